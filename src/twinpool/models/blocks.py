"""What every family shares: linear layers, norms, gated MLP, mixture of experts. Weights are packed once, at load.

Rounding follows transformers: each module's output is rounded to the model dtype once, sums inside it are float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from twinpool.models import native


class Linear:
    """y = x · Wᵀ (+ bias). weight: [n, k]. With the compiled kernels W is kept packed only, and the torch weight may go."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.n, self.k = weight.shape
        self.dtype = weight.dtype
        self._packed: Any = None
        self._weight: torch.Tensor | None = weight.detach()
        self._bias = None if bias is None else bias.detach()
        if native.use(weight):
            contiguous = weight.contiguous()
            self._packed = native.kernels.PackedLinear(contiguous.data_ptr(), native.DTYPE_CODES[self.dtype], self.n, self.k)
            self._weight = None
            self._bias = None if bias is None else bias.float().contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, k], rows may be strided → [rows, n] in the model dtype."""
        if self._packed is None:
            assert self._weight is not None
            return F.linear(x, self._weight, self._bias)
        y = torch.empty(x.shape[0], self.n, dtype=self.dtype)
        bias = 0 if self._bias is None else self._bias.data_ptr()
        self._packed.run(x.data_ptr(), x.stride(0), y.data_ptr(), self.n, x.shape[0], bias)
        return y

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, k] → float32 [rows, n], not rounded to the model dtype on the way where the kernels run."""
        if self._packed is None:
            return self(x).float()
        y = torch.empty(x.shape[0], self.n, dtype=torch.float32)
        self._packed.run_f32(x.data_ptr(), x.stride(0), y.data_ptr(), self.n, x.shape[0])
        return y


class RmsNorm:
    """x · rsqrt(mean x² + eps) · (1 + w), as Qwen3-Next and Qwen3.5 have it. weight: [dim]."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight.detach().float().contiguous()
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, dim], rows may be strided → contiguous [rows, dim]."""
        if not native.use(x):
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
            return (wide * (1.0 + self._weight)).to(x.dtype)
        rows, dim = x.shape
        y = torch.empty(rows, dim, dtype=x.dtype)
        native.kernels.rms_norm(
            x.data_ptr(), x.stride(0), y.data_ptr(), dim, rows, dim, self._weight.data_ptr(), self._eps, True,
            native.DTYPE_CODES[x.dtype],
        )  # fmt: skip
        return y


class GatedRmsNorm:
    """w · (x · rsqrt(mean x² + eps)) · silu(gate). weight: [dim]."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight.detach().float().contiguous()
        self._eps = eps

    def __call__(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x, gate: contiguous [rows, dim] → [rows, dim]."""
        if not native.use(x):
            wide = x.float()
            wide = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)).to(x.dtype)
            return ((self._weight.to(x.dtype) * wide) * F.silu(gate.float())).to(x.dtype)
        rows, dim = x.shape
        y = torch.empty(rows, dim, dtype=x.dtype)
        native.kernels.rms_norm_gated(
            x.data_ptr(), gate.data_ptr(), y.data_ptr(), rows, dim, self._weight.data_ptr(), self._eps,
            native.DTYPE_CODES[x.dtype],
        )  # fmt: skip
        return y


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up; both [rows, dim], rows may be strided → contiguous."""
    if not native.use(gate):
        return F.silu(gate) * up
    rows, dim = gate.shape
    y = torch.empty(rows, dim, dtype=gate.dtype)
    native.kernels.silu_mul(
        gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0), y.data_ptr(), dim, rows, dim,
        native.DTYPE_CODES[gate.dtype],
    )  # fmt: skip
    return y


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x · sigmoid(gate); x contiguous [rows, dim], gate [rows, dim] with strided rows → contiguous."""
    if not native.use(x):
        return x * torch.sigmoid(gate)
    rows, dim = x.shape
    y = torch.empty(rows, dim, dtype=x.dtype)
    native.kernels.sigmoid_mul(
        x.data_ptr(), gate.data_ptr(), gate.stride(0), y.data_ptr(), rows, dim, native.DTYPE_CODES[x.dtype]
    )
    return y


class Mlp:
    """down(silu(gate(x)) · up(x)), gate and up in one product."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        self._inner = gate.shape[0]
        self._gate_up = Linear(torch.cat((gate, up)))
        self._down = Linear(down)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, hidden]."""
        both = self._gate_up(x)
        return self._down(silu_mul(both[:, : self._inner], both[:, self._inner :]))


class Moe:
    """Top-k experts and a gated shared expert, as Qwen's MoE blocks have them. Tokens meet their experts in ascending order, so
    that a token's sum does not depend on who else was routed where."""

    def __init__(self, block: Any) -> None:
        router, experts, shared = block.gate, block.experts, block.shared_expert
        self._top_k = router.top_k
        self._normalise = getattr(router, "norm_topk_prob", True)
        self._router = Linear(router.weight)
        inner = experts.intermediate_dim
        self._experts = [
            Mlp(gate_up[:inner], gate_up[inner:], down)
            for gate_up, down in zip(experts.gate_up_proj, experts.down_proj, strict=True)
        ]
        self._shared = Mlp(shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight)
        self._shared_gate = Linear(block.shared_expert_gate.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, hidden]."""
        probabilities = torch.softmax(self._router(x), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(probabilities, self._top_k, dim=-1)
        if self._normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.to(x.dtype)
        routed = torch.zeros_like(x)
        for expert in torch.unique(chosen).tolist():
            tokens, places = torch.where(chosen == expert)
            said = self._experts[expert](x[tokens]) * weights[tokens, places, None]
            routed.index_add_(0, tokens, said)
        shared = self._shared(x)
        gate = self._shared_gate(x).expand(-1, x.shape[1]).contiguous()
        return routed + sigmoid_mul(shared, gate)
