"""The issue's own measure of done: 64 sessions, 8 at once, pools too small for all of them: no leak, and the tokens of a cache-less run."""

from __future__ import annotations

import numpy as np
import pytest

from twinpool import LLM, SamplingParams

SESSIONS, TURNS, NEW_TOKENS = 64, 3, 40
ANSWER = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


def talk(**options: object) -> tuple[list[tuple[int, ...]], LLM]:
    """All answers of all sessions, turn by turn, on the demo model; the engine is closed and left for inspection."""
    rng = np.random.default_rng(0)
    system = rng.integers(3, 3000, 70).tolist()
    histories = [list(system) for _ in range(SESSIONS)]
    answers: list[tuple[int, ...]] = []
    with LLM(device_memory="192MiB", **options) as llm:  # type: ignore[arg-type]
        for _ in range(TURNS):
            prompts = [history + rng.integers(3, 3000, NEW_TOKENS).tolist() for history in histories]
            for session, answer in enumerate(llm.generate(prompts, ANSWER)):
                answers.append(answer.token_ids)
                histories[session] = prompts[session] + list(answer.token_ids)
        llm.engine.check_idle(thorough=True)
    return answers, llm


@pytest.fixture(scope="module")
def truth() -> list[tuple[int, ...]]:
    return talk(disable_radix_cache=True)[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_mamba_cache_size": 45, "max_total_tokens": 6000},
        {"page_size": 16, "max_mamba_cache_size": 45},
        {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True, "max_mamba_cache_size": 30},
        {
            "schedule_policy": "lpm",
            "chunked_prefill_size": 64,
            "max_total_tokens": 1200,
            "schedule_conservativeness": 0.1,
        },
    ],
    ids=["ample", "few slots and KV", "pages of 16", "no_buffer", "retraction"],
)
def test_sixty_four_sessions_eight_at_once(truth, options) -> None:
    answers, llm = talk(max_running_requests=8, **options)
    assert answers == truth
    snapshot = llm.engine.snapshot()
    for counts in (snapshot.pages, snapshot.slots):
        assert counts.free + counts.evictable == counts.total
    if "max_mamba_cache_size" in options:
        assert snapshot.evictions.n_states > 0
