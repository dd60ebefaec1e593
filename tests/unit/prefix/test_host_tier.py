"""The host tier of the tree with exact answers: what is copied, what goes first, what comes back (reference 5.2-5.4)."""

from __future__ import annotations

import pytest

from tests.unit.prefix.test_tree import Small, seq
from twinpool.memory.host import HostArena
from twinpool.memory.pools import Pool
from twinpool.prefix.host import HostPlan
from twinpool.prefix.tree import PrefixTree
from twinpool.step import HostCopy


class Tiered(Small):
    """A tree of single-token pages with a host below it; a host chunk is one page or one state."""

    def __init__(
        self, policy: str = "write_through", *, chunks: int = 100, max_slots: int | None = None, n_pages: int = 400,
        n_slots: int = 20, cap: int = -1, eviction: str = "lru",
    ) -> None:  # fmt: skip
        self.pages = Pool(name="pages", first=1, count=n_pages)
        self.slots = Pool(name="slots", first=1, count=n_slots)
        self.page_size = 1
        self.orders: list[HostCopy] = []
        self.arena = HostArena(total_bytes=10 * chunks, page_bytes=10, slot_bytes=10, max_slots=max_slots)
        self.tree = PrefixTree(
            pages=self.pages, slots=self.slots, page_size=1, grid_tokens=1, eviction_policy=eviction, max_states_per_path=cap,
            host=HostPlan(self.arena, policy, self.orders),
        )  # fmt: skip

    @property
    def held(self) -> tuple[int, int]:
        """(pages, states) on the host."""
        return self.arena.used_pages, self.arena.used_slots

    def node(self, tokens):
        """The node that ends here."""
        node, rest = self.tree.root, self.key(tokens)
        while rest:
            node = node.children[rest[:4]]
            assert rest.startswith(node.key)
            rest = rest[len(node.key) :]
        return node

    def where(self, tokens) -> str:
        """Copies of a node: d and h for KV, D and H for states on device and host."""
        node = self.node(tokens)
        marks = (
            ("d", node.on_device), ("D", node.state), ("h", node.host_pages is not None), ("H", node.host_state),
        )  # fmt: skip
        return "".join(mark for mark, there in marks if there)

    def leave_device(self) -> None:
        """Evict all that may go from the device."""
        self.tree.evict(pages=self.pages.count, slots=self.slots.count)
        self.tree.check()

    def restore(self, tokens) -> bool:
        """Bring back what a match of the tokens finds on the host, as admission does."""
        node = self.match([*tokens, 999]).host_node
        held = self.tree.hold(node)
        done = self.tree.restore(node)
        self.tree.let_go(held)
        self.tree.check()
        return done


def test_write_through_copies_at_the_first_insert_with_the_path_above() -> None:
    small = Tiered()
    small.put(seq(4))
    small.put(seq(7))
    assert (small.where(seq(4)), small.where(seq(7)), small.held) == ("dDhH", "dDhH", (7, 2))
    assert [(len(order.pages), bool(order.slot)) for order in small.orders] == [(4, 0), (0, 1), (3, 0), (0, 1)]
    assert all(order.to_host for order in small.orders)


def test_selective_copies_at_the_second_use_and_the_whole_path_then() -> None:
    small = Tiered("write_through_selective")
    small.put(seq(4))
    small.put(seq(7))
    assert small.held == (0, 0)
    small.match([*seq(7), 9], touch=False)
    assert small.held == (0, 0), "a probe is no use"
    small.match([*seq(7), 9])
    assert small.held == (7, 2)


def test_selective_drops_what_was_used_once() -> None:
    small = Tiered("write_through_selective")
    small.put(seq(4))
    small.leave_device()
    assert (small.tree.n_nodes, small.held) == (0, (0, 0))


def test_write_back_copies_when_the_device_evicts() -> None:
    small = Tiered("write_back")
    small.put(seq(4))
    small.put(seq(7))
    small.match([*seq(7), 9])
    assert small.held == (0, 0)
    small.tree.evict(pages=1)
    assert (small.where(seq(4)), small.where(seq(7)), small.held) == ("dDhH", "hH", (7, 2))
    small.leave_device()
    assert (small.where(seq(4)), small.where(seq(7)), small.held) == ("hH", "hH", (7, 2))


