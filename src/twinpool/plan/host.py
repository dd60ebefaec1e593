"""The host tier of a plan: how many idle sessions it covers, under twinpool's arena and split as the reference does it."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.errors import MemoryRefusal
from twinpool.memory.host import HostArena
from twinpool.memory.host_budget import host_arena
from twinpool.memory.host_cover import HostCover, balanced_context_tokens, host_bytes_for, host_cover
from twinpool.memory.ledger import Ledger
from twinpool.plan.sizing import Sizing
from twinpool.plan.workload import Workload
from twinpool.units import GB, ceil_div

_SIZE_STEPS_A_GB = 10  # advice names sizes in tenths of a GB


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """The host tier of one rank (bytes), and sessions of `context_tokens` tokens with `states` checkpoints that it covers, all workers
    together: one memory for both (auto), split like the device's pools (proportional, reference 5.1), and under the quota of
    --hicache-mamba-size-gb (None without it). refusal: why the engine would not start with this tier; then it covers nothing.
    """

    total_bytes: int
    write_policy: str
    context_tokens: int
    states: int
    auto: HostCover | None
    proportional: HostCover | None
    quota: HostCover | None
    refusal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSize:
    """Host memory of one rank that covers so many sessions of a worker. size_gb: for --hicache-size, in 10^9 bytes, rounded up."""

    size_gb: float
    state_bytes: int
    kv_bytes: int


def host_plan(sizing: Sizing, workload: Workload | None) -> HostPlan | None:
    """None without --enable-hierarchical-cache or a ledger. Without a workload: sessions at which the device's pools balance."""
    ledger, resolved, request = sizing.ledger, sizing.resolved, sizing.request
    if ledger is None or not resolved.enable_hierarchical_cache:
        return None
    context_tokens = balanced_context_tokens(ledger, context_len=resolved.context_len)
    states = 1
    if workload is not None:
        context_tokens, states = workload.tokens_per_request, workload.checkpoints_per_session
    try:
        arena = host_arena(resolved, ledger, memory=None)
    except MemoryRefusal as error:
        return HostPlan(
            total_bytes=0, write_policy=resolved.hicache_write_policy, context_tokens=context_tokens, states=states, auto=None,
            proportional=None, quota=None, refusal=str(error),
        )  # fmt: skip
    assert arena is not None
    page_tokens = request.page_size * request.dcp
    shared = HostArena(total_bytes=arena.total_bytes, page_bytes=arena.page_bytes, slot_bytes=arena.slot_bytes)
    auto, quota = (
        host_cover(one, page_size=page_tokens, context_tokens=context_tokens, states=states) for one in (shared, arena)
    )
    proportional = proportional_cover(
        arena, state_share=_state_share(ledger), page_tokens=page_tokens, context_tokens=context_tokens, states=states
    )
    return HostPlan(
        total_bytes=arena.total_bytes, write_policy=resolved.hicache_write_policy, context_tokens=context_tokens, states=states,
        auto=_of_workers(auto, request.dp), proportional=_of_workers(proportional, request.dp),
        quota=_of_workers(quota, request.dp) if arena.has_quota else None,
    )  # fmt: skip


def proportional_cover(
    arena: HostArena, *, state_share: float, page_tokens: int, context_tokens: int, states: int, total_bytes: int | None = None
) -> HostCover:  # fmt: skip
    """The same bytes (or total_bytes) as two pools, that of states having this share. Pages have page_tokens tokens."""
    whole = arena.total_bytes if total_bytes is None else total_bytes
    state_bytes = int(whole * state_share)
    by_states = state_bytes // arena.slot_bytes // states
    pages = ceil_div(context_tokens, page_tokens)
    by_kv = (whole - state_bytes) // arena.page_bytes // pages if arena.page_bytes and pages else by_states
    return HostCover(context_tokens, by_kv, by_states, min(by_kv, by_states))


def host_size_for(workload: Workload, sizing: Sizing, *, sessions: int) -> tuple[HostSize, HostArena]:
    """(memory for so many of the workload's sessions of one worker, an empty arena of these pages and states)."""
    request, states = sizing.request, workload.checkpoints_per_session
    arena = HostArena(
        total_bytes=0, page_bytes=request.page_bytes, slot_bytes=request.stage_slot_bytes + request.stage_extra_bytes
    )
    page_tokens = request.page_size * request.dcp
    wanted = host_bytes_for(
        arena, sessions, page_size=page_tokens, context_tokens=workload.tokens_per_request, states=states
    )
    pages = ceil_div(workload.tokens_per_request, page_tokens)
    size = HostSize(
        size_gb=ceil_div(wanted * _SIZE_STEPS_A_GB, GB) / _SIZE_STEPS_A_GB, state_bytes=sessions * states * arena.slot_bytes,
        kv_bytes=sessions * pages * arena.page_bytes,
    )  # fmt: skip
    return size, arena


def _state_share(ledger: Ledger) -> float:
    """Of the device's two pools."""
    states = ledger.conv_pool_bytes + ledger.ssm_pool_bytes + ledger.extra_pool_bytes
    return states / (states + ledger.kv_pool_bytes)


def _of_workers(cover: HostCover, dp: int) -> HostCover:
    return HostCover(cover.context_tokens, cover.by_kv * dp, cover.by_states * dp, cover.together * dp)
