"""A Hugging Face folder: safetensors read row by row and written tensor by tensor.

One tensor is in memory at a time: files are mapped when read, shards are dealt to the ranks that
convert together. Pickled `.bin` files are refused: opening one runs its code.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch

from megacp.distributed.grid import Axis
from megacp.huggingface.convert.tensors import (
    PACKED,
    Info,
    Source,
    is_finite,
    not_finite,
    num_bytes,
    whole,
)
from megacp.prepare.tokenize.beside import read_object
from megacp.storage import files, wording
from megacp.training.checkpoint import storage
from megacp.training.checkpoint.outcome import on_all_ranks, on_rank_0

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {name: dtype for name, dtype in storage.STORED_DTYPES.items() if dtype.is_floating_point}
_LENGTH, _LONGEST_HEADER = 8, 100_000_000
"""Bytes of the number that begins a safetensors file, and of the longest header that the library
reads.
"""
MIB = 1 << 20
SECONDS = 10.0
"""Seconds to wait for a file that another machine has just made."""
_TOLD = 10
"""Tensors that a message names."""
_T = TypeVar("_T")


def on_each(world: Axis, action: Callable[[], _T]) -> _T:
    """The result of `action` on this rank; what it raises on any rank is one ValueError on all,
    with the ranks.
    """
    if world.size == 1:
        return action()
    found: list[_T] = []  # no result of on_all_ranks, which would send it to the others
    on_all_ranks(world, lambda: found.append(action()), ValueError)
    return found[0]


def on_first(world: Axis, action: Callable[[], _T]) -> _T:
    """The small result of `action`, done by the first rank, on every rank; ValueError on all when
    it raises.
    """
    return action() if world.size == 1 else on_rank_0(world, action, ValueError)


def mine(items: Sequence[_T], world: Axis) -> Sequence[_T]:
    """The items of this rank, in turns: nothing where there are more ranks than items."""
    return items[world.rank :: world.size]


def files_of(infos: Mapping[str, Info], max_bytes: int) -> list[list[str]]:
    """The tensors of each file, in order; a file holds at most `max_bytes`, or a single larger
    tensor.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, info in infos.items():
        if shards[-1] and filled + num_bytes(info) > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += num_bytes(info)
    return shards


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Indented, as the library writes it; a link at `path` is replaced."""
    files.write_atomically(
        path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    )


def copy_file(source: Path, target: Path) -> None:
    """Copy a regular file's content; a link at `target` is replaced, never written through."""
    with files.open_regular(source) as given, files.replacement(target) as stream:
        shutil.copyfileobj(given, stream)


