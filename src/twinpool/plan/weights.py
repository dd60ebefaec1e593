"""Bytes of a model's weights on one rank: from its files' headers, from its config.json, or from the size in its name."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from twinpool.errors import ModelError
from twinpool.models.attention.spec import GqaSpec, MlaSpec
from twinpool.models.gdn.spec import GdnSpec
from twinpool.models.kda.spec import KdaSpec
from twinpool.models.mamba2.spec import Mamba2Spec
from twinpool.models.shapes import ConfigReader, item_bytes
from twinpool.models.shortconv.spec import ShortConvSpec
from twinpool.models.spec import LayerSpec, ModelSpec
from twinpool.units import ceil_div, round_up

_LARGEST_HEADER_BYTES = 100_000_000  # the safetensors library refuses longer ones
_ANY = 1 << 30  # ways of a part that any number of ranks can share
_EVERY_MATRIX = re.compile(r"(?!.*lm_head)")  # quantisers leave the head alone unless they name it
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_PREFIXES = ("", "model.", "model.language_model.", "language_model.model.", "language_model.", "backbone.")


@dataclass(frozen=True, slots=True)
class WeightEstimate:
    """Weights without those of MTP layers, which are loaded for speculation only.

    bytes: on the fullest rank; total_bytes: of all ranks, a replicated tensor counted once; params: elements;
    origin: "index", "config", "name" or "flag"; mtp_bytes: of the MTP layers, of all ranks.
    """

    bytes: int
    total_bytes: int
    params: int
    origin: str
    note: str
    mtp_bytes: int = 0

    def rescaled(self, checkpoint_bytes: int, *, origin: str) -> WeightEstimate:
        """The same shares of a checkpoint (MTP layers included) that has this many bytes."""
        scale = checkpoint_bytes / (self.total_bytes + self.mtp_bytes)
        rank, mtp = round(self.bytes * scale), round(self.mtp_bytes * scale)
        return replace(self, bytes=rank, total_bytes=checkpoint_bytes - mtp, mtp_bytes=mtp, origin=origin)


@dataclass(frozen=True, slots=True)
class _Part:
    """A module: name as in a checkpoint, elements, ranks that can share it, whether quantisers take it."""

    name: str
    params: int
    ways: int = _ANY
    matrix: bool = True


def index_weight_bytes(folder: Path) -> int | None:
    """Bytes of the tensors in a folder's safetensors files, None when there are none.

    From the index's metadata.total_size, else from each file's header (8 bytes of length, JSON with data_offsets).
    Raises ModelError naming the broken file.
    """
    index = folder / "model.safetensors.index.json"
    total = _total_size(index) if index.is_file() else None
    if total is not None:
        return total
    files = sorted(folder.glob("*.safetensors"))
    return sum(_tensor_bytes(path) for path in files) if files else None


def _total_size(index: Path) -> int | None:
    try:
        total = json.loads(index.read_text())["metadata"].get("total_size")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} holds no JSON object with 'metadata'; it cannot be read as an index.") from error
    if total is None:
        return None
    if isinstance(total, bool) or not isinstance(total, int | float) or total <= 0:
        raise ModelError(f"{index} says total_size={total!r}; it must be a number of bytes above 0.")
    return int(total)


def _tensor_bytes(path: Path) -> int:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _LARGEST_HEADER_BYTES:
                raise ModelError(f"{path} gives its header {length} bytes; it is no safetensors file.")
            header = json.loads(file.read(length))
            spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
            total = sum(int(end) - int(start) for start, end in spans)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} has a header that cannot be read as safetensors: {error}.") from error
    needed = 8 + length + total
    if path.stat().st_size < needed:
        raise ModelError(f"{path} needs {needed} bytes and has {path.stat().st_size}; it is cut short.")
    return total


def estimate_weights(
    config: Mapping[str, Any],
    spec: ModelSpec,
    *,
    tp: int,
    pp: int = 1,
    ep: int = 1,
    dtype: str,
    params_b: float | None = None,
) -> WeightEstimate:
    """Count the parameters that a config.json describes and the bytes of one rank.

    dtype: of what is not quantised (a hf_quant_config.json's "quantization" may stand as quantization_config);
    params_b: billions of parameters in the name, used when the config cannot be counted. Raises ModelError for --weights.
    """
    try:
        parts = tuple(_parts(config, spec))
        scheme = _Scheme.read(config, dtype)
    except ModelError as reason:
        why = str(reason).rstrip(".")
        if params_b is None:
            raise ModelError(f"the weights cannot be counted ({why}); give --weights SIZE.") from reason
        params = round(params_b * 1e9)
        total = params * item_bytes(dtype)
        note = f"from the size in the model's name, all of it {dtype}, because {why}"
        return WeightEstimate(ceil_div(total, tp * pp), total, params, "name", note)
    target = [part for part in parts if not part.name.startswith("mtp.")]
    mtp = [part for part in parts if part.name.startswith("mtp.")]
    return WeightEstimate(
        bytes=round(_rank_bytes(target, scheme, tp=tp, pp=pp, ep=ep, n_layers=len(spec.layers))),
        total_bytes=round(sum(scheme.part_bytes(part) for part in target)),
        params=sum(part.params for part in target),
        origin="config",
        note=_note(config, parts, pp=pp),
        mtp_bytes=round(sum(scheme.part_bytes(part) for part in mtp)),
    )


def _rank_bytes(parts: list[_Part], scheme: _Scheme, *, tp: int, pp: int, ep: int, n_layers: int) -> float:
    """Of the fullest pipeline stage: its layers at their mean, and the larger of embedding and head (both when pp is 1)."""
    layers, ends = 0.0, [0.0, 0.0]
    for part in parts:
        # Expert parallelism cuts inside the tensor-parallel group, so that group's size counts unless ep is larger.
        ranks = max(tp, ep) if part.name.endswith(".experts") else tp
        size = scheme.part_bytes(part) / min(ranks, part.ways)
        if part.name.startswith("layers."):
            layers += size
        else:
            ends[part.name.startswith("lm_head")] += size
    if pp == 1:
        return layers + sum(ends)
    return layers * ceil_div(n_layers, pp) / n_layers + max(ends)


def _note(config: Mapping[str, Any], parts: tuple[_Part, ...], *, pp: int) -> str:
    notes = ["approximate: every matrix is taken to divide evenly; norms, routers and latent projections are whole"]
    if config.get("vision_config") and not any(part.name.startswith("visual") for part in parts):
        notes.append("the vision tower is not counted")
    if pp > 1:
        notes.append("pipeline stages are taken to hold mean layers")
    return "; ".join(notes)


@dataclass(frozen=True, slots=True)
class _Scheme:
    """(pattern of module names, bytes per element) in order; what `ignored` matches, or no rule, has plain_bytes."""

    plain_bytes: int
    rules: tuple[tuple[re.Pattern[str], float], ...] = ()
    ignored: re.Pattern[str] | None = None

    @staticmethod
    def read(config: Mapping[str, Any], dtype: str) -> _Scheme:
        """From quantization_config, the text config's too. Raises ModelError when it is broken or not known here."""
        quantised = config.get("quantization_config") or config.get("text_config", config).get("quantization_config")
        if not quantised:
            return _Scheme(item_bytes(dtype))
        keys = ("ignore", "exclude_modules", "ignored_layers", "modules_to_not_convert")
        try:
            ignored = [name for key in keys for name in quantised.get(key) or ()]
            return _Scheme(item_bytes(dtype), tuple(_rules(quantised)), _pattern(ignored) if ignored else None)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, re.error) as error:
            raise ModelError(f"config.json has a quantization_config that cannot be read: {error!r}.") from error

    def part_bytes(self, part: _Part) -> float:
        """Bytes of a part over all ranks, the scales of quantised blocks included."""
        names = [prefix + part.name for prefix in _PREFIXES]
        if not part.matrix or (self.ignored is not None and any(map(self.ignored.match, names))):
            return part.params * self.plain_bytes
        sizes = (size for pattern, size in self.rules if any(map(pattern.match, names)))
        return part.params * next(sizes, float(self.plain_bytes))


