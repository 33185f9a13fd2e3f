"""Every record and key of the catalog, byte for byte; and that nothing else is ever taken for one.

The vectors are format version 1: they never change. Fields may be appended, with defaults, and then old bytes still read.
"""

import stat
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.cache import catalog_format as fmt
from ckptfs.cache.catalog_format import (
    NO_SEGMENT,
    CarriedOut,
    DirectoryEntry,
    DirectoryTimes,
    Inode,
    Recovered,
    Recovery,
    Session,
    Settings,
    Shard,
    ShardLayout,
    Store,
    StoreState,
    Version,
    VersionState,
    Writer,
    pack,
    unpack,
)
from ckptfs.cache.errors import DamagedData, StoreError
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, NodeId, SegmentId, StoreId, Vid

S = StoreId(b"S" * 16)
T = StoreId(b"T" * 16)
G = SegmentId(b"G" * 16)
R = b"r" * 16

VECTORS: dict[str, tuple[Any, str]] = {
    "entry": (DirectoryEntry(1, InodeNumber(4097), stat.S_IFREG), "9401cd1001cd800000"),
    "entry tie": (DirectoryEntry(1, InodeNumber(2), stat.S_IFDIR, 1), "940102cd400001"),
    "times": (DirectoryTimes(1, 1700000000123456789, 1700000000123456790), "9301cf17979cfe3d85cd15cf17979cfe3d85cd16"),
    "root": (
        Inode(1, 0o40755, 0, 0, 1, 2, 3, parent=ROOT_INODE),
        "dc001d01cd41ed0000010203010000c4008001a001c0c0c0c0c0c2c0c000c0c0c2ff00",
    ),
    "inode full": (
        Inode(
            1,
            0o100644,
            1000,
            1001,
            10,
            20,
            30,
            2,
            5,
            0,
            b"",
            {b"user.a": b"\0\xff"},
            None,
            "protected",
            7,
            Writer(S, 9),
            Vid(b"c" * 16),
            Vid(b"p" * 16),
            Vid(b"q" * 16),
            Vid(b"b" * 16),
            True,
            Vid(b"o" * 16),
            Vid(b"l" * 16),
            9,
            Vid(b"x" * 16),
            Vid(b"y" * 16),
            True,
            24,
            11,
        ),
        "dc001d01cd81a4cd03e8cd03e90a141e020500c40081c406757365722e61c40200ffc0a970726f7465637465640792c41053"
        "53535353535353535353535353535309c41063636363636363636363636363636363c4107070707070707070707070707070"
        "7070c41071717171717171717171717171717171c41062626262626262626262626262626262c3c4106f6f6f6f6f6f6f6f6f"
        "6f6f6f6f6f6f6fc4106c6c6c6c6c6c6c6c6c6c6c6c6c6c6c6c09c41078787878787878787878787878787878c4107979797979"
        "7979797979797979797979c3180b",
    ),
    "symlink": (
        Inode(1, 0o120777, 0, 0, 1, 1, 1, target=b"../x", size=4),
        "dc001d01cda1ff0000010101010400c4042e2e2f7880c0a001c0c0c0c0c0c2c0c000c0c0c2ff00",
    ),
    "open": (
        Version(1, InodeNumber(2), VersionState.OPEN, S, G),
        "dc0011010201c41053535353535353535353535353535353c41047474747474747474747474747474747c200c4000100000090000000c2",
    ),
    "protected": (
        Version(
            1,
            InodeNumber(2),
            VersionState.PROTECTED,
            S,
            G,
            True,
            1 << 40,
            R,
            ShardLayout.STRIPED,
            1,
            1,
            1 << 20,
            [Shard(S, b"0" * 16), Shard(T, b"1" * 16)],
        ),
        "dc0011010203c41053535353535353535353535353535353c41047474747474747474747474747474747c3cf000001000000"
        "0000c41072727272727272727272727272727272010101ce001000009292c41053535353535353535353535353535353c410"
        "3030303030303030303030303030303092c41054545454545454545454545454545454c41031313131313131313131313131"
        "313131000000c2",
    ),
    "damaged": (
        Version(1, InodeNumber(2), VersionState.LOCAL, S, G, True, 3, R, cell_size=3, damaged=True),
        "dc0011010202c41053535353535353535353535353535353c41047474747474747474747474747474747c303c41072727272"
        "727272727272727272727272010000039000000"
        "0c3",
    ),
    "dead": (
        Version(
            1,
            InodeNumber(2),
            VersionState.DEAD,
            S,
            NO_SEGMENT,
            True,
            3,
            R,
            ShardLayout.COPIES,
            1,
            0,
            4096,
            [Shard(S, R)],
            0,
            0,
            5,
        ),
        "dc0011010204c41053535353535353535353535353535353c41000000000000000000000000000000000c303c41072727272"
        "727272727272727272727272020100cd10009192c41053535353535353535353535353535353c41072727272727272727272"
        "727272727272000005c2",
    ),
    "store": (
        Store(1, NodeId("node-1"), StoreState.IN, "127.0.0.1:7000", "/nvme/store", {"rack": "r1"}, b"cert"),
        "9901a66e6f64652d3101ae3132372e302e302e313a37303030ab2f6e766d652f73746f726581a47261636ba27231c40463657274c2c2",
    ),
    "session": (Session(1, S, 42), "9301c410535353535353535353535353535353532a"),
    "carried out": (CarriedOut(1, 42), "92012a"),
    "settings": (Settings(1, b"C" * 16, 4, 2, 1 << 20), "9601c410434343434343434343434343434343430402ce00100000a46e6f6465"),
    "recovered": (Recovered(1, [Recovery(b"R" * 16, 7, 1000)]), "92019193c4105252525252525252525252525252525207cd03e8"),
}
KINDS: tuple[Any, ...] = (DirectoryEntry, DirectoryTimes, Inode, Version, Store, Session, CarriedOut, Settings, Recovered)


