"""What public logs come to: divisions that are explained, flags that would match, and the command's exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.plan.test_logged import PUBLIC, printed
from twinpool.cli import plan as plan_command
from twinpool.errors import TwinpoolError
from twinpool.plan.command import read_command
from twinpool.plan.log_line import DIFFERS, EQUAL, UNKNOWN, LogCheck
from twinpool.plan.log_plan import LogOutcome, plan_log
from twinpool.plan.sizing import changed

NUMBERS = {source: (form, numbers) for source, form, numbers in PUBLIC}
H100, SALA = "Qwen3.8-27B-FP8 on an H100", "MiniCPM-SALA of 2026-04-07"


def planned(source: str, *words: str) -> LogOutcome:
    (boot,) = plan_log(read_command(["--boot-log", "-", *words], usage=""), printed(*NUMBERS[source]))
    return boot


def check(boot: LogOutcome, what: str) -> LogCheck:
    return next(check for check in boot.checks if check.what.startswith(what))


def test_a_pool_of_twenty_slots_and_millions_of_tokens() -> None:
    """MiniCPM-SALA, no radix cache: K is the number of requests, and the padding slot was not charged."""
    flags = ("--mem-fraction-static", "0.84", "--disable-radix-cache", "--max-running-requests", "20")
    boot = planned(SALA, "MiniCPM-SALA", *flags)
    assert boot.explains == "sglang-unpadded"
    assert {check.what: check.verdict for check in boot.checks if check.verdict != EQUAL} == {
        "free after both pools": UNKNOWN
    }
    assert check(boot, "KV tokens").ours == "6,612,333"


def test_sizes_on_a_rank_of_two() -> None:
    boot = planned("kvcache-ai/ktransformers issue 1870", "Qwen3.5-397B-A17B", "--tp-size", "2")
    for what in ("conv", "ssm", "KV: (", "split by ratio 0.9"):
        assert check(boot, what).verdict == EQUAL
    assert "0.66 GiB were freed" in check(boot, "free after").note


def test_what_is_not_in_the_log_is_said_with_the_number_that_would_explain_it() -> None:
    boot = planned(H100, "Qwen3.8-27B", "--mem-fraction-static", "0.85", "--max-running-requests", "32")
    assert DIFFERS not in {check.verdict for check in boot.checks}
    slots = check(boot, "slots (K)")
    assert (slots.logged, slots.ours, slots.verdict) == ("124", "125", UNKNOWN)
    assert slots.note.startswith("explained by 79.51 GiB before the load, 1.03 more than logged")


def test_slots_a_request_differ_only_where_the_strategy_was_given() -> None:
    source = "Qwen4-Exp NVFP4 of 2026-08-26, lines wrapped"
    asked = ("--max-running-requests", "48")
    given = planned(source, *asked, "--mamba-radix-cache-strategy", "extra_buffer")
    assert check(given, "max_running").verdict == DIFFERS
    form, numbers = NUMBERS[source]
    text = printed(form, {**numbers, "max_running_requests": 32})
    (boot,) = plan_log(read_command(["--boot-log", "-", *asked], usage=""), text)
    assert (check(boot, "max_running").verdict, "for S = 3" in check(boot, "max_running").note) == (UNKNOWN, True)


def test_workers_of_data_parallel_attention_have_a_pool_each() -> None:
    """Numbers by hand are of one rank, but pins and requests of the flags are of all workers."""
    flags = ("--tp-size", "4", "--dp-size", "4", "--enable-dp-attention", "--max-mamba-cache-size", "328")
    boot = planned("kvcache-ai/ktransformers issue 1870", *flags)
    assert check(boot, "slots (K) as pinned").verdict == EQUAL


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        (("Qwen3.8-27B",), ()),
        (
            ("Qwen3.8-27B", "--tp-size", "4"),
            (
                "the log's states are those of Qwen3.8-27B with --tp-size 1 and --mamba-ssm-dtype float32, not with --tp-size 4",
                "the log's KV is that of Qwen3.8-27B with --tp-size 1 and --kv-cache-dtype bfloat16, not with --tp-size 4",
            ),
        ),
        (
            ("Qwen3.8-27B", "--mamba-ssm-dtype", "bfloat16", "--kv-cache-dtype", "fp8_e4m3"),
            (
                "the log's states are those of Qwen3.8-27B with --mamba-ssm-dtype float32",
                "the log's KV is that of Qwen3.8-27B with --kv-cache-dtype bfloat16",
            ),
        ),
        (
            ("Qwen3.5-9B",),
            (
                "no number of ranks up to 64 and no state dtype gives Qwen3.5-9B the log's states: the log is probably of "
                "another model",
                "no number of ranks up to 64 and no KV dtype gives Qwen3.5-9B the log's bytes of a token",
                "flags and the memory that its pools took give 374 slots: the plan below starts from the log's 124 slots, as if "
                "pinned",
            ),
        ),
    ],
)
def test_a_model_that_does_not_match_is_told_what_would(words: tuple[str, ...], notes: tuple[str, ...]) -> None:
    assert planned(H100, *words).notes == notes


def test_what_the_log_says_is_told_apart_from_what_was_asked() -> None:
    boot = planned(SALA, "MiniCPM-SALA", "--mem-fraction-static", "0.84", "--disable-radix-cache")
    sizing = boot.outcome.sizing
    origins = sizing.resolved.origins
    assert [origins[name] for name in ("mem_fraction_static", "radix_cache", "page_size")] == ["flag", "flag", "log"]
    assert sizing.request.origins["weights"] == "log"
    assert changed(sizing, page_size=1).resolved.origins["page_size"] == "flag"


def test_the_command_prints_the_checks_and_refuses_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "boot.log"
    log.write_bytes(printed(*NUMBERS[H100]).encode("utf-16"))
    assert exit_code("--boot-log", str(log), "Qwen3.8-27B", "--json") == (0, "")
    (boot,) = json.loads(capsys.readouterr().out)["boots"]
    assert boot["slot_bytes_logged"] == pytest.approx(153_944_064, rel=0.001)
    for data, said in ((b"", "is empty"), (bytes(range(256)), "none of the lines")):
        log.write_bytes(data)
        code, sentence = exit_code("--boot-log", str(log))
        assert (code, said in sentence) == (2, True)


def exit_code(*words: str) -> tuple[int, str]:
    """(exit code, the sentence of a refusal)."""
    try:
        return plan_command.run(words), ""
    except TwinpoolError as error:
        return error.exit_code, str(error)
