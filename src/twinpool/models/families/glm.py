"""GLM-5-Next (GLM-5.3-Flash), the text part: Kimi Delta Attention or attention over a latent, mixed into several streams."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import nn

from twinpool.errors import ModelError
from twinpool.models.attention.index_layer import adopt_index
from twinpool.models.attention.latent_layer import adopt_latent
from twinpool.models.blocks import Linear, Mlp, Moe, RmsNorm, adopt_mlp, adopt_norm, make_experts, make_router
from twinpool.models.bound import Step
from twinpool.models.families.base import Decoder, Parts, Source
from twinpool.models.families.kimi import CONVOLUTIONS, FORGET_GATE
from twinpool.models.group import Adds
from twinpool.models.kda.layer import adopt_kda
from twinpool.models.kda.sharding import delta_sharding
from twinpool.models.rows import by_token


class OpenStreams(nn.Module):
    """The embeddings as `count` equal streams: [T, hidden_size] -> [T, count, hidden_size]."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """A copy for each stream."""
        del step
        return hidden[:, None].repeat(1, self.count, 1)

    def over_ranks(self, summed: Callable[[Adds], Adds]) -> None:
        """Every rank has all streams."""


class CloseStreams(nn.Module):
    """norm(mean of the streams): [T, streams, hidden_size] -> [T, hidden_size]."""

    def __init__(self, norm: RmsNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Streams are added in their order."""
        total = _sum(streams.float(), 1) / streams.shape[1]
        return self.norm.forward(total.to(streams.dtype))


