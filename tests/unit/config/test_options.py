"""Options: every default, every limit, and what is refused by name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from twinpool.config.flags import flag_rows, help_text, options_from_keywords, parse_serve
from twinpool.config.options import ServeOptions, all_options
from twinpool.config.refused import refusals
from twinpool.errors import ConfigError

REFERENCE_DEFAULTS = {
    "--model-path": None,
    "--tokenizer-path": None,
    "--served-model-name": None,
    "--revision": None,
    "--chat-template": None,
    "--context-length": None,
    "--dtype": "auto",
    "--device": "cpu",
    "--threads": None,
    "--random-seed": 0,
    "--device-memory": None,
    "--mem-fraction-static": None,
    "--mamba-full-memory-ratio": None,
    "--max-mamba-cache-size": None,
    "--max-total-tokens": None,
    "--page-size": None,
    "--kv-cache-dtype": "auto",
    "--mamba-ssm-dtype": None,
    "--mamba-conv-dtype": "auto",
    "--disable-radix-cache": False,
    "--mamba-radix-cache-strategy": "auto",
    "--mamba-track-interval": 256,
    "--mamba-max-states-per-path": -1,
    "--radix-eviction-policy": "lru",
    "--enable-hierarchical-cache": False,
    "--hicache-ratio": None,
    "--hicache-size": 0.0,
    "--hicache-host-memory-fraction": 0.8,
    "--hicache-write-policy": "write_through",
    "--hicache-storage-backend": None,
    "--hicache-storage-path": None,
    "--hicache-storage-size": 10.0,
    "--hicache-storage-prefetch-policy": "timeout",
    "--hicache-mamba-size-gb": None,
    "--max-running-requests": None,
    "--max-queued-requests": None,
    "--chunked-prefill-size": None,
    "--max-prefill-tokens": 16384,
    "--prefill-max-requests": None,
    "--schedule-policy": "fcfs",
    "--schedule-conservativeness": 1.0,
    "--retraction-policy": "length",
    "--disable-overlap-schedule": False,
    "--tp-size": 1,
    "--dp-size": 1,
    "--pp-size": 1,
    "--dcp-size": 1,
    "--speculative-num-draft-tokens": 0,
    "--host": "127.0.0.1",
    "--port": 30000,
    "--api-key": None,
    "--enable-cache-report": False,
    "--enable-metrics": False,
    "--request-log": None,
    "--decode-log-interval": 40,
    "--log-level": "info",
}


def refuse(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_serve(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_flag_and_default_is_the_documented_one() -> None:
    options = parse_serve([])
    assert {option.name: getattr(options, option.field) for option in all_options()} == REFERENCE_DEFAULTS
    assert options == ServeOptions()
    assert options.given == frozenset()


@pytest.mark.parametrize("option", all_options(), ids=lambda option: option.name)
def test_every_flag_is_parsed_into_its_field(option) -> None:  # type: ignore[no-untyped-def]
    if option.kind is bool:
        argv, expected = [option.name], True
    elif option.choices:
        argv, expected = [option.name, option.choices[-1]], option.choices[-1]
    elif option.flag.size:
        argv, expected = [option.name, "2GiB"], 2 << 30
    elif option.kind is str:
        argv, expected = [option.name, "some text"], "some text"
    else:
        value = (
            option.default
            if option.field in ("tp_size", "dp_size", "pp_size", "dcp_size")
            else 0.5
            if option.kind is float
            else 7
        )
        value = 0 if option.field == "speculative_num_draft_tokens" else value
        argv, expected = [option.name, str(value)], value
    options = parse_serve(argv)
    assert getattr(options, option.field) == expected
    assert options.given == {option.field}
    if len(argv) == 2:
        assert parse_serve([f"{argv[0]}={argv[1]}"]) == options
    for alias in option.flag.aliases:
        assert parse_serve([alias, *argv[1:]]) == options
    assert option.name in help_text()


@pytest.mark.parametrize("name", sorted(refusals().flags))
def test_known_flag_of_the_reference_is_refused_by_name(name: str) -> None:
    text = refuse(name, "x")
    assert text.startswith(f"{name} is not supported: ")
    assert text.endswith(".")
    assert refuse(f"{name}=x") == text


@pytest.mark.parametrize(("name", "value"), sorted(refusals().values))
def test_known_value_of_the_reference_is_refused_by_name(name: str, value: str) -> None:
    assert refuse(name, value).startswith(f"{name} {value} is not supported: ")


def test_no_flag_is_both_honoured_and_refused() -> None:
    honoured = {name for option in all_options() for name in (option.name, *option.flag.aliases)}
    assert not honoured & set(refusals().flags)
    choices = {(option.name, choice) for option in all_options() for choice in option.choices}
    assert not choices & set(refusals().values)
    assert {name for name, _ in refusals().values} <= honoured


def test_every_flag_of_the_behaviour_document_is_known() -> None:
    """The flags of reference 3.1 and 3.4, each honoured or refused: none falls through to 'unknown'."""
    document = (
        "mamba-full-memory-ratio max-mamba-cache-size mamba-ssm-dtype mamba-backend mamba-radix-cache-strategy "
        "mamba-track-interval mamba-max-states-per-path enable-int8-mamba-checkpoint int8-mamba-ckpt-size "
        "enable-mamba-cache-stochastic-rounding mamba-cache-philox-rounds linear-attn-backend "
        "linear-attn-decode-backend linear-attn-prefill-backend linear-attn-verify-backend "
        "enable-linear-replayssm linear-replayssm-cache-len enable-linear-replayssm-spec mem-fraction-static "
        "max-running-requests max-queued-requests max-total-tokens chunked-prefill-size max-prefill-tokens "
        "prefill-max-requests page-size schedule-policy schedule-conservativeness retraction-policy "
        "disable-overlap-schedule disable-radix-cache radix-eviction-policy radix-eviction-policy-config "
        "radix-cache-backend kv-cache-dtype enable-page-major-kv-layout enable-unified-memory "
        "enable-session-radix-cache enable-streaming-session enable-cache-report enable-metrics "
        "decode-log-interval enable-lmcache lmcache-config-file enable-hierarchical-cache enable-hicache "
        "hicache-host-memory-mode hicache-ratio hicache-size hicache-host-memory-fraction hicache-write-policy "
        "hicache-io-backend hicache-mem-layout hicache-storage-backend hicache-storage-prefetch-policy "
        "hicache-storage-backend-extra-config hicache-storage-prefetch-retry-poll-interval "
        "hicache-storage-prefetch-retry-max-attempts trust-remote-code quantization"
    )
    honoured = {name for option in all_options() for name in (option.name, *option.flag.aliases)}
    assert [name for name in document.split() if f"--{name}" not in honoured | set(refusals().flags)] == []


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--page-sise", "2"], "--page-sise is not a flag of twinpool; did you mean --page-size"),
        (["--zzz"], "--zzz is not a flag of twinpool; see twinpool serve --help."),
        (["-x"], "-x is not a flag of twinpool; see twinpool serve --help."),
        (["model"], "'model' belongs to no flag; see twinpool serve --help."),
        (["--page-size"], "Argument --page-size: expected one argument; see twinpool serve --help."),
        (["--page"], "--page is not a flag of twinpool; did you mean --page-size"),
        (["--port", "abc"], "--port: 'abc' is not an integer."),
        (["--mem-fraction-static", "much"], "--mem-fraction-static: 'much' is not a number."),
        (["--device-memory", "3x"], "--device-memory: '3x' is not a size: write a number with an optional unit"),
        (["--schedule-policy", "new"], "--schedule-policy new is not one of fcfs, lpm."),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_sentence(argv: list[str], sentence: str) -> None:
    assert refuse(*argv).startswith(sentence)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("--page-size", "0", "at least 1"),
        ("--port", "65536", "at most 65535"),
        ("--port", "-1", "at least 0"),
        ("--mem-fraction-static", "0", "above 0"),
        ("--mem-fraction-static", "1.01", "at most 1"),
        ("--mem-fraction-static", "nan", "a finite number"),
        ("--mamba-full-memory-ratio", "inf", "a finite number"),
        ("--mamba-full-memory-ratio", "0", "above 0"),
        ("--schedule-conservativeness", "0", "above 0"),
        ("--max-mamba-cache-size", "0", "at least 1"),
        ("--max-running-requests", "0", "at least 1"),
        ("--max-total-tokens", "0", "at least 1"),
        ("--max-prefill-tokens", "0", "at least 1"),
        ("--prefill-max-requests", "0", "at least 1"),
        ("--max-queued-requests", "-1", "at least 0"),
        ("--mamba-track-interval", "0", "at least 1"),
        ("--decode-log-interval", "0", "at least 1"),
        ("--context-length", "1", "at least 2"),
        ("--threads", "0", "at least 1"),
        ("--random-seed", "-1", "at least 0"),
        ("--device-memory", "0", "at least 1"),
        # Their bytes would be no integer, or none that memory is counted in.
        ("--hicache-size", "1e300", "at most 1000000000"),
        ("--hicache-ratio", "1e300", "at most 1000000000"),
        ("--hicache-mamba-size-gb", "1e300", "at most 1000000000"),
        ("--hicache-storage-size", "1e300", "at most 1000000000"),
    ],
)
def test_limits(name: str, value: str, rule: str) -> None:
    assert re.fullmatch(f"{name} must be {rule}, got .+\\.", refuse(name, value))


@pytest.mark.parametrize("value", [0, -2])
def test_states_per_path_uses_the_words_of_the_reference(value: int) -> None:
    expected = f"--mamba-max-states-per-path must be -1 (unlimited) or a positive integer, got {value}."
    assert refuse("--mamba-max-states-per-path", str(value)) == expected
    assert parse_serve(["--mamba-max-states-per-path", "1"]).mamba_max_states_per_path == 1


@pytest.mark.parametrize(
    "argv",
    [["--dp-size", "2"], ["--pp", "2"], ["--dcp-size", "2"], ["--speculative-num-draft-tokens", "4"]],
)
def test_parallel_sizes_are_refused_when_serving_but_not_in_options(argv: list[str]) -> None:
    assert "is not supported when serving" in refuse(*argv)
    ServeOptions(tp_size=2, dp_size=2, pp_size=2, dcp_size=2, speculative_num_draft_tokens=4)


def test_several_ranks_are_served_with_and_without_a_disk_tier() -> None:
    disk = ["--enable-hierarchical-cache", "--hicache-storage-backend", "file", "--hicache-storage-path", "/tmp/x"]
    assert parse_serve(["--tp", "2"]).tp_size == parse_serve(["--tp", "2", *disk]).tp_size == 2


def test_auto_is_the_split_of_the_host_tier_without_a_quota() -> None:
    assert parse_serve(["--hicache-mamba-size-gb", "auto"]).hicache_mamba_size_gb is None
    assert "'none' is not a number" in refuse("--hicache-mamba-size-gb", "none")


def test_keywords_are_the_flags() -> None:
    options = options_from_keywords({"page_size": 16, "device_memory": "2GiB", "disable_radix_cache": True})
    assert options == parse_serve(["--page-size", "16", "--device-memory", "2GiB", "--disable-radix-cache"])
    assert options.given == {"page_size", "device_memory_bytes", "disable_radix_cache"}
    assert options_from_keywords({"device_memory": 4096}).device_memory_bytes == 4096
    assert options_from_keywords({"hicache_mamba_size_gb": "auto"}).hicache_mamba_size_gb is None


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"page_sise": 16}, "page_sise is not a flag of twinpool; did you mean page_size"),
        ({"trust_remote_code": True}, "--trust-remote-code is not supported: "),
        ({"page_size": "16"}, "--page-size takes int, got '16'."),
        ({"page_size": ""}, "--page-size takes int, got ''."),
        ({"page_size": True}, "--page-size takes int, got True."),
        ({"hicache_mamba_size_gb": "much"}, "--hicache-mamba-size-gb takes float, got 'much'."),
        ({"disable_radix_cache": 1}, "--disable-radix-cache takes switch, got 1."),
        ({"model_path": 3}, "--model-path takes text, got 3."),
        ({"port": None}, "--port takes int, got None."),
    ],
)
def test_a_wrong_keyword_is_refused_in_one_sentence(keywords: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options_from_keywords(keywords)
    assert str(caught.value).startswith(sentence)


def test_rows_carry_text_for_every_flag() -> None:
    for row in flag_rows():
        assert row.help.endswith("."), row.name
        assert row.default, row.name


def test_importing_config_is_light() -> None:
    code = (
        "import sys; import twinpool.config.flags, twinpool.config.resolve\n"
        "heavy = {'torch', 'transformers', 'numpy', 'fastapi', 'pydantic', 'uvicorn'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("threads", "10000", "at most 256"),
        ("random_seed", "9" * 400, f"at most {(1 << 63) - 1}"),
        ("api_key", "", "--api-key is empty"),
        ("served_model_name", "", "--served-model-name is empty"),
    ],
)
def test_values_that_would_only_fail_later(name: str, text: str, limit: str) -> None:
    option = next(option for option in all_options() if option.field == name)
    with pytest.raises(ConfigError, match=limit):
        option.check(option.parse(text))
