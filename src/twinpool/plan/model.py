"""What is planned for: a built-in shape, a folder, a config.json, a hub id, or two numbers given by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twinpool.errors import ConfigError, ModelError
from twinpool.models.builtin import builtin_models, find_builtin
from twinpool.models.config_file import read_config_file
from twinpool.models.shapes import LayerSpec, StateShapes
from twinpool.models.spec import ModelSpec

MANUAL = "manual numbers"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """name, where its shape comes from, its spec; config: what the spec was read from; folder: where weights may lie.

    params_b: billions of parameters by its name, None if unknown.
    """

    name: str
    source: str
    spec: ModelSpec
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    params_b: float | None = None


def find_model(name: str, *, revision: str | None = None) -> PlannedModel:
    """A folder or file if there is one of that name, else a built-in shape, else a hub id (only its config is fetched).

    revision: of a hub id; asks the hub even if the shape is built in. Raises ModelError.
    """
    path = Path(name).expanduser()
    if path.exists():
        return _from_path(path)
    builtin = find_builtin(name) if revision is None else None
    if builtin is not None:
        return PlannedModel(
            name=builtin.name,
            source=f"built-in shape ({builtin.source})",
            spec=ModelSpec.from_config_json(builtin.config),
            config=builtin.config,
            params_b=builtin.params_b,
        )
    if name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1:
        raise ModelError(f"there is no folder or file {name}.")
    if "/" not in name:
        names = ", ".join(model.name for model in builtin_models())
        raise ModelError(f"'{name}' is no folder, no hub id (owner/name) and none of the built-in shapes: {names}.")
    return _from_hub(name, revision)


def manual_model(*, state_bytes_per_slot: int, kv_bytes_per_token: int, context_len: int | None) -> PlannedModel:
    """A model of which only the two constants of one rank are known (bytes). Raises ConfigError for impossible ones."""
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
        layers=(LayerSpec(linear=_FixedState(state_bytes_per_slot)), LayerSpec(attention=_FixedKv(kv_bytes_per_token))),
    )  # fmt: skip
    return PlannedModel(name=MANUAL, source="flags", spec=spec)


@dataclass(frozen=True, slots=True)
class _FixedState:
    """So many bytes a slot, as float32 elements, on each rank."""

    slot_bytes: int

    def states(self, tp: int) -> StateShapes:
        """One temporal state; already of one rank."""
        del tp
        return StateShapes((), (self.slot_bytes // 4,))


@dataclass(frozen=True, slots=True)
class _FixedKv:
    """So many bytes a token, on each rank."""

    token_bytes: int

    def kv_bytes_per_token(self, kv_dtype: str, tp: int, dcp: int = 1) -> int:
        """The number as given; dtype and ranks are already in it."""
        del kv_dtype, tp, dcp
        return self.token_bytes


def _from_path(path: Path) -> PlannedModel:
    folder = path if path.is_dir() else path.parent
    file = path / "config.json" if path.is_dir() else path
    config = read_config_file(file)
    name = path.name if path.is_dir() else path.name.removesuffix(".json").removesuffix("_config")
    builtin = find_builtin(name.replace("--", "/"))
    return PlannedModel(
        name=name, source=f"{path}", spec=ModelSpec.from_config_json(config), config=config, folder=folder,
        params_b=builtin.params_b if builtin else None,
    )  # fmt: skip


def _from_hub(hub_id: str, revision: str | None) -> PlannedModel:
    from twinpool.models.hub import fetch_config  # slow to import, and most plans need no network

    path = fetch_config(hub_id, revision=revision)
    config = read_config_file(path)
    return PlannedModel(
        name=hub_id, source="hub", spec=ModelSpec.from_config_json(config), config=config, folder=path.parent
    )
