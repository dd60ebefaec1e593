"""The tree's invariants, recomputed from nothing (reference 9.2, 17 and 21–23)."""

from __future__ import annotations

import numpy as np

from twinpool.prefix.evict import Evictor
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
        if node is root:
            continue
        n_nodes += 1
        assert node.key
        assert len(node.key) == len(node.pages) * page_bytes
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
