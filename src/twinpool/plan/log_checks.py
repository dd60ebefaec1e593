"""A boot log against our formulas, line by line: what it says, what we get, and whether its own rounding explains the rest."""

from __future__ import annotations

from collections.abc import Iterator

from twinpool.bootlog import BootFacts
from twinpool.memory.ledger import MemoryRequest
from twinpool.plan.log_division import division
from twinpool.plan.log_line import DIFFERS, EQUAL, UNKNOWN, LogCheck, gib, kv_gib, near
from twinpool.plan.sizing import Sizing
from twinpool.units import GIB, to_gib


def check_boot(ranks: tuple[BootFacts, ...], sizing: Sizing, *, missing: tuple[str, ...] = ()) -> tuple[LogCheck, ...]:
    """All checks of one boot. sizing: of the log's model, flags and memory; missing: what the division lacks."""
    found: list[LogCheck] = []
    for facts in ranks:
        found += _weights(facts)
        found += _state_sizes(facts, sizing.request)
        found += _kv_size(facts, sizing)
        found += _left_over(facts)
        found += _requests(facts, sizing)
    found += division(ranks, sizing, missing)
    found += _agreement(ranks)
    return tuple(found)


def _weights(facts: BootFacts) -> Iterator[LogCheck]:
    if facts.load_begin_gb is None or facts.load_end_gb is None or facts.weights_gb is None:
        return
    ours = facts.load_begin_gb - facts.load_end_gb
    yield LogCheck(
        rank=facts.label, what="weights = free before - free after", logged=gib(facts.weights_gb), ours=gib(ours),
        verdict=near(ours, facts.weights_gb, 3),
    )  # fmt: skip


def _state_sizes(facts: BootFacts, request: MemoryRequest) -> Iterator[LogCheck]:
    """K + 1 slots of conv and of ssm, and the draft scratch of the request rows."""
    slots = (facts.slots or 0) + 1
    conv, slot = request.stage_conv_bytes, request.stage_slot_bytes
    sizes = (
        ("conv states", facts.conv_gb, slots * conv),
        ("ssm states", facts.ssm_gb, slots * (slot - conv + request.stage_extra_bytes)),
    )
    for what, logged, size_bytes in sizes:
        if logged is not None:
            yield LogCheck(
                rank=facts.label, what=f"{what}: {slots} slots (K + 1)", logged=gib(logged), ours=gib(to_gib(size_bytes)),
                verdict=near(to_gib(size_bytes), logged),
            )  # fmt: skip
    if facts.draft_ssm_gb and slot > conv:
        yield _draft_scratch(facts.label, facts.draft_ssm_gb, request.draft_tokens, ssm_bytes=slot - conv)


def _draft_scratch(rank: str, logged_gb: float, drafts: int, *, ssm_bytes: int) -> LogCheck:
    """Rows × draft tokens × ssm; the rows are those that the log's own size gives."""
    states = round(logged_gb * GIB / ssm_bytes)
    if not drafts:
        note = f"{states} states; missing: --speculative-num-draft-tokens"
        return LogCheck(rank=rank, what="draft ssm states", logged=gib(logged_gb), ours="?", verdict=UNKNOWN, note=note)
    rows = max(1, round(states / drafts))
    ours = to_gib(rows * drafts * ssm_bytes)
    what = f"draft ssm states: {rows} rows × {drafts} draft tokens"
    return LogCheck(rank=rank, what=what, logged=gib(logged_gb), ours=gib(ours), verdict=near(ours, logged_gb))


def _kv_size(facts: BootFacts, sizing: Sizing) -> Iterator[LogCheck]:
    """Tokens and a padding page. Keys and values are rounded apart; the draft model's KV is a pool of its own in the log."""
    logged = kv_gib(facts)
    if logged is None or facts.kv_tokens is None:
        return
    cell = sizing.request.kv_bytes_per_token - sizing.draft_kv_bytes_per_token
    ours = to_gib((facts.kv_tokens + sizing.request.page_size) * cell)
    yield LogCheck(
        rank=facts.label, what=f"KV: ({facts.kv_tokens} tokens + a page) × {cell:,} bytes", logged=gib(logged), ours=gib(ours),
        verdict=near(ours, logged, 1 if facts.kv_gb is not None else 2),
    )  # fmt: skip


