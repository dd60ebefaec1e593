"""Running requests that go back to the queue, because KV ran short or memory was lost, or are given up because that cannot help."""

from __future__ import annotations

from twinpool.prefix.ghosts import restore_undone
from twinpool.request import Finish, Phase
from twinpool.sched.book import Book
from twinpool.sched.commit import release_if_finished, spoil
from twinpool.sched.publish import publish_chunk, release
from twinpool.sched.sequence import Sequence

# How often one request, or one after another, is begun again. Copies that still fail then will fail for ever.
MOST_RESTARTS = 3


def send_back(book: Book, sequence: Sequence) -> None:
    """Return a running request to the front of the queue; what it computed stays in the tree while there is room (reference 6.3)."""
    request = sequence.request
    # Its tracked checkpoint first, then its end: eviction takes the short tail before the long rest.
    publish_chunk(book, sequence)
    _requeue(book, sequence, publish=True)
    request.retractions += 1
    book.totals.retracted_requests += 1
    book.totals.retracted_input_tokens += request.prompt_len
    book.totals.retracted_output_tokens += request.n_output


def begin_again(book: Book, why: str) -> None:
    """Memory is not what it should be: requeue all that run and have no end yet, publishing nothing, to be computed from their tokens.

    why: part of the sentence for a request to which this has happened too often although no tier is left to be given up. Nothing may
    be in flight.
    """
    assert not book.in_flight, "results of these requests are still to come"
    book.lost_in_a_row += 1
    for fetched in book.fetched.values():
        fetched.start = fetched.end = 0  # what was read from the disk is lost, too
    for sequence in reversed(list(book.running.values())):
        request = sequence.request
        if sequence.finish is not None or (request.restarts >= MOST_RESTARTS and book.tree.tier is None):
            spoil(sequence, f"{why}, and the request was begun {request.restarts + 1} times: the log has the reason.")
            release_if_finished(book, sequence)
        else:
            _requeue(book, sequence, publish=False)
            request.restarts += 1
            book.totals.restarted_requests += 1
            if request.first_token_s is None:
                request.reuse = restore_undone(request.reuse)


def close_tiers_if_worn_out(book: Book) -> None:
    """Go on without host and disk tier when too many copies have failed, so that nobody computes for ever what was computed before.

    For the moment after memory was lost: the tree is empty.
    """
    too_often = any(request.restarts > MOST_RESTARTS for request in book.waiting)
    if book.tree.tier is None or not (too_often or book.lost_in_a_row > MOST_RESTARTS):
        return
    book.tree.close_tier()
    if book.storage is not None:
        for request in book.waiting:
            book.storage.forget(request.rid)
        book.storage = None
        book.fetched.clear()


def give_up(book: Book, sequence: Sequence) -> None:
    """The only running request cannot get one more page: end it with a sentence that says so (reference 6.3)."""
    request = sequence.request
    capacity_tokens = book.pages.count * book.shape.page_size
    sequence.finish = Finish(
        "error",
        out_of_memory=True,
        message=(
            "Out of memory even after retracting all other requests in the decode batch. Aborting the last request. "
            f"It has {request.n_tokens} tokens and needs one more, the KV pool holds {capacity_tokens}: ask for at most "
            f"{capacity_tokens - request.prompt_len} tokens, or raise --mem-fraction-static or --max-total-tokens."
        ),
    )
    book.totals.aborted_out_of_memory_requests += 1
    release_if_finished(book, sequence)


def _requeue(book: Book, sequence: Sequence, *, publish: bool) -> None:
    release(book, sequence, publish=publish)
    sequence.request.phase = Phase.WAITING
    book.waiting.push_front(sequence.request)
