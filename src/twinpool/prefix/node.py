"""Nodes of the prefix tree, what a match and an insert return, and locks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from twinpool.request import Int32Array, Reuse

TOKEN_BYTES = 4  # a token in a key: little-endian int32
NO_PAGES: Int32Array = np.empty(0, np.int32)
# Which memory was too small for a state (Node.state_gone): the device's, or the host's, where a copy was to be.
NOT_GONE, DEVICE_GONE, HOST_GONE = 0, 1, 2


class Ghost:
    """What is remembered of an evicted edge: its tokens, and the ghosts below it. Never matched, only counted."""

    __slots__ = ("children", "key")

    def __init__(self, key: bytes, children: dict[bytes, Ghost]) -> None:
        self.key = key
        self.children = children


class Node:
    """One edge of the tree and, perhaps, the state after its last token; on the device, on the host, or on both.

    key: the edge's tokens as bytes; depth: tokens from the root to its end; pages: int32 [len / page_size], owned by the tree,
    empty when its KV is on the host only; n_device_children: children whose KV is on the device.
    state: checkpoint slot, 0 for none (slot 0 is padding and never handed out); state_gone: what was too small
    for a state that is nowhere now; HOST_GONE beside one on the device: the host has dropped its copy, or had no room for one.
    host_pages: int32 copies on the host, None for none; host_state: host slot, 0 for none; n_host_children: children with a copy
    there; host_lock: restores that need these copies now.
    stored: its state was given to the disk tier, or came from there.
    lock: requests whose prefix includes this edge; state_lock: requests that resumed from this very state.
    last_access, hits, priority: of uses that ended at this node or at evicted ones below it (reference 4.10).
    """

    __slots__ = (
        "children", "created", "depth", "ghosts", "heap_key", "hits", "host_heap_key", "host_lock", "host_pages", "host_state", "key",
        "last_access", "lock", "n_device_children", "n_host_children", "pages", "parent", "priority", "state", "state_gone",
        "state_lock", "stored",
    )  # fmt: skip

    def __init__(self, *, key: bytes, depth: int, pages: Int32Array, parent: Node | None, now: int) -> None:
        self.key = key
        self.depth = depth
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.n_device_children = 0
        self.ghosts: dict[bytes, Ghost] = {}
        self.state = 0
        self.state_gone = NOT_GONE
        self.host_pages: Int32Array | None = None
        self.host_state = 0
        self.n_host_children = 0
        self.host_lock = 0
        self.host_heap_key: tuple[int, ...] | None = None
        self.stored = False
        self.lock = 0
        self.state_lock = 0
        self.created = now
        self.last_access = now
        self.hits = 0
        self.priority = 0
        self.heap_key: tuple[int, ...] | None = None

    @property
    def on_device(self) -> bool:
        """Its KV is on the device; that of all nodes above it then is, too."""
        return len(self.pages) > 0

    @property
    def is_evictable_leaf(self) -> bool:
        """Its device KV may go now: no children on the device, no lock, not the root."""
        return not self.n_device_children and not self.lock and self.parent is not None and len(self.pages) > 0

    @property
    def is_host_leaf(self) -> bool:
        """Its host copies may go now: nothing below it needs them, and no restore."""
        return self.host_pages is not None and not self.n_host_children and not self.host_lock


class Lock(NamedTuple):
    """A receipt: what was locked, and so what unlocking gives back."""

    node: Node
    holds_state: bool


class Held(NamedTuple):
    """A receipt: a node whose host copies are held, and the lock on the device KV above them."""

    node: Node
    lock: Lock


class Match(NamedTuple):
    """What the tree knows of a key, in tokens.

    resume_len: up to the deepest checkpoint on the device, which is what can be reused at once; node: where that checkpoint hangs (the
    root for none); branching: where the next prefill should leave a checkpoint because cached prompts part there, if anywhere
    (reference 4.2). host_node: the deeper node that can be resumed from after a restore, None when the device has the deepest;
    reuse: as if it were not restored.
    """

    resume_len: int
    node: Node
    branching: int | None
    reuse: Reuse
    host_node: Node | None = None


class Inserted(NamedTuple):
    """Result of an insert. freed_pages: the caller's duplicates of what was on the device already, to be freed; state_taken: whether
    the tree took the slot (False: the node has a state already); pages: the tree's page ids for the whole prefix (int32)."""

    node: Node
    freed_pages: Int32Array
    state_taken: bool
    pages: Int32Array
