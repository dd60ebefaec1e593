"""From options to a running engine: find the model, divide the memory, wire everything, and say so in the log
(reference 2.1).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from twinpool import bootlog
from twinpool.clock import Clock, WallClock
from twinpool.config.idle import given_fields, idle_flags
from twinpool.config.options import ServeOptions
from twinpool.config.resolve import DeviceFacts, Resolved, resolve
from twinpool.engine import checkpoint, host
from twinpool.engine.core import Engine, EngineFacts
from twinpool.engine.disk import DiskTier, check_disk, open_disk_tier
from twinpool.engine.executor import TorchExecutor
from twinpool.engine.rank import allocate, check_kv_dtype, forward_of, free_bytes, load_rank
from twinpool.engine.rank_boot import RankLog, agree, join_ranks, start_ranks
from twinpool.engine.rank_segments import Store
from twinpool.engine.ranks import Pools, Ranks
from twinpool.engine.report import BatchLog
from twinpool.engine.restore import LayerParts
from twinpool.engine.text import Tokenizer
from twinpool.errors import ConfigError, ModelError
from twinpool.memory.budget import plan_memory
from twinpool.memory.host import HostArena
from twinpool.memory.host_advice import HostMemory
from twinpool.memory.host_budget import host_arena
from twinpool.memory.inputs import memory_request
from twinpool.memory.ledger import Ledger
from twinpool.models.adopt import SOURCES
from twinpool.models.native import native, set_threads, use_native
from twinpool.models.spec import ModelSpec
from twinpool.wiring import build_scheduler

log = logging.getLogger("twinpool.engine")


def boot_engine(options: ServeOptions, *, poison_freed: bool = False, clock: Clock | None = None) -> Engine:
    """Load the model and build an engine that is ready for requests; with --tp-size, the processes of the other ranks as well.

    poison_freed: fill freed pages and slots with NaN (tests). Raises ConfigError, ModelError, MemoryRefusal or RankLost.
    """
    folder = checkpoint.find_folder(options.model_path, revision=options.revision)
    spec = checkpoint.read_spec(folder)
    if spec.architecture not in SOURCES:  # told before the slow part; load_model asks again
        raise ModelError(f"{spec.architecture} can be planned but not served yet; served: {', '.join(SOURCES)}.")
    spec.check_tp(options.tp_size)
    pre_load_bytes = options.device_memory_bytes or free_bytes(ranks=options.tp_size)
    resolved = resolve(options, spec, DeviceFacts(pre_load_bytes))
    check_disk(resolved, memory_request(spec, resolved, pre_load_bytes=pre_load_bytes, available_bytes=pre_load_bytes))
    check_kv_dtype(resolved)
    resolved = replace(resolved, warnings=_early_warnings(options, resolved, spec))
    for warning in resolved.warnings:
        log.warning(warning)
    tokenizer = _load_tokenizer(resolved, folder)
    ranks = Ranks(resolved.tp_size) if resolved.tp_size > 1 else None
    try:
        parts = _Parts(
            options, resolved, spec, folder, tokenizer, poison_freed=poison_freed, clock=clock or WallClock()
        )
        return _build(parts, pre_load_bytes, ranks)
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def _early_warnings(options: ServeOptions, resolved: Resolved, spec: ModelSpec) -> tuple[str, ...]:
    """What there is to warn about before anything is loaded."""
    found = [*resolved.warnings, *idle_flags(options, among=given_fields(options))]
    if resolved.kv_cache_dtype == "fp8_e4m3" and spec.n_attention_layers:
        found.append(
            "Keys and values are kept in fp8_e4m3 without scales (1.0 for all of them): compare answers on your own tasks."
        )
    if native is None:
        found.append(
            "The compiled kernels are not there, so torch does their work, slowly: install a C++ compiler, then twinpool again."
        )
    threads = _all_threads(resolved)
    if threads < resolved.tp_size:
        of = "--threads" if resolved.threads else "cores"
        found.append(
            f"--tp-size {resolved.tp_size} starts more ranks than there are {of} ({threads}), and in every layer each waits for all "
            f"others: use at most {threads}."
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What is known of an engine before anything is loaded."""

    options: ServeOptions
    resolved: Resolved
    spec: ModelSpec
    folder: Path
    tokenizer: Tokenizer
    poison_freed: bool
    clock: Clock


