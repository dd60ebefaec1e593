"""Calibration: the fit on known laws, the measurement of endpoints in virtual time, and HTTP endpoints that misbehave."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.clock import VirtualClock
from twinpool.errors import ConfigError, TwinpoolError
from twinpool.replay.calibrate import limits_of, points_of, read_calibrate, report, run
from twinpool.replay.cost import Calibration, CostModel, read_calibration
from twinpool.replay.endpoint import Answer, HttpEndpoint
from twinpool.replay.fit import Point, decode_point, fit, non_negative, prefill_point
from twinpool.replay.measure import Decode, Limits, Measurement, Prefill, together_s

TRUTH = Calibration(flops_share=0.42, bandwidth_share=0.61, step_s=0.0021, row_s=0.00013)
COST = CostModel(
    weight_bytes=8e9, expert_bytes=20e9, n_experts=128, experts_per_token=8, flops_per_token=6e9, attention_flops=4e5,
    kv_bytes_per_token=2e4, slot_bytes=2e7, reduce_bytes_per_token=1e5, flops_per_s=989e12, bandwidth_bytes_per_s=3.35e12,
    link_bytes_per_s=450e9, calibration=Calibration(),
)  # fmt: skip
LIMITS = Limits(
    context_tokens=40_000, pool_tokens=200_000, running=8, vocab_size=1000, chunk_tokens=8192, seconds=600.0, repeats=3
)


def points(truth: Calibration, *, noise: Callable[[], float] = lambda: 1.0) -> list[Point]:
    """Points that follow the law, perhaps with errors."""
    cut = [prefill_point(COST, tokens=n, chunk_tokens=8192, measured_s=1.0) for n in (64, 256, 1024, 4096, 16384)]
    step = [
        decode_point(COST, context_tokens=context, batch=batch, steps=32, measured_s=1.0)
        for context in (64, 16384)
        for batch in (1, 2, 4, 8)
    ]
    return [replace(point, measured_s=point.modelled_s(truth) * noise()) for point in cut + step]


def assert_close(found: Calibration, truth: Calibration, *, rel: float) -> None:
    for name in ("flops_share", "bandwidth_share", "step_s", "row_s"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=rel, abs=1e-9), name


@pytest.mark.parametrize(
    "truth",
    [
        TRUTH,
        Calibration(flops_share=1.0, bandwidth_share=1.0, step_s=0.0, row_s=0.0),
        Calibration(flops_share=0.003, bandwidth_share=0.01, step_s=0.1, row_s=0.0),
        Calibration(flops_share=0.9, bandwidth_share=0.1, step_s=0.0, row_s=0.002),
    ],
)
def test_the_fit_finds_the_law_that_made_the_points(truth: Calibration) -> None:
    found = fit(points(truth), source="here")
    assert found.source == "here"
    assert_close(found, truth, rel=1e-5)


def test_the_fit_stands_small_errors() -> None:
    errors = np.random.default_rng(7)
    found = fit(points(TRUTH, noise=lambda: float(errors.normal(1.0, 0.01))), source="")
    assert found.flops_share == pytest.approx(TRUTH.flops_share, rel=0.05)
    assert found.bandwidth_share == pytest.approx(TRUTH.bandwidth_share, rel=0.1)
    assert found.step_s == pytest.approx(TRUTH.step_s, rel=0.5)


def test_a_share_that_bounds_no_step_keeps_its_assumed_value_or_less() -> None:
    short = [
        point
        for point in points(TRUTH)
        if point.name not in ("prefill of 1,024", "prefill of 4,096", "prefill of 16,384")
    ]
    found = fit(short, source="")
    assert found.bandwidth_share == pytest.approx(TRUTH.bandwidth_share, rel=1e-5)
    assert found.flops_share == Calibration().flops_share


def test_a_device_is_not_faster_than_its_peaks() -> None:
    fast = [replace(point, measured_s=point.measured_s / 20) for point in points(TRUTH)]
    found = fit(fast, source="")
    assert (found.flops_share, found.bandwidth_share, found.step_s, found.row_s) == (1.0, 1.0, 0.0, 0.0)


def test_too_few_points_are_refused() -> None:
    with pytest.raises(TwinpoolError, match="needs 2 prompt lengths and 2 decode batches, and 5 and 1 were measured"):
        fit(points(TRUTH)[:6], source="")
    with pytest.raises(TwinpoolError, match="and 0 and 0 were measured"):
        fit([], source="")


def test_non_negative_least_squares_by_hand() -> None:
    assert non_negative(np.eye(2), np.array([3.0, -1.0])).tolist() == [3.0, 0.0]
    assert non_negative(np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([1.0, 3.0])).tolist() == pytest.approx([2.0, 0.0])
    assert non_negative(np.array([[-1.0]]), np.array([1.0])).tolist() == [0.0]


@given(
    st.lists(st.lists(st.floats(0, 10), min_size=3, max_size=3), min_size=3, max_size=8),
    st.lists(st.floats(-10, 10), min_size=8, max_size=8),
)
@settings(max_examples=100, deadline=None)
def test_non_negative_least_squares_is_optimal(rows: list[list[float]], wanted: list[float]) -> None:
    """No step along an axis, up or (where there is room) down, makes the error smaller."""
    matrix, goal = np.array(rows), np.array(wanted[: len(rows)])
    found = non_negative(matrix, goal)
    assert (found >= 0).all()

    def error(x: np.ndarray) -> float:
        return float(np.sum((matrix @ x - goal) ** 2))

    for column in range(3):
        for change in (0.01, -min(0.01, found[column])):
            moved = found.copy()
            moved[column] += change
            assert error(moved) >= error(found) - 1e-6


def test_time_while_all_decode_together() -> None:
    one = Answer(0.0, tuple(1.0 + 0.5 * i for i in range(11)), 11)  # 1.0 to 6.0
    two = Answer(0.0, tuple(3.0 + 0.5 * i for i in range(11)), 11)  # 3.0 to 8.0
    assert together_s([one]) == pytest.approx(0.5)
    assert together_s([one, two]) == pytest.approx(0.5)
    coarse = Answer(0.0, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0), 11)  # two tokens an event
    assert together_s([coarse]) == pytest.approx(0.5)
    late = replace(two, events_s=tuple(when_s + 10 for when_s in two.events_s))
    assert together_s([one, late]) is None
    assert together_s([Answer(0.0, (1.0,), 1)]) is None


class LawfulEndpoint:
    """A server in virtual time: prompts one after another in chunks, then all rows decode together, by the cost model's law."""

    def __init__(self, clock: VirtualClock, truth: Calibration, *, chunk_tokens: int | None) -> None:
        self.sent: list[tuple[int, ...]] = []
        self._clock, self._chunk_tokens = clock, chunk_tokens
        self._cost = replace(COST, calibration=truth)

    def ask(self, prompts: Sequence[list[int]], *, output_tokens: int) -> list[Answer]:
        self.sent += [tuple(prompt) for prompt in prompts]
        sent_s = self._clock.now_s()
        events: list[list[float]] = []
        for prompt in prompts:
            point = prefill_point(COST, tokens=len(prompt), chunk_tokens=self._chunk_tokens, measured_s=1.0)
            self._clock.advance(point.modelled_s(self._cost.calibration))
            events.append([self._clock.now_s()])
        for step_s in self._cost.decode_s([len(prompt) for prompt in prompts], output_tokens - 1).tolist():
            self._clock.advance(step_s)
            for times in events:
                times.append(self._clock.now_s())
        return [Answer(sent_s, tuple(times), output_tokens) for times in events]


