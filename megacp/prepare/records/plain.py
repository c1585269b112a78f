"""Read records from CSV tables and from plain text files.

In a table (.csv, .tsv), the first row has the names of the columns, every other row is a record,
and empty cells count as absent. A .txt file is one record: its whole content is a text.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from megacp.prepare.records.record import Record, Refusal
from megacp.storage.place import open_input

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
# The longest cell that the csv module accepts; --max-record-bytes limits whole rows instead.
_LONGEST_CELL = 2**31 - 1


def read_text_file(path: str, max_record_bytes: int) -> Iterator[Record | Refusal]:
    """Yield the content of a .txt file as one record with the key `text`."""
    with open_input(path) as stream:
        # One byte more than allowed shows that a file is too large without reading all of it.
        data = stream.read(max_record_bytes + 1)
    if len(data) > max_record_bytes:
        reason = (
            f"the file has more than --max-record-bytes {max_record_bytes}: split it into several "
            "files, or raise the limit"
        )
        yield Refusal(path, 1, 0, reason)
        return
    text = _decoded(data)
    if text is None:
        yield Refusal(path, 1, 0, "the file is not UTF-8 text")
    elif text.strip():
        yield Record(1, 0, len(data), {"text": text})


def read_csv(path: str, max_record_bytes: int) -> Iterator[Record | Refusal]:
    """Yield the rows of a .csv or .tsv file as records.

    `line` is the line on which a row begins, and `offset` the 0-based row. The separator of a .csv
    file may be a semicolon, as spreadsheets write it in some languages.
    """
    with open_input(path) as stream:
        text = _decoded(stream.read())
    if text is None:
        yield Refusal(path, 1, 0, "the file is not UTF-8 text: save it as UTF-8")
        return
    csv.field_size_limit(_LONGEST_CELL)
    first_line = text.partition("\n")[0]
    separator = next(mark for end, mark in _SEPARATORS.items() if path.lower().endswith(end))
    if separator == "," and "," not in first_line and ";" in first_line:
        separator = ";"
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    begin = 1
    row = 0
    names: list[str] = []
    try:
        for cells in reader:
            at = begin
            begin = reader.line_num + 1
            if not any(cells):  # an empty line
                continue
            if not names:
                names = [cell.strip() for cell in cells]
                repeated = sorted({name for name in names if names.count(name) > 1})
                if repeated:
                    reason = f"the first row names the column {repeated[0]!r} more than once"
                    yield Refusal(path, at, 0, reason)
                    return
                continue
            yield _record(path, at, row, names, cells, max_record_bytes)
            row += 1
    except csv.Error as error:
        reason = f"the table is not valid ({error}): check the quotes around this row"
        yield Refusal(path, begin, row, reason)


def _record(
    path: str, line: int, row: int, names: list[str], cells: list[str], max_record_bytes: int
) -> Record | Refusal:
    """Return one row of a table as a record."""
    size = max(1, sum([len(cell.encode()) for cell in cells]))
    if len(cells) > len(names):
        reason = f"the row has {len(cells)} cells, but the first row names {len(names)} columns"
        return Refusal(path, line, row, reason)
    if size > max_record_bytes:
        reason = f"the row has {size} bytes, more than --max-record-bytes {max_record_bytes}"
        return Refusal(path, line, row, reason)
    value: dict[str, Any] = {}
    # A short row lacks its last cells.
    for name, cell in zip(names, cells, strict=False):
        if cell.strip():
            value[name] = cell
    return Record(line, row, size, value)


def _decoded(data: bytes) -> str | None:
    """Return the text of UTF-8 bytes without a byte order mark, or None if they are not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
