"""How many decode steps can be planned in one go, with the very outcome of planning them one by one (replay skips that way)."""

from __future__ import annotations

from collections.abc import Callable

from twinpool.sched.book import Book
from twinpool.sched.sequence import Sequence

# Given the lengths (tokens) of the rows of the next step: how many steps may pass before something from outside must be seen.
Horizon = Callable[[list[int]], int]


def stride(book: Book, horizon: Horizon) -> int:
    """Steps in which only decode rows run and nothing else can happen; 1 when the next step must be planned on its own.

    Nothing else: nobody finishes before the last of them, nobody is admitted, chunked, retracted or stopped by an end token,
    and no request takes more than one checkpoint (under the lazy strategy one at the very end).
    """
    running = list(book.running.values())
    if not running or not all(_steady(sequence) for sequence in running):
        return 1
    if any(row.tokens is not None for rows in book.in_flight.values() for row, _ in rows):
        return 1  # its commit publishes, which moves what eviction drops first
    shape = book.shape
    if book.waiting and len(running) < shape.max_running_requests:
        return 1  # each step tries to admit
    steps = min(sequence.remaining_outputs for sequence in running)
    if shape.track_slots:
        steps = min(steps, _checkpoint_limit(running, track_tokens=shape.track_tokens, lazy=shape.is_lazy))
    if steps > 1:
        steps = min(steps, horizon([sequence.planned for sequence in running]))
    room_pages = book.pages.available + book.tree.evictable_pages
    while steps > 1 and pages_for(running, steps, shape.page_size) > room_pages:
        steps //= 2
    return max(steps, 1)


def pages_for(running: list[Sequence], steps: int, page_size: int) -> int:
    """KV pages that so many decode steps of these sequences need beyond those they hold."""
    return sum(sequence.pages_short(sequence.planned + steps, page_size) for sequence in running)


def _steady(sequence: Sequence) -> bool:
    """It decodes, and only its length can end it."""
    return sequence.wants_decode and not sequence.request.end_tokens


def _checkpoint_limit(running: list[Sequence], *, track_tokens: int, lazy: bool) -> int:
    """One checkpoint a request at most; the lazy strategy's second slot lives for one step, so there it must be the last."""
    if not lazy:
        return track_tokens
    return min(track_tokens - sequence.planned % track_tokens for sequence in running)
