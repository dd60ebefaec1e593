"""Where a model is found: built-in shapes and their endings, folders and files, a hub id, two numbers; and what is refused."""

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from tests.unit.plan.weighing import CONFIGS, LFM2, real
from twinpool.errors import ConfigError, ModelError
from twinpool.models.builtin import builtin_models
from twinpool.models.hub import fetch_config
from twinpool.plan import model
from twinpool.plan.model import find_model, manual_model


def write(folder: Path, config: dict[str, Any], **files: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("name", "shown", "of"),
    [
        ("Qwen3.5-27B", "Qwen3.5-27B", ""),
        ("qwen3.5-27b", "Qwen3.5-27B", ""),
        ("Qwen/qwen3.8-27b", "Qwen3.8-27B", " of Qwen3.5-27B"),
    ],
)
def test_a_built_in_shape(name: str, shown: str, of: str) -> None:
    found = find_model(name)
    assert (found.name, found.params_b, found.folder) == (shown, 27, None)
    assert found.source == f"built-in shape{of} (the published config.json)"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Qwen/Qwen3.6-27B-FP8", "Qwen3.6-27B-FP8"),
        ("nvidia/Qwen3.5-397B-A17B-NVFP4", "Qwen3.5-397B-A17B-NVFP4"),
        ("qwen3.5-35b-a3b-gptq-int4", "Qwen3.5-35B-A3B-gptq-int4"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
        ("Nemotron-H-56B-Base-8K", "Nemotron-H-56B-Base-8K"),
    ],
)
def test_an_ending_about_quantisation_is_kept(name: str, shown: str) -> None:
    assert find_model(name).name == shown


def test_a_name_with_a_slip_gets_the_nearest_names_first() -> None:
    with pytest.raises(ModelError) as refused:
        find_model("Qwen3.5-27BB-FP8")
    sentence = str(refused.value)
    assert sentence.startswith(
        "'Qwen3.5-27BB-FP8' is no folder, no hub id (owner/name) and none of the built-in shapes; nearest: Qwen3.5-27B; "
    )
    assert sentence.endswith(f"; all: {', '.join(row.name for row in builtin_models())}.")


def test_a_name_like_no_other_gets_the_list_alone() -> None:
    with pytest.raises(ModelError, match=r"none of the built-in shapes; all: Qwen3-Next-80B-A3B, "):
        find_model("zzzzzzzz")


@pytest.mark.parametrize("name", ["./nothing", "/nothing", "a/b/c", "nothing.json"])
def test_a_path_that_is_not_there(name: str) -> None:
    with pytest.raises(ModelError, match=r"^there is no folder or file .*\.$"):
        find_model(name)


def test_a_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", LFM2)
    found = find_model(str(folder))
    assert (found.name, found.source, found.folder, found.params_b) == ("mine", str(folder), folder, None)
    assert find_model(str(folder / "config.json")).folder == folder


def test_a_file_that_is_called_otherwise_has_no_weights_beside_it(tmp_path: Path) -> None:
    (tmp_path / "Qwen--Qwen3.5-27B_config.json").write_text(json.dumps(LFM2))
    found = find_model(str(tmp_path / "Qwen--Qwen3.5-27B_config.json"))
    assert (found.name, found.folder, found.params_b) == ("Qwen--Qwen3.5-27B", None, 27)


def test_a_nested_text_config_is_read() -> None:
    found = find_model(str(CONFIGS / "Qwen--Qwen3.5-27B_config.json"))
    assert "text_config" in found.config
    assert (len(found.spec.layers), found.spec.hidden_size) == (64, 5120)


@pytest.mark.parametrize("config", [LFM2, real("Qwen--Qwen3.5-27B")], ids=["flat", "nested"])
def test_modelopt_says_the_quantisation_in_a_file_of_its_own(tmp_path: Path, config: dict[str, Any]) -> None:
    said = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    folder = write(tmp_path / "mine", config, hf_quant_config={"quantization": said})
    found = find_model(str(folder))
    scheme = {"type": "float", "num_bits": 8}
    assert found.config["quantization_config"] == {"quant_method": "modelopt", **said, "kv_cache_scheme": scheme}
    assert found.spec.checkpoint_kv_dtype == "fp8_e4m3"


