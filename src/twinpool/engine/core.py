"""The engine as server and offline door see it: requests in, text out, one step at a time.

    engine = Engine.boot(options)                # or boot.boot_engine(options, ...)
    requests = engine.add(prompt_ids, params)    # params.n requests, each with its own rid
    while engine.has_work:
        for output in engine.step(): ...         # Output: new text, tokens, log-probabilities, the finish if it ended
    engine.close()

Threads: one thread calls add, abort, step, flush_cache and close. From any thread: `tokenizer`, `facts`, `view_disk()`,
and `snapshot()`, which is the frozen picture taken after the last step. `step()` returns [] when there is nothing to
do; wait for work elsewhere.

Text is decoded here, so that a stop string ends the request at once: `Output.text` is ready for the client (held back
while it may turn into a stop string or lacks bytes of a character, cut at the stop string, without the end token), and
joined it is the whole answer. `Output.finish` comes once per request, in its last Output.

Metrics: `engine.observers.append(observer)`; an observer has the three methods of EngineObserver, all called in the
engine's thread:
    on_step(report: StepReport)          after each committed step; plan, result, outputs of that call, time, counts
    on_finish(request: Request)          reuse, retractions, n_output, finish are final, and all times (arrival_s,
                                         first_scheduled_s, first_token_s, finished_s, of `engine.clock`)
    on_retraction(retraction)            sched.book.Retraction
Totals that only grow (evictions, retractions, skipped checkpoints) are fields of Snapshot.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from twinpool.clock import Clock
from twinpool.engine.sampler import mix_seed
from twinpool.engine.text import StreamDecoder, Tokenizer
from twinpool.engine.tier import HostCounts, HostWatch
from twinpool.errors import BadRequest, RequestError
from twinpool.loop import Loop
from twinpool.memory.host_cover import HostCover
from twinpool.memory.snapshot import PoolCounts
from twinpool.prefix.evict import Evictions
from twinpool.prefix.host_view import HostView, host_view
from twinpool.request import Finish, Int32Array, Request, SamplingParams
from twinpool.sched.book import Delta, Retraction, Totals
from twinpool.sched.scheduler import Scheduler
from twinpool.step import Executor, Order, OrdersFailed, StepPlan, StepResult, TokenLogprob

if TYPE_CHECKING:
    from twinpool.config.options import ServeOptions
    from twinpool.config.resolve import Resolved
    from twinpool.engine.disk import DiskCounts, DiskTier
    from twinpool.engine.ranks import Ranks
    from twinpool.memory.budget import Ledger
    from twinpool.models.spec import ModelSpec

log = logging.getLogger("twinpool.engine")
_POLL_S, _MOST_POLL_S = 0.0005, 0.02
_POLL_SHARE = 5  # with many that wait, one part of so many of the time is spent on looking


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What was decided at boot and never changes."""

    options: ServeOptions
    resolved: Resolved
    ledger: Ledger
    spec: ModelSpec
    model_name: str
    eos_token_ids: frozenset[int]
    weight_bytes: int
    startup_available_bytes: int

    @property
    def context_len(self) -> int:
        """Longest prompt plus output, tokens."""
        return self.resolved.context_len


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """News of one request. tokens and logprobs (empty unless asked for) may be longer than `text`: text can be held
    back.
    """

    request: Request
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Counts after a step. pages: KV pages of `page_size` tokens; slots: state slots; the totals are since boot; host:
    the host tier, None without one.
    """

    pages: PoolCounts
    slots: PoolCounts
    page_size: int
    n_running: int
    n_waiting: int
    new_token_ratio: float
    evictions: Evictions
    totals: Totals
    step: int
    host: HostCounts | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepReport:
    """A committed step. now_s: `engine.clock` when it was committed."""

    plan: StepPlan
    result: StepResult
    outputs: tuple[Output, ...]
    now_s: float
    snapshot: Snapshot


class EngineObserver(Protocol):
    """Sees what the engine does; must be quick, it is called between steps."""

    def on_step(self, report: StepReport) -> None:
        """A step was committed."""

    def on_finish(self, request: Request) -> None:
        """A request ended, for whatever reason."""

    def on_retraction(self, retraction: Retraction) -> None:
        """Requests went back to the queue because KV ran short."""


class Closable(Executor, Protocol):
    """An executor with a thread to end."""

    def settle(self, orders: tuple[Order, ...]) -> None:
        """Run orders that no step will take along for now."""

    def close(self) -> None:
        """Wait for what was submitted, then end the thread."""


class Engine:
    """Scheduler, executor and tokenizer, wired. Built by `boot.boot_engine`."""

    def __init__(
        self,
        *,
        facts: EngineFacts,
        scheduler: Scheduler,
        executor: Closable,
        tokenizer: Tokenizer,
        clock: Clock,
        disk: DiskTier | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.facts = facts
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.clock = clock
        self.observers: list[EngineObserver] = []
        self.loop = Loop(
            scheduler=scheduler, executor=executor, overlap=scheduler.shape.overlap, observe=self._note_step
        )
        self._executor = executor
        self._disk, self._ranks = disk, ranks
        self._streams: dict[int, StreamDecoder] = {}
        self._committed: tuple[StepPlan, StepResult] | None = None
        self._n_added = 0
        self._n_seeds = 0
        self._n_steps = 0
        self._was_idle = True
        tree = scheduler.book.tree
        self._host = HostWatch(tree, tree.tier) if tree.tier is not None else None
        self._snapshot = self._take_snapshot()

    @staticmethod
    def boot(options: ServeOptions, *, poison_freed: bool = False) -> Engine:
        """Load a model and divide the memory; see `boot.boot_engine`."""
        from twinpool.engine.boot import boot_engine  # boot builds this class

        return boot_engine(options, poison_freed=poison_freed)

    @property
    def has_work(self) -> bool:
        """Something waits, runs, is in flight, or is not told yet."""
        return not self.loop.idle or bool(self.scheduler.book.deltas)

    def add(
        self, prompt: Int32Array | Sequence[int], params: SamplingParams, *, priority: int = 0
    ) -> tuple[Request, ...]:
        """Queue `params.n` requests over one prompt (int32 [prompt tokens]); all or none.

        Raises BadRequest if the request is wrong or can never fit, QueueFull beyond --max-queued-requests.
        """
        vocab_size = self.facts.spec.vocab_size
        params.validate(vocab_size=vocab_size)
        tokens = np.asarray(prompt, np.int64)
        if len(tokens) and not (int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size):
            raise BadRequest(f"the prompt names a token outside the vocabulary of {vocab_size}.", field="prompt")
        added: list[Request] = []
        try:
            for copy in range(params.n):
                request = Request.new(
                    rid=self._n_added + 1,
                    prompt=tokens.astype(np.int32),
                    params=self._with_seed(params, copy),
                    eos_token_ids=self.facts.eos_token_ids,
                    priority=priority,
                    arrival_s=self.clock.now_s(),
                )
                self.scheduler.add(request)
                self._n_added += 1
                added.append(request)
        except RequestError:
            for request in added:  # not in _streams yet, so nobody hears of them
                self.scheduler.abort(request.rid)
            raise
        for request in added:
            self._streams[request.rid] = StreamDecoder(
                self.tokenizer,
                stop=params.stop,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
        self._was_idle = False
        return tuple(added)

    def _with_seed(self, params: SamplingParams, copy: int) -> SamplingParams:
        """A seed of its own for every sequence: drawn in order of arrival from --random-seed, or spread from the one
        given.
        """
        if params.seed is None:
            self._n_seeds += 1
            return replace(params, seed=mix_seed(self.facts.resolved.random_seed, self._n_seeds))
        return replace(params, seed=mix_seed(params.seed, copy)) if copy else params

    def abort(self, rid: int) -> bool:
        """End a request because nobody wants it; its last Output comes with a later step. False if it is not known."""
        return self.scheduler.abort(rid)

    def step(self) -> list[Output]:
        """Plan, run and commit at most one step each; return all news. At the end of all work the pools are checked
        for leaks.
        """
        self._committed = None
        outputs: list[Output] = []
        began_s = time.monotonic()
        deltas = self.loop.step()
        while deltas:
            outputs += [output for delta in deltas if (output := self._to_output(delta)) is not None]
            deltas = self.scheduler.take_deltas()  # a stop string may have ended a request just now
        for failure in self.loop.failures:
            what = "its requests ended with an error"
            if isinstance(failure, OrdersFailed):
                what = "the cache is empty and all that ran is computed again"
            log.error("a step failed; %s", what, exc_info=failure)
        if self.loop.failures and self._host is not None:
            self._host.say_if_closed()
        self.loop.failures.clear()
        if self._host is not None:
            self._host.say_if_lost()
        self.check_ranks()
        if self.loop.idle and not self._was_idle:
            self._was_idle = True
            self._settle()
            self.check_idle()
        elif not deltas and self.loop.waits:
            # A prefix is being read from the disk, and nothing else can run.
            pause_s = (_POLL_SHARE - 1) * (time.monotonic() - began_s)
            time.sleep(min(max(pause_s, _POLL_S), _MOST_POLL_S))
        self._snapshot = self._take_snapshot()
        self._tell(outputs)
        return outputs

    def check_ranks(self) -> None:
        """Raise RankLost if one of several ranks has ended; nothing runs after that."""
        if self._ranks is not None:
            self._ranks.check()

    def on_rank_lost(self, call: Callable[[], object]) -> None:
        """Have somebody told, in another thread, when `check_ranks` begins to raise."""
        if self._ranks is not None:
            self._ranks.on_lost(call)

    def _to_output(self, delta: Delta) -> Output | None:
        """A delta with its text; finds stop strings and ends the request there."""
        request = delta.request
        stream = self._streams.get(request.rid)
        if stream is None:
            return None
        ends = request.end_tokens
        was_stopped = stream.stopped
        text = stream.push(token for token in delta.tokens if token not in ends)
        finish = delta.finish
        if stream.stopped is not None and was_stopped is None:
            self.scheduler.finish(request.rid, Finish("stop", matched=stream.stopped))
        if finish is not None:
            text += stream.flush()
            if stream.stopped is not None and finish.reason in ("stop", "length"):
                # The stop string may have come with the very token that also ended the request by length.
                finish = Finish("stop", matched=stream.stopped)
                request.finish = finish
            del self._streams[request.rid]
        return Output(request, text, delta.tokens, delta.logprobs, finish)

    def _tell(self, outputs: list[Output]) -> None:
        """Pass the news on to the observers."""
        for retraction in self.scheduler.take_retractions():
            for observer in self.observers:
                observer.on_retraction(retraction)
        if self._committed is not None:
            plan, result = self._committed
            report = StepReport(plan, result, tuple(outputs), self.clock.now_s(), self._snapshot)
            for observer in self.observers:
                observer.on_step(report)
        for output in outputs:
            if output.finish is not None:
                for observer in self.observers:
                    observer.on_finish(output.request)

    def _note_step(self, plan: StepPlan, result: StepResult) -> None:
        self._committed = (plan, result)
        self._n_steps += 1

    def flush_cache(self) -> bool:
        """Forget the prefix cache, on the host as well; False (and nothing happens) while there is work."""
        done = self.loop.idle and self.scheduler.flush()
        self._snapshot = self._take_snapshot()
        return done

    def snapshot(self) -> Snapshot:
        """Counts after the last step."""
        return self._snapshot

    def _take_snapshot(self) -> Snapshot:
        pages, slots = self.scheduler.counts()
        book = self.scheduler.book
        return Snapshot(
            pages=pages,
            slots=slots,
            page_size=self.scheduler.shape.page_size,
            n_running=self.scheduler.n_running,
            n_waiting=self.scheduler.n_waiting,
            new_token_ratio=book.ratio.value,
            evictions=book.tree.evictions.copy(),
            totals=replace(book.totals),
            step=self._n_steps,
            host=self._host.counts() if self._host is not None else None,
        )

    def view_host(self) -> HostView | None:
        """What lies on the host now, None without a host tier. Walks the whole tree; in the engine's thread only."""
        if self._host is None:
            return None
        tree = self.scheduler.book.tree
        return host_view(tree.root, page_size=tree.page_size)

    def cover_host(self) -> HostCover | None:
        """How many idle sessions the host tier holds, as at boot; None without one; from any thread."""
        return (
            self._host.cover(self.facts.ledger, context_len=self.facts.context_len) if self._host is not None else None
        )

    def view_disk(self) -> DiskCounts | None:
        """The disk tier now, None without one; from any thread."""
        return self._disk.counts() if self._disk is not None else None

    def check_idle(self, *, thorough: bool = False) -> None:
        """Assert that everything not cached is free (reference 6.6); thorough: walk the tree and the pools as well."""
        pages, slots = self.scheduler.counts()
        for name, counts in (("full", pages), ("mamba", slots)):
            fine = counts.free + counts.evictable == counts.total and counts.protected == 0 and counts.held == 0
            assert fine, (
                f"[{name}] pool memory leak detected! total={counts.total}, available={counts.free}, "
                f"evictable={counts.evictable}, protected={counts.protected}, held={counts.held}"
            )
        if self._host is not None:
            self._host.check()
        if thorough:
            self.scheduler.check()

    def _settle(self) -> None:
        """With nothing left to run, what the tiers below were told is done at once: the next step may be hours away."""
        if orders := self.scheduler.book.take_orders():
            self._executor.settle(orders)

    def close(self) -> None:
        """End the threads; what the disk tier was given is written first. Requests that still run are dropped."""
        self._settle()
        self._executor.close()
        if self._ranks is not None:
            self._ranks.close()
        if self._disk is not None:
            self._disk.close()
