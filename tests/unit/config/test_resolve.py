"""resolve: what beats what, the strategy matrix of reference 3.2, the capacity rows of 1.2, and every refusal."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from importlib import resources

import pytest

from twinpool.config.defaults import chunked_prefill_tokens, static_fraction
from twinpool.config.options import ServeOptions, all_options
from twinpool.config.resolve import DeviceFacts, Resolved, resolve
from twinpool.errors import ConfigError
from twinpool.models.spec import ModelSpec
from twinpool.units import GIB

DEVICE = DeviceFacts(memory_bytes=24 * GIB)


def spec_of(**changes: object) -> ModelSpec:
    """The demo model's spec (Gated DeltaNet, bfloat16, context 32768), with changes."""
    config = json.loads(resources.files("twinpool").joinpath("demo/config.json").read_text())
    return replace(ModelSpec.from_config_json(config), **changes)  # type: ignore[arg-type]


def run(*, spec: ModelSpec | None = None, facts: DeviceFacts = DEVICE, **options: object) -> Resolved:
    return resolve(ServeOptions(**options), spec or spec_of(), facts)  # type: ignore[arg-type]


def refuse(*, spec: ModelSpec | None = None, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        run(spec=spec, **options)
    return str(caught.value)


def test_defaults_of_the_demo_model() -> None:
    got = run()
    assert (got.served_model_name, got.model_path, got.context_len) == ("demo", None, 32768)
    assert (got.dtype, got.kv_cache_dtype, got.mamba_ssm_dtype, got.mamba_conv_dtype) == (
        "bfloat16",
        "bfloat16",
        "float32",
        "bfloat16",
    )
    assert (got.mamba_full_memory_ratio, got.max_mamba_cache_size, got.page_size) == (0.9, None, 1)
    assert (got.strategy, got.overlap, got.slots_per_request, got.track_slots) == ("extra_buffer", True, 5, 2)
    assert (got.grids.checkpoint_tokens, got.grids.track_tokens) == (64, 256)
    assert (got.chunked_prefill_size, got.max_prefill_tokens, got.mem_fraction_static) == (4096, 16384, 0.75)
    assert got.device_memory_bytes == 24 * GIB
    assert got.warnings == ()


ORIGINS = {
    "device_memory_bytes": "measured",
    "served_model_name": "derived",
    "context_len": "model default",
    "dtype": "model default",
    "kv_cache_dtype": "derived",
    "mamba_ssm_dtype": "model default",
    "mamba_conv_dtype": "derived",
    "chunked_prefill_size": "derived",
    "mem_fraction_static": "derived",
    "strategy": "derived",
    "slots_per_request": "derived",
    "track_slots": "derived",
    "grids": "derived",
}


def test_every_value_has_its_origin() -> None:
    got = run()
    rows = {name: origin for name, _, origin in got.rows()}
    assert {name: origin for name, origin in rows.items() if origin != "default"} == ORIGINS
    assert set(rows) == set(Resolved.__dataclass_fields__) - {"origins", "warnings"}


FLAG_VALUES = {
    "model_path": "m",
    "tokenizer_path": "t",
    "served_model_name": "s",
    "revision": "r",
    "chat_template": "c",
    "dtype": "float32",
    "device": "cpu",
    "threads": 3,
    "random_seed": 5,
    "device_memory_bytes": 3 * GIB,
    "mem_fraction_static": 0.5,
    "mamba_full_memory_ratio": 2.0,
    "max_mamba_cache_size": 9,
    "max_total_tokens": 99,
    "page_size": 16,
    "kv_cache_dtype": "float16",
    "mamba_ssm_dtype": "bfloat16",
    "mamba_conv_dtype": "float16",
    "mamba_track_interval": 128,
    "mamba_max_states_per_path": 4,
    "radix_eviction_policy": "slru",
    "max_running_requests": 3,
    "max_queued_requests": 0,
    "chunked_prefill_size": 32,
    "max_prefill_tokens": 64,
    "prefill_max_requests": 2,
    "schedule_policy": "lpm",
    "schedule_conservativeness": 0.3,
    "retraction_policy": "priority",
    "host": "h",
    "port": 1,
    "api_key": "secret",
    "enable_cache_report": True,
    "enable_metrics": True,
    "request_log": "requests.jsonl",
    "decode_log_interval": 1,
    "log_level": "debug",
}


@pytest.mark.parametrize("field", sorted(FLAG_VALUES))
def test_an_explicit_flag_wins_and_says_so(field: str) -> None:
    got = run(**{field: FLAG_VALUES[field]}, given=frozenset({field}))
    assert getattr(got, field) == FLAG_VALUES[field]
    assert got.origins[field] == "flag"


def test_flags_whose_value_has_another_name() -> None:
    got = run(context_length=512, mamba_radix_cache_strategy="extra_buffer_lazy")
    assert (got.context_len, got.origins["context_len"]) == (512, "flag")
    assert (got.strategy, got.origins["strategy"]) == ("extra_buffer_lazy", "flag")
    got = run(disable_radix_cache=True, disable_overlap_schedule=True)
    assert (got.radix_cache, got.origins["radix_cache"], got.overlap, got.origins["overlap"]) == (
        False,
        "flag",
        False,
        "flag",
    )


def test_no_option_is_dropped() -> None:
    folded = {"context_length", "mamba_radix_cache_strategy", "disable_radix_cache", "disable_overlap_schedule"}
    assert {option.field for option in all_options()} - set(Resolved.__dataclass_fields__) == folded


def test_a_default_given_explicitly_counts_as_a_flag() -> None:
    assert run(port=30000, given=frozenset({"port"})).origins["port"] == "flag"
    assert run(port=30001).origins["port"] == "flag"
    assert run().origins["port"] == "default"


def test_model_default_beats_the_default_and_a_flag_beats_both() -> None:
    model = spec_of(architecture="Qwen4ExpForConditionalGeneration")
    got = run(spec=model)
    assert (got.page_size, got.origins["page_size"]) == (64, "model default")
    assert (got.mamba_full_memory_ratio, got.origins["mamba_full_memory_ratio"]) == (0.9, "default")
    got = run(spec=model, page_size=1)
    assert (got.page_size, got.origins["page_size"]) == (1, "flag")
    got = run(spec=model, mamba_radix_cache_strategy="no_buffer", disable_overlap_schedule=True)
    assert (got.page_size, got.origins["page_size"]) == (1, "default")


def test_an_unusual_checkpoint_dtype_needs_a_flag() -> None:
    odd = spec_of(dtype="float64")
    assert refuse(spec=odd) == (
        "The checkpoint's data type float64 is not one of bfloat16, float16, float32; choose with --dtype."
    )
    assert run(spec=odd, dtype="float32").dtype == "float32"


def test_warnings_of_the_spec_are_passed_on() -> None:
    assert run(spec=spec_of(warnings=("odd.",)), chunked_prefill_size=32).warnings[0] == "odd."


def test_state_dtype_of_the_config_yields_to_the_flag() -> None:
    assert run(spec=spec_of(ssm_dtype="float16")).mamba_ssm_dtype == "float16"
    assert run(spec=spec_of(ssm_dtype="float16"), mamba_ssm_dtype="float32").origins["mamba_ssm_dtype"] == "flag"


def test_served_model_name_follows_the_path() -> None:
    assert run(model_path="org/model").served_model_name == "org/model"


AUTO = [  # supports, overlap on, page, radix -> strategy, overlap, S, track slots
    (True, True, 1, True, "extra_buffer", True, 5, 2),
    (True, True, 16, True, "extra_buffer", True, 5, 2),
    (True, False, 16, True, "extra_buffer", False, 4, 1),
    (True, False, 1, True, "no_buffer", False, 3, 0),
    (False, True, 1, True, "no_buffer", False, 3, 0),
    (False, False, 1, True, "no_buffer", False, 3, 0),
    (True, True, 1, False, "no_buffer", True, 1, 0),
    (True, False, 16, False, "no_buffer", False, 1, 0),
    (False, True, 16, False, "no_buffer", True, 1, 0),
]


@pytest.mark.parametrize(("supports", "overlap", "page", "radix", "strategy", "overlaps", "slots", "tracks"), AUTO)
def test_auto_strategy(
    supports: bool, overlap: bool, page: int, radix: bool, strategy: str, overlaps: bool, slots: int, tracks: int
) -> None:
    got = run(
        spec=spec_of(supports_extra_buffer=supports),
        page_size=page,
        disable_overlap_schedule=not overlap,
        disable_radix_cache=not radix,
    )
    assert (got.strategy, got.overlap, got.slots_per_request, got.track_slots) == (strategy, overlaps, slots, tracks)


@pytest.mark.parametrize(
    ("strategy", "overlap", "slots", "tracks"),
    [
        ("extra_buffer", True, 5, 2),
        ("extra_buffer", False, 4, 1),
        ("extra_buffer_lazy", True, 4, 1),
        ("no_buffer", False, 3, 0),
    ],
)
def test_explicit_strategy(strategy: str, overlap: bool, slots: int, tracks: int) -> None:
    got = run(mamba_radix_cache_strategy=strategy, disable_overlap_schedule=not overlap)
    assert (got.strategy, got.overlap, got.slots_per_request, got.track_slots) == (strategy, overlap, slots, tracks)


def test_auto_that_turns_overlap_off_says_so() -> None:
    got = run(spec=spec_of(supports_extra_buffer=False))
    assert (got.overlap, got.origins["overlap"]) == (False, "derived")


@pytest.mark.parametrize("option", [{"pp_size": 2}, {"speculative_num_draft_tokens": 4}])
def test_pipelines_and_speculation_on_a_cpu_turn_overlap_off(option: dict[str, int]) -> None:
    got = run(mamba_radix_cache_strategy="extra_buffer", **option)
    assert (got.overlap, got.slots_per_request) == (False, 4)
    on_gpu = run(mamba_radix_cache_strategy="extra_buffer", facts=DeviceFacts(24 * GIB, "cuda"), **option)
    assert on_gpu.overlap is ("pp_size" not in option)


def test_refusals_in_the_words_of_the_reference() -> None:
    no_support = spec_of(supports_extra_buffer=False, architecture="Lfm2ForCausalLM")
    for name in ("extra_buffer", "extra_buffer_lazy"):
        text = refuse(spec=no_support, mamba_radix_cache_strategy=name)
        assert text == "extra_buffer is not supported for Lfm2ForCausalLM; use no_buffer."
        dense = spec_of(layers=(), architecture="LlamaForCausalLM")
        text = refuse(spec=dense, mamba_radix_cache_strategy=name)
        assert text == f"--mamba-radix-cache-strategy {name} needs mamba state, got LlamaForCausalLM."
    assert (
        refuse(mamba_radix_cache_strategy="extra_buffer_lazy", disable_overlap_schedule=True)
        == "Lazy extra buffer requires overlap schedule (--disable-overlap-schedule is incompatible)"
    )
    assert (
        refuse(mamba_radix_cache_strategy="no_buffer", page_size=16, disable_overlap_schedule=True)
        == "no_buffer only supports page_size=1."
    )
    assert refuse(spec=no_support, page_size=16) == "no_buffer only supports page_size=1."
    assert (
        refuse(mamba_radix_cache_strategy="no_buffer")
        == "no_buffer do not support overlap schedule. Try to set disable_overlap_schedule=True."
    )


def test_radix_off_ignores_the_strategy_and_the_grids() -> None:
    got = run(disable_radix_cache=True, mamba_radix_cache_strategy="no_buffer", page_size=48, chunked_prefill_size=96)
    assert (got.radix_cache, got.slots_per_request, got.track_slots, got.overlap) == (False, 1, 0, True)
    assert (got.grids.checkpoint_tokens, got.grids.track_tokens) == (48, 48)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"page_size": 48, "mamba_track_interval": 480},
            "--page-size 48 and the model's state chunk of 64 tokens: one must divide the other",
        ),
        (
            {"page_size": 16, "mamba_track_interval": 100},
            "--mamba-track-interval 100 is not a multiple of --page-size 16; use 112.",
        ),
        (
            {
                "mamba_track_interval": 2,
                "speculative_num_draft_tokens": 4,
                "mamba_radix_cache_strategy": "extra_buffer",
            },
            "--mamba-track-interval 2 is below the 4 draft tokens of a step; use 4 or more.",
        ),
        (
            {"page_size": 16, "chunked_prefill_size": 100},
            "--chunked-prefill-size 100 is not a multiple of the page of 16 tokens; use 96 or 112.",
        ),
        (
            {"page_size": 16, "chunked_prefill_size": 7},
            "--chunked-prefill-size 7 is not a multiple of the page of 16 tokens; use 16.",
        ),
        (
            {"context_length": 40000},
            "--context-length 40000 is longer than the model's 32768 tokens; use at most 32768.",
        ),
    ],
)
def test_refusals_in_our_words(options: dict[str, object], sentence: str) -> None:
    assert refuse(**options).startswith(sentence)


