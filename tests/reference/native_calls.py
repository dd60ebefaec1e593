"""Tensors for the compiled kernels by plain address, and the same formulas in torch, float32, written from their definition."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from twinpool import _native as native

CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, *, scale: float = 1.0) -> None:
    """Fails unless got is want within the dtype's tolerance, `scale` times."""
    limit = TOLERANCE[dtype] * scale
    torch.testing.assert_close(got.float(), want.float(), rtol=limit, atol=limit)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal to the last bit (NaN and signs of zero included)."""
    whole = torch.int32 if got.element_size() == 4 else torch.int16
    return bool(torch.equal(got.contiguous().view(whole), want.contiguous().view(whole)))


@dataclass
class Packed:
    """A native.Rows and the arrays it looks at. rows: (prefix, tokens, slot, checkpoint offset or -1, checkpoint slot)."""

    rows: list[tuple[int, int, int, int, int]]
    tables: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        ints = np.array(self.rows, np.int32).reshape(-1, 5).T.copy()
        self.prefixes, lengths, self.slots, self.marks, self.copies = (np.ascontiguousarray(x) for x in ints)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        if not self.tables:
            self.tables = [np.zeros(1, np.int32) for _ in self.rows]
        self.addresses = np.array([t.ctypes.data for t in self.tables], np.int64)
        arrays = (self.offsets, self.prefixes, self.slots, self.marks, self.copies, self.addresses)
        self.handle = native.Rows(len(self.rows), *(x.ctypes.data for x in arrays))


@dataclass(frozen=True)
class Slots:
    """State slots as one byte arena: conv window [C, k - 1], then the matrix [hv, dv, dk], with a gap before the next slot."""

    conv: torch.Tensor
    ssm: torch.Tensor
    raw: torch.Tensor
    stride_bytes: int
    ssm_offset_bytes: int

    @staticmethod
    def of(
        n: int, conv: tuple[int, int], ssm: tuple[int, int, int], conv_dtype: torch.dtype, ssm_dtype: torch.dtype
    ) -> Slots:
        """NaN everywhere."""
        conv_bytes = -(-conv[0] * conv[1] * conv_dtype.itemsize // 64) * 64
        stride = -(-(conv_bytes + int(np.prod(ssm)) * ssm_dtype.itemsize + 4) // 64) * 64
        raw = torch.full((n * stride,), 0xFF, dtype=torch.uint8)

        def part(shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> torch.Tensor:
            whole = raw.view(dtype)
            inner = torch.empty(shape).stride()
            return whole.as_strided((n, *shape), (stride // dtype.itemsize, *inner), offset // dtype.itemsize)

        return Slots(part(conv, conv_dtype, 0), part(ssm, ssm_dtype, conv_bytes), raw, stride, conv_bytes)


def conv1d_silu(
    p: Packed, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slots: Slots
) -> torch.Tensor:
    """y like x; the windows in `slots` move on."""
    y = torch.full_like(x, float("nan"))
    native.conv1d_silu(
        p.handle, x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
        weight.shape[0], weight.shape[1], slots.raw.data_ptr(), slots.stride_bytes, 0, CODES[slots.conv.dtype], CODES[x.dtype],
    )  # fmt: skip
    return y


def conv_formula(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, window: torch.Tensor
) -> torch.Tensor:
    """silu of the causal convolution of one row x [T, C] behind window [C, k - 1], and the window after it."""
    line = torch.cat([window.float(), x.to(window.dtype).float().T], 1)
    y = F.conv1d(line[None], weight[:, None], bias, groups=len(weight))[0].T
    return F.silu(y), line[:, line.shape[1] - window.shape[1] :]


@dataclass(frozen=True)
class Heads:
    """Sizes of a delta rule layer."""

    hk: int
    hv: int
    dk: int
    dv: int

    @property
    def width(self) -> int:
        """Columns of q | k | v."""
        return 2 * self.hk * self.dk + self.hv * self.dv


@dataclass(frozen=True)
class RuleInputs:
    """qkv [T, width], a and b [T, hv] of the activations' dtype; a_log and dt_bias float32 [hv]."""

    qkv: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor

    @staticmethod
    def random(heads: Heads, tokens: int, dtype: torch.dtype, seed: int = 0) -> RuleInputs:
        """Normal everything; the rows of qkv, a and b lie in one wider tensor, as a projection leaves them."""
        torch.manual_seed(seed)
        wide = torch.randn(tokens, heads.width + 2 * heads.hv + 3).to(dtype)
        qkv, a, b, _ = wide.split([heads.width, heads.hv, heads.hv, 3], 1)
        return RuleInputs(qkv, a, b, torch.randn(heads.hv) * 0.5, torch.randn(heads.hv))

    def cut(self, begin: int, end: int) -> RuleInputs:
        """Tokens [begin, end)."""
        return RuleInputs(self.qkv[begin:end], self.a[begin:end], self.b[begin:end], self.a_log, self.dt_bias)


