"""Reads records from tables: Parquet, Arrow files, and folders that Hugging Face datasets saved.

Key property: they are the `Record`s and `Refusal`s that JSONL gives: a row is a record, columns are its keys. What is
null is absent. Rejected: the datasets package, which converts a whole input into its own cache.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megacp.core.storage.files import PLAIN_NAME, parse_json, read_json
from megacp.core.storage.place import folders_in, open_input, place_of, read_content, suffix_of
from megacp.core.storage.url import UnreachableError, Url, is_url
from megacp.prepare.records.arrow_buffers import LazyBytes, blocks, rows_of, swelling
from megacp.prepare.records.record import Record, Refusal

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_MAGIC = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""How a stream begins no batch; without it a file may have been cut between two."""
_ROWS, _FEW_ROWS = 16, 4
_RECORDS_OF_A_PAGE, _LARGEST_RATIO = 4, 100
_SMALL_COLUMN = 16 << 20
"""Bytes of a column below which no value in it is large, however often it is repeated."""


def read_parquet(path: str, max_record_bytes: int) -> Iterator[Record | Refusal]:
    """Rows of a Parquet file as records: `line` is the row from 1, `offset` the row from 0, `size` about its bytes.

    ValueError when pyarrow is missing; a file that cannot be read gives a Refusal.
    """
    pyarrow, parquet = _modules("parquet")
    row = 0
    try:
        with parquet.ParquetFile(open_input(path) if is_url(path) else path) as file:
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                if (problem := _swollen(group, max_record_bytes)) is not None:
                    yield Refusal(path, row + 1, row, f"row group {number} of {group.num_rows} rows: {problem}")
                    row += group.num_rows
                    continue
                for value in _row_group(file, number, max_record_bytes):
                    yield _row(path, row, value, max_record_bytes)
                    row += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        yield Refusal(path, row + 1, row, f"the Parquet file is damaged or cut short ({_one_line(error)})")


def read_arrow(path: str, max_record_bytes: int) -> Iterator[Record | Refusal]:
    """Rows of an Arrow file, in the stream or in the file format, as `read_parquet`."""
    pyarrow, ipc = _modules("ipc")
    row = 0
    try:
        with _source(pyarrow, path) as source:
            swollen = _swollen_batches(ipc, source, max_record_bytes)
            for number, batch in enumerate(_batches(ipc, source, swollen)):
                if batch is None:
                    rows, problem = swollen[number]
                    yield Refusal(path, row + 1, row, f"batch {number} of {rows} rows: {problem}")
                    row += rows
                    continue
                for value in _rows_of(batch, max_record_bytes):
                    yield _row(path, row, value, max_record_bytes)
                    row += 1
    except UnreachableError:
        raise
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, ValueError) as error:
        yield Refusal(path, row + 1, row, f"the Arrow file is damaged or cut short ({_one_line(error)})")


def _source(pyarrow: Any, path: str) -> Any:
    return pyarrow.PythonFile(open_input(path), mode="r") if is_url(path) else pyarrow.memory_map(path)


def _batches(ipc: Any, source: Any, swollen: Mapping[int, tuple[int, str]]) -> Iterator[Any]:
    """Record batches of either format, which begin differently; None for one that is not decompressed.

    A stream that ends without saying so is an error. It cannot be read on behind a batch that is left out.
    """
    source.seek(0)
    if source.read(len(_MAGIC)) == _MAGIC:
        file = ipc.open_file(source)
        yield from (None if i in swollen else file.get_batch(i) for i in range(file.num_record_batches))
        return
    source.seek(0)
    stream = ipc.open_stream(source)
    if swollen:
        yield from (stream.read_next_batch() for _ in range(min(swollen)))
        yield from (None,)
        raise OSError("what follows that batch is not read")
    yield from stream
    source.seek(max(0, source.size() - len(_STREAM_END)))
    if source.read() != _STREAM_END:
        raise OSError("the stream has no end")


def _swollen_batches(ipc: Any, source: Any, max_record_bytes: int) -> dict[int, tuple[int, str]]:
    """By number, the rows of each batch that is not decompressed, and why. ValueError for a dictionary that is not."""
    found, number = {}, 0
    for header, body in _messages(ipc, source):
        try:
            rows, largest = rows_of(header), swelling(header, body)
        except struct.error as error:
            raise ValueError(f"a header ends too early: {error}") from error
        if largest is not None and _swells(*largest, max_record_bytes):
            problem = _refusal("a buffer", *largest, max_record_bytes, "batches")
            if rows is None:
                raise ValueError(f"a dictionary: {problem}")
            found[number] = rows, problem
        number += rows is not None
    return found


