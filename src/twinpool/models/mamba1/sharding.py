"""How ranks share a Mamba1 layer: by channels; dt, B and C are sums over all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twinpool.models.shard import COLUMNS, ROWS, Cut, cut, on_first


def mamba1_cuts(module: str, *, channels: Callable[[Any], int]) -> dict[str, Cut]:
    """Cuts of a layer whose names have `module` (a regular expression) before those of its parts; channels: of the whole model."""
    return {
        # x | z
        rf"{module}\.in_proj\.(weight|bias)": cut(0, lambda config: ((channels(config), 1),) * 2),
        rf"{module}\.(conv1d\.(weight|bias)|dt_proj\.(weight|bias)|A_log|D)": ROWS,
        rf"{module}\.(x_proj|out_proj)\.weight": COLUMNS,
        rf"{module}\.out_proj\.bias": on_first,
    }
