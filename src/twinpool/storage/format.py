"""A segment as a file: a safetensors file with tensors `pages`, `state` and `digest`, whose name says what it is.

    length of the header, 8 bytes | header, JSON, padded to a block | pages | state | SHA-256 of all before it, 32 bytes

Why this format: segments are written once, are large (megabytes) and are read whole, so a file each lets the kernel do the work of a
database: atomic renames, space given back at once, no lock between servers. SQLite (and diskcache, which is built on it) and LMDB
would write every byte twice or map a file of fixed size, and check no checksums of values. safetensors is a dependency already and
other tools read it; it has no checksum, so the last tensor is one. SHA-256 rather than a CRC: a torn file is not random noise, and
processors have instructions for it (twice the speed of blake2b where measured, 1 GB/s a core).

A segment of a given model has one valid encoding, so a reader compares the header with the one it expects instead of parsing it.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass

from twinpool.storage.keys import KEY_BYTES, Fingerprint, SegmentInfo
from twinpool.units import round_up

Bytes = bytes | bytearray | memoryview  # contiguous; `array.data` of a numpy array

SUFFIX = ".safetensors"
_BLOCK_BYTES = 4096  # pages begin on a block of the disk
_LENGTH_BYTES, _DIGEST_BYTES = 8, 32
_HEX = f"[0-9a-f]{{{2 * KEY_BYTES}}}"
_NAME = re.compile(rf"({_HEX})-({_HEX})-({_HEX})-(\d{{1,12}})-(\d{{1,12}}){re.escape(SUFFIX)}")


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Bytes of a segment as they lie in the arena: pages [(end - start) / page_size × page_bytes], state [slot_bytes]."""

    info: SegmentInfo
    pages: Bytes
    state: Bytes


def file_name(info: SegmentInfo) -> str:
    """key-parent-grid-start-end.safetensors: a listing of the folder is the index."""
    keys = "-".join(key.hex() for key in (info.key, info.parent_key, info.grid_key))
    return f"{keys}-{info.start}-{info.end}{SUFFIX}"


def parse_name(name: str) -> SegmentInfo | None:
    """What a file is by its name; None: not a segment."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    key, parent_key, grid_key = (bytes.fromhex(text) for text in found.groups()[:3])
    start, end = int(found[4]), int(found[5])
    if start >= end:
        return None
    return SegmentInfo(start=start, end=end, key=key, parent_key=parent_key, grid_key=grid_key)


def file_bytes(info: SegmentInfo, fingerprint: Fingerprint) -> int:
    """Size of a segment's file."""
    return len(_header(info, fingerprint)) + payload_bytes(info, fingerprint) + _DIGEST_BYTES


def payload_bytes(info: SegmentInfo, fingerprint: Fingerprint) -> int:
    """Bytes of a segment's pages and state."""
    return _pages_bytes(info, fingerprint) + fingerprint.slot_bytes


def smallest_file_bytes(fingerprint: Fingerprint) -> int:
    """Size of the file of one page and one state."""
    key = bytes(KEY_BYTES)
    info = SegmentInfo(start=0, end=fingerprint.page_size, key=key, parent_key=key, grid_key=key)
    return file_bytes(info, fingerprint)


def check_segment(segment: Segment, fingerprint: Fingerprint) -> None:
    """Assert whole pages and the right number of bytes."""
    info = segment.info
    assert info.start % fingerprint.page_size == info.end % fingerprint.page_size == 0, f"{info} is not of whole pages"
    assert _length(segment.pages) == _pages_bytes(info, fingerprint), "the pages of a segment have the wrong size"
    assert _length(segment.state) == fingerprint.slot_bytes, "the state of a segment has the wrong size"


def encode(segment: Segment, fingerprint: Fingerprint) -> list[Bytes]:
    """The parts of the file, one after another; pages and state are not copied."""
    parts: list[Bytes] = [_header(segment.info, fingerprint), segment.pages, segment.state]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return [*parts, digest.digest()]


def decode(data: memoryview, info: SegmentInfo, fingerprint: Fingerprint) -> Segment | None:
    """The segment in a file's bytes, as views of them; None when any byte is not what was written, or it is another segment."""
    header = _header(info, fingerprint)
    if data.nbytes != file_bytes(info, fingerprint) or data[: len(header)] != header:
        return None
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        return None
    state_at = body.nbytes - fingerprint.slot_bytes
    return Segment(info, body[len(header) : state_at], body[state_at:])


def _header(info: SegmentInfo, fingerprint: Fingerprint) -> bytes:
    """Length and JSON of the safetensors header (format of huggingface/safetensors: spaces may follow the JSON)."""
    pages_end = _pages_bytes(info, fingerprint)
    state_end = pages_end + fingerprint.slot_bytes
    page_count = (info.end - info.start) // fingerprint.page_size
    document = {
        "__metadata__": {
            "fingerprint": fingerprint.digest.hex(),
            "key": info.key.hex(),
            "parent_key": info.parent_key.hex(),
            "start": str(info.start),
            "end": str(info.end),
        },
        "pages": _tensor([page_count, fingerprint.page_bytes], 0, pages_end),
        "state": _tensor([fingerprint.slot_bytes], pages_end, state_end),
        "digest": _tensor([_DIGEST_BYTES], state_end, state_end + _DIGEST_BYTES),
    }
    text = json.dumps(document, separators=(",", ":")).encode()
    size_bytes = round_up(_LENGTH_BYTES + len(text), _BLOCK_BYTES) - _LENGTH_BYTES
    return size_bytes.to_bytes(_LENGTH_BYTES, "little") + text.ljust(size_bytes)


def _tensor(shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": shape, "data_offsets": [begin, end]}


def _pages_bytes(info: SegmentInfo, fingerprint: Fingerprint) -> int:
    return (info.end - info.start) // fingerprint.page_size * fingerprint.page_bytes


def _length(data: Bytes) -> int:
    return memoryview(data).nbytes
