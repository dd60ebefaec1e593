"""Mamba2: shapes of a state, and the layers of Nemotron-H, Granite 4, Falcon-H1, Bamba and Zamba2 (reference 1.6)."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.errors import ModelError
from twinpool.models.attention.spec import GqaSpec
from twinpool.models.shapes import ConfigReader, LayerSpec, StateShapes, shard


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """`heads` heads of head_dim, state size N, G groups, a convolution of `kernel` taps over x|B|C."""

    heads: int
    head_dim: int
    state_size: int
    groups: int
    kernel: int

    def states(self, tp: int) -> StateShapes:
        """conv [(inner + 2 G N) / tp, kernel - 1], G raised to tp unless tp divides it; temporal [H / tp, d, N]."""
        heads = shard(self.heads, tp, what="Mamba heads")
        groups = self.groups if self.groups % tp == 0 else tp
        channels = (self.heads * self.head_dim + 2 * groups * self.state_size) // tp
        return StateShapes((channels, self.kernel - 1), (heads, self.head_dim, self.state_size))


def _both_names(mamba: LayerSpec, attention: LayerSpec) -> dict[str, LayerSpec]:
    """Layer kinds under the names of checkpoints and under those transformers has since given them."""
    return {"mamba": mamba, "attention": attention, "linear_attention": mamba, "full_attention": attention}


def nemotron_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """By layers_block_type, or a letter a layer in hybrid_override_pattern; feed-forward layers stand on their own.

    Raises ModelError.
    """
    mamba = LayerSpec(
        linear=Mamba2Spec(
            heads=reader.integer("mamba_num_heads"),
            head_dim=reader.integer("mamba_head_dim"),
            state_size=reader.integer("ssm_state_size"),
            groups=reader.integer("n_groups", default=8),
            kernel=reader.integer("conv_kernel", default=4, least=2),
        )
    )
    attention, neither = LayerSpec(attention=GqaSpec.read(reader)), LayerSpec()
    kinds = {**_both_names(mamba, attention), "moe": neither, "mlp": neither}
    listed = reader.layers("layers_block_type", kinds) or reader.layers("layer_types", kinds)
    if listed is not None:
        return listed
    letters = {"M": mamba, "*": attention, "E": neither, "-": neither}
    pattern = list(reader.text("hybrid_override_pattern", default=""))
    if not pattern:
        raise ModelError(
            "config.json has neither 'hybrid_override_pattern' nor 'layers_block_type', one of which is needed."
        )
    spelled = ConfigReader({**reader.values, "hybrid_override_pattern": pattern})
    return spelled.layers("hybrid_override_pattern", letters) or ()


def _read_mamba(reader: ConfigReader) -> Mamba2Spec:
    """From the mamba_* keys of Granite, Falcon-H1 and Bamba; heads of width 'auto' share the inner width, which is
    mamba_d_ssm (Falcon-H1) or else mamba_expand * hidden_size.
    """
    heads = reader.integer("mamba_n_heads", default=128)
    if reader.values.get("mamba_d_head") in (None, "auto"):
        expanded = reader.integer("mamba_expand", default=2) * reader.integer("hidden_size")
        inner = reader.integer("mamba_d_ssm", default=expanded)
        if inner % heads:
            raise ModelError(f"config.json says mamba_n_heads={heads}; it must divide the inner width of {inner}.")
        head_dim = inner // heads
    else:
        head_dim = reader.integer("mamba_d_head")
    return Mamba2Spec(
        heads=heads,
        head_dim=head_dim,
        state_size=reader.integer("mamba_d_state", default=256),
        groups=reader.integer("mamba_n_groups", default=1),
        kernel=reader.integer("mamba_d_conv", default=4, least=2),
    )


def granite_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """By layer_types (layers_block_type in older configs). Raises ModelError."""
    kinds = _both_names(LayerSpec(linear=_read_mamba(reader)), LayerSpec(attention=GqaSpec.read(reader)))
    listed = reader.layers("layer_types", kinds) or reader.layers("layers_block_type", kinds)
    if listed is None:
        raise ModelError("config.json has no 'layer_types', which this architecture needs.")
    return listed


def falcon_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """Attention and Mamba2 side by side in every layer. Raises ModelError."""
    both = LayerSpec(attention=GqaSpec.read(reader), linear=_read_mamba(reader))
    return (both,) * reader.integer("num_hidden_layers")


def bamba_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """attn_layer_indices names the attention layers, counted from 0. Raises ModelError."""
    mamba, attention = LayerSpec(linear=_read_mamba(reader)), LayerSpec(attention=GqaSpec.read(reader))
    listed = reader.numbered_layers("attn_layer_indices", named=attention, others=mamba)
    if listed is None:
        raise ModelError("config.json has no 'attn_layer_indices', which this architecture needs.")
    return listed


def zamba_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """By layers_block_type, or hybrid_layer_ids counted from 0; a hybrid layer is attention and then Mamba2.

    Attention sees the hidden state and the embedding, so its heads are twice as wide; weights are shared between
    hybrid layers, keys and values are not (transformers' zamba2). Raises ModelError.
    """
    hidden, heads = reader.integer("hidden_size"), reader.integer("n_mamba_heads", default=8)
    mamba = Mamba2Spec(
        heads=heads,
        head_dim=max(1, reader.integer("mamba_expand", default=2) * hidden // heads),
        state_size=reader.integer("mamba_d_state", default=64),
        groups=reader.integer("mamba_ngroups", default=1),
        kernel=reader.integer("mamba_d_conv", default=4, least=2),
    )
    wide = max(1, 2 * hidden // reader.integer("num_attention_heads", default=32))
    plain, both = LayerSpec(linear=mamba), LayerSpec(attention=GqaSpec.read(reader, head_dim=wide), linear=mamba)
    listed = reader.layers("layers_block_type", {"mamba": plain, "linear_attention": plain, "hybrid": both})
    if listed is None:
        listed = reader.numbered_layers("hybrid_layer_ids", named=both, others=plain)
    if listed is None:
        raise ModelError("config.json has neither 'layers_block_type' nor 'hybrid_layer_ids', one of which is needed.")
    return listed


def pure_mamba2_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """Mamba2 in every layer, no attention. Raises ModelError."""
    mamba = Mamba2Spec(
        heads=reader.integer("num_heads"),
        head_dim=reader.integer("head_dim"),
        state_size=reader.integer("state_size", default=128),
        groups=reader.integer("n_groups", default=8),
        kernel=reader.integer("conv_kernel", default=4, least=2),
    )
    return (LayerSpec(linear=mamba),) * reader.integer("num_hidden_layers")
