"""Archives, compression and standard input give what the plain file gives."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from twinpool.errors import ConfigError
from twinpool.replay.files import opened
from twinpool.replay.formats import load_trace

LINE = b'{"timestamp": %d, "input_length": 5, "output_length": 1, "hash_ids": [%d]}\n'
FIRST, SECOND = LINE % (0, 1) + LINE % (1, 2), LINE % (2, 3)


def ids(path: str) -> list[tuple[str, int]]:
    return [(request.session, int(request.blocks[0])) for request in load_trace(path, strict=True).requests()]


def tar_bytes(mode: str, *, names: tuple[str, ...] = ("b.jsonl", "README.md", "._a.jsonl", "a.jsonl")) -> bytes:
    content = {"a.jsonl": FIRST, "b.jsonl": SECOND, "README.md": b"hello", "._a.jsonl": b"\x00"}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=f"w:{mode}") as archive:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size = len(content[name])
            archive.addfile(entry, io.BytesIO(content[name]))
    return buffer.getvalue()


@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_compressed_file(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "t.jsonl.xz"  # what it is called does not matter
    path.write_bytes(compress(FIRST))
    assert ids(str(path)) == [("t.jsonl:1", 1), ("t.jsonl:2", 2)]


@pytest.mark.parametrize("mode", ["", "gz", "bz2", "xz"])
def test_tar(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "t.tar"
    path.write_bytes(tar_bytes(mode))
    assert ids(str(path)) == [("a.jsonl:1", 1), ("a.jsonl:2", 2), ("b.jsonl:1", 3)]


def test_zip_with_a_compressed_member(tmp_path: Path) -> None:
    path = tmp_path / "t.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("in/b.jsonl.gz", gzip.compress(SECOND))
        archive.writestr("in/a.jsonl", FIRST)
        archive.writestr("LICENSE", b"words")
    assert ids(str(path)) == [("in/a.jsonl:1", 1), ("in/a.jsonl:2", 2), ("in/b.jsonl:1", 3)]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(tar_bytes("xz", names=("a.jsonl",)))))
    assert ids("-") == [("a.jsonl:1", 1), ("a.jsonl:2", 2)]


def test_blank_lines_count_but_are_not_given(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"x\n\n  \ny")
    with opened(str(path)) as members:
        assert list(next(members).lines()) == [(1, b"x\n"), (4, b"y")]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (lzma.compress(FIRST * 50)[:-20], "cannot be read: Compressed file ended"),
        (gzip.compress(FIRST)[:-9], "cannot be read: Compressed file ended"),
        (gzip.compress(FIRST)[:-8] + b"\x00" * 8, "cannot be read: CRC check failed"),
        (tar_bytes("")[:600], "cannot be read: "),
        (b"PK\x03\x04" + b"\x00" * 60, "cannot be read: File is not a zip file"),
        (tar_bytes("", names=("README.md",)), "must hold a .json, .jsonl or .csv file, but the archive has none"),
        (b"\x28\xb5\x2f\xfd1234", "needs Python 3.14"),
        (b"", "is empty; a trace has at least one request"),
        (b"\xff\xfe\x00\x01binary", "starts like none of the trace formats"),
    ],
)
def test_unreadable_content_is_one_sentence(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "t.bin"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load_trace(str(path))
    assert why in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.jsonl cannot be read: No such file or directory\."):
        load_trace(str(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:1024],
        lambda whole: whole[:1300],
        lambda whole: whole[:1024] + b"\xff" + whole[1025:],
        lambda whole: gzip.compress(whole[:1024]),
    ],
    ids=["cut after a member", "cut in a header", "a damaged header", "cut before it was compressed"],
)
def test_a_damaged_tar_is_never_a_shorter_one(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "t.tar"
    path.write_bytes(damage(tar_bytes("", names=("a.jsonl", "b.jsonl"))))
    with pytest.raises(ConfigError, match=r"t\.tar cannot be read: .* header where a member|checksum where a member"):
        load_trace(str(path))
