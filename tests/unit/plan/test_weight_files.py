"""Bytes of safetensors files from an index or from headers, and broken ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from twinpool.errors import ModelError
from twinpool.plan.weight_files import index_weight_bytes


def tensors(*sizes: int) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for i, size in enumerate(sizes):
        header[f"t{i}"] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at := at + size]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(at)


def test_headers_are_summed_over_files(tmp_path: Path) -> None:
    assert index_weight_bytes(tmp_path) is None
    (tmp_path / "a.safetensors").write_bytes(tensors(10, 6))
    (tmp_path / "b.safetensors").write_bytes(tensors(5))
    assert index_weight_bytes(tmp_path) == 21


def test_the_index_comes_first_and_may_lack_a_total(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(tensors(10))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size": 99}}')
    assert index_weight_bytes(tmp_path) == 99
    index.write_text('{"metadata": {}}')
    assert index_weight_bytes(tmp_path) == 10


@pytest.mark.parametrize("text", ["[]", "{", '{"metadata": 3}', '{"metadata": {"total_size": "big"}}'])
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        index_weight_bytes(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no safetensors file"), (b"\xff" * 8, "no safetensors file"), (tensors(10)[:-1], "cut short"),
        ((4).to_bytes(8, "little") + b"nope", "cannot be read as safetensors"),
        ((8).to_bytes(8, "little") + b'{"a": 3}', "cannot be read as safetensors"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=rf"a\.safetensors .*{reason}"):
        index_weight_bytes(tmp_path)
