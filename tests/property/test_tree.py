"""The tree against a slow, eager model of it, step by step: structure, order of eviction, counters, locks, reuse report."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.property.slow_tree import Prefix, SlowTree
from twinpool.memory.pools import Pool
from twinpool.prefix.tree import Lock, PrefixTree

N_PAGES, N_SLOTS = 30, 8


def key(tokens: Prefix) -> bytes:
    return np.array(tokens, np.int32).tobytes()


class TreeMachine(RuleBasedStateMachine):
    """Inserts, matches, locks, evictions and resets over pools that are too small. `seen`: every prefix that was ever inserted."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]), cap=st.sampled_from([-1, -1, 0, 1, 2]),
        policy=st.sampled_from(["lru", "lru", "lfu", "slru", "fifo", "filo", "mru", "priority"]),
    )  # fmt: skip
    def build(self, page_size, cap, policy) -> None:
        self.page = page_size
        self.pages = Pool(name="pages", first=1, count=N_PAGES)
        self.slots = Pool(name="slots", first=1, count=N_SLOTS)
        self.tree = PrefixTree(
            pages=self.pages, slots=self.slots, page_size=page_size, grid_tokens=2 * page_size, max_states_per_path=cap,
            eviction_policy=policy,
        )  # fmt: skip
        self.slow = SlowTree(page_size=page_size, grid=2 * page_size, policy=policy, cap=cap)
        self.locks: list[tuple[Lock, Prefix]] = []
        self.seen: set[Prefix] = set()
        self.keys: list[Prefix] = [()]

    def _tokens(self, data) -> Prefix:
        base = data.draw(st.sampled_from(self.keys))
        cut = data.draw(st.integers(0, len(base)))
        return base[:cut] + tuple(data.draw(st.lists(st.integers(0, 1), max_size=6)))

    def _room(self, *, pages: int = 0, slots: int = 0) -> bool:
        """Ask the tree for room, and check that it evicts just what the model would, or nothing if that cannot be enough."""
        can = self._free()[0] + self.slow.evictable()[0] >= pages
        assert self.tree.room_pages(pages) == can
        while can and self._free()[0] < pages:
            self.slow.evict_kv()
        can_slots = self._free()[1] + self.slow.evictable()[1] >= slots
        assert self.tree.room_slots(slots) == can_slots
        while can_slots and self._free()[1] < slots:
            self.slow.evict_state()
        return can and can_slots

    def _free(self) -> tuple[int, int]:
        """Free pages and slots, by the model."""
        used = self.slow.used()
        return N_PAGES - used[0], N_SLOTS - used[1]

    @rule(data=st.data(), with_state=st.booleans(), priority=st.integers(0, 2))
    def insert(self, data, with_state, priority) -> None:
        tokens = self._tokens(data)
        tokens = tokens[: len(tokens) // self.page * self.page]
        n = len(tokens)
        if not n or not self._room(pages=n // self.page, slots=int(with_state)):
            return
        self.keys.append(tokens)
        table = self.pages.alloc(n // self.page)
        slot = int(self.slots.alloc(1)[0]) if with_state else None
        result = self.tree.insert(
            key(tokens), table, length=n, owned_from=0, state_slot=slot, priority=priority
        )  # fmt: skip
        existing, taken = self.slow.insert(tokens, state=with_state, priority=priority)
        assert (result.state_taken, result.node.depth) == (taken, n)
        assert result.freed_pages.tolist() == table[: existing // self.page].tolist()
        assert self.tree.path_pages(result.node).tolist() == result.pages.tolist()
        assert result.pages[existing // self.page :].tolist() == table[existing // self.page :].tolist()
        self.pages.free(result.freed_pages)
        if slot is not None and not taken:
            self.slots.free([slot])
        self.seen |= {tokens[:i] for i in range(1, n + 1)}

    @rule(data=st.data(), keep=st.booleans(), touch=st.booleans())
    def match(self, data, keep, touch) -> None:
        tokens = self._tokens(data)
        limit = max(0, len(tokens) - 1)
        found = self.tree.match(key(tokens), limit_tokens=limit, touch=touch)
        kv, best, branching, labels = self.slow.match(tokens, limit, touch=touch)
        assert (found.resume_len, found.node.depth, found.branching) == (len(best), len(best), branching)
        assert bool(found.node.state) == bool(best)
        reuse, gaps = found.reuse, dict(found.reuse.gaps)
        assert (reuse.prompt, reuse.kv_matched, reuse.reused) == (len(tokens), kv, len(best))
        assert reuse.reused + sum(gaps.values()) == len(tokens)
        assert all(gaps.values())
        for reason in ("state_evicted", "no_checkpoint", "below_grid"):
            assert gaps.get(reason, 0) == labels.count(reason)
        # Only what was once inserted can have been evicted.
        once = kv + gaps.get("kv_evicted", 0)
        assert once <= max(limit, kv)
        assert not once or tokens[:once] in self.seen
        if keep and touch:
            self.locks.append((self.tree.lock(found.node), best))
            assert self.locks[-1][0].holds_state == self.slow.lock(best)

    @rule(data=st.data())
    def unlock(self, data) -> None:
        if self.locks:
            lock, prefix = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
            self.tree.unlock(lock)
            self.slow.unlock(prefix, lock.holds_state)

    @rule(data=st.data())
    def relock(self, data) -> None:
        """Move a lock to another node: further down its path as the scheduler does, or anywhere."""
        if self.locks:
            index = data.draw(st.integers(0, len(self.locks) - 1))
            old, prefix = self.locks[index]
            deeper = [p for p in self.slow.nodes if p[: len(prefix)] == prefix]
            goals = sorted(deeper if deeper and data.draw(st.booleans()) else self.slow.nodes)
            if goals:
                goal = data.draw(st.sampled_from(goals))
                moved = self.tree.relock(old, self._node(goal))
                assert moved.holds_state == self.slow.lock(goal)
                self.slow.unlock(prefix, old.holds_state)
                self.locks[index] = (moved, goal)

    @rule(pages=st.integers(0, 8), slots=st.integers(0, 3))
    def evict(self, pages, slots) -> None:
        self.tree.evict(pages=pages, slots=slots)
        free, evictable = self._free(), self.slow.evictable()
        goal = [a + min(n, e) for a, n, e in zip(free, (pages, slots), evictable, strict=True)]
        while self._free()[0] < goal[0]:
            self.slow.evict_kv()
        while self._free()[1] < goal[1]:
            self.slow.evict_state()

    @rule(n=st.integers(0, N_PAGES + 2), m=st.integers(0, N_SLOTS + 2))
    def room(self, n, m) -> None:
        self._room(pages=n, slots=m)

    @rule()
    def reset(self) -> None:
        if not self.locks:
            self.tree.reset()
            self.slow.nodes.clear()
            self.slow.states.clear()
            self.seen.clear()
            assert (self.pages.available, self.slots.available) == (N_PAGES, N_SLOTS)

    def _walk(self) -> dict[Prefix, object]:
        """The real tree's nodes by their prefixes."""
        found, stack = {}, [(self.tree.root, ())]
        while stack:
            node, prefix = stack.pop()
            for child in node.children.values():
                whole = prefix + tuple(np.frombuffer(child.key, np.int32).tolist())
                found[whole] = child
                stack.append((child, whole))
        return found

    def _node(self, prefix: Prefix):
        return self._walk()[prefix]

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "tree"):
            return
        tree, slow = self.tree, self.slow
        tree.check()
        nodes = self._walk()
        assert {p: (n.state != 0, n.lock, n.state_lock) for p, n in nodes.items()} == slow.picture()
        names = {id(node): prefix for prefix, node in nodes.items()}
        assert [names[id(node)] for node in tree._evictor.states] == slow.states
        assert (tree.evictable_pages, tree.evictable_slots) == slow.evictable()
        assert (self.pages.available, self.slots.available) == self._free()
        assert self.pages.available + tree.evictable_pages + tree.protected_pages == N_PAGES
        assert self.slots.available + tree.evictable_slots + tree.protected_slots == N_SLOTS
        assert tree.evictions == slow.evictions
        for _, prefix in self.locks:
            found = tree.match(key(prefix), limit_tokens=len(prefix), touch=False)
            assert found.resume_len == len(prefix) or not slow.nodes[prefix].state_lock, (
                "a locked prefix is not resumable"
            )


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=400, stateful_step_count=50, deadline=None)
