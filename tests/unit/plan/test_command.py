"""The command line of a plan: flags before and after --, a launch line in a file, and contradictions between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinpool.config.engines import SGLANG, SGLANG_UNPADDED, TWINPOOL, EngineRules
from twinpool.errors import ConfigError
from twinpool.plan.command import Command, help_text, read_command

LAUNCH = ["python", "-m", "sglang.launch_server", "--model-path", "org/m", "--tp", "4"]


def read(*argv: str) -> Command:
    return read_command(argv, usage="usage")


def test_flags_before_and_after_the_dashes_are_merged() -> None:
    command = read("org/m", "--gpu", "H100", "--page-size", "64", "--running", "8", "--", *LAUNCH, "--dtype", "half")
    assert (command.model, command.options.gpu, command.options.running, command.engine) == (
        "org/m",
        "H100",
        8,
        "sglang",
    )
    assert (command.flags.tp_size, command.flags.page_size, command.flags.dtype) == (4, 64, "float16")
    assert command.flags == command.line.deployment
    assert not command.sweep


def test_the_model_of_the_launch_line_counts_where_no_other_is_named() -> None:
    assert read("--", *LAUNCH).model == "org/m"
    assert read("other", "--", *LAUNCH).model == "other"
    assert read("--model-path", "x").model == "x"
    assert read().model is None


def test_a_launch_line_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "launch.sh"
    file.write_text("#!/bin/bash\n# serves\nvllm serve org/m \\\n  --max-num-seqs 32 \\\n  -tp 2\n")
    command = read("--launch", str(file))
    assert (command.engine, command.model) == ("vllm", "org/m")
    assert command.line.vllm is not None
    assert command.line.vllm.max_num_seqs == 32


@pytest.mark.parametrize(
    ("argv", "rules"),
    [
        (["m"], SGLANG),
        (["m", "--engine", "sglang-unpadded"], SGLANG_UNPADDED),
        (["m", "--engine", "sglang-unpadded", "--", *LAUNCH], SGLANG_UNPADDED),
        (["m", "--gpu", "CPU"], TWINPOOL),
        (["m", "--gpu", "cpu", "--engine", "sglang"], SGLANG),
        (["--", "twinpool", "serve"], TWINPOOL),
    ],
)
def test_the_engine(argv: list[str], rules: EngineRules) -> None:
    assert read(*argv).rules == rules


def test_vllm_has_no_two_pools() -> None:
    with pytest.raises(ConfigError, match=r"^--engine vllm keeps states and KV in one pool"):
        _ = read("m", "--engine", "vllm").rules


def test_sweep_is_a_first_word_only() -> None:
    assert read("sweep", "m", "--points", "5").sweep
    assert not read("m").sweep


def test_a_draft_algorithm_may_find_its_tokens_in_the_launch_line() -> None:
    algorithm, tokens = ["--speculative-algorithm", "EAGLE"], ["--speculative-num-draft-tokens", "4"]
    assert read(*algorithm, "--", *LAUNCH, *tokens).flags.speculative_num_draft_tokens == 4
    with pytest.raises(ConfigError, match="--speculative-algorithm EAGLE needs --speculative-num-draft-tokens"):
        read("--", *LAUNCH, *algorithm)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["a", "b"], r"There are 2 models \(a, b\); give one."),
        (["a", "--model-path", "b"], r"There are 2 models \(a, b\); give one."),
        (["--launch", "x", "--", *LAUNCH], "There are two launch lines"),
        (["--launch", "no such file"], "--launch no such file cannot be read"),
        (["--launch", "/"], "--launch / cannot be read"),
        (["--engine", "vllm", "--", *LAUNCH], "--engine vllm contradicts the launch line, which starts sglang"),
        (
            ["--engine", "sglang", "--", "vllm", "serve", "m"],
            "--engine sglang contradicts the launch line, which starts vllm",
        ),
        (["--tp", "8", "--", *LAUNCH], "--tp-size is 8 on the command line and 4 in the launch line; leave one out"),
        (["m", "--tp", "0"], "--tp-size must be at least 1, got 0"),
        (["m", "--running", "-3"], "--running must be at least 1, got -3"),
        (["m", "--weights", "big"], "--weights: 'big' is not a size"),
        (["m", "--gpu"], "Argument --gpu: expected one argument"),
        (["m", "--runing", "3"], "--runing is not a flag of twinpool plan; did you mean --running"),
        (["m", "--engine", "trtllm"], "--engine trtllm is not one of sglang"),
        ([""], "MODEL is empty"),
        (["m", "--tp", "1" + "0" * 400], r"--tp-size must be below 2\*\*63, got a number of 1329 bits"),
        (["m", "--max-queued-requests", "9" * 30], r"--max-queued-requests must be below 2\*\*63"),
        (["m", "--weights", "9" * 400], r"--weights: a size must be below 2\*\*63 bytes"),
        (["m", "--html", "page.html"], "--html is a flag of twinpool plan sweep"),
        (["m", "--points", "5"], "--points is a flag of twinpool plan sweep"),
        (["sweep", "m", "--to", "1e300"], r"--to must be at most 1e\+15"),
        (["sweep", "--boot-log", "-"], "A sweep has no --boot-log"),
        (["--gpu", "H100", "--boot-log", "-"], "--gpu contradicts --boot-log: the memory is what the log measured"),
        (["m", "--activations", "1GiB"], "--activations is for --engine vllm"),
    ],
)
def test_a_contradiction_or_bad_value_is_one_sentence(argv: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{sentence}") as caught:
        read(*argv)
    assert "\n" not in str(caught.value)


def test_the_same_flag_on_both_sides_may_say_the_same() -> None:
    assert read("--tp", "4", "--", *LAUNCH).flags.tp_size == 4


def test_help_lists_its_own_flags_and_names_the_others() -> None:
    text = help_text("usage: x\n")
    assert text.startswith("usage: x\n")
    assert "  --tokens-per-request TOKENS" in text
    assert "--mamba-full-memory-ratio" in text
