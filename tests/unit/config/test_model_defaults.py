"""Defaults that a model or an engine has of its own."""

from __future__ import annotations

from twinpool.config.defaults import model_default
from twinpool.config.engines import SGLANG, TWINPOOL


def ratio(architecture: str, family: str, engine: str) -> tuple[float, bool]:
    return model_default("mamba_full_memory_ratio", architecture=architecture, family=family, engine=engine)


def test_a_state_as_small_as_seven_tokens_has_a_ratio_of_its_own_where_we_serve() -> None:
    assert ratio("Lfm2ForCausalLM", "shortconv", TWINPOOL.name) == (0.1, True)
    assert ratio("Lfm2ForCausalLM", "shortconv", SGLANG.name) == (0.9, False)
    assert ratio("Qwen3NextForCausalLM", "gdn", TWINPOOL.name) == (0.9, False)


def test_an_engine_without_rows_has_the_models() -> None:
    page_size = model_default(
        "page_size", architecture="Qwen4ExpForConditionalGeneration", family="gdn", engine=SGLANG.name
    )
    assert page_size == (64, True)
