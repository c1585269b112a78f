"""Updated parameters on their way to all ranks, while the next step's first layers already compute.

Key property: a part of the model waits for the buckets of its own parameters, right before its forward. Whoever reads
whole parameters in another way waits for all. Rejected: waiting where the parameters are sent, which shows the whole
gather in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from megacp.core.distributed.collectives import Pending


class Arrivals:
    """Gathers under way, by the number of their bucket."""

    def __init__(self) -> None:
        self._under_way: dict[int, Pending] = {}

    def start(self, bucket: int, gather: Pending) -> None:
        """A gather has begun."""
        self._under_way[bucket] = gather

    def wait(self, buckets: Iterable[int]) -> None:
        """Until these have arrived; those that have cost nothing."""
        for bucket in buckets:
            if (gather := self._under_way.pop(bucket, None)) is not None:
                gather.wait()

    def wait_for_all(self) -> None:
        """Until all have arrived."""
        self.wait(list(self._under_way))

    def before_forward(self, parts: Sequence[nn.Module], holding: dict[nn.Parameter, int]) -> None:
        """Let each part wait for its buckets before it runs. `holding` says which bucket has a parameter; one in
        several parts is the first one's.
        """
        seen: set[nn.Parameter] = set()
        for part in parts:
            own = [parameter for parameter in part.parameters() if parameter not in seen]
            seen.update(own)
            buckets = sorted({holding[parameter] for parameter in own if parameter in holding})
            part.register_forward_pre_hook(lambda module, inputs, buckets=buckets: self.wait(buckets))
