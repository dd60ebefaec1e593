"""A boot log against our formulas, line by line: what it says, what we get, and whether its own rounding explains the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from twinpool.bootlog import BootFacts
from twinpool.memory.ledger import MemoryRequest
from twinpool.memory.split import Split, pinned, split
from twinpool.plan.sizing import Sizing
from twinpool.units import GIB, to_gib

EQUAL, ROUNDING, DIFFERS, UNKNOWN = "equal", "within the log's rounding", "differs", "not determined"
HALF_CENT_GIB = 0.005
TOKENS_TOLERANCE = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class LogCheck:
    """One line of the comparison. verdict: equal, within the log's rounding, differs, or not determined (note: what is missing)."""

    rank: str
    what: str
    logged: str
    ours: str
    verdict: str
    note: str = ""


def check_boot(ranks: tuple[BootFacts, ...], sizing: Sizing) -> tuple[LogCheck, ...]:
    """All checks of one boot. sizing: of the log's model, flags and memory."""
    found: list[LogCheck] = []
    for facts in ranks:
        found += _weights(facts)
        found += _state_sizes(facts, sizing.request)
        found += _kv_size(facts, sizing)
        found += _left_over(facts)
        found += _requests(facts, sizing)
    found += _division(ranks, sizing)
    found += _agreement(ranks)
    return tuple(found)


def _gib(value: float) -> str:
    return f"{value:.2f} GiB"


def _near(a: float, b: float, steps: float = 1) -> str:
    """Equality of two sizes in GiB, one of them rounded to two decimals `steps` times."""
    return EQUAL if abs(a - b) <= steps * HALF_CENT_GIB + 1e-9 else DIFFERS


def _weights(facts: BootFacts) -> Iterator[LogCheck]:
    if facts.load_begin_gb is None or facts.load_end_gb is None or facts.weights_gb is None:
        return
    ours = facts.load_begin_gb - facts.load_end_gb
    yield LogCheck(
        rank=facts.label, what="weights = free before - free after", logged=_gib(facts.weights_gb), ours=_gib(ours),
        verdict=_near(ours, facts.weights_gb, 3),
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
                rank=facts.label, what=f"{what}: {slots} slots (K + 1)", logged=_gib(logged), ours=_gib(to_gib(size_bytes)),
                verdict=_near(to_gib(size_bytes), logged),
            )  # fmt: skip
    if facts.draft_ssm_gb is not None and slot > conv:
        yield _draft_scratch(facts.label, facts.draft_ssm_gb, request.draft_tokens, ssm_bytes=slot - conv)


def _draft_scratch(rank: str, logged_gb: float, drafts: int, *, ssm_bytes: int) -> LogCheck:
    """Rows × draft tokens × ssm; the rows are those that the log's own size gives."""
    states = round(logged_gb * GIB / ssm_bytes)
    if not drafts:
        note = f"{states} states; missing: --speculative-num-draft-tokens"
        return LogCheck(
            rank=rank, what="draft ssm states", logged=_gib(logged_gb), ours="?", verdict=UNKNOWN, note=note
        )
    rows = max(1, round(states / drafts))
    ours = to_gib(rows * drafts * ssm_bytes)
    what = f"draft ssm states: {rows} rows × {drafts} draft tokens"
    return LogCheck(rank=rank, what=what, logged=_gib(logged_gb), ours=_gib(ours), verdict=_near(ours, logged_gb))


def _kv_total(facts: BootFacts) -> float | None:
    if facts.kv_gb is not None:
        return facts.kv_gb
    return None if facts.k_gb is None or facts.v_gb is None else facts.k_gb + facts.v_gb


def _kv_size(facts: BootFacts, sizing: Sizing) -> Iterator[LogCheck]:
    """Tokens and a padding page. Keys and values are rounded apart; the draft model's KV is a pool of its own in the log."""
    logged = _kv_total(facts)
    if logged is None or facts.kv_tokens is None:
        return
    cell = sizing.request.kv_bytes_per_token - sizing.draft_kv_bytes_per_token
    ours = to_gib((facts.kv_tokens + sizing.request.page_size) * cell)
    yield LogCheck(
        rank=facts.label, what=f"KV: ({facts.kv_tokens} tokens + a page) × {cell:,} bytes", logged=_gib(logged), ours=_gib(ours),
        verdict=_near(ours, logged, 1 if sizing.keeps_latents else 2),
    )  # fmt: skip


