"""The plan of a boot log's own pools: the slots, tokens and requests that it says, whatever its flags and memory would give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from twinpool.bootlog import BootFacts
from twinpool.errors import TwinpoolError
from twinpool.memory.split import pinned, slack_bytes, split_with
from twinpool.plan.log_division import explaining_rest
from twinpool.plan.log_line import HALF_CENT_GIB
from twinpool.plan.sizing import Sizing, size
from twinpool.units import GIB, count, format_bytes

# Ways of charging a request fewer slots than the default does; the log tells which by its number of requests.
_STRATEGIES: tuple[dict[str, Any], ...] = (
    {"mamba_radix_cache_strategy": "extra_buffer_lazy"},
    {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True},
    {"disable_radix_cache": True},
)


@dataclass(frozen=True, slots=True)
class Booted:
    """sizing: of the pools as the log has them, as far as that is possible. notes: what was assumed for it."""

    sizing: Sizing
    notes: tuple[str, ...]


def as_booted(sizing: Sizing, facts: BootFacts) -> Booted:
    """The division with the log's slots, tokens and requests.

    sizing: as flags and memory give it. Where they leave the log's numbers open (its memory has two decimals, a flag is missing), the
    memory of the pools is what their sizes take, and then the slots are pinned. Flags that are set here count as logged.
    """
    found: Booted | None = None
    for start, told in _with_strategies(sizing, facts):
        booted = _with_pools(start, facts, told)
        if booted is not None and (found is None or _runs(booted.sizing) > _runs(found.sizing)):
            found = booted
        if found is not None and _runs(found.sizing) >= (facts.max_running_requests or 0):
            return _held_down(found, facts)
    if found is None:
        return Booted(sizing, ("no setting gives the log's pools: the plan below is what flags and memory give",))
    return found


def _runs(sizing: Sizing) -> int:
    """Requests of a worker."""
    return 0 if sizing.ledger is None else sizing.ledger.max_running_requests


def _with_strategies(sizing: Sizing, facts: BootFacts) -> Iterator[tuple[Sizing, str]]:
    """(the plan, what to say about it): as it is, then, where the log does not say which, with each strategy of fewer slots a request."""
    yield sizing, ""
    if sizing.flags.given & {"mamba_radix_cache_strategy", "disable_radix_cache"}:
        return
    for values in _STRATEGIES:
        try:
            tried = _logged(sizing, **values)
        except TwinpoolError:
            continue  # the model or the page size does not allow it
        said = tried.resolved.strategy if tried.resolved.radix_cache else "--disable-radix-cache"
        runs = f" for {count(facts.max_running_requests, 'request')}" if facts.max_running_requests else ""
        yield (
            tried,
            f"{count(facts.slots or 0, 'slot')}{runs}: S = {tried.request.slots_per_request}, and the plan below is with {said}",
        )


def _with_pools(sizing: Sizing, facts: BootFacts, told: str) -> Booted | None:
    """The first division that has the log's pools; None where there is none."""
    for tried, note in _divided(sizing, facts):
        if _has_pools(tried, facts):
            return Booted(tried, tuple(filter(None, (told, note, _memory_note(sizing, tried)))))
    return None


def _held_down(booted: Booted, facts: BootFacts) -> Booted:
    """With no more requests than the log has; its pools stay."""
    wanted = facts.max_running_requests
    if not wanted or _runs(booted.sizing) == wanted:
        return booted
    fewer = _logged(booted.sizing, max_running_requests=wanted * booted.sizing.request.dp)
    held = _with_pools(fewer, facts, "")
    return booted if held is None else replace(booted, sizing=held.sizing)


def _has_pools(sizing: Sizing, facts: BootFacts) -> bool:
    """Whether slots and tokens are the log's; tokens that cost nothing follow from lengths and not from memory."""
    if sizing.ledger is None or sizing.ledger.max_mamba_cache_size != facts.slots:
        return False
    free = facts.kv_tokens is None or not sizing.request.kv_bytes_per_token
    return free or sizing.ledger.kv_tokens == facts.kv_tokens


def _divided(sizing: Sizing, facts: BootFacts) -> Iterator[tuple[Sizing, str]]:
    """(division, what to say about it), that which assumes least first."""
    yield sizing, ""
    slots, tokens, request = facts.slots or 0, facts.kv_tokens, sizing.request
    cell = request.kv_bytes_per_token
    if tokens is not None and cell and not pinned(request):
        rest = explaining_rest(request, slots=slots, tokens=tokens)
        if rest is not None:
            yield _with_rest(sizing, rest), ""
    if tokens is not None and cell and pinned(request):
        parts = split_with(request, slots)
        yield _with_rest(sizing, parts.rest_bytes - parts.kv_bytes + tokens * cell), ""
    note = _pin_note(sizing, slots)
    try:
        held = _logged(sizing, max_mamba_cache_size=slots * request.dp, mamba_full_memory_ratio=None)
    except TwinpoolError:
        return
    yield held, note
    if tokens is not None and cell:
        parts = split_with(held.request, slots)
        yield _with_rest(held, parts.rest_bytes - parts.kv_bytes + tokens * cell), note


def _pin_note(sizing: Sizing, slots: int) -> str:
    ours = sizing.ledger
    given = "no pools" if ours is None else count(ours.max_mamba_cache_size, "slot")
    memory = "memory that its pools took" if sizing.machine.pools_only else "log's free memory"
    return f"flags and the {memory} give {given}: the plan below starts from the log's {count(slots, 'slot')}, as if pinned"


def _memory_note(before: Sizing, after: Sizing) -> str:
    """What the pools did not get, or got more, where it is more than what two decimals leave open."""
    more_bytes = before.machine.available_bytes - after.machine.available_bytes
    if before.machine.pools_only or abs(more_bytes) <= 4 * HALF_CENT_GIB * GIB:
        return ""
    which = "less" if more_bytes > 0 else "more"
    return (
        f"the log's pools took {format_bytes(abs(more_bytes))} {which} than its free memory and flags leave: the plan below divides "
        "what they took, and counts the difference as weights"
    )


def _with_rest(sizing: Sizing, rest_bytes: int) -> Sizing:
    """The same with so much for both pools, by what is free after the load; where only the pools are known, by all there is."""
    machine = sizing.machine
    if machine.pools_only:
        machine = replace(machine, pre_load_bytes=max(1, rest_bytes), available_bytes=max(0, rest_bytes))
    else:
        machine = replace(
            machine, available_bytes=max(0, rest_bytes + slack_bytes(sizing.request) + sizing.request.multimodal_bytes)
        )
    return size(sizing.model, machine, sizing.flags, sizing.rules)


def _logged(sizing: Sizing, **values: object) -> Sizing:
    """The plan with other flags that count as read off the log. Raises ConfigError where they contradict each other."""
    names = frozenset(values)
    flags = replace(sizing.flags, **values, given=sizing.flags.given | names, logged=sizing.flags.logged | names)  # type: ignore[arg-type]
    return size(sizing.model, sizing.machine, flags, sizing.rules)
