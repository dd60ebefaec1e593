"""The examples run and show what they say they show."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture(autouse=True)
def _logging_again():
    yield
    logging.disable(logging.NOTSET)


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_concurrency_bound() -> None:
    example = load("concurrency_bound")
    (small, answers), (large, same) = example.run(0.3), example.run(4.0)
    assert small["ran at once"] == small["allowed"] < large["ran at once"] == large["allowed"]
    assert float(str(small["KV used"]).rstrip("%")) < 10
    assert answers == same


def test_residency_bound() -> None:
    example = load("residency_bound")
    (few, answers), (many, same) = example.run(8), example.run(96)
    share = [int(str(row["reused"]).rstrip("%")) for row in (few, many)]
    assert share[0] < 20
    assert share[1] > 95
    assert few["KV tokens"] > few["all sessions"]
    assert answers == same


def test_plan_from_boot_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("plan_from_boot_log")
    boot = example.run(example.LOG)
    assert {check.verdict for check in boot.checks} == {"equal"}
    assert (boot.outcome.fit.running, boot.outcome.fit.idle) == (39, 31)
    assert boot.outcome.fit.tokens_short == 48 * 8192 - 327_310
    monkeypatch.setattr(example.sys, "argv", ["plan_from_boot_log.py"])
    example.main()
    assert "--max-mamba-cache-size 76 for 8 requests and 52 idle sessions" in capsys.readouterr().out
