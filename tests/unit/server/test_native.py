"""POST /generate: meta_info, batches, streams, log-probabilities, reuse."""

from __future__ import annotations

import itertools

from fastapi.testclient import TestClient

from tests.unit.server.fakes import LETTERS, n_said, parse_events, said


def test_reply_and_reuse(client: TestClient) -> None:
    body = {"text": "abcabcabca", "sampling_params": {"max_new_tokens": 6, "ignore_eos": True}, "rid": "mine"}
    reply = client.post("/generate", json=body).json()
    assert reply["text"] == said("abcabcabca", 6, ignore_eos=True)
    assert len(reply["output_ids"]) == 6
    meta = reply["meta_info"]
    assert meta["id"] == "mine"
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (10, 6, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["reuse"] == {"kv_matched": 0, "reused": 0, "from_host": 0, "from_storage": 0, "gaps": {"new": 10}}
    assert meta["e2e_latency"] >= 0
    meta = client.post("/generate", json=body).json()["meta_info"]
    assert meta["cached_tokens"] == meta["reuse"]["reused"] == 8
    assert meta["cached_tokens_details"] == {"device": 8, "host": 0}
    assert meta["reuse"]["reused"] + sum(meta["reuse"]["gaps"].values()) == 10


def test_default_length_and_end_token(client: TestClient) -> None:
    meta = client.post("/generate", json={"text": "abc"}).json()["meta_info"]
    assert meta["completion_tokens"] == n_said("abc", 128)
    assert meta["finish_reason"] == {"type": "stop", "matched": 0}


def test_stop_string_is_named(client: TestClient) -> None:
    stop = said("abc", 40, ignore_eos=True)[3:5]
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 40, "ignore_eos": True, "stop": [stop]}}
    reply = client.post("/generate", json=body).json()
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stop not in reply["text"]


def test_batch_keeps_order_and_ids(client: TestClient) -> None:
    ids = [[LETTERS.index(letter) for letter in prompt] for prompt in ("abc", "b")]
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 5}, "rid": ["x", "y"]}
    replies = client.post("/generate", json=body).json()
    assert [reply["text"] for reply in replies] == [said("abc", 5), said("b", 5)]
    assert [reply["meta_info"]["id"] for reply in replies] == ["x", "y"]
    one = client.post("/generate", json={"text": ["abc"], "sampling_params": {"max_new_tokens": 5}}).json()
    assert isinstance(one, list)
    two = client.post("/generate", json={"text": "abc", "sampling_params": {"n": 2}, "rid": "z"}).json()
    assert [reply["meta_info"]["id"] for reply in two] == ["z_0", "z_1"]


def test_stream_is_cumulative(client: TestClient) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 7, "ignore_eos": True}, "stream": True}
    events = parse_events(client.post("/generate", json=body).text)
    assert events.pop() == "[DONE]"
    texts = [event["text"] for event in events]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == said("abc", 7, ignore_eos=True)
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    assert sorted(set(counts)) == [1, 2, 3, 4, 5, 6, 7]
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)


def test_streamed_batch_says_which(client: TestClient) -> None:
    body = {"text": ["abc", "ca"], "sampling_params": {"max_new_tokens": 5}, "stream": True}
    events = parse_events(client.post("/generate", json=body).text)[:-1]
    last = {event["index"]: event["text"] for event in events}
    assert last == {0: said("abc", 5), 1: said("ca", 5)}


def test_logprobs(client: TestClient) -> None:
    body = {
        "text": "abc", "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}, "return_logprob": True,
        "top_logprobs_num": 2, "return_text_in_logprobs": True,
    }  # fmt: skip
    reply = client.post("/generate", json=body).json()
    found = reply["meta_info"]["output_token_logprobs"]
    assert [item[:2] for item in found] == [[-0.5, token] for token in reply["output_ids"]]
    assert [item[2] for item in found] == [LETTERS[token] for token in reply["output_ids"]]
    assert [len(top) for top in reply["meta_info"]["output_top_logprobs"]] == [2, 2]
