"""A checkpoint on disk: where it is and what its config says. Its weights are read by models/adopt.py."""

from __future__ import annotations

from pathlib import Path

from twinpool.errors import ModelError
from twinpool.models.config_file import read_config
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
    return ModelSpec.from_config_json(read_config(folder))
