"""One workload on three splits of the same memory: too few states, both pools in balance, too little KV; no device needed.

python examples/replay_splits.py
"""

from __future__ import annotations

from twinpool.plan.command import read_command
from twinpool.plan.run import sizing_of
from twinpool.replay.cost import Calibration
from twinpool.replay.experiment import Experiment, run_experiment
from twinpool.replay.options import TrafficOptions
from twinpool.replay.outcome import Outcome, pressure
from twinpool.replay.synthetic import SyntheticOptions, synthesize

WORKLOAD = SyntheticOptions(sessions=24, turns=6, input_tokens=1500, output_tokens=120, think_s=8.0, interval_s=1.0)
MACHINE = ["Qwen3.5-35B-A3B", "--gpu", "H200", "--tp-size", "2", "--page-size", "64", "--pool-memory", "3GiB"]
SLOTS = (16, 48, 72)


def run(slots: int) -> Outcome:
    """The workload with this many state slots; KV gets what they leave of the memory."""
    trace = synthesize(WORKLOAD)
    sizing = sizing_of(read_command([*MACHINE, "--max-mamba-cache-size", str(slots)], usage=""))
    traffic = TrafficOptions(arrival="recorded")
    experiment = Experiment(trace=trace, sizing=sizing, traffic=traffic, calibration=Calibration())
    return Outcome(trace=trace, traffic=traffic, result=run_experiment(experiment))


def main() -> None:
    """Print a line a split, and what made it so."""
    for slots in SLOTS:
        found = run(slots)
        setup, reuse = found.result.setup, found.result.reuse
        print(f"{setup.slots} slots, {setup.kv_tokens:,} KV tokens: {reuse.token_share:.1%} of prompt tokens reused")
        print(f"  {pressure(found).sentences[0]}\n")


if __name__ == "__main__":
    main()
