"""Answers from a checkpoint on one process: load whole tensors by global name, continue prompts
token by token.

The model's class is that of training, on a grid of one rank. Prompts are documents of one row, and
their images are encoded once. The text of the row is computed again for every token, which is
enough to look at a model and too slow to serve it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megacp.attention.context_parallel.layout import CONTIGUOUS
from megacp.distributed.grid import build_grid
from megacp.distributed.shape import GridShape
from megacp.engine.config.parallel import ParallelConfig
from megacp.engine.config.run import ON_CPU, RunConfig, Value, with_values
from megacp.engine.data_parallel.parameter import spec_of
from megacp.engine.models.build import build_chunks
from megacp.engine.models.language import LanguageModelChunk
from megacp.engine.rows.batch import PackedBatch
from megacp.engine.rows.shard import shard_batch
from megacp.engine.rows.vision import PatchGrids
from megacp.huggingface.generation.prompt import Prompt, prompt_grids, prompt_pixels, prompt_row
from megacp.training.checkpoint.commit import load_checkpoint
from megacp.training.data.vision.decoding import rules_from_dict
from megacp.training.data.vision.rules import VisionRules
from megacp.training.loop.state import stored_state
from megacp.training.loop.stored import stored_config

_ONE_PROCESS: dict[str, Value] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "num_virtual_stages_per_pipeline_rank": 1,
    "pipeline_schedule": ParallelConfig().pipeline_schedule,
    "dynamic_context_parallel": False,
    "cp_layout": CONTIGUOUS.name,
    "load": None,
    **ON_CPU,
}


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and when an answer ends."""

    count: int
    """New tokens of an answer at most."""
    temperature: float = 0.0
    """0 takes the likeliest token."""
    seed: int = 0
    """Answer number i of a call draws from seed + i, however prompts share rows."""
    ends: tuple[int, ...] = ()
    """The tokens that end an answer; the one that does is part of it."""


class Generator:
    """A model read from a checkpoint that any grid wrote."""

    def __init__(self, checkpoint: str | Path) -> None:
        """Load the newest whole checkpoint below `checkpoint`, or that step. Raises ValueError when
        there is none.
        """
        self.grid = build_grid(GridShape(), 0)
        loaded = load_checkpoint(checkpoint, self.grid.world)
        self.path, self.step, self.progress = loaded.path, loaded.step, stored_state(loaded)
        self.config: RunConfig = with_values(stored_config(loaded), _ONE_PROCESS)
        self.model: LanguageModelChunk = build_chunks(
            self.config, self.grid, drawn=lambda name: False
        )[0].eval()
        self.rules: VisionRules | None = None
        """How images become tokens, as far as it is known."""
        if self.progress.image_rules and self.config.vision.vision_num_layers:
            self.rules = rules_from_dict(self.progress.image_rules)
        places = {
            piece.name: piece.of(parameter.detach())
            for parameter in (*self.model.parameters(), *self.model.buffers())
            for piece in spec_of(parameter).pieces
        }
        for name, tensor in loaded.whole_tensors():
            if name not in places or places[name].shape != tensor.shape:
                raise ValueError(
                    f"checkpoint {self.path} holds {name} {tuple(tensor.shape)}, which its config "
                    "has not"
                )
            places.pop(name).copy_(tensor)
        if places:
            raise ValueError(f"checkpoint {self.path} lacks {', '.join(sorted(places))}")

    @torch.no_grad()
    def logits(self, batch: PackedBatch, features: torch.Tensor | None = None) -> torch.Tensor:
        """Logits `[T, vocab]` in fp32 or wider, in the order of the row; `features` of its images
        if they are known.
        """
        local = shard_batch(batch, self.grid.cp, CONTIGUOUS)
        logits = self.model.row_logits(local, features)
        return logits if logits.dtype == torch.float64 else logits.float()

    def answer(
        self, prompts: Sequence[Prompt], sampling: Sampling, names: Sequence[str] = ()
    ) -> Iterator[np.ndarray]:
        """The new tokens of each prompt's answer, in order, int64.

        ValueError for a prompt that leaves no room in a row of the model's length, by its name if
        it has one.
        """
        limit = self.config.data.seq_length
        for number, prompt in enumerate(prompts):
            if len(prompt.tokens) >= limit:
                name = names[number] if names else f"prompt {number}"
                raise ValueError(
                    f"{name}: {len(prompt.tokens)} tokens, --seq-length of the run is {limit}"
                )
        seed = sampling.seed
        for group in _groups(prompts, limit, sampling.count):
            yield from self._answer_row(group, sampling, seed)
            seed += len(group)

    @torch.no_grad()
    def _answer_row(
        self, prompts: Sequence[Prompt], sampling: Sampling, seed: int
    ) -> list[np.ndarray]:
        config, features = self.config, None
        if (
            self.model.vision is not None
            and self.rules is not None
            and any(prompt.encoded for prompt in prompts)
        ):
            pixels, grids = (
                map(torch.from_numpy, prompt_pixels(prompts, self.rules)),
                prompt_grids(prompts),
            )
            features = self.model.vision(
                *pixels, None if grids is None else PatchGrids(grids)
            )  # [n, h]
        answers: list[list[int]] = [[] for _ in prompts]
        generators = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
        going = set(range(len(prompts)))
        token_ids = self.rules.token_ids if self.rules is not None else {}
        never = torch.tensor(
            [i for i in token_ids.values() if i < config.model.vocab_size], dtype=torch.int64
        )
        while going:
            batch, last = prompt_row(prompts, answers, config.data.image_attention, token_ids)
            logits = self.logits(batch, features)[torch.from_numpy(last)]
            logits[
                :, never
            ] = -torch.inf  # only an image has them, also where the tokenizer knows them
            for i in sorted(going):
                chosen = logits[i].argmax()
                if sampling.temperature > 0.0:
                    shares = torch.softmax(logits[i] / sampling.temperature, -1)
                    chosen = torch.multinomial(shares, 1, generator=generators[i])
                answers[i].append(int(chosen))
                full = len(prompts[i].tokens) + len(answers[i]) >= config.data.seq_length
                if answers[i][-1] in sampling.ends or len(answers[i]) == sampling.count or full:
                    going.discard(i)
        return [np.array(answer, np.int64) for answer in answers]


def _groups(prompts: Sequence[Prompt], limit: int, count: int) -> Iterator[list[Prompt]]:
    """Neighbouring prompts that with full answers fill a row of `limit` tokens, at least one at a
    time.
    """
    group: list[Prompt] = []
    filled = 0
    for prompt in prompts:
        size = len(prompt.tokens) + count
        if group and filled + size > limit:
            yield group
            group, filled = [], 0
        group.append(prompt)
        filled += size
    if group:
        yield group
