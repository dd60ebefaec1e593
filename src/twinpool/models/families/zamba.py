"""Zamba2: Mamba2 layers, some with attention and an MLP before them whose weights several layers share, each with adapters.

The shared blocks see the hidden state and the embedding side by side, so that is what goes from layer to layer here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from twinpool.errors import ModelError
from twinpool.models.attention.ops import AttentionKernel, AttentionShape, attend
from twinpool.models.blocks import Linear, RmsNorm, adopt_linear, adopt_linears, adopt_norm
from twinpool.models.bound import Step
from twinpool.models.families.base import Decoder, Parts, Source
from twinpool.models.group import Adds
from twinpool.models.mamba2.layer import Mamba2Mixer, adopt_mamba2
from twinpool.models.mamba2.sharding import Mamba2Keys, mamba2_cuts, narrow_inner
from twinpool.models.rows import by_token
from twinpool.models.shard import ATTENTION, COLUMNS, ROWS, Sharding, cut, kv_rows, on_first


class Doubled(nn.Module):
    """The layer before the first: [T, hidden_size] to hidden state and embedding, alike at first, [T, 2 hidden_size]."""

    def over_ranks(self, summed: Callable[[Adds], Adds]) -> None:
        """Every rank has the whole of it."""

    def forward(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, 2 hidden_size] of hidden [T, hidden_size]."""
        del step
        return torch.cat([hidden, hidden], -1)


class LeftNorm(RmsNorm):
    """The norm of the left columns, as many as there are weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] of x [T, 2 hidden_size]."""
        return super().forward(x[:, : len(self.scale)])


