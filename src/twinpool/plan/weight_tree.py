"""Every module of a model and its parameters, from a config.json: embedding, layers, feed-forward blocks, MTP, vision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from twinpool.errors import ModelError
from twinpool.models.shapes import ConfigReader
from twinpool.models.spec import LayerSpec, ModelSpec
from twinpool.plan.weight_mixers import mixer_parts
from twinpool.plan.weight_part import Part, Source, text_config
from twinpool.units import round_up

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_PURE_MAMBA = ("MambaForCausalLM", "FalconMambaForCausalLM", "Mamba2ForCausalLM")  # no feed-forward block in any layer
_TIED = ("MambaForCausalLM", "FalconMambaForCausalLM")  # by default: transformers' mamba, zaya and lfm2
_TIED_FAMILIES = ("shortconv", "cca")


def model_parts(config: Mapping[str, Any], spec: ModelSpec) -> Iterator[Part]:
    """Every module of the model, MTP layers (named mtp.*) and a Qwen vision tower (visual.*) included. Raises ModelError."""
    source = Source(ConfigReader(text_config(config)), spec)
    table = spec.vocab_size * spec.hidden_size
    yield Part("embed_tokens", table, matrix=False)
    yield Part("norm", spec.hidden_size, 1, False)
    if not config.get("tie_word_embeddings", _tied(source)):
        yield Part("lm_head", table)
    for i, layer in enumerate(spec.layers):
        yield from _layer(f"layers.{i}", layer, source, moe=_has_experts(source, layer, i=i))
    attention = next((layer.attention for layer in spec.layers if layer.attention is not None), None)
    for i in range(spec.draft_layers):
        yield Part(f"mtp.fc.{i}", 2 * spec.hidden_size**2, 1)
        yield from _layer(f"mtp.layers.{i}", LayerSpec(attention), source, moe=source.first(*_EXPERTS) > 0)
    vision = config.get("vision_config")
    if isinstance(vision, Mapping) and "depth" in vision:
        yield _vision(ConfigReader(vision))


def _tied(source: Source) -> bool:
    """Whether the head is the embedding, by the text config or by the default of its kind."""
    by_kind = source.spec.architecture in _TIED or source.spec.family in _TIED_FAMILIES
    values = source.reader.values
    return bool(values.get("tie_word_embeddings", values.get("tie_embedding", by_kind)))


def _has_experts(source: Source, layer: LayerSpec, *, i: int) -> bool | None:
    """Whether layer i's feed-forward block has experts; None: it has no such block."""
    reader, empty = source.reader, _is_empty(layer)
    if source.spec.architecture in _PURE_MAMBA:
        return None
    if source.nemotron:
        if not empty:
            return None
        kinds = reader.items("layers_block_type") or reader.text("hybrid_override_pattern", default="")
        return kinds[i] in ("moe", "E")
    if source.spec.family == "cca":
        return True if empty or not source.has("zaya_layers") else None  # older files alternate the two
    listed = reader.items("mlp_layer_types")
    if listed is not None:
        return listed[i : i + 1] == ["sparse"]
    return _by_interval(source, i=i)


def _is_empty(layer: LayerSpec) -> bool:
    """Whether the layer mixes no tokens: it is a feed-forward block alone."""
    return layer.attention is None and layer.linear is None and layer.window is None


def _by_interval(source: Source, *, i: int) -> bool:
    """The keys of models that name neither each layer's kind nor a pattern: dense layers first, then every n-th."""
    first, jamba = (
        source.first("first_k_dense_replace", "num_dense_layers"),
        source.spec.architecture == "JambaForCausalLM",
    )
    if not source.first(*_EXPERTS) or i < first or i in (source.reader.items("mlp_only_layers") or ()):
        return False
    step = source.first("decoder_sparse_step") or 1
    period = source.first("expert_layer_period", "moe_layer_freq", default=2 if jamba else 1) or 1
    return (i + 1) % step == 0 and (i - source.first("expert_layer_offset", default=int(jamba))) % period == 0


def _layer(name: str, layer: LayerSpec, source: Source, *, moe: bool | None) -> Iterator[Part]:
    yield Part(f"{name}.norms", source.hidden * ((moe is not None) + (not _is_empty(layer))), 1, False)
    yield from mixer_parts(name, layer, source)
    if moe is not None:
        block = "feed_forward" if source.spec.family in ("mamba1", "shortconv") else "mlp"
        yield from _feed_forward(f"{name}.{'mixer' if source.nemotron else block}", source, moe=moe)


def _feed_forward(name: str, source: Source, *, moe: bool) -> Iterator[Part]:
    """Dense: gate, up and down (no gate in Nemotron-H). Experts: all as one part, the router, shared ones, latent width."""
    hidden = source.hidden
    matrices = ("up_proj", "down_proj") if source.nemotron else ("gate_proj", "up_proj", "down_proj")
    if not moe:
        yield from (Part(f"{name}.{matrix}", hidden * _dense_width(source)) for matrix in matrices)
        return
    experts, width = source.first(*_EXPERTS), _width(source, "moe_intermediate_size", "intermediate_size")
    latent = source.first("routed_expert_hidden_size", "moe_latent_size")
    yield Part(f"{name}.gate", _router_params(source, experts), 1, False)
    yield Part(f"{name}.experts", experts * len(matrices) * (latent or hidden) * width)
    if latent:
        yield Part(f"{name}.latent_proj", 2 * hidden * latent, 1)
    shared_keys = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
    shared = source.first(*shared_keys) or width * source.first("num_shared_experts", "n_shared_experts")
    module = "shared_expert" if source.spec.family == "gdn" else "shared_experts"
    yield from (Part(f"{name}.{module}.{matrix}", hidden * shared) for matrix in matrices if shared)


def _router_params(source: Source, experts: int) -> int:
    """One matrix; in Zaya, a block of three behind a narrow one, with an output for "no expert" (transformers' zaya)."""
    if source.spec.family != "cca":
        return source.hidden * experts
    narrow = source.first("router_hidden_size", "zaya_mlp_expansion", default=256)
    return narrow * (source.hidden + 2 * narrow + experts + 1)


def _width(source: Source, *keys: str) -> int:
    width = source.first(*keys)
    if not width:
        raise ModelError(f"config.json has none of {', '.join(keys)}, one of which the feed-forward blocks need.")
    return width


def _dense_width(source: Source) -> int:
    """Width of a dense feed-forward block; LFM2's is two thirds of its key, rounded up (its own configuration)."""
    width = _width(source, "shared_intermediate_size", "block_ff_dim", "intermediate_size")
    values = source.reader.values
    if source.spec.architecture != "Lfm2ForCausalLM" or not values.get("block_auto_adjust_ff_dim", True):
        return width
    scaled = int((values.get("block_ffn_dim_multiplier") or 1.0) * int(2 * width / 3))
    return round_up(scaled, source.reader.integer("block_multiple_of", default=256))


def _vision(vision: ConfigReader) -> Part:
    """A Qwen vision tower: blocks of attention and MLP, patch and position embeddings, a merger of 2 x 2 patches."""
    width = vision.integer("hidden_size")
    merged = width * vision.integer("spatial_merge_size") ** 2
    blocks = vision.integer("depth") * (4 * width * width + 2 * width * vision.integer("intermediate_size"))
    pixels = vision.integer("in_channels") * vision.integer("temporal_patch_size") * vision.integer("patch_size") ** 2
    ends = (pixels + vision.integer("num_position_embeddings", default=0, least=0)) * width
    return Part("visual", blocks + ends + merged * (merged + vision.integer("out_hidden_size")), matrix=False)
