"""State of one Kimi Delta Attention layer and the layer map of the models that use it (reference 1.6, KDA)."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.errors import ModelError
from twinpool.models.attention.spec import LatentSpec
from twinpool.models.layers import LayerSpec, LayerStates, StateTensor, split_evenly
from twinpool.models.reader import ConfigReader


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaSpec:
    """Heads of one layer: q, k and v have n_heads of head_dim each."""

    n_heads: int
    head_dim: int
    conv_kernel: int

    def states(self, *, ssm_dtype: str, conv_dtype: str, tp: int = 1) -> LayerStates:
        """conv [kernel - 1, 3 heads head_dim] (axes the other way round than in GDN) and temporal [heads, head_dim, head_dim]."""
        heads = split_evenly(self.n_heads, tp, what="linear_attn_config.num_heads")
        conv = StateTensor((self.conv_kernel - 1, 3 * heads * self.head_dim), conv_dtype)
        temporal = StateTensor((heads, self.head_dim, self.head_dim), ssm_dtype)
        return LayerStates((conv,), (temporal,))


def _read_mixer(config: ConfigReader) -> KdaSpec:
    if config.has("linear_attn_config"):
        own = config.section("linear_attn_config")
        names = ("num_heads", "head_dim", "short_conv_kernel_size")
    else:
        own, names = config, ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    n_heads, head_dim, kernel = (own.size(name) for name in names)
    if kernel < 2:
        raise ModelError(f"config.json: {names[2]}={kernel}: it must be at least 2.")
    return KdaSpec(n_heads=n_heads, head_dim=head_dim, conv_kernel=kernel)


def kda_layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    """Layers by `layer_types`, or by the two lists of linear_attn_config, which count layers from 1."""
    n_layers = config.size("num_hidden_layers")
    attention = LayerSpec(attention=LatentSpec.read(config))
    linear = LayerSpec(mixer=_read_mixer(config))
    if config.has("layer_types"):
        kinds = config.names("layer_types", known=("linear_attention", "full_attention"), length=n_layers)
        return tuple(attention if kind == "full_attention" else linear for kind in kinds)
    lists = config.section("linear_attn_config")
    full, recurrent = lists.indices("full_attn_layers"), lists.indices("kda_layers")
    if full & recurrent or full | recurrent != set(range(1, n_layers + 1)):
        raise ModelError(
            "config.json: linear_attn_config.full_attn_layers and kda_layers must name each of the layers "
            f"1 to {n_layers} (num_hidden_layers) once."
        )
    return tuple(attention if i in full else linear for i in range(1, n_layers + 1))