def test_write_back_keeps_no_kv_that_ends_in_nothing_to_resume_from() -> None:
    small = Tiered("write_back")
    small.put(seq(4), state=False)
    small.leave_device()
    assert (small.tree.n_nodes, small.held) == (0, (0, 0))


def test_write_back_copies_the_state_of_an_inner_node_and_only_that() -> None:
    small = Tiered("write_back")
    small.put(seq(4))
    small.put(seq(7))
    small.tree.evict(slots=1)
    assert (small.where(seq(4)), small.where(seq(7)), small.held) == ("dH", "dD", (0, 1))
    assert small.match([*seq(4), 9]).host_node is small.node(seq(4))
    assert small.restore(seq(4))
    assert (small.where(seq(4)), small.orders[-1].to_host) == ("dDH", False)


def test_write_back_keeps_a_leaf_whose_state_went_ahead_of_it() -> None:
    small = Tiered("write_back")
    small.put(seq(4))
    small.put(seq(7), state=False)
    small.tree.evict(slots=1)
    small.tree.evict(pages=3)
    assert (small.where(seq(4)), small.held) == ("dH", (0, 1))
    small.leave_device()
    assert small.where(seq(4)) == "hH"


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_a_state_that_comes_after_the_kv_is_copied_too(policy) -> None:
    small = Tiered(policy)
    small.put(seq(4))
    small.put(seq(7))
    small.match([*seq(7), 9])
    small.match([*seq(5), 9])
    small.tree.evict(pages=1)
    assert small.where(seq(5)) in ("dh", "h")
    small.put(seq(5))
    assert small.where(seq(5)) == "dDhH"
    small.leave_device()
    assert small.match([*seq(5), 9]).host_node.depth == 5


def test_host_only_nodes_take_the_pages_of_an_insert() -> None:
    small = Tiered()
    small.put(seq(4))
    small.put(seq(7))
    small.leave_device()
    small.match([*seq(2), 9])  # splits an edge that is on the host alone
    assert (small.where(seq(2)), small.where(seq(4))) == ("h", "hH")
    pages = small.pages.alloc(9)
    slot = int(small.slots.alloc(1)[0])
    result = small.tree.insert(small.key(seq(9)), pages, length=9, owned_from=0, state_slot=slot)
    assert result.freed_pages.tolist() == []
    assert small.tree.path_pages(result.node).tolist() == pages.tolist()
    assert [small.where(seq(n)) for n in (2, 4, 7, 9)] == ["dh", "dhH", "dhH", "dDhH"]
    assert (small.tree.evictable_pages, small.held) == (9, (9, 3))
    small.tree.check()


def test_an_insert_over_a_path_half_on_the_device_frees_only_duplicates() -> None:
    small = Tiered()
    small.put(seq(4))
    small.put(seq(7))
    small.tree.evict(pages=1)
    assert (small.where(seq(4)), small.where(seq(7))) == ("dDhH", "hH")
    pages = small.pages.alloc(9)
    result = small.tree.insert(small.key(seq(9)), pages, length=9, owned_from=0, state_slot=None)
    assert result.freed_pages.tolist() == pages[:4].tolist()
    assert result.pages[4:].tolist() == pages[4:].tolist()
    assert small.tree.path_pages(result.node).tolist() == result.pages.tolist()
    small.tree.check()


def test_a_restore_brings_back_what_is_missing_and_one_state() -> None:
    small = Tiered()
    small.put(seq(4))
    small.put(seq(7))
    small.put(seq(9))
    small.leave_device()
    small.match([*seq(3), 50])
    small.orders.clear()
    assert small.restore(seq(7))
    assert [small.where(seq(n)) for n in (3, 4, 7, 9)] == ["dh", "dhH", "dDhH", "hH"]
    assert [(order.to_host, len(order.pages)) for order in small.orders] == [
        (False, 3),
        (False, 1),
        (False, 3),
        (False, 0),
    ]
    assert (small.pages.available, small.slots.available) == (400 - 7, 19)
    totals = small.tree.tier.totals
    assert (totals.loaded_tokens, totals.loaded_states) == (7, 1)


