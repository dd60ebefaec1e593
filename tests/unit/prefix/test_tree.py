"""The hybrid tree with exact answers (reference 4.1-4.11; 9.2, 12-27)."""

from __future__ import annotations

import numpy as np
import pytest

from twinpool.errors import ConfigError
from twinpool.memory.pools import Pool
from twinpool.prefix.tree import PrefixTree


class Small:
    """A tree over small pools; tokens are given as lists."""

    def __init__(
        self,
        *,
        n_pages: int = 400,
        n_slots: int = 20,
        page_size: int = 1,
        grid: int = 64,
        cap: int = -1,
        policy: str = "lru",
    ):
        self.pages = Pool(name="pages", first=1, count=n_pages)
        self.slots = Pool(name="slots", first=1, count=n_slots)
        self.page_size = page_size
        self.tree = PrefixTree(
            pages=self.pages,
            slots=self.slots,
            page_size=page_size,
            grid_tokens=grid,
            max_states_per_path=cap,
            eviction_policy=policy,
        )

    @staticmethod
    def key(tokens) -> bytes:
        return np.array(tokens, np.int32).tobytes()

    def put(self, tokens, *, state: bool = True, length: int | None = None, priority: int = 0):
        """Insert as a request would that computed everything itself; returns (result, its page table)."""
        length = len(tokens) if length is None else length
        pages = self.pages.alloc(length // self.page_size)
        slot = int(self.slots.alloc(1)[0]) if state else None
        result = self.tree.insert(
            self.key(tokens), pages, length=length, owned_from=0, state_slot=slot, priority=priority
        )
        self.pages.free(result.freed_pages)
        if state and not result.state_taken:
            self.slots.free([slot])
        self.tree.check()
        return result

    def match(self, tokens, limit: int | None = None, **how):
        found = self.tree.match(self.key(tokens), limit_tokens=len(tokens) if limit is None else limit, **how)
        self.tree.check()
        return found


def seq(n: int, base: int = 0) -> list[int]:
    return [base * 1000 + i for i in range(n)]


@pytest.mark.parametrize(("page", "n", "whole"), [(1, 7, 7), (4, 10, 8)])
def test_insert_then_match(page, n, whole) -> None:
    small = Small(page_size=page)
    small.put(seq(n), length=whole)
    found = small.match(seq(n))
    assert (found.reuse.kv_matched, found.resume_len, found.node.state) == (whole, whole, 1)


def test_kv_alone_is_counted_and_not_reused() -> None:
    small = Small(grid=4)
    small.put(seq(10), state=False)
    found = small.match([*seq(10), 99])
    assert (found.reuse.kv_matched, found.resume_len, found.branching) == (10, 0, 8)
    assert dict(found.reuse.gaps) == {"no_checkpoint": 8, "below_grid": 2, "new": 1}


def test_a_split_falls_back_to_the_nearest_state_above() -> None:
    small = Small()
    small.put(seq(64))
    small.put(seq(192))
    small.put(seq(200), state=False)
    found = small.match([*seq(150), 9999])
    # The worked example of reference 4.2.
    assert (found.reuse.kv_matched, found.resume_len, found.branching) == (150, 64, 128)
    assert small.tree.n_nodes == 4


def test_a_probe_changes_nothing() -> None:
    small = Small()
    small.put(seq(64))
    nodes = small.tree.n_nodes
    found = small.match([*seq(30), 5], touch=False)
    assert (found.reuse.kv_matched, found.resume_len) == (30, 0)
    assert small.tree.n_nodes == nodes


def test_interior_state_gone_the_deeper_one_still_serves() -> None:
    small = Small(grid=1)
    small.put(seq(4))
    small.put(seq(7))
    small.tree.evict(slots=1)
    small.tree.check()
    assert small.match(seq(4)).resume_len == 0
    assert small.match(seq(7)).resume_len == 7
    assert dict(small.match(seq(4)).reuse.gaps) == {"state_evicted": 4}
    assert small.tree.evictions.states == {"kv_pressure": 0, "state_pressure": 1, "path_limit": 0}


def test_a_leaf_that_loses_its_state_goes_whole() -> None:
    small = Small()
    small.put(seq(4))
    small.put(seq(5, base=1))
    before = small.tree.evictable_pages
    small.tree.evict(slots=1)
    small.tree.check()
    assert small.tree.evictable_pages == before - 4
    assert small.match(seq(4)).reuse.kv_matched == 0


def test_room_evicts_no_more_than_needed_and_nothing_if_it_cannot() -> None:
    small = Small(n_slots=4, n_pages=20)
    for base in range(4):
        small.put(seq(5, base=base))
    assert not small.tree.room_slots(5)
    assert not small.tree.room_pages(21)
    assert small.tree.n_nodes == 4
    assert small.tree.room_slots(1)
    assert (small.tree.n_nodes, small.slots.available) == (3, 1)
    assert small.tree.room_pages(6)
    assert (small.tree.n_nodes, small.pages.available) == (2, 10)


def test_locks_move_between_evictable_and_protected_and_back() -> None:
    small = Small()
    node = small.put(seq(5)).node
    tree = small.tree
    assert (tree.evictable_pages, tree.evictable_slots) == (5, 1)
    lock = tree.lock(node)
    assert (tree.evictable_pages, tree.evictable_slots, tree.protected_pages, tree.protected_slots) == (0, 0, 5, 1)
    assert not tree.room_slots(20)
    tree.check()
    tree.unlock(lock)
    assert (tree.evictable_pages, tree.evictable_slots, tree.protected_pages, tree.protected_slots) == (5, 1, 0, 0)


def test_a_locked_path_keeps_its_kv_but_gives_up_states_above() -> None:
    small = Small(n_slots=2)
    small.put(seq(4))
    node = small.put(seq(9)).node
    lock = small.tree.lock(node)
    assert small.tree.room_slots(1)
    small.tree.check()
    assert small.match(seq(9)).reuse.kv_matched == 9
    assert small.match(seq(4)).resume_len == 0
    small.tree.unlock(lock)


def test_the_same_prefix_twice_frees_the_duplicates_and_refuses_the_state() -> None:
    small = Small()
    first = small.put(seq(6))
    again = small.put(seq(6))
    assert (again.state_taken, len(again.freed_pages)) == (False, 6)
    assert again.pages.tolist() == small.tree.path_pages(first.node).tolist()
    assert small.pages.available == 400 - 6


def test_branching_of_three_prompts() -> None:
    small = Small()
    shared = seq(65)
    small.put(shared)
    small.put([*shared, *seq(10, base=1)])
    small.put([*shared, *seq(20, base=2)])
    for node in list(small.tree._evictor.states)[:2]:
        small.tree._evictor._drop_state(node, "state_pressure")
    found = small.match([*shared, *seq(10, base=1)])
    assert (found.reuse.kv_matched, found.resume_len, found.branching) == (75, 0, 64)
    found = small.match(seq(40))
    assert found.branching is None


def test_path_cap_drops_the_shallowest_and_keeps_the_kv() -> None:
    small = Small(cap=2, grid=1)
    for n in (3, 6, 9, 12):
        small.put(seq(n))
    assert [small.match(seq(n)).resume_len for n in (3, 6, 9, 12)] == [0, 0, 9, 12]
    assert [small.match(seq(n)).reuse.kv_matched for n in (3, 6)] == [3, 6]


def test_path_cap_spares_forks_and_locked_states() -> None:
    small = Small(cap=1, grid=1)
    small.put([*seq(3), 77], state=False)
    small.put(seq(6), state=False)
    fork = small.put(seq(3)).node
    assert len(fork.children) == 2
    lock = small.tree.lock(small.put(seq(6)).node)
    small.put(seq(9))
    # Three states on the path and a cap of one: a fork, a locked state and the tail stay.
    assert [small.match(seq(n)).resume_len for n in (3, 6, 9)] == [3, 6, 9]
    small.tree.unlock(lock)
    small.put(seq(12))
    assert [small.match(seq(n)).resume_len for n in (3, 6, 9, 12)] == [3, 3, 3, 12]


def test_evicted_kv_is_told_from_new() -> None:
    small = Small()
    small.put(seq(8))
    small.put(seq(12))
    small.tree.evict(pages=12)
    assert small.tree.n_nodes == 0
    found = small.match([*seq(10), 5, 6, 7])
    assert dict(found.reuse.gaps) == {"kv_evicted": 10, "new": 3}
    small.put(seq(4, base=3))
    assert dict(small.match([*seq(4, base=3), 1]).reuse.gaps) == {"new": 1}


def test_lru_and_touching() -> None:
    small = Small()
    for base in range(3):
        small.put(seq(4, base=base))
    small.match(seq(4, base=0))
    small.tree.evict(pages=1)
    assert [small.match(seq(4, base=b)).reuse.kv_matched for b in range(3)] == [4, 0, 4]


@pytest.mark.parametrize(("policy", "gone"), [("fifo", 0), ("filo", 2), ("mru", 0), ("lfu", 1), ("lru", 1)])
def test_policies(policy, gone) -> None:
    small = Small(policy=policy)
    for base in range(3):
        small.put(seq(4, base=base))
    for base in (1, 2, 2, 0, 0):
        if base != 1:
            small.match(seq(4, base=base))
    small.tree.evict(pages=1)
    left = [small.match(seq(4, base=b), touch=False).reuse.kv_matched for b in range(3)]
    assert left.index(0) == gone
    assert sum(left) == 8


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--radix-eviction-policy random is not one of lru, lfu"):
        Small(policy="random")


def test_reset_gives_everything_back() -> None:
    small = Small()
    for base in range(3):
        small.put(seq(4, base=base))
    small.match([*seq(2), 9])
    small.tree.reset()
    small.tree.check()
    assert (small.pages.available, small.slots.available, small.tree.n_nodes) == (400, 20, 0)
    assert small.match(seq(4)).reuse.kv_matched == 0
