"""Health, facts, loads, flush and metrics."""

from __future__ import annotations

import re

import pytest
from fastapi.testclient import TestClient

from tests.unit.server.fakes import Fake, make_fake, n_said
from twinpool.config.options import ServeOptions
from twinpool.metrics import CATALOGUE, USUAL_LABELS
from twinpool.request import REUSE_GAPS

COMPLETIONS = "/v1/completions"
SAMPLE = re.compile(r"^([a-zA-Z0-9_:]+)\{([^}]*)\} (\S+)$")


def samples(text: str) -> dict[tuple[str, str], float]:
    """(name, its own labels) to value; checks that the usual labels are there."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = SAMPLE.match(line)
        assert match is not None, line
        labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
        usual = {name: labels.pop(name) for name in USUAL_LABELS}
        assert usual == {
            "model_name": "models/tiny",
            "engine_type": "unified",
            "tp_rank": "0",
            "pp_rank": "0",
            "dp_rank": "0",
        }
        found[match[1], ",".join(labels.values())] = float(match[3])
    return found


def test_health_generate(client: TestClient, fake: Fake) -> None:
    assert client.get("/health_generate").json() == {"status": "ready"}
    assert fake.service.engine.snapshot().totals.finished_requests == 1


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info(client: TestClient, path: str) -> None:
    info = client.get(path).json()
    assert (info["max_mamba_cache_size"], info["max_running_requests"], info["page_size"]) == (16, 4, 1)
    assert info["mamba_full_memory_ratio"] == 0.9
    assert info["max_total_num_tokens"] == 256
    state = info["internal_states"][0]
    assert state["effective_max_running_requests_per_dp"] == 4
    assert state["memory_usage"] == {
        "weight": 0.25, "kvcache": 1.0, "statecache": 0.5, "token_capacity": 256, "state_capacity": 16,
        "startup_available": 4.0, "graph": 0.0,
    }  # fmt: skip
    assert state["last_gen_throughput"] == 0.0
    assert info["ledger"][0]["name"] == "weights"


def test_model_info(client: TestClient) -> None:
    assert client.get("/get_model_info").json()["architectures"] == ["TinyForCausalLM"]


def test_loads(client: TestClient) -> None:
    load = client.get("/v1/loads").json()["loads"][0]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["token_usage"]) == (0, 0, 0.0)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_flush_forgets_the_cache(client: TestClient, fake: Fake, method: str) -> None:
    body = {"prompt": "abcabcabca", "max_tokens": 4}
    cached = [
        client.post(COMPLETIONS, json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in "12"
    ]
    assert cached == [0, 8]
    reply = client.request(method, "/flush_cache?timeout=1.5")
    assert reply.status_code == 200
    assert reply.text.startswith("Cache flushed.")
    assert fake.service.engine.snapshot().pages.free == 256
    assert client.post(COMPLETIONS, json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("timeout", ["-1", "soon", "nan", "inf", ""])
def test_flush_timeout_must_be_seconds(client: TestClient, timeout: str) -> None:
    reply = client.get("/flush_cache", params={"timeout": timeout})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "timeout")


def test_flush_of_a_busy_server(client: TestClient, fake: Fake) -> None:
    fake.valve.delay_s = 0.002
    body = {"prompt": "abc", "max_tokens": 150, "ignore_eos": True}
    slow = client.portal.start_task_soon(_post, fake, body)
    while not fake.service.engine.has_work:
        pass
    reply = client.post("/flush_cache")
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert message == "Cache not flushed because there are pending requests. #queue-req: 0, #running-req: 1"
    assert client.post("/flush_cache?timeout=20").status_code == 200
    assert slow.result() == 200


async def _post(fake: Fake, body: dict) -> int | None:
    from tests.unit.server.fakes import Call

    return (await Call(fake.app, COMPLETIONS, body).run()).status


def test_metrics_after_two_requests(client: TestClient) -> None:
    body = {"prompt": "abcabcabca", "max_tokens": 6}
    for _ in range(2):
        client.post(COMPLETIONS, json=body)
    reply = client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    found = samples(reply.text)
    n_out = n_said("abcabcabca", 6)
    assert found["sglang:prompt_tokens_total", ""] == 20
    assert found["sglang:generation_tokens_total", ""] == 2 * n_out
    assert found["sglang:num_requests_total", ""] == 2
    assert found["sglang:cached_tokens_total", "device"] == found["sglang:cached_tokens_total", "total"] == 8
    assert found["sglang:realtime_tokens_total", "prefill_compute"] == 12
    assert found["sglang:realtime_tokens_total", "prefill_cache"] == 8
    assert found["sglang:prefill_effective_tokens_total", "input"] == 12
    assert found["sglang:prefill_effective_tokens_total", "device_hit"] == 8
    assert found["sglang:cache_hit_rate", ""] == 0.8
    gaps = {labels: value for (name, labels), value in found.items() if name == "twinpool:reuse_gap_tokens_total"}
    assert sum(gaps.values()) == 12
    assert set(gaps) == set(REUSE_GAPS)
    slots = {labels: value for (name, labels), value in found.items() if name == "twinpool:state_slots"}
    assert sum(slots.values()) == found["twinpool:state_pool_slots", ""] == 16
    assert slots["cached"] == found["sglang:mamba_evictable_tokens", ""] == found["twinpool:resumable_prefixes", ""] > 0
    kv = [found[f"sglang:kv_{part}_tokens", ""] for part in ("available", "evictable", "used")]
    assert sum(kv) == found["sglang:max_total_num_tokens", ""] == 256
    assert kv[2] == found["sglang:token_usage", ""] == 0
    assert found["sglang:prompt_tokens_histogram_bucket", "8.0"] == 0
    assert found["sglang:prompt_tokens_histogram_bucket", "16.0"] == 2
    assert (
        found["sglang:prompt_tokens_histogram_bucket", "+Inf"] == found["sglang:prompt_tokens_histogram_count", ""] == 2
    )
    assert found["sglang:prompt_tokens_histogram_sum", ""] == 20
    assert found["sglang:uncached_prompt_tokens_histogram_sum", ""] == 12
    assert found["sglang:inter_token_latency_seconds_count", ""] == 2 * (n_out - 1)
    assert found["sglang:time_to_first_token_seconds_count", ""] == 2
    assert found["sglang:weight_memory_usage_gb", ""] == 0.25
    assert sum(v for (name, _), v in found.items() if name == "twinpool:finished_requests_total") == 2


def test_every_metric_is_described(client: TestClient) -> None:
    text = client.get("/metrics").text
    for metric in CATALOGUE:
        assert f"# TYPE {metric.name} {metric.kind}\n" in text
        assert f"# HELP {metric.name} " in text


def test_catalogue_is_sound() -> None:
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)
    for metric in CATALOGUE:
        assert metric.name.startswith(("sglang:", "twinpool:"))
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert (metric.kind == "histogram") == bool(metric.buckets)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.help.endswith(".")


def test_no_metrics_without_the_flag() -> None:
    fake = make_fake(options=ServeOptions())
    with TestClient(fake.app) as client:
        client.portal.call(fake.service.bridge.booted)
        reply = client.get("/metrics")
        assert reply.status_code == 404
        assert reply.json()["error"]["message"] == "there are no metrics here: start the server with --enable-metrics."
        assert reply.json()["error"]["code"] == "not_enabled"


def test_two_servers_do_not_share_metrics() -> None:
    first, second = make_fake(), make_fake()
    with TestClient(first.app) as one, TestClient(second.app) as two:
        for client, fake in ((one, first), (two, second)):
            client.portal.call(fake.service.bridge.booted)
        one.post(COMPLETIONS, json={"prompt": "abc"})
        assert samples(one.get("/metrics").text)["sglang:num_requests_total", ""] == 1
        assert samples(two.get("/metrics").text)["sglang:num_requests_total", ""] == 0
