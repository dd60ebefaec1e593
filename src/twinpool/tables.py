"""Tables: head, rows and which columns are numbers; and as plain text, each column as wide as its widest cell."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    """A head and rows of cells. right: columns (from 0) whose cells end at the same place, for numbers.

    Raises ValueError for a row with more or fewer cells than the head.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Collection[int] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.head):
                raise ValueError(f"a row has {len(row)} cells under a head of {len(self.head)}: {list(row)}")

    @property
    def text(self) -> str:
        """Aligned lines, two spaces between columns, no colour, no space at the end of a line."""
        lines = [self.head, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.head))]
        return "\n".join(self._line(cells, widths) for cells in lines)

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        padded = [
            cell.rjust(width) if column in self.right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()


def table_text(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """A table as text in one call; see Table for the columns in `right` and the ValueError for an uneven row."""
    return Table(head, rows, right).text
