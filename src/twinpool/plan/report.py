"""A plan for people: tables, sentences, and the flags to paste."""

from __future__ import annotations

from collections.abc import Iterator

from twinpool.bootlog import ledger_table, values_table
from twinpool.models.builtin import builtin_models
from twinpool.models.spec import ModelSpec
from twinpool.plan.advice import Advice, Step
from twinpool.plan.devices import devices
from twinpool.plan.host import HostPlan
from twinpool.plan.outcome import Inverses, Outcome
from twinpool.plan.sizing import Sizing
from twinpool.plan.workload import ASKED, EVEN, KV, STATES, Fit, Workload, rounded_ratio
from twinpool.tables import table_text
from twinpool.units import GB, MIB, count, format_bytes, to_gib

BOUND = {STATES: "the state pool", KV: "the KV pool", ASKED: "--max-running-requests", EVEN: "both pools alike"}
WAYS = (
    "Two ways to run out: running requests that find no slots or no KV (they wait), and idle sessions whose checkpoint or "
    "KV was evicted (their next turn reads everything again)."
)


def report_text(outcome: Outcome) -> str:
    """The whole report."""
    blocks = [heading(outcome.sizing), _settings(outcome.sizing)]
    if outcome.sizing.ledger is None:
        blocks.append(f"Refused at boot: {outcome.sizing.refusal}")
    else:
        blocks += ["Memory of one rank\n" + ledger_table(outcome.sizing.ledger), _capacity(outcome)]
    blocks += [host_text(outcome.host)] if outcome.host is not None else []
    blocks += [_bullets("What happens without asking", outcome.clamps)]
    if outcome.workload is not None:
        blocks += _workload_blocks(outcome, outcome.workload)
    blocks += [_bullets("Flags without effect on the two pools", outcome.line.no_effect)]
    blocks += [_bullets("Flags that change memory in a way the plan leaves out", outcome.line.not_modelled)]
    others = tuple(value.shown for value in outcome.line.other_values)
    blocks += [_bullets("Values that are not modelled and change no pool's size", others)]
    blocks += [_bullets("Flags that were not understood", outcome.line.unknown)]
    if outcome.launch_flags:
        machine, flags = outcome.sizing.machine, outcome.sizing.flags
        unknown = machine.pools_only and flags.mem_fraction_static is None
        head = flags_head(machine.available_bytes if unknown else None)
        blocks.append(f"{head}\n  " + " ".join(outcome.launch_flags))
    return "\n\n".join(block for block in blocks if block) + "\n"


def flags_head(pool_bytes: int | None) -> str:
    """Over flags to paste. pool_bytes: of both pools, where only they are known and so no --mem-fraction-static."""
    if pool_bytes is None:
        return "Flags to paste"
    return f"Flags to paste (beside a --mem-fraction-static that leaves the pools {format_bytes(pool_bytes)})"


def heading(sizing: Sizing) -> str:
    """Model, machine, and the constants everything else follows from."""
    request, resolved = sizing.request, sizing.resolved
    te = sizing.token_equivalents
    ranks = sizing.machine.ranks
    lines = [
        f"{sizing.model.name} on {ranks} × {sizing.machine.name}, as {sizing.rules.name} divides it",
        f"  shape: {sizing.model.source}",
        f"  one state slot: {format_bytes(request.stage_slot_bytes + request.stage_extra_bytes)} "
        f"(conv {format_bytes(request.stage_conv_bytes)} {resolved.mamba_conv_dtype}, "
        f"ssm {format_bytes(request.stage_slot_bytes - request.stage_conv_bytes)} {resolved.mamba_ssm_dtype})",
        f"  one token of KV: {request.kv_bytes_per_token:,} bytes {resolved.kv_cache_dtype}",
    ]
    if te is not None:
        lines.append(
            f"  so a slot is worth {te:,.1f} tokens, and a running request is charged {count(request.slots_per_request, 'slot')}"
        )
    if sizing.machine.note:
        lines.append(f"  weights: {sizing.machine.note}")
    return "\n".join(lines)


def _settings(sizing: Sizing) -> str:
    """Only what the two pools depend on."""
    wanted = (
        "context_len", "mem_fraction_static", "mamba_full_memory_ratio", "max_mamba_cache_size", "max_running_requests",
        "max_total_tokens", "page_size", "radix_cache", "strategy", "overlap", "slots_per_request", "grids",
        "chunked_prefill_size", "tp_size", "pp_size", "dp_size", "dcp_size", "speculative_num_draft_tokens",
    )  # fmt: skip
    return "Settings\n" + values_table(row for row in sizing.resolved.rows() if row[0] in wanted)


