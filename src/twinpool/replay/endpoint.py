"""A live OpenAI-compatible endpoint, asked for answers of a fixed length to prompts of token ids, with the time of each event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from twinpool.clock import Clock, WallClock
from twinpool.errors import ConfigError, TwinpoolError

_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """When a request was sent, when each event with a part of its answer came (seconds, one clock), and the tokens of the answer."""

    sent_s: float
    events_s: tuple[float, ...]
    output_tokens: int


class Endpoint(Protocol):
    """What is measured."""

    def ask(self, prompts: Sequence[list[int]], *, output_tokens: int) -> list[Answer]:
        """Send all prompts (token ids) at once and wait for all answers, each of so many tokens. Raises TwinpoolError."""
        ...


class HttpEndpoint:
    """An endpoint by its address, with or without /v1. One event loop and one pool of connections for all of its life.

    model: its served name, or None for the first of /v1/models. timeout_s: the longest silence that is waited for.
    Raises ConfigError for an address that is none, TwinpoolError for one that does not answer as it should.
    """

    def __init__(
        self, url: str, *, model: str | None = None, api_key: str | None = None, timeout_s: float = 60.0, clock: Clock | None = None
    ) -> None:  # fmt: skip
        import httpx  # slow to import, and only a measurement needs it

        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"'{url}' is no address: give one such as http://127.0.0.1:30000.")
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._clock = clock or WallClock()
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(headers=headers, timeout=timeout_s, limits=httpx.Limits(max_connections=None))
        self._runner = asyncio.Runner()
        self._failures = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError)
        self.context_tokens: int | None = None
        try:
            self._model = self._describe(model)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close its connections."""
        with self._runner:
            self._runner.run(self._client.aclose())

    def ask(self, prompts: Sequence[list[int]], *, output_tokens: int) -> list[Answer]:
        """Send all prompts (token ids) at once and wait for all answers. Raises TwinpoolError."""
        return self._runner.run(self._ask_all(prompts, output_tokens))

    def _describe(self, model: str | None) -> str:
        """The name of the model to ask for; context_tokens is filled where the endpoint says it."""
        path = f"{self._base}/models"
        try:
            response = self._runner.run(self._client.get(path))
        except self._failures as error:
            raise self._unreachable(error) from error
        self._check(response.status_code, response.text, path)
        try:
            listed = {entry["id"]: entry for entry in response.json()["data"]}
            first = next(iter(listed))
        except (ValueError, KeyError, TypeError, StopIteration) as error:
            raise TwinpoolError(f"{path} lists no model: give the address of an OpenAI-compatible server.") from error
        length = listed.get(model or first, {}).get("max_model_len")
        self.context_tokens = length if isinstance(length, int) else None
        return model or str(first)

    async def _ask_all(self, prompts: Sequence[list[int]], output_tokens: int) -> list[Answer]:
        try:
            return list(await asyncio.gather(*(self._ask(prompt, output_tokens) for prompt in prompts)))
        except self._failures as error:
            raise self._unreachable(error) from error

    async def _ask(self, prompt: list[int], output_tokens: int) -> Answer:
        path = f"{self._base}/completions"
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        events_s: list[float] = []
        answered_tokens = 0
        sent_s = self._clock.now_s()
        async with self._client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                self._check(response.status_code, (await response.aread()).decode(errors="replace"), path)
            if "text/event-stream" not in response.headers.get("content-type", ""):
                raise TwinpoolError(f"{path} does not stream: it must answer stream=true with server-sent events.")
            async for line in response.aiter_lines():
                event = _event(line, path)
                if event.get("choices"):
                    events_s.append(self._clock.now_s())
                answered_tokens = (event.get("usage") or {}).get("completion_tokens", answered_tokens)
        if not events_s:
            raise TwinpoolError(f"{path} ended its answer without a token.")
        return Answer(sent_s, tuple(events_s), answered_tokens or len(events_s))

    def _check(self, status: int, text: str, path: str) -> None:
        """Raise TwinpoolError for a status that is not 200."""
        if status == 401:
            raise TwinpoolError(f"{path} asks for a key: give it with --api-key.")
        if status == 404:
            raise TwinpoolError(f"{path} does not exist there: give the address of an OpenAI-compatible server.")
        if status != 200:
            raise TwinpoolError(f"{path} answered {status}: {' '.join(text.split())[:_SHOWN]}")

    def _unreachable(self, error: Exception) -> TwinpoolError:
        reason = str(error) or type(error).__name__
        return TwinpoolError(f"{self._base} does not answer ({reason}): is the server running, and is it this address?")


def _event(line: str, path: str) -> dict[str, Any]:
    """The object of a line of a stream; empty for lines without one. Raises TwinpoolError for an error event."""
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return {}
    try:
        event = json.loads(data)
    except ValueError as error:
        raise TwinpoolError(f"{path} sent an event that is no JSON: {data[:_SHOWN]}") from error
    if not isinstance(event, dict) or event.get("error"):
        raise TwinpoolError(f"{path} failed in the middle of an answer: {data[:_SHOWN]}")
    return event