def measured(limits: Limits, truth: Calibration = TRUTH) -> tuple[list[Prefill], list[Decode], LawfulEndpoint, float]:
    clock = VirtualClock()
    endpoint = LawfulEndpoint(clock, truth, chunk_tokens=limits.chunk_tokens)
    prefills, decodes = Measurement(endpoint, limits, clock=clock, seed=1).run()
    return prefills, decodes, endpoint, clock.now_s()


def test_a_lawful_endpoint_is_measured_and_its_law_is_found() -> None:
    prefills, decodes, endpoint, _ = measured(LIMITS)
    assert [one.tokens for one in prefills] == [64, 256, 1024, 4096, 16384]
    assert [(one.context_tokens, one.batch) for one in decodes] == [
        (64, 1), (64, 2), (64, 4), (64, 8), (16384, 1), (16384, 2), (16384, 4), (16384, 8),
    ]  # fmt: skip
    assert len(set(endpoint.sent)) == len(endpoint.sent)
    assert all(125 <= token < 500 for prompt in endpoint.sent for token in prompt)
    found = fit(points_of(COST, prefills, decodes, chunk_tokens=LIMITS.chunk_tokens), source="")
    assert_close(found, TRUTH, rel=0.01)


def test_measurements_keep_to_the_limits() -> None:
    limits = replace(LIMITS, context_tokens=600, pool_tokens=1000, running=4)
    prefills, decodes, _, _ = measured(limits)
    assert [one.tokens for one in prefills] == [64, 256]
    assert [(one.context_tokens, one.batch) for one in decodes] == [(64, 1), (64, 2), (64, 4), (256, 1), (256, 2)]
    slow = replace(TRUTH, step_s=0.05)
    for seconds in (10.0, 30.0):
        prefills, decodes, _, took_s = measured(replace(LIMITS, seconds=seconds), slow)
        assert took_s <= seconds
        assert prefills
        assert decodes


