"""Names of what is on disk: the fingerprint of a model, and a hash of every prefix of a token sequence that a segment could end at."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from twinpool.request import Int32Array

GRID_TOKENS = 64  # a prefix hash is kept at every multiple: 100,000 tokens are 1,563 hashes
KEY_BYTES = 16  # 128 bits: two different prefixes share a key with a chance of 2**-64 only after 2**32 of them
LAYOUT_VERSION = 1  # raised whenever bytes of a page or a state come to mean something else
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Everything that must be equal for the bytes of one server to mean the same to another.

    model: a digest of config and weights. page_size in tokens; page_bytes and slot_bytes as in the arena.
    """

    model: str
    kv_dtype: str
    ssm_dtype: str
    conv_dtype: str
    page_size: int
    page_bytes: int
    slot_bytes: int
    layout: int = LAYOUT_VERSION

    @property
    def digest(self) -> bytes:
        """KEY_BYTES over all fields."""
        return _hash(json.dumps(asdict(self), sort_keys=True).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInfo:
    """What a segment is: tokens [start, end) of a conversation, and the state after `end`.

    key, parent_key: hashes of the whole prefix up to `end` and up to `start`; grid_key: up to the last multiple of GRID_TOKENS that is
    <= end, by which a prompt finds its candidates.
    """

    start: int
    end: int
    key: bytes
    parent_key: bytes
    grid_key: bytes


class PrefixKeys(ABC):
    """Names of all prefixes of one token sequence: equal names, equal tokens."""

    @abstractmethod
    def __len__(self) -> int:
        """Tokens so far."""

    @abstractmethod
    def grid_key(self, end: int) -> bytes:
        """Of the tokens up to the last multiple of GRID_TOKENS that is <= end."""

    @abstractmethod
    def key(self, end: int) -> bytes:
        """Of tokens [0, end)."""

    def info(self, start: int, end: int) -> SegmentInfo:
        """The segment of tokens [start, end). Raises ValueError when it is empty or goes beyond the tokens."""
        if not 0 <= start < end:
            raise ValueError(f"a segment cannot be tokens [{start}, {end})")
        return SegmentInfo(
            start=start, end=end, key=self.key(end), parent_key=self.key(start), grid_key=self.grid_key(end)
        )


class ChainHash(PrefixKeys):
    """Hashes of the prefixes of one token sequence, which may grow; each token is hashed once.

    At multiples of GRID_TOKENS: h(0) = the fingerprint's digest, h(n + 64) = H(h(n), 64 tokens); between them H(h(n), fewer tokens).
    So every key depends on the model, the dtypes and every token before it.
    """

    def __init__(self, fingerprint: Fingerprint, tokens: Sequence[int] | Int32Array = ()) -> None:
        self._marks = [fingerprint.digest]  # h at 0, 64, 128, ...
        self._token_bytes = bytearray()
        self.extend(tokens)

    def __len__(self) -> int:
        """Tokens so far."""
        return len(self._token_bytes) // _TOKEN_BYTES

    def extend(self, tokens: Sequence[int] | Int32Array) -> None:
        """Append token ids."""
        self._token_bytes += np.asarray(tokens, dtype="<i4").tobytes()
        for start in range((len(self._marks) - 1) * GRID_TOKENS, len(self) - GRID_TOKENS + 1, GRID_TOKENS):
            self._marks.append(self._after(self._marks[-1], start, start + GRID_TOKENS))

    def grid_key(self, end: int) -> bytes:
        """Hash of the tokens up to the last multiple of GRID_TOKENS that is <= end. Raises IndexError beyond the tokens."""
        return self._marks[end // GRID_TOKENS]

    def key(self, end: int) -> bytes:
        """Hash of tokens [0, end). Raises ValueError beyond the tokens."""
        if end > len(self):
            raise ValueError(f"there are {len(self)} tokens, and the key of {end} is asked for")
        grid_end = end // GRID_TOKENS * GRID_TOKENS
        grid_key = self.grid_key(end)
        return grid_key if grid_end == end else self._after(grid_key, grid_end, end)

    def _after(self, before: bytes, start: int, end: int) -> bytes:
        return _hash(before + self._token_bytes[start * _TOKEN_BYTES : end * _TOKEN_BYTES])


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()
