"""Kimi-Linear, Ling-3 and GLM-5-Next: configs as published, what is refused, and drafts behind the last layer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import tiny_checkpoint
from twinpool import LLM, SamplingParams
from twinpool.engine.checkpoint import read_spec
from twinpool.errors import ConfigError, ModelError
from twinpool.models.adopt import load_model
from twinpool.models.attention.spec import DsaSpec, MlaSpec, with_exact_index
from twinpool.models.shapes import LayerSpec, StateShapes


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


def copied(source: Path, target: Path, **keys: object) -> Path:
    """A copy with keys of config.json changed; None takes one out."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text()) | keys
    (target / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return target


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mla_use_nope", False),
        ("mla_use_output_gate", True),
        ("moe_router_activation_func", "softmax"),
        ("moe_layer_freq", 2),
    ],
)
def test_keys_that_transformers_leaves_out_are_refused(
    cache_dir: Path, tmp_path: Path, key: str, value: object
) -> None:
    folder = copied(tiny_checkpoint("kimi", cache_dir), tmp_path / "a", **{key: value})
    with pytest.raises(ModelError, match=f"config.json says {key}={value!r}; only "):
        load_model(folder, dtype="float32", context_len=8)


@pytest.mark.parametrize(
    "change", [{"num_experts_per_token": "auto"}, {"num_expert_group": [1]}, {"moe_renormalize": "x"}]
)
def test_a_wrong_value_under_another_name_of_its_key_is_one_sentence(
    change: dict[str, object], cache_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "a"
    shutil.copytree(tiny_checkpoint("kimi", cache_dir), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=r"config\.json is not a KimiLinearConfig: "):
        load_model(folder, dtype="float32")


def test_a_full_gate_is_refused(cache_dir: Path, tmp_path: Path) -> None:
    linear = {
        "use_full_rank_gate": True,
        "head_dim": 8,
        "num_heads": 3,
        "full_attn_layers": [3],
        "kda_layers": [1, 2, 4],
    }
    folder = copied(tiny_checkpoint("kimi", cache_dir), tmp_path / "a", linear_attn_config=linear)
    with pytest.raises(ModelError, match="use_full_rank_gate=True"):
        load_model(folder, dtype="float32", context_len=8)


def test_the_published_form_of_a_kimi_config(cache_dir: Path, tmp_path: Path) -> None:
    saved = tiny_checkpoint("kimi", cache_dir)
    linear = {
        "head_dim": 8,
        "num_heads": 3,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [3],
        "kda_layers": [1, 2, 4],
    }
    gone = dict.fromkeys(
        ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    )
    folder = copied(
        saved, tmp_path / "a", linear_attn_config=linear, first_k_dense_replace=1, mla_use_nope=True, **gone
    )
    assert read_spec(folder).layers == read_spec(saved).layers
    assert len(load_model(folder, dtype="float32", context_len=8)._layers) == 4


def test_the_published_name_and_drafts_of_ling(cache_dir: Path, tmp_path: Path) -> None:
    saved = tiny_checkpoint("ling", cache_dir)
    folder = copied(saved, tmp_path / "a", architectures=["BailingMoeV3ForCausalLM"], num_nextn_predict_layers=1)
    weights = load_file(folder / "model.safetensors")
    drafts = {name.replace(".3.", ".4."): tensor.clone() for name, tensor in weights.items() if ".layers.3." in name}
    save_file({**weights, **drafts}, folder / "model.safetensors")
    assert len(load_model(folder, dtype="float32", context_len=8)._layers) == 4


def test_a_part_of_the_shared_key_that_turns_is_refused(cache_dir: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 0.25}
    folder = copied(tiny_checkpoint("ling", cache_dir), tmp_path / "a", rope_parameters=rope)
    with pytest.raises(
        ModelError, match=r"turn 2 of the 4 elements of qk_rope_head_dim; here all of them turn: leave partial"
    ):
        load_model(folder, dtype="float32", context_len=8)


def test_a_convolution_in_parts_must_be_whole(cache_dir: Path, tmp_path: Path) -> None:
    folder = copied(tiny_checkpoint("ling", cache_dir), tmp_path / "a")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.attention.k_conv1d.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"lack model.layers.0.self_attn.k_conv1d.weight\."):
        load_model(folder, dtype="float32", context_len=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_topk": 0}, r"index_topk=0 tokens, less than a pool of index_kpool=4; at least one"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail=False; only True"),
        (
            {"indexer_types": ["full"] * 3 + ["shared"]},
            r"indexer_types\[3\]='shared', an index of another layer; only 'full'",
        ),
    ],
)
def test_indices_that_are_not_computed_are_refused(
    change: dict[str, object], message: str, cache_dir: Path, tmp_path: Path
) -> None:
    folder = tiny_checkpoint("glm", cache_dir)
    text = json.loads((folder / "config.json").read_text())["text_config"] | change
    with pytest.raises(ModelError, match=message):
        load_model(copied(folder, tmp_path / "a", text_config=text), dtype="float32", context_len=8)


