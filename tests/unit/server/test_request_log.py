"""The request log: what a line says, conversations by their tokens, the salt, and files that cannot be written."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient

from tests.unit.server.fakes import make_fake, n_said
from twinpool.clock import VirtualClock
from twinpool.config.options import ServeOptions
from twinpool.errors import ConfigError
from twinpool.replay.formats import load_trace
from twinpool.replay.formats.request_log import FIELDS
from twinpool.request import Request, SamplingParams
from twinpool.server import request_log
from twinpool.server.conversations import Conversations
from twinpool.server.request_log import RequestLog, block_tokens

SALT = b"s" * 32


def ended(prompt: list[int], output: list[int], *, arrival_s: float = 0.0, finished_s: float = 1.0) -> Request:
    """A request as an observer sees it."""
    request = Request.new(rid=1, prompt=prompt, params=SamplingParams(max_tokens=max(1, len(output))))
    request.tokens[len(prompt) : len(prompt) + len(output)] = output
    request.n_tokens = len(prompt) + len(output)
    request.arrival_s, request.finished_s = arrival_s, finished_s
    return request


def logged(path: Path, *requests: Request, page_size: int = 1) -> list[dict[str, object]]:
    """The lines of a log after these requests."""
    log = RequestLog(path)
    log.start(page_size=page_size, clock=VirtualClock(100.0))
    for request in requests:
        log.on_finish(request)
    log.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def place(conversations: Conversations, prompt: list[int], output: list[int]) -> tuple[str, int, str | None]:
    found = conversations.place(np.array(prompt + output, np.int32), len(prompt))
    return found.session, found.index, found.parent


def test_blocks_are_whole_pages_of_at_least_64_tokens() -> None:
    assert [block_tokens(page_size) for page_size in (1, 16, 48, 64, 128)] == [64, 64, 96, 64, 128]


def test_equal_prefixes_have_equal_hashes_and_nothing_else_has() -> None:
    conversations = Conversations(salt=SALT, block_size=4, prefix="x")
    a = conversations.place(np.arange(11, dtype=np.int32), 11).blocks
    b = conversations.place(np.array([*range(8), 9, 9, 9, 9], np.int32), 12).blocks
    c = conversations.place(np.array([7, *range(4, 8)] * 2, np.int32), 8).blocks
    assert (len(a), len(b), len(c)) == (2, 3, 2)
    assert a.tolist() == b[:2].tolist()
    assert not set(a.tolist()) & set(c.tolist())  # the same tokens after another beginning are another block
    other = Conversations(salt=b"other", block_size=4, prefix="x").place(np.arange(11, dtype=np.int32), 11).blocks
    assert not set(a.tolist()) & set(other.tolist())
    assert min(a) >= 0


def test_a_session_goes_on_and_forks() -> None:
    conversations = Conversations(salt=SALT, block_size=4, prefix="x")
    system = [1, 2, 3, 4, 5]
    assert place(conversations, [*system, 6], [7, 8]) == ("x-0", 0, None)
    assert place(conversations, [*system, 9], [7, 8]) == ("x-1", 0, None)  # a shared beginning is no conversation
    assert place(conversations, [*system, 6, 7, 8, 9, 9], [3]) == ("x-0", 1, None)
    assert place(conversations, [*system, 6, 7, 5], [4]) == (
        "x-2",
        0,
        "x-0",
    )  # the last token of an answer may be left out
    assert place(conversations, [*system, 6, 7, 8, 9, 9, 2, 2, 2, 2], []) == ("x-0", 2, None)
    assert place(conversations, [*system, 9], [7, 8]) == ("x-3", 0, None)  # the same prompt again is not longer
    assert place(conversations, [*system, 9, 7, 8], []) == ("x-3", 1, None)


def test_old_ends_are_forgotten() -> None:
    conversations = Conversations(salt=SALT, block_size=4, prefix="x", most_ends=2)
    for first in range(5):
        place(conversations, [first] * 6, [9])
    assert (len(conversations._ends), sum(sum(tails.values()) for tails in conversations._tails.values())) == (2, 2)
    assert place(conversations, [0] * 7, [])[0] == "x-5"
    assert place(conversations, [4] * 7, [])[:2] == ("x-4", 1)


def test_a_line_is_read_by_the_format(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    prompt = list(range(130))
    lines = logged(
        path,
        ended(prompt, [1, 2, 3], arrival_s=100.5, finished_s=102.0),
        ended([*prompt, 1, 2, 3, *range(70)], [], arrival_s=105.0, finished_s=105.25),
    )
    assert set(lines[0]) <= set(FIELDS)
    assert [line["duration_s"] for line in lines] == [1.5, 0.25]
    trace = load_trace(str(path), strict=True)
    assert (trace.block_size, trace.rejected, trace.notes) == (64, (), ())
    (session,) = trace.sessions
    first, second = session.requests
    assert (first.input_tokens, first.output_tokens, second.input_tokens, second.output_tokens) == (130, 3, 203, 0)
    assert first.blocks.tolist() == second.blocks[:2].tolist()
    assert (first.arrival_s, second.arrival_s, second.think_s) == (0.0, 4.5, pytest.approx(3.0))


def test_a_restart_appends_and_its_hashes_compare(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    logged(path, ended(list(range(64)), [1]))
    path.write_bytes(path.read_bytes() + b'{"time_s": 12')  # the disk was full, or the machine went down
    logged_again = RequestLog(path)
    logged_again.start(page_size=64, clock=VirtualClock())
    logged_again.on_finish(ended(list(range(70)), [1]))
    logged_again.close()
    trace = load_trace(str(path))
    assert len(trace.rejected) == 1
    assert len({request.blocks[0] for request in trace.requests()}) == 1
    assert len(trace.sessions) == 2
    salt = tmp_path / "requests.jsonl.salt"
    assert (salt.stat().st_mode & 0o777, len(salt.read_text().strip())) == (0o600, 64)


def test_two_logs_have_secrets_of_their_own(tmp_path: Path) -> None:
    one, two = (logged(tmp_path / name, ended(list(range(64)), []))[0]["hashes"] for name in ("a", "b"))
    assert one != two


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        RequestLog(tmp_path / "missing" / "log")
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        RequestLog(tmp_path)
    other = tmp_path / "notes.txt"
    other.write_text("mine\n")
    with pytest.raises(ConfigError, match="is no request log"):
        RequestLog(other)
    path = tmp_path / "log"
    logged(path, ended(list(range(64)), []))
    with (
        closing(RequestLog(path)) as log,
        pytest.raises(
            ConfigError, match=r"blocks of 64 tokens, and pages of 128 make blocks of 128: name a new file\."
        ),
    ):
        log.start(page_size=128, clock=VirtualClock())
    salt = tmp_path / "log.salt"
    salt.write_text("00ff\n")
    with pytest.raises(ConfigError, match="must hold 32 bytes in hexadecimal and holds 2"):
        RequestLog(path)
    salt.write_text("no hexadecimal")
    with pytest.raises(ConfigError, match="cannot be used"):
        RequestLog(path)
    salt.unlink()
    with pytest.raises(ConfigError, match="is gone"):
        RequestLog(path)


def test_a_full_disk_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    log = RequestLog(path)
    log.start(page_size=64, clock=VirtualClock())
    for _ in range(3):
        log.on_finish(ended(list(range(64)), []))
    with caplog.at_level(logging.WARNING, "twinpool.server"):
        log.close()
    said = [record.getMessage() for record in caplog.records]
    assert sum("No space left on device" in line for line in said) <= 1
    assert said[-1] == f"--request-log {path} lacks 3 requests."


def test_a_disk_that_hangs_costs_lines_and_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "_MOST_WAITING", 2)
    log = RequestLog(tmp_path / "log")  # never started: nobody takes anything out of its queue
    for _ in range(5):
        log.on_finish(ended([1], []))
    assert log._lost == 3
    log.close()


def test_the_server_logs_what_it_served(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    fake = make_fake(options=ServeOptions(request_log=str(path)))
    prompt = "abc" * 30
    with TestClient(fake.app) as client:
        client.portal.call(fake.service.bridge.booted)
        for text in (prompt, prompt + "def"):
            assert client.post("/v1/completions", json={"prompt": text, "max_tokens": 5}).status_code == 200
        assert client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 0}).status_code == 400
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["input_tokens"] for line in lines] == [90, 93]
    assert [line["output_tokens"] for line in lines] == [n_said(prompt, 5), n_said(prompt + "def", 5)]
    assert lines[0]["hashes"] == lines[1]["hashes"]
    assert "abc" not in path.read_text()
    assert load_trace(str(path), strict=True).block_size == 64
