"""POSIX access control lists: what they do to modes, and modes to them. Pure.

The kernel checks accesses against them, and that what it is given is a valid list; it leaves to the file system what creating and
chmod(2) mean. Lists are kept as the extended attributes they are set by, in the format of `linux/posix_acl_xattr.h`,
little-endian: u32 version 2, then for each entry u16 tag, u16 permissions (rwx), u32 user or group. Entries are ordered by tag.
"""

import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ckptfs.cache.errors import DamagedData

ACCESS = b"system.posix_acl_access"
DEFAULT = b"system.posix_acl_default"
"""A directory's: what its new files and directories begin with."""
NAMES = (ACCESS, DEFAULT)

USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20

_VERSION = 2
_HEADER = struct.Struct("<I")
_ENTRY = struct.Struct("<HHI")


class AclEntry(NamedTuple):
    """One entry. `qualifier` is the user or group of `USER` and `GROUP`."""

    tag: int
    permissions: int
    qualifier: int


Acl = list[AclEntry]


def unpack_acl(value: bytes) -> Acl:
    """The entries. Raises `DamagedData` for what is no list."""
    if len(value) < _HEADER.size or _HEADER.unpack_from(value)[0] != _VERSION or (len(value) - _HEADER.size) % _ENTRY.size:
        raise DamagedData(f"an access control list of {len(value)} bytes makes no sense")
    return [AclEntry._make(fields) for fields in _ENTRY.iter_unpack(value[_HEADER.size :])]


def pack_acl(acl: Acl) -> bytes:
    return _HEADER.pack(_VERSION) + b"".join(_ENTRY.pack(*entry) for entry in acl)


def is_mode_alone(acl: Acl) -> bool:
    """Whether permission bits say all that the list says."""
    return all(entry.tag in (USER_OBJ, GROUP_OBJ, OTHER) for entry in acl)


def mode_of(acl: Acl) -> int:
    """The nine permission bits that stat shows for the list: those of the group are the mask's where there is one."""
    shifts = {USER_OBJ: 6, _group_tag(acl): 3, OTHER: 0}
    return sum(entry.permissions << shifts[entry.tag] for entry in acl if entry.tag in shifts)


def with_mode(acl: Acl, mode: int) -> Acl:
    """The list after chmod(2)."""
    return _each_class(acl, lambda _, bits: bits, mode)


def at_creation(default: bytes | None, mode: int, umask: int, *, is_directory: bool) -> tuple[int, dict[bytes, bytes]]:
    """Mode and attributes of what is made with this mode in a directory with this default list: where there is one, it takes the
    place of the umask. Raises `DamagedData`."""
    if default is None:
        return mode & ~umask, {}
    acl = _each_class(unpack_acl(default), lambda granted, asked: granted & asked, mode)
    attributes = {} if is_mode_alone(acl) else {ACCESS: pack_acl(acl)}
    if is_directory:
        attributes[DEFAULT] = default
    return mode & ~0o777 | mode_of(acl), attributes


def after_chmod(attributes: Mapping[bytes, bytes], mode: int) -> dict[bytes, bytes]:
    """The attributes of what has got this mode. Raises `DamagedData`."""
    changed = dict(attributes)
    if ACCESS in changed:
        changed[ACCESS] = pack_acl(with_mode(unpack_acl(changed[ACCESS]), mode))
    return changed


def _group_tag(acl: Acl) -> int:
    """Where the group's bits of the mode stand."""
    return MASK if any(entry.tag == MASK for entry in acl) else GROUP_OBJ


def _each_class(acl: Acl, combine: Callable[[int, int], int], mode: int) -> Acl:
    """The list with the permissions that stand for owner, group and others combined with those of the mode."""
    shifts = {USER_OBJ: 6, _group_tag(acl): 3, OTHER: 0}
    return [
        entry._replace(permissions=combine(entry.permissions, mode >> shifts[entry.tag] & 7)) if entry.tag in shifts else entry
        for entry in acl
    ]
