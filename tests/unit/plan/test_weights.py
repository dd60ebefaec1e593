"""Weight bytes: parameter totals against the names of real models, bytes against real files and logs, and broken input."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.errors import ModelError
from twinpool.models.spec import ModelSpec
from twinpool.plan.weights import WeightEstimate, estimate_weights, index_weight_bytes
from twinpool.units import GIB

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
DEMO = Path(__file__).parents[3] / "src" / "twinpool" / "demo"
KIMI_LINEAR = {  # transformers' KimiLinearConfig defaults
    "architectures": ["KimiLinearForCausalLM"], "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216,
    "moe_intermediate_size": 1024, "num_hidden_layers": 27, "num_attention_heads": 32, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_experts": 256, "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "linear_attn_config": {"num_heads": 32, "head_dim": 128, "full_attn_layers": [4, 8, 12, 16, 20, 24, 27]},
}  # fmt: skip
GRANITE_MICRO = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "vocab_size": 100352, "hidden_size": 2048, "intermediate_size": 8192,
    "shared_intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 0,
    "mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_state": 128, "tie_word_embeddings": True,
    "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
}  # fmt: skip
QWEN_9B = {
    "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "linear_num_value_heads": 32, "tie_word_embeddings": False, "mtp_num_hidden_layers": 1,
}  # fmt: skip
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"], "vocab_size": 65536, "hidden_size": 2048, "block_ff_dim": 12288,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
}  # fmt: skip
LFM2_MOE = {
    "architectures": ["Lfm2MoeForCausalLM"], "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 7168,
    "moe_intermediate_size": 1792, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_dense_layers": 2, "num_experts": 32, "full_attn_idxs": [2, 6, 10, 14, 18, 21],
}  # fmt: skip
FALCON = {
    "architectures": ["FalconH1ForCausalLM"], "vocab_size": 65537, "hidden_size": 2048, "intermediate_size": 4096,
    "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "mamba_n_heads": 48,
    "mamba_d_head": 64, "mamba_d_state": 256,
}  # fmt: skip


def real(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}_config.json").read_text())
    return config


def weigh(config: dict[str, Any], *, tp: int = 1, pp: int = 1, ep: int = 1, **more: float) -> WeightEstimate:
    spec = ModelSpec.from_config_json(config)
    return estimate_weights(config, spec, tp=tp, pp=pp, ep=ep, dtype=spec.dtype, **more)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen--Qwen3.5-27B", 27.4),
        ("Qwen--Qwen3.5-35B-A3B", 35.1),
        ("nvidia--Qwen3.5-397B-A17B-NVFP4", 397),
        ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31.6),
        ("nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", 550),
        ("nvidia--Nemotron-H-56B-Base-8K", 56),
        ("moonshotai--Kimi-K3", 2800),
    ],
)
def test_real_configs_have_the_parameters_of_their_names(name: str, billions: float) -> None:
    assert weigh(real(name)).params == pytest.approx(billions * 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("config", "params"),
    [
        (KIMI_LINEAR, 49_122_675_072), (GRANITE_MICRO, 3_191_396_096), (FALCON, 1_605_121_408), (LFM2, 1_170_340_608),
        (LFM2_MOE, 8_339_929_856),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else None,
)  # fmt: skip
def test_counts_are_those_of_the_module_trees_of_transformers(config: dict[str, Any], params: int) -> None:
    assert weigh(config).params == pytest.approx(params, rel=1e-4)


def test_the_demo_is_counted_to_its_file() -> None:
    config = json.loads((DEMO / "config.json").read_text())
    assert index_weight_bytes(DEMO) == 10_557_280
    assert weigh(config).bytes == pytest.approx(10_557_280, rel=0.001)


def test_two_ranks_of_qwen_9b_take_what_a_log_shows() -> None:
    # 22.93 GiB free before and 14.08 after loading, on each of two devices; the vision tower is that of its family.
    vision = {**real("Qwen--Qwen3.5-27B")["vision_config"], "out_hidden_size": 4096}
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": QWEN_9B, "vision_config": vision}
    assert weigh(config, tp=2).bytes == pytest.approx((22.93 - 14.08) * GIB, rel=0.01)


def test_granite_micro_takes_what_a_log_shows() -> None:
    assert weigh(GRANITE_MICRO).bytes == pytest.approx((15.24 - 9.26) * GIB, rel=0.01)


def test_an_fp4_checkpoint_is_smaller_than_its_parameters_and_keeps_what_it_ignores() -> None:
    config = real("nvidia--Qwen3.5-397B-A17B-NVFP4")
    packed, ignored = weigh(config), config["quantization_config"].pop("ignore")
    assert "lm_head" in ignored
    assert 0.5625 * packed.params < weigh(config).total_bytes < packed.total_bytes < 0.61 * packed.params


def test_mixed_precision_sizes_each_listed_module() -> None:
    config = {**real("Qwen--Qwen3.5-27B"), "quantization_config": {"quant_method": "modelopt", "quantized_layers": {
        "model.language_model.layers.3.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.language_model.layers.0.mlp.up_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    }}}  # fmt: skip
    plain = weigh(real("Qwen--Qwen3.5-27B")).total_bytes
    saved = 5120 * 24 * 256 * 2 * 1.0 + 5120 * 17408 * (2 - 0.5625)
    assert plain - weigh(config).total_bytes == saved


@pytest.mark.parametrize(
    ("name", "file_gb"),
    [("Qwen--Qwen3.5-27B", 21.9), ("Qwen--Qwen3.5-35B-A3B", 23.4)],  # noonghunna/club-3090#603 and #607
)
def test_mixed_precision_files_have_the_size_of_the_published_ones(name: str, file_gb: float) -> None:
    # What nvidia's NVFP4 repositories of these shapes list: FP8 mixers without a and b, NVFP4 feed-forward blocks and head.
    fp8, fp4 = {"quant_algo": "FP8"}, {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    inside = {f"linear_attn.{p}": fp8 for p in ("in_proj_qkv", "in_proj_z", "out_proj")}
    inside |= {f"self_attn.{p}": fp8 for p in ("q_proj", "k_proj", "v_proj", "o_proj")}
    inside |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.experts", "mlp.shared_expert"), fp4)
    layers = {f"model.language_model.layers.{i}.{p}": row for i in range(64) for p, row in inside.items()}
    quantised = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {**layers, "lm_head": fp4}, "ignore": ["mtp*"]}
    estimate = weigh({**real(name), "quantization_config": quantised})
    assert estimate.total_bytes + estimate.mtp_bytes == pytest.approx(file_gb * 1e9, rel=0.003)


@pytest.mark.parametrize(
    ("quantised", "bytes_per_element"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1 + 4 / 16384),
        ({"quant_method": "fp8"}, 1),
        ({"quant_algo": "NVFP4", "group_size": 16}, 0.5625),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 0.5 + 2.5 / 128),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {
            "targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 32}}}}, 0.53125),
    ],
    ids=["fp8-block", "fp8", "nvfp4", "awq", "mxfp4"],
)  # fmt: skip
def test_bytes_of_each_format(quantised: dict[str, Any], bytes_per_element: float) -> None:
    plain, packed = weigh(LFM2), weigh({**LFM2, "quantization_config": quantised})
    kept = 65536 * 2048 + (2 * 16 + 1) * 2048 + 10 * 2048 * 3  # embedding, norms, convolutions
    assert packed.total_bytes == pytest.approx(kept * 2 + (plain.params - kept) * bytes_per_element, abs=1)


def test_a_quantisation_that_is_not_known_is_refused_or_replaced_by_the_name() -> None:
    config = {**LFM2, "quantization_config": {"quant_method": "quark"}}
    with pytest.raises(ModelError, match=r"^the weights cannot be counted \(.*'quark'.*\); give --weights SIZE\.$"):
        weigh(config)
    estimate = weigh(config, params_b=1.2, tp=2)
    assert (estimate.origin, estimate.total_bytes, estimate.bytes) == ("name", 2_400_000_000, 1_200_000_000)


def test_a_broken_quantisation_is_an_expected_error() -> None:
    with pytest.raises(ModelError, match="quantization_config that cannot be read"):
        weigh({**LFM2, "quantization_config": {"config_groups": {"g": {}}}})


def test_a_missing_width_is_not_counted_as_nothing() -> None:
    config = {key: value for key, value in LFM2.items() if key != "block_ff_dim"}
    with pytest.raises(ModelError, match="intermediate_size"):
        weigh(config)


def test_kv_heads_are_repeated_and_latents_are_whole() -> None:
    qwen = real("Qwen--Qwen3.5-27B")  # 4 KV heads
    whole, eighth = weigh(qwen), weigh(qwen, tp=8)
    kv = 16 * 2 * 5120 * 4 * 256 * 2
    norms = (64 * 2 + 1) * 5120 * 2
    assert eighth.bytes == pytest.approx((whole.bytes - kv - norms) / 8 + kv / 4 + norms, abs=1)
    assert weigh(KIMI_LINEAR, tp=8).bytes > weigh(KIMI_LINEAR).bytes / 8 + 7 * 2304 * 576 * 2 * 7 / 8


def test_experts_divide_by_the_larger_of_both_groups() -> None:
    config = real("Qwen--Qwen3.5-35B-A3B")
    experts = 40 * 256 * 3 * 2048 * 512 * 2
    assert weigh(config).bytes - weigh(config, ep=8).bytes == pytest.approx(experts * 7 / 8, abs=1)
    assert weigh(config, tp=8, ep=8).bytes == weigh(config, tp=8).bytes


def test_the_first_or_last_pipeline_stage_is_the_fullest() -> None:
    whole, half = weigh(QWEN_9B), weigh(QWEN_9B, pp=2)
    table = 248320 * 4096 * 2
    assert half.bytes == pytest.approx((whole.bytes - 2 * table) / 2 + table, rel=1e-4)
    assert "mean layers" in half.note


def test_mtp_layers_are_apart() -> None:
    estimate = weigh(QWEN_9B)
    without = weigh({**QWEN_9B, "mtp_num_hidden_layers": 0})
    assert without.mtp_bytes == 0 < estimate.mtp_bytes
    assert estimate.bytes == without.bytes


def test_a_measured_checkpoint_is_shared_as_estimated() -> None:
    estimate = weigh(QWEN_9B, tp=2)
    measured = estimate.rescaled(2 * (estimate.total_bytes + estimate.mtp_bytes), origin="index")
    assert (measured.bytes, measured.total_bytes) == (2 * estimate.bytes, 2 * estimate.total_bytes)
    assert (measured.mtp_bytes, measured.origin) == (2 * estimate.mtp_bytes, "index")


def test_a_vision_tower_is_counted_or_named() -> None:
    qwen = real("Qwen--Qwen3.5-27B")
    text_only = {key: value for key, value in qwen.items() if key != "vision_config"}
    assert weigh(qwen).params - weigh(text_only).params == pytest.approx(0.46e9, rel=0.02)
    assert "vision tower is not counted" in weigh(real("moonshotai--Kimi-K3")).note


@given(tp=st.sampled_from([1, 2, 4, 8]), name=st.sampled_from(["Qwen--Qwen3.5-27B", "moonshotai--Kimi-K3"]))
def test_ranks_hold_at_least_their_share(tp: int, name: str) -> None:
    estimate = weigh(real(name), tp=tp)
    assert estimate.total_bytes / tp <= estimate.bytes + 1 <= estimate.total_bytes + 2


def tensors(*sizes: int) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for i, size in enumerate(sizes):
        header[f"t{i}"] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at := at + size]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(at)


def test_headers_are_summed_over_files(tmp_path: Path) -> None:
    assert index_weight_bytes(tmp_path) is None
    (tmp_path / "a.safetensors").write_bytes(tensors(10, 6))
    (tmp_path / "b.safetensors").write_bytes(tensors(5))
    assert index_weight_bytes(tmp_path) == 21


def test_the_index_comes_first_and_may_lack_a_total(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(tensors(10))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size": 99}}')
    assert index_weight_bytes(tmp_path) == 99
    index.write_text('{"metadata": {}}')
    assert index_weight_bytes(tmp_path) == 10


@pytest.mark.parametrize("text", ["[]", "{", '{"metadata": 3}', '{"metadata": {"total_size": "big"}}'])
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        index_weight_bytes(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no safetensors file"), (b"\xff" * 8, "no safetensors file"), (tensors(10)[:-1], "cut short"),
        ((4).to_bytes(8, "little") + b"nope", "cannot be read as safetensors"),
        ((8).to_bytes(8, "little") + b'{"a": 3}', "cannot be read as safetensors"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=rf"a\.safetensors .*{reason}"):
        index_weight_bytes(tmp_path)
