"""Routes: the integer indices with which a layer sends tokens to their experts and back.

A route is computed once per microbatch and layer, and used in every pass. A token has k slots, one
per chosen expert. Slots are sorted by expert, then by token, and sent to the ep rank of their
expert. The receiving rank sorts the rows from all ranks by expert. No row is dropped or padded, so
a rank may receive no rows. Padding tokens have no slots, because each would put load on k experts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.ops.device import HostCopy, to_device
from megacp.distributed.collectives import all_to_all
from megacp.distributed.grid import Axis


class Groups:
    """Row ranges of `n` experts, for rows sorted by expert."""

    def __init__(self, counts: torch.Tensor) -> None:
        self.ends = counts.cumsum(0, dtype=torch.int32)
        """End of each expert's rows: int32 `[n]` on the device."""
        self.experts = len(counts)

    def __getitem__(self, place: slice) -> Groups:
        """Return the groups of the rows `[place.start, place.stop)`."""
        first = self.ends.new_full((1,), place.start)
        # clip each expert's range to the slice; experts outside the slice get empty ranges
        return Groups(self.ends.clamp(place.start, place.stop).diff(prepend=first))

    def spread(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """Return, for each of R = `rows` rows, its expert's values in `x[n a]`: `[R, a]`."""
        places = torch.arange(rows, device=x.device, dtype=self.ends.dtype)
        experts = torch.searchsorted(self.ends, places, right=True)
        return x.unflatten(0, (self.experts, -1)).index_select(0, experts)

    @functools.cached_property
    def counts(self) -> list[int]:
        """Number of rows per expert; the first access makes the host wait for the device."""
        return self.ends.diff(prepend=self.ends.new_zeros(1)).tolist()


class Route:
    """The route of this rank's `t` tokens, and of the `R` rows that its experts receive.

    Construction is collective over `axis`. With one ep rank, the host never waits. With several, it
    waits at the first access to `sent` or `received`, so work launched earlier overlaps.
    """

    def __init__(
        self,
        chosen: torch.Tensor,
        places: torch.Tensor,
        experts: int,
        axis: Axis,
    ) -> None:
        self.axis = axis
        self.chosen = chosen
        """Experts of each token, sorted by index: int64 `[t, k]`."""
        self.places = places
        """Indices of the tokens among this rank's tokens including padding: int64 `[t]`."""
        sorted_slots, self.order = chosen.flatten().sort(stable=True)
        """Slots sorted by expert, then by token: int64 `[t k]`."""
        self.slots = self.order.argsort()
        """Inverse permutation of `order`."""
        # count the rows per expert with searchsorted, because bincount would wait for the device
        all_experts = torch.arange(experts, device=chosen.device)
        ends = torch.searchsorted(sorted_slots, all_experts, right=True)
        counts = ends.diff(prepend=ends.new_zeros(1))  # [E]
        # [ep, n]: number of rows that each source rank sends to each expert of this rank
        self._found = all_to_all(counts, axis).view(axis.size, -1)
        self.groups = Groups(self._found.sum(0))
        """Row ranges of this rank's experts."""
        to_ranks = counts.view(axis.size, -1).sum(1)  # [ep]
        from_ranks = self._found.sum(1)  # [ep]
        self._rows = HostCopy(torch.stack([to_ranks, from_ranks]))

    @property
    def sent(self) -> list[int]:
        """Number of rows sent to each ep rank."""
        return self._rows.values[0].tolist()

    @property
    def received(self) -> list[int]:
        """Number of rows received from each ep rank; the sum is `R`."""
        return self._rows.values[1].tolist()

    @functools.cached_property
    def arrived(self) -> torch.Tensor:
        """Permutation int64 `[R]` that sorts the received rows by expert, source and token."""
        experts = torch.arange(self.groups.experts, device=self._found.device)
        expert = experts.repeat(self.axis.size)  # rows arrive by source, then by expert
        # output_size saves the host from waiting for the sum
        arrived = expert.repeat_interleave(self._found.flatten(), output_size=sum(self.received))
        return arrived.argsort(stable=True)

    @functools.cached_property
    def leaving(self) -> torch.Tensor:
        """Inverse permutation of `arrived`."""
        return self.arrived.argsort()

    def spread(self, slots: torch.Tensor) -> torch.Tensor:
        """Send slots `[t k, ...]`, sorted by expert and token, to their experts.

        Return the rows `[R, ...]` of this rank's experts. Collective over `axis`.
        """
        if self.axis.size == 1:
            return slots
        return all_to_all(slots, self.axis, self.sent, self.received).index_select(0, self.arrived)

    def collect(self, rows: torch.Tensor) -> torch.Tensor:
        """Send rows `[R, ...]` back to their tokens: the inverse of `spread`."""
        if self.axis.size == 1:
            return rows
        return all_to_all(rows.index_select(0, self.leaving), self.axis, self.received, self.sent)


class PlannedRoute(Route):
    """A route for a dry run on tensors without values.

    This rank's experts receive as many rows as planned for the busiest rank.
    """

    load = 1.0
    """Number of rows for this rank's experts relative to an even distribution; at least 1."""

    @property
    def sent(self) -> list[int]:
        slots = self.chosen.numel()
        ranks = self.axis.size
        here = min(slots, math.ceil(slots * self.load / ranks))
        # the other ranks share the remaining slots as evenly as possible
        each, more = divmod(slots - here, max(1, ranks - 1))
        counts = [each + 1] * more + [each] * (ranks - 1 - more)
        counts.insert(self.axis.rank, here)
        return counts

    @property
    def received(self) -> list[int]:
        return [self.sent[self.axis.rank]] * self.axis.size

    @classmethod
    def of_load(cls, load: float) -> type[Route]:
        """Return a subclass whose routes have the given load."""
        return type("PlannedRoute", (cls,), {"load": load})


Terms = Callable[[torch.Tensor], torch.Tensor]
"""Function from expert scores `[t, E]` to the two auxiliary loss terms `[2]`."""


@dataclass(frozen=True)
class Routes:
    """The routes of all layers in one microbatch, and the data that they share.

    Activation recomputation reuses a layer's route, so it sends every token to the same experts.
    """

    plan: AttentionPlan
    here: np.ndarray
    """This rank's tokens in the row, without padding: int64 `[t]`."""
    places: torch.Tensor
    """Indices of these tokens, as in `Route.places`."""
    tokens: int = 0
    """Number of tokens in the whole step, without padding; 0, as in evaluation, disables counting.
    """
    by_layer: dict[int, Route] = field(default_factory=dict)
    terms: dict[int, Terms | None] = field(default_factory=dict)
    """Auxiliary loss terms by layer, computed together with the route."""
    make: type[Route] = Route
    """Class of the routes to create."""

    @classmethod
    def of(cls, plan: AttentionPlan, tp: Axis, device: torch.device, tokens: int = 0) -> Routes:
        """Return routes, initially empty, for this rank's tokens (a tp slice of `plan.local`)."""
        held = plan.local.reshape(tp.size, -1)[tp.rank]
        places = np.flatnonzero(plan.metadata.leave[held] > 0)  # padding has leave = 0
        return cls(plan, held[places], to_device(places, device), tokens)

    @functools.cached_property
    def documents(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Document number of each local token, int64 `[t]`, and document lengths, `[D]`."""
        number = self.plan.metadata.document
        device = self.places.device
        lengths = np.bincount(number[number >= 0], minlength=1)
        return to_device(number[self.here], device), to_device(lengths, device)
