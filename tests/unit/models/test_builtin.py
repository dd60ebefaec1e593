"""Built-in shapes: the published table of hybrid models, boot logs and real config.json files say the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twinpool.models.builtin import builtin_models, find_builtin
from twinpool.models.spec import ModelSpec
from twinpool.units import MIB

DATA = Path(__file__).parents[2] / "data"
CONFIGS = sorted((DATA / "configs").glob("*.json"))
LOGS = {log["name"]: log for log in json.loads((DATA / "boot_logs.json").read_text())}

# name: layers, linear, attention, ssm MiB (float32), conv MiB (bfloat16), KV bytes per token (bfloat16), one rank
TABLE = {
    "Qwen3-Next-80B-A3B": (48, 36, 12, 72.0, 1.688, 24_576),
    "Qwen3.5-9B": (32, 24, 8, 48.0, 1.125, 32_768),
    "Qwen3.5-27B": (64, 48, 16, 144.0, 2.812, 65_536),
    "Qwen3.5-35B-A3B": (40, 30, 10, 60.0, 1.406, 20_480),
    "Qwen3.5-122B-A10B": (48, 36, 12, 144.0, 2.531, 24_576),
    "Qwen3.5-397B-A17B": (60, 45, 15, 180.0, 3.164, 30_720),
    "Qwen3.8-Flash-Next": (48, 36, 12, 108.0, 2.109, 24_576),
    "Kimi-Linear-48B-A3B": (27, 20, 7, 40.0, 1.406, 8_064),
    "Kimi-K3": (93, 69, 24, 414.0, 14.555, 27_648),
    "GLM-5.3-Flash": (45, 34, 11, 136.0, 4.781, 11_627),
    "Ling-3.0-tiny": (24, 18, 6, 18.0, 0.633, 6_912),
    "Ling-3.0-flash": (42, 35, 7, 70.0, 2.461, 8_064),
    "Nemotron-Nano-9B-v2": (56, 27, 4, 135.0, 1.898, 16_384),
    "Nemotron-3-Nano-30B-A3B": (52, 23, 6, 46.0, 0.809, 6_144),
    "Nemotron-3.5-Lightning-30B-A3B": (52, 23, 6, 46.0, 0.809, 6_144),
    "Nemotron-3-Super-120B-A12B": (88, 40, 8, 160.0, 2.344, 8_192),
    "Nemotron-3-Ultra-550B-A55B": (108, 48, 12, 384.0, 5.062, 12_288),
    "Nemotron-H-56B-Base": (118, 54, 10, 864.0, 6.328, 40_960),
    "granite-4.0-h-micro": (40, 36, 4, 72.0, 0.896, 8_192),
    "granite-4.0-h-1b": (40, 36, 4, 54.0, 0.686, 8_192),  # the table has "?" for KV: 4 layers × 4 heads × 2 × 128 × 2
    "granite-4.0-h-small": (40, 36, 4, 144.0, 1.740, 16_384),
    "Falcon-H1-0.5B": (36, 36, 36, 27.0, 0.369, 18_432),
    "Falcon-H1-1.5B": (24, 24, 24, 72.0, 0.492, 24_576),
    "Falcon-H1-7B": (44, 44, 44, 132.0, 0.902, 45_056),
    "OLMo-Hybrid": (32, 24, 8, 50.625, 1.582, 122_880),  # printed as 50.62
    "LFM2-1.2B": (16, 10, 6, 0.0, 0.078, 12_288),
    "LFM2-8B-A1B": (24, 18, 6, 0.0, 0.141, 12_288),
    "MiniCPM-SALA": (32, 24, 8, 48.0, 0.0, 8_192),
    "Inkling": (66, 66, 11, 0.0, 6.961, 45_056),  # not in the table; 66 × 6 windows, 11 × 8 heads × 2 × 128 × 2
}
# boot log: built-in model, KV dtype of the launch
FROM_LOGS = {
    "Qwen3.5-9B bf16": ("Qwen3.5-9B", "bfloat16"),
    "Qwen3.6-27B-FP8": ("Qwen3.6-27B", "bfloat16"),
    "Qwen3.8-27B-NVFP4": ("Qwen3.8-27B", "fp8_e4m3"),
    "Qwen3.5-35B-A3B-AWQ": ("Qwen3.5-35B-A3B", "bfloat16"),
    "Kimi-K3 TP8 (SKILL example)": ("Kimi-K3", "fp8_e4m3"),
    "GLM-5.3-Flash TP2 (docs boot log)": ("GLM-5.3-Flash", "fp8_e4m3"),
    "Ling-3 tiny (BailingMoeV3)": ("Ling-3.0-tiny", "bfloat16"),
    "granite-4.0-h-micro": ("granite-4.0-h-micro", "bfloat16"),
    "Nemotron-Nano-9B-v2": ("Nemotron-Nano-9B-v2", "bfloat16"),
}


def spec_of(name: str) -> ModelSpec:
    row = find_builtin(name)
    assert row is not None
    return ModelSpec.from_config_json(row.config)


def bytes_of(spec: ModelSpec) -> tuple[int, int, int]:
    return (
        spec.ssm_bytes_per_slot(ssm_dtype="float32"),
        spec.conv_bytes_per_slot(conv_dtype="bfloat16"),
        spec.kv_bytes_per_token(kv_dtype="bfloat16"),
    )


def test_every_row_is_tested() -> None:
    assert [row.name for row in builtin_models()] == list(TABLE)
    assert all(row.source for row in builtin_models())


@pytest.mark.parametrize("name", TABLE)
def test_rows_give_the_published_bytes(name: str) -> None:
    layers, linear, attention, ssm_mib, conv_mib, kv_bytes = TABLE[name]
    spec = spec_of(name)
    ssm, conv, kv = bytes_of(spec)
    assert (len(spec.layers), spec.n_linear_layers, spec.n_attention_layers) == (layers, linear, attention)
    assert (ssm / MIB, kv) == (ssm_mib, kv_bytes)
    assert conv / MIB == pytest.approx(conv_mib, abs=6e-4)


@pytest.mark.parametrize("log", FROM_LOGS)
def test_rows_give_the_bytes_of_boot_logs(log: str) -> None:
    name, kv_dtype = FROM_LOGS[log]
    spec, line = spec_of(name), LOGS[log]
    tp = line["tp"]
    spec.check_tp(tp)
    assert spec.ssm_bytes_per_slot(ssm_dtype="float32", tp=tp) == line["ssm_bytes_slot"]
    assert spec.conv_bytes_per_slot(conv_dtype="bfloat16", tp=tp) == line["conv_bytes_slot"]
    assert spec.kv_bytes_per_token(kv_dtype=kv_dtype, tp=tp) == line["kv_bytes_token"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_real_configurations_agree_with_their_row(path: Path) -> None:
    short = path.stem.removesuffix("_config").split("--")[1]
    name = next(n for n in (short, short.rsplit("-", 1)[0]) if find_builtin(n) is not None)
    real, row = ModelSpec.from_config_json(json.loads(path.read_text())), spec_of(name)
    assert bytes_of(real) == bytes_of(row)
    assert real.layers == row.layers
    assert (real.architecture, real.hidden_size, real.vocab_size) == (row.architecture, row.hidden_size, row.vocab_size)
    assert (real.context_len, real.draft_layers, real.n_query_heads) == (
        row.context_len, row.draft_layers, row.n_query_heads,
    )  # fmt: skip


def test_names_are_found_in_any_case_under_any_organisation() -> None:
    row = find_builtin("Qwen3.5-27B")
    assert row is not None
    assert (row.params_b, row.aliases) == (27, ("Qwen3.6-27B", "Qwen3.8-27B"))
    for name in ("qwen3.5-27b", "Qwen/Qwen3.5-27B", "Qwen/qwen3.8-27B"):
        assert find_builtin(name) is row
    assert find_builtin("Qwen3.5-28B") is None
    assert find_builtin("") is None


def test_no_name_is_given_twice() -> None:
    names = [known.casefold() for row in builtin_models() for known in (row.name, *row.aliases)]
    assert len(names) == len(set(names))


def test_what_rows_say_beside_the_bytes() -> None:
    flash = find_builtin("Qwen3.8-Flash-Next")
    assert flash is not None
    assert "184,336" in flash.note
    assert spec_of("Qwen3.8-Flash-Next").side_state_bytes == 184_336
    assert spec_of("Inkling").warnings == (
        "55 layers keep only the last 512 tokens: 230,686,720 bytes of bfloat16 keys and values a sequence that are "
        "not counted here.",
    )
