"""The engine over a fake executor: text, stops, seeds, copies, news to observers, and the leak check."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tests.worlds import EOS, VOCAB, FakeExecutor, expected_output, make_world
from twinpool.clock import VirtualClock
from twinpool.engine.core import Engine, Output, StepReport
from twinpool.errors import BadRequest, QueueFull
from twinpool.request import Request, SamplingParams
from twinpool.sched.book import Retraction


class Letters:
    """A tokenizer of VOCAB letters."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + i) for i in ids)


class Closed(FakeExecutor):
    closed = False

    def settle(self, orders) -> None:
        for order in orders:
            self._obey(order)

    def close(self) -> None:
        self.closed = True


def make_engine(**world: object) -> Engine:
    made = make_world(**world)
    made.executor.__class__ = Closed
    facts = SimpleNamespace(
        spec=SimpleNamespace(vocab_size=VOCAB),
        resolved=SimpleNamespace(random_seed=3, context_len=4096),
        eos_token_ids=frozenset({EOS}),
    )
    return Engine(
        facts=facts,
        scheduler=made.scheduler,
        executor=made.executor,
        tokenizer=Letters(),
        clock=VirtualClock(),
    )


def drain(engine: Engine) -> dict[int, Output]:
    """Run to the end; one merged Output a request."""
    merged: dict[int, Output] = {}
    while engine.has_work:
        for news in engine.step():
            old = merged.get(news.request.rid, Output(news.request))
            assert old.finish is None, "news after the end"
            merged[news.request.rid] = Output(
                news.request, old.text + news.text, old.tokens + news.tokens, old.logprobs + news.logprobs, news.finish
            )
    return merged


def letters(tokens: list[int]) -> str:
    return Letters().decode([t for t in tokens if t != EOS])


@pytest.mark.parametrize("overlap", [True, False])
def test_text_is_the_answer_without_the_end_token(overlap: bool) -> None:
    engine = make_engine(overlap=overlap)
    prompts = [[1, 2, 3], [4, 5], [6]]
    requests = [engine.add(p, SamplingParams(max_tokens=15, temperature=0.0))[0] for p in prompts]
    outputs = drain(engine)
    for prompt, request in zip(prompts, requests, strict=True):
        expected = expected_output(prompt, 15)
        output = outputs[request.rid]
        assert list(output.tokens) == expected
        assert output.text == letters(expected)
        assert output.finish.reason == ("stop" if expected[-1] == EOS else "length")
    engine.check_idle(thorough=True)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stop_string_ends_the_request_and_cuts_the_text(overlap: bool) -> None:
    said = letters(expected_output([1, 2], 20, ignore_eos=True))
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    for length in (1, 2, 3):
        stop = said[6 : 6 + length]
        engine = make_engine(overlap=overlap)
        (request,) = engine.add([1, 2], SamplingParams(**{**_fields(params), "stop": (stop,)}))
        output = drain(engine)[request.rid]
        assert output.text == said[: said.find(stop)]
        assert (output.finish.reason, output.finish.matched) == ("stop", stop)
        assert request.finish == output.finish
        assert len(output.tokens) == said.find(stop) + length


def test_a_stop_string_in_the_very_last_token_is_a_stop() -> None:
    said = letters(expected_output([1, 2], 5, ignore_eos=True))
    assert said[4] not in said[:4]
    engine = make_engine(overlap=False)
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, stop=(said[4],))
    (request,) = engine.add([1, 2], params)
    output = drain(engine)[request.rid]
    assert (output.text, output.finish.matched) == (said[:4], said[4])


def _fields(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}


def test_seeds_are_drawn_in_order_of_arrival_and_copies_get_their_own() -> None:
    def seeds() -> list[int | None]:
        engine = make_engine()
        made = [
            engine.add([1], SamplingParams()),
            engine.add([2], SamplingParams(seed=5, n=3)),
            engine.add([3], SamplingParams(n=2)),
        ]
        return [request.params.seed for requests in made for request in requests]

    first = seeds()
    assert first == seeds()
    assert first[1] == 5
    assert len(set(first)) == 6


