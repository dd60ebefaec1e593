"""What lies around the mixers: linear layers with packed weights, norms, MLP, mixture of experts, the usual layer.

Activations are [T, features], contiguous, of the model's dtype. `residual` is added after rounding, in place, and returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from twinpool.errors import ModelError
from twinpool.models.bound import Step
from twinpool.models.group import Adds
from twinpool.models.native import CODES, native, use_native


class Linear(nn.Module):
    """y = x W^T + bias with one or more weights [n_i, k] side by side; the compiled form replaces the torch tensors."""

    def __init__(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None = None) -> None:
        super().__init__()
        weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        bias = None if biases is None else torch.cat(list(biases)).contiguous()
        self.n, self.k = weight.shape
        self.dtype = weight.dtype
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


def adopt_linear(module: Any) -> Linear:
    """Ours with the weight, and the bias if there is one, of a torch Linear."""
    return Linear([module.weight], None if module.bias is None else [module.bias])


def adopt_linears(*modules: Any) -> Linear:
    """Ours with the weights, and the biases if the first has one, of torch Linears of the same input, side by side."""
    biased = modules[0].bias is not None
    return Linear([module.weight for module in modules], [module.bias for module in modules] if biased else None)


class RmsNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.scale = weight.detach().float().contiguous()
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


def adopt_norm(module: Any) -> RmsNorm:
    """Ours with the weight of a transformers norm that keeps its epsilon as variance_epsilon, as most do."""
    return RmsNorm(module.weight, module.variance_epsilon)


class ZeroCentredNorm(RmsNorm):
    """x / rms(x) * (1 + weight)."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__(1.0 + weight.detach().float(), eps)


