"""What the boot log says about the host tier."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.tiny_models import tiny_checkpoint
from tests.unit.engine.test_boot import boot
from tests.unit.test_bootlog import ledger_of
from twinpool import bootlog
from twinpool.engine import host as machine
from twinpool.errors import MemoryRefusal
from twinpool.memory.host import HostArena
from twinpool.memory.ledger import Ledger
from twinpool.units import GIB, MIB


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3_5", tmp_path_factory.mktemp("host_log"))


def arena_of(ledger: Ledger, total_bytes: int, *, max_slots: int | None = None) -> HostArena:
    return HostArena(
        total_bytes=total_bytes, page_bytes=ledger.page_bytes, slot_bytes=ledger.slot_bytes, max_slots=max_slots
    )


def test_memory_without_a_split() -> None:
    ledger = ledger_of(page_size=64)
    assert (ledger.max_mamba_cache_size, ledger.kv_tokens, ledger.slot_bytes) == (130, 461888, 77266944)
    taken, covered = bootlog.host_lines(arena_of(ledger, 60 * 10**9), ledger)
    # 1,572,864 bytes a page, so 50 pages a chunk beside one state: 762 chunks of 78,643,200 bytes; 3,552 tokens a session.
    assert taken == (
        "Allocating 59.93 GB host memory for KV and states together: at most 2438400 tokens or 762 states, no fixed split."
    )
    assert covered == (
        "HiCache covers 359 sessions of 3552 tokens, each with its state (680 by KV alone, 762 by states alone); "
        "the device holds 130."
    )
    assert bootlog.host_warnings(arena_of(ledger, 60 * 10**9), ledger) == ()


def test_a_fixed_quota_has_the_references_lines() -> None:
    ledger = ledger_of(page_size=64)
    arena = arena_of(ledger, 60 * 10**9, max_slots=300)
    kv, states, covered = bootlog.host_lines(arena, ledger)
    assert kv == "Allocating full hierarchical KV host pool: 1478400 tokens, 36.33 GB host memory."
    assert (
        states == "Allocating 23.18 GB host memory for hierarchical Mamba cache (300 state slots, layout=page_first)."
    )
    assert covered.startswith("HiCache covers 300 sessions of 3552 tokens")
    assert bootlog.host_warnings(arena, ledger) == ()


def test_a_host_tier_no_larger_than_the_device_is_warned_about() -> None:
    ledger = ledger_of(page_size=64)
    (warning,) = bootlog.host_warnings(arena_of(ledger, 10 * 10**9), ledger)
    assert warning == (
        "HiCache host KV pool (406400 tokens) is smaller than the device pool (461888 tokens): it covers 59 sessions of "
        "3552 tokens and the device holds 130, so hardly any outlives the device; raise --hicache-size."
    )
    # More than the device's KV, less than its KV and states.
    (warning,) = bootlog.host_warnings(arena_of(ledger, 12 * 10**9), ledger)
    assert warning.startswith(
        "HiCache host memory (11.95 GB) is too small for copies of both device pools: it covers 71 "
    )
    (warning,) = bootlog.host_warnings(arena_of(ledger, 60 * 10**9, max_slots=100), ledger)
    assert warning == (
        "HiCache host state pool (100 states) is too small for the KV beside it: it covers 100 sessions of 3552 tokens "
        "and the device holds 130, so hardly any outlives the device; raise --hicache-size or leave "
        "--hicache-mamba-size-gb out."
    )


def test_the_ledger_table_has_the_tier_below_the_whole() -> None:
    lines = bootlog.ledger_table(ledger_of(), host=(32 * GIB, "flag")).splitlines()
    assert lines[-2].split()[0] == "whole"
    assert lines[-1].split() == ["host", "tier", "32.00", "GiB", "flag", "host", "memory,", "beside", "the", "whole"]


def test_a_boot_says_it(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "twinpool.engine"):
        engine = boot(tiny, enable_hierarchical_cache=True, hicache_size=0.2)
    engine.close()
    said = caplog.messages
    assert any(line.startswith("Tree cache initialized: ") and line.endswith("hicache_attached=True") for line in said)
    scheduler = next(at for at, line in enumerate(said) if line.startswith("max_total_num_tokens="))
    assert said[scheduler + 1].startswith("Allocating 0.20 GB host memory for KV and states together: at most ")
    assert said[scheduler + 2].startswith("HiCache covers ")
    assert "host tier" in said[-1].splitlines()[-1]
    assert [line for line in said if line.startswith("HiCache host")] == []
    assert engine.snapshot().host is not None


def test_a_tier_that_is_too_small_is_a_warning(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "twinpool.engine"):
        boot(tiny, enable_hierarchical_cache=True, hicache_size=0.004).close()
    (record,) = [record for record in caplog.records if record.getMessage().startswith("HiCache host KV pool")]
    assert record.levelname == "WARNING"


def test_sizes_of_a_tier_that_is_not_there_are_a_warning(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "twinpool.engine"):
        boot(tiny, hicache_size=0.2, hicache_write_policy="write_back").close()
        boot(tiny).close()
    said = [line for line in caplog.messages if line.startswith("There is no host tier")]
    assert len(said) == 1
    assert "so --hicache-size, --hicache-write-policy does nothing: give --enable-hierarchical-cache" in said[0]


def test_on_a_cpu_the_devices_pools_are_not_given_away_twice(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 100 * MIB)
    # 64 MiB of the 100 are the device's; most of them are pools that nobody has written to yet.
    with pytest.raises(MemoryRefusal, match=r"Requesting 0\.08 GB but only have 0\.0\d GB free"):
        boot(tiny, enable_hierarchical_cache=True, hicache_size=0.08)
    engine = boot(tiny, enable_hierarchical_cache=True, hicache_size=0.03)
    engine.close()
