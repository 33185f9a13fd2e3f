"""The catalog's keys and records, format version 1.

Keys (bytes; `<dir>` and `<ino>` are 16 lower-case hex digits, so that numeric order is key order; `<vid>`, `<store>` 32)::

    d/<dir>/<name>     DirectoryEntry     the only thing that makes a name; <name> is 1-255 bytes, no NUL, no slash
    n/<dir>/<ino>      empty              one for each subdirectory: counting them gives a directory's nlink without
                                          reading its entries
    t/<dir>            DirectoryTimes     mtime and ctime of a directory, put blindly, compared by nobody
    i/<ino>            Inode
    v/<vid>            Version            intent, manifest and tombstone in one; the only reason for a shard to exist
    s/<store>          Store              permanent
    l/<node>           Session            bound to the node's session
    j/<node>           32 bytes           SHA-256 of the token with which one new store of the node may join
    r/<store>          bytes              how far the store's replica of the catalog has come, decimal ASCII, bound to its session
    h/<segment>/<store>  empty            programs on that store's node have another store's segment open
    o/<node>/<unique>  CarriedOut         a request whose change is made and whose answer the kernel may not have yet; <unique> is
                                          its number on the FUSE connection, 16 hex digits
    c/join             "token"            new stores need a token; absent: they don't
    c/leader           Session            whose agent decides for the cluster; bound to its session
    c/<what>           bytes              cluster-wide facts: ino, dirmove, format (decimal ASCII), settings (Settings), recovered
                                          (Recovered), filling (there only while the catalog is filled: see `catalog_fill`)

Values are msgpack arrays (msgspec `array_like` structs) whose first element is the record's format version. Readers
refuse other versions; fields may only be appended, with a default. `unpack` checks everything it can without other
records and raises `DamagedData`.
"""

import enum
import stat
from typing import Annotated, Any, TypeVar

import msgspec

from ckptfs.cache.errors import DamagedData, StoreError
from ckptfs.cache.ids import ID_SIZE, InodeNumber, NodeId, SegmentId, StoreId, Vid

FORMAT_VERSION = 1
NAME_SIZE_MAX = 255
TARGET_SIZE_MAX = 4095
NO_SEGMENT = SegmentId(bytes(ID_SIZE))
"""The segment of a protected version that has none any more: a later version carried its backing file on, in place. Its bytes
exist only as shards. No segment is ever created under this id."""

NO_STORE = StoreId(bytes(ID_SIZE))
"""The holder of a shard that nobody has, of a version that was recovered: repair makes it and finds it one."""

UNKNOWN_ROOT = bytes(ID_SIZE)
"""The root of such a shard: it is what follows from the content, which the content's own root proves."""

_ID = msgspec.Meta(min_length=ID_SIZE, max_length=ID_SIZE)
_NOT_NEGATIVE = msgspec.Meta(ge=0)
_POSITIVE = msgspec.Meta(ge=1)


BLOCKS_UNKNOWN = -1
"""In place of a number of blocks, where nobody has noted it: the size has to do."""


class VersionState(enum.IntEnum):
    """A version's stored state. 0 is never valid, so that zeroed space is not a state.

    Transitions: OPEN -> LOCAL -> PROTECTED -> DEAD -> (no key); OPEN and LOCAL may also go straight to DEAD or vanish.
    """

    OPEN = 1
    LOCAL = 2
    PROTECTED = 3
    DEAD = 4


class StoreState(enum.IntEnum):
    """A store's stored state: only IN stores take new shards."""

    IN = 1
    DRAINING = 2
    LOST = 3
    REMOVED = 4

    @property
    def is_gone(self) -> bool:
        """Whether it isn't in the cluster any more: what only it had counts as not there, and its shards are made elsewhere."""
        return self in (StoreState.LOST, StoreState.REMOVED)


class ShardLayout(enum.IntEnum):
    """How a protected version's shards relate to its bytes: striped Reed-Solomon, or whole copies (small files)."""

    STRIPED = 1
    COPIES = 2


NODE_DOMAIN = "node"
"""As a failure domain's label: each node is one."""


class DirectoryEntry(msgspec.Struct, array_like=True, frozen=True):
    """What a name leads to. `kind` is the S_IFMT part of the mode. `tie` keeps readdir cookies apart: when two names of
    one directory change in one transaction, the second has 1."""

    format: int
    ino: Annotated[InodeNumber, _POSITIVE]
    kind: Annotated[int, _NOT_NEGATIVE]
    tie: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0


class DirectoryTimes(msgspec.Struct, array_like=True, frozen=True):
    """Nanoseconds since the epoch."""

    format: int
    mtime_ns: int
    ctime_ns: int


