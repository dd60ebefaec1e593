"""One run in numbers: reuse and its gaps, latencies, throughput, occupancy, evictions. Times are modelled, counts are not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from twinpool.prefix.evict import Evictions
from twinpool.replay.describe import Spread, concurrency, spread
from twinpool.replay.disk_use import DiskUse, disk_use
from twinpool.replay.host_use import HostUse, host_use
from twinpool.replay.record import PoolSample, Recorder, RequestRecord, time_weights
from twinpool.replay.run import Run
from twinpool.request import REUSE_GAPS
from twinpool.units import share

SCHEMA = "twinpool-replay/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What ran: names, and the sizes of both pools (slots, tokens, page size), S, and how arrivals were made.

    write_policy: of the host tier, None without one; prefetch_policy: of the disk tier, None without one.
    """

    trace: str
    model: str
    machine: str
    engine: str
    slots: int
    kv_tokens: int
    page_size: int
    slots_per_request: int
    max_running_requests: int
    slot_bytes: int
    kv_bytes_per_token: int
    strategy: str
    arrival: str
    sessions_alive: int | None
    seed: int
    calibration: str
    write_policy: str | None = None
    prefetch_policy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseSummary:
    """Prompt tokens of all counted requests: reused, matched in KV alone, and the rest by reason (request.REUSE_GAPS).

    from_host_tokens: the part of the reused ones that was brought back from the host; from_storage_tokens: the part that was read
    from the disk before. token_share: reused / prompt; kv_share:
    kv_matched / prompt.
    """

    prompt_tokens: int
    reused_tokens: int
    kv_matched_tokens: int
    token_share: float
    kv_share: float
    gaps: tuple[tuple[str, int], ...]
    from_host_tokens: int = 0
    from_storage_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """requests counted and warm_up ones beside them; refused: by scheduler or at the end of KV, with the first sentence.

    computed_tokens: prefilled; what of them had been computed before is outcome.Recomputed.
    """

    requests: int
    warm_up: int
    refused: int
    first_refusal: str
    output_tokens: int
    computed_tokens: int
    evicted_kv_tokens: int
    evicted_states: int
    evictions: Evictions
    published_checkpoints: int
    skipped_checkpoints: int
    retractions: int
    retracted_tokens: int
    steps: int
    peak_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Modelled, in seconds: of the run, and of requests (queue: arrival to first scheduled; ttft: arrival to first token;
    tpot: per output token after the first; e2e: arrival to the end). tokens_per_s: input and output computed or reused.
    """

    duration_s: float
    queue_s: Spread | None
    ttft_s: Spread | None
    tpot_s: Spread | None
    e2e_s: Spread | None
    input_tokens_per_s: float
    output_tokens_per_s: float
    requests_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Mean shares of each pool over the samples, weighted by time: working (held by running requests), protected (cached, locked),
    evictable (cached), free. Requests running (from first scheduled to their end) and waiting, over the whole run.
    """

    slots_working: float
    slots_protected: float
    slots_evictable: float
    slots_free: float
    pages_working: float
    pages_protected: float
    pages_evictable: float
    pages_free: float
    mean_running: float
    median_running: float
    mean_waiting: float
    peak_waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """samples, records: what the summaries are made of (pools over time; one a request). host, disk: None without such a tier."""

    setup: Setup
    reuse: ReuseSummary
    counts: Counts
    times: Times
    occupancy: Occupancy
    samples: tuple[PoolSample, ...]
    records: tuple[RequestRecord, ...]
    host: HostUse | None = None
    disk: DiskUse | None = None


def summarise(run: Run, setup: Setup) -> ReplayResult:
    """The numbers of a run, over its requests that are no warm-up."""
    records = tuple(run.recorder.records)
    counted = [record for record in records if not record.warm_up]
    served = [record for record in records if record.is_served]
    samples, book = tuple(run.recorder.samples), run.scheduler.book
    return ReplayResult(
        setup=setup, reuse=_reuse(served), counts=_counts(run, counted), times=_times(served, run.duration_s),
        occupancy=_occupancy(run.recorder, run.duration_s), samples=samples, records=records,
        host=host_use(book.tree, run.recorder.means, failed_restores=book.totals.failed_restores),
        disk=disk_use(run.disk, run.recorder.means),
    )  # fmt: skip


