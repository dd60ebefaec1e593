"""Order and extent of both evictions, and moved locks (reference 4.9-4.11; 9.2, 15-17, 23, 26)."""

from __future__ import annotations

import pytest

from tests.unit.prefix.test_tree import Small, seq
from twinpool.prefix.evict import Evictions


def resume(small: Small, n: int) -> int:
    return small.match(seq(n), touch=False).resume_len


def chain(small: Small, *lengths: int):
    """States at these lengths of one sequence; the last node."""
    return [small.put(seq(n)) for n in lengths][-1].node


def test_room_stops_at_the_first_tombstone_and_evict_goes_on() -> None:
    small = Small(n_slots=4, grid=1)
    chain(small, 2, 4, 6, 8)
    assert small.tree.room_slots(1)
    assert [resume(small, n) for n in (2, 4, 6, 8)] == [0, 4, 6, 8]
    assert small.pages.available == 400 - 8
    small.tree.evict(slots=2)
    assert [resume(small, n) for n in (2, 4, 6, 8)] == [0, 0, 0, 8]
    assert small.tree.evictions.states == {"kv_pressure": 0, "state_pressure": 3, "path_limit": 0}


def test_kv_eviction_goes_up_the_chain_as_parents_become_leaves() -> None:
    small = Small()
    chain(small, 2, 4, 6)
    assert small.tree.room_pages(400 - 6 + 3)
    assert (small.tree.n_nodes, small.pages.available) == (1, 398)
    assert small.tree.evictions == Evictions(
        {"kv_pressure": 4, "state_pressure": 0}, {"kv_pressure": 2, "state_pressure": 0, "path_limit": 0}
    )
    assert small.slots.available == 19


def test_kv_that_goes_with_the_state_of_its_leaf_says_so() -> None:
    small = Small()
    chain(small, 4, 9)
    small.put(seq(3, base=1))
    small.match(seq(9))
    small.match(seq(4))
    small.tree.evict(slots=2)
    assert small.tree.evictions.kv_tokens == {"kv_pressure": 0, "state_pressure": 3 + 5}
    assert small.tree.evictions.states == {"kv_pressure": 0, "state_pressure": 2, "path_limit": 0}


def test_a_parent_is_as_recent_as_the_newest_use_below_it() -> None:
    small = Small()
    leaves = [small.put([*seq(4), token]).node for token in (50, 60)]
    small.put(seq(3, base=7))
    small.match([*seq(4), 60])
    for leaf in leaves:
        small.tree._evictor._evict_leaf(leaf, "kv_pressure")
    small.tree.check()
    small.tree.evict(pages=1)
    assert small.match(seq(3, base=7), touch=False).reuse.kv_matched == 0, (
        "what was used before the last use below the parent goes first"
    )
    assert small.match(seq(4), touch=False).reuse.kv_matched == 4


def test_a_parent_inherits_uses_and_priority_of_what_was_evicted_below() -> None:
    for policy in ("lfu", "priority"):
        small = Small(policy=policy)
        table = small.pages.alloc(4)
        small.tree.insert(small.key(seq(4)), table, length=4, owned_from=0, state_slot=None, priority=0)
        for _ in range(3):
            deeper = [*seq(4), 9]
            result = small.tree.insert(
                small.key(deeper), small.pages.alloc(5), length=5, owned_from=0, state_slot=None, priority=5
            )
            small.pages.free(result.freed_pages)
        small.put(seq(2, base=3))
        small.put(seq(2, base=3))
        small.tree._evictor._evict_leaf(result.node, "kv_pressure")
        small.tree.check()
        small.tree.evict(pages=1)
        assert small.match(seq(4), touch=False).reuse.kv_matched == 4, policy
        assert small.match(seq(2, base=3), touch=False).reuse.kv_matched == 0, policy


def test_both_halves_of_a_split_are_as_old_as_the_whole() -> None:
    small = Small(policy="fifo")
    small.put(seq(6))
    small.put(seq(3, base=1))
    small.match(seq(6))
    small.match([*seq(4), 99])
    small.tree.evict(pages=1)
    small.tree.evict(pages=1)
    assert small.match(seq(3, base=1), touch=False).reuse.kv_matched == 3
    assert small.tree.n_nodes == 1


def test_locked_memory_is_never_a_victim() -> None:
    small = Small(n_slots=3)
    held = small.tree.lock(chain(small, 4, 9))
    small.put(seq(5, base=1))
    assert not small.tree.room_pages(400 - 8)
    assert not small.tree.room_slots(3)
    small.tree.evict(pages=400, slots=3)
    small.tree.check()
    assert (small.tree.n_nodes, resume(small, 9), resume(small, 4)) == (2, 9, 0)
    small.tree.unlock(held)
    small.tree.evict(pages=400)
    assert (small.tree.n_nodes, small.pages.available, small.slots.available) == (0, 400, 3)


def test_a_moved_lock_frees_the_old_state_and_keeps_the_path() -> None:
    small = Small()
    first = small.put(seq(4)).node
    lock = small.tree.lock(first)
    second = small.put(seq(9)).node
    lock = small.tree.relock(lock, second)
    tree = small.tree
    assert (first.lock, first.state_lock, second.lock, second.state_lock) == (1, 0, 1, 1)
    assert (tree.protected_pages, tree.protected_slots, tree.evictable_slots) == (9, 1, 1)
    other = small.put(seq(3, base=1)).node
    lock = tree.relock(lock, other)
    assert (first.lock, second.lock, other.lock, tree.protected_pages) == (0, 0, 1, 3)
    tree.unlock(lock)
    assert (tree.protected_pages, tree.protected_slots) == (0, 0)
    tree.check()


def test_a_lock_taken_before_a_split_covers_both_halves() -> None:
    small = Small()
    lock = small.tree.lock(small.put(seq(8)).node)
    small.match([*seq(5), 99])
    assert (small.tree.n_nodes, small.tree.protected_pages) == (2, 8)
    small.tree.unlock(lock)
    small.tree.check()
    assert (small.tree.protected_pages, small.tree.evictable_pages) == (0, 8)


def test_a_tombstone_takes_a_new_state() -> None:
    small = Small(grid=1)
    chain(small, 4, 9)
    small.tree.evict(slots=1)
    again = small.put(seq(4))
    assert (again.state_taken, resume(small, 4)) == (True, 4)
    assert dict(small.match([*seq(4), 1]).reuse.gaps) == {"new": 1}


def test_a_state_that_is_refused_makes_the_existing_one_most_recent() -> None:
    small = Small(n_slots=3)
    small.put(seq(4))
    small.put(seq(4, base=1))
    small.put(seq(4))
    small.tree.evict(slots=1)
    assert (resume(small, 4), small.match(seq(4, base=1), touch=False).reuse.kv_matched) == (4, 0)


def test_reset_of_a_tree_in_use_is_a_bug() -> None:
    small = Small()
    small.tree.lock(small.put(seq(4)).node)
    with pytest.raises(AssertionError, match="in use"):
        small.tree.reset()
