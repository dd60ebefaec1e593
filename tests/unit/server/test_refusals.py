"""Every refusal: its status, the field it names, and that it comes at once."""

from __future__ import annotations

import json

import pytest
from fastapi.testclient import TestClient

from tests.unit.server.fakes import Fake, make_fake
from twinpool.config.options import ServeOptions
from twinpool.server.openai_protocol import CHAT_REFUSED, COMPLETION_REFUSED

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES = [{"role": "user", "content": "abc"}]
IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]


def refused(client: TestClient, path: str, body: object) -> dict:
    """The error of a request that must be a 400."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = client.post(path, content=content)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"{", "not valid JSON"), (b"", "not valid JSON"), (b"[1]", "a JSON object, not an array"),
        (b'"x"', "not a string"), (b'{"temperature": NaN}', "not valid JSON"), (b"\xff\xfe", "not valid JSON"),
        (b"null", "not null"),
    ],
)  # fmt: skip
def test_bad_json(client: TestClient, path: str, raw: bytes, says: str) -> None:
    assert says in refused(client, path, raw)["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (CHAT, {"messages": MESSAGES, "temprature": 1}, "temprature", "did you mean temperature?"),
        (CHAT, {}, "messages", "messages is required"),
        (CHAT, {"messages": []}, "messages", "messages: it must have at least 1 item."),
        (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", "robot"),
        (CHAT, {"messages": [{"role": "user", "content": IMAGE}]}, "messages[0].content", "'image_url'"),
        (CHAT, {"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "not a number"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages", "no content"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages[0].x", "not a field"),
        (CHAT, {"messages": [{"role": "user", "content": "refuse"}]}, "messages", "template refuses"),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "or equal to 20"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens",
         "give one"),
        (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        (CHAT, {"messages": MESSAGES, "stream": True, "stream_options": {"x": 1}}, "stream_options.x", "not a field"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "prompt is empty"),
        (COMPLETIONS, {"prompt": []}, "prompt", "not empty"),
        (COMPLETIONS, {"prompt": ["abc", ""]}, "prompt", "prompt is empty"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", "array of token ids"),
        (COMPLETIONS, {"prompt": [True]}, "prompt", "array of token ids"),
        (COMPLETIONS, {"prompt": [1.0]}, "prompt", "array of token ids"),
        (COMPLETIONS, {"prompt": [10**30]}, "prompt", "array of token ids"),
        (COMPLETIONS, {"prompt": [11]}, "prompt", "vocabulary ends at 10"),
        (COMPLETIONS, {"prompt": "abc", "max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        (COMPLETIONS, {"prompt": "abc", "max_tokens": 0}, "max_tokens", "at least 1"),
        (COMPLETIONS, {"prompt": "abc", "max_tokens": "5"}, "max_tokens", "'5'"),
        (COMPLETIONS, {"prompt": "abc", "max_tokens": True}, "max_tokens", "True"),
        (COMPLETIONS, {"prompt": "abc", "max_tokens": 10**30}, "max_tokens", "less than or equal"),
        (COMPLETIONS, {"prompt": "abc", "temperature": -0.1}, "temperature", "0 (greedy) or above"),
        (COMPLETIONS, {"prompt": "abc", "temperature": "hot"}, "temperature", "'hot'"),
        (COMPLETIONS, {"prompt": "abc", "top_p": 0}, "top_p", "(0, 1]"),
        (COMPLETIONS, {"prompt": "abc", "top_k": -2}, "top_k", "-1 (all)"),
        (COMPLETIONS, {"prompt": "abc", "min_p": 1.5}, "min_p", "[0, 1]"),
        (COMPLETIONS, {"prompt": "abc", "n": 0}, "n", "between 1 and 128"),
        (COMPLETIONS, {"prompt": "abc", "seed": 2**63}, "seed", "less than"),
        (COMPLETIONS, {"prompt": "abc", "stop": [1]}, "stop", "array of strings"),
        (COMPLETIONS, {"prompt": "abc", "stop": ""}, "stop", "non-empty"),
        (COMPLETIONS, {"prompt": "abc", "stop_token_ids": [11]}, "stop_token_ids", "vocabulary ends at 10"),
        (COMPLETIONS, {"prompt": "abc", "logit_bias": {"x": 1}}, "logit_bias", "'x' is not a token id"),
        (COMPLETIONS, {"prompt": "abc", "logit_bias": {"1": 101}}, "logit_bias", "-100 to 100"),
        (COMPLETIONS, {"prompt": "abc", "logit_bias": {"11": 1}}, "logit_bias", "vocabulary ends at 10"),
        (COMPLETIONS, {"prompt": "abc", "logprobs": 21}, "logprobs", "less than or equal to 20"),
        (COMPLETIONS, {"prompt": "abc", "echo": True, "logprobs": 1}, "echo", "not computed"),
        (COMPLETIONS, {"prompt": "abc", "min_tokens": 20}, "min_tokens", "max_tokens=16"),
        (GENERATE, {}, "text", "either text or input_ids"),
        (GENERATE, {"text": "a", "input_ids": [1]}, "text", "either text or input_ids"),
        (GENERATE, {"text": ["a", "b"], "rid": ["x"]}, "rid", "2 prompts and 1 rids"),
        (GENERATE, {"text": "a", "sampling_params": {"max_tokens": 4}}, "sampling_params.max_tokens", "not a field"),
        (GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": -4}}, "sampling_params.max_new_tokens",
         "or equal"),
        (GENERATE, {"text": "a", "top_logprobs_num": 2}, "top_logprobs_num", "return_logprob"),
        (GENERATE, {"text": "a", "image_data": "x"}, "image_data", "reads text only"),
        (GENERATE, {"text": "a", "logprob_start_len": 0}, "logprob_start_len", "not computed"),
    ],
)  # fmt: skip
def test_wrong_values(client: TestClient, path: str, body: dict, param: str, says: str) -> None:
    error = refused(client, path, body)
    assert error["param"] == param
    assert says in error["message"]
    assert error["message"].count("\n") == 0


def test_infinity_written_as_a_number(client: TestClient) -> None:
    assert refused(client, COMPLETIONS, b'{"prompt": "abc", "temperature": 1e999}')["param"] == "temperature"


@pytest.mark.parametrize("name", sorted(CHAT_REFUSED))
def test_chat_fields_that_are_not_honoured(client: TestClient, name: str) -> None:
    error = refused(client, CHAT, {"messages": MESSAGES, name: {"anything": 1}})
    assert (error["param"], name in error["message"]) == (name, True)
    harmless = {"messages": MESSAGES, name: None}
    assert client.post(CHAT, json=harmless).status_code == 200
    for value in CHAT_REFUSED[name].harmless:
        assert client.post(CHAT, json={**harmless, name: value}).status_code == 200


@pytest.mark.parametrize("name", sorted(COMPLETION_REFUSED))
def test_completion_fields_that_are_not_honoured(client: TestClient, name: str) -> None:
    assert refused(client, COMPLETIONS, {"prompt": "abc", name: {"anything": 1}})["param"] == name
    for value in (None, *COMPLETION_REFUSED[name].harmless):
        assert client.post(COMPLETIONS, json={"prompt": "abc", name: value}).status_code == 200


def test_true_is_not_one(client: TestClient) -> None:
    refused(client, COMPLETIONS, {"prompt": "abc", "best_of": True})
    refused(client, CHAT, {"messages": MESSAGES, "store": 0})


def test_fields_that_say_who_asks(client: TestClient) -> None:
    who = {"user": "u", "metadata": {"k": "v"}, "store": False, "safety_identifier": "s", "prompt_cache_key": "p"}
    assert client.post(CHAT, json={"messages": MESSAGES, **who}).status_code == 200


def test_over_long_prompt_is_refused_while_the_engine_is_busy() -> None:
    fake = make_fake(is_open=False)
    with TestClient(fake.app) as client:
        client.portal.call(fake.service.bridge.booted)
        client.portal.start_task_soon(lambda: _post_forever(fake))
        error = refused(client, COMPLETIONS, {"prompt": "a" * 300, "max_tokens": 4})
        assert error["param"] == "prompt"
        for number in ("300", "304", "256"):
            assert number in error["message"]
        error = refused(client, COMPLETIONS, {"prompt": "a" * 250, "max_tokens": 100})
        assert (error["param"], "at most 6 tokens" in error["message"]) == ("max_tokens", True)
        assert fake.valve.n_steps == 0
        fake.valve.open.set()


async def _post_forever(fake: Fake) -> None:
    """Keep the engine inside a step."""
    from tests.unit.server.fakes import Call

    await Call(fake.app, COMPLETIONS, {"prompt": "abc"}).run()


def test_prompt_larger_than_the_pool() -> None:
    fake = make_fake(n_pages=20, context_len=256)
    with TestClient(fake.app) as client:
        client.portal.call(fake.service.bridge.booted)
        error = refused(client, COMPLETIONS, {"prompt": "a" * 20, "max_tokens": 4})
        assert "the KV pool holds 20: at most 19" in error["message"]
        chat = client.post(CHAT, json={"messages": [{"role": "user", "content": "abc"}], "ignore_eos": True})
        assert chat.json()["usage"]["completion_tokens"] == 16


def test_unknown_route_and_method(client: TestClient) -> None:
    reply = client.get("/v2/nothing")
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
    assert "/v2/nothing" in reply.json()["error"]["message"]
    reply = client.get(CHAT)
    assert (reply.status_code, reply.json()["error"]["code"]) == (405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"


def test_body_too_large(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinpool.server.protocol.MAX_BODY_BYTES", 1000)
    body = json.dumps({"prompt": "a" * 1000}).encode()
    assert client.post(COMPLETIONS, content=body).status_code == 413
    reply = client.post(COMPLETIONS, content=(body[i : i + 100] for i in range(0, len(body), 100)))
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")


def test_api_key() -> None:
    fake = make_fake(options=ServeOptions(api_key="s3cret", enable_metrics=True))
    with TestClient(fake.app) as client:
        client.portal.call(fake.service.bridge.booted)
        assert client.get("/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/server_info", "/nothing"):
            reply = client.get(path)
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        for given in ("s3cret", "Bearer s3cre", "Bearer s3cret2", "bearer s3cret", "Bearer \xe9"):
            header = {"Authorization": given.encode("latin-1")}
            assert client.get("/v1/models", headers=header).status_code == 401
        good = {"Authorization": "Bearer s3cret"}
        assert client.get("/v1/models", headers=good).status_code == 200
        assert client.get("/nothing", headers=good).status_code == 404
        assert "s3cret" not in client.get("/server_info", headers=good).text


def test_refusals_are_counted(client: TestClient, fake: Fake) -> None:
    client.post(COMPLETIONS, json={"prompt": ""})
    client.post(COMPLETIONS, json={"prompt": "abc", "model": "x"})
    counted = fake.service.meters.values("twinpool:refused_requests_total")
    assert counted == {("invalid_request_error",): 1.0, ("model_not_found",): 1.0}
