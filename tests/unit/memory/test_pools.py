"""One ring of ids: FIFO, never an exception when short, no double free (reference 9.2, 8 and 9)."""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from twinpool.memory.arena import Arena
from twinpool.memory.pools import Pool
from twinpool.memory.snapshot import PoolCounts


def test_freed_ids_are_reused_only_after_the_ones_already_free() -> None:
    pool = Pool(name="slots", first=1, count=5)
    first = pool.alloc(3)
    assert first is not None
    assert first.tolist() == [1, 2, 3]
    pool.free([2])
    assert [pool.alloc(1).tolist() for _ in range(3)] == [[4], [5], [2]]
    assert pool.alloc(1) is None
    assert pool.available == 0


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("wrong", [[1, 1], [6], [0], [4], [-1], [-2], [1, 2, 3, 1], [1, 5]])
def test_wrong_frees_are_bugs(wrong, as_array) -> None:
    pool = Pool(name="slots", first=1, count=5)
    pool.alloc(3)
    with pytest.raises(AssertionError, match="slots"):
        pool.free(np.array(wrong, np.int32) if as_array else wrong)


def test_a_negative_id_is_not_the_last_one() -> None:
    pool = Pool(name="slots", first=1, count=5)
    pool.alloc(5)
    with pytest.raises(AssertionError, match="slots: an id is outside the pool"):
        pool.free(np.array([-1], np.int32))


def test_an_id_named_twice_is_found_where_the_ring_wraps() -> None:
    pool = Pool(name="slots", first=1, count=5)
    ids = pool.alloc(5)
    pool.free(ids[:4])
    assert pool.alloc(2).tolist() == [1, 2]
    pool.free(np.array([5, 1], np.int32))
    assert pool.free_ids().tolist() == [3, 4, 5, 1]
    pool.alloc(4)
    with pytest.raises(AssertionError, match="slots: double free"):
        pool.free(np.array([1, 2, 3, 4, 1], np.int32))


def test_arena_regions_do_not_touch() -> None:
    arena = Arena(page_bytes=1024, slot_bytes=2500, n_slots=3, n_pages=11)
    assert arena.pages_per_slot == 3
    assert [arena.slot_offset_bytes(i) for i in range(4)] == [0, 3072, 6144, 9216]
    assert arena.page_offset_bytes(0) == arena.kv_offset_bytes == 12288
    assert arena.total_bytes == 12288 + 12 * 1024
    assert arena.rounding_bytes == 4 * (3072 - 2500)


def test_counts_that_do_not_add_up_are_bugs() -> None:
    PoolCounts(total=5, free=1, evictable=2, protected=1, held=1).check()
    with pytest.raises(AssertionError, match="adds up to 4"):
        PoolCounts(total=5, free=1, evictable=2, protected=1, held=0).check()


class PoolMachine(RuleBasedStateMachine):
    """Against a deque."""

    @initialize(count=st.integers(1, 12))
    def build(self, count) -> None:
        self.freed: list[int] = []
        self.pool = Pool(name="p", first=3, count=count, on_free=lambda ids: self.freed.extend(ids.tolist()))
        self.model = deque(range(3, 3 + count))
        self.held: list[int] = []

    @rule(n=st.integers(0, 6))
    def alloc(self, n) -> None:
        ids = self.pool.alloc(n)
        if n > len(self.model):
            assert ids is None
        else:
            assert ids.tolist() == [self.model.popleft() for _ in range(n)]
            self.held += ids.tolist()

    @rule(data=st.data(), as_array=st.booleans())
    def free(self, data, as_array) -> None:
        if self.held:
            ids = data.draw(st.lists(st.sampled_from(self.held), unique=True))
            self.pool.free(np.array(ids, np.int32) if as_array else ids)
            self.model.extend(ids)
            self.held = [i for i in self.held if i not in ids]
            assert self.freed[len(self.freed) - len(ids) :] == ids

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            assert self.pool.free_ids().tolist() == list(self.model)


TestPool = PoolMachine.TestCase
