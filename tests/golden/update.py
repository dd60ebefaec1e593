"""Write every golden file again, after a deliberate change of output: `python -m tests.golden.update`; then read the diff."""

from __future__ import annotations

from tests.golden.cases import CASES, HERE, output

if __name__ == "__main__":
    for name, argv in CASES.items():
        (HERE / name).write_text(output(argv))
