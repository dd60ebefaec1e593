"""The shapes of OpenAI's replies: choices, chunks, log-probabilities."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twinpool.engine.core import Output
from twinpool.engine.text import Tokenizer
from twinpool.request import Finish
from twinpool.server.answer import Answer
from twinpool.step import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What stands at the head of every object of one reply."""

    id: str
    created_unix_s: int
    model: str
    is_chat: bool
    tokenizer: Tokenizer
    wants_logprobs: bool

    @staticmethod
    def new_id(*, is_chat: bool) -> str:
        """A fresh reply id."""
        return ("chatcmpl-" if is_chat else "cmpl-") + uuid.uuid4().hex

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created_unix_s, "model": self.model}

    def whole(self, answers: Sequence[Answer], *, prefixes: Sequence[str], usage: dict[str, Any]) -> dict[str, Any]:
        """The reply without streaming. prefixes: text to put before each answer (an echoed prompt, or nothing)."""
        choices = []
        for index, (answer, prefix) in enumerate(zip(answers, prefixes, strict=True)):
            text = prefix + answer.text
            message: dict[str, Any]
            if self.is_chat:
                message = {"message": {"role": "assistant", "content": text, "refusal": None}}
            else:
                message = {"text": text}
            logprobs = self._logprobs(answer.logprobs, offset=0)
            reason = finish_reason(answer.finish)
            choices.append({"index": index, **message, "logprobs": logprobs, "finish_reason": reason})
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": usage, "system_fingerprint": None}

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat choice: who speaks."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None, None)

    def echo(self, index: int, prompt: str) -> dict[str, Any]:
        """The first chunk of a completion that repeats its prompt."""
        return self._chunk(index, {"text": prompt}, None, None)

    def chunk(self, index: int, output: Output, *, offset: int) -> dict[str, Any] | None:
        """One output as a chunk; None if it holds nothing to show yet. offset: characters said before it."""
        if not output.text and not (self.wants_logprobs and output.logprobs) and output.finish is None:
            return None
        said: dict[str, Any]
        if not self.is_chat:
            said = {"text": output.text}
        else:
            said = {"delta": {"content": output.text} if output.text else {}}
        return self._chunk(index, said, self._logprobs(output.logprobs, offset=offset), finish_reason(output.finish))

    def closing(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The usage chunk that ends a stream with include_usage."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {**self._head(kind), "choices": [], "usage": usage}

    def _chunk(
        self, index: int, said: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head(kind), "choices": [choice], "usage": None}

    def _logprobs(self, logprobs: Sequence[TokenLogprob], *, offset: int) -> dict[str, Any] | None:
        if not self.wants_logprobs or not logprobs:
            return None
        return self._chat_logprobs(logprobs) if self.is_chat else self._completion_logprobs(logprobs, offset)

    def _chat_logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = [
            {**self._token(item.token, item.logprob), "top_logprobs": [self._token(*pair) for pair in item.top]}
            for item in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.tokenizer.token_text(token)
        # A token that is part of a character has no text of its own.
        in_bytes = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": in_bytes}

    def _completion_logprobs(self, logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        texts = [self.tokenizer.token_text(item.token) for item in logprobs]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [item.logprob for item in logprobs],
            "top_logprobs": [{self.tokenizer.token_text(t): lp for t, lp in item.top} for item in logprobs],
            "text_offset": offsets,
        }


def finish_reason(finish: Finish | None) -> str | None:
    """'stop', 'length', or None while it goes on."""
    return None if finish is None else finish.reason
