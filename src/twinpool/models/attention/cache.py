"""Keys and values as the cache keeps them: the one rule by which torch rounds them, and whether a device can keep them so."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max


def kept(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in the cache's dtype: to nearest, ties to even.

    In fp8 whatever is beyond ±448 becomes ±448, infinities too, and NaN stays NaN, as the kernels have it (src/native/e4m3.h). What
    a plain cast makes of such values differs from device to device.
    """
    return (x.clamp(-_LARGEST, _LARGEST) if dtype == FP8 else x).to(dtype)


def can_keep(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch writes scattered tokens in that dtype on `device`, and reads back what it wrote: tried with a few numbers."""
    numbers = torch.tensor([0.0, -1.5, 448.0, 1000.0])
    try:
        pages = torch.zeros(8, 1, dtype=dtype, device=device)
        places = torch.tensor([5, 1, 7, 2], device=device)
        pages[places] = kept(numbers[:, None].to(device), dtype)
        read = pages[places].float().cpu()
    except (RuntimeError, TypeError):  # torch's words for a dtype that a device, or an operator on it, does not have
        return False
    return torch.equal(read[:3, 0], numbers[:3]) and read[3].item() == (_LARGEST if dtype == FP8 else numbers[3])
