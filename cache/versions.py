"""What happens to versions: opened for writing, local, protected. Each step is one transaction that compares inode and version.

The states and what leads from one to the next stand in `version_states`; what happens after a crash, in `version_recovery`; what
ends a version together with its name, in `removal` and `rename`. Pure: time and randomness are injected.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import NamedTuple

import msgspec

from ckptfs.cache.catalog_format import (
    BLOCKS_UNKNOWN,
    FORMAT_VERSION,
    NO_SEGMENT,
    UNKNOWN_ROOT,
    Inode,
    Shard,
    ShardLayout,
    Version,
    VersionState,
    Writer,
    inode_key,
    pack,
    store_key,
    version_key,
)
from ckptfs.cache.catalog_kv import Compare, KeyValue, Put, Unchanged
from ckptfs.cache.catalog_records import Conflict, Plan, commit, existing_inode, find_version, repeated
from ckptfs.cache.commit_batches import Planned, commit_batched
from ckptfs.cache.errors import ContentMoved, DamagedData, HeldElsewhere, NoSuchName, NotPermitted
from ckptfs.cache.ids import ID_SIZE, InodeNumber, SegmentId, StoreId, Vid, new_vid
from ckptfs.cache.prefixes import give_up_prefix, superseded, without_prefix
from ckptfs.cache.removal import end_versions
from ckptfs.cache.segment_records import mark_damaged, replace_segment
from ckptfs.cache.version_recovery import Dropped, drop_open_versions, versions_at_home
from ckptfs.cache.version_states import version_step


class OpenedForWriting(NamedTuple):
    """A file this node writes now. `carried_on`: the segment holds the bytes the file had; else it is new. `previous` is the
    version that ended or lost its segment with this, as it was before; its segment is free if nothing was carried on."""

    inode: Inode
    vid: Vid
    version: Version
    segment: SegmentId
    previous: tuple[Vid, Version] | None
    carried_on: bool


class LocalCommit(NamedTuple):
    """A version whose bytes are synced and hashed here. `root` is the content root over cells of `cell_size` bytes. With
    `release_writer` other nodes may write the file from then on. `blocks` of 512 bytes is what its segment takes."""

    ino: InodeNumber
    vid: Vid
    size: int
    root: bytes
    cell_size: int
    mtime_ns: int
    release_writer: bool
    blocks: int = BLOCKS_UNKNOWN


class CommittedLocal(NamedTuple):
    """The versions that are local now, and those that ended because of it: the caller frees their segments."""

    vids: set[Vid]
    freed: list[tuple[Vid, Version]]


class ProtectedCommit(NamedTuple):
    """A version whose shards are all acknowledged: shard i by `shards[i]`. `store_revisions` are the holders' records as
    they were when they were chosen. An empty file has no shards."""

    ino: InodeNumber
    vid: Vid
    layout: ShardLayout
    data_shards: int
    parity_shards: int
    cell_size: int
    shards: list[Shard]
    store_revisions: dict[StoreId, int]


class RepairedCommit(NamedTuple):
    """New holders of a protected version's shards: shard i is at `moved[i]` now. `before` are its shards as they were when the
    repair began, `store_revisions` the new holders' records as they were when they were chosen."""

    vid: Vid
    before: list[Shard]
    moved: dict[int, Shard]
    store_revisions: dict[StoreId, int]


