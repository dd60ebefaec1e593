"""What the engine does, as metrics: an observer that counts in the engine's thread, and the gauges of a scrape."""

from __future__ import annotations

from twinpool.engine.core import Engine, Output, StepReport
from twinpool.engine.disk import DiskCounts
from twinpool.engine.tier import HostCounts
from twinpool.memory.ledger import Ledger
from twinpool.prefix.evict import Evictions
from twinpool.prefix.host import HostTotals
from twinpool.request import REUSE_GAPS, Request
from twinpool.sched.book import Retraction
from twinpool.server.meters import Meters
from twinpool.units import to_gib

STORAGE_BACKEND = "file"  # the one there is
# Fields of DiskStats that count what happened to segments.
DISK_EVENTS = (
    "written", "already_there", "read", "evicted", "no_room", "no_parent", "paused", "damaged", "vanished", "failed", "leftovers",
)  # fmt: skip
_WINDOW_S = 1.0


class EngineStats:
    """Counts steps and finished requests.

    `gen_throughput` is the rate of the last full window of work, in tokens a second.
    """

    def __init__(self, meters: Meters) -> None:
        self.gen_throughput = 0.0
        self._meters = meters
        self._last_token_s: dict[int, float] = {}
        self._window_start_s: float | None = None
        self._window_tokens = 0
        self._window_retracted = 0

    def on_step(self, report: StepReport) -> None:
        """Tokens of a committed step."""
        rows = report.plan.rows
        computed = sum(row.end - row.start for row in rows if row.tokens is not None)
        self._meters.add("sglang:realtime_tokens_total", computed, "prefill_compute")
        for name, took_s in (("load_back", report.result.load_s), ("hicache_backup", report.result.save_s)):
            if took_s:
                self._meters.observe(f"sglang:{name}_duration_seconds", took_s)
        admitted: list[Request] = []
        for output in report.outputs:
            if output.tokens:
                self._tokens(output, report.now_s, admitted)
        if admitted:
            prompt = sum(request.prompt_len for request in admitted)
            reused = sum(request.reuse.reused for request in admitted)
            self._meters.set("sglang:cache_hit_rate", reused / prompt)
        busy = report.snapshot.n_running + report.snapshot.n_waiting > 0
        self._close_window(report.now_s, even_if_short=not busy)

    def on_finish(self, request: Request) -> None:
        """Distributions over whole sequences."""
        meters = self._meters
        self._last_token_s.pop(request.rid, None)
        reason = request.finish.reason if request.finish is not None else "error"
        meters.add("twinpool:finished_requests_total", 1, reason)
        if request.finished_s is not None:
            meters.observe("sglang:e2e_request_latency_seconds", request.finished_s - request.arrival_s)
        if request.n_output:
            meters.observe("sglang:prompt_tokens_histogram", request.prompt_len)
            meters.observe("sglang:uncached_prompt_tokens_histogram", request.prompt_len - request.reuse.reused)
            meters.observe("sglang:generation_tokens_histogram", request.n_output)

    def on_retraction(self, retraction: Retraction) -> None:
        """Requests went back to the queue."""
        self._window_retracted += retraction.n_requests

    def _tokens(self, output: Output, now_s: float, admitted: list[Request]) -> None:
        meters, request, n_tokens = self._meters, output.request, len(output.tokens)
        before_s = self._last_token_s.get(request.rid)
        if before_s is None:
            admitted.append(request)
            self._first_token(request, now_s)
        else:
            meters.observe("sglang:inter_token_latency_seconds", (now_s - before_s) / n_tokens, n_tokens)
        if output.finish is None:
            self._last_token_s[request.rid] = now_s
        meters.add("sglang:generation_tokens_total", n_tokens)
        meters.add("sglang:realtime_tokens_total", n_tokens, "decode")
        self._window_tokens += n_tokens
        if self._window_start_s is None:
            self._window_start_s = now_s

    def _first_token(self, request: Request, now_s: float) -> None:
        """The prompt is done: what it cost and what the prefix cache saved."""
        meters, reuse = self._meters, request.reuse
        meters.add("sglang:prompt_tokens_total", request.prompt_len)
        for source, tokens in reuse.by_tier.items():
            cache_source = f"storage_{STORAGE_BACKEND}" if source == "storage" else source
            meters.add("sglang:cached_tokens_total", tokens, cache_source)
            meters.add("sglang:prefill_effective_tokens_total", tokens, f"{source}_hit")
        meters.add("sglang:cached_tokens_total", reuse.reused, "total")
        meters.add("sglang:realtime_tokens_total", reuse.reused, "prefill_cache")
        meters.add("sglang:prefill_effective_tokens_total", request.prompt_len - reuse.reused, "input")
        meters.add("twinpool:kv_matched_tokens_total", reuse.kv_matched)
        for reason, tokens in reuse.gaps:
            meters.add("twinpool:reuse_gap_tokens_total", tokens, reason)
        meters.observe("sglang:time_to_first_token_seconds", now_s - request.arrival_s)
        if request.first_scheduled_s is not None:
            meters.observe("sglang:queue_time_seconds", request.first_scheduled_s - request.arrival_s)

    def _close_window(self, now_s: float, *, even_if_short: bool) -> None:
        """A rate once a second of work, or when the work ends."""
        if self._window_start_s is None:
            return
        duration_s = now_s - self._window_start_s
        if duration_s < _WINDOW_S and not (even_if_short and duration_s > 0):
            return
        self.gen_throughput = self._window_tokens / duration_s
        self._meters.set("sglang:num_retracted_reqs", self._window_retracted)
        self._window_start_s, self._window_tokens, self._window_retracted = None, 0, 0


