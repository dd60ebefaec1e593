"""One rank's memory: from a device, from flags, with weights that are estimated, in files or given, and what does not fit."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.plan.weighing import LFM2, weigh
from twinpool.config.launch import deployment_from
from twinpool.errors import ConfigError, ModelError
from twinpool.plan.devices import find_device
from twinpool.plan.machine import Machine, find_machine
from twinpool.plan.model import find_model, manual_model
from twinpool.plan.options import MachineOptions
from twinpool.units import GIB


def machine(name: str, *, flags: dict[str, Any] | None = None, **options: Any) -> Machine:
    return find_machine(find_model(name), deployment_from(flags or {}), MachineOptions(**options))


def refusal(name: str, *, flags: dict[str, Any] | None = None, **options: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        machine(name, flags=flags, **options)
    return str(refused.value)


def test_a_device_less_what_its_context_and_the_weights_take() -> None:
    found = machine("Qwen3.5-27B", gpu="H200")
    assert found.weights is not None
    assert (found.name, found.ranks, found.weights.origin) == ("H200", 1, "config")
    assert found.pre_load_bytes == find_device("H200").pre_load_bytes
    assert found.available_bytes == found.pre_load_bytes - found.weights.bytes
    assert found.note == found.weights.note


def test_weights_as_given() -> None:
    found = machine("Qwen3.5-27B", flags={"tp_size": 2}, gpu="H200", weights=25 * GIB)
    assert found.weights is not None
    assert (found.weights.bytes, found.weights.total_bytes, found.weights.origin) == (25 * GIB, 50 * GIB, "flag")
    assert (found.available_bytes, found.note) == (found.pre_load_bytes - 25 * GIB, "as given by --weights")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"pre_load_memory": 3 * GIB, "post_weights_memory": 4 * GIB},
            "--post-weights-memory 4.00 GiB is more than the 3.00",
        ),
        ({"weights": GIB, "post_weights_memory": 4 * GIB}, "--weights contradicts --post-weights-memory"),
        ({"pool_memory": GIB, "post_weights_memory": 4 * GIB}, "--pool-memory contradicts --post-weights-memory"),
        ({"pool_memory": GIB, "pre_load_memory": 4 * GIB}, "--pool-memory contradicts --pre-load-memory"),
    ],
)
def test_memory_that_is_said_twice(options: dict[str, int], sentence: str) -> None:
    assert refusal("Qwen3.5-27B", gpu="H200", **options).startswith(sentence)


def test_memory_after_the_weights_as_given() -> None:
    found = machine("Qwen3.5-27B", flags={"tp_size": 2}, gpu="H200", post_weights_memory=90 * GIB)
    assert (found.weights, found.available_bytes, found.ranks) == (None, 90 * GIB, 2)
    assert found.note == "as given by --post-weights-memory"


def test_memory_before_the_weights_as_given() -> None:
    found = machine("Qwen3.5-27B", pre_load_memory=100 * GIB)
    assert found.weights is not None
    assert (found.name, found.device, found.pre_load_bytes) == ("the device", None, 100 * GIB)
    assert machine("Qwen3.5-27B", flags={"device_memory_bytes": 80 * GIB}).pre_load_bytes == 80 * GIB


def test_memory_after_the_weights_needs_that_before_them() -> None:
    assert refusal("Qwen3.5-27B", post_weights_memory=GIB).startswith("--post-weights-memory also needs --gpu or")


def test_a_device_is_needed() -> None:
    assert refusal("Qwen3.5-27B").startswith("The memory of a device is not known: give --gpu")
    assert refusal("Qwen3.5-27B", gpu="cpu").startswith("The memory of a device is not known")
    assert machine("LFM2-1.2B", flags={"device_memory_bytes": 8 * GIB}, gpu="cpu").pre_load_bytes == 8 * GIB


def test_a_device_that_is_not_known() -> None:
    assert refusal("Qwen3.5-27B", gpu="H2000").startswith("--gpu 'H2000' is not in the table of devices; nearest: H200")


@pytest.mark.parametrize(
    ("name", "flags", "ranks"),
    [
        ("Qwen3.5-122B-A10B", {}, "4 ranks (--tp-size 4)"),
        ("Qwen3.5-122B-A10B", {"tp_size": 2}, "4 ranks (--tp-size 4)"),
        ("Qwen3.5-122B-A10B", {"pp_size": 2}, "4 ranks (--tp-size 2)"),
        ("Qwen3.5-397B-A17B", {}, "16 ranks (--tp-size 16)"),
    ],
)
def test_ranks_that_would_hold_the_weights(name: str, flags: dict[str, Any], ranks: str) -> None:
    sentence = refusal(name, flags=flags, gpu="H100")
    assert f"; use at least {ranks}, a quantised checkpoint, or give the real size with --weights." in sentence
    tp = int(ranks.rstrip(")").split()[-1])
    assert machine(name, flags={**flags, "tp_size": tp}, gpu="H100").available_bytes > 0
    if tp // 2 > flags.get("tp_size", 1):
        refusal(name, flags={**flags, "tp_size": tp // 2}, gpu="H100")


def test_the_sentence_says_what_is_needed_and_what_is_there() -> None:
    assert refusal("Qwen3.5-27B", pre_load_memory=40 * GIB) == (
        "The weights take 50.10 GiB on each of 1 rank and the device has 40.00 GiB before they are loaded; "
        "use at least 2 ranks (--tp-size 2), a quantised checkpoint, or give the real size with --weights."
    )


def test_heads_that_do_not_divide_are_no_way_out() -> None:
    # 24 query heads and 16 key heads: 8 ranks at most.
    sentence = refusal("Qwen3.5-27B", pre_load_memory=5 * GIB)
    assert sentence.endswith(
        "no number of ranks up to 64 holds them: use a quantised checkpoint, a larger device, "
        "or give the real size with --weights."
    )


def test_given_weights_that_do_not_fit_say_nothing_about_ranks() -> None:
    sentence = refusal("Qwen3.5-27B", gpu="H100", weights=100 * GIB)
    assert "use more ranks (--tp-size) and give what --weights is on each of them" in sentence


def test_an_ending_or_a_flag_makes_weights_smaller() -> None:
    plain, named = machine("Qwen3.5-27B", gpu="H200"), machine("Qwen/Qwen3.6-27B-FP8", gpu="H200")
    asked = machine("Qwen3.5-27B", flags={"quantization": "fp8"}, gpu="H200")
    assert plain.weights is not None
    assert named.weights is not None
    assert asked.weights is not None
    assert named.weights.bytes == asked.weights.bytes == pytest.approx(plain.weights.bytes * 0.55, rel=0.01)
    assert "taken from the ending -FP8 of the name" in named.note
    assert "as --quantization fp8 says" in asked.note


def test_a_quantisation_that_is_not_known() -> None:
    with pytest.raises(ModelError, match=r"--quantization gguf does not tell .*; give --weights SIZE\.$"):
        machine("Qwen3.5-27B", flags={"quantization": "gguf"}, gpu="H200")


def test_files_come_before_the_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LFM2))
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 3000000000}}')
    found = machine(str(tmp_path), flags={"tp_size": 2}, gpu="H100")
    assert found.weights is not None
    assert (found.weights.origin, found.weights.total_bytes) == ("index", 3_000_000_000)
    assert found.weights.bytes == pytest.approx(1_500_000_000, rel=0.001)


def test_draft_layers_are_loaded_for_speculation_only() -> None:
    plain = machine("Qwen3.5-27B", flags={"tp_size": 2}, gpu="H200")
    drafting = machine("Qwen3.5-27B", flags={"tp_size": 2, "speculative_num_draft_tokens": 4}, gpu="H200")
    assert plain.weights is not None
    assert plain.available_bytes - drafting.available_bytes == plain.weights.mtp_bytes // 2


def test_a_data_type_doubles_weights() -> None:
    found = machine("LFM2-8B-A1B", flags={"dtype": "float32"}, gpu="H100")
    assert found.weights is not None
    assert found.weights.bytes == 2 * weigh(dict(find_model("LFM2-8B-A1B").config)).bytes


def test_nothing_is_known_of_the_weights_of_two_numbers() -> None:
    manual = manual_model(state_bytes_per_slot=400, kv_bytes_per_token=4, context_len=None)
    with pytest.raises(ConfigError, match="give --weights SIZE"):
        find_machine(manual, deployment_from({}), MachineOptions(gpu="H100"))
    given = find_machine(manual, deployment_from({}), MachineOptions(gpu="H100", weights=GIB))
    assert given.weights is not None
    assert given.weights.bytes == GIB
