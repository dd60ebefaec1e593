"""Keys and values in fp8: what a request says depends on nothing but itself, in every family, on every tier and over ranks."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.agreement.llm_runs import (
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
from tests.agreement.test_disk_tier import disk_llm, tier
from tests.tiny_models import FAMILIES
from twinpool.engine.checkpoint import read_spec

FP8 = {"kv_cache_dtype": "fp8_e4m3"}
TURN = greedy(12)


@pytest.mark.parametrize("family", FAMILIES)
def test_hits_mates_cuts_and_retraction_change_nothing(family: str) -> None:
    folder, prompts = checkpoint(family), conversation(10)
    apart, longer = [prompt(i, 30 + i) for i in range(4)], greedy(60)
    alone, alone_apart = (say_alone(folder, p, n, **FP8) for p, n in ((prompts, TURN), (apart, longer)))
    turns = next_turn(prompts, alone)
    alone_turns = say_alone(folder, turns, TURN, **FP8)
    tight = {"max_total_tokens": 260, "schedule_conservativeness": 0.05, "chunked_prefill_size": 96}
    with tiny_llm(folder, mamba_track_interval=64, **FP8) as llm:
        assert say(llm, prompts, TURN) == alone
        assert say(llm, prompts, TURN) == alone
        done = llm.generate(turns, TURN)
        assert bits_of(done) == alone_turns
        assert sum(c.cached_tokens for c in done) > 0
    with tiny_llm(folder, **tight, **FP8) as llm:
        assert [say(llm, [p], TURN)[0] for p in prompts] == alone
        assert say(llm, apart, longer) == alone_apart
        assert llm.engine.snapshot().totals.retracted_requests > 0
    rounded = alone != say_alone(folder, prompts, TURN)
    assert rounded == (read_spec(folder).n_attention_layers > 0)


@pytest.mark.parametrize(("family", "dtype"), [("qwen3_5", "bfloat16"), ("ling", "float32"), ("kimi", "bfloat16")])
def test_the_host_and_the_disk_bring_back_the_same_bits(tmp_path: Path, family: str, dtype: str) -> None:
    folder, prompts, options = checkpoint(family, dtype=dtype), conversation(10), {**FP8, "mamba_ssm_dtype": "bfloat16"}
    with disk_llm(tmp_path, folder, **options) as llm:
        alone = []
        for ids in prompts:
            llm.flush_cache()
            alone += say(llm, [ids], TURN)
        assert say(llm, prompts, TURN) == alone
        llm.engine.scheduler.book.tree.evict(pages=10**6, slots=10**6)
        done = llm.generate(prompts, TURN)
        assert bits_of(done) == alone
        assert sum(c.reuse.from_host for c in done) > 0
    with disk_llm(tmp_path, folder, **options) as llm:
        assert say(llm, prompts, TURN) == alone
        assert tier(llm).counts().fetched_tokens > 100
    with disk_llm(tmp_path, folder, mamba_ssm_dtype="bfloat16") as llm:
        llm.generate(prompts, TURN)
        assert tier(llm).counts().fetched_tokens == 0, "the folder is that of another cache"


@pytest.mark.parametrize("family", ["qwen3_5", "ling"])
def test_two_ranks_say_what_one_says(family: str) -> None:
    folder, prompts = checkpoint(family), conversation(10)
    expected = [tokens for tokens, _ in say_alone(folder, prompts, TURN, **FP8)]
    with tiny_llm(folder, tp_size=2, mamba_track_interval=64, **FP8) as llm:
        for ids, tokens in zip(prompts, expected, strict=True):
            cold = say(llm, [ids], TURN)
            assert cold[0][0] == tokens
            assert say(llm, [ids], TURN) == cold  # from the cache, to the last bit


def test_the_log_says_that_there_are_no_scales(caplog: pytest.LogCaptureFixture) -> None:
    for family, warns in (("qwen3_5", True), ("mamba", False)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "twinpool.engine"), tiny_llm(checkpoint(family), **FP8):
            pass
        said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert any("fp8_e4m3 without scales" in line for line in said) == warns
        assert "KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 4096" in caplog.text
