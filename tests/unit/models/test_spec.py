"""Bytes per slot and token of real configurations (reference 1.6, 1.7, section 10) and refusals of bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twinpool.errors import ModelError
from twinpool.models.spec import ModelSpec
from twinpool.units import MIB

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048, "vocab_size": 151936,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 262144,
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
KIMI_LINEAR = {
    "architectures": ["KimiLinearForCausalLM"], "hidden_size": 2304, "vocab_size": 163840, "num_hidden_layers": 27,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "linear_attn_config": {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4, "full_attn_layers": [4, 8, 12, 16, 20, 24, 27]},
}  # fmt: skip
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"], "hidden_size": 2048, "vocab_size": 65536, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
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
        ("nvidia--Nemotron-H-56B-Base-8K", 54, 10, 864.0, 6.328, 40_960),
    ],
)
def test_real_configurations(name, linear, attention, ssm_mib, conv_mib, kv_bytes) -> None:
    spec = ModelSpec.from_config_json(json.loads((CONFIGS / f"{name}_config.json").read_text()))
    assert (spec.n_linear_layers, spec.n_attention_layers) == (linear, attention)
    assert spec.ssm_bytes_per_slot(ssm_dtype="float32") / MIB == ssm_mib
    assert spec.conv_bytes_per_slot(conv_dtype="bfloat16") / MIB == pytest.approx(conv_mib, abs=5e-4)
    assert spec.kv_bytes_per_token(kv_dtype="bfloat16") == kv_bytes


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architecture 'LlamaForCausalLM' is not known; known: Qwen3NextForCausalLM"),
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