class SafetensorsFolder:
    """The weights of a folder as a Source: one file, or several with an index."""

    def __init__(self, folder: Path, without: tuple[str, ...] = ()) -> None:
        """Reads only headers; tensors whose names begin as one of `without` says are left out,
        whatever they hold.

        Raises ValueError when there are no safetensors, or index and files disagree.
        """
        self.folder = folder
        self._without = without
        self.left_out: list[str] = []
        self.files: dict[str, Any] = {}
        self._places: dict[str, str] = {}
        self._infos: dict[str, Info] = {}
        listed = self._listed()
        for name in sorted(set(listed.values())) if listed else [SINGLE]:
            self._add(name)
        if listed and listed != self._places:
            wrong = sorted(set(listed.items()) ^ set(self._places.items()))
            words = ", ".join(f"{tensor} ({file})" for tensor, file in wrong[:10])
            raise ValueError(f"{folder / INDEX} and the files beside it disagree on {words}")

    def _listed(self) -> dict[str, str]:
        single, several = ((self.folder / name).exists() for name in (SINGLE, INDEX))
        if single == several:
            what = "both" if single else "neither"
            raise ValueError(
                f"{self.folder} has {what} {SINGLE} and {INDEX}; pickled files are not read"
            )
        if single:
            return {}
        listed = read_object(self.folder / INDEX).get("weight_map")
        if (
            not isinstance(listed, dict)
            or not listed
            or not all(isinstance(v, str) for v in listed.values())
        ):
            raise ValueError(f"{self.folder / INDEX} has no weight_map of tensors and files")
        for name in set(listed.values()):
            if Path(name).name != name or "\0" in name or not name.endswith(".safetensors"):
                raise ValueError(
                    f"{self.folder / INDEX} names {name!r}, which is no safetensors file of this "
                    "folder"
                )
        return listed

    def _add(self, name: str) -> None:
        import safetensors

        try:
            require_complete(self.folder / name)
            file = safetensors.safe_open(self.folder / name, "pt")
        except (OSError, safetensors.SafetensorError) as error:
            raise ValueError(f"{self.folder / name} cannot be read: {error}") from error
        self.files[name] = file
        for tensor in file.keys():
            self._places[tensor] = name
            if tensor.startswith(self._without):
                self.left_out.append(tensor)
                continue
            described = file.get_slice(tensor)
            kind = described.get_dtype()
            known = _DTYPES | ({"U8": torch.uint8} if tensor.endswith(PACKED) else {})
            if kind not in known:
                raise ValueError(
                    f"{self.folder / name}: {tensor} has dtype {kind}, known are {', '.join(known)}"
                )
            self._infos[tensor] = Info(tuple(described.get_shape()), known[kind])

    @property
    def infos(self) -> Mapping[str, Info]:
        return self._infos

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows of a tensor, as of any `Source`; the file is mapped, so a row is read from disk when
        it is used.

        Raises ValueError for numbers that are not finite, with all such tensors of the file.
        """
        place = self._places[name]
        found: torch.Tensor = self.files[place].get_slice(name)[start:stop]
        if not is_finite(found):
            raise ValueError(
                f"{self.folder / place} has weights that are inf or NaN: {self._not_finite(place)}"
            )
        return found

    def _not_finite(self, place: str) -> str:
        """The tensors of a file that are not finite, each with a count."""
        file = self.files[place]
        counts = [not_finite(name, file.get_tensor(name)) for name in file.keys()]
        return wording.listed([count for count in counts if count], _TOLD)


def require_complete(path: Path) -> None:
    """Raise ValueError when a safetensors file is shorter than its header says, or is a Git LFS
    pointer.

    Opens regular files only: the library would wait for the writer of a pipe. A header that cannot
    be parsed is left to the library, which says why.
    """
    files.refuse_pointer(path)
    with files.open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        expected = _expected_size(stream)
    if size < expected:
        raise ValueError(
            f"{path}: the file is incomplete ({size:,} bytes found, {expected:,} expected)"
        )


def _expected_size(stream: BinaryIO) -> int:
    """The least size of a safetensors file with this beginning; its size, if the header is
    whole.
    """
    beginning = stream.read(_LENGTH)
    if len(beginning) < _LENGTH:
        return _LENGTH
    length = int.from_bytes(beginning, "little")
    if length > _LONGEST_HEADER:
        return _LENGTH
    header = stream.read(length)
    if len(header) < length:
        return _LENGTH + length
    return _LENGTH + length + _end_of_tensors(header)


def _end_of_tensors(header: bytes) -> int:
    """Where the last tensor ends, counted from the end of the header; 0 for a header that is not
    understood.
    """
    try:
        content = files.parse_json(header)
        ends = [
            value["data_offsets"][1] for name, value in content.items() if name != "__metadata__"
        ]
    except (ValueError, AttributeError, TypeError, KeyError, IndexError):
        return 0
    return max((end for end in ends if type(end) is int), default=0)


def write_tensors(source: Source, folder: Path, max_shard_bytes: int, world: Axis) -> list[Path]:
    """Write all tensors of `source` in their order; one file, or shards of at most
    `max_shard_bytes` with an index.

    Each rank writes files of its own; all ranks return together.
    """
    infos = source.infos
    shards = files_of(infos, max_shard_bytes)
    count = len(shards)
    names = (
        [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        if count > 1
        else [SINGLE]
    )
    paths = [folder / name for name in names]

    def write() -> None:
        for path, of_file in mine(list(zip(paths, shards, strict=True)), world):
            ordered = sorted(
                of_file, key=lambda name: -infos[name].dtype.itemsize
            )  # see `storage.header`
            write_file(
                source,
                ordered,
                path,
                storage.header((n, infos[n].dtype, infos[n].shape) for n in ordered),
            )

    on_each(world, write)
    on_first(world, lambda: require_seen(paths))
    if count == 1:
        return paths
    total = {"total_size": sum(num_bytes(info) for info in infos.values())}
    where = {name: path.name for path, names in zip(paths, shards, strict=True) for name in names}
    if world.rank == 0:
        write_json(folder / INDEX, {"metadata": total, "weight_map": dict(sorted(where.items()))})
    return [*paths, folder / INDEX]


def write_file(source: Source, names: Sequence[str], path: Path, header: bytes) -> None:
    """Tensors of `source` one after another behind a header of theirs."""
    with files.new_file(path, SECONDS) as stream:
        stream.write(header)
        for name in names:
            tensor = whole(source, name)
            assert Info(tuple(tensor.shape), tensor.dtype) == source.infos[name], (
                "it is not as planned"
            )
            storage.write_values(stream, tensor)


def require_seen(paths: Sequence[Path]) -> None:
    """OSError when a file that some rank has written is not here, even after a while."""
    for path in paths:
        files.seen(path.stat, SECONDS)


@contextmanager
def new_folder(output: Path, world: Axis) -> Iterator[Path]:
    """A folder beside `output` that becomes it at the end of the block, and is removed when the
    block raises.

    What a killed conversion to the same output has left goes first. ValueError when `output`
    exists.
    """
    folder = on_first(world, lambda: _made_beside(output))

    def place() -> None:
        files.sync_below(folder)
        files.place_folder(folder, output)

    try:
        yield folder
        on_first(world, place)
    except BaseException:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _made_beside(output: Path) -> Path:
    if output.exists() or output.is_symlink():
        raise ValueError(f"--output {output} exists; nothing is ever written over")
    beside, begin = output.absolute().parent, f"{output.name}.tmp-{socket.gethostname()}-"
    try:
        beside.mkdir(parents=True, exist_ok=True)
        for left in beside.glob(f"{glob.escape(begin)}*") if Path("/proc/self").exists() else ():
            if not Path("/proc", left.name.removeprefix(begin)).exists():  # its process is no more
                shutil.rmtree(left, ignore_errors=True)
        folder = beside / f"{begin}{os.getpid()}"
        folder.mkdir()
    except OSError as error:
        raise ValueError(f"--output {output} cannot be written: {error.strerror}") from error
    return folder
