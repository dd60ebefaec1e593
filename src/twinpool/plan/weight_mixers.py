"""Parameters of one layer's mixers: attention, and each kind of linear layer."""

from __future__ import annotations

from collections.abc import Iterator

from twinpool.errors import ModelError
from twinpool.models.attention.spec import DsaSpec, GqaSpec, MlaSpec
from twinpool.models.cca.spec import CcaSpec
from twinpool.models.gdn.spec import GdnSpec
from twinpool.models.inkling.spec import InklingConvSpec
from twinpool.models.kda.spec import KdaSpec
from twinpool.models.lightning.spec import LightningSpec
from twinpool.models.mamba1.spec import Mamba1Spec
from twinpool.models.mamba2.spec import Mamba2Spec
from twinpool.models.shapes import LayerSpec
from twinpool.models.shortconv.spec import ShortConvSpec
from twinpool.plan.weight_part import Part, Source
from twinpool.units import ceil_div

_LINEAR_NAMES = {
    "gdn": "linear_attn",
    "kda": "self_attn",
    "lightning": "self_attn",
    "shortconv": "conv",
    "cca": "self_attn",
}
_LATENT_HEAD_DIM = 128  # qk_nope_head_dim where a config leaves it out: transformers' kimi_linear and bailing_hybrid
_INDEXED_HEAD_DIM = 256  # the same of glm5_next


def mixer_parts(name: str, layer: LayerSpec, source: Source) -> Iterator[Part]:
    """Attention and linear modules of a layer called `name`. Raises ModelError: a key is missing, a kind is not known."""
    heads = source.reader.integer("num_attention_heads", default=0, least=0)
    attention = f"{name}.{'mixer' if source.nemotron else 'self_attn'}"
    if layer.attention is not None:
        yield from _attention(attention, layer.attention, source, heads=heads)
    if layer.window is not None:
        own = source.first("swa_num_attention_heads", default=heads)
        yield from _attention(attention, layer.window.heads, source, heads=own)
    if layer.linear is not None:
        kind = "mixer" if source.nemotron else _LINEAR_NAMES.get(source.spec.family, "mamba")
        yield from _linear(f"{name}.{kind}", layer.linear, source)


def _attention(name: str, attention: object, source: Source, *, heads: int) -> Iterator[Part]:
    if isinstance(attention, GqaSpec):
        yield from _grouped_heads(name, attention, source, heads=heads)
    elif isinstance(attention, MlaSpec):
        yield from _latent(name, attention, source, heads=heads, nope=_LATENT_HEAD_DIM)
    elif isinstance(attention, DsaSpec):
        yield from _latent(name, attention.latent, source, heads=heads, nope=_INDEXED_HEAD_DIM)
        yield from _index(f"{name}.indexer", attention, source)
    else:
        raise ModelError(f"attention of kind {type(attention).__name__} cannot be counted.")


def _grouped_heads(name: str, attention: GqaSpec, source: Source, *, heads: int) -> Iterator[Part]:
    """Queries (twice where they carry an output gate), keys, values, output; Inkling's relative positions."""
    hidden, reader = source.hidden, source.reader
    gated = source.spec.family == "gdn" and reader.values.get("attn_output_gate", True)
    yield Part(f"{name}.q_proj", hidden * heads * attention.head_dim * (2 if gated else 1))
    yield Part(f"{name}.k_proj", hidden * attention.kv_heads * attention.head_dim, attention.kv_heads)
    yield Part(f"{name}.v_proj", hidden * attention.kv_heads * attention.v_head_dim, attention.kv_heads)
    yield Part(f"{name}.o_proj", heads * attention.v_head_dim * hidden)
    if source.spec.family == "inkling":
        yield Part(f"{name}.r_proj", hidden * heads * reader.integer("d_rel", default=16))


def _latent(name: str, attention: MlaSpec, source: Source, *, heads: int, nope: int) -> Iterator[Part]:
    """Queries (through a narrow matrix where q_lora_rank says so), the latent of keys and values, output and its gate."""
    hidden, rope = source.hidden, attention.qk_rope_head_dim
    key = source.first("qk_nope_head_dim", default=nope)
    value = source.first("v_head_dim", default=key)
    query_rank = source.first("q_lora_rank")
    if query_rank:
        yield Part(f"{name}.q_a_proj", hidden * query_rank, 1)
        yield Part(f"{name}.q_b_proj", query_rank * heads * (key + rope))
    else:
        yield Part(f"{name}.q_proj", hidden * heads * (key + rope))
    yield Part(f"{name}.kv_a_proj_with_mqa", hidden * (attention.kv_lora_rank + rope), 1)
    yield Part(f"{name}.kv_b_proj", attention.kv_lora_rank * heads * (key + value))
    yield Part(f"{name}.o_proj", heads * value * hidden)
    if source.reader.values.get("mla_use_output_gate"):
        yield Part(f"{name}.g_proj", hidden * heads * value)


def _index(name: str, attention: DsaSpec, source: Source) -> Iterator[Part]:
    """The index of sparse attention: its queries, its one key, the gate that pools keys, a weight a head; all whole."""
    hidden, dim = source.hidden, attention.index_dim
    index_heads = source.first("index_n_heads", default=32)  # glm5_next's default
    yield Part(f"{name}.wq_b", (source.first("q_lora_rank") or hidden) * index_heads * dim, 1)
    yield Part(f"{name}.wk", hidden * dim, 1)
    yield Part(f"{name}.index_kpool_compress_gate", hidden * dim, 1, False)
    yield Part(f"{name}.weights_proj", hidden * index_heads, 1)


