"""Slots and tokens of a boot log against the split: from its free memory, or from what its own pools take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from twinpool.bootlog import BootFacts
from twinpool.memory.ledger import MemoryRequest
from twinpool.memory.split import Split, exact, pinned, split
from twinpool.plan.log_line import DIFFERS, EQUAL, HALF_CENT_GIB, LOG_CONSTANTS, ROUNDING, UNKNOWN, LogCheck
from twinpool.plan.sizing import Sizing
from twinpool.units import GIB, to_gib

TOKENS_TOLERANCE = 0.001
# What contexts and communication buffers take before the first line with free memory in it, at most.
_MOST_CONTEXT_GIB = 2.5
_HALF_BYTES = round(HALF_CENT_GIB * GIB)


def division(ranks: tuple[BootFacts, ...], sizing: Sizing, missing: tuple[str, ...]) -> Iterator[LogCheck]:
    """Slots and tokens by the split, from the least free memory of all ranks; without it, by the ratio alone."""
    if missing:
        yield from _ratio_check(ranks[0], sizing, missing)
        return
    counts = _Counts(ranks, sizing)
    found = list(counts.checks())
    yield from found
    if any(check.verdict in (UNKNOWN, DIFFERS) for check in found) and not pinned(sizing.request):
        yield from _ratio_check(ranks[0], sizing, ("free memory of the other ranks",) if counts.hidden_ranks else ())


@dataclass(frozen=True, slots=True)
class _Counts:
    """What a boot logged, and the division that is to explain it."""

    ranks: tuple[BootFacts, ...]
    sizing: Sizing

    @property
    def hidden_ranks(self) -> int:
        """Ranks whose free memory the log does not show."""
        return max(0, self.sizing.machine.ranks - sum(facts.load_end_gb is not None for facts in self.ranks))

    def checks(self) -> Iterator[LogCheck]:
        """Slots, then tokens."""
        facts = self.ranks[0]
        ours, (low, high) = split(self.sizing.request), _corners(self.sizing, facts)
        yield self._counted("slots (K)", facts.slots or 0, ours.slots, span=(low.slots, high.slots))
        if facts.kv_tokens is None:
            return
        if facts.resized:
            yield LogCheck(
                rank="", what="KV tokens", logged=f"{facts.kv_tokens:,}", ours=f"{ours.tokens:,}", verdict=UNKNOWN,
                note="sized from what was free after the graphs were captured, not by the split",
            )  # fmt: skip
            return
        tolerance = TOKENS_TOLERANCE * facts.kv_tokens
        yield self._counted(
            "KV tokens", facts.kv_tokens, ours.tokens, span=(low.tokens, high.tokens), tolerance=tolerance
        )

    def _counted(self, what: str, logged: int, ours: int, *, span: tuple[int, int], tolerance: float = 0.0) -> LogCheck:
        note, verdict = "", EQUAL
        if abs(ours - logged) > tolerance:
            note = self._reason()
            within = min(span) <= logged <= max(span)
            verdict = ROUNDING if within else UNKNOWN if note else DIFFERS
        return LogCheck(rank="", what=what, logged=f"{logged:,}", ours=f"{ours:,}", verdict=verdict, note=note)

    def _reason(self) -> str:
        """What the log does not show and would explain another division; empty when nothing would."""
        if self.hidden_ranks:
            return (
                f"the log shows free memory of {self.sizing.machine.ranks - self.hidden_ranks} of "
                f"{self.sizing.machine.ranks} ranks; the split takes the least of all"
            )
        request, facts = self.sizing.request, self.ranks[0]
        share = 1 - exact(request.mem_fraction_static)
        rest = explaining_rest(request, slots=facts.slots or 0, tokens=facts.kv_tokens or 0)
        if rest is None or not share:
            return ""
        before = math.floor((request.available_bytes - request.multimodal_bytes - rest) / share)
        more = to_gib(before - request.pre_load_bytes)
        if not 0 < more <= _MOST_CONTEXT_GIB:
            return ""
        return (
            f"explained by {to_gib(before):.2f} GiB before the load, {more:.2f} more than logged: what was free before "
            "'Init torch distributed ends'"
        )


def _corners(sizing: Sizing, facts: BootFacts) -> tuple[Split, Split]:
    """The division at both ends of what two decimals of GiB leave open, in memory and in constants read off a log."""
    request = sizing.request
    slot_bytes = cell_bytes = 0
    if sizing.model.source == LOG_CONSTANTS:
        slot_bytes = math.ceil(2 * _HALF_BYTES / ((facts.slots or 0) + 1))
        cell_bytes = math.ceil(2 * _HALF_BYTES / max(1, facts.kv_tokens or 0))
    low = replace(
        request, pre_load_bytes=request.pre_load_bytes + _HALF_BYTES,
        available_bytes=max(0, request.available_bytes - _HALF_BYTES), ssm_bytes=request.ssm_bytes + slot_bytes,
        kv_bytes_per_token=request.kv_bytes_per_token + cell_bytes,
    )  # fmt: skip
    high = replace(
        request, pre_load_bytes=max(1, request.pre_load_bytes - _HALF_BYTES),
        available_bytes=request.available_bytes + _HALF_BYTES, ssm_bytes=max(0, request.ssm_bytes - slot_bytes),
        kv_bytes_per_token=max(1, request.kv_bytes_per_token - cell_bytes),
    )  # fmt: skip
    return split(low), split(high)


def _ratio_check(facts: BootFacts, sizing: Sizing, missing: tuple[str, ...]) -> Iterator[LogCheck]:
    """Without the memory the pools themselves give it: the ratio must split their sum as logged."""
    lacks = "missing: " + ", ".join(missing) if missing else ""
    request, slots, tokens = sizing.request, facts.slots or 0, facts.kv_tokens
    if pinned(request):
        ours = split(request).slots
        verdict = EQUAL if ours == slots else DIFFERS
        yield LogCheck(rank="", what="slots (K) as pinned", logged=f"{slots:,}", ours=f"{ours:,}", verdict=verdict)
        if verdict == EQUAL:
            return
    if tokens is None or not request.kv_bytes_per_token:
        yield LogCheck(
            rank="", what="slots and tokens by the ratio", logged=f"{slots:,}", ours="?", verdict=UNKNOWN,
            note=f"{lacks}, KV tokens".removeprefix(", "),
        )  # fmt: skip
        return
    ratio_request = replace(request, max_mamba_cache_size=None, radix_cache=True, max_total_tokens=None)
    explained = explaining_rest(ratio_request, slots=slots, tokens=tokens)
    state = f"{slots:,} slots, {tokens:,} tokens"
    pools = "" if explained is None else f"pools of {to_gib(explained):.2f} GiB together"
    yield LogCheck(
        rank="", what=f"split by ratio {request.ratio}", logged=state, ours="?" if explained is None else state,
        verdict=UNKNOWN if explained is None else EQUAL, note="; ".join(filter(None, (pools, lacks))),
    )  # fmt: skip


def explaining_rest(request: MemoryRequest, *, slots: int, tokens: int) -> int | None:
    """Bytes for both pools under which the split gives these slots and tokens, if there are any."""
    with_states = (slots + request.padding_slots) * (request.stage_slot_bytes + request.stage_extra_bytes)
    least_bytes = with_states + request.fixed_bytes + tokens * request.kv_bytes_per_token
    if request.charged_drafts:
        rows = min(request.requests_per_worker or 0, slots // request.slots_per_request)
        least_bytes += request.stage_slot_bytes * (rows + 1) * request.charged_drafts
    whole = replace(
        request, mem_fraction_static=1.0, max_total_tokens=None, multimodal_bytes=0, activation_reserve_bytes=0
    )
    for rest in (least_bytes, least_bytes + request.page_bytes - 1):
        parts = split(replace(whole, pre_load_bytes=rest, available_bytes=rest))
        if (parts.slots, parts.tokens) == (slots, tokens):
            return rest
    return None
