"""A boot log of two ranks, checked line by line, and what the same machine could run if it were split for its workload.

python examples/plan_from_boot_log.py [FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path

from twinpool.cli.plan import USAGE
from twinpool.plan.command import read_command
from twinpool.plan.log_plan import LogOutcome, plan_log

LOG = """\
[TP0] server_args=ServerArgs(model_path='Qwen/Qwen3.5-9B', tp_size=2, mem_fraction_static=0.8, disable_overlap_schedule=True, page_size=1)
[TP0] Load weight begin. avail mem=22.93 GB
[TP0] Load weight end. elapsed=8.64 s, type=Qwen3_5ForConditionalGeneration, avail mem=14.08 GB, mem usage=8.85 GB.
[TP1] Load weight begin. avail mem=22.93 GB
[TP1] Load weight end. elapsed=8.51 s, type=Qwen3_5ForConditionalGeneration, avail mem=14.07 GB, mem usage=8.86 GB.
[TP0] Mamba Cache is allocated. max_mamba_cache_size: 186, conv_state size: 0.10GB, ssm_state size: 4.38GB
[TP1] Mamba Cache is allocated. max_mamba_cache_size: 186, conv_state size: 0.10GB, ssm_state size: 4.38GB
[TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 327310, K size: 2.50 GB, V size: 2.50 GB
[TP1] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 327310, K size: 2.50 GB, V size: 2.50 GB
"""
WORKLOAD = ["--running", "8", "--tokens-per-request", "8192", "--idle-sessions", "40"]


def run(text: str) -> LogOutcome:
    """The first boot of a log, planned for WORKLOAD. Raises ConfigError when there is none."""
    command = read_command(["--boot-log", "-", "--mamba-radix-cache-strategy", "no_buffer", *WORKLOAD], usage=USAGE)
    return plan_log(command, text)[0]


def main() -> None:
    """Print verdicts, then the workload before and after the recommended split."""
    boot = run(Path(sys.argv[1]).read_text() if len(sys.argv) > 1 else LOG)
    for check in boot.checks:
        print(f"{check.rank:8} {check.what:50} {check.logged:>12} {check.ours:>12}  {check.verdict}")
    fit, advice = boot.outcome.fit, boot.outcome.advice
    assert fit is not None
    assert advice is not None
    print(
        f"\nas booted: {fit.running} requests at most, and {fit.idle} idle sessions can resume; short by {fit.tokens_short} tokens"
    )
    if advice.setting is not None:
        best = advice.setting
        print(
            f"instead:   --max-mamba-cache-size {best.pin.slots} for {best.workload.running} requests and "
            f"{best.workload.idle_sessions} idle sessions"
        )


if __name__ == "__main__":
    main()
