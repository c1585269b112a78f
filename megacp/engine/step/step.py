"""One optimizer step, or one validation batch, on any grid: plan, shard, run the pipeline, reduce,
update.

The same lines run on one process and on 4D grids; the grid decides what the objects hold.
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
from megacp.distributed.grid import ProcessGrid, connect
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
"""(loss, gradient norm) of a step, equal on all ranks -> what becomes of it."""

Row = PackedBatch | PlannedRow
"""A microbatch; one without a plan is planned where its step begins."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; equal on all ranks."""

    loss: float
    grad_norm: float
    lr: float
    decision: Decision
    """What became of it, and why."""
    suspects: str = ""
    """The packs of a step with findings."""
    experts: Mapping[str, float] = field(default_factory=dict)
    """Figures of `Balance.settle`."""


class ParallelModel:
    """This rank's share of the model, its gradients and its optimizer, and how to step them."""

    def __init__(
        self, config: RunConfig, grid: ProcessGrid, phase: Phase = unmeasured, drawn: Drawn = ALL
    ) -> None:
        training, parallel = config.training, config.parallel
        self.config = config
        self.grid = grid
        self.is_new = True
        """No step was trained in this process yet."""
        self.phase = phase
        self.chunks, self.parameters = build_sharded(config, grid, drawn)
        self.backend = self.chunks[0].backend
        self.optimizer = ShardedOptimizer(
            self.parameters, training, grid.world, grid.device, self.backend.adamw
        )
        balanced = [
            m for chunk in self.chunks for m in chunk.modules() if isinstance(m, LayerBalance)
        ]
        self.balance = Balance(balanced, config, grid)
        self.rows = rows_of(config, grid)
        self.layout = LAYOUTS[parallel.cp_layout]
        self.mix = mix_of(config.model)
        self.sharded_tokens = grid.tp.size if parallel.sequence_parallel else 1
        width = config.model.hidden_size
        self.first_trained = first_trained_stage(config, grid.world.size)
        """The first virtual stage with something to train."""
        self.hidden = HiddenStates(
            lambda batch: (batch.num_tokens // self.sharded_tokens, width), self.backend.dtype
        )
        open_channels(grid, len(self.chunks))
        connect(
            [part for axis in grid.all_axes() for pair in axis.parts.values() for part in pair],
            grid.device,
        )

    def plan(self, batch: PackedBatch) -> PlannedRow:
        """What a microbatch asks of this rank, worked out on the host; called from the loader's
        threads.
        """
        self._refuse_foreign_ids(batch)
        share = shard_batch(
            batch,
            self.rows.axis,
            self.layout,
            tp=self.sharded_tokens * self.backend.token_multiple,
            mix=self.mix,
        )
        for reach in self.mix:
            self.backend.prepare(share.plan.within(reach))
        self.backend.prepare_states(share.plan)
        if share.vision is not None:
            vision = share.vision.packed_for(self.grid.device, self.backend.dtype)
            if self.chunks[0].vision is not None:
                self.chunks[0].vision.tower.prepare(vision.grids)
            share = dataclasses.replace(share, vision=vision)
        return PlannedRow(batch, share.pinned_for(self.grid.device))

    def shard(self, row: Row, step: int) -> LocalBatch:
        """This rank's share of a microbatch on its device."""
        return self._moved(self._planned(row).share, step)

    def _planned(self, row: Row) -> PlannedRow:
        return row if isinstance(row, PlannedRow) else self.plan(row)

    def _moved(self, share: LocalBatch, step: int) -> LocalBatch:
        """The share on its device, with a dropout key of seed and step, not of ranks; `token_names`
        name the packs.
        """
        text = f"{self.config.training.seed}/{step}"
        key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        return share.to(self.grid.device, key)

    def _refuse_foreign_ids(self, batch: PackedBatch) -> None:
        """An id outside the tables would be looked up on no tp rank and silently become a zero
        row.
        """
        model = self.config.model
        counted = batch.labels[batch.loss_weights > 0]  # others are 0, or ids that nothing looks up
        for name, ids, rows in (
            ("token", batch.tokens, model.embedding_rows),
            ("label", counted, model.vocab_size),
        ):
            if len(ids) and ids.max() >= rows:
                raise ValueError(
                    f"packs {batch.pack_ids} hold the {name} id {ids.max()}, the model's table has "
                    f"{rows} rows: "
                    "was --data-path built for another --vocab-size?"
                )

    def train(
        self,
        rows: Sequence[Row],
        step: int,
        denominator: float,
        tokens: int,
        check: Check = finite_only,
    ) -> StepResult:
        """One update from this data-parallel rank's microbatches, if `check` lets it be; `step`
        counts from 1.

        `tokens` of the whole step, without padding: terms of balance are divided by them.
        """
        losses = self._pipeline(rows, step, denominator, True, tokens)()
        self.is_new = False
        with self.phase("gradient exchange"):
            self.parameters.finish()
        loss, experts = self._total(losses), self.balance.settle(tokens)
        norm = self.optimizer.grad_norm(self.phase)
        lr = learning_rate(step, self.config.training)
        decision = check(loss, norm)  # from numbers that all ranks hold: all decide alike
        if decision.update:
            self.optimizer.update(lr, norm, self.phase)
            self.balance.correct()
        self.parameters.zero()
        packs = [row.pack_ids for row in rows]
        named = (
            suspects(packs, losses, decision.finite, self.grid.world) if decision.findings else ""
        )
        return StepResult(loss, norm, lr, decision, named, experts)

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Row], denominator: float) -> float:
        """The loss of a validation batch: the same sum over the same kind of denominator, nothing
        updated.

        Dropout is off: chunks are switched to evaluation and back.
        """
        for chunk in self.chunks:
            chunk.eval()
        losses = self._pipeline(rows, 0, denominator, False)()
        self.parameters.release()
        for chunk in self.chunks:
            chunk.train()
        return self._total(losses)

    def gradients(
        self, rows: Sequence[Row], step: int, denominator: float, tokens: int = 0
    ) -> float:
        """Loss and summed gradients without an update; `parameters.grad_shard` is valid until
        `parameters.zero`, and what `balance` has counted until `Balance.settle`. Without `tokens`
        it counts nothing and has no term.
        """
        losses = self._pipeline(rows, step, denominator, True, tokens)()
        self.parameters.finish()
        return self._total(losses)

    def _pipeline(
        self, rows: Sequence[Row], step: int, denominator: float, training: bool, tokens: int = 0
    ) -> Callable[[], list[torch.Tensor]]:
        """`runtime.run` over these rows, ready to be called."""
        with self.phase("shard"):
            shares = [self._planned(row).share for row in rows]
        name: str = self.config.parallel.pipeline_schedule if training else "forward_only"
        if training and self.is_new and len(self.chunks) > 1 and self.grid.device.type == "cuda":
            name = f"first {name}"
        sizes = self.grid.pp.size, len(shares), len(self.chunks)
        actions = schedule(name, self.grid.pp.rank, *sizes, first_trained=self.first_trained)
        chunks: list[ModelChunk] = [
            partial(chunk, denominator=denominator, tokens=tokens) for chunk in self.chunks
        ]
        if self.parameters.by_schedule:  # full shards: the list gathers and frees parameters too
            actions = with_parameters(actions)
        deferred = self.backend.deferred if training else None
        hidden = dataclasses.replace(self.hidden, move=partial(self._moved, step=step))
        return partial(
            run, actions, chunks, shares, self.grid, hidden, self.parameters, self.phase, deferred
        )

    def _total(self, losses: Sequence[torch.Tensor]) -> float:
        """Sum of all microbatch losses over dp and cp, on every rank."""
        counted = self.grid.tp.rank == 0  # tp ranks hold the same loss; other stages hold none
        mine = sum(loss.item() for loss in losses) if counted else 0.0
        return all_reduce(
            torch.tensor([mine], dtype=torch.float64, device=self.grid.device), self.grid.world
        ).item()