class Connection(nn.Module):
    """What a layer reads from the streams, and how its output and the streams make the next ones.

    Weights of a token come from all its streams at once: for each stream one to read it (pre) and one to write it (post), and a
    matrix [streams, streams] that mixes them, made doubly stochastic by `rounds` of dividing by its sums (Sinkhorn-Knopp).
    Source: transformers' Glm5NextTextHyperConnection.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.streams, self.rounds, self.eps = module.hc_mult, module.hc_sinkhorn_iters, module.hc_eps
        self.linear = Linear([module.fn.float()])
        self.norm = RmsNorm(torch.ones(self.linear.k, device=module.fn.device), module.input_norm.eps)
        sizes = torch.tensor([self.streams, self.streams, self.streams**2], device=module.fn.device)
        self.scale, self.base = module.scale.float().repeat_interleave(sizes), module.base.float()

    def read(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(what the layer gets [T, hidden_size], post [T, streams, 1], mix [T, streams, streams]); streams [T, streams, hidden_size]."""
        wide, n = streams.float(), self.streams
        logits = self.linear.forward(self.norm.forward(wide.flatten(1))) * self.scale + self.base
        pre, post, mix = by_token(self._open, logits).split([n, n, n * n], -1)
        mix = mix.unflatten(-1, (n, n))
        mix = mix / _sum(mix, -1)[..., None] + self.eps
        mix = mix / (_sum(mix, -2)[:, None] + self.eps)
        for _ in range(self.rounds - 1):
            mix = mix / (_sum(mix, -1)[..., None] + self.eps)
            mix = mix / (_sum(mix, -2)[:, None] + self.eps)
        collapsed = _sum((pre + self.eps)[..., None] * wide, 1).to(streams.dtype)
        return collapsed, 2.0 * post[..., None], mix

    def write(self, streams: torch.Tensor, out: torch.Tensor, post: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
        """[T, streams, hidden_size]: the layer's out [T, hidden_size] and the old streams, by the weights that `read` gave."""
        mixed = _sum(mix[..., None] * streams.float()[:, :, None], 1)
        return (post * out.float()[:, None] + mixed).to(streams.dtype)

    def _open(self, logits: torch.Tensor) -> torch.Tensor:
        """Sigmoids of one token's reading and writing weights, exponentials of its mixing ones over each row's largest."""
        plain, mix = logits[: 2 * self.streams], logits[2 * self.streams :].unflatten(0, (self.streams, -1))
        return torch.cat([torch.sigmoid(plain), torch.exp(mix - mix.amax(-1, keepdim=True)).flatten()])


class StreamLayer(nn.Module):
    """Streams through mixer(norm(x)), then through mlp(second_norm(x)), each behind its own connection."""

    def __init__(
        self,
        *,
        connection: Connection,
        norm: RmsNorm,
        mixer: nn.Module,
        second_connection: Connection,
        second_norm: RmsNorm,
        mlp: nn.Module,
    ) -> None:
        super().__init__()
        self.connection, self.norm, self.mixer = connection, norm, mixer
        self.second_connection, self.second_norm, self.mlp = second_connection, second_norm, mlp
        self._mixer, self._mlp = mixer.forward, mlp.forward

    def over_ranks(self, summed: Callable[[Adds], Adds]) -> None:
        """As PreNormLayer's."""
        self._mixer, self._mlp = summed(self._mixer), summed(self._mlp)

    def forward(self, streams: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, streams, hidden_size] of such."""
        x, post, mix = self.connection.read(streams)
        out = self._mixer(self.norm.forward(x), step, torch.zeros_like(x))
        streams = self.connection.write(streams, out, post, mix)
        x, post, mix = self.second_connection.read(streams)
        out = self._mlp(self.second_norm.forward(x), torch.zeros_like(x))
        return self.second_connection.write(streams, out, post, mix)


def check(config: Any) -> None:
    """Raise ModelError for an index that leaves out the newest tokens, chooses nothing else, or is that of another layer."""
    if not config.index_kpool_always_select_tail:
        raise ModelError("config.json says index_kpool_always_select_tail=False; only True runs here.")
    if config.index_topk < config.index_kpool:
        raise ModelError(
            f"config.json says index_topk={config.index_topk} tokens, less than a pool of index_kpool={config.index_kpool}; "
            "at least one pool runs here."
        )
    kinds = zip(config.layer_types, config.indexer_types, strict=False)
    shared = [number for number, kind in enumerate(kinds) if kind == ("indexed_attention", "shared")]
    if shared:
        raise ModelError(
            f"config.json says indexer_types[{shared[0]}]='shared', an index of another layer; only 'full' runs here, in attention layers."
        )


def build(parts: Parts) -> Decoder:
    """Our layers with the model's weights, in its order."""
    layers = [_layer(parts, block) for block in parts.base.layers]
    return Decoder(layers=(OpenStreams(parts.config.hc_mult), *layers), norm=CloseStreams(adopt_norm(parts.base.norm)))


def _layer(parts: Parts, block: Any) -> StreamLayer:
    mixer: nn.Module
    if block.block_type == "linear_attention":
        bound = block.self_attn.forget_gate.safe_gate_lower_bound
        mixer = adopt_kda(block.self_attn, layer=next(parts.linear), lower_bound=bound)
    else:
        layer = next(parts.attention)
        index = adopt_index(block.self_attn.indexer, layer=layer, window=next(parts.linear))
        mixer = adopt_latent(block.self_attn, layer=layer, table=parts.table, index=index)
    return StreamLayer(
        connection=Connection(block.attn_hc),
        norm=adopt_norm(block.input_layernorm),
        mixer=mixer,
        second_connection=Connection(block.ffn_hc),
        second_norm=adopt_norm(block.post_attention_layernorm),
        mlp=_feed_forward(block.mlp, parts.config.swiglu_limit),
    )


def _feed_forward(module: Any, limit: float) -> Mlp | Moe:
    if not hasattr(module, "experts"):
        return adopt_mlp(module, limit=limit)
    experts = make_experts(module.experts, limit=limit)
    return Moe(router=make_router(module.gate), experts=experts, shared=adopt_mlp(module.shared_experts, limit=limit))


def _sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over a short axis, one after another: torch may add in another order at the end of a tensor than in its middle."""
    return reduce(torch.add, x.unbind(dim))


SOURCES = {
    "Glm5NextForConditionalGeneration": Source(
        module="glm5_next",
        config="Glm5NextTextConfig",
        model="Glm5NextTextModel",
        build=build,
        check=check,
        ignored=("mtp.", "model.visual."),
        renamed={
            r"^model\.language_model\.": "model.",
            r"\.hc_(attn|ffn)_(fn|base|scale)$": r".\1_hc.\2",
            **FORGET_GATE,
        },
        joined=CONVOLUTIONS,
        sharding=delta_sharding(),
        rotary=None,
    )
}
