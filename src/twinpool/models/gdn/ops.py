"""Gated DeltaNet over packed rows, states updated in place in their slots. Compiled kernels on the CPU, torch elsewhere."""

from __future__ import annotations

import torch

from twinpool.models import native
from twinpool.models.gdn import reference
from twinpool.models.rows import PackedRows
from twinpool.models.step_batch import StateLayer


def conv_silu(x: torch.Tensor, weight: torch.Tensor, rows: PackedRows, cache: StateLayer) -> torch.Tensor:
    """x: [T, C] in the model dtype, rows may be strided; weight: float32 [C, kernel]; → contiguous [T, C].

    Inputs are rounded to the window's dtype first, so that a window read back gives the very same sums.
    """
    conv = cache.conv
    if native.use(x):
        y = torch.empty(x.shape, dtype=x.dtype)
        native.kernels.conv1d_silu(
            rows.native, x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), weight.data_ptr(), 0, weight.shape[0],
            weight.shape[1], conv.data_ptr(), conv.stride(0) * conv.element_size(), 0, native.DTYPE_CODES[conv.dtype],
            native.DTYPE_CODES[x.dtype],
        )  # fmt: skip
        return y
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    keep = weight.shape[1] - 1
    for r, (begin, end) in enumerate(rows.spans()):
        slot = int(rows.step.slots[r])
        rounded = x[begin:end].to(conv.dtype).float()
        out, inputs = reference.causal_conv(rounded, conv[slot].float(), weight)
        y[begin:end] = out.to(x.dtype)
        at = int(rows.checkpoint_offsets[r])
        if at >= 0:
            conv[int(rows.step.checkpoint_slots[r])] = inputs[:, at : at + keep].to(conv.dtype)
        conv[slot] = inputs[:, inputs.shape[1] - keep :].to(conv.dtype)
    return y


def delta_rule(
    qkv: torch.Tensor,
    gate_inputs: tuple[torch.Tensor, torch.Tensor],
    gate_weights: tuple[torch.Tensor, torch.Tensor],
    *,
    shape: tuple[int, int, int, int],
    rows: PackedRows,
    cache: StateLayer,
) -> torch.Tensor:
    """qkv: contiguous [T, 2 Hk dk + Hv dv] after the convolution; gate_inputs: (a, b), each [T, Hv], rows may be strided;
    gate_weights: (A_log, dt_bias), float32 [Hv]; shape: (Hk, Hv, dk, dv); → [T, Hv, dv] in the model dtype."""
    (a, b), (a_log, dt_bias), (hk, hv, dk, dv) = gate_inputs, gate_weights, shape
    ssm = cache.ssm
    out = torch.empty(qkv.shape[0], hv, dv, dtype=qkv.dtype, device=qkv.device)
    if native.use(qkv):
        native.kernels.gated_delta_rule(
            rows.native, qkv.data_ptr(), qkv.stride(0), a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0),
            a_log.data_ptr(), dt_bias.data_ptr(), out.data_ptr(), hk, hv, dk, dv, ssm.data_ptr(),
            ssm.stride(0) * ssm.element_size(), 0, native.DTYPE_CODES[ssm.dtype], native.DTYPE_CODES[qkv.dtype],
        )  # fmt: skip
        return out
    decay, beta = reference.gates(a, b, a_log, dt_bias)
    q, k, v = qkv.split((hk * dk, hk * dk, hv * dv), dim=1)
    for r, (begin, end) in enumerate(rows.spans()):
        slot = int(rows.step.slots[r])
        row_out, states = reference.delta_rule(
            q[begin:end].reshape(-1, hk, dk), k[begin:end].reshape(-1, hk, dk), v[begin:end].reshape(-1, hv, dv),
            decay[begin:end], beta[begin:end], ssm[slot],
        )  # fmt: skip
        out[begin:end] = row_out.to(out.dtype)
        at = int(rows.checkpoint_offsets[r])
        if at >= 0:
            ssm[int(rows.step.checkpoint_slots[r])] = states[at - 1]
        ssm[slot] = states[-1]
    return out
