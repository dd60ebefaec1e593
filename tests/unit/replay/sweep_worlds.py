"""A small machine, a small trace and made-up measurements for the tests of sweeps."""

from __future__ import annotations

from dataclasses import replace

from twinpool.plan.command import read_command
from twinpool.plan.run import sizing_of
from twinpool.plan.sizing import Sizing
from twinpool.replay.cost import Calibration
from twinpool.replay.experiment import prepare
from twinpool.replay.options import TrafficOptions
from twinpool.replay.spread import Shared
from twinpool.replay.sweep import Measured
from twinpool.replay.synthetic import SyntheticOptions, synthesize
from twinpool.replay.tokens import TokenSpace
from twinpool.replay.trace import Trace

MACHINE = ["Qwen3.5-9B", "--gpu", "H100", "--pool-memory", "3GiB", "--page-size", "16", "--max-running-requests", "4"]
CLOSED = TrafficOptions(arrival="closed", sessions=12)


def sizing(*more: str) -> Sizing:
    """3 GiB for both pools, four running requests."""
    return sizing_of(read_command([*MACHINE, *more], usage=""))


def trace() -> Trace:
    """Twelve sessions of four turns."""
    made = synthesize(SyntheticOptions(sessions=12, turns=4, system_tokens=64, input_tokens=300, output_tokens=20))
    return prepare(made, CLOSED)[0]


def shared() -> Shared:
    """What workers hold."""
    made = trace()
    return Shared(trace=made, tokens=TokenSpace(made), calibration=Calibration())


MEASURED = Measured(
    slots=100, kv_tokens=10_000, page_size=16, max_running_requests=4, requests=48, refused=0, prompt_tokens=1000,
    token_share=0.5, kv_share=0.6, gaps=(("state_evicted", 0.1), ("no_checkpoint", 0.0), ("below_grid", 0.0), ("kv_evicted", 0.0),
    ("new", 0.4)), computed_tokens=500, evicted_states=7, evicted_kv_tokens=160, retractions=0, slots_free=0.1, pages_free=0.4,
    mean_running=3.5, peak_running=4, queue_p50_s=0.0, ttft_p50_s=0.2, ttft_p99_s=0.9, tpot_p50_s=0.01, e2e_p50_s=1.0,
    input_tokens_per_s=100.0, output_tokens_per_s=10.0, duration_s=10.0,
)  # fmt: skip


def measured(token_share: float, **values: object) -> Measured:
    """A measurement with this reuse."""
    return replace(MEASURED, token_share=token_share, **values)  # type: ignore[arg-type]
