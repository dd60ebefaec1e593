"""A small model's segments: contents follow from the key, so what a store returns can be judged without remembering it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from twinpool.storage.format import Segment, file_bytes
from twinpool.storage.keys import Fingerprint, SegmentInfo
from twinpool.storage.store import DiskStore

SMALL = Fingerprint(
    model="small", kv_dtype="bfloat16", ssm_dtype="float32", conv_dtype="bfloat16",
    page_size=4, page_bytes=32, slot_bytes=48,
)  # fmt: skip
PLENTY_BYTES = 1 << 30
ONE_PAGE = SegmentInfo(start=0, end=4, key=bytes(16), parent_key=bytes(16), grid_key=bytes(16))
FILE_BYTES = file_bytes(ONE_PAGE, SMALL)  # of one page and one state


def segment(info: SegmentInfo, fingerprint: Fingerprint = SMALL) -> Segment:
    """Pages and a state that no other key has."""
    pages_bytes = (info.end - info.start) // fingerprint.page_size * fingerprint.page_bytes
    content = hashlib.shake_256(info.key + info.parent_key).digest(pages_bytes + fingerprint.slot_bytes)
    return Segment(info, content[:pages_bytes], content[pages_bytes:])


def same(read: Segment | None, info: SegmentInfo) -> bool:
    """Whether it is what `segment` made."""
    wanted = segment(info)
    return read is not None and (read.info, bytes(read.pages), bytes(read.state)) == (info, wanted.pages, wanted.state)


def store_at(path: Path, limit_bytes: int = PLENTY_BYTES, fingerprint: Fingerprint = SMALL) -> DiskStore:
    """A store of the small model."""
    return DiskStore(path, limit_bytes=limit_bytes, fingerprint=fingerprint)


def put_chain(store: DiskStore, tokens: Sequence[int], ends: Sequence[int]) -> list[SegmentInfo]:
    """Put segments that end there, root first; asserts that all are taken."""
    infos = chain_infos(store, tokens, ends)
    assert all(store.put(segment(info, store.fingerprint)) for info in infos)
    return infos


def chain_infos(store: DiskStore, tokens: Sequence[int], ends: Sequence[int]) -> list[SegmentInfo]:
    """Segments that end there, root first."""
    hashes = store.hashes(tokens)
    return [hashes.info(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def longest_end(store: DiskStore, tokens: Sequence[int]) -> int:
    """Tokens of the longest chain found."""
    infos = store.longest(store.hashes(tokens))
    return infos[-1].end if infos else 0
