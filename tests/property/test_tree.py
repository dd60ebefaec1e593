"""The tree against a slow, obvious model: a set of prefixes with KV, a map of prefixes with a state."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from twinpool.memory.pools import Pool
from twinpool.prefix.tree import Lock, PrefixTree

N_PAGES, N_SLOTS = 30, 6


class TreeMachine(RuleBasedStateMachine):
    """Inserts, matches, locks, evictions and resets. `seen`: every prefix that was ever inserted, page by page."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]), cap=st.sampled_from([-1, -1, 1, 2]),
        policy=st.sampled_from(["lru", "lfu", "slru", "fifo", "filo", "mru", "priority"]),
    )  # fmt: skip
    def build(self, page_size, cap, policy) -> None:
        self.page = page_size
        self.pages = Pool(name="pages", first=1, count=N_PAGES)
        self.slots = Pool(name="slots", first=1, count=N_SLOTS)
        self.tree = PrefixTree(
            pages=self.pages, slots=self.slots, page_size=page_size, grid_tokens=2 * page_size, max_states_per_path=cap,
            eviction_policy=policy,
        )  # fmt: skip
        self.locks: list[tuple[Lock, list[int]]] = []
        self.seen: set[tuple[int, ...]] = set()
        self.keys: list[list[int]] = [[]]

    def _key(self, tokens) -> bytes:
        return np.array(tokens, np.int32).tobytes()

    def _tokens(self, data) -> list[int]:
        base = data.draw(st.sampled_from(self.keys))
        cut = data.draw(st.integers(0, len(base)))
        return base[:cut] + data.draw(st.lists(st.integers(0, 2), max_size=10))

    @rule(data=st.data(), with_state=st.booleans())
    def insert(self, data, with_state) -> None:
        tokens = self._tokens(data)
        length = len(tokens) // self.page * self.page
        if not length or not self.tree.room_pages(length // self.page) or (with_state and not self.tree.room_slots(1)):
            return
        self.keys.append(tokens)
        table = self.pages.alloc(length // self.page)
        slot = int(self.slots.alloc(1)[0]) if with_state else None
        known = self.tree.match(self._key(tokens[:length]), limit_tokens=length, touch=False)
        result = self.tree.insert(self._key(tokens), table, length=length, owned_from=0, state_slot=slot)
        assert result.existing_len == known.kv_len
        assert result.node.depth == length
        self.pages.free(result.freed_pages)
        if slot is not None:
            assert result.state_taken == (known.resume_len < length)
            if not result.state_taken:
                self.slots.free([slot])
        assert self.tree.path_pages(result.node).tolist() == result.pages.tolist()
        self.seen |= {tuple(tokens[:n]) for n in range(self.page, length + 1, self.page)}
        after = self.tree.match(self._key(tokens), limit_tokens=length, touch=False)
        assert after.kv_len == length
        assert not with_state or after.resume_len == length

    @rule(data=st.data(), keep=st.booleans(), touch=st.booleans())
    def match(self, data, keep, touch) -> None:
        tokens = self._tokens(data)
        limit = max(0, len(tokens) - 1)
        before = self.tree.n_nodes
        found = self.tree.match(self._key(tokens), limit_tokens=limit, touch=touch)
        assert found.resume_len <= found.kv_len <= limit
        assert found.kv_len % self.page == 0
        assert found.node.depth == found.resume_len
        assert touch or self.tree.n_nodes == before
        reuse = found.reuse
        assert reuse.reused + sum(n for _, n in reuse.gaps) == len(tokens)
        gone = dict(reuse.gaps).get("kv_evicted", 0)
        # Only what was once inserted can have been evicted (compared by whole pages).
        once = found.kv_len + gone // self.page * self.page
        assert not gone or once == 0 or tuple(tokens[:once]) in self.seen
        if keep and touch:
            self.locks.append((self.tree.lock(found.node), tokens[: found.resume_len]))

    @rule(data=st.data())
    def unlock(self, data) -> None:
        if self.locks:
            lock, _ = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
            self.tree.unlock(lock)

    @rule(pages=st.integers(0, 8), slots=st.integers(0, 3))
    def evict(self, pages, slots) -> None:
        before = (self.pages.available, self.slots.available)
        possible = (min(pages, self.tree.evictable_pages), min(slots, self.tree.evictable_slots))
        self.tree.evict(pages=pages, slots=slots)
        assert self.pages.available >= before[0] + possible[0]
        assert self.slots.available >= before[1] + possible[1]

    @rule(n=st.integers(0, N_PAGES + 2), m=st.integers(0, N_SLOTS + 2))
    def room(self, n, m) -> None:
        can = self.pages.available + self.tree.evictable_pages >= n
        assert self.tree.room_pages(n) == can
        assert not can or self.pages.available >= n
        can = self.slots.available + self.tree.evictable_slots >= m
        assert self.tree.room_slots(m) == can
        assert not can or self.slots.available >= m

    @rule()
    def reset(self) -> None:
        if not self.locks:
            self.tree.reset()
            self.seen.clear()
            assert (self.pages.available, self.slots.available) == (N_PAGES, N_SLOTS)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check()
        assert self.pages.available + self.tree.evictable_pages + self.tree.protected_pages == N_PAGES
        assert self.slots.available + self.tree.evictable_slots + self.tree.protected_slots == N_SLOTS
        for _, tokens in self.locks:
            found = self.tree.match(self._key(tokens), limit_tokens=len(tokens), touch=False)
            assert found.resume_len == len(tokens), "a locked prefix is not resumable"


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
