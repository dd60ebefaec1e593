"""Checkpoints found and read; what is wrong with one is said in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny_models import tiny_checkpoint
from twinpool.engine.checkpoint import DEMO_FOLDER, find_folder, read_spec
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
