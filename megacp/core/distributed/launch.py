"""Where a process learns its rank: torchrun's environment, the device, the default process group.

Key property: this file alone reads or writes `os.environ`, so everything else is a function of its arguments. One
process needs no process group and no torchrun.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import errno
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from megacp.core.distributed.failure import within
from megacp.core.distributed.grid import GridShape, ProcessGrid, build_grid, connect
from megacp.core.distributed.meeting import Meeting
from megacp.core.distributed.restart_store import fresh_store
from megacp.core.large_blocks import LARGE, reuse_large_blocks

_M_TRIM_THRESHOLD, _FREE_TOP = -1, 64 << 20
_M_MMAP_THRESHOLD = -3
"""glibc's names of two options (malloc.h). The free bytes at the heap's end from which on it gives them back; and the
bytes from which on an allocation gets a map of its own.
"""
_FROZEN_SECONDS = 60.0
"""Beyond all deadlines: then a store that answers nothing is given up."""
_NAME_SECONDS = 30.0
"""How long MASTER_ADDR may be unknown to the name service: a cluster may start machines before their names."""


_FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
"""torch's record of the last NCCL collectives, written to a file of each rank at a timeout (torch's names)."""


@dataclass(frozen=True)
class World:
    """This process among all processes of the run, as torchrun told it."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def world_from_environment() -> World:
    """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; a single process when they are absent.

    Raises ValueError naming every variable that is no number, a rank outside its world, and one of RANK and WORLD_SIZE
    without the other: every process would then train alone.
    """
    given = [key for key in ("RANK", "WORLD_SIZE") if key in os.environ]
    if len(given) == 1:
        (missing,) = {"RANK", "WORLD_SIZE"} - set(given)
        raise ValueError(f"environment variables: {given[0]} is set, {missing} is not; start with torchrun or set both")
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
    """Give large CPU tensors memory maps of their own, so that a long run does not grow; those of our own functions are
    used again (`large_blocks`).

    gloo keeps small blocks between the large outputs of collectives; in glibc's heap the freed outputs then cannot be
    used again and a rank grows by about one output a call. The end of the heap stays, up to some MiB: to set one option
    fixes the other one at 128 KiB, and most pages of a step would be given back and cleared anew. A no-op where the C
    library has no `mallopt`.
    """
    reuse_large_blocks()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE)
        mallopt(_M_TRIM_THRESHOLD, _FREE_TOP)


def trim_heap() -> None:
    """Give free pages of the C library's heap back; a training loop on CPU calls it now and then.

    It does for smaller tensors what `steady_heap` does for large ones. A no-op where there is no `malloc_trim`.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def meet(world: World, seconds: float) -> Meeting:
    """Find the other ranks of this run in its store; no process group is made.

    Raises ValueError with one message for a store that cannot be opened or reached, a rank that does not come within
    `seconds`, or comes twice.
    """
    if world.size == 1:
        return Meeting(world.rank, 1, None, seconds)
    by_hand = "TORCHELASTIC_RUN_ID" not in os.environ

    def find() -> dist.Store:
        return fresh_store(_open_store(world, seconds), world.rank, world.size, seconds, by_hand)

    try:
        store = within(2 * seconds + _FROZEN_SECONDS, find)  # it is looked for, then waited in
    except (TimeoutError, dist.DistError) as error:
        lost = str(error).strip().partition("\n")[0]
        raise ValueError(f"rank {world.rank} on {socket.gethostname()} lost the run's store: {lost}") from error
    return Meeting(world.rank, world.size, store, seconds)


def join(
    meeting: Meeting, shape: GridShape, timeout_minutes: float = 10.0, patience_minutes: float | None = None
) -> ProcessGrid:
    """The grid of the first ranks that met: device, process group (gloo on CPU, NCCL on CUDA), axes.

    Raises ValueError when fewer met than the grid holds; a rank beyond it must not call this.
    """
    world = world_from_environment()
    device = pick_device(world)
    timeout = datetime.timedelta(minutes=timeout_minutes)
    size = min(meeting.size, shape.world_size)
    if size > 1 and not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        if backend == "nccl":
            set_defaults(_FLIGHT_RECORDER)
        dist.init_process_group(backend, store=meeting.store, rank=meeting.rank, world_size=size, timeout=timeout)
    patience = None if patience_minutes is None else datetime.timedelta(minutes=patience_minutes)
    grid = build_grid(shape, meeting.rank, device, timeout, patience)
    if device.type == "cuda":  # gloo has made its connections with the groups
        connect(grid.all_axes(), device)
    return grid


def start(shape: GridShape, timeout_minutes: float = 10.0) -> ProcessGrid:
    """Join the run: the other ranks, device, process group, grid. Raises ValueError on a wrong world size."""
    world = world_from_environment()
    if world.size < shape.world_size:
        return build_grid(shape, world.rank)  # which refuses it
    return join(meet(world, 60.0 * timeout_minutes), shape, timeout_minutes)


def stop() -> None:
    """Leave the run in order; without a process group nothing happens."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _open_store(world: World, seconds: float) -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT: torchrun's agent has it, or else rank 0."""
    host, text = (os.environ.get(key, "") for key in ("MASTER_ADDR", "MASTER_PORT"))
    wrong = [f"{key} is not set" for key, value in (("MASTER_ADDR", host), ("MASTER_PORT", text)) if not value]
    if text and not (text.isdecimal() and 0 < int(text) < 2**16):
        wrong.append(f"MASTER_PORT={text!r} is no number of a port (1 to 65535)")
    if wrong:
        raise ValueError(f"environment variables: {', '.join(wrong)}; start with torchrun or set them alike everywhere")
    port = int(text)
    timeout = datetime.timedelta(seconds=max(1.0, seconds))
    if world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        listening = _listen(port)
        return dist.TCPStore(
            "localhost", port, None, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach()
        )
    _await_store(host, port, world, seconds)
    return dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False)


def _listen(port: int) -> socket.socket:
    """A socket that listens on all addresses of this machine. Raises ValueError when the port is taken."""
    both = socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=2048)
    except OSError as error:
        why = "is in use by another process" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise ValueError(
            f"MASTER_PORT={port} {why} on {socket.gethostname()}, the machine of rank 0: choose another port, the same "
            "for all ranks, or end what is left of an earlier run"
        ) from error


def _await_store(host: str, port: int, world: World, seconds: float) -> None:
    """Return once somebody listens there: torch's own waiting prints a page for every attempt."""
    begun = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), timeout=max(1.0, min(10.0, seconds))).close()
            return
        except (socket.gaierror, UnicodeError) as error:
            limit, why = min(seconds, _NAME_SECONDS), f"MASTER_ADDR={host!r} is no machine that can be found: {error}"
        except OSError as error:
            limit = seconds
            why = f"nobody listens at MASTER_ADDR={host}, MASTER_PORT={port}: {error.strerror or error}"
        if time.monotonic() - begun >= limit:
            raise ValueError(
                f"rank {world.rank} on {socket.gethostname()} waited {limit:g} s: {why}; is rank 0 running there?"
            )
        time.sleep(0.2)


def leave(status: int) -> NoReturn:
    """End this process now, without the destructors of libraries and their threads.

    After a failure, those of a process group may wait for ever for a machine that is frozen. After a good run, a thread
    of gloo that lets go of a tensor while the interpreter ends would abort the process (pytorch issue 190489).
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(status)
