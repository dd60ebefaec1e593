"""Real engines whose copies between the tiers fail at random, half-way: every answer is that of an engine without cache, to the last bit.

Streams, several answers to a prompt, sampling with penalties and seeds, stop strings, log-probabilities, clients that leave, flushes and
retractions are all mixed; copies fail before the forward, in the restore's own thread, at rest, one by one and several in a row.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agreement.live import Live, live_server
from tests.agreement.llm_runs import checkpoint, conversation, prompt, tiny_llm
from twinpool import LLM, SamplingParams
from twinpool.engine import copies
from twinpool.engine.copies import Part, TierCopies
from twinpool.engine.core import Output
from twinpool.request import Request
from twinpool.sched.requeue import MOST_RESTARTS
from twinpool.step import HostCopy, SlotOrder

# family, strategy, overlap, write policy, page size, queue order, prefetch policy of a disk tier
CASES = [
    ("qwen3_5", "extra_buffer", True, "write_through", 1, "fcfs", None),
    ("kimi", "extra_buffer_lazy", True, "write_back", 16, "lpm", "wait_complete"),
    ("jamba", "no_buffer", False, "write_through", 1, "fcfs", "best_effort"),
    ("glm", "extra_buffer", False, "write_through_selective", 16, "lpm", "timeout"),
    ("zamba", "no_buffer", False, "write_back", 1, "lpm", None),
    pytest.param("falcon", "no_buffer", False, "write_through", 1, "fcfs", "wait_complete", marks=pytest.mark.full),
]


class Faults:
    """Copies that fail half-way: so many in a thousand, of one kind or any, begin a run of failures, of this length at most."""

    def __init__(self, dice: random.Random, *, permille: int, most_in_a_row: int = 1, only: str | None = None) -> None:
        self.dice, self.permille, self.most_in_a_row, self.only = dice, permille, most_in_a_row, only
        self.left = 0
        self.counts: Counter[str] = Counter()

    def strikes(self, what: str) -> bool:
        """Whether this copy fails."""
        if self.only not in (None, what):
            return False
        if self.left:
            self.left -= 1
        elif self.dice.randrange(1000) >= self.permille:
            return False
        else:
            self.left = self.dice.randrange(self.most_in_a_row)
        self.counts[what] += 1
        return True

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        move, gather, fill, rows = TierCopies.move, TierCopies.gather, TierCopies.fill_host, copies.copy_rows

        def failing_move(one: TierCopies, order: SlotOrder | HostCopy, part: Part) -> None:
            alone = part is one.whole
            # Copies within the device are no tier's: they come first to a request in any case, and it could not go on without.
            if (isinstance(order, SlotOrder) and alone) or not self.strikes(_kind(order, alone)):
                move(one, order, part)
                return
            if isinstance(order, HostCopy):
                half = len(order.pages) // 2
                move(one, replace(order, pages=order.pages[:half], host_pages=order.host_pages[:half]), part)
            raise OSError("no link")

        def failing_rows(dst: Any, dst_ids: Any, src: Any, src_ids: Any, span: Any) -> None:
            if not self.strikes("rows"):
                rows(dst, dst_ids, src, src_ids, span)
                return
            dst.numpy()[dst_ids] = 255  # NaN, in every float type
            raise MemoryError

        def failing_gather(one: TierCopies, order: Any) -> Any:
            if self.strikes("gather"):
                raise MemoryError
            return gather(one, order)

        def failing_fill(one: TierCopies, order: Any) -> None:
            fill(one, order)
            if self.strikes("fill"):
                one._host_slot(order.host_slot).numpy()[:] = 255
                raise RuntimeError("out of paper")

        monkeypatch.setattr(TierCopies, "move", failing_move)
        monkeypatch.setattr(TierCopies, "gather", failing_gather)
        monkeypatch.setattr(TierCopies, "fill_host", failing_fill)
        monkeypatch.setattr(copies, "copy_rows", failing_rows)


def _kind(order: SlotOrder | HostCopy, alone: bool) -> str:
    if isinstance(order, HostCopy) and order.to_host:
        return "to the host"
    return "from the host" if alone else "beside the forward"


Said = tuple[tuple[int, ...], tuple[float, ...], str, str, int | str | None]
Asked = tuple[list[int], SamplingParams]


@cache
def asked(family: str) -> tuple[tuple[Asked, tuple[Said, ...]], ...]:
    """What is asked, and what an engine without cache answers to each alone."""
    with tiny_llm(checkpoint(family), disable_radix_cache=True, disable_overlap_schedule=True) as llm:
        plain = {"logprobs": 0, "ignore_eos": True}
        found: list[tuple[Asked, tuple[Said, ...]]] = []
        openings = [*conversation(10), prompt(9, 300)]
        for turn in range(2):
            for at, ids in enumerate(openings):
                params = [
                    SamplingParams(max_tokens=20, temperature=0.0, **plain),
                    SamplingParams(
                        max_tokens=30, temperature=1.1, seed=at, frequency_penalty=0.4, repetition_penalty=1.1, **plain
                    ),
                    SamplingParams(
                        max_tokens=12, temperature=0.8, seed=at, n=2, presence_penalty=0.3, top_k=40, **plain
                    ),
                ][at % 3]
                said = _alone(llm, ids, params)
                found.append(((ids, params), said))
                text = said[0][2]
                if at % 2 and params.n == 1 and len(text) > 8:
                    stopped = replace(params, stop=(text[6:9], "never this"))
                    found.append(((ids, stopped), _alone(llm, ids, stopped)))
                openings[at] = [*ids, *said[0][0], *prompt(60 + at + turn, 5)]
        return tuple(found)


def _alone(llm: LLM, ids: list[int], params: SamplingParams) -> tuple[Said, ...]:
    return tuple(
        (c.token_ids, tuple(p.logprob for p in c.logprobs), c.text, c.finish_reason, c.stop_reason)
        for c in llm.generate([ids], params)
    )


class Client:
    """One answer as it comes: it must go on where it was, and end as the one without cache."""

    def __init__(self, request: Request, expected: Said) -> None:
        self.request, self.expected = request, expected
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.text = ""
        self.has_left = self.ended = False

    def hear(self, output: Output) -> None:
        assert not self.ended
        self.tokens += output.tokens
        self.logprobs += [one.logprob for one in output.logprobs]
        self.text += output.text
        tokens, logprobs, text, reason, matched = self.expected
        assert tuple(self.tokens) == tokens[: len(self.tokens)]
        assert tuple(self.logprobs) == logprobs[: len(self.logprobs)]
        if output.finish is None:
            assert text.startswith(self.text)
            return
        self.ended = True
        if self.has_left:
            assert output.finish.reason in ("abort", reason)
            return
        assert (output.finish.reason, output.finish.matched) == (reason, matched), output.finish
        assert (self.text, len(self.tokens)) == (text, len(tokens))
        reuse = self.request.reuse
        assert reuse.reused + sum(count for _, count in reuse.gaps) == reuse.prompt == self.request.prompt_len
        assert 0 <= reuse.from_storage <= reuse.from_storage + reuse.from_host <= reuse.reused


class Crowd:
    """Clients of one engine."""

    def __init__(self, llm: LLM, dice: random.Random, family: str) -> None:
        self.engine, self.dice, self.family = llm.engine, dice, family
        self.clients: dict[int, Client] = {}
        self.happened: Counter[str] = Counter()

    def ask(self) -> None:
        (ids, params), expected = self.dice.choice(asked(self.family))
        for request, said in zip(self.engine.add(ids, params), expected, strict=True):
            self.clients[request.rid] = Client(request, said)

    def step(self) -> None:
        for output in self.engine.step():
            client = self.clients[output.request.rid]
            client.hear(output)
            if client.ended:
                del self.clients[output.request.rid]
                request = output.request
                self.happened["from the host"] += request.reuse.from_host > 0
                self.happened["from the disk"] += request.reuse.from_storage > 0
                self.happened["begun again"] += request.restarts > 0
                self.happened["begun again in the middle"] += request.restarts > 0 and request.reuse.reused > 0
                self.happened["retracted"] += request.retractions > 0
        self.engine.scheduler.check()

    def trouble(self) -> None:
        tree, what = self.engine.scheduler.book.tree, self.dice.random()
        if what < 0.6:
            tree.evict(pages=self.dice.choice([50, 10**6]), slots=self.dice.choice([3, 10**6]))
        elif what < 0.8 and self.clients:
            client = self.dice.choice(list(self.clients.values()))
            client.has_left = True
            self.engine.abort(client.request.rid)
        else:
            self.happened["flushed"] += self.engine.flush_cache()

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            for _ in range(self.dice.randrange(4)):
                self.ask()
            most = self.dice.choice([3, 10, 10**6])
            while self.clients and most:
                self.step()
                most -= 1
            if self.dice.random() < 0.6:
                self.trouble()
        while self.clients or self.engine.has_work:
            self.step()


@pytest.mark.parametrize(("family", "strategy", "overlap", "policy", "page_size", "order", "prefetch"), CASES)
def test_copies_that_fail_change_no_answer(
    request, tmp_path: Path, monkeypatch, family, strategy, overlap, policy, page_size, order, prefetch
) -> None:
    options: dict[str, object] = {
        "enable_hierarchical_cache": True, "hicache_size": 0.02, "hicache_write_policy": policy, "mamba_track_interval": 64,
        "mamba_radix_cache_strategy": strategy, "disable_overlap_schedule": not overlap, "page_size": page_size,
        "schedule_policy": order, "chunked_prefill_size": 96, "max_total_tokens": 480, "max_mamba_cache_size": 16,
        "schedule_conservativeness": 0.05,
    }  # fmt: skip
    if prefetch is not None:
        options |= {
            "hicache_storage_backend": "file", "hicache_storage_path": str(tmp_path), "hicache_storage_size": 1.0,
            "hicache_storage_prefetch_policy": prefetch,
        }  # fmt: skip
    asked(family)
    happened: Counter[str] = Counter()
    for seed in range(30 if request.config.getoption("--full") else 3):
        dice = random.Random(f"{seed} {family}")
        with tiny_llm(checkpoint(family), **options) as llm, monkeypatch.context() as patch:
            if prefetch is not None:
                llm.engine.scheduler.book.storage.threshold_tokens = 16
            faults = Faults(dice, permille=[3, 10, 30][seed % 3], most_in_a_row=dice.choice([1, 3]))
            faults.install(patch)
            crowd = Crowd(llm, dice, family)
            crowd.run(14)
            happened += crowd.happened + faults.counts
            happened["closed"] += llm.engine.snapshot().host.is_closed
            faults.permille = faults.left = 0
            crowd.run(2)
    assert happened["from the host"] > 1, happened
    assert happened["begun again"] > 1, happened


@pytest.mark.parametrize("what", ["to the host", "beside the forward", "fill", "gather"])
def test_copies_that_fail_for_ever_cost_the_tiers_and_no_answer(tmp_path: Path, monkeypatch, caplog, what) -> None:
    options = {
        "enable_hierarchical_cache": True, "hicache_size": 0.02, "mamba_track_interval": 64, "chunked_prefill_size": 96,
        "hicache_storage_backend": "file", "hicache_storage_path": str(tmp_path), "hicache_storage_size": 1.0,
        "hicache_storage_prefetch_policy": "wait_complete",
    }  # fmt: skip
    dice = random.Random(what)
    for _ in range(2):  # the first fills the disk
        with tiny_llm(checkpoint("qwen3_5"), **options) as llm, monkeypatch.context() as patch:
            storage = llm.engine.scheduler.book.storage
            storage.threshold_tokens = 16
            if any(tmp_path.iterdir()):
                Faults(dice, permille=1000, only=what).install(patch)
            crowd = Crowd(llm, dice, "qwen3_5")
            crowd.run(12)
            llm.engine.scheduler.book.tree.evict(pages=10**6, slots=10**6)
            crowd.run(6)
            closed = llm.engine.snapshot().host.is_closed
    assert closed
    assert len([line for line in caplog.messages if "host and disk tier are not used any more" in line]) == 1


# Run by the interpreter of the server before all else.
BROKEN = """
from twinpool.engine.copies import TierCopies
from twinpool.step import HostCopy
move = TierCopies.move
def fails(one, order, part):
    if isinstance(order, HostCopy):
        raise OSError("no link")
    move(one, order, part)