def test_a_restore_without_room_changes_nothing() -> None:
    small = Tiered(n_pages=9, n_slots=3)
    small.put(seq(7))
    small.leave_device()
    taken = small.pages.alloc(3)
    small.orders.clear()
    assert not small.restore(seq(7))
    small.pages.free(taken)
    taken = small.slots.alloc(3)
    assert not small.restore(seq(7))
    assert (small.where(seq(7)), small.orders, small.pages.available) == ("hH", [], 9)
    small.slots.free(taken)
    assert small.restore(seq(7))


def test_the_host_drops_the_leaf_used_longest_ago() -> None:
    small = Tiered(chunks=14)
    for base in range(2):
        small.put(seq(6, base=base))
    small.leave_device()
    assert small.restore(seq(6))
    small.leave_device()
    small.put(seq(5, base=2))
    assert small.where(seq(5, base=2)) == "dDhH"
    assert small.match(seq(6)).reuse.kv_matched == 6
    assert small.match(seq(6, base=1)).reuse.kv_matched == 0
    assert dict(small.match([*seq(6, base=1), 1]).reuse.gaps) == {"kv_evicted": 6, "new": 1}


def test_the_host_drops_dead_kv_before_anything_else() -> None:
    small = Tiered(chunks=14)
    small.put(seq(6), state=False)
    small.put(seq(6, base=1))
    small.match([*seq(6), 1])
    small.leave_device()
    assert (small.where(seq(6)), small.where(seq(6, base=1)), small.held) == ("h", "hH", (12, 1))
    small.put(seq(2, base=2))
    assert small.match(seq(6)).reuse.kv_matched == 0, "dead KV stays although room was needed"
    assert small.where(seq(6, base=1)) == "hH"


def test_dead_kv_goes_before_a_state_too() -> None:
    small = Tiered(chunks=15)
    small.put(seq(6), state=False)
    small.put(seq(6, base=1))
    small.leave_device()
    small.put(seq(2, base=2))
    assert (small.where(seq(6, base=1)), small.where(seq(2, base=2))) == ("hH", "dDhH")
    assert small.match(seq(6)).reuse.kv_matched == 0


def test_kv_that_is_alive_again_is_not_dropped_as_dead() -> None:
    small = Tiered(chunks=16)
    small.put(seq(6), state=False)
    small.leave_device()
    small.put(seq(4, base=1))
    small.put(seq(6))
    small.leave_device()
    assert small.where(seq(6)) == "hH"
    small.put(seq(4, base=2))
    assert small.where(seq(6)) == "hH"
    assert small.match(seq(4, base=1)).reuse.kv_matched == 0


def test_under_a_quota_a_leaf_goes_whole_and_an_inner_node_loses_its_state() -> None:
    small = Tiered(chunks=40, max_slots=2)
    small.put(seq(4))
    small.put(seq(7))
    small.leave_device()
    small.put(seq(3, base=1))
    assert [small.where(seq(n)) for n in (4, 7)] == ["h", "hH"]
    assert dict(small.match([*seq(4), 1]).reuse.gaps) == {"host_state_evicted": 4, "new": 1}
    small.put(seq(5, base=1))
    assert small.held == (4 + 5, 2), "the leaf of 3 tokens went with its KV"
    assert small.where(seq(4)) == "h", "KV that lost its deeper state"


def test_a_state_that_finds_no_room_under_its_quota_drops_no_kv() -> None:
    small = Tiered(chunks=40, max_slots=1)
    small.put(seq(4))
    small.put(seq(6, base=1), state=False)
    small.put(seq(3, base=2), state=False)
    small.leave_device()
    held = small.tree.hold(small.node(seq(4)))
    result = small.tree.insert(
        small.key(seq(6, base=1)), small.pages.alloc(6), length=6, owned_from=0, state_slot=int(small.slots.alloc(1)[0])
    )
    small.tree.let_go(held)
    small.tree.check()
    assert result.state_taken
    assert (small.where(seq(6, base=1)), small.where(seq(4))) == ("dDh", "hH")
    assert small.where(seq(3, base=2)) == "h"
    assert small.tree.tier.totals.unsaved_states == 1


