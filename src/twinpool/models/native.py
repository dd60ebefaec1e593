"""The compiled kernels, if they were built. Layers ask `use(tensor)`; without them (or off the CPU) they run the torch path.

The torch path is correct on any device; only the kernels promise the same bits whatever the batch, the cut or the thread count.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    from twinpool import _native as kernels
except ImportError:  # no compiler when the package was installed
    kernels: Any = None  # type: ignore[no-redef]

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def available() -> bool:
    """Whether the compiled kernels were built."""
    return kernels is not None


def use(tensor: torch.Tensor) -> bool:
    """Whether this tensor is computed by the compiled kernels."""
    return kernels is not None and tensor.device.type == "cpu" and tensor.dtype in DTYPE_CODES


def set_threads(n_threads: int) -> None:
    """Threads of the compiled kernels (no effect without them)."""
    if kernels is not None:
        kernels.set_threads(n_threads)
