"""Waiting, bounded, for what another process does."""

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    """Return once the condition holds; fails, naming `what`, if that takes longer."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: did not come about in time"
        time.sleep(0.02)
