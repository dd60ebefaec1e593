"""Between the event loop and the engine's thread.

Event loop → engine: commands in a queue, run between two steps. Engine → event loop: after each step, one call that
puts every output into the stream of its request. The event loop never waits for a step, and every submitted request
gets an answer: its outputs, or the error that kept it from having them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from twinpool.engine.core import Engine, Output
from twinpool.errors import RankLost, RequestError, ShuttingDown
from twinpool.request import Int32Array, Request, SamplingParams
from twinpool.server.http_errors import EngineDown, NotReady

log = logging.getLogger("twinpool.server")

T = TypeVar("T")


class State(Enum):
    """Where the engine stands, as /health reports it."""

    BOOTING = "booting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt to submit; params.n sequences come of it. tokens: int32 [prompt tokens]."""

    tokens: Int32Array
    params: SamplingParams
    priority: int = 0


class Stream:
    """The outputs of one sequence, on the event loop. Leaving it early (`cancel`) ends the request in the engine."""

    def __init__(self, request: Request, cancel: Callable[[int], None]) -> None:
        self.request = request
        self.ended = False
        self._cancel = cancel
        self._queue: asyncio.Queue[Output | RequestError] = asyncio.Queue()

    def put(self, item: Output | RequestError) -> None:
        """Event loop only: the next output, or what ended the request."""
        self._queue.put_nowait(item)

    async def outputs(self) -> AsyncIterator[Output]:
        """All outputs up to the one that has the finish. Raises RequestError if the engine failed."""
        while not self.ended:
            item = await self._queue.get()
            if isinstance(item, RequestError):
                self.ended = True
                raise item
            self.ended = item.finish is not None
            yield item

    def cancel(self) -> None:
        """Nobody reads this any more. Harmless once it has ended."""
        if not self.ended:
            self.ended = True
            self._cancel(self.request.rid)


