"""What a recovery found and did, for people and for JSON. Pure."""

import msgspec


class Trouble(msgspec.Struct, frozen=True):
    """A file, by its path, and what is wrong with it."""

    path: str
    reason: str


class RecoveryReport(msgspec.Struct):
    """What was found, and what became of it. Paths have no leading slash where only a shard's footer knows them. `closed` are
    files that were closed after the state, and never protected: their homes seal and protect them when they start."""

    cluster: str
    state_source: str
    state_revision: int
    stores: list[str]
    stores_not_given: list[str]
    files: int = 0
    bytes: int = 0
    became_protected: int = 0
    holders_changed: int = 0
    recovered: list[str] = []
    recovered_bytes: int = 0
    closed: list[str] = []
    deleted_before: int = 0
    segments_unproved: int = 0
    damaged_shards: int = 0
    lost: list[Trouble] = []
    waiting: list[Trouble] = []
    trouble: list[str] = []


def shown(path: bytes) -> str:
    """A path for people and JSON."""
    return path.decode(errors="backslashreplace")
