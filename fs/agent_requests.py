"""What the agent answers on the node's socket: to the mount, which needs bytes, and to the command line.

Requests are maps with `do`; answers have `ok`, and where it is false `error`, one of: gone (no such file or version now),
unreachable (no node that has the bytes answers), damaged (they answer, but what they have is wrong), full (this node's drive
has no room for a copy that is needed), failed (this node's disk or catalog), unknown (no such request), internal (a bug; the
log has it).

    ping                               the agent is there
    wake {urgent, nodes}               something may wait for protection. `urgent`: somebody waits for it, on these nodes too
    fetch {ino, offset, length} *      -> copy, identity: path of the local copy of that version, in which that part is there
                                       and right, and which file that is; or data, the bytes themselves, where the drive has no
                                       room for a copy
    fetch_whole {ino}                  -> copy, identity, vid, size: complete, right and synced
    keep_free {bytes}                  local copies are released until so much is free, and no more are made than leave it free
    attributes {ino} *                 -> size, mtime_ns, blocks, as the home has them now
    read {ino, offset, length} *       -> data: bytes as the home has them now, short at the end of the file
    call_home {home, call, data}       -> errno, value, message: what a program here does to a file whose home is that
                                       store. Error old: that node's release takes no such calls
    verify {inos, deep, repair, paths} -> files: a report for each file there is. With `repair`, of what is right afterwards;
                                       `paths` (bytes, one for each inode) are for messages, and go as hints with shards that are
                                       made again
    drain {deadline, leave}            -> see `Drain.protect`. With `leave` the store takes no new shards from now on, and
                                       those it has are made again on others; -> state: of the store, and nothing else where it
                                       is lost or removed
    join_again                         -> state: of the store, which takes shards again if that is `in`
    rebalance                          shards move from full stores to empty ones; status says how far it is
    held                               -> named: how many shards and copies the catalog still says are here
    prove {vid}                        -> right, message: whether every shard of a protected version is right, hashed now where it
                                       lies; what is not is made anew first
    findings {inos}                    -> findings: what verify found wrong with these files, asked by this node, and still is
    admit {node, token_hash}           one new store of the node may join with the token of this SHA-256
    remove_node {node, force}          -> removed, files: whether the node is out of the cluster now, and the paths (bytes) of
                                       files whose newest content only it had: given up with `force`, else the reason why not
    status {fresh, look}               -> see `_status`. `fresh`: the stores are asked anew; `look`: if that is soon done

    * and {vid, version}: what a program has open, its record packed. Of a file that was removed, this is meant.
"""

import contextlib
import logging
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, TypeVar

import msgspec
import trio

from ckptfs.cache.admission import admit
from ckptfs.cache.catalog_format import Inode, StoreState, Version, VersionState, unpack
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.errors import CacheError, NoSuchName
from ckptfs.cache.ids import ID_SIZE, InodeNumber, NodeId, StoreId, Vid
from ckptfs.cache.inode_paths import paths_of
from ckptfs.cache.store_registry import set_draining, stores
from ckptfs.cache.store_removal import HoldsTheOnly, remove_node
from ckptfs.fs.agent import Agent
from ckptfs.fs.agent_user import AgentUser
from ckptfs.fs.home_calls import Call, answer_as_message, from_message
from ckptfs.fs.local_socket import Message
from ckptfs.fs.protection_problems import LOST_SHOWN_MAX, label_problems, protection_problems, rebuild_problems
from ckptfs.fs.verify_findings import VerifyFindings
from ckptfs.replication.errors import PeerRefused, PeerUnreachable, RefusalReason, ReplicationError, ShardDamaged, ShardNotFound
from ckptfs.replication.local_copies import CopyFailed, CopyFull, CopyPlace, CopyRefused
from ckptfs.replication.scrub import ScrubStatistics, scrub_problems
from ckptfs.replication.stripe_reader import ContentDamaged
from ckptfs.replication.verify_report import FileReport

log = logging.getLogger(__name__)

READ_BYTES_MAX = 16 << 20
"""The largest part one `read` gives; the caller asks again for more."""

AWAY_SECONDS = 10.0
"""How long the home of a file that is being written must not have answered before readers get what of it is protected."""
REMEMBERED_MAX = 1000
LOOK_SECONDS_MAX = 3.0
MOVED_TRIES = 4
REPAIR_TRIES = 3
"""How often a file is verified again that was replaced during its repair."""

Result = TypeVar("Result")


