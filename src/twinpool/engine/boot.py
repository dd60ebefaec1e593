"""From options to a running engine: find the model, divide the memory, wire everything, and say so in the log
(reference 2.1).
"""

from __future__ import annotations

import gc
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from twinpool import bootlog
from twinpool.clock import Clock, WallClock
from twinpool.config.options import ServeOptions
from twinpool.config.resolve import DeviceFacts, Resolved, resolve
from twinpool.engine import checkpoint, host
from twinpool.engine.core import Engine, EngineFacts
from twinpool.engine.disk import open_disk_tier
from twinpool.engine.executor import Forward, TorchExecutor
from twinpool.engine.report import BatchLog
from twinpool.engine.tensors import KvShape, Memory
from twinpool.engine.text import Tokenizer
from twinpool.errors import ConfigError, ModelError
from twinpool.memory.arena import Arena
from twinpool.memory.budget import plan_memory
from twinpool.memory.host import HostArena
from twinpool.memory.host_budget import host_arena
from twinpool.memory.inputs import memory_request
from twinpool.memory.ledger import Ledger
from twinpool.models.adopt import SOURCES, AdoptedModel, load_model
from twinpool.models.native import set_threads, use_native
from twinpool.models.shapes import item_bytes
from twinpool.models.spec import ModelSpec
from twinpool.models.step_batch import PackedStep
from twinpool.wiring import build_scheduler

log = logging.getLogger("twinpool.engine")


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model in memory, and what the device had before and after. Bytes."""

    model: AdoptedModel
    pre_load_bytes: int
    available_bytes: int


def boot_engine(options: ServeOptions, *, poison_freed: bool = False, clock: Clock | None = None) -> Engine:
    """Load the model and build an engine that is ready for requests.

    poison_freed: fill freed pages and slots with NaN (tests). Raises ConfigError, ModelError or MemoryRefusal.
    """
    clock = clock or WallClock()
    folder = checkpoint.find_folder(options.model_path, revision=options.revision)
    spec = checkpoint.read_spec(folder)
    if spec.architecture not in SOURCES:  # told before the slow part; load_model asks again
        raise ModelError(f"{spec.architecture} can be planned but not served yet; served: {', '.join(SOURCES)}.")
    pre_load_bytes = options.device_memory_bytes or host.available_memory_bytes()
    resolved = resolve(options, spec, DeviceFacts(pre_load_bytes))
    for warning in (*spec.warnings, *resolved.warnings):
        log.warning(warning)
    tokenizer = _load_tokenizer(resolved, folder)
    threads = resolved.threads or host.usable_cores()
    set_threads(threads)
    loaded = _load_model(folder, resolved, pre_load_bytes)
    ledger = plan_memory(
        memory_request(spec, resolved, pre_load_bytes=loaded.pre_load_bytes, available_bytes=loaded.available_bytes)
    )
    tier = _host_tier(resolved, ledger)
    memory = _allocate(spec, resolved, ledger, tier)
    disk = open_disk_tier(resolved, memory.arena, folder)
    executor = TorchExecutor(
        forward=_forward(loaded.model, memory),
        memory=memory,
        # Our kernels have threads of their own, and torch's would only compete with them.
        torch_threads=1 if use_native(memory.buffer.device) else threads,
        store=disk.put if disk is not None else None,
    )
    scheduler = build_scheduler(resolved, ledger, clock=clock, host=tier, storage=disk, tell_freed=poison_freed)
    facts = EngineFacts(
        options=options,
        resolved=resolved,
        ledger=ledger,
        spec=spec,
        model_name=resolved.served_model_name,
        eos_token_ids=tokenizer.eos_token_ids,
        weight_bytes=loaded.model.weight_bytes,
        startup_available_bytes=loaded.available_bytes,
    )
    engine = Engine(facts=facts, scheduler=scheduler, executor=executor, tokenizer=tokenizer, clock=clock, disk=disk)
    engine.observers.append(
        BatchLog(book=scheduler.book, clock=clock, decode_log_interval=resolved.decode_log_interval)
    )
    _log_pools(facts, memory.arena.total_bytes, tier)
    if disk is not None:
        found = disk.store.stats
        log.info(
            bootlog.disk_line(
                str(disk.store.path),
                segments=found.segments,
                used_bytes=found.used_bytes,
                limit_bytes=found.limit_bytes,
            )
        )
    return engine


def _load_tokenizer(resolved: Resolved, folder: Path) -> Tokenizer:
    tokenizer_folder = folder
    if resolved.tokenizer_path is not None:
        tokenizer_folder = checkpoint.find_folder(resolved.tokenizer_path, flag="--tokenizer-path")
    tokenizer = Tokenizer.load(tokenizer_folder, config_folder=folder)
    if resolved.chat_template is not None:
        try:
            tokenizer.hf.chat_template = Path(resolved.chat_template).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template {resolved.chat_template} cannot be read: {error}.") from error
    return tokenizer


def _load_model(folder: Path, resolved: Resolved, pre_load_bytes: int) -> _Loaded:
    """Weights in memory, as our layers hold them, and what that cost."""
    log.info(bootlog.load_begin_line(pre_load_bytes))
    began_s = time.monotonic()
    model = load_model(folder, dtype=resolved.dtype, device=resolved.device, context_len=resolved.context_len)
    gc.collect()
    # Pages of a mapped file are not counted as used, so the weights are charged at least at their size.
    available_bytes = max(0, pre_load_bytes - model.weight_bytes)
    if resolved.origins["device_memory_bytes"] == "measured":
        available_bytes = min(available_bytes, host.available_memory_bytes())
    log.info(
        bootlog.load_end_line(
            elapsed_s=time.monotonic() - began_s,
            model_class=type(model.module).__name__,
            available_bytes=available_bytes,
            used_bytes=pre_load_bytes - available_bytes,
        )
    )
    return _Loaded(model, pre_load_bytes, available_bytes)


def _forward(model: AdoptedModel, memory: Memory) -> Forward:
    """The model over its memory, as the executor calls it."""
    device = memory.buffer.device

    def forward(step: PackedStep) -> torch.Tensor:
        input_ids, sample_at = (torch.from_numpy(array).to(device) for array in (step.input_ids, step.sample_at))
        return model.forward(input_ids, step, memory, sample_at)

    return forward


def _host_tier(resolved: Resolved, ledger: Ledger) -> HostArena | None:
    """Host memory for evicted prefixes, if it is asked for, out of what the host will have left."""
    available_bytes = host.available_memory_bytes()
    if resolved.device == "cpu":
        # The device's pools lie in the same memory and are handed out when they are written, so nobody has counted them.
        pools = ledger.conv_pool_bytes + ledger.ssm_pool_bytes + ledger.extra_pool_bytes + ledger.kv_pool_bytes
        available_bytes = max(0, available_bytes - pools)
    return host_arena(resolved, ledger, available_bytes=available_bytes)


def _allocate(spec: ModelSpec, resolved: Resolved, ledger: Ledger, tier: HostArena | None) -> Memory:
    """The rank's one buffer."""
    attention = [layer.attention for layer in spec.layers if layer.attention is not None]
    kv_shapes = [shape for shape in attention if isinstance(shape, KvShape)]
    assert len(kv_shapes) == len(attention), "adopted models keep keys and values by head, or a latent"
    _check_pages(resolved, ledger)
    arena = Arena(
        page_bytes=ledger.page_bytes,
        slot_bytes=ledger.slot_bytes,
        n_slots=ledger.max_mamba_cache_size,
        n_pages=ledger.n_pages,
    )
    return Memory(
        arena,
        page_size=resolved.page_size,
        kv_shapes=kv_shapes,
        state_shapes=spec.state_shapes(),
        kv_dtype=resolved.kv_cache_dtype,
        ssm_dtype=resolved.mamba_ssm_dtype,
        conv_dtype=resolved.mamba_conv_dtype,
        device=resolved.device,
        host=tier,
    )


