"""The host tier of the tree: which nodes get a copy in host memory, which copies go first, and bringing them back (reference 5).

Copies run in the order in which they are told, before the forward of the next step (step.HostCopy). So a page that is copied and
freed in one breath is read before anybody writes it, and nothing has to wait for an acknowledgement.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from twinpool.memory.host import HostArena
from twinpool.prefix.node import HOST_GONE, NO_PAGES, NOT_GONE, TOKEN_BYTES, Node
from twinpool.step import HostCopy, HostFill, Order

# How often a node must have been used before it is copied; write_back copies when the device copy goes.
POLICIES = {"write_through": 1, "write_through_selective": 2, "write_back": None}
# In which order kinds of leaves go: KV that nothing can be resumed from; under write_back what the device has as well, which is copied
# once more when it leaves it; and the rest.
_DEAD, _TWICE, _KEPT, _ALL = (0,), (1,), (2,), (3,)
_FEW_ENTRIES = 64  # the order of eviction is not cleared of outdated entries before it has so many


@dataclass(frozen=True, slots=True, eq=False)
class HostPlan:
    """What a tree needs for a host tier: its memory, when copies are made (a key of POLICIES), and where they are told."""

    arena: HostArena
    policy: str
    orders: list[Order]


@dataclass(slots=True)
class HostTotals:
    """Counters since boot: tokens of KV and states copied to the host and back, dropped there, read from the disk into it,
    gone when the whole cache was emptied, and not copied for want of room; lost: KV that write_back was to copy then, and dropped."""

    saved_tokens: int = 0
    saved_states: int = 0
    loaded_tokens: int = 0
    loaded_states: int = 0
    evicted_tokens: int = 0
    evicted_states: int = 0
    filled_tokens: int = 0
    filled_states: int = 0
    flushed_tokens: int = 0
    flushed_states: int = 0
    unsaved_tokens: int = 0
    unsaved_states: int = 0
    lost_tokens: int = 0
    lost_nodes: int = 0


class HostTier:
    """Owns the host copies of nodes. policy: a key of POLICIES; rank: leaves of the smallest go first (evict.POLICIES); orders: where
    copies are told, in order; unlink: takes a node without any copy out of the tree.
    """

    def __init__(
        self, *, arena: HostArena, policy: str, rank: Callable[[Node], tuple[int, ...]], orders: list[Order],
        page_size: int, unlink: Callable[[Node], None],
    ) -> None:  # fmt: skip
        self.arena = arena
        self.totals = HostTotals()
        self.states: OrderedDict[Node, None] = OrderedDict()  # least recently used first
        self._needed_uses = POLICIES[policy]
        self._key = rank
        self._orders, self._unlink = orders, unlink
        self._page_size = page_size
        self._heap: list[tuple[tuple[int, ...], int, Node]] = []
        self._pushed = 0
        self._most_entries = _FEW_ENTRIES
        self._wanted: list[Node] = []  # whose states `hold` keeps

    def used(self, node: Node, *, copy: bool) -> None:
        """A node was inserted or resumed from: note that it is wanted, and with `copy` copy its path if it has been used often
        enough.
        """
        if node.host_state:
            self.states.move_to_end(node)
        if copy and node.host_pages is not None:
            self._save_state(node)  # a state that came after the KV, under every policy
        elif copy and self._needed_uses is not None and node.hits >= self._needed_uses:
            self._save_path(node)
        self.moved(node)

    def keep(self, node: Node) -> bool:
        """Whether an evicted device leaf stays in the tree by its host copy, which write_back makes now if there is a state to resume
        from.
        """
        if node.host_pages is None and (node.host_state or (node.state and self._needed_uses is None)):
            self._save_path(node)
            if node.host_pages is None:
                self.totals.lost_nodes += 1
                self.totals.lost_tokens += len(node.pages) * self._page_size
        if node.host_pages is None:
            return False
        self._save_state(node, before=self._newest_to_drop(node))
        return True

    def keep_state(self, node: Node) -> bool:
        """Whether a state that leaves the device stays on the host, where write_back copies it now."""
        if node.host_pages is not None or self._needed_uses is None:
            self._save_state(node, before=self._newest_to_drop(node))
        return node.host_state != 0

    def moved(self, node: Node) -> None:
        """A node was used, has lost its KV on the device, or got it: its rank may be another."""
        self._offer(node)

    def discard(self, node: Node) -> None:
        """A node leaves the tree with its device copy: what is on the host is a state without KV (write_back), which goes, too."""
        assert not node.children
        assert node.host_pages is None
        if node.host_state:
            self._drop_state(node)

    def hold(self, node: Node) -> None:
        """Keep the KV copies of a node and of those above it, and the state of the node, until `let_go`."""
        self._wanted.append(node)
        step: Node | None = node
        while step is not None:
            step.host_lock += 1
            step = step.parent

    def let_go(self, node: Node) -> None:
        """Undo `hold`."""
        self._wanted.remove(node)
        step: Node | None = node
        while step is not None:
            step.host_lock -= 1
            self._offer(step)
            step = step.parent

    def pages_of(self, nodes: list[Node]) -> int:
        """Device pages that restoring these nodes takes."""
        return sum(len(node.host_pages) for node in nodes if node.host_pages is not None)

    def load(self, node: Node) -> None:
        """Tell the copy that brings back a node's KV, to its new device pages."""
        assert node.host_pages is not None
        self._orders.append(HostCopy(False, node.pages, node.host_pages))
        self.totals.loaded_tokens += len(node.host_pages) * self._page_size

    def load_state(self, node: Node, *, slot: int) -> None:
        """Tell the copy that brings back a node's state, to a new device slot."""
        self._orders.append(HostCopy(False, NO_PAGES, NO_PAGES, slot, node.host_state))
        self.totals.loaded_states += 1

    def room(self, *, pages: int = 0, slots: int = 0, before: Node | None = None) -> bool:
        """Drop copies, or only those that go before that node's, until so many pages and states fit; False when that cannot be."""
        while True:
            lacks_pages, lacks_slots = self.arena.lacks(pages=pages, slots=slots)
            if not (lacks_pages or lacks_slots):
                return True
            if not (self._evict_for_pages(before) if lacks_pages else self._evict_for_slots(before)):
                return False

    def _evict_for_pages(self, before: Node | None) -> bool:
        """Drop one thing that may make room for KV; False when there is none."""
        return self._evict_leaf(self._limit(before)) or (not self.arena.has_quota and self._evict_state(before))

    def _evict_for_slots(self, before: Node | None) -> bool:
        """Drop one thing that may make room for a state; False when there is none. Under a quota KV makes no room for states."""
        if self.arena.has_quota:
            return self._evict_state(before)
        return self._evict_leaf(_KEPT) or self._evict_state(before) or self._evict_leaf(self._limit(before))

    def _limit(self, before: Node | None) -> tuple[int, ...]:
        """Leaves of a smaller rank may go."""
        return _ALL if before is None else (*_KEPT, *self._key(before))

    def fill(self, node: Node, kv: memoryview, state: memoryview) -> bool:
        """Give a node that has just been hung into the tree, or one without a state, what was read from the disk.

        kv: bytes of its pages, not read when it has KV somewhere. False, with nothing changed, when there is no room.
        """
        parent = node.parent
        assert parent is not None
        if not self.arena.can_ever_hold(pages=node.depth // self._page_size, slots=1):
            return False
        if parent.parent is not None and parent.host_pages is None:
            self._save_path(parent)
        if parent.parent is not None and parent.host_pages is None:
            return False
        lacks_kv = not node.on_device and node.host_pages is None
        n_pages = len(node.key) // (self._page_size * TOKEN_BYTES) if lacks_kv else 0
        for one in (parent, node):  # neither what it stands on nor a copy of its own may make room for it
            self.hold(one)
        found = self.arena.alloc(pages=n_pages, slots=1) if self.room(pages=n_pages, slots=1) else None
        for one in (node, parent):
            self.let_go(one)
        if found is None:
            return False
        pages, slots = found
        if lacks_kv:
            node.host_pages = pages
            parent.n_host_children += 1
        node.host_state = int(slots[0])
        node.stored = True
        self.totals.filled_tokens += n_pages * self._page_size
        self.totals.filled_states += 1
        self.states[node] = None
        self._orders.append(HostFill(pages, kv, node.host_state, state))
        self._offer(node)
        return True

    def give_up(self, node: Node) -> None:
        """Free a node's copies: the whole tree is being emptied."""
        pages = node.host_pages if node.host_pages is not None else NO_PAGES
        self.arena.free(pages=pages, slot=node.host_state)
        self.totals.flushed_tokens += len(pages) * self._page_size
        self.totals.flushed_states += bool(node.host_state)

    def forget_all(self) -> None:
        """The tree has been emptied: every copy is given back."""
        self._heap.clear()
        self.states.clear()

    def _save_path(self, node: Node) -> None:
        """Copy what is not on the host yet from the root down to the node: KV below a gap could not be resumed from."""
        self.hold(node)  # nothing of the path may be dropped to make room for the rest of it
        missing: list[Node] = []
        step: Node | None = node
        while step is not None and step.parent is not None:
            if step.host_pages is None:
                missing.append(step)
            step = step.parent
        while missing and self._save(missing[-1]):
            missing.pop()
        if missing:
            self.totals.unsaved_tokens += len(missing[-1].pages) * self._page_size
        for step in missing:
            if step.state:
                step.state_gone = HOST_GONE
        self.let_go(node)

    def _save(self, node: Node) -> bool:
        """Copy a node's KV, and its state if there is room for that, too. Everything above it is on the host."""
        if not self.arena.can_ever_hold(pages=node.depth // self._page_size, slots=1):
            return False  # it would push out everything else, and nothing could be resumed from it
        found = self.arena.alloc(pages=len(node.pages)) if self.room(pages=len(node.pages)) else None
        if found is None:
            return False
        node.host_pages = found[0]
        assert node.parent is not None
        node.parent.n_host_children += 1
        self._orders.append(HostCopy(True, node.pages, node.host_pages))
        self.totals.saved_tokens += len(node.pages) * self._page_size
        self._save_state(node)
        return True

    def _newest_to_drop(self, node: Node) -> Node | None:
        """What a state that leaves the device may push out: anything under write_back (None); else the host has dropped it before,
        and only what goes before it.
        """
        return None if self._needed_uses is None else node

    def _save_state(self, node: Node, *, before: Node | None = None) -> None:
        """Copy a node's state if it has one that the host has not, in place of what goes before that node, or of anything."""
        if not node.state or node.host_state:
            return
        node.host_lock += 1
        found = self.arena.alloc(pages=0, slots=1) if self.room(slots=1, before=before) else None
        node.host_lock -= 1
        self._offer(node)
        if found is None:
            self.totals.unsaved_states += 1
            node.state_gone = HOST_GONE
            return
        node.host_state, node.state_gone = int(found[1][0]), NOT_GONE
        self.states[node] = None
        self._orders.append(HostCopy(True, NO_PAGES, NO_PAGES, node.state, node.host_state))
        self.totals.saved_states += 1

    def _offer(self, node: Node) -> None:
        """A node may have become the next to go."""
        if not node.is_host_leaf:
            return
        key = self._rank(node)
        if node.host_heap_key == key:
            return
        node.host_heap_key = key
        self._pushed += 1
        heapq.heappush(self._heap, (key, self._pushed, node))
        if len(self._heap) > self._most_entries:
            # One of each node, also of those that are held now: nobody offers them again under the same key.
            self._heap = list({one[2]: one for one in self._heap if one[2].host_heap_key == one[0]}.values())
            heapq.heapify(self._heap)
            self._most_entries = 2 * len(self._heap) + _FEW_ENTRIES

    def _rank(self, node: Node) -> tuple[int, ...]:
        """Leaves of the smallest rank go first. Of those that the device has as well that is the one which it will evict last."""
        if not node.on_device:
            return (*_KEPT, *self._key(node)) if node.host_state else _DEAD
        if self._needed_uses is None:
            return (*_TWICE, *(-part for part in self._key(node)))
        return (*_KEPT, *self._key(node))

    def _evict_leaf(self, limit: tuple[int, ...]) -> bool:
        """The copy of the leaf of the smallest rank goes, KV and state; False when there is none below the limit."""
        while self._heap:
            key, _, node = self._heap[0]
            if node.host_heap_key == key and node.is_host_leaf and self._rank(node) == key:
                if key >= limit:
                    return False
                heapq.heappop(self._heap)
                self._drop(node)
                return True
            heapq.heappop(self._heap)
            if node.host_heap_key == key:
                node.host_heap_key = None
                self._offer(node)  # used, or dead or alive again, since it was offered
        return False

    def _evict_state(self, before: Node | None) -> bool:
        """The state that was used longest ago goes; a leaf goes whole, since its KV would end in nothing to resume from."""
        node = next((one for one in self.states if one not in self._wanted), None)
        if node is None or (before is not None and node.last_access >= before.last_access):
            return False
        if node.is_host_leaf and not node.on_device:
            self._drop(node)
            return True
        self._drop_state(node)
        self._offer(node)
        return True

    def _drop_state(self, node: Node) -> None:
        self.arena.free(slot=node.host_state)
        node.host_state = 0
        del self.states[node]
        self.totals.evicted_states += 1
        node.state_gone = HOST_GONE  # whatever the device still has: a larger host would keep it when that goes, too

    def _drop(self, node: Node) -> None:
        """Give a node's copies back; without a device copy the node goes with them."""
        assert node.host_pages is not None
        if node.host_state:
            self._drop_state(node)
        self.arena.free(pages=node.host_pages)
        self.totals.evicted_tokens += len(node.host_pages) * self._page_size
        node.host_pages = node.host_heap_key = None
        parent = node.parent
        assert parent is not None
        parent.n_host_children -= 1
        if not node.on_device:
            self._unlink(node)
        self._offer(parent)
