"""What is dropped first: KV by leaves under a policy, states by least recent use (reference 4.10, 4.11)."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from twinpool.errors import ConfigError
from twinpool.memory.pools import Pool
from twinpool.prefix.ghosts import Ghosts
from twinpool.prefix.host import HostTier
from twinpool.prefix.node import DEVICE_GONE, NO_PAGES, NOT_GONE, TOKEN_BYTES, Node

# --radix-eviction-policy: the leaf with the smallest key goes first.
POLICIES: dict[str, Callable[[Node], tuple[int, ...]]] = {
    "lru": lambda node: (node.last_access,),
    "lfu": lambda node: (node.hits, node.last_access),
    "slru": lambda node: (min(node.hits, 2), node.last_access),
    "fifo": lambda node: (node.created,),
    "mru": lambda node: (-node.last_access,),
    "filo": lambda node: (-node.created,),
    "priority": lambda node: (node.priority, node.last_access),
}

KV_PRESSURE, STATE_PRESSURE, PATH_LIMIT = "kv_pressure", "state_pressure", "path_limit"


@dataclass(slots=True)
class Evictions:
    """KV tokens and states that left the device's cache since boot, by what ran short: kv_pressure (pages), state_pressure (slots),
    path_limit (places for states on one path, --mamba-max-states-per-path).

    A leaf goes whole, so each pool loses some for want of the other: KV under state_pressure, states under kv_pressure.
    """

    kv_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys((KV_PRESSURE, STATE_PRESSURE), 0))
    states: dict[str, int] = field(default_factory=lambda: dict.fromkeys((KV_PRESSURE, STATE_PRESSURE, PATH_LIMIT), 0))

    def copy(self) -> Evictions:
        """The counts as they are now."""
        return Evictions(dict(self.kv_tokens), dict(self.states))

    @property
    def n_kv_tokens(self) -> int:
        """KV tokens for whatever reason."""
        return sum(self.kv_tokens.values())

    @property
    def n_states(self) -> int:
        """States for whatever reason."""
        return sum(self.states.values())


class Evictor:
    """Victim order of both pools, and the counters of what the tree holds. A node's memory leaves the tree only here."""

    tier: HostTier | None = None

    def __init__(self, *, pages: Pool, slots: Pool, ghosts: Ghosts, policy: str, page_size: int) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"--radix-eviction-policy {policy} is not one of {', '.join(POLICIES)}.")
        self.pages, self.slots, self._ghosts = pages, slots, ghosts
        self._key = POLICIES[policy]
        self._page_bytes = page_size * TOKEN_BYTES
        self._page_size = page_size
        self._heap: list[tuple[tuple[int, ...], int, Node]] = []
        self._n_pushed = 0
        self.states: OrderedDict[Node, None] = OrderedDict()  # least recently used first; locked ones are passed over
        self.evictable_pages = self.protected_pages = 0
        self.evictable_slots = self.protected_slots = 0
        self.n_nodes = 0
        self.evictions = Evictions()

    def offer(self, node: Node) -> None:
        """A leaf became evictable, or its rank changed. Outdated heap entries are recognised by their key and skipped."""
        key = self._key(node)
        if node.heap_key == key:
            return
        node.heap_key = key
        self._n_pushed += 1
        heapq.heappush(self._heap, (key, self._n_pushed, node))
        if len(self._heap) > 4 * self.n_nodes + 64:
            self._compact()

    def _compact(self) -> None:
        """Drop outdated heap entries. A node whose own entry goes is offered anew when it is a leaf again."""
        kept = []
        for entry in self._heap:
            node = entry[2]
            if node.heap_key is not entry[0]:
                continue
            if node.is_evictable_leaf:
                kept.append(entry)
            else:
                node.heap_key = None
        self._heap = kept
        heapq.heapify(self._heap)

    def attach_state(self, node: Node, slot: int) -> None:
        """The node gets a checkpoint; it is the most recently used one."""
        node.state, node.state_gone = slot, NOT_GONE
        self.states[node] = None
        self.evictable_slots += 1

    def room_pages(self, n: int) -> bool:
        """Evict leaves until `n` pages are free; False, with nothing evicted, if that cannot be."""
        if self.pages.available + self.evictable_pages < n:
            return False
        while self.pages.available < n:
            self._evict_next_leaf()
        return True

    def room_slots(self, n: int) -> bool:
        """Evict states until `n` slots are free; False, with nothing evicted, if that cannot be."""
        if self.slots.available + self.evictable_slots < n:
            return False
        while self.slots.available < n:
            self._evict_next_state()
        return True

    def evict(self, *, pages: int = 0, slots: int = 0) -> None:
        """Free `pages` pages and `slots` slots more (collateral counts), as far as there is anything to evict."""
        target_pages = min(self.pages.available + pages, self.pages.available + self.evictable_pages)
        target_slots = min(self.slots.available + slots, self.slots.available + self.evictable_slots)
        while self.pages.available < target_pages:
            self._evict_next_leaf()
        while self.slots.available < target_slots:
            self._evict_next_state()

    def _drop_state(self, node: Node, reason: str) -> None:
        """Free a node's checkpoint and keep its KV (a tombstone). A copy on the host stays."""
        del self.states[node]
        self.evictable_slots -= 1
        self.evictions.states[reason] += 1
        self.slots.free((node.state,))
        node.state = 0
        if not node.host_state and node.state_gone == NOT_GONE:
            node.state_gone = DEVICE_GONE

    def _evict_next_leaf(self) -> None:
        """The leaf that the policy names goes, KV and state."""
        while True:
            key, _, node = heapq.heappop(self._heap)
            if node.heap_key is not key or not node.is_evictable_leaf:
                if node.heap_key is key:
                    node.heap_key = None
                continue
            return self._evict_leaf(node, KV_PRESSURE)

    def _evict_next_state(self) -> None:
        """The least recently used unlocked state goes; a leaf goes whole, since its KV would end in nothing to resume from."""
        node = next(node for node in self.states if not node.state_lock)
        if node.is_evictable_leaf:
            self._evict_leaf(node, STATE_PRESSURE)
            return
        if self.tier is not None:
            self.tier.keep_state(node)
        self._drop_state(node, STATE_PRESSURE)

    def _evict_leaf(self, node: Node, reason: str) -> None:
        parent = node.parent
        assert parent is not None
        kept = self.tier is not None and self.tier.keep(node)
        if node.state:
            self._drop_state(node, reason)
        # A use of a node is a use of everything above it. That is written down here, where it first matters: not with each use.
        parent.last_access = max(parent.last_access, node.last_access)
        parent.priority = max(parent.priority, node.priority)
        self.pages.free(node.pages)
        self.evictable_pages -= len(node.pages)
        self.evictions.kv_tokens[reason] += len(node.pages) * self._page_size
        node.heap_key = None
        parent.n_device_children -= 1
        if kept and self.tier is not None:
            node.pages = NO_PAGES
            self.tier.moved(node)
        else:
            if self.tier is not None:
                self.tier.discard(node)
            self.unlink(node)
            if self.tier is not None:
                self.tier.moved(parent)
        if parent.is_evictable_leaf:
            self.offer(parent)

    def unlink(self, node: Node) -> None:
        """A node without any copy leaves the tree."""
        parent = node.parent
        assert parent is not None
        self.n_nodes -= 1
        parent.hits += node.hits
        first_page = node.key[: self._page_bytes]
        del parent.children[first_page]
        self._ghosts.remember(parent, first_page, node)
        node.parent = None

    def cap_path(self, tail: Node, limit: int) -> None:
        """--mamba-max-states-per-path: drop the shallowest states on the path to `tail` beyond `limit` (reference 4.11).

        Spared: the tail, locked states, forks, leaves. So the count may stay above the limit; the next insert tries again.
        """
        holders: list[Node] = []
        node: Node | None = tail
        while node is not None:
            if node.state:
                holders.append(node)
            node = node.parent
        excess = len(holders) - limit
        for node in reversed(holders):
            if excess <= 0:
                return
            if node is not tail and not node.state_lock and len(node.children) == 1 and node.n_device_children:
                self._drop_state(node, PATH_LIMIT)
                excess -= 1

    def forget_all(self) -> None:
        """Counters and orders of an empty tree; totals stay."""
        self._heap.clear()
        self.states.clear()
        self.evictable_pages = self.evictable_slots = self.n_nodes = 0
        if self.tier is not None:
            self.tier.forget_all()
