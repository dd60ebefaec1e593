"""The catalogue of metrics: every name, kind, label and bucket. What is not here cannot be reported.

`sglang:*` names are those of reference 7.3 and 7.4 that have a meaning here, so that existing dashboards keep
working; `twinpool:*` names are ours, for what has none. The exporter adds USUAL_LABELS to each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]

USUAL_LABELS = ("model_name", "engine_type", "tp_rank", "pp_rank", "dp_rank")

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 100.0)
ITL_BUCKETS_S = (
    0.002,
    0.004,
    0.006,
    0.008,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.06,
    0.08,
    0.1,
    0.2,
    0.4,
    0.6,
    0.8,
    1.0,
    2.0,
    4.0,
)
E2E_BUCKETS_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 100.0, 200.0, 400.0, 600.0)
QUEUE_BUCKETS_S = (0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
COPY_BUCKETS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
TOKEN_BUCKETS = (
    8.0,
    16.0,
    32.0,
    64.0,
    128.0,
    256.0,
    512.0,
    1024.0,
    2048.0,
    4096.0,
    8192.0,
    16384.0,
    32768.0,
    65536.0,
    131072.0,
    262144.0,
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `labels` are its own, beside USUAL_LABELS; `buckets` are a histogram's upper bounds, without +Inf."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "gauge", text, labels)


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "counter", text, labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(name, "histogram", text, (), buckets)


_POOLS = (
    _gauge(
        "sglang:token_usage", "Usage of the fuller pool (KV or states), 0 to 1, two decimals; evictable counts as free."
    ),
    _gauge("sglang:full_token_usage", "Usage of the KV pool, 0 to 1; evictable counts as free."),
    _gauge("sglang:mamba_usage", "Usage of the state pool, 0 to 1; evictable counts as free."),
    _gauge("sglang:num_used_tokens", "KV tokens in use; states are not included."),
    _gauge("sglang:kv_available_tokens", "KV tokens that nobody holds."),
    _gauge("sglang:kv_evictable_tokens", "KV tokens of cached prefixes that may be dropped."),
    _gauge("sglang:kv_used_tokens", "KV tokens of running requests and of the prefixes they lock."),
    _gauge("sglang:mamba_available_tokens", "State slots (not tokens, in spite of the name) that nobody holds."),
    _gauge("sglang:mamba_evictable_tokens", "State slots (not tokens) of checkpoints that may be dropped."),
    _gauge(
        "sglang:mamba_used_tokens", "State slots (not tokens) of running requests and of the checkpoints they lock."
    ),
    _gauge(
        "twinpool:state_slots",
        "State slots by holder: working, track, cached (evictable), protected (locked), free.",
        "kind",
    ),
)
_HOST = (
    _gauge("sglang:hicache_host_used_tokens", "KV tokens of prefixes on the host."),
    _gauge(
        "sglang:hicache_host_total_tokens",
        "KV tokens that the host holds or could hold beside the states that are there now.",
    ),
    _gauge("sglang:hicache_host_mamba_used_states", "States (checkpoints) on the host."),
    _gauge(
        "sglang:hicache_host_mamba_total_states",
        "States that the host holds or could hold beside the KV that is there now.",
    ),
    _gauge("twinpool:hicache_closed", "1 once host and disk tier have been given up because copies failed, else 0."),
)
_DISK = (
    _gauge(
        "twinpool:disk_segments", "Segments (what one checkpoint adds to a conversation) in the disk tier's folder."
    ),
    _gauge("twinpool:disk_used_bytes", "Bytes of segments in the disk tier's folder, whoever wrote them."),
    _gauge("twinpool:disk_limit_bytes", "--hicache-storage-size in bytes."),
    _gauge("twinpool:disk_pending_bytes", "Bytes that wait to be written to the disk tier."),
)
_SCHEDULER = (
    _gauge("sglang:num_running_reqs", "Requests that hold slots."),
    _gauge("sglang:num_queue_reqs", "Requests that wait for admission."),
    _gauge("sglang:num_retracted_reqs", "Requests that wait after having been retracted."),
    _gauge("sglang:gen_throughput", "Output tokens per second over the last second or more of work."),
    _gauge("sglang:new_token_ratio", "Share of the remaining max_tokens that admission reserves for running requests."),
    _gauge("sglang:cache_hit_rate", "Reused share of the prompt tokens of the last admitted requests, 0 to 1."),
    _gauge(
        "twinpool:effective_max_running_requests",
        "Requests that can run at once: the flag's value or what the slots allow.",
    ),
    _gauge("twinpool:resumable_prefixes", "Checkpoints in the prefix cache: prefixes from which a session can resume."),
)
_CONSTANTS = (
    _gauge("sglang:max_total_num_tokens", "Capacity of the KV pool, tokens."),
    _gauge("sglang:page_size", "Tokens per KV page."),
    _gauge("sglang:num_pages", "Pages of the KV pool."),
    _gauge("sglang:context_len", "Longest prompt plus output, tokens."),
    _gauge("sglang:weight_memory_usage_gb", "Weights, GiB."),
    _gauge("sglang:kv_cache_memory_usage_gb", "KV pool, GiB."),
    _gauge("sglang:startup_available_gpu_memory_gb", "Device memory available before the weights were loaded, GiB."),
    _gauge("twinpool:state_pool_slots", "Capacity of the state pool, slots (max_mamba_cache_size)."),
    _gauge("twinpool:state_pool_memory_usage_gb", "State pool, GiB."),
)
_COUNTERS = (
    _counter("sglang:prompt_tokens_total", "Prompt tokens of admitted requests, one count for each prompt."),
    _counter("sglang:generation_tokens_total", "Output tokens."),
    _counter("sglang:num_requests_total", "Sequences that were accepted; a request with n=3 counts three times."),
    _counter(
        "sglang:cached_tokens_total",
        "Prompt tokens reused from the prefix cache, by source: device, host, storage_file, total.",
        "cache_source",
    ),
    _counter("sglang:realtime_tokens_total", "Tokens by mode: prefill_compute, prefill_cache, decode.", "mode"),
    _counter(
        "sglang:prefill_effective_tokens_total",
        "Prompt tokens by mode: input (computed), device_hit, host_hit, storage_hit (reused).",
        "mode",
    ),
    _counter("sglang:evicted_tokens_total", "KV tokens dropped from the prefix cache."),
    _counter("sglang:num_retracted_requests_total", "Retractions."),
    _counter("sglang:num_retracted_input_tokens_total", "Prompt tokens of retracted requests."),
    _counter(
        "sglang:num_retracted_output_tokens_total",
        "Output tokens that retracted requests had when they were sent back.",
    ),
    _counter("twinpool:evicted_states_total", "Checkpoints (state slots) dropped from the prefix cache."),
    _counter(
        "twinpool:evictions_total",
        "The two counters of what was dropped from the prefix cache, KV tokens (pool full) and states (pool mamba), by what ran short: "
        "kv_pressure (pages), state_pressure (slots), path_limit (--mamba-max-states-per-path). A leaf goes whole, so either "
        "shortage costs both pools.",
        "reason",
        "pool",
    ),
    _counter(
        "sglang:load_back_tokens_total",
        "Brought back from the host, by pool: full (KV tokens), mamba (states).",
        "pool",
    ),
    _counter("sglang:load_back_bytes_total", "Bytes brought back from the host."),
    _counter(
        "sglang:hicache_backup_tokens_total", "Copied to the host, by pool: full (KV tokens), mamba (states).", "pool"
    ),
    _counter("sglang:hicache_backup_bytes_total", "Bytes copied to the host."),
    _counter(
        "sglang:hicache_dropped_tokens_total",
        "KV tokens (pool full) and states (pool mamba) that the host gave up, by reason: host_pressure (a copy made "
        "room for another), not_copied (no room could be made for it).",
        "reason",
        "pool",
    ),
    _counter(
        "twinpool:failed_restores_total", "Requests that computed what the host had, for want of room on the device."
    ),
    _counter(
        "twinpool:restarted_requests_total", "Running requests computed again because a copy between the tiers failed."
    ),
    _counter("sglang:prefetched_tokens_total", "KV tokens read from the disk tier for requests."),
    _counter("sglang:backuped_tokens_total", "KV tokens written to the disk tier."),
    _counter(
        "twinpool:disk_segments_total",
        "Segments of the disk tier by what happened: written, already_there, read, evicted, no_room and no_parent (not "
        "written), dropped (too many waited), paused (a write had just failed), damaged, vanished, failed (the disk), leftovers (removed).",
        "event",
    ),
    _counter("twinpool:disk_late_requests_total", "Requests that went on before all of their prefix was read."),
    _counter("twinpool:kv_matched_tokens_total", "Prompt tokens whose KV was found, reused or not."),
    _counter("twinpool:reuse_gap_tokens_total", "Prompt tokens that were not reused, by reason.", "reason"),
    _counter(
        "twinpool:skipped_checkpoints_total", "Checkpoints not taken because no state slot was free or evictable."
    ),
    _counter("twinpool:published_checkpoints_total", "Checkpoints given to the prefix cache."),
    _counter("twinpool:refused_requests_total", "HTTP requests refused, by code of the error.", "code"),
    _counter(
        "twinpool:finished_requests_total", "Sequences that ended, by reason: stop, length, abort, error.", "reason"
    ),
    _counter(
        "twinpool:out_of_memory_aborts_total", "Sequences ended because even alone they could not get another KV page."
    ),
)
_HISTOGRAMS = (
    _histogram("sglang:time_to_first_token_seconds", "Arrival to first token, seconds.", TTFT_BUCKETS_S),
    _histogram("sglang:inter_token_latency_seconds", "Time between two tokens of a sequence, seconds.", ITL_BUCKETS_S),
    _histogram("sglang:e2e_request_latency_seconds", "Arrival to end, seconds.", E2E_BUCKETS_S),
    _histogram("sglang:queue_time_seconds", "Arrival to first admission, seconds.", QUEUE_BUCKETS_S),
    _histogram("sglang:load_back_duration_seconds", "Copies back from the host in a step, seconds.", COPY_BUCKETS_S),
    _histogram("sglang:hicache_backup_duration_seconds", "Copies to the host in a step, seconds.", COPY_BUCKETS_S),
    _histogram("sglang:prompt_tokens_histogram", "Prompt tokens of a sequence.", TOKEN_BUCKETS),
    _histogram(
        "sglang:uncached_prompt_tokens_histogram", "Prompt tokens of a sequence that had to be computed.", TOKEN_BUCKETS
    ),
    _histogram("sglang:generation_tokens_histogram", "Output tokens of a sequence.", TOKEN_BUCKETS),
)

CATALOGUE: tuple[Metric, ...] = _POOLS + _HOST + _DISK + _SCHEDULER + _CONSTANTS + _COUNTERS + _HISTOGRAMS
