"""Access control lists and modes: as the kernel's own functions for file systems have it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.cache.errors import DamagedData
from ckptfs.cache.posix_acl import (
    ACCESS,
    DEFAULT,
    GROUP,
    GROUP_OBJ,
    MASK,
    OTHER,
    USER,
    USER_OBJ,
    Acl,
    AclEntry,
    after_chmod,
    at_creation,
    is_mode_alone,
    mode_of,
    pack_acl,
    unpack_acl,
    with_mode,
)

NOBODY = 0xFFFFFFFF
PLAIN = [AclEntry(USER_OBJ, 7, NOBODY), AclEntry(GROUP_OBJ, 5, NOBODY), AclEntry(OTHER, 1, NOBODY)]
NAMED = [
    AclEntry(USER_OBJ, 7, NOBODY),
    AclEntry(USER, 6, 1000),
    AclEntry(GROUP_OBJ, 5, NOBODY),
    AclEntry(GROUP, 4, 100),
    AclEntry(MASK, 6, NOBODY),
    AclEntry(OTHER, 1, NOBODY),
]
PACKED = bytes.fromhex(
    "02000000 01000700ffffffff 02000600e8030000 04000500ffffffff 08000400 64000000 10000600ffffffff 20000100ffffffff"
)


def test_the_attribute_s_format() -> None:
    assert pack_acl(NAMED) == PACKED
    assert unpack_acl(PACKED) == NAMED
    for damaged in (b"", PACKED[:3], PACKED[:-1], b"\x01" + PACKED[1:]):
        with pytest.raises(DamagedData):
            unpack_acl(damaged)


def test_the_mode_shows_the_mask_in_place_of_the_group() -> None:
    assert (oct(mode_of(PLAIN)), is_mode_alone(PLAIN)) == ("0o751", True)
    assert (oct(mode_of(NAMED)), is_mode_alone(NAMED)) == ("0o761", False)


def test_chmod_changes_the_mask_and_no_named_entry() -> None:
    changed = {entry.tag: entry.permissions for entry in with_mode(NAMED, 0o640)}
    assert changed == {USER_OBJ: 6, USER: 6, GROUP_OBJ: 5, GROUP: 4, MASK: 4, OTHER: 0}
    attributes = {ACCESS: PACKED, b"user.a": b"1"}
    assert after_chmod(attributes, 0o640) == {ACCESS: pack_acl(with_mode(NAMED, 0o640)), b"user.a": b"1"}
    assert after_chmod({b"user.a": b"1"}, 0o640) == {b"user.a": b"1"}


def test_without_a_default_list_the_umask_holds() -> None:
    assert at_creation(None, 0o102666, 0o027, is_directory=False) == (0o102640, {})


def test_a_default_list_takes_the_umask_s_place() -> None:
    mode, attributes = at_creation(PACKED, 0o100640, 0o777, is_directory=False)
    assert oct(mode) == "0o100640"
    granted = {entry.tag: entry.permissions for entry in unpack_acl(attributes.pop(ACCESS))}
    assert granted == {USER_OBJ: 6, USER: 6, GROUP_OBJ: 5, GROUP: 4, MASK: 4, OTHER: 0}
    assert not attributes
    _, attributes = at_creation(PACKED, 0o40755, 0o022, is_directory=True)
    assert attributes[DEFAULT] == PACKED
    assert at_creation(pack_acl(PLAIN), 0o100666, 0, is_directory=False) == (0o100640, {})


@given(st.lists(st.integers(0, 7), min_size=6, max_size=6), st.integers(0, 0o777))
def test_what_chmod_sets_is_what_is_shown(permissions: list[int], mode: int) -> None:
    acl: Acl = [entry._replace(permissions=bits) for entry, bits in zip(NAMED, permissions, strict=True)]
    assert mode_of(with_mode(acl, mode)) == mode
    created, attributes = at_creation(pack_acl(acl), mode, 0, is_directory=False)
    assert created == mode & mode_of(acl) == mode_of(unpack_acl(attributes[ACCESS]))
