"""Which tests run where: all of them with --full (make test-all), and a matrix that is small enough for each commit without."""

from __future__ import annotations

import pytest

# Second shapes of a family, and families whose layers are those of another: per commit they are compared with transformers once.
VARIANTS = frozenset({
    "granite_rope", "lfm2_moe", "kimi_narrow", "ling_narrow", "nemotron_latent", "falcon_plain", "zamba", "zamba_rope", "olmo_rope",
    "mamba", "glm",
})  # fmt: skip
ONCE = (
    "test_one_pass", "test_memory_is_as_planned", "test_greedy_tokens_and_logprobs_equal_transformers",
    "test_the_boot_log_prints_what_is_allocated", "test_experts_are_those_of_transformers",
)  # fmt: skip
# GLM-5-Next is a variant by its mixers only: nobody else has its sparse index and its streams, so what they say runs per commit as well.
STREAMS, SAYS = "glm", frozenset({"test_miss", "test_hit", "test_cut", "test_batch", "test_retract"})
# One family for each kind of mixer: Gated DeltaNet and experts, KDA and attention over a latent, Mamba2, Mamba1, short convolution.
MIXERS = frozenset({"qwen3_5_moe", "kimi", "granite_moe", "jamba", "lfm2"})
RANKS = "test_tokens_of_one_rank"
# What the cache's dtype changes is the attention of a family, not its mixers: a few of each kind per commit.
FP8, FP8_FAMILIES = (
    "test_hits_mates_cuts_and_retraction_change_nothing",
    frozenset({"qwen3_5", "lfm2", "kimi", "jamba"}),
)
RETRACT = "test_retract"
MATRIX = "test_the_same_bits_whatever_the_cut_the_batch_and_the_threads"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="every row of every matrix (make test-all)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: a row that is left out without --full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    left = [item for item in items if _is_left_out(item)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not _is_left_out(item)]


def _is_left_out(item: pytest.Item) -> bool:
    if item.get_closest_marker("full") is not None:
        return True
    values = getattr(item, "callspec", None)
    if values is None:
        return False
    name, params = item.name.partition("[")[0], values.params
    # A cell of tests/agreement/test_families.py: family and strategy.
    family, strategy = params.get("cell", (params.get("family"), None))
    if family in VARIANTS and name not in ONCE and not (family == STREAMS and name in {*SAYS, MATRIX}):
        return True
    if name == RETRACT:
        return family not in MIXERS and strategy in ("lazy", "off")
    if name == RANKS:
        return params["family"] not in MIXERS
    if name == FP8 and params["family"] not in FP8_FAMILIES:
        return True
    if name != MATRIX or params["dtype"] != params["ssm_dtype"]:
        return name == MATRIX
    return params["dtype"] == "float16" and family not in MIXERS