class Writer(msgspec.Struct, array_like=True, frozen=True):
    """The home that accepts writes of an inode now: the store, and the incarnation of its session."""

    store: Annotated[StoreId, _ID]
    incarnation: int


class Inode(msgspec.Struct, array_like=True, frozen=True):
    """One inode. Times in nanoseconds. For directories size and nlink are not kept (nlink is counted); their mtime is that of
    `t/` where it exists, their ctime the newer of both.

    `writer` is set while the home accepts writes; `size` then is only as of the last commit. `cur` is the version a reader
    gets when nobody writes, `prot` the newest protected one, `prev` (a protected version of the replaced file) is kept
    until this inode has one of its own. `policy` is the directory's inherited fsync policy ("" = local).
    `open` is the version being written; it becomes `cur` when its bytes are local. `prev_local` (a local version of the replaced
    file) is kept until this inode has a local one, so that a power cut shows the old content rather than none.
    `times_set_ns` is when another node than the writer set the times, else 0: they hold unless the segment was written since.
    `prefix`, `prefix_next` and `prefix_holds`: see `prefixes`. `made_ns` is when it was made, 0 where that was not kept.
    `blocks` of 512 bytes is what the file took on its home's drive when `size` was recorded: fewer, if it has holes.
    """

    format: int
    mode: Annotated[int, _POSITIVE]
    uid: Annotated[int, _NOT_NEGATIVE]
    gid: Annotated[int, _NOT_NEGATIVE]
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    nlink: Annotated[int, _NOT_NEGATIVE] = 1
    size: Annotated[int, _NOT_NEGATIVE] = 0
    rdev: Annotated[int, _NOT_NEGATIVE] = 0
    target: bytes = b""
    xattrs: dict[bytes, bytes] = {}
    parent: Annotated[InodeNumber, _POSITIVE] | None = None
    policy: str = ""
    epoch: int = 1
    writer: Writer | None = None
    cur: Annotated[Vid, _ID] | None = None
    prot: Annotated[Vid, _ID] | None = None
    prev: Annotated[Vid, _ID] | None = None
    rolled_back_from: Annotated[Vid, _ID] | None = None
    lost: bool = False
    open: Annotated[Vid, _ID] | None = None
    prev_local: Annotated[Vid, _ID] | None = None
    times_set_ns: int = 0
    prefix: Annotated[Vid, _ID] | None = None
    prefix_next: Annotated[Vid, _ID] | None = None
    prefix_holds: bool = False
    blocks: int = BLOCKS_UNKNOWN
    made_ns: int = 0

    def mtime_with(self, segment_mtime_ns: int) -> int:
        """The file's mtime, given that of the segment its writer has."""
        return self.mtime_ns if self.times_set_ns > segment_mtime_ns else segment_mtime_ns

    def ctime_with(self, segment_mtime_ns: int) -> int:
        """The file's ctime, given its segment's mtime at its writer: writing changes both, setting times the record alone."""
        return self.ctime_ns if segment_mtime_ns == self.mtime_ns else max(self.ctime_ns, segment_mtime_ns)

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_regular(self) -> bool:
        return stat.S_ISREG(self.mode)


class Shard(msgspec.Struct, array_like=True, frozen=True):
    """The holder of one shard and the root it acknowledged (16 bytes)."""

    store: Annotated[StoreId, _ID]
    root: Annotated[bytes, _ID]


class Version(msgspec.Struct, array_like=True, frozen=True):
    """One content. `segment` is its backing file on `home`. `durable`: the bytes were fdatasynced once, so that the segment
    survives a power cut. `size`, `root` (16 bytes) are valid from LOCAL on, the code and `shards` from PROTECTED on; shard i is
    `shards[i]`. `dead_at_ns` is wall time, for a grace only; the revision of a death is the `mod_revision` of the key.
    `damaged`: the segment was hashed again and isn't what it was when the file was closed: nobody reads it (LOCAL and
    PROTECTED)."""

    format: int
    ino: Annotated[InodeNumber, _POSITIVE]
    state: VersionState
    home: Annotated[StoreId, _ID]
    segment: Annotated[SegmentId, _ID]
    durable: bool = False
    size: Annotated[int, _NOT_NEGATIVE] = 0
    root: bytes = b""
    layout: ShardLayout = ShardLayout.STRIPED
    data_shards: Annotated[int, _NOT_NEGATIVE] = 0
    parity_shards: Annotated[int, _NOT_NEGATIVE] = 0
    cell_size: Annotated[int, _NOT_NEGATIVE] = 0
    shards: list[Shard] = []
    local_revision: int = 0
    dead_revision: int = 0
    dead_at_ns: int = 0
    damaged: bool = False


