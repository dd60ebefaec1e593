"""Linear mixers of one family: compiled, in torch, and unmodified transformers, side by side in one run.

    python bench/mixers.py FAMILY [--threads 1] [--rounds 5] [--cpu-time]

A model of random weights in bfloat16 with mixers of published widths and few, narrow layers is made in a temporary folder. "torch" is
the same engine, whose mixers run the slow reference as where nothing is compiled for them; all else of it stays compiled. Rounds are
interleaved, medians are printed, the last line is JSON. --cpu-time counts the process's processor time instead of the clock's: for one
thread on a machine that others use.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from contextlib import ExitStack
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import tokenizers
import torch
import transformers

import engine
from engine import DECODE_CONTEXT, our_decode, our_prefill, their_decode, their_prefill
from twinpool import LLM
from twinpool.models.gdn.ops import GdnKernel
from twinpool.models.kda.ops import KdaKernel
from twinpool.models.mamba1.ops import Mamba1Kernel

KERNELS: tuple[type, ...] = (GdnKernel, KdaKernel, Mamba1Kernel)
VOCAB = 8192
_PLAIN: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 1024, "max_position_embeddings": 4096, "tie_word_embeddings": False, "eos_token_id": 2, "pad_token_id": 0,
    "bos_token_id": None,
}  # fmt: skip
_LAYERS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
# Family -> configuration class, model class, what its config says: transformers' names.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "kimi": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        _PLAIN
        | {
            "layer_types": _LAYERS, "linear_num_heads": 8, "linear_head_dim": 128, "kv_lora_rank": 128, "q_lora_rank": None,
            "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 256, "n_shared_experts": 1,
        },
    ),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        _PLAIN | {"attn_layer_period": 4, "attn_layer_offset": 3, "num_experts": 1, "use_mamba_kernels": False},
    ),
    "olmo": (
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        _PLAIN
        | {
            "layer_types": _LAYERS, "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 96,
            "linear_value_head_dim": 192,
        },
    ),
}  # fmt: skip


def make_model(family: str, folder: Path) -> None:
    """Save a random model, and a tokenizer, which a folder must have."""
    config_name, model_name, values = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**values, dtype="bfloat16"))
    model.to(torch.bfloat16).save_pretrained(folder)
    words = {f"<{i}>": i for i in range(VOCAB)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<0>")).save(str(folder / "tokenizer.json"))


def load(folder: Path, threads: int) -> LLM:
    """An engine without a prefix cache."""
    return LLM(str(folder), device_memory="2GiB", threads=threads, disable_radix_cache=True, max_running_requests=8)


def load_in_torch(folder: Path, threads: int) -> LLM:
    """The same without compiled mixers."""

    def without_handle(kernel: type) -> Any:
        init = kernel.__init__  # type: ignore[misc]

        @wraps(init)
        def changed(self: Any, *args: Any, **named: Any) -> None:
            init(self, *args, **named)
            self.handle = None

        return patch.object(kernel, "__init__", changed)

    with ExitStack() as stack:
        for kernel in KERNELS:
            stack.enter_context(without_handle(kernel))
        return load(folder, threads)


def measure(folder: Path, threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """Case -> medians: tokens per second of the three, and what compiled is of the other two in a round."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    compiled, slow = load(folder, threads), load_in_torch(folder, threads)
    torch.set_num_threads(threads)
    rng = np.random.default_rng(0)
    results: dict[str, dict[str, float]] = {}
    for name, batch, length in (
        ("prefill 128", 1, 128),
        ("prefill 512", 1, 512),
        ("decode x1", 1, 0),
        ("decode x8", 8, 0),
    ):
        prompts = rng.integers(10, VOCAB, (batch, length or DECODE_CONTEXT)).astype(np.int64)
        ours, other = (our_prefill, their_prefill) if length else (our_decode, their_decode)
        runs = partial(ours, compiled, prompts), partial(ours, slow, prompts), partial(other, theirs, prompts)
        for run in runs:
            run()
        rates = [[run() for run in runs] for _ in range(rounds)]
        results[name] = {
            **dict(
                zip(
                    ("compiled", "torch", "transformers"), map(statistics.median, zip(*rates, strict=True)), strict=True
                )
            ),
            "to torch": statistics.median(a / b for a, b, _ in rates),
            "to transformers": statistics.median(a / c for a, _, c in rates),
        }
        print(f"{name:12}" + "".join(f"{value:17.2f}" for value in results[name].values()))
    compiled.close()
    slow.close()
    return results


def main() -> None:
    """Make the model, run all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    if args.cpu_time:
        engine.time = SimpleNamespace(perf_counter=time.process_time)
    with tempfile.TemporaryDirectory() as name:
        make_model(args.family, Path(name))
        print(
            f"{'tokens/s':12}"
            + "".join(f"{n:>17}" for n in ("compiled", "torch", "transformers", "/ torch", "/ transformers"))
        )
        results = measure(Path(name), args.threads, args.rounds)
    print(json.dumps({**vars(args), "results": results}))


if __name__ == "__main__":
    main()
