"""The vLLM profile against its boot lines: every number below was printed by a vLLM that somebody ran (docs/vllm-profile.md)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.errors import ConfigError, MemoryRefusal, ModelError
from twinpool.models.spec import ModelSpec
from twinpool.plan.vllm import VllmLedger, VllmRequest, plan_vllm, vllm_request
from twinpool.plan.vllm_blocks import HybridLayers, block_layout, group_layers
from twinpool.units import GIB, MIB

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
MODEL_27B = "Qwen--Qwen3.5-27B"
MODEL_35B = "Qwen--Qwen3.5-35B-A3B"
LIGHTNING = "nvidia--NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4"
ALIGN_16 = 16
ALIGN_MLA = 64
ALIGN_CPU = 128


def gdn(value_heads: int, kv_heads: int, *, key_heads: int = 16, layers: int = 32) -> ModelSpec:
    """A Qwen3.5 of these heads: head 128, conv kernel 4, attention head 256, every fourth layer attention."""
    return ModelSpec.from_config_json({
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 2560,
        "vocab_size": 248320, "num_hidden_layers": layers, "num_attention_heads": 16, "head_dim": 256,
        "num_key_value_heads": kv_heads, "max_position_embeddings": 262144, "dtype": "bfloat16",
        "linear_num_key_heads": key_heads, "linear_key_head_dim": 128, "linear_num_value_heads": value_heads,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32",
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
    })  # fmt: skip


def config(name: str) -> ModelSpec:
    """A published configuration."""
    return ModelSpec.from_config_json(json.loads((CONFIGS / f"{name}_config.json").read_text()))


def request(
    spec: ModelSpec, *, tp: int = 1, kv: str = "bfloat16", ssm: str = "float32", **flags: object
) -> VllmRequest:
    """A request on a device with room for everything, unless the flags say otherwise."""
    facts: dict[str, object] = {"total_bytes": 80 * GIB, "non_kv_bytes": GIB, **flags}
    return vllm_request(spec, tp=tp, kv_dtype=kv, ssm_dtype=ssm, conv_dtype="bfloat16", **facts)


def plan(spec: ModelSpec, **flags: object) -> VllmLedger:
    """The ledger of `request` with the same arguments."""
    return plan_vllm(request(spec, **flags))


LING_FLASH = HybridLayers(
    attention_layers=7, linear_layers=35, kv_bytes_per_token=(512 + 64) * 2, conv_bytes=3 * 4096 * 3 * 2,
    ssm_bytes=32 * 128 * 128 * 4,
)  # fmt: skip
SUPER_FP8 = HybridLayers(
    attention_layers=8, linear_layers=40, kv_bytes_per_token=512, conv_bytes=10240 * 3 * 2, ssm_bytes=128 * 64 * 128 * 4
)
FLASH_NEXT_2_DRAFTS = HybridLayers(
    attention_layers=12,
    linear_layers=36,
    kv_bytes_per_token=2048,
    conv_bytes=10240 * 5 * 2,
    ssm_bytes=48 * 128 * 128 * 4,
)


@pytest.mark.parametrize(
    ("spec", "flags", "tokens"),
    [
        pytest.param(gdn(32, 4), {}, 528, id="Qwen3.5-4B: vllm#40696"),
        pytest.param(gdn(16, 2), {}, 544, id="Qwen3.5-0.8B and 2B"),
        pytest.param(config(MODEL_27B), {}, 784, id="Qwen3.6-27B: vllm#47430"),
        pytest.param(config(LIGHTNING), {}, 2096, id="Nemotron-3.5-Lightning: vllm#53749"),
        pytest.param(gdn(8, 1, key_heads=4, layers=12), {"kernel_alignment": ALIGN_CPU}, 640, id="100M model, CPU"),
        pytest.param(
            gdn(8, 1, key_heads=4, layers=12), {"kernel_alignment": 16, "block_size": 32}, 544, id="100M model, block 32"
        ),
        pytest.param(config(MODEL_35B), {"kv": "fp8_e4m3"}, 2096, id="35B, fp8 KV: 2,146,304 / 1,024 exactly"),
        pytest.param(
            config(MODEL_27B), {"tp": 2, "kv": "fp8_e4m3", "num_speculative_tokens": 3}, 1600, id="club-3090#44, #751"
        ),
        pytest.param(
            config(MODEL_27B), {"tp": 2, "kv": "fp8_e4m3", "num_speculative_tokens": 4}, 1616, id="club-3090#1170"
        ),
        pytest.param(
            config(MODEL_27B), {"tp": 2, "kv": "fp8_e4m3", "num_speculative_tokens": 7}, 1648, id="club-3090#1107"
        ),
        pytest.param(
            config(MODEL_27B), {"ssm": "bfloat16", "num_speculative_tokens": 7}, 448, id="qwen38-27b-rtx3090#102, fast"
        ),
        pytest.param(
            config(MODEL_27B), {"ssm": "bfloat16", "num_speculative_tokens": 15}, 480, id="qwen38-27b-rtx3090#102, 15"
        ),
        pytest.param(
            config(MODEL_27B), {"ssm": "bfloat16", "kv": "fp8_e4m3", "num_speculative_tokens": 3}, 832,
            id="qwen38-27b-rtx3090#102, long",
        ),
    ],
)  # fmt: skip
def test_block_size_as_logged(spec: ModelSpec, flags: dict[str, object], tokens: int) -> None:
    assert request(spec, **flags).layout.block_tokens == tokens


def test_state_and_token_bytes_of_the_4b() -> None:
    layers = request(gdn(32, 4)).layers
    assert (layers.state_bytes, layers.kv_bytes_per_token) == (2_146_304, 4096)


@pytest.mark.parametrize(
    ("layers", "alignment", "tokens", "percent"),
    [
        pytest.param(LING_FLASH, ALIGN_MLA, 1920, "1.89", id="Ling-3.0-flash: vllm#53749"),
        pytest.param(SUPER_FP8, ALIGN_16, 8320, "0.10", id="Nemotron-3-Super: vllm#48401"),
        pytest.param(FLASH_NEXT_2_DRAFTS, ALIGN_16, 1600, "0.88", id="Qwen3.8-Flash-Next: vllm#54458"),
    ],
)
def test_block_size_and_padding_of_other_families(
    layers: HybridLayers, alignment: int, tokens: int, percent: str
) -> None:
    layout = block_layout(
        layers, mode="align", kernel_alignment=alignment, block_size=None, chunk_tokens=64, speculative_blocks=0
    )
    assert (layout.block_tokens, f"{layout.padding_fraction * 100:.2f}") == (tokens, percent)


@pytest.mark.parametrize(
    ("flags", "percent"),
    [
        ({"ssm": "bfloat16", "num_speculative_tokens": 7}, "3.23"),
        ({"ssm": "bfloat16", "kv": "fp8_e4m3", "num_speculative_tokens": 3}, "0.48"),
        ({"tp": 2, "kv": "fp8_e4m3", "num_speculative_tokens": 3}, "0.25"),
        ({"tp": 2, "kv": "fp8_e4m3", "num_speculative_tokens": 7}, "0.73"),
        ({}, "0.13"),
    ],
)
def test_padding_of_the_27b_as_logged(flags: dict[str, object], percent: str) -> None:
    layout = request(config(MODEL_27B), **flags).layout
    assert f"{layout.padding_fraction * 100:.2f}" == percent


def test_log_of_the_27b_without_prefix_caching() -> None:
    """vllm#40691: 290,864 tokens by the old line, 33.04x, because 1,487 blocks give 371 to each of 4 groups."""
    ledger = plan(
        config(MODEL_27B), prefix_caching=False, max_model_len=32768, max_num_seqs=16, num_gpu_blocks_override=1487
    )
    assert ledger.old_kv_cache_size_tokens == 290_864
    assert f"{ledger.max_concurrency:.2f}" == "33.04"
    assert ledger.blocks_per_request(32768) == 45