@pytest.mark.parametrize("name", VECTORS)
def test_golden_vectors(name: str) -> None:
    record, digits = VECTORS[name]
    assert pack(record).hex() == digits
    assert unpack(type(record), bytes.fromhex(digits)) == record


def test_a_record_without_the_newest_fields_has_their_defaults() -> None:
    version, digits = VECTORS["protected"]
    older = bytes.fromhex("dc0010" + digits[6:-2])  # as it was written before there was `damaged`
    assert unpack(Version, older) == version


def test_a_store_without_the_newest_fields_has_their_defaults() -> None:
    record, digits = VECTORS["store"]
    assert unpack(Store, bytes.fromhex("97" + digits[2:-4])) == record
    assert unpack(Store, bytes.fromhex("98" + digits[2:-2])) == record
    assert not record.settled
    assert not record.was_draining


def test_settings_without_a_failure_domain_are_of_nodes() -> None:
    older = bytes.fromhex("9501c410434343434343434343434343434343430402ce00100000")
    assert unpack(Settings, older) == VECTORS["settings"][0]
    assert unpack(Settings, older).failure_domain == "node"


def test_golden_keys() -> None:
    vid = Vid(bytes(range(16)))
    assert fmt.entry_key(InodeNumber(0x1234), b"a\xffb") == b"d/0000000000001234/a\xffb"
    assert fmt.entry_prefix(ROOT_INODE) == b"d/0000000000000001/"
    assert fmt.subdirectory_key(ROOT_INODE, InodeNumber(4097)) == b"n/0000000000000001/0000000000001001"
    assert fmt.subdirectory_prefix(ROOT_INODE) == b"n/0000000000000001/"
    assert fmt.times_key(ROOT_INODE) == b"t/0000000000000001"
    assert fmt.inode_key(InodeNumber(2**63)) == b"i/8000000000000000"
    assert fmt.version_key(vid) == b"v/000102030405060708090a0b0c0d0e0f"
    assert fmt.store_key(S) == b"s/53535353535353535353535353535353"
    assert fmt.session_key(NodeId("node-1")) == b"l/node-1"
    assert fmt.answer_key(NodeId("node-1"), 10) == b"o/node-1/000000000000000a"
    assert fmt.answer_prefix(NodeId("node-1")) == b"o/node-1/"
    assert [fmt.FORMAT_KEY, fmt.INODE_BLOCK_KEY, fmt.DIRECTORY_MOVE_KEY, fmt.SETTINGS_KEY] == [
        b"c/format",
        b"c/ino",
        b"c/dirmove",
        b"c/settings",
    ]


def test_keys_sort_as_numbers() -> None:
    numbers = [InodeNumber(number) for number in (1, 9, 10, 255, 256, 4096, 2**32, 2**63)]
    assert sorted(fmt.inode_key(number) for number in numbers) == [fmt.inode_key(number) for number in numbers]


@given(st.binary(min_size=16, max_size=16), st.integers(1, 2**63), st.binary(min_size=1, max_size=255))
def test_keys_can_be_read_back(identifier: bytes, directory: int, name: bytes) -> None:
    assert fmt.vid_of_key(fmt.version_key(Vid(identifier))) == identifier
    assert fmt.store_of_key(fmt.store_key(StoreId(identifier))) == identifier
    assert fmt.entry_of_key(fmt.entry_key(InodeNumber(directory), name)) == (directory, name)
    assert fmt.unique_of_key(fmt.answer_key(NodeId("node-1"), directory)) == directory


@given(st.binary(max_size=60))
def test_other_keys_are_damaged(tail: bytes) -> None:
    readers: tuple[tuple[bytes, Any, Any], ...] = (
        (b"v/", fmt.vid_of_key, fmt.version_key),
        (b"s/", fmt.store_of_key, fmt.store_key),
        (b"d/", fmt.entry_of_key, lambda found: fmt.entry_key(*found)),
        (b"o/node-1/", fmt.unique_of_key, lambda found: fmt.answer_key(NodeId("node-1"), found)),
    )
    for prefix, read, write in readers:
        try:
            found = read(prefix + tail)
        except DamagedData:
            continue
        assert write(found) == prefix + tail


