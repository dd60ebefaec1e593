"""Bytes of quantised weights: by config, by flag, by name, against published files; and what is not known."""

from typing import Any

import pytest

from tests.unit.plan.weighing import CONFIGS, LFM2, real, weigh
from twinpool.errors import ModelError
from twinpool.plan.weight_quantisation import split_ending
from twinpool.units import GIB

KEPT = 65536 * 2048 + (2 * 16 + 1) * 2048 + 10 * 2048 * 3  # LFM2's embedding, norms and convolutions: never quantised


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
    fp8: dict[str, Any] = {"quant_algo": "FP8"}
    fp4: dict[str, Any] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
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
    assert packed.total_bytes == pytest.approx(KEPT * 2 + (plain.params - KEPT) * bytes_per_element, abs=1)


@pytest.mark.parametrize("params_b", [None, 1.2])
def test_a_quantisation_that_is_not_known_asks_for_the_weights(params_b: float | None) -> None:
    config = {**LFM2, "quantization_config": {"quant_method": "quark"}}
    sentence = "config.json says quant_method='quark', whose bytes are not known here; give --weights SIZE."
    with pytest.raises(ModelError) as refused:
        weigh(config, params_b=params_b)
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    "quantised",
    [
        {"config_groups": {"g": {}}},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "awq", "bits": -4},
        {"config_groups": {"g": {"weights": {"num_bits": 1e308}}}},
        {"config_groups": {"g": {"weights": {"num_bits": float("inf")}}}},
    ],
)
def test_a_broken_quantisation_is_an_expected_error(quantised: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="quantization_config that cannot be read"):
        weigh({**LFM2, "quantization_config": quantised})


FILES = [  # config under tests/data/configs, GiB without MTP layers
    ("Qwen--Qwen3.5-27B", 50.96),
    ("Qwen--Qwen3.5-35B-A3B", 65.39),
    ("Qwen--Qwen3.5-122B-A10B", 228.29),
    ("Qwen--Qwen3.5-397B-A17B", 739.1),
    ("moonshotai--Kimi-K3", 1446.3),
    ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 58.82),
    ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4", 17.5),
    ("nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8", 113.46),
    ("nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", 64.77),
    ("nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", 1023.2),
    ("nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8", 513.8),
    ("nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4", 290.9),
    ("nvidia--NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4", 17.5),
    ("nvidia--Nemotron-H-56B-Base-8K", 104.91),
    ("nvidia--Qwen3.5-122B-A10B-NVFP4", 73.04),
    ("nvidia--Qwen3.5-397B-A17B-NVFP4", 221.6),
    ("nvidia--Qwen3.6-27B-NVFP4", 19.62),
    ("nvidia--Qwen3.6-35B-A3B-NVFP4", 20.23),
]


@pytest.mark.parametrize(("name", "gib"), FILES)
def test_real_configs_have_these_totals(name: str, gib: float) -> None:
    assert weigh(real(name), name=name).total_bytes / GIB == pytest.approx(gib, rel=0.001)


def test_the_table_has_every_config() -> None:
    assert sorted(name for name, _ in FILES) == sorted(p.name.removesuffix("_config.json") for p in CONFIGS.iterdir())


@pytest.mark.parametrize("name", [name for name, _ in FILES if "NVFP4" in name or "FP8" in name])
def test_quantised_files_are_this_much_of_the_plain_one(name: str) -> None:
    config = real(name)
    packed = weigh(config, name=name)
    share = packed.total_bytes / (2 * packed.params)
    low, high = (0.5, 0.51) if name.endswith("-FP8") else (0.28, 0.35)
    if name == "nvidia--Qwen3.6-27B-NVFP4":  # its mixers are FP8 and there are no experts
        low, high = 0.38, 0.39
    assert low <= share <= high


@pytest.mark.parametrize(
    ("flag", "bytes_per_element"),
    [
        ("fp8", 1), ("w8a8_int8", 1), ("modelopt_fp4", 0.5625), ("nvfp4", 0.5625), ("mxfp4", 0.53125), ("mxfp8", 1.03125),
        ("awq", 0.5 + 2.5 / 128), ("gptq_marlin", 0.5 + 2.5 / 128), ("bitsandbytes", 0.5625),
    ],
)  # fmt: skip
def test_a_launch_line_says_the_scheme(flag: str, bytes_per_element: float) -> None:
    packed = weigh(LFM2, quantization=flag)
    assert packed.total_bytes == pytest.approx(KEPT * 2 + (packed.params - KEPT) * bytes_per_element, abs=1)
    assert packed.note.endswith(f"quantised as --quantization {flag} says")


@pytest.mark.parametrize(
    ("name", "scheme", "bytes_per_element"),
    [
        ("LFM2-1.2B", "", 2), ("LFM2-1.2B-BF16", "", 2), ("LFM2-1.2B-FP8", "fp8", 1), ("x/LFM2-1.2B-fp8-dynamic", "fp8", 1),
        ("LFM2-1.2B-NVFP4", "nvfp4", 0.5625), ("LFM2-1.2B-MXFP4", "mxfp4", 0.53125), ("LFM2-1.2B-AWQ", "awq", 0.51953125),
        ("LFM2-1.2B-GPTQ-Int4", "gptq", 0.51953125), ("LFM2-1.2B-GPTQ-Int8", "int8", 1),
        ("LFM2-1.2B.w4a16", "gptq", 0.51953125), ("LFM2-1.2B-bnb-4bit", "bitsandbytes", 0.5625),
    ],
)  # fmt: skip
def test_a_name_says_the_scheme(name: str, scheme: str, bytes_per_element: float) -> None:
    packed = weigh(LFM2, name=name)
    assert packed.total_bytes == pytest.approx(KEPT * 2 + (packed.params - KEPT) * bytes_per_element, abs=1)
    assert (f"the quantisation ({scheme}) is taken from the ending" in packed.note) == bool(scheme)


def test_the_config_comes_before_the_flag_and_the_flag_before_the_name() -> None:
    fp8 = {**LFM2, "quantization_config": {"quant_method": "fp8"}}
    assert weigh(fp8, quantization="awq", name="x-NVFP4").total_bytes == weigh(fp8).total_bytes
    assert weigh(LFM2, quantization="fp8", name="x-NVFP4").total_bytes == weigh(fp8).total_bytes


def test_modelopt_may_have_quantised_the_cache_alone() -> None:
    config = {**LFM2, "quantization_config": {"quant_method": "modelopt", "quant_algo": None}}
    assert weigh(config).total_bytes == weigh(LFM2).total_bytes


@pytest.mark.parametrize("more", [{"quantization": "gguf"}, {"quantization": "quark"}, {"name": "x/LFM2-1.2B-GGUF"}])
def test_a_flag_or_a_name_that_is_not_known_asks_for_the_weights(more: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"give --weights SIZE\.$"):
        weigh(LFM2, params_b=1.2, **more)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("Qwen/Qwen3.6-27B-FP8", ("Qwen/Qwen3.6-27B", "-FP8")),
        ("Qwen3.5-27B-GPTQ-Int4", ("Qwen3.5-27B", "-GPTQ-Int4")),
        ("Qwen3.5-27B", ("Qwen3.5-27B", "")),
        ("Nemotron-H-56B-Base-8K", ("Nemotron-H-56B-Base-8K", "")),
        ("fp8", ("fp8", "")),
    ],
)
def test_an_ending_is_split_off(name: str, parts: tuple[str, str]) -> None:
    assert split_ending(name) == parts