def _capacity(outcome: Outcome) -> str:
    sizing, ledger = outcome.sizing, outcome.sizing.ledger
    assert ledger is not None
    dp = sizing.request.dp
    each = f" on each of {dp} workers" if dp > 1 else ""
    lines = [
        f"State pool: {ledger.max_mamba_cache_size} slots{each}; KV pool: {ledger.logical_tokens:,} tokens{each}; "
        f"at most {count(ledger.max_running_requests * dp, 'request')} run at once."
    ]
    if outcome.balance_tokens is not None:
        lines.append(
            f"With contexts shorter than {outcome.balance_tokens:,.0f} tokens on average the states run out first, "
            "with longer ones the KV."
        )
    return "\n".join(lines)


def host_text(host: HostPlan) -> str:
    """The host tier, and the sessions that it covers under each way of dividing it."""
    if host.refusal is not None:
        return f"Host tier refused at boot: {host.refusal}"
    rows = [
        (name, f"{cover.by_kv:,}", f"{cover.by_states:,}", f"{cover.together:,}")
        for name, cover in (
            ("--hicache-mamba-size-gb, as given", host.quota),
            ("one memory (auto)", host.auto),
            ("split like the device pools", host.proportional),
        )
        if cover is not None
    ]
    checkpoints = f"{host.states} checkpoint{'s' * (host.states > 1)}"
    table = table_text(("sessions covered", "by KV", "by states", "both"), rows, right=(1, 2, 3))
    return (
        f"Host tier: {host.total_bytes / GB:,.2f} GB on each rank, {host.write_policy}; sessions of {host.context_tokens:,} tokens with "
        f"{checkpoints} each\n{table}\nWhat is on the device has a copy there, so only sessions beyond the device's own outlive it."
    )


def _bullets(heading: str, sentences: tuple[str, ...]) -> str:
    return "\n".join([heading, *(f"  - {sentence}" for sentence in sentences)]) if sentences else ""


def _workload_blocks(outcome: Outcome, workload: Workload) -> Iterator[str]:
    asked = _asked(workload)
    yield asked if outcome.fit is None else f"{asked}\n{_fit_text(outcome.fit, workload)}"
    if outcome.inverses is not None:
        yield _inverse_text(outcome.inverses, workload, outcome)
    if outcome.advice is not None:
        yield _advice_text(outcome.advice, outcome)


def _asked(workload: Workload) -> str:
    return (
        f"Workload: {workload.running} running × {workload.tokens_per_request:,} tokens, {workload.idle_sessions} idle sessions × "
        f"{workload.checkpoints_per_session} checkpoint{'s' * (workload.checkpoints_per_session > 1)} ({workload.origin})"
    )


def _fit_text(fit: Fit, workload: Workload) -> str:
    rows: list[tuple[str | int, ...]] = [
        ("running requests", fit.running_by_states, fit.running_by_kv, workload.running, BOUND[fit.running_bound]),
        (
            "idle sessions that can resume",
            fit.idle_by_states,
            fit.idle_by_kv,
            workload.idle_sessions,
            BOUND[fit.idle_bound],
        ),
        ("needed: slots / tokens", fit.slots_needed, fit.tokens_needed, "", ""),
        ("there are", fit.slots_available, fit.tokens_available, "", ""),
        ("short by", fit.slots_short, fit.tokens_short, "", ""),
    ]
    cells = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows]
    table = table_text(("", "by states", "by KV", "asked", "ends first"), cells, right=(1, 2, 3))
    return f"{table}\n{WAYS}"


def fit_paragraphs(outcome: Outcome) -> tuple[str, ...]:
    """The heading's lines and the workload, as paragraphs."""
    workload = outcome.workload
    lines = tuple(line.strip() for line in heading(outcome.sizing).splitlines())
    return lines if workload is None else (*lines, _asked(workload))


def _inverse_text(inverses: Inverses, workload: Workload, outcome: Outcome) -> str:
    tokens = f"{workload.tokens_per_request:,} tokens"
    ranks = _ranks(inverses.fewest_ranks, outcome)
    beside = f" beside {workload.idle_sessions:,} idle sessions" * (workload.idle_sessions > 0)
    rows = [
        (f"most running requests{beside} at {tokens}", f"{inverses.most_running:,}"),
        (f"most idle sessions beside {workload.running} running", f"{inverses.most_idle:,}"),
        (f"longest average context of {workload.running} running", f"{inverses.longest_context:,} tokens"),
        ("idle sessions in one GiB of a rank", f"{inverses.sessions_per_gib:,.2f}"),
        ("fewest devices for the workload", ranks),
    ]
    return table_text(("with the best split of this memory", ""), rows)


