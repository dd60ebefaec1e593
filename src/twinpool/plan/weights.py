"""Bytes of a model's weights on one rank: counted from its config.json, priced by its quantisation, scaled to its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from twinpool.errors import ModelError
from twinpool.models.spec import ModelSpec
from twinpool.plan.weight_part import Part
from twinpool.plan.weight_quantisation import Scheme, read_scheme
from twinpool.plan.weight_tree import model_parts
from twinpool.units import ceil_div

_NAME_SHARE = 0.15  # a count this far from the size in the name lacks a part, or the config lacks a key
_NAME_ROUNDING_B = 1.0  # names of small models are rounded to whole billions


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Devices that share one replica's weights: tensor, pipeline and expert parallel sizes."""

    tp: int
    pp: int = 1
    ep: int = 1

    @property
    def count(self) -> int:
        """Devices."""
        return self.tp * self.pp


@dataclass(frozen=True, slots=True)
class WeightEstimate:
    """Weights without those of MTP layers, which are loaded for speculation only.

    bytes: on the fullest rank; total_bytes: of all ranks, a replicated tensor counted once; params: elements, 0 unknown;
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


def estimate_weights(
    config: Mapping[str, Any],
    spec: ModelSpec,
    ranks: Ranks,
    *,
    dtype: str,
    name: str = "",
    quantization: str | None = None,
    params_b: float | None = None,
    checkpoint_bytes: int | None = None,
) -> WeightEstimate:
    """Count the parameters that a config.json describes and the bytes of one rank.

    dtype: of what is not quantised; name and quantization (a launch line's flag) tell of the scheme when the config does
    not; params_b: billions of parameters in the name, used when the config cannot be counted or its count contradicts
    them; checkpoint_bytes: of the files, if they are there. Raises ModelError that asks for --weights.
    """
    scheme = _scheme(config, dtype=dtype, name=name, flag=quantization, needed=checkpoint_bytes is None)
    try:
        estimate = _counted(config, spec, ranks, scheme=scheme)
    except ModelError as reason:
        return _uncounted(str(reason), spec, ranks, scheme=scheme, params_b=params_b, checkpoint_bytes=checkpoint_bytes)
    if checkpoint_bytes is not None:
        # A plain checkpoint under --quantization shrinks while it loads; one that is quantised already does not.
        loaded = estimate.total_bytes + estimate.mtp_bytes if scheme.while_loading else checkpoint_bytes
        return estimate.rescaled(min(loaded, checkpoint_bytes), origin="index")
    counted_b = estimate.params / 1e9
    if params_b is not None and abs(counted_b - params_b) > max(_NAME_SHARE * params_b, _NAME_ROUNDING_B):
        why = f"the keys that are known of its config give {counted_b:,.0f} billion"
        return _uncounted(why, spec, ranks, scheme=scheme, params_b=params_b, checkpoint_bytes=None)
    return estimate


def _scheme(config: Mapping[str, Any], *, dtype: str, name: str, flag: str | None, needed: bool) -> Scheme:
    """The quantisation. Where files give the bytes it only weighs shares, and one that is not known may stay out."""
    try:
        return read_scheme(config, dtype=dtype, flag=flag, name=name)
    except ModelError:
        if needed:
            raise
        return read_scheme({}, dtype=dtype)


def _counted(config: Mapping[str, Any], spec: ModelSpec, ranks: Ranks, *, scheme: Scheme) -> WeightEstimate:
    parts = tuple(model_parts(config, spec))
    target = [part for part in parts if not part.name.startswith("mtp.")]
    mtp = [part for part in parts if part.name.startswith("mtp.")]
    return WeightEstimate(
        bytes=round(_rank_bytes(target, scheme, ranks, n_layers=len(spec.layers))),
        total_bytes=round(sum(scheme.part_bytes(part) for part in target)),
        params=sum(part.params for part in target),
        origin="config",
        note=_note(config, parts, scheme, pp=ranks.pp),
        mtp_bytes=round(sum(scheme.part_bytes(part) for part in mtp)),
    )


def _uncounted(
    reason: str, spec: ModelSpec, ranks: Ranks, *, scheme: Scheme, params_b: float | None, checkpoint_bytes: int | None
) -> WeightEstimate:
    """Equal shares of the files, or of the size in the name, whose embedding and head are not quantised."""
    why = reason.rstrip(".")
    if checkpoint_bytes is not None:
        note = f"the checkpoint's files, divided evenly, because {why}"
        return WeightEstimate(ceil_div(checkpoint_bytes, ranks.count), checkpoint_bytes, 0, "index", note)
    if params_b is None:
        raise ModelError(f"the weights cannot be counted ({why}); give --weights SIZE.")
    params = round(params_b * 1e9)
    plain = min(params, 2 * spec.vocab_size * spec.hidden_size)
    total = round(plain * scheme.plain_bytes + (params - plain) * scheme.matrix_bytes)
    notes = [f"from the size in the model's name, {params_b:g} billion parameters, because {why}", scheme.note]
    return WeightEstimate(ceil_div(total, ranks.count), total, params, "name", "; ".join(filter(None, notes)))


def _rank_bytes(parts: Sequence[Part], scheme: Scheme, ranks: Ranks, *, n_layers: int) -> float:
    """Of the fullest pipeline stage: its layers at their mean, and the larger of embedding and head (both when pp is 1)."""
    layers, ends = 0.0, [0.0, 0.0]
    for part in parts:
        # Expert parallelism cuts inside the tensor-parallel group, so that group's size counts unless ep is larger.
        sharing = max(ranks.tp, ranks.ep) if part.name.endswith(".experts") else ranks.tp
        size = scheme.part_bytes(part) / min(sharing, part.ways)
        if part.name.startswith("layers."):
            layers += size
        else:
            ends[part.name.startswith("lm_head")] += size
    if ranks.pp == 1:
        return layers + sum(ends)
    return layers * ceil_div(n_layers, ranks.pp) / n_layers + max(ends)


def _note(config: Mapping[str, Any], parts: Sequence[Part], scheme: Scheme, *, pp: int) -> str:
    notes = ["approximate: every matrix is taken to divide evenly; norms, routers and latent projections are whole"]
    if scheme.note:
        notes.append(scheme.note)
    if config.get("vision_config") and not any(part.name.startswith("visual") for part in parts):
        notes.append("the vision tower is not counted")
    if pp > 1:
        notes.append("pipeline stages are taken to hold mean layers")
    return "; ".join(notes)
