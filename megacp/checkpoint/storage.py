"""The payload of a checkpoint: `torch.distributed.checkpoint` (DCP) files written and read box by box.

Key property: boxes of global tensors become DCP shards through two small planners, so the files are ordinary DCP (its
own tools open them) while flat ZeRO slices need no sharded tensor type. Files are made anew and never through a link;
they are read only where they are regular and as large as stated. Loading talks to no other rank. Rejected:
`state_dict` with DTensor, which cannot describe a slice that starts in the middle of a row.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from megacp.checkpoint.agree import on_first, together
from megacp.checkpoint.archive import refuse_growth
from megacp.checkpoint.index import coverage, read_index
from megacp.checkpoint.manifest import FileRecord
from megacp.checkpoint.names import TensorBox
from megacp.distributed.collectives import gather_to_first
from megacp.distributed.grid import Axis
from megacp.files import create_new, open_regular, rename, seen

INDEX_FILE = ".metadata"
_MOST_INDEX_BYTES = 1 << 30


class PayloadError(RuntimeError):
    """Writing the payload failed on some rank; the message names rank and reason, the same on all ranks."""


class _NewFiles(FileSystem):
    """Files that DCP makes: each is new, in a folder that another machine may have made a moment ago."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IO[bytes]]:
        with seen(lambda: create_new(path)) as stream:
            yield stream

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        seen(lambda: os.stat(path))  # it exists, or the save is wrong

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        rename(path, new_path)


class _Writer(dcp.FileSystemWriter):
    """DCP's file writer, without the path and the random id it would put in the index."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, overwrite=False)
        self.fs = _NewFiles()

    def storage_meta(self) -> None:
        return None


class _StatedFiles(FileSystem):
    """Files that DCP reads: regular ones of the size that the manifest says."""

    def __init__(self, files: Mapping[str, FileRecord], seconds: float) -> None:
        self._files, self._seconds = files, seconds

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IO[bytes]]:
        size = self._files[Path(path).name].size
        with seen(lambda: open_regular(path, size), self._seconds) as stream:
            yield stream


class _Reader(dcp.FileSystemReader):
    """DCP's file reader, which unpacks the archive of a box only when it is no larger unpacked."""

    def __init__(self, folder: Path, files: Mapping[str, FileRecord], seconds: float) -> None:
        super().__init__(folder)
        self.fs = _StatedFiles(files, seconds)

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        where = f"{self.path / sinfo.relative_path} from byte {sinfo.offset} on"
        refuse_growth(file, sinfo.offset, sinfo.length, where)
        return super()._slice_file(file, sinfo)


class _SavePlanner(SavePlanner):
    def __init__(self, boxes: Sequence[TensorBox]) -> None:
        self._boxes = {(box.name, tuple(box.offsets)): box for box in boxes if box.tensor.numel()}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(box) for box in self._boxes.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        index: dict[str, TensorStorageMetadata] = {}
        for plan in all_plans:
            for item in plan.items:
                data = item.tensor_data
                assert data is not None
                entry = index.setdefault(
                    item.index.fqn, TensorStorageMetadata(properties=data.properties, size=data.size, chunks=[])
                )
                if (entry.size, entry.properties.dtype) != (data.size, data.properties.dtype):
                    raise ValueError(f"ranks disagree on shape or dtype of {item.index.fqn}")
                entry.chunks.append(data.chunk)
        problems = [problem for name, entry in index.items() for problem in coverage(name, entry)]
        if problems:
            raise ValueError("; ".join(problems[:20]))
        return all_plans, Metadata(state_dict_metadata=dict(index))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        assert write_item.index.offset is not None
        return self._boxes[write_item.index.fqn, tuple(write_item.index.offset)].tensor.detach()


def _write_item(box: TensorBox) -> WriteItem:
    offsets = torch.Size(box.offsets)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=offsets, sizes=box.tensor.shape),
        properties=TensorProperties(dtype=box.tensor.dtype),
        size=torch.Size(box.global_shape),
    )
    return WriteItem(index=MetadataIndex(box.name, offsets), type=WriteItemType.SHARD, tensor_data=data)


class PayloadWriter:
    """One payload on its way into a folder: made by all ranks together, written by each alone, completed by all.

    The boxes' values are read by `write`, the only part that may run on another thread; it talks to no other rank.
    Raises PayloadError on all ranks when the boxes do not tile their tensors.
    """

    def __init__(self, boxes: Sequence[TensorBox], world: Axis) -> None:
        self._world = world
        self._planner = _SavePlanner(boxes)
        self._plan = self._planner.create_local_plan()
        self._metadata: Metadata | None = None
        self._results: list[WriteResult] = []
        plans = gather_to_first(self._plan, world)
        on_first(world, lambda: self._make_index(plans), PayloadError)

    def _make_index(self, plans: list[SavePlan] | None) -> None:
        assert plans is not None
        self._metadata = self._planner.create_global_plan(plans)[1]

    def write(self, folder: Path) -> list[Path]:
        """Write and sync this rank's boxes into an existing folder, which all ranks share; the files' paths."""
        writer = _Writer(folder)
        writer.set_up_storage_writer(self._world.rank == 0)
        before: list[SavePlan] = [SavePlan([]) for _ in range(self._world.rank)]  # DCP names files by place in a list
        plan = writer.prepare_global_plan([*before, writer.prepare_local_plan(self._plan)])[-1]
        self._results = writer.write_data(plan, self._planner).wait()
        return sorted(folder.glob(f"__{self._world.rank}_*"))

    def complete(self, folder: Path) -> Path | None:
        """Write the index once all ranks have written: its path on rank 0, None elsewhere. Collective."""
        results = gather_to_first(self._results, self._world)

        def write_index() -> None:
            assert self._metadata is not None and results is not None
            writer = _Writer(folder)
            writer.set_up_storage_writer(True)
            writer.finish(self._metadata, results)

        on_first(self._world, write_index, PayloadError)
        return folder / INDEX_FILE if self._world.rank == 0 else None


