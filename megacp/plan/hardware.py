"""GPUs and links as numbers, from hardware.yaml beside this file or a sheet that `megacp-plan
calibrate` wrote.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from megacp.plan.sheet import Sheet, read_sheet

GPUS_OF_A_MACHINE = 8


def nominal_sheet() -> Sheet:
    """hardware.yaml."""
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


GPUS, NETWORKS = tuple(nominal_sheet()["gpus"]), tuple(nominal_sheet()["networks"])
"""Names of what the sheet knows."""
DEFAULT_GPU = "h100"


@dataclass(frozen=True)
class Hardware:
    """What training reaches on a GPU and its links."""

    memory: float
    """GiB that a process finds."""
    products: float
    """FLOP/s of large products."""
    attention: Mapping[str, Sequence[float]]
    """FLOP/s of `fused` and `flex` attention, forward and backward."""
    bandwidth: float
    """Bytes/s of memory."""
    inside: float
    """Bytes/s that a GPU sends to others of its machine."""
    outside: float
    """Bytes/s that it sends to other machines."""
    host: float
    """Bytes/s between it and host memory."""
    latency: float
    """Seconds of a message beside its bytes."""
    peak: float
    """FLOP/s that utilisation is told of."""
    source: str
    """Where the numbers are from, as a sentence."""
    host_memory: float = math.inf
    """GiB of the host for each GPU."""
    experts: float = 1.0
    """Share of the rate of products that those of experts reach."""
    dtype: str = "bfloat16"
    """What training computes in, for which the rates hold."""
    calls: float = 0.0
    """Seconds that the host takes for the calls of a block's forward; its backward takes twice as
    long.
    """
    overlap: float = 1.0
    """Share of a compute under which its host and its links work on."""
    cores: float = math.inf
    """Ranks that compute at once; more of them take turns."""
    beside: float = 1.0
    """How many times as long a rank takes where others share the caches and the memory of its
    machine.
    """

    def link(self, ranks: int, stride: int) -> float:
        """Bytes/s of a rank that sends to others of `ranks` that stand `stride` apart: by the
        slowest link it takes.
        """
        return self.inside if ranks * stride <= GPUS_OF_A_MACHINE else self.outside

    def ring(self, ranks: int, stride: int) -> float:
        """Bytes/s of a gather or a sum over them: what leaves a machine leaves by the adapters of
        all its ranks there.

        A ring enters and leaves each machine once, so every adapter carries a part of it (NCCL's
        channels).
        """
        return min(self.inside, self.link(ranks, stride) * max(1, GPUS_OF_A_MACHINE // stride))

    def exchange(self, ranks: int, stride: int) -> float:
        """Bytes/s of a rank that sends as much to each of the others: its own adapter has what
        leaves its machine.
        """
        away = ranks - max(1, GPUS_OF_A_MACHINE // stride)
        return min(self.inside, self.outside * (ranks - 1) / away) if away > 0 else self.inside

    def exposed(self, seconds: float, under: float) -> float:
        """What is left of seconds of the host or a link that go on under `under` seconds of
        computes.
        """
        return max(0.0, seconds - self.overlap * under)


def hardware(gpu: str, network: str) -> Hardware:
    """Return the numbers of a GPU of hardware.yaml by its name, or those of a measured GPU by its
    file.

    Raises ValueError where it is neither, and for a file with all that is wrong in it.
    """
    nominal = nominal_sheet()
    if gpu in GPUS:
        own = nominal["gpus"][gpu]
        told = f"Nominal times: no machine was measured ({own['source']})"
        return hardware_of({**nominal, "gpus": {gpu: {**own, "source": told}}}, network)
    try:
        return hardware_of(read_sheet(gpu, network), network)
    except OSError as error:
        known = ", ".join(GPUS)
        raise ValueError(
            f"--gpu {gpu} is none of {known}, nor a file of `calibrate`: {error.strerror}"
        ) from None


def hardware_here(device: str, gib: float | None, network: str) -> Hardware:
    """Return the row of a device, found by the name that the device gives itself, with its own
    memory in GiB.

    A device without a row, such as a CPU, counts as the default of `megacp-plan`. `gib` None keeps
    the row's memory.
    """
    words = device.lower().replace("-", " ").split()
    known = next((gpu for gpu in GPUS if gpu in words), None)
    row = hardware(known or DEFAULT_GPU, network)
    source = f"{device}: nominal times of {known or DEFAULT_GPU}"
    if known is None:
        source += f", as no sheet has {device}"
    return replace(row, memory=gib or row.memory, source=source)


def hardware_of(sheet: Sheet, network: str) -> Hardware:
    """The one GPU of a sheet: what it can do, times the shares of it that training reaches."""
    (own,), reached = sheet["gpus"].values(), sheet["reached"]
    return Hardware(
        memory=own["memory"],
        products=own["flops"] * reached["products"],
        attention={
            name: [own["flops"] * share for share in reached[name]] for name in ("fused", "flex")
        },
        bandwidth=own["bandwidth"] * reached["bandwidth"],
        inside=own["link"] * reached["link"],
        outside=sheet["networks"][network] * reached["network"],
        host=sheet["host"] * reached["host"],
        latency=reached["latency"],
        peak=own["flops"],
        source=own["source"],
        experts=reached["experts"],
        host_memory=sheet["host_memory"],
        **sheet.get("terms", {}),
    )
