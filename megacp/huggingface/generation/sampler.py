"""Generates text from a checkpoint in one process: loads whole tensors by global name, then
continues prompts token by token.

The model class is the one used in training, on a grid of one rank. Each prompt is one document of a
row, and its images are encoded once. There is no key-value cache: every new token recomputes the
row's text, which is fast enough to try a model but too slow to serve it.
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

# Flags that depend on the grid or the device, with their values for one process.
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
    """How to choose tokens, and when to end an answer."""

    count: int
    """Maximum number of new tokens per answer."""
    temperature: float = 0.0
    """0 always selects the most likely token."""
    seed: int = 0
    """Answer i of a call uses the seed `seed + i`, independently of how prompts share rows."""
    ends: tuple[int, ...] = ()
    """Tokens that end an answer; the answer includes its end token."""


class Generator:
    """A model loaded from a checkpoint of any device grid."""

    def __init__(self, checkpoint: str | Path) -> None:
        """Load the newest complete checkpoint below `checkpoint`, or the step at that path.

        Raise ValueError if there is none, or if its tensors do not match its config.
        """
        # One rank, whatever grid wrote the checkpoint.
        self.grid = build_grid(GridShape(), 0)
        loaded = load_checkpoint(checkpoint, self.grid.world)
        self.path = loaded.path
        self.step = loaded.step
        self.progress = stored_state(loaded)
        self.config: RunConfig = with_values(stored_config(loaded), _ONE_PROCESS)
        # No parameter is initialised: the checkpoint overwrites all of them.
        chunks = build_chunks(self.config, self.grid, drawn=lambda name: False)
        self.model: LanguageModelChunk = chunks[0].eval()
        self.rules: VisionRules | None = None
        """How images become tokens; None if there is no vision tower or the rules are unknown."""
        if self.progress.image_rules and self.config.vision.vision_num_layers:
            self.rules = rules_from_dict(self.progress.image_rules)
        # Views of the parameters by checkpoint name; a fused parameter has several names.
        places: dict[str, torch.Tensor] = {}
        for parameter in (*self.model.parameters(), *self.model.buffers()):
            for piece in spec_of(parameter).pieces:
                places[piece.name] = piece.of(parameter.detach())
        # Every tensor of the checkpoint must have its place, and every place its tensor.
        for name, tensor in loaded.whole_tensors():
            if name not in places or places[name].shape != tensor.shape:
                raise ValueError(
                    f"checkpoint {self.path} has {name} of shape {tuple(tensor.shape)}, which does "
                    "not match its config"
                )
            places.pop(name).copy_(tensor)
        if places:
            raise ValueError(f"checkpoint {self.path} lacks {', '.join(sorted(places))}")

    @torch.no_grad()
    def logits(self, batch: PackedBatch, features: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits `[T, vocab]` in fp32 or wider, in the order of the row.

        `features`: the row's encoded images; None encodes the images of the batch.
        """
        # With one rank the shard is the whole row.
        local = shard_batch(batch, self.grid.cp, CONTIGUOUS)
        logits = self.model.row_logits(local, features)
        return logits if logits.dtype == torch.float64 else logits.float()

    def answer(
        self, prompts: Sequence[Prompt], sampling: Sampling, names: Sequence[str] = ()
    ) -> Iterator[np.ndarray]:
        """Yield the new tokens of each prompt's answer, in order, int64.

        Raise ValueError if a prompt leaves no room for an answer in its row. The message has the
        prompt's name from `names`, or its number.
        """
        # A row may not exceed the length of training rows.
        limit = self.config.data.seq_length
        for number, prompt in enumerate(prompts):
            if len(prompt.tokens) >= limit:
                name = names[number] if names else f"prompt {number}"
                raise ValueError(
                    f"{name}: {len(prompt.tokens)} tokens leave no room for an answer: the run has "
                    f"--seq-length {limit}"
                )
        # Seeds follow the number of the prompt, so groups do not change the answers.
        seed = sampling.seed
        for group in _groups(prompts, limit, sampling.count):
            yield from self._answer_row(group, sampling, seed)
            seed += len(group)

    @torch.no_grad()
    def _answer_row(
        self, prompts: Sequence[Prompt], sampling: Sampling, seed: int
    ) -> list[np.ndarray]:
        """Return the answers of prompts that share a row."""
        config = self.config
        features = None
        has_images = any(prompt.encoded for prompt in prompts)
        if self.model.vision is not None and self.rules is not None and has_images:
            pixels = map(torch.from_numpy, prompt_pixels(prompts, self.rules))
            grids = prompt_grids(prompts)
            patch_grids = None if grids is None else PatchGrids(grids)
            features = self.model.vision(*pixels, patch_grids)  # [pooled tokens, hidden]
        # One generator per prompt: an answer does not depend on its neighbours in the row.
        answers: list[list[int]] = [[] for _ in prompts]
        generators = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
        unfinished = set(range(len(prompts)))
        token_ids = self.rules.token_ids if self.rules is not None else {}
        # Tokens of images are never sampled, even if the tokenizer has them.
        known = [i for i in token_ids.values() if i < config.model.vocab_size]
        never = torch.tensor(known, dtype=torch.int64)
        while unfinished:
            batch, last = prompt_row(prompts, answers, config.data.image_attention, token_ids)
            logits = self.logits(batch, features)[torch.from_numpy(last)]  # [prompts, vocab]
            logits[:, never] = -torch.inf
            for i in sorted(unfinished):
                # Greedy by default.
                chosen = logits[i].argmax()
                if sampling.temperature > 0.0:
                    # Otherwise sample from the softmax of the scaled logits.
                    shares = torch.softmax(logits[i] / sampling.temperature, -1)
                    chosen = torch.multinomial(shares, 1, generator=generators[i])
                answers[i].append(int(chosen))
                has_end = answers[i][-1] in sampling.ends
                is_full = len(prompts[i].tokens) + len(answers[i]) >= config.data.seq_length
                if has_end or len(answers[i]) == sampling.count or is_full:
                    unfinished.discard(i)
        return [np.array(answer, np.int64) for answer in answers]


def _groups(prompts: Sequence[Prompt], limit: int, count: int) -> Iterator[list[Prompt]]:
    """Yield groups of neighbouring prompts that, with full answers, fit in a row of `limit` tokens.

    A group has at least one prompt, even if it does not fit.
    """
    group: list[Prompt] = []
    # Reserved tokens of the group: prompts with answers of maximum length.
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
