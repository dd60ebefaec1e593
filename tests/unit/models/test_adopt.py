"""Checkpoints become adopted models: strictly, in every form they are stored in."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.tiny_models import _COMMON, FAMILIES, VOCAB, tiny_checkpoint
from twinpool.errors import ModelError
from twinpool.models.adopt import SOURCES, AdoptedModel, _rotary_table, load_model
from twinpool.models.blocks import Linear, Moe
from twinpool.models.native import native


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adopt")


def changed(folder: Path, to: Path, change: dict[str, torch.Tensor | None]) -> Path:
    """A copy whose tensors are replaced, added, or (None) left out."""
    shutil.copytree(folder, to)
    tensors = {**load_file(folder / "model.safetensors"), **change}
    save_file({k: v for k, v in tensors.items() if v is not None}, to / "model.safetensors", metadata={"format": "pt"})
    return to


def heads_of(model: object) -> torch.Tensor:
    """Logits of a vector of ones: enough to see that a head was found."""
    x = torch.ones(1, 32)
    return model._head(x, wide=True)  # type: ignore[attr-defined]


def test_missing_unknown_and_misshapen_weights_are_named(cache_dir: Path, tmp_path: Path) -> None:
    folder, name = tiny_checkpoint("qwen3_5", cache_dir), "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ModelError, match=rf"lack {name}, which config\.json asks for"):
        load_model(changed(folder, tmp_path / "a", {name: None}), dtype="float32")
    with pytest.raises(ModelError, match=r"hold model\.extra, which config\.json does not ask for"):
        load_model(changed(folder, tmp_path / "b", {"model.extra": torch.ones(1)}), dtype="float32")
    scale = "model.layers.2.self_attn.attn.k_scale"
    with pytest.raises(ModelError, match=rf"hold scales of keys and values, {scale}, which are not applied here; use"):
        load_model(changed(folder, tmp_path / "d", {scale: torch.ones(1)}), dtype="float32")
    with pytest.raises(ModelError, match=rf"{name} in .* is \[3, 32\] in the weights and \[48, 32\] by config"):
        load_model(changed(folder, tmp_path / "c", {name: torch.ones(3, 32)}), dtype="float32")


def test_files_that_are_missing_or_broken(cache_dir: Path, tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3_5", cache_dir)
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_model(tmp_path, dtype="float32")
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(ModelError, match=r"has no \*\.safetensors"):
        load_model(tmp_path, dtype="float32")
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load_model(tmp_path, dtype="float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM' cannot be run here yet"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type='dynamic'"),
        ({"rope_parameters": {"rope_type": "x"}}, "rope_type='x', which does not run here; use one of default, "),
        ({"rope_parameters": {"rope_type": 7}}, "rope_type=7"),
        ({"rope_parameters": [1]}, "config.json"),
        ({"dtype": []}, "config.json"),
    ],
)
def test_what_our_layers_do_not_do_is_refused(
    cache_dir: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint("qwen3_5", cache_dir), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError, match=message):
        load_model(folder, dtype="float32")


def test_tied_embeddings_need_no_head_and_draft_layers_are_left_out(cache_dir: Path, tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3_5", cache_dir, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model = load_model(changed(folder, tmp_path / "a", {"mtp.layers.0.weight": torch.ones(2)}), dtype="float32")
    embeddings = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    torch.testing.assert_close(heads_of(model), embeddings.sum(1)[None], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["lfm2", "lfm2_moe", "falcon_mamba", "qwen3_5"])
def test_a_head_beside_the_embeddings_is_used_if_it_differs(family: str, cache_dir: Path, tmp_path: Path) -> None:
    """Some configs do not say whether the two are one, and their classes do not agree on what that means."""
    folder = tmp_path / "a"
    shutil.copytree(tiny_checkpoint(family, cache_dir), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).get_output_embeddings()
    torch.testing.assert_close(
        heads_of(load_model(folder, dtype="float32")), theirs.weight.sum(1)[None], atol=1e-4, rtol=1e-4
    )
    stored = load_file(folder / "model.safetensors")
    (embeddings,) = (name for name in stored if "embed" in name and "norm" not in name)
    head = stored.pop("lm_head.weight")
    expected = stored[embeddings].sum(1)[None]
    one = changed(folder, tmp_path / "b", {"lm_head.weight": stored[embeddings].clone()})
    torch.testing.assert_close(heads_of(load_model(one, dtype="float32")), expected, atol=1e-4, rtol=1e-4)
    other = changed(folder, tmp_path / "c", {embeddings: None})
    torch.testing.assert_close(heads_of(load_model(other, dtype="float32")), head.sum(1)[None], atol=1e-4, rtol=1e-4)


def test_saved_buffers_are_asked_for_and_keep_their_dtype(cache_dir: Path, tmp_path: Path) -> None:
    folder, name = tiny_checkpoint("lfm2_moe", cache_dir), "model.layers.1.feed_forward.expert_bias"
    with pytest.raises(ModelError, match=rf"lack {name}"):
        load_model(changed(folder, tmp_path / "a", {name: None}), dtype="float32")
    model = load_model(folder, dtype="bfloat16")
    moe = next(m for m in model.module.modules() if isinstance(m, Moe))
    assert moe.router.bias is not None
    assert torch.equal(moe.router.bias, load_file(folder / "model.safetensors")[name])


def test_a_config_of_the_wrong_kind_is_one_sentence(cache_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint("granite", cache_dir), tmp_path / "a")
    config = json.loads((tmp_path / "a/config.json").read_text())
    (tmp_path / "a/config.json").write_text(json.dumps({**config, "mamba_n_heads": "eight"}))
    with pytest.raises(ModelError, match=r"is not a GraniteMoeHybridConfig: .*mamba_n_heads.*\.$"):
        load_model(tmp_path / "a", dtype="float32")
    (tmp_path / "a/config.json").write_text(json.dumps({**config, "position_embedding_type": "alibi"}))
    with pytest.raises(ModelError, match="position_embedding_type='alibi'; only 'rope' and 'nope' run here"):
        load_model(tmp_path / "a", dtype="float32")


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "kimi",
            {"num_shared_experts": 0},
            r"shared_experts\.gate_proj\.weight has no elements by config\.json: \[0, 32\]",
        ),
        ("kimi", {"num_experts_per_token": None}, r"num_experts_per_tok=null; it must have a value, such as 8\."),
        (
            "kimi",
            {"pad_token_id": VOCAB},
            r"makes no KimiLinearForCausalLM: Padding_idx must be within num_embeddings\.",
        ),
        ("granite", {"logits_scaling": 0.0}, r"logits_scaling=0\.0; it must not be zero"),
        ("granite", {"time_step_limit": None}, r"time_step_limit=null; it must have a value, such as \(0\.0, inf\)\."),
        ("bamba", {"mamba_d_state": None}, r"mamba_d_state=null; it must have a value, such as 256\."),
    ],
)
def test_sizes_that_make_no_model_are_refused(
    family: str, change: dict[str, object], message: str, cache_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint(family, cache_dir), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    weights = load_file(folder / "model.safetensors")
    shared = {
        name: torch.zeros(0) for name in weights if change.get("num_shared_experts") == 0 and "shared_exp" in name
    }
    save_file({**weights, **shared}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load_model(folder, dtype="float32")


def test_a_model_is_made_under_its_own_dtype_while_others_load(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, second_is_made = tiny_checkpoint("qwen3_5", cache_dir), threading.Event()
    made, n_made = transformers.Qwen3_5TextModel.__init__, 0

    def meet(self: object, config: object) -> None:
        nonlocal n_made, second
        n_made += 1
        if n_made == 1:
            second = pool.submit(load_model, folder, dtype="float32")
            assert not second_is_made.wait(2)
        else:
            second_is_made.set()
        made(self, config)

    second: Future[AdoptedModel]
    monkeypatch.setattr(transformers.Qwen3_5TextModel, "__init__", meet)
    with ThreadPoolExecutor(1) as pool:
        models = [load_model(folder, dtype="bfloat16"), second.result()]
    assert [model.module.get_input_embeddings().weight.dtype for model in models] == [torch.bfloat16, torch.float32]


def test_experts_may_be_stored_one_by_one(cache_dir: Path, tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3_next", cache_dir)
    stored = load_file(folder / "model.safetensors")
    change: dict[str, torch.Tensor | None] = {}
    for name, tensor in stored.items():
        if name.endswith("experts.gate_up_proj"):
            change[name] = None
            for i, part in enumerate(tensor):
                prefix = f"{name.removesuffix('gate_up_proj')}{i}."
                change[f"{prefix}gate_proj.weight"], change[f"{prefix}up_proj.weight"] = (
                    p.clone() for p in part.chunk(2)
                )
        elif name.endswith("experts.down_proj"):
            change[name] = None
            change.update(
                {f"{name.removesuffix('down_proj')}{i}.down_proj.weight": p.clone() for i, p in enumerate(tensor)}
            )
    if not change:  # this transformers stores them one by one already
        assert any(".experts.0.gate_proj" in name for name in stored)
    model = load_model(changed(folder, tmp_path / "a", change), dtype="float32")
    moe = next(m for m in model.module.modules() if isinstance(m, Moe))
    assert len(moe.experts) == 4
    one = next(name for name in {**stored, **change} if name.endswith("experts.2.down_proj.weight"))
    with pytest.raises(ModelError, match="experts"):
        load_model(changed(folder, tmp_path / "b", {**change, one: None}), dtype="float32")


def test_the_text_part_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    whole = transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(text_config=_COMMON, vision_config=vision)
    ).eval()
    whole.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float32")
    with torch.inference_mode():
        torch.testing.assert_close(heads_of(model), whole.lm_head(torch.ones(1, 32)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rotary_table_is_transformers_own(family: str, cache_dir: Path) -> None:
    folder = tiny_checkpoint(family, cache_dir)
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    if SOURCES[name].rotary is None:
        pytest.skip("a model without positions")
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config)
    module = getattr(model.base_model, SOURCES[name].rotary, None)
    if module is None:
        pytest.skip("a model without positions")
    table = _rotary_table(module, 40)
    cos, sin = module(torch.empty(0), torch.tensor([[0, 7, 39]]))
    half = table.shape[1] // 2
    for part, expected in ((table[[0, 7, 39], :half], cos[0]), (table[[0, 7, 39], half:], sin[0])):
        assert torch.equal(torch.cat([part, part], -1), expected)


@pytest.mark.skipif(native is None, reason="the kernels are not compiled")
def test_packed_weights_replace_the_parameters(cache_dir: Path) -> None:
    folder = tiny_checkpoint("qwen3_5", cache_dir)
    model = load_model(folder, dtype="bfloat16", context_len=64)
    assert [name for name, _ in model.module.named_parameters()] == ["model.embed_tokens.weight"]
    stored = sum(t.numel() * 2 for t in load_file(folder / "model.safetensors").values())
    assert stored * 0.9 < model.weight_bytes < stored * 1.6  # small layers are padded to whole vectors
    assert sum(isinstance(m, Linear) for m in model.module.modules()) == 4 * 4 + 1
