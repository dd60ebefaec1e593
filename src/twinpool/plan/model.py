"""What is planned for: a built-in shape, a folder, a config.json, a hub id, or two numbers given by hand."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from twinpool.config.resolve import DEMO_NAME
from twinpool.errors import ConfigError, ModelError
from twinpool.models.builtin import DEMO_FOLDER, BuiltinModel, builtin_models, find_builtin
from twinpool.models.config_file import read_config_file
from twinpool.models.hub import QUANTISATION_FILE, fetch_config
from twinpool.models.shapes import LayerSpec, StateShapes
from twinpool.models.spec import ModelSpec
from twinpool.plan.weight_part import text_config
from twinpool.plan.weight_quantisation import split_ending

MANUAL = "manual numbers"
CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """name, where its shape comes from, its spec; config: what the spec was read from; folder: where weights may lie.

    The name keeps an ending such as -FP8, which tells of weights that no file tells of. config: with the quantization_config
    of a hf_quant_config.json where it has none itself. params_b: billions of parameters by its name, None if unknown.
    """

    name: str
    source: str
    spec: ModelSpec
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    params_b: float | None = None


def find_model(name: str, *, revision: str | None = None) -> PlannedModel:
    """A folder or file if there is one of that name, else the demo model or a built-in shape, else a hub id (only its config is
    fetched).

    revision: of a hub id; asks the hub even if the shape is built in. Raises ModelError.
    """
    path = _existing(name)
    if path is not None:
        return _from_path(path)
    if name == DEMO_NAME:
        return replace(_from_path(DEMO_FOLDER), source="the model that ships with twinpool")
    builtin, known = _builtin(name) if revision is None else (None, "")
    if builtin is not None:
        of = "" if known.startswith(builtin.name) else f" of {builtin.name}"
        return PlannedModel(
            name=known,
            source=f"built-in shape{of} ({builtin.source})",
            spec=ModelSpec.from_config_json(builtin.config),
            config=builtin.config,
            params_b=builtin.params_b,
        )
    if name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1:
        raise ModelError(f"there is no folder or file {name}.")
    if "/" not in name:
        raise ModelError(
            f"'{name}' is no folder, no hub id (owner/name) and none of the built-in shapes; {_built_in_names(name)}."
        )
    return _from_hub(name, revision)


def _existing(name: str) -> Path | None:
    """The file or folder of that name; None if there is none, or if none can have such a name."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # too long; the home of a user who is not here
        return None


def _builtin(name: str) -> tuple[BuiltinModel | None, str]:
    """The built-in shape of a name, and the name as its row spells it: qwen/qwen3.6-27b-FP8 is Qwen3.6-27B-FP8, of the shape of
    Qwen3.5-27B.
    """
    stem, ending = (name, "") if find_builtin(name) is not None else split_ending(name)
    row = find_builtin(stem)
    return row, "" if row is None else f"{row.known_as(stem)}{ending}"


def _built_in_names(name: str) -> str:
    """The nearest built-in shapes, then all of them."""
    by_key = {known.casefold(): row.name for row in builtin_models() for known in (row.name, *row.aliases)}
    near = dict.fromkeys(
        by_key[key] for key in difflib.get_close_matches(split_ending(name)[0].casefold(), by_key, n=3)
    )
    nearest = f"nearest: {', '.join(near)}; " if near else ""
    return f"{nearest}all: {', '.join(model.name for model in builtin_models())}"


def manual_model(
    *, state_bytes_per_slot: int, kv_bytes_per_token: int, context_len: int | None, conv_bytes_per_slot: int = 0
) -> PlannedModel:
    """A model of which only the two constants of one rank are known (bytes). Raises ConfigError for impossible ones.

    conv_bytes_per_slot: the part of the state that is convolution windows, an even number.
    """
    if state_bytes_per_slot < 4 or state_bytes_per_slot % 4:
        raise ConfigError(
            f"--state-bytes-per-slot {state_bytes_per_slot} must be a positive multiple of 4 (one float32): "
            "it is the conv and the temporal state of all linear layers of one sequence on one rank."
        )
    if kv_bytes_per_token < 0:
        raise ConfigError(f"--kv-bytes-per-token {kv_bytes_per_token} must be at least 0.")
    spec = ModelSpec(
        architecture=MANUAL, model_type="", family=MANUAL, hidden_size=1, vocab_size=1, context_len=context_len or 262_144,
        dtype="bfloat16", ssm_dtype="float32", chunk_tokens=64, supports_extra_buffer=True,
        layers=(
            LayerSpec(linear=_FixedState(conv_bytes_per_slot, state_bytes_per_slot - conv_bytes_per_slot)),
            LayerSpec(attention=_FixedKv(kv_bytes_per_token)),
        ),
    )  # fmt: skip
    return PlannedModel(name=MANUAL, source="flags", spec=spec)


@dataclass(frozen=True, slots=True)
class _FixedState:
    """So many bytes a slot on each rank: bfloat16 elements of conv windows, float32 elements of a temporal state."""

    conv_bytes: int
    ssm_bytes: int

    def states(self, tp: int) -> StateShapes:
        """One window and one temporal state; already of one rank."""
        del tp
        conv, ssm = self.conv_bytes // 2, self.ssm_bytes // 4
        return StateShapes((conv,) if conv else (), (ssm,) if ssm else ())


@dataclass(frozen=True, slots=True)
class _FixedKv:
    """So many bytes a token, on each rank."""

    token_bytes: int

    def kv_bytes_per_token(self, kv_dtype: str, tp: int, dcp: int = 1) -> int:
        """The number as given; dtype and ranks are already in it."""
        del kv_dtype, tp, dcp
        return self.token_bytes


def _from_path(path: Path) -> PlannedModel:
    """A folder, or a file: its neighbours belong to it only if it is called config.json."""
    file = path / CONFIG_FILE if path.is_dir() else path
    name = path.resolve().name if path.is_dir() else path.name.removesuffix(".json").removesuffix("_config")
    folder = file.parent if file.name == CONFIG_FILE else None
    return _from_file(file, name=name, source=f"{path}", folder=folder)


def _from_hub(hub_id: str, revision: str | None) -> PlannedModel:
    file = fetch_config(hub_id, revision=revision)
    return _from_file(file, name=hub_id, source="hub", folder=file.parent)


def _from_file(file: Path, *, name: str, source: str, folder: Path | None) -> PlannedModel:
    config = read_config_file(file)
    if folder is not None:
        config = _with_quantisation(config, folder / QUANTISATION_FILE)
    builtin, _ = _builtin(name.replace("--", "/"))
    return PlannedModel(
        name=name, source=source, spec=ModelSpec.from_config_json(config), config=config, folder=folder,
        params_b=builtin.params_b if builtin else None,
    )  # fmt: skip


def _with_quantisation(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """The config with what modelopt wrote into a file of its own, unless it says itself how it is quantised.

    Raises ModelError when the file cannot be read.
    """
    if config.get("quantization_config") or text_config(config).get("quantization_config") or not file.is_file():
        return config
    quantised = read_config_file(file).get("quantization")
    if not isinstance(quantised, dict):
        raise ModelError(f"{file} has no object 'quantization', which says how the weights are quantised.")
    found = {"quant_method": "modelopt", **quantised}
    if quantised.get("kv_cache_quant_algo") == "FP8":  # what config.json calls a scheme of 8-bit floats
        found.setdefault("kv_cache_scheme", {"type": "float", "num_bits": 8})
    return {**config, "quantization_config": found}
