"""`twinpool VERB ARGV...` in this process."""

from __future__ import annotations

import sys

import pytest

from twinpool.cli import main


def outcome(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    """Its exit code."""
    monkeypatch.setattr(sys, "argv", ["twinpool", *argv])
    with pytest.raises(SystemExit) as left:
        main.main()
    assert isinstance(left.value.code, int)
    return left.value.code


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Its exit code, standard output and standard error."""
    code = outcome(monkeypatch, *argv)
    out, err = capsys.readouterr()
    return code, out, err
