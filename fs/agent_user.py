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
from ckptfs.fs.privileges import CAP_CHOWN, CAP_DAC_READ_SEARCH, CAP_LEASE, CAP_SETGID, CAP_SETPCAP, CAP_SETUID, NAMES, permitted

DEFAULT_USER = "ckptfs"
ROOT = "root"
KEPT = (CAP_DAC_READ_SEARCH, CAP_LEASE)
"""What the agent keeps of root: it reads segments, which the mount process writes as root, and asks whether one has a writer."""

_NEEDED = (CAP_CHOWN, CAP_SETGID, CAP_SETUID, CAP_SETPCAP, *KEPT)
_NUMBERS = ((1_879_048_192, 1 << 27), (61_184, 4_336))
"""First number and how many: a range nobody gives out (https://systemd.io/UIDS-GIDS), and for containers with 65,536 users the
one of services without a user of their own."""


class AgentUser(NamedTuple):
    """`why`: what an operator should know about the choice, or "". `gives_up_root`: the agent begins as root and becomes it."""

    name: str
    uid: int
    gid: int
    why: str = ""
    gives_up_root: bool = False


def agent_user(wanted: str, cluster: bytes) -> AgentUser:
    """The user, for `node.agent_user` and the cluster's id. Raises `ConfigurationError`."""
    uid, gid = os.geteuid(), os.getegid()
    if uid != 0:
        _require(
            wanted == "" or _uid_of(wanted) == uid,
            f"node.agent_user: the user {uid} runs this node, and its agent can't be {wanted}: leave the key out, or have root"
            " run it",
        )
        return AgentUser(_name_of(uid), uid, gid)
    if wanted == ROOT:
        return AgentUser(ROOT, 0, 0, "node.agent_user says so: whoever takes over the agent is root on this machine")
    named = _passwd(wanted or DEFAULT_USER)
    _require(not wanted or named is not None, _NO_SUCH_USER.format(wanted))
    if lacking := [NAMES[capability] for capability in _NEEDED if capability not in permitted()]:
        return AgentUser(
            ROOT,
            0,
            0,
            f"root lacks {', '.join(lacking)} here (a container's?), so the agent can't become another user: allow it that",
        )
    if named is not None:
        return AgentUser(named.pw_name, named.pw_uid, named.pw_gid, gives_up_root=named.pw_uid != 0)
    number = _number_of(cluster)
    _require(number is not None, "node.agent_user: name a user: this machine, or container, has no number free for one")
    assert number is not None
    why = f"this machine has no user {DEFAULT_USER}: docs/operations.md says how to make one"
    return AgentUser(f"the number {number}", number, number, why, gives_up_root=True)


def check_agent_user(wanted: str, listen: str) -> None:
    """Whether the agent can be had as that user, before anything is mounted. Raises `ConfigurationError`."""
    user = agent_user(wanted, b"")
    port = int(listen.rpartition(":")[2])
    _require(
        not user.gives_up_root or port == 0 or port >= _first_free_port(),
        f"node.listen: port {port} is root's, and the agent runs as {user.name}: take one from {_first_free_port()} on,"
        ' or have it run as root (node.agent_user = "root")',
    )


_NO_SUCH_USER = "node.agent_user: this machine has no user {}: make it (docs/operations.md says how), or leave the key out"


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


def _first_free_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    except (OSError, ValueError):
        return 1024


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
