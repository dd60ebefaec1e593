"""Each reader on a small file: values, sessions, times; and the records that it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twinpool.errors import ConfigError
from twinpool.replay.formats import FORMATS, load_trace
from twinpool.replay.trace import Trace

DATA = Path(__file__).resolve().parents[2] / "data" / "traces"


def load(name: str) -> Trace:
    return load_trace(str(DATA / name), strict=True)


def write_lines(folder: Path, *lines: object) -> str:
    path = folder / "t.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def test_agent_sessions_and_sub_agents() -> None:
    trace = load("agent.json")
    assert (trace.format, trace.block_size, trace.scope, trace.clock) == ("agent", 64, "session", "session")
    parent, child = trace.sessions
    assert (parent.id, parent.namespace, parent.parent) == ("trace_a", "trace_a", None)
    assert (child.id, child.namespace, child.parent) == ("trace_a/agent_001", "trace_a", "trace_a")
    assert (parent.tool_tokens, parent.system_tokens) == (100, 28)
    assert [request.arrival_s for request in parent.requests] == [0.0, 5.0, 9.0]
    assert [request.think_s for request in parent.requests] == [None, 3.0, 1.0]
    assert [request.api_time_s for request in parent.requests] == [2.0, None, 1.0]
    assert [request.blocks.tolist() for request in parent.requests] == [[1, 2], [1, 2, 3, 4], [1, 2, 5]]
    assert [request.arrival_s for request in child.requests] == [6.0, 8.0]
    assert "friendlier to caches" in trace.notes[0]


def test_a_prompt_that_is_extended_shares_its_blocks() -> None:
    first, second, _ = load("agent.json").sessions[0].requests
    assert first.blocks.base is second.blocks
    with pytest.raises(ValueError, match="read-only"):
        first.blocks[0] = 7


def test_mooncake() -> None:
    trace = load("mooncake.jsonl")
    assert (trace.format, trace.block_size, trace.scope, trace.clock) == ("mooncake", 512, "global", "trace")
    assert [session.id for session in trace.sessions] == [f"mooncake.jsonl:{line}" for line in (1, 2, 3, 4)]
    requests = list(trace.requests())
    assert [request.arrival_s for request in requests] == [0.0, 0.5, 1.5, 2.0]
    assert [len(request.blocks) for request in requests] == [2, 3, 3, 2]
    assert {request.think_s for request in requests} == {None}


def test_azure() -> None:
    trace = load("azure.csv")
    assert (trace.format, trace.block_size) == ("azure", None)
    requests = list(trace.requests())
    assert [(request.input_tokens, request.output_tokens) for request in requests] == [(4808, 10), (3180, 8), (110, 27)]
    assert [request.arrival_s for request in requests] == pytest.approx([0.0, 0.25, 3.0], abs=1e-6)
    assert "unknown" in trace.notes[0]


def test_azure_with_zones_and_more_columns(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(
        b"\xef\xbb\xbfTIMESTAMP,NumImages,ContextTokens,GeneratedTokens\r\n"
        b"2024-05-10 00:00:00.5+00:00,0,10,0\r\n2024-05-10 02:00:01+02:00,3,11,1\r\n"
    )
    requests = list(load_trace(str(path), strict=True).requests())
    assert [(request.arrival_s, request.input_tokens) for request in requests] == [(0.0, 10), (0.5, 11)]


def test_bailian_tree() -> None:
    trace = load("bailian.jsonl")
    assert (trace.format, trace.block_size) == ("bailian", 16)
    assert [(session.id, session.parent, len(session.requests)) for session in trace.sessions] == [
        ("7", None, 3), ("9", "7", 1), ("10", None, 1),
    ]  # fmt: skip
    assert [request.arrival_s for request in trace.sessions[0].requests] == [0.0, 2.5, 7.5]
    assert trace.notes[1] == "1 requests follow one that is not in the trace; each starts a session here."


def test_request_log() -> None:
    trace = load("requests.jsonl")
    assert (trace.format, trace.block_size, trace.scope, trace.clock) == ("request-log", 16, "global", "trace")
    a, b, anonymous = trace.sessions
    assert (a.id, b.id, anonymous.id, b.parent) == ("a", "b", "requests.jsonl:5", "a")
    assert [request.arrival_s for request in a.requests] == [0.0, 7.0, 9.0]
    # 107 - (100 + 2) = 5; the third came before the second answer's end, so nobody thought.
    assert [request.think_s for request in a.requests] == [None, 5.0, None]
    assert len(anonymous.requests[0].blocks) == 0


def test_late_lines_are_sorted_and_told(tmp_path: Path) -> None:
    log = {"input_tokens": 5, "output_tokens": 1, "block_size": 16, "hashes": []}
    path = write_lines(tmp_path, {"time_s": 9, **log}, {"time_s": 4, **log})
    trace = load_trace(path)
    assert [session.id for session in trace.sessions] == ["t.jsonl:2", "t.jsonl:1"]
    assert trace.notes[-1] == "1 requests stand after a later one; all are ordered by time here."


MOONCAKE = {"timestamp": 0, "input_length": 600, "output_length": 10, "hash_ids": [0, 1]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hash_ids": [0]}, "hash_ids has 1 ids, but 600 input tokens in blocks of 512 take 2"),
        ({"hash_ids": [0, 1, 2]}, "hash_ids has 3 ids, but 600 input tokens in blocks of 512 take 2"),
        ({"hash_ids": [0, 1.5]}, "hash_ids must hold integers, got float"),
        ({"hash_ids": [0, True]}, "hash_ids must hold integers, got bool"),
        ({"hash_ids": [0, -1]}, "hash_ids must hold ids from 0, got -1"),
        ({"hash_ids": [0, 1 << 63]}, "hash_ids must hold ids of at most 9223372036854775807"),
        ({"hash_ids": None}, "hash_ids must be a list, got null"),
        ({"timestamp": -1}, "timestamp must be a time from 0 to 1e+15, got -1"),
        ({"timestamp": float("nan")}, "timestamp must be a time from 0 to 1e+15, got NaN"),
        ({"timestamp": 10**400}, f"timestamp must be a time from 0 to 1e+15, got {'1' + '0' * 36}..."),
        ({"timestamp": "0"}, 'timestamp must be a number, got "0"'),
        ({"input_length": 0}, "input_length must be 1 to 100000000, got 0"),
        ({"input_length": 600.0}, "input_length must be an integer, got 600.0"),
        ({"output_length": -2}, "output_length must be 0 to 100000000, got -2"),
    ],
)
def test_bad_fields_are_rejected(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = write_lines(tmp_path, MOONCAKE, MOONCAKE | change)
    trace = load_trace(path)
    assert [(rejection.where, rejection.reason) for rejection in trace.rejected] == [("t.jsonl:2", reason)]
    assert len(trace.sessions) == 1
    with pytest.raises(ConfigError) as raised:
        load_trace(path, strict=True)
    assert str(raised.value) == f"t.jsonl:2: {reason}."


def test_missing_field_and_broken_lines(tmp_path: Path) -> None:
    less = {key: value for key, value in MOONCAKE.items() if key != "output_length"}
    trace = load_trace(write_lines(tmp_path, MOONCAKE, "", less, "[1]", '{"timestamp": 0, "inp'))
    assert [rejection.where for rejection in trace.rejected] == ["t.jsonl:3", "t.jsonl:4", "t.jsonl:5"]
    assert trace.rejected[0].reason == "output_length is missing"
    assert trace.rejected[1].reason == "the line must be an object, got [1]"
    assert trace.rejected[2].reason.startswith("not JSON (")


def test_bad_azure_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    good = "2023-11-16 18:17:03.97,4808,10"
    rows = [good, "2023-11-16 18:17:03.97,4808", "soon,1,1", "2023-13-16 18:17:03,1,1", "2023-11-16 18:17:03,-5,1"]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    trace = load_trace(str(path))
    assert [rejection.where for rejection in trace.rejected] == ["t.csv:3", "t.csv:4", "t.csv:5", "t.csv:6"]
    assert trace.rejected[0].reason == "the header has 3 columns, this row has 2"
    assert trace.rejected[3].reason == "ContextTokens must be a count of tokens, got '-5'"


def test_request_log_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    good = {"time_s": 0, "input_tokens": 20, "output_tokens": 1, "block_size": 16, "hashes": [5]}
    bad: list[dict[str, Any]] = [
        good | {"prompt": "hello"}, good | {"block_size": 8, "hashes": [1, 2]}, good | {"hashes": [5, 6]},
    ]  # fmt: skip
    trace = load_trace(write_lines(tmp_path, good, *bad))
    assert [rejection.reason for rejection in trace.rejected] == [
        "prompt is not a field of a request log",
        "block_size is 8, but 16 on the lines before",
        "hashes has 2 ids, but 20 input tokens in blocks of 16 take 1",
    ]


def test_agent_rejects_name_the_place(tmp_path: Path) -> None:
    session = json.loads((DATA / "agent.json").read_text())
    session["requests"][1]["hash_ids"] = [1, 2, 3]
    session["requests"][2]["requests"][0]["in"] = "64"
    other = session | {"id": "trace_b", "hash_id_scope": "global"}
    trace = load_trace(write_lines(tmp_path, session, other, session, "nonsense"))
    assert [rejection.where for rejection in trace.rejected] == [
        "t.jsonl:1:requests[1]", "t.jsonl:1:requests[2].requests[0]", "t.jsonl:2", "t.jsonl:3", "t.jsonl:4",
    ]  # fmt: skip
    assert trace.rejected[0].reason == "hash_ids has 3 ids, but 260 input tokens in blocks of 64 take 4"
    assert trace.rejected[2].reason == "hash_id_scope must be local"
    assert trace.rejected[3].reason == "session trace_a was given at t.jsonl:1"
    assert [len(session.requests) for session in trace.sessions] == [2, 1]


def test_bailian_rejects_a_chat_given_twice(tmp_path: Path) -> None:
    line = (DATA / "bailian.jsonl").read_text().splitlines()[0]
    trace = load_trace(write_lines(tmp_path, line, line))
    assert trace.rejected[0].reason == "chat_id 7 was used at t.jsonl:1"


def test_no_usable_record(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no usable mooncake record; of 1 rejected, the first is t.jsonl:1: "):
        load_trace(write_lines(tmp_path, MOONCAKE | {"input_length": -1}))


def test_unknown_format(tmp_path: Path) -> None:
    path = write_lines(tmp_path, {"hello": 1})
    with pytest.raises(ConfigError, match=r"t.jsonl:1 starts like none of the trace formats \(agent, bailian, "):
        load_trace(path)
    with pytest.raises(ConfigError, match="nonsense is not a trace format; known are agent, "):
        load_trace(path, format="nonsense")


def test_format_overrides_detection(tmp_path: Path) -> None:
    path = write_lines(tmp_path, "not json", MOONCAKE)
    trace = load_trace(path, format="mooncake")
    assert (len(trace.sessions), len(trace.rejected)) == (1, 1)


@pytest.mark.parametrize("name", ["agent.json", "mooncake.jsonl", "azure.csv", "bailian.jsonl", "requests.jsonl"])
def test_exactly_one_format_recognises_a_file(name: str) -> None:
    first = (DATA / name).read_bytes().splitlines(keepends=True)[0]
    assert sum(known.recognises(first) for known in FORMATS) == 1
