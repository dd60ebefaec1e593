"""Names of prefixes for a simulated disk: sums over all tokens at once, where the server hashes them block by block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twinpool.request import Int32Array
from twinpool.storage.keys import GRID_TOKENS, KEY_BYTES, PrefixKeys

_HALF_BYTES = KEY_BYTES // 2
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # odd: different tokens stay different, in the upper bits, too


class TokenSums(PrefixKeys):
    """The name of tokens [0, n) is n and the sum of (token, spread) × (a random odd number of its place), modulo 2^64.

    Two different prefixes of one length share a name with a chance of about 2^-64 each, since nobody chooses recorded tokens to
    collide; a folder's names must stand up to that, and are blake2b (storage/keys.py), which takes thirty times as long here.
    """

    def __init__(self, tokens: Sequence[int] | Int32Array) -> None:
        spread = np.asarray(tokens, np.int32).astype(np.uint64) * _SPREAD
        spread ^= spread >> np.uint64(32)
        spread *= _factors(len(spread))
        self._sums = np.cumsum(spread, dtype=np.uint64)

    def __len__(self) -> int:
        return len(self._sums)

    def grid_key(self, end: int) -> bytes:
        """Of the last multiple of GRID_TOKENS that is <= end."""
        return self.key(end // GRID_TOKENS * GRID_TOKENS)

    def key(self, end: int) -> bytes:
        """Of tokens [0, end)."""
        total = int(self._sums[end - 1]) if end else 0
        return end.to_bytes(_HALF_BYTES, "little") + total.to_bytes(_HALF_BYTES, "little")


def _factors(count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """One random odd number a place, the same in every process."""
    if count > len(_made[0]):
        size = max(count, 2 * len(_made[0]))
        _made[0] = np.random.default_rng(5).integers(0, 1 << 64, size, np.uint64) | np.uint64(1)
    return _made[0][:count]


_made = [np.empty(0, np.uint64)]
