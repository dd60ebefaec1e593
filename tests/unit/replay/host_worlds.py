"""Machines with a host tier for tests of replay: the report of 565 slots, and a small one."""

from __future__ import annotations

from dataclasses import replace

from tests.replay_worlds import Turn, session, trace
from twinpool.plan.command import read_command
from twinpool.plan.run import sizing_of
from twinpool.plan.sizing import Sizing
from twinpool.replay.cost import Calibration
from twinpool.replay.experiment import Experiment
from twinpool.replay.options import TrafficOptions
from twinpool.replay.spread import Shared, run_point
from twinpool.replay.sweep import Measured, Row, Sweep, grid_of, main_axis, points_of
from twinpool.replay.tokens import TokenSpace
from twinpool.replay.trace import Trace

# GLM-5.3-Flash on one of four devices, as sglang#39436 has it: 734 slots in 14 GB are states of 17,825,792 + 1,253,376 bytes
# (16-bit), and (32 GB - 565 slots) / 2,680,896 tokens are 7,915 bytes of KV a token.
SLOT_BYTES, KV_BYTES, PAGE_TOKENS = 17_825_792 + 1_253_376, 7_915, 64
PROMPT_TOKENS, CHUNK_TOKENS, N_PROMPTS, N_AGAIN = 8_448, 4_096, 200, 8
DEVICE_PROMPTS = 20


def report_sizing(*more: str) -> Sizing:
    """Device pools of 20 prompts with three checkpoints each, and 32 GB of host memory."""
    pool_bytes = DEVICE_PROMPTS * (PROMPT_TOKENS * KV_BYTES + 3 * SLOT_BYTES) + SLOT_BYTES
    words = [
        "--gpu", "H200", "--state-bytes-per-slot", str(SLOT_BYTES), "--kv-bytes-per-token", str(KV_BYTES),
        "--pool-memory", str(pool_bytes), "--page-size", str(PAGE_TOKENS), "--chunked-prefill-size", str(CHUNK_TOKENS),
        "--max-mamba-cache-size", str(3 * DEVICE_PROMPTS), "--max-running-requests", "1",
        "--enable-hierarchical-cache", "--hicache-size", "32",
    ]  # fmt: skip
    return sizing_of(read_command([*words, *more], usage=""))


def report_trace() -> Trace:
    """200 different prompts one after another, then the first eight again."""
    blocks = PROMPT_TOKENS // PAGE_TOKENS
    order = [*range(N_PROMPTS), *range(N_AGAIN)]
    sessions = [
        session(
            f"s{place}",
            Turn(
                blocks=range(which * blocks, (which + 1) * blocks), input_tokens=PROMPT_TOKENS, arrival_s=float(place)
            ),
        )
        for place, which in enumerate(order)
    ]
    return replace(trace(*sessions, block_size=PAGE_TOKENS), name="sglang#39436")


def experiment(sizing: Sizing, recorded: Trace, *, arrival: str = "count") -> Experiment:
    """A run of it."""
    return Experiment(
        trace=recorded, sizing=sizing, traffic=TrafficOptions(arrival=arrival), calibration=Calibration()  # type: ignore[arg-type]
    )  # fmt: skip


def sweep_of(**axes: str) -> Sweep:
    """The report over values of axes, counts only: `disk_sizes` is --disk-sizes."""
    recorded = report_trace()
    grid = grid_of({f"--{name.replace('_', '-')}": values for name, values in axes.items()})
    sizing = report_sizing()
    sizing = replace(sizing, flags=replace(sizing.flags, given=sizing.flags.given - {"hicache_size"}))
    shared = Shared(trace=recorded, tokens=TokenSpace(recorded), calibration=Calibration(), bounds=False)
    rows = []
    for point in points_of(sizing, TrafficOptions(arrival="count"), grid):
        found = run_point(shared, point)
        rows.append(
            Row(point=point, measured=found) if isinstance(found, Measured) else Row(point=point, refusal=found)
        )
    return Sweep(
        trace=recorded.name, model="m", machine="g", arrival="count", calibration="assumed", over=main_axis(grid), rows=tuple(rows)
    )  # fmt: skip
