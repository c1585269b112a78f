"""An optimizer step or a validation batch: plan, shard, run the pipeline, reduce, update.

The same code runs in a single process and on 4D grids; the grid only determines each rank's share.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from megacp.attention.context_parallel.layout import LAYOUTS
from megacp.distributed.collectives import all_reduce
from megacp.distributed.grid import Axis, ProcessGrid, connect
from megacp.engine.config.run import RunConfig
from megacp.engine.expert_parallel.balance import Balance, LayerBalance
from megacp.engine.models.build import build_sharded
from megacp.engine.models.costs import first_trained_stage
from megacp.engine.models.init import ALL, Drawn
from megacp.engine.optim.lr_schedule import learning_rate
from megacp.engine.optim.sharded import ShardedOptimizer
from megacp.engine.pipeline_parallel.runtime import HiddenStates, ModelChunk, open_channels, run
from megacp.engine.pipeline_parallel.schedules import schedule, with_parameters
from megacp.engine.rows.batch import PackedBatch
from megacp.engine.rows.mix import mix_of
from megacp.engine.rows.shard import LocalBatch, shard_batch
from megacp.engine.step.decision import Decision, finite_only, suspects
from megacp.engine.step.rows import PlannedRow, rows_of
from megacp.engine.timers import Phase, unmeasured

Check = Callable[[float, float], Decision]
"""Function from a step's loss and gradient norm, which are equal on all ranks, to a decision."""

Row = PackedBatch | PlannedRow
"""A microbatch with or without a plan. A missing plan is computed at the start of the step."""


@dataclass(frozen=True)
class StepResult:
    """Result of an optimizer step, the same on all ranks."""

    loss: float
    grad_norm: float
    lr: float
    decision: Decision
    """Whether the step was applied, and why not."""
    suspects: str = ""
    """Sentence about the step's packs if there are findings."""
    experts: Mapping[str, float] = field(default_factory=dict)
    """Expert-load statistics from `Balance.settle`."""


