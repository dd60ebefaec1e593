"""What a request says depends on nothing but itself: not on mates, cuts, cache hits, eviction, retraction or strategy.

Log-probabilities are compared bit by bit, freed memory is filled with NaN, and the pools are checked for leaks after
each run.
"""

from __future__ import annotations

import itertools

import pytest

from tests.agreement.llm_runs import (
    STRATEGIES,
    bits_of,
    checkpoint,
    conversation,
    greedy,
    next_turn,
    prompt,
    say,
    say_alone,
    tiny_llm,
)
from tests.tiny_models import FAMILIES
from twinpool import SamplingParams


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_with_shared_prefixes_twice_over(name: str) -> None:
    folder, prompts, params = checkpoint("qwen3_5"), conversation(10), greedy(70)
    expected = say_alone(folder, prompts, params)
    options = {"mamba_track_interval": 64, "chunked_prefill_size": 96, **STRATEGIES[name]}
    with tiny_llm(folder, **options) as llm:
        assert say(llm, prompts, params) == expected
        assert say(llm, prompts, params) == expected
        # The next turn: each answer goes on, resumed from wherever the strategy left a state.
        longer = next_turn(prompts, expected)
        done = llm.generate(longer, params)
        reused = sum(c.cached_tokens for c in done)
        assert (reused > 0) == (name != "off")
    assert bits_of(done) == say_alone(folder, longer, params)


@pytest.mark.parametrize("family", FAMILIES)
def test_alone_and_in_a_batch_of_eight(family: str) -> None:
    folder, params = checkpoint(family), greedy(10)
    prompts = [prompt(i, length) for i, length in enumerate((1, 17, 64, 65, 90, 128, 31, 200))]
    with tiny_llm(folder, chunked_prefill_size=150) as llm:
        assert say(llm, prompts, params) == say_alone(folder, prompts, params)


@pytest.mark.parametrize(("chunk", "page_size"), [(1, 1), (16, 16), (64, 1), (70, 1), (-1, 1), (-1, 32)])
def test_any_chunk_size(chunk: int, page_size: int) -> None:
    folder, params = checkpoint("qwen3_5_moe"), greedy(5)
    prompts = [prompt(1, 61), prompt(2, 130)]
    options = {"chunked_prefill_size": chunk, "page_size": page_size, "mamba_track_interval": 64}
    with tiny_llm(folder, **options) as llm:
        assert say(llm, prompts, params) == say_alone(folder, prompts, params)


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads(threads: int) -> None:
    folder, params = checkpoint("qwen3_next"), greedy(6)
    prompts = [prompt(3, 100), prompt(4, 9)]
    with tiny_llm(folder, threads=threads) as llm:
        assert say(llm, prompts, params) == say_alone(folder, prompts, params)


@pytest.mark.parametrize("dtypes", [{}, {"kv_cache_dtype": "bfloat16"}, {"mamba_ssm_dtype": "bfloat16"}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cache_hits_change_nothing_in_low_precision(dtype: str, dtypes: dict[str, str]) -> None:
    folder, prompts, params = checkpoint("qwen3_5", dtype=dtype), conversation(30)[:3], greedy(4)
    with tiny_llm(folder, chunked_prefill_size=64, **dtypes) as llm:
        alone = []
        for ids in prompts:
            llm.flush_cache()
            alone += say(llm, [ids], params)
        for _ in range(2):
            assert say(llm, prompts, params) == alone
        assert llm.generate(prompts, params)[1].cached_tokens >= 128


def test_retraction_when_kv_runs_short() -> None:
    folder, params = checkpoint("qwen3_5"), greedy(60)
    prompts = [prompt(i, 30 + i) for i in range(4)]
    with tiny_llm(folder, max_total_tokens=230, schedule_conservativeness=0.05) as llm:
        assert say(llm, prompts, params) == say_alone(folder, prompts, params)
        assert llm.engine.snapshot().totals.retracted_requests > 0


def test_sampling_repeats_itself_after_retraction_and_in_any_company() -> None:
    folder = checkpoint("qwen3_5")
    params = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=60, ignore_eos=True, seed=11, frequency_penalty=0.3)
    prompts = [prompt(i, 30 + i) for i in range(4)]
    expected = say_alone(folder, prompts, params)
    with tiny_llm(folder, max_total_tokens=230, schedule_conservativeness=0.05) as llm:
        assert say(llm, prompts, params) == expected
        assert llm.engine.snapshot().totals.retracted_requests > 0
    assert len({tokens for tokens, _ in expected}) == len(prompts)


def test_eviction_of_states_and_kv() -> None:
    folder, params = checkpoint("qwen3_5"), greedy(20)
    prompts = [p for seed in range(100, 400, 100) for p in conversation(seed)]
    expected = dict(zip(map(tuple, prompts), say_alone(folder, prompts, params), strict=True))
    with tiny_llm(folder, max_mamba_cache_size=7, max_total_tokens=600, chunked_prefill_size=64) as llm:
        for ids in itertools.chain(prompts, reversed(prompts)):
            assert say(llm, [ids], params) == [expected[tuple(ids)]]
        snapshot = llm.engine.snapshot()
        assert snapshot.evictions.n_states > 0
        assert snapshot.evictions.n_kv_tokens > 0


def test_a_hit_at_every_possible_checkpoint() -> None:
    folder, params = checkpoint("qwen3_next"), greedy(5)
    ids = prompt(50, 260)
    ((expected, logprobs),) = say_alone(folder, [ids], params)
    with tiny_llm(folder, chunked_prefill_size=64) as llm:
        for length in (64, 128, 192, 256):
            llm.flush_cache()
            llm.generate([[*ids[:length], ids[length] ^ 1]], greedy(1))
            (done,) = llm.generate([ids], params)
            assert done.cached_tokens == length
            assert (done.token_ids, tuple(p.logprob for p in done.logprobs)) == (expected, logprobs)


@pytest.mark.parametrize("name", ["no_buffer", "extra_buffer"])
def test_a_hit_at_every_place_in_a_pool_of_a_sparse_index(name: str) -> None:
    """Pools of four tokens, contexts of three times as many tokens as are chosen; a state is left at any token."""
    folder, params, ids = checkpoint("glm"), greedy(5), prompt(50, 120)
    ((expected, logprobs),) = say_alone(folder, [ids], params)
    cached = []
    with tiny_llm(folder, chunked_prefill_size=50, **STRATEGIES[name]) as llm:
        for length in (90, 91, 92, 93):
            llm.flush_cache()
            llm.generate([ids[:length]], greedy(1))
            (done,) = llm.generate([ids], params)
            cached.append(done.cached_tokens)
            assert (done.token_ids, tuple(p.logprob for p in done.logprobs)) == (expected, logprobs)
    assert min(cached) >= 90
    assert {n % 4 for n in cached} == {0, 1, 2, 3}
