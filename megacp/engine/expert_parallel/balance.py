"""Expert load balancing: two auxiliary loss terms, and a correction of the router's choice.

All values are the same as in a single-process run. A step has N tokens across all ranks and
microbatches, without padding; N is known before the first forward pass. A layer routes each token
to k of E experts. For documents d and experts e,

    document term   a E / (k N) * sum over d, e of f[d, e] P[d, e] / n[d]
    z term          z / N * sum over tokens of logsumexp(scores)^2
    correction      b[e] += g * sign(sum of c - E c[e])

where f[d, e] counts the tokens of d routed to e, P[d, e] sums their probabilities, n[d] is the
length of d, and c[e] counts the tokens of e in the whole step. The coefficients are a, z and g.

The ranks that share a row sum f, in integers; everything else is local. The terms are not part of
the loss that the pipeline computes: each layer adds their gradient to the gradient of its scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from megacp.attention.ops.pointwise import FromInputs
from megacp.distributed.collectives import all_gather, all_reduce
from megacp.distributed.grid import ProcessGrid
from megacp.engine.backends.native import NativeBackend
from megacp.engine.config.model import ModelConfig
from megacp.engine.config.run import RunConfig
from megacp.engine.data_parallel.parameter import attach, spec_of
from megacp.engine.data_parallel.shards import ParameterSlice
from megacp.engine.expert_parallel.route import Routes, Terms
from megacp.engine.expert_parallel.router import SCORES, ScoreFunction
from megacp.engine.layers.moe import correction_tensor
from megacp.engine.tensor_parallel.parameters import parameter_spec


def _terms(
    score: ScoreFunction,
    document: torch.Tensor,
    price: torch.Tensor | None,
    z: float,
    scores: torch.Tensor,
) -> torch.Tensor:
    """Return both terms, `[2]`, for the `scores[t, E]` of this rank's tokens.

    `document[t]` is each token's document. `price[D, E]` is the factor of a probability in the
    document term, by document and expert; None disables the term. `z` is the factor of each squared
    logsumexp in the z term.
    """
    first = second = scores.new_zeros(())
    if price is not None:
        prices = price.index_select(0, document)  # [t, E]
        first = (score.probabilities(scores) * prices).sum()
    if z > 0:
        second = z * scores.logsumexp(-1).square().sum()
    return torch.stack([first, second])


def _gradient(terms: Terms, grad: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor]:
    """Return the gradient `grad` of the scores, plus the gradient of the terms."""
    with torch.enable_grad():
        given = scores.detach().requires_grad_()
        total = terms(given).sum()
    (added,) = torch.autograd.grad(total, given)
    return (grad + added,)


def with_terms(scores: torch.Tensor, terms: Terms | None) -> torch.Tensor:
    """Return the scores unchanged; the backward pass adds the gradient of the terms."""
    if terms is None:
        return scores
    return FromInputs.apply(torch.Tensor.detach, partial(_gradient, terms), scores)


class LayerBalance(nn.Module):
    """One layer's token counts on this rank, and the correction of its router's choice.

    The correction is a buffer, not a parameter.
    """

    correction: torch.Tensor | None
    """Values added to the scores before experts are chosen: float32 `[E]`."""

    def __init__(self, prefix: str, config: ModelConfig, backend: NativeBackend) -> None:
        super().__init__()
        self.score = SCORES[config.moe_router_score_function]
        self.topk = config.moe_router_topk
        wanted = backend.balance
        self.document = wanted.document
        self.z = wanted.z
        self.axes = wanted.axes
        device = backend.options.device
        self.counts = torch.zeros(config.num_experts, dtype=torch.int64, device=device)
        """Number of tokens routed to each expert: `[E]`."""
        self.terms = torch.zeros(2, dtype=torch.float64, device=device)
        """Sums of the two loss terms: `[2]`."""
        self.register_buffer("correction", None)
        if self.score.corrected:
            tensor = correction_tensor(config)
            zeros = torch.zeros(tensor.shape, dtype=torch.float32, device=device)
            tensor = dataclasses.replace(tensor, name=f"{prefix}.{tensor.name}")
            self.correction = attach(zeros, parameter_spec([tensor], backend.options))

    def count(self, scores: torch.Tensor, chosen: torch.Tensor, routes: Routes) -> Terms | None:
        """Count a microbatch, and return its auxiliary terms; None if both coefficients are 0.

        `scores[t, E]` and `chosen[t, k]` are for this rank's tokens. Collective over tp and the
        ranks that share the row.
        """
        experts = scores.shape[1]
        if self.document > 0:
            document, lengths = routes.documents  # [t], [D]
            rows = len(lengths)
        else:  # count all tokens as one document
            document = chosen.new_zeros(len(chosen))
            lengths = None
            rows = 1
        # count the tokens of each document and expert
        places = (document.unsqueeze(1) * experts + chosen).flatten()  # [t k], into [D, E]
        found = chosen.new_zeros(rows * experts)
        found = found.scatter_add_(0, places, torch.ones_like(places)).view(rows, experts)
        self.counts += found.sum(0)
        if self.document == self.z == 0:
            return None
        price = None
        if lengths is not None:
            for axis in self.axes:
                found = all_reduce(found, axis)
            scale = self.document * experts / (self.topk * routes.tokens)
            wide_lengths = lengths.to(scores.dtype).unsqueeze(1)  # [D, 1]
            price = found.to(scores.dtype) / wide_lengths * scale  # [D, E]
        terms = partial(_terms, self.score, document, price, self.z / routes.tokens)
        self.terms += terms(scores)
        return terms


class Balance:
    """Load balance of all mixture-of-experts layers on this rank."""

    def __init__(
        self,
        layers: Sequence[LayerBalance],
        config: RunConfig,
        grid: ProcessGrid,
    ) -> None:
        self.layers = layers
        self.model = config.model
        self.grid = grid
        training = config.training
        self.rate = training.moe_router_bias_update_rate
        self.terms = (
            ("balance_loss", training.moe_aux_loss_coeff),
            ("z_loss", training.moe_z_loss_coeff),
        )
        self.corrections = [layer.correction for layer in layers if layer.correction is not None]
        self.counts = torch.empty(0)
        """Number of tokens per expert in the last step, summed over ranks: int64 `[layers, E]`."""

    def settle(self, tokens: int) -> dict[str, float]:
        """Sum the counts of a step with `tokens` tokens over all ranks, and reset them.

        Return figures by their names in the log; an empty dict if nothing was counted. Collective
        over the world.
        """
        if tokens == 0 or self.model.num_experts == 0:
            return {}
        mine = torch.zeros(4, dtype=torch.float64, device=self.grid.device)
        if self.layers:
            counts = torch.stack([layer.counts for layer in self.layers])
            self.counts = all_reduce(all_reduce(counts, self.grid.ep), self.grid.edp)
            given = self.counts.sum(1)  # [layers]
            missing = tokens * self.model.moe_router_topk - given
            mine[:2] = torch.stack([layer.terms for layer in self.layers]).sum(0)
            # the busiest expert's load relative to an even distribution, in the worst layer
            busiest = self.counts.amax(1).double()
            mine[2] = (busiest * self.model.num_experts / given).max()
            mine[3] = missing.take(missing.abs().argmax())  # indexing would wait for the device
            for layer in self.layers:
                layer.counts.zero_()
                layer.terms.zero_()
        table = all_gather(mine.unsqueeze(0), self.grid.world).cpu()  # [world, 4]
        terms = zip(self.terms, table[:, :2].sum(0).tolist(), strict=True)
        load = table[:, 2].max().item()
        missing = table[:, 3]
        dropped = missing.take(missing.abs().argmax()).item()
        figures = {name: value for (name, coefficient), value in terms if coefficient > 0}
        return {**figures, "expert_load": load, "dropped": int(dropped)}

    def correct(self) -> None:
        """Update the corrections based on the counts of the last step.

        The direction is computed from integers, so all ranks make the same update.
        """
        if self.rate <= 0:
            return
        for correction, counts in zip(self.corrections, self.counts, strict=True):
            excess = counts.sum() - len(counts) * counts  # [E], positive for underused experts
            correction.add_(self.rate * excess.sign())

    def slices(self) -> list[ParameterSlice]:
        """Return the corrections as slices for a checkpoint; they count on one rank per stage."""
        first = self.grid.tp.rank == self.grid.over("dp", "cp").rank == 0
        slices = []
        for correction in self.corrections:
            spec = dataclasses.replace(spec_of(correction), counted=first)
            slices.append(ParameterSlice(spec, tuple(correction.shape), 0, correction))
        return slices
