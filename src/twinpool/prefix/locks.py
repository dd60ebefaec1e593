"""Locks: the KV of a whole path, the state of its last node only (reference 4.9)."""

from __future__ import annotations

from twinpool.prefix.evict import Evictor
from twinpool.prefix.node import Lock, Node


def take(evictor: Evictor, node: Node, *, below: Node) -> Lock:
    """Lock the KV of `node` and of what is above it, down from `below` (not included), and the state of `node`."""
    step: Node | None = node
    while step is not None and step is not below:
        if not step.lock:
            evictor.evictable_pages -= len(step.pages)
            evictor.protected_pages += len(step.pages)
        step.lock += 1
        step = step.parent
    if not node.state:
        return Lock(node, False)
    if not node.state_lock:
        evictor.evictable_slots -= 1
        evictor.protected_slots += 1
    node.state_lock += 1
    return Lock(node, True)


def give_back(evictor: Evictor, lock: Lock) -> None:
    """Undo `lock` up to the root."""
    give_back_state(evictor, lock)
    step: Node | None = lock.node
    while step is not None and step.parent is not None:
        step.lock -= 1
        if not step.lock:
            evictor.evictable_pages += len(step.pages)
            evictor.protected_pages -= len(step.pages)
        step = step.parent
    if lock.node.is_evictable_leaf:
        evictor.offer(lock.node)


def give_back_state(evictor: Evictor, lock: Lock) -> None:
    """Undo the part of `lock` that holds a state."""
    if lock.holds_state:
        lock.node.state_lock -= 1
        if not lock.node.state_lock:
            evictor.evictable_slots += 1
            evictor.protected_slots -= 1


def move(evictor: Evictor, lock: Lock, node: Node, *, root: Node) -> Lock:
    """Lock `node` instead, without a moment in which neither is locked. Further down the same path only the new part is walked."""
    anchor, step = lock.node, node
    while step.depth > anchor.depth:
        assert step.parent is not None
        step = step.parent
    if step is anchor:
        moved = take(evictor, node, below=anchor)
        give_back_state(evictor, lock)
        return moved
    moved = take(evictor, node, below=root)
    give_back(evictor, lock)
    return moved
