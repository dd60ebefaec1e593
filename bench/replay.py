"""Replay on one core: the recorded traces, what they cost in seconds and memory, and whether cost grows with requests.

    python bench/replay.py --agent agent-traces.tar.xz --mooncake mooncake_conversation.jsonl.xz [--repeat 3]

Each run is a process of its own (peak memory is its own); medians are printed. The last line is JSON. Targets: all agent sessions in a
closed loop at 32 alive in under 30 s and 1 GiB; Mooncake in under 10 s; the cost of half the requests about half.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

MACHINE = ["--gpu", "H200", "--page-size", "64"]
AGENT = [
    "GLM-5.3-Flash", *MACHINE, "--tp", "8", "--weights", "30GiB", "--kv-cache-dtype", "fp8_e4m3", "--max-running-requests", "48",
    "--max-mamba-cache-size", "900", "--arrival", "closed", "--sessions", "32",
]  # fmt: skip
MOONCAKE = ["Qwen3.5-35B-A3B", *MACHINE, "--tp", "2"]


def measure(trace: str, words: list[str]) -> None:
    """One run in this process; prints JSON: seconds to load and to run, peak memory, requests, input tokens."""
    from twinpool.replay.command import read_replay
    from twinpool.replay.experiment import Experiment, prepare, run_experiment
    from twinpool.replay.formats import load_trace

    command = read_replay([trace, *words], usage="")
    began_s = time.perf_counter()
    loaded, traffic = prepare(load_trace(trace), command.options)
    loaded_s = time.perf_counter()
    result = run_experiment(
        Experiment(trace=loaded, sizing=command.sizing, traffic=traffic, calibration=command.calibration)
    )
    print(
        json.dumps(
            {
                "load_s": loaded_s - began_s,
                "run_s": time.perf_counter() - loaded_s,
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                "requests": result.counts.requests,
                "input_tokens": result.reuse.prompt_tokens,
                "output_tokens": result.counts.output_tokens,
                "token_share": result.reuse.token_share,
            }
        )
    )


def run(name: str, trace: str, words: list[str], repeat: int) -> dict[str, float]:
    """Medians over processes."""
    rows = []
    for _ in range(repeat):
        done = subprocess.run(
            [sys.executable, __file__, "--one", trace, *words], capture_output=True, text=True, check=True
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    print(
        f"{name:28} {median['requests']:7,.0f} requests  load {median['load_s']:6.2f} s  run {median['run_s']:6.2f} s  "
        f"peak {median['peak_mib']:6.0f} MiB  reuse {median['token_share']:.4f}",
        flush=True,
    )
    return median


def main() -> None:
    """Run what was asked for."""
    if sys.argv[1:2] == ["--one"]:
        measure(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--agent", metavar="FILE")
    parser.add_argument("--mooncake", metavar="FILE")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    found = {}
    if options.agent:
        found["agent"] = run("agent, 32 alive", options.agent, AGENT, options.repeat)
        found["agent_half"] = run("agent, 80 trees", options.agent, [*AGENT, "--limit", "80"], options.repeat)
    if options.mooncake:
        found["mooncake"] = run("Mooncake, as recorded", options.mooncake, MOONCAKE, options.repeat)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