def test_an_interval_as_long_as_the_draft_is_enough() -> None:
    got = run(mamba_track_interval=4, speculative_num_draft_tokens=4, mamba_radix_cache_strategy="extra_buffer")
    assert got.mamba_track_interval == 4


def test_context_parallel_ranks_widen_the_page() -> None:
    got = run(page_size=16, dcp_size=3)
    assert (got.grids.checkpoint_tokens, got.grids.track_tokens) == (192, 768)
    assert got.chunked_prefill_size == 4096 // 48 * 48
    assert "page of 48 tokens; use 48 or 96" in refuse(page_size=16, dcp_size=3, chunked_prefill_size=64)


def test_a_chunk_below_the_state_chunk_warns_where_states_are_tracked() -> None:
    (warning,) = run(chunked_prefill_size=32).warnings
    assert "--chunked-prefill-size 32 is below the state chunk of 64 tokens" in warning
    assert run(chunked_prefill_size=64).warnings == ()
    assert run(chunked_prefill_size=32, disable_radix_cache=True).warnings == ()
    assert (
        run(chunked_prefill_size=32, mamba_radix_cache_strategy="no_buffer", disable_overlap_schedule=True).warnings
        == ()
    )


@pytest.mark.parametrize(
    ("page", "interval", "checkpoint", "track"),
    [(1, 256, 64, 256), (16, 96 + 16, 64, 448), (128, 256, 128, 256), (1, 100, 64, 1600)],
)
def test_grids(page: int, interval: int, checkpoint: int, track: int) -> None:
    got = run(page_size=page, mamba_track_interval=interval).grids
    assert (got.checkpoint_tokens, got.track_tokens) == (checkpoint, track)


