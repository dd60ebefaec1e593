"""Running prompts through `LLM` in memory-tight ways and comparing what comes out, to the last bit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np

from tests.tiny_models import tiny_checkpoint
from twinpool import LLM, SamplingParams
from twinpool.engine.llm import Completion

# Every strategy of the prefix cache, and what else changes where states are kept and when they are there.
STRATEGIES: dict[str, dict[str, object]] = {
    "extra_buffer": {"mamba_radix_cache_strategy": "extra_buffer"},
    "extra_buffer, no overlap": {"mamba_radix_cache_strategy": "extra_buffer", "disable_overlap_schedule": True},
    "extra_buffer, pages of 16": {"mamba_radix_cache_strategy": "extra_buffer", "page_size": 16},
    "lazy": {"mamba_radix_cache_strategy": "extra_buffer_lazy"},
    "lazy, pages of 16": {"mamba_radix_cache_strategy": "extra_buffer_lazy", "page_size": 16},
    "no_buffer": {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True},
    "off": {"disable_radix_cache": True},
}
CACHING = tuple(name for name in STRATEGIES if name != "off")
# Token ids and the bit patterns of their log-probabilities: equal only if every logit was.
Said = list[tuple[tuple[int, ...], tuple[float, ...]]]


@cache
def _cache_dir() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="twinpool-tiny-")


def checkpoint(family: str, **changes: object) -> Path:
    """A tiny random checkpoint, made once a session."""
    return tiny_checkpoint(family, Path(_cache_dir().name), **changes)


@contextmanager
def tiny_llm(folder: Path, **options: object) -> Iterator[LLM]:
    """An LLM of 40 state slots and 4,096 KV tokens unless told otherwise, freed memory poisoned, leaks checked at the
    end.
    """
    tight = {"device_memory": "64MiB", "max_mamba_cache_size": 40, "max_total_tokens": 4096, **options}
    with LLM(str(folder), poison_freed=True, **tight) as llm:
        yield llm
        llm.engine.check_idle(thorough=True)


def prompt(seed: int, n_tokens: int) -> list[int]:
    """Random byte tokens."""
    return np.random.default_rng(seed).integers(0, 256, n_tokens).tolist()


def greedy(max_tokens: int, **params: object) -> SamplingParams:
    """Greedy, through end tokens, with log-probabilities."""
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "logprobs": 0, "max_tokens": max_tokens, **params})


def bits_of(done: Iterable[Completion]) -> Said:
    """What was said, to the last bit."""
    return [(c.token_ids, tuple(p.logprob for p in c.logprobs)) for c in done]


def next_turn(prompts: Sequence[list[int]], said: Said) -> list[list[int]]:
    """The prompts of a conversation that goes on: prompt, answer, and nine tokens of the user."""
    return [[*ids, *tokens, *prompt(i, 9)] for i, (ids, (tokens, _)) in enumerate(zip(prompts, said, strict=True))]


def say(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> Said:
    """All prompts in one batch."""
    done = llm.generate(prompts, params)
    assert not [c.error for c in done if c.error]
    return bits_of(done)


def say_alone(folder: Path, prompts: Sequence[list[int]], params: SamplingParams, **dtypes: str) -> Said:
    """Each prompt by itself, without prefix cache, overlap or chunks: what every other way with these dtypes must repeat."""
    options = {"disable_radix_cache": True, "disable_overlap_schedule": True, "chunked_prefill_size": -1, **dtypes}
    with tiny_llm(folder, **options) as llm:
        return [say(llm, [p], params)[0] for p in prompts]


def conversation(seed: int) -> list[list[int]]:
    """Prompts that share prefixes: whole, in part, forked at odd places, and one that is a beginning of another."""
    base = prompt(seed, 200)
    return [base[:150], base, base[:130] + prompt(seed + 1, 40), base[:77] + prompt(seed + 2, 60), base[:64]]