TierCopies.move = fails
"""


def test_a_server_whose_copies_fail_for_ever_serves_on_and_says_so(tmp_path: Path, monkeypatch) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    prompts = [[100 + n, *range(300, 500)] for n in range(8)]
    with LLM(device_memory="1GiB", disable_radix_cache=True) as llm:
        expected = [list(one.token_ids) for one in llm.generate(prompts, params)]
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))

    def ask(live: Live, ids: list[int]) -> list[int]:
        """Streamed; the text only ever grows."""
        sampling = {"max_new_tokens": 30, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
        reply = httpx.post(f"{live.url}/generate", json=body, timeout=60).text
        *events, last = [line.removeprefix("data: ") for line in reply.splitlines() if line]
        assert last == "[DONE]"
        texts = [json.loads(event)["text"] for event in events]
        assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
        return json.loads(events[-1])["output_ids"]

    with live_server(tmp_path, "--enable-hierarchical-cache", "--hicache-size", "0.1") as live:
        with ThreadPoolExecutor(4) as clients:
            assert list(clients.map(functools.partial(ask, live), prompts)) == expected
        found = live.metrics()
        assert found["twinpool:restarted_requests_total"] > MOST_RESTARTS
        assert found["twinpool:hicache_closed"] == 1
        assert found["sglang:num_requests_total"] == found["twinpool:finished_requests_total{length}"] == len(prompts)
        assert found["sglang:time_to_first_token_seconds_count"] == len(prompts)
        assert found["sglang:prompt_tokens_total"] == sum(map(len, prompts))
        assert live.get("/server_info").json()["internal_states"][0]["hicache"]["is_closed"] is True
        live.check_no_leak()
        live.process.send_signal(signal.SIGTERM)
        assert live.process.wait(30) == 0
    log = live.log.read_text()
    assert log.count("host and disk tier are not used any more") == 1
    assert log.count("a step failed; the cache is empty") == MOST_RESTARTS + 1
