"""Giving computed prefixes to the tree: after a prefill chunk, at the end, and when a request is retracted (reference 4.6–4.8)."""

from __future__ import annotations

from twinpool.prefix.stored import forget_stored, store_copies
from twinpool.sched.book import Book
from twinpool.sched.sequence import Sequence, Tracked
from twinpool.step import Row, SlotOrder


def pick_track(book: Book, sequence: Sequence) -> int | None:
    """A slot for the next checkpoint of this request, or None: then the checkpoint is skipped and counted.

    Never the slot of a checkpoint that is in flight, and the newest finished one only as a last resort: until the new one is
    committed it is what the request would leave behind.
    """
    newest = sequence.tracked[-1].slot if sequence.tracked else None
    idle = [slot for slot in sequence.tracks if slot not in sequence.pending_tracks and slot != newest]
    slot = idle[0] if idle else _grow_tracks(book, sequence)
    if slot is None and newest is not None:
        slot = newest
    if slot is None:
        book.totals.skipped_checkpoints += 1
        return None
    sequence.tracked = [kept for kept in sequence.tracked if kept.slot != slot]
    sequence.pending_tracks.add(slot)
    return slot


def _grow_tracks(book: Book, sequence: Sequence) -> int | None:
    """One more track slot if the strategy allows it: evicting for the request's normal share, never for the lazy second one."""
    share = max(book.shape.track_slots, 1)  # no_buffer: the slot being donated at the end of a chunk
    if len(sequence.tracks) < share:
        if not book.tree.room_slots(1):
            return None
    elif not (book.shape.is_lazy and len(sequence.tracks) == share):
        return None
    ids = book.slots.alloc(1)
    if ids is None:
        return None
    sequence.tracks.append(int(ids[0]))
    return sequence.tracks[-1]


def note_checkpoint(book: Book, sequence: Sequence, row: Row) -> None:
    """A step that wrote a checkpoint is committed: remember it, and give back the lazy second slot."""
    if row.checkpoint_at is None:
        return
    sequence.pending_tracks.discard(row.checkpoint_slot)
    sequence.tracked.append(Tracked(row.checkpoint_at, row.checkpoint_slot))
    if book.shape.is_lazy:
        spare = [s for s in sequence.tracks if s != row.checkpoint_slot and s not in sequence.pending_tracks]
        if spare and len(sequence.tracks) > book.shape.track_slots:
            book.slots.free(spare[:1])
            sequence.tracks.remove(spare[0])
            sequence.tracked = [kept for kept in sequence.tracked if kept.slot != spare[0]]


def publish_chunk(book: Book, sequence: Sequence) -> None:
    """After a committed prefill chunk: make it matchable up to its checkpoint while the request runs on (reference 4.6)."""
    if not sequence.tracked:
        return
    newest = sequence.tracked.pop()
    if _insert(book, sequence, newest):
        sequence.tracks.remove(newest.slot)
    elif not book.shape.track_slots:
        sequence.tracks.remove(newest.slot)
        book.slots.free([newest.slot])


def release(book: Book, sequence: Sequence, *, publish: bool) -> None:
    """Take everything from a sequence with nothing in flight; with `publish`, leave its longest resumable prefix in the tree.

    The working slot itself is donated when the state's length is a whole number of pages: the next turn then re-reads nothing of
    this one (the reference falls back to the last tracked position and loses up to a track grid: reference 11.4).
    """
    assert sequence.in_flight == 0
    donated: int | None = None
    if publish and book.shape.radix_cache:
        kept = _last_resumable(book, sequence)
        if kept is not None and kept.length > sequence.owned_from and _insert(book, sequence, kept):
            donated = kept.slot
        _store(book, sequence)
    book.pages.free(sequence.own_pages(book.shape.page_size))
    book.slots.free([slot for slot in (sequence.slot, *sequence.tracks) if slot != donated])
    book.tree.unlock(sequence.lock)
    rid = sequence.request.rid
    del book.running[rid]
    never_ran = [joined for joined in book.joined if joined.rid == rid]
    if never_ran:
        book.joined.remove(never_ran[0])
        slot = sequence.slot
        book.orders[:] = [one for one in book.orders if not (isinstance(one, SlotOrder) and one.dst == slot)]
    else:
        book.left.append(rid)


def _store(book: Book, sequence: Sequence) -> None:
    """At the end of a turn the disk tier is given what the conversation can be resumed from."""
    if book.storage is None:
        return
    for lost in book.storage.lost():
        forget_stored(book.tree, lost.tokens.tobytes(), kept_tokens=lost.kept_tokens)
    node = sequence.lock.node
    book.orders += store_copies(book.tree, node, sequence.request.key(node.depth))


def _last_resumable(book: Book, sequence: Sequence) -> Tracked | None:
    """The longest page-aligned length whose state the request holds."""
    if sequence.committed % book.shape.page_size == 0:
        return Tracked(sequence.committed, sequence.slot)
    return sequence.tracked[-1] if sequence.tracked else None


def _insert(book: Book, sequence: Sequence, kept: Tracked) -> bool:
    """Insert [0, kept.length) with its state; True if the tree took the slot. Duplicates the request owned are freed.

    Pages freed here may still be read by a step in flight; whoever gets them next writes in a later step, so that is safe.
    """
    page_size = book.shape.page_size
    inserted = book.tree.insert(
        sequence.request.key(kept.length),
        sequence.pages[: kept.length // page_size],
        length=kept.length,
        owned_from=sequence.owned_from,
        state_slot=kept.slot,
        priority=sequence.request.priority,
    )
    if len(inserted.freed_pages):
        book.pages.free(inserted.freed_pages)
        sequence.replace_pages(inserted.pages)
    sequence.owned_from = kept.length
    sequence.lock = book.tree.relock(sequence.lock, inserted.node)
    book.totals.published_checkpoints += inserted.state_taken
    return inserted.state_taken
