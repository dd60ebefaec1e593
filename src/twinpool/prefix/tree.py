"""The hybrid prefix cache: a radix tree over token ids whose nodes hold KV pages and, perhaps, a state checkpoint (reference 4)."""

from __future__ import annotations

import numpy as np

from twinpool.memory.pools import Pool
from twinpool.prefix import locks
from twinpool.prefix.check import check_host, check_tree
from twinpool.prefix.evict import POLICIES, Evictions, Evictor
from twinpool.prefix.ghosts import Ghosts, attribute
from twinpool.prefix.host import HostPlan, HostTier
from twinpool.prefix.node import HOST_GONE, NO_PAGES, NOT_GONE, TOKEN_BYTES, Held, Inserted, Lock, Match, Node
from twinpool.prefix.walk import split, walk
from twinpool.request import Int32Array, Reuse

__all__ = ["Inserted", "Lock", "Match", "Node", "PrefixTree"]


class PrefixTree:
    """Keys are little-endian int32 token bytes; lengths are tokens, whole pages.

    grid_tokens: distance of checkpoints (reference 3.2), for the branching position and the reuse report; max_states_per_path: -1
    for no limit; disabled: every match is empty (--disable-radix-cache).
    """

    def __init__(
        self,
        *,
        pages: Pool,
        slots: Pool,
        page_size: int,
        grid_tokens: int,
        eviction_policy: str = "lru",
        max_states_per_path: int = -1,
        disabled: bool = False,
        host: HostPlan | None = None,
    ) -> None:
        self.page_size = page_size
        self.disabled = disabled
        self._page_bytes = page_size * TOKEN_BYTES
        self._grid = grid_tokens
        self._cap = max_states_per_path
        self._pages, self._slots = pages, slots
        self._ghosts = Ghosts()
        self._evictor = Evictor(
            pages=pages, slots=slots, ghosts=self._ghosts, policy=eviction_policy, page_size=page_size
        )
        self.tier: HostTier | None = None
        if host is not None and not disabled:
            self.tier = HostTier(
                arena=host.arena, policy=host.policy, rank=POLICIES[eviction_policy], orders=host.orders,
                page_size=page_size, unlink=self._evictor.unlink,
            )  # fmt: skip
            self._evictor.tier = self.tier
        self._now = 0
        self.root = Node(key=b"", depth=0, pages=NO_PAGES, parent=None, now=0)

    # Counts of what the tree holds: pages and slots.
    @property
    def evictable_pages(self) -> int:
        """KV pages that eviction can free."""
        return self._evictor.evictable_pages

    @property
    def protected_pages(self) -> int:
        """KV pages locked by running requests."""
        return self._evictor.protected_pages

    @property
    def evictable_slots(self) -> int:
        """Checkpoints that eviction can free."""
        return self._evictor.evictable_slots

    @property
    def protected_slots(self) -> int:
        """Checkpoints locked by running requests."""
        return self._evictor.protected_slots

    @property
    def n_nodes(self) -> int:
        """Nodes without the root."""
        return self._evictor.n_nodes

    @property
    def evictions(self) -> Evictions:
        """What has left the device's cache since boot, and why; the caller copies what it keeps."""
        return self._evictor.evictions

    def match(self, key: bytes, *, limit_tokens: int, touch: bool = True, count: bool = True) -> Match:
        """The longest reusable prefix of `key` within its first `limit_tokens` tokens (floored to pages).

        A partial edge is split where the key leaves it. `touch` False is a probe: nothing is split and no order changes. `count` False:
        a use that has been counted, of a request that still waits.
        """
        prompt = len(key) // TOKEN_BYTES
        if self.disabled:
            return Match(0, self.root, None, Reuse(prompt=prompt, gaps=(("new", prompt),)))
        limit = min(limit_tokens, prompt) * TOKEN_BYTES // self._page_bytes * self._page_bytes
        path, position, partial, shared = walk(self.root, key, limit, self._page_bytes)
        best, gone, gone_from = self.root, 0, NOT_GONE
        host: Node | None = None
        for node in path:
            if node.state:
                best, host = node, None
            elif node.host_state:
                host = node
            elif node.state_gone:
                gone, gone_from = node.depth, node.state_gone
        evicted = 0
        if shared:
            assert partial is not None
            if touch:
                self.split(partial, shared)
        elif partial is None:
            last = path[-1] if path else self.root
            evicted = Ghosts.evicted_tokens(last, key, position, self._page_bytes)
        kv, resume = (position + shared) // TOKEN_BYTES, best.depth
        if touch:
            # What may be brought back must not be dropped for a copy of what is on the device: that waits for the restore.
            self._touch(best, copy=host is None, count=count)
        branching = kv // self._grid * self._grid
        reuse = attribute(
            prompt=prompt, limit=limit_tokens, kv=kv, resume=resume, gone=gone, grid=self._grid, evicted=evicted,
            from_host=gone_from == HOST_GONE,
        )  # fmt: skip
        return Match(resume, best, branching if branching > resume else None, reuse, host)

    def hold(self, node: Node) -> Held:
        """Protect everything that a restore of `node` (Match.host_node) starts from: device KV down its path, and host copies."""
        assert self.tier is not None
        self.tier.hold(node)
        anchor = node
        while anchor.parent is not None and not anchor.on_device:
            anchor = anchor.parent
        return Held(node, self.lock(anchor))

    def let_go(self, held: Held) -> None:
        """Undo `hold`."""
        assert self.tier is not None
        self.unlock(held.lock)
        self.tier.let_go(held.node)

    def restore(self, node: Node) -> bool:
        """Bring the path of a held node and its state back to the device; False, with nothing changed but evictions, if there is
        no room. The copies are told; the caller locks the node before it lets go.
        """
        assert self.tier is not None
        missing: list[Node] = []
        step = node
        while step.parent is not None and not step.on_device:
            missing.append(step)
            step = step.parent
        if not (self.room_pages(self.tier.pages_of(missing)) and self.room_slots(1)):
            return False
        for one in reversed(missing):
            self._bring_back(one)
        self._bring_back_state(node)
        self._touch(node)
        return True

    def _bring_back(self, node: Node) -> None:
        """Device pages for a node whose KV is on the host, and the copy that fills them."""
        assert self.tier is not None
        assert node.host_pages is not None
        ids = self._pages.alloc(len(node.host_pages))
        assert ids is not None
        self._adopt(node, ids)
        self.tier.load(node)

    def _bring_back_state(self, node: Node) -> None:
        """A device slot for a node's host state, and the copy that fills it."""
        assert self.tier is not None
        slots = self._slots.alloc(1)
        assert slots is not None
        self._evictor.attach_state(node, int(slots[0]))
        self.tier.load_state(node, slot=int(slots[0]))

    def _adopt(self, node: Node, pages: Int32Array) -> None:
        """A node that was on the host alone gets device pages."""
        node.pages = pages
        assert node.parent is not None
        node.parent.n_device_children += 1
        self._evictor.evictable_pages += len(pages)
        assert self.tier is not None
        self.tier.moved(node)

    def insert(
        self, key: bytes, pages: Int32Array, *, length: int, owned_from: int, state_slot: int | None, priority: int = 0
    ) -> Inserted:
        """Make the first `length` tokens of `key` matchable, with the state after them.

        key: at least `length` tokens; pages: int32 [length / page_size], the caller's page table; owned_from: tokens before it are the
        tree's already. The tree becomes the owner of the pages past what existed, and of `state_slot` if it takes it; it frees
        nothing of the caller's.
        """
        limit = length * TOKEN_BYTES
        assert length > 0
        assert limit % self._page_bytes == 0
        assert limit <= len(key)
        assert not self.disabled
        path, position, partial, shared = walk(self.root, key, limit, self._page_bytes)
        end = path[-1] if path else self.root
        if shared:
            assert partial is not None
            end = self.split(partial, shared)
            position += shared
        matched = position // TOKEN_BYTES
        existing = self._adopt_path(path if not shared else [*path, end], pages)
        freed = pages[owned_from // self.page_size : max(owned_from, existing) // self.page_size]
        if matched < length:
            end = self._add_leaf(end, key[position:limit], pages[matched // self.page_size : length // self.page_size])
        end.priority = max(end.priority, priority)
        taken = state_slot is not None and not end.state
        if taken:
            assert state_slot
            self._evictor.attach_state(end, state_slot)
        self._touch(end)
        if taken and self._cap >= 0:
            self._evictor.cap_path(end, self._cap)
        whole = self.path_pages(end) if len(freed) else pages[: length // self.page_size]
        return Inserted(end, freed, taken, whole)

    def _adopt_path(self, path: list[Node], pages: Int32Array) -> int:
        """Nodes of the path that were on the host alone take the caller's device pages; returns tokens that were on the device."""
        if self.tier is None:
            return path[-1].depth if path else 0
        existing = 0
        for node in path:
            if node.on_device:
                existing = node.depth
            else:
                first = node.depth - len(node.key) // TOKEN_BYTES
                self._adopt(node, pages[first // self.page_size : node.depth // self.page_size].copy())
        return existing

    def path_pages(self, node: Node) -> Int32Array:
        """Page ids from the root to the end of `node` (int32 [depth / page_size])."""
        parts: list[Int32Array] = []
        while node.parent is not None:
            parts.append(node.pages)
            node = node.parent
        return np.concatenate(parts[::-1]) if parts else NO_PAGES

    def lock(self, node: Node) -> Lock:
        """Protect the KV of the whole path and the state of `node` itself (reference 4.9)."""
        return locks.take(self._evictor, node, below=self.root)

    def unlock(self, lock: Lock) -> None:
        """Give back exactly what `lock` took."""
        locks.give_back(self._evictor, lock)

    def relock(self, lock: Lock, node: Node) -> Lock:
        """Move a lock, without a moment in which neither place is protected; cheap when `node` is further down the same path."""
        return locks.move(self._evictor, lock, node, root=self.root)

    def room_pages(self, n: int) -> bool:
        """Evict KV until `n` pages are free; False, with nothing evicted, if that cannot be."""
        return self._evictor.room_pages(n)

    def room_slots(self, n: int) -> bool:
        """Evict states until `n` slots are free; False, with nothing evicted, if that cannot be."""
        return self._evictor.room_slots(n)

    def evict(self, *, pages: int = 0, slots: int = 0) -> None:
        """Free that much more, as far as there is anything to evict."""
        self._evictor.evict(pages=pages, slots=slots)

    def reset(self) -> None:
        """Free everything the tree owns. Nothing may be locked."""
        assert self.protected_pages == self.protected_slots == 0, "the tree is in use"
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            self._pages.free(node.pages)
            if node.state:
                self._slots.free((node.state,))
            if self.tier is not None:
                self.tier.give_up(node)
        self._evictor.forget_all()
        self._ghosts.clear()
        self.root.children.clear()
        self.root.n_device_children = self.root.n_host_children = 0
        self.root.ghosts.clear()

    def close_tier(self) -> None:
        """Go on as a tree without a host tier. It must be empty, as after `reset`."""
        assert self.tier is None or not self.tier.states
        self.tier = self._evictor.tier = None

    def check(self) -> None:
        """Assert every invariant from scratch (tests after each step, the server when idle)."""
        check_tree(self.root, self._evictor, self._page_bytes)
        if self.tier is not None:
            check_host(self.root, self.tier)
        self._pages.check()
        self._slots.check()

    def split(self, child: Node, at_bytes: int) -> Node:
        """Cut an edge after so many bytes; returns the new upper node."""
        self._evictor.n_nodes += 1
        return split(child, at_bytes, self._page_bytes)

    def _add_leaf(self, parent: Node, key: bytes, pages: Int32Array) -> Node:
        node = self.hang(parent, key, pages.copy())
        parent.n_device_children += 1
        self._evictor.evictable_pages += len(pages)
        return node

    def hang(self, parent: Node, key: bytes, pages: Int32Array) -> Node:
        """A new node below `parent`, nowhere yet if it has no pages: then the caller gives it a copy on the host, or unhangs it."""
        node = Node(
            key=key, depth=parent.depth + len(key) // TOKEN_BYTES, pages=pages, parent=parent, now=self._now + 1
        )
        parent.children[key[: self._page_bytes]] = node
        self._ghosts.revive(parent, node, self._page_bytes)
        self._evictor.n_nodes += 1
        return node

    def unhang(self, node: Node) -> None:
        """Take back a node that has got no KV anywhere."""
        assert node.parent is not None
        del node.parent.children[node.key[: self._page_bytes]]
        self._evictor.n_nodes -= 1

    def _touch(self, node: Node, *, copy: bool = True, count: bool = True) -> None:
        """`node` was used: its state becomes the most recent one, its path's KV is refreshed (by eviction, when it gets there), and
        it may get a copy on the host.
        """
        self._now += 1
        node.last_access = self._now
        node.hits += count
        if node.state:
            self._evictor.states.move_to_end(node)
        if node.is_evictable_leaf:
            self._evictor.offer(node)
        if self.tier is not None and node.parent is not None:
            self.tier.used(node, copy=copy)