def test_the_deepest_state_of_a_path_takes_the_place_of_shallower_ones() -> None:
    small = Tiered(chunks=40, max_slots=2)
    for length in (2, 4, 6):
        small.put(seq(length))
    assert [small.where(seq(n)) for n in (2, 4, 6)] == ["dDh", "dDhH", "dDhH"]
    late = Tiered("write_back", chunks=40, max_slots=2)
    for length in (2, 4, 6):
        late.put(seq(length))
    late.leave_device()
    assert late.match([*seq(6), 9]).host_node.depth == 6


def test_a_path_that_can_never_fit_pushes_nothing_out() -> None:
    small = Tiered(chunks=10)
    small.put(seq(4))
    small.put(seq(10, base=1))
    assert (small.where(seq(4)), small.where(seq(10, base=1)), small.held) == ("dDhH", "dD", (4, 1))
    assert small.tree.tier.totals.unsaved_tokens == 10
    small.put(seq(9, base=1))
    assert (small.where(seq(9, base=1)), small.where(seq(10, base=1))) == ("dDhH", "dD")


def test_an_unsaved_leaf_leaves_and_a_state_alone_on_the_host_goes_with_it() -> None:
    small = Tiered("write_back", chunks=6)
    small.put(seq(6))
    small.put(seq(8))
    small.tree.evict(slots=1)
    assert (small.where(seq(6)), small.held) == ("dH", (0, 1))
    small.leave_device()
    assert (small.tree.n_nodes, small.held) == (0, (0, 0))


def test_the_path_cap_leaves_the_copies_on_the_host() -> None:
    small = Tiered(cap=1)
    for length in (2, 4, 6):
        small.put(seq(length))
    assert [small.where(seq(n)) for n in (2, 4, 6)] == ["dhH", "dhH", "dDhH"]
    found = small.match([*seq(4), 9])
    assert (found.resume_len, found.host_node.depth) == (0, 4)


def test_a_flush_frees_both_tiers() -> None:
    small = Tiered()
    for base in range(5):
        small.put(seq(6, base=base))
    small.tree.evict(pages=12)
    small.tree.reset()
    small.tree.check()
    assert (small.held, small.pages.available, small.slots.available) == ((0, 0), 400, 20)
    small.put(seq(6))
    assert small.where(seq(6)) == "dDhH"


def test_a_held_path_survives_the_search_for_room() -> None:
    small = Tiered("write_back", chunks=12, n_pages=12, n_slots=4)
    small.put(seq(6))
    small.put(seq(5, base=1))
    small.tree.evict(pages=6)
    assert (small.where(seq(6)), small.where(seq(5, base=1))) == ("hH", "dD")
    taken = small.pages.alloc(small.pages.available - 1)
    assert small.restore(seq(6)), "the other leaf makes room, and its copy may not push out what is restored"
    assert small.where(seq(6)) == "dDhH"
    assert small.where(seq(5, base=1)) == "h", "its state found no room"
    small.pages.free(taken)


def test_what_is_locked_or_held_stays_in_the_order_of_eviction() -> None:
    small = Tiered()
    kept, busy = small.put(seq(4)).node, [*seq(4, base=1), 5]
    small.put(busy[:4])
    lock = small.tree.lock(kept)
    small.tree.tier.hold(kept)
    for _ in range(200):  # enough uses for the orders to be cleared of outdated entries
        small.tree.match(small.key(busy), limit_tokens=4)
        small.tree.tier.hold(small.node(busy[:4]))
        small.tree.tier.let_go(small.node(busy[:4]))
    small.tree.tier.let_go(kept)
    small.tree.unlock(lock)
    small.tree.check()
    assert len(small.tree.tier._heap) < 200
    small.leave_device()
    assert (small.where(seq(4)), small.pages.available) == ("hH", 400)


def test_a_state_that_the_host_has_dropped_pushes_out_nothing_newer_when_it_leaves_the_device() -> None:
    small = Tiered(chunks=40, max_slots=1)
    small.put(seq(4))
    small.put(seq(7))
    assert (small.where(seq(4)), small.where(seq(7))) == ("dDh", "dDhH")
    small.leave_device()
    assert (small.where(seq(4)), small.where(seq(7))) == ("h", "hH")
    assert dict(small.match([*seq(4), 9]).reuse.gaps) == {"host_state_evicted": 4, "new": 1}


