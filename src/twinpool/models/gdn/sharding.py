"""How ranks share what Gated DeltaNet convolves: q | k | v, each by its heads."""

from __future__ import annotations

from typing import Any


def qkv_heads(config: Any) -> tuple[tuple[int, int], ...]:
    """Pieces of q | k | v: (heads, elements of one), by the linear_* keys."""
    keys = (config.linear_num_key_heads, config.linear_key_head_dim)
    return keys, keys, (config.linear_num_value_heads, config.linear_value_head_dim)
