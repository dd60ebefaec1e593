"""Launch lines as people paste them: every shape is read, every flag is sorted, and nothing but ConfigError comes out."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields

import hypothesis.strategies as st
import pytest
from hypothesis import given

from twinpool.config.deployment import bears_on_pools, deployment_options
from twinpool.config.field import Option
from twinpool.config.launch import NO_EFFECT, NOT_MODELLED, LaunchLine, read_launch, split_words
from twinpool.config.options import MemoryOptions
from twinpool.errors import ConfigError

DOCKER = r"""
docker run --gpus all --shm-size 32g -p 30000:30000 -v /data:/models --ipc=host \
  -e SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK=1 --env=SGLANG_MAMBA_CONV_DTYPE=float32 --env SGLANG_MAMBA_SSM_DTYPE=bfloat16 \
  lmsysorg/sglang:latest \
  python3 -m sglang.launch_server --model-path Qwen/Qwen3.5-397B-A17B --tp-size 8 \
  --mem-fraction-static 0.85 --max-running-requests 160   # what the recipe says
"""
SPECULATING = """
# the model's own draft head
python -m sglang.launch_server --model Qwen/Qwen3-Next-80B-A3B-Instruct --tp 4 --speculative-algo NEXTN \\
  --speculative-num-steps 3 --speculative-eagle-topk 1 \\
  # --max-mamba-cache-size 40 \\
  --max-running-requests 48 > server.log 2>&1 &
