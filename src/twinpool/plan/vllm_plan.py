"""`twinpool plan` for an engine with one pool of blocks: vLLM's flags to its ledger, and a workload against it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from twinpool.config.deployment import SYNONYMS, Deployment
from twinpool.config.launch import LaunchLine
from twinpool.config.vllm_flags import VllmFlags
from twinpool.errors import ConfigError, MemoryRefusal
from twinpool.plan.command import Command
from twinpool.plan.machine import Machine, find_machine
from twinpool.plan.run import planned_model
from twinpool.plan.vllm import plan_vllm, vllm_request
from twinpool.plan.vllm_ledger import CPU_BLOCK_TOKENS, DEFAULT_UTILIZATION, VllmLedger
from twinpool.plan.workload import Workload
from twinpool.tables import table_text
from twinpool.units import GIB, format_bytes

# Activation peak and graphs of a step, where the user does not know better: what an engine of this kind is seen to take.
ACTIVATION_BYTES = 2 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFit:
    """running: requests of this length that the blocks hold at once. idle_sessions: cached ones beside them, with their
    checkpoints. blocks_running, blocks_idle: of one of each. reused_tokens: of a cached one, when it goes on.
    """

    running: int
    idle_sessions: int
    blocks_running: int
    blocks_idle: int
    reused_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOutcome:
    """ledger: None when vLLM would not start (refusal says why). machine.note: how weights are known."""

    model: str
    machine: Machine
    activation_bytes: int
    ledger: VllmLedger | None
    refusal: str | None
    workload: Workload | None
    fit: VllmFit | None
    line: LaunchLine


def plan_vllm_command(command: Command) -> VllmOutcome:
    """The plan of a command for vLLM. Raises ConfigError or ModelError."""
    flags = command.line.vllm or _from_deployment(command.flags)
    model, options = planned_model(command), command.options
    tp = flags.tensor_parallel_size
    placement = replace(
        command.flags, tp_size=tp, pp_size=flags.pipeline_parallel_size, quantization=flags.quantization
    )
    if flags.pipeline_parallel_size > 1:
        raise ConfigError("--pipeline-parallel-size is not part of the vLLM profile: plan the stages one by one.")
    machine = find_machine(model, placement, options)
    total = (
        machine.device.memory_bytes
        if machine.device is not None and machine.device.memory_bytes
        else machine.pre_load_bytes
    )
    activation = ACTIVATION_BYTES if options.activations is None else options.activations
    drafts = _draft_tokens(flags)
    request = vllm_request(
        model.spec,
        total_bytes=total,
        non_kv_bytes=total - machine.available_bytes + activation,
        tp=tp,
        kv_dtype=_dtype(flags.kv_cache_dtype, model.spec.checkpoint_kv_dtype or model.spec.dtype),
        ssm_dtype=_dtype(flags.mamba_ssm_cache_dtype, model.spec.ssm_dtype),
        conv_dtype=_dtype(flags.mamba_cache_dtype, model.spec.dtype),
        max_model_len=flags.max_model_len,
        utilization=flags.gpu_memory_utilization or DEFAULT_UTILIZATION,
        kv_cache_memory_bytes=flags.kv_cache_memory_bytes,
        num_gpu_blocks_override=flags.num_gpu_blocks_override,
        max_num_seqs=flags.max_num_seqs,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        block_size=flags.block_size,
        kernel_alignment=CPU_BLOCK_TOKENS if machine.name == "CPU" and flags.block_size is None else None,
        mamba_block_size=flags.mamba_block_size,
        mamba_cache_mode=flags.mamba_cache_mode,
        prefix_caching=not flags.no_enable_prefix_caching,
        num_speculative_tokens=drafts,
        draft_attention_layers=model.spec.draft_layers if drafts else 0,
    )
    workload = _workload(command, request.max_model_len, flags)
    ledger, refusal = None, None
    try:
        ledger = plan_vllm(request)
    except MemoryRefusal as error:
        refusal = str(error)
    return VllmOutcome(
        model=model.name, machine=machine, activation_bytes=activation, ledger=ledger, refusal=refusal, workload=workload,
        fit=fit(ledger, workload) if ledger is not None and workload is not None else None, line=command.line,
    )  # fmt: skip


def fit(ledger: VllmLedger, workload: Workload) -> VllmFit:
    """Requests and cached sessions of the workload's length in the pool's blocks (one of which is vLLM's own)."""
    layout, blocks = ledger.layout, ledger.num_blocks - 1
    each = layout.blocks_per_request(workload.tokens_per_request)
    cached = layout.cached_blocks(workload.tokens_per_request, retention_tokens=ledger.request.retention_tokens)
    running = min(ledger.max_num_seqs, blocks // each)
    free = blocks - min(workload.running, running) * each
    idle = free // cached if cached and ledger.request.prefix_caching else 0
    # A prompt that is longer by its next turn: one token more is enough for all of these to be reused.
    reused = ledger.cached_prefix_tokens(workload.tokens_per_request + 1)
    return VllmFit(running=running, idle_sessions=idle, blocks_running=each, blocks_idle=cached, reused_tokens=reused)


def report_text(outcome: VllmOutcome) -> str:
    """For people: the pool, what vLLM will log, warnings, the workload."""
    machine = outcome.machine
    blocks = [
        f"{outcome.model} on {machine.ranks} × {machine.name}, as vllm divides it (one pool of blocks)\n  weights: {machine.note}"
    ]
    if outcome.ledger is None:
        blocks.append(f"Refused at start: {outcome.refusal}")
    else:
        ledger = outcome.ledger
        rows = [(name, format_bytes(size)) for name, size in ledger.lines]
        blocks.append("Memory of one rank\n" + table_text(("memory", "size"), rows, right=(1,)))
        blocks.append(_pool_text(ledger))
        blocks.append("\n".join(f"  - {sentence}" for sentence in ledger.warnings))
    if outcome.fit is not None and outcome.workload is not None:
        blocks.append(_fit_text(outcome.fit, outcome.workload))
    for heading, flags in (
        ("Flags without effect", outcome.line.no_effect),
        ("Flags not understood", outcome.line.unknown),
    ):
        blocks.append("\n".join([heading, *(f"  - {flag}" for flag in flags)]) if flags else "")
    return "\n\n".join(block for block in blocks if block) + "\n"


def _pool_text(ledger: VllmLedger) -> str:
    layout = ledger.layout
    groups = f"{layout.attention_groups} attention and {layout.state_groups} state groups of {layout.layers_per_group} layers"
    prefix = "none is kept" if ledger.smallest_prefix_tokens is None else f"{ledger.smallest_prefix_tokens:,} tokens"
    rows = [
        ("blocks", f"{ledger.num_blocks:,} of {layout.block_tokens} tokens, {groups}"),
        ("it will log", f"GPU KV cache size: {ledger.kv_cache_size_tokens:,} tokens"),
        (
            "",
            f"Maximum concurrency for {ledger.request.max_model_len:,} tokens per request: {ledger.max_concurrency:.2f}x",
        ),
        ("tokens really kept", f"{ledger.usable_tokens:,} with their checkpoints"),
        ("--max-num-seqs", f"{ledger.max_num_seqs} ({ledger.max_num_seqs_bound}); {ledger.running_requests} can run"),
        ("shortest reusable prefix", prefix),
        ("a state is padded by", f"{layout.padding_fraction:.2%}"),
    ]
    return "\n".join(f"{name:26}{text}" for name, text in rows)


def _fit_text(found: VllmFit, workload: Workload) -> str:
    return (
        f"Workload: {workload.running} running × {workload.tokens_per_request:,} tokens, {workload.idle_sessions} idle sessions\n"
        f"  {found.running} requests of this length run at once ({found.blocks_running} blocks each), and beside the workload's "
        f"{found.idle_sessions} idle sessions stay cached ({found.blocks_idle} blocks each).\n"
        f"  When it goes on, a cached session computes {workload.tokens_per_request - found.reused_tokens:,} of these tokens again."
    )


def _workload(command: Command, longest: int, flags: VllmFlags) -> Workload | None:
    options = command.options
    tokens = options.tokens_per_request
    if tokens is None:
        return None
    if tokens > longest:
        raise ConfigError(
            f"--tokens-per-request {tokens} is longer than the context of {longest} tokens; use at most {longest}."
        )
    running = options.running or flags.max_num_seqs
    if running is None:
        raise ConfigError("--tokens-per-request needs --running (or --max-num-seqs): how many run at once.")
    return Workload(running=running, tokens_per_request=tokens, idle_sessions=options.idle_sessions)


def _dtype(flag: str, otherwise: str) -> str:
    return otherwise if flag == "auto" else SYNONYMS.get(flag, flag)


def _draft_tokens(flags: VllmFlags) -> int:
    """num_speculative_tokens of --speculative-config. Raises ConfigError."""
    if flags.speculative_config is None:
        return 0
    try:
        config = json.loads(flags.speculative_config)
        count = config["num_speculative_tokens"]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError("--speculative-config must be a JSON object with num_speculative_tokens.") from error
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"--speculative-config says num_speculative_tokens={count!r}; it must be at least 1.")
    return count


def _from_deployment(flags: Deployment) -> VllmFlags:
    """The same wishes in vLLM's words, where no vLLM launch line is given."""
    return VllmFlags(
        tensor_parallel_size=flags.tp_size,
        pipeline_parallel_size=flags.pp_size,
        gpu_memory_utilization=flags.mem_fraction_static,
        max_model_len=flags.context_length,
        max_num_seqs=flags.max_running_requests,
        block_size=flags.page_size,
        kv_cache_dtype=flags.kv_cache_dtype,
        mamba_ssm_cache_dtype=flags.mamba_ssm_dtype or "auto",
        quantization=flags.quantization,
        no_enable_prefix_caching=flags.disable_radix_cache,
    )