def _advice_text(advice: Advice, outcome: Outcome) -> str:
    lines = ["Advice, cheapest first"]
    if not advice.steps:
        lines.append("  - the workload fits as it is" if advice.holds else "  - no flag of this kind helps")
    lines += [f"  {number}. {_step(step)}" for number, step in enumerate(advice.steps, 1)]
    if outcome.balanced_ratio is not None:
        lines.append(f"  Balanced ratio r* = (S + D) · te · dcp / L = {rounded_ratio(outcome.balanced_ratio)}.")
    if advice.setting is not None:
        setting = advice.setting
        same = f"--mamba-full-memory-ratio {setting.ratio}" if setting.ratio is not None else "no ratio"
        lines.append(
            f"  Recommended: --max-mamba-cache-size {setting.pin.slots} for {setting.workload.running} running and "
            f"{setting.workload.idle_sessions} idle sessions ({same} gives as many slots); {setting.reason}."
        )
    if not advice.holds:
        lines.append("  The workload does not fit this memory; what would help:")
        lines += [f"  - {_step(step)}" for step in advice.options]
        lines += [f"  - {sentence}" for sentence in _hardware(advice, outcome)]
    return "\n".join(lines)


def _step(step: Step) -> str:
    warning = f" [{step.warning}]" if step.warning else ""
    return f"{step.title}: {step.why}{warning}"


def _hardware(advice: Advice, outcome: Outcome) -> Iterator[str]:
    host = advice.host
    if host is not None:
        yield (
            f"--enable-hierarchical-cache --hicache-size {host.size_gb:g}: a host tier on each rank for {host.sessions:,} more idle "
            f"sessions, {host.state_bytes / GB:,.2f} GB of states and {host.kv_bytes / GB:,.2f} GB of KV for all "
            f"{host.covered_sessions:,} (what the device keeps is copied, too); split like the device pools, the same memory covers "
            f"{host.proportional_sessions:,}"
        )
    yield f"devices: {_ranks(advice.ranks, outcome)}"


def _ranks(ranks: int | None, outcome: Outcome) -> str:
    """The fewest devices, or why they cannot be named."""
    if ranks is not None:
        return f"--tp-size {ranks}"
    return (
        "no number of ranks up to 64 is enough"
        if outcome.other_machines
        else "not known: sizes were given for this rank only"
    )


def models_table() -> str:
    """--list-models: every built-in shape with its constants at one rank, bfloat16 KV and the model's own state dtype."""
    rows = []
    for model in builtin_models():
        spec = ModelSpec.from_config_json(model.config)
        ssm = spec.ssm_bytes_per_slot(ssm_dtype=spec.ssm_dtype) / MIB
        conv = spec.conv_bytes_per_slot(conv_dtype="bfloat16") / MIB
        kv = spec.kv_bytes_per_token(kv_dtype="bfloat16")
        rows.append(
            (
                model.name, spec.family, f"{spec.n_linear_layers}", f"{spec.n_attention_layers}", f"{ssm:,.2f}",
                f"{conv:,.3f}", f"{kv:,}", ", ".join(model.aliases),
            )
        )  # fmt: skip
    head = ("model", "family", "linear", "attention", "ssm MiB", "conv MiB", "KV B/token", "also")
    return table_text(head, rows, right=(2, 3, 4, 5, 6)) + "\n"


def devices_table() -> str:
    """--list-gpus: memory, what is free before weights, bandwidth and source."""
    rows = [
        (
            device.name, f"{to_gib(device.memory_bytes):,.2f}" if device.memory_bytes else "as given",
            f"{to_gib(device.pre_load_bytes):,.2f}" if device.memory_bytes else "as given",
            f"{device.bandwidth_bytes_per_s / 1e9:,.0f}", f"{device.bf16_flops / 1e12:,.0f}", device.source,
        )
        for device in devices()
    ]  # fmt: skip
    head = ("device", "GiB", "free before weights", "GB/s", "bf16 TFLOPS", "source")
    return table_text(head, rows, right=(1, 2, 3, 4)) + "\n"
