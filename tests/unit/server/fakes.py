"""A tiny engine: the real Engine over the symbolic memory of tests/worlds.py, eleven letters, a valve on its steps."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from tests.worlds import VOCAB, FakeExecutor, World, expected_output, make_world
from twinpool.clock import WallClock
from twinpool.config.options import ServeOptions
from twinpool.engine.core import Engine
from twinpool.errors import BadRequest
from twinpool.memory.ledger import LedgerLine
from twinpool.server.app import build_app
from twinpool.server.service import Service
from twinpool.step import Order, StepPlan, StepResult, TokenLogprob

LETTERS = "_abcdefghij"  # token i is letter i; token 0 ends a text


class LetterTokenizer:
    """One letter a token; the end token has no text unless asked for."""

    has_chat_template = True

    longest_token_chars = 1000  # far above what any test sends as too long

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        if not set(text) <= set(LETTERS):
            raise AssertionError(f"'{text}' has letters outside {LETTERS}")
        return [LETTERS.index(letter) for letter in text]

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(LETTERS[i] for i in ids if i or not skip_special_tokens)

    def token_text(self, token: int) -> str:
        return LETTERS[token]

    def render_chat(self, messages: list[dict[str, Any]], *, template_options: dict[str, Any] | None = None) -> str:
        texts = []
        for message in messages:
            content = message["content"]
            if content == "refuse":
                raise BadRequest("the chat template refuses these messages: no.", field="messages")
            texts.append(content if isinstance(content, str) else "".join(part["text"] for part in content))
        return "_".join(texts) + "_" + (template_options or {}).get("suffix", "")


@dataclass
class Valve:
    """Holds steps back (closed) or slows them down; makes a step fail."""

    open: threading.Event = field(default_factory=threading.Event)
    delay_s: float = 0.0
    raise_at: Exception | None = None
    n_steps: int = 0


class ValveExecutor:
    """FakeExecutor whose results wait for the valve; it also gives log-probabilities."""

    def __init__(self, inner: FakeExecutor, valve: Valve) -> None:
        self._inner = inner
        self._valve = valve
        self.closed = False

    def submit(self, plan: StepPlan) -> SimpleNamespace:
        handle = self._inner.submit(plan)

        def result() -> StepResult:
            self._valve.open.wait()
            time.sleep(self._valve.delay_s)
            self._valve.n_steps += 1
            done = handle.result()
            if self._valve.raise_at is not None:
                raise self._valve.raise_at
            # A made-up but exact report: the chosen token at -0.5, its successor at -1.5.
            logprobs = tuple(
                None if token is None else TokenLogprob(token, -0.5, ((token, -0.5), ((token + 1) % VOCAB, -1.5)))
                for token in done.tokens
            )
            return replace(done, logprobs=logprobs)

        return SimpleNamespace(result=result)

    def settle(self, orders: tuple[Order, ...]) -> None:
        for order in orders:
            self._inner._obey(order)

    def close(self) -> None:
        self.closed = True


@dataclass(frozen=True)
class FakeResolved:
    model_path: str | None = "models/tiny"
    tokenizer_path: str | None = None
    random_seed: int = 0
    page_size: int = 1
    mamba_full_memory_ratio: float = 0.9
    max_mamba_cache_size: int | None = None
    max_running_requests: int | None = None
    api_key: str | None = None
    hicache_write_policy: str = "write_through"
    origins: dict[str, str] = field(default_factory=dict)


@dataclass
class Fake:
    """One fake server: its app, and the parts a test looks at or turns."""

    service: Service
    valve: Valve
    world: World
    app: Any


def make_fake(*, options: ServeOptions | None = None, boot: Any = None, is_open: bool = True, **world: Any) -> Fake:
    """A server over a tiny world. `world` goes to make_world; boot replaces what boots the engine."""
    options = options or ServeOptions(enable_metrics=True, enable_cache_report=True)
    valve = Valve()
    if is_open:
        valve.open.set()
    made = make_world(**{"context_len": 256, "n_pages": 256, "strategy": "no_buffer", "overlap": False, **world})
    made.scheduler.book.clock = WallClock()

    def boot_engine() -> Engine:
        facts = SimpleNamespace(
            options=options, resolved=FakeResolved(api_key=options.api_key),
            context_len=made.scheduler.shape.context_len,
            ledger=SimpleNamespace(
                kv_pool_bytes=1 << 30, conv_pool_bytes=1 << 28, ssm_pool_bytes=1 << 28, extra_pool_bytes=0,
                kv_tokens=24, logical_tokens=24, max_mamba_cache_size=4,
                lines=(LedgerLine("weights", 7, "measured"),),
            ),
            spec=SimpleNamespace(vocab_size=VOCAB, model_type="tiny", architecture="TinyForCausalLM"),
            model_name="models/tiny", eos_token_ids=frozenset({0}), weight_bytes=1 << 28,
            startup_available_bytes=1 << 32,
        )  # fmt: skip
        executor = ValveExecutor(made.executor, valve)
        return Engine(
            facts=facts, scheduler=made.scheduler, executor=executor, tokenizer=LetterTokenizer(), clock=WallClock()
        )

    service = Service(options=options, boot=boot or boot_engine)
    return Fake(service, valve, made, build_app(service))


def said(prompt: str, max_tokens: int, *, ignore_eos: bool = False) -> str:
    """The text a request must get."""
    tokens = expected_output([LETTERS.index(letter) for letter in prompt], max_tokens, ignore_eos=ignore_eos)
    return "".join(LETTERS[token] for token in tokens if token)


def n_said(prompt: str, max_tokens: int) -> int:
    """The tokens a request must get, the end token included."""
    return len(expected_output([LETTERS.index(letter) for letter in prompt], max_tokens))


@dataclass
class Call:
    """One ASGI request by hand, so that a test can leave in the middle."""

    app: Any
    path: str
    body: dict[str, Any] | None = None
    method: str = "POST"
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    received: bytes = b""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    got_some: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> Call:
        """The whole exchange."""
        sent = False
        raw = b"" if self.body is None else json.dumps(self.body).encode()

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": raw, "more_body": False}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            else:
                self.received += message.get("body", b"")
                self.got_some.set()

        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": self.method,
            "scheme": "http", "path": self.path, "raw_path": self.path.encode(), "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json")], "client": ("c", 1), "server": ("s", 2), "state": {},
        }  # fmt: skip
        await self.app(scope, receive, send)
        return self

    def json(self) -> Any:
        return json.loads(self.received)

    def events(self) -> list[Any]:
        """The data of each event; the last one is '[DONE]' in a stream that ended well."""
        return parse_events(self.received.decode())


def parse_events(text: str) -> list[Any]:
    """The data of each server-sent event."""
    assert text.endswith("\n\n")
    parts = text.removesuffix("\n\n").split("\n\n")
    assert all(part.startswith("data: ") for part in parts)
    data = [part.removeprefix("data: ") for part in parts]
    return [item if item == "[DONE]" else json.loads(item) for item in data]
