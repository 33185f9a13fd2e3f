"""What can go wrong in this room. A class says who must act; the message says what happened, what is safe, what to do."""


class ReplicationError(Exception):
    """Base of this room's errors."""


class CodecUnavailable(ReplicationError):
    """The erasure-code engine asked for can't be loaded on this machine. The operator installs it or chooses another."""


class NotEnoughDomains(ReplicationError):
    """Too few live failure domains with free space for the shards. Nothing was placed; it may be asked again later."""