def _left_over(facts: BootFacts) -> Iterator[LogCheck]:
    """What both pools took must be gone afterwards."""
    kv = _kv_total(facts)
    if facts.load_end_gb is None or facts.pool_end_gb is None or kv is None:
        return
    pools = kv + sum(size or 0.0 for size in (facts.conv_gb, facts.ssm_gb, facts.draft_ssm_gb, facts.draft_conv_gb))
    ours = facts.load_end_gb - pools
    verdict, gap, note = _near(ours, facts.pool_end_gb, 8), ours - facts.pool_end_gb, ""
    if verdict == DIFFERS and gap > 0:
        verdict, note = UNKNOWN, f"{gap:.2f} GiB are in neither pool: workspaces, a draft model or other processes"
    yield LogCheck(
        rank=facts.label, what="free after both pools", logged=_gib(facts.pool_end_gb), ours=_gib(ours), verdict=verdict,
        note=note,
    )  # fmt: skip


def _requests(facts: BootFacts, sizing: Sizing) -> Iterator[LogCheck]:
    """n = min(asked, K // S)."""
    logged, slots = facts.max_running_requests, facts.slots
    if logged is None or slots is None:
        return
    per_request, asked = sizing.request.slots_per_request, sizing.request.requests_per_worker
    ours = slots // per_request if asked is None else min(asked, slots // per_request)
    verdict, note = EQUAL, ""
    if ours != logged:
        fits = [s for s in (1, 2, 3, 4, 5) if slots // s == logged]
        verdict, note = DIFFERS, f"{slots} slots / S = {logged} for S = {fits[0]}" if fits else ""
        if asked is None and logged < slots // per_request:
            verdict, note = UNKNOWN, "missing: --max-running-requests, which may have asked for fewer"
    yield LogCheck(
        rank=facts.label, what=f"max_running_requests: {slots} slots / {per_request} a request"
        + (f", asked {asked}" if asked is not None else ""),
        logged=str(logged), ours=str(ours), verdict=verdict, note=note,
    )  # fmt: skip
    if facts.max_total_tokens is not None and facts.kv_tokens is not None:
        total = facts.kv_tokens * sizing.request.dcp
        yield LogCheck(
            rank=facts.label, what="max_total_num_tokens", logged=f"{facts.max_total_tokens:,}", ours=f"{total:,}",
            verdict=EQUAL if total == facts.max_total_tokens else DIFFERS,
        )  # fmt: skip


def _division(ranks: tuple[BootFacts, ...], sizing: Sizing) -> Iterator[LogCheck]:
    """Slots and tokens by the split, from the least free memory of all ranks."""
    slots, tokens = ranks[0].slots, ranks[0].kv_tokens
    missing = [
        name
        for name, value in (
            ("free memory before the load", _least(ranks, "load_begin_gb")),
            ("free memory after the load", _least(ranks, "load_end_gb")),
            ("mem_fraction_static", sizing.flags.mem_fraction_static),
        )
        if value is None
    ]
    if missing:
        yield from _ratio_check(ranks[0], sizing, missing)
        return
    exact, (low, high) = split(sizing.request), _corners(sizing.request)
    note = ""
    shown = sum(facts.load_end_gb is not None for facts in ranks)
    if sizing.machine.ranks > shown:
        note = f"the log shows free memory of {shown} of {sizing.machine.ranks} ranks; the split takes the least of all"
    counts = [_counted("slots (K)", slots or 0, exact.slots, (low.slots, high.slots), 0.0, note)]
    if tokens is not None:
        counts.append(_counted("KV tokens", tokens, exact.tokens, (low.tokens, high.tokens), TOKENS_TOLERANCE, note))
    yield from counts
    if any(check.verdict in (UNKNOWN, DIFFERS) for check in counts) and not pinned(sizing.request):
        yield from _ratio_check(ranks[0], sizing, ["free memory of the other ranks"] if note else [])


def _counted(what: str, logged: int, ours: int, span: tuple[int, int], tolerance: float, note: str) -> LogCheck:
    verdict = DIFFERS
    if abs(ours - logged) <= tolerance * logged:
        verdict = EQUAL
    elif span[0] <= logged <= span[1]:
        verdict = ROUNDING
    elif note:
        verdict = UNKNOWN
    return LogCheck(
        rank="",
        what=what,
        logged=f"{logged:,}",
        ours=f"{ours:,}",
        verdict=verdict,
        note="" if verdict == EQUAL else note,
    )


def _corners(request: MemoryRequest) -> tuple[Split, Split]:
    """The division at both ends of what two decimals of GiB leave open."""
    half = round(HALF_CENT_GIB * GIB)
    low = replace(
        request, pre_load_bytes=request.pre_load_bytes + half, available_bytes=max(0, request.available_bytes - half)
    )
    high = replace(
        request, pre_load_bytes=max(1, request.pre_load_bytes - half), available_bytes=request.available_bytes + half
    )
    return split(low), split(high)


def _ratio_check(facts: BootFacts, sizing: Sizing, missing: list[str]) -> Iterator[LogCheck]:
    """Without the memory the pools themselves give it: the ratio must split their sum as logged."""
    lacks = "missing: " + ", ".join(missing) if missing else ""
    request, slots, tokens = sizing.request, facts.slots or 0, facts.kv_tokens
    if pinned(request):
        ours = split(request).slots
        verdict = EQUAL if ours == slots else DIFFERS
        note = "" if verdict == EQUAL else "the pin was not taken"
        yield LogCheck(
            rank="", what="slots (K) as pinned", logged=f"{slots:,}", ours=f"{ours:,}", verdict=verdict, note=note
        )
        if verdict == EQUAL:
            return
    if tokens is None or not request.kv_bytes_per_token:
        yield LogCheck(
            rank="",
            what="slots and tokens by the ratio",
            logged=f"{slots:,}",
            ours="?",
            verdict=UNKNOWN,
            note=f"{lacks}, KV tokens",
        )
        return
    ratio_request = replace(request, max_mamba_cache_size=None, max_total_tokens=None, mem_fraction_static=1.0)
    explained = _explaining_rest(ratio_request, slots=slots, tokens=tokens)
    state = f"{slots:,} slots, {tokens:,} tokens"
    verdict = UNKNOWN if explained is None else EQUAL
    note = (
        lacks
        if explained is None
        else "; ".join(filter(None, (f"pools of {to_gib(explained):.2f} GiB together", lacks)))
    )
    split_up = "?" if explained is None else state
    yield LogCheck(
        rank="", what=f"split by ratio {request.ratio}", logged=state, ours=split_up, verdict=verdict, note=note
    )


def _explaining_rest(request: MemoryRequest, *, slots: int, tokens: int) -> int | None:
    """Bytes for both pools under which the ratio gives these slots and tokens, if there are any."""
    with_states = (slots + request.padding_slots) * (request.stage_slot_bytes + request.stage_extra_bytes)
    least = with_states + request.fixed_bytes + tokens * request.kv_bytes_per_token
    if request.charged_drafts:
        rows = min(request.requests_per_worker or 0, slots // request.slots_per_request)
        least += request.stage_slot_bytes * (rows + 1) * request.charged_drafts
    for rest in (least, least + request.page_bytes - 1):
        parts = split(replace(request, pre_load_bytes=rest, available_bytes=rest))
        if (parts.slots, parts.tokens) == (slots, tokens):
            return rest
    return None


def _least(ranks: tuple[BootFacts, ...], name: str) -> float | None:
    values = [value for facts in ranks if (value := getattr(facts, name)) is not None]
    return min(values, default=None)


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
