"""The most hits that a cache of limited room can have, for requests known in advance: Belady's MIN over intervals."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Stays:
    """Units (pages, checkpoints) that must stay in a cache to be hit, all int64 [n].

    first, last: moments during which they stay, both included; first > last: they need no room. units: how many; a part
    of them may stay.
    """

    first: Ints
    last: Ints
    units: Ints


def most_hits(stays: Stays, room_units: Ints) -> int:
    """Units that can stay when at most room_units[m] (int64 [moments]) do at moment m.

    Exact: where there are too many, those that stay longest go, which are the ones that are used last. That is MIN of
    L. A. Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5(2), 1966, with
    units that need not be taken in at all. It never loses a hit to another choice: all that are there at a moment take the same
    room then, and the longest stay takes room at every later moment at which another one does.
    """
    total = int(stays.units.sum())
    costly = stays.first <= stays.last
    first, last, units = stays.first[costly], stays.last[costly], stays.units[costly]
    load = np.cumsum(_by_moment(first, units, len(room_units)) - _by_moment(last + 1, units, len(room_units)))
    if not np.any(load > room_units):
        return total
    order = np.argsort(first, kind="stable")
    begins = np.searchsorted(first[order], np.arange(len(room_units) + 1)).tolist()
    return total - _lost(begins, last[order].tolist(), units[order].tolist(), np.maximum(room_units, 0).tolist())


def _by_moment(moments: Ints, units: Ints, n_moments: int) -> Ints:
    """Units summed by moment (int64 [moments]); what lies past the last moment is left out."""
    return np.bincount(moments, weights=units, minlength=n_moments + 1)[:n_moments].astype(np.int64)


def _lost(begins: Sequence[int], lasts: Sequence[int], units: Sequence[int], room_units: Sequence[int]) -> int:
    """Units that MIN drops; stays begins[m] .. begins[m + 1] begin at moment m. Those that end together are alike."""
    by_last = [0] * len(room_units)
    latest: list[int] = []  # a heap of moments at which something ends, negated
    load = lost = 0
    for moment, room in enumerate(room_units):
        for stay in range(begins[moment], begins[moment + 1]):
            last = lasts[stay]
            if not by_last[last]:
                heapq.heappush(latest, -last)
            by_last[last] += units[stay]
            load += units[stay]
        while load > room:
            last = -latest[0]
            dropped = min(by_last[last], load - room)
            by_last[last] -= dropped
            load -= dropped
            lost += dropped
            if not by_last[last]:
                heapq.heappop(latest)
        load -= by_last[moment]
    return lost
