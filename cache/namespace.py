"""Names and inodes over the catalog's key-value interface: what POSIX says, in transactions any engine can run.

Every method reads what it needs, decides, and commits one transaction that compares what it has read; if anything of that
changed meanwhile, it begins again, a bounded number of times. So each operation happens at one revision, on all nodes, or not
at all. Nothing is cached here but a block of inode numbers. `rename`, `removal` and `inode_changes` hold the longer ones.

Pure: time and randomness are injected, and nothing blocks but through the engine.
"""

import contextlib
import stat
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

import msgspec

from ckptfs.cache.catalog_format import (
    FILLING_KEY,
    FORMAT_KEY,
    FORMAT_VERSION,
    INODE_BLOCK_KEY,
    SETTINGS_KEY,
    TARGET_SIZE_MAX,
    DirectoryEntry,
    DirectoryTimes,
    Inode,
    Settings,
    Version,
    VersionState,
    Writer,
    check_format,
    entry_key,
    entry_prefix,
    inode_key,
    pack,
    pack_number,
    subdirectory_key,
    subdirectory_prefix,
    times_key,
    unpack,
    unpack_number,
)
from ckptfs.cache.catalog_kv import Compare, Delete, KeyValue, Operation, Present, Put, Unchanged
from ckptfs.cache.catalog_records import (
    ATTEMPTS_MAX,
    Conflict,
    check_name,
    check_new_name,
    commit,
    entry_put,
    existing_directory,
    existing_inode,
    existing_name,
    find_name,
    inode_put,
    repeated,
    touched,
    with_times,
)
from ckptfs.cache.errors import (
    DamagedData,
    DirectoryNotEmpty,
    InvalidMove,
    IsADirectory,
    NameExists,
    NameTooLong,
    NoSuchName,
    NotADirectory,
    NotPermitted,
    StoreError,
    TooManyLinks,
)
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, SegmentId, StoreId, Vid, new_vid
from ckptfs.cache.inode_changes import (
    AttributeChanges,
    XattrFlags,
    attempt_attributes,
    attempt_change,
)
from ckptfs.cache.posix_acl import DEFAULT, at_creation
from ckptfs.cache.removal import BeforeRemoval, Removed, attempt_unlink, remove_directory, untold
from ckptfs.cache.rename import Place, Renamed, RenameFlags, Whiteout, attempt_rename
from ckptfs.cache.version_states import version_step

__all__ = ["AttributeChanges", "Created", "DirectoryItem", "Namespace", "Removed", "RenameFlags", "Renamed", "XattrFlags"]

INODE_BLOCK_COUNT = 4096
LINKS_MAX = 65_000  # as ext4

Completion = Callable[[InodeNumber, Inode], tuple[Inode, list[Operation]]]


def inherited(directory: Inode, mode: int, gid: int, umask: int) -> tuple[int, int, dict[bytes, bytes]]:
    """What something has that is made in the directory with this mode, by somebody of this group: mode, group, attributes."""
    if directory.mode & stat.S_ISGID:
        gid = directory.gid
        if stat.S_ISDIR(mode):
            mode |= stat.S_ISGID
    if stat.S_ISLNK(mode):
        return mode, gid, {}
    mode, xattrs = at_creation(directory.xattrs.get(DEFAULT), mode, umask, is_directory=stat.S_ISDIR(mode))
    return mode, gid, xattrs


class Created(NamedTuple):
    """A new regular file: `vid` is its version, open for writing here."""

    ino: InodeNumber
    inode: Inode
    vid: Vid


class DirectoryItem(msgspec.Struct, frozen=True, gc=False):
    """One name of a directory. `kind` is the S_IFMT part of the mode; `cookie` is where readdir goes on after this name."""

    name: bytes
    ino: InodeNumber
    kind: int
    cookie: int


