"""The offline door: prompts in, completions out, over the same engine as the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from twinpool.config.flags import options_from_keywords
from twinpool.engine.core import Engine
from twinpool.engine.text import Message
from twinpool.errors import BadRequest
from twinpool.request import Finish, Request, Reuse, SamplingParams
from twinpool.step import TokenLogprob

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer.

    token_ids: all output tokens, the one that ended it included; text: without end token and stop string.
    finish_reason: 'stop', 'length' or 'error' (then `error` says what happened). logprobs: one a token if asked for,
    else empty. cached_tokens: prompt tokens that were not computed again; reuse: why not more.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...]
    prompt_tokens: int
    cached_tokens: int
    reuse: Reuse
    stop_reason: int | str | None = None
    error: str = ""


@dataclass(slots=True)
class _Collected:
    """What has come of one request so far."""

    request: Request
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None

    def completion(self) -> Completion:
        """The whole answer; the request has ended."""
        assert self.finish is not None
        return Completion(
            text="".join(self.texts),
            token_ids=tuple(self.tokens),
            finish_reason=self.finish.reason,
            logprobs=tuple(self.logprobs),
            prompt_tokens=self.request.prompt_len,
            cached_tokens=self.request.reuse.reused,
            reuse=self.request.reuse,
            stop_reason=self.finish.matched,
            error=self.finish.message if self.finish.reason == "error" else "",
        )


class LLM:
    """A model with its two pools. Options are the server's flags without dashes, such as page_size=16.

    The prefix cache lives as long as the object: a prompt that begins like an earlier one resumes from it. Use it from
    one thread, and close it (or use `with`).
    """

    def __init__(self, model_path: str | None = None, *, poison_freed: bool = False, **options: object) -> None:
        """Load a model (default: the demo model that ships with twinpool) and divide the memory.

        poison_freed: fill freed pages and slots with NaN, so that a read of freed memory cannot go unseen (for tests).
        Raises ConfigError for an option that is unknown or wrong, ModelError, MemoryRefusal.
        """
        self.engine = Engine.boot(
            options_from_keywords({"model_path": model_path, **options} if model_path is not None else options),
            poison_freed=poison_freed,
        )

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the engine's thread."""
        self.engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete prompts (texts or token ids; one or many), all in one batch as far as memory allows.

        sampling_params: one for all, one for each prompt, or None for the defaults. Returns the completions in the
        order of the prompts, `n` for each. Raises BadRequest before anything runs if one of the requests is wrong.
        """
        batch = _as_batch(prompts)
        ids = [self.engine.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in batch]
        return self._run(ids, sampling_params)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answer one conversation (a list of messages with 'role' and 'content') or several; like `generate`."""
        if not conversations:
            return []
        many = [conversations] if isinstance(conversations[0], dict) else conversations
        return self._run([self.engine.tokenizer.encode_chat(c) for c in many], sampling_params)  # type: ignore[arg-type]

    def flush_cache(self) -> None:
        """Forget every cached prefix."""
        done = self.engine.flush_cache()
        assert done, "nothing runs between two calls"

    def _run(
        self, prompts: Sequence[Sequence[int]], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Completion]:
        """Queue everything, step until it is done."""
        params = _params_of(sampling_params, len(prompts))
        requests: list[Request] = []
        try:
            for prompt, asked in zip(prompts, params, strict=True):
                requests += self.engine.add(list(prompt), asked)
            collected = self._collect(requests)
        except BaseException:
            # A refused prompt, or the user's Ctrl-C: what is queued must not come back with the next call.
            for request in requests:
                self.engine.abort(request.rid)
            while self.engine.has_work:
                self.engine.step()
            raise
        return [one.completion() for one in collected]

    def _collect(self, requests: Sequence[Request]) -> list[_Collected]:
        collected = {request.rid: _Collected(request) for request in requests}
        while self.engine.has_work:
            for output in self.engine.step():
                one = collected[output.request.rid]
                one.texts.append(output.text)
                one.tokens += output.tokens
                one.logprobs += output.logprobs
                one.finish = output.finish
        return list(collected.values())


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt as a batch of one."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _params_of(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    """One SamplingParams for each prompt. Raises BadRequest if the numbers differ."""
    if given is None:
        return [SamplingParams()] * count
    if isinstance(given, SamplingParams):
        return [given] * count
    if len(given) != count:
        raise BadRequest(f"{len(given)} sampling_params for {count} prompts: give one, or one for each.")
    return given
