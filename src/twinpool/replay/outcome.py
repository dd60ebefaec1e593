"""What a replay found, with what follows from its numbers: work done again, checkpoints held, and the pool that was the tighter one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from twinpool.replay.cliff import Pool, Reading, tighter_pool
from twinpool.replay.options import TrafficOptions
from twinpool.replay.record import RequestRecord
from twinpool.replay.result import ReplayResult
from twinpool.replay.trace import Trace

if TYPE_CHECKING:
    from twinpool.replay.bound import Bounds

TighterPool = Pool | Literal["neither"]
STATE_GAPS = (
    "state_evicted",
    "host_state_evicted",
)  # of request.REUSE_GAPS, those that more room for states would close


_TIGHTER = {
    ("states", False): "The state pool was the tighter one",
    ("KV", False): "The KV pool was the tighter one",
    ("states", True): "The host tier's part for states was the tighter one",
    ("KV", True): "The host tier's part for KV was the tighter one",
    ("host", True): "The host tier was too small",
    ("disk", True): "The disk tier was too small",
    ("disk_writes", True): "The disk tier was too slow to write what it was given",
}  # by pool, and whether a tier below the device ran out of room


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run to report: the trace as it was used, how it arrived, the numbers, and the upper bounds where they were asked for."""

    trace: Trace
    traffic: TrafficOptions
    result: ReplayResult
    bounds: Bounds | None = None

    @property
    def reuse_known(self) -> bool:
        """Whether the recorder kept block ids; else nobody knows what requests share, and no reuse is not 0 % of reuse."""
        return self.trace.block_size is not None

    @property
    def timed(self) -> bool:
        """Whether steps took (modelled) time."""
        return self.traffic.arrival != "count"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """Tokens computed again: of prompts whose checkpoint or KV had been evicted, of those that were on the host and found no room
    on the device, and of requests that had been retracted.

    forgotten: at most; of those counted as new, what a cache that never forgets would have had, because the tree remembers
    evictions for a while only (the few that were never kept, such as the end of an answer, are in it); 0 without bounds.
    """

    state_evicted_tokens: int
    kv_evicted_tokens: int
    forgotten_tokens: int
    retracted_tokens: int
    restore_failed_tokens: int = 0

    @property
    def tokens(self) -> int:
        """All of them."""
        lost = self.state_evicted_tokens + self.kv_lost_tokens
        return lost + self.retracted_tokens + self.restore_failed_tokens

    @property
    def kv_lost_tokens(self) -> int:
        """Those whose KV had been evicted, remembered or forgotten."""
        return self.kv_evicted_tokens + self.forgotten_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Checkpoints in the tree, mean over time; and over the sessions alive (from their first arrival to their last answer) on
    average, None where no session has a second request or no time passed.
    """

    mean_checkpoints: float
    per_session: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """pool: the one that ran out first and cost reuse; sentences: that, and what else ran out."""

    pool: TighterPool
    sentences: tuple[str, ...]


def recomputed(outcome: Outcome) -> Recomputed:
    """Work done again. What a retracted request computes a second time is what was prefilled beyond every prompt's unmatched part."""
    result = outcome.result
    gaps = dict(result.reuse.gaps)
    once = sum(record.input_tokens - record.reused for record in result.records if record.scheduled_s is not None)
    return Recomputed(
        state_evicted_tokens=sum(gaps.get(reason, 0) for reason in STATE_GAPS),
        kv_evicted_tokens=gaps["kv_evicted"],
        forgotten_tokens=_forgotten_tokens(outcome, gaps["new"]),
        retracted_tokens=max(0, result.counts.computed_tokens - once) if result.counts.retractions else 0,
        restore_failed_tokens=gaps.get("restore_failed", 0),
    )


def _forgotten_tokens(outcome: Outcome, new_tokens: int) -> int:
    if outcome.bounds is None or not outcome.result.counts.evicted_kv_tokens:
        return 0
    return max(0, outcome.bounds.infinite_tokens - (outcome.result.reuse.prompt_tokens - new_tokens))


def held(result: ReplayResult) -> Held:
    """How many checkpoints were kept, and how many that is for each session alive."""
    occupancy = result.occupancy
    checkpoints = (occupancy.slots_evictable + occupancy.slots_protected) * result.setup.slots
    alive_s = _alive_s(result.records)
    if not alive_s or not result.times.duration_s:
        return Held(mean_checkpoints=checkpoints, per_session=None)
    return Held(mean_checkpoints=checkpoints, per_session=checkpoints * result.times.duration_s / alive_s)


