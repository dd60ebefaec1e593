"""What the boot log says about the host tier."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tiny_models import tiny_checkpoint
from tests.unit.engine.test_boot import boot
from tests.unit.memory.test_budget import QWEN3_NEXT, rest_of
from tests.unit.test_bootlog import ledger_of
from twinpool import bootlog
from twinpool.engine import host as machine
from twinpool.errors import MemoryRefusal
from twinpool.memory.budget import plan_memory
from twinpool.memory.host import HostArena
from twinpool.memory.host_advice import HostMemory, pools_bytes
from twinpool.memory.host_budget import host_arena
from twinpool.memory.ledger import Ledger
from twinpool.units import GIB, MIB


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3_5", tmp_path_factory.mktemp("host_log"))


def arena_of(ledger: Ledger, total_bytes: int, *, max_slots: int | None = None) -> HostArena:
    return HostArena(
        total_bytes=total_bytes, page_bytes=ledger.page_bytes, slot_bytes=ledger.slot_bytes, max_slots=max_slots
    )


def resolved_of(**values: object) -> SimpleNamespace:
    return SimpleNamespace(**{
        "enable_hierarchical_cache": True, "hicache_size": 0.0, "hicache_ratio": None, "hicache_mamba_size_gb": None,
        "hicache_host_memory_fraction": 0.8, "mem_fraction_static": 0.9, "context_len": 262144, **values,
    })  # fmt: skip


def warnings_of(ledger: Ledger, arena: HostArena, **values: object) -> tuple[str, ...]:
    memory = HostMemory(free_bytes=100 * 10**9)
    return bootlog.host_warnings(arena, ledger, resolved=resolved_of(**values), memory=memory)


def test_memory_without_a_split() -> None:
    ledger = ledger_of(page_size=64)
    assert (ledger.max_mamba_cache_size, ledger.kv_tokens, ledger.slot_bytes) == (130, 461888, 77266944)
    taken, covered = bootlog.host_lines(arena_of(ledger, 60 * 10**9), ledger, context_len=262144)
    # 1,572,864 bytes a page, so 50 pages a chunk beside one state: 762 chunks of 78,643,200 bytes; 3,552 tokens a session.
    assert taken == (
        "Allocating 59.93 GB host memory for KV and states together: at most 2438400 tokens or 762 states, no fixed split."
    )
    assert covered == (
        "HiCache covers 359 sessions of 3552 tokens, each with its state (680 by KV alone, 762 by states alone); "
        "the device holds 130."
    )
    assert warnings_of(ledger, arena_of(ledger, 60 * 10**9)) == ()


def test_a_fixed_quota_has_the_references_lines() -> None:
    ledger = ledger_of(page_size=64)
    arena = arena_of(ledger, 60 * 10**9, max_slots=300)
    kv, states, covered = bootlog.host_lines(arena, ledger, context_len=262144)
    assert kv == "Allocating full hierarchical KV host pool: 1478400 tokens, 36.33 GB host memory."
    assert (
        states == "Allocating 23.18 GB host memory for hierarchical Mamba cache (300 state slots, layout=page_first)."
    )
    assert covered.startswith("HiCache covers 300 sessions of 3552 tokens")
    assert warnings_of(ledger, arena) == ()


def test_a_host_tier_no_larger_than_the_device_is_warned_about() -> None:
    ledger = ledger_of(page_size=64)
    (warning,) = warnings_of(ledger, arena_of(ledger, 10 * 10**9), hicache_size=10.0)
    assert warning == (
        "HiCache host KV pool (406400 tokens) is smaller than the device pool (461888 tokens): it covers 59 sessions of 3552 tokens "
        "and the device holds 130, so hardly any outlives the device. To cover more than the device it needs 21.9 GB, and 100.00 GB "
        "are free: raise --hicache-size to 21.9 or more."
    )
    assert warnings_of(ledger, arena_of(ledger, int(21.9 * 10**9))) == ()
    # More than the device's KV, less than its KV and states.
    (warning,) = warnings_of(ledger, arena_of(ledger, 12 * 10**9), hicache_ratio=0.56)
    assert warning.startswith(
        "HiCache host memory (11.95 GB) is too small for copies of both device pools: it covers 71 "
    )
    ratio = float(warning.partition("raise --hicache-ratio to ")[2].partition(" or")[0])
    assert warnings_of(ledger, arena_of(ledger, int(ratio * pools_bytes(ledger)))) == ()


def test_one_session_is_one() -> None:
    ledger = ledger_of(page_size=64)
    (warning,) = warnings_of(ledger, arena_of(ledger, 250 * 10**6))
    assert ": it covers 1 session of 3552 tokens and the device holds 130, " in warning


def test_no_session_is_longer_than_the_context() -> None:
    """Of longer ones the same arena would cover fewer than the device."""
    ledger = ledger_of(page_size=64, max_mamba_cache_size=5)
    assert ledger.kv_tokens // 5 > 8192
    arena = arena_of(ledger, 10 * 10**9)
    assert "HiCache covers 35 sessions of 8192 tokens" in bootlog.host_lines(arena, ledger, context_len=8192)[1]
    assert warnings_of(ledger, arena, context_len=8192) == ()
    assert warnings_of(ledger, arena, context_len=1 << 20) != ()


def test_a_quota_that_binds_is_what_is_advised() -> None:
    ledger = ledger_of(page_size=64)
    (warning,) = warnings_of(ledger, arena_of(ledger, 60 * 10**9, max_slots=100))
    assert warning.startswith(
        "HiCache host state pool (100 states) is too small for the KV beside it: it covers 100 sessions of 3552 tokens "
        "and the device holds 130, so hardly any outlives the device. The quota binds, not the size: give "
        "--hicache-mamba-size-gb between "
    )
    assert warning.endswith(", or leave it out.")
    for gb in quotas_in(warning):
        assert warnings_of(ledger, arena_of(ledger, 60 * 10**9, max_slots=int(gb * 10**9) // ledger.slot_bytes)) == ()
    # A quota that leaves too little for KV is advised in the same words.
    (warning,) = warnings_of(ledger, arena_of(ledger, 60 * 10**9, max_slots=700))
    assert "The quota binds, not the size: " in warning
    least, most = quotas_in(warning)
    assert warnings_of(ledger, arena_of(ledger, 60 * 10**9, max_slots=int(most * 10**9) // ledger.slot_bytes)) == ()
    assert int(least * 10**9) // ledger.slot_bytes == 131


def test_a_quota_of_a_size_that_is_too_small_anyway() -> None:
    ledger = ledger_of(page_size=64)
    (warning,) = warnings_of(ledger, arena_of(ledger, 12 * 10**9, max_slots=20))
    assert "The quota binds first: leave --hicache-mamba-size-gb out and it covers 71 sessions. " in warning
    assert "it covers 20 sessions" in warning
    assert warning.endswith("it needs 21.9 GB, and 100.00 GB are free: raise --hicache-size to 21.9 or more.")


def test_a_quota_that_costs_no_session_is_not_to_be_left_out() -> None:
    ledger = ledger_of(page_size=64)
    (warning,) = warnings_of(ledger, arena_of(ledger, 12 * 10**9, max_slots=72))
    (without,) = warnings_of(ledger, arena_of(ledger, 12 * 10**9))
    covered = re.compile(r"it covers (\d+) sessions")
    assert covered.findall(warning) == covered.findall(without)
    assert "quota" not in warning


def test_where_no_size_fits_the_device_is_to_take_less() -> None:
    """On a CPU, whose device takes 20 of 30 GiB: the fraction that is named gives a tier of twice its pools."""
    request = rest_of(20 * GIB, **{**QWEN3_NEXT, "page_size": 64})
    ledger = plan_memory(request)
    memory = HostMemory(free_bytes=30 * GIB, pools_inside=True)
    resolved = resolved_of(mem_fraction_static=request.mem_fraction_static)
    arena = host_arena(resolved, ledger, memory=memory)
    (warning,) = bootlog.host_warnings(arena, ledger, resolved=resolved, memory=memory)
    assert (
        "it needs 21.9 GB, and 10.74 GB are free beside the device's pools, which take 21.47 GB of the same memory: "
        in warning
    )
    fraction = float(re.search(r"give the device less with --mem-fraction-static ([\d.]+) or less", warning)[1])
    smaller = plan_memory(replace(request, mem_fraction_static=fraction))
    tier = host_arena(resolved, smaller, memory=memory)
    assert tier.total_bytes == pytest.approx(2 * pools_bytes(smaller), rel=0.01)
    assert bootlog.host_warnings(tier, smaller, resolved=resolved, memory=memory) == ()


def quotas_in(warning: str) -> tuple[float, float]:
    least, most = re.search(r"between ([\d.]+) and ([\d.]+),", warning).groups()
    return float(least), float(most)


@pytest.mark.parametrize(
    ("free_gib", "line"),
    [
        # 20 GiB of pools: (100 - 10) * 0.8 is more than twice them; (40 - 8) * 0.8 is less.
        (100, "ratio 2.000 -> 2.000; 72.0 GiB host memory per rank (fraction 0.80, 1 rank on this host), host pools 40.0 GiB."),
        (40, "ratio 2.000 -> 1.278; 25.6 GiB host memory per rank (fraction 0.80, 1 rank on this host), host pools 25.6 GiB."),
    ],
)  # fmt: skip
def test_a_size_that_nobody_gave_is_said(free_gib: int, line: str) -> None:
    ledger, memory, resolved = ledger_of(page_size=64), HostMemory(free_bytes=free_gib * GIB), resolved_of(tp_size=1)
    arena = host_arena(resolved, ledger, memory=memory)
    said = bootlog.host_auto_lines(arena, ledger, resolved=resolved, memory=memory)
    assert said == (f"HiCache auto-sizing: {line}",)
    given = resolved_of(hicache_size=30.0)
    assert bootlog.host_auto_lines(arena, ledger, resolved=given, memory=memory) == ()


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


def test_a_boot_says_what_size_it_took(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "twinpool.engine"):
        boot(tiny, enable_hierarchical_cache=True).close()
    (line,) = [line for line in caplog.messages if line.startswith("HiCache auto-sizing: ratio 2.000 -> ")]
    assert line.endswith(" GiB.")


def test_a_tier_that_is_too_small_is_a_warning(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "twinpool.engine"):
        boot(tiny, enable_hierarchical_cache=True, hicache_size=0.004).close()
    (record,) = [record for record in caplog.records if record.getMessage().startswith("HiCache host KV pool")]
    assert record.levelname == "WARNING"


def test_sizes_of_a_tier_that_is_not_there_are_a_warning(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "twinpool.engine"):
        engine = boot(tiny, hicache_size=0.2, hicache_write_policy="write_back")
        engine.close()
        boot(tiny).close()
    said = [line for line in caplog.messages if line.startswith("--hicache-size")]
    assert said == [
        "--hicache-size, --hicache-write-policy do nothing without --enable-hierarchical-cache: give that, too, or leave them out."
    ]
    assert said[0] in engine.facts.resolved.warnings


def test_a_boot_keeps_what_it_warned_about(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "twinpool.engine"):
        engine = boot(
            tiny,
            enable_hierarchical_cache=True,
            hicache_size=0.004,
            hicache_storage_size=5.0,
            threads=1,
            kv_cache_dtype="fp8_e4m3",
        )
    engine.close()
    logged = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert list(engine.facts.resolved.warnings) == logged
    for beginning in ("Keys and values are kept in fp8_e4m3", "--hicache-storage-size does nothing", "HiCache host "):
        assert sum(line.startswith(beginning) for line in logged) == 1, beginning


def test_on_a_cpu_the_devices_pools_are_not_given_away_twice(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 100 * MIB)
    # 64 MiB of the 100 are the device's; most of them are pools that nobody has written to yet.
    with pytest.raises(MemoryRefusal, match=r"Requesting 0\.08 GB but only have 0\.0\d GB free"):
        boot(tiny, enable_hierarchical_cache=True, hicache_size=0.08)
    engine = boot(tiny, enable_hierarchical_cache=True, hicache_size=0.03)
    engine.close()