@pytest.mark.parametrize(
    ("weights", "flag", "conv"),
    [
        ("bfloat16", "auto", "bfloat16"),
        ("float16", "auto", "float16"),
        ("float32", "auto", "float32"),
        ("float32", "bfloat16", "bfloat16"),
    ],
)
def test_conv_dtype_follows_weights_that_bfloat16_would_round(weights: str, flag: str, conv: str) -> None:
    got = run(dtype=weights, mamba_conv_dtype=flag)
    assert (got.dtype, got.kv_cache_dtype, got.mamba_conv_dtype) == (weights, weights, conv)


@pytest.mark.parametrize(
    ("capacity_gib", "tokens"),
    [
        (None, 4096),
        (4, 2048),
        (19.9, 2048),
        (20, 4096),
        (34.9, 4096),
        (35, 4096),
        (59.9, 4096),
        (60, 8192),
        (89, 8192),
        (159.9, 8192),
        (160, 16384),
    ],
)
def test_chunk_by_capacity(capacity_gib: float | None, tokens: int) -> None:
    capacity_bytes = None if capacity_gib is None else int(capacity_gib * GIB)
    assert chunked_prefill_tokens(capacity_bytes) == tokens
    assert run(facts=DeviceFacts(capacity_bytes)).chunked_prefill_size == tokens


