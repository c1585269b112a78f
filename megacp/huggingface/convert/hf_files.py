"""Reads the safetensors of Hugging Face folders row by row, and writes them tensor by tensor.

Only one tensor is in memory at a time: input files are memory-mapped, and output files are
distributed across the ranks of a conversion. Pickled `.bin` files are refused, because loading them
can execute code.
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

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {name: dtype for name, dtype in storage.STORED_DTYPES.items() if dtype.is_floating_point}
# Size in bytes of the number that begins a safetensors file: the length of its header.
_LENGTH = 8
# Size in bytes of the longest header that the library reads.
_LONGEST_HEADER = 100_000_000
MIB = 1 << 20
# Seconds to wait for a file that another machine has written.
SECONDS = 10.0
# Number of tensors that a message lists.
_TOLD = 10
_T = TypeVar("_T")


def on_each(world: Axis, action: Callable[[], _T]) -> _T:
    """Run `action` on each rank and return this rank's result.

    If it raises on any rank, raise one ValueError on all ranks that lists the failed ranks.
    """
    if world.size == 1:
        return action()
    # on_all_ranks would send a result to the other ranks, so the action has none.
    found: list[_T] = []
    on_all_ranks(world, lambda: found.append(action()), ValueError)
    return found[0]


def on_first(world: Axis, action: Callable[[], _T]) -> _T:
    """Run `action` on the first rank and return its result, which should be small, on all ranks.

    If it raises, raise ValueError on all ranks.
    """
    if world.size == 1:
        return action()
    return on_rank_0(world, action, ValueError)


def mine(items: Sequence[_T], world: Axis) -> Sequence[_T]:
    """Return this rank's items, dealt round-robin; empty if there are more ranks than items."""
    return items[world.rank :: world.size]


def files_of(infos: Mapping[str, Info], max_bytes: int) -> list[list[str]]:
    """Return the tensor names of each file, in order.

    Each file has at most `max_bytes`, or contains a single larger tensor.
    """
    # Fill files in order, so a file's tensors are neighbours in the model.
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
    """Write JSON with the library's indentation; a symbolic link at `path` is replaced."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    files.write_atomically(path, text.encode())


def copy_file(source: Path, target: Path) -> None:
    """Copy a regular file's content; a symbolic link at `target` is replaced, not followed."""
    with files.open_regular(source) as given, files.replacement(target) as stream:
        shutil.copyfileobj(given, stream)


