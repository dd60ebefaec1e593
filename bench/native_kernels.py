"""The compiled kernels by themselves: linear layers beside torch's, delta rule and attention in tokens per second.

    python bench/native_kernels.py [--threads 2] [--rounds 7]

Linear layers of both kinds are timed in turns, over enough copies of the weights that they come from memory, as in a model; medians
are printed. Sizes are those of a Qwen3.5-shaped model of 100 M parameters. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from twinpool.models.native import CODES, native

COLD_BYTES = 128 << 20  # of weights in rotation: several times the last-level cache
SHAPES = ((2048, 768), (768, 2048))
LINEAR_ROWS = (1, 8, 512)
MIN_S = 0.03  # of one measurement


def timed(run: Callable[[], object]) -> float:
    """Seconds of one run, over as many as fill MIN_S."""
    count, began_s = 0, time.perf_counter()
    while True:
        run()
        count += 1
        if (elapsed_s := time.perf_counter() - began_s) > MIN_S:
            return elapsed_s / count


def medians(runs: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Median seconds of each, timed in turns so that a slow moment of the machine meets them all."""
    for run in runs:
        run()
    samples = [[timed(run) for run in runs] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*samples, strict=True)]


def linear(n: int, k: int, rows: int, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """GFLOP/s, and GB/s of weights, of one layer [n, k]; ours and torch's."""
    copies = max(1, COLD_BYTES // (n * k * dtype.itemsize)) if rows < 64 else 1
    weights = [(torch.randn(n, k) / k**0.5).to(dtype) for _ in range(copies)]
    handles = [native.PackedLinear(w.data_ptr(), CODES[dtype], n, k) for w in weights]
    x, y = torch.randn(rows, k).to(dtype), torch.empty(rows, n, dtype=dtype)

    def ours() -> None:
        for handle in handles:
            handle.run(x.data_ptr(), k, y.data_ptr(), n, rows)

    def theirs() -> None:
        for weight in weights:
            F.linear(x, weight)

    ours_s, theirs_s = (s / copies for s in medians((ours, theirs), rounds))
    flop, weight_bytes = 2 * rows * n * k, n * k * dtype.itemsize
    return {
        "gflop_s": flop / ours_s / 1e9,
        "gb_s": weight_bytes / ours_s / 1e9,
        "torch_gflop_s": flop / theirs_s / 1e9,
        "torch_gb_s": weight_bytes / theirs_s / 1e9,
        "times_torch": theirs_s / ours_s,
    }


@dataclass(frozen=True)
class Packed:
    """A native.Rows of rows (prefix, tokens), row i on slot i, and the arrays it looks at."""

    handle: object
    arrays: tuple[np.ndarray, ...]

    @staticmethod
    def of(rows: Sequence[tuple[int, int]], tables: Sequence[np.ndarray] = ()) -> Packed:
        """Without checkpoints."""
        count = len(rows)
        offsets = np.cumsum([0, *(tokens for _, tokens in rows)]).astype(np.int32)
        prefixes, slots = np.array([p for p, _ in rows], np.int32), np.arange(count, dtype=np.int32)
        none, tables = np.full(count, -1, np.int32), tables or [slots] * count
        at = np.array([t.ctypes.data for t in tables], np.int64)
        arrays = (offsets, prefixes, slots, none, slots, at)
        return Packed(native.Rows(count, *(a.ctypes.data for a in arrays)), (*arrays, *tables))


def delta_rule(rows: Sequence[int], rounds: int, *, layers: int = 9, heads: int = 8, dim: int = 128) -> float:
    """Tokens per second through the rule of `layers` layers, float32 states."""
    tokens, width = sum(rows), 3 * heads * dim
    x = torch.randn(tokens, width + 2 * heads).bfloat16()
    a_log, bias = torch.randn(heads) * 0.5, torch.randn(heads)
    states = torch.zeros(layers, len(rows), heads, dim, dim)
    out = torch.empty(tokens, heads * dim, dtype=torch.bfloat16)
    packed, base, ld = Packed.of([(0, n) for n in rows]), x.data_ptr(), x.stride(0)
    gates = (base + 2 * width, ld, base + 2 * (width + heads), ld, a_log.data_ptr(), bias.data_ptr())
    sizes = (heads, heads, dim, dim)

    def run() -> None:
        for state in states:
            place = (state.data_ptr(), state.stride(0) * 4, 0, 0, 1)
            native.gated_delta_rule(packed.handle, base, ld, *gates, out.data_ptr(), *sizes, *place)

    return tokens / medians((run,), rounds)[0]


def attention(
    rows: Sequence[tuple[int, int]], rounds: int, *, heads: int = 8, kv_heads: int = 2, dim: int = 128
) -> dict[str, float]:
    """Seconds, tokens per second, GFLOP/s and GB/s of keys and values of one layer; pages of 16 tokens, bfloat16."""
    longest, page = max(p + n for p, n in rows), 16
    each = -(-longest // page)
    order = np.random.default_rng(0).permutation(len(rows) * each).astype(np.int32)
    packed = Packed.of(rows, list(order.reshape(len(rows), each)))
    cache = torch.randn(len(order), page, 2, kv_heads * dim).bfloat16()
    tokens, token_bytes = sum(n for _, n in rows), kv_heads * dim * 2
    q = torch.randn(tokens, heads, dim).bfloat16()
    out = torch.empty_like(q)
    place = (page, cache.data_ptr(), page * 2 * token_bytes, 0, token_bytes, 2 * token_bytes, 1, 1)

    def run() -> None:
        shape = (heads, kv_heads, dim, dim**-0.5)
        native.paged_attention(packed.handle, q.data_ptr(), heads * dim, dim, out.data_ptr(), *shape, *place)

    seconds = medians((run,), rounds)[0]
    pairs = sum((p + 1 + p + n) * n // 2 for p, n in rows)
    return {
        "ms": seconds * 1e3,
        "tokens_s": tokens / seconds,
        "gflop_s": 4 * pairs * heads * dim / seconds / 1e9,
        "gb_s": sum(p + n for p, n in rows) * 2 * token_bytes / seconds / 1e9,
    }


def show(name: str, values: dict[str, float]) -> None:
    """One line."""
    print(f"{name:34}" + "  ".join(f"{key} {value:9.2f}" for key, value in values.items()), flush=True)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    native.set_threads(args.threads)
    results: dict[str, dict[str, float]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for n, k in SHAPES:
            for rows in LINEAR_ROWS:
                name = f"linear {n}x{k} {str(dtype).removeprefix('torch.')} M={rows}"
                results[name] = linear(n, k, rows, dtype, args.rounds)
                show(name, results[name])
    for name, lengths in (("prefill 512", [512]), ("decode 1", [1]), ("decode 8", [1] * 8)):
        results[f"delta rule {name}"] = {"tokens_s": delta_rule(lengths, args.rounds)}
        show(f"delta rule {name}", results[f"delta rule {name}"])
    shapes = (("prefill 2048", [(0, 2048)]), ("decode 1 at 8K", [(8191, 1)]), ("decode 8 at 8K", [(8191, 1)] * 8))
    for name, rows_of_step in shapes:
        results[f"attention {name}"] = attention(rows_of_step, args.rounds)
        show(f"attention {name}", results[f"attention {name}"])
    print(json.dumps({"threads": args.threads, "results": results}))


if __name__ == "__main__":
    main()
