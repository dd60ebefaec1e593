"""`twinpool replay` as a user runs it: exit codes, files, bad input in one sentence, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli.running import run

DATA = Path(__file__).resolve().parents[2] / "data" / "traces"
MACHINE = ["Qwen3.5-35B-A3B", "--gpu", "H200", "--tp-size", "2", "--page-size", "64", "--pool-memory", "800MiB"]
GOOD = '{"timestamp": 0, "input_length": 1000, "output_length": 3, "hash_ids": [1, 2]}\n'


@pytest.mark.parametrize("name", ["agent.json", "azure.csv", "bailian.jsonl", "mooncake.jsonl", "requests.jsonl"])
@pytest.mark.parametrize("arrival", ["closed", "count"])
def test_every_format_is_replayed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, arrival: str
) -> None:
    code, out, err = run(monkeypatch, capsys, "replay", str(DATA / name), *MACHINE, "--arrival", arrival)
    assert (code, err) == (0, "")
    assert out.startswith(f"{name} on Qwen3.5-35B-A3B, 2 × H200\n")
    assert ("Reuse: unknown." in out) == (name == "azure.csv")
    assert ("Times are modelled" in out) == (arrival == "closed")


def test_json_is_the_same_bytes_each_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(DATA / "agent.json"), *MACHINE, "--sessions", "2", "--start-anywhere", "--seed", "5"]
    first = run(monkeypatch, capsys, "replay", *words, "--json", "--records")
    assert first == run(monkeypatch, capsys, "replay", *words, "--json", "--records")
    found = json.loads(first[1])
    assert found["setup"]["seed"] == 5
    assert len(found["records"]) == found["counts"]["requests"] + found["counts"]["warm_up"]
    without = json.loads(run(monkeypatch, capsys, "replay", *words, "--json", "--no-bounds")[1])
    assert found["bounds"]["infinite_tokens"] >= found["reuse"]["reused_tokens"]
    assert (without["bounds"], without["records"]) == (None, None)
    assert without["reuse"] == found["reuse"]


def test_files_are_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page, events = tmp_path / "page.html", tmp_path / "events.json"
    files = ["--html", str(page), "--chrome-trace", str(events)]
    code, _, _ = run(monkeypatch, capsys, "replay", str(DATA / "mooncake.jsonl"), *MACHINE, *files)
    assert code == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert {one["ph"] for one in json.loads(events.read_text())["traceEvents"]} == {"M", "X", "C"}
    code, _, err = run(monkeypatch, capsys, "replay", str(DATA / "mooncake.jsonl"), *MACHINE, "--html", str(tmp_path))
    assert (code, err) == (2, f"twinpool: error: --html {tmp_path} is a folder; name a file.\n")


BAD_LINES = {
    '{"timestamp": "x", "input_length": 9, "output_length": 1, "hash_ids": [1]}': 'timestamp must be a number, got "x"',
    '{"timestamp": -5, "input_length": 9, "output_length": 1, "hash_ids": [1]}': "timestamp must be a time from 0",
    '{"timestamp": 1, "input_length": 2000, "output_length": 1, "hash_ids": [1]}': "hash_ids has 1 ids, but 2000 input tokens",
    '{"timestamp": 1, "input_length": 1.5, "output_length": 1, "hash_ids": [1]}': "input_length must be an integer, got 1.5",
    '{"timestamp": 1, "input_length": 9,': "not JSON",
}  # fmt: skip


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_record_is_left_out_and_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(GOOD + line + "\n")
    code, out, err = run(monkeypatch, capsys, "replay", str(path), *MACHINE)
    assert (code, err) == (0, "")
    assert "  left out: 1 records that cannot be used\n" in out
    assert f"  left out: t.jsonl:2: {BAD_LINES[line]}" in out
    assert "1 requests of 1 sessions" in out
    code, out, err = run(monkeypatch, capsys, "replay", str(path), *MACHINE, "--strict")
    assert (code, out) == (2, "")
    assert err.startswith(f"twinpool: error: t.jsonl:2: {BAD_LINES[line]}")


def test_a_request_larger_than_the_pool(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    blocks = list(range(100))
    path.write_text(
        f'{GOOD}{{"timestamp": 0, "input_length": 51200, "output_length": 3, "hash_ids": {blocks}}}\n'
    )  # fmt: skip
    why = "session t.jsonl:2, request 1: the prompt has 51200 tokens, but the KV pool holds"
    code, out, _ = run(monkeypatch, capsys, "replay", str(path), *MACHINE)
    assert code == 0
    assert f"Refused: 1; the first is {why}" in out
    code, out, err = run(monkeypatch, capsys, "replay", str(path), *MACHINE, "--strict")
    assert (code, out) == (2, "")
    assert err.startswith(f"twinpool: error: {why}")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "t.jsonl: t.jsonl is empty; a trace has at least one request."),
        (b'{"timestamp": 0, "input_length": 0, "output_length": 3, "hash_ids": []}\n',
         "t.jsonl has no usable mooncake record; of 1 rejected, the first is t.jsonl:1: input_length must be 1 to"),
        (b"\xfd7zXZ\x00\x00\x04", "t.jsonl cannot be read: Compressed file ended before the end-of-stream marker"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "t.jsonl has no usable azure record; it has no request."),
    ],
    ids=["empty", "nothing usable", "cut short", "a header alone"],
)  # fmt: skip
def test_a_trace_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    code, out, err = run(monkeypatch, capsys, "replay", str(path), *MACHINE)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        ([], 2, "No trace is named: give TRACE"),
        ([str(DATA / "mooncake.jsonl"), *MACHINE, "--records"], 2, "--records adds requests to the JSON: give --json with it."),
        ([str(DATA / "mooncake.jsonl"), *MACHINE, "--speed", "0"], 2, "--speed"),
        ([str(DATA / "mooncake.jsonl"), *MACHINE[:-1], "10MiB"], 3, "Not enough GPU memory"),
        (["nowhere.jsonl", *MACHINE], 2, "nowhere.jsonl cannot be read: No such file or directory."),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str], code: int, said: str
) -> None:
    found, out, err = run(monkeypatch, capsys, "replay", *argv)
    assert (found, out, err.count("\n")) == (code, "", 1)
    assert said in err


@pytest.mark.parametrize(("verb", "module"), [("sweep", "sweep_cli"), ("calibrate", "calibrate")])
def test_other_verbs_get_their_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str, module: str
) -> None:
    monkeypatch.setattr(f"twinpool.replay.{module}.run", lambda argv: print(*argv) or 0)
    assert run(monkeypatch, capsys, "replay", verb, "a", "--b") == (0, "a --b\n", "")


def test_no_torch_is_loaded() -> None:
    words = [str(DATA / "mooncake.jsonl"), *MACHINE]
    code = (
        f"import sys; from twinpool.cli.main import run; run(['replay', *{words!r}]); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--arrival", "recorded", "--sessions", "4"], "--sessions does nothing with --arrival recorded: it is for --arrival closed."),
        (["--start-anywhere"], "--start-anywhere does nothing with --arrival recorded: it is for --arrival closed."),
        (["--arrival", "count", "--think-s", "2"], "--think-s does nothing with --arrival count: it is for --arrival closed."),
        (["--arrival", "closed", "--speed", "2"], "--speed does nothing with --arrival closed: it is for --arrival recorded."),
        (["--speed", "1e-300"], "--speed must be at least 1e-06, got 1e-300."),
        (
            ["--hicache-size", "5"],
            "--hicache-size does nothing without --enable-hierarchical-cache: give that, too, or leave it out.",
        ),
        (
            ["--enable-hierarchical-cache", "--hicache-host-memory-fraction", "0.5"],
            "--hicache-host-memory-fraction does nothing in a replay, which does not know the host's memory: give --hicache-size instead.",
        ),
    ],
)  # fmt: skip
def test_a_flag_that_would_do_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    code, out, err = run(monkeypatch, capsys, "replay", str(DATA / "mooncake.jsonl"), *MACHINE, *words)
    assert (code, out, err) == (2, "", f"twinpool: error: {why}\n")


def test_a_pasted_line_may_have_flags_that_do_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["replay", str(DATA / "mooncake.jsonl"), *MACHINE[1:], "--no-bounds"]
    line = ["--", "sglang", "serve", "--model-path", MACHINE[0], "--hicache-size", "5"]
    code, _, err = run(monkeypatch, capsys, *words, *line)
    assert (code, err) == (0, "")


def test_a_place_that_cannot_be_written_is_told_before_the_trace_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = tmp_path / "none" / "events.json"
    code, _, err = run(monkeypatch, capsys, "replay", "no-such-trace", *MACHINE, "--chrome-trace", str(place))
    assert (code, err) == (
        2, f"twinpool: error: --chrome-trace {place} cannot be written: there is no folder {place.parent}.\n",
    )  # fmt: skip


def test_names_that_no_encoding_has_are_written_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = {"time_s": 0, "session": "\ud800", "input_tokens": 9, "output_tokens": 1, "block_size": 16, "hashes": []}
    path, page, events = tmp_path / "t.jsonl", tmp_path / "page.html", tmp_path / "events.json"
    path.write_text(json.dumps(line) + "\n")
    files = ["--html", str(page), "--chrome-trace", str(events)]
    assert run(monkeypatch, capsys, "replay", str(path), *MACHINE, *files)[0] == 0
    spans = [one for one in json.loads(events.read_text())["traceEvents"] if one["ph"] == "X"]
    assert {one["args"]["session"] for one in spans} == {"\ud800"}