def why_not(small: Tiered, tokens: list[int]) -> str:
    """Why the prefix is not resumed from the device: on the host, or the first reason."""
    found = small.tree.match(small.key([*tokens, 9]), limit_tokens=len(tokens), touch=False)
    return "on the host" if found.host_node is not None else found.reuse.gaps[0][0]


def test_a_state_is_missed_by_the_name_of_the_memory_that_was_too_small() -> None:
    small = Tiered(chunks=40, max_slots=1)
    for length in (4, 7):
        small.put(seq(length))
    assert (small.where(seq(4)), why_not(small, seq(4))) == ("dDh", "new"), "the device still has what the host dropped"
    small.tree.evict(slots=1)
    assert (small.where(seq(4)), why_not(small, seq(4))) == ("dh", "host_state_evicted")
    small.put(seq(4))
    assert (small.where(seq(4)), why_not(small, seq(4))) == ("dDhH", "new")
    small.tree.evict(slots=2)
    assert (small.where(seq(4)), why_not(small, seq(4))) == ("hH", "on the host")


@pytest.mark.parametrize(
    ("policy", "chunks", "reason"),
    [
        ("write_through", 6, "host_state_evicted"),
        ("write_through_selective", 100, "state_evicted"),
        ("write_through", 100, "on the host"),
        ("write_back", 100, "on the host"),
    ],
)
def test_a_state_that_was_never_on_the_host_is_missed_there_only_if_it_was_to_be_copied(policy, chunks, reason) -> None:
    small = Tiered(policy, chunks=chunks)
    small.put(seq(6))
    small.put(seq(8), state=False)
    small.tree.evict(slots=1)
    assert (small.node(seq(6)).on_device, small.node(seq(6)).state) == (True, 0)
    assert why_not(small, seq(6)) == reason


def test_without_a_host_tier_no_state_is_missed_there() -> None:
    small = Small()
    small.put(seq(4))
    small.put(seq(7))
    small.tree.evict(slots=1)
    assert dict(small.match([*seq(4), 9]).reuse.gaps) == {"state_evicted": 4, "new": 1}


@pytest.mark.parametrize(
    ("eviction", "gone"),
    [("lru", 1), ("lfu", 2), ("slru", 2), ("fifo", 0), ("mru", 0), ("filo", 2), ("priority", 0)],
)
def test_the_policy_of_eviction_is_that_of_the_host_too(eviction: str, gone: int) -> None:
    small = Tiered(chunks=20, eviction=eviction)
    small.put(seq(5, base=0), priority=0)
    small.put(seq(5, base=1), priority=1)
    small.match(seq(6, base=1))
    small.put(seq(5, base=2), priority=1)
    for _ in range(2):
        small.match(seq(6, base=0))
    small.leave_device()
    small.put(seq(5, base=3), priority=1)
    kept = [base for base in range(4) if small.match(seq(5, base=base)).reuse.kv_matched]
    assert kept == [base for base in range(4) if base != gone]


def test_under_write_back_copies_of_what_the_device_has_go_first_and_those_that_it_evicts_next_last() -> None:
    small = Tiered("write_back", chunks=20)
    for base in range(3):
        small.put(seq(5, base=base))
    small.leave_device()
    for base in (1, 2):
        assert small.restore(seq(5, base=base))
    assert [small.where(seq(5, base=base)) for base in range(3)] == ["hH", "dDhH", "dDhH"]
    small.tree.tier.room(pages=6)
    small.tree.check()
    assert [small.where(seq(5, base=base)) for base in range(3)] == ["hH", "dDhH", "dD"]
    small.leave_device()
    assert [small.where(seq(5, base=base)) for base in range(3)] == ["hH", "hH", "hH"], "it was copied once more"


@pytest.mark.parametrize("eviction", ["fifo", "lru"])
def test_coming_and_going_leaves_no_entries_in_the_order_of_eviction(eviction: str) -> None:
    small = Tiered("write_back", eviction=eviction)
    for base in range(3):
        small.put(seq(5, base=base))
    for _ in range(100):
        small.leave_device()
        for base in range(3):
            assert small.restore(seq(5, base=base))
    assert len(small.tree.tier._heap) < 140
