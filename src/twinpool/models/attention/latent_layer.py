"""The mixer of attention over a latent that takes the place of transformers' own, holding the same parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from twinpool.errors import ModelError
from twinpool.models.attention.index import attend_chosen
from twinpool.models.attention.index_layer import SparseIndex
from twinpool.models.attention.latent import LatentKernel, LatentShape, attend, rotate_pairs
from twinpool.models.blocks import Linear, RmsNorm, adopt_linear, adopt_norm
from twinpool.models.bound import Step
from twinpool.models.rows import by_token


class LatentMixer(nn.Module):
    """hidden += o_proj(attention(q, latent) * sigmoid(gate)), the gate, one a head, where there is one.

    in_proj is q | latent | shared key | gate; query_norm and query_up follow q where it comes through a narrow matrix. keys and
    values: for each head a linear from its query to a latent, and one from a latent to its value. table: float32 [positions,
    rotary], cos then sin, [positions, 0] for shared keys that are not rotated. index: chooses the tokens that late queries attend to,
    from their narrow form.
    """

    def __init__(
        self,
        *,
        in_proj: Linear,
        query_norm: RmsNorm | None,
        query_up: Linear | None,
        latent_norm: RmsNorm,
        keys: Sequence[Linear],
        values: Sequence[Linear],
        kernel: LatentKernel,
        table: torch.Tensor,
        o_proj: Linear,
        layer: int,
        index: SparseIndex | None = None,
    ) -> None:
        super().__init__()
        self.in_proj = in_proj
        self.query_norm = query_norm
        self.query_up = query_up
        self.latent_norm = latent_norm
        self.keys = nn.ModuleList(keys)
        self.values = nn.ModuleList(values)
        self.kernel = kernel
        self.table = table
        self.o_proj = o_proj
        self.layer = layer
        self.index = index
        shape = kernel.shape
        query = shape.heads * shape.key_dim if query_up is None else query_up.k
        sizes = [query, shape.rank, shape.rotary]
        self._sizes = [*sizes, in_proj.n - sum(sizes)]
        self._to_latent, self._from_latent = [k.forward for k in keys], [v.forward for v in values]

    def forward(self, x: torch.Tensor, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        """x (normed), hidden: [T, hidden_size] of the model's dtype; returns hidden, changed in place."""
        q, latent, shared, gate = self.in_proj.forward(x).split(self._sizes, -1)
        chosen = None
        if self.query_norm is not None and self.query_up is not None:
            narrow = self.query_norm.forward(q)
            chosen = None if self.index is None else self.index.forward(x, narrow, step)
            q = self.query_up.forward(narrow)
        q = q.unflatten(-1, (self.kernel.shape.heads, self.kernel.shape.key_dim))
        plain, turned = q.split([self.kernel.shape.plain, self.kernel.shape.rotary], -1)
        shared = shared[:, None, :]
        if self.table.shape[1]:
            cos_sin = self.table[torch.from_numpy(step.batch.positions).to(x.device)]
            turned, shared = (rotate_pairs(part.float(), cos_sin).to(x.dtype) for part in (turned, shared))
        row = torch.cat([self.latent_norm.forward(latent), shared[:, 0]], -1)
        queries = self._absorb(plain, turned)
        if chosen is None:
            out = attend(self.kernel, step, self.layer, queries, row)
        else:
            out = attend_chosen(self.kernel, step, self.layer, queries, row, chosen)
        return self.o_proj.forward(self._expand(out, gate), hidden)

    def _absorb(self, plain: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
        """[T, heads, width]: each head's query as it meets latents | its part for the shared key."""
        shape = self.kernel.shape
        queries = torch.zeros((len(plain), shape.heads, shape.width), dtype=plain.dtype, device=plain.device)
        for head, to_latent in enumerate(self._to_latent):
            to_latent(plain[:, head], queries[:, head, : shape.rank])
        queries[..., shape.rank :] = turned
        return queries

    def _expand(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """[T, heads value_dim]: each head's value of its latent, gated."""
        shape = self.kernel.shape
        mixed = torch.zeros((len(out), shape.heads, shape.value_dim), dtype=out.dtype, device=out.device)
        for head, from_latent in enumerate(self._from_latent):
            from_latent(out[:, head, : shape.rank], mixed[:, head])
        if gate.shape[-1]:
            mixed *= by_token(torch.sigmoid, gate.float()).to(out.dtype)[..., None]
        return mixed.flatten(1)


def adopt_latent(module: Any, *, layer: int, table: torch.Tensor, index: SparseIndex | None = None) -> LatentMixer:
    """Our mixer with the weights of a Kimi, GLM-5-Next or Ling-3 attention; g_proj, where it is, makes the gates.

    `layer` counts attention layers; table: float32 [positions, rotary] or [positions, 0]. Raises ModelError for keys that are shared
    whole, of which no latent is left, and for a table of another width than the shared keys'.
    """
    shape = LatentShape(
        heads=module.num_heads,
        rank=module.kv_lora_rank,
        plain=module.qk_nope_head_dim,
        rotary=module.qk_rope_head_dim,
        value_dim=module.v_head_dim,
        scale=module.scaling,
    )
    if not shape.plain:
        raise ModelError("config.json says qk_nope_head_dim=0; it must be at least 1.")
    if table.shape[1] not in (0, shape.rotary):
        raise ModelError(
            f"config.json's rope_parameters turn {table.shape[1]} of the {shape.rotary} elements of qk_rope_head_dim; here all of them "
            "turn: leave partial_rotary_factor out."
        )
    narrow = module.q_lora_rank is not None
    inputs = [module.q_a_proj if narrow else module.q_proj, module.kv_a_proj_with_mqa]
    if hasattr(module, "g_proj"):
        inputs.append(module.g_proj)
    weight = inputs[0].weight
    heads = module.kv_b_proj.weight.unflatten(0, (shape.heads, shape.plain + shape.value_dim))
    return LatentMixer(
        in_proj=_side_by_side(inputs),
        query_norm=adopt_norm(module.q_a_layernorm) if narrow else None,
        query_up=adopt_linear(module.q_b_proj) if narrow else None,
        latent_norm=adopt_norm(module.kv_a_layernorm),
        keys=[Linear([head[: shape.plain].T]) for head in heads],
        values=[Linear([head[shape.plain :]]) for head in heads],
        kernel=LatentKernel(shape, dtype=weight.dtype, device=weight.device),
        table=table,
        o_proj=adopt_linear(module.o_proj),
        layer=layer,
        index=index,
    )


def _side_by_side(modules: Sequence[Any]) -> Linear:
    """One linear of several; biases are zero where only others have one."""
    weights = [module.weight for module in modules]
    if all(module.bias is None for module in modules):
        return Linear(weights)
    return Linear(
        weights, [w.new_zeros(len(w)) if m.bias is None else m.bias for m, w in zip(modules, weights, strict=True)]
    )
