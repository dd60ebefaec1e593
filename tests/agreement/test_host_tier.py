"""Real tensors through the host tier: greedy tokens and the bits of their log-probabilities are those of a run without any cache."""

from __future__ import annotations

from functools import cache

import pytest

from tests.agreement.llm_runs import (
    CACHING,
    STRATEGIES,
    Said,
    bits_of,
    checkpoint,
    conversation,
    greedy,
    prompt,
    say,
    say_alone,
    tiny_llm,
)
from twinpool import LLM
from twinpool.engine.copies import Part, TierCopies
from twinpool.step import HostCopy, SlotOrder

POLICIES = ["write_through", "write_through_selective", "write_back"]
HOST = {"enable_hierarchical_cache": True, "hicache_size": 0.02, "mamba_track_interval": 64}
N_TOKENS = 20


@cache
def alone(seed: int) -> Said:
    """What a conversation's prompts say one by one without any cache."""
    return say_alone(checkpoint("qwen3_5"), conversation(seed), greedy(N_TOKENS))


def leave_device(llm: LLM) -> None:
    """Evict all that the device has cached: what has a copy on the host stays there."""
    llm.engine.scheduler.book.tree.evict(pages=10**6, slots=10**6)
    llm.engine.check_idle(thorough=True)


def from_host(llm: LLM, prompts: list[list[int]], expected: Said) -> int:
    """Run the prompts in one batch, compare, and count the tokens that came from the host."""
    done = llm.generate(prompts, greedy(N_TOKENS))
    assert bits_of(done) == expected
    return sum(c.reuse.from_host for c in done)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CACHING)
def test_no_hit_device_hit_and_host_hit_say_the_same(name, policy) -> None:
    folder, prompts, params = checkpoint("qwen3_5"), conversation(10), greedy(N_TOKENS)
    options = {"chunked_prefill_size": 96, "hicache_write_policy": policy, **HOST, **STRATEGIES[name]}
    with tiny_llm(folder, **options) as llm:
        assert say(llm, prompts, params) == alone(10)
        assert from_host(llm, prompts, alone(10)) == 0, "all of it is on the device"
        leave_device(llm)
        assert from_host(llm, prompts, alone(10)) > 0
        leave_device(llm)
        assert [say(llm, [ids], params)[0] for ids in prompts] == alone(10)
        totals = llm.engine.scheduler.book.tree.tier.totals
        assert totals.loaded_states > 1
        llm.flush_cache()
        assert from_host(llm, prompts, alone(10)) == 0


@pytest.mark.parametrize(("chunk", "page_size"), [(16, 16), (64, 1), (70, 1), (144, 16), (-1, 1), (-1, 16)])
def test_any_cut_after_a_host_hit(chunk, page_size) -> None:
    options = {"chunked_prefill_size": chunk, "page_size": page_size, **HOST}
    with tiny_llm(checkpoint("qwen3_5"), **options) as llm:
        assert say(llm, conversation(10), greedy(N_TOKENS)) == alone(10)
        leave_device(llm)
        assert from_host(llm, conversation(10), alone(10)) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_host_hit_among_strangers_that_are_just_computed(policy) -> None:
    folder, strangers = checkpoint("qwen3_5"), [prompt(70 + i, 40 + 30 * i) for i in range(3)]
    expected = say_alone(folder, strangers, greedy(N_TOKENS))
    with tiny_llm(folder, hicache_write_policy=policy, chunked_prefill_size=100, **HOST) as llm:
        assert say(llm, conversation(10), greedy(N_TOKENS)) == alone(10)
        assert say(llm, conversation(10), greedy(N_TOKENS)) == alone(10)
        leave_device(llm)
        mixed = [x for pair in zip(strangers, conversation(10), strict=False) for x in pair]
        both = [x for pair in zip(expected, alone(10), strict=False) for x in pair]
        assert from_host(llm, mixed, both) > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("host_gb", "quota_gb"), [(0.02, None), (0.00006, None), (0.02, 0.00001)])
def test_so_little_device_memory_that_everything_goes_through_the_host(policy, host_gb, quota_gb) -> None:
    """Device pools of one request or two, host memory of all, of a few, or with two states among them."""
    folder, seeds = checkpoint("qwen3_5"), (100, 200)
    options = {
        **HOST, "hicache_size": host_gb, "hicache_mamba_size_gb": quota_gb, "hicache_write_policy": policy,
        "max_mamba_cache_size": 6, "max_total_tokens": 330, "chunked_prefill_size": 64,
    }  # fmt: skip
    with tiny_llm(folder, **options) as llm:
        counts = [from_host(llm, conversation(seed), alone(seed)) for seed in seeds * 3]
        totals = llm.engine.scheduler.book.tree.tier.totals
        assert totals.saved_states > 0
        if host_gb > 0.001 and quota_gb is None:
            assert sum(counts) > 300
            assert totals.evicted_states == 0
        else:
            assert totals.evicted_states > 0


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("name", ["extra_buffer", "no_buffer"])
def test_a_copy_that_fails_changes_no_answer(name, at, to_host, monkeypatch) -> None:
    """One copy of a kind fails half-way: nobody is given what the tree believed to be there, and what runs is computed."""
    params, move, seen = greedy(N_TOKENS), TierCopies.move, [0]

    def fails(self: TierCopies, order: SlotOrder | HostCopy, part: Part) -> None:
        if isinstance(order, HostCopy) and order.to_host == to_host:
            seen[0] += 1
            if seen[0] == at + 1:
                raise OSError("no link")
        move(self, order, part)

    monkeypatch.setattr(TierCopies, "move", fails)
    with tiny_llm(checkpoint("qwen3_5"), chunked_prefill_size=96, **HOST, **STRATEGIES[name]) as llm:
        answers = []
        for _ in range(4):
            answers += llm.generate(conversation(10), params)
            leave_device(llm)
        assert bits_of(answers) == alone(10) * 4
        assert llm.engine.snapshot().totals.restarted_requests > 0
        if not to_host:
            assert any(dict(answer.reuse.gaps).get("restore_failed") for answer in answers)
        assert from_host(llm, conversation(10), alone(10)) > 0, "the tier works again"


@pytest.mark.parametrize("name", ["extra_buffer, pages of 16", "lazy", "no_buffer"])
def test_keys_and_open_pools_of_a_sparse_index_come_back(name) -> None:
    folder, params = checkpoint("glm"), greedy(N_TOKENS)
    expected = say_alone(folder, conversation(10), params)
    with tiny_llm(folder, chunked_prefill_size=96, **HOST, **STRATEGIES[name]) as llm:
        assert say(llm, conversation(10), params) == expected
        leave_device(llm)
        assert from_host(llm, conversation(10), expected) > 0


@pytest.mark.parametrize(("dtype", "family"), [("bfloat16", "qwen3_next"), ("bfloat16", "qwen3_5_moe")])
def test_low_precision_comes_back_bit_by_bit(dtype, family) -> None:
    options = {**HOST, "mamba_ssm_dtype": "bfloat16", "chunked_prefill_size": 64}
    with tiny_llm(checkpoint(family, dtype=dtype), **options) as llm:
        expected: Said = []
        for ids in conversation(30):
            llm.flush_cache()
            expected += say(llm, [ids], greedy(N_TOKENS))
        llm.flush_cache()
        assert say(llm, conversation(30), greedy(N_TOKENS)) == expected
        leave_device(llm)
        assert from_host(llm, conversation(30), expected) > 0
