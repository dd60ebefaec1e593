"""What to change, cheapest first: memory fraction, strategy, split, data types, host tier, more devices. Each step is sized again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from twinpool.errors import TwinpoolError
from twinpool.plan import inverse
from twinpool.plan.host import host_size_for, proportional_cover
from twinpool.plan.machine import Machine
from twinpool.plan.sizing import Sizing, changed
from twinpool.plan.workload import Fit, Workload, asked_running, fit, slots_needed
from twinpool.units import GB, ceil_div, format_bytes

STRATEGIES_BY_SLOTS = ("extra_buffer_lazy", "no_buffer")
ACCURACY = "changes results slightly: compare answers on your own tasks before you keep it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One change: its title, why, the plan with it (and with all steps before it), and a warning to read first."""

    title: str
    why: str
    sizing: Sizing
    warning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTier:
    """Host memory of one rank for idle sessions that the device cannot keep, one memory for KV and states.

    sessions: those; covered_sessions: with those that the device has, which are copied as well; size_gb: for --hicache-size, 10^9
    bytes; state_bytes, kv_bytes: what the covered sessions take of it. proportional_sessions: how many the same memory covers when
    it is split like the device pools.
    """

    sessions: int
    covered_sessions: int
    size_gb: float
    state_bytes: int
    kv_bytes: int
    proportional_sessions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A split that uses up both pools together for a workload that fits: the most idle sessions it can keep.

    pin: --max-mamba-cache-size; ratio: gives as many slots (None: no ratio does); reason: why the pin is the safer one.
    """

    workload: Workload
    pin: inverse.Pin
    ratio: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Steps in order, the plan after them and what it does to the workload; then what helps if that does not hold it.

    holds: the workload fits after the steps. setting: the recommended split; where the workload does not fit, of the
    nearest one that does (fewer idle sessions, then fewer running requests); None when not one request fits.
    options: data types that would help, each alone, behind a warning. ranks: the fewest that hold the workload.
    """

    steps: tuple[Step, ...]
    final: Sizing
    fit: Fit | None
    holds: bool
    setting: Setting | None
    options: tuple[Step, ...]
    host: HostTier | None
    ranks: int | None


def advise(workload: Workload, sizing: Sizing, *, machine_of: Callable[[int], Machine] | None) -> Advice:
    """Look for the cheapest change of flags under which the workload fits."""
    steps: list[Step] = []
    current = sizing
    for step_from in (_raise_fraction, _fewer_slots, _split):
        if _holds(workload, current):
            break
        for step in step_from(workload, current):
            steps.append(step)
            current = step.sizing
    holds, setting = _holds(workload, current), _setting(workload, current)
    return Advice(
        steps=tuple(steps),
        final=current,
        fit=fit(workload, current) if current.ledger is not None else None,
        holds=holds,
        setting=setting,
        options=tuple(_smaller_types(current)),
        host=None if holds or setting is None else _host_tier(workload, current, setting),
        ranks=None if holds else inverse.fewest_ranks(workload, current, machine_of=machine_of),
    )


