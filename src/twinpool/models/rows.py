"""A linear mixer over the rows of a step, one after another: states in and out of their slots, checkpoints on the way."""

from __future__ import annotations

from collections.abc import Callable

import torch

from twinpool.models.bound import Step

# (inputs of consecutive tokens of one sequence [n, ...], its conv window, its temporal state) -> outputs [n, ...]; the two states,
# views of a slot, are brought forward in place.
RowFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def by_rows(step: Step, layer: int, x: torch.Tensor, run: RowFunction, *, window: bool = True) -> torch.Tensor:
    """[T, ...]: `run` over each row of x [T, ...], cut where a checkpoint is taken; states are those of linear layer `layer`.

    window: False if the convolution has walked the rows already, so that windows at checkpoints are not touched.
    """
    batch, views = step.batch, step.memory.states[layer].views
    pieces = []
    for row, slot in enumerate(batch.slots.tolist()):
        begin, end = int(batch.row_offsets[row]), int(batch.row_offsets[row + 1])
        mark = begin + int(batch.checkpoint_offsets[row])
        for first, last in ((begin, mark), (mark, end)):
            if first < last:
                pieces.append(run(x[first:last], views.conv[slot], views.ssm[slot]))
            if last == mark > begin:
                copy = int(batch.checkpoint_slots[row])
                if window:
                    views.conv[copy].copy_(views.conv[slot])
                views.ssm[copy].copy_(views.ssm[slot])
    return torch.cat(pieces)


def by_token(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """`function` of each token by itself, stacked; inputs [T, ...].

    torch's exp, silu and the like may round differently at the end of a tensor than in its middle, so what a token gets would
    depend on how many others are computed with it. One by one, every token is a tensor of the same shape.
    """
    return torch.stack([function(*token) for token in zip(*inputs, strict=True)])