def _pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Any of: a module and all inside it, a glob, or 're:' and a regular expression."""
    found = []
    for name in names:
        plain = fnmatch.translate(name) if "*" in name else re.escape(name) + r"(?:\.|\Z)"
        found.append(f"(?:{name[3:] if name.startswith('re:') else plain})")
    return re.compile("|".join(found))


def _rules(quantised: Mapping[str, Any]) -> Iterator[tuple[re.Pattern[str], float]]:
    """Rules of modelopt's quantized_layers, else compressed-tensors' config_groups, else one for every matrix."""
    named, groups = quantised.get("quantized_layers"), quantised.get("config_groups")
    if named:
        by_size: dict[float, list[str]] = {}
        for name, row in named.items():
            by_size.setdefault(_algorithm_bytes(row), []).append(name)
        yield from ((_pattern(names), size) for size, names in by_size.items())
    elif groups:
        for group in groups.values():
            targets = group.get("targets") or ["Linear"]
            yield _EVERY_MATRIX if targets == ["Linear"] else _pattern(targets), _bits_bytes(group["weights"])
    else:
        yield _EVERY_MATRIX, _algorithm_bytes(quantised) if quantised.get("quant_algo") else _method_bytes(quantised)


def _algorithm_bytes(row: Mapping[str, Any]) -> float:
    """modelopt's quant_algo: 4 bits and a scale a group (8 bits for floats, 16 for integers), or 8 bits."""
    name, group = str(row["quant_algo"]), int(row.get("group_size") or 16)
    if "FP4" in name:
        return 0.5 + 1 / (32 if "MXFP4" in name else group)
    if "FP8" in name or "INT8" in name:
        return 1.0
    if "W4A" in name or "INT4" in name:
        return 0.5 + 2 / group
    raise ModelError(f"config.json says quant_algo={name!r}, whose bytes are not known here.")


