"""What the disk has of a waiting request's prefix: looked for when it arrives, and again if memory has lost since what it had then."""

from __future__ import annotations

from typing import NamedTuple

from twinpool.prefix.stored import adopt_stored
from twinpool.prefix.tree import PrefixTree
from twinpool.request import Request
from twinpool.sched.book import Book
from twinpool.sched.storage import Fetched

# How often it is looked for. Where memory loses it faster than the queue moves, reading it once more is no help.
MOST_LOOKS = 3


def look(book: Book, request: Request) -> None:
    """A request has arrived: begin to read what the disk has of its prefix and memory has not."""
    if book.storage is not None:
        fetched = book.fetched[request.rid] = Fetched()
        _look(book, request, fetched, _probe(book.tree, request))


def is_fetched(book: Book, request: Request) -> bool:
    """Whether a request that could start now need not wait for the disk any more; what was read for it hangs in the tree then.

    What is read for others stays aside meanwhile: in the tree it would push out, or be pushed out by, what runs.
    """
    fetched = book.fetched.get(request.rid)
    if fetched is None:
        return True  # there is no disk tier, or the request was sent back to the queue
    while True:  # a read may be over as it begins
        if fetched.is_reading:
            _take(book, request, fetched)
        if fetched.is_reading:
            return False
        if fetched.n_looks == MOST_LOOKS:
            return True
        memory = _probe(book.tree, request)
        if memory.resumable_tokens >= fetched.expected_tokens:
            return True
        _look(book, request, fetched, memory)


def in_memory_tokens(tree: PrefixTree, request: Request) -> int:
    """How much of a waiting request device and host can resume together (a probe: nothing moves)."""
    return _probe(tree, request).resumable_tokens


class _InMemory(NamedTuple):
    """What device and host together can resume of a prefix, and what they have KV of."""

    resumable_tokens: int
    kv_tokens: int


def _probe(tree: PrefixTree, request: Request) -> _InMemory:
    match = tree.match(request.key(request.n_tokens), limit_tokens=request.n_tokens - 1, touch=False)
    resumable_tokens = match.host_node.depth if match.host_node is not None else match.resume_len
    return _InMemory(resumable_tokens, match.reuse.kv_matched)


def _look(book: Book, request: Request, fetched: Fetched, memory: _InMemory) -> None:
    assert book.storage is not None
    tokens = request.tokens[: request.n_tokens - 1]
    book.storage.look(request.rid, tokens, in_memory_tokens=memory.resumable_tokens, kv_tokens=memory.kv_tokens)
    wanted = book.storage.wanted(request.rid)
    fetched.n_looks += 1
    fetched.is_reading = wanted is not None
    fetched.expected_tokens = memory.resumable_tokens


def _take(book: Book, request: Request, fetched: Fetched) -> None:
    """Hang what was read into the tree, if it is all there or has been waited for long enough."""
    assert book.storage is not None
    segments = book.storage.poll(request.rid)
    if segments is None:
        return
    fetched.is_reading = False
    memory = _probe(book.tree, request)
    if segments and segments[0].start > memory.kv_tokens:
        fetched.expected_tokens = segments[-1].end  # what it stands on has gone meanwhile: worth another look
        return
    if segments:
        fetched.start = memory.resumable_tokens
        fetched.end = adopt_stored(book.tree, request.key(request.n_tokens), segments)
        if fetched.end:
            _end_needless_reads(book)
    fetched.expected_tokens = in_memory_tokens(book.tree, request)


def _end_needless_reads(book: Book) -> None:
    """What was read for one request may be all that others wait for, as when one prompt is asked for several answers."""
    assert book.storage is not None
    for request in book.waiting:
        wanted = book.storage.wanted(request.rid)
        if wanted is not None and in_memory_tokens(book.tree, request) >= wanted:
            book.storage.forget(request.rid)
            fetched = book.fetched[request.rid]
            fetched.is_reading, fetched.expected_tokens = False, wanted
