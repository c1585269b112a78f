"""Start of a rank: determine its number, find the other ranks, build the grid, report failures.

Only this file reads or writes `os.environ`, so all other code depends only on its arguments. A
single process needs neither a process group nor torchrun.

A failed rank writes its reason to the run's store, which usually still works when collectives do
not. Ranks whose collectives fail read these reasons. A rank that leaves no reason was killed or
hangs.
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

# How long rank 0 waits for the other ranks to read its verdict, since it may host the store.
_READING_SECONDS = 5.0
# Make torch record the latest NCCL collectives, and write them to a file per rank on a timeout.
_FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
# An address that only this machine can reach.
_LOOPBACK = "127.0.0.1"
# Rows differ in length. Without expandable segments, the allocator would lose memory to
# fragmentation, and would wait for the device to release memory.
_CUDA = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@dataclass(frozen=True)
class World:
    """Global and local rank of this process, and numbers of ranks, as set by torchrun."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def world_from_environment() -> World:
    """Return the world given by RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.

    Without these variables, the world has a single process. Raise ValueError if they are
    inconsistent, or if only one of RANK and WORLD_SIZE is set, because every process would then
    train separately.
    """
    # LOCAL_WORLD_SIZE may be missing if all ranks run on one machine.
    size = os.environ.get("WORLD_SIZE", "1")
    defaults = {"RANK": "0", "WORLD_SIZE": size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": size}
    texts = {key: os.environ.get(key, default) for key, default in defaults.items()}
    both_or_none = ("RANK" in os.environ) == ("WORLD_SIZE" in os.environ)
    if both_or_none and all(text.isdecimal() for text in texts.values()):
        rank, ranks, local_rank, local_ranks = map(int, texts.values())
        if rank < ranks and local_rank < local_ranks:
            return World(rank, ranks, local_rank, local_ranks)
    shown = ", ".join(f"{key}={os.environ.get(key, '(not set)')}" for key in defaults)
    raise ValueError(
        f"environment variables: {shown} are inconsistent; start the run with torchrun or unset "
        "them"
    )


def ranks_of_one_machine(count: int) -> tuple[dist.Store, list[dict[str, str]]]:
    """Return the store for a run whose ranks this process starts, and each rank's environment.

    The caller must keep the store until the ranks end. The store accepts any connection, so it is
    reachable only from this machine.
    """
    # Listen before the ranks start, so that no other process can take the port.
    listener = socket.create_server((_LOOPBACK, 0))
    port = listener.getsockname()[1]
    # From now on, the store owns the descriptor.
    descriptor = listener.detach()
    store = dist.TCPStore(
        _LOOPBACK, port, None, True, wait_for_workers=False, master_listen_fd=descriptor
    )
    shared = {
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    environments = []
    for rank in range(count):
        # the caller's OMP_NUM_THREADS takes precedence
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **shared}
        environment["RANK"] = str(rank)
        environment["LOCAL_RANK"] = str(rank)
        environments.append(environment)
    return store, environments


def would_restart() -> bool:
    """Return whether torchrun restarts the run if this process exits with a nonzero status."""
    # only torchrun sets these variables
    done = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    allowed = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return done.isdecimal() and allowed.isdecimal() and int(done) < int(allowed)


def device_type(world: World) -> str:
    """Return `cuda` if torch finds GPUs, else `cpu`, without initializing a device.

    Also set environment variables that packages read on import. If LOCAL_RANK is not set, a single
    GPU belongs to this rank (`srun --gpus-per-task=1`). Otherwise, raise ValueError if there are
    fewer GPUs than local ranks: a run uses CPUs despite GPUs only on request.
    """
    # With Slurm, a rank may find only its own GPU, and LOCAL_RANK is not set.
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    own_gpu = count == 1 and "RANK" in os.environ and "LOCAL_RANK" not in os.environ
    if 0 < count < world.local_size and not own_gpu:
        raise ValueError(
            f"torch finds {count} GPUs for the {world.local_size} ranks of this machine "
            "(LOCAL_WORLD_SIZE, else WORLD_SIZE): start one rank per GPU, or set "
            "CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    if count == 0:
        return "cpu"
    # otherwise, every rank would start one compiler thread per core
    compile_threads = max(1, (os.cpu_count() or 1) // world.local_size)
    set_defaults(_CUDA | {"TORCHINDUCTOR_COMPILE_THREADS": str(compile_threads)})
    return "cuda"


def pick_device(world: World) -> torch.device:
    """Return the GPU of this local rank, or the CPU, using an equal share of its cores."""
    if device_type(world) == "cuda":
        torch.cuda.set_device(world.local_rank)
        return torch.device("cuda", world.local_rank)
    settle_cpu()
    if "OMP_NUM_THREADS" not in os.environ:  # the user's choice takes precedence
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.local_size))
    return torch.device("cpu")


def device_at_hand(world: World) -> tuple[str, float]:
    """Return the name of this rank's device and its memory in GiB.

    A CPU rank has an equal share of the machine's memory.
    """
    if device_type(world) == "cuda":
        gpu = torch.cuda.get_device_properties(world.local_rank)
        return gpu.name, gpu.total_memory / 2**30
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return "CPU", memory / world.local_size / 2**30


def settle_cpu() -> None:
    """Configure this process as a CPU rank; threads that start later inherit the configuration.

    Denormal results (below 1e-38 in float32) become 0. Processors are many times slower with
    denormals, which are frequent in decayed states.

    Large tensors get their own memory maps, which our functions reuse (`large_blocks`). In glibc's
    heap, small gloo blocks would prevent the memory of freed outputs from being returned.
    """
    torch.set_flush_denormal(True)
    BLOCKS.active = True
    keep_in_heap(LARGE)


@dataclass(frozen=True)
class Rendezvous:
    """Connection of a rank to all ranks of a run, before any process group exists.

    `store` contains only keys from this start of the run; it is None for a single rank.
    """

    rank: int
    size: int
    store: dist.Store | None
    seconds: float
    host: str = field(default_factory=socket.gethostname)

    def decided_by_rank_0(
        self, topic: str, value: str, judge: Callable[[list[str]], str], also: float = 0.0
    ) -> str:
        """Return rank 0's verdict: the result of `judge` for all ranks' values, in rank order.
        Every rank calls this method once per topic. `also` is the time in seconds that a rank may
        need to compute its value, in addition to `seconds`. Raise ValueError if a value does not
        arrive in time; on rank 0, the error names the rank.
        """
        store = self.store
        seconds = self.seconds + also
        if store is None:
            return judge([value])
        store.set(f"{topic}/{self.rank}", value)
        store.set_timeout(datetime.timedelta(seconds=seconds))
        # Rank 0 collects all values and writes the verdict; the other ranks wait for the verdict.
        values: list[str] = []
        try:
            while self.rank == 0 and len(values) < self.size:
                values.append(store.get(f"{topic}/{len(values)}").decode())
            if self.rank == 0:
                store.set(f"{topic}/verdict", judge(values))
            verdict = store.get(f"{topic}/verdict").decode()
        except dist.DistError as late:
            raise ValueError(
                f"no message about the {topic} from rank {len(values)} within {seconds:g} s"
            ) from late
        # Rank 0 waits until all ranks have read the verdict, because it may host the store.
        read = store.add(f"{topic}/read", 1)  # number of ranks that have read the verdict
        deadline = time.monotonic() + _READING_SECONDS
        while self.rank == 0 and read < self.size and time.monotonic() < deadline:
            time.sleep(0.01)
            read = store.add(f"{topic}/read", 0)
        return verdict


def rendezvous(world: World, seconds: float) -> Rendezvous:
    """Connect to the other ranks through the store of torchrun's agent or rank 0.

    No process group is created. Raise ValueError if the store cannot be reached, or if ranks do not
    connect within `seconds`.
    """
    if world.size == 1:
        return Rendezvous(world.rank, 1, None, seconds)
    host = os.environ.get("MASTER_ADDR", "")
    port = os.environ.get("MASTER_PORT", "")
    place = f"MASTER_ADDR={host}, MASTER_PORT={port}"
    if not host or not (port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(
            f"environment variables: {place} must give a host and a port from 1 to 65535: start "
            "with torchrun, or set them for every rank"
        )
    # torchrun's agent already serves a store at this address; without it, rank 0 must serve one
    serves = world.rank == 0 and _rank_0_holds_the_store()
    server = "localhost" if serves else host
    timeout = datetime.timedelta(seconds=max(1.0, seconds))
    try:
        store = dist.TCPStore(server, int(port), None, serves, timeout, wait_for_workers=False)
        fresh = fresh_store(store, world.rank, world.size, seconds)
    except dist.DistError as error:
        here = f"rank {world.rank} on {socket.gethostname()}"
        why = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{here} found no store at {place}: {why}; check that rank 0 runs there and that the "
            "port is free"
        ) from error
    return Rendezvous(world.rank, world.size, fresh, seconds)


def _rank_0_holds_the_store() -> bool:
    """Return whether rank 0 hosts the run's store, instead of torchrun or `--nproc`."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)


def fresh_store(store: dist.Store, rank: int, size: int, seconds: float) -> dist.Store:
    """Return a part of `store` to which no earlier start of the run has written.

    After a restart, torchrun gives new ranks the old store, which contains addresses of dead
    processes. All ranks therefore agree on a new prefix:

    1. Each rank writes a random word.
    2. Rank 0 proposes the list of all words that it finds.
    3. Each rank agrees to a proposal that contains its own word.
    4. Once all ranks have agreed, rank 0 confirms the proposal.

    TORCHELASTIC_RESTART_COUNT cannot be used as the prefix: after a machine has failed, it differs
    between machines. Raise ValueError that lists the ranks missing after `seconds`.
    """

    def read(key: str) -> str:
        if not store.check([f"life/{key}"]):
            return ""
        return store.get(f"life/{key}").decode()

    # the word is new at every start, so old keys never match it
    word = secrets.token_hex(8)
    agreed = ""
    deadline = time.monotonic() + seconds
    store.set(f"life/word/{rank}", word)
    while time.monotonic() < deadline:
        if rank == 0:
            store.set("life/proposal", ",".join(read(f"word/{other}") for other in range(size)))
        # An old proposal does not contain the new word of this rank.
        proposal = read("proposal")
        words = proposal.split(",")
        if len(words) == size and words[rank] == word:
            name = hashlib.sha256(proposal.encode()).hexdigest()[:16]
            if name != agreed:
                store.set(f"life/agreed/{rank}", name)
                agreed = name
            if rank == 0 and all(read(f"agreed/{other}") == name for other in range(size)):
                store.set("life/settled", name)
            if read("settled") == name:
                return dist.PrefixStore(f"life/{name}", store)
        # Poll less often if many ranks share the store.
        time.sleep(0.02 * max(1.0, size / 128))
    # Time is up: report the ranks without a word or, if there are none, those that did not agree.
    missing = [other for other in range(size) if not read(f"word/{other}")]
    if not missing:
        missing = [other for other in range(size) if read(f"agreed/{other}") != agreed]
    if rank == 0:
        time.sleep(_READING_SECONDS)  # the other ranks look for missing ranks in this store
    raise ValueError(
        f"rank {rank} on {socket.gethostname()} waited {seconds:g} s for the {size} ranks of this "
        f"run to start: no message from {named(missing)}; start every rank, with the same "
        "MASTER_ADDR, MASTER_PORT and WORLD_SIZE"
    )


def join(
    rendezvous: Rendezvous,
    shape: GridShape,
    timeout_minutes: float = 10.0,
    file_timeout_minutes: float | None = None,
) -> ProcessGrid:
    """Choose the device, create the process groups (gloo or NCCL), and return the grid.

    `timeout_minutes` limits collectives; `file_timeout_minutes` limits collectives that wait for
    files.
    """
    device = pick_device(world_from_environment())
    timeout = datetime.timedelta(minutes=timeout_minutes)
    file_timeout = None
    if file_timeout_minutes is not None:
        file_timeout = datetime.timedelta(minutes=file_timeout_minutes)
    store = rendezvous.store
    if store is not None:
        store.set(f"joins/{rendezvous.rank}", "")
    try:
        if rendezvous.size > 1 and not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            if backend == "nccl":
                set_defaults(_FLIGHT_RECORDER)
            # Without a device_id, only the members of a group create it. With one, all ranks would
            # split each group from the world's communicator.
            dist.init_process_group(backend, None, timeout, rendezvous.size, rendezvous.rank, store)
        grid = build_grid(shape, rendezvous.rank, device, timeout, file_timeout)
    except RuntimeError as error:
        # A store error contains the missing key, but not the rank that did not write it.
        if store is not None:
            error.add_note(_who_did_not_join(store, rendezvous.size))
        raise
    if device.type == "cuda":  # gloo has connected when it created the groups; NCCL has not
        connect(grid.in_steps(), device)
    return grid


def _who_did_not_join(store: dist.Store, size: int) -> str:
    """Return a message that names the ranks that did not join the process group."""
    try:
        missing = [rank for rank in range(size) if not store.check([f"joins/{rank}"])]
    except RuntimeError:
        return "the run's store does not answer"
    if not missing:
        return "all ranks tried to join the process group, but one was lost meanwhile"
    return f"{named(missing)} did not join the process group: stopped, dead, or still computing"


def meet_in_file(file: str, rank: int, world_size: int) -> None:
    """Join a gloo process group of ranks on this machine, which find each other through a file.

    A single rank needs no group. The timeout is longer than any tool waits, because the process
    that started the ranks detects hangs earlier.
    """
    if world_size > 1:
        hours = datetime.timedelta(hours=12)
        dist.init_process_group("gloo", f"file://{file}", hours, world_size, rank)


def report_failure(error: BaseException, place: str, world: Axis, wait_seconds: float = 5.0) -> str:
    """Publish the reason for this rank's failure, and return a report with all ranks' reasons.

    `place` is where the failure happened, such as `step 12`. If another rank broke a collective on
    this rank (`was_hit`), wait up to `wait_seconds` for the other ranks' reasons, and list the
    ranks without one. Also wait after a ValueError, which usually occurs on all ranks. This
    function never raises.
    """
    why = str(error).strip().partition("\n")[0][:500]
    mine = f"rank {world.rank} failed in {place}: {type(error).__name__}: {why}"
    if world.size == 1 or not dist.is_initialized():
        return mine
    hit = was_hit(error)
    seconds = wait_seconds if hit or isinstance(error, ValueError) else 0.0
    heard = {world.rank: mine}
    answered: list[bool] = []

    def exchange() -> None:
        # The store is lost together with the rank or machine that hosts it.
        with contextlib.suppress(Exception):
            _listen(heard, world, seconds)
            answered.append(True)

    # The store does not answer if its machine is frozen, and torch's timeouts do not cover `check`
    # and `set`. So the exchange runs in a thread, which may outlive the wait below.
    thread = threading.Thread(target=exchange, daemon=True)
    thread.start()
    thread.join(3.0 * wait_seconds)
    reasons = dict(heard)  # a copy: the thread may still add to `heard`
    lines = [mine]
    for rank, reason in sorted(reasons.items()):
        if rank != world.rank:
            lines.append(reason)
    silent = [rank for rank in range(world.size) if rank not in reasons]
    ended: list[int] = []
    if world.local is not None:
        ended = [rank for rank in world.local.host.ended() if rank in silent]
    if hit and ended:
        lines.append(f"{named(ended)} of this machine ended")
    silent = [rank for rank in silent if rank not in ended]
    if not answered:
        holder = ": rank 0 hosts it" if _rank_0_holds_the_store() else ""
        lines.append(f"the run's store does not answer{holder}")
    elif hit and silent:
        lines.append(
            f"no message from {named(silent)} in {place}: stopped, dead, or still computing"
        )
    return "\n".join(lines)


def was_hit(error: BaseException) -> bool:
    """Return whether an error comes from a collective that another rank has broken.

    The causes of the error are checked too: if a rank is lost while all ranks write or read a
    checkpoint, the collective's error is the cause of a SaveError or a ValueError.
    """
    cause: BaseException | None = error
    while cause is not None:
        if type(cause) is RuntimeError or isinstance(cause, dist.DistError):
            return True
        cause = cause.__cause__
    return False


def _listen(heard: dict[int, str], world: Axis, seconds: float) -> None:
    """Write this rank's reason to the run's store, and add the other ranks' reasons to `heard`.

    Wait up to `seconds` for these reasons.
    """
    store = run_store()
    deadline = time.monotonic() + seconds
    store.set(f"megacp_failure/{world.rank}", heard[world.rank])
    # Poll with `check`, because `get` would wait for a rank that may be dead.
    while len(heard) < world.size and time.monotonic() < deadline:
        for rank in range(world.size):
            if rank not in heard and store.check([f"megacp_failure/{rank}"]):
                heard[rank] = store.get(f"megacp_failure/{rank}").decode()
        time.sleep(0.05)
    if world.rank == 0:
        time.sleep(min(1.0, seconds))  # rank 0 may host the store, which other ranks still read


def run_store() -> dist.Store:
    """Return the store through which all ranks of the process group have connected."""
    return dist.distributed_c10d._get_default_store()


def named(ranks: list[int]) -> str:
    """Return text such as `rank 3` or `ranks 0, 2, 3`; long lists are shortened."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {listed(ranks, 16)}"


def stop() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def hard_exit(status: int) -> NoReturn:
    """End this process immediately, without running destructors of libraries.

    After a failure, the destructor of a process group may wait forever for a frozen machine. After
    a successful run, a gloo thread that releases a tensor while the interpreter shuts down would
    abort the process (pytorch issue 190489).
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader may have closed the pipe
            stream.flush()
    os._exit(status)
