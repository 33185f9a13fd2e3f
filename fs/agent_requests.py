"""What the agent answers on the node's socket: to the mount, and to the command line.

Requests are maps with `do`; inodes and versions are looked up in the catalog, so that nobody can ask for anything else.

- `wake` [`urgent`]: a version waits for protection.
- `fetch` `ino` `vid` `offset` `length`: that range of a version's local copy is present and verified: `copy`, its path.
- `fetch_whole` `ino`: the same for all of the current content.
- `attributes` `ino`: `size`, `mtime_ns`, `blocks` of a file that its home may be writing.
- `read` `ino` `offset` `length`: `data`, from the home.
- `status`; `verify` `inos` [`deep`].
"""

import dataclasses
import errno
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from ckptfs.cache.catalog_format import Inode, Version
from ckptfs.cache.errors import CacheError, NoSuchName
from ckptfs.cache.ids import InodeNumber, Vid
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.versions import Versions
from ckptfs.fs.local_socket import Message
from ckptfs.replication.errors import ReplicationError
from ckptfs.replication.holders import Holders
from ckptfs.replication.members import Members
from ckptfs.replication.replicator import Replicator
from ckptfs.replication.restore import Restorer
from ckptfs.replication.verify import FileReport, Verifier

log = logging.getLogger(__name__)

Result = TypeVar("Result")

READ_WAIT_SECONDS = 10.0
"""How long a read of what only one node has waits for that node."""
RETRY_SECONDS = 0.25


class AgentRequests:
    """Dispatches requests. Whatever goes wrong with peers is an answer with `ok` false."""

    def __init__(
        self,
        namespace: Namespace,
        versions: Versions,
        members: Members,
        holders: Holders,
        replicator: Replicator,
        restorer: Restorer,
        verifier: Verifier,
        codec_name: str,
    ) -> None:
        self._namespace = namespace
        self._versions = versions
        self._members = members
        self._holders = holders
        self._replicator = replicator
        self._restorer = restorer
        self._verifier = verifier
        self._codec_name = codec_name
        self._unexpected_errors = 0
        self._requests: dict[str, Callable[[Message], Awaitable[Message]]] = {
            "wake": self._wake,
            "fetch": self._fetch,
            "fetch_whole": self._fetch_whole,
            "attributes": self._attributes,
            "read": self._read,
            "status": self._status,
            "verify": self._verify,
        }

    async def answer(self, request: Message) -> Message:
        """One request. Never raises."""
        handler = self._requests.get(str(request.get("do")))
        if handler is None:
            return _no("unknown", f"the agent does not know the request {request.get('do')!r}")
        try:
            return {"ok": True, **await handler(request)}
        except NoSuchName as error:
            return _no("gone", str(error))
        except (ReplicationError, CacheError, trio.TooSlowError) as error:
            return _no("unreachable", str(error) or "a peer took too long")
        except OSError as error:
            return _no("failed", f"{error.filename or 'the store'}: {error.strerror}", error.errno or errno.EIO)
        except Exception as error:
            self._unexpected_errors += 1
            log.exception("request_failed do=%s", request.get("do"))
            return _no("failed", f"unexpected: {error!r}")

    async def _wake(self, request: Message) -> Message:
        self._replicator.wake(urgent=bool(request.get("urgent")))
        return {}

    async def _fetch(self, request: Message) -> Message:
        vid = Vid(request["vid"])
        version = await self._versions.version(vid)
        if version is None:
            raise NoSuchName(f"version {vid.hex()} was replaced or removed")
        await self._know_holders(version)
        return {"copy": str(await self._restorer.fetch(vid, version, request["offset"], request["length"]))}

    async def _fetch_whole(self, request: Message) -> Message:
        vid, version = await self._current(InodeNumber(request["ino"]))
        await self._know_holders(version)
        return {"copy": str(await self._restorer.fetch_whole(vid, version))}

    async def _attributes(self, request: Message) -> Message:
        _, version = await self._current(InodeNumber(request["ino"]))
        await self._know_holders(version)
        status = await self._patiently(lambda: self._holders.segment_status(version.home, version.segment))
        return {"size": status.size, "mtime_ns": status.mtime_ns, "blocks": status.blocks}

    async def _read(self, request: Message) -> Message:
        vid, version = await self._current(InodeNumber(request["ino"]))
        await self._know_holders(version)
        offset, length = request["offset"], request["length"]
        data = await self._patiently(lambda: self._holders.read_segment(version.home, vid, version.segment, offset, length))
        return {"data": data}

    async def _know_holders(self, version: Version) -> None:
        """Learn of stores that joined since the catalog's list was last read."""
        wanted = {version.home, *(shard.store for shard in version.shards)}
        if any(self._members.member(store) is None for store in wanted):
            await self._members.refresh()

    async def _current(self, ino: InodeNumber) -> tuple[Vid, Version]:
        """The version that readers of the inode get now: what is being written, or else the newest content."""
        inode: Inode = await self._namespace.inode(ino)
        vid = inode.open if inode.writer is not None and inode.open is not None else inode.cur
        version = None if vid is None else await self._versions.version(vid)
        if vid is None or version is None:
            raise NoSuchName(f"inode {ino} has no content")
        return vid, version

    async def _patiently(self, ask: Callable[[], Awaitable[Result]]) -> Result:
        """Ask the home again for a while: it may be restarting."""
        deadline = trio.current_time() + READ_WAIT_SECONDS
        while True:
            try:
                with trio.fail_at(deadline):
                    return await ask()
            except ReplicationError:
                if trio.current_time() + RETRY_SECONDS > deadline:
                    raise
            await trio.sleep(RETRY_SECONDS)
            await self._members.refresh()

    async def _status(self, request: Message) -> Message:
        members = await self._members.refresh(everyone=True)
        return {
            "codec": self._codec_name,
            "stores": [
                {
                    "store": member.store.hex(),
                    "node": member.node,
                    "domain": member.domain,
                    "address": member.address,
                    "state": member.state.name.lower(),
                    "live": member.live,
                    "free_bytes": member.free_bytes,
                    "last_error": self._members.last_error(member.store),
                }
                for member in members
            ],
            "replicator": dataclasses.asdict(self._replicator.statistics()),
            "restorer": dataclasses.asdict(self._restorer.statistics()),
            "unexpected_errors": self._unexpected_errors,
        }

    async def _verify(self, request: Message) -> Message:
        await self._members.refresh()
        reports = []
        for number in request["inos"]:
            ino = InodeNumber(number)
            try:
                vid, version = await self._current(ino)
            except NoSuchName as error:
                reports.append(FileReport(ino, "gone", message=str(error)).as_message())
                continue
            report = await self._verifier.verify(ino, vid, version, deep=bool(request.get("deep")))
            reports.append(report.as_message())
        return {"files": reports}


def _no(error: str, message: str, number: int = errno.EIO) -> Message:
    return {"ok": False, "error": error, "message": message, "errno": number}
