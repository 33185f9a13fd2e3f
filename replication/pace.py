"""How fast work may go that nobody waits for."""

import sys

import trio


class Pace:
    """At most so many bytes a second, over all that share it, and no more than `within` allows; 0: as fast as it goes."""

    def __init__(self, bytes_per_second: float, *, within: "Pace | None" = None) -> None:
        self._bytes_per_second = bytes_per_second
        self._within = within
        self._free_at = 0.0

    @property
    def bytes_at_once(self) -> int:
        """What goes in a twentieth of a second: so much may be sent before it is spent, and nobody waits long for the rest."""
        return int(self._bytes_per_second / 20) if self._bytes_per_second else sys.maxsize

    async def spend(self, size_bytes: int) -> None:
        """Call it after the bytes went; it returns when the next may."""
        if self._within is not None:
            await self._within.spend(size_bytes)
        if not self._bytes_per_second:
            await trio.lowlevel.checkpoint()
            return
        self._free_at = max(self._free_at, trio.current_time()) + size_bytes / self._bytes_per_second
        await trio.sleep_until(self._free_at)
