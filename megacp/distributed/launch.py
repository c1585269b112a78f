"""Where a process learns who it is: torchrun's environment, the device, the default process group.

Key property: the only file that reads or writes `os.environ`, so that everything else is a function of its
arguments. One process needs no process group and no torchrun.
"""

from __future__ import annotations

import ctypes
import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megacp.distributed.generation import fresh_store
from megacp.distributed.grid import GridShape, ProcessGrid, build_grid

_M_MMAP_THRESHOLD, _LARGE_BLOCK = -3, 4 << 20
"""glibc's name for the option (malloc.h), and the bytes from which on a block gets a map of its own."""


@dataclass(frozen=True)
class World:
    """This process among all processes of the run, as torchrun told it."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def world_from_environment() -> World:
    """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; a single process when they are absent.

    Raises ValueError naming every variable that is no number, or a rank outside its world.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    defaults = {"RANK": "0", "WORLD_SIZE": size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": size}
    texts = {key: os.environ.get(key, default) for key, default in defaults.items()}
    wrong = [f"{key}={text!r} is not a number" for key, text in texts.items() if not text.isdecimal()]
    values = {} if wrong else {key: int(text) for key, text in texts.items()}
    for key, limit in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if values and not values[key] < values[limit]:
            wrong.append(f"{key}={values[key]} is not below {limit}={values[limit]}")
    if wrong:
        raise ValueError(f"environment variables: {', '.join(wrong)}; start with torchrun or unset them")
    return World(values["RANK"], values["WORLD_SIZE"], values["LOCAL_RANK"], values["LOCAL_WORLD_SIZE"])


def would_restart() -> bool:
    """Whether torchrun starts the run again when this process exits with another status than 0."""
    restarts = [os.environ.get(f"TORCHELASTIC_{key}", "0") for key in ("RESTART_COUNT", "MAX_RESTARTS")]
    return all(text.isdecimal() for text in restarts) and int(restarts[0]) < int(restarts[1])


def device_type(world: World) -> str:
    """`cuda` when this machine has a GPU for each of its local ranks, else `cpu`; touches no device."""
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= world.local_size else "cpu"


def pick_device(world: World) -> torch.device:
    """The GPU of this local rank when there are enough of them, else the CPU, whose cores the local ranks share as
    threads.
    """
    if device_type(world) == "cuda":
        device = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
        return device
    steady_heap()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.local_size))
    return torch.device("cpu")


def set_defaults(values: Mapping[str, str]) -> None:
    """Give environment variables of guest packages these values where the user has set none."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def steady_heap() -> None:
    """Give large CPU tensors memory maps of their own, so that a long run does not grow.

    gloo keeps small blocks between the large outputs of collectives; in glibc's heap the freed outputs then cannot be
    used again and a rank grows by about one output a call. A no-op where the C library has no `mallopt`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


def trim_heap() -> None:
    """Give free pages of the C library's heap back; a training loop on CPU calls it now and then.

    It does for smaller tensors what `steady_heap` does for large ones. A no-op where there is no `malloc_trim`.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def start(shape: GridShape, timeout_minutes: float = 10.0) -> ProcessGrid:
    """Join the run: device, process group (gloo on CPU, NCCL on CUDA), grid. Raises ValueError on a wrong world
    size.
    """
    world = world_from_environment()
    device = pick_device(world)
    timeout = datetime.timedelta(minutes=timeout_minutes)
    if world.size > 1 and not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        launched, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=timeout))
        store = fresh_store(launched, world.rank, world.size, timeout.total_seconds())
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    return build_grid(shape, world.rank, device, timeout)


def stop() -> None:
    """Leave the run in order; without a process group nothing happens."""
    if dist.is_initialized():
        dist.destroy_process_group()