def _reuse(records: list[RequestRecord]) -> ReuseSummary:
    prompt = sum(record.input_tokens for record in records)
    reused = sum(record.reused for record in records)
    matched = sum(record.kv_matched for record in records)
    gaps = dict.fromkeys(REUSE_GAPS, 0)
    for record in records:
        for reason, tokens in record.gaps:
            gaps[reason] += tokens
    return ReuseSummary(
        prompt_tokens=prompt, reused_tokens=reused, kv_matched_tokens=matched, token_share=share(reused, prompt),
        kv_share=share(matched, prompt), gaps=tuple(gaps.items()),
        from_host_tokens=sum(record.from_host for record in records),
        from_storage_tokens=sum(record.from_storage for record in records),
    )  # fmt: skip


def _counts(run: Run, counted: list[RequestRecord]) -> Counts:
    book = run.scheduler.book
    totals, tree = book.totals, book.tree
    refused = [record for record in counted if record.refusal]
    return Counts(
        requests=len(counted), warm_up=len(run.recorder.records) - len(counted), refused=len(refused),
        first_refusal=refused[0].refusal if refused else "", output_tokens=sum(record.output_tokens for record in counted),
        computed_tokens=run.prefilled_tokens, evicted_kv_tokens=tree.evictions.n_kv_tokens,
        evicted_states=tree.evictions.n_states, evictions=tree.evictions.copy(), published_checkpoints=totals.published_checkpoints,
        skipped_checkpoints=totals.skipped_checkpoints, retractions=totals.retracted_requests,
        retracted_tokens=totals.retracted_input_tokens + totals.retracted_output_tokens, steps=run.steps,
        peak_running=run.recorder.peak_running,
    )  # fmt: skip


def _times(records: list[RequestRecord], duration_s: float) -> Times:
    def between(start: str, end: str) -> Iterable[float]:
        return (getattr(record, end) - getattr(record, start) for record in records if getattr(record, end) is not None)

    tpot = (
        (record.finished_s - record.first_token_s) / (record.output_tokens - 1)
        for record in records
        if record.finished_s is not None and record.first_token_s is not None and record.output_tokens > 1
    )
    return Times(
        duration_s=duration_s,
        queue_s=spread(between("arrival_s", "scheduled_s")),
        ttft_s=spread(between("arrival_s", "first_token_s")),
        tpot_s=spread(tpot),
        e2e_s=spread(between("arrival_s", "finished_s")),
        input_tokens_per_s=share(sum(record.input_tokens for record in records), duration_s),
        output_tokens_per_s=share(sum(record.output_tokens for record in records), duration_s),
        requests_per_s=share(len(records), duration_s),
    )


def _occupancy(recorder: Recorder, duration_s: float) -> Occupancy:
    samples, records, mean = recorder.samples, recorder.records, recorder.means.of
    slots = mean("slots_free") + mean("slots_evictable") + mean("slots_protected") + mean("slots_held")
    pages = mean("pages_free") + mean("pages_evictable") + mean("pages_protected") + mean("pages_held")
    # From the requests themselves: samples of a long run are too few for short requests with pauses between them.
    spans = [
        (one.scheduled_s, one.finished_s)
        for one in records
        if one.scheduled_s is not None and one.finished_s is not None
    ]
    ran_s = sum(end_s - start_s for start_s, end_s in spans)
    waited_s = sum(one.scheduled_s - one.arrival_s for one in records if one.scheduled_s is not None)
    running = sorted(zip((one.running for one in samples), time_weights(samples), strict=True))
    median = float(concurrency(spans)[1]) if duration_s and spans else _weighted_median(running)
    return Occupancy(
        slots_working=share(mean("slots_held"), slots), slots_protected=share(mean("slots_protected"), slots),
        slots_evictable=share(mean("slots_evictable"), slots), slots_free=share(mean("slots_free"), slots),
        pages_working=share(mean("pages_held"), pages), pages_protected=share(mean("pages_protected"), pages),
        pages_evictable=share(mean("pages_evictable"), pages), pages_free=share(mean("pages_free"), pages),
        mean_running=ran_s / duration_s if duration_s else mean("running"), median_running=median,
        mean_waiting=waited_s / duration_s if duration_s else mean("waiting"),
        peak_waiting=max((one.waiting for one in samples), default=0),
    )  # fmt: skip


def _weighted_median(values: list[tuple[int, float]]) -> float:
    half, passed = sum(span for _, span in values) / 2, 0.0
    for value, span in values:
        passed += span
        if passed >= half:
            return float(value)
    return 0.0
