"""What can go wrong in this room. A class says who must act; the message says what happened, what is safe, what to do."""

import enum


class ReplicationError(Exception):
    """Base of this room's errors."""


class CodecUnavailable(ReplicationError):
    """The erasure-code engine asked for can't be loaded on this machine. The operator installs it or chooses another."""


class NotEnoughDomains(ReplicationError):
    """Too few live failure domains with free space for the shards. Nothing was placed; it may be asked again later."""


class ContentTooLarge(ReplicationError):
    """The content has more cells than a shard file can name, so it stays on its home only. Its owner writes smaller files."""


class PeerUnreachable(ReplicationError):
    """No answer from a peer: refused, reset, closed in the middle, or silent beyond the deadline. Worth another try."""


class PeerNotTrusted(PeerUnreachable):
    """Who is there can't prove to be who they should be, or doesn't believe this node. The operator issues certificates."""


class CertificateTrouble(ReplicationError):
    """Certificates can't be made, or files of them can't be used. The operator must act."""


class RefusalReason(enum.IntEnum):
    """Why a peer said no, as it stands on the wire. Numbers are never reused; 0 is never valid."""

    FULL = 1
    """The peer has no space for this; another holder is needed."""
    NOT_FOUND = 2
    """The peer holds no such shard, copy or segment."""
    VERSION = 3
    """No protocol version in common: one side has to be upgraded."""
    BUSY = 4
    """The peer is at one of its limits; the same request may succeed a little later."""
    DAMAGED = 5
    """What the peer holds fails its own checksums."""
    MISMATCH = 6
    """What arrived isn't what the request said: nothing of it was kept; send it again from the start."""
    CONFLICT = 7
    """The peer already holds other bytes under this name. One vid has one content, so somebody is wrong: never retried."""
    FAILED = 8
    """The peer's drive failed; it takes nothing more until its operator acted."""
    WRONG_PEER = 9
    """Another store, or another cluster, answers at this address."""
    INVALID = 10
    """The request makes no sense to the peer: a bug in one of the two programs."""


class PeerRefused(ReplicationError):
    """A peer answered no. `reason` says who must act; `retryable` whether the same request to the same peer may succeed."""

    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(f"{reason.name.lower().replace('_', ' ')}: {message}")
        self.reason = reason
        self.message = message

    @property
    def retryable(self) -> bool:
        return self.reason in (RefusalReason.BUSY, RefusalReason.MISMATCH)


class ProtocolViolation(ReplicationError):
    """Bytes from a peer are not this protocol, or come out of turn. The connection is dropped and counted."""


class ShardDamaged(ReplicationError):
    """A shard file (or what a peer sent of one) fails its checksums or contradicts itself. Nothing of it was used;
    the cells in question are decoded from other shards."""


class ShardNotFound(ReplicationError):
    """This store holds no such shard or copy."""


class ShardConflict(ReplicationError):
    """A complete shard with another root is stored under this vid and index. Nothing was overwritten."""


class WriterRevoked(ReplicationError):
    """A newer put of the same shard took this one's place; the newer one goes on from what was written."""


class StoreFull(ReplicationError):
    """No space for this in the store without eating the reserve. Nothing was kept; another holder is needed."""


class StoreFailed(ReplicationError):
    """The store's drive failed to write or sync, and nothing more is acknowledged until the operator acted; or something in the
    store stands in the way of this shard, which the message names."""


class NotEnoughShards(ReplicationError):
    """Fewer than k shards of a stripe can be read now. The bytes may come back when more holders do."""


class AddressRefused(ReplicationError):
    """An address this node must not use, or that is none. The operator changes the configuration."""
