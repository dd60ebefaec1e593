"""`twinpool serve --help` to the letter. Refresh after a deliberate change: `python -m tests.golden.test_help`."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinpool.cli.main import run
from twinpool.config.flags import help_text

GOLDEN = Path(__file__).with_name("serve_help.txt")


def test_serve_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run(["serve", "--help"])
    assert left.value.code == 0
    assert capsys.readouterr().out == GOLDEN.read_text()


if __name__ == "__main__":
    GOLDEN.write_text(help_text())
