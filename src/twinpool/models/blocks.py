"""What lies around the mixers: linear layers with packed weights, norms, MLP, mixture of experts.

Activations are [T, features], contiguous, of the model's dtype. `residual` is added after rounding, in place, and returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from twinpool.models.native import CODES, native, use_native


class Linear(nn.Module):
    """y = x W^T + bias with one or more weights [n_i, k] side by side; the compiled form replaces the torch tensors."""

    def __init__(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None = None) -> None:
        super().__init__()
        weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        bias = None if biases is None else torch.cat(list(biases)).contiguous()
        self.n, self.k = weight.shape
        self.size_bytes = weight.numel() * weight.element_size()
        self.handle: Any = None
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        if use_native(weight.device):
            weight = weight.contiguous()
            self.handle = native.Linear(
                weight=weight.data_ptr(),
                ldw=weight.stride(0),
                bias=0 if bias is None else bias.data_ptr(),
                n=self.n,
                k=self.k,
                dtype=CODES[weight.dtype],
            )
            self.size_bytes = self.handle.size_bytes
        else:
            self.weight, self.bias = weight, bias

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None, *, wide: bool = False) -> torch.Tensor:
        """[T, n] of x's dtype; float32 and unrounded if wide. With a residual: residual += y, returned."""
        if self.handle is None:
            y = F.linear(x, self.weight, self.bias)  # type: ignore[arg-type]
            return y.float() if wide else y if residual is None else residual.add_(y)
        rows = x.shape[0]
        if residual is not None:
            at = residual.data_ptr()
            self.handle.run(x.data_ptr(), x.stride(0), rows, at, residual.stride(0), at)
            return residual
        out = torch.empty((rows, self.n), dtype=torch.float32 if wide else x.dtype)
        self.handle.run(x.data_ptr(), x.stride(0), rows, out.data_ptr(), self.n, 0, wide)
        return out


class ZeroCentredNorm(nn.Module):
    """x / rms(x) * (1 + weight)."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.scale = 1.0 + weight.detach().float()
        self.eps = eps
        self.native = use_native(weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normed x [T, features]."""
        if not self.native:
            wide = x.float()
            return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.scale).to(x.dtype)
        rows, width = x.shape
        out = torch.empty((rows, width), dtype=x.dtype)
        native.rms_norm(
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            width,
            rows,
            width,
            self.scale.data_ptr(),
            self.eps,
            CODES[x.dtype],
        )
        return out


class Mlp(nn.Module):
    """residual += down(silu(gate(x)) * up(x))."""

    def __init__(self, *, gate_up: Linear, down: Linear) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x (normed), residual: [T, hidden_size]."""
        out: torch.Tensor = self.down(gated_product(self.gate_up(x)), residual=residual)
        return out


def gated_product(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [T, 2 n], gate first; [T, n]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if not use_native(gate_up.device):
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up
    out = torch.empty((rows, width), dtype=gate_up.dtype)
    native.silu_mul(gate_up.data_ptr(), 2 * width, out.data_ptr(), width, rows, width, CODES[gate_up.dtype])
    return out


class Moe(nn.Module):
    """residual += sum of the chosen experts, weighted, plus the gated shared expert."""

    def __init__(
        self,
        *,
        router: Linear,
        experts: Sequence[Mlp],
        shared: Mlp,
        shared_gate: Linear,
        top_k: int,
        normalise: bool,
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = nn.ModuleList(experts)
        self.shared = shared
        self.shared_gate = shared_gate
        self.top_k = top_k
        self.normalise = normalise
        self.handle: Any = None
        if router.handle is not None:
            self.handle = native.Moe(
                router=router.handle,
                gate_up=[e.gate_up.handle for e in experts],
                down=[e.down.handle for e in experts],
                shared_gate_up=shared.gate_up.handle,
                shared_down=shared.down.handle,
                shared_gate=shared_gate.handle,
                top_k=top_k,
                normalise=normalise,
            )

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x (normed), residual: [T, hidden_size]."""
        if self.handle is None:
            return self._forward_torch(x, residual)
        at = residual.data_ptr()
        self.handle.run(x.data_ptr(), x.shape[0], at, at)
        return residual

    def _forward_torch(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).float().softmax(-1).topk(self.top_k, -1)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if len(token):
                out = expert.down(gated_product(expert.gate_up(x[token])))  # type: ignore[operator]
                total.index_add_(0, token, out * weights[token, place, None])
        shared = self.shared.down(gated_product(self.shared.gate_up(x)))
        return residual.add_(total + torch.sigmoid(self.shared_gate(x)) * shared)


def adopt_mlp(module: Any) -> Mlp | Moe:
    """Our block with the weights of a Qwen3-Next or Qwen3.5 MLP or sparse MoE block."""
    if not hasattr(module, "experts"):
        return Mlp(
            gate_up=Linear([module.gate_proj.weight, module.up_proj.weight]), down=Linear([module.down_proj.weight])
        )
    shared = adopt_mlp(module.shared_expert)
    assert isinstance(shared, Mlp), "a shared expert is a plain MLP"
    pairs = zip(module.experts.gate_up_proj, module.experts.down_proj, strict=True)
    return Moe(
        router=Linear([module.gate.weight]),
        experts=[Mlp(gate_up=Linear([gate_up]), down=Linear([down])) for gate_up, down in pairs],
        shared=shared,
        shared_gate=Linear([module.shared_expert_gate.weight]),
        top_k=module.gate.top_k,
        normalise=getattr(module.gate, "norm_topk_prob", True),
    )


def adopt_norm(module: Any) -> ZeroCentredNorm:
    """Our norm with the weight of a Qwen3-Next or Qwen3.5 RMSNorm."""
    return ZeroCentredNorm(module.weight, module.eps)
