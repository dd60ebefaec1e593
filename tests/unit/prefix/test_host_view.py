"""What lies on the host, by hand."""

from __future__ import annotations

import numpy as np

from twinpool.prefix.host_view import HostView, host_view
from twinpool.prefix.node import NO_PAGES, Node


def grow(parent: Node, *, tokens: int, on_host: bool = True, state: int = 0, host_state: int = 0) -> Node:
    """A child with pages of two tokens."""
    pages = np.arange(tokens // 2, dtype=np.int32)
    node = Node(key=bytes(4 * tokens), depth=parent.depth + tokens, pages=pages, parent=parent, now=0)
    node.host_pages = pages if on_host else None
    node.state, node.host_state = state, host_state
    parent.children[bytes([len(parent.children)])] = node
    return node


def root() -> Node:
    return Node(key=b"", depth=0, pages=NO_PAGES, parent=None, now=0)


def test_an_empty_host() -> None:
    view = host_view(root(), page_size=2)
    assert view == HostView(0, 0, 0, 0)
    assert view.resumable_share == 1.0


def test_kv_above_a_state_is_resumable_and_kv_below_it_is_not() -> None:
    top = root()
    shared = grow(top, tokens=8)
    grow(grow(shared, tokens=4, host_state=3), tokens=6)  # a tail without a state
    grow(shared, tokens=2, state=5)  # its state is on the device
    grow(top, tokens=10)  # nothing to resume from
    view = host_view(top, page_size=2)
    assert view == HostView(kv_tokens=30, resumable_tokens=14, sessions=3, resumable_sessions=1)
    assert view.resumable_share == 14 / 30


def test_what_is_on_the_device_alone_is_not_the_hosts() -> None:
    top = root()
    grow(grow(top, tokens=4), tokens=6, on_host=False, state=1)
    assert host_view(top, page_size=2) == HostView(kv_tokens=4, resumable_tokens=4, sessions=0, resumable_sessions=0)


def test_a_path_of_thousands_of_nodes_is_no_recursion() -> None:
    top = node = root()
    for _ in range(5000):
        node = grow(node, tokens=2)
    node.host_state = 1
    assert host_view(top, page_size=2) == HostView(10000, 10000, 1, 1)
