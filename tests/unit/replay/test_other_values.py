"""A value of another engine that changes results is refused in a replay, where a plan only names it."""

from __future__ import annotations

import pytest

from twinpool.errors import ConfigError
from twinpool.replay.command import read_replay

LINE = "python -m sglang.launch_server --model-path Qwen/Qwen3.5-9B --enable-hierarchical-cache"


@pytest.mark.parametrize("flag", ["--hicache-storage-backend mooncake", "--radix-eviction-policy tlru"])
def test_a_value_that_changes_results_is_refused_by_name(flag: str) -> None:
    words = ["trace.jsonl", "--gpu", "H100", "--", *LINE.split(), *flag.split()]
    with pytest.raises(ConfigError, match=f"^{flag} is not "):
        read_replay(words, usage="")
