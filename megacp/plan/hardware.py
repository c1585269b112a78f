"""Rates of GPUs and links, from hardware.yaml or a sheet that `megacp-plan calibrate` wrote."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from megacp.plan.sheet import Sheet, read_sheet

# Ranks with neighbouring numbers fill machines of this size.
GPUS_OF_A_MACHINE = 8


def nominal_sheet() -> Sheet:
    """Return the contents of hardware.yaml: published numbers of GPUs and networks."""
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


# Names of the known GPUs.
GPUS = tuple(nominal_sheet()["gpus"])
# Names of the known networks.
NETWORKS = tuple(nominal_sheet()["networks"])
DEFAULT_GPU = "h100"


@dataclass(frozen=True)
class Hardware:
    """Rates that training reaches on a GPU and its links."""

    memory: float
    """GiB that a process can use."""
    products: float
    """FLOP/s of large products."""
    attention: Mapping[str, Sequence[float]]
    """FLOP/s of `fused` and `flex` attention, forward and backward."""
    bandwidth: float
    """Bytes/s of memory."""
    inside: float
    """Bytes/s that a GPU sends to other GPUs of its machine."""
    outside: float
    """Bytes/s that a GPU sends to other machines."""
    host: float
    """Bytes/s between a GPU and host memory."""
    latency: float
    """Seconds of a message in addition to the time of its bytes."""
    peak: float
    """FLOP/s to which utilisation refers."""
    source: str
    """A sentence about the source of the numbers."""
    host_memory: float = math.inf
    """GiB of host memory per GPU."""
    experts: float = 1.0
    """Rate of the products of experts, as a share of `products`."""
    dtype: str = "bfloat16"
    """The dtype to which the rates refer."""
    calls: float = 0.0
    """Seconds of the host for the calls of a block's forward; backward takes twice as long."""
    overlap: float = 1.0
    """Share of compute time under which calls and messages hide."""
    cores: float = math.inf
    """Number of ranks that can compute at once; more ranks take turns."""
    beside: float = 1.0
    """Factor on the time of a rank that shares caches and memory with other ranks."""

    def link(self, ranks: int, stride: int) -> float:
        """Return the bytes/s of a rank that sends to a neighbour in a group.

        The group has `ranks` ranks, `stride` apart; its slowest link counts.
        """
        if ranks * stride <= GPUS_OF_A_MACHINE:
            return self.inside
        return self.outside

    def ring(self, ranks: int, stride: int) -> float:
        """Return the bytes/s of a gather or a sum over a group.

        A ring enters and leaves each machine once, so the adapters of all its ranks on a machine
        share the traffic (NCCL's channels).
        """
        adapters = max(1, GPUS_OF_A_MACHINE // stride)
        return min(self.inside, self.link(ranks, stride) * adapters)

    def exchange(self, ranks: int, stride: int) -> float:
        """Return the bytes/s of a rank that sends equally much to each other rank of a group.

        Its own adapter sends everything that leaves the machine.
        """
        away = ranks - max(1, GPUS_OF_A_MACHINE // stride)  # ranks on other machines
        if away <= 0:
            return self.inside
        return min(self.inside, self.outside * (ranks - 1) / away)

    def exposed(self, seconds: float, under: float) -> float:
        """Return the part of `seconds` that does not hide under `under` seconds of compute."""
        return max(0.0, seconds - self.overlap * under)


def hardware(gpu: str, network: str) -> Hardware:
    """Return the numbers of a GPU, given its name in hardware.yaml or the file of a measured one.

    Raise ValueError if it is neither, or with all problems of the file.
    """
    nominal = nominal_sheet()
    if gpu in GPUS:
        # Keep only this GPU, and say in its source that nothing was measured.
        own = nominal["gpus"][gpu]
        told = f"Nominal times: no machine was measured ({own['source']})"
        return hardware_of({**nominal, "gpus": {gpu: {**own, "source": told}}}, network)
    try:
        return hardware_of(read_sheet(gpu, network), network)
    except OSError as error:
        known = ", ".join(GPUS)
        raise ValueError(
            f"--gpu {gpu} is neither one of {known} nor a file of `calibrate`: {error.strerror}"
        ) from None


def hardware_here(device: str, gib: float | None, network: str) -> Hardware:
    """Return the numbers of a device, found by the name that the device reports.

    `gib` is its memory in GiB; None keeps the memory of hardware.yaml. A device without an entry,
    such as a CPU, counts as the default GPU of `megacp-plan`.
    """
    # "NVIDIA H100-SXM5-80GB" has the word h100
    words = device.lower().replace("-", " ").split()
    known = next((gpu for gpu in GPUS if gpu in words), None)
    row = hardware(known or DEFAULT_GPU, network)
    source = f"{device}: nominal times of {known or DEFAULT_GPU}"
    if known is None:
        source += f", as no sheet has {device}"
    return replace(row, memory=gib or row.memory, source=source)


def hardware_of(sheet: Sheet, network: str) -> Hardware:
    """Return the numbers of a sheet with one GPU: peak rates times the shares reached."""
    (own,) = sheet["gpus"].values()
    reached = sheet["reached"]
    attention = {}
    for kernel in ("fused", "flex"):
        attention[kernel] = [own["flops"] * share for share in reached[kernel]]
    return Hardware(
        memory=own["memory"],
        products=own["flops"] * reached["products"],
        attention=attention,
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
