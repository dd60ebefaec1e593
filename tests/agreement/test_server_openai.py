"""The real `openai` client against a real server with the demo model."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import pytest

import twinpool.demo
from tests.agreement.live import Live, command, live_server
from twinpool.engine.text import Tokenizer
from twinpool.prefix.checkpoint import decode_checkpoint, prefill_checkpoint

PROMPTS = [
    "In the beginning",
    "And the king said",
    "The sea was",
    "Once upon a time",
    "My dear",
    "It was",
    "He",
    "War and",
]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_server(tmp_path_factory.mktemp("server")) as live:
        yield live


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(next(iter(twinpool.demo.__path__))))


@dataclass
class Rules:
    """Where the rules leave checkpoints, as positions in token sequences (reference 4.5-4.8, docs/differences.md).

    The demo model's prompts here fit one chunk, pages hold one token, the strategy is extra_buffer.
    """

    grid_tokens: int
    track_tokens: int
    kept: list[tuple[list[int], set[int]]] = field(default_factory=list)

    def cached(self, prompt: list[int]) -> int:
        """The deepest checkpoint on the prompt's path, the last prompt token left to compute."""
        limit = len(prompt) - 1
        return max((at for ids, marks in self.kept for at in marks if at <= min(limit, common(ids, prompt))), default=0)

    def ran(self, prompt: list[int], output: list[int], *, ended: bool) -> None:
        """A request was computed: its prefill checkpoint, its decode checkpoints and the state it ended with."""
        start = self.cached(prompt)
        matched = max((min(common(ids, prompt), len(prompt) - 1) for ids, _ in self.kept), default=0)
        fork: int | None = matched // self.grid_tokens * self.grid_tokens
        fork = fork if fork > start else None
        at_prompt = prefill_checkpoint(start=start, end=len(prompt), grid_tokens=self.grid_tokens, branching=fork)
        # The end token is computed by the step that was in flight when it was sampled; the last token of a cut answer
        # is not.
        total = len(prompt) + len(output) - (not ended)
        marks = {total} | ({at_prompt} if at_prompt is not None else set())
        for at in range(len(prompt) + 1, total + 1):
            if decode_checkpoint(start=at - 1, end=at, track_tokens=self.track_tokens):
                marks.add(at)
        self.kept.append(((prompt + output)[:total], marks))


def common(one: list[int], other: list[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_streamed_conversation_reuses_what_the_rules_predict(live: Live, tokenizer: Tokenizer) -> None:
    client = live.client()
    info = live.get("/server_info").json()
    assert (info["strategy"], info["page_size"]) == ("extra_buffer", 1)
    rules = Rules(info["grids"]["checkpoint_tokens"], info["grids"]["track_tokens"])
    ids_of = {tokenizer.token_text(token): token for token in reversed(range(3072))}
    messages: list[dict[str, str]] = []
    found, expected, new = [], [], []
    for turn in range(10):
        messages.append({"role": "user", "content": f"{PROMPTS[turn % 8]}, and what came then, tell me more of it"})
        prompt = tokenizer.encode_chat(messages)
        stream = client.chat.completions.create(
            model="demo", messages=messages, max_tokens=40, temperature=0.8, seed=turn, stream=True, logprobs=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        text, output, reason, usage = "", [], None, None
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
                output += [ids_of[item.token] for item in (choice.logprobs.content if choice.logprobs else [])]
        assert usage is not None
        assert usage.prompt_tokens == len(prompt)
        assert usage.completion_tokens == len(output)
        assert text == tokenizer.decode(output)
        found.append(usage.prompt_tokens_details.cached_tokens)
        expected.append(rules.cached(prompt))
        new.append(len(prompt) - found[-1])
        rules.ran(prompt, output, ended=reason == "stop")
        messages.append({"role": "assistant", "content": text})
    assert found == expected
    # The prompts grow by some sixty tokens a turn; whatever was read before the last checkpoint is not read again.
    assert found[-1] > 300
    live.check_no_leak()


def test_a_turn_that_ends_by_itself_is_read_once(live: Live, tokenizer: Tokenizer) -> None:
    """Token for token: a prompt that continues a finished sequence computes its new tokens only."""
    prompt = tokenizer.encode("And the king said unto them, ")
    say = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    for turn in range(5):
        reply = httpx.post(
            f"{live.url}/generate", json={"input_ids": prompt, "sampling_params": say}, timeout=60
        ).json()
        meta = reply["meta_info"]
        assert meta["cached_tokens"] == (len(prompt) - 11 if turn else 0)
        assert meta["reuse"]["reused"] + sum(meta["reuse"]["gaps"].values()) == len(prompt)
        # The last token of an answer that was cut is not computed; ten more follow.
        prompt = [*prompt, *reply["output_ids"], *range(100, 110)]
    assert meta["cached_tokens"] > 100
    live.check_no_leak()


def test_parallel_requests_say_what_they_say_alone(live: Live) -> None:
    client = live.client()

    def ask(prompt: str) -> tuple[str, str]:
        reply = client.completions.create(model="demo", prompt=prompt, max_tokens=24, temperature=0.0)
        return reply.choices[0].text, reply.choices[0].finish_reason

    alone = [ask(prompt) for prompt in PROMPTS]
    live.get("/flush_cache?timeout=5")
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, PROMPTS))
    assert together == alone
    both = client.completions.create(model="demo", prompt=PROMPTS, max_tokens=24, temperature=0.0, n=2)
    assert [choice.text for choice in both.choices] == [text for text, _ in alone for _ in range(2)]
    live.check_no_leak()


def test_errors_as_the_client_sees_them(live: Live) -> None:
    client = live.client()
    with pytest.raises(openai.BadRequestError, match="best_off"):
        client.completions.create(model="demo", prompt="x", extra_body={"best_off": 2})
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.BadRequestError, match="32768"):
        client.completions.create(model="demo", prompt=[5] * 40000, max_tokens=4)
    assert [model.id for model in client.models.list()] == ["demo"]


