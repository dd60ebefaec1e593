"""The short convolution in slow, readable float32: the truth that ops are tested against, and what runs where nothing is compiled."""

from __future__ import annotations

import torch

from twinpool.models.gdn.reference import causal_conv


def short_conv(
    x: torch.Tensor, window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [T, C], the new window [C, kernel - 1]) of x [T, C] after `window`; weight [C, kernel], bias [C]; no activation."""
    y, new = causal_conv(x, window, weight)
    return y + bias, new