def test_static_fraction_by_capacity() -> None:
    """Reference 1.2, row 'otherwise' without graphs, by hand; at most a quarter is ever reserved."""
    assert static_fraction(None, prefill_tokens=2048, ranks=1) == 0.95
    assert static_fraction(32 * GIB, prefill_tokens=4096, ranks=1) == round(1 - (512 + 6144 + 128) / 32768, 3)
    assert static_fraction(32 * GIB, prefill_tokens=100, ranks=8) == round(1 - (512 + 3072 + 1024) / 32768, 3)
    assert static_fraction(80 * GIB, prefill_tokens=4096, ranks=1) == round(1 - 10240 / 81920, 3)  # the floor
    assert static_fraction(60 * GIB, prefill_tokens=4096, ranks=1) == round(1 - 6784 / 61440, 3)  # not above 60 GiB
    assert static_fraction(128 * GIB, prefill_tokens=8192, ranks=1) == round(1 - (512 + 12288 + 128) / 131072, 3)
    for gib in (0.25, 1, 2, 4, 8, 24):
        assert static_fraction(int(gib * GIB), prefill_tokens=4096, ranks=1) == 0.75


def test_device_memory_is_the_capacity_when_given() -> None:
    got = run(device_memory_bytes=128 * GIB)
    assert (got.chunked_prefill_size, got.mem_fraction_static) == (8192, 0.901)
    got = run(facts=DeviceFacts(memory_bytes=None))
    assert (got.device_memory_bytes, got.mem_fraction_static, got.chunked_prefill_size) == (None, 0.95, 4096)


