"""OLMo-Hybrid: Gated DeltaNet with projections of its own, or attention whose queries and keys are normed whole; then an MLP.

Around attention the norms come after the parts, around Gated DeltaNet before them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from twinpool.models.attention.layer import AttentionMixer, adopt_attention
from twinpool.models.attention.ops import attend
from twinpool.models.blocks import Linear, Mlp, PreNormLayer, RmsNorm, adopt_linear, adopt_mlp, adopt_norm
from twinpool.models.bound import Step
from twinpool.models.families.base import Decoder, Parts, Source
from twinpool.models.gdn.layer import GdnMixer, adopt_kernel
from twinpool.models.gdn.sharding import qkv_heads
from twinpool.models.group import Adds, Rms
from twinpool.models.shard import ATTENTION, COLUMNS, ROWS, Sharding, cut, kv_rows


class NormedAttention(nn.Module):
    """An attention mixer with a norm over all heads' queries together, and one over all keys."""

    def __init__(self, mixer: AttentionMixer, query_norm: RmsNorm, key_norm: RmsNorm) -> None:
        super().__init__()
        self.mixer, self.query_norm, self.key_norm = mixer, query_norm, key_norm
        self._columns = len(query_norm.scale), len(query_norm.scale) + len(key_norm.scale)
        self._norms = query_norm.forward, key_norm.forward

    def norm_over_ranks(self, rms: Rms) -> None:
        """The norms are over the heads of all ranks."""

        def over_ranks(norm: RmsNorm, x: torch.Tensor) -> torch.Tensor:
            wide = x.float()
            return (wide / rms(wide, norm.eps) * norm.scale).to(x.dtype)

        self._norms = partial(over_ranks, self.query_norm), partial(over_ranks, self.key_norm)

    def forward(self, x: torch.Tensor, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        """x, hidden: [T, hidden_size] of the model's dtype; returns hidden, changed in place."""
        proj, (keys, values), (norm_queries, norm_keys) = self.mixer.qkv.forward(x), self._columns, self._norms
        proj[:, :keys] = norm_queries(proj[:, :keys])
        proj[:, keys:values] = norm_keys(proj[:, keys:values])
        return self.mixer.o_proj.forward(attend(self.mixer.kernel, step, self.mixer.layer, proj), hidden)


class PostNormLayer(nn.Module):
    """hidden += norm(attention(hidden)), then hidden += second_norm(mlp(hidden))."""

    def __init__(self, *, attention: NormedAttention, norm: RmsNorm, mlp: Mlp, second_norm: RmsNorm) -> None:
        super().__init__()
        self.attention, self.norm, self.mlp, self.second_norm = attention, norm, mlp, second_norm
        self._attention, self._mlp = attention.forward, mlp.forward

    def over_ranks(self, summed: Callable[[Adds], Adds]) -> None:
        """As PreNormLayer's."""
        self._attention, self._mlp = summed(self._attention), summed(self._mlp)

    def forward(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """hidden [T, hidden_size], changed in place and returned."""
        hidden.add_(self.norm.forward(self._attention(hidden, step, torch.zeros_like(hidden))))
        return hidden.add_(self.second_norm.forward(self._mlp(hidden, torch.zeros_like(hidden))))


def build(parts: Parts) -> Decoder:
    """Our layers with the model's weights, in its order."""
    return Decoder(layers=tuple(_layer(parts, block) for block in parts.base.layers), norm=adopt_norm(parts.base.norm))


def _layer(parts: Parts, block: Any) -> PreNormLayer | PostNormLayer:
    mlp = adopt_mlp(block.mlp)
    if hasattr(block, "linear_attn"):
        return PreNormLayer(
            norm=adopt_norm(block.input_layernorm),
            mixer=_delta_net(block.linear_attn, layer=next(parts.linear)),
            second_norm=adopt_norm(block.post_attention_layernorm),
            mlp=mlp,
        )
    module = block.self_attn
    mixer = adopt_attention(module, layer=next(parts.attention), table=parts.table, out_proj=module.o_proj)
    return PostNormLayer(
        attention=NormedAttention(mixer, adopt_norm(module.q_norm), adopt_norm(module.k_norm)),
        norm=adopt_norm(block.post_attention_layernorm),
        mlp=mlp,
        second_norm=adopt_norm(block.post_feedforward_layernorm),
    )


def _delta_net(module: Any, *, layer: int) -> GdnMixer:
    norm = module.o_norm
    beta_scale = 2.0 if module.allow_neg_eigval else 1.0
    kernel = adopt_kernel(module, norm=norm, eps=norm.variance_epsilon, beta_scale=beta_scale)
    inputs = (module.q_proj, module.k_proj, module.v_proj, module.g_proj, module.b_proj, module.a_proj)
    return GdnMixer(
        in_proj=Linear([p.weight for p in inputs]), kernel=kernel, out_proj=adopt_linear(module.o_proj), layer=layer
    )


SHARDING = Sharding(
    divided=("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads", "intermediate_size"),
    head_dim=lambda config: getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    cuts={
        r"\.linear_attn\.([qkvgba]_proj\.weight|A_log|dt_bias)": ROWS,
        r"\.linear_attn\.conv1d\.weight": cut(0, qkv_heads),
        **ATTENTION,
        r"\.q_norm\.weight": ROWS,
        r"\.k_norm\.weight": cut(0, kv_rows),
        r"\.(gate|up)_proj\.weight": ROWS,
        r"\.down_proj\.weight": COLUMNS,
    },
    joint_norm=lambda config: True,
)
SOURCES = {
    "OlmoHybridForCausalLM": Source(
        module="olmo_hybrid",
        config="OlmoHybridConfig",
        model="OlmoHybridForCausalLM",
        build=build,
        sharding=SHARDING,
        # The names of checkpoints, where each convolution is stored by itself.
        renamed={
            r"\.attention_layer_norm\.": ".input_layernorm.",
            r"\.feedforward_layer_norm\.": ".post_attention_layernorm.",
        },
        joined={
            ".linear_attn.conv1d.weight": tuple(f".linear_attn.{name}_conv1d.weight" for name in "qkv"),
        },
    ),
}