def declare_labels(meters: Meters) -> None:
    """Report 0 for every label value from the start, so that rates over the first minutes are right."""
    for reason in REUSE_GAPS:
        meters.add("twinpool:reuse_gap_tokens_total", 0, reason)
    for source in ("device", "host", f"storage_{STORAGE_BACKEND}", "total"):
        meters.add("sglang:cached_tokens_total", 0, source)
    for mode in ("prefill_compute", "prefill_cache", "decode"):
        meters.add("sglang:realtime_tokens_total", 0, mode)
    _set_evictions(meters, Evictions())
    _set_host_pools(meters, HostTotals())
    for mode in ("input", "device_hit", "host_hit", "storage_hit"):
        meters.add("sglang:prefill_effective_tokens_total", 0, mode)


def state_pool_bytes(ledger: Ledger) -> int:
    """The state pool as allocated, padding slot included."""
    return ledger.conv_pool_bytes + ledger.ssm_pool_bytes + ledger.extra_pool_bytes


def set_constants(meters: Meters, engine: Engine) -> None:
    """Gauges that boot fixes (reference 7.3)."""
    snapshot, facts = engine.snapshot(), engine.facts
    meters.set("sglang:max_total_num_tokens", snapshot.pages.total * snapshot.page_size)
    meters.set("sglang:page_size", snapshot.page_size)
    meters.set("sglang:num_pages", snapshot.pages.total)
    meters.set("sglang:context_len", facts.context_len)
    meters.set("sglang:weight_memory_usage_gb", to_gib(facts.weight_bytes))
    meters.set("sglang:startup_available_gpu_memory_gb", to_gib(facts.startup_available_bytes))
    meters.set("sglang:kv_cache_memory_usage_gb", to_gib(facts.ledger.kv_pool_bytes))
    meters.set("twinpool:state_pool_slots", snapshot.slots.total)
    meters.set("twinpool:state_pool_memory_usage_gb", to_gib(state_pool_bytes(facts.ledger)))
    meters.set("twinpool:effective_max_running_requests", engine.scheduler.shape.max_running_requests)


