"""Bytes per slot and token of real configurations (reference 1.6, 1.7, section 10) and refusals of bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.errors import ModelError
from twinpool.models.gdn.spec import GdnSpec
from twinpool.models.kda.spec import KdaSpec
from twinpool.models.shapes import KV_DTYPES, packed_bytes
from twinpool.models.spec import ModelSpec
from twinpool.units import MIB

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048, "vocab_size": 151936,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "max_position_embeddings": 262144,
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
KIMI_LINEAR = {
    "architectures": ["KimiLinearForCausalLM"], "hidden_size": 2304, "vocab_size": 163840, "num_hidden_layers": 27,
    "num_attention_heads": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "linear_attn_config": {
        "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4, "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
    },
}  # fmt: skip
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"], "hidden_size": 2048, "vocab_size": 65536, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "ssm", "tp", "slot_bytes", "kv_bytes"),
    [
        (QWEN3_NEXT, "float32", 1, 77_266_944, 24_576),
        (QWEN3_NEXT, "bfloat16", 1, 39_518_208, 24_576),
        (QWEN3_NEXT, "float32", 2, 38_633_472, 12_288),
        (KIMI_LINEAR, "float32", 1, 43_417_600, 8_064),
        (LFM2, "float32", 1, 81_920, 12_288),
    ],
)
def test_golden_bytes(config, ssm, tp, slot_bytes, kv_bytes) -> None:
    spec = ModelSpec.from_config_json(config)
    assert spec.slot_bytes(ssm_dtype=ssm, conv_dtype="bfloat16", tp=tp) == slot_bytes
    assert spec.kv_bytes_per_token(kv_dtype="bfloat16", tp=tp) == kv_bytes


@pytest.mark.parametrize(
    ("name", "linear", "attention", "ssm_mib", "conv_mib", "kv_bytes"),
    [
        ("Qwen--Qwen3.5-35B-A3B", 30, 10, 60.0, 1.406, 20_480),
        ("Qwen--Qwen3.5-27B", 48, 16, 144.0, 2.812, 65_536),
        ("nvidia--Qwen3.5-397B-A17B-NVFP4", 45, 15, 180.0, 3.164, 30_720),
        ("moonshotai--Kimi-K3", 69, 24, 414.0, 14.555, 27_648),
        ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 23, 6, 46.0, 0.809, 6_144),
        ("nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", 48, 12, 384.0, 5.062, 12_288),
        ("nvidia--NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4", 23, 6, 46.0, 0.809, 6_144),
        ("nvidia--Nemotron-H-56B-Base-8K", 54, 10, 864.0, 6.328, 40_960),
    ],
)
def test_real_configurations(name, linear, attention, ssm_mib, conv_mib, kv_bytes) -> None:
    spec = ModelSpec.from_config_json(json.loads((CONFIGS / f"{name}_config.json").read_text()))
    assert (spec.n_linear_layers, spec.n_attention_layers) == (linear, attention)
    assert spec.ssm_bytes_per_slot(ssm_dtype="float32") / MIB == ssm_mib
    assert spec.conv_bytes_per_slot(conv_dtype="bfloat16") / MIB == pytest.approx(conv_mib, abs=6e-4)
    assert spec.kv_bytes_per_token(kv_dtype="bfloat16") == kv_bytes


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "architecture 'LlamaForCausalLM' is not known; known: Qwen3NextForCausalLM, .*; the manual numbers "
            "--state-bytes-per-slot and --kv-bytes-per-token of 'twinpool plan' work for any model",
        ),
        ({"architectures": None}, "architectures=None"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"hidden_size": -1}, "hidden_size=-1"),
        ({"num_hidden_layers": "48"}, "num_hidden_layers='48'"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads=24 and linear_num_key_heads=16"),
        ({"layer_types": ["linear_attention"]}, "1 layer_types for num_hidden_layers=48"),
        ({"layer_types": ["swa"] * 48}, "layer type 'swa'"),
        ({"text_config": 3}, "text_config=3"),
    ],
)
def test_bad_configurations_are_refused_by_key(change, sentence) -> None:
    with pytest.raises(ModelError, match=sentence):
        ModelSpec.from_config_json({**QWEN3_NEXT, **change})


def test_heads_must_divide() -> None:
    with pytest.raises(ModelError, match="--tp-size 3 does not divide the model's 16 linear key heads"):
        ModelSpec.from_config_json(QWEN3_NEXT).slot_bytes(ssm_dtype="float32", conv_dtype="bfloat16", tp=3)


def test_an_invalid_state_dtype_warns_and_is_ignored() -> None:
    spec = ModelSpec.from_config_json({**QWEN3_NEXT, "mamba_ssm_dtype": "int3"})
    assert spec.ssm_dtype == "float32"
    assert spec.warnings[0].startswith("Invalid mamba_ssm_dtype 'int3' in config. Must be one of [")


GRANITE_MICRO = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "hidden_size": 2048, "vocab_size": 100352,
    "num_hidden_layers": 40, "num_attention_heads": 32,
    "num_key_value_heads": 8, "mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_state": 128,
    "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256,
    "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
}  # fmt: skip
FALCON_HALF = {
    "architectures": ["FalconH1ForCausalLM"], "hidden_size": 1024, "vocab_size": 32784, "num_hidden_layers": 36,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "mamba_n_heads": 24, "mamba_d_head": 64,
    "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_chunk_size": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "linear", "attention", "ssm_mib", "conv_mib", "kv_bytes", "chunk"),
    [
        (GRANITE_MICRO, 36, 4, 72.0, 0.896, 8_192, 256),
        (FALCON_HALF, 36, 36, 27.0, 0.369, 18_432, 128),
    ],
)
def test_shapes_of_the_model_table(config, linear, attention, ssm_mib, conv_mib, kv_bytes, chunk) -> None:
    spec = ModelSpec.from_config_json(config)
    assert (spec.n_linear_layers, spec.n_attention_layers, spec.chunk_tokens) == (linear, attention, chunk)
    assert spec.ssm_bytes_per_slot(ssm_dtype="float32") / MIB == ssm_mib
    assert spec.conv_bytes_per_slot(conv_dtype="bfloat16") / MIB == pytest.approx(conv_mib, abs=6e-4)
    assert spec.kv_bytes_per_token(kv_dtype="bfloat16") == kv_bytes


def test_every_layer_of_a_parallel_model_has_both() -> None:
    layers = ModelSpec.from_config_json(FALCON_HALF).layers
    assert all(layer.attention is not None and layer.linear is not None for layer in layers)


def test_state_shapes_follow_the_family() -> None:
    (gdn, *_) = ModelSpec.from_config_json(QWEN3_NEXT).state_shapes(tp=2)
    assert (gdn.conv, gdn.temporal) == ((4096, 3), (16, 128, 128))
    (kda, *_) = ModelSpec.from_config_json(KIMI_LINEAR).state_shapes(tp=2)
    assert (kda.conv, kda.temporal) == ((3, 6144), (16, 128, 128))
    (conv, *_) = ModelSpec.from_config_json(LFM2).state_shapes()
    assert (conv.conv, conv.temporal, conv.temporal_elements) == ((2048, 2), (), 0)


@pytest.mark.parametrize(("tp", "channels"), [(1, 4352), (2, 2176 + 128), (64, 64 + 256)])
def test_mamba2_groups_are_replicated_where_they_do_not_split(tp, channels) -> None:
    """Granite micro: 64 heads of 64, one group of state 128: (4096 + 2 G N) / tp with G raised to tp."""
    (shapes, *_) = ModelSpec.from_config_json(GRANITE_MICRO).state_shapes(tp=tp)
    assert shapes.conv == (channels, 3)
    assert shapes.temporal == (64 // tp, 64, 128)


@pytest.mark.parametrize(("tp", "dcp", "heads"), [(1, 1, 2), (2, 1, 1), (4, 1, 1), (8, 1, 1), (2, 2, 2), (8, 4, 1)])
def test_kv_heads_never_fall_below_one(tp, dcp, heads) -> None:
    spec = ModelSpec.from_config_json(QWEN3_NEXT)
    assert spec.kv_bytes_per_token(kv_dtype="bfloat16", tp=tp, dcp=dcp) == heads * 512 * 12 * 2


def test_a_latent_is_on_every_rank() -> None:
    spec = ModelSpec.from_config_json(KIMI_LINEAR)
    assert spec.kv_bytes_per_token(kv_dtype="fp8_e4m3", tp=8) == 7 * 576


def test_every_nth_layer_is_attention_without_a_list() -> None:
    spec = ModelSpec.from_config_json({**QWEN3_NEXT, "num_hidden_layers": 7, "full_attention_interval": 3})
    assert spec.attention_layers == (2, 5)
    assert spec.linear_layers == (0, 1, 3, 4, 6)


def test_facts_of_a_nested_and_quantised_config() -> None:
    path = CONFIGS / "nvidia--Qwen3.5-397B-A17B-NVFP4_config.json"
    spec = ModelSpec.from_config_json(json.loads(path.read_text()))
    assert (spec.architecture, spec.family) == ("Qwen3_5MoeForConditionalGeneration", "gdn")
    assert (spec.dtype, spec.ssm_dtype, spec.checkpoint_kv_dtype) == ("bfloat16", "float32", "fp8_e4m3")
    assert (spec.chunk_tokens, spec.supports_extra_buffer, spec.context_len) == (64, True, 262_144)
    plain = ModelSpec.from_config_json(json.loads((CONFIGS / "Qwen--Qwen3.5-27B_config.json").read_text()))
    assert plain.checkpoint_kv_dtype is None


def test_short_convolution_takes_no_extra_buffer_and_any_chunk() -> None:
    spec = ModelSpec.from_config_json(LFM2)
    assert (spec.supports_extra_buffer, spec.chunk_tokens) == (False, 1)


def test_the_nested_state_dtype_wins() -> None:
    nested = {"architectures": ["Qwen3_5ForConditionalGeneration"], "mamba_ssm_dtype": "float16"}
    text = {**QWEN3_NEXT, "mamba_ssm_dtype": "bfloat16"}
    assert ModelSpec.from_config_json({**nested, "text_config": text}).ssm_dtype == "bfloat16"
    assert ModelSpec.from_config_json({**nested, "text_config": QWEN3_NEXT}).ssm_dtype == "float16"


@pytest.mark.parametrize(
    ("config", "change", "sentence"),
    [
        (
            QWEN3_NEXT,
            {"linear_conv_kernel_dim": 1},
            "linear_conv_kernel_dim=1; it must be a whole number of at least 2",
        ),
        (QWEN3_NEXT, {"num_key_value_heads": 3}, "num_attention_heads=16 and num_key_value_heads=3"),
        (QWEN3_NEXT, {"vocab_size": True}, "vocab_size=True"),
        (QWEN3_NEXT, {"vocab_size": 10**400}, "vocab_size is above 281,474,976,710,656"),
        (
            LFM2,
            {"num_hidden_layers": 10**9, "layer_types": None, "full_attn_idxs": []},
            "num_hidden_layers is above 4,096",
        ),
        (QWEN3_NEXT, {"num_nextn_predict_layers": 10**18}, "num_nextn_predict_layers is above 4,096"),
        (QWEN3_NEXT, {"dtype": "int3"}, "dtype='int3'"),
        (QWEN3_NEXT, {"architectures": []}, r"architectures=\[\]"),
        (QWEN3_NEXT, {"layer_types": []}, "num_hidden_layers|0 layer_types"),
        (KIMI_LINEAR, {"linear_attn_config": [1]}, r"linear_attn_config=\[1\]"),
        (KIMI_LINEAR, {"linear_attn_config": {"num_heads": 1, "head_dim": 1}}, "no 'full_attn_layers'"),
        (LFM2, {"full_attn_idxs": [16]}, "names layer 16 in full_attn_idxs; layers here are 0 to 15"),
        (LFM2, {"full_attn_idxs": None}, "neither 'layer_types' nor 'full_attn_idxs'"),
        (GRANITE_MICRO, {"layer_types": None}, "no 'layer_types'"),
        (GRANITE_MICRO, {"mamba_d_head": None, "mamba_n_heads": 65}, "mamba_n_heads=65"),
    ],
)
def test_bad_values_of_each_family_are_refused(config, change, sentence) -> None:
    with pytest.raises(ModelError, match=sentence):
        ModelSpec.from_config_json({**config, **change})


def test_unknown_storage_types_are_refused() -> None:
    with pytest.raises(
        ModelError, match=r"KV dtype 'int3' is not one of float32, bfloat16, .*, mxfp8, fp4_e2m1, nvfp4"
    ):
        ModelSpec.from_config_json(QWEN3_NEXT).kv_bytes_per_token(kv_dtype="int3")


@pytest.mark.parametrize(
    ("kv_dtype", "gqa", "latent"),
    [
        ("bfloat16", 12 * 1024 * 2, 7 * 576 * 2),
        ("fp8_e5m2", 12 * 1024, 7 * 576),
        ("mxfp8", 12 * (1024 + 32), 7 * (576 + 18)),
        ("fp4_e2m1", 12 * (512 + 64), 7 * (288 + 36)),
        ("nvfp4", 12 * (512 + 64), 7 * (288 + 36)),
    ],
)
def test_storage_formats_and_their_scales(kv_dtype, gqa, latent) -> None:
    assert ModelSpec.from_config_json(QWEN3_NEXT).kv_bytes_per_token(kv_dtype=kv_dtype) == gqa
    assert ModelSpec.from_config_json(KIMI_LINEAR).kv_bytes_per_token(kv_dtype=kv_dtype) == latent


@given(st.integers(0, 10_000), st.sampled_from(KV_DTYPES))
def test_more_elements_never_take_less(elements, kv_dtype) -> None:
    assert packed_bytes(elements, kv_dtype) <= packed_bytes(elements + 1, kv_dtype) <= 4 * (elements + 1)


GLM = {
    "architectures": ["Glm5NextForConditionalGeneration"],
    "text_config": {
        "hidden_size": 4096, "vocab_size": 154880, "num_hidden_layers": 8, "num_attention_heads": 64,
        "kv_lora_rank": 512, "qk_rope_head_dim": 0, "index_kpool": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "kv_dtype", "dcp", "each"),
    [
        ({}, "bfloat16", 1, 1024 + 33),
        ({}, "fp8_e4m3", 1, 512 + 33),  # the boot log's 5,995 over 11 layers
        ({}, "fp8_e4m3", 2, 512 + 66),
        ({"index_kpool": None}, "fp8_e4m3", 1, 512 + 9),  # 132 bytes for 16 tokens, rounded up
        ({"index_kpool": 1, "qk_rope_head_dim": 64}, "fp8_e4m3", 1, 512 + 16 + 128 + 132),
    ],
)
def test_a_sparse_index_is_kept_beside_the_latent(change, kv_dtype, dcp, each) -> None:
    spec = ModelSpec.from_config_json({**GLM, "text_config": {**GLM["text_config"], **change}})
    assert spec.attention_layers == (3, 7)
    assert spec.kv_bytes_per_token(kv_dtype=kv_dtype, dcp=dcp) == 2 * each


def test_draft_layers_are_as_the_last_attention_layer() -> None:
    plain = json.loads((CONFIGS / "Qwen--Qwen3.5-27B_config.json").read_text())
    spec = ModelSpec.from_config_json(plain)
    assert (spec.draft_layers, spec.draft_kv_bytes_per_token(kv_dtype="bfloat16")) == (1, 65_536 // 16)
    assert spec.draft_kv_bytes_per_token(kv_dtype="fp8_e4m3", tp=4) == 512
    assert ModelSpec.from_config_json({**KIMI_LINEAR, "num_nextn_predict_layers": 3}).draft_layers == 3
    assert ModelSpec.from_config_json(QWEN3_NEXT).draft_kv_bytes_per_token(kv_dtype="bfloat16") == 0


def test_query_heads_must_divide() -> None:
    spec = ModelSpec.from_config_json(QWEN3_NEXT)
    spec.check_tp(16)
    with pytest.raises(ModelError, match="--tp-size 3 does not divide the model's 16 query heads; use 1, 2, 4, 8, 16"):
        spec.check_tp(3)
    odd = ModelSpec.from_config_json({**QWEN3_NEXT, "linear_num_key_heads": 6, "linear_num_value_heads": 6})
    with pytest.raises(ModelError, match="--tp-size 4 does not divide the model's 6 linear key heads"):
        odd.check_tp(4)


def test_stages_of_a_pipeline() -> None:
    spec = ModelSpec.from_config_json(KIMI_LINEAR)
    assert spec.stages(1) == (range(27),)
    assert spec.stages(4) == (range(7), range(7, 14), range(14, 21), range(21, 27))
    assert spec.stages(5) == (range(5), range(5, 10), range(10, 16), range(16, 22), range(22, 27))
    assert (spec.stage_share(4), spec.stage_share(27)) == ((6, 20), (1, 20))
    assert spec.stage_kv_bytes_per_token(pp=4, kv_dtype="bfloat16") == 2 * 1152
    for pp in (0, 28):
        with pytest.raises(ModelError, match=f"--pp-size {pp} needs a layer for each stage; the model has 27, so 1 to"):
            spec.stages(pp)


@given(st.integers(1, 120), st.integers(1, 120))
def test_stages_hold_every_layer_once(n_layers, pp) -> None:
    spec = ModelSpec.from_config_json({**QWEN3_NEXT, "num_hidden_layers": n_layers})
    if pp > n_layers:
        return
    stages = spec.stages(pp)
    assert [layer for stage in stages for layer in stage] == list(range(n_layers))
    sizes = [len(stage) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)


def of(architecture: str, **keys) -> ModelSpec:
    common = {"hidden_size": 4096, "vocab_size": 65536, "num_hidden_layers": 32, "num_attention_heads": 32}
    return ModelSpec.from_config_json({"architectures": [architecture], **common, "num_key_value_heads": 8, **keys})


@pytest.mark.parametrize(
    ("spec", "family", "attention", "conv", "temporal", "kv_bytes"),
    [
        (of("JambaForCausalLM"), "mamba1", (4, 12, 20, 28), (8192, 3), (8192, 1, 16), 4 * 4096),
        (of("FalconMambaForCausalLM", num_attention_heads=None), "mamba1", (), (8192, 3), (8192, 1, 16), 0),
        (of("BambaForCausalLM", attn_layer_indices=[9, 18]), "mamba2", (9, 18), (8704, 3), (128, 64, 256), 8192),
        (
            of("Zamba2ForCausalLM", hybrid_layer_ids=[6], n_mamba_heads=128, num_key_value_heads=None),
            "mamba2", (6,), (8320, 3), (128, 64, 64), 32 * 512 * 2,
        ),
        (of("Mamba2ForCausalLM", num_heads=128, head_dim=64), "mamba2", (), (10240, 3), (128, 64, 128), 0),
        (of("MiniMaxText01ForCausalLM", attn_type_list=[0, 1] * 16), "lightning", None, (), (32, 128, 128), 65_536),
        (
            of("BailingMoeV2_5ForCausalLM", layer_group_size=8, kv_lora_rank=512, qk_rope_head_dim=64),
            "lightning", (7, 15, 23, 31), (), (32, 128, 128), 4 * 1152,
        ),
        (
            of("BailingMoeV3ForCausalLM", layer_group_size=[1] * 31 + [0], kv_lora_rank=512, qk_rope_head_dim=64),
            "kda", (31,), (3, 12288), (32, 128, 128), 1152,
        ),
        (
            of(
                "JetNemotronForCausalLM", layer_types=["jet", "attn", "jet", "swa"], num_hidden_layers=4,
                efficient_attention_config={"jet": {"num_heads": 12, "head_dim": 96, "expand_v": 2.0, "conv_size": 4}},
            ),
            "gdn", (1, 3), (4608, 3), (12, 192, 96), 8192,
        ),
        (of("OlmoHybridForCausalLM", num_hidden_layers=4), "gdn", (3,), (3 * 4096, 3), (32, 192, 96), 4096),
        (of("ZayaForCausalLM", head_dim=128, num_hidden_layers=2), "cca", (0, 1), (5120, 2), (), 8192),
    ],
)  # fmt: skip
def test_layers_and_shapes_of_each_family(spec, family, attention, conv, temporal, kv_bytes) -> None:
    assert spec.family == family
    assert attention is None or spec.attention_layers == attention
    assert (spec.state_shapes()[0].conv, spec.state_shapes()[0].temporal) == (conv, temporal)
    assert spec.kv_bytes_per_token(kv_dtype="bfloat16") == kv_bytes
    spec.check_tp(2)


def test_zaya_has_a_second_window_that_is_not_split() -> None:
    spec = of("ZayaForCausalLM", head_dim=128, sliding_window=4096, layer_types=["hybrid", "hybrid_sliding"] * 16)
    (shapes, *_) = spec.state_shapes(tp=2)
    assert (shapes.conv, shapes.second_conv, shapes.conv_elements) == ((2560, 2), (4096, 1), 2560 * 2 + 4096)
    assert spec.attention_layers == tuple(range(0, 32, 2))
    assert spec.warnings[0].startswith("16 layers keep only the last 4096 tokens: 268,435,456 bytes")


def test_a_language_model_inside_an_omni_config() -> None:
    path = CONFIGS / "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16_config.json"
    text = json.loads(path.read_text())
    spec = ModelSpec.from_config_json({"architectures": ["NemotronH_Nano_Omni_Reasoning_V3"], "llm_config": text})
    assert spec.layers == ModelSpec.from_config_json(text).layers
    assert spec.warnings == ()
    (warning,) = ModelSpec.from_config_json({**text, "mamba_ssm_cache_dtype": "float16"}).warnings
    assert warning.startswith("config.json says mamba_ssm_cache_dtype='float16', which is not read; states are float32")


def test_replay_rings() -> None:
    """16 records on one of two ranks: 16 value heads and 8 key heads of 128; 16 KDA heads of 128."""
    gdn, kda = GdnSpec(16, 128, 32, 128, 4), KdaSpec(32, 128, 4)
    half, whole = {"records": 16, "conv_item_bytes": 2, "tp": 2}, {"records": 16, "conv_item_bytes": 4, "tp": 2}
    assert gdn.replay_ring_bytes(**half) == 2 * (16 * 16 * 128 * 2 + 8 * 16 * 128 * 2) + 16 * 16 * 4
    assert gdn.replay_ring_bytes(**whole) == 16 * 16 * 128 * 4 + 8 * 16 * 128 * 4 + 16 * 16 * 4
    assert kda.replay_ring_bytes(**half) == 2 * (2 * 16 * 16 * 128 * 2) + 16 * 16 * 4 + 16 * 16 * 128 * 4
