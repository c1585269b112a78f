"""The store of --nproc is visible only on this machine, and Ctrl-C stops a start without a
traceback.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megacp.training.start.interrupts import handles
from megacp.training.start.launch import ranks_of_one_machine
from tests.faults.processes import ROOT, ends

SIZES = "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 2 --seq-length 64 --vocab-size 64"
FLAGS = ["--nproc", "2", *SIZES.split(), "--train-iters", "100000", "--log-file", "/dev/null"]


def listening(port: int) -> set[str]:
    """Return the local addresses at which this machine listens on a port, in the kernel's notation."""
    found = set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net", table)
        if not path.exists():
            continue
        for line in path.read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, number = local.partition(":")
            if state == "0A" and int(number, 16) == port:
                found.add(address)
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's list of sockets")
def test_the_store_of_nproc_listens_at_the_loopback_address_only() -> None:
    store, environments = ranks_of_one_machine(2)
    port = int(environments[0]["MASTER_PORT"])
    assert listening(port) == {"0100007F"}
    assert {one["MASTER_ADDR"] for one in environments} == {"127.0.0.1"}
    store.set("a", "b")
    assert store.get("a") == b"b"


def started(flags: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megacp.train", *flags]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    pipe = subprocess.PIPE
    # a separate session is like the foreground job of a terminal: Ctrl-C reaches all its processes
    return subprocess.Popen(
        command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def children(process: int) -> list[int]:
    return [
        int(text) for text in Path(f"/proc/{process}/task/{process}/children").read_text().split()
    ]


def imports_torch(process: int) -> bool:
    return "libtorch" in Path(f"/proc/{process}/maps").read_text()


MOMENTS: dict[str, Callable[[int], bool]] = {
    "while Python starts": lambda process: handles(process, signal.SIGINT),
    "while torch is imported": imports_torch,
    "between two starts": lambda process: len(children(process)) == 1,
    "while ranks start": lambda process: len(children(process)) == 2,
    "while a rank imports torch": lambda process: any(map(imports_torch, children(process))),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_in_the_first_seconds_is_one_word(moment: str) -> None:
    run = started(FLAGS)
    deadline = time.monotonic() + 100
    while not MOMENTS[moment](run.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    if moment == "while Python starts":
        time.sleep(0.2)  # Python's own handler is active before ours
    ranks = children(run.pid)
    os.killpg(run.pid, signal.SIGINT)
    try:
        (ended,) = ends([run], 60)
    finally:
        for rank in ranks:
            with contextlib.suppress(
                ProcessLookupError
            ):  # the process has already ended, as expected
                os.kill(rank, signal.SIGKILL)
    assert (ended.status, ended.out) == (130, "")
    assert ended.err in ("interrupted\n", "interrupted before the first step\n")


def test_a_process_that_is_told_to_ignore_ctrl_c_does(tmp_path: Path) -> None:
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, eval(sys.argv[1]))\n"
        "from megacp.training.start.interrupts import leave_at_ctrl_c\n"
        "leave_at_ctrl_c()\n"
        "signal.raise_signal(signal.SIGINT)\n"
        "print('goes on')"
    )
    done = {
        handler: subprocess.run(
            [sys.executable, "-c", code, handler],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        for handler in ("signal.SIG_IGN", "signal.default_int_handler")
    }
    ignores, leaves = done.values()
    assert (ignores.returncode, ignores.stdout) == (0, "goes on\n")
    assert (leaves.returncode, leaves.stdout, leaves.stderr) == (130, "", "interrupted\n")


def test_a_handler_of_another_process_is_seen() -> None:
    assert handles(os.getpid(), signal.SIGINT) and not handles(os.getpid(), signal.SIGUSR2)
    assert handles(2**22 + 1, signal.SIGTERM), "a process that is not there needs no killing"
