"""Azure CSV: times and lengths of single requests; reuse is unknown."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

from twinpool.replay.files import Member
from twinpool.replay.formats.assemble import Draft, order_note, single_sessions
from twinpool.replay.formats.format import Format
from twinpool.replay.formats.records import Rejects, Unusable, length
from twinpool.replay.trace import NO_BLOCKS, Trace

_TIME, _INPUT, _OUTPUT = COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?([+-]\d\d:\d\d|Z)?")
_BOM = "\ufeff"
_NOTE = "The recorder kept lengths and times only: what requests share with each other is unknown."


def recognises(line: bytes) -> bool:
    """Whether a file that starts with this line is one."""
    return set(COLUMNS) <= set(_names(line))


def read(name: str, members: Iterable[Member], rejects: Rejects) -> Trace:
    """The trace; columns besides time, input and output are not used."""
    drafts = [draft for member in members for draft in _drafts(member, rejects)]
    return Trace(
        name=name,
        format=FORMAT.name,
        block_size=None,
        scope="global",
        clock="trace",
        sessions=single_sessions(drafts),
        rejected=tuple(rejects.items),
        notes=(_NOTE, *order_note(drafts)),
    )


def _drafts(member: Member, rejects: Rejects) -> Iterator[Draft]:
    """The usable rows of one file."""
    names = _names(member.head)
    if not set(COLUMNS) <= set(names):
        rejects.add(f"{member.name}:1", f"the columns {', '.join(COLUMNS)} are needed")
        return
    for line, row in member.lines():
        if line == 1:
            continue
        try:
            yield _draft(member.name, line, dict(zip(names, _cells(row, len(names)), strict=True)))
        except (Unusable, UnicodeDecodeError) as error:
            rejects.add(f"{member.name}:{line}", error)


def _draft(member: str, line: int, row: dict[str, str]) -> Draft:
    counts = {column: _count(column, row[column]) for column in (_INPUT, _OUTPUT)}
    return Draft(
        member=member,
        line=line,
        arrival_s=_epoch_s(row[_TIME]),
        input_tokens=length(counts, _INPUT, at_least=1),
        output_tokens=length(counts, _OUTPUT),
        blocks=NO_BLOCKS,
    )


def _names(line: bytes) -> list[str]:
    """The column names of a header line; none if it is not text."""
    try:
        return next(csv.reader([line.decode().removeprefix(_BOM).strip()]), [])
    except (UnicodeDecodeError, csv.Error):
        return []


def _cells(line: bytes, columns: int) -> Sequence[str]:
    cells = next(csv.reader([line.decode().strip()]), [])
    if len(cells) != columns:
        raise Unusable(f"the header has {columns} columns, this row has {len(cells)}")
    return cells


def _count(column: str, cell: str) -> int:
    if not re.fullmatch(r"\d{1,18}", cell):
        raise Unusable(f"{column} must be a count of tokens, got '{cell[:40]}'")
    return int(cell)


def _epoch_s(cell: str) -> float:
    """Seconds since 1970. Parsed in two parts: the files have seven decimals, a datetime six. No zone means UTC."""
    found = _TIMESTAMP.fullmatch(cell)
    if found is None:
        raise Unusable(f"{_TIME} must be a date and time, got '{cell[:40]}'")
    try:
        whole = datetime.fromisoformat(found[1] + (found[3] or ""))
    except ValueError as error:
        raise Unusable(f"{_TIME} must be a date and time, got '{cell[:40]}' ({error})") from None
    zoned = whole if whole.tzinfo else whole.replace(tzinfo=UTC)
    return zoned.timestamp() + float(found[2] or 0)


FORMAT = Format("azure", "Azure CSV: times and lengths of single requests, reuse unknown", recognises, read)