def _check_pages(resolved: Resolved, ledger: Ledger) -> None:
    """Raise ConfigError for pages that are no whole number of elements, which an index of odd bytes a token can make."""
    widths = (resolved.kv_cache_dtype, resolved.mamba_ssm_dtype, resolved.mamba_conv_dtype)
    width = max(item_bytes(dtype) for dtype in widths)
    if ledger.page_bytes % width:
        fitting = resolved.page_size * width // math.gcd(ledger.page_bytes, width)
        raise ConfigError(
            f"--page-size {resolved.page_size} makes pages of {ledger.page_bytes:,} bytes, which elements of {width} bytes do not "
            f"fill: use --page-size {fitting}."
        )


def _log_pools(facts: EngineFacts, arena_bytes: int, tier: HostArena | None) -> None:
    """The lines after the weights, then our two tables: every value with its origin, and every byte with its."""
    resolved, ledger = facts.resolved, facts.ledger
    # The pools are zero pages that the system hands out when they are first written: what they will take is taken off.
    left_bytes = max(0, facts.startup_available_bytes - arena_bytes)
    for warning in ledger.warnings:
        log.warning(warning)
    for line in bootlog.pool_lines(ledger, kv_dtype=resolved.kv_cache_dtype)[len(ledger.warnings) :]:
        log.info(line)
    log.info(bootlog.pool_end_line(left_bytes))
    attached = tier is not None and resolved.radix_cache
    log.info(bootlog.tree_line(hybrid_ssm=facts.spec.n_linear_layers > 0, hicache_attached=attached))
    log.info(
        bootlog.scheduler_line(
            ledger,
            chunked_prefill_size=resolved.chunked_prefill_size,
            max_prefill_tokens=resolved.max_prefill_tokens,
            context_len=resolved.context_len,
            available_bytes=left_bytes,
            device=resolved.device,
        )
    )
    if tier is not None:
        _log_host(tier, ledger)
    log.info("Settings\n%s", bootlog.values_table(resolved.rows()))
    log.info("Memory\n%s", bootlog.ledger_table(ledger, host=_host_row(tier, resolved)))


def _log_host(tier: HostArena, ledger: Ledger) -> None:
    """What the host tier takes and covers, and whether that is worth having."""
    for line in bootlog.host_lines(tier, ledger):
        log.info(line)
    for warning in bootlog.host_warnings(tier, ledger):
        log.warning(warning)


def _host_row(tier: HostArena | None, resolved: Resolved) -> tuple[int, str] | None:
    """Bytes of the host tier and where their number comes from."""
    if tier is None:
        return None
    given = any(resolved.origins[name] == "flag" for name in ("hicache_size", "hicache_ratio"))
    return tier.total_bytes, "flag" if given else "derived"
