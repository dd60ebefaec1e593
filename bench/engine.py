"""The engine against unmodified transformers: prefill and decode rates on one model, side by side in one run.

    python bench/engine.py MODEL_FOLDER [--threads 2] [--rounds 5]

Ours goes through the whole engine (scheduler, sampler, commit); theirs is a bare loop over the model with its own cache and argmax.
Rounds are interleaved, medians are printed, the last line is JSON. The model should be Qwen3.5-shaped, 100 M random weights in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from twinpool import LLM, SamplingParams
from twinpool.models.native import native

DECODE_STEPS = 48
DECODE_CONTEXT = 64


def our_prefill(llm: LLM, prompts: np.ndarray) -> float:
    """Tokens per second of one prompt, until its first token is out."""
    began_s = time.perf_counter()
    llm.generate([prompts[0].tolist()], SamplingParams(max_tokens=1, temperature=0.0))
    return prompts.shape[1] / (time.perf_counter() - began_s)


def our_decode(llm: LLM, prompts: np.ndarray) -> float:
    """Tokens per second of a batch, from the step in which all have their first token on."""
    batch, engine = len(prompts), llm.engine
    params = SamplingParams(max_tokens=DECODE_STEPS + 1, temperature=0.0, ignore_eos=True)
    for prompt in prompts:
        engine.add(prompt, params)
    n_tokens, began_s, n_began = 0, 0.0, 0
    while engine.has_work:
        n_tokens += sum(len(output.tokens) for output in engine.step())
        if not n_began and n_tokens >= batch:
            began_s, n_began = time.perf_counter(), n_tokens
    return (n_tokens - n_began) / (time.perf_counter() - began_s)


@torch.inference_mode()
def their_prefill(model: torch.nn.Module, prompts: np.ndarray) -> float:
    """As `our_prefill`, for transformers."""
    began_s = time.perf_counter()
    model(input_ids=torch.from_numpy(prompts[:1]), logits_to_keep=1, use_cache=True).logits.argmax(-1)
    return prompts.shape[1] / (time.perf_counter() - began_s)


@torch.inference_mode()
def their_decode(model: torch.nn.Module, prompts: np.ndarray) -> float:
    """As `our_decode`, for transformers."""
    out = model(input_ids=torch.from_numpy(prompts), logits_to_keep=1, use_cache=True)
    cache = out.past_key_values if hasattr(out, "past_key_values") else out.cache
    name = "cache" if hasattr(out, "cache") else "past_key_values"
    began_s = time.perf_counter()
    for _ in range(DECODE_STEPS):
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        out = model(input_ids=token, use_cache=True, **{name: cache})
    return len(prompts) * DECODE_STEPS / (time.perf_counter() - began_s)


def main() -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    llm = LLM(args.model, device_memory="3GiB", threads=args.threads, disable_radix_cache=True, max_running_requests=8)
    torch.set_num_threads(args.threads)
    rng = np.random.default_rng(0)

    def ids(batch: int, length: int) -> np.ndarray:
        return rng.integers(10, 8000, (batch, length)).astype(np.int64)

    cases: list[tuple[str, Callable[[], float], Callable[[], float]]] = []
    for length in (128, 512, 2048):
        prompts = ids(1, length)
        cases.append(
            (f"prefill {length}", lambda p=prompts: our_prefill(llm, p), lambda p=prompts: their_prefill(theirs, p))
        )
    for batch in (1, 4, 8):
        prompts = ids(batch, DECODE_CONTEXT)
        cases.append(
            (f"decode x{batch}", lambda p=prompts: our_decode(llm, p), lambda p=prompts: their_decode(theirs, p))
        )
    results: dict[str, dict[str, float]] = {}
    print(
        f"{'tokens per second':16}  {'twinpool':>9}  {'transformers':>12}  {'ratio':>6}   (native kernels: {native is not None})"
    )
    for name, ours, other in cases:
        ours(), other()
        rates = [(ours(), other()) for _ in range(args.rounds)]
        mine, peer = (statistics.median(column) for column in zip(*rates, strict=True))
        ratio = statistics.median(a / b for a, b in rates)
        results[name] = {"twinpool": round(mine, 1), "transformers": round(peer, 1), "ratio": round(ratio, 2)}
        print(f"{name:16}  {mine:9.0f}  {peer:12.0f}  {ratio:6.2f}")
    llm.close()
    print(
        json.dumps({"threads": args.threads, "rounds": args.rounds, "native": native is not None, "results": results})
    )


if __name__ == "__main__":
    main()
