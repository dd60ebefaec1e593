"""Weights of every family: in one file or in several, and each way in which they can be wrong as one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import MIXERS
from tests.reference.packed import Bench
from tests.tiny_models import FAMILIES, VOCAB, tiny_checkpoint
from twinpool import LLM
from twinpool.errors import ModelError
from twinpool.models.adopt import load_model

TOKENS = torch.randint(0, VOCAB, (20,), generator=torch.Generator().manual_seed(5)).tolist()
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loading")


def in_parts(folder: Path, to: Path) -> Path:
    """A copy whose tensors lie in three files, every third one in each, with an index and a file that it does not name."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    (to / "model.safetensors").unlink()
    names, where = sorted(tensors), {}
    for part in range(3):
        file = f"model-{part + 1:05}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[part::3]}, to / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names[part::3], file)
    (to / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    save_file({"consolidated": torch.ones(1)}, to / "consolidated.safetensors")
    return to


@pytest.mark.parametrize("family", FAMILIES)
def test_several_files_are_as_one(family: str, cache_dir: Path, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, cache_dir)
    one, several = (
        Bench(f, dtype="float32").logits(TOKENS, [len(TOKENS)]) for f in (folder, in_parts(folder, tmp_path / "a"))
    )
    assert torch.equal(one, several)


def test_a_file_that_the_index_names_is_missing(cache_dir: Path, tmp_path: Path) -> None:
    folder = in_parts(tiny_checkpoint("lfm2", cache_dir), tmp_path / "a")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors cannot be read: No such file"):
        load_model(folder, dtype="float32")


@pytest.mark.parametrize(
    "index",
    [
        "{}",
        "[1]",
        "null",
        '"a"',
        *(f'{{"weight_map": {x}}}' for x in ("[]", '{"a": 1}', '{"a": ["b"]}', '{"a": 1, "b": "c"}')),
    ],
)
def test_an_index_of_another_form_is_one_sentence(index: str, tmp_path: Path, cache_dir: Path) -> None:
    shutil.copy(tiny_checkpoint("lfm2", cache_dir) / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json cannot be read: \S"):
        load_model(tmp_path, dtype="float32")


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "complex64", "bool"])
def test_weights_that_are_no_plain_floats_are_refused(dtype: str, cache_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint("lfm2", cache_dir), tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.feed_forward.w1.weight"
    save_file({**tensors, name: tensors[name].to(getattr(torch, dtype))}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"{name} in .* is {dtype}; weights must be float32, bfloat16 or float16"):
        load_model(path.parent, dtype="float32")


def change(tensors: Tensors, how: str) -> Tensors:
    name = max(name for name in tensors if tensors[name].ndim == 2)
    if how == "missing":
        del tensors[name]
    elif how == "unknown":
        tensors["model.layers.0.extra.weight"] = torch.ones(2)
    else:
        tensors[name] = tensors[name][:-1].clone()
    return tensors


@pytest.mark.parametrize("family", sorted(MIXERS))
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"the weights (in .* )?lack \S+"),
        ("unknown", r"hold model\.layers\.0\.extra\.weight, which config\.json does not ask for"),
        ("misshapen", r"is \[\d+(, \d+)*\] in the weights and \[\d+(, \d+)*\] by config\.json\."),
        ("truncated", r"model\.safetensors cannot be read: "),
    ],
)
def test_wrong_weights_are_one_sentence(family: str, how: str, message: str, cache_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    shutil.copytree(tiny_checkpoint(family, cache_dir), folder)
    path = folder / "model.safetensors"
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        save_file(change(load_file(path), how), path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message) as error:
        load_model(folder, dtype="float32")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "part", "what"),
    [
        ("kimi", "experts.3.w1.weight", "tensors"),
        ("jamba", "experts.2.up_proj.weight", "tensors"),
        ("nemotron", "experts.5.down_proj.weight", "tensors"),
        ("ling", "v_conv1d.weight", "rows"),
        ("olmo", "q_conv1d.weight", "rows"),
    ],
)
def test_parts_that_do_not_fit_together_are_named(
    family: str, part: str, what: str, cache_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "a"
    shutil.copytree(tiny_checkpoint(family, cache_dir), folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith(part))
    tensors[name] = tensors[name][..., :-1].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"hold {what} of \[.*\] in \S+ and of \[.*\] in \S+, which must be alike"):
        load_model(folder, dtype="float32", context_len=8)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("granite", {"attention_head_dim": 64}),
        ("bamba", {"attention_head_dim": 4}),
        ("jamba", {"attention_head_dim": 16}),
    ],
)
def test_pages_are_those_of_the_model(family: str, change: dict[str, int], cache_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    shutil.copytree(tiny_checkpoint(family, cache_dir), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=r"2 key heads of 8 in transformers' model, and pages 2 of \d+;"):
        LLM(str(folder), device_memory="64MiB")