def _build(parts: _Parts, pre_load_bytes: int, ranks: Ranks | None) -> Engine:
    """Weights, memory, and an engine over them."""
    resolved, spec, clock = parts.resolved, parts.spec, parts.clock
    say = _rank_log(resolved).info
    threads = _threads_of_rank(resolved)
    set_threads(threads)
    if ranks is not None:
        start_ranks(
            ranks, folder=parts.folder, spec=spec, resolved=resolved, pre_load_bytes=pre_load_bytes, threads=threads
        )
    loaded = load_rank(parts.folder, resolved, pre_load_bytes=pre_load_bytes, rank=0, say=say)
    available_bytes = loaded.available_bytes if ranks is None else agree(ranks, resolved, loaded)
    ledger = plan_memory(memory_request(spec, resolved, pre_load_bytes=pre_load_bytes, available_bytes=available_bytes))
    host_tier = _host_tier(resolved, ledger)
    tier = host_tier.arena
    memory = allocate(spec, resolved, ledger, tier)
    disk = open_disk_tier(resolved, memory.arena, parts.folder)
    facts = EngineFacts(
        options=parts.options,
        resolved=replace(resolved, warnings=(*resolved.warnings, *ledger.warnings, *host_tier.warnings)),
        ledger=ledger,
        spec=spec,
        model_name=resolved.served_model_name,
        eos_token_ids=parts.tokenizer.eos_token_ids,
        weight_bytes=loaded.model.weight_bytes,
        startup_available_bytes=available_bytes,
    )
    _log_pools(facts, memory.arena.total_bytes, host_tier)
    if disk is not None:
        _log_disk(disk)
    store: Store | None = disk.put if disk is not None else None
    if ranks is not None:
        pools = Pools(ledger, tier)
        store = join_ranks(ranks, loaded.model, resolved=resolved, pools=pools, put=store, say=log.info)
    executor = TorchExecutor(
        forward=forward_of(loaded.model, memory),
        memory=memory,
        # Our kernels have threads of their own, and torch's would only compete with them.
        torch_threads=1 if use_native(memory.buffer.device) else threads,
        store=store,
        ranks=ranks,
        layers=LayerParts.of(spec, memory),
    )
    scheduler = build_scheduler(resolved, ledger, clock=clock, host=tier, storage=disk, tell_freed=parts.poison_freed)
    engine = Engine(
        facts=facts,
        scheduler=scheduler,
        executor=executor,
        tokenizer=parts.tokenizer,
        clock=clock,
        disk=disk,
        ranks=ranks,
    )
    engine.observers.append(
        BatchLog(book=scheduler.book, clock=clock, decode_log_interval=resolved.decode_log_interval)
    )
    return engine


def _threads_of_rank(resolved: Resolved) -> int:
    """An equal part of the threads, one at least."""
    return max(1, _all_threads(resolved) // resolved.tp_size)


def _all_threads(resolved: Resolved) -> int:
    return resolved.threads or host.usable_cores()


def _rank_log(resolved: Resolved) -> logging.Logger | logging.LoggerAdapter[logging.Logger]:
    """The log, with the rank in front of each line where there are several, as the reference has it."""
    return RankLog(log, {"rank": 0}) if resolved.tp_size > 1 else log


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


@dataclass(frozen=True, slots=True)
class _HostTier:
    """arena: host memory for evicted prefixes, None when it is not asked for; what the log says of it."""

    arena: HostArena | None
    lines: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def _host_tier(resolved: Resolved, ledger: Ledger) -> _HostTier:
    """The tier out of what the host will have left."""
    # On a CPU the pools lie in the same memory and are handed out when they are written, so nobody has counted them.
    memory = HostMemory(free_bytes=free_bytes(ranks=resolved.tp_size), pools_inside=resolved.device == "cpu")
    arena = host_arena(resolved, ledger, memory=memory)
    if arena is None:
        return _HostTier(None)
    lines = bootlog.host_lines(arena, ledger, context_len=resolved.context_len)
    return _HostTier(
        arena,
        lines=(*lines, *bootlog.host_auto_lines(arena, ledger, resolved=resolved, memory=memory)),
        warnings=bootlog.host_warnings(arena, ledger, resolved=resolved, memory=memory),
    )


def _log_pools(facts: EngineFacts, arena_bytes: int, tier: _HostTier) -> None:
    """The lines after the weights, then our two tables: every value with its origin, and every byte with its."""
    resolved, ledger, log = facts.resolved, facts.ledger, _rank_log(facts.resolved)
    # The pools are zero pages that the system hands out when they are first written: what they will take is taken off.
    left_bytes = max(0, facts.startup_available_bytes - arena_bytes)
    for warning in ledger.warnings:
        log.warning(warning)
    for line in bootlog.pool_lines(ledger, kv_dtype=resolved.kv_cache_dtype, latent=facts.spec.latent):
        log.info(line)
    log.info(bootlog.pool_end_line(left_bytes))
    attached = tier.arena is not None and resolved.radix_cache
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
    for line in tier.lines:
        log.info(line)
    for warning in tier.warnings:
        log.warning(warning)
    log.info("Settings\n%s", bootlog.values_table(resolved.rows()))
    log.info("Memory\n%s", bootlog.ledger_table(ledger, host=_host_row(tier.arena, resolved)))


def _log_disk(disk: DiskTier) -> None:
    """Where the disk tier is, and what it holds."""
    found = disk.store.stats
    log.info(
        bootlog.disk_line(
            str(disk.store.path),
            segments=found.segments,
            used_bytes=found.used_bytes,
            limit_bytes=found.limit_bytes,
        )
    )


def _host_row(tier: HostArena | None, resolved: Resolved) -> tuple[int, str] | None:
    """Bytes of the host tier and where their number comes from."""
    if tier is None:
        return None
    given = any(resolved.origins[name] == "flag" for name in ("hicache_size", "hicache_ratio"))
    return tier.total_bytes, "flag" if given else "derived"
