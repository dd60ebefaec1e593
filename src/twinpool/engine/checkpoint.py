"""A checkpoint on disk: where it is and what its config says. Its weights are read by models/adopt.py."""

from __future__ import annotations

from pathlib import Path

from twinpool.errors import ModelError
from twinpool.models.builtin import DEMO_FOLDER as DEMO_FOLDER
from twinpool.models.config_file import read_config
from twinpool.models.hub import fetch_snapshot
from twinpool.models.spec import ModelSpec


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
    return fetch_snapshot(model_path, revision=revision, flag=flag)


def read_spec(folder: Path) -> ModelSpec:
    """The memory facts in a folder's config.json. Raises ModelError if it is missing, broken or of an unknown
    architecture.
    """
    return ModelSpec.from_config_json(read_config(folder))
