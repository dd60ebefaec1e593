"""Flags to paste: a line that the server takes and that gives the plan shown; none where it would be refused."""

from __future__ import annotations

import shlex

import pytest

from twinpool.cli.plan import USAGE
from twinpool.config.flags import parse_serve
from twinpool.plan.command import read_command
from twinpool.plan.outcome import Outcome
from twinpool.plan.report import report_text
from twinpool.plan.run import plan

OURS = ("Qwen3.5-9B", "--engine", "twinpool", "--gpu", "H100")
THEIRS = ("Qwen3.5-9B", "--gpu", "H100")
TIER = "--enable-hierarchical-cache"


def planned(*words: str) -> Outcome:
    return plan(read_command(words, usage=USAGE))


@pytest.mark.parametrize(
    "flags",
    [
        "--page-size 64",
        "--page-size 64 --hicache-size 5",
        f"{TIER} --hicache-ratio 2.0 --hicache-size 30",
        f"{TIER} --hicache-storage-backend file",
        f"{TIER} --hicache-size 9 --hicache-storage-backend file --hicache-storage-path /tmp/x --hicache-storage-size 3",
        f"{TIER} --hicache-mamba-size-gb 2 --hicache-write-policy write_back",
        "--page-size 64 --hicache-storage-size 3 --hicache-write-policy write_back",
        "--mamba-radix-cache-strategy no_buffer --disable-overlap-schedule --max-mamba-cache-size 60",
        "--disable-radix-cache --max-running-requests 40 --max-total-tokens 5000 --tp-size 2",
        "--running 16 --tokens-per-request 4096 --idle-sessions 100",
        f"--running 16 --tokens-per-request 30000 --idle-sessions 400 {TIER} --hicache-ratio 1 --hicache-size 20",
    ],
)
def test_the_server_takes_the_line_and_it_gives_the_plan(flags: str) -> None:
    outcome = planned(*OURS, *flags.split())
    words = shlex.split(" ".join(outcome.launch_flags))
    assert words
    options = parse_serve(words)
    if options.hicache_storage_backend is not None:
        assert options.hicache_storage_path is not None
    assert not (options.hicache_ratio is not None and options.hicache_size)
    again = planned(*OURS, *words)
    assert (again.launch_flags, [clamp for clamp in again.clamps if "does nothing" in clamp]) == (
        outcome.launch_flags,
        [],
    )
    if outcome.workload is None:
        assert again.sizing.ledger == outcome.sizing.ledger
        assert again.host == outcome.host
    elif outcome.advice is not None and outcome.advice.setting is not None:
        assert again.sizing.ledger is not None
        assert again.sizing.ledger.max_mamba_cache_size == outcome.advice.setting.pin.slots


def test_a_flag_that_does_nothing_is_told_and_not_pasted() -> None:
    outcome = planned(*THEIRS, "--hicache-size", "5", "--page-size", "64")
    assert (
        "--hicache-size does nothing without --enable-hierarchical-cache: give that, too, or leave it out."
        in outcome.clamps
    )
    assert outcome.launch_flags == ("--page-size 64",)


def test_what_is_refused_is_not_pasted() -> None:
    host = planned(*THEIRS, TIER, "--hicache-size", "0.001")
    assert (host.launch_flags, "Flags to paste" in report_text(host)) == ((), False)
    assert "Host tier refused at boot" in report_text(host)
    device = planned(*THEIRS, "--max-mamba-cache-size", "100000")
    assert (device.sizing.ledger, device.launch_flags) == (None, ())
    ours = planned(*OURS, "--quantization", "fp8")
    assert ours.launch_flags == ()
    assert [
        clamp for clamp in ours.clamps if clamp.startswith("twinpool serve does not take this line: --quantization")
    ]


def test_another_engine_has_no_folder_of_ours() -> None:
    flags = ("--hicache-storage-backend", "file", "--hicache-storage-path", "/tmp/x", "--hicache-storage-size", "3")
    outcome = planned(*THEIRS, TIER, *flags)
    assert outcome.launch_flags == (TIER, "--hicache-storage-backend file")
