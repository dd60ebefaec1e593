"""Where a state is worth keeping: strategies, grids, and the position of each checkpoint. A policy is a change to this file only."""

from __future__ import annotations

import math
from dataclasses import dataclass

from twinpool.errors import ConfigError
from twinpool.units import round_down


@dataclass(frozen=True, slots=True)
class Strategy:
    """One row of the strategy table (reference 3.3): what is added to the base of 3 slots a request, by overlap on and off.

    The base of 3: the working slot, the locked cached prefix, and one being donated between prefill and decode.
    """

    added_overlap: int
    added_serial: int
    tracks_overlap: int
    tracks_serial: int


BASE_SLOTS = 3
STRATEGIES = {
    "no_buffer": Strategy(added_overlap=0, added_serial=0, tracks_overlap=0, tracks_serial=0),
    "extra_buffer": Strategy(added_overlap=2, added_serial=1, tracks_overlap=2, tracks_serial=1),
    "extra_buffer_lazy": Strategy(added_overlap=1, added_serial=1, tracks_overlap=1, tracks_serial=1),
}


def _row(name: str) -> Strategy:
    if name not in STRATEGIES:
        raise ConfigError(f"--mamba-radix-cache-strategy {name} is not one of {', '.join(STRATEGIES)}.")
    return STRATEGIES[name]


def slots_per_request(name: str, *, overlap: bool, radix: bool = True, skip_decode_lock: bool = False) -> int:
    """S, the state slots charged for each running request: 5 / 4 / 4 / 3, and 1 without the radix cache (reference 3.3).

    skip_decode_lock: the matched prefix is not held while a request decodes, one slot less where states are tracked.
    """
    if not radix:
        return 1
    row = _row(name)
    added = row.added_overlap if overlap else row.added_serial
    return BASE_SLOTS + added - (1 if skip_decode_lock and added else 0)


def track_slots(name: str, *, overlap: bool) -> int:
    """Slots a request gets beside its working slot, to write checkpoints to: 2 / 1 / 1 / 0 (reference 3.3, 4.4)."""
    row = _row(name)
    return row.tracks_overlap if overlap else row.tracks_serial


@dataclass(frozen=True, slots=True)
class Grids:
    """Distances in tokens (reference 3.2): page, kernel chunk, checkpoint grid g (prefill), track grid (decode)."""

    page_tokens: int
    chunk_tokens: int
    checkpoint_tokens: int
    track_tokens: int


def grids(*, page_tokens: int, chunk_tokens: int, track_interval_tokens: int, dcp: int = 1) -> Grids:
    """The grids of reference 3.2. Raises ConfigError when neither of page and model chunk divides the other."""
    chunk = max(chunk_tokens, page_tokens)
    if chunk % min(chunk_tokens, page_tokens):
        raise ConfigError(
            f"--page-size {page_tokens} and the model's state chunk of {chunk_tokens} tokens: one must divide the other "
            f"(a page size that fits: {math.gcd(page_tokens, chunk_tokens)})."
        )
    checkpoint = math.lcm(chunk, page_tokens * dcp)
    return Grids(page_tokens, chunk, checkpoint, math.lcm(checkpoint, track_interval_tokens))


def prefill_checkpoint(*, start: int, end: int, grid_tokens: int, branching: int | None = None) -> int | None:
    """Where a prefill chunk over tokens [start, end) leaves its one checkpoint, or None.

    The last absolute multiple of the grid in (start, end] (the reference counts from the chunk's start, which is the same place
    whenever the chunk starts on the grid: 4.5); a fork of cached prompts at `branching` inside the chunk takes precedence, so that
    the next request that shares it finds a state there.
    """
    regular = round_down(end, grid_tokens)
    if branching is not None and start < branching <= end:
        return branching
    return regular if regular > start else None


def decode_checkpoint(*, start: int, end: int, track_tokens: int) -> int | None:
    """The length in (start, end] after which the state is tracked during decode, the last if there are several (4.7)."""
    at = round_down(end, track_tokens)
    return at if at > start else None