def _bits_bytes(weights: Mapping[str, Any]) -> float:
    """compressed-tensors' weights: num_bits and, a group, 8 bits of scale for floats of 4 bits, else 16."""
    bits, group = int(weights["num_bits"]), int(weights.get("group_size") or -1)
    scale_bytes = 1 if weights.get("type") == "float" and bits == 4 else 2
    return bits / 8 + (scale_bytes / group if group > 0 else 0)  # a scale a row or a 128 x 128 block is nothing


def _method_bytes(quantised: Mapping[str, Any]) -> float:
    """fp8 (4 bytes of scale a block), or AWQ and GPTQ (16 bits of scale and a zero a group)."""
    method, bits = str(quantised.get("quant_method")), quantised.get("bits", quantised.get("w_bit"))
    if method == "fp8":
        block = quantised.get("weight_block_size")
        return 1 + 4 / (int(block[0]) * int(block[1])) if block else 1.0
    if method in ("awq", "gptq") and isinstance(bits, int):
        return bits / 8 + (2 + bits / 8) / int(quantised.get("group_size") or 128)
    raise ModelError(f"config.json says quant_method={method!r}, whose bytes are not known here.")


def _parts(config: Mapping[str, Any], spec: ModelSpec) -> Iterator[_Part]:
    """Every module of the model, MTP layers (named mtp.*) and a Qwen vision tower (visual.*) included. Raises ModelError."""
    text = config.get("text_config", config)
    reader = ConfigReader(text)
    table = spec.vocab_size * spec.hidden_size
    tied = text.get("tie_word_embeddings", text.get("tie_embedding", spec.family == "shortconv"))
    yield _Part("embed_tokens", table, matrix=False)
    yield _Part("norm", spec.hidden_size, 1, False)
    if not config.get("tie_word_embeddings", tied):
        yield _Part("lm_head", table)
    for i, layer in enumerate(spec.layers):
        yield from _layer(f"layers.{i}", layer, reader, spec, moe=_has_experts(reader, layer, spec, i=i))
    attention = next((layer.attention for layer in spec.layers if layer.attention is not None), None)
    for i in range(_first(reader, "mtp_num_hidden_layers", "num_nextn_predict_layers")):
        yield _Part(f"mtp.fc.{i}", 2 * spec.hidden_size**2, 1)
        yield from _layer(f"mtp.layers.{i}", LayerSpec(attention), reader, spec, moe=_first(reader, *_EXPERTS) > 0)
    vision = config.get("vision_config")
    if isinstance(vision, Mapping) and "depth" in vision:
        yield _vision(ConfigReader(vision))


def _first(reader: ConfigReader, *keys: str) -> int:
    """The first of these keys that is there, else 0."""
    return next((reader.integer(key, least=0) for key in keys if reader.values.get(key) is not None), 0)


