"""How many prompt tokens of a request go into this step."""

from __future__ import annotations

from twinpool.units import round_down


def chunk_end(*, start: int, target: int, budget_tokens: int, page_size: int, grid_tokens: int) -> int:
    """Where to cut a prefill that is at `start` and wants to reach `target` with `budget_tokens` left: a length, `start` for none.

    A cut lands on an absolute multiple of the checkpoint grid when that makes progress, so that later checkpoints stay on the
    grid (the reference cuts at pages only, and drifts off it: reference 4.5), else on a page border.
    """
    end = start + budget_tokens
    if end >= target:
        return target
    for multiple in (grid_tokens, page_size):
        cut = round_down(end, multiple)
        if cut > start:
            return cut
    return start
