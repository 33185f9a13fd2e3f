"""The filter lacks no id, has few it should not have, and others each time."""

import random

from ckptfs.cache.id_filter import IdFilter


def test_it_has_what_was_added_and_little_else() -> None:
    generator = random.Random(1)
    ids = [generator.randbytes(16) for _ in range(40_000)]
    wrong = []
    for _ in range(2):
        filter_ = IdFilter(20_000)
        for one in ids[:20_000]:
            filter_.add(one)
        assert all(one in filter_ for one in ids[:20_000])
        wrong.append({one for one in ids[20_000:] if one in filter_})
    assert 0 < len(wrong[0]) < 20_000 // 40
    assert len(wrong[0] & wrong[1]) < len(wrong[0]) // 4
