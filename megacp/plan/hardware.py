"""Rates of GPUs and links, from hardware.yaml or a sheet written by `megacp-plan calibrate`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from megacp.plan.sheet import Sheet, read_sheet

# Number of GPUs per machine. Ranks with consecutive numbers fill one machine after another.
GPUS_OF_A_MACHINE = 8


def nominal_sheet() -> Sheet:
    """Return the contents of hardware.yaml: published rates of GPUs and networks."""
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
    """FLOP/s of large matrix products."""
    attention: Mapping[str, Sequence[float]]
    """FLOP/s of `fused` and `flex` attention, each for the forward and the backward pass."""
    bandwidth: float
    """Memory bandwidth in bytes/s."""
    inside: float
    """Bytes/s that a GPU sends to other GPUs in its machine."""
    outside: float
    """Bytes/s that a GPU sends to other machines."""
    host: float
    """Bytes/s between a GPU and host memory."""
    latency: float
    """Seconds that each message takes in addition to the transfer of its bytes."""
    peak: float
    """Peak FLOP/s, the reference for utilisation."""
    source: str
    """A sentence that states where the numbers come from."""
    host_memory: float = math.inf
    """GiB of host memory per GPU."""
    experts: float = 1.0
    """Rate of matrix products in experts, as a fraction of `products`."""
    dtype: str = "bfloat16"
    """The dtype for which the rates hold."""
    calls: float = 0.0
    """Host seconds to launch a block's forward pass; the backward pass takes twice as long."""
    overlap: float = 1.0
    """Fraction of the compute time that calls and messages can overlap with."""
    cores: float = math.inf
    """Number of ranks that can compute at once; more ranks take turns."""
    beside: float = 1.0
    """Slowdown factor of a rank that shares caches and memory with other ranks."""

    def link(self, ranks: int, stride: int) -> float:
        """Return the bytes/s at which a rank sends to its neighbour in a group.

        The group has `ranks` ranks whose numbers are `stride` apart. Its slowest link determines
        the rate.
        """
        if ranks * stride <= GPUS_OF_A_MACHINE:
            return self.inside
        return self.outside

    def ring(self, ranks: int, stride: int) -> float:
        """Return the bytes/s of an all-gather or a reduction in a group.

        A ring enters and leaves each machine once, so the network adapters of the group's ranks on
        a machine share the traffic (NCCL's channels).
        """
        adapters = max(1, GPUS_OF_A_MACHINE // stride)
        return min(self.inside, self.link(ranks, stride) * adapters)

    def exchange(self, ranks: int, stride: int) -> float:
        """Return the bytes/s of a rank that sends equal amounts to all other ranks in a group.

        Only the rank's own network adapter carries the traffic that leaves the machine.
        """
        away = ranks - max(1, GPUS_OF_A_MACHINE // stride)  # ranks on other machines
        if away <= 0:
            return self.inside
        return min(self.inside, self.outside * (ranks - 1) / away)

    def exposed(self, seconds: float, under: float) -> float:
        """Return the part of `seconds` that does not overlap with `under` seconds of compute."""
        return max(0.0, seconds - self.overlap * under)


def hardware(gpu: str, network: str) -> Hardware:
    """Return the rates of a GPU, given its name in hardware.yaml or the path of a measured sheet.

    `H100` and `RTX 4090` are h100 and rtx4090. Raise ValueError if `gpu` is neither, or with all
    problems of the sheet.
    """
    name = "".join(_words(gpu))
    if name in GPUS:
        # State in its source that nothing was measured.
        sheet = sheet_like(name)
        own = sheet["gpus"][name]
        own["source"] = f"Times from published rates: no machine was measured ({own['source']})"
        return hardware_of(sheet, network)
    try:
        return hardware_of(read_sheet(gpu, network), network)
    except OSError as error:
        raise ValueError(
            f"--gpu {gpu} is not a known GPU ({', '.join(GPUS)}), and not a file written by "
            f"`megacp-plan calibrate`: {error.strerror}"
        ) from None


def _words(text: str) -> list[str]:
    """Return the words of a GPU's name in small letters."""
    return text.lower().replace("-", " ").replace("_", " ").split()


def _reported_gpu(device: str) -> str | None:
    """Return the name in hardware.yaml of a device, given the name that it reports; None if new.

    "NVIDIA H100-SXM5-80GB" has the word h100, and "NVIDIA RTX 6000 Ada Generation" has three words
    that together spell rtx6000ada.
    """
    words = _words(device)
    spelled = set()
    for start in range(len(words)):
        for end in range(start + 1, len(words) + 1):
            spelled.add("".join(words[start:end]))
    return next((gpu for gpu in GPUS if gpu in spelled), None)


def sheet_like(gpu: str) -> Sheet:
    """Return the nominal sheet of a single GPU: its own rates, and the rates that all share."""
    sheet = nominal_sheet()
    own = sheet["gpus"][gpu]
    # A card on PCI Express 4 reaches the memory of its host at half the rate.
    sheet["host"] = own.pop("host", sheet["host"])
    sheet["gpus"] = {gpu: own}
    return sheet


def hardware_here(device: str, gib: float | None, network: str) -> Hardware:
    """Return the rates of a device, looked up by the name that the device reports.

    `gib` is its memory in GiB; None uses the memory from hardware.yaml. A device without an entry,
    such as a CPU, is treated as `DEFAULT_GPU`.
    """
    known = _reported_gpu(device)
    row = hardware(known or DEFAULT_GPU, network)
    source = f"{device}: times from the published rates of {known or DEFAULT_GPU}"
    if known is None:
        source += f", as hardware.yaml has no entry for {device}"
    return replace(row, memory=gib or row.memory, source=source)


def hardware_of(sheet: Sheet, network: str) -> Hardware:
    """Return the rates of a sheet with one GPU: peak rates times the fractions reached."""
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
