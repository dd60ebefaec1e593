"""The disk tier's two doors to the tree: what is given to it at the end of a turn, and what it brings back into the host tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twinpool.prefix.node import NO_PAGES, TOKEN_BYTES, Node
from twinpool.prefix.tree import PrefixTree
from twinpool.prefix.walk import walk
from twinpool.step import StoreCopy


@dataclass(frozen=True, slots=True, eq=False)
class StoredSegment:
    """Tokens [start, end) as they lay in the arena: kv of whole pages, and the state after `end`, in bytes."""

    start: int
    end: int
    kv: memoryview
    state: memoryview


def store_copies(tree: PrefixTree, node: Node, key: bytes) -> list[StoreCopy]:
    """The orders that give the disk every state on the device down to `node`, each with the KV since the one above it.

    Not the last state alone: where prompts part, and where a prompt ended, others go on. What the disk was given is not given again.
    key: at least the node's tokens.
    """
    path: list[Node] = []
    step = node
    while step.parent is not None:
        path.append(step)
        step = step.parent
    pages = tree.path_pages(node)
    tokens = np.frombuffer(key, np.int32, node.depth)
    orders: list[StoreCopy] = []
    start = 0
    for step in reversed(path):
        if not step.stored and not step.state:
            continue
        if not step.stored:
            step.stored = True
            span = pages[start // tree.page_size : step.depth // tree.page_size]
            orders.append(StoreCopy(tokens[: step.depth], start, step.depth, span, step.state))
        start = step.depth
    return orders


def forget_stored(tree: PrefixTree, key: bytes, *, kept_tokens: int) -> None:
    """The disk has no more than the first kept_tokens of `key`: what the tree has beyond them is given to it once more."""
    path, _, _, _ = walk(tree.root, key, len(key), tree.page_size * TOKEN_BYTES)
    for node in path:
        node.stored = node.stored and node.depth <= kept_tokens


def adopt_stored(tree: PrefixTree, key: bytes, segments: Sequence[StoredSegment]) -> int:
    """Hang what was read from the disk into the tree, as copies on the host; returns how far it can be resumed from (tokens).

    A segment that does not join what the tree has, or finds no room, ends it.
    """
    reached = 0
    for segment in segments:
        if not _adopt(tree, key, segment):
            break
        reached = segment.end
    return reached


def _adopt(tree: PrefixTree, key: bytes, segment: StoredSegment) -> bool:
    tier = tree.tier
    assert tier is not None
    page_bytes, limit = tree.page_size * TOKEN_BYTES, segment.end * TOKEN_BYTES
    path, position, partial, shared = walk(tree.root, key, limit, page_bytes)
    parent = path[-1] if path else tree.root
    if shared:
        assert partial is not None
        parent = tree.split(partial, shared)
        position += shared
    if position // TOKEN_BYTES < segment.start:
        return False  # what it stands on has gone meanwhile
    if position == limit:
        return bool(parent.state or parent.host_state) or tier.fill(parent, memoryview(b""), segment.state)
    node = tree.hang(parent, key[position:limit], NO_PAGES)
    done = (position // TOKEN_BYTES - segment.start) // tree.page_size
    n_pages = (segment.end - segment.start) // tree.page_size
    page_kv_bytes = segment.kv.nbytes // n_pages
    if tier.fill(node, segment.kv[done * page_kv_bytes :], segment.state):
        return True
    tree.unhang(node)
    return False
