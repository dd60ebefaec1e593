"""Who may start: KV pages, state slots and rows are all counted before a request gets any of them (reference 6.1, 4.3, 4.4).

Refuse (at `check_can_ever_fit`): never fits. Wait: not now. Admit: pages are taken chunk by chunk, slots at once.
"""

from __future__ import annotations

from typing import NamedTuple

from twinpool.errors import BadRequest
from twinpool.prefix.ghosts import restore_failed, restored
from twinpool.prefix.node import Node
from twinpool.prefix.tree import Lock, Match
from twinpool.request import Phase, Request, Reuse
from twinpool.sched.book import Book
from twinpool.sched.retract import CLIP_NEW_TOKENS, reserved_tokens
from twinpool.sched.sequence import Sequence, new_page_table
from twinpool.sched.storage import Fetched
from twinpool.step import Joined, SlotOrder
from twinpool.units import ceil_div


def check_can_ever_fit(book: Book, request: Request) -> None:
    """Raise BadRequest if the request is longer than the context or its prompt than the whole KV pool."""
    shape = book.shape
    asked = request.prompt_len + request.params.max_tokens
    if asked > shape.context_len:
        left_tokens = shape.context_len - request.prompt_len
        fewer = f" or ask for at most {left_tokens} tokens" if left_tokens > 0 else ""
        raise BadRequest(
            f"the prompt has {request.prompt_len} tokens and max_tokens is {request.params.max_tokens}, {asked} in all, but the "
            f"context is {shape.context_len} tokens: shorten the prompt{fewer} (server flag --context-length).",
            field="max_tokens" if left_tokens > 0 else "prompt",
        )
    capacity_tokens = book.pages.count * shape.page_size
    if request.prompt_len + 1 > capacity_tokens:
        raise BadRequest(
            f"the prompt has {request.prompt_len} tokens, but the KV pool holds {capacity_tokens}: at most "
            f"{capacity_tokens - 1} prompt tokens fit (server flags --mem-fraction-static, --max-total-tokens, "
            "--mamba-full-memory-ratio).",
            field="prompt",
        )


def try_admit(book: Book, request: Request) -> Sequence | None:
    """Match, lock and give slots to a waiting request, or return None with nothing held when pages or slots are short."""
    key, limit = request.key(request.n_tokens), request.n_tokens - 1
    match = book.tree.match(key, limit_tokens=limit, count=not request.tried)
    request.tried = True
    resumed = None
    if match.host_node is not None:
        resumed = _resume_restored(book, request, match)
        if resumed is None:  # looking for room may have evicted what was matched
            match = book.tree.match(key, limit_tokens=limit, touch=False)
    if resumed is None:
        resumed = _resume(book, request, match)
    if resumed is None:
        return None
    slot_ids = book.slots.alloc(1 + book.shape.track_slots)
    assert slot_ids is not None
    slot, *tracks = (int(i) for i in slot_ids)
    book.orders.append(SlotOrder(dst=slot, src=resumed.node.state or None))
    capacity_tokens = request.prompt_len + request.params.max_tokens
    pages = new_page_table(max_tokens=capacity_tokens, page_size=book.shape.page_size)
    length = resumed.node.depth
    if length:
        pages[: length // book.shape.page_size] = book.tree.path_pages(resumed.node)
    branching = match.branching if match.branching is not None and match.branching > length else None
    sequence = Sequence(
        request=request, slot=slot, tracks=tracks, pages=pages, n_pages=length // book.shape.page_size, lock=resumed.lock,
        owned_from=length, planned=length, committed=length, prefill_end=request.n_tokens, branching=branching,
        planned_outputs=request.n_output,
    )  # fmt: skip
    _start(book, sequence, resumed.reuse)
    return sequence


class _Resumed(NamedTuple):
    """Where a request goes on, what its match was worth, and the lock on the node. Its slots and pages are free."""

    node: Node
    reuse: Reuse
    lock: Lock


def _resume(book: Book, request: Request, match: Match) -> _Resumed | None:
    """From the deepest checkpoint on the device, if there is room for the rest; None, with nothing held, when there is not."""
    # Locked first: what the request will reuse must not count as room.
    lock = book.tree.lock(match.node)
    if not _has_kv_room(book, request, cached_tokens=match.resume_len) or not book.tree.room_slots(
        1 + book.shape.track_slots
    ):
        book.tree.unlock(lock)
        return None
    if match.host_node is None:
        return _Resumed(match.node, match.reuse, lock)
    book.totals.failed_restores += 1
    return _Resumed(match.node, restore_failed(match.reuse, tokens=match.host_node.depth - match.resume_len), lock)


def _resume_restored(book: Book, request: Request, match: Match) -> _Resumed | None:
    """From a deeper node whose KV or state is on the host, all or nothing: its pages, and one slot more than the request's own,
    must be there before anything is told. None, with nothing held, when they are not.
    """
    tree, node = book.tree, match.host_node
    assert node is not None
    held = tree.hold(node)
    # KV that is on the device and held neither counts as room nor takes any.
    has_room = _has_kv_room(book, request, cached_tokens=held.lock.node.depth)
    fits = has_room and tree.room_slots(2 + book.shape.track_slots) and tree.restore(node)
    lock = tree.lock(node) if fits else None
    tree.let_go(held)
    if lock is None:
        return None
    tokens = node.depth - match.resume_len
    fetched = book.fetched.get(request.rid, Fetched())
    read = max(0, min(node.depth, fetched.end) - max(match.resume_len, fetched.start))
    return _Resumed(node, restored(match.reuse, tokens=tokens, from_storage=read), lock)


def _start(book: Book, sequence: Sequence, reuse: Reuse) -> None:
    """Move the request from the queue to the running ones."""
    request = sequence.request
    book.waiting.remove(request)
    book.fetched.pop(request.rid, None)
    book.running[request.rid] = sequence
    request.phase = Phase.PREFILL
    if request.first_scheduled_s is None:
        # What a retracted request finds later is its own work: the report keeps the first match.
        request.first_scheduled_s = book.clock.now_s()
        request.reuse = reuse
    book.joined.append(
        Joined(
            rid=request.rid,
            params=request.params,
            prompt=request.tokens[: request.prompt_len],
            output=request.tokens[request.prompt_len : request.n_tokens].copy(),
            eos_token_ids=request.eos_token_ids,
        )
    )


def _has_kv_room(book: Book, request: Request, *, cached_tokens: int) -> bool:
    """Whether the rest of the prompt, past what is locked on the device, and the output expected of everybody fit in free and
    evictable pages.
    """
    page_size = book.shape.page_size
    room_pages = book.pages.available + book.tree.evictable_pages
    extend = request.n_tokens - cached_tokens
    if not book.running:
        # Alone it may start even if its whole max_tokens does not fit: it will probably stop earlier. One that is begun again may have
        # as many tokens as the pool; whether there is a page more is for its first decode step to say.
        return ceil_div(extend, page_size) <= room_pages
    new = min(request.params.max_tokens - request.n_output, CLIP_NEW_TOKENS)
    reserved = reserved_tokens(book.running.values(), book.ratio.value)
    return extend + new + page_size < room_pages * page_size - reserved
