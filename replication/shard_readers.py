"""Shards that are read again and again stay open: their footers would cost more to check than a cell to read."""

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from ckptfs.cache.ids import Vid
from ckptfs.replication.errors import ShardNotFound
from ckptfs.replication.shard_reader import ShardReader
from ckptfs.replication.shard_store import ShardStore
from ckptfs.replication.unopened import unopened

OPEN_COUNT_MAX = 64
FOOTER_BYTES_MAX = 8 << 20


@dataclass(slots=True)
class _Open:
    reader: ShardReader
    identity: tuple[int, int]
    users: int = 0
    dropped: bool = False


class ShardReaders:
    """Open readers of one store's shards, least recently used ones closed first. Blocking, safe to use from several
    threads. A shard that was replaced or removed meanwhile is not served from its old file."""

    def __init__(self, store: ShardStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[Vid, int], _Open] = OrderedDict()

    @contextlib.contextmanager
    def borrow(self, vid: Vid, index: int) -> Iterator[ShardReader]:
        """The shard's reader for the `with` block. Raises as `ShardReader` does."""
        held = self._take(vid, index)
        try:
            yield held.reader
        finally:
            with self._lock:
                held.users -= 1
                if held.dropped and not held.users:
                    held.reader.close()

    def close(self) -> None:
        """Close what nobody uses; the rest when it is given back."""
        with self._lock:
            for key in list(self._open):
                self._drop(key)

    def _take(self, vid: Vid, index: int) -> _Open:
        key = (vid, index)
        try:
            status = os.stat(self._store.path_of(vid, index), follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            with self._lock:
                self._drop(key)
            raise ShardNotFound(f"no shard {vid.hex()}.{index} in this store") from None
        except OSError as error:
            raise unopened(error, f"the shard {vid.hex()}.{index}") from None
        identity = (status.st_ino, status.st_size)
        with self._lock:
            held = self._open.get(key)
            if held is not None and held.identity == identity:
                self._open.move_to_end(key)
                held.users += 1
                return held
            self._drop(key)
        held = _Open(self._store.open(vid, index), identity, users=1)
        with self._lock:
            self._drop(key)
            self._open[key] = held
            while len(self._open) > OPEN_COUNT_MAX or self._footer_bytes() > FOOTER_BYTES_MAX:
                self._drop(next(iter(self._open)))
        return held

    def _footer_bytes(self) -> int:
        return sum(len(held.reader.footer_bytes) for held in self._open.values())

    def _drop(self, key: tuple[Vid, int]) -> None:
        held = self._open.pop(key, None)
        if held is not None:
            held.dropped = True
            if not held.users:
                held.reader.close()
