"""A live server with a host tier: more sessions than the device holds, what it says of them, and the same answers."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.agreement.live import Live, live_server
from twinpool import LLM, SamplingParams

N_SESSIONS, TURNS, NEW_TOKENS = 10, 3, 12
# Four sessions fit on the device.
FLAGS = {"max_total_tokens": 1024, "max_mamba_cache_size": 12, "max_running_requests": 2}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    words = [word for name, value in FLAGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    tier = ("--enable-hierarchical-cache", "--hicache-size", "0.05")
    with live_server(tmp_path_factory.mktemp("host"), *words, *tier) as live:
        yield live


def opening(session: int) -> list[int]:
    """The first prompt of a session: two hundred tokens that no other begins with."""
    return [100 + session, *(300 + (7 * session + 3 * at) % 500 for at in range(199))]


def without_cache() -> list[list[list[int]]]:
    """What every session says in every turn when nothing is ever reused."""
    answers: list[list[list[int]]] = []
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(device_memory="1GiB", disable_radix_cache=True, **FLAGS) as llm:
        prompts = [opening(session) for session in range(N_SESSIONS)]
        for _ in range(TURNS):
            said = [list(one.token_ids) for one in llm.generate(prompts, params)]
            answers.append(said)
            prompts = [[*prompt, *answer, 9] for prompt, answer in zip(prompts, said, strict=True)]
    return answers


def test_sessions_outlive_the_device_and_say_the_same(live: Live) -> None:
    expected = without_cache()
    prompts = [opening(session) for session in range(N_SESSIONS)]
    params = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
    from_host = 0
    for turn in range(TURNS):
        for session, prompt in enumerate(prompts):
            body = {"input_ids": prompt, "sampling_params": params}
            reply = httpx.post(f"{live.url}/generate", json=body, timeout=60).json()
            assert reply["output_ids"] == expected[turn][session]
            meta = reply["meta_info"]
            tiers = meta["cached_tokens_details"]
            assert tiers["device"] + tiers["host"] == meta["cached_tokens"] == meta["reuse"]["reused"]
            assert meta["reuse"]["reused"] + sum(meta["reuse"]["gaps"].values()) == len(prompt)
            if turn:  # everything but the last token of the answer, which was not computed, and what is new
                assert meta["cached_tokens"] == len(prompt) - 2
            from_host += tiers["host"]
            prompts[session] = [*prompt, *reply["output_ids"], 9]
    found = live.metrics()
    assert found["sglang:cached_tokens_total{host}"] == from_host > 2000
    assert found["sglang:load_back_tokens_total{mamba}"] == (TURNS - 1) * N_SESSIONS
    assert found["sglang:load_back_duration_seconds_count"] > 0
    assert found["sglang:hicache_backup_duration_seconds_count"] > 0
    host = live.get("/server_info").json()["internal_states"][0]["hicache"]
    assert host["coverage"]["resumable_sessions"] == host["coverage"]["sessions"] == N_SESSIONS
    assert host["used_tokens"] == found["sglang:hicache_host_used_tokens"]
    live.check_no_leak()
    found = live.metrics()
    assert found["sglang:hicache_host_used_tokens"] == found["sglang:hicache_host_mamba_used_states"] == 0
    log = live.log.read_text()
    assert "hicache_attached=True" in log
    assert "GB host memory for KV and states together" in log
    assert "memory leak" not in log
