"""What users of the two-pool engine reported (sglang and other projects), foreseen by the planner with the report's numbers.

Reports on vLLM that print blocks and tokens are in test_vllm.py (#55148 and kaito#2319: the bound on sequences; #40691; club-3090
#1170). Two are no case for a plan, which moves no data: tpu-inference#2366 (block ids clipped while running) and sglang#10400
(states that nobody set to zero).
"""

from __future__ import annotations

import re

import pytest

from tests.unit.plan.plans import builtin, machine, manual, plan
from twinpool.config.engines import SGLANG
from twinpool.config.launch import LaunchLine, read_launch, split_words
from twinpool.plan import inverse
from twinpool.plan.advice import advise
from twinpool.plan.clamps import clamps
from twinpool.plan.command import read_command
from twinpool.plan.sizing import Sizing, changed, size
from twinpool.plan.vllm_plan import plan_vllm_command
from twinpool.plan.workload import Workload, balanced_ratio, fit
from twinpool.units import GIB, MIB

S5 = {"mamba_radix_cache_strategy": "extra_buffer"}


def sentences(sizing: Sizing) -> str:
    return "\n".join(clamps(sizing, LaunchLine()))


@pytest.mark.parametrize(
    ("report", "model", "ranks", "slots", "asked", "runs"),
    [
        # The report names no model: slots and S decide alone.
        ("sglang#38846", "Qwen3-Next-80B-A3B", 4, 47, 32, 9),
        # 16 requests at 4 slots each were planned for.
        ("Qwen3.8-27B-SGLang-DGX-Spark#7", "Qwen3.8-27B", 1, 16 * 4, 16, 12),
        # A published recipe (gb200, tp 4, host tier), beside its own max-running-requests.
        ("InferenceX Qwen3.5-397B", "Qwen3.5-397B-A17B", 4, 360, 160, 72),
    ],
)
def test_requests_are_capped_by_slots(report: str, model: str, ranks: int, slots: int, asked: int, runs: int) -> None:
    flags = {"tp_size": ranks, "max_mamba_cache_size": slots, "max_running_requests": asked, **S5}
    sizing = plan(builtin(model), machine(100 * GIB), **flags)
    assert sizing.ledger is not None, report
    assert sizing.ledger.max_running_requests == runs
    assert f"--max-running-requests {asked} becomes {runs}: {slots} slots / 5 a request = {runs} " in sentences(sizing)
    assert f"max_running_requests is capped to {runs} by the mamba state cache" in sentences(sizing)