def set_gauges(meters: Meters, engine: Engine, stats: EngineStats) -> None:
    """Counts after the last step (reference 2.2, 7.3). Evictable cached data counts as free in every usage."""
    snapshot = engine.snapshot()
    pages, slots, page_size, totals = snapshot.pages, snapshot.slots, snapshot.page_size, snapshot.totals
    values: dict[str, float] = {
        "sglang:token_usage": round(max(pages.usage, slots.usage), 2),
        "sglang:full_token_usage": pages.usage,
        "sglang:mamba_usage": slots.usage,
        "sglang:num_used_tokens": pages.used * page_size,
        "sglang:kv_available_tokens": pages.free * page_size,
        "sglang:kv_evictable_tokens": pages.evictable * page_size,
        "sglang:kv_used_tokens": pages.used * page_size,
        "sglang:mamba_available_tokens": slots.free,
        "sglang:mamba_evictable_tokens": slots.evictable,
        "sglang:mamba_used_tokens": slots.used,
        "sglang:num_running_reqs": snapshot.n_running,
        "sglang:num_queue_reqs": snapshot.n_waiting,
        "sglang:new_token_ratio": snapshot.new_token_ratio,
        "sglang:gen_throughput": stats.gen_throughput,
        "twinpool:resumable_prefixes": slots.evictable + slots.protected,
        "sglang:evicted_tokens_total": snapshot.evictions.n_kv_tokens,
        "sglang:num_retracted_requests_total": totals.retracted_requests,
        "sglang:num_retracted_input_tokens_total": totals.retracted_input_tokens,
        "sglang:num_retracted_output_tokens_total": totals.retracted_output_tokens,
        "twinpool:evicted_states_total": snapshot.evictions.n_states,
        "twinpool:skipped_checkpoints_total": totals.skipped_checkpoints,
        "twinpool:published_checkpoints_total": totals.published_checkpoints,
        "twinpool:out_of_memory_aborts_total": totals.aborted_out_of_memory_requests,
        "twinpool:failed_restores_total": totals.failed_restores,
        "twinpool:restarted_requests_total": totals.restarted_requests,
    }
    for name, value in values.items():
        meters.set(name, value)
    by_holder = {
        "working": snapshot.n_running,
        "track": slots.held - snapshot.n_running,
        "cached": slots.evictable,
        "protected": slots.protected,
        "free": slots.free,
    }
    for holder, count in by_holder.items():
        meters.set("twinpool:state_slots", count, holder)
    _set_evictions(meters, snapshot.evictions)
    if snapshot.host is not None:
        _set_host(meters, snapshot.host)
    disk = engine.view_disk()
    if disk is not None:
        _set_disk(meters, disk)


def _set_evictions(meters: Meters, evictions: Evictions) -> None:
    """What left the device's cache, by pool and reason."""
    for pool, by_reason in (("full", evictions.kv_tokens), ("mamba", evictions.states)):
        for reason, number in by_reason.items():
            meters.set("twinpool:evictions_total", number, reason, pool)


def _set_host(meters: Meters, host: HostCounts) -> None:
    """The host tier's occupancy and traffic."""
    _set_host_pools(meters, host.totals)
    meters.set("sglang:hicache_host_used_tokens", host.used_tokens)
    meters.set("sglang:hicache_host_total_tokens", host.total_tokens)
    meters.set("sglang:hicache_host_mamba_used_states", host.used_states)
    meters.set("sglang:hicache_host_mamba_total_states", host.total_states)
    meters.set("twinpool:hicache_closed", host.is_closed)
    meters.set("sglang:load_back_bytes_total", host.loaded_bytes)
    meters.set("sglang:hicache_backup_bytes_total", host.saved_bytes)


def _set_disk(meters: Meters, disk: DiskCounts) -> None:
    """The disk tier's occupancy and traffic."""
    store = disk.store
    gauges = {
        "twinpool:disk_segments": store.segments,
        "twinpool:disk_used_bytes": store.used_bytes,
        "twinpool:disk_limit_bytes": store.limit_bytes,
        "twinpool:disk_pending_bytes": disk.pending_bytes,
        "sglang:prefetched_tokens_total": disk.fetched_tokens,
        "sglang:backuped_tokens_total": store.written_tokens,
        "twinpool:disk_late_requests_total": disk.late_requests,
    }
    for name, value in gauges.items():
        meters.set(name, value)
    for event in DISK_EVENTS:
        meters.set("twinpool:disk_segments_total", getattr(store, event), event)
    meters.set("twinpool:disk_segments_total", disk.dropped_segments, "dropped")


def _set_host_pools(meters: Meters, totals: HostTotals) -> None:
    """What went to the host, came back and was given up, by pool: KV tokens (full) or states (mamba)."""
    meters.set("sglang:load_back_tokens_total", totals.loaded_tokens, "full")
    meters.set("sglang:load_back_tokens_total", totals.loaded_states, "mamba")
    meters.set("sglang:hicache_backup_tokens_total", totals.saved_tokens, "full")
    meters.set("sglang:hicache_backup_tokens_total", totals.saved_states, "mamba")
    meters.set("sglang:hicache_dropped_tokens_total", totals.evicted_tokens, "host_pressure", "full")
    meters.set("sglang:hicache_dropped_tokens_total", totals.evicted_states, "host_pressure", "mamba")
    meters.set("sglang:hicache_dropped_tokens_total", totals.unsaved_tokens, "not_copied", "full")
    meters.set("sglang:hicache_dropped_tokens_total", totals.unsaved_states, "not_copied", "mamba")
