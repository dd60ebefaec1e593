"""Jamba, Mamba, OLMo-Hybrid and the text part of MiniCPM-V: forms of checkpoints, configs that are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.reference.packed import Bench
from tests.tiny_models import _COMMON, VOCAB, tiny_checkpoint
from twinpool.errors import ModelError
from twinpool.models.adopt import load_model

TOKENS = torch.randint(0, VOCAB, (20,), generator=torch.Generator().manual_seed(5)).tolist()
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mamba1")


def stored_as(folder: Path, to: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """A copy with its tensors under other names or in other pieces."""
    shutil.copytree(folder, to)
    save_file(change(load_file(folder / "model.safetensors")), to / "model.safetensors", metadata={"format": "pt"})
    return to


def logits(folder: Path) -> torch.Tensor:
    return Bench(folder, dtype="float32").logits(TOKENS, [len(TOKENS)])


def by_modules(tensors: Tensors) -> Tensors:
    """A stored OLMo-Hybrid under the names of transformers' modules: one convolution for q, k and v."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(".q_conv1d.weight"):
            parts = [tensors[name.replace("q_conv1d", f"{part}_conv1d")] for part in "qkv"]
            found[name.replace("q_conv1d", "conv1d")] = torch.cat(parts)
        elif "k_conv1d" not in name and "v_conv1d" not in name:
            name = name.replace("attention_layer_norm", "input_layernorm")
            found[name.replace("feedforward_layer_norm", "post_attention_layernorm")] = tensor
    return found


def test_olmo_under_both_kinds_of_names(cache_dir: Path, tmp_path: Path) -> None:
    folder = tiny_checkpoint("olmo", cache_dir)
    stored = {name.split(".")[-2] for name in load_file(folder / "model.safetensors")}
    assert stored >= {"q_conv1d", "attention_layer_norm", "feedforward_layer_norm"}
    assert torch.equal(logits(stored_as(folder, tmp_path / "a", by_modules)), logits(folder))


def test_a_first_mamba_has_its_embeddings_under_another_name(cache_dir: Path, tmp_path: Path) -> None:
    folder = tiny_checkpoint("mamba", cache_dir)
    other = stored_as(
        folder,
        tmp_path / "a",
        lambda tensors: {k.replace(".embeddings.", ".embedding."): v for k, v in tensors.items()},
    )
    assert "backbone.embedding.weight" in load_file(other / "model.safetensors")
    assert torch.equal(logits(other), logits(folder))


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("jamba", {"sliding_window": 64}, "sliding_window=64; only null runs here"),
        ("jamba", {"hidden_act": "gelu"}, "hidden_act='gelu'; only 'silu' runs here"),
        ("mamba", {"hidden_act": "gelu"}, "hidden_act='gelu'; only 'silu' runs here"),
        (
            "olmo",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type='dynamic'",
        ),
    ],
)
def test_configs_that_are_refused(
    family: str, change: dict[str, Any], message: str, cache_dir: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_checkpoint(family, cache_dir), tmp_path / "a")
    config = {**json.loads((folder / "config.json").read_text()), **change}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        load_model(folder, dtype="float32")


def test_mamba_without_a_context_length_loads(cache_dir: Path) -> None:
    assert load_model(tiny_checkpoint("falcon_mamba", cache_dir), dtype="float32").vocab_size == VOCAB


def test_residuals_in_float32_matter(cache_dir: Path) -> None:
    """In bfloat16 both ways run, and do not say the same."""
    wide, narrow = (
        Bench(tiny_checkpoint("mamba", cache_dir, dtype="bfloat16", residual_in_fp32=how), dtype="bfloat16").logits(
            TOKENS, [len(TOKENS)]
        )
        for how in (True, False)
    )
    assert not torch.equal(wide, narrow)
    assert torch.nn.functional.cosine_similarity(wide[0], narrow[0], dim=0) > 0.99


@pytest.mark.parametrize("version", ["6", "7"])
def test_the_text_part_of_minicpm_v(version: str, tmp_path: Path) -> None:
    name = f"MiniCPMV4_{version}"
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{name}Config")(
        text_config={**_COMMON, "model_type": "qwen3_5_text"}, vision_config=vision, insert_layer_id=0
    )
    torch.manual_seed(0)
    whole = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    whole.save_pretrained(tmp_path)
    with torch.inference_mode():
        theirs = whole(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(logits(tmp_path)[0], theirs, atol=1e-4, rtol=1e-4)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["text_config"]["model_type"] = "qwen3"
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ModelError, match="model_type='qwen3' of the text; only 'qwen3_5_text' runs here"):
        load_model(tmp_path, dtype="float32")
