"""Text from a checkpoint on one process: load whole tensors by global name, sample token by token.

Key property: the same chunk class that trains, on a grid of one rank, so what is sampled is what was trained. The whole
row is computed again for every token: for looking at a model, not for serving it. Rejected: a second, cached decoder.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from megacp.batch import PackedBatch
from megacp.checkpoint.commit import load_checkpoint
from megacp.config.run import RunConfig, with_values
from megacp.config.yaml_file import from_yaml
from megacp.context_parallel.layout import select_layout
from megacp.context_parallel.shard import shard_batch
from megacp.distributed.grid import GridShape, build_grid
from megacp.distributed.parameter import spec_of
from megacp.models.build import build_chunks
from megacp.models.language import LanguageModelChunk

_ONE_PROCESS = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "num_virtual_stages_per_pipeline_rank": 1,
    "cp_layout": "contiguous",
    "load": None,
}


class Generator:
    """A language model read from a checkpoint that any grid wrote."""

    def __init__(self, checkpoint: str | Path) -> None:
        """Load the newest whole checkpoint below `checkpoint`, or that step. Raises ValueError when there is none."""
        self.grid = build_grid(GridShape(), 0)
        loaded = load_checkpoint(checkpoint, self.grid.world)
        self.path, self.step = loaded.path, loaded.step
        self.tokenizer_sha256: str = loaded.extra["tokenizer_sha256"]
        self.config: RunConfig = with_values(from_yaml(loaded.config_yaml), _ONE_PROCESS)
        self.model: LanguageModelChunk = build_chunks(self.config, self.grid)[0].eval()
        places = {
            piece.name: piece.of(parameter.detach())
            for parameter in self.model.parameters()
            for piece in spec_of(parameter).pieces
        }
        for name, tensor in loaded.whole_tensors():
            places.pop(name).copy_(tensor)
        if places:
            raise ValueError(f"checkpoint {self.path} lacks {', '.join(sorted(places))}")

    @torch.no_grad()
    def logits(self, tokens: np.ndarray) -> torch.Tensor:
        """Logits `[n, vocab]` in fp32 or wider of one document `tokens[n]`."""
        zeros = np.zeros(len(tokens), np.int32)
        row = np.asarray(tokens, np.int64)
        batch = PackedBatch(
            tokens=row,
            labels=np.zeros_like(row),
            loss_weights=np.zeros(len(row), np.float32),
            position_ids=np.arange(len(row)),
            document=zeros,
            branch=zeros,
            span=zeros,
            pack_ids=(),
        )
        local = shard_batch(batch, self.grid.cp, select_layout("contiguous"))
        logits = self.model.logits(None, local)
        return logits if logits.dtype == torch.float64 else logits.float()

    def sample(self, prompt: np.ndarray, count: int, *, temperature: float, seed: int, eos: int | None) -> np.ndarray:
        """Up to `count` new tokens after `prompt[n]`, n >= 1; greedy at temperature 0; stops after `eos`."""
        if len(prompt) == 0:
            raise ValueError("the prompt is empty; give at least one token of text with --prompt")
        generator = torch.Generator().manual_seed(seed)
        tokens = list(map(int, prompt))
        for _ in range(count):
            last = self.logits(np.array(tokens[-self.config.data.seq_length :]))[-1]
            if temperature == 0.0:
                token = int(last.argmax())
            else:
                token = int(torch.multinomial(torch.softmax(last / temperature, -1), 1, generator=generator))
            tokens.append(token)
            if token == eos:
                break
        return np.array(tokens[len(prompt) :], dtype=np.int64)
