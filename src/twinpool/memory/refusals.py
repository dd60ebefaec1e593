"""Texts of E1 to E4, W1 and W2 (reference 1.9, to the letter), each refusal followed by what would work here (11.2)."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from twinpool.errors import MemoryRefusal
from twinpool.memory.ledger import MemoryRequest
from twinpool.memory.split import (
    Split,
    exact,
    one_slot_a_request,
    pinned,
    serves,
    slots_bytes_in_ratio,
    split,
    split_with,
)
from twinpool.units import MIB, format_bytes, round_up, to_gib


def _round_up(value: Fraction) -> float:
    """To three decimals, as flags are advised."""
    return math.ceil(value * 1000) / 1000


def no_room_for_kv(request: MemoryRequest, parts: Split) -> MemoryRefusal:
    """E1: weights, slack and states leave nothing for KV."""
    pre = request.pre_load_bytes
    least = 1 - Fraction(request.available_bytes, pre)
    return MemoryRefusal(
        "Loaded weights leave no GPU memory for the KV cache under "
        f"--mem-fraction-static={request.mem_fraction_static}. "
        f"Raise --mem-fraction-static above {_round_up(least):.3f} "
        f"(minimum viable = 1 - available/pre = {float(least):.4f}). "
        f"If using speculative decoding, draft weights are now counted. {_advice(request, parts)}"
    )


def no_slots(request: MemoryRequest, parts: Split) -> MemoryRefusal:
    """E2: not one usable slot."""
    return MemoryRefusal(
        "Not enough GPU memory for hybrid (mamba/linear-attention) state cache. "
        f"Computed max_mamba_cache_size={parts.slots} (total_rest_memory={to_gib(parts.rest_bytes):.2f} GB, "
        f"mamba_cache_per_req={request.stage_slot_bytes / MIB:.2f} MB). "
        "Try: (1) reduce --max-running-requests, (2) increase --mem-fraction-static, "
        f"(3) reduce --speculative-num-draft-tokens, or (4) use GPUs with more memory. {_advice(request, parts)}"
    )


def no_requests(request: MemoryRequest, parts: Split) -> MemoryRefusal:
    """E3: slots or tokens for less than one request."""
    return MemoryRefusal(
        "Hybrid (mamba/linear-attention) state cache is too small to serve any requests. "
        f"max_mamba_cache_size={parts.slots}, mamba_ratio={request.slots_per_request}, resulting max_num_reqs=0. "
        "Try: (1) reduce --max-running-requests, (2) increase --mem-fraction-static, or (3) use GPUs with more memory. "
        f"{_advice(request, parts)}"
    )


def no_tokens(request: MemoryRequest, parts: Split) -> MemoryRefusal:
    """E4: less than one KV page."""
    return MemoryRefusal(
        "Not enough memory. Please try to increase --mem-fraction-static. "
        f"Current value: mem_fraction_static={request.mem_fraction_static}. {_advice(request, parts)}"
    )


# As format strings, because the boot log is also read back.
CAPPED_BY_STATES = (
    "max_running_requests is capped to {cap:d} by the mamba state cache (max_mamba_cache_size={slots:d}, "
    "{slots_per_request:d} state slots per request). To raise it: increase --mamba-full-memory-ratio or "
    "--max-mamba-cache-size, or halve the state size with --mamba-ssm-dtype bfloat16."
)
CAPPED_BY_KV = (
    "max_running_requests was reduced from the requested {requested:d} to {granted:d} (per dp worker) "
    "due to the available KV cache capacity."
)


def capped_by_states(*, cap: int, slots: int, slots_per_request: int) -> str:
    """W1: fewer requests than wanted because each needs S slots."""
    return CAPPED_BY_STATES.format(cap=cap, slots=slots, slots_per_request=slots_per_request)


def capped_by_kv(*, requested: int, granted: int) -> str:
    """W2: fewer requests than asked for because a request needs at least two tokens of KV."""
    return CAPPED_BY_KV.format(requested=requested, granted=granted)


def cap_is_moot(*, cap: int, profiled: int) -> str:
    """--max-total-tokens above what fits (reference 1.4)."""
    return f"max_total_tokens={cap} is larger than the profiled value {profiled}. Use the profiled value instead."


def _advice(request: MemoryRequest, parts: Split) -> str:
    """One sentence: needed, available, what would fit, which flag."""
    cap = request.max_total_tokens
    least_tokens = round_up(2, request.page_size)
    if cap is not None and cap < least_tokens:
        return f"--max-total-tokens {cap} is less than a request needs; use at least {least_tokens}."
    if not request.hybrid:
        return _fraction_advice(request, parts)
    if one_slot_a_request(request):
        return _pin_advice(request, parts, flag="--max-running-requests", given=request.max_running_requests or 0)
    if pinned(request):
        return _pin_advice(request, parts, flag="--max-mamba-cache-size", given=request.max_mamba_cache_size or 0)
    return _ratio_advice(request, parts)


def _pin_advice(request: MemoryRequest, parts: Split, *, flag: str, given: int) -> str:
    """How many slots fit beside one KV page, in the flag's own unit (all dp workers together)."""
    least = request.slots_per_request
    fit = most_slots(request)
    if fit < least:
        return _fraction_advice(request, parts, flag=flag)
    if parts.slots < least:
        return (
            f"{flag} {given} gives {parts.slots} state slots per dp worker and one request needs {least}; "
            f"use at least {least * request.dp}."
        )
    return (
        f"{flag} {given} needs {format_bytes(parts.state_bytes + parts.scratch_bytes)} for {parts.slots} state slots "
        f"and the padding slot, and {format_bytes(parts.rest_bytes)} are left for both pools; "
        f"at most {flag} {fit * request.dp} fits."
    )


