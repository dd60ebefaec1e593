"""A replay for people: the set-up, reuse and what cost it, counts, modelled times, both pools, and what the trace left out."""

from __future__ import annotations

from collections.abc import Mapping

from twinpool.replay.describe import Spread
from twinpool.replay.disk_report import disk_speed_text, disk_table, disk_use_text
from twinpool.replay.host_use import HostUse
from twinpool.replay.options import TrafficOptions
from twinpool.replay.outcome import Outcome, first_refused, held, pressure, recomputed
from twinpool.replay.result import Times
from twinpool.tables import Table
from twinpool.units import GB, format_bytes, share

SHOWN_REJECTS = 5
GAP_MEANINGS = {
    "restore_failed": "was on the host, and could not be brought back",
    "host_state_evicted": "KV was there, the host had no room for its checkpoint, or no more",
    "state_evicted": "KV was there, its checkpoint had been evicted",
    "no_checkpoint": "KV was there, no checkpoint had been kept",
    "below_grid": "KV was there, after the last place where a checkpoint may be",
    "kv_evicted": "had been cached, its KV had been evicted",
    "new": "not seen before, or evicted so long ago that the tree has forgotten it",
}
_SHORTAGES = {
    "kv_pressure": "for want of pages", "state_pressure": "for want of slots", "path_limit": "over --mamba-max-states-per-path",
}  # fmt: skip
UNKNOWN_REUSE = "Reuse: unknown. The trace has lengths only, so every prompt token was computed."
NO_TIMES = "Times: none. With --arrival count no step takes time, so that counts depend on the order of arrivals alone."


def report_text(outcome: Outcome) -> str:
    """The whole report, a block a subject; reuse of a trace without block ids is unknown, not 0 %."""
    blocks = ["\n".join([title(outcome), *(f"  {line}" for line in setup_lines(outcome))])]
    if outcome.reuse_known:
        blocks += [reuse_table(outcome).text, *bound_notes(outcome)]
    else:
        blocks.append(UNKNOWN_REUSE)
    blocks += ["\n".join(pressure(outcome).sentences), counts_table(outcome).text, *refused_lines(outcome)]
    if outcome.timed:
        blocks += [f"{times_heading(outcome)}\n{times_table(outcome).text}", throughput(outcome.result.times)]
    else:
        blocks.append(NO_TIMES)
    blocks += [
        f"{pools_table(outcome).text}\n{concurrency(outcome)}",
        *_host_block(outcome),
        *_disk_block(outcome),
        *_trace_block(outcome),
    ]
    return "\n\n".join(blocks) + "\n"


def title(outcome: Outcome) -> str:
    """Trace, model and machine in one line."""
    setup = outcome.result.setup
    return f"{setup.trace} on {setup.model}, {setup.machine}"


def setup_lines(outcome: Outcome) -> tuple[str, ...]:
    """What ran: traffic, both pools, and whose rules sized them."""
    setup, counts = outcome.result.setup, outcome.result.counts
    sessions = len(outcome.trace.sessions)
    warm_up = f" and {counts.warm_up:,} warm-up prompts that count in no share and no time" if counts.warm_up else ""
    return (
        f"traffic: {counts.requests:,} requests of {sessions:,} sessions{warm_up}",
        f"arrival: {arrival(outcome.traffic)}",
        f"state pool: {setup.slots:,} slots of {format_bytes(setup.slot_bytes)}; strategy {setup.strategy}, "
        f"{setup.slots_per_request} slots a running request, at most {setup.max_running_requests:,} of them",
        f"KV pool: {setup.kv_tokens:,} tokens of {setup.kv_bytes_per_token:,} bytes, in pages of {setup.page_size:,}",
        *_host_line(outcome),
        *_disk_line(outcome),
        f"sized as {setup.engine} does it; scheduled by twinpool",
    )


def _host_line(outcome: Outcome) -> tuple[str, ...]:
    host = outcome.result.host
    if host is None:
        return ()
    room = f"{host.most_tokens:,} tokens {'and' if host.fixed_split else 'or'} {host.most_states:,} states"
    split = "a fixed split" if host.fixed_split else "no fixed split"
    return (f"host tier: {host.total_bytes / GB:,.2f} GB, {room}, {split}; {outcome.result.setup.write_policy}",)


def _disk_line(outcome: Outcome) -> tuple[str, ...]:
    disk, policy = outcome.result.disk, outcome.result.setup.prefetch_policy
    return (f"disk tier: {disk_speed_text(disk)}; {policy}",) if disk is not None else ()


