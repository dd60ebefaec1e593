"""The planner and the server: the same flags and the same memory give the same ledger, and its boot log checks out."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.agreement.live import live_server
from tests.agreement.llm_runs import checkpoint
from twinpool import LLM
from twinpool.engine.checkpoint import DEMO_FOLDER
from twinpool.memory.ledger import Ledger, LedgerLine
from twinpool.plan.command import read_command
from twinpool.plan.log_line import EQUAL, ROUNDING
from twinpool.plan.log_plan import LogOutcome, plan_log
from twinpool.plan.run import plan

MEMORY = {"device_memory": "256MiB"}
FLAG_SETS: dict[str, dict[str, Any]] = {
    "defaults": MEMORY,
    "all that is free": {"max_total_tokens": 4096, "max_mamba_cache_size": 20},
    "a little memory": {"device_memory": "96MiB"},
    "ratio": {**MEMORY, "mamba_full_memory_ratio": 3.7},
    "little state": {**MEMORY, "mamba_full_memory_ratio": 0.13},
    "pin": {**MEMORY, "max_mamba_cache_size": 37},
    "token cap": {**MEMORY, "max_total_tokens": 5000},
    "page size": {**MEMORY, "page_size": 16, "mamba_radix_cache_strategy": "extra_buffer"},
    "no buffer": {**MEMORY, "mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True},
    "lazy buffer": {**MEMORY, "mamba_radix_cache_strategy": "extra_buffer_lazy"},
    "no radix cache": {**MEMORY, "disable_radix_cache": True, "max_running_requests": 9},
    "no radix cache, any number": {**MEMORY, "disable_radix_cache": True},
    "requests": {**MEMORY, "max_running_requests": 3},
    "states of 16 bits": {**MEMORY, "mamba_ssm_dtype": "bfloat16"},
    "weights of 16 bits": {**MEMORY, "dtype": "bfloat16"},
    "KV of 16 bits": {**MEMORY, "kv_cache_dtype": "bfloat16"},
    "KV of 8 bits": {**MEMORY, "kv_cache_dtype": "fp8_e4m3"},
    "KV of 8 bits in pages": {**MEMORY, "kv_cache_dtype": "fp8_e4m3", "page_size": 16, "mamba_full_memory_ratio": 2.5},
    "half of it": {**MEMORY, "mem_fraction_static": 0.53},
    "context": {**MEMORY, "context_length": 512, "chunked_prefill_size": 128},
}


def words_of(flags: dict[str, Any]) -> list[str]:
    """The flags as a command line."""
    words: list[str] = []
    for name, value in flags.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def planned(flags: dict[str, Any], *, pre_load_bytes: int, available_bytes: int, folder: Path = DEMO_FOLDER) -> Ledger:
    """What `twinpool plan` makes of the flags and of the memory that the server measured."""
    measured = ["--pre-load-memory", str(pre_load_bytes), "--post-weights-memory", str(available_bytes)]
    command = read_command([str(folder), "--engine", "twinpool", *measured, *words_of(flags)], usage="")
    ledger = plan(command).sizing.ledger
    assert ledger is not None
    return ledger


def amounts(ledger: Ledger) -> list[tuple[str, int, str, str]]:
    """Every line of a ledger but how the weights are known."""
    return [
        (line.name, line.bytes, line.part_of, "" if line.name == "weights" else _shown(line)) for line in ledger.lines
    ]


def _shown(line: LedgerLine) -> str:
    return f"{line.origin} {line.note}"


def check_log(
    text: str, flags: dict[str, Any], *, model: tuple[str, ...] = (str(DEMO_FOLDER), "--engine", "twinpool")
) -> LogOutcome:
    """The server's own log has one boot, every line of which is explained."""
    words = [*model, "--boot-log", "-", *words_of(flags)]
    (boot,) = plan_log(read_command(words, usage=""), text)
    assert {check.what: check for check in boot.checks if check.verdict not in (EQUAL, ROUNDING)} == {}
    assert len(boot.checks) >= 8
    return boot


def check_alone(text: str, ledger: Ledger | None = None) -> LogOutcome:
    """The log is enough: without a model or a flag beside it every line is explained, and the plan has the server's pools."""
    boot = check_log(text, {}, model=())
    ours, facts = boot.outcome.sizing.ledger, boot.ranks[0]
    assert ours is not None
    logged = (facts.slots, facts.kv_tokens, facts.max_running_requests)
    assert (ours.max_mamba_cache_size, ours.kv_tokens, ours.max_running_requests) == logged
    assert boot.notes == ()
    if ledger is not None:
        assert (ours.slot_bytes, ours.page_bytes, ours.page_size, ours.slots_per_request, ours.warnings) == (
            ledger.slot_bytes, ledger.page_bytes, ledger.page_size, ledger.slots_per_request, ledger.warnings,
        )  # fmt: skip
    return boot