class Adapter(nn.Module):
    """Low-rank terms of projections that lie side by side: columns i += up_i(down_i(x))."""

    def __init__(self, pairs: Sequence[Any]) -> None:
        super().__init__()
        self.down = adopt_linears(*(pair[0] for pair in pairs))
        self.ups = nn.ModuleList([adopt_linear(pair[1]) for pair in pairs])
        ends = list(accumulate(pair[1].weight.shape[0] for pair in pairs))
        self.columns = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Change out [T, all columns] in place; x [T, inputs]."""
        inner = self.down.forward(x).chunk(len(self.ups), -1)
        for up, part, columns in zip(self.ups, inner, self.columns, strict=True):
            up(part, out[:, columns])


class SharedBlock(nn.Module):
    """mlp(second_norm(attention(norm(hidden | embedding)))), nothing added on the way; weights of several layers."""

    def __init__(self, module: Any, table: torch.Tensor) -> None:
        super().__init__()
        attention, mlp, config = module.self_attn, module.feed_forward, module.self_attn.config
        self.norm, self.second_norm = adopt_norm(module.input_layernorm), adopt_norm(module.pre_ff_layernorm)
        self.qkv = adopt_linears(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o_proj = adopt_linear(attention.o_proj)
        self.gate_up, self.down = adopt_linear(mlp.gate_up_proj), adopt_linear(mlp.down_proj)
        shape = AttentionShape(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            dim=attention.head_dim,
            rotary=table.shape[1],
            scale=attention.scaling,
        )
        dtype = attention.q_proj.weight.dtype
        self.kernel = AttentionKernel(shape, query_scale=None, key_scale=None, table=table, dtype=dtype)
        self._attended: Callable[[torch.Tensor], torch.Tensor] = self.o_proj.forward
        self._transformed: Callable[[torch.Tensor], torch.Tensor] = self.down.forward

    def over_ranks(self, summed: Callable[[Adds], Adds]) -> None:
        """Sum what attention and MLP give over the ranks; every layer that uses the block may ask for it."""
        self._attended, self._transformed = (_added_to_nothing(summed, part) for part in (self.o_proj, self.down))

    def attend(self, hidden: torch.Tensor, step: Step, layer: int, adapter: Adapter | None) -> torch.Tensor:
        """[T, hidden_size]: attention over the cache of attention layer `layer`; hidden [T, 2 hidden_size]."""
        x = self.norm.forward(hidden)
        proj = self.qkv.forward(x)
        if adapter is not None:
            adapter.add_to(proj, x)
        return self._attended(attend(self.kernel, step, layer, proj))

    def transform(self, x: torch.Tensor, adapter: Adapter) -> torch.Tensor:
        """[T, hidden_size]: the MLP of the normed x [T, hidden_size]."""
        x = self.second_norm.forward(x)
        opened = self.gate_up.forward(x)
        adapter.add_to(opened, x)
        gate, up = opened.chunk(2, -1)
        return self._transformed(by_token(F.gelu, gate) * up)


class ZambaLayer(nn.Module):
    """hidden += mamba(norm(hidden)); the embedding beside it stays."""

    def __init__(self, norm: RmsNorm, mamba: Mamba2Mixer) -> None:
        super().__init__()
        self.norm, self.mamba = norm, mamba
        self._mamba = mamba.forward

    def over_ranks(self, summed: Callable[[Adds], Adds]) -> None:
        """As PreNormLayer's."""
        self._mamba = summed(self._mamba)

    def forward(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """hidden [T, 2 hidden_size], its left half changed in place; returned."""
        self._mix(hidden, hidden, step)
        return hidden

    def _mix(self, seen: torch.Tensor, hidden: torch.Tensor, step: Step) -> None:
        width = len(self.norm.scale)
        self._mamba(self.norm.forward(seen[:, :width]), step, hidden[:, :width])


class HybridLayer(ZambaLayer):
    """hidden += mamba(norm(hidden + linear(shared block))); layer: number among attention layers."""

    def __init__(
        self,
        norm: RmsNorm,
        mamba: Mamba2Mixer,
        *,
        shared: SharedBlock,
        linear: Linear,
        layer: int,
        attention_adapter: Adapter | None,
        mlp_adapter: Adapter,
    ) -> None:
        super().__init__(norm, mamba)
        self.shared, self.linear, self.layer = shared, linear, layer
        self.attention_adapter, self.mlp_adapter = attention_adapter, mlp_adapter

    def over_ranks(self, summed: Callable[[Adds], Adds]) -> None:
        """As PreNormLayer's, of the shared block too."""
        super().over_ranks(summed)
        self.shared.over_ranks(summed)

    def forward(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """hidden [T, 2 hidden_size], its left half changed in place; returned."""
        out = self.shared.attend(hidden, step, self.layer, self.attention_adapter)
        out = self.shared.transform(out, self.mlp_adapter)
        self._mix(self.linear.forward(out).add_(hidden[:, : out.shape[1]]), hidden, step)
        return hidden


def check(config: Any) -> None:
    """Raise ModelError for keys that transformers does not act on, or that contradict each other."""
    for key, value in {"use_long_context": False, "use_conv_bias": True}.items():
        if getattr(config, key) != value:
            raise ModelError(f"config.json says {key}={getattr(config, key)}; only {value} runs here.")
    hybrid = [number for number, kind in enumerate(config.layers_block_type) if kind == "hybrid"]
    if config.hybrid_layer_ids != hybrid or len(config.layers_block_type) != config.num_hidden_layers:
        raise ModelError(
            f"config.json says hybrid_layer_ids={config.hybrid_layer_ids} and num_hidden_layers={config.num_hidden_layers}; "
            f"layers_block_type has {len(config.layers_block_type)} layers, with hybrid ones at {hybrid}."
        )
    width, heads = 2 * config.hidden_size, config.num_attention_heads
    for key, value in {"attention_hidden_size": width, "attention_head_dim": width // heads}.items():
        if getattr(config, key) != value:
            raise ModelError(f"config.json says {key}={getattr(config, key)}; by its other keys it is {value}.")
    if not config.tie_word_embeddings:
        raise ModelError("config.json says tie_word_embeddings=False, which in this architecture would share nothing.")


def build(parts: Parts) -> Decoder:
    """Our layers with the model's weights, in its order."""
    shared: dict[int, SharedBlock] = {}
    layers = [_layer(parts, block, number, shared) for number, block in enumerate(parts.base.layers)]
    last = parts.base.final_layernorm
    return Decoder(layers=(Doubled(), *layers), norm=LeftNorm(last.weight, last.variance_epsilon))


def _layer(parts: Parts, block: Any, number: int, shared: dict[int, SharedBlock]) -> ZambaLayer:
    """shared: blocks that are made already, by the identity of a weight of theirs."""
    hybrid = hasattr(block, "shared_transformer")
    inner = block.mamba_decoder if hybrid else block
    norm, mamba = adopt_norm(inner.input_layernorm), adopt_mamba2(inner.mamba, layer=next(parts.linear))
    if not hybrid:
        return ZambaLayer(norm, mamba)
    module = block.shared_transformer
    key = id(module.self_attn.q_proj.weight)
    if key not in shared:
        shared[key] = SharedBlock(module, parts.table)
    use = parts.config.hybrid_layer_ids.index(number)
    return HybridLayer(
        norm,
        mamba,
        shared=shared[key],
        linear=adopt_linear(block.linear),
        layer=next(parts.attention),
        attention_adapter=_attention_adapter(module.self_attn, use),
        mlp_adapter=Adapter([module.feed_forward.gate_up_proj_adapter_list[use]]),
    )


def _attention_adapter(module: Any, use: int) -> Adapter | None:
    if not module.config.use_shared_attention_adapter:
        return None
    return Adapter([getattr(module, f"linear_{name}_adapter_list")[use] for name in "qkv"])


def _added_to_nothing(summed: Callable[[Adds], Adds], linear: Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    forward = summed(linear.forward)
    return lambda x: forward(x, x.new_zeros(len(x), linear.n))


def _gate_up(config: Any) -> tuple[tuple[int, int], ...]:
    return ((config.intermediate_size, 1),) * 2


_MAMBA2 = Mamba2Keys(
    heads="n_mamba_heads", head_dim="mamba_headdim", groups="mamba_ngroups", state_size="mamba_d_state"
)
SHARDING = Sharding(
    divided=("num_attention_heads", "n_mamba_heads", "intermediate_size"),
    shared=("num_key_value_heads", "mamba_ngroups"),
    cuts={
        **ATTENTION,
        **mamba2_cuts(r"\.mamba", _MAMBA2),
        # The narrow matrix of an adapter is on every rank, the other one is as what it is added to.
        r"\.linear_q_adapter_list\.\d+\.1\.weight": ROWS,
        r"\.linear_[kv]_adapter_list\.\d+\.1\.weight": cut(0, kv_rows),
        r"\.gate_up_proj(\.weight|\.bias|_adapter_list\.\d+\.1\.weight)": cut(0, _gate_up),
        r"\.down_proj\.weight": COLUMNS,
        r"\.down_proj\.bias": on_first,
    },
    check=_MAMBA2.check,
    joint_norm=_MAMBA2.joint_norm,
    adjust=narrow_inner,
    # Adapters are as wide as all heads are by the hidden size.
    narrowed=r"\.linear_[qkv]_adapter_list\.\d+\.1\.weight",
)
SOURCES = {
    "Zamba2ForCausalLM": Source(
        module="zamba2",
        config="Zamba2Config",
        model="Zamba2ForCausalLM",
        build=build,
        check=check,
        activation="gelu",
        sharding=SHARDING,
    ),
}
