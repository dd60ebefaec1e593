"""Hostile clients against a real server whose pools are almost too small; whatever they do, it answers and leaks nothing."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.agreement.live import Live, live_server

GENERATE = "/generate"
CHAT = "/v1/chat/completions"
ALONE_S = 5.0


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    flags = ("--max-total-tokens", "700", "--max-mamba-cache-size", "12", "--chunked-prefill-size", "64")
    with live_server(tmp_path_factory.mktemp("server"), *flags) as live:
        yield live


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=60) as client:
        yield client


def greedy(ids: list[int], new_tokens: int) -> dict[str, Any]:
    """A /generate body."""
    params = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": params}


def requests_with_shared_prefixes(count: int) -> list[dict[str, Any]]:
    """Prompts that share 0 to 180 tokens and differ after them."""
    chance = random.Random(11)
    base = [chance.randrange(3, 3000) for _ in range(180)]
    return [
        greedy([*base[: chance.choice([0, 10, 64, 65, 128, 180])], chance.randrange(3, 3000)], chance.randrange(1, 20))
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (GENERATE, b"", None),
        (GENERATE, b'{"text":"\xff\xfe"}', None),
        (GENERATE, b'{"text":"\\ud800"}', None),
        (GENERATE, b"[" * 100_000, None),
        (GENERATE, b'{"text":"a","sampling_params":{"temperature":NaN}}', None),
        (GENERATE, b'{"text":"a","sampling_params":{"temperature":1e400}}', "sampling_params.temperature"),
        (GENERATE, b'{"text":""}', "text"),
        (GENERATE, b'{"input_ids":[[]]}', "input_ids"),
        (GENERATE, b'{"input_ids":[99999999]}', "input_ids"),
        (GENERATE, b'{"text":"a","sampling_params":{"max_new_tokens":0}}', "max_new_tokens"),
        (GENERATE, b'{"text":"a","sampling_params":{"max_new_tokens":999999}}', "max_new_tokens"),
        (GENERATE, b'{"text":"a","sampling_params":{"max_new_tokens":2,"min_new_tokens":3}}', "min_new_tokens"),
        (
            GENERATE,
            json.dumps({"text": "a", "sampling_params": {"stop": ["x"] * 10_000}}).encode(),
            "stop",
        ),
        (
            CHAT,
            b'{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"chat_template":"{{ 1/0 }}"}}',
            "chat_template_kwargs",
        ),
        (
            CHAT,
            b'{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"tokenize":true}}',
            "chat_template_kwargs",
        ),
    ],
)
def test_a_bad_request_is_told_its_field_in_a_short_sentence(
    client: httpx.Client, path: str, body: bytes, field: str | None
) -> None:
    reply = client.post(path, content=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, field)
    assert len(error["message"]) < 400
    if field is not None:
        assert field in error["message"] or "prompt" in error["message"]


def test_a_text_of_ten_megabytes_is_refused_at_once(client: httpx.Client) -> None:
    start_s = time.monotonic()
    reply = client.post(GENERATE, json={"text": "hello world " * 850_000})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "text")
    assert "--context-length" in reply.json()["error"]["message"]
    # Tokenising it takes 7 seconds and more.
    assert time.monotonic() - start_s < 3


def test_a_million_prompts_in_one_body_are_refused_at_once(client: httpx.Client) -> None:
    reply = client.post("/v1/completions", json={"prompt": ["a"] * 1_000_000, "n": 128, "max_tokens": 1})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "prompt")
    assert "128000000 sequences" in error["message"]
    assert "4096" in error["message"]


def test_small_replies_do_not_wait_for_delayed_acknowledgements(client: httpx.Client) -> None:
    client.get("/health")
    times_s = []
    for _ in range(20):
        start_s = time.monotonic()
        client.get("/health")
        times_s.append(time.monotonic() - start_s)
    assert sorted(times_s)[10] < 0.03, "a delayed acknowledgement costs 0.04 s each time"


def test_answers_under_attack_are_those_of_an_idle_server(live: Live, client: httpx.Client) -> None:
    bodies = requests_with_shared_prefixes(60)
    alone = []
    for body in bodies[:20]:
        assert client.post("/flush_cache?timeout=5").status_code == 200
        alone.append(client.post(GENERATE, json=body).json()["output_ids"])

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        reply = httpx.post(live.url + GENERATE, json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    with ThreadPoolExecutor(40) as pool:
        answers = pool.map(ask, bodies)
        leavers = [pool.submit(_leave, live, body, after_s=0.01 * index) for index, body in enumerate(bodies[:15])]
        flushes = [httpx.post(live.url + "/flush_cache?timeout=0", timeout=60).status_code for _ in range(5)]
        found = list(answers)
        for leaver in leavers:
            leaver.result()
    assert [answer["output_ids"] for answer in found[:20]] == alone
    assert set(flushes) <= {200, 400}
    for body, answer in zip(bodies, found, strict=True):
        meta = answer["meta_info"]
        assert meta["reuse"]["reused"] + sum(meta["reuse"]["gaps"].values()) == len(body["input_ids"])
        assert meta["cached_tokens"] == meta["reuse"]["reused"]
    wait_until_idle(client)
    live.check_no_leak()


def _leave(live: Live, body: dict[str, Any], *, after_s: float) -> None:
    """Send a request and close the connection while it is queued, prefilled or decoded."""
    raw = json.dumps({**body, "stream": True}).encode()
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)
        time.sleep(after_s)


def wait_until_idle(client: httpx.Client) -> None:
    """Until the requests of clients that left are gone too."""
    deadline_s = time.monotonic() + ALONE_S
    while time.monotonic() < deadline_s:
        (load,) = client.get("/v1/loads").json()["loads"]
        if load["num_running_reqs"] == load["num_waiting_reqs"] == 0:
            return
        time.sleep(0.02)
    raise AssertionError("requests of clients that left still run")
