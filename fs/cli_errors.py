"""What a command can end with besides success. The message is one line for a person: what happened, what to do."""


class CommandError(Exception):
    """Base; `exit_code` is part of the command line's promise (docs/operations.md).

    `reported`: the command has printed its JSON document already, so that the error adds no second one.
    """

    exit_code = 1

    def __init__(self, message: str, *, reported: bool = False) -> None:
        super().__init__(message)
        self.reported = reported


class NotReached(CommandError):
    """The answer is no, or what was waited for did not come about."""

    exit_code = 1


class WrongUse(CommandError):
    """The command can't mean what was typed."""

    exit_code = 2


class Unreachable(CommandError):
    """The node that would know doesn't answer."""

    exit_code = 3


class Interrupted(CommandError):
    """Ctrl-C (SIGINT). Nodes don't notice: they are in sessions of their own."""

    exit_code = 130