"""


def line_of(text: str) -> LaunchLine:
    return read_launch(split_words(text))


def test_a_docker_line_gives_flags_and_environment() -> None:
    line = line_of(DOCKER)
    flags = line.deployment
    assert (line.engine, line.model) == ("sglang", "Qwen/Qwen3.5-397B-A17B")
    assert (flags.tp_size, flags.mem_fraction_static, flags.max_running_requests) == (8, 0.85, 160)
    assert (flags.skip_decode_lock, flags.mamba_conv_dtype, flags.mamba_ssm_dtype) == (True, "float32", "bfloat16")
    assert line.no_effect == line.not_modelled == line.unknown == ()


def test_comments_in_a_continued_line_hide_only_themselves() -> None:
    line = line_of(SPECULATING)
    assert line.model == "Qwen/Qwen3-Next-80B-A3B-Instruct"
    assert line.deployment.max_mamba_cache_size is None
    assert (line.deployment.tp_size, line.deployment.max_running_requests) == (4, 48)
    assert (line.deployment.speculative_algorithm, line.deployment.speculative_num_draft_tokens) == ("NEXTN", 4)


def test_redirections_and_pipes_end_the_line() -> None:
    for tail in ("> log.txt 2>&1 &", "2>&1 | tee log.txt", "&", "&& echo done", "; sleep 1", "&> log"):
        line = line_of(f"python -m sglang.launch_server --model-path M --disable-radix-cache {tail}")
        assert (line.model, line.unknown) == ("M", ()), tail


def test_a_comment_after_a_continuation_and_a_last_backslash_are_dropped() -> None:
    line = line_of("sglang serve --model-path M \\  # the model\n  --tp 2 \\\r\n --page-size 16 \\")
    assert (line.model, line.deployment.tp_size, line.deployment.page_size, line.unknown) == ("M", 2, 16, ())


@pytest.mark.parametrize(
    ("text", "engine", "model"),
    [
        ("python -m sglang.launch_server --model-path org/m", "sglang", "org/m"),
        ("/opt/venv/bin/python3 -m sglang.launch_server --model=org/m", "sglang", "org/m"),
        ("sglang serve --model-path org/m --tp 2", "sglang", "org/m"),
        ("cd /srv && export A=1; uv run sglang serve --model-path org/m", "sglang", "org/m"),
        ("vllm serve org/m --tensor-parallel-size 2", "vllm", "org/m"),
        ("/usr/bin/vllm serve --tensor-parallel-size 2 org/m", "vllm", "org/m"),
        ("python -m vllm.entrypoints.openai.api_server --model org/m", "vllm", "org/m"),
        ("docker run --gpus all vllm/vllm-openai:v0.11.0 --model org/m", "vllm", "org/m"),
        ("docker run --gpus all vllm/vllm-openai:latest org/m -tp 2", "vllm", "org/m"),
        ("docker run --entrypoint bash vllm/vllm-openai vllm serve org/m", "vllm", "org/m"),
        ("twinpool serve --model-path org/m", "twinpool", "org/m"),
        ("python -m twinpool serve", "twinpool", None),
        ("--model-path org/m --tp 2", None, "org/m"),
        ("", None, None),
    ],
)
def test_engine_and_model(text: str, engine: str | None, model: str | None) -> None:
    line = line_of(text)
    assert (line.engine, line.model) == (engine, model)
    assert line.unknown == ()


def test_vllm_flags() -> None:
    line = line_of(
        "VLLM_USE_V1=1 vllm serve moonshotai/Kimi-Linear-48B-A3B-Instruct -tp 4 --gpu-memory-utilization=0.92 "
        "--max-model-len 131072 --max_num_seqs 64 --enable-prefix-caching --mamba-cache-mode align "
        '--speculative-config \'{"method": "mtp", "num_speculative_tokens": 2}\' --trust-remote-code'
    )
    flags = line.vllm
    assert flags is not None
    assert (flags.tensor_parallel_size, flags.gpu_memory_utilization, flags.max_model_len) == (4, 0.92, 131072)
    assert (flags.max_num_seqs, flags.enable_prefix_caching, flags.mamba_cache_mode) == (64, True, "align")
    assert flags.speculative_config == '{"method": "mtp", "num_speculative_tokens": 2}'
    assert (line.no_effect, line.unknown) == (("--trust-remote-code",), ())


def test_the_engine_of_an_argument_counts_only_where_the_line_says_none() -> None:
    assert read_launch(["--max-num-seqs", "8"], engine="vllm").vllm is not None
    assert read_launch(split_words("sglang serve --tp 2"), engine="vllm").engine == "sglang"


def test_quotes_underscores_equal_signs_and_the_last_of_duplicates() -> None:
    line = line_of(
        'sglang serve --model_path "org/a model" --tp_size=2 --tp 4 --mem_fraction_static=.9 --tool_call_parser x'
    )
    flags = line.deployment
    assert (line.model, flags.tp_size, flags.mem_fraction_static) == ("org/a model", 4, 0.9)
    assert (line.no_effect, line.unknown) == (("--tool_call_parser x",), ())
    assert flags.given == {"model_path", "tp_size", "mem_fraction_static"}


def test_switches() -> None:
    flags = line_of(
        "sglang serve --disable-radix-cache --enable-dp-attention=false --disable-overlap-schedule=True"
    ).deployment
    assert (flags.disable_radix_cache, flags.enable_dp_attention, flags.disable_overlap_schedule) == (True, False, True)


def test_flags_of_several_words_and_negative_numbers() -> None:
    line = line_of("sglang serve --cuda-graph-bs 1 2 4 8 --chunked-prefill-size -1 --dist-init-addr host:20000 --tp 2")
    assert line.not_modelled == ("--cuda-graph-bs 1 2 4 8",)
    assert line.no_effect == ("--dist-init-addr host:20000",)
    assert (line.deployment.chunked_prefill_size, line.deployment.tp_size) == (-1, 2)


def test_a_word_after_a_switch_is_no_model_where_one_is_named() -> None:
    line = line_of("sglang serve --model-path M --enable-metrics true")
    assert (line.model, line.unknown) == ("M", ("'true' belongs to no flag.",))


def test_synonyms_of_data_types() -> None:
    flags = line_of("sglang serve --kv-cache-dtype bf16 --dtype half").deployment
    assert (flags.kv_cache_dtype, flags.dtype) == ("bfloat16", "float16")
    assert line_of("sglang serve --kv-cache-dtype fp8").deployment.kv_cache_dtype == "fp8_e4m3"


def test_the_flag_beats_the_environment() -> None:
    line = line_of("SGLANG_MAMBA_SSM_DTYPE=float16 sglang serve --mamba-ssm-dtype bfloat16")
    assert line.deployment.mamba_ssm_dtype == "bfloat16"
    assert line_of("SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK=0 sglang serve").deployment.skip_decode_lock is False


def test_a_name_and_value_after_a_flag_is_its_value() -> None:
    line = line_of("sglang serve --served-model-name SGLANG_MAMBA_SSM_DTYPE=bfloat16")
    assert line.deployment.served_model_name == "SGLANG_MAMBA_SSM_DTYPE=bfloat16"
    assert line.deployment.mamba_ssm_dtype is None


# Sections 3.1, 3.3 (environment, above) and 3.4 of the reference; a switch has no value.
REFERENCE_FLAGS = (
    "--mamba-full-memory-ratio 0.9", "--max-mamba-cache-size 100", "--mamba-ssm-dtype bfloat16", "--mamba-backend triton",
    "--mamba-radix-cache-strategy extra_buffer", "--mamba-track-interval 256", "--mamba-max-states-per-path -1",
    "--enable-int8-mamba-checkpoint", "--int8-mamba-ckpt-size 10", "--enable-mamba-cache-stochastic-rounding",
    "--mamba-cache-philox-rounds 0", "--linear-attn-backend triton", "--linear-attn-decode-backend triton",
    "--linear-attn-prefill-backend triton", "--linear-attn-verify-backend triton", "--enable-linear-replayssm",
    "--linear-replayssm-cache-len 16", "--enable-linear-replayssm-spec", "--mem-fraction-static 0.8",
    "--max-running-requests 64", "--max-queued-requests 8", "--max-total-tokens 1000", "--chunked-prefill-size 8192",
    "--max-prefill-tokens 16384", "--prefill-max-requests 4", "--page-size 64", "--schedule-policy lpm",
    "--schedule-conservativeness 0.5", "--retraction-policy length", "--disable-overlap-schedule",
    "--disable-radix-cache", "--radix-eviction-policy lru", "--radix-eviction-policy-config {}",
    "--radix-cache-backend x", "--kv-cache-dtype auto", "--enable-page-major-kv-layout", "--enable-unified-memory",
    "--enable-session-radix-cache", "--enable-streaming-session", "--enable-cache-report", "--enable-metrics",
    "--decode-log-interval 40", "--enable-lmcache", "--lmcache-config-file x", "--enable-hierarchical-cache",
    "--enable-hicache", "--hicache-host-memory-mode cache", "--hicache-ratio 2.0", "--hicache-size 100",
    "--hicache-host-memory-fraction 0.8", "--hicache-write-policy write_through", "--hicache-io-backend kernel",
    "--hicache-mem-layout page_first", "--hicache-storage-backend file", "--hicache-storage-prefetch-policy timeout",
    "--hicache-storage-backend-extra-config {}", "--hicache-storage-prefetch-retry-poll-interval 8",
    "--hicache-storage-prefetch-retry-max-attempts 8",
)  # fmt: skip


@pytest.mark.parametrize("text", REFERENCE_FLAGS)
def test_every_flag_of_the_reference_is_known(text: str) -> None:
    line = line_of(f"python -m sglang.launch_server --model-path M {text}")
    taken = line.deployment.given - {"model_path"}
    assert line.unknown == ()
    assert len(taken) + len(line.no_effect) + len(line.not_modelled) + len(line.other_values) == 1


@pytest.mark.parametrize("option", deployment_options(), ids=lambda option: option.name)
def test_flags_that_are_read_are_in_no_other_list(option: Option) -> None:
    names = {option.name, *option.flag.aliases}
    assert not names & (NO_EFFECT | NOT_MODELLED)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("--mem-fraction-statc 0.9", "--mem-fraction-statc 0.9 is not a flag that twinpool knows; did you mean --mem-fraction-static?"),
        ("--frobnicate", "--frobnicate is not a flag that twinpool knows; it was not taken into account."),
    ],
)  # fmt: skip
def test_unknown_flags_are_listed_with_a_hint(text: str, sentence: str) -> None:
    assert line_of(f"sglang serve --model-path M {text}").unknown == (sentence,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--tp eight", "--tp-size: 'eight' is not an integer"),
        ("--tp 0", "--tp-size must be at least 1, got 0"),
        ("--mem-fraction-static 1.5", "--mem-fraction-static must be at most 1, got 1.5"),
        ("--mem-fraction-static nan", "--mem-fraction-static must be a finite number"),
        ("--mamba-full-memory-ratio 0", "--mamba-full-memory-ratio must be above 0, got 0"),
        ("--max-mamba-cache-size -5", "--max-mamba-cache-size must be at least 1, got -5"),
        ("--chunked-prefill-size 0", "--chunked-prefill-size must be -1 .* got 0"),
        ("--mamba-ssm-dtype fp8", "--mamba-ssm-dtype fp8 is not one of"),
        ("--mamba-radix-cache-strategy lazy", "--mamba-radix-cache-strategy lazy is not one of"),
        ("--page-size", "--page-size in the launch line has no value"),
        ("--page-size --tp 2", "--page-size in the launch line has no value"),
        ("--speculative-algorithm EAGLE", "--speculative-algorithm EAGLE needs --speculative-num-draft-tokens"),
    ],
)
def test_a_bad_value_is_one_sentence_that_names_the_flag(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{words}") as caught:
        line_of(f"sglang serve --model-path M {text}")
    assert "\n" not in str(caught.value)


def test_an_open_quote_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^The launch line cannot be split into words: "):
        split_words("sglang serve --model-path 'M")


def test_a_branching_draft_needs_its_number_of_tokens() -> None:
    flags = "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 4"
    with pytest.raises(ConfigError, match="needs --speculative-num-draft-tokens"):
        line_of(f"sglang serve {flags}")
    assert (
        line_of(f"sglang serve {flags} --speculative-num-draft-tokens 16").deployment.speculative_num_draft_tokens == 16
    )


FLAG_NAMES = [option.name for option in deployment_options()] + [
    "--gpu-memory-utilization",
    "--max-num-seqs",
    "--unknown",
]
WORDS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["python", "-m", "sglang.launch_server", "vllm", "serve", "--", "-", "-1", "1e999", "4GiB", "=", "-e", "A=1"]),
    st.sampled_from(FLAG_NAMES),
    st.builds("{}={}".format, st.sampled_from(FLAG_NAMES), st.text(max_size=8)),
)  # fmt: skip


@given(words=st.lists(WORDS, max_size=8))
def test_any_words_give_a_line_or_a_config_error(words: list[str]) -> None:
    with suppress(ConfigError):
        assert isinstance(read_launch(words), LaunchLine)


@given(text=st.text(max_size=60))
def test_any_text_gives_words_or_a_config_error(text: str) -> None:
    with suppress(ConfigError):
        assert isinstance(read_launch(split_words(text)), LaunchLine)


@pytest.mark.parametrize("backend", ["mooncake", "hf3fs", "nixl", "aibrix", "dynamic"])
def test_values_that_no_pool_depends_on_are_named_and_not_refused(backend: str) -> None:
    words = f"--enable-hierarchical-cache --hicache-size 30 --hicache-storage-backend {backend} --schedule-policy dfs-weight --port x"
    line = read_launch(["python", "-m", "sglang.launch_server", *words.split()])
    assert {value.shown for value in line.other_values} == {
        "--port x", "--schedule-policy dfs-weight", f"--hicache-storage-backend {backend}",
    }  # fmt: skip
    assert line.deployment.given == {"enable_hierarchical_cache", "hicache_size"}
    with pytest.raises(ConfigError, match="--port takes int"):
        line.refuse_other_values()


@pytest.mark.parametrize(
    "words",
    [
        "python -m sglang.launch_server --kv-cache-dtype int4",
        "python -m sglang.launch_server --hicache-size big",
        "twinpool serve --enable-hierarchical-cache --hicache-storage-backend mooncake",
    ],
)
def test_values_of_pools_and_lines_of_our_own_are_refused(words: str) -> None:
    with pytest.raises(ConfigError):
        read_launch(words.split())


def test_every_option_is_of_pools_or_not() -> None:
    """The list names options, and none that the division or the host tier's size looks at."""
    others = {option.field for option in deployment_options() if not bears_on_pools(option.field)}
    assert {"port", "hicache_storage_backend", "radix_eviction_policy", "schedule_policy"} <= others
    assert not others & {item.name for item in fields(MemoryOptions)}
    assert not others & {
        "hicache_size",
        "hicache_ratio",
        "hicache_mamba_size_gb",
        "max_running_requests",
        "chunked_prefill_size",
    }
