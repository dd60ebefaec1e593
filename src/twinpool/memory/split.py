"""The arithmetic of the division: slack, slots, draft scratch, KV tokens. Judgement is in budget.py and refusals.py.

Flags are taken as the decimals they were written as (0.9 is nine tenths), so sizes are exact and no rounding of
binary floats decides over a slot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from twinpool.memory.ledger import MemoryRequest
from twinpool.units import round_down

# Of a pool without bytes: each still takes 12 bytes of bookkeeping on the host.
_MOST_FREE_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """slack_bytes, rest_bytes (for both pools), slots (K, may be <= 0), draft_rows, scratch_bytes, state_bytes (with
    padding, side states and rings), kv_bytes (what is left, may be <= 0), profiled_tokens (before
    --max-total-tokens) and tokens.
    """

    slack_bytes: int
    rest_bytes: int
    slots: int
    draft_rows: int
    scratch_bytes: int
    state_bytes: int
    kv_bytes: int
    profiled_tokens: int
    tokens: int


def exact(value: float) -> Fraction:
    """The decimal that a flag's float was written as."""
    return Fraction(repr(float(value)))


def slack_bytes(request: MemoryRequest) -> int:
    """Memory that is left alone: (1 - mem_fraction_static) of what was free before the load, rounded up (1.1)."""
    share = math.ceil(request.pre_load_bytes * (1 - exact(request.mem_fraction_static)))
    return max(share, request.activation_reserve_bytes)


def pinned(request: MemoryRequest) -> bool:
    """Whether the number of slots does not depend on memory (reference 1.3, cases a and b)."""
    return request.max_mamba_cache_size is not None or one_slot_a_request(request)


def one_slot_a_request(request: MemoryRequest) -> bool:
    """Case b of reference 1.3: no radix cache and a known number of requests."""
    no_pin = request.max_mamba_cache_size is None
    return no_pin and not request.radix_cache and request.max_running_requests is not None


def slots_bytes_in_ratio(request: MemoryRequest, slots: int) -> Fraction:
    """The state share of the budget that gives exactly `slots` usable slots in ratio mode: the inverse of `_slots`."""
    slot, extra, drafts = request.stage_slot_bytes, request.stage_extra_bytes, request.charged_drafts
    pad = request.padding_slots
    if drafts:
        each = slot * (1 + Fraction(drafts, request.slots_per_request)) + extra
        return slot * (pad + drafts) + extra * pad + slots * each
    return Fraction(request.fixed_bytes + (slots + pad) * (slot + extra))


def _slots(request: MemoryRequest, rest_bytes: int) -> int:
    """K by the three cases of reference 1.3."""
    if request.max_mamba_cache_size is not None:
        return request.max_mamba_cache_size // request.dp
    per_worker = request.requests_per_worker
    if one_slot_a_request(request) and per_worker is not None:
        return per_worker
    ratio = exact(request.ratio)
    budget = rest_bytes * ratio / (1 + ratio)
    fixed = slots_bytes_in_ratio(request, 0)
    return math.floor((budget - fixed) / (slots_bytes_in_ratio(request, 1) - fixed))


def _draft_rows(request: MemoryRequest, slots: int) -> int:
    """Request rows for which each draft step keeps a state."""
    per_worker = request.requests_per_worker
    if not request.charged_drafts or per_worker is None:
        return 0
    return slots if one_slot_a_request(request) else min(per_worker, slots // request.slots_per_request)


def split_with(request: MemoryRequest, slots: int) -> Split:
    """The division with a given number of usable slots."""
    slack = slack_bytes(request)
    rest = request.available_bytes - slack - request.multimodal_bytes
    rows = _draft_rows(request, slots)
    scratch = request.stage_slot_bytes * (rows + 1) * request.charged_drafts
    each = request.stage_slot_bytes + request.stage_extra_bytes
    state = (slots + request.padding_slots) * each + request.fixed_bytes if request.hybrid else 0
    kv = rest - scratch - state
    profiled = _profiled_tokens(request, kv_bytes=kv, slots=slots)
    cap = request.max_total_tokens
    tokens = profiled if cap is None else min(profiled, round_down(cap, request.page_size))
    return Split(
        slack_bytes=slack,
        rest_bytes=rest,
        slots=slots,
        draft_rows=rows,
        scratch_bytes=scratch,
        state_bytes=state,
        kv_bytes=kv,
        profiled_tokens=profiled,
        tokens=tokens,
    )


def _profiled_tokens(request: MemoryRequest, *, kv_bytes: int, slots: int) -> int:
    """Tokens by memory, whole pages (reference 1.4).

    Without attention layers a token costs nothing. The reference then has one context's, which all requests and prefixes share;
    ours has one context's for each slot, so that only states run out.
    """
    if request.kv_bytes_per_token:
        return round_down(kv_bytes // request.kv_bytes_per_token, request.page_size)
    contexts = slots if request.one_arena and request.hybrid else 1
    free = max(request.context_len, min(contexts * request.context_len, _MOST_FREE_TOKENS))
    return round_down(request.max_total_tokens or free, request.page_size)


def split(request: MemoryRequest) -> Split:
    """The division, whatever comes out: slots and tokens may be zero or less."""
    rest = request.available_bytes - slack_bytes(request) - request.multimodal_bytes
    return split_with(request, _slots(request, rest) if request.hybrid else 0)


def serves(request: MemoryRequest, parts: Split) -> bool:
    """Whether one request can run: S slots, two tokens, and everything inside the budget."""
    states = not request.hybrid or (parts.slots > 0 and parts.slots // request.slots_per_request > 0)
    return states and parts.kv_bytes > 0 and parts.tokens >= 2
