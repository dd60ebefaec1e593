"""Boot lines to the letter, and read back out of noisy logs."""

from __future__ import annotations

from dataclasses import fields

import hypothesis.strategies as st
from hypothesis import given

from tests.unit.memory.test_budget import KIMI_LINEAR, QWEN3_NEXT, rest_of
from twinpool import bootlines, bootlog
from twinpool.bootlog import BootFacts
from twinpool.memory.budget import plan_memory
from twinpool.units import GIB, MIB


def ledger_of(**values):
    return plan_memory(rest_of(20 * GIB, **{**QWEN3_NEXT, **values}))


def test_the_lines_operators_grep_for() -> None:
    ledger = ledger_of()
    mamba, kv = bootlog.pool_lines(ledger, kv_dtype="bfloat16")
    assert mamba == (
        "Mamba Cache is allocated. max_mamba_cache_size: 130, conv_state size: 0.22GB, ssm_state size: 9.21GB "
    )
    assert kv == (
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 461949, K size: 5.29 GB, V size: 5.29 GB"
    )  # fmt: skip
    assert bootlog.load_begin_line(5 * GIB) == "Load weight begin. avail mem=5.00 GB"
    end = bootlog.load_end_line(elapsed_s=1.234, model_class="Net", available_bytes=4 * GIB, used_bytes=GIB)
    assert end == "Load weight end. elapsed=1.23 s, type=Net, avail mem=4.00 GB, mem usage=1.00 GB."
    assert bootlog.pool_end_line(GIB // 2) == "Memory pool end. avail mem=0.50 GB"
    assert bootlog.tree_line(hybrid_ssm=True) == (
        "Tree cache initialized: source=builtin impl=twinpool hybrid_swa=False hybrid_ssm=True hicache_attached=False"
    )


def test_the_scheduler_line_names_the_device() -> None:
    values = {"max_prefill_tokens": 16384, "context_len": 262144, "available_bytes": 3 * GIB}
    assert bootlog.scheduler_line(ledger_of(), chunked_prefill_size=2048, **values) == (
        "max_total_num_tokens=461949, chunked_prefill_size=2048, max_prefill_tokens=16384, max_running_requests=26, "
        "context_len=262144, available_cpu_mem=3.00 GB"
    )
    gpu = bootlog.scheduler_line(ledger_of(dcp=2), chunked_prefill_size=None, device="cuda", **values)
    assert gpu.startswith("max_total_num_tokens=923898, chunked_prefill_size=-1,")
    assert gpu.endswith("available_gpu_mem=3.00 GB")


def test_drafts_and_latent_caches_have_their_own_forms() -> None:
    lines = bootlog.pool_lines(ledger_of(draft_tokens=4, max_running_requests=8), kv_dtype="bfloat16")
    assert lines[-2] == (
        "Mamba Cache is allocated. max_mamba_cache_size: 70, conv_state size: 0.12GB, ssm_state size: 4.99GB "
        "intermediate_ssm_state_cache size: 2.53GB intermediate_conv_window_cache size: 0.06GB "
    )
    latent = bootlog.pool_lines(plan_memory(rest_of(20 * GIB, **KIMI_LINEAR)), kv_dtype="float16", latent=True)
    assert latent[-1] == "KV Cache is allocated. dtype: torch.float16, #tokens: 1403164, KV size: 10.54 GB"


def test_a_model_without_states_has_no_mamba_line() -> None:
    ledger = plan_memory(rest_of(GIB, conv_bytes=0, ssm_bytes=0, kv_bytes_per_token=4096))
    assert [line.split(".")[0] for line in bootlog.pool_lines(ledger, kv_dtype="bfloat16")] == ["KV Cache is allocated"]


def gigabytes() -> st.SearchStrategy[float]:
    return st.integers(0, 99_999).map(lambda hundredths: hundredths / 100)


WORDS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.]{0,20}", fullmatch=True)
COUNTS = st.integers(0, 10**8)


@st.composite
def boots(draw: st.DrawFn, label: str = "") -> BootFacts:
    """A boot whose log has each line whole or not at all."""
    groups: tuple[dict[str, st.SearchStrategy], ...] = (
        {"load_begin_gb": gigabytes()},
        {"load_s": gigabytes(), "model_class": WORDS, "load_end_gb": gigabytes(), "weights_gb": gigabytes()},
        {"multimodal_gb": gigabytes()},
        {"requested": COUNTS, "granted": COUNTS},
    )
    values: dict[str, object] = {}
    for group in groups:
        if draw(st.booleans()):
            values |= {name: draw(strategy) for name, strategy in group.items()}
    if "load_s" in values and draw(st.booleans()):
        values["quantization"] = draw(WORDS)
    values |= {"slots": draw(COUNTS), "conv_gb": draw(gigabytes()), "ssm_gb": draw(gigabytes())}
    if draw(st.booleans()):
        values |= {"cap": draw(COUNTS), "slots_per_request": draw(COUNTS)}
    if draw(st.booleans()):
        values |= {"draft_ssm_gb": draw(gigabytes()), "draft_conv_gb": draw(gigabytes())}
    values |= {"kv_dtype": draw(WORDS), "kv_tokens": draw(COUNTS)}
    if draw(st.booleans()):
        values |= {"k_gb": draw(gigabytes()), "v_gb": draw(gigabytes())}
    else:
        values["kv_gb"] = draw(gigabytes())
    values["pool_end_gb"] = draw(gigabytes())
    values |= {
        "max_total_tokens": draw(COUNTS), "chunked_prefill_size": draw(st.integers(-1, 10**6)),
        "max_prefill_tokens": draw(COUNTS), "max_running_requests": draw(COUNTS), "context_len": draw(COUNTS),
        "device": draw(st.sampled_from(["cpu", "gpu"])), "available_gb": draw(gigabytes()),
    }  # fmt: skip
    return BootFacts(label=label, **values)  # type: ignore[arg-type]