def _setting(workload: Workload, sizing: Sizing) -> Setting | None:
    nearest = replace(workload, idle_sessions=0)
    if inverse.pin_for(nearest, sizing) is None:
        nearest = replace(nearest, running=inverse.most_running(nearest, sizing))
    if nearest.running == 0:
        return None
    nearest = replace(nearest, idle_sessions=inverse.most_idle(nearest, sizing))
    pin = inverse.pin_for(nearest, sizing)
    assert pin is not None, "the inverse found a workload that the forward computation refuses"
    ratio = inverse.ratio_for_slots(sizing, pin.slots // sizing.request.dp)
    return Setting(workload=nearest, pin=pin, ratio=ratio, reason=_pin_reason(nearest, sizing))


def _holds(workload: Workload, sizing: Sizing) -> bool:
    if sizing.ledger is None:
        return False
    found = fit(workload, sizing)
    return found.holds and found.running >= workload.running


def _raise_fraction(workload: Workload, sizing: Sizing) -> Iterator[Step]:
    """Up to the default of this device: what an engine takes by itself is known to leave room for activations."""
    if sizing.flags.mem_fraction_static is None or sizing.machine.pools_only:
        return
    before = sizing.resolved.mem_fraction_static
    try:
        default = changed(sizing, mem_fraction_static=None).resolved.mem_fraction_static
    except TwinpoolError:
        return  # the device is too small for the default
    if default <= before:
        return
    gained_bytes = int((default - before) * sizing.request.pre_load_bytes)
    yield Step(
        title=f"--mem-fraction-static {default}",
        why=f"{format_bytes(gained_bytes)} of the slack go to the pools; {default} is the default for this device",
        sizing=changed(sizing, mem_fraction_static=default),
    )


def _fewer_slots(workload: Workload, sizing: Sizing) -> Iterator[Step]:
    """A strategy that charges fewer slots for each running request, where no split holds the workload as it is.

    The first with which one does; where none does, only a strategy that costs nothing.
    """
    if inverse.pin_for(workload, sizing) is not None:
        return
    steps = [step for name in STRATEGIES_BY_SLOTS for step in _strategy(sizing, name)]
    enough = [step for step in steps if inverse.pin_for(workload, step.sizing) is not None]
    yield from (enough or [step for step in steps if not step.warning])[:1]


def _strategy(sizing: Sizing, name: str) -> Iterator[Step]:
    try:
        tried = changed(
            sizing, mamba_radix_cache_strategy=name, disable_overlap_schedule=name == "no_buffer",
            page_size=1 if name == "no_buffer" else sizing.flags.page_size,
        )  # fmt: skip
    except TwinpoolError:
        return  # this model or these flags do not allow it
    if tried.request.slots_per_request < sizing.request.slots_per_request:
        cost = "no overlap of scheduling and forward, and no checkpoints while decoding"
        yield Step(
            title=f"--mamba-radix-cache-strategy {name}",
            why=f"S falls from {sizing.request.slots_per_request} to {tried.request.slots_per_request} slots a request",
            sizing=tried,
            warning=cost if name == "no_buffer" else "",
        )


def _split(workload: Workload, sizing: Sizing) -> Iterator[Step]:
    """Pin the slots that the workload needs; KV takes the rest."""
    pin = inverse.pin_for(workload, sizing)
    if pin is None:
        return
    running = asked_running(workload, sizing)
    # The fraction is written out: its default moves with the number of requests.
    tried = changed(
        sizing, max_mamba_cache_size=pin.slots, mamba_full_memory_ratio=None, max_running_requests=running,
        mem_fraction_static=sizing.fraction_to_write,
    )  # fmt: skip
    yield Step(
        title=f"--max-mamba-cache-size {pin.slots} --max-running-requests {running}",
        why=f"{pin.slots} slots are what the workload needs, and KV then holds {pin.tokens:,} tokens on each worker",
        sizing=tried,
    )


def _smaller_types(sizing: Sizing) -> Iterator[Step]:
    """Data types that shrink one pool's unit."""
    if sizing.resolved.mamba_ssm_dtype == "float32" and sizing.request.ssm_bytes and sizing.model.config:
        half = changed(sizing, mamba_ssm_dtype="bfloat16")
        sizes = f"{format_bytes(sizing.request.stage_slot_bytes)} to {format_bytes(half.request.stage_slot_bytes)}"
        yield Step(title="--mamba-ssm-dtype bfloat16", why=f"a slot falls from {sizes}", sizing=half, warning=ACCURACY)
    if sizing.resolved.kv_cache_dtype in ("bfloat16", "float16") and sizing.model.config:
        try:
            small = changed(sizing, kv_cache_dtype="fp8_e4m3")
        except TwinpoolError:
            return
        sizes = f"{sizing.request.kv_bytes_per_token:,} to {small.request.kv_bytes_per_token:,} bytes"
        yield Step(title="--kv-cache-dtype fp8_e4m3", why=f"a token falls from {sizes}", sizing=small, warning=ACCURACY)


def _pin_reason(workload: Workload, sizing: Sizing) -> str:
    """When a pin is safer than a ratio."""
    te = sizing.token_equivalents
    if te is None:
        return "the model keeps no KV, so there is nothing to split"
    if sizing.request.charged_drafts:
        return "a ratio solves for draft scratch of K // S requests and gives what is left over to KV: a pin says what you get"
    slots = slots_needed(workload, sizing)
    return (
        f"a pin of at least {slots} slots keeps {workload.running} requests running whatever memory is free at boot; "
        f"under a ratio each slot lost to a fuller device also moves {math.ceil(te):,} tokens"
    )


def _host_tier(workload: Workload, sizing: Sizing, setting: Setting) -> HostTier | None:
    """For the idle sessions that the recommended split does not keep. The tier must cover all of them and the running ones: what the
    device keeps has a copy there, too.
    """
    missing, request = workload.idle_sessions - setting.workload.idle_sessions, sizing.request
    if missing <= 0 or not request.radix_cache:
        return None
    covered = ceil_div(workload.idle_sessions, request.dp) + ceil_div(workload.running, request.dp)
    size, arena = host_size_for(workload, sizing, sessions=covered)
    device_states = setting.pin.slots // request.dp * arena.slot_bytes
    device_kv = setting.pin.tokens // request.dcp * request.kv_bytes_per_token
    proportional = proportional_cover(
        arena, state_share=device_states / (device_states + device_kv), page_tokens=request.page_size * request.dcp,
        context_tokens=workload.tokens_per_request, states=workload.checkpoints_per_session,
        total_bytes=int(size.size_gb * GB),
    )  # fmt: skip
    return HostTier(
        sessions=missing, covered_sessions=covered * request.dp, size_gb=size.size_gb, state_bytes=size.state_bytes,
        kv_bytes=size.kv_bytes, proportional_sessions=min(proportional.together, covered) * request.dp,
    )  # fmt: skip
