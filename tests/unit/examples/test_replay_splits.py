"""The example of three splits shows what it says: a pool runs out at either end, and the middle reuses most."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from twinpool.replay.outcome import pressure

PATH = Path(__file__).resolve().parents[3] / "examples" / "replay_splits.py"


def test_replay_splits(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("replay_splits", PATH)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    few_states, middle, little_kv = (example.run(slots) for slots in example.SLOTS)
    assert pressure(few_states).pool == "states"
    assert pressure(little_kv).pool == "KV"
    least = max(few_states.result.reuse.token_share, little_kv.result.reuse.token_share)
    assert middle.result.reuse.token_share > least + 0.1
    example.main()
    assert "16 slots, 261,120 KV tokens:" in capsys.readouterr().out
