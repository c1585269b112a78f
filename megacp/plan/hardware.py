"""GPUs and links as numbers, from hardware.yaml beside this file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

GPUS_OF_A_MACHINE = 8


def _sheet() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


GPUS, NETWORKS = tuple(_sheet()["gpus"]), tuple(_sheet()["networks"])
"""Names of what the sheet knows."""


@dataclass(frozen=True)
class Hardware:
    """What training reaches on a GPU and its links."""

    memory: float
    """GiB that a process finds."""
    products: float
    """FLOP/s of large products."""
    attention: dict[str, tuple[float, float]]
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

    def link(self, ranks: int, stride: int) -> float:
        """Bytes/s of a rank that sends to others of `ranks` that stand `stride` apart: by the slowest link it takes."""
        return self.inside if ranks * stride <= GPUS_OF_A_MACHINE else self.outside

    def ring(self, ranks: int, stride: int) -> float:
        """Bytes/s of a gather or a sum over them: what leaves a machine leaves by the adapters of all its ranks there.

        A ring enters and leaves each machine once, so every adapter carries a part of it (NCCL's channels).
        """
        together = max(1, GPUS_OF_A_MACHINE // stride)
        return self.inside if ranks * stride <= GPUS_OF_A_MACHINE else min(self.inside, self.outside * together)


def hardware(gpu: str, network: str) -> Hardware:
    """Nominal numbers of a GPU and a network of the sheet."""
    sheet = _sheet()
    own, reached = sheet["gpus"][gpu], sheet["reached"]
    return Hardware(
        memory=own["memory"],
        products=own["flops"] * reached["products"],
        attention={
            name: (own["flops"] * reached[name][0], own["flops"] * reached[name][1]) for name in ("fused", "flex")
        },
        bandwidth=own["bandwidth"] * reached["bandwidth"],
        inside=own["link"] * reached["link"],
        outside=sheet["networks"][network] * reached["network"],
        host=sheet["host"] * reached["host"],
        latency=reached["latency"],
        peak=own["flops"],
        source=own["source"],
    )
