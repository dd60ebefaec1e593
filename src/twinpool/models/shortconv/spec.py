"""State of one short-convolution layer and the layer map of LFM2 (reference 1.6, short conv)."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.errors import ModelError
from twinpool.models.attention.spec import HeadsSpec
from twinpool.models.layers import LayerSpec, LayerStates, StateTensor, split_evenly
from twinpool.models.reader import ConfigReader


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """Width of the window and its kernel, which counts the current token."""

    hidden_size: int
    conv_kernel: int

    def states(self, *, ssm_dtype: str, conv_dtype: str, tp: int = 1) -> LayerStates:
        """conv [hidden, kernel - 1] on one rank; there is no temporal state."""
        del ssm_dtype  # part of the interface; nothing here is stored in it
        width = split_evenly(self.hidden_size, tp, what="hidden_size")
        return LayerStates((StateTensor((width, self.conv_kernel - 1), conv_dtype),), ())


def shortconv_layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    """Layers by `layer_types`, or by full_attn_idxs, which counts from 0."""
    n_layers = config.size("num_hidden_layers")
    kernel = config.size("conv_L_cache")
    if kernel < 2:
        raise ModelError(f"config.json: conv_L_cache={kernel}: it must be at least 2.")
    attention = LayerSpec(attention=HeadsSpec.read(config))
    linear = LayerSpec(mixer=ShortConvSpec(hidden_size=config.size("hidden_size"), conv_kernel=kernel))
    if config.has("layer_types"):
        kinds = config.names("layer_types", known=("conv", "full_attention"), length=n_layers)
        return tuple(attention if kind == "full_attention" else linear for kind in kinds)
    full = config.indices("full_attn_idxs")
    if full - set(range(n_layers)):
        raise ModelError(f"config.json: full_attn_idxs names layer {max(full)}, but the last one is {n_layers - 1}.")
    return tuple(attention if i in full else linear for i in range(n_layers))