def test_chunking_off_reserves_for_the_longest_prefill() -> None:
    got = run(device_memory_bytes=128 * GIB, chunked_prefill_size=-1)
    assert (got.chunked_prefill_size, got.origins["chunked_prefill_size"]) == (None, "flag")
    assert got.mem_fraction_static == round(1 - (512 + 16384 * 1.5 + 128) / 131072, 3)


def test_a_default_chunk_is_whole_pages() -> None:
    assert run(page_size=192, mamba_track_interval=192).chunked_prefill_size == 4032
    assert run(page_size=8192, mamba_track_interval=8192).chunked_prefill_size == 8192


def test_rows_are_for_people() -> None:
    rows = {
        name: value for name, value, _ in run(api_key="secret", chunked_prefill_size=-1, enable_metrics=True).rows()
    }
    assert rows["api_key"] == "set"
    assert rows["chunked_prefill_size"] == "off"
    assert (rows["enable_metrics"], rows["enable_cache_report"]) == ("on", "off")
    assert rows["device_memory_bytes"] == "24.00 GiB"
    assert rows["grids"] == "checkpoint 64, track 256"
    assert rows["max_mamba_cache_size"] == "-"
    assert "secret" not in str(rows)


def test_every_combination_is_refused_or_consistent() -> None:
    strategies = ("auto", "no_buffer", "extra_buffer", "extra_buffer_lazy")
    for strategy, page, serial, off, supports in itertools.product(
        strategies, (1, 16, 64, 128), (0, 1), (0, 1), (0, 1)
    ):
        try:
            got = run(
                spec=spec_of(supports_extra_buffer=bool(supports)),
                mamba_radix_cache_strategy=strategy,
                page_size=page,
                disable_overlap_schedule=bool(serial),
                disable_radix_cache=bool(off),
            )
        except ConfigError:
            continue
        assert got.slots_per_request == (1 if off else 3 + got.track_slots)
        assert not (got.overlap and serial)
        assert off or not (got.strategy == "no_buffer" and (got.overlap or page > 1))
        assert off or got.grids.checkpoint_tokens % page == 0
