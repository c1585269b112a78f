"""Machines of an elastic run on loopback. Each is a torchrun agent with its ranks, and can be lost.

A lost machine is the agent and all its descendants, killed at once, so that no other process is
notified. Killing only a rank would not do: its agent would notify the other agents and restart it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.processes import ROOT, free_port

RENDEZVOUS = "join_timeout=300,last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3"
"""Short waits: torchrun's defaults are 30 s for more machines and 15 s for a sign of life."""


def _below(pid: int) -> list[int]:
    """Return the process and all its descendants."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


@dataclass
class Machines:
    """`count` agents of one run; the first one has the rendezvous."""

    flags: Sequence[str]
    folder: Path
    count: int
    least: int = 1
    ranks: int = 1
    restarts: int = 3
    port: int = field(default_factory=free_port)
    agents: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, machine: int) -> None:
        """Start an agent; `output` returns its log."""
        endpoint = f"127.0.0.1:{self.port}"
        launcher = [
            "torch.distributed.run",
            "--nnodes",
            f"{self.least}:{self.count}",
            "--rdzv-backend",
            "c10d",
        ]
        launcher += ["--rdzv-endpoint", endpoint, "--rdzv-id", "run"]
        # all agents have the same address, so `is_host` selects the host
        launcher += [
            "--rdzv-conf",
            f"{RENDEZVOUS},is_host={machine == 0}",
        ]
        launcher += ["--nproc-per-node", str(self.ranks), "--max-restarts", str(self.restarts)]
        command = [sys.executable, "-m", *launcher, "-m", "megacp.train", *self.flags]
        environment = {key: text for key, text in os.environ.items() if "TORCHELASTIC" not in key}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        environment |= {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
        }
        with open(self._output(machine), "ab") as out:
            self.agents[machine] = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=out, stderr=out
            )

    def lose(self, machine: int) -> None:
        """Lose the machine: kill its agent and its ranks at once."""
        doomed = _below(self.agents[machine].pid)
        for pid in doomed:
            os.kill(pid, signal.SIGSTOP)
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        self.agents.pop(machine).wait()

    def output(self, machine: int) -> str:
        """Return the output of an agent and its ranks, from all its lives."""
        return self._output(machine).read_text(errors="replace")

    def wait(self, timeout: float) -> dict[int, int]:
        """Return the exit status of each remaining agent."""
        deadline = time.monotonic() + timeout
        return {
            machine: agent.wait(max(1.0, deadline - time.monotonic()))
            for machine, agent in self.agents.items()
        }

    def end(self) -> None:
        """Kill all remaining processes."""
        for machine in list(self.agents):
            if self.agents[machine].poll() is None:
                self.lose(machine)

    def _output(self, machine: int) -> Path:
        return self.folder / f"machine_{machine}.txt"
