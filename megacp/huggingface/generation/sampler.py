"""Answers from a checkpoint on one process: load whole tensors by global name, continue prompts token by token.

Key property: the chunk class is that of training, on a grid of one rank. Prompts are documents of one row, and
questions about the same images are branches: several questions cost one pass, and images are encoded once. The text of
the row is computed again for every token, which is enough to look at a model and too slow to serve it. Rejected: a
second, cached decoder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megacp.core.checkpoint.commit import load_checkpoint
from megacp.core.config.run import ON_CPU, RunConfig, Value, with_values
from megacp.core.context_parallel.layout import select_layout
from megacp.core.context_parallel.shard import shard_batch
from megacp.core.data.batch import PackedBatch
from megacp.core.data.geometry import ImageRules
from megacp.core.data.manifest import DatasetManifest
from megacp.core.distributed.grid import GridShape, build_grid
from megacp.core.distributed.parameter import spec_of
from megacp.core.models.build import build_chunks
from megacp.core.models.language import LanguageModelChunk
from megacp.core.training.sources import image_misfits
from megacp.core.training.state import first_token, last_token, stored_state
from megacp.core.training.stored import stored_config
from megacp.huggingface.generation.prompt import Prompt, PromptPart, prompt_pixels, prompt_row
from megacp.prepare.records.conversation import answer_ends
from megacp.prepare.tokenize.tokenizer import Tokenizer

_ONE_PROCESS: dict[str, Value] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "num_virtual_stages_per_pipeline_rank": 1,
    "pipeline_schedule": "1f1b",
    "dynamic_context_parallel": False,
    "cp_layout": "contiguous",
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
        """Load the newest whole checkpoint below `checkpoint`, or that step. Raises ValueError when there is none."""
        self.grid = build_grid(GridShape(), 0)
        self._rules: ImageRules | None = None
        loaded = load_checkpoint(checkpoint, self.grid.world)
        self.path, self.step = loaded.path, loaded.step
        progress = stored_state(loaded)
        self.tokenizer_sha256: str = progress.tokenizer_sha256
        self._stored_rules: dict[str, Any] | None = progress.image_rules
        self._progress = progress
        self.config: RunConfig = with_values(stored_config(loaded), _ONE_PROCESS)
        self.model: LanguageModelChunk = build_chunks(self.config, self.grid)[0].eval()
        places = {
            piece.name: piece.of(parameter.detach())
            for parameter in self.model.parameters()
            for piece in spec_of(parameter).pieces
        }
        for name, tensor in loaded.whole_tensors():
            if name not in places or places[name].shape != tensor.shape:
                raise ValueError(f"checkpoint {self.path} holds {name} {tuple(tensor.shape)}, which its config has not")
            places.pop(name).copy_(tensor)
        if places:
            raise ValueError(f"checkpoint {self.path} lacks {', '.join(sorted(places))}")

    def first_token(self, by_files: int | None) -> int | None:
        """The token id that begins a prompt, see `state.first_token`."""
        return first_token(self._progress, by_files)

    def last_token(self, by_files: int | None) -> int | None:
        """The token id that ended the documents of training, see `state.last_token`."""
        return last_token(self._progress, by_files)

    def template_ends(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The token ids with which the chat template of training ends answers; none without one, or not known.

        ValueError as `answer_ends`.
        """
        texts = self._progress.chat_template
        return () if texts is None else answer_ends(texts, tokenizer)

    @property
    def by_template(self) -> bool:
        """Whether a chat template wrote the messages that the model learned."""
        return self._progress.chat_template is not None

    @property
    def has_image_rules(self) -> bool:
        """Whether the checkpoint itself says how images become tokens."""
        return self._stored_rules is not None and self.config.vision.vision_num_layers > 0

    def image_rules(self, data_path: str | None) -> ImageRules:
        """The rules by which images become tokens: those of the checkpoint, or of the dataset at `data_path`.

        ValueError when there are none, or they do not fit the model.
        """
        if not self.config.vision.vision_num_layers:
            raise ValueError(f"{self.path} has no vision tower: it was trained on text alone")
        values, reasons, where = self._stored_rules, [], str(self.path)
        stored = values and values.get("token_ids")
        if data_path is not None:
            manifest, where = DatasetManifest.read(data_path), f"--data-path {data_path}"
            values = manifest.image_rules
            if self.tokenizer_sha256 and manifest.tokenizer.sha256 != self.tokenizer_sha256:
                reasons.append(f"{where} was built with another tokenizer than {self.path} was trained with")
        if values is None:
            raise ValueError(f"{where} holds no image rules: give --data-path of a dataset built with image flags")
        rules = ImageRules.from_dict(values)
        reasons += image_misfits(where, rules, self.config.vision)
        if stored and stored != rules.token_ids:
            reasons.append(f"{where} has the image tokens {rules.token_ids}, {self.path} was trained with {stored}")
        rows, last = self.config.model.embedding_rows, max(rules.token_ids.values())
        if last >= rows:
            reasons.append(f"{where} has ids up to {last}, the model has {rows} rows")
        if reasons:
            raise ValueError("\n".join(reasons))
        self._rules = rules
        return rules

    def _image_ids(self) -> dict[str, int]:
        """Ids that only images have, as far as they are known."""
        if self._rules is not None:
            return self._rules.token_ids
        return ImageRules.from_dict(self._stored_rules).token_ids if self._stored_rules else {}

    @torch.no_grad()
    def logits(self, batch: PackedBatch, features: torch.Tensor | None = None) -> torch.Tensor:
        """Logits `[T, vocab]` in fp32 or wider, in the order of the row; `features` of its images if they are known."""
        local = shard_batch(batch, self.grid.cp, select_layout("contiguous"))
        logits = self.model.row_logits(local, features)
        return logits if logits.dtype == torch.float64 else logits.float()

    @torch.no_grad()
    def features(self, prompts: Sequence[Prompt]) -> torch.Tensor | None:
        """The encoded images `[n, h]` of a row of these prompts; None when they have none."""
        if self.model.vision is None or not any(prompt.encoded for prompt in prompts):
            return None
        assert self._rules is not None, "no prompt has images without `image_rules`"
        patches, pooling = prompt_pixels(prompts, self._rules)
        return self.model.vision(torch.from_numpy(patches), torch.from_numpy(pooling))

    def answer(
        self, prompts: Sequence[Prompt], sampling: Sampling, names: Sequence[str] = ()
    ) -> Iterator[list[np.ndarray]]:
        """For each prompt in order the new tokens int64 of each of its answers.

        ValueError for a prompt that leaves no room in a row of the model's length, by its name if it has one.
        """
        limit = self.config.data.seq_length
        for number, prompt in enumerate(prompts):
            if _is_text(prompt):
                continue
            if max(prompt.lengths) >= limit:
                name = names[number] if names else f"prompt {number}"
                raise ValueError(f"{name}: {max(prompt.lengths)} tokens, --seq-length of the run is {limit}")
        first = 0
        for group in _groups(prompts, limit, sampling.count):
            yield from self._answer_row(group, sampling, sampling.seed + first)
            first += sum(prompt.num_answers for prompt in group)

    def _answer_row(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> list[list[np.ndarray]]:
        limit = self.config.data.seq_length
        features = self.features(prompts)
        answers: list[list[list[int]]] = [[[] for _ in range(prompt.num_answers)] for prompt in prompts]
        flat = [answer for of_prompt in answers for answer in of_prompt]
        sliding = [_is_text(prompt) for prompt in prompts for _ in range(prompt.num_answers)]
        lengths = [length for prompt in prompts for length in prompt.lengths]
        generators = [torch.Generator().manual_seed(seed + i) for i in range(len(flat))]
        going = set(range(len(flat))) if sampling.count > 0 else set()
        token_ids = self._image_ids()
        never = torch.tensor([i for i in token_ids.values() if i < self.config.model.vocab_size], dtype=torch.int64)
        while going:
            shown = [_windowed(p, a, limit) for p, a in zip(prompts, answers, strict=True)]
            row = prompt_row([p for p, _ in shown], [a for _, a in shown], self.config.data.image_attention, token_ids)
            logits = self.logits(row.batch, features)[torch.from_numpy(row.last)]
            logits[:, never] = -torch.inf  # only an image has them, also where the tokenizer knows them
            for i in sorted(going):
                flat[i].append(_choose(logits[i], sampling.temperature, generators[i]))
                full = not sliding[i] and lengths[i] + len(flat[i]) >= limit
                if flat[i][-1] in sampling.ends or len(flat[i]) == sampling.count or full:
                    going.discard(i)
        return [[np.array(answer, np.int64) for answer in of_prompt] for of_prompt in answers]


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator))


def _is_text(prompt: Prompt) -> bool:
    """Whether it is plain text, of which the end alone may be shown to the model."""
    return not prompt.branches and not prompt.encoded


def _windowed(prompt: Prompt, answers: list[list[int]], limit: int) -> tuple[Prompt, list[list[int]]]:
    """A plain text that has outgrown `limit` tokens as the last `limit` of them, the rest as it is."""
    if not _is_text(prompt) or len(prompt.prefix.tokens) + len(answers[0]) <= limit:
        return prompt, answers
    tokens = np.concatenate((prompt.prefix.tokens, np.array(answers[0], np.int64)))[-limit:]
    return dataclasses.replace(prompt, prefix=PromptPart(tokens)), [[]]


def _groups(prompts: Sequence[Prompt], limit: int, count: int) -> Iterator[list[Prompt]]:
    """Neighbouring prompts that with full answers fill a row of `limit` tokens, at least one at a time."""
    group: list[Prompt] = []
    filled = 0
    for prompt in prompts:
        parts = [prompt.prefix, *prompt.branches]
        size = sum(len(part.tokens) for part in parts) + count * prompt.num_answers
        if group and filled + size > limit:
            yield group
            group, filled = [], 0
        group.append(prompt)
        filled += size
    if group:
        yield group
