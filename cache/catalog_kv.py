"""The key-value interface every catalog engine offers. File-system meaning is written above it, once.

An engine is linearizable: a transaction that returned is seen by every later read, on every node (with a replica: after
`catch_up`, and one's own at once). Revisions are positive
integers that grow with each successful transaction that changes something (and may with one whose operations change nothing).
"""

from collections.abc import AsyncGenerator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:
    from ckptfs.cache.session_fence import SessionFence


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One key as it stands: `create_revision` is when it last came into being, `mod_revision` when it last changed.

    A struct the garbage collector doesn't follow: it would walk a long range's entries again and again while they are made.
    """

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int


class Unchanged(NamedTuple):
    """Holds if the key's `mod_revision` is this one; revision 0 means that the key is absent."""

    key: bytes
    mod_revision: int


class Present(NamedTuple):
    """Holds if the key exists, whatever its value."""

    key: bytes


class EmptyRange(NamedTuple):
    """Holds if no key begins with the prefix."""

    prefix: bytes


Compare = Unchanged | Present | EmptyRange


class Put(NamedTuple):
    """Set the key to the value. With `bound_to_session` the key goes when the session that wrote it ends."""

    key: bytes
    value: bytes
    bound_to_session: bool = False


class Delete(NamedTuple):
    """Remove the key; nothing happens if it is absent."""

    key: bytes


Operation = Put | Delete


def prefix_end(prefix: bytes) -> bytes:
    """The smallest key greater than every key with this prefix. Keys are ASCII up to names, so 0xff x 300 is past all of them."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b"\xff" * 300


COMPARES_MAX = 120
OPERATIONS_MAX = 120
"""Limits of one transaction: etcd's 128, less what an engine adds; a key may appear once among the operations."""


_key = itemgetter(0)


def check_transaction(compares: Sequence[Compare], operations: Sequence[Operation], session: str | None) -> None:
    """What every engine refuses, before it does anything. Raises `ValueError`."""
    if len(compares) > COMPARES_MAX or len(operations) > OPERATIONS_MAX:
        raise ValueError(f"a transaction of {len(compares)} compares and {len(operations)} operations is too long")
    if len(set(map(_key, operations))) != len(operations):
        raise ValueError("a transaction names one key twice")
    if session is None:
        for operation in operations:
            if isinstance(operation, Put) and operation.bound_to_session:
                raise ValueError("a key can't be bound to a session: this handle was opened without one")


class TransactionResult(NamedTuple):
    """`revision` is the transaction's own when it succeeded, else the newest one the engine has seen."""

    succeeded: bool
    revision: int


class Event(NamedTuple):
    """One change: the value is None where the key was deleted."""

    revision: int
    key: bytes
    value: bytes | None


class KeyValue(Protocol):
    """What the catalog needs from an engine. All methods raise `CatalogUnavailable` when the engine can't be reached."""

    async def get(self, key: bytes) -> Entry | None:
        """The key's entry, or None."""
        ...

    async def catch_up(self) -> None:
        """Return once reads see every transaction that returned, on any node, before this call.

        Only an engine that reads from a replica lags at all, by no more than the way of an event.
        """
        ...

    async def get_many(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """The entry of each key, or None, in their order: at one revision for up to `COMPARES_MAX` of them."""
        ...

    async def range(self, prefix: bytes, *, after: bytes = b"", limit: int | None = None) -> list[Entry]:
        """Entries whose key begins with `prefix` and is greater than `after`, in key order, at most `limit`."""
        ...

    async def count(self, prefix: bytes) -> int:
        """How many keys begin with the prefix."""
        ...

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> TransactionResult:
        """Apply all operations at one revision if all compares hold, else change nothing.

        Raises `ValueError` for more than `COMPARES_MAX` compares, `OPERATIONS_MAX` operations or a key named twice.
        Does not promise that the result survives a power cut: see `make_durable`.
        """
        ...

    def fence_with(self, fence: "SessionFence") -> None:
        """From now on `transact` changes nothing, and raises `SessionEnded`, where the fence's session is not as it was (R11)."""
        ...

    async def make_durable(self) -> None:
        """Return once everything that returned from `transact` before this call survives a power cut."""
        ...

    async def revision(self) -> int:
        """The newest revision, read linearizably."""
        ...

    def is_short_of_room(self) -> bool:
        """Whether the catalog's drive is full and what is kept back for removing names is half used: what can wait is to wait."""
        ...

    def watch(self, after_revision: int) -> AsyncGenerator[list[Event], None]:
        """All changes after the revision, in order, one list per transaction; runs until it is closed.

        Raises `CatalogCompacted` if the engine no longer has them.
        """
        ...

    async def aclose(self) -> None:
        """Release what the engine holds; ends running watches."""
        ...