def test_copies_are_all_queued_or_none() -> None:
    engine = make_engine(max_running=1)
    engine.scheduler.shape = SimpleNamespace(**{**_shape(engine), "max_queued_requests": 2})
    engine.add([1], SamplingParams())
    with pytest.raises(QueueFull):
        engine.add([2], SamplingParams(n=2))
    assert engine.scheduler.n_waiting == 1
    outputs = drain(engine)
    assert len(outputs) == 1


def _shape(engine: Engine) -> dict[str, object]:
    shape = engine.scheduler.shape
    return {name: getattr(shape, name) for name in type(shape).__dataclass_fields__}


def test_wrong_prompts_are_refused() -> None:
    engine = make_engine()
    with pytest.raises(BadRequest, match="outside the vocabulary of 11"):
        engine.add([1, VOCAB], SamplingParams())
    with pytest.raises(BadRequest, match="the prompt is empty"):
        engine.add([], SamplingParams())
    with pytest.raises(BadRequest, match="stop_token_ids"):
        engine.add([1], SamplingParams(stop_token_ids=(VOCAB,)))
    with pytest.raises(BadRequest, match="logit_bias"):
        engine.add([1], SamplingParams(logit_bias=((1, float("nan")),)))
    assert not engine.has_work


class Watcher:
    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.finished: list[Request] = []
        self.retractions: list[Retraction] = []

    def on_step(self, report: StepReport) -> None:
        self.reports.append(report)

    def on_finish(self, request: Request) -> None:
        self.finished.append(request)

    def on_retraction(self, retraction: Retraction) -> None:
        self.retractions.append(retraction)


def test_observers_see_every_step_finish_and_retraction() -> None:
    engine = make_engine(n_pages=24, overlap=True, schedule_conservativeness=0.1)
    watcher = Watcher()
    engine.observers.append(watcher)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    for first in range(1, 5):
        engine.add([first, 2, 3], params)
    outputs = drain(engine)
    assert [output.finish.reason for output in outputs.values()] == ["length"] * 4
    assert sorted(r.rid for r in watcher.finished) == [1, 2, 3, 4]
    assert [r.plan.step for r in watcher.reports] == [r.result.step for r in watcher.reports]
    assert watcher.retractions
    assert engine.snapshot().totals.retracted_requests == sum(r.n_requests for r in watcher.retractions)
    assert engine.snapshot().step == len(watcher.reports)
    told = [token for report in watcher.reports for output in report.outputs for token in output.tokens]
    assert len(told) == 48


def test_aborted_requests_end_with_abort() -> None:
    engine = make_engine(max_running=1)
    (running,) = engine.add([1, 2], SamplingParams(max_tokens=50, ignore_eos=True))
    (waiting,) = engine.add([3], SamplingParams(max_tokens=50))
    engine.step()
    engine.step()
    assert engine.abort(running.rid)
    assert engine.abort(waiting.rid)
    assert not engine.abort(99)
    outputs = drain(engine)
    assert {outputs[r.rid].finish.reason for r in (running, waiting)} == {"abort"}


def test_a_step_that_fails_ends_its_requests_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(overlap=False)
    (request,) = engine.add([1, 2], SamplingParams())
    broken = engine.loop._executor.slots
    broken[1] = broken[2] = broken[3] = 12345

    def boom(plan: object) -> None:
        raise RuntimeError("kernel")

    engine.loop._executor._run, run = boom, engine.loop._executor._run
    output = drain(engine)[request.rid]
    assert (output.finish.reason, "kernel" in output.finish.message) == ("error", True)
    assert "a step failed" in caplog.text
    engine.loop._executor._run = run


def test_a_leak_is_seen_when_work_ends() -> None:
    engine = make_engine()
    engine.scheduler.book.slots.alloc(1)
    engine.add([1, 2], SamplingParams(max_tokens=3))
    with pytest.raises(AssertionError, match=r"\[mamba\] pool memory leak detected! total=16"):
        drain(engine)


def test_flush_forgets_the_cache_only_when_idle() -> None:
    engine = make_engine()
    engine.add(np.arange(8, dtype=np.int32), SamplingParams(max_tokens=3))
    assert not engine.flush_cache()
    drain(engine)
    assert engine.snapshot().pages.evictable > 0
    assert engine.flush_cache()
    assert engine.snapshot().pages.evictable == 0
    engine.close()
    assert engine._executor.closed
