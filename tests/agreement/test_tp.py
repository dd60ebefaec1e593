"""Two ranks on this machine: the tokens of one rank, both pools of each, and an end when a rank ends."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import openai
import psutil
import pytest

from tests.agreement.live import command, live_server
from tests.agreement.llm_runs import (
    STRATEGIES,
    Said,
    checkpoint,
    conversation,
    greedy,
    next_turn,
    prompt,
    say,
    say_alone,
    tiny_llm,
)
from twinpool import LLM, SamplingParams
from twinpool.engine import ranks
from twinpool.engine.follower import follow
from twinpool.errors import ConfigError, ModelError, RankLost

# Every family with one of its strategies, and what its config lacks for two ranks. Per commit one for each kind of mixer runs
# (tests/conftest.py).
CASES = [
    ("qwen3_5", "extra_buffer", {}),
    ("qwen3_5_moe", "lazy", {}),
    ("qwen3_next", "off", {}),
    ("nemotron", "no_buffer", {}),
    ("nemotron_latent", "lazy", {}),
    ("granite", "lazy", {}),
    ("granite_moe", "extra_buffer", {"mamba_n_groups": 1}),
    ("lfm2", "off", {}),
    ("lfm2_moe", "no_buffer", {}),
    ("kimi", "extra_buffer", {"linear_num_heads": 4}),
    ("ling", "lazy", {}),
    ("falcon", "no_buffer", {}),
    ("bamba", "no_buffer", {}),
    ("olmo", "off", {}),
    ("jamba", "no_buffer", {}),
    ("falcon_mamba", "no_buffer", {}),
    ("mamba", "off", {}),
    ("zamba", "no_buffer", {}),
    ("zamba_rope", "off", {"mamba_ngroups": 1}),
]
TURN = greedy(12)


def tokens(said: Said) -> list[tuple[int, ...]]:
    return [one for one, _ in said]


def followers() -> list[psutil.Process]:
    """Processes of other ranks that this one has started."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "twinpool.engine.follower" in " ".join(child.cmdline())]


