"""What vLLM gives one layer of a model: its state page with room for speculation, its KV bytes per token."""

from __future__ import annotations

from twinpool.errors import ModelError
from twinpool.models.shapes import StateShapes, item_bytes
from twinpool.models.spec import ModelSpec
from twinpool.plan.vllm_blocks import HybridLayers


def hybrid_layers(
    spec: ModelSpec,
    *,
    tp: int,
    kv_dtype: str,
    ssm_dtype: str,
    conv_dtype: str,
    speculative_tokens: int = 0,
    draft_attention_layers: int = 0,
) -> HybridLayers:
    """Layers of one of `tp` ranks; draft layers count as further attention layers of the same size.

    Each speculative token widens the conv window by one column (MambaStateShapeCalculator,
    vllm/model_executor/layers/mamba/mamba_utils.py). Raises ModelError: an unknown dtype, a tp that does not divide,
    or layers of unequal size, which vLLM cannot put into one pool.
    """
    shapes = _equal_states(spec, tp=tp)
    conv, temporal = 0, 0
    if shapes is not None:
        conv = _conv_elements(shapes, speculative_tokens=speculative_tokens)
        temporal = shapes.temporal_elements
    return HybridLayers(
        attention_layers=spec.n_attention_layers + draft_attention_layers,
        linear_layers=spec.n_linear_layers,
        kv_bytes_per_token=_kv_bytes_per_token(spec, kv_dtype=kv_dtype, tp=tp),
        conv_bytes=conv * item_bytes(conv_dtype),
        ssm_bytes=temporal * item_bytes(ssm_dtype),
    )


def _equal_states(spec: ModelSpec, *, tp: int) -> StateShapes | None:
    """The shapes that all linear layers share; None without linear layers. Raises ModelError when they differ."""
    if any(layer.window is not None for layer in spec.layers):
        raise ModelError("The model has sliding-window layers; the vLLM profile knows full attention and states only.")
    kinds = set(spec.state_shapes(tp=tp))
    if len(kinds) > 1:
        raise ModelError(f"The model's linear layers have {len(kinds)} kinds of states; vLLM's one page size needs 1.")
    return kinds.pop() if kinds else None


def _conv_elements(shapes: StateShapes, *, speculative_tokens: int) -> int:
    """Elements of the conv window [channels, columns], axes in either order, with one more column per draft token."""
    if not shapes.conv:
        return 0
    return shapes.conv_elements + max(shapes.conv) * speculative_tokens


def _kv_bytes_per_token(spec: ModelSpec, *, kv_dtype: str, tp: int) -> int:
    """Bytes of one token in one attention layer; 0 without any. Raises ModelError when layers differ."""
    layers = spec.n_attention_layers
    if layers == 0:
        return 0
    kinds = {layer.attention for layer in spec.layers if layer.attention is not None}
    if len(kinds) > 1:
        raise ModelError(f"The model's attention layers have {len(kinds)} kinds of KV; vLLM's one page size needs 1.")
    return spec.kv_bytes_per_token(kv_dtype=kv_dtype, tp=tp) // layers
