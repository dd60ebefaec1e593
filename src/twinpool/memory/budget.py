"""How device memory is divided between weights, slack, states and KV: one pure function (reference 1.1, 1.3 to 1.9)."""

from __future__ import annotations

from twinpool.errors import ConfigError
from twinpool.memory import refusals
from twinpool.memory.arena import Arena
from twinpool.memory.ledger import SLACK, Ledger, LedgerLine, MemoryRequest
from twinpool.memory.split import Split, pinned, split
from twinpool.units import format_bytes

__all__ = ["Ledger", "LedgerLine", "MemoryRequest", "plan_memory"]


def plan_memory(request: MemoryRequest) -> Ledger:
    """Divide one rank's memory. Raises MemoryRefusal (E1 to E4, reference 1.9) or ConfigError for impossible input."""
    _check(request)
    parts = split(request)
    if request.hybrid and parts.slots <= 0:
        raise refusals.no_slots(request, parts)
    if parts.kv_bytes <= 0:
        raise refusals.no_room_for_kv(request, parts)
    if parts.tokens <= 0:
        raise refusals.no_tokens(request, parts)
    running, warnings = _running_requests(request, parts)
    cap = request.max_total_tokens
    if cap is not None and request.kv_bytes_per_token and cap > parts.profiled_tokens:
        warnings = (refusals.cap_is_moot(cap=cap, profiled=parts.profiled_tokens), *warnings)
    lines = (*_static_lines(request, parts), *_state_lines(request, parts), *_kv_lines(request, parts))
    slot, conv = request.stage_slot_bytes, request.stage_conv_bytes
    slots = parts.slots + 1 if request.hybrid else 0
    draft_slots = (parts.draft_rows + 1) * request.charged_drafts
    return Ledger(
        whole_bytes=_whole_bytes(request),
        budget_bytes=parts.rest_bytes,
        max_mamba_cache_size=parts.slots,
        slots_per_request=request.slots_per_request,
        slot_bytes=slot,
        conv_pool_bytes=slots * conv,
        ssm_pool_bytes=slots * (slot - conv),
        extra_pool_bytes=slots * request.stage_extra_bytes,
        draft_rows=parts.draft_rows,
        draft_conv_bytes=draft_slots * conv,
        draft_ssm_bytes=draft_slots * (slot - conv),
        page_size=request.page_size,
        page_bytes=request.page_bytes,
        kv_tokens=parts.tokens,
        logical_tokens=parts.tokens * request.dcp,
        kv_pool_bytes=(parts.tokens + request.page_size) * request.kv_bytes_per_token,
        max_running_requests=running,
        lines=lines,
        warnings=warnings + overrun_warnings(lines),
    )