class Namespace:
    """The tree of one catalog, as seen and changed by one store's node. `changes` is the engine that changes are committed
    through, for one that adds something of its own to them; by default `kv`.

    Raises from `errors`: the `NamespaceError` that is the operation's errno, `CatalogUnavailable` if the engine can't be reached
    or the same operation kept losing to others, `DamagedData` if a record makes no sense.
    """

    def __init__(
        self,
        kv: KeyValue,
        store: StoreId,
        incarnation: int,
        now_ns: Callable[[], int],
        *,
        changes: KeyValue | None = None,
        make_vid: Callable[[], Vid] = new_vid,
    ) -> None:
        self.kv = kv
        self._changes = changes or kv
        self.before_removal: BeforeRemoval = untold
        self._writer = Writer(store, incarnation)
        self.now_ns = now_ns
        self._make_vid = make_vid
        self._numbers = range(0)

    # The catalog as a whole

    async def format_if_empty(self, settings: Settings, uid: int = 0, gid: int = 0) -> Settings:
        """Make a new catalog's root, unless it has one; several nodes may do so at once. Returns the settings that hold. The root
        directory is this user's and this group's."""
        now = self.now_ns()
        root = Inode(FORMAT_VERSION, stat.S_IFDIR | 0o755, uid, gid, now, now, now, parent=ROOT_INODE)
        await self.kv.transact(
            [*(Unchanged(key, 0) for key in (SETTINGS_KEY, inode_key(ROOT_INODE), INODE_BLOCK_KEY, FILLING_KEY))],
            [
                Put(FORMAT_KEY, pack_number(FORMAT_VERSION)),
                Put(SETTINGS_KEY, pack(settings)),
                Put(inode_key(ROOT_INODE), pack(root)),
                Put(INODE_BLOCK_KEY, pack_number(ROOT_INODE + 1)),
            ],
        )
        await self.kv.make_durable()
        return await self.settings()

    async def settings(self) -> Settings:
        """What the cluster agreed on. Raises `StoreError` if the catalog is empty or newer."""
        written = await self.kv.get(FORMAT_KEY)
        if written is not None:
            check_format(written.value)
        entry = await self.kv.get(SETTINGS_KEY)
        if entry is None or written is None:
            if await self.kv.get(FILLING_KEY) is not None:
                raise StoreError(
                    "the catalog is half filled: ckptfs import or ckptfs recover did not come to its end; run it again, and start"
                    " no node before"
                )
            raise StoreError("the catalog is empty: no node has formatted it")
        return unpack(Settings, entry.value)

    # Looking

    async def lookup(self, parent: InodeNumber, name: bytes) -> tuple[InodeNumber, Inode]:
        """The inode a name leads to. Raises `NoSuchName`, `NotADirectory`, `NameTooLong`."""
        if name == b".":
            return parent, await self._with_times(parent, await existing_directory(self.kv, parent))
        if name == b"..":
            above = (await existing_directory(self.kv, parent)).parent
            if above is None:
                raise DamagedData(f"directory {parent} has no parent")
            return above, await self.inode(above)
        for _ in range(ATTEMPTS_MAX):
            found = await existing_name(self.kv, parent, name)
            ino = found.entry.ino
            entry = await self.kv.get(inode_key(ino))
            if entry is not None:
                inode = unpack(Inode, entry.value)
                return ino, (await self._with_times(ino, inode) if inode.is_directory else inode)
            # The name was removed, or leads elsewhere, since it was read.
        raise DamagedData(f"name {name!r} of directory {parent} leads to an inode that does not exist")

    async def inode(self, ino: InodeNumber) -> Inode:
        """The inode, with a directory's own times. Raises `NoSuchName` when it is gone."""
        inode, _ = await existing_inode(self.kv, ino)
        return await self._with_times(ino, inode) if inode.is_directory else inode

    async def inodes(self, inos: Sequence[InodeNumber]) -> dict[InodeNumber, Inode]:
        """As `inode`, for many at once. Left out are those that are gone, or whose record is damaged: whoever asks for such a one
        alone is told."""
        found: dict[InodeNumber, Inode] = {}
        try:
            for ino, entry in zip(inos, await self.kv.get_many([inode_key(ino) for ino in inos]), strict=True):
                if entry is not None:
                    inode = unpack(Inode, entry.value)
                    found[ino] = await self._with_times(ino, inode) if inode.is_directory else inode
        except DamagedData:
            for ino in inos:
                with contextlib.suppress(NoSuchName, DamagedData):
                    found[ino] = await self.inode(ino)
        return found

    async def _with_times(self, ino: InodeNumber, inode: Inode) -> Inode:
        entry = await self.kv.get(times_key(ino))
        if entry is None:
            return inode
        return with_times(inode, unpack(DirectoryTimes, entry.value))

    async def nlink(self, ino: InodeNumber, inode: Inode) -> int:
        """The link count stat shows: a directory has one for its name, one for `.`, one for each subdirectory's `..`."""
        if not inode.is_directory or not inode.nlink:
            return inode.nlink
        return 2 + await self.kv.count(subdirectory_prefix(ino))

    async def readdir(self, directory: InodeNumber) -> list[DirectoryItem]:
        """All names at one revision, without `.` and `..`, in the order of their cookies.

        A cookie is greater than 2 (1 and 2 are for `.` and `..`) and belongs to the name for as long as it leads to the same
        inode: other names' coming and going doesn't move it, nor does a restart.
        """
        prefix = entry_prefix(directory)
        entries = await self.kv.range(prefix)
        if not entries:
            await existing_directory(self.kv, directory)
        name_begins = len(prefix)
        items = []
        for entry in entries:
            found = unpack(DirectoryEntry, entry.value)
            cookie = (entry.mod_revision << 1 | found.tie) + 2
            items.append(DirectoryItem(entry.key[name_begins:], found.ino, found.kind, cookie))
        items.sort(key=attrgetter("cookie"))
        return items

    # Making

    async def create_file(
        self, parent: InodeNumber, name: bytes, mode: int, uid: int, gid: int, segment_id: SegmentId, umask: int = 0
    ) -> Created:
        """A new regular file, open for writing here; its bytes will be in this segment of the own store.

        Raises `NameExists`, `NoSuchName` if the directory is gone, `NotADirectory`, `NameTooLong`.
        """
        vid = self._make_vid()

        def complete(ino: InodeNumber, inode: Inode) -> tuple[Inode, list[Operation]]:
            return self._opened(ino, inode, vid, segment_id, durable=False)

        ino, inode = await self._make(parent, name, stat.S_IFREG | stat.S_IMODE(mode), uid, gid, umask, complete)
        return Created(ino, inode, vid)

    def _opened(
        self, ino: InodeNumber, inode: Inode, vid: Vid, segment_id: SegmentId, *, durable: bool
    ) -> tuple[Inode, list[Operation]]:
        version = Version(FORMAT_VERSION, ino, VersionState.OPEN, self._writer.store, segment_id, durable=durable)
        return msgspec.structs.replace(inode, writer=self._writer, open=vid), [version_step(vid, None, version)]

    async def make_nameless(self, parent: InodeNumber, mode: int, uid: int, gid: int, umask: int) -> Created:
        """What `create_file` would make in this directory, for a file that has no name yet: nothing is in the catalog before
        `name_file`. Raises `NoSuchName`, `NotADirectory`."""
        directory = await existing_directory(self.kv, parent)
        mode, gid, xattrs = inherited(directory, stat.S_IFREG | stat.S_IMODE(mode), gid, umask)
        now = self.now_ns()
        inode = Inode(FORMAT_VERSION, mode, uid, gid, now, now, now, nlink=0, xattrs=xattrs, made_ns=now)
        return Created(await self._new_number(), inode, self._make_vid())

    async def name_file(self, nameless: Created, segment_id: SegmentId, parent: InodeNumber, name: bytes) -> Inode:
        """Give a nameless file its first name; it is being written here, in this segment. Raises like `create_file`.

        Precondition: the segment's bytes and its name are synced.
        """
        check_new_name(name)
        ino, inode, vid = nameless
        now = self.now_ns()
        named, more = self._opened(ino, msgspec.structs.replace(inode, nlink=1, ctime_ns=now), vid, segment_id, durable=True)
        await self._make_name(parent, name, ino, named, more)
        return named

    async def make_directory(
        self, parent: InodeNumber, name: bytes, mode: int, uid: int, gid: int, umask: int = 0
    ) -> tuple[InodeNumber, Inode]:
        """A new, empty directory; it takes its parent's set-group-id bit and fsync policy. Raises like `create_file`."""

        def complete(ino: InodeNumber, inode: Inode) -> tuple[Inode, list[Operation]]:
            return msgspec.structs.replace(inode, parent=parent), [Put(subdirectory_key(parent, ino), b"")]

        return await self._make(parent, name, stat.S_IFDIR | stat.S_IMODE(mode), uid, gid, umask, complete)

    async def make_node(
        self, parent: InodeNumber, name: bytes, mode: int, rdev: int, uid: int, gid: int, umask: int = 0
    ) -> tuple[InodeNumber, Inode]:
        """A new pipe, socket or device. Raises like `create_file`, and `NotPermitted` for kinds with methods of their own."""
        if stat.S_IFMT(mode) not in (stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK):
            raise NotPermitted(f"a node of kind {stat.S_IFMT(mode):#o} can't be made")

        def complete(_ino: InodeNumber, inode: Inode) -> tuple[Inode, list[Operation]]:
            return msgspec.structs.replace(inode, rdev=rdev), []

        return await self._make(parent, name, mode, uid, gid, umask, complete)

    async def make_symlink(
        self, parent: InodeNumber, name: bytes, target: bytes, uid: int, gid: int
    ) -> tuple[InodeNumber, Inode]:
        """A new symbolic link. Raises like `create_file`; `NoSuchName` for an empty target."""
        if len(target) > TARGET_SIZE_MAX:
            raise NameTooLong(f"a link's target has {len(target)} bytes, at most {TARGET_SIZE_MAX} are possible")
        if not target:
            raise NoSuchName("a link's target can't be empty")

        def complete(_ino: InodeNumber, inode: Inode) -> tuple[Inode, list[Operation]]:
            return msgspec.structs.replace(inode, target=target, size=len(target)), []

        return await self._make(parent, name, stat.S_IFLNK | 0o777, uid, gid, 0, complete)

    async def _make(
        self, parent: InodeNumber, name: bytes, mode: int, uid: int, gid: int, umask: int, complete: Completion
    ) -> tuple[InodeNumber, Inode]:
        check_new_name(name)
        directory = await existing_directory(self.kv, parent)
        mode, gid, xattrs = inherited(directory, mode, gid, umask)
        ino = await self._new_number()
        now = self.now_ns()
        policy = directory.policy if stat.S_ISDIR(mode) else ""
        inode, more = complete(
            ino, Inode(FORMAT_VERSION, mode, uid, gid, now, now, now, xattrs=xattrs, policy=policy, made_ns=now)
        )
        await self._make_name(parent, name, ino, inode, more)
        return ino, inode

    async def _make_name(
        self, parent: InodeNumber, name: bytes, ino: InodeNumber, inode: Inode, more: Sequence[Operation]
    ) -> None:
        compares: list[Compare] = [Unchanged(entry_key(parent, name), 0), Present(inode_key(parent))]
        operations = [
            entry_put(parent, name, ino, inode.mode),
            inode_put(ino, inode),
            touched(parent, inode.ctime_ns),
            *more,
        ]

        async def attempt() -> None:
            if (await self._changes.transact(compares, operations)).succeeded:
                return
            if await find_name(self.kv, parent, name) is not None:
                raise NameExists(f"name {name!r} exists in directory {parent}")
            await existing_directory(self.kv, parent)
            raise Conflict

        await repeated(attempt)

    async def _new_number(self) -> InodeNumber:
        """A number that was never used. The block it is from is durably taken before the first of it is used, so that a power
        cut can't make the catalog forget numbers that segments already carry."""
        while not self._numbers:
            entry = await self.kv.get(INODE_BLOCK_KEY)
            if entry is None:
                raise StoreError("the catalog is empty: no node has formatted it")
            first = unpack_number(entry.value)
            block = range(first, first + INODE_BLOCK_COUNT)
            taken = await self.kv.transact(
                [Unchanged(INODE_BLOCK_KEY, entry.mod_revision)], [Put(INODE_BLOCK_KEY, pack_number(block.stop))]
            )
            if not taken.succeeded:
                continue
            await self.kv.make_durable()
            if not self._numbers:  # else another task has taken a block meanwhile, and this one stays unused
                self._numbers = block
        number, self._numbers = self._numbers[0], self._numbers[1:]
        return InodeNumber(number)

    async def link(self, ino: InodeNumber, parent: InodeNumber, name: bytes) -> Inode:
        """Another name for a file. Raises `NameExists`, `NotPermitted` for a directory, `TooManyLinks`, `NoSuchName`."""
        check_new_name(name)

        async def attempt() -> Inode:
            inode, revision = await existing_inode(self.kv, ino)
            await existing_directory(self.kv, parent)
            if await find_name(self.kv, parent, name) is not None:
                raise NameExists(f"name {name!r} exists in directory {parent}")
            if inode.is_directory:
                raise NotPermitted(f"inode {ino} is a directory: it can't have a second name")
            if inode.nlink >= LINKS_MAX:
                raise TooManyLinks(f"inode {ino} has {inode.nlink} names")
            now = self.now_ns()
            linked = msgspec.structs.replace(inode, nlink=inode.nlink + 1, ctime_ns=now)
            await commit(
                self._changes,
                [Unchanged(entry_key(parent, name), 0), Unchanged(inode_key(ino), revision), Present(inode_key(parent))],
                [
                    entry_put(parent, name, ino, inode.mode),
                    Put(inode_key(ino), pack(linked)),
                    touched(parent, now),
                ],
            )
            return linked

        return await repeated(attempt)

    # Removing and moving

    async def unlink(self, parent: InodeNumber, name: bytes) -> Removed:
        """Remove a name of anything but a directory. Raises `NoSuchName`, `IsADirectory`, `NotADirectory`."""
        check_name(name)
        if name in (b".", b".."):
            raise IsADirectory(f"{name!r} is a directory")
        return await repeated(lambda: attempt_unlink(self._changes, parent, name, self.now_ns(), self.before_removal))

    async def rmdir(self, parent: InodeNumber, name: bytes) -> Removed:
        """Remove an empty directory. Raises `NoSuchName`, `NotADirectory`, `DirectoryNotEmpty`; `InvalidMove` for `.`."""
        check_name(name)
        if name == b".":
            raise InvalidMove("a directory can't be removed as '.'")
        if name == b"..":
            raise DirectoryNotEmpty("a directory's parent is never empty")

        async def attempt() -> Removed:
            found = await existing_name(self.kv, parent, name)
            if not stat.S_ISDIR(found.entry.kind):
                raise NotADirectory(f"name {name!r} in directory {parent} is not a directory")
            now = self.now_ns()
            removed, plan = await remove_directory(self.kv, parent, found.entry.ino, now)
            self.before_removal(removed)
            await commit(
                self._changes,
                [Unchanged(entry_key(parent, name), found.revision), *plan.compares],
                [Delete(entry_key(parent, name)), *plan.operations, touched(parent, now)],
            )
            return removed

        return await repeated(attempt)

    async def rename(
        self,
        old_parent: InodeNumber,
        old_name: bytes,
        new_parent: InodeNumber,
        new_name: bytes,
        flags: RenameFlags = RenameFlags(0),  # noqa: B008 (an immutable value)
        owner: tuple[int, int] = (0, 0),
    ) -> Renamed:
        """Move a name, replacing what is under the new one, or exchange the two. `owner`: user and group of a whiteout.

        Nothing happens if both lead to one inode. Raises `NoSuchName`, `NameExists` (NOREPLACE), `NotADirectory`, `IsADirectory`,
        `DirectoryNotEmpty`, `InvalidMove` for a directory below itself or impossible flags.
        """
        old, new = Place(old_parent, old_name), Place(new_parent, new_name)
        flags = RenameFlags(flags)
        whiteout = None
        if flags & RenameFlags.WHITEOUT:
            uid, gid = owner
            gid = inherited(await existing_directory(self.kv, old_parent), stat.S_IFCHR, gid, 0)[1]
            whiteout = Whiteout(await self._new_number(), uid, gid)
        return await repeated(
            lambda: attempt_rename(self._changes, old, new, flags, self.now_ns(), whiteout, self.before_removal)
        )

    # Attributes

    async def set_attributes(self, ino: InodeNumber, changes: AttributeChanges) -> Inode:
        """Change some attributes; the inode afterwards. Raises `NoSuchName`; `NotPermitted` for a size of what has none."""
        inode = await repeated(lambda: attempt_attributes(self._changes, ino, changes, self.now_ns(), self._writer.store))
        return await self._with_times(ino, inode) if inode.is_directory else inode

    async def change(self, ino: InodeNumber, change: Callable[[Inode], Inode]) -> Inode:
        """Commit a change of an inode's record; `change` may be called repeatedly. Raises `NoSuchName`, and what it raises."""
        return await repeated(lambda: attempt_change(self._changes, ino, change))
