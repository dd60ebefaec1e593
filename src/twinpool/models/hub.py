"""Files of a model on the Hugging Face hub, from its cache on this machine or downloaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
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
    path = Path(_fetch(lambda: _file(hub_id, "config.json", revision), hub_id, "MODEL"))
    for name in (WEIGHT_INDEX, QUANTISATION_FILE):
        with contextlib.suppress(ModelError):  # there is none, or no network: weights are estimated
            _fetch(partial(_file, hub_id, name, revision), hub_id, "MODEL")
    return path


def _file(hub_id: str, name: str, revision: str | None) -> str:
    """One file's path, from the cache if it is there. The hub's client would ask a dead network for half a minute: we ask once."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return str(hf_hub_download(hub_id, name, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        get_hf_file_metadata(hf_hub_url(hub_id, name, revision=revision))
        return str(hf_hub_download(hub_id, name, revision=revision))


def _fetch(download: Callable[[], str], hub_id: str, flag: str) -> str:
    import httpx2
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    try:
        return download()
    except (HfHubHTTPError, HFValidationError, EntryNotFoundError, OSError, httpx2.HTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{hub_id} is neither a local folder nor a hub id that can be fetched: {reason} ({flag})."
        ) from error
