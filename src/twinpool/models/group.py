"""Sums over the ranks of one model, added in one fixed order."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from twinpool.models.shard import Share

# Its process groups are not in torch's type hints.
dist: Any = torch.distributed
TIMEOUT_S = 120.0  # of one sum: the other ranks are at most a step behind
_LOCAL = "127.0.0.1"

# Group.rms: (x, eps) -> root mean square of a token.
Rms = Callable[[torch.Tensor, float], torch.Tensor]
# Group.total: what this rank adds, [T, features] -> the sum of all ranks'.
Total = Callable[[torch.Tensor], torch.Tensor]
# A module's forward: (x, ..., residual) -> residual, to which it has added in place.
Adds = Callable[..., torch.Tensor]


class Group:
    """The ranks that hold one model, this one among them. All make the same calls in the same order."""

    def __init__(self, share: Share, process_group: Any) -> None:
        self.share = share
        self._group = process_group

    @staticmethod
    def join(share: Share, *, meeting: Path, device: str) -> Group:
        """Meet the others over a file that is not there yet; waits for them.

        gloo on the CPU, NCCL on CUDA. The process's default group is left to the caller. Raises RuntimeError when they do not
        come.
        """
        store = dist.FileStore(str(meeting), share.ranks)
        timeout = timedelta(seconds=TIMEOUT_S)
        if device != "cpu":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            return Group(share, dist.ProcessGroupNCCL(store, share.rank, share.ranks, nccl))
        options = dist.ProcessGroupGloo._Options()
        # Ranks are processes of one machine, whose own name need not lead anywhere.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOCAL)]
        options._timeout = timeout
        return Group(share, dist.ProcessGroupGloo(store, share.rank, share.ranks, options))

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `part`, [T, features] and contiguous, in its dtype.

        Added in float32 from rank 0 on, so that no rank and no run has another sum. Raises RuntimeError when a rank is gone.
        """
        rows = len(part)
        parts = torch.empty((self.share.ranks * rows, *part.shape[1:]), dtype=part.dtype, device=part.device)
        self._group._allgather_base(parts, part).wait()
        first, *others = parts.split(rows)
        total: torch.Tensor = first.float()
        for other in others:
            total += other.float()
        return total.to(part.dtype)

    def rms(self, x: torch.Tensor, eps: float) -> torch.Tensor:
        """float32 [T, 1]: root of eps + the mean square of all ranks' columns of a token; x, this rank's, float32 [T, n].

        Columns that several ranks hold are held by equally many. Root and division are rounded exactly, wherever they stand in a
        tensor, and the sum of squares is taken in double.
        """
        squares = self.total(x.double().square().sum(-1, keepdim=True).float())
        return (squares / (self.share.ranks * x.shape[1]) + eps).sqrt()

    def summed(self, forward: Adds) -> Adds:
        """A module's forward whose addend is the sum over the ranks."""

        def run(x: torch.Tensor, *rest: Any) -> torch.Tensor:
            *step, residual = rest
            assert isinstance(residual, torch.Tensor)
            return residual.add_(self.total(forward(x, *step, torch.zeros_like(residual))))

        return run
