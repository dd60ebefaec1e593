"""`twinpool replay calibrate` against a live server with the demo model."""

from __future__ import annotations

from pathlib import Path

import pytest

import twinpool.demo
from tests.agreement.live import live_server
from twinpool.replay.calibrate import run
from twinpool.replay.cost import read_calibration

DEMO = str(Path(next(iter(twinpool.demo.__path__))))


def test_a_live_server_is_measured_and_modelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "calibration.json"
    machine = (DEMO, "--gpu", "cpu", "--device-memory", "1GiB")
    with live_server(tmp_path) as live:
        assert run([live.url, *machine, "--out", str(out), "--seconds", "6", "--repeats", "1"]) == 0
        live.check_no_leak()
    found = read_calibration(out)
    assert 0 < found.flops_share <= 1
    assert 0 < found.bandwidth_share <= 1
    assert found.step_s + found.row_s > 0
    printed = capsys.readouterr().out
    assert "decode of 8 at 64" in printed
    errors = [int(line.split()[-1].rstrip("%")) for line in printed.splitlines() if line.endswith("%")]
    assert len(errors) >= 6
    assert sorted(map(abs, errors))[len(errors) // 2] < 50  # a loaded machine measures badly, but not nonsense
