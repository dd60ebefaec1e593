"""Which pages of a prompt were computed before, and until when; which pages running requests hold. It forgets nothing."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from twinpool.replay.reuse import prefix_keys
from twinpool.request import Int32Array

Keys = npt.NDArray[np.uint64]
Seen = tuple[int, int, float]


def page_keys(prompt: Int32Array, answer: Int32Array, *, page_size: int, block_size: int | None) -> Keys:
    """A key for each prefix of whole pages (uint64 [pages]) of a prompt and its answer (int32 [tokens] each).

    Tokens are read at both ends of stretches in which only one thing can end: inside a block numbers follow each other
    (replay/tokens.py), so that its ends tell the stretch. block_size None: the trace has no blocks.
    """
    stretch = page_size if block_size is None else math.gcd(page_size, block_size)
    whole = len(prompt) // stretch * stretch
    rest = np.concatenate((prompt[whole:], answer))
    rest = rest[: len(rest) // stretch * stretch]
    ends = [np.concatenate((prompt[at:whole:stretch], rest[at::stretch])).astype(np.int64) for at in (0, stretch - 1)]
    per_page = page_size // stretch
    return prefix_keys(ends[0] | ends[1] << 32)[per_page - 1 :: per_page]


class Edge:
    """Pages that every request so far had together or not at all. keys: of the prefixes that end with each (uint64 [pages]).

    until_s: when the last request with these pages had ended; nobody computes them after that. holders: running requests
    that hold them.
    """

    __slots__ = ("children", "holders", "keys", "last_key", "parent", "until_s")

    def __init__(self, keys: Keys, parent: Edge | None) -> None:
        self.keys = keys
        self.last_key = keys.item(-1) if len(keys) else 0
        self.parent = parent
        self.children: dict[int, Edge] = {}
        self.until_s = -math.inf
        self.holders = 0


class Prefixes:
    """A radix tree over page keys. Pages held by several requests at once count once in `held_pages`."""

    def __init__(self) -> None:
        self.held_pages = 0
        self._root = Edge(np.empty(0, np.uint64), None)

    def add(self, keys: Keys, *, n_prompt_pages: int, ends_s: float) -> tuple[list[Seen], Edge]:
        """Enter a request that ends at `ends_s` with all its pages, of which the first are its prompt's.

        Returns (which of the prompt's pages were there, in order and as few as can be: first page, page after the last,
        until_s; where the prompt's whole pages end, for hold and let_go).
        """
        path = self._follow(self._root, keys[:n_prompt_pages], 0)
        prompt_end = path[-1] if path else self._root
        seen = _joined(path)
        for edge in (*path, *self._follow(prompt_end, keys, n_prompt_pages)):
            if ends_s > edge.until_s:
                edge.until_s = ends_s
        return seen, prompt_end

    def hold(self, prompt_end: Edge) -> None:
        """A request has its whole prompt in memory."""
        edge: Edge | None = prompt_end
        while edge is not None:
            if not edge.holders:
                self.held_pages += len(edge.keys)
            edge.holders += 1
            edge = edge.parent

    def let_go(self, prompt_end: Edge) -> None:
        """It has no longer."""
        edge: Edge | None = prompt_end
        while edge is not None:
            edge.holders -= 1
            if not edge.holders:
                self.held_pages -= len(edge.keys)
            edge = edge.parent

    def _follow(self, parent: Edge, keys: Keys, at: int) -> list[Edge]:
        """Edges that make up keys[at:] below `parent`; one is split where the keys leave it, and one is made for what is new."""
        path: list[Edge] = []
        while at < len(keys):
            edge = parent.children.get(keys.item(at))
            if edge is None:
                edge = Edge(keys[at:].copy(), parent)
                parent.children[keys.item(at)] = edge
            end = at + len(edge.keys)
            if end > len(keys) or keys.item(end - 1) != edge.last_key:
                edge = _split(edge, _common(edge.keys, keys[at:end]))
            path.append(edge)
            at += len(edge.keys)
            parent = edge
        return path


def _common(first: Keys, second: Keys) -> int:
    """Leading keys that both have; a key stands for its whole prefix, so the rest has none in common."""
    shorter = min(len(first), len(second))
    return int(np.count_nonzero(first[:shorter] == second[:shorter]))


def _split(edge: Edge, n_pages: int) -> Edge:
    """Cut an edge after so many pages; returns the new upper one."""
    assert edge.parent is not None
    upper = Edge(edge.keys[:n_pages], edge.parent)
    upper.until_s, upper.holders = edge.until_s, edge.holders
    edge.parent.children[edge.keys.item(0)] = upper
    edge.keys = edge.keys[n_pages:]
    edge.parent = upper
    upper.children[edge.keys.item(0)] = edge
    return upper


def _joined(path: list[Edge]) -> list[Seen]:
    """Pages that were there before, neighbours with one end together. New ones, which no request has had yet, come last."""
    seen: list[Seen] = []
    at = 0
    for edge in path:
        if edge.until_s == -math.inf:
            break
        end = at + len(edge.keys)
        if seen and seen[-1][2] == edge.until_s:
            seen[-1] = (seen[-1][0], end, edge.until_s)
        else:
            seen.append((at, end, edge.until_s))
        at = end
    return seen
