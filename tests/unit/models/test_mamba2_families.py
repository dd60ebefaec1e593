"""Nemotron-H, Falcon-H1, Bamba and Zamba2: configs that are refused, forms of checkpoints, memory as the planner counts it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.reference.packed import Bench
from tests.tiny_models import tiny_checkpoint
from twinpool.engine.checkpoint import read_spec
from twinpool.errors import ModelError
from twinpool.models.adopt import load_model
from twinpool.models.blocks import Moe
from twinpool.models.families.falcon import FalconLayer
from twinpool.models.families.zamba import HybridLayer
from twinpool.models.spec import ModelSpec

FAMILIES = ("nemotron", "nemotron_latent", "falcon", "falcon_plain", "bamba", "zamba", "zamba_rope")


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mamba2")


def with_config(folder: Path, to: Path, change: dict[str, Any]) -> Path:
    """A copy with other values in config.json, None for a key that is left out."""
    shutil.copytree(folder, to)
    config = {**json.loads((folder / "config.json").read_text()), **change}
    (to / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in change or v is not None}))
    return to


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("nemotron", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'; only 'relu2' runs here"),
        ("nemotron", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu'; only 'silu' runs here"),
        ("nemotron", {"sliding_window": 64}, "sliding_window=64; only None runs here"),
        ("nemotron", {"residual_in_fp32": True}, "residual_in_fp32=True; only False runs here"),
        ("nemotron", {"attention_bias": True}, "attention_bias=True; only False runs here"),
        ("nemotron", {"n_shared_experts": 2}, "n_shared_experts=2; only 1 runs here"),
        (
            "nemotron",
            {"time_step_limit": [0.0, 0.5]},
            r"time_step_limit=\[0.0, 0.5\]; steps are bounded by time_step_min=0.3",
        ),
        (
            "nemotron",
            {"time_step_limit": [0.4, 1e30]},
            r"time_step_limit=\[0.4, 1e\+30\]; steps are bounded by time_step_min=0.3",
        ),
        ("nemotron", {"time_step_limit": [0.1]}, r"time_step_limit=\[0.1\]; steps are bounded"),
        ("nemotron", {"attention_head_dim": 8}, "attention_head_dim=8 and head_dim=16, which must agree"),
        ("falcon", {"hidden_act": "gelu"}, "hidden_act='gelu'; only 'silu' runs here"),
        ("bamba", {"hidden_act": "gelu"}, "hidden_act='gelu'; only 'silu' runs here"),
        ("zamba", {"hidden_act": "silu"}, "hidden_act='silu'; only 'gelu' runs here"),
        ("zamba", {"use_long_context": True}, "use_long_context=True; only False runs here"),
        ("zamba", {"use_conv_bias": False}, "use_conv_bias=False; only True runs here"),
        ("zamba", {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ("zamba", {"mamba_headdim": 4}, "8 Mamba heads of 4 and makes 64 columns of them, which must agree"),
        ("zamba", {"mamba_headdim": "x"}, "8 Mamba heads of 'x'"),
        ("zamba", {"attention_head_dim": 8}, "attention_head_dim=8; by its other keys it is 16"),
        ("zamba", {"num_mem_blocks": -1}, "makes no Zamba2ForCausalLM"),
        ("zamba", {"hybrid_layer_ids": [0, 3, 5]}, r"hybrid_layer_ids=\[0, 3, 5\] .* hybrid ones at \[1, 3, 5\]"),
    ],
)
def test_what_our_layers_do_not_do_is_refused(
    cache_dir: Path, tmp_path: Path, family: str, change: dict[str, Any], message: str
) -> None:
    folder = with_config(tiny_checkpoint(family, cache_dir), tmp_path / "copy", change)
    with pytest.raises(ModelError, match=message):
        load_model(folder, dtype="float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_kv_are_as_large_as_the_planner_says(cache_dir: Path, family: str) -> None:
    folder = tiny_checkpoint(family, cache_dir)
    spec, memory = read_spec(folder), Bench(folder, dtype="float32", n_slots=2).memory
    states = sum(view[1].numel() * 4 for layer in memory.states for view in (layer.conv, layer.ssm))
    assert states == spec.slot_bytes(ssm_dtype="float32", conv_dtype="float32")
    pages = sum(view[1].numel() * 4 for layer in memory.kv for view in (layer.keys, layer.values))
    assert pages == spec.kv_bytes_per_token(kv_dtype="float32") * 4


def test_nemotron_experts_are_stored_one_by_one_under_the_old_names(cache_dir: Path) -> None:
    stored = load_file(tiny_checkpoint("nemotron_latent", cache_dir) / "model.safetensors")
    assert "backbone.layers.4.mixer.experts.7.up_proj.weight" in stored
    model = load_model(tiny_checkpoint("nemotron_latent", cache_dir), dtype="float32")
    moe = next(m for m in model.module.modules() if isinstance(m, Moe))
    assert (len(moe.experts), moe.experts[0].gate_up.k, moe.narrow.k) == (8, 16, 32)


def test_nemotron_layers_by_letters(cache_dir: Path, tmp_path: Path) -> None:
    folder = with_config(
        tiny_checkpoint("nemotron", cache_dir),
        tmp_path / "copy",
        {"layers_block_type": None, "hybrid_override_pattern": "M-M*E"},
    )
    one, two = (
        Bench(f, dtype="float32").logits([1, 2, 3], [3]) for f in (folder, tiny_checkpoint("nemotron", cache_dir))
    )
    assert torch.equal(one, two)


def test_falcon_heads_of_any_width_share_the_inner_one(cache_dir: Path, tmp_path: Path) -> None:
    folder = tiny_checkpoint("falcon_plain", cache_dir)
    auto = with_config(folder, tmp_path / "copy", {"mamba_d_head": "auto"})
    assert read_spec(auto).state_shapes() == read_spec(folder).state_shapes()
    assert read_spec(folder).state_shapes()[0].temporal == (8, 6, 16)


def test_falcon_factors_of_one_cost_nothing(cache_dir: Path) -> None:
    def first(family: str) -> FalconLayer:
        model = load_model(tiny_checkpoint(family, cache_dir), dtype="float32")
        return next(m for m in model.module.modules() if isinstance(m, FalconLayer))

    assert first("falcon_plain").ssm.factors is None
    factors = first("falcon").ssm.factors
    assert factors is not None
    assert [len(factors), *factors[[0, 64, 128, 160, 192]].tolist()] == pytest.approx([200, 0.5, 0.6, 0.7, 1.2, 0.9])


def test_zamba_blocks_are_kept_once_and_may_be_stored_for_every_layer(cache_dir: Path, tmp_path: Path) -> None:
    folder = tiny_checkpoint("zamba", cache_dir)
    model = load_model(folder, dtype="float32")
    hybrid = [m for m in model.module.modules() if isinstance(m, HybridLayer)]
    assert [layer.shared is hybrid[0].shared for layer in hybrid] == [True, False, True]
    assert [layer.mlp_adapter is hybrid[0].mlp_adapter for layer in hybrid] == [True, False, False]
    stored = load_file(folder / "model.safetensors")
    first, third = "model.layers.1.shared_transformer", "model.layers.5.shared_transformer"
    assert not any(name.startswith(third) for name in stored)
    copied = tmp_path / "copy"
    shutil.copytree(folder, copied)
    again = {third + name.removeprefix(first): t.clone() for name, t in stored.items() if name.startswith(first)}
    save_file({**stored, **again}, copied / "model.safetensors", metadata={"format": "pt"})
    assert load_model(copied, dtype="float32").weight_bytes == model.weight_bytes


@pytest.mark.parametrize(
    ("family", "attention", "linear"),
    [("nemotron", (3,), (0, 2)), ("falcon", (0, 1, 2), (0, 1, 2)), ("bamba", (2,), (0, 1, 3))],
)
def test_layers_of_each_kind(cache_dir: Path, family: str, attention: tuple[int, ...], linear: tuple[int, ...]) -> None:
    spec: ModelSpec = read_spec(tiny_checkpoint(family, cache_dir))
    assert (spec.attention_layers, spec.linear_layers) == (attention, linear)