@pytest.mark.parametrize(("kv_gib", "blocks", "tokens"), [(8.82, 184, 141_036), (9.75, 203, 155_600)])
def test_log_of_the_27b_on_48_gib(kv_gib: float, blocks: int, tokens: int) -> None:
    """An L40S: available KV memory of two boots, blocks named by the max_num_seqs error, tokens logged."""
    ledger = plan(
        config(MODEL_27B), total_bytes=48 * GIB, kv_cache_memory_bytes=int(kv_gib * GIB), prefix_caching=False,
        max_model_len=131_072, max_num_seqs=16,
    )  # fmt: skip
    assert (ledger.num_blocks, ledger.kv_cache_size_tokens) == (blocks, tokens)


def test_log_of_a_9b() -> None:
    """A Qwen3.5-9B rewriter: 1.74 GiB of KV (two decimals), 108 blocks, 53,084 tokens at 24,576."""
    spec = gdn(32, 4)
    ledger = plan(
        spec,
        num_gpu_blocks_override=108,
        prefix_caching=False,
        max_model_len=24_576,
        max_num_seqs=8,
        total_bytes=24 * GIB,
    )
    assert ledger.kv_cache_size_tokens == 53_084
    assert f"{108 * ledger.layout.block_bytes / GIB:.2f}" == "1.74"


