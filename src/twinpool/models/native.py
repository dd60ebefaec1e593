"""The compiled kernels, where there are any: `native` is the module or None, and CODES its names of dtypes."""

from __future__ import annotations

from typing import Any

import torch

native: Any
try:
    from twinpool import _native as native  # type: ignore[no-redef]  # declared above for type checkers
except ImportError:  # no compiler when the package was installed: torch does the work
    native = None

CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}


def use_native(device: torch.device) -> bool:
    """Whether modules on `device` run the compiled kernels."""
    return native is not None and device.type == "cpu"


def set_threads(n_threads: int) -> None:
    """Threads that share a kernel's work (the caller is one of them); torch's own where nothing is compiled."""
    if native is None:
        torch.set_num_threads(n_threads)
    else:
        native.set_threads(n_threads)
