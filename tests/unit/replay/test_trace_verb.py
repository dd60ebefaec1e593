"""`twinpool trace`: the table, the JSON, strictness, and a synthesized file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twinpool.cli.trace import run
from twinpool.errors import ConfigError

DATA = Path(__file__).resolve().parents[2] / "data" / "traces"


def test_info_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", str(DATA / "agent.json"), str(DATA / "azure.csv")]) == 0
    agent, azure = capsys.readouterr().out.split("\n\nazure.csv")
    assert "5 requests in 2 sessions, 1 of them sub-agents or forks; 0 rejected" in agent
    assert "41.7% of blocks (5 of 12, 64 tokens each), 40.9% of input tokens (320 of 782)" in agent
    assert "note: The public collection" in agent
    assert "reuse: unknown" in azure


def test_info_json_has_every_rejection(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text((DATA / "mooncake.jsonl").read_text() + "{}\n" * 7)
    assert run(["info", str(path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["traces"]
    assert (found["requests"], found["rejected"], len(found["rejections"])) == (4, 7, 7)
    assert found["rejections"][0] == {"where": "t.jsonl:5", "reason": "input_length is missing"}
    assert found["reuse"]["seen_blocks"] == 5
    assert run(["info", str(path)]) == 0
    assert "rejected: 2 more; --json lists them all" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"t.jsonl:5: input_length is missing\."):
        run(["info", "--strict", str(path)])


def test_bad_words() -> None:
    with pytest.raises(ConfigError, match="describe is not a verb of twinpool trace; there are info and synthesize"):
        run(["describe"])
    with pytest.raises(ConfigError, match="needs at least one FILE"):
        run(["info"])
    with pytest.raises(ConfigError, match="nonsense is not a trace format; known are agent"):
        run(["info", "--format", "nonsense", str(DATA / "azure.csv")])
    with pytest.raises(ConfigError, match="--stric is not a flag"):
        run(["info", "--stric"])


def test_synthesize_and_read_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    assert run(["synthesize", "--sessions", "3", "--turns", "4", "--seed", "7", "-o", str(path)]) == 0
    assert capsys.readouterr().out == f"12 requests in {path}\n"
    assert run(["synthesize", "--sessions", "3", "--turns", "4", "--seed", "7"]) == 0
    assert capsys.readouterr().out == path.read_text()
    assert run(["info", "--strict", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["traces"][0]["requests"] == 12
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        run(["synthesize", "-o", str(tmp_path / "no" / "t.jsonl")])


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    assert "synthesize" in capsys.readouterr().out
    assert run([]) == 2
    with pytest.raises(SystemExit) as done:
        run(["info", "--help"])
    assert done.value.code == 0
    assert "--strict" in capsys.readouterr().out