@pytest.mark.parametrize(
    ("pool", "page_size", "key_tokens"), [(4, 1, 1), (4, 4, 4), (4, 16, 4), (4, 6, 3), (16, 4, 4), (1, 8, 1)]
)
def test_keys_of_an_index_take_what_a_page_must_hold(pool: int, page_size: int, key_tokens: int) -> None:
    """A page has room for the pools that can end in it; the reference's has a part of an fp8 key for each token."""
    sparse = DsaSpec(MlaSpec(12, 0), index_dim=48, pool_tokens=pool)
    kept = with_exact_index(LayerSpec(attention=sparse), page_size)
    assert kept.attention is not None
    assert kept.linear is not None
    assert kept.attention.kv_bytes_per_token("bfloat16", 4) == 12 * 2 + 48 // key_tokens * 2
    assert kept.attention.kv_bytes_per_token("fp8_e4m3", 4) == 12 + 48 // key_tokens * 2, "never narrower than 16 bits"
    assert kept.linear.states(4) == StateShapes((pool - 1, 96), ())
    assert sparse.kv_bytes_per_token("bfloat16", 4) == 12 * 2 + -(-48 // pool)


def test_pages_of_odd_bytes_are_refused(cache_dir: Path, tmp_path: Path) -> None:
    saved = tiny_checkpoint("glm", cache_dir)
    text = json.loads((saved / "config.json").read_text())["text_config"] | {"index_kpool": 16, "index_head_dim": 1}
    text |= {"index_topk": 32}
    weights = load_file(saved / "model.safetensors")
    folder = copied(saved, tmp_path / "a", text_config=text)
    save_file({name: _index(name, tensor) for name, tensor in weights.items()}, folder / "model.safetensors")
    options = {
        "device_memory": "64MiB",
        "max_mamba_cache_size": 8,
        "max_total_tokens": 512,
        "kv_cache_dtype": "bfloat16",
    }
    with pytest.raises(ConfigError, match=r"--page-size 1 makes pages of 26 bytes, .* use --page-size 4"):
        LLM(str(folder), **options)
    with LLM(str(folder), page_size=4, **options):
        pass


def _index(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the index, in the shape of 1 element a key and pools of 16."""
    shapes = {
        "wq_b.weight": (10, 10), "wk.weight": (1, 32), "k_norm.weight": (1,), "k_norm.bias": (1,),
        "index_kpool_compress_ape": (16, 1), "index_kpool_compress_gate": (1, 32),
    }  # fmt: skip
    shape = next((shape for end, shape in shapes.items() if name.endswith(f"indexer.{end}")), None)
    return tensor if shape is None else torch.zeros(shape)


def test_a_request_that_overflows_beyond_the_index_ends_alone(cache_dir: Path, tmp_path: Path) -> None:
    folder, name = tmp_path / "a", "model.language_model.embed_tokens.weight"
    shutil.copytree(tiny_checkpoint("glm", cache_dir), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name][259] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ids, params = list(range(60)), SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=4)
    with LLM(str(folder), device_memory="64MiB", disable_radix_cache=True) as llm:
        (alone,) = llm.generate([ids], params)
        mate, broken = llm.generate([ids, [259, *ids]], params)
    assert (mate.token_ids, mate.error) == (alone.token_ids, "")
    assert "not finite" in broken.error