class Gone(Exception):
    """The file or version asked for is no longer there."""


class AgentRequests:
    """Answers requests about one agent. `answer` never raises."""

    def __init__(self, agent: Agent, user: AgentUser | None = None) -> None:
        """`user` is whom the agent runs as, if it is a process of its own."""
        self._agent = agent
        self._user = user
        self._findings = VerifyFindings(self._current_vid)
        self._prefixes_read: OrderedDict[Vid, None] = OrderedDict()
        self._lost_shown: list[InodeNumber] = []
        self._lost_names: dict[InodeNumber, bytes] = {}
        self._answers: dict[str, Callable[[Message], Awaitable[Message]]] = {
            "ping": self._ping,
            "wake": self._wake,
            "fetch": self._fetch,
            "fetch_whole": self._fetch_whole,
            "keep_free": self._keep_free,
            "attributes": self._attributes,
            "read": self._read,
            "call_home": self._call_home,
            "verify": self._verify,
            "drain": self._drain,
            "join_again": self._join_again,
            "held": self._held,
            "rebalance": self._rebalance,
            "prove": self._prove,
            "findings": self._findings_of,
            "admit": self._admit,
            "remove_node": self._remove_node,
            "status": self._status,
        }

    async def answer(self, request: Message) -> Message:
        """One request."""
        name = request.get("do")
        handler = self._answers.get(name) if isinstance(name, str) else None
        if handler is None:
            return _no("unknown", f"the agent does not know the request {name!r}")
        try:
            return {"ok": True, **await handler(request)}
        except (Gone, NoSuchName) as error:
            return _no("gone", str(error) or "no such file")
        except (ShardDamaged, ContentDamaged) as error:
            return _no("damaged", str(error))
        except CopyRefused as error:
            return _no("refused", str(error))
        except CopyFull as error:
            return _no("full", str(error))
        except (CopyFailed, CacheError, OSError) as error:
            return _no("failed", str(error))
        except ReplicationError as error:
            return _no("unreachable", str(error))
        except (KeyError, TypeError, ValueError) as error:
            log.exception("request_without_sense request=%r", name)
            return _no("unknown", f"the request {name!r} makes no sense: {error!r}")
        except Exception as error:  # one bad request must not take the shard server with it
            log.exception("unexpected_error request=%r", name)
            return _no("internal", f"the agent failed: {error!r}; its log has the details")

    async def _ping(self, request: Message) -> Message:
        return {}

    async def _wake(self, request: Message) -> Message:
        if request.get("urgent"):
            await self._agent.hurry([str(node) for node in request.get("nodes", ())])
        else:
            self._agent.replicator.wake()
        return {}

    async def _keep_free(self, request: Message) -> Message:
        await self._agent.restorer.keep_free(int(request["bytes"]))
        return {}

    # ---- bytes

    async def _fetch(self, request: Message) -> Message:
        vid = Vid(bytes(request["vid"]))
        if len(vid) != ID_SIZE:
            raise ValueError("a vid has 16 bytes")
        version = await self._agent.versions.version(vid)
        if version is None:
            version = await self._removed_version(request)
        if version is None or version.state is VersionState.OPEN:
            raise Gone("this version was replaced or deleted meanwhile")
        try:
            fetched = await self._agent.restorer.fetch(vid, version, int(request["offset"]), int(request["length"]))
        except ShardNotFound as error:
            raise Gone(f"the file was removed, and its bytes are gone: {error}") from None
        return {"data": fetched} if isinstance(fetched, bytes) else _place(fetched)

    async def _removed_version(self, request: Message) -> Version | None:
        """What a program has open of a file that was removed; None if the file is still there, with other content now."""
        if not request.get("version"):
            return None
        try:
            await self._agent.namespace.inode(InodeNumber(int(request["ino"])))
        except NoSuchName:
            return unpack(Version, bytes(request["version"]))
        return None

    async def _fetch_whole(self, request: Message) -> Message:
        async def fetch(inode: Inode | None, vid: Vid, version: Version) -> Message:
            if version.state is VersionState.OPEN:
                raise PeerUnreachable(f"the file is being written on {self._home(version)}")
            return {**_place(await self._agent.restorer.fetch_whole(vid, version)), "vid": vid, "size": version.size}

        return await self._current(request, fetch)

    async def _attributes(self, request: Message) -> Message:
        async def ask(inode: Inode | None, vid: Vid, version: Version) -> Message:
            prefix = await self._prefix_instead(inode, version)
            if inode is not None and prefix is not None:
                size = prefix[1].size
                return {"size": size, "mtime_ns": inode.mtime_ns, "blocks": -(-size // 512)}
            if inode is not None and (version.shards or version.state is VersionState.PROTECTED):
                return {"size": version.size, "mtime_ns": inode.mtime_ns, "blocks": -(-version.size // 512)}
            status = await self._at_home(version.home, lambda: self._agent.holders.segment_status(version.home, version.segment))
            return {"size": status.size, "mtime_ns": status.mtime_ns, "blocks": status.blocks}

        return await self._current(request, ask)

    async def _read(self, request: Message) -> Message:
        offset, length = int(request["offset"]), min(int(request["length"]), READ_BYTES_MAX)
        if offset < 0 or length < 0:
            raise ValueError("offset and length can't be negative")

        async def read(inode: Inode | None, vid: Vid, version: Version) -> Message:
            if not length:
                return {"data": b""}
            vid, version = await self._prefix_instead(inode, version) or (vid, version)
            if version.shards or version.state is VersionState.PROTECTED:
                fetched = await self._agent.restorer.fetch(vid, version, offset, length)
                while not isinstance(fetched, bytes):
                    try:
                        fetched = await trio.to_thread.run_sync(_read_copy, fetched, offset, length)
                    except FileNotFoundError:  # it has made room for something since
                        fetched = await self._agent.restorer.fetch(vid, version, offset, length)
                return {"data": fetched}
            data = await self._at_home(
                version.home,
                lambda: self._agent.holders.read_segment(version.home, vid, version.segment, offset, length),
            )
            return {"data": data}

        return await self._current(request, read)

    async def _call_home(self, request: Message) -> Message:
        home, (call, data) = StoreId(bytes(request["home"])), from_message(request)
        member = self._agent.members.member(home)
        if call.call == Call.JOIN and (member is None or not member.live):
            raise PeerUnreachable(f"{self._name(home)} is away")
        try:
            is_long = call.call == Call.SYNC
            answer = await self._at_home(home, lambda: self._agent.holders.call_home(home, call, data, is_long=is_long))
        except PeerRefused as refused:
            return _no("old", refused.message)
        return answer_as_message(answer)

    async def _current(self, request: Message, use: Callable[[Inode | None, Vid, Version], Awaitable[Message]]) -> Message:
        """Use the version a reader gets now: the one being written, else the current one. Again if it moved meanwhile.

        Of a file that was removed, without its inode the version that a program has open. Raises `Gone` if that is nowhere.
        """
        ino = InodeNumber(int(request["ino"]))
        failure: Exception | None = None
        before: Vid | None = None
        for _ in range(MOVED_TRIES):
            try:
                inode = await self._agent.namespace.inode(ino)
            except NoSuchName:
                return await self._of_removed(request, use)
            vid = inode.open if inode.writer is not None and inode.open is not None else inode.cur
            version = None if vid is None else await self._agent.versions.version(vid)
            if failure is not None and vid == before:
                raise failure
            if vid is None or version is None:
                failure, before = failure or Gone("the file has no content that is still there"), vid
                continue
            try:
                return await use(inode, vid, version)
            except (ShardNotFound, ShardDamaged) as error:
                failure, before = error, vid
        raise failure or Gone("the file changes faster than it can be read")

    async def _prefix_instead(self, inode: Inode | None, version: Version) -> tuple[Vid, Version] | None:
        """What of a file that is being written was protected, if its home has been away for so long that readers aren't to wait
        any more, and nothing newer than that was closed (R16)."""
        if inode is None or version.state is not VersionState.OPEN or inode.prefix is None or not inode.prefix_holds:
            return None
        if self._agent.members.seconds_away(version.home) < AWAY_SECONDS:
            return None
        prefix = await self._agent.versions.version(inode.prefix)
        if prefix is None:
            return None
        if inode.prefix not in self._prefixes_read:
            self._prefixes_read[inode.prefix] = None
            while len(self._prefixes_read) > REMEMBERED_MAX:
                self._prefixes_read.popitem(last=False)
            log.warning(
                "prefix_read inode=%d bytes=%d: it was being written on %s, which is away; start it to have the rest",
                version.ino,
                prefix.size,
                self._home(version),
            )
        return inode.prefix, prefix

    async def _of_removed(self, request: Message, use: Callable[[Inode | None, Vid, Version], Awaitable[Message]]) -> Message:
        if not request.get("version"):
            raise Gone("no such file")
        vid = Vid(bytes(request["vid"]))
        version = await self._agent.versions.version(vid) or unpack(Version, bytes(request["version"]))
        try:
            return await use(None, vid, version)
        except ShardNotFound as error:
            raise Gone(f"the file was removed, and its bytes are gone: {error}") from None

    async def _at_home(self, home: StoreId, ask: Callable[[], Awaitable[Result]]) -> Result:
        """Ask a file's home; once more if its address may be out of date. Raises `PeerUnreachable`, and `PeerRefused` for a home
        whose release does not know the question."""
        members = self._agent.members
        address = members.address_of(home)
        try:
            return await ask()
        except PeerUnreachable as error:
            members.note_failure(home, error)
            await members.refresh()
            failure: Exception = error
            if members.address_of(home) != address:
                try:
                    return await ask()
                except PeerUnreachable as again:
                    failure = again
        except PeerRefused as refused:
            if refused.reason is RefusalReason.VERSION:
                raise
            failure = refused
        raise PeerUnreachable(f"only {self._name(home)} has these bytes now, and it is away: {failure}") from None

    def _home(self, version: Version) -> str:
        return self._name(version.home)

    def _name(self, home: StoreId) -> str:
        member = self._agent.members.member(home)
        return str(member.node) if member else f"the unknown store {home.hex()}"

    # ---- for people

    async def _verify(self, request: Message) -> Message:
        await self._agent.members.refresh()
        files = []
        inos = [InodeNumber(int(number)) for number in request["inos"]]
        paths = request.get("paths") or [b""] * len(inos)
        for ino, path in zip(inos, paths, strict=True):
            for _ in range(REPAIR_TRIES):
                report = await self._verify_one(ino, bool(request.get("deep")), bool(request.get("repair")), bytes(path))
                if report is None or not report.is_gone:
                    break
            if report is not None:
                files.append(report.as_message())
        return {"files": files}

    async def _verify_one(self, ino: InodeNumber, deep: bool, repair: bool, path: bytes) -> FileReport | None:
        """The report of what the file is now; one that says so if that changed meanwhile."""
        agent = self._agent
        try:
            inode = await agent.namespace.inode(ino)
        except NoSuchName:
            return None
        if not inode.is_regular:
            return None
        version = None if inode.cur is None else await agent.versions.version(inode.cur)
        if inode.cur is None or version is None:
            report = FileReport(ino, inode.size, is_protected=False, is_lost=inode.open is None)
            report.is_gone = await self._moved_on(ino, inode)
        else:
            report = await agent.verifier.verify(ino, inode.cur, version, deep=deep)
            if repair:
                report = await agent.repairer.repair(ino, inode.cur, version, report, path)
                await agent.mender.mend(inode.cur, version, report)
            if not report.is_gone:
                self._findings.note(ino, inode.cur, path, report, deep=deep)
        if inode.rolled_back_from is not None:
            said = "the node that had its content was declared lost" if inode.lost else "rolled back to older content"
            report.add(
                f"{said}: the version {inode.rolled_back_from.hex()} went with {await self._home_of(inode.rolled_back_from)}"
            )
        if inode.writer is not None and inode.open is not None and not await self._is_at_home(inode.open):
            report.reading = report.reading or "unreachable"
            report.away.add(agent.members.name_of(inode.writer.store))
            report.add(f"only {agent.members.name_of(inode.writer.store)} has what is being written, and it is away")
        return report

    async def _drain(self, request: Message) -> Message:
        agent = self._agent
        if request.get("leave"):
            state = await set_draining(agent.kv, agent.store.store_id, True)
            if state is not StoreState.DRAINING:
                return {"state": state.name.lower()}
            await agent.kv.make_durable()
            await agent.members.refresh(everyone=True)
        return {"state": "draining" if request.get("leave") else "", **await agent.drain.protect(float(request["deadline"]))}

    async def _join_again(self, request: Message) -> Message:
        state = await set_draining(self._agent.kv, self._agent.store.store_id, False)
        await self._agent.kv.make_durable()
        await self._agent.members.refresh()
        return {"state": state.name.lower()}

    async def _rebalance(self, request: Message) -> Message:
        self._agent.rebalance()
        return {"life": self._agent.rebalancer.life}

    async def _held(self, request: Message) -> Message:
        return {"named": await self._agent.sweep.named_count()}

    async def _home_of(self, vid: Vid) -> str:
        version = await self._agent.versions.version(vid)
        return "its home" if version is None else self._home(version)

    async def _prove(self, request: Message) -> Message:
        agent, vid = self._agent, Vid(bytes(request["vid"]))
        version = await agent.versions.version(vid)
        if version is None or version.state is not VersionState.PROTECTED:
            raise Gone("this version was replaced or deleted meanwhile")
        report = await agent.verifier.verify(version.ino, vid, version)
        if report.damaged or report.missing:
            report = await agent.repairer.repair(version.ino, vid, version, report)
            log.warning("shards_not_right inode=%d repaired=%s: %s", version.ino, report.repaired, report.message)
        if report.is_gone:
            raise Gone(report.message)
        self._findings.note(version.ino, vid, b"", report, deep=False)
        wrong = report.damaged or report.missing or report.unreachable
        return {"right": not wrong, "message": report.message}

    async def _current_vid(self, ino: InodeNumber) -> Vid | None:
        try:
            return (await self._agent.namespace.inode(ino)).cur
        except NoSuchName:
            return None

    async def _findings_of(self, request: Message) -> Message:
        found = await self._findings.of([InodeNumber(int(number)) for number in request["inos"]])
        return {"findings": {int(ino): f"{finding.result}: {finding.message}" for ino, finding in found.items()}}

    async def _admit(self, request: Message) -> Message:
        await admit(self._agent.kv, NodeId(str(request["node"])), bytes(request["token_hash"]))
        return {}

    async def _remove_node(self, request: Message) -> Message:
        node, kv = NodeId(str(request["node"])), self._agent.kv
        try:
            given_up, removed = await remove_node(kv, node, force=bool(request.get("force"))), True
        except HoldsTheOnly as holds:
            given_up, removed = holds.inos, False
        if removed:
            log.critical("node_removed node=%s files_given_up=%d", node, len(given_up))
            await self._agent.members.refresh()
        paths = await paths_of(kv, given_up)
        mine = {store: record for store, (record, _) in (await stores(kv)).items() if record.node == node}
        return {
            "removed": removed,
            "stays": [store.hex() for store, record in mine.items() if record.state is not StoreState.REMOVED],
            "files": [paths.get(ino, b"inode %d" % ino) for ino in given_up],
        }

    async def _is_at_home(self, vid: Vid) -> bool:
        """Whether the home of a version that is being written answers for it."""
        version = await self._agent.versions.version(vid)
        try:
            if version is not None:
                await self._agent.holders.segment_status(version.home, version.segment)
        except (ShardNotFound, ShardDamaged):
            return True  # it answers; the version ended, or was never finished
        except ReplicationError:
            return False
        return True

    async def _moved_on(self, ino: InodeNumber, before: Inode) -> bool:
        """Whether the file has other content now than its record said a moment ago, or is gone."""
        try:
            now = await self._agent.namespace.inode(ino)
        except NoSuchName:
            return True
        return (now.cur, now.open) != (before.cur, before.open)

    async def _status(self, request: Message) -> Message:
        """`stores`: every store with `live`; `replicator`, `restorer`, `server`: their statistics; `shards_held`."""
        agent = self._agent
        if request.get("fresh"):  # somebody decides on it: what was true some seconds ago is not enough
            await agent.members.refresh(everyone=True)
        elif request.get("look"):  # a person looks: what the catalog and the others say now, if they say it soon
            with contextlib.suppress(CacheError), trio.move_on_after(LOOK_SECONDS_MAX):
                await agent.members.refresh(everyone=True)
        replicator = agent.replicator.statistics()
        held = agent.shard_store.statistics()
        counters = agent.reader.counters
        problems = [problem for problem in (held.failed, held.obstacle, agent.small_copies.problem) if problem]
        problems += agent.store_problems()
        problems += protection_problems(
            agent.members.known(), agent.members.last_error, agent.cluster.data_shards, agent.cluster.parity_shards, replicator
        )
        own = agent.members.member(agent.store.store_id)
        if own is not None and own.state is StoreState.DRAINING:
            problems.append(
                "this node drains: it takes no new shards, also when restarted; `ckptfs drain --cancel` takes it back"
            )
        problems += label_problems(agent.members.known(), agent.cluster.failure_domain)
        with contextlib.suppress(CacheError):  # a catalog that is away is said elsewhere
            if not request.get("fresh"):
                problems += await self._findings.problems()
                problems += await self._rebuild_problems()
                problems += scrub_problems(agent.scrub.statistics().state)
        if held.held is None:
            problems.append(
                "agent.db, the index of shards, can't be read: it is made anew when the agent or the node is restarted"
            )
        if isinstance(agent.kv, SqliteCatalog) and (damage := agent.kv.statistics().damage):
            problems.append(
                f"{damage}. Its file can't be protected, repaired or rolled back, and what is replaced or deleted keeps its "
                "space: see `The catalog` in docs/operations.md"
            )
        copy = agent.catalog_copy
        if copy is not None and copy.statistics.error:
            problems.append(f"the copy of the catalog in this store can't be made anew: {copy.statistics.error}")
        answer: dict[str, Any] = {
            "catalog_copy": None if copy is None else asdict(copy.statistics),
            "user": None if self._user is None else self._user._asdict(),
            "store": agent.store.store_id.hex(),
            "node": agent.store.node,
            "address": agent.address,
            "codec": agent.codec.name,
            "code": f"{agent.cluster.data_shards}+{agent.cluster.parity_shards}",
            "short_of": replicator.short_of,
            "waiting_count": replicator.waiting_count,
            "waiting_bytes": replicator.waiting_bytes,
            "oldest_waiting_ns": replicator.oldest_waiting_ns,
            "damaged_count": None if request.get("fresh") else await self._damaged_count(),
            "failures": dict(replicator.failures_by_store),
            "last_error": replicator.last_error,
            "replicator": asdict(replicator),
            "restorer": {
                "bytes_fetched": agent.restorer.bytes_fetched,
                "bytes_passed": agent.restorer.bytes_passed,
                "cells_read": counters.cells_read,
                "cells_decoded": counters.cells_decoded,
                "cells_from_home": counters.cells_from_home,
                "damaged_by_store": {store.hex(): count for store, count in counters.damaged_by_store.items()},
                "failed_by_store": {store.hex(): count for store, count in counters.failed_by_store.items()},
            },
            "raiser": asdict(agent.raiser.statistics),
            "rebuild": asdict(agent.rebuilder.statistics),
            "rebalance": asdict(agent.rebalancer.statistics) | {"running": agent.is_rebalancing, "life": agent.rebalancer.life},
            "scrub": _scrub(agent.scrub.statistics()),
            "segment_scrub": asdict(agent.segment_scrub.statistics),
            "sweep": asdict(agent.sweep.statistics),
            "garbage": asdict(agent.collector.statistics),
            "store_watch": asdict(agent.store_watch.statistics),
            "server": asdict(agent.server.statistics()),
            "shards_held": {"count": held.held.shards, "bytes": held.held.file_bytes} if held.held else None,
            "store_failed": held.failed,
            "problems": problems,
            "free_bytes": held.free_bytes,
            "stores": [
                {
                    "store": member.store.hex(),
                    "node": member.node,
                    "domain": member.domain,
                    "address": member.address,
                    "state": member.state.name.lower(),
                    "standing": member.standing,
                    "leads": member.store == agent.leadership.leader,
                    "live": member.live,
                    "free_bytes": member.free_bytes,
                    "error": "" if member.live else agent.members.last_error(member.store),
                }
                for member in agent.members.known()
            ],
        }
        return answer

    async def _rebuild_problems(self) -> list[str]:
        statistics = self._agent.rebuilder.statistics
        shown = statistics.lost[:LOST_SHOWN_MAX]
        if shown != self._lost_shown:
            self._lost_names = await paths_of(self._agent.kv, shown)
            self._lost_shown = shown
        return rebuild_problems(statistics, self._lost_names)

    async def _damaged_count(self) -> int:
        """How many of this node's files that wait for protection are known to be damaged."""
        versions = [await self._agent.versions.version(vid) for vid in self._agent.replicator.waiting_vids()]
        return sum(version is not None and version.damaged for version in versions)


def _scrub(statistics: ScrubStatistics) -> Message:
    """Its state, with `progress` in place of how far it has come."""
    state: Message = msgspec.to_builtins(statistics.state)
    state.pop("after")
    return {**state, "progress": statistics.progress}


def _place(place: CopyPlace) -> Message:
    return {"copy": os.fspath(place.path), "identity": place.identity}


def _no(error: str, message: str) -> Message:
    return {"ok": False, "error": error, "message": message}


def _read_copy(place: CopyPlace, offset: int, length: int) -> bytes:
    """Raises `FileNotFoundError` if that copy is no longer there."""
    descriptor = place.open()
    try:
        return os.pread(descriptor, length, offset)
    finally:
        os.close(descriptor)
