"""The way of a layer's tokens to their experts and back, in integers: found once a microbatch, used in every pass.

A token has k slots, one for each of its experts. Slots are sorted by expert, then token, and go to the ep rank of their
expert. What has come from all ranks is sorted by expert again. No row is dropped, and none is added: a rank may get
none. Padding has no slots, it would load k experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.distributed.collectives import all_to_all
from megacp.core.distributed.grid import Axis
from megacp.core.ops.device import to_device


@dataclass(frozen=True)
class Route:
    """The way of `t` tokens of this rank, and of the `R` rows that its experts are given."""

    axis: Axis
    chosen: torch.Tensor
    """int64 `[t, k]`: the experts of each token, in order of their numbers."""
    places: torch.Tensor
    """int64 `[t]`: where the tokens stand among those of the rank, padding included."""
    order: torch.Tensor
    """int64 `[t k]`: slots by expert, then token."""
    slots: torch.Tensor
    """The inverse of `order`."""
    sent: list[int]
    """Rows to each ep rank."""
    received: list[int]
    """Rows from each."""
    counts: list[int]
    """Rows of each expert of this rank; their sum is `R`."""
    arrived: torch.Tensor | None
    """int64 `[R]`: rows as they came, by expert, source and token; None on one ep rank."""
    leaving: torch.Tensor | None
    """The inverse of `arrived`."""

    @classmethod
    def of(cls, chosen: torch.Tensor, places: torch.Tensor, experts: int, axis: Axis) -> Route:
        """The route of chosen experts; the ranks of `axis` call it together, and wait for the device once."""
        sorted_slots, order = chosen.flatten().sort(stable=True)
        # bincount would wait for the device
        ends = torch.searchsorted(sorted_slots, torch.arange(experts, device=chosen.device), right=True)
        counts = ends.diff(prepend=ends.new_zeros(1))  # [E]
        found = all_to_all(counts, axis)  # rows of every source for each expert here
        both = torch.stack([counts, found]).tolist()
        sent, received = (np.reshape(numbers, (axis.size, -1)) for numbers in both)  # [ep, n]
        own = received.sum(0).tolist()
        arrived = leaving = None
        if axis.size > 1:
            expert = torch.arange(len(own), device=found.device).repeat(axis.size)
            arrived = expert.repeat_interleave(found, output_size=sum(own)).argsort(stable=True)
            leaving = arrived.argsort()
        splits = sent.sum(1).tolist(), received.sum(1).tolist()
        return cls(axis, chosen, places, order, order.argsort(), *splits, own, arrived, leaving)

    def spread(self, slots: torch.Tensor) -> torch.Tensor:
        """What stands by expert and token here, `[t k, ...]`, to the rows `[R, ...]` of this rank's experts."""
        if self.arrived is None:
            return slots
        return all_to_all(slots, self.axis, self.sent, self.received).index_select(0, self.arrived)

    def collect(self, rows: torch.Tensor) -> torch.Tensor:
        """The way back of `spread`."""
        if self.leaving is None:
            return rows
        return all_to_all(rows.index_select(0, self.leaving), self.axis, self.received, self.sent)


@dataclass(frozen=True)
class Routes:
    """What the layers of a microbatch share, and the route of each: a layer that is computed again takes the same,
    so it gives every token to the same experts.
    """

    plan: AttentionPlan
    here: np.ndarray
    """int64 `[t]`: this rank's tokens in the row, without padding."""
    places: torch.Tensor
    """Where they stand, as `Route.places`."""
    tokens: int = 0
    """Those of the whole step, without padding; 0: nothing is counted, as in evaluation."""
    by_layer: dict[int, Route] = field(default_factory=dict)
    terms: dict[int, Any] = field(default_factory=dict)
    """What balance adds to the loss, by layer; found with the route."""

    @classmethod
    def of(cls, plan: AttentionPlan, tp: Axis, device: torch.device, tokens: int = 0) -> Routes:
        """Routes, none found yet, of this rank's tokens, of which each of `tp` has a part."""
        held = plan.local.reshape(tp.size, -1)[tp.rank]
        places = np.flatnonzero(plan.metadata.leave[held] > 0)
        return cls(plan, held[places], to_device(places, device), tokens)

    @cached_property
    def documents(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The document of each token here, int64 `[t]`, and the tokens of each of the row's documents `[D]`."""
        number, device = self.plan.metadata.document, self.places.device
        lengths = np.bincount(number[number >= 0], minlength=1)
        return to_device(number[self.here], device), to_device(lengths, device)