def _alive_s(records: tuple[RequestRecord, ...]) -> float:
    """Seconds from first arrival to last answer, over all sessions; 0 when none has two requests."""
    first_s: dict[str, float] = {}
    last_s: dict[str, float] = {}
    for record in records:
        end_s = record.arrival_s if record.finished_s is None else record.finished_s
        first_s[record.session] = min(record.arrival_s, first_s.get(record.session, record.arrival_s))
        last_s[record.session] = max(end_s, last_s.get(record.session, end_s))
    if len(first_s) == len(records):
        return 0.0
    return sum(last_s.values()) - sum(first_s.values())


def first_refused(result: ReplayResult) -> str:
    """The first refused request with its place and its sentence; empty without one."""
    for record in result.records:
        if record.refusal and not record.warm_up:
            return f"session {record.session}, request {record.index + 1}: {record.refusal.rstrip('.')}"
    return ""


def pressure(outcome: Outcome) -> Pressure:
    """Which pool was the tighter one (cliff.tighter_pool), what its evictions cost, and what running requests waited for."""
    again = recomputed(outcome)
    running = (*_restore_sentences(outcome.result, again), *_running_sentences(outcome.result))
    if not outcome.reuse_known:
        why = "Which pool limits reuse is unknown: the trace has lengths only, and every token counts as new."
        return Pressure(pool="neither", sentences=(why, *running))
    occupancy, prompt = outcome.result.occupancy, outcome.result.reuse.prompt_tokens
    free = (
        f"on average {occupancy.slots_free:.1%} of the slots and {occupancy.pages_free:.1%} of the KV pages were free"
    )
    host = outcome.result.host
    if host is not None:
        free += f", and {host.free_share:.1%} of the host tier"
    disk = outcome.result.disk
    if disk is not None:
        free += f", and of the disk {1 - disk.used_share:.1%}"
    states, kv = again.state_evicted_tokens, again.kv_lost_tokens
    if not states and not kv:
        why = f"Neither pool cost reuse: nothing that was evicted was asked for again; {free}."
        return Pressure(pool="neither", sentences=(why, *running))
    host_full = host is not None and host.ran_out
    lacked = disk.lacked if disk is not None else None
    reading = Reading(
        x=0, reuse=outcome.result.reuse.token_share, state_evicted=states / prompt, kv_evicted=kv / prompt,
        slots_free=host.states_free if host is not None and host_full else occupancy.slots_free,
        pages_free=host.kv_free if host is not None and host_full else occupancy.pages_free,
        one_memory=host is not None and host_full and not host.fixed_split, disk=lacked,
    )  # fmt: skip
    pool = tighter_pool(reading)
    why = (
        f"{_TIGHTER[pool, host_full or lacked is not None]}: {states:,} prompt tokens ({states / prompt:.1%}) "
        f"were computed again because their checkpoint had been evicted, {kv:,} ({kv / prompt:.1%}) because their KV had, alone "
        f"or with its checkpoint; {free}."
    )
    return Pressure(pool=pool, sentences=(why, *running))


def _restore_sentences(result: ReplayResult, again: Recomputed) -> tuple[str, ...]:
    if not again.restore_failed_tokens or result.host is None:
        return ()
    sentence = (
        f"{again.restore_failed_tokens:,} prompt tokens were on the host and were computed again, because the device had no room for "
        "them (their KV, and a state slot beside the request's own)."
    )
    return (sentence,)


def _running_sentences(result: ReplayResult) -> tuple[str, ...]:
    setup, counts = result.setup, result.counts
    found = []
    if counts.peak_running >= setup.max_running_requests:
        by_slots = setup.max_running_requests == setup.slots // setup.slots_per_request
        limit = f"slots / {setup.slots_per_request}, the state pool's limit" if by_slots else "--max-running-requests"
        found.append(
            f"Running requests are limited to {setup.max_running_requests:,} ({limit}), and as many ran at the peak."
        )
    if counts.retractions:
        found.append(
            f"{counts.retractions:,} times a running request was retracted: the KV pool could not hold them all."
        )
    return tuple(found)