@dataclass(frozen=True, slots=True, eq=False)
class _Command:
    """Something to do between two steps, and whom to tell what came of it (None: nobody)."""

    run: Callable[[], object]
    future: asyncio.Future[Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Flush:
    """A flush that waits for idleness until `deadline_s` of the engine's clock."""

    future: asyncio.Future[Any]
    deadline_s: float


_LATER = object()  # what a command returns whose future is answered by somebody else


class Bridge:
    """Owns the engine's thread. `on_ready` runs in it once, between boot and the first step."""

    def __init__(self, *, boot: Callable[[], Engine], on_ready: Callable[[Engine], None]) -> None:
        self._boot = boot
        self._on_ready = on_ready
        self._lock = threading.Lock()  # guards _state against _commands: nothing is queued after the thread's last look
        self._state = State.BOOTING
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="twinpool-engine", daemon=True)
        self._engine: Engine | None = None
        self.failure: BaseException | None = None
        # Of the engine's thread only:
        self._streams: dict[int, Stream] = {}
        self._flushes: list[_Flush] = []
        # Of the event loop only:
        self._unanswered: set[asyncio.Future[Any] | Stream] = set()
        self._quiet = asyncio.Event()
        self._settled = asyncio.Event()
        self._rank_lost = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def state(self) -> State:
        """Where the engine stands; may be read from any thread."""
        return self._state

    @property
    def engine(self) -> Engine:
        """The engine, for what may be read from any thread. Raises NotReady or EngineDown."""
        if self._engine is None:
            if self._state is State.FAILED:
                raise EngineDown("the engine could not start; the reason is in the server's log.")
            raise NotReady("the model is still being loaded: try again in a moment.")
        return self._engine

    def start(self) -> None:
        """Start the thread; call it on the event loop that will read the streams."""
        self._loop = asyncio.get_running_loop()
        self._quiet.set()
        self._thread.start()

    @property
    def was_ready(self) -> bool:
        """Whether the boot succeeded, whatever came later."""
        return self._engine is not None

    async def booted(self) -> None:
        """Wait until the engine is ready or has failed (then `failure` says how)."""
        await self._settled.wait()

    async def submit(self, prompts: Sequence[Prompt]) -> list[Stream]:
        """Queue all prompts or none; the streams of a prompt's `n` sequences stand side by side.

        Raises what Engine.add raises, ShuttingDown while draining, NotReady before and EngineDown after the engine's
        life.
        """
        engine = self.engine
        has_left = threading.Event()
        future = self._post(lambda: [] if has_left.is_set() else self._add_all(engine, prompts))
        try:
            streams: list[Stream] = await asyncio.shield(future)
        except asyncio.CancelledError:
            has_left.set()
            # The engine may be looking just now: what comes of it is cancelled as soon as it exists.
            future.add_done_callback(_cancel_all)
            raise
        return streams

    async def flush(self, *, timeout_s: float) -> bool:
        """Forget the prefix cache once the engine is idle, or False when that is not within `timeout_s`.

        Raises as `submit` does.
        """
        engine = self.engine
        future: asyncio.Future[Any] = self._loop.create_future()  # there before the engine's thread may look at it

        def wait_for_idle() -> object:
            self._flushes.append(_Flush(future, engine.clock.now_s() + timeout_s))
            return _LATER

        return bool(await self._post(wait_for_idle, answer=future))

    async def ask(self, question: Callable[[Engine], T]) -> T:
        """What `question` answers in the engine's thread, between two steps; it must be quick and change nothing.

        Raises as `submit` does.
        """
        engine = self.engine
        answer: T = await self._post(lambda: question(engine))
        return answer

    def cancel(self, rid: int) -> None:
        """End a sequence that nobody reads any more."""
        with self._lock:
            if self._state in (State.READY, State.DRAINING):
                engine = self.engine
                self._commands.put(_Command(lambda: engine.abort(rid)))

    def drain(self) -> None:
        """Take no new work; what runs goes on."""
        with self._lock:
            if self._state in (State.BOOTING, State.READY):
                self._state = State.DRAINING

    async def rank_lost(self) -> None:
        """Wait until one of several ranks has ended (then `failure` says how), which only a new start mends."""
        await self._rank_lost.wait()

    async def drained(self) -> None:
        """Wait until everything accepted has had its last output."""
        await self._quiet.wait()

    async def stop(self, *, timeout_s: float) -> None:
        """End the thread after the current step; sequences that still run get an error.

        Gives up waiting after `timeout_s`, or when it is cancelled; the thread then ends with the process.
        """
        with self._lock:
            if self._state in (State.READY, State.DRAINING):
                self._state = State.STOPPED
                self._commands.put(_Command(lambda: None))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), timeout_s)

    def _post(self, run: Callable[[], object], *, answer: asyncio.Future[Any] | None = None) -> asyncio.Future[Any]:
        """Queue a command for the engine's thread, unless that thread takes none any more. answer: the future to use."""
        future = answer if answer is not None else self._loop.create_future()
        with self._lock:
            if self._state is State.READY:
                self._expect(future)
                self._commands.put(_Command(run, future))
                return future
        if self._state is State.FAILED:
            raise EngineDown("the engine has failed; the reason is in the server's log, and only a restart helps.")
        raise ShuttingDown("the server is shutting down and takes no new requests.")

    def _expect(self, waiting: asyncio.Future[Any] | Stream) -> None:
        self._unanswered.add(waiting)
        self._quiet.clear()

    def _settle(self, waiting: asyncio.Future[Any] | Stream) -> None:
        self._unanswered.discard(waiting)
        if not self._unanswered:
            self._quiet.set()

    def _deliver(self, news: Sequence[tuple[asyncio.Future[Any] | Stream, object]]) -> None:
        """Event loop: answers to commands and outputs to streams, in the order in which they happened."""
        for target, value in news:
            if isinstance(target, Stream):
                assert isinstance(value, Output | RequestError)
                target.put(value)
                if isinstance(value, RequestError) or value.finish is not None:
                    self._settle(target)
                continue
            if isinstance(value, list):
                for stream in value:
                    self._expect(stream)
            if not target.done():
                if isinstance(value, Exception):
                    target.set_exception(value)
                else:
                    target.set_result(value)
            self._settle(target)

    def _run(self) -> None:
        """The engine's thread."""
        try:
            self._live()
        finally:
            self._tell_loop(self._ended.set)

    def _live(self) -> None:
        """The engine's life, from its boot until it is closed."""
        try:
            engine = self._boot()
            self._on_ready(engine)
        except Exception as error:
            self.failure = error
            self._state = State.FAILED
            self._tell_loop(self._settled.set)
            return
        self._engine = engine
        # An idle engine waits for commands, and this is one: it raises.
        engine.on_rank_lost(lambda: self._commands.put(_Command(engine.check_ranks)))
        with self._lock:
            if self._state is State.BOOTING:
                self._state = State.READY
        self._tell_loop(self._settled.set)
        try:
            self._serve(engine)
        except RankLost as error:
            self.failure = error
            self._end_all(State.FAILED, EngineDown(str(error)))
            self._tell_loop(self._rank_lost.set)
        except Exception as error:
            log.error("the engine has failed; every request in flight ends with an error", exc_info=error)
            self.failure = error
            self._end_all(State.FAILED, EngineDown(f"the engine has failed: {type(error).__name__}: {error}"))
        else:
            self._end_all(State.STOPPED, ShuttingDown("the server was stopped before the request was finished."))
        engine.close()

    def _serve(self, engine: Engine) -> None:
        """Commands and steps in turn, until the state says stop."""
        while True:
            n_commands = self._run_commands(wait=not engine.has_work)
            if self._state is State.STOPPED:
                return
            # After a command even an idle engine is stepped once: an abort of a waiting request is told that way.
            if n_commands or engine.has_work:
                outputs = engine.step()
                self._tell_loop(self._deliver, [(s, o) for o in outputs if (s := self._stream_of(o)) is not None])
            self._flush_if_due(engine)

    def _run_commands(self, *, wait: bool) -> int:
        """Run what is queued; wait for the first command if there is nothing else to do."""
        n_commands = 0
        while wait or not self._commands.empty():
            command = self._commands.get()
            wait = False
            n_commands += 1
            try:
                value = command.run()
            except Exception as error:
                if command.future is None:
                    raise
                value = error
            if command.future is not None and value is not _LATER:
                self._tell_loop(self._deliver, [(command.future, value)])
        return n_commands

    def _add_all(self, engine: Engine, prompts: Sequence[Prompt]) -> list[Stream]:
        """All prompts or none."""
        added: list[Request] = []
        try:
            for prompt in prompts:
                added.extend(engine.add(prompt.tokens, prompt.params, priority=prompt.priority))
        except RequestError:
            for request in added:
                engine.abort(request.rid)
            raise
        streams = [Stream(request, self.cancel) for request in added]
        self._streams.update({stream.request.rid: stream for stream in streams})
        return streams

    def _stream_of(self, output: Output) -> Stream | None:
        """Who waits for an output; forgotten with the last one.

        None for sequences that were taken back while being added.
        """
        rid = output.request.rid
        return self._streams.get(rid) if output.finish is None else self._streams.pop(rid, None)

    def _flush_if_due(self, engine: Engine) -> None:
        """Answer the flushes that can be done now or have waited long enough."""
        for flush in tuple(self._flushes):
            if not engine.has_work or engine.clock.now_s() >= flush.deadline_s:
                self._flushes.remove(flush)
                self._tell_loop(self._deliver, [(flush.future, engine.flush_cache())])

    def _end_all(self, state: State, error: RequestError) -> None:
        """Nothing runs any more: whoever waits gets `error`, whoever comes later is turned away."""
        with self._lock:
            self._state = state
        news: list[tuple[asyncio.Future[Any] | Stream, object]] = [(flush.future, error) for flush in self._flushes]
        while not self._commands.empty():
            future = self._commands.get().future
            if future is not None:
                news.append((future, error))
        news.extend((stream, error) for stream in self._streams.values())
        self._streams.clear()
        self._flushes.clear()
        self._tell_loop(self._deliver, news)

    def _tell_loop(self, function: Callable[..., object], *arguments: object) -> None:
        """Call on the event loop; nobody is left to tell once that is closed."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise


def _cancel_all(future: asyncio.Future[Any]) -> None:
    """The streams of a submission whose client is gone."""
    if not future.cancelled() and future.exception() is None:
        for stream in future.result():
            stream.cancel()