def arrival(traffic: TrafficOptions) -> str:
    """How requests arrived, in words."""
    words = {
        "closed": f"closed loop, {traffic.sessions:,} sessions alive, pauses of at most {traffic.idle_cap_s:g} s, seed {traffic.seed}",
        "recorded": "as recorded" if traffic.speed == 1 else f"as recorded, {traffic.speed:g} times as fast",
        "count": "in recorded order, and no step takes time",
    }  # fmt: skip
    parts = [words[traffic.arrival]]
    if traffic.limit is not None:
        parts.append(f"the first {traffic.limit:,} session trees")
    if traffic.arrival == "closed" and traffic.start_anywhere:
        parts.append("the first ones begin anywhere")
    if traffic.shared_preamble:
        parts.append("preambles of equal length shared")
    return "; ".join(parts)


def reuse_table(outcome: Outcome) -> Table:
    """Prompt tokens: reused, why the rest was not (reasons with tokens), and what KV alone matched and what was possible at all."""
    reuse, bounds = outcome.result.reuse, outcome.bounds
    prompt = reuse.prompt_tokens

    def row(name: str, tokens: int, meaning: str) -> tuple[str, str, str, str]:
        return name, f"{tokens:,}", f"{share(tokens, prompt):.1%}", meaning

    rows = [row("reused", reuse.reused_tokens, "up to the checkpoint that the request resumed from")]
    if outcome.result.host is not None:
        rows.append(row("  of it, from the host", reuse.from_host_tokens, "had left the device, and was brought back"))
    if outcome.result.disk is not None:
        rows.append(
            row("  of it, from the disk", reuse.from_storage_tokens, "had left both, and was read for the request")
        )
    rows += [row(reason, tokens, GAP_MEANINGS[reason]) for reason, tokens in reuse.gaps if tokens]
    rows.append(row("all prompts", prompt, ""))
    rows.append(row("matched in KV", reuse.kv_matched_tokens, "what would be reused if every state were kept"))
    if bounds is not None:
        rows.append(
            row("at most, clairvoyant", bounds.clairvoyant_tokens, "these pools, evicting with the future known")
        )
        rows.append(row("at most, infinite", bounds.infinite_tokens, "a cache that never forgets"))
    return Table(("Prompt tokens", "tokens", "share", ""), rows, right=(1, 2))


def bound_notes(outcome: Outcome) -> tuple[str, ...]:
    """What the upper bounds leave out; nothing without bounds."""
    return (outcome.bounds.note,) if outcome.bounds is not None and outcome.bounds.note else ()


def counts_table(outcome: Outcome) -> Table:
    """Counts of the run; none of them depends on a calibration while arrivals do not."""
    result = outcome.result
    counts, again, kept = result.counts, recomputed(outcome), held(result)
    forgotten = f" (and at most {again.forgotten_tokens:,} more, forgotten)" if again.forgotten_tokens else ""
    sources = (
        f"after eviction of a state {again.state_evicted_tokens:,}, of KV {again.kv_evicted_tokens:,}{forgotten}, "
        f"after retraction {again.retracted_tokens:,}"
    )
    if result.host is not None:
        sources += f", for want of room to restore {again.restore_failed_tokens:,}"
    per_session = "" if kept.per_session is None else f"{kept.per_session:,.2f} for each session alive"
    rows = [
        ("requests", f"{counts.requests:,}", f"{counts.refused:,} of them refused"),
        ("prompt tokens computed", f"{counts.computed_tokens:,}", "with warm-up" if counts.warm_up else ""),
        ("of these, again", f"{again.tokens:,}", sources),
        ("output tokens", f"{counts.output_tokens:,}", ""),
        ("steps", f"{counts.steps:,}", ""),
        ("evicted states", f"{counts.evicted_states:,}", _why(counts.evictions.states)),
        ("evicted KV tokens", f"{counts.evicted_kv_tokens:,}", _why(counts.evictions.kv_tokens)),
        ("checkpoints published", f"{counts.published_checkpoints:,}", f"{counts.skipped_checkpoints:,} skipped for want of a slot"),
        ("checkpoints held, mean", f"{kept.mean_checkpoints:,.1f}", per_session),
        ("retractions", f"{counts.retractions:,}", f"{counts.retracted_tokens:,} tokens given up"),
    ]  # fmt: skip
    return Table(("Counts", "", ""), rows, right=(1,))


def _why(evicted: Mapping[str, int]) -> str:
    """What ran short, with how much went for it."""
    return ", ".join(f"{number:,} {_SHORTAGES[reason]}" for reason, number in evicted.items() if number)


def times_heading(outcome: Outcome) -> str:
    """That times are modelled, and from which calibration."""
    return f"Times are modelled (calibration: {outcome.result.setup.calibration})"


def times_table(outcome: Outcome) -> Table:
    """Percentiles over requests, in seconds; per output token in milliseconds. A time that nobody has is a dash."""
    times = outcome.result.times
    rows = [
        _spread_row("queue, s", times.queue_s),
        _spread_row("to the first token, s", times.ttft_s),
        _spread_row("per output token, ms", times.tpot_s, factor=1000),
        _spread_row("end to end, s", times.e2e_s),
    ]
    return Table(("", "requests", "mean", "P10", "P50", "P90", "P99", "max"), rows, right=range(1, 8))


