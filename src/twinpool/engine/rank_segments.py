"""Segments of the disk tier with several ranks: a file holds the bytes of all of them, so that all find a prefix there or none does.

Of each page, and of the state, come the bytes of rank 0, then those of rank 1, and so on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from twinpool.step import HostFill, Order, StoreCopy

Store = Callable[[StoreCopy, memoryview, memoryview], None]
Bytes = bytes | memoryview


@dataclass(frozen=True, slots=True)
class StorePart:
    """What one rank gives for a StoreCopy: kv, its pages one after another, and its state."""

    kv: Bytes
    state: Bytes


class RankSegments:
    """Puts together what the ranks give for each StoreCopy, and passes it on in the order of the orders. From any thread."""

    def __init__(self, ranks: int, put: Store) -> None:
        self._put = put
        self._orders: deque[StoreCopy] = deque()
        # Of each rank, in the order of the orders.
        self._parts: list[deque[StorePart]] = [deque() for _ in range(ranks)]
        self._lock = threading.Lock()

    def ours(self, order: StoreCopy, kv: memoryview, state: memoryview) -> None:
        """An order, with rank 0's part."""
        with self._lock:
            self._orders.append(order)
            self._add(0, StorePart(kv, state))

    def theirs(self, rank: int, part: StorePart) -> None:
        """Another rank's part of the order that follows the one of its last part."""
        with self._lock:
            self._add(rank, part)

    def _add(self, rank: int, part: StorePart) -> None:
        self._parts[rank].append(part)
        while all(self._parts):
            parts, order = [of_rank.popleft() for of_rank in self._parts], self._orders.popleft()
            kv = np.stack([_rows(part.kv, len(order.pages)) for part in parts], axis=1)
            self._put(order, kv.reshape(-1).data, memoryview(b"".join(part.state for part in parts)))


def orders_of_ranks(orders: tuple[Order, ...], *, ranks: int, page_bytes: int) -> list[tuple[Order, ...]]:
    """What each rank has to do: the same, but of bytes from the disk its own. page_bytes: of one rank."""
    if not any(isinstance(order, HostFill) for order in orders):
        return [orders] * ranks
    shares = [_shares(order, ranks, page_bytes) if isinstance(order, HostFill) else [order] * ranks for order in orders]
    return [tuple(share) for share in zip(*shares, strict=True)]


def _shares(fill: HostFill, ranks: int, page_bytes: int) -> list[HostFill]:
    n_pages = len(fill.host_pages)
    kv = np.frombuffer(fill.kv[: n_pages * ranks * page_bytes], np.uint8).reshape(n_pages, ranks, page_bytes)
    states = np.frombuffer(fill.state, np.uint8).reshape(ranks, -1)
    return [replace(fill, kv=kv[:, rank].tobytes(), state=states[rank].tobytes()) for rank in range(ranks)]


def _rows(kv: Bytes, n_pages: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(kv, np.uint8).reshape(n_pages, len(kv) // n_pages)
