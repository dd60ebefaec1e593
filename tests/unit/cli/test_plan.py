"""`twinpool plan` as a user runs it: exit codes, one sentence on stderr, and no torch."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from tests.unit.cli.running import run

QWEN = ["Qwen3-Next-80B-A3B", "--gpu", "H200"]
ROOM = ["--pre-load-memory", "79GiB", "--post-weights-memory", "60GiB"]


@pytest.mark.parametrize(
    "argv",
    [
        [*QWEN, "--tp", "2"],
        [QWEN[0], *ROOM, "--running", "8", "--tokens-per-request", "8192", "--idle-sessions", "100"],
        [QWEN[0], *ROOM, "--json"],
        ["--state-bytes-per-slot", "1MiB", "--kv-bytes-per-token", "4096", *ROOM],
        [*ROOM, "--", "python", "-m", "sglang.launch_server", "--model-path", "Qwen/Qwen3-Next-80B-A3B-Instruct"],
        ["--list-models"],
        ["--list-gpus"],
        ["--help"],
    ],
)
def test_a_plan_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    code, out, err = run(monkeypatch, capsys, "plan", *argv)
    assert (code, err) == (0, "")
    assert out


def test_a_plan_that_the_engine_refuses_is_told_and_exits_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(monkeypatch, capsys, "plan", QWEN[0], *ROOM, "--max-mamba-cache-size", "5000")
    assert (code, err) == (3, "")
    assert "Refused at boot: Loaded weights leave no GPU memory for the KV cache" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "No model is named"),
        (["--gpu", "H100"], "No model is named"),
        (["Qwen9", "--gpu", "H100"], "'Qwen9' is no folder"),
        (["./nowhere", "--gpu", "H100"], "there is no folder or file ./nowhere"),
        (["a\nb", "--gpu", "H100"], "'a b' is no folder"),
        ([QWEN[0], *ROOM, "--tp", "4", "--dcp-size", "3"], "--dcp-size 3 does not divide the 4 tensor-parallel ranks"),
        ([QWEN[0], *ROOM, "--dcp-size", "2"], "--dcp-size 2 does not divide the 1 tensor-parallel rank of"),
        ([QWEN[0], "--gpu", "H101"], "--gpu 'H101' is not in the table of devices; nearest: H100"),
        ([QWEN[0]], "The memory of a device is not known"),
        ([QWEN[0], "--gpu", "CPU"], "The memory of a device is not known"),
        ([QWEN[0], "--post-weights-memory", "50GiB"], "--post-weights-memory also needs --gpu or --pre-load-memory"),
        ([QWEN[0], "--gpu", "L4"], "The weights take"),
        ([QWEN[0], *ROOM, "--tp", "3"], "--tp-size 3 does not divide"),
        ([QWEN[0], *ROOM, "--max-mamba-cache-size", "0"], "--max-mamba-cache-size must be at least 1, got 0"),
        ([QWEN[0], *ROOM, "--max-running-requests", "-4"], "--max-running-requests must be at least 1, got -4"),
        ([QWEN[0], *ROOM, "--tokens-per-request", "0"], "--tokens-per-request must be at least 1, got 0"),
        ([QWEN[0], "--pre-load-memory=-5GiB"], "--pre-load-memory: '-5GiB' is not a size"),
        (["A", "B", *ROOM], "There are 2 models (A, B); give one."),
        (
            [QWEN[0], *ROOM, "--tp", "2", "--", "sglang", "serve", "--tp", "4"],
            "--tp-size is 2 on the command line and 4",
        ),
        ([QWEN[0], *ROOM, "--engine", "twinpool", "--", "sglang", "serve"], "--engine twinpool contradicts"),
        ([QWEN[0], *ROOM, "--idle-sessions", "4"], "--idle-sessions needs --tokens-per-request"),
        ([QWEN[0], *ROOM, "--running", "4"], "--running needs --tokens-per-request"),
        ([QWEN[0], *ROOM, "--tokens-per-request", "100"], "--tokens-per-request needs --running"),
        ([QWEN[0], *ROOM, "--context-length", "999999"], "--context-length 999999 is longer than the model's 262144"),
        (
            [QWEN[0], *ROOM, "--running", "1", "--tokens-per-request", "999999"],
            "--tokens-per-request 999999 is longer than the context of 262144",
        ),
        ([QWEN[0], *ROOM, "--trace", "tests/data/traces/agent.json"], "does not tell how many requests run at once"),
        (["--state-bytes-per-slot", "4096", *ROOM], "--state-bytes-per-slot and --kv-bytes-per-token go together"),
        (["--state-bytes-per-slot", "6", "--kv-bytes-per-token", "1", *ROOM], "must be a positive multiple of 4"),
    ],
)
def test_bad_input_is_one_sentence_and_exits_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    code, out, err = run(monkeypatch, capsys, "plan", *argv)
    assert (code, out) == (2, "")
    assert err.startswith("twinpool: error: ")
    assert err.count("\n") == 1
    assert words in err


def test_no_torch_is_imported() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'fastapi', 'uvicorn', 'huggingface_hub'): sys.modules[name] = None\n"
        "from twinpool.cli.main import run\n"
        f"sys.exit(run(['plan', *{[QWEN[0], *ROOM]}, '--running', '4', '--tokens-per-request', '9000']))\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    print(f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before:.2f} s of CPU time")
    assert done.returncode == 0, done.stderr
    assert "Memory of one rank" in done.stdout


BY_HAND = [
    "--state-bytes-per-slot", "1MiB", "--kv-bytes-per-token", "4KiB", "--pool-memory", "1GiB", "--page-size", "16",
    "--mamba-radix-cache-strategy", "extra_buffer",
]  # fmt: skip
S5, DRAFTS = ["--mamba-radix-cache-strategy", "extra_buffer"], ["--speculative-num-draft-tokens", "4"]


@pytest.mark.parametrize(
    ("argv", "slots", "tokens", "running"),
    [
        ([QWEN[0], "--pool-memory", "20GiB", *S5], 130, 461_949, 26),
        ([QWEN[0], "--pool-memory", "20GiB", *S5, *DRAFTS, "--max-running-requests", "48"], 70, 461_949, 14),
        ([QWEN[0], "--pool-memory", "20GiB", *S5, *DRAFTS, "--max-running-requests", "8"], 70, 537_405, 8),
        (["Kimi-Linear-48B-A3B", "--pool-memory", "20GiB", *S5, "--page-size", "64"], 233, 1_403_136, 46),
        (BY_HAND, 484, 137_984, 96),
        ([*BY_HAND, "--mamba-full-memory-ratio", "1"], 511, 131_072, 102),
        ([*BY_HAND, "--mamba-full-memory-ratio", "1", *DRAFTS, "--max-running-requests", "64"], 281, 131_584, 56),
    ],
)
def test_golden_numbers_of_the_reference_by_pool_memory(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    slots: int,
    tokens: int,
    running: int,
) -> None:
    """Section 10, with nothing but the memory of both pools, from the command line."""
    code, out, err = run(monkeypatch, capsys, "plan", *argv)
    assert (code, err) == (0, "")
    assert f"State pool: {slots} slots; KV pool: {tokens:,} tokens; at most {running} requests run at once." in out
    assert "Flags to paste (beside a --mem-fraction-static that leaves the pools " in out