class PreNormLayer(nn.Module):
    """hidden += m mixer(norm(hidden)), then hidden += m mlp(second_norm(hidden)), m the multiplier.

    mixer: a module `(x, step, residual) -> residual` that adds in place; mlp: `(x, residual) -> residual`, likewise.
    """

    def __init__(
        self, *, norm: nn.Module, mixer: nn.Module, second_norm: nn.Module, mlp: nn.Module, multiplier: float = 1.0
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList([norm, mixer, second_norm, mlp])
        # Kept beside the list: looking modules up in it for every step costs more than it does here.
        self._norm, self._mixer = norm.forward, mixer.forward
        self._second_norm, self._mlp = second_norm.forward, mlp.forward
        self._multiplier = multiplier

    def over_ranks(self, summed: Callable[[Adds], Adds]) -> None:
        """Sum what mixer and MLP add over the ranks: `summed` makes a forward of such a sum out of theirs."""
        self._mixer, self._mlp = summed(self._mixer), summed(self._mlp)

    def forward(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """hidden [T, hidden_size], changed in place and returned."""
        if self._multiplier == 1.0:
            hidden = self._mixer(self._norm(hidden), step, hidden)
            return self._mlp(self._second_norm(hidden), hidden)  # type: ignore[no-any-return]
        # Two roundings, as a product and a sum: torch's add with a factor fuses them in some lanes and not in others.
        hidden.add_(self._mixer(self._norm(hidden), step, torch.zeros_like(hidden)).mul_(self._multiplier))
        return hidden.add_(self._mlp(self._second_norm(hidden), torch.zeros_like(hidden)).mul_(self._multiplier))


class Mlp(nn.Module):
    """residual += down(silu(gate(x)) * up(x)), or down(relu(up(x))^2) if squared_relu; gate_up is the one or the other.

    limit: gate is not above it, up within -limit and limit.
    """

    def __init__(self, *, gate_up: Linear, down: Linear, squared_relu: bool = False, limit: float = math.inf) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.squared_relu = squared_relu
        self.limit = limit

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x (normed), residual: [T, hidden_size]."""
        return self.down.forward(self.inner(x), residual)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """[T, intermediate size]: what goes into `down`."""
        opened = self.gate_up.forward(x)
        return squared_relu(opened) if self.squared_relu else gated_product(opened, self.limit)


def adopt_mlp(module: Any, *, limit: float = math.inf) -> Mlp:
    """Ours with the weights, and the biases if there are some, of gate_proj, up_proj and down_proj; limit: of an Mlp."""
    gate_up = adopt_linears(module.gate_proj, module.up_proj)
    return Mlp(gate_up=gate_up, down=adopt_linear(module.down_proj), limit=limit)


def check_width(what: str, *, heads: int, head_dim: int, columns: int) -> None:
    """Raise ModelError unless `heads` heads are as wide as the weights of theirs that config.json makes by its other keys."""
    if not isinstance(head_dim, int) or heads * head_dim != columns:
        raise ModelError(
            f"config.json says {heads} {what} heads of {head_dim!r} and makes {columns} columns of them, which must agree."
        )


def gated_product(gate_up: torch.Tensor, limit: float = math.inf) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) of [T, 2 n], gate first; [T, n]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if not use_native(gate_up.device):
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    out = torch.empty((rows, width), dtype=gate_up.dtype)
    native.silu_mul(gate_up.data_ptr(), 2 * width, out.data_ptr(), width, rows, width, limit, CODES[gate_up.dtype])
    return out


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2 of [T, n]; [T, n]."""
    if not use_native(x.device):
        return F.relu(x).square()
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype)
    native.squared_relu(x.data_ptr(), x.stride(0), out.data_ptr(), width, rows, width, CODES[x.dtype])
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How experts are chosen and weighted.

    linear: to one logit an expert, of the model's dtype or float32; scores are their softmax, or sigmoids. bias: float32 [experts],
    added for choosing only.
    groups: experts are in equal groups, and only the top_groups with the largest sum of their two best scores are open.
    normalise: weights are divided by their sum + epsilon; scale: a factor on them, last.
    """

    linear: Linear
    top_k: int
    normalise: bool
    sigmoid: bool = False
    bias: torch.Tensor | None = None
    groups: int = 1
    top_groups: int = 1
    epsilon: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Raises ModelError when there are fewer open experts than a token needs."""
        experts = self.linear.n
        regular = experts % self.groups == 0 and 1 <= self.top_groups <= self.groups
        opened = experts // self.groups * self.top_groups if regular else 0
        if not 1 <= self.top_k <= opened:
            raise ModelError(
                f"config.json asks for {self.top_k} of {experts} experts a token (num_experts_per_tok) from {self.top_groups} "
                f"of {self.groups} groups (topk_group, n_group), which have {opened}."
            )

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights float32, experts int64), both [T, top_k], of x [T, hidden_size]."""
        logits = self.linear.forward(x.to(self.linear.dtype)).float()
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        keys = scores if self.bias is None else scores + self.bias
        if self.groups > 1:
            grouped = keys.unflatten(-1, (self.groups, -1))
            best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1).topk(self.top_groups, -1).indices
            closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            keys = grouped.masked_fill(closed[..., None], float("-inf")).flatten(-2)
        chosen = keys.topk(self.top_k, -1).indices
        weights = scores.gather(-1, chosen)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + self.epsilon)
        return weights * self.scale, chosen


class Moe(nn.Module):
    """residual += sum of the chosen experts, weighted, plus the shared expert where there is one, gated if it has a gate.

    narrow, widen: experts work in the fewer columns of narrow(x), and their sum goes through widen; the shared one gets x.
    """

    def __init__(
        self,
        *,
        router: Router,
        experts: Sequence[Mlp],
        shared: Mlp | None = None,
        shared_gate: Linear | None = None,
        narrow: Linear | None = None,
        widen: Linear | None = None,
    ) -> None:
        super().__init__()
        assert router.bias is None or router.bias.dtype == torch.float32, "the kernel reads float32"
        assert shared is None or shared.limit == experts[0].limit, "the kernel has one limit"
        self.router = router
        self.linears = nn.ModuleList(part for part in (router.linear, shared_gate, narrow, widen) if part is not None)
        self.experts = nn.ModuleList(experts)
        self.shared = shared
        self.shared_gate = shared_gate
        self.narrow, self.widen = narrow, widen
        self.handle: Any = None
        if router.linear.handle is not None:
            self.handle = native.Moe(
                router=router.linear.handle,
                gate_up=[e.gate_up.handle for e in experts],
                down=[e.down.handle for e in experts],
                shared_gate_up=None if shared is None else shared.gate_up.handle,
                shared_down=None if shared is None else shared.down.handle,
                shared_gate=None if shared_gate is None else shared_gate.handle,
                narrow=None if narrow is None else narrow.handle,
                widen=None if widen is None else widen.handle,
                top_k=router.top_k,
                normalise=router.normalise,
                sigmoid=router.sigmoid,
                bias=0 if router.bias is None else router.bias.data_ptr(),
                groups=router.groups,
                top_groups=router.top_groups,
                epsilon=router.epsilon,
                scale=router.scale,
                squared_relu=experts[0].squared_relu,
                limit=experts[0].limit,
            )

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x (normed), residual: [T, hidden_size]."""
        if self.handle is None:
            return self._forward_torch(x, residual)
        at = residual.data_ptr()
        self.handle.run(x.data_ptr(), x.shape[0], at, at)
        return residual

    def _forward_torch(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router.choose(x)
        inputs = x if self.narrow is None else self.narrow.forward(x)
        total = _sum_of_experts(self.experts, inputs, weights, chosen)
        if self.widen is not None:
            total = self.widen.forward(total)
        if self.shared is not None:
            shared = self.shared.down.forward(self.shared.inner(x))
            total += shared if self.shared_gate is None else torch.sigmoid(self.shared_gate.forward(x)) * shared
        return residual.add_(total)


def _sum_of_experts(
    experts: Iterable[Any], x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """[T, inputs]: what the chosen experts, each an Mlp, make of x [T, inputs], weighted and summed in their order.

    weights (rounded to x's dtype), chosen: [T, top_k], as Router.choose gives them.
    """
    weights = weights.to(x.dtype)
    total = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        token, place = torch.where(chosen == number)
        if len(token):
            out = expert.down(expert.inner(x[token]))
            total.index_add_(0, token, out * weights[token, place, None])
    return total


def make_experts(module: Any, *, squared_relu: bool = False, limit: float = math.inf) -> list[Mlp]:
    """One MLP an expert, from a module with gate_up_proj [experts, 2 intermediate, hidden] (up_proj, [experts, intermediate,
    hidden], if squared_relu) and down_proj [experts, hidden, intermediate]; limit: of an Mlp.
    """
    opens = module.up_proj if squared_relu else module.gate_up_proj
    return [
        Mlp(gate_up=Linear([first]), down=Linear([second]), squared_relu=squared_relu, limit=limit)
        for first, second in zip(opens, module.down_proj, strict=True)
    ]


def make_router(gate: Any) -> Router:
    """Ours with the weights of a transformers DeepSeek-V3 router: by sigmoids, with a bias for the choice."""
    return Router(
        linear=Linear([gate.weight]),
        top_k=gate.top_k,
        sigmoid=True,
        bias=gate.e_score_correction_bias,
        groups=gate.num_group,
        top_groups=gate.topk_group,
        normalise=gate.norm_topk_prob,
        epsilon=1e-20,
        scale=gate.routed_scaling_factor,
    )