def write_payload(folder: Path, boxes: Sequence[TensorBox], world: Axis) -> list[Path]:
    """Write every rank's boxes into an existing empty folder (shared by all ranks); returns the files of this rank.

    Collective over `world`. Files are synced to disk. Raises PayloadError on all ranks when any rank fails.
    """
    writer = PayloadWriter(boxes, world)
    files: list[Path] = []
    together(world, lambda: files.extend(writer.write(folder)), PayloadError)
    index = writer.complete(folder)
    return [*files, index] if index is not None else files


class Payload:
    """A written payload, opened for reading; `files` are its files as the manifest states them.

    Files that are missing are waited for `seconds`. Raises ValueError when the index has another hash, says anything
    that no megacp checkpoint says, or refers to a file that `files` does not name.
    """

    def __init__(self, folder: Path, files: Mapping[str, FileRecord], seconds: float = 0.0) -> None:
        path = folder / INDEX_FILE
        stated = files.get(INDEX_FILE)
        if stated is None or stated.size > _MOST_INDEX_BYTES:
            raise ValueError(f"{path} is not in the manifest, or larger than any index")
        with seen(lambda: open_regular(path, stated.size), seconds) as stream:
            content = stream.read(stated.size)
        if hashlib.sha256(content).hexdigest() != stated.sha256:
            raise ValueError(f"{path} is damaged: its sha256 is not the one in the manifest")
        try:
            self._metadata = read_index(content, {name: record.size for name, record in files.items()})
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        self._reader = _Reader(folder, files, seconds)
        self._reader.set_up_storage_reader(self._metadata, True)

    @property
    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Global shape and dtype of every stored tensor by name."""
        index = self._metadata.state_dict_metadata
        return {name: (tuple(e.size), e.properties.dtype) for name, e in index.items()}  # type: ignore[union-attr]

    def problems(self, boxes: Iterable[TensorBox]) -> list[str]:
        """Why these boxes cannot be read, one line per tensor: missing, another shape, another dtype."""
        found: dict[str, str] = {}
        tensors = self.tensors
        for box in boxes:
            stored = tensors.get(box.name)
            if stored is None:
                found[box.name] = f"{box.name} is not in the checkpoint"
            elif stored[0] != tuple(box.global_shape):
                found[box.name] = f"{box.name} has shape {stored[0]} in the checkpoint, {tuple(box.global_shape)} here"
            elif stored[1] != box.tensor.dtype:
                found[box.name] = f"{box.name} is {stored[1]} in the checkpoint, {box.tensor.dtype} here"
        return list(found.values())

    def read(self, boxes: Iterable[TensorBox]) -> None:
        """Fill the boxes' tensors; each stored box that overlaps one of them is read. `problems` must be empty.

        Raises ValueError when a file does not hold what the index says, OSError when it cannot be opened.
        """
        planner = _LoadPlanner(boxes, self._metadata)
        plan = planner.create_local_plan()
        try:
            self._reader.read_data(plan, planner).wait()
        except (OSError, ValueError):
            raise
        except Exception as error:  # whatever torch makes of bytes that are no tensor of this shape
            raise ValueError(f"{self._reader.path} does not hold what its index says: {error}") from error

    def read_whole(self, name: str) -> torch.Tensor:
        """One tensor, whole, on the CPU."""
        shape, dtype = self.tensors[name]
        tensor = torch.empty(shape, dtype=dtype)
        self.read([TensorBox(name, shape, (0,) * len(shape), tensor)])
        return tensor


class _LoadPlanner(LoadPlanner):
    def __init__(self, boxes: Iterable[TensorBox], metadata: Metadata) -> None:
        self._boxes: dict[str, list[TensorBox]] = defaultdict(list)
        for box in boxes:
            if box.tensor.numel():
                self._boxes[box.name].append(box)
        self._metadata = metadata

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, boxes in self._boxes.items():
            entry = self._metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            wanted = [ChunkStorageMetadata(torch.Size(box.offsets), box.tensor.shape) for box in boxes]
            reads = create_read_items_for_chunk_list(name, entry, wanted)
            found = sum(math.prod(item.lengths) for item in reads)
            if found != sum(box.tensor.numel() for box in boxes):
                raise ValueError(f"the checkpoint index does not cover {name}: {found} elements found")
            items += reads
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise ValueError(f"{read_item.storage_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index
        assert index.index is not None
        target = self._boxes[index.fqn][index.index].tensor.detach()
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass
