"""A resumed session's time to the first token, its KV copied from the host layer by layer beside the forward, or all of it before.

    python -m bench.restore [--tokens 8192] [--rounds 9] [--threads 1] [--layers 32] [--kv-heads 4]

A random Qwen3.5-family model, narrow but with as much KV a token as is asked for, and two engines over it that differ in this alone;
rounds are interleaved, medians are printed, the last line is JSON. The answers must be the same token.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from tests.tiny_models import tiny_checkpoint

from twinpool import LLM, SamplingParams
from twinpool.engine.executor import TorchExecutor
from twinpool.engine.restore import LayerParts
from twinpool.units import MIB

NEW_TOKENS = 16
N_PUSHING = 3
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def engine(folder: Path, args: argparse.Namespace, *, layered: bool) -> LLM:
    """An engine whose executor knows its layers, or does not, so that the first one waits for all copies."""
    llm = LLM(
        str(folder), device_memory="6GiB", threads=args.threads, max_running_requests=1, max_mamba_cache_size=8,
        max_total_tokens=args.tokens * 2, context_length=args.tokens + 2 * NEW_TOKENS, enable_hierarchical_cache=True,
        hicache_size=4.0, dtype="bfloat16", kv_cache_dtype="bfloat16",
    )  # fmt: skip
    if not layered:
        executor = llm.engine._executor
        assert isinstance(executor, TorchExecutor)
        executor.layers = LayerParts.undivided(executor._memory)
    return llm


def ask(llm: LLM, prompt: list[int]) -> tuple[float, int, int]:
    """(seconds to the answer's one token, the token, tokens that came from the host)."""
    began_s = time.perf_counter()
    (answer,) = llm.generate([prompt], ONE_TOKEN)
    return time.perf_counter() - began_s, answer.token_ids[0], answer.reuse.from_host


def play_round(llms: dict[str, LLM], rng: np.random.Generator, n_tokens: int) -> dict[str, float]:
    """Seconds from the device and from the host, on both engines."""
    sessions = rng.integers(0, 256, (1 + N_PUSHING, n_tokens + NEW_TOKENS)).tolist()
    seconds, tokens = {}, set()
    for name, llm in llms.items():
        ask(llm, sessions[0])
        device_s, device_token, _ = ask(llm, sessions[0])
        for session in sessions[1:]:
            ask(llm, session)
        host_s, host_token, from_host = ask(llm, sessions[0])
        assert from_host >= n_tokens, "the device still had it"
        seconds[f"device, {name}"], seconds[f"host, {name}"] = device_s, host_s
        tokens |= {device_token, host_token}
    assert len(tokens) == 1, f"the answer depends on the place: {tokens}"
    return seconds


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("tokens", 8192), ("rounds", 9), ("threads", 1), ("layers", 32), ("kv-heads", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as cache:
        folder = tiny_checkpoint(
            "qwen3_5", Path(cache), hidden_size=128, num_hidden_layers=args.layers, num_key_value_heads=args.kv_heads,
            num_attention_heads=args.kv_heads, head_dim=64, max_position_embeddings=args.tokens * 2,
            layer_types=None, full_attention_interval=2,
        )  # fmt: skip
        llms = {"layer by layer": engine(folder, args, layered=True), "before": engine(folder, args, layered=False)}
        rng = np.random.default_rng(0)
        play_round(llms, rng, args.tokens)
        rounds = [play_round(llms, rng, args.tokens) for _ in range(args.rounds)]
        seconds = {place: statistics.median(one[place] for one in rounds) for place in rounds[0]}
        restored_bytes = args.tokens * args.layers // 2 * args.kv_heads * 64 * 2 * 2
        print(
            f"{args.tokens:,} tokens, {restored_bytes / MIB:.0f} MiB of KV, {args.rounds} rounds; time to the first token, median"
        )
        for place, took_s in seconds.items():
            print(f"  {place:24}  {took_s * 1e3:9.1f} ms")
        for llm in llms.values():
            llm.engine.check_idle(thorough=True)
            llm.close()
    print(
        json.dumps({"tokens": args.tokens, "rounds": args.rounds, "restored_bytes": restored_bytes, "ttft_s": seconds})
    )


if __name__ == "__main__":
    main()
