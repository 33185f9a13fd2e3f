"""Bytes and sizes of files whose home is another node, asked of this node's agent.

The agent answers only with bytes it has checked (or, for a file that is being written, with what the home has now). When no
node that has them answers, programs get EIO: never older content.
"""

import errno
import math
from pathlib import Path
from typing import NamedTuple

import trio

from ckptfs.cache.catalog_format import Version, pack
from ckptfs.cache.errors import HeldElsewhere
from ckptfs.cache.ids import InodeNumber, StoreId, Vid
from ckptfs.fs.fuse_errors import ContentUnreachable
from ckptfs.fs.home_calls import answer_from_message
from ckptfs.fs.local_socket import LocalClient, Message, NodeNotAnswering
from ckptfs.replication.local_copies import CopyPlace
from ckptfs.replication.peer_messages import HomeAnswer

READ_WAIT_SECONDS = 10.0
"""How long a read waits for an agent that restarts, here or at the file's home, or for peers that come back; then EIO."""
AGENT_SECONDS_MAX = 60.0
"""How long one request may take an agent that is there: it has limits of its own for peers that hang, 30 s the longest."""
PING_SECONDS = 10.0
"""An agent that takes so long over a request is asked whether it is there, and has as long to say so."""

RETRY_SECONDS = 0.2
IMPATIENT_SECONDS = 30.0
"""For so long after attributes could not be had from a home they are asked for once only: a listing of a thousand files whose
home is away waits once, not a thousand times."""


class ContentGone(ContentUnreachable):
    """What was opened is nowhere any more, or not what the file holds now."""


class RemoteAttributes(NamedTuple):
    """As the home has them now; sizes in bytes, blocks of 512 bytes."""

    size: int
    mtime_ns: int
    blocks: int


class WholeCopy(NamedTuple):
    """A verified copy, and the version it is of."""

    place: CopyPlace
    vid: Vid


class RemoteContent:
    """This node's agent, as the mount uses it. All methods raise `ContentUnreachable`.

    Where a version is given, it is what a program has opened: its bytes are meant if the file is removed meanwhile. It is
    `ContentGone` if they are nowhere any more, or if the file is there and has other content now.
    """

    def __init__(
        self, agent: LocalClient, *, wait_seconds: float = READ_WAIT_SECONDS, ping_seconds: float = PING_SECONDS
    ) -> None:
        self._agent = agent
        self._wait_seconds = wait_seconds
        self._ping_seconds = ping_seconds
        self._impatient_until = -math.inf
        self._agent_hangs = False

    async def attributes(self, ino: InodeNumber, vid: Vid, version: Version | None) -> RemoteAttributes:
        """Size and times of a file that its home may be writing. The kernel asks for them before each open and read, so they
        wait as reads do."""
        answer = await self._ask({"do": "attributes", "ino": ino, **_opened(vid, version)}, ino)
        return RemoteAttributes(answer["size"], answer["mtime_ns"], answer["blocks"])

    async def fetch(self, ino: InodeNumber, vid: Vid, version: Version, offset: int, length: int) -> CopyPlace | bytes:
        """Have the range of a hashed version's local copy present and verified; returns where it is, or the bytes where the drive
        has no room for one."""
        request = {"do": "fetch", "ino": ino, "offset": offset, "length": length, **_opened(vid, version)}
        answer = await self._ask(request, ino)
        return bytes(answer["data"]) if "data" in answer else place_of(answer)

    async def read(self, ino: InodeNumber, vid: Vid, version: Version | None, offset: int, length: int) -> bytes:
        """Bytes from the home, short at the end of the file."""
        request = {"do": "read", "ino": ino, "offset": offset, "length": length, **_opened(vid, version)}
        return bytes((await self._ask(request, ino))["data"])

    async def fetch_whole(self, ino: InodeNumber) -> WholeCopy:
        """A complete, verified copy of the file's current content. Raises `OSError` (ENOSPC) too."""
        answer = await self._ask({"do": "fetch_whole", "ino": ino}, ino)
        return WholeCopy(place_of(answer), Vid(bytes(answer["vid"])))

    async def call_home(
        self, home: StoreId, ino: InodeNumber, call: Message, timeout_seconds: float, wait_seconds: float | None = None
    ) -> HomeAnswer:
        """Have a file's home carry out a call (`home_calls`). `wait_seconds`: where one that is away isn't waited for as long as
        otherwise. Raises `HeldElsewhere` too, for a home of an older release."""
        answer = await self._ask({"do": "call_home", "home": home, **call}, ino, timeout_seconds, wait_seconds)
        return answer_from_message(answer)

    async def _ask(
        self,
        request: Message,
        ino: InodeNumber,
        timeout_seconds: float = AGENT_SECONDS_MAX,
        wait_seconds: float | None = None,
    ) -> Message:
        deadline = trio.current_time() + (self._wait_seconds if wait_seconds is None else wait_seconds)
        is_for_attributes = request["do"] == "attributes"
        while True:
            try:
                answer = await self._call(request, timeout_seconds)
                if answer["ok"]:
                    return answer
                message = str(answer.get("message", answer.get("error")))
                if answer.get("error") == "gone":
                    raise ContentGone(message)
                if answer.get("error") == "old":
                    raise HeldElsewhere(message)
                if answer.get("error") == "full":
                    raise OSError(errno.ENOSPC, message)
                if answer.get("error") == "refused":
                    raise OSError(errno.EROFS, message)
                is_away = answer.get("error") == "unreachable"
                may_pass = is_away and not (is_for_attributes and trio.current_time() < self._impatient_until)
            except NodeNotAnswering as error:
                message, is_away, may_pass = f"this node's agent does not answer ({error})", False, True
            if not may_pass or trio.current_time() + RETRY_SECONDS > deadline:
                if is_away and is_for_attributes:
                    self._impatient_until = trio.current_time() + IMPATIENT_SECONDS
                raise ContentUnreachable(message)
            await trio.sleep(RETRY_SECONDS)

    async def _call(self, request: Message, timeout_seconds: float) -> Message:
        """The agent's answer. Raises `NodeNotAnswering`, also for an agent that hangs."""
        answer: Message | None = None
        failure = NodeNotAnswering("it hangs: it accepts requests and answers none")
        if self._agent_hangs:
            await self._agent.call({"do": "ping"}, timeout_seconds=min(self._ping_seconds, 1.0))
            self._agent_hangs = False

        async def watch(scope: trio.CancelScope) -> None:
            while True:
                await trio.sleep(self._ping_seconds)
                try:
                    await self._agent.call({"do": "ping"}, timeout_seconds=self._ping_seconds)
                except NodeNotAnswering:
                    self._agent_hangs = True
                    scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, nursery.cancel_scope)
            try:
                answer = await self._agent.call(request, timeout_seconds=timeout_seconds)
            except NodeNotAnswering as error:
                failure = error
            nursery.cancel_scope.cancel()
        if answer is None:
            raise failure
        return answer


def place_of(answer: Message) -> CopyPlace:
    """Where a local copy is, as the agent says it."""
    inode, generation = answer["identity"]
    return CopyPlace(Path(answer["copy"]), (int(inode), int(generation)))


def _opened(vid: Vid, version: Version | None) -> Message:
    return {} if version is None else {"vid": vid, "version": pack(version)}
