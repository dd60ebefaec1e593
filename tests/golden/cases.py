"""Command lines whose output is kept to the letter, one file beside this one each."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from twinpool.cli.main import run

HERE = Path(__file__).parent
LOG = str(HERE / "boot_log.txt")
WORKLOAD = ["--running", "16", "--tokens-per-request", "16384", "--idle-sessions", "100"]
MODEL = ["plan", "Qwen3.5-35B-A3B", "--gpu", "H100", "--tp-size", "2", *WORKLOAD]
LAUNCH = [
    "SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK=1", "python", "-m", "sglang.launch_server", "--model-path", "Qwen/Qwen3.5-35B-A3B",
    "--tp", "2", "--mem-fraction-static", "0.8", "--mamba-full-memory-ratio", "0.5", "--max-running-requests", "256",
    "--enable-metrics",
]  # fmt: skip

REPLAY = [
    "replay", str(HERE / "replay_trace.jsonl"), "Qwen3.5-35B-A3B", "--gpu", "H200", "--tp-size", "2", "--page-size", "64",
    "--pool-memory", "700MiB",
]  # fmt: skip

CASES: dict[str, list[str]] = {
    "help.txt": ["--help"],
    "serve_help.txt": ["serve", "--help"],
    "plan_help.txt": ["plan", "--help"],
    "trace_help.txt": ["trace", "--help"],
    "replay_help.txt": ["replay", "--help"],
    "replay_small.txt": REPLAY,
    "replay_small.json": [*REPLAY, "--json", "--records", "--limit", "2", "--arrival", "closed", "--sessions", "2"],
    "replay_count.txt": [*REPLAY, "--arrival", "count", "--no-bounds"],
    "plan_models.txt": ["plan", "--list-models"],
    "plan_devices.txt": ["plan", "--list-gpus"],
    "plan_h100.txt": MODEL,
    "plan_h100.json": [*MODEL, "--json"],
    "plan_refused.txt": ["plan", "Qwen3.5-35B-A3B", "--gpu", "H100", "--mem-fraction-static", "0.8"],
    "plan_host.txt": [*MODEL, "--enable-hierarchical-cache", "--hicache-size", "100", "--hicache-mamba-size-gb", "40"],
    "plan_launch.txt": ["plan", "--gpu", "H100", "--", *LAUNCH],
    "plan_sweep.txt": ["plan", "sweep", *MODEL[1:], "--points", "8"],
    "plan_boot_log.txt": ["plan", "--boot-log", LOG, *WORKLOAD],
    "plan_boot_log.json": ["plan", "--boot-log", LOG, "--json"],
    "plan_vllm.txt": [*MODEL, "--engine", "vllm"],
    "plan_vllm.json": [*MODEL, "--engine", "vllm", "--json"],
}


def output(argv: list[str]) -> str:
    """What a command line prints; --help leaves by SystemExit, as it does for a user."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        run(argv)
    return printed.getvalue()
