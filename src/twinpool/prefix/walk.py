"""Walking a key down the tree, and splitting an edge. Edges are compared with one memcmp each, at the key's own bytes."""

from __future__ import annotations

import numpy as np

from twinpool.prefix.node import TOKEN_BYTES, Node


def common_bytes(edge: bytes, key: bytes, offset: int, limit: int) -> int:
    """Length of the longest common prefix of `edge` and key[offset:limit], in bytes (a whole number of tokens)."""
    n = min(len(edge), limit - offset) // TOKEN_BYTES
    if not n:
        return 0
    differ = np.frombuffer(edge, np.int32, n) != np.frombuffer(key, np.int32, n, offset)
    first = int(differ.argmax())
    return (first if differ[first] else n) * TOKEN_BYTES


def walk(root: Node, key: bytes, limit: int, page_bytes: int) -> tuple[list[Node], int, Node | None, int]:
    """Follow `key[:limit]` (bytes, whole pages).

    Returns (nodes matched whole, from below the root; bytes matched by them; the child matched in part, if any; bytes of it
    that match, whole pages).
    """
    path: list[Node] = []
    node, position = root, 0
    while position + page_bytes <= limit:
        child = node.children.get(key[position : position + page_bytes])
        if child is None:
            break
        end = position + len(child.key)
        if end <= limit and key.startswith(child.key, position):
            path.append(child)
            node, position = child, end
            continue
        shared = common_bytes(child.key, key, position, limit) // page_bytes * page_bytes
        return path, position, child, shared
    return path, position, None, 0


def split(child: Node, at_bytes: int, page_bytes: int) -> Node:
    """Cut an edge; returns the new upper node, which has the KV of the first `at_bytes` bytes, the lock, and no state."""
    parent = child.parent
    assert parent is not None
    n_pages = at_bytes // page_bytes
    on_device = child.on_device
    upper = Node(
        key=child.key[:at_bytes],
        depth=child.depth - (len(child.key) - at_bytes) // TOKEN_BYTES,
        pages=child.pages[:n_pages],
        parent=parent,
        now=child.last_access,
    )
    upper.lock, upper.created = child.lock, child.created
    upper.n_device_children = int(on_device)
    if child.host_pages is not None:
        upper.host_pages, child.host_pages = child.host_pages[:n_pages], child.host_pages[n_pages:]
        upper.n_host_children = 1
        upper.host_lock = child.host_lock
    parent.children[child.key[:page_bytes]] = upper
    child.key = child.key[at_bytes:]
    child.pages = child.pages[n_pages:]
    child.parent = upper
    upper.children[child.key[:page_bytes]] = child
    return upper
