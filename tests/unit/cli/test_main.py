"""The command line: verbs, exit codes, one line for an expected error, a traceback for a bug."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys

import pytest

from tests.unit.cli.running import outcome
from twinpool.cli import main
from twinpool.errors import ConfigError, MemoryRefusal


def test_help_lists_the_verbs_that_exist(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(monkeypatch, "--help") == 0
    text = capsys.readouterr().out
    assert all(f"  {verb} " in text for verb in main.VERBS)
    assert outcome(monkeypatch) == 2
    assert capsys.readouterr().out == text


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == "twinpool 0.1.0\n"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["srve"], "twinpool: error: srve is not a verb of twinpool; did you mean serve?\n"),
        (["zzz"], "twinpool: error: zzz is not a verb of twinpool; see twinpool --help.\n"),
        (["serve", "--prt", "1"], "twinpool: error: --prt is not a flag of twinpool; did you mean --port?\n"),
    ],
)
def test_a_wrong_command_is_one_line_and_exit_2(
    argv: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcome(monkeypatch, *argv) == 2
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize(("error", "code"), [(ConfigError("no."), 2), (MemoryRefusal("small."), 3)])
def test_exit_codes(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: object) -> int:
        raise error

    monkeypatch.setattr("twinpool.cli.serve.run", fail)
    assert outcome(monkeypatch, "serve") == code
    assert capsys.readouterr().err == f"twinpool: error: {error}\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: object) -> int:
        raise KeyError("bug")

    monkeypatch.setattr("twinpool.cli.serve.run", fail)
    monkeypatch.setattr(sys, "argv", ["twinpool", "serve"])
    with pytest.raises(KeyError):
        main.main()


def test_help_and_bad_flags_do_not_load_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['twinpool.server.app'] = None\n"
        "from twinpool.cli.main import main\n"
        "sys.argv = ['twinpool', 'serve', '--hicache-io-backend', 'kernel']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("twinpool: error: --hicache-io-backend is not supported: ")


def test_the_module_runs_as_the_package_does() -> None:
    for name in ("twinpool", "twinpool.cli.main"):
        done = subprocess.run([sys.executable, "-m", name, "bake"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("twinpool: error: bake is not a verb of twinpool")


def test_a_reader_that_has_enough_is_no_bug() -> None:
    code = "import sys; from twinpool.cli.main import main; sys.argv = ['twinpool', 'plan', '--list-models']; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", main.READER_LEFT)


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(argv: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("twinpool.cli.replay.run", stop)
    assert outcome(monkeypatch, "replay") == main.INTERRUPTED
    assert capsys.readouterr() == ("", "twinpool: interrupted.\n")


def test_a_port_that_is_taken_is_refused_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "twinpool", "serve", "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert (done.returncode, done.stderr) == (
        2,
        f"twinpool: error: 127.0.0.1:{port} cannot be listened on ({os.strerror(errno.EADDRINUSE)}): "
        "choose another with --host and --port.\n",
    )