class Store(msgspec.Struct, array_like=True, frozen=True):
    """One store of the cluster. `address` is host:port of its agent; `directory` its path on its own machine (a hint for
    people and for the local cluster). `labels` say where it stands, e.g. {"rack": "r1", "zone": "z1"}.
    `settled`: every file was rolled back whose newest content only this lost store had. `was_draining`: it drained when it was
    declared lost, and does again when it is back."""

    format: int
    node: NodeId
    state: StoreState
    address: str
    directory: str
    labels: dict[str, str] = {}
    certificate: bytes = b""
    settled: bool = False
    was_draining: bool = False

    def domain(self, label: str) -> str:
        """Its failure domain, if that is what stores with the same label share; the node where it has none."""
        return self.labels.get(label) or self.node


class Session(msgspec.Struct, array_like=True, frozen=True):
    """A node's session: its store and an incarnation, different each time the node starts."""

    format: int
    store: Annotated[StoreId, _ID]
    incarnation: int


class CarriedOut(msgspec.Struct, array_like=True, frozen=True):
    """A request was carried out, on the FUSE connection of this incarnation of the node. Written with what it changed."""

    format: int
    incarnation: int


class Settings(msgspec.Struct, array_like=True, frozen=True):
    """`c/settings`: what the whole cluster must agree on. `failure_domain` is the label of stores that fail together, or
    "node"."""

    format: int
    cluster: Annotated[bytes, _ID]
    data_shards: Annotated[int, _POSITIVE]
    parity_shards: Annotated[int, _NOT_NEGATIVE]
    cell_size: Annotated[int, _POSITIVE]
    failure_domain: str = NODE_DOMAIN


class Recovery(msgspec.Struct, array_like=True, frozen=True):
    """A catalog was filled anew from an older state. What was at revisions after `known_to`, and before `begins_at`, it does not
    know: shards and copies of that time may be all that is left of files. It began at `begins_at`, beyond every revision that any
    store at hand had seen."""

    id: Annotated[bytes, _ID]
    known_to: Annotated[int, _NOT_NEGATIVE]
    begins_at: Annotated[int, _POSITIVE]


class Recovered(msgspec.Struct, array_like=True, frozen=True):
    """`c/recovered`: every recovery this catalog went through, the newest last. Absent, if there was none."""

    format: int
    recoveries: Annotated[list[Recovery], msgspec.Meta(min_length=1)]

    def is_unknown_time(self, revision: int) -> bool:
        """Whether the catalog has lost what it knew at this revision."""
        return any(recovery.known_to < revision < recovery.begins_at for recovery in self.recoveries)


Record = TypeVar("Record", DirectoryEntry, DirectoryTimes, Inode, Version, Store, Session, CarriedOut, Settings, Recovered)

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind)
    for kind in (DirectoryEntry, DirectoryTimes, Inode, Version, Store, Session, CarriedOut, Settings, Recovered)
}


def pack(record: Record) -> bytes:
    """The record's bytes."""
    return _encoder.encode(record)


def unpack(kind: type[Record], value: bytes) -> Record:
    """The record in these bytes. Raises `DamagedData` for anything but a whole, valid record of this format version."""
    try:
        record: Record = _decoders[kind].decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedData(f"catalog record {kind.__name__} can't be read: {error}") from None
    if record.format != FORMAT_VERSION:
        raise DamagedData(f"catalog record {kind.__name__} has format {record.format}, this program reads {FORMAT_VERSION}")
    if isinstance(record, Version):
        _check_version(record)
    return record


def _check_version(version: Version) -> None:
    if version.state in (VersionState.LOCAL, VersionState.PROTECTED) and len(version.root) != ID_SIZE:
        raise DamagedData("catalog record Version is local or protected but has no content root")
    if version.state is VersionState.PROTECTED and version.size > 0:
        total = version.data_shards + version.parity_shards
        if version.data_shards < 1 or len(version.shards) != total:
            raise DamagedData(f"catalog record Version names {len(version.shards)} shards, its code has {total}")


def check_format(value: bytes) -> None:
    """Check the value of `c/format`. Raises `StoreError` if a newer program wrote this catalog, `DamagedData` for nonsense."""
    number = unpack_number(value)
    if number > FORMAT_VERSION:
        raise StoreError(f"the catalog has format {number}, this program knows {FORMAT_VERSION}: upgrade ckptfs on this node")
    if number < 1:
        raise DamagedData(f"the catalog's format version is {number}")


def pack_number(number: int) -> bytes:
    return b"%d" % number


def unpack_number(value: bytes) -> int:
    """The number in a `c/` key's value. Raises `DamagedData` for anything but 1-18 decimal digits."""
    if not 1 <= len(value) <= 18 or not value.isdigit():
        raise DamagedData(f"a catalog number reads {value[:40]!r}")
    return int(value)


def entry_prefix(directory: InodeNumber) -> bytes:
    return b"d/%016x/" % directory


