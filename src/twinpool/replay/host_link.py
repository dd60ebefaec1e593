"""How long copies between device and host memory make a step, in replay."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twinpool.step import HostCopy, Order, StoreCopy

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """One rank's way to the host. bytes_per_s: in each direction, the peak, which no calibration lowers.

    page_bytes, slot_bytes: of a page and a state. n_layers: a load comes layer by layer. one_way: both directions share it
    (unified memory). saves_beside: copies to the host run beside the forward; else before it, as twinpool's own engine does.
    """

    bytes_per_s: float
    page_bytes: int
    slot_bytes: int
    n_layers: int
    one_way: bool
    saves_beside: bool

    def step_s(self, forward_s: Seconds, orders: Iterable[Order]) -> Seconds:
        """Duration of a step (float64 [1]) whose forward alone takes so long.

        Saves run beside the forward or before it, and so does what is given to the disk, which leaves the device the same way. Of a load
        the first layer comes before the forward, and the others while it runs, so that it ends when the later of the two does.
        """
        copies = [order for order in orders if isinstance(order, HostCopy | StoreCopy)]
        if not copies:
            return forward_s
        saved_s = self._took_s(copies, to_host=True)
        loaded_s = self._took_s(copies, to_host=False)
        first_s = loaded_s / self.n_layers
        restored_s = first_s + np.maximum(forward_s, loaded_s - first_s)
        if not self.saves_beside:
            return saved_s + restored_s
        return np.maximum(restored_s, saved_s + loaded_s if self.one_way else saved_s)

    def _took_s(self, copies: Iterable[HostCopy | StoreCopy], *, to_host: bool) -> float:
        moved_bytes = sum(
            len(copy.pages) * self.page_bytes + bool(copy.slot) * self.slot_bytes
            for copy in copies
            if (isinstance(copy, StoreCopy) or copy.to_host) == to_host
        )
        return moved_bytes / self.bytes_per_s
