"""What stores hold of each version, put together from their inventories: is it enough to give the content? Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ckptfs.cache.catalog_format import NO_STORE, UNKNOWN_ROOT, Shard, ShardLayout, Version
from ckptfs.cache.ids import InodeNumber, StoreId, Vid
from ckptfs.replication.inventory import FoundCopy, FoundShard, Inventory

NO_INODE = InodeNumber(0)


@dataclass
class FoundContent:
    """Shards, or copies, of one version that belong together: one code, one content root. `holders` has the root and the holder
    of each shard by its index; of copies all have the same root, and indices are those in which they were found. One that was
    moved may have two holders: `everywhere` has both.

    The other fields are hints of the newest of them."""

    vid: Vid
    layout: ShardLayout
    data_shards: int
    parity_shards: int
    cell_size: int
    size: int
    root: bytes
    holders: dict[int, Shard] = field(default_factory=dict)
    everywhere: set[tuple[int, Shard]] = field(default_factory=set)
    ino: InodeNumber = NO_INODE
    path_hint: bytes = b""
    revision: int = -1
    stored_at_ns: int = 0

    @property
    def cell_count(self) -> int:
        return -(-self.size // self.cell_size)

    @property
    def needed(self) -> int:
        """So many shards give the content: those without a cell of a short content give nothing, and aren't needed."""
        return min(self.data_shards, self.cell_count)

    def useful(self, indices: Iterable[int]) -> int:
        """How many of these shards have cells."""
        return sum(1 for index in indices if index >= self.data_shards or index < self.cell_count)

    @property
    def is_enough(self) -> bool:
        if self.layout is ShardLayout.COPIES:
            return bool(self.holders)
        return self.useful(self.holders) >= self.needed

    def shards(self, copies_wanted: int) -> list[Shard]:
        """What the catalog is to say: where each shard is, or that nobody has it."""
        if self.layout is ShardLayout.COPIES:
            found = [self.holders[index] for index in sorted(self.holders)][:copies_wanted]
            return found + [Shard(NO_STORE, self.root)] * (copies_wanted - len(found))
        missing = Shard(NO_STORE, UNKNOWN_ROOT)
        return [self.holders.get(index, missing) for index in range(self.data_shards + self.parity_shards)]

    def is_content_of(self, version: Version) -> bool:
        return (self.size, self.root) == (version.size, version.root)

    def has_code_of(self, version: Version) -> bool:
        own = (self.layout, self.data_shards, self.cell_size)
        if own != (version.layout, version.data_shards, version.cell_size):
            return False
        return self.layout is ShardLayout.COPIES or self.parity_shards == version.parity_shards

    def _hint(self, found: FoundShard | FoundCopy) -> None:
        if found.revision > self.revision:
            self.ino, self.path_hint, self.revision = found.ino, found.path_hint or self.path_hint, found.revision
        self.stored_at_ns = max(self.stored_at_ns, found.stored_at_ns)


class FoundContents:
    """What was found of every version."""

    def __init__(self, inventories: Iterable[Inventory]) -> None:
        self._by_vid: dict[Vid, dict[tuple[object, ...], FoundContent]] = {}
        for inventory in inventories:
            for shard in inventory.shards:
                self._add_shard(inventory.store, shard)
            for copy in inventory.copies:
                self._add_copy(inventory.store, copy)

    def _add_shard(self, store: StoreId, shard: FoundShard) -> None:
        code = (shard.data_shards, shard.parity_shards, shard.cell_size, shard.size, shard.content_root)
        found = self._by_vid.setdefault(shard.vid, {}).setdefault(code, FoundContent(shard.vid, ShardLayout.STRIPED, *code))
        found.holders.setdefault(shard.index, Shard(store, shard.root))
        found.everywhere.add((shard.index, Shard(store, shard.root)))
        found._hint(shard)

    def _add_copy(self, store: StoreId, copy: FoundCopy) -> None:
        of_vid = self._by_vid.setdefault(copy.vid, {})
        key = (copy.size, copy.root)
        if key not in of_vid:
            of_vid[key] = FoundContent(copy.vid, ShardLayout.COPIES, 1, 0, copy.size, copy.size, copy.root)
        found = of_vid[key]
        if all(shard.store != store for shard in found.holders.values()):  # of a damaged database one may come twice
            found.holders[len(found.holders)] = Shard(store, copy.root)
        found._hint(copy)

    def of(self, vid: Vid) -> list[FoundContent]:
        """What was found of the version, the most whole first."""
        return sorted(self._by_vid.get(vid, {}).values(), key=lambda found: (found.is_enough, len(found.holders)), reverse=True)

    def __iter__(self) -> Iterator[Vid]:
        return iter(sorted(self._by_vid))

    @property
    def newest_revision(self) -> int:
        """Of all that was found; 0 if nothing was."""
        return max((found.revision for some in self._by_vid.values() for found in some.values()), default=0)

    @property
    def highest_ino(self) -> InodeNumber:
        return max((found.ino for some in self._by_vid.values() for found in some.values()), default=NO_INODE)