class Handler(BaseHTTPRequestHandler):
    """Answers by the server's `reply` for completions; lists one model."""

    def do_GET(self) -> None:
        status, kind, body = self.server.models  # type: ignore[attr-defined]
        self._send(status, kind, body)

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))  # type: ignore[attr-defined]
        self.server.keys.append(self.headers.get("Authorization"))  # type: ignore[attr-defined]
        self._send(*self.server.reply)  # type: ignore[attr-defined]

    def _send(self, status: int, kind: str, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


MODELS = (200, "application/json", json.dumps({"data": [{"id": "m", "max_model_len": 500}]}))
EVENTS = "".join(
    f"data: {json.dumps(event)}\n\n"
    for event in (
        {"choices": [{"text": "a"}]},
        {"choices": [{"text": "bc"}]},
        {"choices": [], "usage": {"completion_tokens": 3}},
    )
)
STREAM = (200, "text/event-stream; charset=utf-8", EVENTS + "data: [DONE]\n\n")


@contextmanager
def server(*, models: tuple[int, str, str] = MODELS, reply: tuple[int, str, str] = STREAM) -> Iterator[Any]:
    """A small HTTP server; `.url` is its address."""
    made: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.models, made.reply, made.bodies, made.keys = models, reply, [], []
    made.url = f"http://127.0.0.1:{made.server_address[1]}"
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_an_endpoint_is_asked_for_a_stream_of_so_many_tokens(suffix: str) -> None:
    with server() as made, closing(HttpEndpoint(made.url + suffix, api_key="k")) as endpoint:
        assert endpoint.context_tokens == 500
        answers = endpoint.ask([[1, 2], [3]], output_tokens=3)
        assert [(len(answer.events_s), answer.output_tokens) for answer in answers] == [(2, 3), (2, 3)]
        assert all(answer.sent_s <= answer.events_s[0] <= answer.events_s[1] for answer in answers)
        assert sorted(body["prompt"] for body in made.bodies) == [[1, 2], [3]]
        assert {(body["model"], body["max_tokens"], body["stream"]) for body in made.bodies} == {("m", 3, True)}
        assert set(made.keys) == {"Bearer k"}


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        ((404, "text/plain", "no"), "/v1/completions does not exist there"),
        (
            (400, "application/json", '{"error": "prompt must be text"}'),
            'answered 400: {"error": "prompt must be text"}',
        ),
        ((200, "application/json", "{}"), "does not stream"),
        ((200, "text/event-stream", "data: [DONE]\n\n"), "ended its answer without a token"),
        ((200, "text/event-stream", 'data: {"error": {"message": "full"}}\n\n'), "failed in the middle of an answer"),
        ((200, "text/event-stream", "data: {\n\n"), "sent an event that is no JSON"),
    ],
)
def test_an_endpoint_that_does_not_answer_as_it_should(reply: tuple[int, str, str], sentence: str) -> None:
    with (
        server(reply=reply) as made,
        closing(HttpEndpoint(made.url)) as endpoint,
        pytest.raises(TwinpoolError) as caught,
    ):
        endpoint.ask([[1]], output_tokens=2)
    assert sentence in str(caught.value)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("models", "sentence"),
    [
        ((401, "application/json", "{}"), "asks for a key: give it with --api-key"),
        ((404, "text/html", "<html>"), "/v1/models does not exist there"),
        ((200, "text/html", "<html>"), "lists no model"),
        ((200, "application/json", '{"data": []}'), "lists no model"),
    ],
)
def test_an_address_that_is_no_endpoint(models: tuple[int, str, str], sentence: str) -> None:
    with server(models=models) as made, pytest.raises(TwinpoolError, match=sentence):
        HttpEndpoint(made.url)


