"""Giving up root for good: another user, no groups, and of root's rights only the capabilities that are named.

What is left can't grow again: the capability bounding set has the same few, the inheritable and ambient sets are empty, so that a
program it starts has none, and `no_new_privs` takes set-user-id files their effect.
"""

import ctypes
import os
import struct
from collections.abc import Iterable

# linux/capability.h
CAP_CHOWN = 0
CAP_DAC_READ_SEARCH = 2
CAP_SETGID = 6
CAP_SETUID = 7
CAP_SETPCAP = 8
CAP_NET_BIND_SERVICE = 10
CAP_LEASE = 28
NAMES = {
    CAP_CHOWN: "CAP_CHOWN",
    CAP_DAC_READ_SEARCH: "CAP_DAC_READ_SEARCH",
    CAP_SETGID: "CAP_SETGID",
    CAP_SETUID: "CAP_SETUID",
    CAP_SETPCAP: "CAP_SETPCAP",
    CAP_NET_BIND_SERVICE: "CAP_NET_BIND_SERVICE",
    CAP_LEASE: "CAP_LEASE",
}

_HEADER = struct.pack("=Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
_SETS = struct.Struct("=6I")  # effective, permitted, inheritable: their lower halves, then their upper ones

# linux/prctl.h
_PR_CAPBSET_READ = 23
_PR_CAPBSET_DROP = 24
_PR_SET_SECUREBITS = 28
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4

# linux/securebits.h, each with the bit that locks it
_NO_ROOT = 0b11  # the number 0 brings no rights with it
_NO_SETUID_FIXUP = (
    0b1100  # capabilities stay what they are set to when the user changes, and access(2) goes by them (SQLite asks it)
)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


class RightsKept(Exception):
    """The process could not give up what it had; it must end."""


def permitted() -> frozenset[int]:
    """The capabilities this process may use."""
    sets = ctypes.create_string_buffer(_SETS.size)
    _checked(_libc.capget(_HEADER, sets), "capget")
    _, low, _, _, high, _ = _SETS.unpack(sets.raw)
    both = low | high << 32
    return frozenset(capability for capability in range(64) if both >> capability & 1)


def give_up_root(uid: int, gid: int, keep: Iterable[int]) -> None:
    """Become that user in that group and no other, with these capabilities and no other, for good.

    For a process with one thread that has them, and CAP_SETUID, CAP_SETGID and CAP_SETPCAP. A signal for the death of its parent
    is forgotten, and its files in /proc are root's from here on. Raises `RightsKept`.
    """
    kept = frozenset(keep)
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        raise RightsKept(f"{threads} threads run already, and each has rights of its own")
    mask = sum(1 << capability for capability in kept)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    try:
        for capability in range(64):
            if capability not in kept and _libc.prctl(_PR_CAPBSET_READ, capability, 0, 0, 0) == 1:
                _checked(_libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0), "PR_CAPBSET_DROP")
        _checked(_libc.prctl(_PR_SET_SECUREBITS, _NO_ROOT | _NO_SETUID_FIXUP, 0, 0, 0), "PR_SET_SECUREBITS")
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        _checked(_libc.capset(_HEADER, _SETS.pack(low, low, 0, high, high, 0)), "capset")
        _checked(_libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "PR_CAP_AMBIENT_CLEAR_ALL")
        _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    except OSError as error:
        raise RightsKept(f"root could not be given up: {error}") from None
    if (os.getresuid(), os.getresgid(), os.getgroups(), permitted()) != ((uid,) * 3, (gid,) * 3, [], kept):
        raise RightsKept("root was given up, and something of it is left")


def _checked(result: int, call: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
