"""A running request and the memory it holds: working slot, track slots, page table, lock on the prefix it resumed from."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from twinpool.prefix.tree import Lock
from twinpool.request import Finish, Int32Array, Request
from twinpool.units import ceil_div


@dataclass(frozen=True, slots=True)
class Tracked:
    """A checkpoint that the request holds and the tree does not know yet: the state after `length` tokens, in `slot`."""

    length: int
    slot: int


@dataclass(slots=True, eq=False)
class Sequence:
    """A request between admission and release.

        0 ........ owned_from ........ committed ........ planned
        tree's pages | own pages, computed | own pages, in flight

    prefill_end: tokens to compute before the first token is sampled. planned_outputs: output tokens that will be known when every
    submitted step is committed. `finish` set: no more rows; released when nothing is in flight. spoilt: a row of it failed, so that
    its pages and slots hold nothing.
    """

    request: Request
    slot: int
    tracks: list[int]
    pages: Int32Array
    n_pages: int
    lock: Lock
    owned_from: int
    planned: int
    committed: int
    prefill_end: int
    branching: int | None
    planned_outputs: int
    tracked: list[Tracked] = field(default_factory=list)
    pending_tracks: set[int] = field(default_factory=set)
    in_flight: int = 0
    finish: Finish | None = None
    spoilt: bool = False

    @property
    def is_prefilling(self) -> bool:
        """Some known tokens are in no plan yet."""
        return self.planned < self.prefill_end

    @property
    def wants_decode(self) -> bool:
        """The next row of this sequence would be a decode row."""
        return self.finish is None and not self.is_prefilling and self.planned_outputs < self.request.params.max_tokens

    @property
    def remaining_outputs(self) -> int:
        """Output tokens that may still come."""
        return self.request.params.max_tokens - self.planned_outputs

    def own_pages(self, page_size: int) -> Int32Array:
        """Page ids that belong to the request, not to the tree."""
        return self.pages[self.owned_from // page_size : self.n_pages]

    def pages_short(self, end: int, page_size: int) -> int:
        """Pages still to be allocated before tokens [0, end) fit."""
        return max(0, ceil_div(end, page_size) - self.n_pages)

    def add_pages(self, ids: Int32Array) -> None:
        """Append freshly allocated pages to the page table."""
        self.pages[self.n_pages : self.n_pages + len(ids)] = ids
        self.n_pages += len(ids)

    def replace_pages(self, path_pages: Int32Array) -> None:
        """Point the first len(path_pages) entries at the tree's pages, on a copy: a plan in flight may still read the old table."""
        pages = self.pages.copy()
        pages[: len(path_pages)] = path_pages
        self.pages = pages


def new_page_table(*, max_tokens: int, page_size: int) -> Int32Array:
    """An empty page table for a sequence of at most `max_tokens` tokens (int32 [pages])."""
    return np.zeros(ceil_div(max_tokens, page_size), np.int32)