def _has_experts(reader: ConfigReader, layer: LayerSpec, spec: ModelSpec, *, i: int) -> bool | None:
    """Whether layer i's feed-forward block has experts; None: it has no such block (Nemotron-H's mixers)."""
    if spec.architecture.startswith("NemotronH"):
        if layer.attention or layer.linear:
            return None
        kinds = reader.items("layers_block_type") or reader.text("hybrid_override_pattern", default="")
        return kinds[i] in ("moe", "E")
    first = _first(reader, "first_k_dense_replace", "num_dense_layers")
    if not _first(reader, *_EXPERTS) or i < first or i in (reader.items("mlp_only_layers") or ()):
        return False
    step = _first(reader, "decoder_sparse_step") or 1
    period = _first(reader, "expert_layer_period", "moe_layer_freq") or 1
    return (i + 1) % step == 0 and (i - _first(reader, "expert_layer_offset")) % period == 0


def _layer(name: str, layer: LayerSpec, reader: ConfigReader, spec: ModelSpec, *, moe: bool | None) -> Iterator[_Part]:
    nemotron = spec.architecture.startswith("NemotronH")
    mixer = {"gdn": "linear_attn", "kda": "self_attn", "shortconv": "conv"}.get(spec.family, "mamba")
    yield _Part(f"{name}.norms", spec.hidden_size * (1 if moe is None else 2), 1, False)
    if layer.attention is not None:
        yield from _attention(f"{name}.{'mixer' if nemotron else 'self_attn'}", layer.attention, reader, spec)
    if layer.linear is not None:
        yield from _linear(f"{name}.{'mixer' if nemotron else mixer}", layer.linear, reader, spec)
    if moe is not None:
        yield from _feed_forward(f"{name}.{'mixer' if nemotron else 'mlp'}", reader, spec, moe=moe)


def _attention(name: str, attention: object, reader: ConfigReader, spec: ModelSpec) -> Iterator[_Part]:
    hidden, heads = spec.hidden_size, reader.integer("num_attention_heads")
    if isinstance(attention, GqaSpec):
        gated = spec.family == "gdn" and reader.values.get("attn_output_gate", True)
        yield _Part(f"{name}.q_proj", hidden * heads * attention.head_dim * (2 if gated else 1))
        yield _Part(f"{name}.k_proj", hidden * attention.kv_heads * attention.head_dim, attention.kv_heads)
        yield _Part(f"{name}.v_proj", hidden * attention.kv_heads * attention.v_head_dim, attention.kv_heads)
        yield _Part(f"{name}.o_proj", heads * attention.v_head_dim * hidden)
    elif isinstance(attention, MlaSpec):
        nope, value = reader.integer("qk_nope_head_dim"), reader.integer("v_head_dim")
        query_rank, rope = _first(reader, "q_lora_rank"), attention.qk_rope_head_dim
        yield _Part(f"{name}.q_a_proj", hidden * query_rank, 1)
        yield _Part(f"{name}.q_proj", (query_rank or hidden) * heads * (nope + rope))
        yield _Part(f"{name}.kv_a_proj_with_mqa", hidden * (attention.kv_lora_rank + rope), 1)
        yield _Part(f"{name}.kv_b_proj", attention.kv_lora_rank * heads * (nope + value))
        outputs = 2 if reader.values.get("mla_use_output_gate") else 1  # the gate has the shape of o_proj
        yield _Part(f"{name}.o_proj", outputs * heads * value * hidden)
    else:
        raise ModelError(f"attention of kind {type(attention).__name__} cannot be counted.")


