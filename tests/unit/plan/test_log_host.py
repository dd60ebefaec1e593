"""The host tier's lines of a boot log: every form is read as it is printed, and compared where its numbers say enough."""

from __future__ import annotations

import pytest

from tests.unit.plan.test_log_booted import MIXED, of
from twinpool import bootlines
from twinpool.plan.log_host import read_host
from twinpool.plan.log_line import DIFFERS, EQUAL, ROUNDING
from twinpool.plan.log_plan import LogOutcome

KV_LINE = "Allocating full hierarchical KV host pool: 5361792 tokens, {gb:.2f} GB host memory."
STATES_LINE = "Allocating {gb:.2f} GB host memory for hierarchical Mamba cache (1130 state slots, layout=page_first)."


def with_lines(*lines: str, more: str = "enable_hierarchical_cache=True, ") -> LogOutcome:
    text = MIXED.format(tokens=2_680_896, running=113, more=more, page=64)
    return of(text + "".join(f"[2026-10-10 10:00:12 TP0] {line}\n" for line in lines))


def host_verdicts(boot: LogOutcome) -> list[str]:
    return [check.verdict for check in boot.checks if check.what.startswith("host")]


def test_two_pools_are_so_many_bytes() -> None:
    request = with_lines().outcome.sizing.request
    kv_gb = 5_361_792 * request.kv_bytes_per_token / 1e9
    states_gb = 1130 * request.stage_slot_bytes / 1e9
    lines = (KV_LINE.format(gb=kv_gb), STATES_LINE.format(gb=states_gb))
    boot = with_lines(*lines)
    assert host_verdicts(boot) == [EQUAL, EQUAL]
    padded = with_lines(KV_LINE.format(gb=kv_gb), STATES_LINE.format(gb=states_gb + request.stage_slot_bytes / 1e9))
    assert host_verdicts(padded) == [EQUAL, EQUAL]
    assert host_verdicts(with_lines(KV_LINE.format(gb=kv_gb / 2))) == [DIFFERS]
    assert boot.outcome.host is not None
    assert boot.outcome.host.total_bytes == pytest.approx((kv_gb + states_gb) * 1e9, rel=0.001)


def test_a_ratio_that_the_host_allowed() -> None:
    sizing = with_lines().outcome.sizing
    kv_gb, states_gb = 5_361_792 * sizing.request.kv_bytes_per_token / 1e9, 1130 * sizing.request.stage_slot_bytes / 1e9
    ledger = sizing.ledger
    assert ledger is not None
    pools_gb = (ledger.conv_pool_bytes + ledger.ssm_pool_bytes + ledger.kv_pool_bytes) / 1e9
    ratio = (kv_gb + states_gb) / pools_gb
    line = (
        "HiCache auto-sizing: ratio 2.000 -> {:.3f}; 300.0 GiB host memory per rank (fraction 0.80, 4 ranks on this host), "
        "host pools 1.0 GiB."
    )
    lines = (KV_LINE.format(gb=kv_gb), STATES_LINE.format(gb=states_gb))
    assert host_verdicts(with_lines(*lines, line.format(ratio)))[-1] in (EQUAL, ROUNDING)
    assert host_verdicts(with_lines(*lines, line.format(ratio + 0.1)))[-1] == DIFFERS


@pytest.mark.parametrize("changed", ["set states", "١e4 states", f"{'9' * 400} states"])
def test_a_line_without_its_number_is_not_read(changed: str) -> None:
    line = "Allocating 1.58 GB host memory for KV and states together: at most 1540839 tokens or {}, no fixed split."
    assert host_verdicts(with_lines(line.format("3749 states"))) == [DIFFERS]
    assert host_verdicts(with_lines(line.format(changed))) == []


def test_what_nothing_follows_from_is_named() -> None:
    line = "Allocating 107.41 GB host memory for hierarchical KV cache."
    (check,) = [check for check in with_lines(line).checks if check.what == "host tier"]
    assert (check.logged, check.note) == (line, "read, and compared with nothing")


@pytest.mark.parametrize(
    ("template", "values"),
    [
        (bootlines.HOST_KV, {"pool": "full", "host_tokens": 7, "host_kv_gb": 1.25}),
        (bootlines.HOST_STATES, {"host_state_gb": 0.5, "host_slots": 9, "layout": "page_first"}),
        (bootlines.HOST_SHARED, {"host_gb": 1.5, "host_tokens": 64, "host_states": "1 state"}),
        (
            bootlines.HOST_COVER,
            {"together": "12 sessions", "context_tokens": 44, "by_kv": 20, "by_states": 30, "device_sessions": 4},
        ),
        (
            bootlines.HOST_AUTO,
            {
                "wanted_ratio": 2.0,
                "ratio": 1.5,
                "allowed_gib": 3.0,
                "fraction": 0.8,
                "ranks": "2 ranks",
                "host_gib": 1.5,
            },
        ),
    ],
)
def test_every_line_is_read_as_it_is_printed(template: str, values: dict[str, object]) -> None:
    (found,) = read_host(f"noise\n[TP0] {template.format(**values)}\nnoise\n").lines.values()
    assert {
        name: found[name] if isinstance(value, str) else type(value)(found[name]) for name, value in values.items()
    } == values
