"""What happens without asking, one sentence each, and nothing about what does not happen."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.plan.plans import builtin, machine, manual, plan
from twinpool.config.launch import LaunchLine
from twinpool.plan.clamps import clamps
from twinpool.units import GIB, MIB

S5 = {"mamba_radix_cache_strategy": "extra_buffer"}
DP4 = {"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}


def sentences(line: LaunchLine | None = None, **flags: Any) -> tuple[str, ...]:
    """Of a slot of 1 MiB (256 tokens), a token of 4 KiB and 1 GiB; with enough slots unless flags say otherwise."""
    sizing = plan(manual(MIB, 4096, context_len=1000), machine(GIB), **{"max_mamba_cache_size": 400, **S5, **flags})
    return clamps(sizing, line or LaunchLine())


@pytest.mark.parametrize(
    ("flags", "start"),
    [
        (
            {"max_mamba_cache_size": 47, "max_running_requests": 32},
            "--max-running-requests 32 becomes 9: 47 slots / 5 a request = 9 on each of 1 worker; the rest",
        ),
        (
            {**DP4, "max_mamba_cache_size": 190, "max_running_requests": 128},
            "--max-running-requests 128 becomes 36: 47 slots / 5 a request = 9 on each of 4 workers; the rest",
        ),
        (
            {"max_total_tokens": 40, "max_running_requests": 32},
            "--max-running-requests 32 becomes 20: 40 tokens of KV / 2 = 20 on each of 1 worker; the rest",
        ),
        ({**DP4, "max_running_requests": 18}, "--max-running-requests 18 is divided by 4 workers, at least one each and rounded down: 16"),
        ({**DP4, "max_running_requests": 2}, "--max-running-requests 2 is divided by 4 workers, at least one each and rounded down: 4"),
        ({}, "--max-running-requests is not given: 80 requests may run at once."),
        ({**DP4, "max_mamba_cache_size": 403}, "--max-mamba-cache-size 403 is divided by 4 workers and rounded down: 400 slots."),
        (
            {"max_total_tokens": 600},
            "The context of 1,000 tokens is longer than the KV pool of 600: a request that grows beyond the pool is refused",
        ),
        ({}, "A prefix is reused only up to a checkpoint: nothing below 64 tokens, and while decoding one every 256 tokens."),
        (
            {"disable_radix_cache": True, "max_running_requests": 30},
            "370 of 400 slots (370.00 MiB) are never used: without the radix cache 30 requests take one each.",
        ),
        (
            {"max_running_requests": 8},
            "360 of 400 slots (360.00 MiB) are beyond what 8 running requests take; they only hold checkpoints",
        ),
        ({"mamba_full_memory_ratio": 0.5}, "--mamba-full-memory-ratio is ignored: --max-mamba-cache-size beats it."),
        (
            {"mamba_full_memory_ratio": 0.5, "max_mamba_cache_size": None, "disable_radix_cache": True, "max_running_requests": 9},
            "--mamba-full-memory-ratio is ignored: without the radix cache each running request gets one slot.",
        ),
        ({"dp_size": 2}, "--dp-size 2 without --enable-dp-attention starts separate replicas"),
        ({"max_total_tokens": 10**9}, "max_total_tokens=1000000000 is larger than the profiled value"),
        ({"chunked_prefill_size": 32}, "--chunked-prefill-size 32 is below the state chunk of 64 tokens"),
    ],
)  # fmt: skip
def test_a_sentence(flags: dict[str, Any], start: str) -> None:
    assert [sentence for sentence in sentences(**flags) if sentence.startswith(start)] != []


def test_the_grid_of_checkpoints_while_decoding_is_a_common_multiple() -> None:
    assert any(
        sentence.endswith("while decoding one every 1600 tokens.") for sentence in sentences(mamba_track_interval=100)
    )


def test_no_sentence_about_a_wish_that_is_granted() -> None:
    found = sentences(max_running_requests=80)
    assert [sentence for sentence in found if "running" in sentence] == []
    assert [sentence for sentence in sentences(**DP4, max_running_requests=16) if "workers" in sentence] == []


def test_flags_that_the_plan_leaves_out_are_named() -> None:
    line = LaunchLine(not_modelled=("--enable-lora",))
    assert "--enable-lora changes memory and is not part of this plan." in sentences(line)


def test_a_refused_plan_still_says_which_flags_lose() -> None:
    sizing = plan(builtin("Qwen3-Next-80B-A3B"), machine(GIB), max_mamba_cache_size=9999, mamba_full_memory_ratio=2.0)
    assert sizing.ledger is None
    assert clamps(sizing, LaunchLine()) == ("--mamba-full-memory-ratio is ignored: --max-mamba-cache-size beats it.",)
