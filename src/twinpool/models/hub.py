"""Files of a model on the Hugging Face hub, from its cache on this machine or downloaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from twinpool.errors import ModelError

SNAPSHOT_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
WEIGHT_INDEX = "model.safetensors.index.json"
QUANTISATION_FILE = "hf_quant_config.json"


def fetch_snapshot(hub_id: str, *, revision: str | None, flag: str) -> Path:
    """The folder of the whole checkpoint. Raises ModelError naming the id and the flag it came from."""
    from huggingface_hub import snapshot_download

    return Path(
        _fetch(lambda: snapshot_download(hub_id, revision=revision, allow_patterns=SNAPSHOT_PATTERNS), hub_id, flag)
    )


def fetch_config(hub_id: str, *, revision: str | None) -> Path:
    """config.json, beside it the index of the weights and modelopt's quantisation if they exist. Raises ModelError."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    path = Path(_fetch(lambda: hf_hub_download(hub_id, "config.json", revision=revision), hub_id, "MODEL"))
    for name in (WEIGHT_INDEX, QUANTISATION_FILE):
        with contextlib.suppress(EntryNotFoundError, OSError):  # there is none, or no network: weights are estimated
            hf_hub_download(hub_id, name, revision=revision)
    return path


def _fetch(download: Callable[[], str], hub_id: str, flag: str) -> str:
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return download()
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, httpx.HTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{hub_id} is neither a local folder nor a hub id that can be fetched: {reason} ({flag})."
        ) from error
