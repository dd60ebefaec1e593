"""Real tensors through the disk tier: after a restart greedy tokens and the bits of their log-probabilities are those of a run without
any cache, whatever has happened to the folder."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agreement.live import Live, live_server
from tests.agreement.llm_runs import (
    CACHING,
    STRATEGIES,
    Said,
    bits_of,
    checkpoint,
    conversation,
    greedy,
    prompt,
    say_alone,
    tiny_llm,
)
from twinpool import LLM, SamplingParams
from twinpool.engine.copies import TierCopies
from twinpool.engine.disk import DiskTier
from twinpool.errors import ConfigError
from twinpool.sched import disk
from twinpool.storage import files

HOST = {"enable_hierarchical_cache": True, "hicache_size": 0.02, "mamba_track_interval": 64, "chunked_prefill_size": 96}
N_TOKENS = 20
SEED = 10


@cache
def alone() -> Said:
    """What the conversation's prompts say one by one without any cache."""
    return say_alone(checkpoint("qwen3_5"), conversation(SEED), greedy(N_TOKENS))


@contextmanager
def disk_llm(path: Path, folder: Path | None = None, **options: object) -> Iterator[LLM]:
    """An LLM over a disk tier that is waited for, and that reads short prefixes, too."""
    settings = {
        "hicache_storage_backend": "file", "hicache_storage_path": str(path), "hicache_storage_size": 1.0,
        "hicache_storage_prefetch_policy": "wait_complete", **HOST, **options,
    }  # fmt: skip
    with tiny_llm(folder or checkpoint("qwen3_5"), **settings) as llm:
        tier(llm).threshold_tokens = 16
        yield llm


def tier(llm: LLM) -> DiskTier:
    disk = llm.engine.scheduler.book.storage
    assert isinstance(disk, DiskTier)
    return disk


def from_disk(llm: LLM, expected: Said | None = None, seed: int = SEED) -> int:
    """Run the prompts in one batch, compare, and count the tokens that came from the disk."""
    done = llm.generate(conversation(seed), greedy(N_TOKENS))
    said = bits_of(done)
    assert said == (alone() if expected is None else expected)
    for one in done:
        assert sum(one.reuse.by_tier.values()) == one.reuse.reused
    return sum(one.reuse.from_storage for one in done)


