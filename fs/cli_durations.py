"""How long something may take, as it is given to a command."""

import re

from ckptfs.fs.cli_errors import WrongUse

UNIT_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(option: str, text: str) -> float:
    """30, 30s, 5m or 1h in seconds. Raises `WrongUse`, which names the option."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([smh]?)", text.strip())
    if found is None:
        raise WrongUse(f"{option}: a number of seconds, or 30s, 5m, 1h, not {text!r}")
    return float(found[1]) * UNIT_SECONDS[found[2]]
