"""A workload against the two pools: which one binds, by how much, and how many idle sessions stay resumable."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from twinpool.errors import ConfigError
from twinpool.memory.ledger import Ledger
from twinpool.memory.split import exact
from twinpool.plan.options import WorkloadOptions
from twinpool.plan.sizing import Sizing
from twinpool.units import ceil_div, round_up

STATES, KV, ASKED, EVEN = "states", "kv", "max_running_requests", "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """running: requests at once. tokens_per_request: average context, input and output. idle_sessions: between turns,
    to be resumable, with checkpoints_per_session states each. All of one replica. origin: where the numbers come from.
    """

    running: int
    tokens_per_request: int
    idle_sessions: int = 0
    checkpoints_per_session: int = 1
    origin: str = "flag"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What a ledger does to a workload, all dp workers together.

    running_by_states, running_by_kv: how many could run by each pool alone, with nothing idle. running: how many will,
    and running_bound: what decides (states, kv, max_running_requests). slots_needed, tokens_needed: of the workload.
    idle_by_states, idle_by_kv: idle sessions that have their checkpoint and their KV beside the asked running requests;
    idle: those that have both. idle_bound: the pool that ends first.
    slots_short, tokens_short: how far each pool is below what the workload needs (0: enough).
    """

    running_by_states: int
    running_by_kv: int
    running: int
    running_bound: str
    slots_needed: int
    slots_available: int
    tokens_needed: int
    tokens_available: int
    idle_by_states: int
    idle_by_kv: int
    idle: int
    idle_bound: str
    slots_short: int
    tokens_short: int

    @property
    def holds(self) -> bool:
        """Whether the whole workload fits."""
        return not self.slots_short and not self.tokens_short


def workload_of(options: WorkloadOptions, sizing: Sizing) -> Workload | None:
    """The workload that flags describe; None when none is described. Raises ConfigError for half of one."""
    running = options.running or sizing.resolved.max_running_requests
    tokens = options.tokens_per_request
    if tokens is None:
        if options.idle_sessions:
            raise ConfigError("--idle-sessions needs --tokens-per-request: an idle session keeps its KV too.")
        if options.running is not None and options.trace is None:
            raise ConfigError("--running needs --tokens-per-request: how much KV each request takes.")
        return None
    limit = sizing.resolved.context_len
    if tokens > limit:
        raise ConfigError(
            f"--tokens-per-request {tokens} is longer than the context of {limit} tokens; use at most {limit}."
        )
    if running is None:
        raise ConfigError("--tokens-per-request needs --running (or --max-running-requests): how many run at once.")
    return Workload(
        running=running, tokens_per_request=tokens, idle_sessions=options.idle_sessions,
        checkpoints_per_session=options.checkpoints_per_session, origin=options.workload_origin,
    )  # fmt: skip


def asked_running(workload: Workload, sizing: Sizing) -> int:
    """--max-running-requests that runs the workload: workers get equal numbers, rounded down (reference 1.5)."""
    return round_up(workload.running, sizing.request.dp)


def slots_needed(workload: Workload, sizing: Sizing) -> int:
    """Slots of one worker: S for each running request, and the checkpoints of its idle sessions."""
    dp, per_request = sizing.request.dp, sizing.request.slots_per_request
    running = ceil_div(workload.running, dp)
    if not sizing.request.radix_cache:
        return running * per_request
    return running * per_request + ceil_div(workload.idle_sessions, dp) * workload.checkpoints_per_session


def tokens_needed(workload: Workload, sizing: Sizing) -> int:
    """Logical tokens of one worker; each context takes whole pages of the tree."""
    dp, page = sizing.request.dp, sizing.request.page_size * sizing.request.dcp
    idle = workload.idle_sessions if sizing.request.radix_cache else 0
    contexts = ceil_div(workload.running, dp) + ceil_div(idle, dp)
    return contexts * round_up(workload.tokens_per_request, page)


def fit(workload: Workload, sizing: Sizing) -> Fit:
    """Compare. Raises ConfigError when the plan itself was refused."""
    ledger = sizing.ledger
    if ledger is None:
        raise ConfigError(sizing.refusal or "there is no ledger")
    dp = sizing.request.dp
    context = round_up(workload.tokens_per_request, sizing.request.page_size * sizing.request.dcp)
    has_kv = sizing.request.kv_bytes_per_token > 0
    tokens = ledger.logical_tokens
    by_states = ledger.max_mamba_cache_size // ledger.slots_per_request
    by_kv = tokens // context if has_kv else by_states
    running = min(ledger.max_running_requests, by_states, by_kv)
    needs_slots, needs_tokens = slots_needed(workload, sizing), tokens_needed(workload, sizing)
    idle_states, idle_kv = _idle(workload, ledger, context=context, dp=dp, has_kv=has_kv)
    if not sizing.request.radix_cache:
        idle_states = idle_kv = 0
    return Fit(
        running_by_states=by_states * dp,
        running_by_kv=by_kv * dp,
        running=running * dp,
        running_bound=_bound(by_states, by_kv, ledger.max_running_requests),
        slots_needed=needs_slots * dp,
        slots_available=ledger.max_mamba_cache_size * dp,
        tokens_needed=needs_tokens * dp,
        tokens_available=tokens * dp,
        idle_by_states=idle_states * dp,
        idle_by_kv=idle_kv * dp,
        idle=min(idle_states, idle_kv) * dp,
        idle_bound=STATES if idle_states < idle_kv else KV if idle_kv < idle_states else EVEN,
        slots_short=max(0, needs_slots - ledger.max_mamba_cache_size) * dp,
        tokens_short=max(0, needs_tokens - tokens) * dp if has_kv else 0,
    )


def _bound(by_states: int, by_kv: int, most: int) -> str:
    """What holds concurrency down; the asked limit when neither pool does."""
    if most < min(by_states, by_kv):
        return ASKED
    return STATES if by_states < by_kv else KV if by_kv < by_states else EVEN


def _idle(workload: Workload, ledger: Ledger, *, context: int, dp: int, has_kv: bool) -> tuple[int, int]:
    """(idle sessions of a worker that keep a checkpoint, that keep their KV) beside the running requests it gets."""
    running = min(ceil_div(workload.running, dp), ledger.max_running_requests)
    free_slots = ledger.max_mamba_cache_size - running * ledger.slots_per_request
    by_states = max(0, free_slots) // workload.checkpoints_per_session
    if not has_kv:
        return by_states, by_states
    return by_states, max(0, ledger.logical_tokens - running * context) // context


def balanced_ratio(sizing: Sizing, tokens_per_request: float) -> float | None:
    """r* = (S + D) · te · dcp / L: both pools run out together (reference 1.5); None without attention layers."""
    te = sizing.token_equivalents
    if te is None:
        return None
    per_request = sizing.request.slots_per_request + sizing.request.charged_drafts
    return per_request * te * sizing.request.dcp / tokens_per_request


def rounded_ratio(ratio: float) -> float:
    """A ratio as one writes it: three significant digits, rounded up."""
    unit = Fraction(10) ** (math.floor(math.log10(ratio)) - 2)
    return float(math.ceil(exact(ratio) / unit) * unit)
