"""A config.json, read in one place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twinpool.errors import ModelError


def read_config(folder: Path) -> dict[str, Any]:
    """The object in a folder's config.json. Raises ModelError if it is missing, unreadable or no object."""
    path = folder / "config.json"
    if not path.exists():
        raise ModelError(f"{folder} has no config.json: --model-path takes a folder in Hugging Face format.")
    return read_config_file(path)


def read_config_file(path: Path) -> dict[str, Any]:
    """The object in a config file. Raises ModelError if it cannot be read or holds no object."""
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not JSON, not UTF-8
        raise ModelError(f"{path} cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no JSON object.")
    return config