def test_health_during_a_long_prefill_and_a_client_that_leaves(live: Live) -> None:
    body = {"input_ids": [7 + i % 900 for i in range(20000)], "sampling_params": {"max_new_tokens": 64}}
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=live.url, timeout=5) as quick:
        quick.get("/health")

        def post() -> None:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{live.url}/generate", json=body, timeout=httpx.Timeout(5, read=1.5))

        leaving = pool.submit(post)
        times_s = []
        while not leaving.done():
            start_s = time.monotonic()
            assert quick.get("/health").status_code == 200
            times_s.append(time.monotonic() - start_s)
            time.sleep(0.02)
        leaving.result()
        deadline_s = time.monotonic() + 10
        while live.metrics()["sglang:num_running_reqs"] and time.monotonic() < deadline_s:
            time.sleep(0.1)
    times_s.sort()
    # The other core may be somebody else's: one late answer in twenty is the machine's, not the server's.
    assert times_s[int(len(times_s) * 0.95)] < 0.1
    assert live.metrics()["twinpool:finished_requests_total{abort}"] >= 1
    live.check_no_leak()


def test_metrics_add_up(live: Live) -> None:
    before = live.metrics()
    client = live.client()
    text = " ".join(PROMPTS) * 3
    for _ in range(2):
        usage = client.completions.create(model="demo", prompt=text, max_tokens=5).usage
    after = live.metrics()

    def grew(name: str) -> float:
        return after[name] - before.get(name, 0)

    cached = usage.prompt_tokens_details.cached_tokens
    assert cached == usage.prompt_tokens // 64 * 64
    assert grew("sglang:prompt_tokens_total") == 2 * usage.prompt_tokens
    assert grew("sglang:cached_tokens_total{total}") == cached
    assert grew("sglang:realtime_tokens_total{prefill_compute}") == 2 * usage.prompt_tokens - cached
    assert grew("sglang:num_requests_total") == 2
    gaps = sum(grew(name) for name in after if name.startswith("twinpool:reuse_gap_tokens_total"))
    assert gaps == 2 * usage.prompt_tokens - cached


def test_interrupt_drains(tmp_path: Path) -> None:
    body = {"model": "demo", "prompt": "In the beginning", "max_tokens": 1000, "stream": True}
    with live_server(tmp_path) as live:
        with live.client().completions.create(**body, extra_body={"ignore_eos": True}) as stream:
            chunks = [next(stream)]
            live.interrupt()
            time.sleep(0.1)
            refused = httpx.post(f"{live.url}/v1/completions", json={"prompt": "x"}, timeout=10)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            chunks += list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert live.process.wait(timeout=15) == 0
        assert "Stopping" in live.log.read_text()
        assert "Traceback" not in live.log.read_text()


def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    body = {"model": "demo", "prompt": "In the beginning", "max_tokens": 20000, "stream": True}
    with (
        live_server(tmp_path) as live,
        live.client().completions.create(**body, extra_body={"ignore_eos": True}) as stream,
    ):
        next(stream)
        live.interrupt()
        time.sleep(0.2)
        assert live.process.poll() is None
        live.interrupt()
        assert live.process.wait(timeout=10) == 0
        assert "Traceback" not in live.log.read_text()


def test_a_taken_port_is_said_at_once(live: Live) -> None:
    port = live.url.rsplit(":", 1)[1]
    done = subprocess.run(command("--port", port), capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr
