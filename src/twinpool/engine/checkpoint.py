"""A checkpoint on disk: where it is, what its config says, and its weights in a transformers module tree."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from twinpool.engine.tensors import DTYPES
from twinpool.errors import ModelError
from twinpool.models.spec import ModelSpec

DEMO_FOLDER = Path(__file__).resolve().parents[1] / "demo"


def find_folder(model_path: str | None, *, revision: str | None = None, flag: str = "--model-path") -> Path:
    """The local folder of a model: the demo's (None), a folder, or a hub id's, downloaded if it is not here yet.

    Raises ModelError naming the path and the flag.
    """
    if model_path is None:
        return DEMO_FOLDER
    folder = Path(model_path).expanduser()
    if folder.is_dir():
        return folder
    # A hub id is `name` or `owner/name`; anything else can only be meant as a path.
    if model_path.count("/") > 1 or model_path.startswith((".", "/", "~")):
        raise ModelError(f"there is no folder {model_path} ({flag} takes a local folder or a hub id).")
    return _download(model_path, revision, flag)


def _download(hub_id: str, revision: str | None, flag: str) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, httpx.HTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{hub_id} is neither a local folder nor a hub id that can be fetched: {reason} ({flag})."
        ) from error


def read_spec(folder: Path) -> ModelSpec:
    """The memory facts in a folder's config.json. Raises ModelError if it is missing, broken or of an unknown
    architecture.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{folder} has no config.json: --model-path takes a folder in Hugging Face format.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
    if not isinstance(config, Mapping):
        raise ModelError(f"{path} holds no JSON object.")
    return ModelSpec.from_config_json(config)


def load_model(folder: Path, *, dtype: str) -> Any:
    """The text part of a checkpoint as transformers builds it, in `dtype`, on the CPU, ready for inference.

    Raises ModelError if weights are missing, unreadable or of other shapes than the config says.
    """
    from transformers import AutoModelForCausalLM

    try:
        with _quiet():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=DTYPES[dtype],
                local_files_only=True,
                output_loading_info=True,
                attn_implementation="eager",
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"the weights in {folder} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"the weights in {folder} lack {len(missing)} tensors that config.json asks for: {missing[0]}, ..."
        )
    return model.eval().requires_grad_(False)


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers, tied ones once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.state_dict().values()}
    return sum(storages.values())


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars: the boot log has its own lines."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
