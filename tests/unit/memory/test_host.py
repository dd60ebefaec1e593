"""The host arena: ids, offsets, quotas and conservation, against a plain set of what is out."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from twinpool.memory.host import HostArena
from twinpool.units import ceil_div


def free_slots(arena: HostArena, slots) -> None:
    for slot in slots:
        arena.free(slot=int(slot))


class ArenaMachine(RuleBasedStateMachine):
    """Pages and slots come and go in any order, in bunches that may not fit."""

    @initialize(
        total=st.integers(0, 600), page=st.sampled_from([0, 1, 7, 10, 30]), slot=st.sampled_from([1, 3, 10, 21, 64]),
        quota=st.none() | st.integers(0, 12),
    )  # fmt: skip
    def build(self, total, page, slot, quota) -> None:
        self.arena = HostArena(total_bytes=total, page_bytes=page, slot_bytes=slot, max_slots=quota)
        self.total = total
        self.pages: list[int] = []
        self.slots: list[int] = []

    @rule(pages=st.integers(0, 12), slots=st.integers(0, 4))
    def alloc(self, pages, slots) -> None:
        if self.arena.page_bytes == 0:
            pages = 0
        fits = not any(self.arena.lacks(pages=pages, slots=slots))
        before = (self.arena.used_pages, self.arena.used_slots, self.arena.page_capacity, self.arena.slot_capacity)
        found = self.arena.alloc(pages=pages, slots=slots)
        assert (found is not None) == fits
        if found is None:
            after = (self.arena.used_pages, self.arena.used_slots, self.arena.page_capacity, self.arena.slot_capacity)
            assert after == before, "a refused allocation took something"
            return
        assert self.arena.can_ever_hold(pages=len(self.pages) + pages, slots=len(self.slots) + slots)
        assert (len(found[0]), len(found[1])) == (pages, slots)
        assert (found[1] > 0).all(), "0 is never a slot"
        self.pages += found[0].tolist()
        self.slots += found[1].tolist()

    @rule(data=st.data())
    def free_some_pages(self, data) -> None:
        if self.pages:
            some = data.draw(st.lists(st.sampled_from(self.pages), unique=True))
            self.arena.free(pages=np.array(some, np.int32))
            self.pages = [page for page in self.pages if page not in some]

    @rule(data=st.data())
    def free_a_slot(self, data) -> None:
        if self.slots:
            slot = data.draw(st.sampled_from(self.slots))
            self.arena.free(slot=slot)
            self.slots.remove(slot)

    @rule()
    def free_all(self) -> None:
        self.arena.free(pages=np.array(self.pages, np.int32))
        free_slots(self.arena, self.slots)
        self.pages, self.slots = [], []
        arena = self.arena
        assert (arena.page_capacity, arena.slot_capacity) == (arena.most_pages, arena.most_slots)

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "arena"):
            return
        arena = self.arena
        arena.check()
        assert (arena.used_pages, arena.used_slots) == (len(self.pages), len(self.slots))
        assert arena.used_pages <= arena.page_capacity <= arena.most_pages
        assert arena.used_slots <= arena.slot_capacity <= arena.most_slots
        assert arena.total_bytes <= self.total
        if arena.has_quota:
            assert (arena.page_capacity, arena.slot_capacity) == (arena.most_pages, arena.most_slots)
        spans = [(arena.page_offset_bytes(page), arena.page_bytes) for page in self.pages]
        spans += [(arena.slot_offset_bytes(slot), arena.slot_bytes) for slot in self.slots]
        end = 0
        for start, size in sorted(spans):
            assert start >= end, "two owners of one byte"
            end = start + size
        assert end <= arena.total_bytes, "a span leaves the buffer"


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


@given(page=st.integers(1, 50), slot=st.integers(1, 200), n=st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_a_chunk_wastes_less_than_its_smaller_tenant(page, slot, n) -> None:
    arena = HostArena(total_bytes=10_000, page_bytes=page, slot_bytes=slot)
    assert max(page, slot) <= arena.chunk_bytes < max(page, slot) + min(page, slot)
    assert arena.most_pages // arena.n_chunks == ceil_div(slot, page)
    assert arena.most_slots // arena.n_chunks == max(1, page // slot)
    found = arena.alloc(pages=min(n, arena.most_pages))
    assert found is not None


def test_a_state_larger_than_a_page() -> None:
    arena = HostArena(total_bytes=109, page_bytes=10, slot_bytes=25)
    assert (arena.chunk_bytes, arena.n_chunks, arena.most_pages, arena.most_slots) == (30, 3, 9, 3)
    pages, slots = arena.alloc(pages=4, slots=1)
    assert (pages.tolist(), slots.tolist()) == ([0, 1, 2, 3], [3])
    assert [arena.page_offset_bytes(page) for page in pages.tolist()] == [0, 10, 20, 30]
    assert arena.slot_offset_bytes(3) == 60
    assert (arena.page_capacity, arena.slot_capacity) == (6, 1)
    assert arena.lacks(pages=2, slots=1) == (False, True)
    assert arena.lacks(pages=3, slots=0) == (True, False)


def test_states_smaller_than_a_page() -> None:
    arena = HostArena(total_bytes=100, page_bytes=30, slot_bytes=12)
    assert (arena.chunk_bytes, arena.n_chunks, arena.most_pages, arena.most_slots) == (30, 3, 3, 6)
    _, slots = arena.alloc(pages=0, slots=3)
    assert slots.tolist() == [1, 2, 3]
    assert [arena.slot_offset_bytes(slot) for slot in (1, 2, 3)] == [0, 12, 30]
    assert arena.page_capacity == 1
    arena.free(slot=3)
    assert arena.page_capacity == 2


def test_chunks_move_between_kinds_when_they_are_wholly_free() -> None:
    arena = HostArena(total_bytes=60, page_bytes=10, slot_bytes=20)
    pages, _ = arena.alloc(pages=6)
    assert arena.alloc(pages=0, slots=1) is None
    arena.free(pages=pages[:1])
    assert arena.alloc(pages=0, slots=1) is None, "half of a chunk is still KV"
    arena.free(pages=pages[1:2])
    assert arena.alloc(pages=0, slots=1)[1].tolist() == [1]
    assert arena.alloc(pages=1) is None


def test_a_quota_stays_where_it_is() -> None:
    arena = HostArena(total_bytes=100, page_bytes=10, slot_bytes=20, max_slots=2)
    assert (arena.most_pages, arena.most_slots, arena.has_quota) == (6, 2, True)
    assert arena.alloc(pages=7) is None
    assert arena.alloc(pages=0, slots=3) is None
    assert arena.alloc(pages=6, slots=2) is not None
    assert arena.lacks(pages=1, slots=1) == (True, True)


@pytest.mark.parametrize(("pages", "slots", "fits"), [(4, 1, True), (5, 1, False), (6, 0, True), (7, 0, False)])
def test_what_an_empty_arena_can_hold(pages, slots, fits) -> None:
    arena = HostArena(total_bytes=60, page_bytes=10, slot_bytes=20)
    assert arena.can_ever_hold(pages=pages, slots=slots) == fits


def test_without_kv_all_of_it_is_states() -> None:
    arena = HostArena(total_bytes=100, page_bytes=0, slot_bytes=30)
    assert arena.alloc(pages=0, slots=3)[1].tolist() == [1, 2, 3]
    assert arena.alloc(pages=0, slots=1) is None


def test_freeing_what_is_not_out_is_a_bug() -> None:
    arena = HostArena(total_bytes=100, page_bytes=10, slot_bytes=20)
    pages, _ = arena.alloc(pages=2, slots=1)
    arena.free(pages=pages[:1])
    with pytest.raises(AssertionError, match="not in use"):
        arena.free(pages=pages[:1])


def test_an_arena_that_no_machine_has_can_be_planned() -> None:
    """The largest --hicache-size: what it takes here is for the chunks in use only."""
    arena = HostArena(total_bytes=10**18, page_bytes=1024, slot_bytes=400_000)
    assert arena.most_slots == 10**18 // (391 * 1024)
    found = arena.alloc(pages=1000, slots=2)
    assert found is not None
    arena.free(pages=found[0])
    free_slots(arena, found[1])
    arena.check()
    assert (arena.used_pages, arena.used_slots) == (0, 0)
