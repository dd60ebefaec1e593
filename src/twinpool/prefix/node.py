"""Nodes of the prefix tree, what a match and an insert return, and locks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from twinpool.request import Int32Array, Reuse

TOKEN_BYTES = 4  # a token in a key: little-endian int32
NO_PAGES: Int32Array = np.empty(0, np.int32)


class Ghost:
    """What is remembered of an evicted edge: its tokens, and the ghosts below it. Never matched, only counted."""

    __slots__ = ("children", "key")

    def __init__(self, key: bytes, children: dict[bytes, Ghost]) -> None:
        self.key = key
        self.children = children


class Node:
    """One edge of the tree and, perhaps, the state after its last token.

    key: the edge's tokens as bytes; depth: tokens from the root to its end; pages: int32 [len / page_size], owned by the tree.
    state: checkpoint slot, 0 for none (slot 0 is padding and never handed out); state_gone: it had one, which was evicted.
    lock: requests whose prefix includes this edge; state_lock: requests that resumed from this very state.
    last_access, hits, priority: of uses that ended at this node or at evicted ones below it (reference 4.10).
    """

    __slots__ = (
        "children", "created", "depth", "ghosts", "heap_key", "hits", "key", "last_access", "lock", "pages", "parent", "priority",
        "state", "state_gone", "state_lock",
    )  # fmt: skip

    def __init__(self, *, key: bytes, depth: int, pages: Int32Array, parent: Node | None, now: int) -> None:
        self.key = key
        self.depth = depth
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.ghosts: dict[bytes, Ghost] = {}
        self.state = 0
        self.state_gone = False
        self.lock = 0
        self.state_lock = 0
        self.created = now
        self.last_access = now
        self.hits = 0
        self.priority = 0
        self.heap_key: tuple[int, ...] | None = None

    @property
    def is_evictable_leaf(self) -> bool:
        """Its KV may go now: no children, no lock, not the root."""
        return not self.children and not self.lock and self.parent is not None


class Lock(NamedTuple):
    """A receipt: what was locked, and so what unlocking gives back."""

    node: Node
    holds_state: bool


class Match(NamedTuple):
    """What the tree knows of a key, in tokens.

    kv_len: KV matched, ignoring states; resume_len: up to the deepest checkpoint on the way, which is what is reused;
    node: where that checkpoint hangs (the root for none); state_slot: its slot; branching: where the next prefill should leave a
    checkpoint because cached prompts part there, if anywhere (reference 4.2).
    """

    kv_len: int
    resume_len: int
    node: Node
    state_slot: int | None
    branching: int | None
    reuse: Reuse


class Inserted(NamedTuple):
    """Result of an insert. existing_len: tokens that were there already; freed_pages: the caller's duplicates of them, to be freed;
    state_taken: whether the tree took the slot (False: the node has a state already); pages: the tree's page ids for the whole
    prefix (int32)."""

    node: Node
    existing_len: int
    freed_pages: Int32Array
    state_taken: bool
    pages: Int32Array