def _left_over(facts: BootFacts) -> Iterator[LogCheck]:
    """What both pools took must be gone afterwards."""
    kv = kv_gib(facts)
    if facts.load_end_gb is None or facts.pool_end_gb is None or kv is None:
        return
    pools = kv + sum(size or 0.0 for size in (facts.conv_gb, facts.ssm_gb, facts.draft_ssm_gb, facts.draft_conv_gb))
    ours = facts.load_end_gb - pools
    verdict, gap, note = near(ours, facts.pool_end_gb, 8), ours - facts.pool_end_gb, ""
    if verdict == DIFFERS and gap > 0:
        verdict, note = UNKNOWN, f"{gap:.2f} GiB are in neither pool: workspaces, a draft model or other processes"
    elif verdict == DIFFERS:
        verdict, note = UNKNOWN, f"{-gap:.2f} GiB were freed in between, by a cache of the loader or other processes"
    yield LogCheck(
        rank=facts.label, what="free after both pools", logged=gib(facts.pool_end_gb), ours=gib(ours), verdict=verdict,
        note=note,
    )  # fmt: skip


def _requests(facts: BootFacts, sizing: Sizing) -> Iterator[LogCheck]:
    """S as the warning says it, n = min(asked, K // S), and tokens over all ranks of a context (reference 1.5)."""
    if facts.slots_per_request is not None:
        ours = sizing.request.slots_per_request
        same = facts.slots_per_request == ours
        yield LogCheck(
            rank=facts.label, what="state slots a request (S)", logged=str(facts.slots_per_request), ours=str(ours),
            verdict=EQUAL if same else _of_strategy(sizing), note="" if same else _STRATEGY_NOTE,
        )  # fmt: skip
    if facts.max_running_requests is not None and facts.slots is not None:
        yield _running(facts, sizing, logged=facts.max_running_requests, slots=facts.slots)
    if facts.max_total_tokens is not None and facts.kv_tokens is not None:
        total = facts.kv_tokens * sizing.request.dcp
        yield LogCheck(
            rank=facts.label, what="max_total_num_tokens", logged=f"{facts.max_total_tokens:,}", ours=f"{total:,}",
            verdict=EQUAL if total == facts.max_total_tokens else DIFFERS,
        )  # fmt: skip


_STRATEGY_NOTE = "S follows from --mamba-radix-cache-strategy, the overlap schedule and the radix cache"


def _of_strategy(sizing: Sizing) -> str:
    """What another S means: a difference only where the strategy was given."""
    return DIFFERS if "mamba_radix_cache_strategy" in sizing.flags.given else UNKNOWN


def _running(facts: BootFacts, sizing: Sizing, *, logged: int, slots: int) -> LogCheck:
    per_request, asked = sizing.request.slots_per_request, sizing.request.requests_per_worker
    ours = slots // per_request if asked is None else min(asked, slots // per_request)
    verdict, note = EQUAL, ""
    if ours != logged:
        fits = [s for s in (1, 2, 3, 4, 5) if slots // s == logged]
        verdict = _of_strategy(sizing) if fits else DIFFERS
        note = f"{slots} slots / S = {logged} for S = {fits[0]}; {_STRATEGY_NOTE}" if fits else ""
        if asked is None and logged < ours and not fits:
            verdict, note = UNKNOWN, "missing: --max-running-requests, which may have asked for fewer"
    return LogCheck(
        rank=facts.label, what=f"max_running_requests: {slots} slots / {per_request} a request"
        + (f", asked {asked}" if asked is not None else ""),
        logged=str(logged), ours=str(ours), verdict=verdict, note=note,
    )  # fmt: skip


def _agreement(ranks: tuple[BootFacts, ...]) -> Iterator[LogCheck]:
    """All ranks must have the same slots and tokens."""
    if len(ranks) < 2:
        return
    for what, name in (("slots (K)", "slots"), ("KV tokens", "kv_tokens")):
        values = sorted({value for facts in ranks if (value := getattr(facts, name)) is not None})
        if values:
            yield LogCheck(
                rank=f"{len(ranks)} ranks", what=f"{what} agree over ranks", logged=" / ".join(f"{value:,}" for value in values),
                ours=f"{values[0]:,}", verdict=EQUAL if len(values) == 1 else DIFFERS,
            )  # fmt: skip