def _linear(name: str, linear: object, source: Source) -> Iterator[Part]:
    if isinstance(linear, GdnSpec):
        yield from _delta_net(name, linear, source)
    elif isinstance(linear, KdaSpec):
        yield from _kimi_delta(name, linear, source)
    elif isinstance(linear, LightningSpec):
        yield from _lightning(name, linear, source)
    elif isinstance(linear, Mamba1Spec):
        yield from _mamba1(name, linear, source)
    elif isinstance(linear, Mamba2Spec):
        yield from _mamba2(name, linear, source)
    elif isinstance(linear, ShortConvSpec):
        yield Part(f"{name}.in_proj", 3 * source.hidden * source.hidden)
        yield Part(f"{name}.out_proj", source.hidden * source.hidden)
        yield Part(f"{name}.conv", source.hidden * linear.kernel, matrix=False)
    elif isinstance(linear, CcaSpec):
        yield _query_key_convolutions(name, linear, source)
    elif isinstance(linear, InklingConvSpec):
        yield Part(f"{name}.sconv", 2 * source.hidden * linear.kernel, matrix=False)  # keys' and values' are far less
    else:
        raise ModelError(f"a linear layer of kind {type(linear).__name__} cannot be counted.")


def _delta_net(name: str, linear: GdnSpec, source: Source) -> Iterator[Part]:
    hidden, keys, values = source.hidden, linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
    yield Part(f"{name}.in_proj_qkv", hidden * (2 * keys + values))
    yield Part(f"{name}.in_proj_z", hidden * values)
    yield Part(f"{name}.in_proj_a", 2 * hidden * linear.value_heads)  # a and b
    yield Part(f"{name}.out_proj", values * hidden)
    yield Part(f"{name}.conv1d", (2 * keys + values) * linear.kernel, matrix=False)


def _kimi_delta(name: str, linear: KdaSpec, source: Source) -> Iterator[Part]:
    """Decay and gate go through one head's width, except in Ling-3 and where the config asks for a full gate."""
    hidden, inner = source.hidden, linear.heads * linear.head_dim
    low_rank, ling = (hidden + inner) * linear.head_dim, source.spec.architecture.startswith("Bailing")
    full_gate = ling or (source.reader.values.get("linear_attn_config") or {}).get("use_full_rank_gate")
    yield Part(f"{name}.qkv_proj", 3 * hidden * inner)
    yield Part(f"{name}.f_proj", (hidden * inner if ling else low_rank) + hidden * linear.heads)  # and a beta a head
    yield Part(f"{name}.g_proj", hidden * inner if full_gate else low_rank)
    yield Part(f"{name}.o_proj", inner * hidden)
    yield Part(f"{name}.conv1d", 3 * inner * linear.kernel, matrix=False)


def _lightning(name: str, linear: LightningSpec, source: Source) -> Iterator[Part]:
    """Queries, keys and values of equal width, an output gate and the output (transformers' minimax)."""
    matrix = source.hidden * linear.heads * linear.head_dim
    yield Part(f"{name}.qkv_proj", 3 * matrix)
    yield Part(f"{name}.output_gate", matrix)
    yield Part(f"{name}.out_proj", matrix)


def _mamba1(name: str, linear: Mamba1Spec, source: Source) -> Iterator[Part]:
    """In, out, the projection of step, B and C, the step's own, A, D and a convolution with a bias."""
    hidden, inner, states = source.hidden, linear.inner, linear.state_size
    automatic = ceil_div(hidden, 16)  # what "auto" and a missing key mean in transformers' mamba and jamba
    given = next(
        (key for key in ("mamba_dt_rank", "time_step_rank") if source.reader.values.get(key) not in (None, "auto")), ""
    )
    rank = source.first(given, default=automatic)
    yield Part(f"{name}.in_proj", 2 * hidden * inner)
    yield Part(f"{name}.x_proj", inner * (rank + 2 * states))
    yield Part(f"{name}.dt_proj", rank * inner)
    yield Part(f"{name}.out_proj", inner * hidden)
    yield Part(f"{name}.A_log", inner * (states + 2), matrix=False)  # and D and the step's bias
    yield Part(f"{name}.conv1d", inner * (linear.kernel + 1), matrix=False)


def _mamba2(name: str, linear: Mamba2Spec, source: Source) -> Iterator[Part]:
    inner, channels = linear.heads * linear.head_dim, 2 * linear.groups * linear.state_size
    yield Part(f"{name}.in_proj", source.hidden * (2 * inner + channels + linear.heads))
    yield Part(f"{name}.out_proj", inner * source.hidden)
    yield Part(f"{name}.conv1d", (inner + channels) * (linear.kernel + 1), matrix=False)  # and a bias


def _query_key_convolutions(name: str, linear: CcaSpec, source: Source) -> Part:
    """Zaya's two over queries and keys: one a channel, one that mixes the channels of a head; each has a bias."""
    channels = (linear.query_heads + linear.kv_heads) * linear.head_dim
    taps = (source.first("cca_time0", default=2), source.first("cca_time1", default=2))
    return Part(f"{name}.conv_qk", channels * (taps[0] + 1 + linear.head_dim * taps[1] + 1), matrix=False)
