"""Two ranks of one thread each against one rank of two threads: prefill and decode rates of one model, side by side in one run.

    python bench/ranks.py MODEL_FOLDER [--rounds 5]

Both use the same two cores and take turns; medians are printed, the last line is JSON. The model should be large enough for its
products to matter: Qwen3.5-shaped, 400 M random weights in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics

import numpy as np

from engine import DECODE_CONTEXT, our_decode, our_prefill
from twinpool import LLM
from twinpool.models.native import set_threads


def main() -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    memory = {"device_memory": "3GiB", "disable_radix_cache": True, "max_running_requests": 8}
    one, two = LLM(args.model, threads=2, **memory), LLM(args.model, threads=2, tp_size=2, **memory)
    rng = np.random.default_rng(0)
    results: dict[str, dict[str, float]] = {}
    print(f"{'tokens per second':17}  {'one rank':>9}  {'two ranks':>9}  {'ratio':>6}")
    for name, batch, length in (
        ("prefill 128", 1, 128),
        ("prefill 512", 1, 512),
        ("decode x1", 1, 0),
        ("decode x8", 8, 0),
    ):
        prompts = rng.integers(10, 8000, (batch, length or DECODE_CONTEXT)).astype(np.int64)
        run = our_prefill if length else our_decode

        def rates(run=run, prompts=prompts) -> tuple[float, float]:  # type: ignore[no-untyped-def]
            set_threads(2)  # threads belong to the process, which rank 0 of the two shares with the one
            alone = run(one, prompts)
            set_threads(1)
            return alone, run(two, prompts)

        rates()
        rounds = [rates() for _ in range(args.rounds)]
        alone, shared = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratio = statistics.median(b / a for a, b in rounds)
        results[name] = {"one rank": round(alone, 1), "two ranks": round(shared, 1), "ratio": round(ratio, 2)}
        print(f"{name:17}  {alone:9.1f}  {shared:9.1f}  {ratio:6.2f}")
    one.close()
    two.close()
    print(json.dumps({"rounds": args.rounds, "results": results}))


if __name__ == "__main__":
    main()