class ThreadRank:
    """A rank as Ranks has it, in a thread of this process: all of it but the seconds that a process needs to import torch."""

    def __init__(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        self.rank, self.connection = rank, Connection(ours.detach())
        self.process = SimpleNamespace(kill=lambda: None, poll=lambda: None)
        self.thread = threading.Thread(target=self._run, args=(Connection(theirs.detach()),))
        self.thread.start()

    def _run(self, connection: Connection) -> None:
        try:
            follow(connection)
        except EOFError:
            return
        except Exception as error:
            connection.send(ranks.Failed(repr(error)))
            raise

    def end(self, *, patience_s: float) -> None:
        self.thread.join(patience_s)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks are threads."""
    made: list[ThreadRank] = []

    def make(rank: int) -> ThreadRank:
        made.append(ThreadRank(rank))
        return made[-1]

    monkeypatch.setattr(ranks, "_Peer", make)
    yield
    assert not any(rank.thread.is_alive() for rank in made)


@pytest.mark.parametrize(("family", "strategy", "changes"), CASES)
@pytest.mark.usefixtures("threads")
def test_tokens_of_one_rank(family: str, strategy: str, changes: dict[str, object]) -> None:
    folder, prompts = checkpoint(family, **changes), conversation(10)
    alone = say_alone(folder, prompts, TURN)
    first, longer = tokens(alone), next_turn(prompts, alone)
    apart, params = [prompt(i, 30 + i) for i in range(4)], greedy(60)
    second, third = tokens(say_alone(folder, longer, TURN)), tokens(say_alone(folder, apart, params))
    tight = {
        "mamba_track_interval": 64,
        "max_total_tokens": 260,
        "schedule_conservativeness": 0.05,
        "chunked_prefill_size": 96,
    }
    with tiny_llm(folder, tp_size=2, **tight, **STRATEGIES[strategy]) as llm:
        for p, expected in zip(prompts, first, strict=True):
            cold = say(llm, [p], TURN)
            assert tokens(cold) == [expected]
            assert say(llm, [p], TURN) == cold  # from the cache, to the last bit
        done = llm.generate(longer, TURN)
        assert [c.token_ids for c in done] == second
        assert tokens(say(llm, apart, params)) == third
        snapshot = llm.engine.snapshot()
        assert snapshot.totals.retracted_requests > 0
        assert (snapshot.evictions.n_kv_tokens > 0) == (strategy != "off")


def test_tiers_of_every_rank_and_a_rank_killed_while_it_works(tmp_path: Path) -> None:
    folder, prompts = checkpoint("qwen3_5"), [prompt(i, 100) for i in range(6)]
    expected = tokens(say_alone(folder, prompts, TURN))
    host = {"enable_hierarchical_cache": True, "hicache_size": 0.01, "max_total_tokens": 300}
    disk = {"hicache_storage_backend": "file", "hicache_storage_path": str(tmp_path)}
    with LLM(str(folder), tp_size=2, device_memory="64MiB", mamba_track_interval=64, **host, **disk) as llm:
        (follower,) = followers()
        assert not llm.engine._ranks.meeting.parent.exists()
        for _ in range(2):
            assert [tokens(say(llm, [p], TURN))[0] for p in prompts] == expected
        assert llm.engine.snapshot().host.loaded_bytes > 0
        llm.engine.add(prompt(0, 20), greedy(200))
        for _ in range(5):
            llm.engine.step()
        follower.kill()
        with pytest.raises(RankLost, match="the process of rank 1 has ended"):
            _work(llm)
        with pytest.raises(RankLost):
            llm.generate([prompt(1, 5)], SamplingParams(max_tokens=2))
    written = [path.read_bytes() for path in tmp_path.iterdir()]
    assert len(written) >= len(prompts)
    assert all(hashlib.sha256(data[:-32]).digest() == data[-32:] for data in written)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("family", ["qwen3_5", "falcon_mamba"])
def test_disk_tier_of_all_ranks(family: str, tmp_path: Path) -> None:
    """What two ranks have written two ranks find, one rank does not; a file that is damaged is one for both of them."""
    folder, prompts = checkpoint(family), [prompt(i, 300) for i in range(3)]
    disk = {
        "enable_hierarchical_cache": True, "hicache_size": 0.05, "hicache_storage_backend": "file", "hicache_storage_size": 1.0,
        "hicache_storage_path": str(tmp_path), "hicache_storage_prefetch_policy": "wait_complete",
    }  # fmt: skip

    def run(prompts: list[list[int]], ranks: int = 2) -> tuple[Said, list[bool]]:
        """What is said one after another, and whether at least 256 tokens came from the disk."""
        with tiny_llm(folder, tp_size=ranks, **disk) as llm:
            done = [llm.generate([p], TURN)[0] for p in prompts]
            said = [(one.token_ids, tuple(p.logprob for p in one.logprobs)) for one in done]
            return said, [one.reuse.from_storage >= 256 for one in done]

    first, from_disk = run(prompts)
    assert from_disk == [False] * 3
    longer = next_turn(prompts, first)
    second, from_disk = run(longer)
    assert from_disk == [True] * 3
    alone, from_disk = run(longer, ranks=1)
    assert (tokens(alone), from_disk) == (tokens(second), [False] * 3)
    for path in tmp_path.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-40] ^= 1  # of the state of the last rank
        path.write_bytes(data)
    assert run(longer) == (second, [False] * 3)  # to the last bit


def _work(llm: LLM) -> None:
    while llm.engine.has_work:
        llm.engine.step()


def test_the_demo_model_in_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from twinpool import LLM, SamplingParams\n"
        "def say(**options):\n"
        "    with LLM(device_memory='1GiB', threads=2, **options) as llm:\n"
        "        said = llm.generate(['Once upon a time'], SamplingParams(temperature=0, max_tokens=16))[0].token_ids\n"
        "    if options:\n"
        "        assert llm.engine._ranks._peers[0].process.returncode == 0\n"
        "    return said\n"
        "if __name__ == '__main__':\n"
        "    one, two = say(), say(tp_size=2)\n"
        "    assert len(one) == 16 and one == two, (one, two)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (0, "", 2), done.stderr


def test_pools_of_both_ranks_and_a_killed_rank(tmp_path: Path) -> None:
    with live_server(tmp_path, "--tp-size", "2") as live:
        client = live.client()
        answer = client.completions.create(model="demo", prompt="Hello", max_tokens=4, temperature=0)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        plan = subprocess.run(
            [*command()[:-1], "plan", "--boot-log", str(live.log)], capture_output=True, text=True, check=False
        )
        log = live.log.read_text()
        for rank in (0, 1):
            for pool in ("Mamba Cache is allocated.", "KV Cache is allocated."):
                assert f"[TP{rank}] {pool}" in log
        assert "TP0" in plan.stdout, plan.stderr
        assert "TP1" in plan.stdout
        (follower,) = psutil.Process(live.process.pid).children()
        endless = {"ignore_eos": True}
        stream = client.completions.create(
            model="demo", prompt="Hello", max_tokens=1500, stream=True, extra_body=endless
        )
        next(stream)
        follower.kill()
        with pytest.raises(openai.APIError, match="rank 1 has ended"):
            list(stream)
        assert live.process.wait(timeout=20) == 1
        last = live.log.read_text().splitlines()[-1]
    assert last == (
        "twinpool: error: the process of rank 1 has ended (signal 9), and no rank can go on without the others: start again."
    )


def test_what_ranks_cannot_share_is_refused_before_any_starts() -> None:
    for family, options, error, words in (
        ("jamba", {"tp_size": 3}, ModelError, "--tp-size 3 does not divide the model's 4 query heads; use 1, 2, 4"),
        ("falcon_mamba", {"tp_size": 6}, ModelError, "--tp-size 6 does not divide the model's 64 Mamba channels"),
        ("qwen3_5", {"tp_size": 3}, ModelError, "--tp-size 3 does not divide the model's 4 query heads; use 1, 2, 4"),
        ("qwen3_5", {"pp_size": 2}, ConfigError, "--pp-size 2 is not supported when serving"),
    ):
        with pytest.raises(error, match=words), tiny_llm(checkpoint(family), **{"tp_size": 2, **options}):
            pass
    assert not followers()


@pytest.mark.usefixtures("threads")
def test_more_ranks_than_threads_run_and_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with tiny_llm(checkpoint("qwen3_5"), tp_size=2, threads=1) as llm:
        assert len(say(llm, [prompt(0, 9)], greedy(2))) == 1
    assert (
        "--tp-size 2 starts more ranks than there are --threads (1), and in every layer each waits for all others"
        in caplog.text
    )
