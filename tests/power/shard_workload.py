"""Shards and copies of small files that a store takes and removes, in a random order that a seed decides; run under `recorder.c`.

`python shard_workload.py SEED DIRECTORY [CANARY]`. Marks are as in `file_workload.py`; that of an answered put tells the root.
"""

import ctypes
import json
import sys
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import canaries
from ckptfs.cache import checksum
from ckptfs.cache.ids import InodeNumber, NodeId, Vid
from ckptfs.cache.store import StoreDirectory, sync_directory
from ckptfs.replication.agent_db import AgentDatabase
from ckptfs.replication.shard_format import ShardFooter, ShardHeader
from ckptfs.replication.shard_store import ShardStore
from ckptfs.replication.small_copies import SmallCopies, SmallCopy

STEPS = 30
CELL = 3000
SIZES = (1, 2999, 9000, 40_000)

_mark = getattr(ctypes.CDLL(None), "recorder_mark", None)


def content(number: int, size: int) -> bytes:
    return Random(number).randbytes(size)


def vid_of(number: int) -> Vid:
    return Vid(Random(-number).randbytes(16))


def shard_of(number: int, size: int) -> tuple[ShardHeader, list[bytes], ShardFooter]:
    """Shard 1 of 2+1: of a content of so many bytes, of which only its own cells are made."""
    vid = vid_of(number)
    header = ShardHeader(vid, 1, 2, 1, CELL, size)
    cells = [content(number * 1000 + stripe, header.cell_length(stripe)) for stripe in range(header.cell_count)]
    hashes = b"".join(map(checksum.cell_hash, cells))
    of_content = b"".join(checksum.cell_hash(b"%d" % cell) for cell in range(header.content_cell_count))
    return header, cells, ShardFooter(header, hashes, of_content, InodeNumber(number), b"path", 7)


class Stores:
    """A store's shards and copies, as its agent opens them."""

    def __init__(self, directory: Path) -> None:
        self.store = StoreDirectory.create_or_open(directory / "a", NodeId("a"))
        for path in (self.store.path, self.store.shards):  # as `check_store` does
            sync_directory(path)
        self.index = AgentDatabase(self.store.agent_db)
        self.shards = ShardStore(self.store.shards, self.index, free_bytes=lambda: 1 << 40)
        self.copies = SmallCopies(self.store.small_copies_db, expected=False)
        self.recovered = self.shards.recover()

    def close(self) -> None:
        self.copies.close()
        self.index.close()


class Workload:
    """Random puts and removals."""

    def __init__(self, seed: int, directory: Path) -> None:
        self._chance = Random(seed)
        self._directory = directory
        self._number = seed * 10_000
        self._stores = Stores(directory)
        self._held: list[int] = []
        self._copied: list[int] = []
        self._begun: list[tuple[int, int]] = []

    def run(self) -> None:
        for _ in range(STEPS):
            choice = self._chance.choice(["put"] * 6 + ["resume"] * 3 + ["copies"] * 4 + ["delete", "delete_copies", "restart"])
            getattr(self, f"_{choice}")()
        self._stores.close()

    def _say(self, what: str, mark: dict[str, Any]) -> None:
        if _mark is not None:
            _mark(f"{what} {json.dumps(mark)}".encode())

    def _put(self) -> None:
        self._number += 1
        self._put_shard(self._number, self._chance.choice(SIZES))

    def _resume(self) -> None:
        if self._begun:
            self._put_shard(*self._begun.pop())

    def _put_shard(self, number: int, size: int) -> None:
        """Sometimes only a part of it, to be gone on with."""
        mark = {"do": "put", "number": number, "size": size}
        header, cells, footer = shard_of(number, size)
        self._say("begun", mark)
        writer = self._stores.shards.begin(header)
        stop = self._chance.randrange(len(cells) + 1) if cells and self._chance.random() < 0.4 else len(cells)
        for stripe in range(writer.resume_stripe, max(stop, writer.resume_stripe)):
            writer.write_cell(stripe, cells[stripe], checksum.cell_hash(cells[stripe]))
        if stop < len(cells) and writer.resume_stripe < len(cells):
            writer.suspend()
            self._begun.append((number, size))
            return
        writer.finish(footer)
        self._held.append(number)
        self._say("answered", mark)

    def _delete(self) -> None:
        if self._held:
            number = self._held.pop(self._chance.randrange(len(self._held)))
            self._say("begun", {"do": "delete", "number": number})
            held = next(row for row in self._stores.shards.list() if (row.vid, row.index) == (vid_of(number), 1))
            self._stores.shards.delete(held.vid, held.index, held.stored_at_ns)

    def _copies(self) -> None:
        numbers = []
        copies = []
        for _ in range(self._chance.randint(1, 4)):
            self._number += 1
            data = content(self._number, self._chance.choice([1, 500, 9000]))
            copies.append(SmallCopy(vid_of(self._number), InodeNumber(self._number), len(data), b"path", 7, data))
            numbers.append(self._number)
        mark = {"do": "copies", "numbers": numbers, "sizes": [copy.size for copy in copies]}
        self._say("begun", mark)
        self._stores.copies.put(copies)
        self._copied += numbers
        self._say("answered", mark)

    def _delete_copies(self) -> None:
        if self._copied:
            number = self._copied.pop(self._chance.randrange(len(self._copied)))
            self._say("begun", {"do": "delete copies", "number": number})
            self._stores.copies.delete(
                [(copy.vid, copy.stored_at_ns) for copy in self._stores.copies.list() if copy.vid == vid_of(number)]
            )

    def _restart(self) -> None:
        with closing(self._stores):
            pass
        self._stores = Stores(self._directory)


def main() -> None:
    if len(sys.argv) > 3:
        canaries.BROKEN[sys.argv[3]]()
    Workload(int(sys.argv[1]), Path(sys.argv[2])).run()


if __name__ == "__main__":
    main()
