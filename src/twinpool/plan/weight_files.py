"""Bytes of a checkpoint on disk: from the index of its safetensors files, or from their headers."""

from __future__ import annotations

import json
from pathlib import Path

from twinpool.errors import ModelError
from twinpool.models.hub import WEIGHT_INDEX

_LARGEST_HEADER_BYTES = 100_000_000  # the safetensors library refuses longer ones


def index_weight_bytes(folder: Path) -> int | None:
    """Bytes of the tensors in a folder's safetensors files, None when there are none.

    From the index's metadata.total_size, else from each file's header (8 bytes of length, JSON with data_offsets).
    Raises ModelError naming the broken file.
    """
    index = folder / WEIGHT_INDEX
    total = _total_size(index) if index.is_file() else None
    if total is not None:
        return total
    files = sorted(folder.glob("*.safetensors"))
    return sum(_tensor_bytes(path) for path in files) if files else None


def _total_size(index: Path) -> int | None:
    try:
        total = json.loads(index.read_text())["metadata"].get("total_size")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} holds no JSON object with 'metadata'; it cannot be read as an index.") from error
    if total is None:
        return None
    if isinstance(total, bool) or not isinstance(total, int | float) or total <= 0:
        raise ModelError(f"{index} says total_size={total!r}; it must be a number of bytes above 0.")
    return int(total)


def _tensor_bytes(path: Path) -> int:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _LARGEST_HEADER_BYTES:
                raise ModelError(f"{path} gives its header {length} bytes; it is no safetensors file.")
            header = json.loads(file.read(length))
            spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
            total = sum(int(end) - int(start) for start, end in spans)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} has a header that cannot be read as safetensors: {error}.") from error
    needed = 8 + length + total
    if path.stat().st_size < needed:
        raise ModelError(f"{path} needs {needed} bytes and has {path.stat().st_size}; it is cut short.")
    return total