class Versions:
    """The versions of one catalog, as one store's node changes them. Raises what `Namespace` raises."""

    def __init__(
        self,
        kv: KeyValue,
        store: StoreId,
        incarnation: int,
        now_ns: Callable[[], int],
        *,
        make_vid: Callable[[], Vid] = new_vid,
    ) -> None:
        self.kv = kv
        self.now_ns = now_ns
        self._writer = Writer(store, incarnation)
        self._make_vid = make_vid

    async def version(self, vid: Vid) -> Version | None:
        """The version's record, or None when it is gone."""
        found = await find_version(self.kv, vid)
        return None if found is None else found[0]

    # Writing

    async def open_for_writing(self, ino: InodeNumber, *, truncate_to_new_segment: SegmentId | None) -> OpenedForWriting:
        """Become the file's writer, or find that this node is it already (then nothing is committed).

        With a new segment the file begins anew in it and this node becomes its home; what readers get stays until the new
        version is local. Without one the current version's segment, which must be here, carries on.

        Raises `HeldElsewhere` if another node is writing, or holds the bytes that were to carry on; `NoSuchName`; `NotPermitted`
        for what isn't a regular file; `DamagedData` if there is no content to carry on, or its segment is known to be damaged.
        """

        async def open_(inode: Inode, plan: Plan) -> OpenedForWriting:
            if truncate_to_new_segment is not None:
                return await self._begin(ino, inode, truncate_to_new_segment, plan)
            if inode.open is not None:
                return await self._go_on(ino, inode, inode.open, plan)
            return await self._carry_on(ino, inode, plan)

        opened = await self._become_writer(ino, open_)
        if opened.carried_on and opened.previous is not None:
            # The first write changes bytes a local or protected version stood for. A power cut must not bring that version back.
            await self.kv.make_durable()
        return opened

    async def move_home(self, ino: InodeNumber, segment: SegmentId, copied: Vid | None) -> OpenedForWriting:
        """Become the file's writer and its home. The segment here is a copy of the version `copied` (None, and empty: the file
        has no content); what readers get stays until the new version is local.

        Raises `ContentMoved` if `copied` isn't what readers get when the transaction runs; else as `open_for_writing`.
        """

        async def open_(inode: Inode, plan: Plan) -> OpenedForWriting:
            if inode.cur != copied:
                raise ContentMoved(f"inode {ino} has other content now than was copied")
            return await self._begin(ino, inode, segment, plan)

        return await self._become_writer(ino, open_)

    async def _become_writer(
        self, ino: InodeNumber, open_: Callable[[Inode, Plan], Awaitable[OpenedForWriting]]
    ) -> OpenedForWriting:
        """Commit what `open_` plans, if the inode is still what it was given."""

        async def attempt() -> OpenedForWriting:
            inode, revision = await existing_inode(self.kv, ino)
            if not inode.is_regular:
                raise NotPermitted(f"inode {ino} is not a regular file")
            if inode.writer is not None and inode.writer.store != self._writer.store:
                raise HeldElsewhere(f"inode {ino} is being written on store {inode.writer.store.hex()}")
            plan = Plan([Unchanged(inode_key(ino), revision)], [])
            opened = await open_(inode, plan)
            if plan.operations:
                await commit(self.kv, plan.compares, plan.operations)
            return opened

        return await repeated(attempt)

    async def _begin(self, ino: InodeNumber, inode: Inode, segment: SegmentId, plan: Plan) -> OpenedForWriting:
        ending = await end_versions(self.kv, [inode.open], self.now_ns())
        inode, prefix = await without_prefix(self.kv, inode)
        for part in (ending.plan, prefix.plan):
            plan.compares.extend(part.compares)
            plan.operations.extend(part.operations)
        version = Version(FORMAT_VERSION, ino, VersionState.OPEN, self._writer.store, segment)
        return self._opened(ino, inode, version, ending.dead[0] if ending.dead else None, plan, carried_on=False)

    async def _go_on(self, ino: InodeNumber, inode: Inode, vid: Vid, plan: Plan) -> OpenedForWriting:
        version, _ = await self._existing(vid)
        if inode.writer != self._writer:  # opened by an earlier incarnation of this node
            inode = msgspec.structs.replace(inode, writer=self._writer, epoch=inode.epoch + 1)
            plan.operations.append(Put(inode_key(ino), pack(inode)))
        return OpenedForWriting(inode, vid, version, version.segment, None, True)

    async def _carry_on(self, ino: InodeNumber, inode: Inode, plan: Plan) -> OpenedForWriting:
        if inode.cur is None:
            raise DamagedData(f"inode {ino} has no content to carry on")
        before, revision = await self._existing(inode.cur)
        if before.home != self._writer.store:
            raise HeldElsewhere(f"the bytes of inode {ino} are on store {before.home.hex()}")
        if before.segment == NO_SEGMENT:
            raise ValueError(f"inode {ino} has no segment here to carry on")
        if before.damaged:  # a new version would be hashed as it is, and its damage look like content
            raise DamagedData(f"the segment of inode {ino} is damaged: it can't be carried on")
        plan.compares.append(Unchanged(version_key(inode.cur), revision))
        if before.state is VersionState.PROTECTED:
            plan.operations.append(version_step(inode.cur, before, msgspec.structs.replace(before, segment=NO_SEGMENT)))
            changed = msgspec.structs.replace(inode, prot=inode.cur)
        else:
            plan.operations.append(version_step(inode.cur, before, None))
            changed = msgspec.structs.replace(inode, cur=inode.prot)
        version = Version(
            FORMAT_VERSION, ino, VersionState.OPEN, self._writer.store, before.segment, durable=before.durable, size=before.size
        )
        return self._opened(ino, changed, version, (inode.cur, before), plan, carried_on=True)

    def _opened(
        self,
        ino: InodeNumber,
        inode: Inode,
        version: Version,
        previous: tuple[Vid, Version] | None,
        plan: Plan,
        *,
        carried_on: bool,
    ) -> OpenedForWriting:
        vid = self._make_vid()
        inode = msgspec.structs.replace(
            inode, writer=self._writer, open=vid, epoch=inode.epoch + 1, lost=False, rolled_back_from=None
        )
        plan.operations.append(version_step(vid, None, version))
        plan.operations.append(Put(inode_key(ino), pack(inode)))
        return OpenedForWriting(inode, vid, version, version.segment, previous, carried_on)

    async def mark_durable(self, vid: Vid) -> None:
        """The version's bytes, and the name of its segment, survive a power cut now; nothing happens if it is gone or marked.

        The mark itself does after `KeyValue.make_durable`.
        """

        async def attempt() -> None:
            found = await find_version(self.kv, vid)
            if found is None or found[0].durable:
                return
            version, revision = found
            marked = msgspec.structs.replace(version, durable=True)
            await commit(self.kv, [Unchanged(version_key(vid), revision)], [Put(version_key(vid), pack(marked))])

        await repeated(attempt)

    async def release_segment(self, vid: Vid, shards: Sequence[Shard]) -> bool:
        """Say that a protected version has no segment any more. False if it isn't protected, not at home here, or has none; or
        if its shards are not those the caller has seen to be right.

        The caller makes that durable before it unlinks the segment.
        """

        async def attempt() -> bool:
            found = await find_version(self.kv, vid)
            if found is None:
                return False
            version, revision = found
            if version.state is not VersionState.PROTECTED or version.home != self._writer.store or version.segment == NO_SEGMENT:
                return False
            if version.shards != list(shards):
                return False
            released = version_step(vid, version, msgspec.structs.replace(version, segment=NO_SEGMENT, damaged=False))
            await commit(self.kv, [Unchanged(version_key(vid), revision)], [released])
            return True

        return await repeated(attempt)

    async def release_writer(self, ino: InodeNumber, vid: Vid) -> bool:
        """Let other nodes write the file; this one hasn't opened it again since `vid` became local. False if it has, or isn't the
        writer any more."""

        async def attempt() -> bool:
            try:
                inode, revision = await existing_inode(self.kv, ino)
            except NoSuchName:
                return False
            if not self._writes(inode) or inode.open is not None or inode.cur != vid:
                return False
            released = msgspec.structs.replace(inode, writer=None)
            await commit(self.kv, [Unchanged(inode_key(ino), revision)], [Put(inode_key(ino), pack(released))])
            return True

        return await repeated(attempt)

    # Segments

    async def mark_damaged(self, vid: Vid, segment: SegmentId, damaged: bool) -> bool:
        """Record what hashing the segment showed. False if the version ended or has another segment: then it says nothing."""
        return await mark_damaged(self.kv, vid, segment, damaged)

    async def replace_segment(self, vid: Vid, before: SegmentId, after: SegmentId) -> bool:
        """Name the right segment that takes the place of a protected version's damaged one, here at its home. False if the
        version ended or has another segment. It survives a power cut after `KeyValue.make_durable`; only then may the old one
        go."""
        return await replace_segment(self.kv, self._writer.store, vid, before, after)

    # Local and protected

    async def commit_local(self, commits: Sequence[LocalCommit]) -> CommittedLocal:
        """Show the names' readers these versions. Those whose file is gone or was opened anew are left out; those that are shown
        already, by an attempt of which only the answer was lost, are not.

        Precondition for each: the bytes and the segment's name are synced, `size` and `root` are those of a sealed segment (R2).
        """
        committed = CommittedLocal(set(), [])
        for commit_, ended in await commit_batched(self.kv, commits, self._plan_local, self._plan_local):
            committed.vids.add(commit_.vid)
            committed.freed.extend(ended)
        return committed

    async def _plan_local(self, local: LocalCommit) -> Planned | None:
        found = await self._inode_and_version(local.ino, local.vid)
        if found is None:
            return None
        inode, version, plan = found
        if inode.cur == local.vid and self._is_as_committed(local, version):
            return plan, []  # by an attempt whose outcome nobody heard, before the session it was made in ended
        if inode.open != local.vid or version.state is not VersionState.OPEN or not self._writes(inode):
            return None
        after = msgspec.structs.replace(
            version, state=VersionState.LOCAL, durable=True, size=local.size, root=local.root, cell_size=local.cell_size
        )
        plan.operations.append(version_step(local.vid, version, after))
        # A protected `cur` stays as `prot`; an unprotected one is only replaced.
        replaced = [vid for vid in (inode.cur, inode.prev_local) if vid != inode.prot]
        ending = await end_versions(self.kv, replaced, self.now_ns())
        inode, prefix = await without_prefix(self.kv, inode)
        for part in (ending.plan, prefix.plan):
            plan.compares.extend(part.compares)
            plan.operations.extend(part.operations)
        changed = msgspec.structs.replace(
            inode,
            cur=local.vid,
            open=None,
            prev_local=None,
            size=local.size,
            blocks=local.blocks,
            mtime_ns=inode.mtime_with(local.mtime_ns),
            ctime_ns=inode.ctime_with(local.mtime_ns),
            times_set_ns=0,
            writer=None if local.release_writer else inode.writer,
        )
        plan.operations.append(Put(inode_key(local.ino), pack(changed)))
        return plan, ending.dead

    def _is_as_committed(self, local: LocalCommit, version: Version) -> bool:
        return (
            version.state is VersionState.LOCAL
            and version.home == self._writer.store
            and (version.size, version.root, version.cell_size) == (local.size, local.root, local.cell_size)
        )

    async def commit_protected(self, commits: Sequence[ProtectedCommit]) -> set[Vid]:
        """Record where the shards are. Left out are versions that were replaced meanwhile, and those with a holder whose record
        has changed: their attempt is void.

        Precondition for each: every holder has durably stored exactly the root named here.
        Raises `ValueError` for a commit that contradicts itself or the version's cells.
        """
        done = await commit_batched(self.kv, commits, self._plan_protected, self._plan_protected_if_holders_stay)
        return {protected.vid for protected, _ in done}

    async def _plan_protected(self, protected: ProtectedCommit) -> Planned | None:
        found = await self._inode_and_version(protected.ino, protected.vid)
        if found is None:
            return None
        inode, version, plan = found
        if protected.vid not in (inode.cur, inode.prefix_next) or version.state is not VersionState.LOCAL:
            return None
        _check_protected(protected, version)
        plan.compares.extend(Unchanged(store_key(store), revision) for store, revision in protected.store_revisions.items())
        after = msgspec.structs.replace(
            version,
            state=VersionState.PROTECTED,
            layout=protected.layout,
            data_shards=protected.data_shards,
            parity_shards=protected.parity_shards,
            shards=list(protected.shards),
            damaged=False,
        )
        plan.operations.append(version_step(protected.vid, version, after))
        is_prefix = protected.vid == inode.prefix_next
        dead: list[tuple[Vid, Version]] = []
        if is_prefix:
            changed = msgspec.structs.replace(inode, prefix=protected.vid, prefix_next=None, prefix_holds=True)
        else:
            ending = await end_versions(self.kv, [inode.prot, inode.prev], self.now_ns())
            plan.compares.extend(ending.plan.compares)
            plan.operations.extend(ending.plan.operations)
            dead = ending.dead
            changed = msgspec.structs.replace(inode, prot=protected.vid, prev=None)
        if is_prefix or inode.open is None:  # else the prefix is that of a later version, which is still written
            gone = await superseded(self.kv, inode.prefix)
            plan.compares.extend(gone.compares)
            plan.operations.extend(gone.operations)
            changed = changed if is_prefix else msgspec.structs.replace(changed, prefix=None)
        plan.operations.append(Put(inode_key(protected.ino), pack(changed)))
        return plan, dead

    async def _plan_protected_if_holders_stay(self, protected: ProtectedCommit) -> Planned | None:
        for store, revision in protected.store_revisions.items():
            entry = await self.kv.get(store_key(store))
            if entry is None or entry.mod_revision != revision:
                return None
        return await self._plan_protected(protected)

    async def commit_repaired(self, repaired: RepairedCommit) -> bool:
        """Record the shards' new holders. False, and nothing is changed, if the version was replaced or its shards got other
        holders meanwhile, or if a new holder's record has changed: what the repair stored is garbage then.

        Precondition: every new holder has durably stored exactly the root the shard had before; another is a `ValueError`, unless
        that was unknown.
        """
        for index, shard in repaired.moved.items():
            if repaired.before[index].root not in (shard.root, UNKNOWN_ROOT) or shard.store not in repaired.store_revisions:
                raise ValueError(f"shard {index} got another root, or a holder whose record wasn't read")

        async def attempt() -> bool:
            found = await find_version(self.kv, repaired.vid)
            if found is None or found[0].state is not VersionState.PROTECTED or found[0].shards != repaired.before:
                return False
            for store, revision in repaired.store_revisions.items():
                entry = await self.kv.get(store_key(store))
                if entry is None or entry.mod_revision != revision:
                    return False
            version, version_revision = found
            shards = [repaired.moved.get(index, shard) for index, shard in enumerate(version.shards)]
            compares: list[Compare] = [Unchanged(version_key(repaired.vid), version_revision)]
            compares += [Unchanged(store_key(store), revision) for store, revision in repaired.store_revisions.items()]
            after = msgspec.structs.replace(version, shards=shards)
            await commit(self.kv, compares, [version_step(repaired.vid, version, after)])
            return True

        return await repeated(attempt)

    async def _inode_and_version(self, ino: InodeNumber, vid: Vid) -> tuple[Inode, Version, Plan] | None:
        try:
            inode, inode_revision = await existing_inode(self.kv, ino)
        except NoSuchName:
            return None
        found = await find_version(self.kv, vid)
        if found is None:
            return None
        version, revision = found
        return inode, version, Plan([Unchanged(inode_key(ino), inode_revision), Unchanged(version_key(vid), revision)], [])

    def _writes(self, inode: Inode) -> bool:
        return inode.writer is not None and inode.writer.store == self._writer.store

    async def _existing(self, vid: Vid) -> tuple[Version, int]:
        found = await find_version(self.kv, vid)
        if found is None:
            # Its inode named it a moment ago, and names it in the same transaction that removes it.
            raise Conflict
        return found

    async def give_up_prefix(self, ino: InodeNumber, prefix: Vid) -> None:
        """A prefix that can't be protected, because its bytes have changed, ends. See `prefixes`."""
        await give_up_prefix(self.kv, ino, prefix)

    # Recovery

    async def drop_open(self, ino: InodeNumber, vid: Vid) -> None:
        """As `drop_open_versions`, for one."""
        await self.drop_open_versions([(ino, vid)])

    async def drop_open_versions(self, open_versions: Iterable[tuple[InodeNumber, Vid]]) -> Dropped:
        """Open versions of this store whose bytes are gone go; each file shows what it had before, or goes too."""
        return await drop_open_versions(self.kv, self._writer.store, open_versions, self.now_ns())

    async def local_versions(
        self, store: StoreId, states: Sequence[VersionState] = (VersionState.OPEN, VersionState.LOCAL)
    ) -> list[tuple[Vid, Version]]:
        """Versions in these states whose home is the store, by a walk over all versions: for rebuilding its database. Damaged
        records are passed over."""
        async with aclosing(self.walk_local_versions(store, states, damaged=set())) as versions:
            return [item async for item in versions]

    def walk_local_versions(
        self, store: StoreId, states: Sequence[VersionState], *, damaged: set[bytes] | None = None
    ) -> AsyncGenerator[tuple[Vid, Version], None]:
        """As `local_versions`, one after the other: there may be a million. Whoever walks lets others run meanwhile. A damaged
        record raises `DamagedRecord`, or its key is put into `damaged`."""
        return versions_at_home(self.kv, store, states, damaged=damaged)


def _check_protected(protected: ProtectedCommit, version: Version) -> None:
    if version.size == 0:
        if protected.shards:
            raise ValueError("an empty version has no shards")
        return
    if protected.data_shards < 1 or len(protected.shards) != protected.data_shards + protected.parity_shards:
        raise ValueError(f"{len(protected.shards)} shards are not {protected.data_shards}+{protected.parity_shards}")
    if any(len(shard.root) != ID_SIZE or len(shard.store) != ID_SIZE for shard in protected.shards):
        raise ValueError("a shard's root or store isn't 16 bytes")
    if any(shard.store not in protected.store_revisions for shard in protected.shards):
        raise ValueError("a holder's revision is missing")
    if protected.layout is ShardLayout.STRIPED and protected.cell_size != version.cell_size:
        raise ValueError(f"shards of {protected.cell_size}-byte cells under a root over {version.cell_size}-byte cells")