@pytest.mark.parametrize(
    "key",
    [b"d/0000000000000001", b"d/0000000000000001/", b"d/000000000000000G/a", b"d/ 000000000000001/a", b"d/000000000000000A/a"],
)
def test_bad_entry_keys(key: bytes) -> None:
    with pytest.raises(DamagedData):
        fmt.entry_of_key(key)


@pytest.mark.parametrize("name", VECTORS)
def test_a_cut_record_is_damaged(name: str) -> None:
    """Cut at every byte: never another record of the same length, only `DamagedData`."""
    record, digits = VECTORS[name]
    whole = bytes.fromhex(digits)
    for cut in range(len(whole)):
        with pytest.raises(DamagedData):
            unpack(type(record), whole[:cut])
    with pytest.raises(DamagedData):
        unpack(type(record), whole + b"\xc0")


@pytest.mark.parametrize("name", VECTORS)
def test_a_flipped_bit_is_damage_or_a_valid_record(name: str) -> None:
    """Whether the bytes are those written is the engine's checksum; here nothing else than `DamagedData` may come out."""
    record, digits = VECTORS[name]
    whole = bytes.fromhex(digits)
    for position in range(len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[position] ^= 1 << bit
            _damaged_or_valid(type(record), bytes(changed))


@given(st.sampled_from(KINDS), st.binary(max_size=200))
def test_any_bytes_are_damage_or_a_valid_record(kind: Any, value: bytes) -> None:
    _damaged_or_valid(kind, value)


_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.binary(max_size=20), st.text(max_size=9)
    ),
    lambda children: st.one_of(st.lists(children, max_size=24), st.dictionaries(st.binary(max_size=3), children, max_size=3)),
    max_leaves=30,
)


@pytest.mark.slow
@settings(deadline=None)
@given(st.sampled_from(KINDS), st.lists(_values, max_size=30))
def test_any_array_is_damage_or_a_valid_record(kind: Any, values: list[object]) -> None:
    _damaged_or_valid(kind, msgspec.msgpack.encode([1, *values]))


def test_deep_nesting_is_damage() -> None:
    for kind in KINDS:
        with pytest.raises(DamagedData):
            unpack(kind, b"\x91" * 100_000)
        _damaged_or_valid(kind, b"\xdc\x00\x40\x01" + b"\x91" * 100_000)


def _damaged_or_valid(kind: Any, value: bytes) -> None:
    try:
        record = unpack(kind, value)
    except DamagedData:
        return
    assert unpack(kind, pack(record)) == record or record != record


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", [0, 2, 255, -1])
def test_other_format_versions_are_refused(kind: Any, version: int) -> None:
    record = next(record for record, _ in VECTORS.values() if type(record) is kind)
    with pytest.raises(DamagedData, match="format"):
        unpack(kind, pack(msgspec.structs.replace(record, format=version)))


def test_fields_appended_by_a_later_program_are_passed_over() -> None:
    record = VECTORS["session"][0]
    values = msgspec.msgpack.decode(pack(record))
    assert unpack(Session, msgspec.msgpack.encode([*values, "new", {"field": 1}])) == record


def test_an_inode_written_before_fields_were_appended_still_reads() -> None:
    old = msgspec.msgpack.encode([1, stat.S_IFREG | 0o644, 0, 0, 1, 2, 3])
    assert unpack(Inode, old) == Inode(1, stat.S_IFREG | 0o644, 0, 0, 1, 2, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"home": b"short"},
        {"segment": b""},
        {"shards": [Shard(S, R)]},
        {"shards": [Shard(S, R), Shard(T, b"short")]},
        {"shards": [Shard(S, R), Shard(StoreId(b""), R)]},
        {"data_shards": 0},
        {"root": b""},
        {"size": -1},
        {"ino": 0},
        {"state": 0},
        {"state": 5},
        {"layout": 0},
    ],
)
def test_versions_that_make_no_sense(changes: dict[str, Any]) -> None:
    with pytest.raises(DamagedData):
        unpack(Version, pack(msgspec.structs.replace(VECTORS["protected"][0], **changes)))


@pytest.mark.parametrize("role", ["cur", "prot", "prev", "open", "prev_local", "rolled_back_from"])
def test_inodes_with_impossible_vids(role: str) -> None:
    with pytest.raises(DamagedData):
        unpack(Inode, pack(msgspec.structs.replace(VECTORS["root"][0], **{role: b"x" * 15})))


def test_numbers() -> None:
    assert fmt.pack_number(0) == b"0"
    assert fmt.unpack_number(b"4098") == 4098
    for value in (b"", b"-1", b"1.0", b" 1", b"1" * 19, "\N{ARABIC-INDIC DIGIT ONE}".encode(), b"1\n"):
        with pytest.raises(DamagedData):
            fmt.unpack_number(value)


def test_the_catalogs_format() -> None:
    fmt.check_format(b"1")
    with pytest.raises(StoreError, match="upgrade"):
        fmt.check_format(b"2")
    with pytest.raises(DamagedData):
        fmt.check_format(b"0")
