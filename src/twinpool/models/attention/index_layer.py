"""The sparse index of an attention layer in place of transformers' own, holding the same parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from twinpool.models.attention.index import Chosen, IndexShape, choose, keep_pools
from twinpool.models.blocks import Linear, adopt_linear
from twinpool.models.bound import Step
from twinpool.models.rows import by_token


class SparseIndex(nn.Module):
    """Which tokens a layer's queries attend to.

    in_proj is key | gate | weights of the heads; query_up comes after the layer's own narrow query; places: float32 [P, dim], added
    to the gates of a pool. layer and window number the layer's pages and its window in the slots.
    """

    def __init__(
        self,
        shape: IndexShape,
        *,
        in_proj: Linear,
        query_up: Linear,
        key_norm: nn.LayerNorm,
        places: torch.Tensor,
        layer: int,
        window: int,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.in_proj = in_proj
        self.query_up = query_up
        self.key_norm = key_norm
        self.places = places
        self.layer, self.window = layer, window

    def forward(self, x: torch.Tensor, narrow: torch.Tensor, step: Step) -> Chosen | None:
        """What each token of the step attends to; None: each to all tokens up to its own.

        x (normed) [T, hidden_size], narrow [T, q_lora_rank]: what the layer's queries are made of. Pools that these tokens fill are
        in their pages afterwards.
        """
        shape = self.shape
        key, gate, weights = self.in_proj.forward(x).split([shape.dim, shape.dim, shape.heads], -1)
        rows = torch.cat([by_token(self._normed, key), gate], -1)
        keep_pools(shape, step, layer=self.layer, window=self.window, rows=rows, places=self.places)
        late = torch.from_numpy(step.batch.positions >= shape.whole_tokens).to(x.device)
        if not late.any():
            return None
        queries = self.query_up.forward(narrow[late]).float().unflatten(-1, (shape.heads, shape.dim))
        weights = weights[late].float() * shape.heads**-0.5
        return choose(shape, step, layer=self.layer, queries=queries, weights=weights, late=late)

    def _normed(self, key: torch.Tensor) -> torch.Tensor:
        norm = self.key_norm
        return F.layer_norm(key, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def adopt_index(module: Any, *, layer: int, window: int) -> SparseIndex:
    """Ours with the weights of a GLM-5-Next indexer; layer, window: numbers of its attention layer and of its state."""
    shape = IndexShape(
        heads=module.n_heads,
        dim=module.head_dim,
        pool_tokens=module.index_kpool,
        chosen_tokens=module.index_topk,
    )
    return SparseIndex(
        shape,
        in_proj=Linear([module.wk.weight, module.index_kpool_compress_gate, module.weights_proj.weight]),
        query_up=adopt_linear(module.wq_b),
        key_norm=module.k_norm,
        places=module.index_kpool_compress_ape.detach().float(),
        layer=layer,
        window=window,
    )
