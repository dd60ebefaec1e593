"""How many decode steps can be planned in one go, with the very outcome of planning them one by one (replay skips that way)."""

from __future__ import annotations

from collections.abc import Callable

from twinpool.sched.book import Book
from twinpool.sched.sequence import Sequence
from twinpool.step import HostCopy, StoreCopy

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
    tier = book.tree.tier is not None
    if tier and any(isinstance(order, HostCopy | StoreCopy) for order in book.orders):
        return 1  # the copy takes time that no other step of a run would take
    steps = min(sequence.remaining_outputs for sequence in running)
    if shape.track_slots:
        steps = min(steps, _checkpoint_limit(book, running))
    if steps > 1:
        steps = min(steps, horizon([sequence.planned for sequence in running]))
    if tier:
        # What is evicted may be copied to the host, in the step that evicts it: no step of a run does.
        room_pages = book.pages.available
        steps = _until_a_slot_is_short(book, running, steps)
    else:
        room_pages = book.pages.available + book.tree.evictable_pages
    while steps > 1 and pages_for(running, steps, shape.page_size) > room_pages:
        steps //= 2
    if steps > 1 and _evicts_both(book, running, steps):
        return 1
    return max(steps, 1)


def pages_for(running: list[Sequence], steps: int, page_size: int) -> int:
    """KV pages that so many decode steps of these sequences need beyond those they hold."""
    return sum(sequence.pages_short(sequence.planned + steps, page_size) for sequence in running)


def _steady(sequence: Sequence) -> bool:
    """It decodes, and only its length can end it."""
    return sequence.wants_decode and not sequence.request.end_tokens


def _checkpoint_limit(book: Book, running: list[Sequence]) -> int:
    """Steps until a checkpoint would find other slots than when steps are planned one by one.

    One checkpoint a request at most; the lazy strategy's second slot lives for one step, so there it must be the last. With overlap
    a checkpoint in flight holds its slot until the next plan but one, so that plan takes no further one of the same request (lazy:
    of any request, since its second slot comes free for all).
    """
    track_tokens, lazy = book.shape.track_tokens, book.shape.is_lazy
    in_flight = {row.rid for rows in book.in_flight.values() for row, _ in rows if row.checkpoint_at is not None}
    limit = track_tokens - 1 if book.shape.overlap and not lazy else track_tokens
    for sequence in running:
        until = track_tokens - sequence.planned % track_tokens
        if sequence.request.rid in in_flight or (lazy and in_flight):
            limit = min(limit, until - 1)
        elif lazy:
            limit = min(limit, until)
    return limit


def _until_a_slot_is_short(book: Book, running: list[Sequence], steps: int) -> int:
    """Of so many steps those before a checkpoint may find no free slot."""
    shape, free_slots = book.shape, book.slots.available
    # The lazy strategy's second slot is taken from the free ones, too.
    until = sorted(
        shape.track_tokens - sequence.planned % shape.track_tokens
        for sequence in running
        if len(sequence.tracks) < shape.track_slots or shape.is_lazy
    )
    return min(steps, until[free_slots] - 1) if len(until) > free_slots else steps


def _evicts_both(book: Book, running: list[Sequence], steps: int) -> bool:
    """Whether these steps may evict KV and states: what goes then depends on the order, which one plan would change."""
    growing = sum(len(sequence.tracks) < book.shape.track_slots for sequence in running)
    return growing > book.slots.available and pages_for(running, steps, book.shape.page_size) > book.pages.available