def test_the_config_comes_before_the_file_of_modelopt(tmp_path: Path) -> None:
    config = {**LFM2, "quantization_config": {"quant_method": "fp8"}}
    folder = write(tmp_path / "mine", config, hf_quant_config={"quantization": {"quant_algo": "NVFP4"}})
    assert find_model(str(folder)).config == config


def test_a_file_of_modelopt_without_its_object_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", LFM2, hf_quant_config={"producer": {}})
    with pytest.raises(ModelError, match=r"hf_quant_config\.json has no object 'quantization'"):
        find_model(str(folder))


def test_a_model_without_linear_layers_is_refused_with_the_list(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "llama", {"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "vocab_size": 128256}
    )
    with pytest.raises(
        ModelError,
        match=r"^architecture 'LlamaForCausalLM' is not known; known: Qwen3NextForCausalLM, .*; the manual numbers "
        r"--state-bytes-per-slot and --kv-bytes-per-token of 'twinpool plan' work for any model\.$",
    ):
        find_model(str(folder))


def test_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "snapshot", LFM2, hf_quant_config={"quantization": {"quant_algo": "FP8"}})
    asked = []

    def fetch(hub_id: str, *, revision: str | None) -> Path:
        asked.append((hub_id, revision))
        return folder / "config.json"

    monkeypatch.setattr(model, "fetch_config", fetch)
    found = find_model("owner/some-model")
    assert (found.name, found.source, found.folder, found.params_b) == ("owner/some-model", "hub", folder, None)
    assert found.config["quantization_config"]["quant_algo"] == "FP8"
    assert find_model("Qwen/Qwen3.6-27B-FP8", revision="abc").params_b == 27
    assert asked == [("owner/some-model", None), ("Qwen/Qwen3.6-27B-FP8", "abc")]


def fake_hub(monkeypatch: pytest.MonkeyPatch, *, cached: set[str], there: set[str], error: Exception) -> list[str]:
    """A hub with so many files in the cache and on the network; returns what the network is asked for, as it goes."""
    asked: list[str] = []

    def download(hub_id: str, name: str, *, revision: str | None, local_files_only: bool = False) -> str:
        if name in cached:
            return f"cache/{name}"
        if local_files_only:
            raise LocalEntryNotFoundError("it is not in the cache")
        return f"hub/{hub_id}/{revision}/{name}"

    def head(url: str) -> None:
        name = url.rpartition("/")[2]
        asked.append(name)
        if name not in there:
            raise error

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", head)
    return asked


def test_what_a_hub_id_has_beside_its_config_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_hub(monkeypatch, cached=set(), there={"config.json"}, error=EntryNotFoundError("404"))
    assert fetch_config("owner/name", revision="abc") == Path("hub/owner/name/abc/config.json")
    assert asked == ["config.json", "model.safetensors.index.json", "hf_quant_config.json"]


def test_a_dead_network_is_asked_once_for_each_file_that_the_cache_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = httpx2.ConnectError("no route")
    asked = fake_hub(monkeypatch, cached={"config.json", "hf_quant_config.json"}, there=set(), error=dead)
    assert fetch_config("owner/name", revision=None) == Path("cache/config.json")
    assert asked == ["model.safetensors.index.json"]
    fake_hub(monkeypatch, cached=set(), there=set(), error=dead)
    with pytest.raises(ModelError, match=r"owner/name is neither .*: no route \(MODEL\)\."):
        fetch_config("owner/name", revision=None)


@pytest.mark.parametrize("name", ["é" * 1000, "~nobody-of-that-name/model"])
def test_a_name_that_no_file_can_have(name: str) -> None:
    with pytest.raises(ModelError, match=r"is no folder|there is no folder or file"):
        find_model(name)


def test_two_numbers() -> None:
    found = manual_model(state_bytes_per_slot=400, kv_bytes_per_token=0, context_len=None)
    assert found.spec.slot_bytes(ssm_dtype="float32", conv_dtype="bfloat16", tp=4) == 400
    assert (found.spec.kv_bytes_per_token(kv_dtype="bfloat16"), found.spec.context_len) == (0, 262_144)


@pytest.mark.parametrize(
    ("state", "kv", "reason"), [(6, 1, "positive multiple of 4"), (0, 1, "multiple"), (4, -1, "at least 0")]
)
def test_numbers_that_cannot_be(state: int, kv: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        manual_model(state_bytes_per_slot=state, kv_bytes_per_token=kv, context_len=None)
