"""What the routes share: the bridge, the metrics, and the way from a body's prompts to their streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from twinpool.config.options import ServeOptions
from twinpool.engine.core import Engine
from twinpool.errors import BadRequest, ShuttingDown
from twinpool.request import Request, SamplingParams
from twinpool.sched.admission import check_can_ever_fit
from twinpool.server.bridge import Bridge, Prompt, State, Stream
from twinpool.server.http_errors import EngineDown, ModelNotFound, NotReady
from twinpool.server.meters import Meters
from twinpool.server.request_log import RequestLog
from twinpool.server.stats import EngineStats, declare_labels, set_constants, set_gauges

# Tokenising this many characters takes about a millisecond; longer prompts are tokenised beside the event loop.
_INLINE_CHARACTERS = 2048
_ANY_MODEL = "default"
# One body may hold millions of prompts; each sequence costs memory and time on the event loop before it is queued.
MAX_SEQUENCES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a route asks for.

    prompts: texts or token ids. max_tokens None: as much as fits. special_tokens: as Tokenizer.encode.
    """

    prompts: Sequence[str | list[int]]
    params: SamplingParams
    max_tokens: int | None
    priority: int = 0
    special_tokens: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What came of an Ask: `streams` has params.n of them for each prompt, side by side."""

    prompts: tuple[Prompt, ...]
    streams: tuple[Stream, ...]
    n: int

    def cancel(self) -> None:
        """End what still runs; harmless afterwards."""
        for stream in self.streams:
            stream.cancel()


class Service:
    """One server's state. `options` are known at once, everything else when the engine is ready.

    Raises ConfigError for a --request-log that cannot be written.
    """

    def __init__(self, *, options: ServeOptions, boot: Callable[[], Engine]) -> None:
        self.options = options
        self.meters = Meters()
        self.stats = EngineStats(self.meters)
        self.request_log = RequestLog(Path(options.request_log)) if options.request_log else None
        self.bridge = Bridge(boot=boot, on_ready=self._on_ready)
        self.created_unix_s = int(time.time())
        declare_labels(self.meters)

    def _on_ready(self, engine: Engine) -> None:
        engine.observers.append(self.stats)
        set_constants(self.meters, engine)
        if self.request_log is not None:
            self.request_log.start(page_size=engine.scheduler.shape.page_size, clock=engine.clock)
            engine.observers.append(self.request_log)

    def close(self) -> None:
        """Finish the request log; call it when the engine has stopped."""
        if self.request_log is not None:
            self.request_log.close()

    @property
    def engine(self) -> Engine:
        """The engine. Raises NotReady before it is."""
        return self.bridge.engine

    @property
    def model_name(self) -> str:
        """The served name. Raises NotReady before the engine is ready."""
        return self.engine.facts.model_name

    def check_ready(self) -> None:
        """Raise NotReady, ShuttingDown or EngineDown unless requests are taken. Touches nothing of the engine's."""
        state = self.bridge.state
        if state is State.BOOTING:
            raise NotReady("the model is still being loaded: try again in a moment.")
        if state is State.FAILED:
            raise EngineDown("the engine has failed; the reason is in the server's log, and only a restart helps.")
        if state is not State.READY:
            raise ShuttingDown("the server is shutting down and takes no new requests.")

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound if a request names another model; no name or 'default' means the one that is served."""
        served = self.model_name
        # A path's last part is what people type.
        if name not in (None, _ANY_MODEL, served, served.rstrip("/").rsplit("/", 1)[-1]):
            raise ModelNotFound(f"the model '{name}' is not served here: use '{served}', or leave the field out.")

    def refresh_gauges(self) -> None:
        """Bring the gauges up to date; they stay 0 until the engine is ready."""
        if self.bridge.state is not State.BOOTING:
            set_gauges(self.meters, self.engine, self.stats)

    def count_refusal(self, code: str) -> None:
        """One HTTP request was answered with an error."""
        self.meters.add("twinpool:refused_requests_total", 1, code)

    async def submit(self, ask: Ask) -> Job:
        """Tokenise, check and queue. Raises BadRequest at once for what can never fit, else as Bridge.submit."""
        self.check_ready()
        n_sequences = len(ask.prompts) * ask.params.n
        if n_sequences > MAX_SEQUENCES:
            raise BadRequest(
                f"the prompt has {len(ask.prompts)} parts and n is {ask.params.n}, {n_sequences} sequences in all, but "
                f"one request may ask for {MAX_SEQUENCES}: send several requests.",
                field="prompt",
            )
        prompts = [await self._prepare(prompt, ask) for prompt in ask.prompts]
        streams = await self.bridge.submit(prompts)
        self.meters.add("sglang:num_requests_total", len(streams))
        return Job(tuple(prompts), tuple(streams), ask.params.n)

    async def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Token ids of a text, off the event loop if it is long."""
        tokenizer = self.engine.tokenizer
        if len(text) <= _INLINE_CHARACTERS:
            return tokenizer.encode(text, special_tokens=special_tokens)
        return await asyncio.to_thread(tokenizer.encode, text, special_tokens=special_tokens)

    def _check_length(self, text: str) -> None:
        """Refuse at once what takes seconds to tokenise and is too long however it is cut. Raises BadRequest."""
        context_len = self.engine.facts.context_len
        most_characters = context_len * self.engine.tokenizer.longest_token_chars
        if len(text) > most_characters:
            raise BadRequest(
                f"the prompt has {len(text)} characters, and no more than {most_characters} can fit the context of "
                f"{context_len} tokens: shorten the prompt (server flag --context-length).",
                field="prompt",
            )

    async def _prepare(self, given: str | list[int], ask: Ask) -> Prompt:
        """One prompt as tokens, with the output length it gets. Raises BadRequest if it can never fit."""
        if isinstance(given, str):
            self._check_length(given)
        ids = await self.encode(given, special_tokens=ask.special_tokens) if isinstance(given, str) else given
        if not ids:
            raise BadRequest("the prompt is empty: at least one token is needed.", field="prompt")
        facts, book = self.engine.facts, self.engine.scheduler.book
        ask.params.validate(vocab_size=facts.spec.vocab_size)
        if max(ids) >= facts.spec.vocab_size:
            raise BadRequest(
                f"the prompt names token {max(ids)}, but the vocabulary ends at {facts.spec.vocab_size - 1}.",
                field="prompt",
            )
        max_tokens = ask.max_tokens
        if max_tokens is None:
            room_tokens = min(facts.context_len, book.pages.count * book.shape.page_size)
            max_tokens = max(1, room_tokens - len(ids))
        params = replace(ask.params, max_tokens=max_tokens)
        tokens = np.asarray(ids, np.int32)
        # The scheduler's own rule, asked from here: it reads constants only, and the refusal need not wait for a step.
        check_can_ever_fit(book, Request(rid=0, tokens=tokens, prompt_len=len(ids), params=params))
        return Prompt(tokens, params, ask.priority)