def _messages(ipc: Any, source: Any) -> Iterator[tuple[bytes, Any]]:
    """Header and body of each message, up to damage that the reader of batches meets too."""
    whole = LazyBytes(source, 0, source.size())  # a file at a URL is not read for its headers
    if bytes(whole[: len(_MAGIC)]) == _MAGIC:
        yield from blocks(whole) if bytes(whole[-len(_MAGIC) :]) == _MAGIC else ()
        return
    source.seek(0)
    try:
        for message in ipc.MessageReader.open_stream(source):
            yield message.metadata.to_pybytes(), memoryview(message.body) if message.body is not None else b""
    except UnreachableError:
        raise
    except (OSError, ValueError):  # pyarrow's errors are one or the other
        return


def _modules(name: str) -> tuple[Any, Any]:
    """pyarrow and one of its modules."""
    try:
        return importlib.import_module("pyarrow"), importlib.import_module(f"pyarrow.{name}")
    except ImportError as error:
        raise ValueError("reading tables needs the package pyarrow: pip install 'megacp[data]'") from error


def is_saved_dataset(folder: str) -> bool:
    """Whether `save_to_disk` of Hugging Face datasets wrote a folder."""
    if is_url(folder):
        return not suffix_of(folder) and any((Url(folder) / name).exists() for name in (_STATE, _SPLITS))
    return any((Path(folder) / name).is_file() for name in (_STATE, _SPLITS))


def saved_dataset(folder: str) -> tuple[str, ...]:
    """The Arrow files of a folder that `save_to_disk` of Hugging Face datasets wrote, in order.

    ValueError for several splits, and where the files are not named.
    """
    place = place_of(folder)
    state = place / _STATE
    if not state.exists():
        splits = ", ".join(str(child) for child in folders_in(place) if (child / _STATE).exists())
        raise ValueError(f"{folder} holds several splits; give one of {splits}")
    content = read_json(state) if isinstance(state, Path) else parse_json(read_content(state))
    files = content.get("_data_files") if isinstance(content, dict) else None
    names = [file.get("filename") for file in files or () if isinstance(file, dict)]
    if not names or not all(PLAIN_NAME.fullmatch(str(name)) for name in names):
        raise ValueError(f"{state}: `_data_files` names no files of the folder")
    if content.get("_indices_data_files"):
        raise ValueError(
            f"{state}: rows are chosen by an indices file, which is not read; save it with a newer datasets"
        )
    return tuple(str(place / str(name)) for name in names)


def _columns(group: Any) -> list[Any]:
    return [group.column(i) for i in range(group.num_columns)]


def _swollen(group: Any, max_record_bytes: int) -> str | None:
    """Why a row group is not decompressed; None when it can be. A page of it is only read whole."""
    for column in _columns(group):
        packed, size = column.total_compressed_size, column.total_uncompressed_size
        if _swells(packed, size, max_record_bytes):
            return _refusal(f"column {column.path_in_schema}", packed, size, max_record_bytes, "row groups")
    return None


def _swells(packed: int, size: int, max_record_bytes: int) -> bool:
    return size > _RECORDS_OF_A_PAGE * max_record_bytes and size > _LARGEST_RATIO * packed


def _refusal(what: str, packed: int, size: int, max_record_bytes: int, parts: str) -> str:
    return (
        f"{packed} bytes of {what} decompress to {size}, more than {_LARGEST_RATIO} times as many and "
        f"{_RECORDS_OF_A_PAGE} times --max-record-bytes {max_record_bytes}; write it with smaller {parts}, or raise "
        f"the limit"
    )


def _row_group(file: Any, number: int, max_record_bytes: int) -> Iterator[Any]:
    """The rows of a row group, for `_row`; a few are read at a time, as all may repeat one long string."""
    largest = max((column.total_uncompressed_size for column in _columns(file.metadata.row_group(number))), default=0)
    rows = _ROWS if largest <= _SMALL_COLUMN else _FEW_ROWS
    for batch in file.iter_batches(batch_size=rows, row_groups=[number]):
        yield from _rows_of(batch, max_record_bytes)


def _rows_of(batch: Any, max_record_bytes: int) -> Iterator[Any]:
    """The rows of a batch, for `_row`: as dicts, or each as a table where several together are large."""
    if batch.nbytes <= max_record_bytes:
        yield from batch.to_pylist()
    else:
        yield from (batch.slice(i, 1) for i in range(batch.num_rows))


def _row(path: str, row: int, value: Any, max_record_bytes: int) -> Record | Refusal:
    """One row; `value`: as a dict, or as a table of one row where several together are large."""
    size = 0 if isinstance(value, dict) else value.nbytes
    if size <= max_record_bytes:
        value = value if isinstance(value, dict) else value.to_pylist()[0]
        value = _without_nulls(value)
        size = max(1, _size(value))
    if size > max_record_bytes:
        return Refusal(path, row + 1, row, f"a row of {size} bytes, more than --max-record-bytes {max_record_bytes}")
    return Record(row + 1, row, size, value)


def _without_nulls(value: Any) -> Any:
    """A value without the null keys of its objects: a table fills them in where other rows have a value."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _size(value: Any) -> int:
    """About the bytes of a value."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum([_size(item) for item in value.values()])
    return sum([_size(item) for item in value]) if isinstance(value, list) else 8


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