def test_log_of_lightning_and_ling() -> None:
    """vllm#53749: 7,035,562 and 4,072,594 tokens at 32,768 on one H200, mode align."""
    lightning = plan(config(LIGHTNING), total_bytes=140 * GIB, num_gpu_blocks_override=5153, max_model_len=32_768)
    assert lightning.kv_cache_size_tokens == 7_035_562
    assert (lightning.layout.attention_groups, lightning.layout.state_groups) == (1, 4)
    ling = plan_vllm(
        VllmRequest(
            total_bytes=140 * GIB, non_kv_bytes=GIB, max_model_len=32_768, layers=LING_FLASH, kernel_alignment=ALIGN_MLA,
            num_gpu_blocks_override=3480,
        )
    )  # fmt: skip
    assert ling.kv_cache_size_tokens == 4_072_594
    assert ling.blocks_per_request(32_768) == 18 + 5 * 2


@pytest.mark.parametrize(
    ("drafts", "blocks", "tokens"), [(3, 424, 620_944), (3, 425, 622_408), (3, 205, 300_220), (4, 366, 530_081)]
)
def test_log_of_the_27b_with_drafts_on_two_cards(drafts: int, blocks: int, tokens: int) -> None:
    """club-3090 #295, #294, #594 and #1170: fp8 KV, tp 2, 262,144 tokens."""
    ledger = plan(
        config(MODEL_27B), tp=2, kv="fp8_e4m3", num_speculative_tokens=drafts, draft_attention_layers=1,
        num_gpu_blocks_override=blocks, max_model_len=262_144, max_num_seqs=2,
    )  # fmt: skip
    assert ledger.kv_cache_size_tokens == tokens
    assert (ledger.layout.layers_per_group, ledger.layout.padding_layers) == (17, 3)


def test_blocks_of_the_27b_with_drafts_from_its_memory() -> None:
    """club-3090 #594: 5.33 GiB of KV on each of two cards make the 205 blocks behind 300,220 tokens."""
    ledger = plan(
        config(MODEL_27B), tp=2, kv="fp8_e4m3", num_speculative_tokens=3, draft_attention_layers=1,
        kv_cache_memory_bytes=int(5.33 * GIB), max_model_len=262_144, max_num_seqs=2, total_bytes=24 * GIB,
    )  # fmt: skip
    assert (ledger.num_blocks, ledger.kv_cache_size_tokens) == (205, 300_220)


def test_two_long_requests_fill_what_was_advertised() -> None:
    """club-3090 #1170: with spaced checkpoints two requests of 200K peak at 0.77 of the 366 blocks (two digits kept)."""
    ledger = plan(
        config(MODEL_27B), tp=2, kv="fp8_e4m3", num_speculative_tokens=4, draft_attention_layers=1,
        num_gpu_blocks_override=366, max_model_len=262_144, max_num_seqs=2, retention_interval=None,
    )  # fmt: skip
    assert 2 * ledger.blocks_per_request(200_000) * 100 // 366 == 77
    assert ledger.usable_tokens == 365 * 162 * 1616 // (162 * 4)
    spaced = plan_vllm(replace(ledger.request, mamba_block_size=8192))
    assert spaced.request.retention_tokens == 5 * 1616
    assert spaced.kv_cache_size_tokens == ledger.kv_cache_size_tokens == 530_081
    assert spaced.usable_tokens > 2 * ledger.usable_tokens
    assert any("8192 is no multiple" in sentence for sentence in spaced.warnings)