class ParallelModel:
    """This rank's share of the model, its gradients and its optimizer."""

    def __init__(
        self, config: RunConfig, grid: ProcessGrid, phase: Phase = unmeasured, drawn: Drawn = ALL
    ) -> None:
        training = config.training
        parallel = config.parallel
        self.config = config
        self.grid = grid
        self.is_new = True
        """Whether this process has not completed a training step yet."""
        self.phase = phase
        self.chunks, self.parameters = build_sharded(config, grid, drawn)
        # all chunks of a rank share one backend
        self.backend = self.chunks[0].backend
        self.optimizer = ShardedOptimizer(
            self.parameters, training, grid.world, grid.device, self.backend.adamw
        )
        balanced: list[LayerBalance] = []
        for chunk in self.chunks:
            balanced += [m for m in chunk.modules() if isinstance(m, LayerBalance)]
        self.balance = Balance(balanced, config, grid)
        self.rows = rows_of(config, grid)
        self.layout = LAYOUTS[parallel.cp_layout]
        self.mix = mix_of(config.model)
        # number of tp ranks that share the tokens of a row between two layers
        self.sharded_tokens = grid.tp.size if parallel.sequence_parallel else 1
        width = config.model.hidden_size
        self.first_trained = first_trained_stage(config, grid.world.size)
        """First virtual stage with trained parameters."""
        # stages exchange hidden states [t/tp, h] in the model's dtype
        self.hidden = HiddenStates(
            lambda batch: (batch.num_tokens // self.sharded_tokens, width), self.backend.dtype
        )
        # create all communicators now, because creating them inside a step could deadlock
        open_channels(grid, len(self.chunks))
        parts: list[Axis] = []
        for axis in grid.all_axes():
            for pair in axis.parts.values():
                parts += pair
        connect(parts, grid.device)

    def plan(self, batch: PackedBatch) -> PlannedRow:
        """Return this rank's share of a microbatch, with everything that the host can precompute.

        Data loader threads call this method. Raise ValueError if token ids are outside the tables.
        """
        self._refuse_foreign_ids(batch)
        share = shard_batch(
            batch,
            self.rows.axis,
            self.layout,
            tp=self.sharded_tokens * self.backend.token_multiple,
            mix=self.mix,
        )
        # layers with different attention ranges need different attention plans
        for reach in self.mix:
            self.backend.prepare(share.plan.within(reach))
        self.backend.prepare_states(share.plan)
        # convert pixels and precompute the tower's tables here, outside the step
        if share.vision is not None:
            vision = share.vision.packed_for(self.grid.device, self.backend.dtype)
            if self.chunks[0].vision is not None:
                self.chunks[0].vision.tower.prepare(vision.grids)
            share = dataclasses.replace(share, vision=vision)
        return PlannedRow(batch, share.pinned_for(self.grid.device))

    def shard(self, row: Row, step: int) -> LocalBatch:
        """Return this rank's share of a microbatch on its device."""
        return self._moved(self._planned(row).share, step)

    def _planned(self, row: Row) -> PlannedRow:
        return row if isinstance(row, PlannedRow) else self.plan(row)

    def _moved(self, share: LocalBatch, step: int) -> LocalBatch:
        """Return the share on its device, with the step's dropout key.

        The key depends on seed and step but not on ranks; `token_names` distinguish the packs.
        """
        text = f"{self.config.training.seed}/{step}"
        # hash the text so that the keys of consecutive steps are unrelated
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return share.to(self.grid.device, int.from_bytes(digest, "little"))

    def _refuse_foreign_ids(self, batch: PackedBatch) -> None:
        """Raise ValueError if ids are outside the tables.

        No tp rank has a row for these ids, so they would silently become rows of zeros.
        """
        model = self.config.model
        counted = batch.labels[batch.loss_weights > 0]  # other labels are never looked up
        tables = (
            ("token", batch.tokens, model.embedding_rows),
            ("label", counted, model.vocab_size),
        )
        for name, ids, rows in tables:
            if len(ids) and ids.max() >= rows:
                raise ValueError(
                    f"packs {batch.pack_ids} contain the {name} id {ids.max()}, but the model's "
                    f"table has only {rows} rows: check that --data-path and --vocab-size are for "
                    "the same tokenizer"
                )

    def train(
        self,
        rows: Sequence[Row],
        step: int,
        denominator: float,
        tokens: int,
        check: Check = finite_only,
    ) -> StepResult:
        """Run one step on this data-parallel rank's microbatches, and update if `check` allows it.

        `step` counts from 1. The loss is divided by `denominator`, and load-balancing terms by
        `tokens`, the number of tokens in the whole step without padding.
        """
        losses = self._pipeline(rows, step, denominator, True, tokens)()
        # all kernels are compiled and loaded now
        self.is_new = False
        with self.phase("gradient exchange"):
            self.parameters.finish()
        loss = self._total(losses)
        experts = self.balance.settle(tokens)
        norm = self.optimizer.grad_norm(self.phase)
        lr = learning_rate(step, self.config.training)
        # all ranks have the same numbers, so they make the same decision
        decision = check(loss, norm)
        if decision.update:
            self.optimizer.update(lr, norm, self.phase)
            self.balance.correct()
        self.parameters.zero()
        named = ""
        if decision.findings:
            packs = [row.pack_ids for row in rows]
            named = suspects(packs, losses, decision.finite, self.grid.world)
        return StepResult(loss, norm, lr, decision, named, experts)

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Row], denominator: float) -> float:
        """Return the loss of a validation batch, with the same formula as in training.

        Nothing is updated. The chunks are in evaluation mode during the call, so dropout is off.
        """
        for chunk in self.chunks:
            chunk.eval()
        losses = self._pipeline(rows, 0, denominator, False)()
        # without a backward pass, full sharding would keep the last parts gathered
        self.parameters.release()
        for chunk in self.chunks:
            chunk.train()
        return self._total(losses)

    def gradients(
        self, rows: Sequence[Row], step: int, denominator: float, tokens: int = 0
    ) -> float:
        """Return the loss, and compute summed gradients without updating parameters.

        `parameters.grad_shard` is valid until `parameters.zero`, and the counts in `balance` until
        `Balance.settle`. Without `tokens`, there are no counts and no load-balancing terms.
        """
        losses = self._pipeline(rows, step, denominator, True, tokens)()
        self.parameters.finish()
        return self._total(losses)

    def _pipeline(
        self, rows: Sequence[Row], step: int, denominator: float, training: bool, tokens: int = 0
    ) -> Callable[[], list[torch.Tensor]]:
        """Return `runtime.run` bound to these rows."""
        with self.phase("shard"):
            shares = [self._planned(row).share for row in rows]
        name: str = self.config.parallel.pipeline_schedule if training else "forward_only"
        # interleaved stages could deadlock while kernels compile in the first step (runtime.py)
        if training and self.is_new and len(self.chunks) > 1 and self.grid.device.type == "cuda":
            name = f"first {name}"
        # stages, microbatches and chunks determine this stage's list of actions
        sizes = self.grid.pp.size, len(shares), len(self.chunks)
        actions = schedule(name, self.grid.pp.rank, *sizes, first_trained=self.first_trained)
        chunks: list[ModelChunk] = [
            partial(chunk, denominator=denominator, tokens=tokens) for chunk in self.chunks
        ]
        if self.parameters.by_schedule:  # with full sharding, the list also gathers parameters
            actions = with_parameters(actions)
        deferred = self.backend.deferred if training else None
        # batches are moved to the device with this step's dropout key
        hidden = dataclasses.replace(self.hidden, move=partial(self._moved, step=step))
        return partial(
            run, actions, chunks, shares, self.grid, hidden, self.parameters, self.phase, deferred
        )

    def _total(self, losses: Sequence[torch.Tensor]) -> float:
        """Return the sum of all microbatch losses over dp and cp, on every rank."""
        mine = 0.0
        if self.grid.tp.rank == 0:  # tp ranks have the same loss; other stages have none
            mine = sum(loss.item() for loss in losses)
        total = torch.tensor([mine], dtype=torch.float64, device=self.grid.device)
        return all_reduce(total, self.grid.world).item()
