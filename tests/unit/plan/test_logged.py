"""Real boot logs: the numbers of public ones in the format each was printed in, noise around them, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from twinpool import bootlog
from twinpool.bootlog import BootFacts
from twinpool.errors import ConfigError, TwinpoolError
from twinpool.plan.command import read_command
from twinpool.plan.log_plan import plan_log
from twinpool.plan.log_report import log_text
from twinpool.plan.logged import read_boots

# Formats of versions, oldest first; {p} is the prefix of a line.
NO_DTYPE = (
    "{p}Load weight end. elapsed={load_s} s, type={model_class}, dtype=torch.bfloat16, avail mem={load_end_gb} GB, "
    "mem usage={weights_gb} GB.\n"
    "{p}Using KV cache dtype: torch.bfloat16\n"
    "{p}Mamba Cache is allocated. max_mamba_cache_size: {slots}, conv_state size: {conv_gb}GB, ssm_state size: {ssm_gb}GB \n"
    "{p}KV Cache is allocated. #tokens: {kv_tokens}, K size: {k_gb} GB, V size: {v_gb} GB\n"
    "{p}Memory pool end. avail mem={pool_end_gb} GB\n"
)
NO_TIME = NO_DTYPE.replace("elapsed={load_s} s, ", "")
LATENT = (
    "{p}Load weight end. elapsed={load_s} s, type={model_class}, quant={quantization}, fmt=e4m3, "
    "avail mem={load_end_gb} GB, mem usage={weights_gb} GB.\n"
    "{p}Mamba Cache is allocated. max_mamba_cache_size: {slots}, conv_state size: {conv_gb}GB, ssm_state size: {ssm_gb}GB \n"
    "{p}KV Cache is allocated. dtype: torch.bfloat16, #tokens: {kv_tokens}, KV size: {kv_gb} GB\n"
)
QUANTISED = LATENT.replace("KV size: {kv_gb} GB", "K size: {k_gb} GB, V size: {v_gb} GB")
WRAPPED = (
    "[TP0] Load weight end. elapsed={load_s} s,\ntype={model_class}, quant={quantization},\nquant_algo=NVFP4, "
    "avail mem={load_end_gb} GB, mem usage={weights_gb} GB.\n"
    "[TP0] Mamba Cache is allocated. max_mamba_cache_size: {slots},\nconv_state size: {conv_gb}GB, ssm_state size: {ssm_gb}GB\n"
    "[TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: {kv_tokens},\nK size: {k_gb} GB, V size: {v_gb} GB\n"
    "[TP0] Memory pool end. avail mem={pool_end_gb} GB\n"
    "[TP0] max_total_num_tokens={max_total_tokens}, chunked_prefill_size=4096,\nmax_prefill_tokens=16384, "
    "max_running_requests={max_running_requests},\ncontext_len={context_len}, available_gpu_mem={available_gb} GB\n"
)
SPACED = (
    "[TP0..3] Load weight end. elapsed={load_s} s, type={model_class},\n         avail mem={load_end_gb} GB, "
    "mem usage={weights_gb} GB\n"
    "[TP0..3] Mamba Cache is allocated. max_mamba_cache_size: {slots},\n         conv_state size: {conv_gb} GB, "
    "ssm_state size: {ssm_gb} GB\n"
    "[TP0..3] KV Cache is allocated. #tokens: {kv_tokens},\n         K size: {k_gb} GB, V size: {v_gb} GB\n"
    "[TP0..3] Memory pool end. avail mem={pool_end_gb} GB\n"
)
DRAFTS = (
    "{p}Mamba Cache is allocated. max_mamba_cache_size: {slots}, conv_state size: {conv_gb}GB, ssm_state size: {ssm_gb}GB "
    "intermediate_ssm_state_cache size: {draft_ssm_gb}GB intermediate_conv_window_cache size: {draft_conv_gb}GB \n"
    "{p}KV Cache is allocated. dtype: torch.bfloat16, #tokens: {kv_tokens}, K size: {k_gb} GB, V size: {v_gb} GB\n"
    "{p}Memory pool end. avail mem={pool_end_gb} GB\n"
    "{p}KV Cache is allocated. dtype: torch.bfloat16, #tokens: {kv_tokens}, K size: 3.39 GB, V size: 3.39 GB\n"
    "{p}Memory pool end. avail mem=14.77 GB\n"
)
# Source, format, numbers.
PUBLIC: list[tuple[str, str, dict[str, Any]]] = [
    ("kvcache-ai/ktransformers issue 1870", NO_DTYPE, {
        "label": "TP1", "load_s": 653.47, "model_class": "Qwen3_5MoeForConditionalGeneration", "load_end_gb": 19.08,
        "weights_gb": 3.76, "slots": 82, "conv_gb": 0.13, "ssm_gb": 7.29, "kv_tokens": 580_364, "k_gb": 4.15, "v_gb": 4.15,
        "pool_end_gb": 4.02}),
    ("LFM2 of 2025-12-29", NO_TIME, {
        "label": "TP0", "model_class": "Lfm2ForCausalLM", "load_end_gb": 13.81, "weights_gb": 1.52, "slots": 85_292,
        "conv_gb": 4.88, "ssm_gb": 0.0, "kv_tokens": 473_854, "k_gb": 2.71, "v_gb": 2.71, "pool_end_gb": 2.43}),
    ("MiniCPM-SALA of 2026-04-07", NO_TIME, {
        "model_class": "MiniCPMSALAForCausalLM", "load_end_gb": 64.6, "weights_gb": 17.99, "slots": 20, "conv_gb": 0.0,
        "ssm_gb": 0.98, "kv_tokens": 6_612_763, "k_gb": 25.23, "v_gb": 25.23, "pool_end_gb": 12.99}),
    ("Qwen3.8-27B-FP8 on an H100", QUANTISED, {
        "load_s": 429.52, "model_class": "Qwen3_5ForConditionalGeneration", "quantization": "fp8", "load_end_gb": 50.01,
        "weights_gb": 28.47, "slots": 124, "conv_gb": 0.34, "ssm_gb": 17.58, "kv_tokens": 330_323, "k_gb": 10.08,
        "v_gb": 10.08}),
    ("Ling-3 of 2026-10-10", LATENT, {
        "load_s": 329.53, "model_class": "BailingMoeV3ForCausalLM", "quantization": "fp8", "load_end_gb": 29.67,
        "weights_gb": 80.31, "slots": 117, "conv_gb": 0.28, "ssm_gb": 8.07, "kv_tokens": 1_226_984, "kv_gb": 9.21}),
    ("Qwen4-Exp NVFP4 of 2026-08-26, lines wrapped", WRAPPED, {
        "label": "TP0", "load_s": 282.07, "model_class": "Qwen4ExpForConditionalGeneration", "quantization": "modelopt_fp4",
        "load_end_gb": 35.23, "weights_gb": 76.11, "slots": 97, "conv_gb": 0.1, "ssm_gb": 5.17, "kv_tokens": 484_032,
        "k_gb": 2.77, "v_gb": 2.77, "pool_end_gb": 24.45, "max_total_tokens": 484_032, "max_running_requests": 6,
        "context_len": 262_144, "available_gb": 19.86}),
    ("Nemotron-H on four XPUs, units spaced", SPACED, {
        "label": "TP0", "load_s": 36.9, "model_class": "NemotronHForCausalLM", "load_end_gb": 7.95, "weights_gb": 14.76,
        "slots": 8, "conv_gb": 0.0, "ssm_gb": 0.1, "kv_tokens": 1_557_504, "k_gb": 2.23, "v_gb": 2.23, "pool_end_gb": 3.39}),
    ("DFlash of 2026-10-02, draft pools after the target's", DRAFTS, {
        "slots": 64, "conv_gb": 0.07, "ssm_gb": 3.05, "draft_ssm_gb": 48.75, "draft_conv_gb": 0.43, "kv_tokens": 295_950,
        "k_gb": 4.52, "v_gb": 4.52, "pool_end_gb": 21.57}),
]  # fmt: skip
ALWAYS = {"label", "slots", "conv_gb", "ssm_gb", "kv_tokens"}


def printed(form: str, numbers: dict[str, Any]) -> str:
    label = numbers.get("label", "")
    return form.format(p=f"[2026-04-14 16:08:49{' ' * bool(label)}{label}] ", **{"load_s": 0, **numbers})


def facts_in(text: str) -> tuple[BootFacts, ...]:
    return tuple(facts for boot in read_boots(text) for facts in boot.ranks)


@pytest.mark.parametrize(("source", "form", "numbers"), PUBLIC, ids=[source for source, _, _ in PUBLIC])
def test_a_public_log_is_read(source: str, form: str, numbers: dict[str, Any]) -> None:
    (facts,) = facts_in(printed(form, numbers))
    assert {name: getattr(facts, name) for name in numbers} == numbers, source


PREFIXES = {
    "docker compose": "server-1  | {line}",
    "kubernetes": "2026-04-14T16:08:49.123456789Z stderr F {line}",
    "journal": "Apr 14 16:08:49 host sglang[1234]: {line}",
    "ray": "\x1b[36m(SchedulerActor pid=99, ip=10.0.0.1)\x1b[0m {line}",
    "colours": "\x1b[32m{line}\x1b[0m",
    "progress bar": "Capturing batches (bs=1): 100%|####| 7/7 [00:04<00:00,  1.72it/s]{line}",
    "progress bar redrawn": "  0%|  | 0/7 [00:00<?, ?it/s]\r 14%|# | 1/7 [00:02<00:17]\r{line}",
    "CRLF": "{line}\r",
    "quoted": "> {line}",
}


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_prefixes_do_not_matter(prefix: str) -> None:
    source, form, numbers = PUBLIC[0]
    lines = printed(form, numbers).splitlines()
    (facts,) = facts_in("\n".join(prefix.format(line=line) for line in lines))
    assert {name: getattr(facts, name) for name in numbers} == numbers, source


@pytest.mark.parametrize("key", ["log", "message"])
def test_lines_inside_json(key: str) -> None:
    source, form, numbers = PUBLIC[0]
    lines = [
        json.dumps({key: f"\x1b[32m{line}\x1b[0m\n", "stream": "stderr"})
        for line in printed(form, numbers).splitlines()
    ]
    (facts,) = facts_in("\n".join(lines))
    assert {name: getattr(facts, name) for name in numbers} == numbers, source


def test_ranks_that_write_into_one_line_are_told_apart() -> None:
    _, form, numbers = PUBLIC[0]
    ranks = [printed(form, {**numbers, "label": label}).splitlines() for label in ("DP0 TP0 EP0", "DP0 TP3 EP3")]
    glued = "\n".join(first + second for first, second in zip(*ranks, strict=True))
    assert [facts.label for facts in facts_in(glued)] == ["DP0 TP0 EP0", "DP0 TP3 EP3"]
    (boot,) = read_boots(glued)
    assert {facts.kv_tokens for facts in boot.ranks} == {580_364}


def test_a_line_that_was_cut_gives_no_half_numbers() -> None:
    whole = printed(PUBLIC[0][1], PUBLIC[0][2])
    at = whole.index("#tokens: 580364") + len("#tokens: 58")
    (facts,) = facts_in(whole[:at])
    assert (facts.slots, facts.kv_tokens) == (82, None)
    (facts,) = facts_in(whole[:at] + "\n[2026-04-14 16:08:49 TP1] Memory pool end. avail mem=4.02 GB\n")
    assert (facts.kv_tokens, facts.pool_end_gb) == (None, 4.02)


def test_weights_of_a_draft_model_before_the_pools_are_charged() -> None:
    """Weights of 19.16 and 3.05 GiB: the pools get what is free after both."""
    lines = (
        "Load weight begin. avail mem=93.77 GB\n"
        "Load weight end. elapsed=1 s, type=Target, avail mem=74.61 GB, mem usage=19.16 GB.\n"
        "Load weight begin. avail mem=74.61 GB\n"
        "Load weight end. elapsed=1 s, type=Draft, avail mem=71.56 GB, mem usage=3.05 GB.\n"
        "Mamba Cache is allocated. max_mamba_cache_size: 5, conv_state size: 0.02GB, ssm_state size: 0.84GB \n"
        "KV Cache is allocated. dtype: fp8, #tokens: 270000, K size: 4.12 GB, V size: 4.12 GB\n"
    )
    (facts,) = facts_in(lines)
    assert (facts.model_class, facts.load_begin_gb, facts.load_end_gb, facts.weights_gb) == (
        "Target",
        93.77,
        71.56,
        22.21,
    )


def test_a_boot_that_failed_before_its_pools_does_not_count() -> None:
    good = printed(PUBLIC[0][1], PUBLIC[0][2])
    begin = "[2026-04-14 16:08:49 TP1] Load weight begin. avail mem={} GB\n"
    (facts,) = facts_in(begin.format(11.0) + begin.format(22.84) + good)
    assert facts.load_begin_gb == 22.84


def test_a_second_boot_with_a_draft_model_in_a_file_of_two() -> None:
    """The draft of the first loads after its pools, that of the second before them; the ranks are set up again between."""
    first = printed(PUBLIC[1][1], PUBLIC[1][2]) + load("Draft", 9.0, 8.0)
    setup = "[2026-04-14 16:08:49 TP0] Init torch distributed ends. elapsed=1.0 s, mem usage=0.19 GB\n"
    pools = printed(DRAFTS, {**PUBLIC[-1][2], "label": "TP0"})
    _, second = facts_in(first + setup + load("Target", 20.0, 14.0) + load("Draft", 14.0, 13.0) + pools)
    assert (second.dist_gb, second.load_begin_gb, second.load_end_gb, second.weights_gb) == (0.19, 20.0, 13.0, 7.0)
    assert (second.model_class, second.slots) == ("Target", 64)


def load(model: str, begin: float, end: float) -> str:
    start = "[2026-04-14 16:08:49 TP0] Load weight "
    return (
        f"{start}begin. avail mem={begin:.2f} GB\n"
        f"{start}end. elapsed=1 s, type={model}, avail mem={end:.2f} GB, mem usage={begin - end:.2f} GB.\n"
    )


@pytest.mark.parametrize("after_pools", [False, True])
def test_slots_a_request_are_read_off_the_warning(after_pools: bool) -> None:
    warning = (
        "[2026-04-14 16:08:49 TP1] max_running_requests is capped to 16 by the mamba state cache (max_mamba_cache_size=82, "
        "5 state slots per request). To raise it: increase --mamba-full-memory-ratio\n"
    )
    pools = printed(PUBLIC[0][1], PUBLIC[0][2])
    (facts,) = facts_in(pools + warning if after_pools else warning + pools)
    assert (facts.cap, facts.slots_per_request, facts.slots) == (16, 5, 82)


def test_several_boots_in_one_file() -> None:
    first, second = printed(PUBLIC[1][1], PUBLIC[1][2]), printed(PUBLIC[1][1], {**PUBLIC[1][2], "slots": 7})
    end = "[2026-04-14 16:08:49 TP0] max_total_num_tokens=473854, max_running_requests=1, \n"
    assert [facts.slots for facts in facts_in(first + end + second)] == [85_292, 7]


def test_sliding_windows_have_another_pool_and_full_attention_the_one_that_counts() -> None:
    text = printed(PUBLIC[0][1], PUBLIC[0][2])
    swa = "[TP1] SWA KV Cache is allocated. #tokens: 10, K size: 1.00 GB, V size: 1.00 GB\n"
    at = text.index("[2026-04-14 16:08:49 TP1] KV Cache")
    (facts,) = facts_in(text[:at] + swa + text[at:].replace("] KV Cache", "] Full KV Cache"))
    assert (facts.kv_tokens, facts.k_gb) == (580_364, 4.15)


def test_kv_that_is_sized_after_the_graphs_replaces_what_was_said_before() -> None:
    text = printed(PUBLIC[0][1], PUBLIC[0][2])
    late = (
        "[2026-04-14 16:08:49 TP1] Post-capture KV sizing: KV cache allocated. dtype: torch.bfloat16, #tokens: 600000, "
        "KV size: 8.58 GB, avail mem=3.00 GB\n"
    )
    (facts,) = facts_in(text + late)
    assert (facts.kv_tokens, facts.kv_gb, facts.k_gb, facts.resized) == (600_000, 8.58, None, True)


@pytest.mark.parametrize(
    "arguments",
    [
        "server_args=ServerArgs(model_path='Qwen/Qwen3.5-9B', tp_size=2, mem_fraction_static=0.8, page_size=1, "
        "mamba_full_memory_ratio=0.9, disable_radix_cache=False, max_mamba_cache_size=None, chunked_prefill_size=20",
        "Resolved config: server_args={'model_path': 'Qwen/Qwen3.5-9B', 'tp_size': 2, 'mem_fraction_static': 0.8, "
        "'page_size': 1, 'mamba_full_memory_ratio': 0.9, 'disable_radix_cache': False, 'max_mamba_cache_size': None}",
    ],
    ids=["a class, cut", "a dictionary"],
)
def test_flags_are_read_in_both_forms(arguments: str) -> None:
    (boot,) = read_boots(f"{arguments}\n{printed(PUBLIC[0][1], PUBLIC[0][2])}")
    assert boot.model == "Qwen/Qwen3.5-9B"
    assert boot.flags == {
        "tp_size": 2, "mem_fraction_static": 0.8, "page_size": 1, "mamba_full_memory_ratio": 0.9,
        "disable_radix_cache": False,
    }  # fmt: skip


def test_a_hundred_megabytes_are_read_in_seconds() -> None:
    noise = "[2026-04-14 16:08:49 TP0] Decode batch, #running-req: 3, #full token: 4096, mamba num: 7, gen throughput\n"
    (facts,) = facts_in(noise * 500_000 + printed(PUBLIC[0][1], PUBLIC[0][2]) + noise * 500_000)
    assert facts.slots == 82


NOISE = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=60).filter(
    lambda text: not any(line.head in text for line in bootlog.LINES)
)


@given(st.sampled_from(PUBLIC), st.lists(st.tuples(st.integers(0, 40), NOISE), max_size=12))
def test_noise_between_lines_changes_nothing(
    public: tuple[str, str, dict[str, Any]], noise: list[tuple[int, str]]
) -> None:
    _, form, numbers = public
    if form in (WRAPPED, SPACED):
        return  # their lines are in pieces, and what is between pieces cuts them
    lines = printed(form, numbers).splitlines()
    expected = facts_in("\n".join(lines) + "\n")
    for at, text in noise:
        lines.insert(at % (len(lines) + 1), text)
    assert facts_in("\n".join(lines) + "\n") == expected


WORDS = st.sampled_from(
    [
        *(line.template for line in bootlog.LINES), "server_args=ServerArgs(", "tp_size=", "page_size=0, ", "'", "{", "\n",
        "[TP1] ", "-1", "99999999999999", "0.00", "1e99", "mem_fraction_static=0.5, ", "\x1b[0m", "model_path='x/y/z', ",
        "max_mamba_cache_size: 3, ", "conv_state size: 0.1GB, ", "ssm_state size: 1.0GB ", "#tokens: 9, ", "KV size: 0.1 GB",
    ]
)  # fmt: skip
SOUP = st.lists(WORDS | st.text(max_size=10), max_size=25).map("".join)


def refusal(text: str) -> str:
    """The sentence that refuses a log; empty when it is read."""
    try:
        plan_log(read_command(["--boot-log", "-"], usage=""), text)
    except TwinpoolError as error:
        return str(error)
    return ""


@settings(max_examples=200)
@given(SOUP | st.text())
def test_any_text_is_read_or_refused_in_one_sentence(text: str) -> None:
    assert len(refusal(text).splitlines()) <= 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("\x00\x01\ufffd\ufffdELF", "none of the lines"),
        ("KV Cache is allocated. #tokens: 5, K size: 1.00 GB, V size: 1.00 GB\n", "not a hybrid one"),
        ("Load weight end. type=A, avail mem=3.00 GB, mem usage=1.00 GB.\n", "ends before 'Mamba Cache is allocated'"),
        ("Mamba Cache is allocated. conv_state size: 0.1 GB, ssm_state size: 1.0 GB\n", "does not say max_mamba_cache_size"),
        ("Mamba Cache is allocated. max_mamba_cache_size: 0, conv_state size: 0.1GB, ssm_state size: 1.0GB \n", "0 slots"),
        ("Mamba Cache is allocated. max_mamba_cache_size: 9, conv_state size: 0.1GB, ssm_state size: -1.0GB \n", "size of -1.0"),
        (
            "Mamba Cache is allocated. max_mamba_cache_size: 9, conv_state size: 0.1GB, ssm_state size: 1.0GB \n"
            "KV Cache is allocated. #tokens: -5, KV size: 1.00 GB\n",
            "size of -5",
        ),
    ],
)  # fmt: skip
def test_a_log_without_pools_is_refused_by_what_it_is(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        read_boots(text)
    assert len(str(refused.value).splitlines()) == 1


def test_values_that_no_pool_depends_on_are_named_and_not_refused() -> None:
    arguments = (
        "model_path='Qwen/Qwen3.5-9B', enable_hierarchical_cache=True, hicache_storage_backend='mooncake', "
        "radix_eviction_policy='tlru', schedule_policy='dfs-weight', schedule_conservativeness=0.0"
    )
    text = f"server_args=ServerArgs({arguments})\n" + printed(PUBLIC[3][1], PUBLIC[3][2])
    (boot,) = plan_log(read_command(["--boot-log", "-"], usage=""), text)
    assert {value.shown for value in boot.outcome.line.other_values} == {
        "--hicache-storage-backend mooncake", "--radix-eviction-policy tlru", "--schedule-policy dfs-weight",
        "--schedule-conservativeness 0.0",
    }  # fmt: skip
    assert "  - --radix-eviction-policy tlru\n" in log_text((boot,))


def test_flags_that_contradict_each_other_are_refused_by_name() -> None:
    text = "server_args=ServerArgs(page_size=0, tp_size=1)\n" + printed(PUBLIC[0][1], PUBLIC[0][2])
    with pytest.raises(ConfigError, match="--page-size"):
        read_boots(text)


def test_a_pool_that_rounds_to_nothing_is_the_most_that_its_size_can_be() -> None:
    text = printed(PUBLIC[1][1], {**PUBLIC[1][2], "conv_gb": "0.00", "slots": 1})
    (boot,) = plan_log(read_command(["--boot-log", "-"], usage=""), text)
    assert boot.notes[0] == (
        "the log's states are less than its two decimals show: a slot is taken as 2.56 MiB, the most it can be"
    )
    assert "1 slot: S = 1, and the plan below is with --disable-radix-cache" in boot.notes
    ledger = boot.outcome.sizing.ledger
    assert ledger is not None
    assert (ledger.max_mamba_cache_size, ledger.kv_tokens) == (1, 473_854)
    (boot,) = plan_log(read_command(["--boot-log", "-", "LFM2-1.2B"], usage=""), text)
    assert boot.slot_bytes == 0
