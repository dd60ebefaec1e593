"""Who may start: KV pages, state slots and rows are all counted before a request gets any of them (reference 6.1, 4.3, 4.4).

Refuse (at `check_can_ever_fit`): never fits. Wait: not now. Admit: pages are taken chunk by chunk, slots at once.
"""

from __future__ import annotations

from twinpool.errors import BadRequest
from twinpool.prefix.tree import Match
from twinpool.request import Phase, Request
from twinpool.sched.book import Book
from twinpool.sched.retract import CLIP_NEW_TOKENS, reserved_tokens
from twinpool.sched.sequence import Sequence, new_page_table
from twinpool.step import Joined, SlotOrder
from twinpool.units import ceil_div


def check_can_ever_fit(book: Book, request: Request) -> None:
    """Raise BadRequest if the request is longer than the context or its prompt than the whole KV pool."""
    shape = book.shape
    asked = request.prompt_len + request.params.max_tokens
    if asked > shape.context_len:
        raise BadRequest(
            f"the prompt has {request.prompt_len} tokens and max_tokens is {request.params.max_tokens}, {asked} in all, but the "
            f"context is {shape.context_len} tokens: shorten the prompt or ask for at most "
            f"{max(0, shape.context_len - request.prompt_len)} tokens (server flag --context-length).",
            field="max_tokens" if request.prompt_len < shape.context_len else "prompt",
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
    """Match, lock and give slots to a waiting request, or return None with nothing held when something is short."""
    if len(book.running) >= book.shape.max_running_requests:
        return None
    match = book.tree.match(request.key(request.n_tokens), limit_tokens=request.n_tokens - 1)
    # Locked first: what the request will reuse must not count as room.
    lock = book.tree.lock(match.node)
    n_slots = 1 + book.shape.track_slots
    if not _has_kv_room(book, request, match) or not book.tree.room_slots(n_slots):
        book.tree.unlock(lock)
        return None
    slot_ids = book.slots.alloc(n_slots)
    assert slot_ids is not None
    slot, *tracks = (int(i) for i in slot_ids)
    book.orders.append(SlotOrder(dst=slot, src=match.state_slot))
    capacity_tokens = request.prompt_len + request.params.max_tokens
    pages = new_page_table(max_tokens=capacity_tokens, page_size=book.shape.page_size)
    n_pages = match.resume_len // book.shape.page_size
    if n_pages:
        pages[:n_pages] = book.tree.path_pages(match.node)
    sequence = Sequence(
        request=request, slot=slot, tracks=tracks, pages=pages, n_pages=n_pages, lock=lock,
        owned_from=match.resume_len, planned=match.resume_len, committed=match.resume_len,
        prefill_end=request.n_tokens, branching=match.branching, planned_outputs=request.n_output,
    )  # fmt: skip
    _start(book, sequence, match)
    return sequence


def _start(book: Book, sequence: Sequence, match: Match) -> None:
    """Move the request from the queue to the running ones."""
    request = sequence.request
    book.waiting.remove(request)
    book.running[request.rid] = sequence
    request.phase = Phase.PREFILL
    if request.first_scheduled_s is None:
        # What a retracted request finds later is its own work: the report keeps the first match.
        request.first_scheduled_s = book.clock.now_s()
        request.reuse = match.reuse
    book.joined.append(
        Joined(
            rid=request.rid,
            params=request.params,
            prompt=request.tokens[: request.prompt_len],
            output=request.tokens[request.prompt_len : request.n_tokens].copy(),
            eos_token_ids=request.eos_token_ids,
        )
    )


def _has_kv_room(book: Book, request: Request, match: Match) -> bool:
    """Whether the rest of the prompt and the output expected of everybody fit in free and evictable pages."""
    page_size = book.shape.page_size
    room_pages = book.pages.available + book.tree.evictable_pages
    extend = request.n_tokens - match.resume_len
    if not book.running:
        # Alone it may start even if its whole max_tokens does not fit: it will probably stop earlier.
        return ceil_div(extend + 1, page_size) <= room_pages
    new = min(request.params.max_tokens - request.n_output, CLIP_NEW_TOKENS)
    reserved = reserved_tokens(book.running.values(), book.ratio.value)
    return extend + new + page_size < room_pages * page_size - reserved
