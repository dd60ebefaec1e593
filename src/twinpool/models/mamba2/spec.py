"""Mamba2: shapes of a state, and the layers of Nemotron-H, Granite 4 and Falcon-H1 (reference 1.6)."""

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


def nemotron_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """By layers_block_type, or a letter a layer in hybrid_override_pattern; feed-forward layers stand on their own."""
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
    kinds = {"mamba": mamba, "attention": attention, "moe": neither, "mlp": neither}
    listed = reader.layers("layers_block_type", kinds)
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
    """From the mamba_* keys of Granite and Falcon-H1; heads of width 'auto' share mamba_expand * hidden_size."""
    heads = reader.integer("mamba_n_heads", default=128)
    if reader.values.get("mamba_d_head") in (None, "auto"):
        inner = reader.integer("mamba_expand", default=2) * reader.integer("hidden_size")
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
    """By layer_types (layers_block_type in older configs)."""
    kinds = {"mamba": LayerSpec(linear=_read_mamba(reader)), "attention": LayerSpec(attention=GqaSpec.read(reader))}
    listed = reader.layers("layer_types", kinds) or reader.layers("layers_block_type", kinds)
    if listed is None:
        raise ModelError("config.json has no 'layer_types', which this architecture needs.")
    return listed


def falcon_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """Attention and Mamba2 side by side in every layer."""
    both = LayerSpec(attention=GqaSpec.read(reader), linear=_read_mamba(reader))
    return (both,) * reader.integer("num_hidden_layers")
