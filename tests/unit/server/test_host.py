"""What a server says about its host tier: responses, facts, metrics, flush."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

from tests.unit.server.fakes import Fake, make_fake, said
from tests.unit.server.test_admin import samples
from twinpool.memory.host import HostArena
from twinpool.request import Reuse
from twinpool.server.answer import cached_details

PAGE_BYTES, SLOT_BYTES = 8, 32
LETTERS = "abcdef"


@pytest.fixture
def fake() -> Fake:
    arena = HostArena(total_bytes=100 * SLOT_BYTES, page_bytes=PAGE_BYTES, slot_bytes=SLOT_BYTES)
    return make_fake(host=arena, n_pages=24, n_slots=4, max_running=1)


def say(client: TestClient, letter: str) -> dict[str, object]:
    """meta_info of twelve equal letters and four tokens on."""
    body = {"text": letter * 12, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    reply = client.post("/generate", json=body).json()
    assert reply["text"] == said(letter * 12, 4, ignore_eos=True)
    return reply["meta_info"]


def test_responses_say_where_the_tokens_were(client: TestClient) -> None:
    for letter in LETTERS:
        assert say(client, letter)["cached_tokens_details"] == {"device": 0, "host": 0}
    meta = say(client, "a")
    assert meta["cached_tokens"] == 8
    assert meta["cached_tokens_details"] == {"device": 0, "host": 8}
    gaps = {"no_checkpoint": 3, "new": 1}
    assert meta["reuse"] == {"kv_matched": 11, "reused": 8, "from_host": 8, "from_storage": 0, "gaps": gaps}
    meta = say(client, "a")
    assert meta["cached_tokens_details"] == {"device": 11, "host": 0}
    for letter in LETTERS[1:]:
        say(client, letter)
    body = {"prompt": ["a" * 12, "f" * 12], "max_tokens": 1}
    details = client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 22, "cached_tokens_details": {"device": 0, "host": 22}}


def test_tiers_add_up() -> None:
    assert Reuse(prompt=20, reused=12, from_host=5).by_tier == {"device": 7, "host": 5}
    assert Reuse(prompt=20, reused=12, from_host=5, from_storage=4).by_tier == {"device": 3, "host": 5, "storage": 4}


def test_tokens_from_the_disk_name_their_storage() -> None:
    assert cached_details({"device": 3, "host": 5}) == {"device": 3, "host": 5}
    details = cached_details({"device": 3, "host": 5, "storage": 4})
    assert details == {"device": 3, "host": 5, "storage": 4, "storage_backend": "file"}


def test_server_info(client: TestClient) -> None:
    for letter in LETTERS:
        say(client, letter)
    host = client.get("/server_info").json()["internal_states"][0]["hicache"]
    assert host["policy"] == "write_through"
    assert host["total_bytes"] == 100 * SLOT_BYTES
    assert host["used_tokens"] == host["coverage"]["kv_tokens"] == host["totals"]["saved_tokens"]
    assert host["used_states"] == host["totals"]["saved_states"]
    assert host["coverage"]["sessions"] == host["coverage"]["resumable_sessions"] == 6
    assert host["coverage"]["resumable_share"] == 1.0
    # Sessions of 24 // 4 tokens of 8 bytes, each with a state of 32, in 3200 bytes.
    covers = {"context_tokens": 6, "by_kv": 66, "by_states": 100, "together": 40, "device_sessions": 4}
    assert host["covers"] == covers


def test_server_info_of_a_server_that_drains(client: TestClient, fake: Fake) -> None:
    fake.service.bridge.drain()
    host = client.get("/server_info").json()["internal_states"][0]["hicache"]
    assert host["coverage"] is None
    assert host["used_tokens"] == 0


def test_server_info_without_a_tier() -> None:
    fake = make_fake()
    with TestClient(fake.app) as client:
        client.portal.call(fake.service.bridge.booted)
        assert client.get("/server_info").json()["internal_states"][0]["hicache"] is None


def test_metrics(client: TestClient, fake: Fake) -> None:
    for letter in (*LETTERS, "a"):
        say(client, letter)
    found, host = samples(client.get("/metrics").text), fake.service.engine.snapshot().host
    assert host is not None
    assert found["sglang:cached_tokens_total", "host"] == found["sglang:cached_tokens_total", "total"] == 8
    assert found["sglang:cached_tokens_total", "device"] == 0
    assert found["sglang:prefill_effective_tokens_total", "host_hit"] == 8
    assert found["sglang:hicache_host_used_tokens", ""] == host.used_tokens > 0
    assert found["sglang:hicache_host_total_tokens", ""] == host.total_tokens
    assert found["sglang:hicache_host_mamba_used_states", ""] == host.used_states > 0
    assert found["sglang:hicache_host_mamba_total_states", ""] == host.total_states
    assert found["sglang:load_back_tokens_total", "full"] == host.totals.loaded_tokens == 8
    assert found["sglang:load_back_tokens_total", "mamba"] == host.totals.loaded_states == 1
    assert found["sglang:load_back_bytes_total", ""] == 8 * PAGE_BYTES + SLOT_BYTES
    assert found["sglang:hicache_backup_tokens_total", "full"] == host.totals.saved_tokens
    assert found["sglang:hicache_backup_bytes_total", ""] == host.saved_bytes
    assert found["sglang:hicache_dropped_tokens_total", "full,host_pressure"] == host.totals.evicted_tokens
    assert found["sglang:hicache_dropped_tokens_total", "mamba,not_copied"] == host.totals.unsaved_states
    assert found["twinpool:failed_restores_total", ""] == 0
    # The fake executor copies in no time.
    assert found["sglang:load_back_duration_seconds_count", ""] == 0


@pytest.mark.parametrize(
    ("reason", "world"),
    [
        ("host_state_evicted", {"host": HostArena(total_bytes=10**5, page_bytes=8, slot_bytes=32, max_slots=3), "n_slots": 6}),
        ("restore_failed", {"host": HostArena(total_bytes=10**5, page_bytes=8, slot_bytes=32), "n_slots": 2}),
    ],
)  # fmt: skip
def test_what_the_host_could_not_give_reaches_response_and_metrics(reason: str, world: dict[str, object]) -> None:
    fake = make_fake(n_pages=24, max_running=1, strategy="extra_buffer", **world)
    with TestClient(fake.app, raise_server_exceptions=False) as client:
        client.portal.call(fake.service.bridge.booted)
        say(client, "a")
        fake.world.tree.evict(pages=24, slots=6)  # nothing runs
        say(client, "b")
        again = say(client, "a")["reuse"]
        assert reason in again["gaps"], again
        assert again["reused"] + sum(again["gaps"].values()) == 12
        found = samples(client.get("/metrics").text)
    assert found["twinpool:reuse_gap_tokens_total", reason] == again["gaps"][reason]
    assert found["twinpool:failed_restores_total", ""] == (reason == "restore_failed")
    evictions = fake.world.tree.evictions
    assert found["sglang:evicted_tokens_total", ""] == evictions.n_kv_tokens > 0
    assert found["twinpool:evicted_states_total", ""] == evictions.n_states > 0
    for pool, by_reason in (("full", evictions.kv_tokens), ("mamba", evictions.states)):
        for why, number in by_reason.items():
            assert found["twinpool:evictions_total", f"{pool},{why}"] == number


def test_flush_clears_the_host_tier_too(client: TestClient, fake: Fake) -> None:
    for letter in LETTERS:
        say(client, letter)
    assert client.get("/flush_cache").text.startswith("Cache flushed.")
    found = samples(client.get("/metrics").text)
    assert found["sglang:hicache_host_used_tokens", ""] == found["sglang:hicache_host_mamba_used_states", ""] == 0
    assert found["sglang:hicache_backup_tokens_total", "full"] > 0
    assert say(client, "a")["cached_tokens"] == 0
    fake.service.engine.check_idle(thorough=True)