@pytest.mark.parametrize(
    ("flags", "per_request"),
    [
        (S5, 5),
        ({"mamba_radix_cache_strategy": "extra_buffer_lazy"}, 4),
        ({"mamba_radix_cache_strategy": "extra_buffer", "disable_overlap_schedule": True}, 4),
        ({"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}, 3),
        ({"disable_radix_cache": True}, 1),
    ],
)
def test_the_pin_for_sixteen_requests_knows_s(flags: dict[str, object], per_request: int) -> None:
    """Qwen3.8-27B-SGLang-DGX-Spark#7: the launcher multiplied by 4 whatever the strategy."""
    sizing = plan(builtin("Qwen3.8-27B"), machine(60 * GIB), **flags)
    pin = inverse.pin_for(Workload(running=16, tokens_per_request=8192), sizing)
    assert pin is not None
    assert pin.slots == 16 * per_request
    assert inverse.most_running(Workload(running=1, tokens_per_request=8192), sizing) >= 16


def test_a_ratio_for_long_contexts_starves_the_state_pool() -> None:
    """sglang#33004: Kimi-K3 on 16 H20; the ratio serves long contexts and the asked requests are ignored.

    Missing: memory left after weights, the ratio and the number asked for; 20 GiB, 0.1 and 64 stand in.
    """
    where = machine(20 * GIB, ranks=16)
    flags = {"tp_size": 16, "max_running_requests": 64, **S5}
    sizing = plan(builtin("Kimi-K3"), where, mamba_full_memory_ratio=0.1, **flags)
    assert sizing.ledger is not None
    assert sizing.ledger.max_mamba_cache_size == 68
    assert sizing.ledger.max_running_requests == 13
    work = Workload(running=64, tokens_per_request=4096)
    assert fit(work, sizing).slots_short == 64 * 5 - 68
    advice = advise(work, sizing, machine_of=lambda _: where)
    assert [step.title for step in advice.steps] == ["--max-mamba-cache-size 320 --max-running-requests 64"]
    assert advice.holds
    assert advice.final.ledger is not None
    assert advice.final.ledger.max_running_requests == 64


def test_both_wishes_are_given_and_the_ratio_still_decides() -> None:
    """sglang#36041: --max-running-requests and --max-total-tokens do not size the pools; the rest lies unused.

    Missing: the model and its numbers; a slot of 50 MiB and a token of 20 KiB stand in.
    """
    model, where = manual(50 * MIB, 20 * 1024), machine(24 * GIB)
    sizing = plan(model, where, max_running_requests=60, max_total_tokens=300_000, mamba_full_memory_ratio=0.5, **S5)
    assert sizing.ledger is not None
    assert sizing.ledger.max_running_requests == 32
    assert sizing.ledger.line("unused").note == "above --max-total-tokens"
    assert sizing.ledger.line("unused").bytes > 7 * GIB
    advice = advise(Workload(running=60, tokens_per_request=5000), sizing, machine_of=lambda _: where)
    assert advice.holds
    assert advice.final.ledger is not None
    assert (advice.final.ledger.max_mamba_cache_size, advice.final.ledger.max_running_requests) == (300, 60)


def test_a_shape_without_a_published_ratio_gets_one() -> None:
    """sglang#36719: the GLM-5.3 calculator never emits a ratio. Missing: traffic; contexts of 32K stand in."""
    sizing = plan(builtin("GLM-5.3-Flash"), machine(60 * GIB), **S5)
    ratio = balanced_ratio(sizing, 32_768)
    te = sizing.token_equivalents
    assert te is not None
    assert ratio == pytest.approx(5 * te / 32_768)
    balanced = changed(sizing, mamba_full_memory_ratio=ratio)
    work = Workload(running=1, tokens_per_request=32_768)
    assert abs(fit(work, balanced).running_by_states - fit(work, balanced).running_by_kv) <= 1


def test_an_explicit_size_of_a_decode_worker_is_taken_as_it_is() -> None:
    """sglang#20858: 36 preallocated slots were added on each worker of an explicit size. Missing: the size; 96 stands in."""
    flags = {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True, "disaggregation_mode": "decode"}
    sizing = plan(builtin("Qwen3-Next-80B-A3B"), machine(40 * GIB), max_mamba_cache_size=96, **flags, **S5)
    assert sizing.ledger is not None
    assert sizing.ledger.max_mamba_cache_size == 12
    assert sizing.ledger.line("ssm states").bytes == 12 * (77_266_944 - sizing.request.stage_conv_bytes)


def test_fifty_of_128_run_and_the_kv_pool_is_not_what_holds_them_down() -> None:
    """sglang#30160: Qwen3.6-35B on an H100, 1,956,160 tokens of KV; asked 128, got 50, with short traffic.

    Missing: the slots (250 give 50 at S = 5) and the data types of weights and KV; 8-bit KV stands in.
    """
    model = builtin("Qwen3.6-35B-A3B")
    tokens, slots = 1_956_160, 250
    bytes_needed = tokens * 10_240 + (slots + 1) * 64_389_120
    flags = {"kv_cache_dtype": "fp8_e4m3", "max_running_requests": 128, **S5}
    sizing = plan(model, machine(bytes_needed), max_mamba_cache_size=slots, **flags)
    assert sizing.ledger is not None
    assert (sizing.ledger.kv_tokens, sizing.ledger.max_running_requests) == (tokens, 50)
    found = fit(Workload(running=128, tokens_per_request=32_768), sizing)
    assert (found.running_by_states, found.running_by_kv, found.running_bound) == (50, 59, "states")
    short = Workload(running=128, tokens_per_request=3000)
    assert fit(short, sizing).running_by_kv == 652
    # 640 states of this size are more than all there is, and of half the size they leave 11,500 tokens to each.
    assert inverse.pin_for(short, sizing) is None
    pin = inverse.pin_for(short, changed(sizing, mamba_ssm_dtype="bfloat16"))
    assert pin is not None
    assert (pin.slots, pin.tokens // 128) == (640, 11_507)


def test_few_slots_beside_the_running_requests() -> None:
    """glm53-flash-sm120#12: 28 slots, 4 running, a host tier: 8 slots are left for all cached prefixes."""
    sizing = plan(
        builtin("GLM-5.3-Flash"), machine(40 * GIB), max_mamba_cache_size=28, max_running_requests=4,
        enable_hierarchical_cache=True, **S5,
    )  # fmt: skip
    found = fit(Workload(running=4, tokens_per_request=8192, idle_sessions=20), sizing)
    assert found.slots_needed == 4 * 5 + 20
    assert (found.idle_by_states, found.slots_short) == (8, 12)
    assert not found.holds


def test_states_that_no_request_can_use_are_named_with_their_bytes() -> None:
    """tpu-inference#2416: 76 GiB of states lay idle on Qwen3.5-397B, TP 8; requests + 1 is all that is needed.

    Missing: requests and slots; 64 requests stand in, and as many slots as make 9.5 GiB of 76 on each rank.
    """
    flags = {"tp_size": 8, "disable_radix_cache": True, "max_running_requests": 64}
    model, where = builtin("Qwen3.5-397B-A17B"), machine(60 * GIB)
    spare = round(9.5 * GIB / 24_007_680)
    wasteful = plan(model, where, max_mamba_cache_size=64 + spare, **flags)
    assert f"{spare} of {64 + spare} slots (9.50 GiB) are never used" in sentences(wasteful)
    exact = plan(model, where, **flags)
    assert exact.ledger is not None
    assert exact.ledger.max_mamba_cache_size == 64
    assert exact.ledger.ssm_pool_bytes + exact.ledger.conv_pool_bytes == 65 * 24_007_680
    assert "never used" not in sentences(exact)


def test_kv_counts_attention_layers_only_and_states_are_charged() -> None:
    """TensorRT-LLM#5371: the KV estimate of Nemotron-H took every layer for attention and forgot the states."""
    model = builtin("Nemotron-H-56B-Base")
    sizing = plan(model, machine(60 * GIB))
    attention = model.spec.n_attention_layers
    assert 0 < attention < model.spec.n_linear_layers < len(model.spec.layers)
    assert sizing.request.kv_bytes_per_token == attention * 2 * 8 * 128 * 2
    assert sizing.ledger is not None
    states = sum(sizing.ledger.line(name).bytes for name in ("conv states", "ssm states", "padding slot"))
    assert states == (sizing.ledger.max_mamba_cache_size + 1) * sizing.request.stage_slot_bytes


def test_rings_and_draft_states_are_lines_of_their_own() -> None:
    """TensorRT-LLM#12896: replay and per-draft buffers were missing from the formula. Missing: model; Qwen3-Next stands in."""
    model, where = builtin("Qwen3-Next-80B-A3B"), machine(20 * GIB)
    rings = plan(
        model, where, enable_linear_replayssm=True, max_running_requests=16, disable_overlap_schedule=True,
        mamba_radix_cache_strategy="no_buffer",
    )  # fmt: skip
    assert rings.ledger is not None
    assert rings.ledger.line("replay rings").bytes == rings.request.fixed_bytes > 0
    drafts = plan(model, where, speculative_num_draft_tokens=4, max_running_requests=8, **S5)
    assert drafts.ledger is not None
    assert drafts.ledger.line("draft scratch").bytes == (8 + 1) * 4 * 77_266_944


def test_the_published_recipe_says_its_cap_from_the_launch_line_alone() -> None:
    """The recipe of the first test, as a command: what was asked for and what runs, before a device is rented."""
    line = read_launch(
        split_words(
            "python3 -m sglang.launch_server --model-path Qwen/Qwen3.5-397B-A17B --tp-size 4 --max-mamba-cache-size 360 "
            "--max-running-requests 160 --mamba-max-states-per-path 3 --mamba-track-interval 2048 "
            "--mamba-ssm-dtype bfloat16 --enable-hierarchical-cache --hicache-ratio 2.5"
        )
    )
    sizing = size(builtin("Qwen3.5-397B-A17B"), machine(60 * GIB), line.deployment, SGLANG)
    assert re.search(r"--max-running-requests 160 becomes 72: 360 slots / 5 a request = 72", sentences(sizing))


def test_kv_memory_of_a_latent_hybrid_becomes_blocks_and_requests() -> None:
    """vllm#28228: Kimi-Linear with 2.30 GiB of KV on a card of two, "makes no sense". Missing: blocks and tokens."""
    launch = "vllm serve moonshotai/Kimi-Linear-48B-A3B-Instruct -tp 2 --max-model-len 120000 --kv-cache-memory-bytes 2469606195"
    found = plan_vllm_command(read_command(["--gpu", "H100", "--", *split_words(launch)], usage=""))
    assert found.ledger is not None
    assert (found.ledger.num_blocks, found.ledger.layout.block_tokens) == (319, 960)
    assert f"{found.ledger.max_concurrency:.1f}" == "2.4"


def test_a_peak_above_the_profiled_one_comes_out_of_the_blocks() -> None:
    """vllm#52872: the profiled activation peak leaves out what GDN prefill takes. Missing: the peak; 6 GiB for 2 stand in."""
    words = ["Qwen3.5-35B-A3B", "--gpu", "H200", "--engine", "vllm"]
    profiled, real = (
        plan_vllm_command(read_command([*words, *more], usage="")) for more in ((), ("--activations", "6GiB"))
    )
    assert profiled.ledger is not None
    assert real.ledger is not None
    assert (profiled.activation_bytes, real.activation_bytes) == (2 * GIB, 6 * GIB)
    lost = profiled.ledger.num_blocks - real.ledger.num_blocks
    assert lost == pytest.approx(4 * GIB / profiled.ledger.layout.block_bytes, abs=1)


def test_what_attention_workspaces_need_is_kept_out_of_the_pools() -> None:
    """FreeToken#303: pools sized without the workspace. Missing: sizes; a card of 24 GiB that the weights nearly fill."""
    tight = plan(builtin("Qwen3.5-9B"), machine(4 * GIB, pre_load_bytes=23 * GIB), mem_fraction_static=0.8)
    assert tight.ledger is None
    assert tight.refusal is not None
    assert tight.refusal.endswith("0 B are left for them; use --mem-fraction-static 0.853 or more.")
    roomy = plan(builtin("Qwen3.5-9B"), machine(10 * GIB, pre_load_bytes=23 * GIB), mem_fraction_static=0.8)
    assert roomy.ledger is not None
    assert roomy.ledger.line("slack").bytes == pytest.approx(0.2 * 23 * GIB, abs=1)


@pytest.mark.parametrize(
    ("model", "where", "block"),
    [
        ("Ling-3.0-flash", ["--gpu", "H200", "--weights", "100GiB"], 1920),
        ("Kimi-Linear-48B-A3B", ["--gpu", "H100", "--tp-size", "2"], 960),
        ("Qwen3.5-9B", ["--gpu", "H100"], 528),
        ("Qwen3.5-9B", ["--gpu", "CPU", "--device-memory", "256GiB"], 640),
    ],
)
def test_a_command_finds_the_kernel_that_sets_the_block(model: str, where: list[str], block: int) -> None:
    """vllm#53749 logs the first, vllm#40696 the third: latent attention, and the CPU, take coarser blocks."""
    found = plan_vllm_command(read_command([model, *where, "--engine", "vllm"], usage=""))
    assert found.ledger is not None
    assert found.ledger.layout.block_tokens == block
