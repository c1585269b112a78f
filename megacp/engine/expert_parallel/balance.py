"""Balance of experts: two terms beside the loss, and a correction of the choice, all as one process
would have them.

A step has N real tokens, of all ranks and microbatches, known before its first forward. A layer has
E experts, of which a token is given to k. Over documents d and experts e,

    document    a E / (k N) sum of f[d, e] P[d, e] / n[d]    f tokens of e, P sum of probabilities,
    n tokens of d z           z / N sum over tokens of logsumexp(scores)^2 correction  b[e] += g
    sign(sum of c - E c[e])            c tokens of e in the whole step

The ranks of a row sum f, in integers; all else is local. Terms are no part of the loss that goes
through the stages: a layer adds their gradients to those of its scores.
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
    """Both terms `[2]` of `scores[t, E]`, of this rank's tokens. `price[D, E]` is what a
    probability of 1 adds to the first, of a token of each document (None: there is no such term),
    `z` what a squared logsumexp adds to the second.
    """
    first = second = scores.new_zeros(())
    if price is not None:
        first = (score.probabilities(scores) * price.index_select(0, document)).sum()
    if z > 0:
        second = z * scores.logsumexp(-1).square().sum()
    return torch.stack([first, second])


def _gradient(terms: Terms, grad: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor]:
    with torch.enable_grad():
        given = scores.detach().requires_grad_()
        total = terms(given).sum()
    return (grad + torch.autograd.grad(total, given)[0],)


def with_terms(scores: torch.Tensor, terms: Terms | None) -> torch.Tensor:
    """The same scores, to whose gradient that of the terms is added."""
    return (
        scores
        if terms is None
        else FromInputs.apply(torch.Tensor.detach, partial(_gradient, terms), scores)
    )


class LayerBalance(nn.Module):
    """What this rank counts of a layer in a step, and the correction of its choice, which is no
    parameter.
    """

    correction: torch.Tensor | None
    """float32 `[E]`."""

    def __init__(self, prefix: str, config: ModelConfig, backend: NativeBackend) -> None:
        super().__init__()
        self.score, self.topk = SCORES[config.moe_router_score_function], config.moe_router_topk
        wanted = backend.balance
        self.document, self.z, self.axes = wanted.document, wanted.z, wanted.axes
        device = backend.options.device
        self.counts = torch.zeros(config.num_experts, dtype=torch.int64, device=device)
        """Tokens given to each expert."""
        self.terms = torch.zeros(2, dtype=torch.float64, device=device)
        """Sums of the two terms."""
        self.register_buffer("correction", None)
        if self.score.corrected:
            tensor = correction_tensor(config)
            zeros = torch.zeros(tensor.shape, dtype=torch.float32, device=device)
            tensor = dataclasses.replace(tensor, name=f"{prefix}.{tensor.name}")
            self.correction = attach(zeros, parameter_spec([tensor], backend.options))

    def count(self, scores: torch.Tensor, chosen: torch.Tensor, routes: Routes) -> Terms | None:
        """Count a microbatch, and say what it adds to the loss. Collective over tp and the ranks of
        the row.
        """
        experts = scores.shape[1]
        document, lengths = (
            routes.documents if self.document > 0 else (chosen.new_zeros(len(chosen)), None)
        )
        rows = 1 if lengths is None else len(lengths)
        places = (document.unsqueeze(1) * experts + chosen).flatten()  # [t k], into [D, E]
        found = (
            chosen.new_zeros(rows * experts)
            .scatter_add_(0, places, torch.ones_like(places))
            .view(rows, experts)
        )
        self.counts += found.sum(0)
        if self.document == self.z == 0:
            return None
        price = None
        if lengths is not None:
            for axis in self.axes:
                found = all_reduce(found, axis)
            scale = self.document * experts / (self.topk * routes.tokens)
            price = found.to(scores.dtype) / lengths.to(scores.dtype).unsqueeze(1) * scale
        terms = partial(_terms, self.score, document, price, self.z / routes.tokens)
        self.terms += terms(scores)
        return terms


class Balance:
    """That of all layers with experts on this rank, over the ranks of its grid."""

    def __init__(
        self, layers: Sequence[LayerBalance], config: RunConfig, grid: ProcessGrid
    ) -> None:
        self.layers, self.model, self.grid = layers, config.model, grid
        training = config.training
        self.rate = training.moe_router_bias_update_rate
        self.terms = (
            ("balance_loss", training.moe_aux_loss_coeff),
            ("z_loss", training.moe_z_loss_coeff),
        )
        self.corrections = [layer.correction for layer in layers if layer.correction is not None]
        self.counts = torch.empty(0)
        """int64 `[layers, E]`: tokens of each expert in the last step, of all ranks."""

    def settle(self, tokens: int) -> dict[str, float]:
        """Sum what a step of so many tokens has counted, and forget it: its figures, by their names
        in logs. Collective over the world; nothing where nothing was counted.
        """
        if tokens == 0 or self.model.num_experts == 0:
            return {}
        mine = torch.zeros(4, dtype=torch.float64, device=self.grid.device)
        if self.layers:
            counts = torch.stack([layer.counts for layer in self.layers])
            self.counts = all_reduce(all_reduce(counts, self.grid.ep), self.grid.edp)
            given = self.counts.sum(1)
            missing = tokens * self.model.moe_router_topk - given
            mine[:2] = torch.stack([layer.terms for layer in self.layers]).sum(0)
            mine[2] = (self.counts.amax(1).double() * self.model.num_experts / given).max()
            mine[3] = missing.take(missing.abs().argmax())  # an index would wait for the device
            for layer in self.layers:
                layer.counts.zero_()
                layer.terms.zero_()
        table = all_gather(mine.unsqueeze(0), self.grid.world).cpu()  # [world, 4]
        terms = zip(self.terms, table[:, :2].sum(0).tolist(), strict=True)
        load, missing = table[:, 2].max().item(), table[:, 3]
        dropped = missing.take(missing.abs().argmax()).item()
        figures = {name: value for (name, coefficient), value in terms if coefficient > 0}
        return {**figures, "expert_load": load, "dropped": int(dropped)}

    def correct(self) -> None:
        """Move the corrections by the counts of the last step; integers say where to, so all ranks
        do the same.
        """
        for correction, counts in (
            zip(self.corrections, self.counts, strict=True) if self.rate > 0 else ()
        ):
            correction.add_(self.rate * (counts.sum() - len(counts) * counts).sign())

    def slices(self) -> list[ParameterSlice]:
        """The corrections as a checkpoint holds them; one rank of a stage counts them."""
        first = self.grid.tp.rank == self.grid.over("dp", "cp").rank == 0
        return [
            ParameterSlice(dataclasses.replace(spec_of(x), counted=first), tuple(x.shape), 0, x)
            for x in self.corrections
        ]