def _spread_row(label: str, spread: Spread | None, *, factor: int = 1) -> tuple[str, ...]:
    if spread is None:
        return (label, "0", *("-",) * 6)
    values = (spread.mean, spread.p10, spread.p50, spread.p90, spread.p99, spread.max)
    return (label, f"{spread.count:,}", *(f"{value * factor:,.3f}" for value in values))


def throughput(times: Times) -> str:
    """Rates over the whole run, in one sentence."""
    return (
        f"{times.input_tokens_per_s:,.0f} input tokens/s (computed or reused), {times.output_tokens_per_s:,.1f} output tokens/s and "
        f"{times.requests_per_s:,.2f} requests/s over {times.duration_s:,.1f} s."
    )


def pools_table(outcome: Outcome) -> Table:
    """Mean shares of each pool over time."""
    occupancy = outcome.result.occupancy
    slots = (occupancy.slots_working, occupancy.slots_protected, occupancy.slots_evictable, occupancy.slots_free)
    pages = (occupancy.pages_working, occupancy.pages_protected, occupancy.pages_evictable, occupancy.pages_free)
    rows = [(name, *(f"{part:.1%}" for part in parts)) for name, parts in (("state slots", slots), ("KV pages", pages))]
    return Table(("Mean over time", "working", "protected", "evictable", "free"), rows, right=range(1, 5))


def host_table(host: HostUse) -> Table:
    """What was copied to the host and back, and what was not there for want of room; with warm-up."""
    rows = [
        ("copied to it", f"{host.saved_tokens:,}", f"{host.saved_states:,}", f"{host.saved_bytes / GB:,.2f}"),
        ("brought back", f"{host.loaded_tokens:,}", f"{host.loaded_states:,}", f"{host.loaded_bytes / GB:,.2f}"),
        ("dropped to make room", f"{host.dropped_tokens:,}", f"{host.dropped_states:,}", ""),
        ("not copied for want of room", f"{host.unsaved_tokens:,}", f"{host.unsaved_states:,}", ""),
    ]
    return Table(("Host tier", "KV tokens", "states", "GB"), rows, right=range(1, 4))


def host_use_text(host: HostUse) -> str:
    """How the host's memory was used, in two sentences."""
    failed = f" {host.failed_restores:,} restores found no room on the device." if host.failed_restores else ""
    return (
        f"Mean over time: {host.kv_share:.1%} of it KV, {host.states_share:.1%} states, {host.free_share:.1%} free; at the end "
        f"{host.resumable_share:.1%} of its KV led to a state.{failed}"
    )


def concurrency(outcome: Outcome) -> str:
    """Running and waiting requests, in one sentence."""
    occupancy, counts = outcome.result.occupancy, outcome.result.counts
    return (
        f"Running at once: median {occupancy.median_running:,.0f}, mean {occupancy.mean_running:,.1f}, peak {counts.peak_running:,}; "
        f"waiting: mean {occupancy.mean_waiting:,.1f}, peak {occupancy.peak_waiting:,}."
    )


def refused_lines(outcome: Outcome) -> tuple[str, ...]:
    """How many requests can never fit, and the first with its place and reason; nothing without one."""
    refused = outcome.result.counts.refused
    return (f"Refused: {refused:,}; the first is {first_refused(outcome.result)}.",) if refused else ()


def trace_lines(outcome: Outcome) -> tuple[str, ...]:
    """The trace's notes, and the records that were left out: how many, and the first few with file and line."""
    rejected = outcome.trace.rejected
    lines = [f"note: {note}" for note in outcome.trace.notes]
    if rejected:
        lines.append(f"left out: {len(rejected):,} records that cannot be used")
    lines += [f"left out: {one.where}: {one.reason}" for one in rejected[:SHOWN_REJECTS]]
    if len(rejected) > SHOWN_REJECTS:
        lines.append(f"left out: {len(rejected) - SHOWN_REJECTS:,} more; --json lists them all")
    return tuple(lines)


def _host_block(outcome: Outcome) -> tuple[str, ...]:
    host = outcome.result.host
    return (f"{host_table(host).text}\n{host_use_text(host)}",) if host is not None else ()


def _disk_block(outcome: Outcome) -> tuple[str, ...]:
    disk = outcome.result.disk
    return (f"{disk_table(disk).text}\n{disk_use_text(disk)}",) if disk is not None else ()


def _trace_block(outcome: Outcome) -> tuple[str, ...]:
    lines = trace_lines(outcome)
    return ("\n".join(["Trace", *(f"  {line}" for line in lines)]),) if lines else ()
