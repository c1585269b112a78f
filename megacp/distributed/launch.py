"""Where a process learns who it is: torchrun's environment, the device, the default process group.

Key property: the only file that reads or writes `os.environ`, so that everything else is a function of its
arguments. One process needs no process group and no torchrun.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megacp.distributed.grid import GridShape, ProcessGrid, build_grid


@dataclass(frozen=True)
class World:
    """This process among all processes of the run, as torchrun told it."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def world_from_environment() -> World:
    """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; a single process when they are absent."""
    keys = {"rank": ("RANK", 0), "size": ("WORLD_SIZE", 1), "local_rank": ("LOCAL_RANK", 0)}
    values = {}
    for field_name, (key, default) in keys.items():
        text = os.environ.get(key, str(default))
        if not text.isdigit():
            raise ValueError(f"environment variable {key}={text!r} is not a number; start with torchrun or unset it")
        values[field_name] = int(text)
    return World(**values, local_size=int(os.environ.get("LOCAL_WORLD_SIZE", values["size"])))


def pick_device(world: World) -> torch.device:
    """The GPU of this local rank when there are enough of them, else the CPU (then with one thread a rank)."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= world.local_size:
        device = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
        return device
    threads = max(1, (os.cpu_count() or 1) // world.local_size)
    torch.set_num_threads(threads)
    return torch.device("cpu")


def start(shape: GridShape, timeout_minutes: float = 10.0) -> ProcessGrid:
    """Join the run: device, process group (gloo on CPU, NCCL on CUDA), grid. Raises ValueError on a wrong world size."""
    world = world_from_environment()
    device = pick_device(world)
    timeout = datetime.timedelta(minutes=timeout_minutes)
    if world.size > 1 and not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=timeout)
    return build_grid(shape, world.rank, device, timeout)


def stop() -> None:
    """Leave the run in order; without a process group nothing happens."""
    if dist.is_initialized():
        dist.destroy_process_group()
