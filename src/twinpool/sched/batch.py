"""What runs this step: decode rows first, then prefill chunks, under one token budget."""

from __future__ import annotations

from twinpool.prefix.checkpoint import decode_checkpoint, prefill_checkpoint
from twinpool.sched.admission import try_admit
from twinpool.sched.book import Book
from twinpool.sched.chunking import chunk_end
from twinpool.sched.fetch import in_memory_tokens, is_fetched
from twinpool.sched.publish import pick_track
from twinpool.sched.sequence import Sequence
from twinpool.step import Row, StepPlan


def pages_short_for_decode(book: Book) -> int:
    """KV pages that the next decode step needs beyond those the sequences hold."""
    page_size, short = book.shape.page_size, 0
    for sequence in book.running.values():
        # Nearly always the page that is being filled has room: looked at first, because this runs over all rows of each step.
        if sequence.planned >= sequence.n_pages * page_size and sequence.wants_decode:
            short += 1
    return short


def build(book: Book, step: int) -> StepPlan | None:
    """The next plan, or None when nothing can run. The caller has made room for the decode rows."""
    rows = [_decode_row(book, s) for s in book.running.values() if s.wants_decode]
    budget = book.shape.max_prefill_tokens
    if book.shape.chunked_prefill_size is not None:
        # Even a full house of decode rows leaves prefill one grid of tokens, so that it cannot starve.
        chunk = book.shape.chunked_prefill_size
        left = max(chunk - len(rows), min(chunk, book.shape.grid_tokens))
        budget = min(budget, left)
    rows += _prefill_rows(book, budget)
    return _plan(book, step, rows) if rows else None


def build_run(book: Book, step: int, repeat: int) -> StepPlan:
    """So many decode steps as one plan (sched/stride.py says when). The caller has made room for all of them."""
    return _plan(book, step, [_decode_row(book, s, tokens=repeat) for s in book.running.values()], repeat=repeat)


def _plan(book: Book, step: int, rows: list[tuple[Row, Sequence]], *, repeat: int = 1) -> StepPlan:
    """The plan over these rows, with everything that must be done before it."""
    plan = StepPlan(
        step=step,
        rows=tuple(row for row, _ in rows),
        orders=book.take_orders(),
        joined=tuple(book.joined),
        left=tuple(book.left),
        repeat=repeat,
    )
    book.joined, book.left = [], []
    book.in_flight[step] = rows
    for _, sequence in rows:
        sequence.in_flight += 1
    return plan


def _decode_row(book: Book, sequence: Sequence, *, tokens: int = 1) -> tuple[Row, Sequence]:
    """One more token (or so many): its input is whatever the executor sampled last for this request."""
    start = sequence.planned
    end = start + tokens
    _take_pages(book, sequence, end)
    at = None
    if book.shape.track_slots:
        at = decode_checkpoint(start=start, end=end, track_tokens=book.shape.track_tokens)
    row = _row(book, sequence, end=end, checkpoint_at=at, is_decode=True)
    sequence.planned_outputs += tokens - 1
    return row, sequence


def _prefill_rows(book: Book, budget_tokens: int) -> list[tuple[Row, Sequence]]:
    """Chunks of running prefills in admission order, then of newly admitted requests while tokens are left."""
    rows: list[tuple[Row, Sequence]] = []
    most_rows = book.shape.prefill_max_requests
    unfinished = [s for s in book.running.values() if s.is_prefilling and s.finish is None]
    for sequence in unfinished:
        if most_rows is not None and len(rows) >= most_rows:
            return rows
        row = _prefill_row(book, sequence, budget_tokens, first=not rows)
        if row is None:
            return rows
        rows.append((row, sequence))
        budget_tokens -= row.end - row.start
    if any(sequence.is_prefilling for _, sequence in rows):
        return rows  # one request is cut at a time (reference 6.1)
    for request in book.waiting.ordered(lambda r: in_memory_tokens(book.tree, r)):
        if budget_tokens < book.shape.page_size or (most_rows is not None and len(rows) >= most_rows):
            break
        if len(book.running) >= book.shape.max_running_requests:
            break
        if not is_fetched(book, request):
            continue
        admitted = try_admit(book, request)
        if admitted is None:
            break
        row = _prefill_row(book, admitted, budget_tokens, first=not rows)
        if row is None:
            break
        rows.append((row, admitted))
        budget_tokens -= row.end - row.start
        if admitted.is_prefilling:
            break
    return rows


def _prefill_row(book: Book, sequence: Sequence, budget_tokens: int, *, first: bool) -> Row | None:
    """The next chunk of a prompt, or None when tokens or pages are short."""
    shape = book.shape
    start, target = sequence.planned, sequence.prefill_end
    if shape.chunked_prefill_size is None:
        # Whole prompts only; one that is longer than the limit goes alone.
        end = target if first or target - start <= budget_tokens else start
    else:
        grid = shape.grid_tokens if shape.track_slots else shape.page_size
        end = chunk_end(
            start=start, target=target, budget_tokens=budget_tokens, page_size=shape.page_size, grid_tokens=grid
        )
    fork = sequence.branching
    if shape.radix_cache and not shape.track_slots and fork is not None and start < fork < end:
        end = fork  # no_buffer publishes at chunk ends only: end one where the cached prompts part
    if end == start or not book.tree.room_pages(sequence.pages_short(end, shape.page_size)):
        return None
    _take_pages(book, sequence, end)
    at = None
    if shape.track_slots:
        at = prefill_checkpoint(start=start, end=end, grid_tokens=shape.grid_tokens, branching=fork)
    elif shape.radix_cache:
        at = end  # no_buffer: every chunk end (reference 4.6)
    return _row(book, sequence, end=end, checkpoint_at=at, is_decode=False)


def _take_pages(book: Book, sequence: Sequence, end: int) -> None:
    """Give the sequence the pages that tokens up to `end` need; the caller knows that they are free."""
    if end > sequence.n_pages * book.shape.page_size:
        short = sequence.pages_short(end, book.shape.page_size)
        ids = book.pages.alloc(short)
        assert ids is not None
        sequence.add_pages(ids)


def _row(book: Book, sequence: Sequence, *, end: int, checkpoint_at: int | None, is_decode: bool) -> Row:
    """Fix the row and move the sequence's plan forward."""
    slot = pick_track(book, sequence) if checkpoint_at is not None else None
    start = sequence.planned
    sequence.planned = end
    samples = not sequence.is_prefilling
    row = Row(
        rid=sequence.request.rid,
        start=start,
        end=end,
        tokens=None if is_decode else sequence.request.tokens[start:end],
        slot=sequence.slot,
        pages=sequence.pages,
        checkpoint_at=checkpoint_at if slot is not None else None,
        checkpoint_slot=slot or 0,
        sample=samples,
        position=sequence.planned_outputs,
    )
    sequence.planned_outputs += samples
    return row
