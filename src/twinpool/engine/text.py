"""Text to tokens and back: a tokenizer with its chat template, and decoding of a token stream as it comes.

The tokenizer is the checkpoint's own (`tokenizer.json` through the `tokenizers` library, the chat template through
transformers).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from twinpool.errors import BadRequest, ModelError

_REPLACEMENT = "\ufffd"

Message = Mapping[str, object]


class Tokenizer:
    """Encode, decode, render chats. Safe to call from several threads: nothing in it changes after loading."""

    def __init__(self, hf_tokenizer: Any, *, eos_token_ids: frozenset[int]) -> None:
        self.hf = hf_tokenizer
        self.eos_token_ids = eos_token_ids
        self._fast = hf_tokenizer.backend_tokenizer

    @staticmethod
    def load(folder: Path, *, config_folder: Path | None = None) -> Tokenizer:
        """Read the tokenizer of a checkpoint folder; end tokens come from `config_folder` (default: the same folder).

        Raises ModelError if there is no tokenizer that transformers can read.
        """
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        # AutoTokenizer looks up the class first, which may rebuild a large vocabulary; the file alone says all that is
        # needed.
        loader = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
        try:
            hf_tokenizer = loader.from_pretrained(str(folder))
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(
                f"{folder} holds no tokenizer that can be read: {error} (flag --tokenizer-path)."
            ) from error
        if not hasattr(hf_tokenizer, "backend_tokenizer"):
            raise ModelError(
                f"{folder} has no tokenizer.json and its tokenizer has no fast form (flag --tokenizer-path)."
            )
        eos = _eos_of_folder(config_folder or folder)
        if not eos and hf_tokenizer.eos_token_id is not None:
            eos = frozenset({int(hf_tokenizer.eos_token_id)})
        return Tokenizer(hf_tokenizer, eos_token_ids=eos)

    @cached_property
    def longest_token_chars(self) -> int:
        """No token stands for more characters of a text than this (a normalizer may have joined up to three)."""
        longest = max(map(len, self._fast.get_vocab(with_added_tokens=True)))
        return longest if self._fast.normalizer is None else 3 * longest

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work."""
        return bool(self.hf.chat_template)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special_tokens: add what the tokenizer adds around a plain prompt (bos and the like)."""
        return list(self._fast.encode(text, add_special_tokens=special_tokens).ids)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence of token ids."""
        return str(self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token: int) -> str:
        """One token's own text, special tokens shown (for log-probability reports)."""
        return self.decode([token], skip_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[object] | None = None,
        template_options: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text of a conversation. Raises BadRequest if there is no template or the template refuses the
        messages.
        """
        if not self.has_chat_template:
            raise BadRequest("this model has no chat template: use /v1/completions.", field="messages")
        if not messages:
            raise BadRequest("the conversation is empty: at least one message is needed.", field="messages")
        plain = [{**message, "content": flatten_content(message.get("content"))} for message in messages]
        try:
            text = self.hf.apply_chat_template(
                plain,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                tools=list(tools) if tools else None,
                **(template_options or {}),
            )
        except Exception as error:  # A template is a program, and it may fail in any way a program can.
            raise BadRequest(f"the chat template refuses these messages: {error}.", field="messages") from error
        return str(text)

    def encode_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation; the template has already written the special tokens."""
        return self.encode(
            self.render_chat(messages, add_generation_prompt=add_generation_prompt), special_tokens=False
        )


def flatten_content(content: object) -> str:
    """A message's content as text: a string, nothing, or parts of type 'text' joined by line breaks. Raises BadRequest
    otherwise.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRequest(
            f"a message's content is {type(content).__name__}: it must be a string or a list of parts.",
            field="messages",
        )
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part["text"], str):
            raise BadRequest(f"a content part has type '{kind}': this model reads text only.", field="messages")
        texts.append(part["text"])
    return "\n".join(texts)


def _eos_of_folder(folder: Path) -> frozenset[int]:
    """End tokens named by generation_config.json, else by config.json (its text part included)."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        config = json.loads(path.read_text())
        found = config.get("eos_token_id")
        if found is None:
            found = config.get("text_config", {}).get("eos_token_id")
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()


class IncrementalDecoder:
    """Text of a growing token sequence; what it returns, joined, is the decoding of the whole sequence.

    A window of tokens is decoded again with each new one, because a token's text may hang on its neighbours (leading
    spaces, characters of several bytes). The window starts anew wherever the text so far is complete.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._n_old = 0
        self._old_text = ""
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that became certain with one more token; may be empty."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window, skip_special_tokens=self._skip)
        # Replacement characters at the end may be the first bytes of a character whose rest is still to come.
        certain = text.rstrip(_REPLACEMENT)
        news = certain[self._shown :]
        self._shown = max(self._shown, len(certain))
        if len(certain) == len(text) and len(text) > len(self._old_text):
            self._window = self._window[self._n_old :]
            self._n_old = len(self._window)
            self._old_text = self._tokenizer.decode(self._window, skip_special_tokens=self._skip)
            self._shown = len(self._old_text)
        return news

    def flush(self) -> str:
        """What was held back; the sequence ends here."""
        text = self._tokenizer.decode(self._window, skip_special_tokens=self._skip)
        news = text[self._shown :]
        self._shown = len(text)
        return news


class StopFinder:
    """Finds the first stop string in a text that comes in pieces, and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Text that is certain not to belong to a stop string. Once `matched` is set everything after it is dropped.

        may_stop False: stop strings that end in this piece do not count (min_tokens is not reached yet).
        """
        if self.matched is not None:
            return ""
        self._held += text
        if may_stop:
            # The one that is complete first wins, so that the answer does not hang on how the text was cut.
            ends = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
            if ends:
                _, at, self.matched = min(ends)
                certain, self._held = self._held[:at], ""
                return certain
        keep = self._longest_beginning()
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return certain

    def flush(self) -> str:
        """What was held back; no more text comes."""
        rest, self._held = self._held, ""
        return rest

    def _longest_beginning(self) -> int:
        """Length of the longest end of the held text that is a proper beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[len(self._held) - length :]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class StreamDecoder:
    """A request's tokens to the text its client sees: decoded as they come, cut at the first stop string.

    `stopped` is the stop string that was found, or None. Stop strings that are complete before `min_tokens` tokens do
    not count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._finder = StopFinder(stop)
        self._left = min_tokens

    @property
    def stopped(self) -> str | None:
        """The stop string found, if any."""
        return self._finder.matched

    def push(self, tokens: Iterable[int]) -> str:
        """New text after these tokens (may be empty); nothing more once `stopped`."""
        news: list[str] = []
        for token in tokens:
            if self.stopped is not None:
                break
            self._left -= 1
            news.append(self._finder.push(self._decoder.push(token), may_stop=self._left <= 0))
        return "".join(news)

    def flush(self) -> str:
        """The rest, at the end of the request: held-back bytes and beginnings of stop strings that did not come."""
        if self.stopped is not None:
            return ""
        return self._finder.push(self._decoder.flush(), may_stop=self._left <= 0) + self._finder.flush()
