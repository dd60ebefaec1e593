"""Weight bytes: parameter totals against the names of real models, bytes of ranks against logs, and what cannot be counted."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plan.weighing import (
    DEMO,
    FALCON,
    GLM,
    GRANITE_MICRO,
    INKLING,
    JAMBA,
    KIMI_LINEAR,
    LFM2,
    LFM2_MOE,
    LING,
    LING_2_5,
    MAMBA,
    MINIMAX,
    QWEN_9B,
    ZAYA,
    real,
    weigh,
)
from twinpool.errors import ModelError
from twinpool.models.builtin import BuiltinModel, builtin_models, find_builtin
from twinpool.plan.weight_files import index_weight_bytes
from twinpool.units import GIB


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
        (LFM2_MOE, 8_339_929_856), (JAMBA, 51_570_323_328), (MAMBA, 159_308_544), (MINIMAX, 47_373_946_880),
        (ZAYA, 8_840_488_784), (INKLING, 975_340_270_146), (LING, 124_414_191_072),
        (GLM, 312_692_428_286 + 154880 * 4096),  # transformers' has no head
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else None,
)  # fmt: skip
def test_counts_are_those_of_the_module_trees_of_transformers(config: dict[str, Any], params: int) -> None:
    assert weigh(config).params == pytest.approx(params, rel=2e-4)


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


def test_sliding_layers_have_heads_of_their_own() -> None:
    # Keys and values of a sliding layer have 16 heads, of a full one 8, both of 128.
    full = weigh({**INKLING, "layer_types": ["hybrid"] * 66}).params
    sliding = weigh({**INKLING, "layer_types": ["hybrid_sliding"] * 66}).params
    assert sliding - full == 66 * 2 * 6144 * 8 * 128


def test_older_zaya_files_alternate_attention_and_experts() -> None:
    older = weigh({**ZAYA, "zaya_layers": ["a", 16] * 40, "num_hidden_layers": 80})
    assert older.params == weigh(ZAYA).params


def test_lightning_layers_of_ling_have_an_output_gate() -> None:
    # 28 of 32 layers; one more is 5 matrices of 2560 x 4096 beside what every layer has, and one less is MLA.
    more = weigh({**LING_2_5, "layer_types": ["linear_attention"] * 32})
    mla = 2560 * 32 * 192 + 2560 * 576 + 512 * 32 * 256 + 32 * 128 * 2560
    assert more.params - weigh(LING_2_5).params == 4 * (5 * 2560 * 4096 - mla)


def test_an_index_is_whole_on_every_rank() -> None:
    whole, half = weigh(GLM), weigh(GLM, tp=2)
    assert half.bytes > whole.bytes / 2 + 11 * (1536 * 4096 + 2 * 128 * 4096 + 32 * 4096)


@pytest.mark.parametrize("row", builtin_models(), ids=lambda row: row.name)
def test_every_built_in_shape_is_weighed(row: BuiltinModel) -> None:
    estimate = weigh(row.config, params_b=row.params_b, name=row.name)
    assert estimate.origin in ("config", "name")
    if row.params_b is not None:
        assert estimate.params == pytest.approx(row.params_b * 1e9, rel=0.15, abs=1e9)


def test_a_count_that_contradicts_the_name_gives_way_to_it() -> None:
    # The built-in shape lacks the width that the experts work in.
    row = find_builtin("Nemotron-3-Super-120B-A12B")
    assert row is not None
    estimate = weigh(row.config, params_b=row.params_b, tp=4)
    assert (estimate.origin, estimate.total_bytes, estimate.bytes) == ("name", 240_000_000_000, 60_000_000_000)
    assert estimate.note.startswith("from the size in the model's name, 120 billion parameters, because the keys that")


def test_what_cannot_be_counted_is_priced_by_its_scheme() -> None:
    config = {key: value for key, value in LFM2.items() if key != "block_ff_dim"}
    ends = 2 * 65536 * 2048
    plain, packed = weigh(config, params_b=1.2), weigh(config, params_b=1.2, quantization="fp8", tp=2)
    assert plain.total_bytes == 2_400_000_000
    assert packed.total_bytes == 1_200_000_000 + ends
    assert packed.bytes == packed.total_bytes // 2
    assert "quantised as --quantization fp8 says" in packed.note


def test_files_that_cannot_be_counted_are_divided_evenly() -> None:
    config = {key: value for key, value in LFM2.items() if key != "block_ff_dim"}
    estimate = weigh(config, tp=2, checkpoint_bytes=3001)
    assert (estimate.origin, estimate.total_bytes, estimate.bytes) == ("index", 3001, 1501)
    assert "divided evenly, because config.json has none of" in estimate.note


def test_files_decide_but_for_what_is_quantised_while_it_loads() -> None:
    plain = weigh(LFM2)
    eight_bits = weigh(LFM2, quantization="fp8")
    assert weigh(LFM2, checkpoint_bytes=plain.total_bytes).bytes == plain.bytes
    assert weigh(LFM2, checkpoint_bytes=plain.total_bytes, quantization="fp8").bytes == eight_bits.bytes
    assert weigh(LFM2, checkpoint_bytes=1_000_000_000, quantization="fp8").total_bytes == 1_000_000_000
    unknown = {**LFM2, "quantization_config": {"quant_method": "quark"}}
    assert weigh(unknown, checkpoint_bytes=700_000_000).total_bytes == 700_000_000
