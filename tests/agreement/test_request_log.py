"""The log of a live server, replayed on the same pools: the same reuse, request by request."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import httpx
import pytest

import twinpool.demo
from tests.agreement.live import Live, command, live_server
from twinpool.engine.text import Tokenizer
from twinpool.replay.command import read_replay
from twinpool.replay.experiment import Experiment, prepare, run_experiment
from twinpool.replay.formats import load_trace

DEMO = str(Path(next(iter(twinpool.demo.__path__))))
STORY = "In the beginning the sea was without form, and the king said to his men that they should go down to it. " * 6


def ask(live: Live, prompt: list[int], *, n_output: int) -> tuple[list[int], int]:
    """(prompt and answer as tokens, cached tokens) of one request by token ids."""
    sampling = {"max_new_tokens": n_output, "ignore_eos": True, "temperature": 0}
    body = {"input_ids": prompt, "sampling_params": sampling}
    reply = httpx.post(f"{live.url}/generate", json=body, timeout=60).json()
    return [*prompt, *reply["output_ids"]], reply["meta_info"]["cached_tokens"]


def conversation(live: Live) -> list[int]:
    """Two conversations that share a beginning, a fork, and a prompt that comes again; cached tokens of each request."""
    ids = Tokenizer.load(Path(DEMO)).encode(STORY, special_tokens=False)
    shared, other = ids[:150], ids[150:]
    cached = []
    first, hit = ask(live, shared + other[:40], n_output=70)
    cached.append(hit)
    second, hit = ask(live, shared + other[50:90], n_output=3)
    cached.append(hit)
    for n_more, n_output in ((30, 40), (90, 10), (5, 300), (64, 2)):
        first, hit = ask(live, first + other[:n_more], n_output=n_output)
        cached.append(hit)
        second, hit = ask(live, second + other[7 : 7 + n_more], n_output=n_output)
        cached.append(hit)
    _, hit = ask(live, first[:400] + other[60:160], n_output=20)
    cached.append(hit)
    _, hit = ask(live, first[:400] + other[60:160], n_output=20)
    cached.append(hit)
    return cached


def replayed(log: Path, *flags: str) -> list[int]:
    """Reused tokens of each request, in the order in which they came."""
    argv = [str(log), DEMO, "--gpu", "cpu", "--device-memory", "1GiB", "--arrival", "count", *flags]
    asked = read_replay(argv, usage="")
    trace, traffic = prepare(load_trace(asked.trace, strict=True), asked.options)
    result = run_experiment(
        Experiment(trace=trace, sizing=asked.sizing, traffic=traffic, calibration=asked.calibration)
    )
    assert result.counts.refused == 0
    return [record.reused for record in result.records]


@pytest.mark.parametrize("slots", ["400", "12"], ids=["roomy", "states are evicted"])
def test_replay_of_a_live_log_has_the_reuse_that_the_server_reported(tmp_path: Path, slots: str) -> None:
    log = tmp_path / "requests.jsonl"
    flags = ("--page-size", "64", "--max-mamba-cache-size", slots)
    with live_server(tmp_path, "--request-log", str(log), *flags) as live:
        cached = conversation(live)
        live.interrupt()
        live.process.wait(timeout=30)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(lines) == len(cached) == 12
    assert sum(cached) > 1000
    assert replayed(log, *flags) == cached


def test_with_small_pages_the_log_resolves_64_tokens(tmp_path: Path) -> None:
    """A server with pages of one token reuses up to any token; the log tells blocks apart, so replay never finds more."""
    log = tmp_path / "requests.jsonl"
    with live_server(tmp_path, "--request-log", str(log)) as live:
        cached = conversation(live)
    found = replayed(log)
    assert all(ours <= theirs for ours, theirs in zip(found, cached, strict=True))
    assert sum(found) > 0.8 * sum(cached)


def test_a_folder_that_is_missing_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    done = subprocess.run(
        command("--port", "0", "--request-log", str(tmp_path / "missing" / "log")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.strip().endswith(f"cannot be written: there is no folder {tmp_path / 'missing'}.")
