"""Whom a node's agent runs as: it talks to the network, so a fault in what it decodes must not give root to anybody.

Where root runs the node: `node.agent_user`, or the user `ckptfs` if there is one, or else a number of the cluster's own that no
user and no service has. One cluster has one number, for its nodes on one machine share the catalog's file. Where an ordinary user
runs the node, that user.
"""

import hashlib
import os
import pwd
from pathlib import Path
from typing import NamedTuple

from ckptfs.fs.config import ConfigurationError
from ckptfs.fs.privileges import (
    CAP_CHOWN,
    CAP_DAC_READ_SEARCH,
    CAP_LEASE,
    CAP_NET_BIND_SERVICE,
    CAP_SETGID,
    CAP_SETPCAP,
    CAP_SETUID,
    NAMES,
    permitted,
)

DEFAULT_USER = "ckptfs"
ROOT = "root"
KEPT = (CAP_DAC_READ_SEARCH, CAP_LEASE)
"""What the agent keeps of root: it reads segments, which the mount process writes as root, and asks whether one has a writer.
Where `node.listen` is a port of root's, CAP_NET_BIND_SERVICE too."""

_TO_BECOME = (CAP_CHOWN, CAP_SETGID, CAP_SETUID, CAP_SETPCAP)
_NUMBERS = ((1_879_048_192, 1 << 27), (61_184, 4_336))
"""First number and how many: a range nobody gives out (https://systemd.io/UIDS-GIDS), and for containers with 65,536 users the
one of services without a user of their own."""


class AgentUser(NamedTuple):
    """`why`: what an operator should know about the choice, or "". `keeps`: the agent begins as root and becomes this user, with
    these capabilities; None: it stays who it is."""

    name: str
    uid: int
    gid: int
    why: str = ""
    keeps: tuple[int, ...] | None = None


def agent_user(wanted: str, cluster: bytes, listen: str) -> AgentUser:
    """The user, for `node.agent_user`, the cluster's id and `node.listen`. Raises `ConfigurationError`.

    Nobody named it, and root can't become another user here, as in some containers: it stays root, as in earlier releases.
    """
    uid, gid = os.geteuid(), os.getegid()
    if uid != 0:
        _require(
            wanted == "" or _uid_of(wanted) == uid,
            f"node.agent_user: the user {uid} runs this node, and its agent can't be {wanted}: leave the key out, or have root"
            " run it",
        )
        return AgentUser(_name_of(uid), uid, gid)
    named = _passwd(wanted or DEFAULT_USER)
    if wanted == ROOT or (named is not None and named.pw_uid == 0):
        return stays_root("node.agent_user says so: whoever takes over the agent is root on this machine")
    keeps = (*KEPT, CAP_NET_BIND_SERVICE) if _is_port_of_root(int(listen.rpartition(":")[2])) else KEPT
    if lacking := [NAMES[capability] for capability in (*_TO_BECOME, *keeps) if capability not in permitted()]:
        _require(not wanted, f"node.agent_user: root lacks {', '.join(lacking)} here, so the agent can't become {wanted}")
        return stays_root(f"root lacks {', '.join(lacking)} here (a container's?), so the agent can't become another user")
    if named is not None:
        if _is_mapped(named.pw_uid, "uid_map") and _is_mapped(named.pw_gid, "gid_map"):
            return AgentUser(named.pw_name, named.pw_uid, named.pw_gid, keeps=keeps)
        _require(not wanted, f"node.agent_user: {wanted} is none of the users that this container has")
    _require(not wanted, f"node.agent_user: this machine has no user {wanted}: make it (docs/operations.md says how)")
    if (number := _number_of(cluster)) is None:
        return stays_root("this container has no number free for another user: name one (node.agent_user)")
    why = f"this machine has no user {DEFAULT_USER}: docs/operations.md says how to make one"
    return AgentUser(f"the number {number}", number, number, why, keeps)


def stays_root(why: str) -> AgentUser:
    return AgentUser(ROOT, 0, 0, why)


def _number_of(cluster: bytes) -> int | None:
    choice = int.from_bytes(hashlib.blake2b(cluster, digest_size=8).digest())
    for first, count in _NUMBERS:
        number = first + choice % count
        if all(_is_mapped(number, which) for which in ("uid_map", "gid_map")):
            return number
    return None


def _is_mapped(number: int, which: str) -> bool:
    """Whether there is such a user or group in this container."""
    lines = [[int(field) for field in line.split()] for line in Path("/proc/self", which).read_text().splitlines()]
    return any(first <= number < first + count for first, _, count in lines)


def _is_port_of_root(port: int) -> bool:
    try:
        first_free = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    except (OSError, ValueError):
        first_free = 1024
    return 0 < port < first_free


def _passwd(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


def _uid_of(name: str) -> int | None:
    found = _passwd(name)
    return None if found is None else found.pw_uid


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"the number {uid}"


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigurationError(message)
