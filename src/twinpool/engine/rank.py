"""One rank: its weights, its buffer, and a step over both; rank 0 and those that follow it are made of these."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from twinpool import bootlog
from twinpool.config.resolve import Resolved
from twinpool.engine import host
from twinpool.engine.executor import Forward
from twinpool.engine.tensors import DTYPES, KvShape, Memory
from twinpool.errors import ConfigError
from twinpool.memory.arena import Arena
from twinpool.memory.host import HostArena
from twinpool.memory.ledger import Ledger
from twinpool.models.adopt import AdoptedModel, load_model
from twinpool.models.attention.cache import can_keep
from twinpool.models.attention.spec import GqaSpec
from twinpool.models.shapes import item_bytes
from twinpool.models.shard import Share
from twinpool.models.spec import ModelSpec
from twinpool.models.step_batch import PackedStep
from twinpool.units import round_up

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank's model in memory, and what the device had before and after. Bytes."""

    model: AdoptedModel
    pre_load_bytes: int
    available_bytes: int


def share_of(resolved: Resolved, rank: int) -> Share | None:
    """What that rank holds; None for all of it."""
    return Share(rank, resolved.tp_size) if resolved.tp_size > 1 else None


def free_bytes(*, ranks: int) -> int:
    """Free memory of one of `ranks` ranks of this machine, which share it."""
    return host.available_memory_bytes() // ranks


def load_rank(folder: Path, resolved: Resolved, *, pre_load_bytes: int, rank: int, say: Say) -> Loaded:
    """Weights in memory, as our layers hold them, and what that cost. Raises ModelError as load_model does."""
    say(bootlog.load_begin_line(pre_load_bytes))
    began_s = time.monotonic()
    model = load_model(
        folder,
        dtype=resolved.dtype,
        device=resolved.device,
        context_len=resolved.context_len,
        share=share_of(resolved, rank),
    )
    gc.collect()
    available_bytes = left_bytes(resolved, pre_load_bytes=pre_load_bytes, weight_bytes=model.weight_bytes)
    say(
        bootlog.load_end_line(
            elapsed_s=time.monotonic() - began_s,
            model_class=type(model.module).__name__,
            available_bytes=available_bytes,
            used_bytes=pre_load_bytes - available_bytes,
        )
    )
    return Loaded(model, pre_load_bytes, available_bytes)


def left_bytes(resolved: Resolved, *, pre_load_bytes: int, weight_bytes: int) -> int:
    """What a rank has left after its weights.

    Pages of a mapped file are not counted as used, so the weights are charged at least at their size.
    """
    available_bytes = max(0, pre_load_bytes - weight_bytes)
    if resolved.origins["device_memory_bytes"] == "measured":
        return min(available_bytes, free_bytes(ranks=resolved.tp_size))
    return available_bytes


def forward_of(model: AdoptedModel, memory: Memory) -> Forward:
    """The model over its memory, as the executor calls it. Raises ModelError for pages that are not the model's."""
    model.check_pages(memory)
    device = memory.buffer.device

    def forward(step: PackedStep) -> torch.Tensor:
        input_ids, sample_at = (torch.from_numpy(array).to(device) for array in (step.input_ids, step.sample_at))
        return model.forward(input_ids, step, memory, sample_at)

    return forward


def allocate(spec: ModelSpec, resolved: Resolved, ledger: Ledger, tier: HostArena | None) -> Memory:
    """The rank's one buffer. Raises ConfigError for pages that no dtype of ours fills."""
    _check_pages(resolved, ledger)
    arena = Arena(
        page_bytes=ledger.page_bytes,
        slot_bytes=ledger.slot_bytes,
        n_slots=ledger.max_mamba_cache_size,
        n_pages=ledger.n_pages,
    )
    return allocate_buffer(
        spec,
        arena,
        ranks=resolved.tp_size,
        page_size=resolved.page_size,
        kv_dtype=resolved.kv_cache_dtype,
        ssm_dtype=resolved.mamba_ssm_dtype,
        conv_dtype=resolved.mamba_conv_dtype,
        device=resolved.device,
        host=tier,
    )


def allocate_buffer(
    spec: ModelSpec,
    arena: Arena,
    *,
    ranks: int,
    page_size: int,
    kv_dtype: str,
    ssm_dtype: str,
    conv_dtype: str,
    device: str,
    host: HostArena | None,
) -> Memory:
    """A buffer of that geometry, with views of what one of `ranks` ranks keeps of each layer. page_size: tokens."""
    spec = spec.with_exact_index(page_tokens=page_size)
    attention = [layer.attention for layer in spec.layers if layer.attention is not None]
    kv_shapes = [_kv_share(shape, ranks) for shape in attention if isinstance(shape, KvShape)]
    assert len(kv_shapes) == len(attention), "adopted models keep keys and values by head, or a latent"
    return Memory(
        arena,
        page_size=page_size,
        kv_shapes=kv_shapes,
        state_shapes=spec.state_shapes(tp=ranks),
        kv_dtype=kv_dtype,
        ssm_dtype=ssm_dtype,
        conv_dtype=conv_dtype,
        device=device,
        host=host,
    )


def _kv_share(shape: KvShape, ranks: int) -> KvShape:
    """Heads by rank; a latent is on every rank (reference 1.7)."""
    return replace(shape, kv_heads=shape.kv_heads_per_rank(ranks)) if isinstance(shape, GqaSpec) else shape


def check_kv_dtype(resolved: Resolved) -> None:
    """Raise ConfigError for a --kv-cache-dtype that torch does not have on the device."""
    name, device = resolved.kv_cache_dtype, torch.device(resolved.device)
    if not can_keep(DTYPES[name], device):
        raise ConfigError(
            f"--kv-cache-dtype {name} is a type that torch {torch.__version__} cannot store and read on {device}; use "
            f"--kv-cache-dtype {resolved.dtype}, with {item_bytes(resolved.dtype)} bytes an element instead of {item_bytes(name)}."
        )


def _check_pages(resolved: Resolved, ledger: Ledger) -> None:
    """Raise ConfigError for pages that are no whole number of elements, which an index of odd bytes a token can make."""
    widths = (resolved.kv_cache_dtype, resolved.mamba_ssm_dtype, resolved.mamba_conv_dtype)
    width = max(item_bytes(dtype) for dtype in widths)
    if ledger.page_bytes % width:
        fitting = round_up(resolved.page_size, width)
        raise ConfigError(
            f"--page-size {resolved.page_size} makes pages of {ledger.page_bytes:,} bytes, which elements of {width} bytes do not "
            f"fill: use --page-size {fitting}."
        )
