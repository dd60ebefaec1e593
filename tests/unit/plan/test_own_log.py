"""The tables that twinpool's own boot log ends with: what is printed is read back, with anything in front of a line."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.unit.plan.plans import builtin, machine, plan
from tests.unit.plan.test_logged import PREFIXES
from twinpool import bootlog
from twinpool.config.engines import TWINPOOL
from twinpool.errors import ConfigError
from twinpool.plan.command import read_command
from twinpool.plan.log_plan import LogOutcome, plan_log
from twinpool.plan.own_log import read_own
from twinpool.plan.sizing import Sizing
from twinpool.units import GIB, MIB

FLAG_SETS: dict[str, dict[str, Any]] = {
    "ratio": {"mamba_full_memory_ratio": 0.5},
    "pin": {"max_mamba_cache_size": 37, "max_running_requests": 5},
    "no radix cache": {"disable_radix_cache": True, "max_running_requests": 9},
    "no buffer": {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True},
    "lazy": {"mamba_radix_cache_strategy": "extra_buffer_lazy", "page_size": 16, "chunked_prefill_size": -1},
    "serial": {"mamba_radix_cache_strategy": "extra_buffer", "disable_overlap_schedule": True},
    "tier": {"enable_hierarchical_cache": True, "hicache_size": 3.5, "hicache_write_policy": "write_back"},
    "two ranks": {"tp_size": 2, "device_memory_bytes": 48 * GIB, "kv_cache_dtype": "bfloat16"},
}


def sizing_of(name: str = "Qwen3.5-9B", **flags: Any) -> Sizing:
    flags = {"model_path": name, "mem_fraction_static": 0.75, **flags}
    where = machine(30 * GIB, pre_load_bytes=48 * GIB, ranks=flags.get("tp_size", 1))
    return plan(builtin(name), where, rules=TWINPOOL, **flags)


def printed(sizing: Sizing) -> str:
    """The lines of `twinpool serve` after the weights."""
    ledger, resolved, request = sizing.ledger, sizing.resolved, sizing.request
    assert ledger is not None
    say = "[2026-11-30 10:00:00] "
    lines = [
        bootlog.load_begin_line(request.pre_load_bytes),
        *bootlog.pool_lines(ledger, kv_dtype=resolved.kv_cache_dtype),
        bootlog.scheduler_line(
            ledger, chunked_prefill_size=resolved.chunked_prefill_size, max_prefill_tokens=16384,
            context_len=resolved.context_len, available_bytes=MIB,
        ),
        f"Settings\n{bootlog.values_table(resolved.rows())}",
        f"Memory\n{bootlog.ledger_table(ledger)}",
        "twinpool is ready",
    ]  # fmt: skip
    return "\n".join(say + line for line in lines)


def planned(text: str) -> LogOutcome:
    (boot,) = plan_log(read_command(["--boot-log", "-"], usage=""), text)
    return boot


@pytest.mark.parametrize("flags", FLAG_SETS.values(), ids=FLAG_SETS)
def test_flags_come_back_from_the_settings(flags: dict[str, Any]) -> None:
    sizing = sizing_of(**flags)
    (own,) = read_own(printed(sizing))
    found = own.flags()
    assert {name: found[name] for name in flags} == flags
    ours = planned(printed(sizing)).outcome.sizing
    assert (ours.ledger and ours.ledger.max_mamba_cache_size) == (sizing.ledger and sizing.ledger.max_mamba_cache_size)
    assert (ours.ledger and ours.ledger.kv_tokens) == (sizing.ledger and sizing.ledger.kv_tokens)
    same = (
        "strategy",
        "overlap",
        "slots_per_request",
        "page_size",
        "chunked_prefill_size",
        "hicache_write_policy",
        "tp_size",
    )
    assert [getattr(ours.resolved, name) for name in same] == [getattr(sizing.resolved, name) for name in same]


def test_sizes_come_back_from_the_memory_table() -> None:
    sizing = sizing_of()
    (own,) = read_own(printed(sizing))
    request = sizing.request
    assert own.slot_bytes() == (request.stage_conv_bytes, request.stage_slot_bytes - request.stage_conv_bytes)
    assert own.token_bytes() == request.kv_bytes_per_token
    assert own.free_bytes() == (48 * GIB, 30 * GIB)


@pytest.mark.parametrize("name", sorted(PREFIXES.keys() - {"progress bar redrawn"}))  # a table is written at once
def test_prefixes_of_the_tables_do_not_matter(name: str) -> None:
    text = printed(sizing_of(max_mamba_cache_size=37))
    (plain,) = read_own(text)
    assert len(plain.settings) > 50
    (found,) = read_own("\n".join(PREFIXES[name].format(line=line) for line in text.splitlines()))
    assert found.settings == plain.settings
    assert (found.free_bytes(), found.slot_bytes(), found.token_bytes()) == (
        plain.free_bytes(), plain.slot_bytes(), plain.token_bytes(),
    )  # fmt: skip


def test_tables_inside_json() -> None:
    text = printed(sizing_of(max_mamba_cache_size=37))
    lines = [json.dumps({"log": f"\x1b[32m{line}\x1b[0m\n", "stream": "stderr"}) for line in text.splitlines()]
    (found,), (plain,) = read_own("\n".join(lines)), read_own(text)
    assert found.flags() == plain.flags()
    # The sign of a product is escaped there.
    assert (found.free_bytes(), found.slot_bytes(), found.token_bytes()) == (
        plain.free_bytes(), plain.slot_bytes(), plain.token_bytes(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new"),
    [("48.00 GiB  measured", "9,999,999,999.99 TiB  measured"), ("of 48.00 GiB", "of 9,999,999,999.99 TiB")],
    ids=["a row", "a share"],
)
def test_a_size_that_no_server_has_is_refused(old: str, new: str) -> None:
    text = printed(sizing_of())
    assert old in text
    with pytest.raises(ConfigError, match=r"size of 9,999,999,999.99 TiB: a size must be below .* the log was changed"):
        planned(text.replace(old, new))


def test_pools_that_print_as_nothing_have_no_memory_to_divide() -> None:
    text = printed(sizing_of())
    lines = [
        re.sub(r"(state size: |[KV] size: |mem=|usage=)[\d.]+", r"\g<1>0.00", line)
        for line in text[: text.index("Settings\n")].splitlines()
    ]
    with pytest.raises(ConfigError, match=r"lacks .*mem_fraction_static, and its pools have 0\.00 GB to divide"):
        planned("\n".join(lines))


def test_memory_below_zero_is_told_by_what_the_log_calls_it() -> None:
    text = printed(sizing_of())
    with pytest.raises(ConfigError, match=r"The boot log has -\d+\.\d\d GB to divide"):
        planned(re.sub(r"(weights +)\S+ GiB", r"\g<1>99.00 GiB", text))


def test_odd_values_of_the_tables() -> None:
    text = printed(sizing_of())
    (own,) = read_own(text.replace("Qwen3.5-9B", "off"))
    assert own.settings["model_path"] == ("off", "flag")
    assert own.flags()["model_path"] == "off"
    (own,) = read_own(re.sub(r"\d+ slots ×", f"{'9' * 400} slots ×", text))
    assert own.slot_bytes() is None


def test_a_table_that_was_cut_off_says_what_it_has() -> None:
    text = printed(sizing_of(max_mamba_cache_size=37))
    (own,) = read_own(text[: text.index("Memory\n")])
    assert (own.flags()["max_mamba_cache_size"], own.free_bytes(), own.slot_bytes(), own.token_bytes()) == (
        37,
        None,
        None,
        None,
    )
    ledger = planned(text[: text.index("Memory\n")]).outcome.sizing.ledger
    assert ledger is not None
    assert ledger.max_mamba_cache_size == 37
    assert read_own("") == ()