def most_slots(request: MemoryRequest) -> int:
    """The largest number of usable slots per dp worker that still leaves KV for one request; 0 when none does."""
    low, high = 0, max(0, request.available_bytes // max(1, request.stage_slot_bytes + request.stage_extra_bytes))
    while low < high:
        middle = (low + high + 1) // 2
        parts = split_with(request, middle)
        if parts.kv_bytes > 0 and parts.tokens >= 2:
            low = middle
        else:
            high = middle - 1
    return low


def least_ratio(request: MemoryRequest) -> float | None:
    """The smallest ratio (three decimals) at which one request can run; None when no ratio does."""
    rest = split_with(request, 0).rest_bytes
    needed = slots_bytes_in_ratio(request, request.slots_per_request)
    if needed >= rest:
        return None
    ratio = _round_up(needed / (rest - needed))
    tried = replace(request, ratio=ratio)
    return ratio if serves(tried, split(tried)) else None


def _ratio_advice(request: MemoryRequest, parts: Split) -> str:
    ratio = least_ratio(request)
    if ratio is None:
        return _fraction_advice(request, parts)
    verb = "raise" if exact(ratio) > exact(request.ratio) else "lower"
    needed = math.ceil(slots_bytes_in_ratio(request, request.slots_per_request))
    return (
        f"One request needs {request.slots_per_request} state slots, {format_bytes(needed)} with the padding slot, "
        f"out of {format_bytes(parts.rest_bytes)} for both pools; "
        f"{verb} --mamba-full-memory-ratio from {request.ratio} to {ratio}."
    )


def _fraction_advice(request: MemoryRequest, parts: Split, *, flag: str = "--max-mamba-cache-size") -> str:
    """What one request needs in all, and the --mem-fraction-static (at most 1) that would leave it.

    Under a ratio the states must fit their share; where that asks for too much, a pin wastes nothing. flag: what pins.
    """
    one = split_with(request, request.slots_per_request if request.hybrid else 0)
    needed = one.state_bytes + one.scratch_bytes + round_up(2, request.page_size) * request.kv_bytes_per_token
    has = max(0, parts.rest_bytes)
    text = f"One request needs {format_bytes(needed)} in both pools and {format_bytes(has)} are left for them; "
    if request.hybrid and not pinned(request):
        share = slots_bytes_in_ratio(request, request.slots_per_request)
        under_ratio = max(needed, math.ceil(share * (1 + 1 / exact(request.ratio))))
        fraction = _fraction_for(request, under_ratio)
        if fraction is not None and _serves_with(request, fraction):  # rings can outgrow the share that KV gets
            return f"{text}use --mem-fraction-static {fraction:.3f} or more."
    fraction = _fraction_for(request, needed)
    if fraction is None:
        shrink = ", or shrink a state with --mamba-ssm-dtype bfloat16" if request.hybrid else ""
        return f"{text}no --mem-fraction-static leaves that much: use a device with more memory{shrink}."
    pin = f" with {flag} {request.slots_per_request * request.dp}" if request.hybrid else ""
    return f"{text}use --mem-fraction-static {fraction:.3f} or more{pin}."


def _serves_with(request: MemoryRequest, fraction: float) -> bool:
    changed = replace(request, mem_fraction_static=fraction)
    return serves(changed, split(changed))


def _fraction_for(request: MemoryRequest, needed_bytes: int) -> float | None:
    """The smallest --mem-fraction-static (three decimals) that leaves `needed_bytes` for both pools, or None."""
    slack = request.available_bytes - request.multimodal_bytes - needed_bytes
    fraction = _round_up(max(1 - Fraction(slack, request.pre_load_bytes), Fraction(1, 1000)))
    return None if slack < request.activation_reserve_bytes or fraction > 1 else fraction
