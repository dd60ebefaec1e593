"""The prefix tree as a dictionary of prefixes: slow, eager, and obvious. Every rule is written as the reference words it (4.2-4.11)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from twinpool.prefix.evict import Evictions

Prefix = tuple[int, ...]

POLICY = {
    "lru": lambda n: (n.last_access,),
    "lfu": lambda n: (n.hits, n.last_access),
    "slru": lambda n: (min(n.hits, 2), n.last_access),
    "fifo": lambda n: (n.created,),
    "mru": lambda n: (-n.last_access,),
    "filo": lambda n: (-n.created,),
    "priority": lambda n: (n.priority, n.last_access),
}


@dataclass
class SlowNode:
    """What is known of the edge that ends with a prefix."""

    created: int
    last_access: int
    hits: int = 0
    priority: int = 0
    lock: int = 0
    state: bool = False
    state_gone: bool = False
    state_lock: int = 0


class SlowTree:
    """Nodes by the whole prefix they end with; the parent of one is the longest other one that it starts with."""

    def __init__(self, *, page_size: int, grid: int, policy: str, cap: int) -> None:
        self.page, self.grid, self.cap = page_size, grid, cap
        self.rank = POLICY[policy]
        self.now = 0
        self.nodes: dict[Prefix, SlowNode] = {}
        self.states: list[Prefix] = []  # least recently used first
        self.evictions = Evictions()

    def above(self, prefix: Prefix) -> list[Prefix]:
        """Nodes on the path to a prefix, shallowest first, with its own."""
        return [prefix[:n] for n in range(1, len(prefix) + 1) if prefix[:n] in self.nodes]

    def children(self, prefix: Prefix) -> list[Prefix]:
        return [p for p in self.nodes if p != prefix and [(), *self.above(p)][-2] == prefix]

    def edge_pages(self, prefix: Prefix) -> int:
        shorter = self.above(prefix)[:-1]
        return (len(prefix) - (len(shorter[-1]) if shorter else 0)) // self.page

    def cached(self, tokens: Prefix, limit: int) -> int:
        """How many of the first `limit` tokens have KV, in whole pages."""
        whole = range(limit // self.page * self.page, 0, -self.page)
        return next((n for n in whole if any(p[:n] == tokens[:n] for p in self.nodes)), 0)

    def match(self, tokens: Prefix, limit: int, *, touch: bool) -> tuple[int, Prefix, int | None, list[str]]:
        """(kv_len, the prefix to resume from, branching, a label for each token up to kv)."""
        kv = self.cached(tokens, limit)
        on_path = self.above(tokens[:kv])
        best = next((p for p in reversed(on_path) if self.nodes[p].state), ())
        gone = next((len(p) for p in reversed(on_path) if self.nodes[p].state_gone and not self.nodes[p].state), 0)
        on_grid = kv - kv % self.grid
        labels = [
            "reused" if i < len(best) else "state_evicted" if i < gone else "no_checkpoint" if i < on_grid else "below_grid"
            for i in range(kv)
        ]  # fmt: skip
        if touch:
            self.split(tokens[:kv])
            self.touch(best)
        return kv, best, on_grid if on_grid > len(best) else None, labels

    def split(self, at: Prefix) -> None:
        if at and at not in self.nodes:
            lower = min((p for p in self.nodes if p[: len(at)] == at), key=len)
            self.nodes[at] = replace(self.nodes[lower], state=False, state_gone=False, state_lock=0)

    def touch(self, prefix: Prefix) -> None:
        self.now += 1
        for p in self.above(prefix):
            self.nodes[p].last_access = self.now
            self.nodes[p].hits += 1
        if prefix in self.states:
            self.states.remove(prefix)
            self.states.append(prefix)

    def insert(self, tokens: Prefix, *, state: bool, priority: int) -> tuple[int, bool]:
        """(tokens that existed, whether the state was taken)."""
        existing = self.cached(tokens, len(tokens))
        self.split(tokens[:existing])
        if existing < len(tokens):
            self.nodes[tokens] = SlowNode(created=self.now + 1, last_access=self.now + 1)
        for p in self.above(tokens):
            self.nodes[p].priority = max(self.nodes[p].priority, priority)
        end = self.nodes[tokens]
        taken = state and not end.state
        if taken:
            end.state, end.state_gone = True, False
            self.states.append(tokens)
        self.touch(tokens)
        if taken and self.cap >= 0:
            self.apply_cap(tokens)
        return existing, taken

    def apply_cap(self, tail: Prefix) -> None:
        holders = [p for p in self.above(tail) if self.nodes[p].state]
        excess = len(holders) - self.cap
        for p in holders:
            if excess > 0 and p != tail and not self.nodes[p].state_lock and len(self.children(p)) == 1:
                self.drop_state(p, "path_limit")
                excess -= 1

    def lock(self, prefix: Prefix) -> bool:
        """Lock, and say whether a state was."""
        for p in self.above(prefix):
            self.nodes[p].lock += 1
        holds = bool(prefix) and self.nodes[prefix].state
        if holds:
            self.nodes[prefix].state_lock += 1
        return holds

    def unlock(self, prefix: Prefix, holds: bool) -> None:
        for p in self.above(prefix):
            self.nodes[p].lock -= 1
        if holds:
            self.nodes[prefix].state_lock -= 1

    def drop_state(self, prefix: Prefix, why: str) -> None:
        self.nodes[prefix].state, self.nodes[prefix].state_gone = False, True
        self.states.remove(prefix)
        self.evictions.states[why] += 1

    def is_leaf(self, prefix: Prefix) -> bool:
        return not self.nodes[prefix].lock and not self.children(prefix)

    def evict_leaf(self, prefix: Prefix, why: str) -> None:
        if self.nodes[prefix].state:
            self.drop_state(prefix, why)
        self.evictions.kv_tokens[why] += self.edge_pages(prefix) * self.page
        del self.nodes[prefix]

    def evict_kv(self) -> None:
        """The leaf that the policy ranks lowest."""
        victim = min((p for p in self.nodes if self.is_leaf(p)), key=lambda p: self.rank(self.nodes[p]))
        self.evict_leaf(victim, "kv_pressure")

    def evict_state(self) -> None:
        """The least recently used unlocked state; a leaf goes whole."""
        victim = next(p for p in self.states if not self.nodes[p].state_lock)
        if self.is_leaf(victim):
            self.evict_leaf(victim, "state_pressure")
        else:
            self.drop_state(victim, "state_pressure")

    def used(self) -> tuple[int, int]:
        """(pages, slots) in the tree."""
        return sum(self.edge_pages(p) for p in self.nodes), len(self.states)

    def evictable(self) -> tuple[int, int]:
        """(pages, slots) that eviction could free."""
        return (
            sum(self.edge_pages(p) for p, n in self.nodes.items() if not n.lock),
            sum(not self.nodes[p].state_lock for p in self.states),
        )

    def picture(self) -> dict[Prefix, tuple[bool, int, int]]:
        """(state, lock, state_lock) of each node."""
        return {p: (n.state, n.lock, n.state_lock) for p, n in self.nodes.items()}