def files_of(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder that a server with the default strategy has written and left."""
    with disk_llm(tmp_path) as llm:
        assert from_disk(llm) == 0
    assert len(files_of(tmp_path)) >= 4
    return tmp_path


@pytest.mark.parametrize(
    ("name", "policy"),
    [(name, "write_through") for name in CACHING]
    + [("extra_buffer", "write_through_selective"), ("lazy, pages of 16", "write_back"), ("no_buffer", "write_back")],
)
def test_a_restart_resumes_from_the_disk_and_says_the_same(tmp_path: Path, name, policy) -> None:
    options = {"hicache_write_policy": policy, **STRATEGIES[name]}
    with disk_llm(tmp_path, **options) as llm:
        assert from_disk(llm) == 0
        assert from_disk(llm) == 0, "all of it is in memory"
    with disk_llm(tmp_path, **options) as llm:
        assert from_disk(llm) > 100
        counts = tier(llm).counts()
        assert counts.fetched_tokens > 100
        assert counts.store.damaged == counts.store.failed == 0
        llm.flush_cache()
        assert from_disk(llm) > 100, "a flush does not touch the disk"
    with disk_llm(tmp_path, **options) as llm:
        for turn, ids in enumerate(conversation(SEED)):  # one by one, so that each reads for itself
            (done,) = llm.generate([ids], greedy(N_TOKENS))
            assert (done.token_ids, tuple(p.logprob for p in done.logprobs)) == alone()[turn]


def test_a_conversation_goes_on_over_restarts(tmp_path: Path) -> None:
    """Five servers, one turn each: every turn but the first starts from the disk, and each writes what it adds only."""
    ids = prompt(3, 70)
    for turn in range(5):
        with disk_llm(tmp_path) as llm:
            (done,) = llm.generate([ids], greedy(N_TOKENS))
        assert (done.token_ids, tuple(p.logprob for p in done.logprobs)) == say_alone(
            checkpoint("qwen3_5"), [ids], greedy(N_TOKENS)
        )[0]
        assert done.reuse.from_storage == (len(ids) - 8 if turn else 0)
        spans = [tuple(map(int, path.stem.split("-")[3:])) for path in files_of(tmp_path)]
        assert sum(end - start for start, end in spans) == max(end for _, end in spans) == len(ids) + N_TOKENS - 1
        ids = [*ids, *done.token_ids, *prompt(50 + turn, 7)]


@pytest.mark.parametrize("what", ["fill_host", "gather", "move"])
def test_an_order_that_fails_once_changes_no_answer(written: Path, what, monkeypatch) -> None:
    """Filling the host from the disk, reading the device for the disk, or the first copy of all: what runs is computed instead."""
    plain, left = getattr(TierCopies, what), [1]

    def fails_once(self: TierCopies, *arguments: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise MemoryError("no room")
        return plain(self, *arguments)

    monkeypatch.setattr(TierCopies, what, fails_once)
    with disk_llm(written) as llm:
        from_disk(llm)
        llm.flush_cache()
        assert from_disk(llm) > 100
        assert llm.engine.snapshot().totals.restarted_requests > 0
        llm.engine.check_idle(thorough=True)


@pytest.mark.parametrize(
    ("dtype", "family"),
    [("bfloat16", "qwen3_next"), ("bfloat16", "qwen3_5_moe"), ("float32", "qwen3_next"), ("bfloat16", "glm")],
)
def test_every_dtype_comes_back_bit_by_bit(tmp_path: Path, dtype, family) -> None:
    folder = checkpoint(family, dtype=dtype)
    options = {"mamba_ssm_dtype": "bfloat16" if dtype == "bfloat16" else "float32"}
    with disk_llm(tmp_path, folder, **options) as llm:
        expected: Said = []
        for ids in conversation(SEED):
            llm.engine.flush_cache()
            done = llm.generate([ids], greedy(N_TOKENS))[0]
            expected.append((done.token_ids, tuple(p.logprob for p in done.logprobs)))
    with disk_llm(tmp_path, folder, **options) as llm:
        assert from_disk(llm, expected) > 100


@pytest.mark.parametrize(
    "change", [{"dtype": "bfloat16"}, {"page_size": 16}, {"mamba_ssm_dtype": "bfloat16"}, {"kv_cache_dtype": "bfloat16"},
               {"kv_cache_dtype": "fp8_e4m3"}],
    ids=str,
)  # fmt: skip
def test_another_dtype_or_page_size_finds_nothing(written: Path, change) -> None:
    before = files_of(written)
    with disk_llm(written, **change) as llm:
        llm.generate(conversation(SEED), greedy(N_TOKENS))
        counts = tier(llm).counts()
        assert counts.fetched_tokens == counts.store.read == 0
    assert set(before) < set(files_of(written)), "both keep their files in one folder"
    with disk_llm(written) as llm:
        assert from_disk(llm) > 100


def test_another_model_finds_nothing(written: Path) -> None:
    with disk_llm(written, checkpoint("qwen3_next")) as llm:
        llm.generate(conversation(SEED), greedy(N_TOKENS))
        assert tier(llm).counts().fetched_tokens == 0


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 1
    elif how == "cut":
        del data[-100:]
    elif how == "empty":
        data.clear()
    elif how == "longer":
        data += b"x"
    path.write_bytes(data)


@pytest.mark.parametrize("which", ["first", "all"])
@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "longer", "gone"])
def test_damaged_files_are_misses(written: Path, how, which) -> None:
    with disk_llm(written) as llm:  # its index is older than the damage
        for path in files_of(written)[: 1 if which == "first" else None]:
            path.unlink() if how == "gone" else damage(path, how)
        read = from_disk(llm)
        store = tier(llm).store.stats
        if which == "all":
            assert read == 0
            assert (store.vanished if how == "gone" else store.damaged) > 0
    with disk_llm(written) as llm:
        assert from_disk(llm) > 100, "it was written again"


def test_two_servers_on_one_folder(tmp_path: Path) -> None:
    with disk_llm(tmp_path) as first, disk_llm(tmp_path) as second:
        assert from_disk(first) == 0
        tier(first).writer.flush()
        tier(second).store.refresh()
        assert from_disk(second) > 100
        first.flush_cache()
        for path in files_of(tmp_path):
            path.unlink()
        assert from_disk(first) == 0
        assert tier(first).store.stats.vanished > 0


@pytest.mark.parametrize("policy", ["timeout", "best_effort", "wait_complete"])
def test_every_prefetch_policy_says_the_same(written: Path, policy) -> None:
    with disk_llm(written, hicache_storage_prefetch_policy=policy) as llm:
        read = from_disk(llm)
        late = tier(llm).counts().late_requests
        if policy != "best_effort":
            assert read > 100
            assert late == 0


def test_a_slow_disk_is_not_waited_for(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file takes a tenth of a second, a request waits for a hundredth."""
    read_whole = files.read_whole
    monkeypatch.setattr(files, "read_whole", lambda *args: (time.sleep(0.1), read_whole(*args))[1])
    monkeypatch.setattr(disk, "_WAIT_BASE_S", 0.01)
    with disk_llm(written, hicache_storage_prefetch_policy="timeout") as llm:
        assert from_disk(llm) == 0
        assert tier(llm).counts().late_requests > 0


def test_a_disk_that_is_waited_for_keeps_no_core_busy(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking takes longer the more requests wait, here 4 ms: then it is done less often."""
    answers, read_whole = threading.Event(), files.read_whole
    monkeypatch.setattr(files, "read_whole", lambda *args: (answers.wait(), read_whole(*args))[1])
    with disk_llm(written) as llm:
        engine = llm.engine
        plain = engine.loop.step
        monkeypatch.setattr(engine.loop, "step", lambda: (time.sleep(0.004), plain())[1])
        (request,) = engine.add(conversation(SEED)[0], greedy(N_TOKENS))
        began_s = time.monotonic()
        for _ in range(20):
            assert not engine.step()
        assert time.monotonic() - began_s > 20 * 0.015
        answers.set()
        while engine.has_work:
            engine.step()
        assert request.reuse.from_storage > 0


def test_a_size_that_holds_little_keeps_the_limit(tmp_path: Path) -> None:
    with disk_llm(tmp_path, hicache_storage_size=0.0001) as llm:
        for _ in range(2):
            from_disk(llm)
            llm.flush_cache()
    assert sum(path.stat().st_size for path in files_of(tmp_path)) <= 100_000
    with disk_llm(tmp_path, hicache_storage_size=0.0001) as llm:
        from_disk(llm)


def test_a_size_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"needs room for a page and a state.*raise --hicache-storage-size"),
        disk_llm(tmp_path, hicache_storage_size=1e-6),
    ):
        pass


def test_a_disk_that_breaks_costs_hits_and_is_said_once(tmp_path: Path, monkeypatch, caplog) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    with disk_llm(tmp_path) as llm:
        monkeypatch.setattr("twinpool.storage.files.write_whole", full)
        assert from_disk(llm) == 0
        llm.flush_cache()
        assert from_disk(llm) == 0
        tier(llm).writer.flush()
        store = tier(llm).store.stats
        assert (store.written, store.segments) == (0, 0)
        assert (store.failed, store.paused > 0) == (1, True), "one try, then a pause"
    assert len([line for line in caplog.messages if "goes on without" in line]) == 1
    assert os.listdir(tmp_path) == []


# A server in a process of its own, with the demo model.
N_SESSIONS, SAID = 6, 12


def flags(path: Path) -> list[str]:
    sizes = ("--max-total-tokens", "2048", "--max-mamba-cache-size", "12", "--max-running-requests", "2")
    tier = ("--enable-hierarchical-cache", "--hicache-size", "0.1", "--hicache-storage-backend", "file")
    return [*sizes, *tier, "--hicache-storage-path", str(path), "--hicache-storage-prefetch-policy", "wait_complete"]


def opening(session: int) -> list[int]:
    """The first prompt of a session: three hundred tokens that no other begins with."""
    return [100 + session, *(300 + (7 * session + 3 * at) % 500 for at in range(299))]


@cache
def demo_says() -> list[list[int]]:
    """What each opening is answered without any cache, and what the next turn is."""
    params = SamplingParams(max_tokens=SAID, temperature=0.0, ignore_eos=True)
    with LLM(device_memory="1GiB", disable_radix_cache=True, max_total_tokens=2048) as llm:
        first = [list(one.token_ids) for one in llm.generate([opening(at) for at in range(N_SESSIONS)], params)]
        again = [[*opening(at), *first[at], 9] for at in range(N_SESSIONS)]
        return first + [list(one.token_ids) for one in llm.generate(again, params)]


def ask(live: Live, session: int, turn: int) -> dict[str, Any]:
    """One turn of a session, checked; its meta_info."""
    prompt = opening(session) if not turn else [*opening(session), *demo_says()[session], 9]
    params = {"max_new_tokens": SAID, "temperature": 0.0, "ignore_eos": True}
    reply = httpx.post(f"{live.url}/generate", json={"input_ids": prompt, "sampling_params": params}, timeout=60).json()
    assert reply["output_ids"] == demo_says()[turn * N_SESSIONS + session]
    return reply["meta_info"]


def test_a_server_that_is_stopped_writes_what_it_was_given_and_the_next_one_has_it(tmp_path: Path) -> None:
    demo_says()
    folder = tmp_path / "disk"
    with live_server(tmp_path, *flags(folder)) as live:
        for session in range(N_SESSIONS):
            assert ask(live, session, 0)["cached_tokens_details"] == {"device": 0, "host": 0}
        live.process.send_signal(signal.SIGTERM)
        assert live.process.wait(30) == 0
    assert len(files_of(folder)) >= N_SESSIONS
    (second := tmp_path / "second").mkdir()
    with live_server(second, *flags(folder)) as live:
        n_tokens = 300 + SAID - 1
        for session in range(N_SESSIONS):
            details = ask(live, session, 1)["cached_tokens_details"]
            assert details == {"device": 0, "host": 0, "storage": n_tokens, "storage_backend": "file"}
        found = live.metrics()
        assert found["sglang:cached_tokens_total{storage_file}"] == N_SESSIONS * n_tokens
        assert found["sglang:prefetched_tokens_total"] == N_SESSIONS * n_tokens
        assert found["twinpool:disk_segments_total{read}"] >= N_SESSIONS
        assert found["twinpool:disk_used_bytes"] > 0
        assert live.get("/flush_cache?timeout=5").status_code == 200
        assert ask(live, 0, 1)["cached_tokens_details"]["storage"] > n_tokens - 1, "the disk is not flushed"
        storage = live.get("/server_info").json()["internal_states"][0]["hicache_storage"]
        assert storage["path"] == str(folder)
        assert storage["store"]["segments"] == len(files_of(folder))
        assert f"HiCache storage in {folder}: " in live.log.read_text()
        live.check_no_leak()


def test_kill_9_while_it_writes(tmp_path: Path) -> None:
    """Killed three times at any moment; whatever is in the folder afterwards, the answers are the same and no file is torn."""
    demo_says()
    folder, read = tmp_path / "disk", 0.0
    for life, wait_s in enumerate((0.0, 0.02, 0.2)):
        (logs := tmp_path / str(life)).mkdir()
        with live_server(logs, *flags(folder)) as live:
            for session in range(N_SESSIONS):
                ask(live, session, life % 2)
            found = live.metrics()
            assert found["twinpool:disk_segments_total{damaged}"] == found["twinpool:disk_segments_total{failed}"] == 0
            read += found["twinpool:disk_segments_total{read}"]
            asked = [threading.Thread(target=ask_until_killed, args=(live, session)) for session in range(N_SESSIONS)]
            for thread in asked:
                thread.start()
            time.sleep(wait_s)
            live.process.kill()
            for thread in asked:
                thread.join()
    assert read > 0


def ask_until_killed(live: Live, session: int) -> None:
    with contextlib.suppress(httpx.TransportError):
        ask(live, session, 1)
