"""The way of a layer's tokens to their experts and back, in integers: found once a microbatch, used
in every pass.

A token has k slots, one for each of its experts. Slots are sorted by expert, then token, and go to
the ep rank of their expert. What has come from all ranks is sorted by expert again. No row is
dropped, and none is added: a rank may get none. Padding has no slots, it would load k experts.
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
    """Rows that are sorted by expert."""

    def __init__(self, counts: torch.Tensor) -> None:
        self.ends = counts.cumsum(0, dtype=torch.int32)
        """int32 `[n]`, on the device: where the rows of each expert end."""
        self.experts = len(counts)

    def __getitem__(self, place: slice) -> Groups:
        """Those of some rows, likewise."""
        first = self.ends.new_full((1,), place.start)
        return Groups(self.ends.clamp(place.start, place.stop).diff(prepend=first))

    def spread(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """`[n a]`, of each expert, to `[R, a]`, of each row."""
        places = torch.arange(rows, device=x.device, dtype=self.ends.dtype)
        experts = torch.searchsorted(self.ends, places, right=True)
        return x.unflatten(0, (self.experts, -1)).index_select(0, experts)

    @functools.cached_property
    def counts(self) -> list[int]:
        """Rows of each expert; the host waits for the device."""
        return self.ends.diff(prepend=self.ends.new_zeros(1)).tolist()


class Route:
    """The way of `t` tokens of this rank, and of the `R` rows that its experts are given. The ranks
    of `axis` build it together.

    On one ep rank the host waits for nothing; on several when `sent` is first asked for, so what is
    launched before is done meanwhile.
    """

    def __init__(
        self, chosen: torch.Tensor, places: torch.Tensor, experts: int, axis: Axis
    ) -> None:
        self.axis = axis
        self.chosen = chosen
        """int64 `[t, k]`: the experts of each token, in order of their numbers."""
        self.places = places
        """int64 `[t]`: where the tokens stand among those of the rank, padding included."""
        sorted_slots, self.order = chosen.flatten().sort(stable=True)
        """int64 `[t k]`: slots by expert, then token."""
        self.slots = self.order.argsort()
        """The inverse of `order`."""
        # bincount would wait for the device
        ends = torch.searchsorted(
            sorted_slots, torch.arange(experts, device=chosen.device), right=True
        )
        counts = ends.diff(prepend=ends.new_zeros(1))  # [E]
        self._found = all_to_all(counts, axis).view(
            axis.size, -1
        )  # [ep, n]: rows of every source for each expert here
        self.groups = Groups(self._found.sum(0))
        """The rows of this rank's experts."""
        rows = torch.stack([counts.view(axis.size, -1).sum(1), self._found.sum(1)])
        self._rows = HostCopy(rows)

    @property
    def sent(self) -> list[int]:
        """Rows to each ep rank."""
        return self._rows.values[0].tolist()

    @property
    def received(self) -> list[int]:
        """Rows from each; their sum is `R`."""
        return self._rows.values[1].tolist()

    @functools.cached_property
    def arrived(self) -> torch.Tensor:
        """int64 `[R]`: rows as they came, by expert, source and token."""
        expert = torch.arange(self.groups.experts, device=self._found.device).repeat(self.axis.size)
        arrived = expert.repeat_interleave(self._found.flatten(), output_size=sum(self.received))
        return arrived.argsort(stable=True)

    @functools.cached_property
    def leaving(self) -> torch.Tensor:
        """The inverse of `arrived`."""
        return self.arrived.argsort()

    def spread(self, slots: torch.Tensor) -> torch.Tensor:
        """What stands by expert and token here, `[t k, ...]`, to the rows `[R, ...]` of this rank's
        experts.
        """
        if self.axis.size == 1:
            return slots
        return all_to_all(slots, self.axis, self.sent, self.received).index_select(0, self.arrived)

    def collect(self, rows: torch.Tensor) -> torch.Tensor:
        """The way back of `spread`."""
        if self.axis.size == 1:
            return rows
        return all_to_all(rows.index_select(0, self.leaving), self.axis, self.received, self.sent)


class PlannedRoute(Route):
    """A route on tensors without numbers: this rank's experts get the share of rows that is planned
    for the busiest.
    """

    load = 1.0
    """Rows of this rank's experts over those of an even load; at least 1."""

    @property
    def sent(self) -> list[int]:
        slots, ranks = self.chosen.numel(), self.axis.size
        here = min(slots, math.ceil(slots * self.load / ranks))
        each, more = divmod(slots - here, max(1, ranks - 1))
        counts = [each + 1] * more + [each] * (ranks - 1 - more)
        counts.insert(self.axis.rank, here)
        return counts

    @property
    def received(self) -> list[int]:
        return [self.sent[self.axis.rank]] * self.axis.size

    @classmethod
    def of_load(cls, load: float) -> type[Route]:
        """Return the class of routes with this load."""
        return type("PlannedRoute", (cls,), {"load": load})


Terms = Callable[[torch.Tensor], torch.Tensor]
"""Scores of experts `[t, E]` to what stands beside the loss, `[2]`."""


@dataclass(frozen=True)
class Routes:
    """What the layers of a microbatch share, and the route of each: a layer that is computed again
    takes the same, so it gives every token to the same experts.
    """

    plan: AttentionPlan
    here: np.ndarray
    """int64 `[t]`: this rank's tokens in the row, without padding."""
    places: torch.Tensor
    """Where they stand, as `Route.places`."""
    tokens: int = 0
    """Those of the whole step, without padding; 0: nothing is counted, as in evaluation."""
    by_layer: dict[int, Route] = field(default_factory=dict)
    terms: dict[int, Terms | None] = field(default_factory=dict)
    """What balance adds to the loss, by layer; found with the route."""
    make: type[Route] = Route
    """What makes a route."""

    @classmethod
    def of(cls, plan: AttentionPlan, tp: Axis, device: torch.device, tokens: int = 0) -> Routes:
        """Routes, none found yet, of this rank's tokens, of which each of `tp` has a part."""
        held = plan.local.reshape(tp.size, -1)[tp.rank]
        places = np.flatnonzero(plan.metadata.leave[held] > 0)
        return cls(plan, held[places], to_device(places, device), tokens)

    @functools.cached_property
    def documents(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The document of each token here, int64 `[t]`, and the tokens of each of the row's
        documents `[D]`.
        """
        number, device = self.plan.metadata.document, self.places.device
        lengths = np.bincount(number[number >= 0], minlength=1)
        return to_device(number[self.here], device), to_device(lengths, device)