def noisy(facts: BootFacts, *, prefix: str = "") -> str:
    """The boot's lines as a log file has them: prefix, the rank, colours, other lines between them."""
    rank = f" {facts.label}" if facts.label else ""
    start = f"{prefix}\x1b[32m[2026-11-30 10:00:00{rank}]\x1b[0m "
    return "\n".join(f"{start}{line}\n{start}Capturing batches [1/9]" for line in bootlog.boot_lines(facts))


@given(boots(), st.sampled_from(["", "server-1  | ", "INFO:twinpool:"]))
def test_parse_reads_what_was_printed(facts, prefix) -> None:
    assert bootlog.parse(noisy(facts, prefix=prefix)) == (facts,)


@given(boots(label="DP0 TP0"), boots(label="DP0 TP1"), boots(label="DP0 TP0"))
def test_parse_tells_ranks_and_boots_apart(first, other_rank, again) -> None:
    text = "\n".join((noisy(first), noisy(other_rank), noisy(again)))
    assert bootlog.parse(text) == (first, other_rank, again)


def test_parse_takes_the_target_of_a_draft_pair() -> None:
    target = BootFacts(slots=9, conv_gb=0.1, ssm_gb=1.0, kv_dtype="a", kv_tokens=5, k_gb=1.0, v_gb=1.0)
    draft = BootFacts(load_begin_gb=3.0, kv_dtype="a", kv_tokens=5, k_gb=0.1, v_gb=0.1)
    assert bootlog.parse(noisy(target) + "\n" + noisy(draft)) == (target,)


def test_parse_of_nothing_known_is_empty() -> None:
    assert bootlog.parse("") == ()
    assert bootlog.parse("Uvicorn running\nmax_total_num_tokens=lots") == ()


def test_every_fact_is_printed_by_some_line() -> None:
    printed = {name for line in bootlines.LINES for name in line.kinds}
    assert printed == {item.name for item in fields(BootFacts)} - {"label", "resized"}


@given(st.integers(8 * GIB, 64 * GIB), st.sampled_from([0, 4]), st.booleans())
def test_a_ledger_comes_back_from_its_lines(rest_bytes, drafts, latent) -> None:
    ledger = plan_memory(rest_of(rest_bytes, **QWEN3_NEXT, draft_tokens=drafts, max_running_requests=48))
    (facts,) = bootlog.parse("\n".join(bootlog.pool_lines(ledger, kv_dtype="bfloat16", latent=latent)))
    assert (facts.slots, facts.kv_tokens) == (ledger.max_mamba_cache_size, ledger.kv_tokens)
    assert facts.ssm_gb is not None
    assert abs(facts.ssm_gb * GIB - ledger.ssm_pool_bytes) <= 0.00501 * GIB
    assert (facts.draft_ssm_gb is not None) == (drafts > 0)
    assert (facts.kv_gb is not None) == latent


def test_the_ledger_table_names_every_byte() -> None:
    ledger = ledger_of(page_size=64, multimodal_bytes=64 * MIB, origins={"mem_fraction_static": "flag"})
    lines = bootlog.ledger_table(ledger).splitlines()
    assert lines[0].split() == ["memory", "size", "origin", "note"]
    assert [line.split("  ")[0].strip() or line.strip().split("  ")[0] for line in lines[1:]] == [
        "weights", "slack", "of it KV padding page", "of it arena rounding", "multimodal reserve", "conv states",
        "ssm states", "padding slot", "KV pool", "unused", "whole",
    ]  # fmt: skip
    slack = next(line for line in lines if line.startswith("slack"))
    assert slack.split()[1:4] == ["20.00", "GiB", "flag"]
    assert (
        len({line.index("note") for line in lines[:1]} | {line.index("slot 0") for line in lines if "slot 0" in line})
        == 1
    )


def test_the_values_table_is_aligned() -> None:
    assert bootlog.values_table(
        [("page_size", "64", "flag"), ("strategy", "extra_buffer", "derived")]
    ).splitlines() == [
        "name       value         origin",
        "page_size  64            flag",
        "strategy   extra_buffer  derived",
    ]
