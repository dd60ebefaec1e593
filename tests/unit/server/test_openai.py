"""The OpenAI routes: shapes, streams, usage, log-probabilities, n."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

from tests.unit.server.fakes import LETTERS, Fake, make_fake, n_said, parse_events, said
from twinpool.config.options import ServeOptions

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat(text: str, **more: object) -> dict:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 12, **more}


def test_chat_reply(client: TestClient) -> None:
    reply = client.post(CHAT, json=chat("abc")).json()
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "models/tiny"
    choice = reply["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": said("abc_", 12), "refusal": None}
    ended = n_said("abc_", 12) < 12
    assert choice["finish_reason"] == ("stop" if ended else "length")
    assert choice["logprobs"] is None
    assert reply["usage"] == {
        "prompt_tokens": 4, "completion_tokens": n_said("abc_", 12), "total_tokens": 4 + n_said("abc_", 12),
        "prompt_tokens_details": {"cached_tokens": 0, "cached_tokens_details": {"device": 0, "host": 0}},
    }  # fmt: skip


def test_length_and_end(client: TestClient) -> None:
    long = client.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 60, "ignore_eos": True}).json()
    assert long["choices"][0]["finish_reason"] == "length"
    assert long["choices"][0]["text"] == said("abc", 60, ignore_eos=True)
    assert long["usage"]["completion_tokens"] == 60
    assert n_said("abc", 60) < 60
    short = client.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 60}).json()
    assert short["choices"][0]["finish_reason"] == "stop"
    assert short["choices"][0]["text"] == said("abc", 60)
    assert short["usage"]["completion_tokens"] == n_said("abc", 60)


def test_completions_default_is_sixteen_tokens(client: TestClient) -> None:
    reply = client.post(COMPLETIONS, json={"prompt": "abc", "ignore_eos": True}).json()
    assert reply["usage"]["completion_tokens"] == 16


def test_chat_default_is_the_room_that_is_left(client: TestClient) -> None:
    body = chat("abc", ignore_eos=True)
    del body["max_tokens"]
    assert client.post(CHAT, json=body).json()["usage"]["completion_tokens"] == 256 - 4


def test_content_parts_and_template_options(client: TestClient) -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    body = {
        "messages": [{"role": "user", "content": parts}], "max_completion_tokens": 9,
        "chat_template_kwargs": {"suffix": "dd"},
    }  # fmt: skip
    assert client.post(CHAT, json=body).json()["choices"][0]["message"]["content"] == said("abc_dd", 9)


def test_chat_stream_framing(client: TestClient) -> None:
    body = chat("abc", stream=True, stream_options={"include_usage": True}, ignore_eos=True)
    reply = client.post(CHAT, json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = parse_events(reply.text)
    assert events.pop() == "[DONE]"
    usage = events.pop()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert all(event["usage"] is None for event in events)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == said("abc_", 12, ignore_eos=True)
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}


def test_stream_without_usage_has_no_usage_chunk(client: TestClient) -> None:
    events = parse_events(client.post(COMPLETIONS, json={"prompt": "abc", "stream": True}).text)
    assert all(event["choices"] for event in events[:-1])
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == said("abc", 16)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_cuts_text_and_counts_tokens_to_it(client: TestClient, stream: bool) -> None:
    whole = said("abc", 60, ignore_eos=True)
    stop = whole[5:7]
    at = whole.index(stop)
    body = {"prompt": "abc", "max_tokens": 60, "ignore_eos": True, "stop": stop, "stream": stream}
    reply = client.post(COMPLETIONS, json=body)
    if stream:
        events = parse_events(reply.text)[:-1]
        assert "".join(event["choices"][0]["text"] for event in events) == whole[:at]
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        return
    assert reply.json()["choices"][0]["text"] == whole[:at]
    assert reply.json()["choices"][0]["finish_reason"] == "stop"
    assert reply.json()["usage"]["completion_tokens"] < 60


def test_n_counts_the_prompt_once(client: TestClient) -> None:
    one = client.post(COMPLETIONS, json={"prompt": "abcab", "max_tokens": 5, "ignore_eos": True}).json()
    reply = client.post(COMPLETIONS, json={"prompt": "abcab", "max_tokens": 5, "ignore_eos": True, "n": 3}).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert {choice["text"] for choice in reply["choices"]} == {one["choices"][0]["text"]}
    assert reply["usage"]["prompt_tokens"] == 5
    assert reply["usage"]["completion_tokens"] == 15
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] < 5


def test_several_prompts_and_streamed_indices(client: TestClient) -> None:
    prompts = ["abc", "bca", "cc"]
    reply = client.post(COMPLETIONS, json={"prompt": prompts, "max_tokens": 8, "n": 2}).json()
    assert [choice["text"] for choice in reply["choices"]] == [said(p, 8) for p in prompts for _ in range(2)]
    assert reply["usage"]["prompt_tokens"] == 8
    ids = [[LETTERS.index(letter) for letter in prompt] for prompt in prompts]
    events = parse_events(client.post(COMPLETIONS, json={"prompt": ids, "max_tokens": 8, "stream": True}).text)[:-1]
    for index, prompt in enumerate(prompts):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == said(prompt, 8)
        assert [choice["finish_reason"] is not None for choice in mine].count(True) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_echo(client: TestClient, stream: bool) -> None:
    reply = client.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 8, "echo": True, "stream": stream})
    if stream:
        text = "".join(event["choices"][0]["text"] for event in parse_events(reply.text)[:-1])
    else:
        text = reply.json()["choices"][0]["text"]
    assert text == "abc" + said("abc", 8)


def test_chat_logprobs(client: TestClient) -> None:
    reply = client.post(CHAT, json=chat("abc", logprobs=True, top_logprobs=2, ignore_eos=True)).json()
    content = reply["choices"][0]["logprobs"]["content"]
    assert len(content) == 12
    first = content[0]
    assert first["logprob"] == -0.5
    assert first["bytes"] == list(first["token"].encode())
    assert [item["logprob"] for item in first["top_logprobs"]] == [-0.5, -1.5]
    shown = "".join(item["token"] for item in content if item["token"] != "_")
    assert shown == said("abc_", 12, ignore_eos=True)


def test_completion_logprobs(client: TestClient) -> None:
    body = {"prompt": "abc", "max_tokens": 3, "logprobs": 1, "ignore_eos": True}
    found = client.post(COMPLETIONS, json=body).json()["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [-0.5] * 3
    assert found["text_offset"] == [0, 1, 2]
    assert [len(top) for top in found["top_logprobs"]] == [2, 2, 2]


def test_cached_tokens_only_with_the_report() -> None:
    silent = make_fake(options=ServeOptions())
    with TestClient(silent.app) as client:
        client.portal.call(silent.service.bridge.booted)
        for _ in range(2):
            usage = client.post(COMPLETIONS, json={"prompt": "abcabc"}).json()["usage"]
            assert usage["prompt_tokens_details"] is None


def test_second_turn_reuses_the_first(client: TestClient, fake: Fake) -> None:
    first = client.post(CHAT, json=chat("abcabcab", ignore_eos=True)).json()
    answer = first["choices"][0]["message"]["content"]
    body = {"messages": [{"role": "user", "content": "abcabcab"}], "max_tokens": 4}
    again = client.post(CHAT, json=body).json()
    # no_buffer keeps the state at the end of each prompt chunk (8 tokens here) and at the end of the whole.
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
    assert answer.startswith(again["choices"][0]["message"]["content"])
    assert fake.world.scheduler.check() is None


def test_models(client: TestClient) -> None:
    card = client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("models/tiny", 256)
    assert client.get("/v1/models/models/tiny").json()["id"] == "models/tiny"
    assert client.get("/v1/models/other").status_code == 404
    for name in ("models/tiny", "tiny", "default"):
        assert client.post(COMPLETIONS, json={"prompt": "abc", "model": name}).status_code == 200
    reply = client.post(COMPLETIONS, json={"prompt": "abc", "model": "gpt-9"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert "models/tiny" in reply.json()["error"]["message"]