def entry_key(directory: InodeNumber, name: bytes) -> bytes:
    return b"d/%016x/%b" % (directory, name)


def subdirectory_prefix(directory: InodeNumber) -> bytes:
    return b"n/%016x/" % directory


def subdirectory_key(directory: InodeNumber, child: InodeNumber) -> bytes:
    return b"n/%016x/%016x" % (directory, child)


def times_key(directory: InodeNumber) -> bytes:
    return b"t/%016x" % directory


def inode_key(ino: InodeNumber) -> bytes:
    return b"i/%016x" % ino


def inode_of_key(key: bytes) -> InodeNumber:
    """The inverse of `inode_key`. Raises `DamagedData`."""
    try:
        number = int(key[2:].decode("ascii"), 16)
    except ValueError:
        number = -1
    if number < 0 or inode_key(InodeNumber(number)) != key:
        raise DamagedData(f"catalog key {key[:80]!r} names no inode")
    return InodeNumber(number)


def version_key(vid: Vid) -> bytes:
    return b"v/" + vid.hex().encode()


def vid_of_key(key: bytes) -> Vid:
    """The inverse of `version_key`. Raises `DamagedData`."""
    return Vid(_id_of_key(key, VERSION_PREFIX))


def store_of_key(key: bytes) -> StoreId:
    """The inverse of `store_key`. Raises `DamagedData`."""
    return StoreId(_id_of_key(key, STORE_PREFIX))


def _id_of_key(key: bytes, prefix: bytes) -> bytes:
    digits = key.removeprefix(prefix)
    try:
        identifier = bytes.fromhex(digits.decode("ascii"))
    except ValueError:
        identifier = b""
    if len(identifier) != ID_SIZE or identifier.hex().encode() != digits:
        raise DamagedData(f"catalog key {key[:80]!r} names no id")
    return identifier


def entry_of_key(key: bytes) -> tuple[InodeNumber, bytes]:
    """The inverse of `entry_key`: directory and name. Raises `DamagedData`."""
    directory, slash, name = key[2:18], key[18:19], key[19:]
    try:
        number = int(directory.decode("ascii"), 16)
    except ValueError:
        number = -1
    if slash != b"/" or not 1 <= len(name) <= NAME_SIZE_MAX or entry_key(InodeNumber(max(number, 0)), name) != key:
        raise DamagedData(f"catalog key {key[:80]!r} names no directory entry")
    return InodeNumber(number), name


def store_key(store: StoreId) -> bytes:
    return b"s/" + store.hex().encode()


def replica_key(store: StoreId) -> bytes:
    return REPLICA_PREFIX + store.hex().encode()


def hold_prefix(segment: SegmentId) -> bytes:
    return b"h/%b/" % segment.hex().encode()


def hold_key(segment: SegmentId, store: StoreId) -> bytes:
    return hold_prefix(segment) + store.hex().encode()


def hold_of_key(key: bytes) -> tuple[SegmentId, StoreId]:
    """The inverse of `hold_key`. Raises `DamagedData`."""
    length = len(HOLD_PREFIX) + 2 * ID_SIZE
    segment, store = SegmentId(_id_of_key(key[:length], HOLD_PREFIX)), StoreId(_id_of_key(key[length:], b"/"))
    return segment, store


def session_key(node: NodeId) -> bytes:
    return b"l/" + node.encode()


def admission_key(node: NodeId) -> bytes:
    return b"j/" + node.encode()


def answer_prefix(node: NodeId) -> bytes:
    return b"o/%b/" % node.encode()


def answer_key(node: NodeId, unique: int) -> bytes:
    return b"o/%b/%016x" % (node.encode(), unique)


def unique_of_key(key: bytes) -> int:
    """The request's number in an `answer_key`. Raises `DamagedData`."""
    digits = key.split(b"/", 2)[-1]
    try:
        unique = int(digits.decode("ascii"), 16)
    except ValueError:
        unique = -1
    if b"%016x" % max(unique, 0) != digits:
        raise DamagedData(f"catalog key {key[:80]!r} names no request")
    return unique


FORMAT_KEY = b"c/format"
INODE_BLOCK_KEY = b"c/ino"
DIRECTORY_MOVE_KEY = b"c/dirmove"
SETTINGS_KEY = b"c/settings"
LEADER_KEY = b"c/leader"
JOINING_KEY = b"c/join"
FILLING_KEY = b"c/filling"
RECOVERED_KEY = b"c/recovered"
ENTRY_PREFIX = b"d/"
INODE_PREFIX = b"i/"
VERSION_PREFIX = b"v/"
STORE_PREFIX = b"s/"
SESSION_PREFIX = b"l/"
HOLD_PREFIX = b"h/"
REPLICA_PREFIX = b"r/"
