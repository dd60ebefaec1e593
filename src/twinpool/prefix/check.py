"""The tree's invariants, recomputed from nothing (reference 9.2, 17 and 21–23)."""

from __future__ import annotations

import numpy as np

from twinpool.prefix.evict import Evictor
from twinpool.prefix.host import HostTier
from twinpool.prefix.node import NO_PAGES, TOKEN_BYTES, Node


def check_tree(root: Node, evictor: Evictor, page_bytes: int) -> None:
    """Assert structure, ownership and counters of the tree under `root`. Cost grows with the tree."""
    edges = [NO_PAGES]
    states: dict[int, Node] = {}
    evictable_pages = evictable_slots = n_nodes = 0
    offered = {id(node) for key, _, node in evictor._heap if node.heap_key is key}
    stack = [root]
    while stack:
        node = stack.pop()
        for first_page, child in node.children.items():
            assert child.parent is node
            assert child.key[:page_bytes] == first_page
            assert child.depth == node.depth + len(child.key) // TOKEN_BYTES
            assert child.lock <= node.lock or node is root, "a child is locked and its parent is not"
        stack.extend(node.children.values())
        n_device = sum(child.on_device for child in node.children.values())
        n_host = sum(child.host_pages is not None for child in node.children.values())
        assert (n_device, n_host) == (node.n_device_children, node.n_host_children), "children are miscounted"
        if node is root:
            continue
        _check_copies(node, root, page_bytes)
        n_nodes += 1
        assert node.key
        assert 0 <= node.state_lock <= node.lock, "a state is locked and its KV is not"
        assert not (node.state_lock and not node.state), "a locked state is gone"
        edges.append(node.pages)
        evictable_pages += len(node.pages) * (not node.lock)
        if node.state:
            assert node.state not in states, "two nodes own one slot"
            states[node.state] = node
            evictable_slots += not node.state_lock
        assert not node.is_evictable_leaf or id(node) in offered, "an evictable leaf is not in the eviction order"
    pages = np.concatenate(edges)
    slots = np.fromiter(states, np.int32)
    assert len(np.unique(pages)) == len(pages), "two nodes own one page"
    assert not evictor.pages.n_free_among(pages), "a cached page is in the free ring"
    assert not evictor.slots.n_free_among(slots), "a cached slot is in the free ring"
    assert set(evictor.states) == set(states.values())
    assert n_nodes == evictor.n_nodes
    assert (evictable_pages, len(pages) - evictable_pages) == (evictor.evictable_pages, evictor.protected_pages)
    assert (evictable_slots, len(states) - evictable_slots) == (evictor.evictable_slots, evictor.protected_slots)


def _check_copies(node: Node, root: Node, page_bytes: int) -> None:
    """A node is somewhere; what is on the device hangs below what is on the device, and host copies below host copies."""
    n_pages = len(node.key) // page_bytes
    assert node.on_device or node.host_pages is not None, "a node has no KV anywhere"
    assert len(node.pages) in (0, n_pages), "a node has part of its device pages"
    assert node.host_pages is None or len(node.host_pages) == n_pages, "a node has part of its host pages"
    assert node.on_device or not (node.state or node.lock), "a state or a lock without KV on the device"
    assert not node.host_lock, "a copy is held although nothing is being copied"
    parent = node.parent
    if parent is not root and parent is not None:
        assert parent.on_device or not node.on_device, "device KV below a gap"
        assert parent.host_pages is not None or node.host_pages is None, "host KV below a gap"


def check_host(root: Node, tier: HostTier) -> None:
    """Assert that the host's arena holds exactly the copies of the tree, and that whatever may go is in the order of eviction."""
    pages, slots = [NO_PAGES], []
    offered = {id(node) for key, _, node in tier._heap if node.host_heap_key == key}
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        if node.host_pages is not None:
            pages.append(node.host_pages)
        if node.host_state:
            slots.append(node.host_state)
            assert node in tier.states, "a host state is not in the order of eviction"
        assert not node.is_host_leaf or id(node) in offered, "a host leaf is not in the order of eviction"
    ids = np.concatenate(pages)
    assert len(np.unique(ids)) == len(ids) == tier.arena.used_pages, "host pages are lost or have two owners"
    assert len(set(slots)) == len(slots) == tier.arena.used_slots == len(tier.states), (
        "host states are lost or have two owners"
    )
    tier.arena.check()
