"""A model without attention: a KV pool of no bytes, whose pages only count tokens, through boot, cache, host and disk tier."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from tests.agreement.live import live_server
from tests.agreement.llm_runs import Said, bits_of, checkpoint, conversation, greedy, prompt, say, say_alone, tiny_llm
from twinpool import LLM
from twinpool.cli.main import run
from twinpool.engine.checkpoint import read_spec

FOLDER = checkpoint("falcon_mamba")
TRACE = Path(__file__).parents[1] / "data" / "traces" / "mooncake.jsonl"
PARAMS = greedy(20)
TIERS = {"enable_hierarchical_cache": True, "hicache_size": 0.02, "chunked_prefill_size": 96}


@pytest.fixture(scope="module")
def alone() -> Said:
    return say_alone(FOLDER, conversation(10), PARAMS)


def cached(llm: LLM, expected: Said) -> list[tuple[int, int]]:
    """Run the conversation in one batch, compare; tokens of each prompt that came from the host and from the disk."""
    done = llm.generate(conversation(10), PARAMS)
    assert bits_of(done) == expected
    return [(c.reuse.from_host, c.reuse.from_storage) for c in done]


def test_the_pool_has_tokens_and_no_bytes() -> None:
    with tiny_llm(FOLDER) as llm:
        ledger, memory = llm.engine.facts.ledger, llm.engine._executor._memory
        assert (ledger.page_bytes, ledger.kv_pool_bytes, ledger.kv_tokens) == (0, 0, 4096)
        assert read_spec(FOLDER).kv_bytes_per_token(kv_dtype="float32") == 0
        assert memory.kv == ()
        assert memory.buffer.nbytes == 41 * memory.arena.slot_stride_bytes
        assert memory.arena.slot_stride_bytes - memory.arena.slot_bytes == memory.arena.rounding_bytes // 41 < 64
        say(llm, [prompt(0, 50)], PARAMS)
        assert llm.engine.snapshot().pages.evictable == 50 + 20 - 1


def test_without_caps_all_memory_is_states_and_each_has_a_context_of_tokens() -> None:
    with tiny_llm(FOLDER, max_total_tokens=None, max_mamba_cache_size=None, context_length=512) as llm:
        ledger = llm.engine.facts.ledger
        assert ledger.kv_tokens == ledger.max_mamba_cache_size * 512
        assert ledger.line("unused").bytes < ledger.budget_bytes // 90


def test_states_come_back_from_the_host(alone: Said) -> None:
    with tiny_llm(FOLDER, **TIERS) as llm:
        assert not any(host for host, _ in cached(llm, alone))
        llm.engine.scheduler.book.tree.evict(pages=10**6, slots=10**6)
        llm.engine.check_idle(thorough=True)
        assert any(host for host, _ in cached(llm, alone))


def test_states_come_back_from_the_disk(tmp_path: Path, alone: Said) -> None:
    disk = {
        "hicache_storage_backend": "file", "hicache_storage_path": str(tmp_path), "hicache_storage_size": 1.0,
        "hicache_storage_prefetch_policy": "wait_complete", **TIERS,
    }  # fmt: skip
    for restarted in (False, True):
        with tiny_llm(FOLDER, **disk) as llm:
            llm.engine.scheduler.book.storage.threshold_tokens = 16
            assert any(stored for _, stored in cached(llm, alone)) == restarted


def test_a_server_and_its_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    tiers = ("--enable-hierarchical-cache", "--hicache-size", "0.05", "--hicache-storage-backend", "file")
    flags = ("--model-path", str(folder), "--context-length", "512", "--hicache-storage-path", str(tmp_path / "disk"))
    with live_server(folder, *flags, *tiers) as live:
        texts, cached = set(), []
        for _ in range(3):
            done = live.client().completions.create(
                model="default", prompt="to and fro " * 9, max_tokens=8, temperature=0
            )
            texts.add(done.choices[0].text)
            cached.append(done.usage.prompt_tokens_details.cached_tokens)
        assert (len(texts), cached[0], cached[2]) == (1, 0, 98)
        found, info = live.metrics(), live.get("/server_info").json()
        assert all(math.isfinite(value) for value in found.values())
        assert found["sglang:kv_cache_memory_usage_gb"] == 0 < found["twinpool:state_pool_memory_usage_gb"]
        pool = next(line for line in info["ledger"] if line["name"] == "KV pool")
        assert pool["bytes"] == 0 < info["max_mamba_cache_size"]
        live.check_no_leak()


@pytest.mark.parametrize("host", [(), ("--enable-hierarchical-cache", "--hicache-size", "0.1")])
def test_a_plan_and_a_replay(host: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(FOLDER), "--engine", "twinpool", "--device-memory", "64MiB", *host]) == 0
    assert "one token of KV: 0 bytes" in capsys.readouterr().out
    assert run(["replay", str(TRACE), str(FOLDER), "--engine", "twinpool", "--gpu", "H100", "--json", "--", *host]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["schema"] == "twinpool-replay/1"