def _check(request: MemoryRequest) -> None:
    """Refuse input that no flag combination should produce, by name."""
    positive = ("pre_load_bytes", "context_len", "slots_per_request", "page_size", "dp", "dcp")
    whole = (
        "available_bytes", "conv_bytes", "ssm_bytes", "kv_bytes_per_token", "draft_tokens", "extra_slot_bytes",
        "fixed_bytes", "multimodal_bytes", "activation_reserve_bytes",
    )  # fmt: skip
    for name in positive + whole:
        least = 1 if name in positive else 0
        if getattr(request, name) < least:
            raise ConfigError(f"{name}={getattr(request, name)}: it must be at least {least}.")
    for name in ("max_mamba_cache_size", "max_running_requests", "max_total_tokens"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1.")
    if not 0 < request.mem_fraction_static <= 1:
        raise ConfigError(
            f"--mem-fraction-static is {request.mem_fraction_static} (as given, or as its default comes out for so small a device); "
            "it must be above 0 and at most 1: give it."
        )
    if not 0 < request.ratio < float("inf"):
        raise ConfigError(f"--mamba-full-memory-ratio {request.ratio} must be above 0.")
    if request.draft_tokens and request.max_running_requests is None:
        raise ConfigError(
            f"--speculative-num-draft-tokens {request.draft_tokens} needs --max-running-requests: "
            "draft states are reserved for each running request."
        )
    share = request.stage_share
    if not (0 < share[0] <= share[1]):
        raise ConfigError(f"stage_share={share}: the largest stage has at least one and at most all linear layers.")


def _running_requests(request: MemoryRequest, parts: Split) -> tuple[int, tuple[str, ...]]:
    """Requests that may run at once on this worker, with W1 or W2 when that is fewer than wanted (reference 1.5)."""
    wanted = request.requests_per_worker
    estimate = min(max(parts.tokens * 512 // request.context_len, 2048), 4096)
    running = min(estimate if wanted is None else wanted, parts.tokens // 2)
    cap = parts.slots // request.slots_per_request if request.hybrid else running
    warnings: tuple[str, ...] = ()
    if wanted is not None and running < wanted and cap >= running > 0:
        warnings = (refusals.capped_by_kv(requested=wanted, granted=running),)
    if cap < running:
        running = cap
        if cap > 0:
            per = request.slots_per_request
            warnings = (refusals.capped_by_states(cap=cap, slots=parts.slots, slots_per_request=per),)
    if running <= 0:
        raise refusals.no_requests(request, parts)
    return running, warnings


def _whole_bytes(request: MemoryRequest) -> int:
    """On a host, loading may end with more free memory than it began with; then nothing is charged to weights."""
    return max(request.pre_load_bytes, request.available_bytes)


def _static_lines(request: MemoryRequest, parts: Split) -> tuple[LedgerLine, ...]:
    share = f"1 - mem_fraction_static {request.mem_fraction_static} of {format_bytes(request.pre_load_bytes)}"
    raised = parts.slack_bytes == request.activation_reserve_bytes > 0
    lines = [
        LedgerLine(
            "weights",
            _whole_bytes(request) - request.available_bytes,
            request.origins.get("weights", "measured"),
            "gone when they were loaded",
        ),
        LedgerLine(
            SLACK,
            parts.slack_bytes,
            request.origins.get("mem_fraction_static", "default"),
            "activation reserve" if raised else share,
        ),
    ]
    if request.multimodal_bytes:
        lines.append(LedgerLine("multimodal reserve", request.multimodal_bytes, "default"))
    return tuple(lines)


def _state_lines(request: MemoryRequest, parts: Split) -> tuple[LedgerLine, ...]:
    """The state pool. The padding slot is charged to the budget, or comes out of slack where an engine forgets it."""
    if not request.hybrid:
        return ()
    slots, slot, conv = parts.slots, request.stage_slot_bytes, request.stage_conv_bytes
    extra = request.stage_extra_bytes
    source = "max_mamba_cache_size" if request.max_mamba_cache_size is not None else "mamba_full_memory_ratio"
    if pinned(request) and request.max_mamba_cache_size is None:
        source = "max_running_requests"
    origin = request.origins.get(source, "flag" if pinned(request) else "default")
    rule = f"{source} {request.ratio}" if not pinned(request) else source
    lines = [
        LedgerLine("conv states", slots * conv, origin, f"{slots} slots × {format_bytes(conv)}, by {rule}"),
        LedgerLine("ssm states", slots * (slot - conv), origin, f"{slots} slots × {format_bytes(slot - conv)}"),
        LedgerLine("padding slot", slot, "derived", "slot 0", part_of="" if request.charge_padding_slot else SLACK),
    ]
    if extra:
        count = slots + request.padding_slots
        lines.append(LedgerLine("side states", count * extra, "derived", f"{count} × {format_bytes(extra)}"))
    if request.fixed_bytes:
        lines.append(LedgerLine("replay rings", request.fixed_bytes, "derived"))
    if parts.scratch_bytes:
        note = f"{parts.draft_rows} + 1 rows × {request.charged_drafts} draft tokens × {format_bytes(slot)}"
        lines.append(LedgerLine("draft scratch", parts.scratch_bytes, "derived", note))
    return tuple(lines)


def _kv_lines(request: MemoryRequest, parts: Split) -> tuple[LedgerLine, ...]:
    """The KV pool, what page and slot rounding cost, and what is left."""
    cell, page = request.kv_bytes_per_token, request.page_bytes
    kv = parts.tokens * cell
    capped = parts.tokens < parts.profiled_tokens
    origin = request.origins.get("max_total_tokens", "flag") if capped else "derived"
    pages = parts.tokens // request.page_size
    note = f"{parts.tokens} tokens × {format_bytes(cell)} in {pages} pages of {request.page_size}"
    lines = [LedgerLine("KV pool", kv, origin, note)]
    left = parts.kv_bytes - kv
    lines.append(
        LedgerLine("unused", left, "derived", "above --max-total-tokens" if capped else "less than one page")
        if cell
        else LedgerLine("unused", left, "derived", "no attention layer keeps KV")
    )
    if page:
        lines.append(LedgerLine("KV padding page", page, "derived", "page 0, out of slack", part_of=SLACK))
    if request.hybrid and request.one_arena:
        arena = Arena(page_bytes=page, slot_bytes=request.stage_slot_bytes, n_slots=parts.slots, n_pages=pages)
        whole = f"{arena.pages_per_slot} whole pages" if page else "whole cache lines"
        note = f"slots take {whole}, out of slack"
        lines.append(LedgerLine("arena rounding", arena.rounding_bytes, "derived", note, part_of=SLACK))
    return tuple(lines)


def overrun_warnings(lines: tuple[LedgerLine, ...]) -> tuple[str, ...]:
    """Rounding is not charged, as in the reference; a sentence (lines: of a ledger) when slack cannot carry it, else nothing."""
    slack = sum(line.bytes for line in lines if line.name == SLACK)
    needed = sum(line.bytes for line in lines if line.part_of == SLACK)
    if needed <= slack:
        return ()
    return (
        f"Padding and rounding of slots to whole pages take {format_bytes(needed)}, and the slack that pays for "
        f"them is {format_bytes(slack)}: lower --mem-fraction-static or --page-size.",
    )