MACHINE = ["Qwen3.5-9B", "--gpu", "H100"]


@pytest.mark.parametrize(
    ("argv", "sentence", "code"),
    [
        ([], "No endpoint is named", 2),
        (["localhost:30000", *MACHINE], "'localhost:30000' is no address", 2),
        (["http://127.0.0.1:9", *MACHINE], "does not answer", 1),
        (["http://127.0.0.1:9", "Qwen3.5-9B", "--gpu", "H100", "another"], "There are|one word too many", 2),
        (["http://127.0.0.1:9", *MACHINE, "--seconds", "0"], "--seconds", 2),
        (["http://127.0.0.1:9", *MACHINE, "--out", "missing/file.json"], "there is no folder missing", 2),
    ],
)
def test_command_lines_that_are_refused(argv: list[str], sentence: str, code: int) -> None:
    with pytest.raises(TwinpoolError, match=sentence) as caught:
        run(argv)
    assert caught.value.exit_code == code


def test_an_endpoint_that_answers_too_little_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    with server() as made, pytest.raises(TwinpoolError, match="A calibration needs"):
        run([made.url, *MACHINE, "--out", str(out), "--seconds", "5"])
    assert not out.exists()


def test_the_limits_are_those_of_the_plan_and_of_the_endpoint() -> None:
    command = read_calibrate(
        ["http://h", *MACHINE, "--api-key", "k", "--served-model-name", "s", "--chunked-prefill-size", "4096"]
    )
    assert (command.url, command.api_key, command.served_name) == ("http://h", "k", "s")
    limits = limits_of(command.sizing, command.options, context_tokens=9000)
    assert command.sizing.ledger is not None
    assert (limits.context_tokens, limits.chunk_tokens, limits.repeats) == (9000, 4096, 3)
    assert limits.pool_tokens == command.sizing.ledger.kv_tokens // 2
    assert limits_of(command.sizing, command.options, context_tokens=None).context_tokens == 262144


def test_the_report_shows_each_point() -> None:
    text = report(points(TRUTH)[:6], TRUTH)
    lines = text.splitlines()
    assert len(lines) == 9
    assert lines[1].split()[:3] == ["prefill", "of", "64"]
    assert all(line.endswith("+0%") for line in lines[1:7])
    assert "0.42 of products, 0.61 of memory" in lines[-1]


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    from dataclasses import asdict

    path = tmp_path / "c.json"
    found = fit(points(TRUTH), source="x")
    path.write_text(json.dumps(asdict(found)))
    assert read_calibration(path) == found
    with pytest.raises(ConfigError):
        read_calibration(tmp_path / "none.json")
