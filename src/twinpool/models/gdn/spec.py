"""State of one Gated DeltaNet layer and the layer map of the models that use it (reference 1.6, GDN)."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.errors import ModelError
from twinpool.models.attention.spec import HeadsSpec
from twinpool.models.layers import LayerSpec, LayerStates, StateTensor, split_evenly
from twinpool.models.reader import ConfigReader


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnSpec:
    """Head counts and widths of one layer; conv_kernel counts the current token."""

    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @staticmethod
    def read(config: ConfigReader) -> GdnSpec:
        """From the linear_* keys. Raises ModelError unless value heads are a multiple of key heads and the kernel at least 2."""
        spec = GdnSpec(
            n_key_heads=config.size("linear_num_key_heads"),
            n_value_heads=config.size("linear_num_value_heads"),
            key_dim=config.size("linear_key_head_dim"),
            value_dim=config.size("linear_value_head_dim"),
            conv_kernel=config.size("linear_conv_kernel_dim"),
        )
        if spec.n_value_heads % spec.n_key_heads:
            raise ModelError(
                f"config.json: linear_num_value_heads={spec.n_value_heads} is not a multiple of "
                f"linear_num_key_heads={spec.n_key_heads}."
            )
        if spec.conv_kernel < 2:
            raise ModelError(f"config.json: linear_conv_kernel_dim={spec.conv_kernel}: it must be at least 2.")
        return spec

    def conv_channels(self, *, tp: int = 1) -> int:
        """Width of the window on one rank: q, k and v side by side, each split over the ranks on its own."""
        keys = split_evenly(self.n_key_heads, tp, what="linear_num_key_heads") * self.key_dim
        values = split_evenly(self.n_value_heads, tp, what="linear_num_value_heads") * self.value_dim
        return 2 * keys + values

    def states(self, *, ssm_dtype: str, conv_dtype: str, tp: int = 1) -> LayerStates:
        """conv [channels, kernel - 1] and temporal [value heads, value_dim, key_dim] of one slot on one rank."""
        conv = StateTensor((self.conv_channels(tp=tp), self.conv_kernel - 1), conv_dtype)
        temporal = StateTensor((self.n_value_heads // tp, self.value_dim, self.key_dim), ssm_dtype)
        return LayerStates((conv,), (temporal,))


def gdn_layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    """Layers by `layer_types`, or every full_attention_interval-th one attention (4 unless the config says otherwise)."""
    n_layers = config.size("num_hidden_layers")
    attention = LayerSpec(attention=HeadsSpec.read(config))
    linear = LayerSpec(mixer=GdnSpec.read(config))
    if config.has("layer_types"):
        kinds = config.names("layer_types", known=("linear_attention", "full_attention"), length=n_layers)
        return tuple(attention if kind == "full_attention" else linear for kind in kinds)
    interval = config.size("full_attention_interval", 4)
    return tuple(linear if (i + 1) % interval else attention for i in range(n_layers))
