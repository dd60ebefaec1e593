"""Checkpoints found, read and loaded; what is wrong with one is said in a sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.tiny_models import _COMMON, tiny_checkpoint
from twinpool.engine.checkpoint import DEMO_FOLDER, find_folder, load_model, read_spec, weight_bytes
from twinpool.errors import ModelError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3_5", tmp_path_factory.mktemp("checkpoints"))


def test_no_path_is_the_demo_model(tiny: Path) -> None:
    assert find_folder(None) == DEMO_FOLDER
    assert find_folder(str(tiny)) == tiny


@pytest.mark.parametrize("path", ["/no/such/folder", "./nor/this", "a/b/c"])
def test_a_path_that_is_not_there(path: str) -> None:
    with pytest.raises(ModelError, match="--tokenizer-path takes a local folder or a hub id"):
        find_folder(path, flag="--tokenizer-path")


def test_a_hub_id_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise OSError("no network here")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(
        ModelError, match="owner/name is neither a local folder nor a hub id that can be fetched: no network"
    ):
        find_folder("owner/name")


def test_configs_that_are_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds no JSON object"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ModelError, match="LlamaForCausalLM"):
        read_spec(tmp_path)


def test_weights_are_loaded_in_the_asked_dtype(tiny: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        model = load_model(tiny, dtype=dtype)
        assert model.lm_head.weight.dtype == getattr(torch, dtype)
        assert not model.training
    tensors = load_file(tiny / "model.safetensors")
    assert weight_bytes(load_model(tiny, dtype="float32")) >= sum(t.nbytes for t in tensors.values())


def test_missing_and_missing_shaped_weights_are_named(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(tiny, folder)
    tensors = load_file(tiny / "model.safetensors")
    lost = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 tensors that config\.json asks for: model\.layers\.1\.mlp\.up_proj"):
        load_model(folder, dtype="float32")
    save_file(
        {**tensors, "model.layers.1.mlp.up_proj.weight": lost[:3].clone()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(folder, dtype="float32")


def test_the_text_part_of_a_multimodal_checkpoint_is_loaded(tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    whole = transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(text_config=_COMMON, vision_config=vision)
    ).eval()
    whole.save_pretrained(tmp_path)
    assert read_spec(tmp_path).n_linear_layers == 3
    model = load_model(tmp_path, dtype="float32")
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        assert torch.allclose(model(input_ids=ids).logits, whole(input_ids=ids).logits, atol=1e-4)
