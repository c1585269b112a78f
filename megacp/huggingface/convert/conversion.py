"""One conversion: read the input, write a new folder, verify it, and give it its name.

Everything is written to a folder beside the output, which is renamed when all is well.
"""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path

from megacp.core.checkpoint.directory import is_step_name
from megacp.core.checkpoint.manifest import MANIFEST_FILE
from megacp.core.distributed.collectives import gather_objects
from megacp.core.distributed.grid import Axis, single_axis
from megacp.core.monitor.memory import peak_bytes
from megacp.huggingface.convert.export import Request, with_kept_tokenizer, with_positions, write_checkpoint, write_hf
from megacp.huggingface.convert.hf_files import check_sums, new_folder
from megacp.huggingface.convert.lora import write_adapter
from megacp.huggingface.convert.sharing import on_each, on_first
from megacp.huggingface.convert.source import CONFIG, Loaded, read_checkpoint, read_hf
from megacp.huggingface.convert.tables.architectures import LAYOUTS
from megacp.huggingface.convert.tables.mapping import in_dtype, num_bytes
from megacp.huggingface.convert.verify import verify

_BESIDE = 1 << 20
"""Bytes of headers and small files, at least."""
WRITERS = {"hf": write_hf, "megacp": write_checkpoint}
"""By what the output becomes, where that is a whole model."""


class OtherModelError(Exception):
    """--verify has found another model; the folder is not kept."""


def convert(request: Request, world: Axis) -> None:
    """Do what the request says, and print it. ValueError for what cannot be done, on all ranks of `world`.

    Ranks share reading, hashing and writing of weights; the result has the bytes of one process. The rest is done by
    the first one.
    """
    begun = time.monotonic()
    loaded = read_input(request, world)
    if request.target == "peft":
        on_first(world, lambda: _export_pairs(loaded, request))
        return
    loaded, request = on_each(world, lambda: _resolved(loaded, request))
    with new_folder(request.output, world) as folder:
        on_first(world, lambda: _refuse_small_disk(loaded, folder, request))
        written = WRITERS[request.target](loaded, folder, request, world)
        if request.verify and not on_first(world, lambda: _verified(loaded, folder, request)):
            raise OtherModelError
    size = sum(math.prod(info.shape) for info in written.values())
    print(f"{request.output}: {loaded.architecture.name}, {len(written)} tensors, {size:,} parameters")
    peak, ranks = (
        max(gather_objects(peak_bytes(), world)) >> 20,
        "one process" if world.size == 1 else f"{world.size} ranks",
    )
    print(f"{time.monotonic() - begun:.1f} s on {ranks}; a process held at most {peak:,} MiB, mapped files included")


def _resolved(loaded: Loaded, request: Request) -> tuple[Loaded, Request]:
    """Model and request with what neither says outright, and a line for each."""
    if loaded.pairs is not None:
        print(f"folded into the weights: {loaded.pairs}")
    if request.target == "hf" and loaded.checkpoint is not None:
        loaded, line = with_positions(loaded, request.max_positions)
        print(line)
        request = with_kept_tokenizer(request, loaded)
    if request.chat_template == "messages" and request.tokenizer is None:
        raise ValueError("--chat-template messages goes with --tokenizer: none lies beside the checkpoints of --input")
    return loaded, request


def _refuse_small_disk(loaded: Loaded, folder: Path, request: Request) -> None:
    """ValueError before anything is written, where the weights do not fit."""
    needed = sum(map(num_bytes, in_dtype(loaded.source, request.dtype).infos.values())) + _BESIDE
    if (free := shutil.disk_usage(folder).free) < needed:
        raise ValueError(
            f"--output {request.output} cannot be written: it needs about {needed >> 20:,} MiB, the file system has "
            f"{free >> 20:,} MiB free"
        )


def _verified(loaded: Loaded, folder: Path, request: Request) -> bool:
    after = read_hf(folder) if request.target == "hf" else read_checkpoint(folder, single_axis("world"))
    return verify(loaded, after, request)


def _export_pairs(loaded: Loaded, request: Request) -> None:
    """Write an adapter for the model that the run started from."""
    if loaded.pairs is None:
        raise ValueError(f"--to peft: {loaded.folder} has no low-rank pairs, it was trained with --lora-rank 0")
    base = request.base_model or loaded.pairs.config.checkpoint.load_hf
    with new_folder(request.output, single_axis("world")) as folder:
        links = loaded.architecture.links(loaded.values, LAYOUTS[0])
        elements = write_adapter(loaded.pairs, links, folder, base, request.dtype)
    print(f"{request.output}: {loaded.pairs}; {elements:,} parameters beside {base or 'a model that is not named'}")


def read_input(request: Request, world: Axis) -> Loaded:
    """The model in --input. ValueError names the flag, the path and what is wrong. Collective over `world`."""
    path = request.input
    try:
        on_each(world, lambda: refuse_other_input(path, request.source))
        if request.source == "megacp":
            return read_checkpoint(path, world, request.architecture)
        on_each(world, lambda: check_sums(path, world))
        return on_each(world, lambda: read_hf(path, request.architecture, request.ignored, check_sums=False))
    except (ValueError, OSError) as error:
        said = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ValueError(f"--input {path}: {said.removeprefix(f'--load {path}: ')}") from error


def refuse_other_input(path: Path, kind: str) -> None:
    """ValueError when `path` is no folder of this kind (`hf`, `megacp`), with what it is instead."""
    if not path.is_dir():
        what = "it is a file, expected a folder" if path.exists() else "there is no such folder"
        beside = path.parent if path.exists() else None
        also = f": its folder is {beside}" if beside is not None and (beside / CONFIG).is_file() else ""
        raise ValueError(f"{what}{also}")
    names = {entry.name for entry in path.iterdir()}
    if not names:
        raise ValueError("the folder is empty")
    is_checkpoint = MANIFEST_FILE in names or any(map(is_step_name, names))
    if kind == "hf" and CONFIG not in names:
        also = ", it is a checkpoint of megacp: --from megacp" if is_checkpoint else ""
        raise ValueError(f"the folder has no {CONFIG}{also}")
    if kind == "megacp" and not is_checkpoint and CONFIG in names:
        raise ValueError(f"there is no committed checkpoint, it is a Hugging Face folder with a {CONFIG}: --from hf")