def test_max_num_seqs_above_the_blocks_is_refused() -> None:
    """kaito#2319: max_num_seqs (1024) exceeds available Mamba cache blocks (614)."""
    spec = config(MODEL_27B)
    facts = {"total_bytes": 94 * GIB, "num_gpu_blocks_override": 614, "max_model_len": 32_768}
    with pytest.raises(MemoryRefusal, match=r"^--max-num-seqs 1024 .* pool has 614: lower --max-num-seqs to 614\.$"):
        plan(spec, max_num_seqs=1024, **facts)
    ledger = plan(spec, **facts)
    assert (ledger.max_num_seqs, ledger.running_requests) == (614, 613 // 7)
    assert any("pass --max-num-seqs 614" in sentence for sentence in ledger.warnings)
    assert any(sentence.startswith("Only 87 of 614 sequences") for sentence in ledger.warnings)


def test_default_max_num_seqs_follows_the_device() -> None:
    small = plan(gdn(32, 4), total_bytes=48 * GIB, max_model_len=4096)
    large = plan(gdn(32, 4), total_bytes=80 * GIB, max_model_len=4096)
    assert (small.max_num_seqs, large.max_num_seqs) == (256, 1024)
    assert large.max_num_seqs_bound == "vLLM's default for a device of 80.00 GiB"


def test_smallest_prefix_and_what_a_repeated_prompt_reuses() -> None:
    """vllm#40696 (552 tokens reuse 528) and qwen38-27b-rtx3090#102 (with drafts the last block is dropped)."""
    ledger = plan(gdn(32, 4), max_model_len=1024)
    assert ledger.smallest_prefix_tokens == 528
    assert [ledger.cached_prefix_tokens(length) for length in (480, 528, 552, 979)] == [0, 0, 528, 528]
    fast = plan(config(MODEL_27B), ssm="bfloat16", num_speculative_tokens=7, max_model_len=65_536)
    assert fast.smallest_prefix_tokens == 2 * 448
    lengths = {512: 0, 1024: 448, 2048: 1344, 4096: 3584, 8192: 7616, 16384: 15680, 32768: 32256}
    assert {length: fast.cached_prefix_tokens(length) for length in lengths} == lengths
    assert plan(gdn(32, 4), max_model_len=1024, prefix_caching=False).cached_prefix_tokens(900) == 0


def test_prefix_caching_that_can_never_hit_is_said() -> None:
    """vllm#48401: a block of 8,320 tokens and max_model_len 4,096."""
    facts = VllmRequest(total_bytes=80 * GIB, non_kv_bytes=GIB, max_model_len=4096, layers=SUPER_FP8)
    ledger = plan_vllm(facts)
    assert ledger.usable_tokens == 0
    assert "No prefix is ever reused: the smallest is 8320 tokens and --max-model-len is 4096." in ledger.warnings


def test_too_long_is_refused_with_the_longest_that_fits() -> None:
    facts = {"num_gpu_blocks_override": 20, "max_num_seqs": 1, "prefix_caching": False}
    with pytest.raises(MemoryRefusal, match=r"needs 66 blocks .* 20 blocks .* lower --max-model-len to 8976\.$"):
        plan(gdn(32, 4), max_model_len=32_768, **facts)
    assert plan(gdn(32, 4), max_model_len=8976, **facts).max_concurrency == 1.0
    with pytest.raises(MemoryRefusal, match=r"leave more memory or use a higher -tp\.$"):
        plan(gdn(32, 4), max_model_len=100, **{**facts, "num_gpu_blocks_override": 3})


def test_the_null_block_takes_the_last_block_of_a_full_request() -> None:
    ledger = plan(gdn(32, 4), max_model_len=8976, num_gpu_blocks_override=20, max_num_seqs=1, prefix_caching=False)
    assert any("such a request never ends; lower --max-model-len to 8448" in sentence for sentence in ledger.warnings)


def test_memory_that_weights_leave() -> None:
    with pytest.raises(MemoryRefusal, match=r"0\.5 leaves 0 B .* raise it to at least 0\.91\.$"):
        plan(gdn(32, 4), total_bytes=10 * GIB, non_kv_bytes=9 * GIB, utilization=0.5)
    with pytest.raises(MemoryRefusal, match=r"use a larger device or a higher -tp\.$"):
        plan(gdn(32, 4), total_bytes=10 * GIB, non_kv_bytes=11 * GIB)
    with pytest.raises(
        MemoryRefusal, match=r"needs 2\.00 GiB, but 1\.00 GiB are left .* lower --kv-cache-memory-bytes"
    ):
        plan(gdn(32, 4), total_bytes=10 * GIB, non_kv_bytes=9 * GIB, kv_cache_memory_bytes=2 * GIB)


def test_flags_that_vllm_would_not_start_with() -> None:
    with pytest.raises(ConfigError, match="raise it to 2096"):
        plan(config(LIGHTNING), max_num_batched_tokens=2048)
    with pytest.raises(ConfigError, match="--mamba-block-size 8192 needs --enable-prefix-caching"):
        plan(gdn(32, 4), mamba_block_size=8192, prefix_caching=False)
    with pytest.raises(ConfigError, match="--max-num-seqs is 0; it must be at least 1"):
        plan(gdn(32, 4), max_num_seqs=0)
    with pytest.raises(ConfigError, match="the mode is none"):
        plan(gdn(32, 4), mamba_cache_mode="none")
    with pytest.raises(ConfigError, match="use one of none, align, all"):
        plan(gdn(32, 4), mamba_cache_mode="dense")
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        plan(gdn(32, 4), utilization=1.5)
    with pytest.raises(ConfigError, match="at least 1 token"):
        plan(gdn(32, 4), max_model_len=0)
    with pytest.raises(ConfigError, match="at least 1"):
        plan(gdn(32, 4), max_model_len=1024).blocks_per_request(0)
    with pytest.raises(ModelError, match="does not divide"):
        plan(gdn(32, 4), tp=3)


def test_mode_all_charges_every_boundary_and_rounds_to_the_chunk() -> None:
    ledger = plan(gdn(32, 4), mamba_cache_mode="all", mamba_block_size=256, max_model_len=8192)
    assert ledger.layout.block_tokens == 768
    assert ledger.blocks_per_request(8192) == 4 * 11
    assert ledger.layout.longest_request_tokens(44) == 11 * 768


def test_a_larger_block_size_is_kept_and_padded() -> None:
    ledger = plan(gdn(32, 4), block_size=1024, max_model_len=8192)
    assert (ledger.layout.block_tokens, ledger.layout.padding_bytes) == (1024, 1024 * 4096 - 2_146_304)
    assert any(sentence.startswith("Each state is padded by 95.42%") for sentence in ledger.warnings)


@pytest.mark.parametrize(
    ("attention", "linear", "groups"),
    [
        pytest.param(16, 48, (16, 1, 3, 0), id="27B"),
        pytest.param(17, 48, (17, 1, 3, 3), id="27B and a drafter: Add 3 padding layers"),
        pytest.param(6, 23, (6, 1, 4, 1), id="Nemotron-3-Nano"),
        pytest.param(36, 36, (36, 1, 1, 0), id="Falcon-H1"),
        pytest.param(12, 13, (13, 1, 1, 1), id="close counts"),
        pytest.param(24, 69, (24, 1, 3, 3), id="Kimi-K3"),
        pytest.param(8, 0, (8, 1, 0, 0), id="attention only"),
    ],
)
def test_groups_of_equal_size(attention: int, linear: int, groups: tuple[int, int, int, int]) -> None:
    assert group_layers(attention, linear) == groups


@pytest.mark.parametrize(
    ("retention", "kept"), [(None, 10), (0, 1), (100, 10), (1056, 5), (2112, 3), (10**9, 1)]
)  # fmt: skip
def test_checkpoints_of_a_cached_sequence(retention: int | None, kept: int) -> None:
    layout = request(gdn(32, 4)).layout
    assert layout.checkpoints(10 * 528 + 100, retention_tokens=retention) == kept
    assert layout.checkpoints(500, retention_tokens=retention) == 0


@given(
    total_mib=st.integers(4096, 200_000),
    non_kv_mib=st.integers(0, 100_000),
    utilization=st.floats(0.1, 1.0),
    length=st.integers(1, 500_000),
    drafts=st.integers(0, 8),
    prefix_caching=st.booleans(),
)
def test_lines_add_up_and_advice_is_enough(
    total_mib: int, non_kv_mib: int, utilization: float, length: int, drafts: int, prefix_caching: bool
) -> None:
    facts = request(
        gdn(32, 4), total_bytes=total_mib * MIB, non_kv_bytes=non_kv_mib * MIB, utilization=utilization,
        max_model_len=length, num_speculative_tokens=drafts, prefix_caching=prefix_caching,
    )  # fmt: skip
    try:
        ledger = plan_vllm(facts)
    except MemoryRefusal as refusal:
        _, advised, rest = str(refusal).partition("lower --max-model-len to ")
        if advised:
            plan_vllm(replace(facts, max_model_len=int(rest.rstrip("."))))
        return
    assert sum(size for _, size in ledger.lines) == facts.total_bytes
    assert all(size >= 0 for _, size in ledger.lines)
    assert ledger.layout.page_bytes >= ledger.layout.state_bytes
    assert ledger.layout.longest_request_tokens(ledger.num_blocks) >= length
    assert ledger.blocks_per_request(length) <= ledger.num_blocks
    assert ledger.running_requests <= ledger.max_num_seqs <= max(ledger.num_blocks, 1)