def delta_rule(p: Packed, heads: Heads, x: RuleInputs, slots: Slots) -> torch.Tensor:
    """out [T, hv, dv]; the matrices in `slots` move on."""
    out = torch.full((len(x.qkv), heads.hv, heads.dv), float("nan"), dtype=x.qkv.dtype)
    native.gated_delta_rule(
        p.handle, x.qkv.data_ptr(), x.qkv.stride(0), x.a.data_ptr(), x.a.stride(0), x.b.data_ptr(), x.b.stride(0),
        x.a_log.data_ptr(), x.dt_bias.data_ptr(), out.data_ptr(), heads.hk, heads.hv, heads.dk, heads.dv, slots.raw.data_ptr(),
        slots.stride_bytes, slots.ssm_offset_bytes, CODES[slots.ssm.dtype], CODES[x.qkv.dtype],
    )  # fmt: skip
    return out


def rule_formula(heads: Heads, x: RuleInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, hv, dv] in float32 and the final state [hv, dv, dk], rounded to state's dtype after each token."""
    dtype, repeat = state.dtype, heads.hv // heads.hk
    q, k, v = x.qkv.float().split([heads.hk * heads.dk, heads.hk * heads.dk, heads.hv * heads.dv], 1)
    q, k = (t.reshape(-1, heads.hk, heads.dk).repeat_interleave(repeat, 1) for t in (q, k))
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    q, v = q * heads.dk**-0.5, v.reshape(-1, heads.hv, heads.dv)
    decay = torch.exp(-torch.exp(x.a_log) * F.softplus(x.a.float() + x.dt_bias))
    beta = torch.sigmoid(x.b.float()).to(x.b.dtype).float()
    s, outs = state.float(), []
    for t in range(len(q)):
        s = s * decay[t][:, None, None]
        delta = (v[t] - (s * k[t][:, None]).sum(-1)) * beta[t][:, None]
        s = s + delta[:, :, None] * k[t][:, None]
        outs.append((s * q[t][:, None]).sum(-1))
        s = s.to(dtype).float()
    return torch.stack(outs), s


@dataclass(frozen=True)
class Cache:
    """Pages of one arena: [page][token][K of all heads | V of all heads | a gap], NaN where nothing was written."""

    raw: torch.Tensor
    page_size: int
    kv_heads: int
    dim: int

    @staticmethod
    def of(pages: int, page_size: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Cache:
        """NaN everywhere."""
        return Cache(
            torch.full((pages, page_size, 2 * kv_heads * dim + 4), float("nan"), dtype=dtype), page_size, kv_heads, dim
        )

    @property
    def place(self) -> tuple[int, ...]:
        """base, page stride, offsets of K and V, token stride: bytes."""
        item, width = self.raw.element_size(), self.kv_heads * self.dim
        return self.raw.data_ptr(), self.raw.stride(0) * item, 0, width * item, self.raw.stride(1) * item


def write_kv(p: Packed, cache: Cache, k: torch.Tensor, v: torch.Tensor) -> None:
    """k, v [T, kv_heads, dim] into the pages."""
    native.write_kv(
        p.handle, k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0), cache.kv_heads, cache.dim, cache.page_size,
        *cache.place, CODES[k.dtype], CODES[cache.raw.dtype],
    )  # fmt: skip


def attention(p: Packed, cache: Cache, q: torch.Tensor) -> torch.Tensor:
    """out like q [T, heads, dim], scale 1 / sqrt(dim)."""
    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    native.paged_attention(
        p.handle, q.data_ptr(), q.stride(0), q.stride(1), out.data_ptr(), q.shape[1], cache.kv_heads, cache.dim, cache.dim**-0.5,
        cache.page_size, *cache.place, CODES[q.dtype], CODES[cache.raw.dtype],
    )  # fmt: skip
    return out


def attention_formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    """The last len(q) positions of one sequence attend to all before them; float32 [T, heads, dim]."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.to(kv_dtype).float().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * q.shape[2] ** -0.5
    ahead = torch.arange(len(k))[None] > torch.arange(len(k) - len(q), len(k))[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, float("-inf")).softmax(-1), v)


def linear(handle: native.PackedLinear, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T (+ bias) of x's dtype."""
    y = torch.full((len(x), handle.n), float("nan"), dtype=x.dtype)
    handle.run(x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), len(x), 0 if bias is None else bias.data_ptr())
    return y