class SafetensorsFolder:
    """The weights of a folder as a Source: one file, or several files with an index."""

    def __init__(self, folder: Path, without: tuple[str, ...] = ()) -> None:
        """Read the headers, and skip tensors whose names begin with one of `without`.

        Skipped tensors are not checked. Raise ValueError if there are no safetensors files, or if
        the index and the files disagree.
        """
        self.folder = folder
        self._without = without
        self.left_out: list[str] = []
        self.files: dict[str, Any] = {}
        self._places: dict[str, str] = {}
        self._infos: dict[str, Info] = {}
        # Open every file in the index, and compare its tensors with the index.
        listed = self._listed()
        # Sort the files, so that messages do not depend on the order of the index.
        names = sorted(set(listed.values())) if listed else [SINGLE]
        for name in names:
            self._add(name)
        if listed and listed != self._places:
            wrong = sorted(set(listed.items()) ^ set(self._places.items()))
            words = ", ".join(f"{tensor} ({file})" for tensor, file in wrong[:10])
            raise ValueError(f"{folder / INDEX} and the weight files disagree on {words}")

    def _listed(self) -> dict[str, str]:
        """Return the index, tensor name -> file; empty for a single file without an index."""
        single = (self.folder / SINGLE).exists()
        several = (self.folder / INDEX).exists()
        if single and several:
            raise ValueError(f"{self.folder} has both {SINGLE} and {INDEX}; remove one of them")
        if not single and not several:
            pickled = sorted(path.name for path in self.folder.glob("*.bin"))
            advice = ""
            if pickled:
                advice = (
                    f" ({wording.listed(pickled, 3)}). To convert a model that you trust: "
                    f"AutoModelForCausalLM.from_pretrained({str(self.folder)!r})"
                    ".save_pretrained(FOLDER)"
                )
            raise ValueError(
                f"{self.folder} has neither {SINGLE} nor {INDEX}; pickled files are not supported"
                f"{advice}"
            )
        if single:
            return {}
        listed = read_object(self.folder / INDEX).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise ValueError(f"{self.folder / INDEX} has no weight_map from tensors to files")
        if not all(isinstance(name, str) for name in listed.values()):
            raise ValueError(f"{self.folder / INDEX} has no weight_map from tensors to files")
        for name in set(listed.values()):
            # A path to another folder must not be read.
            if Path(name).name != name or "\0" in name or not name.endswith(".safetensors"):
                raise ValueError(
                    f"{self.folder / INDEX} lists {name!r}, which is not a safetensors file in "
                    "this folder"
                )
        return listed

    def _add(self, name: str) -> None:
        """Read the header of a file."""
        import safetensors

        try:
            # The library would fail later, when it reads a missing tensor.
            require_complete(self.folder / name)
            file = safetensors.safe_open(self.folder / name, "pt")
        except OSError as error:
            raise ValueError(f"{self.folder / name} cannot be read: {error}") from error
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{self.folder / name} cannot be read: it is damaged, or not a safetensors file "
                f"({error}); download it again"
            ) from error
        self.files[name] = file
        for tensor in file.keys():
            # Tensors of a vision tower may have any dtype if only the text model is read.
            self._places[tensor] = name
            if tensor.startswith(self._without):
                self.left_out.append(tensor)
                continue
            described = file.get_slice(tensor)
            kind = described.get_dtype()
            known = dict(_DTYPES)
            if tensor.endswith(PACKED):
                known["U8"] = torch.uint8
            if kind not in known:
                raise ValueError(
                    f"{self.folder / name}: {tensor} has dtype {kind}; supported dtypes are "
                    f"{', '.join(known)}"
                )
            self._infos[tensor] = Info(tuple(described.get_shape()), known[kind])

    @property
    def infos(self) -> Mapping[str, Info]:
        return self._infos

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of a tensor.

        The file is memory-mapped, so a row is read from disk when it is used. Raise ValueError if a
        weight is inf or NaN, with all such tensors of the file.
        """
        # Check every read: inf and NaN must not spread to other files.
        place = self._places[name]
        found: torch.Tensor = self.files[place].get_slice(name)[start:stop]
        if not is_finite(found):
            raise ValueError(
                f"{self.folder / place} has inf or NaN weights: {self._not_finite(place)}"
            )
        return found

    def _not_finite(self, place: str) -> str:
        """Return the tensors of a file that contain inf or NaN, each with its count."""
        file = self.files[place]
        # Counting is slow, so it is done only for the message.
        counts = [not_finite(name, file.get_tensor(name)) for name in file.keys()]
        return wording.listed([count for count in counts if count], _TOLD)


def require_complete(path: Path) -> None:
    """Raise ValueError if a safetensors file is shorter than its header states, or is a Git LFS
    pointer.

    Only regular files are opened, because opening a pipe would wait for its writer. An invalid
    header is not an error here; the library reports it.
    """
    # A pointer is a small text file that Git LFS leaves in place of a large one.
    files.refuse_pointer(path)
    with files.open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        expected = _expected_size(stream)
    if size < expected:
        raise ValueError(
            f"{path}: the file is incomplete ({size:,} bytes found, {expected:,} expected); "
            "download it again"
        )


def _expected_size(stream: BinaryIO) -> int:
    """Return the size in bytes that a safetensors file should have according to its header.

    If the header is incomplete, return a lower bound.
    """
    # If the file is truncated in its header, it must be at least as large as the header.
    beginning = stream.read(_LENGTH)
    if len(beginning) < _LENGTH:
        return _LENGTH
    # A safetensors file is: length of the header, header as JSON, then values.
    length = int.from_bytes(beginning, "little")
    if length > _LONGEST_HEADER:
        return _LENGTH
    header = stream.read(length)
    if len(header) < length:
        return _LENGTH + length
    return _LENGTH + length + _end_of_tensors(header)


def _end_of_tensors(header: bytes) -> int:
    """Return the end of the last tensor, in bytes after the header; 0 for an invalid header."""
    try:
        content = files.parse_json(header)
        ends = [
            value["data_offsets"][1] for name, value in content.items() if name != "__metadata__"
        ]
    except (ValueError, AttributeError, TypeError, KeyError, IndexError):
        return 0
    return max((end for end in ends if type(end) is int), default=0)


def write_tensors(source: Source, folder: Path, max_shard_bytes: int, world: Axis) -> list[Path]:
    """Write all tensors of `source` in order; return the paths of the files.

    The result is one file, or several files of at most `max_shard_bytes` and an index. Each rank
    writes some of the files; all ranks return together.
    """
    infos = source.infos
    shards = files_of(infos, max_shard_bytes)
    count = len(shards)
    names = [SINGLE]
    if count > 1:
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    paths = [folder / name for name in names]

    def write() -> None:
        for path, in_file in mine(list(zip(paths, shards, strict=True)), world):
            # Wide numbers come first, so all tensors are aligned; see `storage.header`.
            ordered = sorted(in_file, key=lambda name: -infos[name].dtype.itemsize)
            header = storage.header((n, infos[n].dtype, infos[n].shape) for n in ordered)
            write_file(source, ordered, path, header)

    on_each(world, write)
    on_first(world, lambda: require_seen(paths))
    if count == 1:
        return paths
    # Only several files need an index.
    total = {"total_size": sum(num_bytes(info) for info in infos.values())}
    where: dict[str, str] = {}
    for path, in_file in zip(paths, shards, strict=True):
        where |= dict.fromkeys(in_file, path.name)
    if world.rank == 0:
        write_json(folder / INDEX, {"metadata": total, "weight_map": dict(sorted(where.items()))})
    return [*paths, folder / INDEX]


def write_file(source: Source, names: Sequence[str], path: Path, header: bytes) -> None:
    """Write tensors of `source` in order, after their header."""
    with files.new_file(path, SECONDS) as stream:
        stream.write(header)
        for name in names:
            tensor = whole(source, name)
            read = Info(tuple(tensor.shape), tensor.dtype)
            assert read == source.infos[name], f"{name} differs from its header"
            storage.write_values(stream, tensor)


def require_seen(paths: Sequence[Path]) -> None:
    """Wait until files written by other ranks are visible. Raise OSError after `SECONDS`."""
    for path in paths:
        files.seen(path.stat, SECONDS)


@contextmanager
def new_folder(output: Path, world: Axis) -> Iterator[Path]:
    """Yield a temporary folder next to `output`, and rename it to `output` at the end of the block.

    If the block raises, the folder is removed. Folders left by killed conversions to the same
    output are removed first. Raise ValueError if `output` exists.
    """
    # In the same parent folder, so the final rename is atomic.
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
    """Create the temporary folder of this process for `output`."""
    if output.exists() or output.is_symlink():
        raise ValueError(f"--output {output} exists and is never overwritten; choose a new folder")
    parent = output.absolute().parent
    begin = f"{output.name}.tmp-{socket.gethostname()}-"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if Path("/proc/self").exists():
            # A folder whose process no longer runs is left over from a killed conversion.
            for left in parent.glob(f"{glob.escape(begin)}*"):
                if not Path("/proc", left.name.removeprefix(begin)).exists():
                    shutil.rmtree(left, ignore_errors=True)
        folder = parent / f"{begin}{os.getpid()}"
        folder.mkdir()
    except OSError as error:
        raise ValueError(f"--output {output} cannot be written: {error.strerror}") from error
    return folder
