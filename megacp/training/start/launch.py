"""Where a process learns its rank, meets the others, makes the grid with them, and tells them why
it failed.

Only this file reads or writes `os.environ`, so everything else is a function of its arguments. One
process needs no process group and no torchrun.

A rank that fails leaves its reason in the run's store, which is no part of a collective, so it
mostly answers when none does. A rank that was only hit names the others; one that was stopped,
killed or hangs is found by its silence.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

import torch
import torch.distributed as dist

from megacp.distributed.grid import Axis, ProcessGrid, build_grid, connect
from megacp.distributed.heap import keep_in_heap, set_defaults
from megacp.distributed.large_blocks import BLOCKS, LARGE
from megacp.distributed.shape import GridShape
from megacp.storage.wording import listed

_READING_SECONDS = (
    5.0  # that rank 0 stays for the others to read what it said: its process may hold the store
)
_FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
"""torch's record of the last NCCL collectives, written to a file of each rank at a timeout (torch's
names).
"""
_LOOPBACK = "127.0.0.1"
"""The address at which a machine reaches itself only."""
_CUDA = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Rows differ in length: else the allocator loses memory to fragments, and waits for the device to
give some back.
"""


@dataclass(frozen=True)
class World:
    """This process among all processes of the run, as torchrun set it."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def world_from_environment() -> World:
    """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; a single process when they are
    absent.

    Raises ValueError with all four where they are no rank in a world, also without one of the first
    two: every process would then train alone.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    defaults = {"RANK": "0", "WORLD_SIZE": size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": size}
    texts = {key: os.environ.get(key, default) for key, default in defaults.items()}
    if ("RANK" in os.environ) == ("WORLD_SIZE" in os.environ) and all(
        text.isdecimal() for text in texts.values()
    ):
        rank, ranks, local_rank, local_ranks = map(int, texts.values())
        if rank < ranks and local_rank < local_ranks:
            return World(rank, ranks, local_rank, local_ranks)
    shown = ", ".join(f"{key}={os.environ.get(key, '(not set)')}" for key in defaults)
    raise ValueError(
        f"environment variables: {shown} are no rank in a world; start with torchrun or unset them"
    )


def ranks_of_one_machine(count: int) -> tuple[dist.Store, list[dict[str, str]]]:
    """Return the store of a run whose ranks this process starts, and the environment of each rank.

    The store is to be kept until the ranks end. Only this machine reaches it: it trusts whoever
    connects.
    """
    listener = socket.create_server((_LOOPBACK, 0))
    port = listener.getsockname()[1]
    # the store owns the descriptor from here on
    store = dist.TCPStore(
        _LOOPBACK, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    shared = {
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
    }
    shared |= {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        **shared,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    return store, [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def would_restart() -> bool:
    """Whether torchrun starts the run again when this process exits with another status than 0."""
    restarts = [
        os.environ.get(f"TORCHELASTIC_{key}", "0") for key in ("RESTART_COUNT", "MAX_RESTARTS")
    ]
    return all(text.isdecimal() for text in restarts) and int(restarts[0]) < int(restarts[1])


def device_type(world: World) -> str:
    """`cuda` where torch sees GPUs, else `cpu`; touches no device, and says what packages read when
    they are imported.

    One GPU for a rank that nobody gave a LOCAL_RANK is its own (`srun --gpus-per-task=1`). Raises
    ValueError for any other number below the local ranks: a run on CPUs beside idle GPUs is to be
    asked for.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    alone = "RANK" in os.environ and "LOCAL_RANK" not in os.environ
    if 0 < count < world.local_size and not (count == 1 and alone):
        raise ValueError(
            f"torch sees {count} GPUs for the {world.local_size} ranks of this machine "
            "(LOCAL_WORLD_SIZE, else "
            "WORLD_SIZE): start as many ranks as GPUs, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    if count:
        set_defaults(
            _CUDA
            | {
                "TORCHINDUCTOR_COMPILE_THREADS": str(
                    max(1, (os.cpu_count() or 1) // world.local_size)
                )
            }
        )
    return "cuda" if count else "cpu"


def pick_device(world: World) -> torch.device:
    """The GPU of this local rank, else the CPU, whose cores the local ranks share as threads."""
    if device_type(world) == "cuda":
        torch.cuda.set_device(world.local_rank)
        return torch.device("cuda", world.local_rank)
    settle_cpu()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.local_size))
    return torch.device("cpu")


def device_at_hand(world: World) -> tuple[str, float]:
    """What the device of this rank is called, and the GiB that a rank has: of the machine's memory
    its part of it.
    """
    if device_type(world) == "cuda":
        gpu = torch.cuda.get_device_properties(world.local_rank)
        return gpu.name, gpu.total_memory / 2**30
    return "CPU", os.sysconf("SC_PAGE_SIZE") * os.sysconf(
        "SC_PHYS_PAGES"
    ) / world.local_size / 2**30


def settle_cpu() -> None:
    """Make a process a CPU rank. Threads that start later do as the one that calls this.

    Results below the normal numbers (1e-38 in fp32) are 0: a processor takes many times as long for
    a product with one, and a state that has decayed is full of them. Large tensors get memory maps
    of their own, and those of our own functions are used again (`large_blocks`): in glibc's heap
    gloo's small blocks keep freed outputs from that.
    """
    torch.set_flush_denormal(True)
    BLOCKS.active = True
    keep_in_heap(LARGE)


@dataclass(frozen=True)
class Rendezvous:
    """One rank among all of a run, before any process group; `store` is the part of this life, None
    for one rank.
    """

    rank: int
    size: int
    store: dist.Store | None
    seconds: float
    host: str = field(default_factory=socket.gethostname)

    def decided_by_rank_0(
        self, topic: str, value: str, judge: Callable[[list[str]], str], also: float = 0.0
    ) -> str:
        """Rank 0's verdict on the values of all ranks, in rank order; every rank calls it once for
        a topic.

        `also`: seconds that a rank may need for its value besides those of the rendezvous. Raises
        ValueError, on rank 0 with the number of a rank that gave no value in time.
        """
        store, seconds = self.store, self.seconds + also
        if store is None:
            return judge([value])
        store.set(f"{topic}/{self.rank}", value)
        store.set_timeout(datetime.timedelta(seconds=seconds))
        values: list[str] = []
        try:
            while self.rank == 0 and len(values) < self.size:
                values.append(store.get(f"{topic}/{len(values)}").decode())
            if self.rank == 0:
                store.set(f"{topic}/verdict", judge(values))
            verdict = store.get(f"{topic}/verdict").decode()
        except dist.DistError as late:
            raise ValueError(
                f"no word on the {topic} from rank {len(values)} within {seconds:g} s"
            ) from late
        read, deadline = store.add(f"{topic}/read", 1), time.monotonic() + _READING_SECONDS
        while self.rank == 0 and read < self.size and time.monotonic() < deadline:
            time.sleep(0.01)
            read = store.add(f"{topic}/read", 0)
        return verdict


def rendezvous(world: World, seconds: float) -> Rendezvous:
    """Find the other ranks of this run in its store, that of torchrun's agent or else of rank 0; no
    group is made.

    Raises ValueError for a store that cannot be reached, and for ranks that do not come in
    `seconds`.
    """
    if world.size == 1:
        return Rendezvous(world.rank, 1, None, seconds)
    host, port = (os.environ.get(key, "") for key in ("MASTER_ADDR", "MASTER_PORT"))
    place = f"MASTER_ADDR={host}, MASTER_PORT={port}"
    if not host or not (port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(
            f"environment variables: {place} (1 to 65535): start with torchrun or set them "
            "everywhere"
        )
    serves = world.rank == 0 and _rank_0_holds_the_store()
    timeout = datetime.timedelta(seconds=max(1.0, seconds))
    try:
        server = "localhost" if serves else host
        store = dist.TCPStore(server, int(port), None, serves, timeout, wait_for_workers=False)
        return Rendezvous(
            world.rank, world.size, fresh_store(store, world.rank, world.size, seconds), seconds
        )
    except dist.DistError as error:
        here, why = (
            f"rank {world.rank} on {socket.gethostname()}",
            str(error).strip().partition("\n")[0],
        )
        raise ValueError(
            f"{here} found no store at {place}: {why}; is rank 0 there, is the port free?"
        ) from error


def _rank_0_holds_the_store() -> bool:
    """Whether the store of the run is in the process of rank 0. Otherwise it is in that of torchrun
    or `--nproc`.
    """
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)


def fresh_store(store: dist.Store, rank: int, size: int, seconds: float) -> dist.Store:
    """A part of `store` that no earlier life of the run has written to; every rank calls it.

    After a restart torchrun gives new ranks the old store, with addresses of dead processes. Each
    rank writes a random word, rank 0 proposes all words it finds, each rank agrees to a proposal
    that holds its own, and rank 0 settles it when all have. (TORCHELASTIC_RESTART_COUNT differs
    between machines once one has failed alone.) ValueError names the ranks that do not come in
    `seconds`.
    """

    def read(key: str) -> str:
        return store.get(f"life/{key}").decode() if store.check([f"life/{key}"]) else ""

    mine, agreed, deadline = secrets.token_hex(8), "", time.monotonic() + seconds
    store.set(f"life/word/{rank}", mine)
    while time.monotonic() < deadline:
        if rank == 0:
            store.set("life/proposal", ",".join(read(f"word/{other}") for other in range(size)))
        proposal = read("proposal")
        words = proposal.split(",")
        if len(words) == size and words[rank] == mine:
            name = hashlib.sha256(proposal.encode()).hexdigest()[:16]
            if name != agreed:
                store.set(f"life/agreed/{rank}", name)
                agreed = name
            if rank == 0 and all(read(f"agreed/{other}") == name for other in range(size)):
                store.set("life/settled", name)
            if read("settled") == name:
                return dist.PrefixStore(f"life/{name}", store)
        time.sleep(0.02 * max(1.0, size / 128))
    missing = [other for other in range(size) if not read(f"word/{other}")]
    missing = missing or [other for other in range(size) if read(f"agreed/{other}") != agreed]
    if rank == 0:
        time.sleep(_READING_SECONDS)  # the others look for it there
    raise ValueError(
        f"rank {rank} on {socket.gethostname()} waited {seconds:g} s for the {size} ranks of this "
        "run to start: no "
        f"word from {named(missing)}; start every rank, with the same MASTER_ADDR, MASTER_PORT and "
        "WORLD_SIZE"
    )


def join(
    rendezvous: Rendezvous,
    shape: GridShape,
    timeout_minutes: float = 10.0,
    file_timeout_minutes: float | None = None,
) -> ProcessGrid:
    """The grid of the ranks that met: device, process group (gloo on CPU, NCCL on CUDA), axes."""
    device = pick_device(world_from_environment())
    timeout = datetime.timedelta(minutes=timeout_minutes)
    file_timeout = (
        None if file_timeout_minutes is None else datetime.timedelta(minutes=file_timeout_minutes)
    )
    store = rendezvous.store
    if store is not None:
        store.set(f"joins/{rendezvous.rank}", "")
    try:
        if rendezvous.size > 1 and not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            if backend == "nccl":
                set_defaults(_FLIGHT_RECORDER)
            # no device_id: each group would be split off the world's communicator by all ranks;
            # only members make it
            dist.init_process_group(backend, None, timeout, rendezvous.size, rendezvous.rank, store)
        grid = build_grid(shape, rendezvous.rank, device, timeout, file_timeout)
    except (
        RuntimeError
    ) as error:  # also those of the store, which name a key and not the rank that did not write it
        if store is not None:
            error.add_note(_who_did_not_join(store, rendezvous.size))
        raise
    if device.type == "cuda":  # gloo has made its connections with the groups
        connect(grid.in_steps(), device)
    return grid


def _who_did_not_join(store: dist.Store, size: int) -> str:
    """The ranks that met the others and then did not come to make the process group, in words."""
    try:
        missing = [rank for rank in range(size) if not store.check([f"joins/{rank}"])]
    except RuntimeError:
        return "the run's store does not answer"
    if not missing:
        return "all ranks came to make the process group, and one was lost while it was made"
    return (
        f"{named(missing)} did not come to make the process group: stopped, dead, or still "
        "computing"
    )


def meet_in_file(file: str, rank: int, world_size: int) -> None:
    """Join a gloo process group of this machine's ranks over a file of their own; one rank needs
    none.

    Its timeout is beyond all that a tool waits: who started the ranks notices a hang sooner.
    """
    if world_size > 1:
        hours = datetime.timedelta(hours=12)
        dist.init_process_group("gloo", f"file://{file}", hours, world_size, rank)


def report_failure(error: BaseException, place: str, world: Axis, wait_seconds: float = 5.0) -> str:
    """Leave this rank's reason for the others; what is known of the failure in words, at `place`
    (`step 12`).

    If another rank broke a collective of this one (`was_hit`), the others get `wait_seconds` to
    give their reasons, and those that give none are named; a ValueError is mostly one of all ranks.
    Never raises.
    """
    why = str(error).strip().partition("\n")[0][:500]
    mine = f"rank {world.rank} failed in {place}: {type(error).__name__}: {why}"
    if world.size == 1 or not dist.is_initialized():
        return mine
    hit = was_hit(error)
    heard = {world.rank: mine}
    answered: list[bool] = []

    def exchange() -> None:
        with contextlib.suppress(Exception):  # the store went with the rank or machine that held it
            _listen(heard, world, wait_seconds if hit or isinstance(error, ValueError) else 0.0)
            answered.append(True)

    # a frozen machine's store answers no request, and torch's own timeouts do not cover `check` and
    # `set`
    thread = threading.Thread(target=exchange, daemon=True)
    thread.start()
    thread.join(3.0 * wait_seconds)
    said = dict(heard)  # the thread may still add to the other one
    lines = [mine, *(text for rank, text in sorted(said.items()) if rank != world.rank)]
    silent = [rank for rank in range(world.size) if rank not in said]
    ended = (
        [rank for rank in world.local.host.ended() if rank in silent]
        if world.local is not None
        else []
    )
    if hit and ended:
        lines.append(f"{named(ended)} of this machine ended")
    silent = [rank for rank in silent if rank not in ended]
    if not answered:
        lines.append(
            "the run's store does not "
            f"answer{': rank 0 holds it' if _rank_0_holds_the_store() else ''}"
        )
    elif hit and silent:
        lines.append(f"no word from {named(silent)} in {place}: stopped, dead, or still computing")
    return "\n".join(lines)


def was_hit(error: BaseException) -> bool:
    """Whether an error is what a collective raises when another rank has broken it, or was caused
    by one of these.

    If a rank is lost while all write or read a checkpoint, that is the cause of a SaveError or a
    ValueError.
    """
    cause: BaseException | None = error
    while cause is not None:
        if type(cause) is RuntimeError or isinstance(cause, dist.DistError):
            return True
        cause = cause.__cause__
    return False


def _listen(heard: dict[int, str], world: Axis, seconds: float) -> None:
    """Leave this rank's words in the run's store, and add to `heard` those that others leave in so
    many seconds.
    """
    store, deadline = run_store(), time.monotonic() + seconds
    store.set(f"megacp_failure/{world.rank}", heard[world.rank])
    while len(heard) < world.size and time.monotonic() < deadline:
        for rank in range(world.size):
            if rank not in heard and store.check([f"megacp_failure/{rank}"]):
                heard[rank] = store.get(f"megacp_failure/{rank}").decode()
        time.sleep(0.05)
    if world.rank == 0:
        time.sleep(min(1.0, seconds))  # it may hold the store: the others read it


def run_store() -> dist.Store:
    """The store in which all ranks of the process group meet."""
    return dist.distributed_c10d._get_default_store()


def named(ranks: list[int]) -> str:
    """`rank 3`, or `ranks 0, 2, 3`; of many the first ones and how many more."""
    return f"rank{'s' if len(ranks) != 1 else ''} {listed(ranks, 16)}"


def stop() -> None:
    """Leave the run in order; without a process group nothing happens."""
    if dist.is_initialized():
        dist.destroy_process_group()


def hard_exit(status: int) -> NoReturn:
    """End this process now, without the destructors of libraries and their threads.

    After a failure, those of a process group may wait for ever for a machine that is frozen. After
    a good run, a thread of gloo that lets go of a tensor while the interpreter ends would abort the
    process (pytorch issue 190489).
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(status)
