"""A small result with numbers made up by hand, for what reports make of it."""

from __future__ import annotations

from twinpool.prefix.evict import Evictions
from twinpool.replay.bound import Bounds
from twinpool.replay.describe import Spread
from twinpool.replay.disk_use import DiskUse
from twinpool.replay.host_use import HostUse
from twinpool.replay.options import TrafficOptions
from twinpool.replay.outcome import Outcome
from twinpool.replay.record import PoolSample, RequestRecord
from twinpool.replay.result import Counts, Occupancy, ReplayResult, ReuseSummary, Setup, Times
from twinpool.replay.trace import Rejection, Session, Trace

SETUP = Setup(
    trace="t.jsonl", model="M", machine="2 × G", engine="sglang", slots=10, kv_tokens=704, page_size=64, slots_per_request=5,
    max_running_requests=2, slot_bytes=1 << 20, kv_bytes_per_token=1000, strategy="extra_buffer", arrival="recorded",
    sessions_alive=None, seed=0, calibration="assumed",
)  # fmt: skip
RECORDS = (
    RequestRecord(
        session="a", index=0, warm_up=False, input_tokens=400, output_tokens=10, arrival_s=0.0, scheduled_s=0.0,
        first_token_s=1.0, finished_s=2.0, gaps=(("new", 400),),
    ),
    RequestRecord(
        session="a", index=1, warm_up=False, input_tokens=500, output_tokens=10, arrival_s=4.0, scheduled_s=5.0,
        first_token_s=6.0, finished_s=8.0, kv_matched=384, reused=256, gaps=(("state_evicted", 128), ("new", 116)), retractions=1,
    ),
    RequestRecord(
        session="b", index=0, warm_up=False, input_tokens=100, output_tokens=10, arrival_s=4.0, scheduled_s=4.0,
        first_token_s=4.5, finished_s=10.0, gaps=(("kv_evicted", 64), ("new", 36)),
    ),
    RequestRecord(
        session="b", index=1, warm_up=False, input_tokens=9000, output_tokens=0, arrival_s=10.0, refusal="it is too long.",
    ),
)  # fmt: skip
BOUNDS = Bounds(
    infinite_tokens=600, infinite_token_share=0.6, clairvoyant_tokens=500, clairvoyant_token_share=0.5, limits="kv", note="At most."
)  # fmt: skip
HOST = HostUse(
    total_bytes=10**10, most_tokens=6400, most_states=100, fixed_split=False, saved_tokens=640, saved_states=6, saved_bytes=10**9,
    loaded_tokens=64, loaded_states=1, loaded_bytes=10**8, dropped_tokens=128, dropped_states=2, unsaved_tokens=0,
    unsaved_states=0, failed_restores=1, kv_share=0.5, states_share=0.25, kv_free=0.25, states_free=0.25, resumable_share=0.9,
)  # fmt: skip
EVICTIONS = Evictions(
    {"kv_pressure": 192, "state_pressure": 0}, {"kv_pressure": 1, "state_pressure": 0, "path_limit": 2}
)
DISK = DiskUse(
    limit_bytes=10**10, used_bytes=10**9, used_share=0.05, segments=9, read_bytes_per_s=2e9, write_bytes_per_s=1e9, latency_s=0.001,
    written_segments=10, written_tokens=640, written_bytes=11 * 10**8, already_there_segments=1, evicted_segments=1,
    no_room_segments=0, no_parent_segments=2, dropped_segments=3, pending_segments=0, read_segments=4, read_bytes=4 * 10**8,
    fetched_tokens=256, late_requests=1, most_pages=100, most_states=100,
)  # fmt: skip
SAMPLES = (
    PoolSample(0.0, 1, 0, 8, 0, 0, 3, 7, 0, 0, 3),
    PoolSample(5.0, 2, 1, 2, 3, 2, 4, 1, 2, 2, 5),
    PoolSample(10.0, 0, 0, 5, 6, 0, 0, 6, 4, 0, 0),
)


def outcome(
    *, state_evicted: int = 128, kv_evicted: int = 64, peak_running: int = 2, retractions: int = 1, lengths_only: bool = False,
    arrival: str = "recorded", rejected: int = 0,
) -> Outcome:  # fmt: skip
    """The run above, with other evictions, peaks, or a trace without block ids."""
    gaps = (
        ("state_evicted", state_evicted), ("no_checkpoint", 0), ("below_grid", 0), ("kv_evicted", kv_evicted),
        ("new", 744 - state_evicted - kv_evicted),
    )  # fmt: skip
    spread = Spread(3, 0.5, 0.0, 0.25, 1.0, 1.0, 1.0)
    result = ReplayResult(
        setup=SETUP,
        reuse=ReuseSummary(
            prompt_tokens=1000, reused_tokens=256, kv_matched_tokens=384, token_share=0.256, kv_share=0.384, gaps=gaps
        ),
        counts=Counts(
            requests=4, warm_up=0, refused=1, first_refusal="it is too long.", output_tokens=30, computed_tokens=1000,
            evicted_kv_tokens=192, evicted_states=3, evictions=EVICTIONS, published_checkpoints=7, skipped_checkpoints=1,
            retractions=retractions,
            retracted_tokens=256, steps=40, peak_running=peak_running,
        ),
        times=Times(
            duration_s=10.0, queue_s=spread, ttft_s=spread, tpot_s=None, e2e_s=spread, input_tokens_per_s=100.0,
            output_tokens_per_s=3.0, requests_per_s=0.3,
        ),
        occupancy=Occupancy(
            slots_working=0.4, slots_protected=0.1, slots_evictable=0.1, slots_free=0.4, pages_working=0.25, pages_protected=0.25,
            pages_evictable=0.25, pages_free=0.25, mean_running=1.5, median_running=1.0, mean_waiting=0.5, peak_waiting=1,
        ),
        samples=SAMPLES,
        records=RECORDS,
    )  # fmt: skip
    trace = Trace(
        name="t.jsonl", format="mooncake", block_size=None if lengths_only else 512, scope="global", clock="trace",
        sessions=(Session("a", ()), Session("b", ())), notes=("Times are invented.",),
        rejected=tuple(Rejection(f"t.jsonl:{line}", "it is wrong") for line in range(1, rejected + 1)),
    )  # fmt: skip
    return Outcome(trace=trace, traffic=TrafficOptions(arrival=arrival), result=result)  # type: ignore[arg-type]
