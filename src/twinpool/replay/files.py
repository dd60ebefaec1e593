"""Trace files as streams of lines: plain, compressed, in archives, or standard input."""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import shutil
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Self, cast

from twinpool.errors import ConfigError

_XZ, _GZIP, _BZIP2, _ZSTD, _ZIP = b"\xfd7zXZ\x00", b"\x1f\x8b", b"BZh", b"\x28\xb5\x2f\xfd", b"PK\x03\x04"
_TAR_MAGIC_AT_BYTES = 257
_PEEK_BYTES = 512
_COMPRESSED = (".xz", ".gz", ".bz2", ".zst")
_TRACE_ENDINGS = (".json", ".jsonl", ".ndjson", ".csv")


@dataclass(frozen=True, slots=True)
class Member:
    """One trace file, perhaps out of an archive. head: its first line; rest: the stream after it, read once."""

    name: str
    head: bytes
    rest: IO[bytes]

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(line number from 1, line) of every line that is not blank."""
        if self.head.strip():
            yield 1, self.head
        for number, line in enumerate(self.rest, start=2):
            if line.strip():
                yield number, line

    def data(self) -> bytes:
        """All of the file."""
        return self.head + self.rest.read()


@contextmanager
def opened(path: str) -> Iterator[Iterator[Member]]:
    """The trace files in `path` ("-": standard input), one after the other; each must be read before the next.

    Compression and archives are recognised by content. Members of a zip come in name order, those of a tar in the order
    of the archive, because a compressed tar can only be read forward. Members that are no .json, .jsonl or .csv are
    left out. Raises ConfigError, also while reading, if the file cannot be opened or unpacked.
    """
    try:
        with _seekable(path) as stream:
            yield _members(Path(path).name if path != "-" else "stdin", _decompressed(stream))
    except (
        OSError,
        EOFError,
        lzma.LZMAError,
        zlib.error,
        tarfile.TarError,
        zipfile.BadZipFile,
        NotImplementedError,
    ) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path} cannot be read: {why}.") from error


@contextmanager
def _seekable(path: str) -> Iterator[io.BufferedReader]:
    """The file, opened; standard input is copied to a temporary file, because zip archives are read from their end."""
    if path != "-":
        with open(path, "rb") as stream:
            yield stream
        return
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.seek(0)
        yield io.BufferedReader(cast(io.RawIOBase, copy))


def _decompressed(stream: IO[bytes]) -> io.BufferedReader:
    """The stream, unpacked if it starts like a compressed file."""
    plain = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(cast(io.RawIOBase, stream))
    head = plain.peek(_PEEK_BYTES)
    unpacked: io.BufferedIOBase
    if head.startswith(_XZ):
        unpacked = lzma.LZMAFile(plain)  # noqa: SIM115  # the caller closes what is below
    elif head.startswith(_GZIP):
        unpacked = gzip.GzipFile(fileobj=plain)
    elif head.startswith(_BZIP2):
        unpacked = bz2.BZ2File(plain)
    elif head.startswith(_ZSTD):
        unpacked = _zstd(plain)
    else:
        return plain
    return io.BufferedReader(cast(io.RawIOBase, unpacked))


def _zstd(stream: IO[bytes]) -> io.BufferedIOBase:
    """A .zst stream unpacked by Python itself, which can from 3.14 on."""
    try:
        module = importlib.import_module("compression.zstd")
    except ModuleNotFoundError:
        raise ConfigError(
            "A .zst file needs Python 3.14, this is an older one: unpack it with `zstd -d`, or pipe it in and name '-'."
        ) from None
    return cast(io.BufferedIOBase, module.ZstdFile(stream))


def _members(name: str, stream: io.BufferedReader) -> Iterator[Member]:
    """The trace files in an unpacked stream: those of a tar or zip, or the stream itself."""
    head = stream.peek(_PEEK_BYTES)
    if head.startswith(_ZIP):
        yield from _zip_members(stream)
    elif head[_TAR_MAGIC_AT_BYTES:].startswith(b"ustar"):
        yield from _tar_members(stream)
    else:
        yield Member(_without_compression(name), stream.readline(), stream)


class _Header(tarfile.TarInfo):
    """A member's header. tarfile takes a damaged or missing one for the end of the archive, which would leave out what follows
    without a word; only the end mark is the end.
    """

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        """As in tarfile. Raises ReadError for a header that is none, but leaves the end mark to the caller."""
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            if isinstance(error, tarfile.EOFHeaderError):  # type: ignore[attr-defined]  # the stubs lack it
                raise
            raise tarfile.ReadError(f"{error} where a member or the end mark should be") from error


def _tar_members(stream: IO[bytes]) -> Iterator[Member]:
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as archive:
        for entry in archive:
            content = archive.extractfile(entry) if entry.isfile() and _is_trace(entry.name) else None
            if content is not None:
                plain = _decompressed(content)
                yield Member(_without_compression(entry.name), plain.readline(), plain)


def _zip_members(stream: IO[bytes]) -> Iterator[Member]:
    with zipfile.ZipFile(stream) as archive:
        for entry in sorted(archive.infolist(), key=lambda found: found.filename):
            if entry.is_dir() or not _is_trace(entry.filename):
                continue
            if entry.flag_bits & 1:
                raise ConfigError(f"{entry.filename} in the archive is encrypted; a trace must be readable.")
            with archive.open(entry) as content:
                plain = _decompressed(content)
                yield Member(_without_compression(entry.filename), plain.readline(), plain)


def _without_compression(name: str) -> str:
    """trace.jsonl for trace.jsonl.xz."""
    return name[: name.rindex(".")] if name.endswith(_COMPRESSED) else name


def _is_trace(name: str) -> bool:
    """Whether a member of an archive can be a trace: no README, licence or hidden file."""
    last = PurePosixPath(_without_compression(name)).name
    return last.endswith(_TRACE_ENDINGS) and not last.startswith(".")