def _linear(name: str, linear: object, reader: ConfigReader, spec: ModelSpec) -> Iterator[_Part]:
    hidden = spec.hidden_size
    if isinstance(linear, GdnSpec):
        keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
        yield _Part(f"{name}.in_proj_qkv", hidden * (2 * keys + values))
        yield _Part(f"{name}.in_proj_z", hidden * values)
        yield _Part(f"{name}.in_proj_a", 2 * hidden * linear.value_heads)  # a and b
        yield _Part(f"{name}.out_proj", values * hidden)
        yield _Part(f"{name}.conv1d", (2 * keys + values) * linear.kernel, matrix=False)
    elif isinstance(linear, KdaSpec):
        inner, low_rank = linear.heads * linear.head_dim, (hidden + linear.heads * linear.head_dim) * linear.head_dim
        full_rank = (reader.values.get("linear_attn_config") or {}).get("use_full_rank_gate")
        yield _Part(f"{name}.qkv_proj", 3 * hidden * inner)
        yield _Part(f"{name}.f_proj", low_rank + hidden * linear.heads)  # decay, and the beta of each head
        yield _Part(f"{name}.g_proj", hidden * inner if full_rank else low_rank)
        yield _Part(f"{name}.o_proj", inner * hidden)
        yield _Part(f"{name}.conv1d", 3 * inner * linear.kernel, matrix=False)
    elif isinstance(linear, Mamba2Spec):
        inner, channels = linear.heads * linear.head_dim, 2 * linear.groups * linear.state_size
        yield _Part(f"{name}.in_proj", hidden * (2 * inner + channels + linear.heads))
        yield _Part(f"{name}.out_proj", inner * hidden)
        yield _Part(f"{name}.conv1d", (inner + channels) * (linear.kernel + 1), matrix=False)  # and a bias
    elif isinstance(linear, ShortConvSpec):
        yield _Part(f"{name}.in_proj", 3 * hidden * hidden)
        yield _Part(f"{name}.out_proj", hidden * hidden)
        yield _Part(f"{name}.conv", hidden * linear.kernel, matrix=False)
    else:
        raise ModelError(f"a linear layer of kind {type(linear).__name__} cannot be counted.")


def _feed_forward(name: str, reader: ConfigReader, spec: ModelSpec, *, moe: bool) -> Iterator[_Part]:
    """Dense: gate, up and down (no gate in Nemotron-H). Experts: all as one part, the router, shared ones, latent width."""
    hidden = spec.hidden_size
    gate = () if spec.architecture.startswith("NemotronH") else ("gate_proj",)
    matrices = (*gate, "up_proj", "down_proj")
    if not moe:
        yield from (_Part(f"{name}.{matrix}", hidden * _dense_width(reader, spec)) for matrix in matrices)
        return
    experts, width = _first(reader, *_EXPERTS), _width(reader, "moe_intermediate_size", "intermediate_size")
    latent = _first(reader, "routed_expert_hidden_size", "moe_latent_size")
    yield _Part(f"{name}.gate", hidden * experts, 1, False)
    yield _Part(f"{name}.experts", experts * len(matrices) * (latent or hidden) * width)
    if latent:
        yield _Part(f"{name}.latent_proj", 2 * hidden * latent, 1)
    shared_keys = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
    shared = _first(reader, *shared_keys) or width * _first(reader, "num_shared_experts", "n_shared_experts")
    module = "shared_expert" if spec.family == "gdn" else "shared_experts"
    yield from (_Part(f"{name}.{module}.{matrix}", hidden * shared) for matrix in matrices if shared)


def _width(reader: ConfigReader, *keys: str) -> int:
    width = _first(reader, *keys)
    if not width:
        raise ModelError(f"config.json has none of {', '.join(keys)}, one of which the feed-forward blocks need.")
    return width


def _dense_width(reader: ConfigReader, spec: ModelSpec) -> int:
    """Width of a dense feed-forward block; LFM2's is two thirds of its key, rounded up (its own configuration)."""
    width = _width(reader, "shared_intermediate_size", "block_ff_dim", "intermediate_size")
    if spec.architecture != "Lfm2ForCausalLM" or not reader.values.get("block_auto_adjust_ff_dim", True):
        return width
    scaled = int((reader.values.get("block_ffn_dim_multiplier") or 1.0) * int(2 * width / 3))
    return round_up(scaled, reader.integer("block_multiple_of", default=256))


def _vision(vision: ConfigReader) -> _Part:
    """A Qwen vision tower: blocks of attention and MLP, patch and position embeddings, a merger of 2 x 2 patches."""
    width = vision.integer("hidden_size")
    merged = width * vision.integer("spatial_merge_size") ** 2
    blocks = vision.integer("depth") * (4 * width * width + 2 * width * vision.integer("intermediate_size"))
    pixels = vision.integer("in_channels") * vision.integer("temporal_patch_size") * vision.integer("patch_size") ** 2
    ends = (pixels + _first(vision, "num_position_embeddings")) * width
    return _Part("visual", blocks + ends + merged * (merged + vision.integer("out_hidden_size")), matrix=False)
