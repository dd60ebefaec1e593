"""Other ranks as processes: what they are told, what they say, and how they end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.tiny_models import tiny_checkpoint
from twinpool.config.options import ServeOptions
from twinpool.config.resolve import DeviceFacts, resolve
from twinpool.engine.checkpoint import read_spec
from twinpool.engine.rank import load_rank
from twinpool.engine.rank_boot import agree, start_ranks
from twinpool.engine.ranks import Ranks
from twinpool.errors import ModelError, RankLost

MIB = 1 << 20


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks(2)
    yield made
    made.close()
    assert all(peer.process.returncode is not None for peer in made._peers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3_5", tmp_path_factory.mktemp("ranks"))


def start(ranks: Ranks, folder: Path, **options: object) -> tuple[object, ...]:
    """Tell the other rank what it is; returns what rank 0 knows too."""
    spec = read_spec(folder)
    resolved = resolve(
        ServeOptions(tp_size=2, device_memory_bytes=64 * MIB, given=frozenset(), **options), spec, DeviceFacts(64 * MIB)
    )
    start_ranks(ranks, folder=folder, spec=spec, resolved=resolved, pre_load_bytes=64 * MIB, threads=1)
    return spec, resolved


def test_all_have_the_least_of_what_each_has_left(ranks: Ranks, folder: Path) -> None:
    _, resolved = start(ranks, folder)
    loaded = load_rank(folder, resolved, pre_load_bytes=64 * MIB, rank=0, say=lambda line: None)
    assert agree(ranks, resolved, loaded) == 64 * MIB - loaded.model.weight_bytes


def test_a_bug_in_another_rank_is_said_here(ranks: Ranks, folder: Path) -> None:
    start(ranks, folder)
    for word in ("all have loaded", "no pools"):
        ranks.collect()
        ranks.send(word)
    with pytest.raises(RankLost, match="rank 1 has failed"):
        ranks.collect()
    with pytest.raises(RankLost, match="no rank can go on without the others: start again"):
        ranks.check()


def test_an_expected_error_of_another_rank_stays_one(ranks: Ranks, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    spec = read_spec(folder)
    resolved = resolve(ServeOptions(tp_size=2, given=frozenset()), spec, DeviceFacts(64 * MIB))
    start_ranks(ranks, folder=tmp_path, spec=spec, resolved=resolved, pre_load_bytes=64 * MIB, threads=1)
    with pytest.raises(ModelError, match=r"has no \*\.safetensors files"):
        ranks.collect()


def test_an_end_is_told_once_and_to_all(ranks: Ranks) -> None:
    told = threading.Event()
    ranks.watch()
    ranks.on_lost(told.set)
    ranks.check()
    ranks._peers[0].process.kill()
    assert told.wait(10)
    with pytest.raises(RankLost, match=r"the process of rank 1 has ended \(signal 9\)"):
        ranks.check()
    with pytest.raises(RankLost, match="signal 9"):
        ranks.send("anything")
    late = threading.Event()
    ranks.on_lost(late.set)
    assert late.is_set()


def test_a_step_that_fails_here_ends_the_others(ranks: Ranks) -> None:
    ranks.watch()
    ranks.lose(ValueError("no room"))
    with pytest.raises(RankLost, match=r"rank 0 could not compute a step \(ValueError: no room\)"):
        ranks.check()
    assert ranks._peers[0].process.wait(5) == -9


def test_ranks_end_when_asked(ranks: Ranks, folder: Path) -> None:
    start(ranks, folder)
    ranks.collect()
    ranks.watch()
    ranks.close()
    assert ranks._peers[0].process.returncode == 0
    ranks.check()


def test_ranks_end_with_rank_0(tmp_path: Path) -> None:
    script = (
        "import time\n"
        "from twinpool.engine.ranks import Ranks\n"
        "print(*(peer.process.pid for peer in Ranks(3)._peers), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as first:
        assert first.stdout is not None
        others = [psutil.Process(int(pid)) for pid in first.stdout.readline().split()]
        first.kill()
    for other in others:
        other.wait(timeout=30)
