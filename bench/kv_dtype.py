"""Attention over a long cache by the dtype of its keys and values: a decode step and a prefill chunk, side by side in one run.

    python bench/kv_dtype.py [--context 16384] [--threads 1] [--rounds 15]

One layer in bfloat16, over pages of random values in random order. Rounds are interleaved. Printed are the least of each dtype's
times, which other work on the machine disturbs least, and fp8 : bf16 by them and as the median of the rounds; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from twinpool.models.attention.cache import kept
from twinpool.models.attention.ops import AttentionKernel, AttentionShape, attend
from twinpool.models.bound import BoundMemory, Step
from twinpool.models.native import set_threads
from twinpool.models.step_batch import StepBatch

PAGE_TOKENS = 16
DTYPES = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "float32": torch.float32}
SHAPES = {
    "16 heads, 2 of KV, 256": AttentionShape(heads=16, kv_heads=2, dim=256, rotary=64, scale=1 / 16),
    "32 heads, 8 of KV, 128": AttentionShape(heads=32, kv_heads=8, dim=128, rotary=128, scale=128**-0.5),
    "32 heads, a latent of 576": AttentionShape(heads=32, kv_heads=1, dim=576, rotary=0, scale=1 / 24),
}


@dataclass(frozen=True, eq=False)
class Kv:
    """One layer's pages."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, eq=False)
class Pools:
    """MemoryViews of one attention layer."""

    kv: tuple[Kv, ...]
    states: tuple[()] = ()


def pools_of(shape: AttentionShape, dtype: torch.dtype, *, n_pages: int) -> Pools:
    """Pages of random keys and values, [n_pages + 1, PAGE_TOKENS, kv_heads, dim] each."""
    g = torch.Generator().manual_seed(0)
    size = (n_pages + 1, PAGE_TOKENS, shape.kv_heads, shape.dim)
    return Pools((Kv(*(kept(torch.randn(size, generator=g), dtype) for _ in range(2))),))


def rows_of(n_rows: int, *, context: int, n_tokens: int) -> StepBatch:
    """Rows of n_tokens tokens that end at `context`, on pages of their own."""
    pages = np.random.default_rng(0).permutation(np.arange(1, n_rows * context // PAGE_TOKENS + 1)).astype(np.int32)

    def ints(*values: int) -> np.ndarray:
        return np.array(values, np.int32)

    return StepBatch(
        positions=np.tile(np.arange(context - n_tokens, context), n_rows),
        row_offsets=ints(*range(0, n_rows * n_tokens + 1, n_tokens)),
        starts=ints(*[context - n_tokens] * n_rows),
        ends=ints(*[context] * n_rows),
        slots=ints(*range(1, n_rows + 1)),
        checkpoint_offsets=ints(*[0] * n_rows),
        checkpoint_slots=ints(*[0] * n_rows),
        pages=tuple(pages.reshape(n_rows, -1)),
    )


def main() -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    set_threads(args.threads)
    results: dict[str, dict[str, float]] = {}
    print(f"{'ms':38}" + "".join(f"{name:>12}" for name in DTYPES) + f"{'fp8 : bf16':>13}{'median':>8}")
    for shape_name, shape in SHAPES.items():
        kernel = AttentionKernel(
            shape, query_scale=None, key_scale=None, table=torch.zeros(args.context, shape.rotary), dtype=torch.bfloat16
        )
        for what, n_rows, n_tokens in (("decode", 1, 1), ("decode x4", 4, 1), ("prefill 64", 1, 64)):
            batch = rows_of(n_rows, context=args.context, n_tokens=n_tokens)
            cpu, n_pages = torch.device("cpu"), n_rows * args.context // PAGE_TOKENS
            steps = {
                name: Step.of(batch, BoundMemory.of(pools_of(shape, dtype, n_pages=n_pages)), device=cpu)
                for name, dtype in DTYPES.items()
            }
            x = torch.randn(n_rows * n_tokens, shape.query_columns + 2 * shape.kv_heads * shape.dim).bfloat16()
            times: dict[str, list[float]] = {name: [] for name in steps}
            for _ in range(args.rounds + 1):
                for name, step in steps.items():
                    began_s = time.perf_counter()
                    attend(kernel, step, 0, x)
                    times[name].append((time.perf_counter() - began_s) * 1e3)
            least = {name: min(ms[1:]) for name, ms in times.items()}
            ratio = least["fp8_e4m3"] / least["bfloat16"]
            median = statistics.median(a / b for a, b in zip(times["fp8_e4m3"][1:], times["bfloat16"][1:], strict=True))
            case = f"{shape_name}: {what}"
            results[case] = {**{name: round(ms, 2) for name, ms in least.items()}, "ratio": round(ratio, 2)}
            print(
                f"{case:38}" + "".join(f"{ms:12.2f}" for ms in least.values()) + f"{ratio:13.2f}{median:8.2f}",
                flush=True,
            )
    print(json.dumps({"context": args.context, "threads": args.threads, "rounds": args.rounds, "results": results}))


if __name__ == "__main__":
    main()
