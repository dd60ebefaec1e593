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


def store_copy(tree: PrefixTree, node: Node, key: bytes) -> StoreCopy | None:
    """The order that gives a node with a state on the device to the disk, with the KV since the last such node above it.

    None when the disk has been given it already. key: at least the node's tokens.
    """
    if node.stored or not node.state or node.parent is None:
        return None
    above = node.parent
    while above.parent is not None and not above.stored:
        above = above.parent
    start = above.depth
    pages = tree.path_pages(node)[start // tree.page_size :]
    node.stored = True
    tokens = np.frombuffer(key, np.int32, node.depth)
    return StoreCopy(tokens, start, node.depth, pages, node.state)


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