@pytest.mark.parametrize("flags", FLAG_SETS.values(), ids=FLAG_SETS)
def test_the_planner_has_the_servers_ledger(flags: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="twinpool"), LLM(**flags) as llm:
        facts = llm.engine.facts
    ledger = facts.ledger
    ours = planned(flags, pre_load_bytes=ledger.whole_bytes, available_bytes=facts.startup_available_bytes)
    assert amounts(ours) == amounts(ledger)
    same = ("max_mamba_cache_size", "slots_per_request", "kv_tokens", "page_size", "max_running_requests", "warnings")
    assert [getattr(ours, name) for name in same] == [getattr(ledger, name) for name in same]
    fraction = facts.resolved.mem_fraction_static
    boot = check_log(caplog.text, {**flags, "mem_fraction_static": fraction})
    assert boot.ranks[0].slots == ledger.max_mamba_cache_size
    check_alone(caplog.text, ledger)


def test_the_log_of_a_checkpoint_names_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="twinpool"), LLM(str(checkpoint("kimi")), **MEMORY) as llm:
        ledger = llm.engine.facts.ledger
    boot = check_alone(caplog.text, ledger)
    assert boot.outcome.sizing.model.config


def test_the_log_of_a_checkpoint_that_is_gone_has_its_constants(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="twinpool"), LLM(str(checkpoint("kimi")), **MEMORY) as llm:
        ledger = llm.engine.facts.ledger
    (boot,) = plan_log(
        read_command(["--boot-log", "-"], usage=""), caplog.text.replace(str(checkpoint("kimi")), "/gone")
    )
    ours = boot.outcome.sizing.ledger
    assert ours is not None
    same = ("slot_bytes", "page_bytes", "max_mamba_cache_size", "kv_tokens", "max_running_requests")
    assert [getattr(ours, name) for name in same] == [getattr(ledger, name) for name in same]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_of_ranks_and_tiers_is_explained_by_its_log(ranks: int, tmp_path: Path) -> None:
    flags = {
        **MEMORY, "tp_size": ranks, "enable_hierarchical_cache": True, "hicache_size": 0.2, "hicache_storage_backend": "file",
        "hicache_storage_path": str(tmp_path / "disk"), "hicache_storage_size": 0.1, "max_mamba_cache_size": 24,
    }  # fmt: skip
    with live_server(tmp_path, *words_of(flags)) as live:
        text = live.log.read_text()
    boot = check_alone(text)
    sizing = boot.outcome.sizing
    assert sizing.flags.device_memory_bytes == 256 << 20
    assert {name: getattr(sizing.flags, name) for name in flags.keys() - MEMORY.keys()} == {
        name: value for name, value in flags.items() if name not in MEMORY
    }
    assert (len(boot.ranks), sizing.machine.ranks) == (ranks, ranks)
    assert len([check for check in boot.checks if check.what.startswith("host tier")]) == 2
    assert boot.outcome.host is not None


@pytest.mark.parametrize(
    "tier",
    [{}, {"hicache_ratio": 1.5}, {"hicache_size": 0.2}, {"hicache_size": 0.2, "hicache_mamba_size_gb": 0.05}],
    ids=str,
)
def test_the_host_tiers_lines_are_explained(tier: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    flags = {**MEMORY, "enable_hierarchical_cache": True, **tier}
    with caplog.at_level(logging.INFO, logger="twinpool"), LLM(**flags):
        pass
    boot = check_alone(caplog.text)
    assert len([check for check in boot.checks if check.what.startswith("host")]) >= 2
    host = boot.outcome.host
    assert host is not None
    assert "hicache_ratio" in tier or host.total_bytes == pytest.approx(tier.get("hicache_size", 0.37) * 1e9, rel=0.02)


def test_several_servers_in_one_log_keep_their_tables(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="twinpool"):
        for slots in (24, 31):
            with LLM(**MEMORY, max_mamba_cache_size=slots):
                pass
    boots = plan_log(read_command(["--boot-log", "-"], usage=""), caplog.text)
    assert [boot.outcome.sizing.flags.max_mamba_cache_size for boot in boots] == [24, 31]


@pytest.mark.parametrize("flags", [{}, {"page_size": 16}, {"kv_cache_dtype": "bfloat16", "page_size": 2}])
def test_a_sparse_index_is_planned_as_it_is_kept(flags: dict[str, Any]) -> None:
    flags = {**MEMORY, **flags}
    with LLM(str(checkpoint("glm")), **flags) as llm:
        facts, memory = llm.engine.facts, llm.engine._executor._memory
    sizes = {"pre_load_bytes": facts.ledger.whole_bytes, "available_bytes": facts.startup_available_bytes}
    ours = planned(flags, folder=checkpoint("glm"), **sizes)
    assert amounts(ours) == amounts(facts.ledger)
    assert (ours.slot_bytes, ours.page_bytes) == (memory.arena.slot_bytes, memory.arena.page_bytes)


def test_a_server_in_a_process_of_its_own(tmp_path: Path) -> None:
    flags = {"mamba_full_memory_ratio": 0.5, "mem_fraction_static": 0.75, "max_running_requests": 12}
    with live_server(tmp_path, *words_of(flags)) as live:
        text = live.log.read_text()
    boot = check_log(text, flags)
    assert (boot.ranks[0].max_running_requests, boot.notes) == (12, ())
