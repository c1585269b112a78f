"""Are two folders the same model? Logits of ours and of the transformers library on the same rows.

Both are computed in float32 on one process, from the files on disk. Hidden states have the usual size first, then one
as small as the epsilons. Comparing tensors alone would not see a lost theta, an epsilon that the library does not read,
or halves that were meant to be pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megacp.core.config.run import RunConfig, with_values
from megacp.core.context_parallel.layout import select_layout
from megacp.core.context_parallel.shard import shard_batch
from megacp.core.data.batch import PackedBatch
from megacp.core.distributed.grid import GridShape, build_grid
from megacp.core.distributed.parameter import spec_of
from megacp.core.models.build import build_chunks
from megacp.core.models.language import LanguageModelChunk
from megacp.huggingface.convert.tables.mapping import Link, Source, whole

TOLERANCE = 1e-4
"""Of the largest logit, in float32: a wrong theta or epsilon is above it, another order of sums far below."""


@dataclass(frozen=True)
class LogitDifference:
    """How far logits `[T, vocab]` of two models are apart."""

    name: str
    largest: float
    """Logit of the first."""
    difference: float
    agreement: float
    """Share of places with the same likeliest token."""
    tokens: int

    @property
    def is_small(self) -> bool:
        """Whether both are one model."""
        return self.difference <= TOLERANCE * self.largest

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.tokens} tokens, largest logit {self.largest:.4g}, max difference "
            f"{self.difference:.3g} ({self.difference / max(self.largest, 1e-30):.2g} of it), "
            f"same likeliest token at {100 * self.agreement:.2f} %"
        )


def library_encoder(folder: Path) -> Callable[[str], list[int]]:
    """How the transformers library encodes a text, reading a folder; nothing is added to it."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, model_max_length=1 << 30)
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


Logits = Callable[[PackedBatch], torch.Tensor]
INPUTS = (
    *("embedding.weight", "vision.patch_embedding.weight", "vision.patch_embedding.bias"),
    "vision.position_embedding.weight",
)
"""Tensors that make the first hidden states, by our names."""


@dataclass(frozen=True)
class Probed:
    """A model that gives logits."""

    logits: Logits
    inputs: Mapping[str, torch.Tensor]
    """Its own tensors of INPUTS."""

    def __call__(self, batch: PackedBatch) -> torch.Tensor:
        """Logits `[T, vocab]` of a row."""
        return self.logits(batch)

    @contextmanager
    def quiet(self, factors: Mapping[str, float]) -> Iterator[None]:
        """Inputs times powers of two, which are exact, inside the block."""
        try:
            for name, factor in factors.items():
                self.inputs[name].mul_(factor)
            yield
        finally:
            for name, factor in factors.items():
                self.inputs[name].div_(factor)


def quiet_factors(config: RunConfig, model: Probed) -> dict[str, float]:
    """Powers of two that make the hidden states before the first norms as small as the norms' epsilons.

    Another epsilon then is another model: beside hidden states of the usual size it is rounding. Mean squares are
    those of the embedding, and of patches of noise on the positions of the tower.
    """
    squares = {name: float(tensor.double().square().mean()) for name, tensor in model.inputs.items()}
    found = {"embedding.weight": (squares["embedding.weight"], config.model.norm_epsilon)}
    if config.vision.vision_num_layers:
        _, weight, bias, positions = INPUTS
        inputs = model.inputs[weight].shape[1]
        patches = inputs * squares[weight] / 3 + squares[bias] + squares[positions]  # pixels are even in [-1, 1]
        found |= dict.fromkeys((weight, bias, positions), (patches, config.vision.vision_norm_epsilon))
    return {name: 2.0 ** round(math.log2(epsilon / square) / 2) for name, (square, epsilon) in found.items() if square}


def our_logits(config: RunConfig, source: Source) -> Probed:
    """Logits of the weights of `source`, by our names, on one process in float32."""
    own = RunConfig(model=config.model, vision=config.vision, data=config.data)  # nothing of its grid or its device
    grid = build_grid(GridShape(), 0)
    plain = with_values(own, {"dtype": "float32", "transformer_impl": "native"})
    model: LanguageModelChunk = build_chunks(plain, grid)[0].eval()
    inputs: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for parameter in model.parameters():
            for piece in spec_of(parameter).pieces:
                piece.of(parameter).copy_(whole(source, piece.name))
                if piece.name in INPUTS:
                    inputs[piece.name] = piece.of(parameter.detach())

    @torch.no_grad()
    def logits(batch: PackedBatch) -> torch.Tensor:
        return model.row_logits(shard_batch(batch, grid.cp, select_layout("contiguous")))

    return Probed(logits, inputs)


def library_model(folder: Path, cls: str, rounded_to: torch.dtype | None = None) -> Any:
    """The model of a folder by the transformers library, in float32, its weights `rounded_to` another dtype before.

    ValueError names missing, unexpected or mismatched tensors.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model, info = getattr(transformers, cls).from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True, attn_implementation="eager"
    )
    wrong = {kind: sorted(map(str, info.get(kind) or ())) for kind in ("missing_keys", "unexpected_keys")}
    wrong["mismatched_keys"] = sorted(map(str, info.get("mismatched_keys") or ()))
    found = [f"{kind.replace('_', ' ')}: {', '.join(names[:10])}" for kind, names in wrong.items() if names]
    if found:
        raise ValueError(f"the transformers library reads {folder} with {'; '.join(found)}")
    for parameter in model.parameters() if rounded_to is not None else ():
        parameter.data = parameter.data.to(rounded_to).float()
    return model.eval()


def library_logits(model: Any, links: Sequence[Link] = ()) -> Probed:
    """Its logits of a row that is one document; `links` say which of its tensors are INPUTS."""
    state = model.state_dict()  # views of its parameters
    renamed = {link.ours[0].name: link.theirs[0].name for link in links if len(link.ours) == len(link.theirs) == 1}
    inputs = {name: state[renamed[name]] for name in INPUTS if name in renamed}

    @torch.no_grad()
    def logits(batch: PackedBatch) -> torch.Tensor:
        images: dict[str, Any] = {}
        if batch.vision is not None:
            pooling = torch.from_numpy(batch.vision.pooling)
            images = {
                "pixel_values": torch.from_numpy(batch.vision.patches),
                "image_token_pooling": pooling,
                "image_grids": torch.tensor([[len(pooling), 1, 0, 0]]),
                "mm_token_type_ids": torch.from_numpy((batch.span > 0).astype(np.int64))[None],
            }
        return model(input_ids=torch.from_numpy(batch.tokens)[None], **images).logits[0]

    return Probed(logits, inputs)


def compare_quiet(
    config: RunConfig, first: Probed, second: Probed, rows: Mapping[str, PackedBatch]
) -> list[LogitDifference]:
    """`compare` with hidden states so small that epsilons show; both models keep their weights."""
    factors = quiet_factors(config, first)
    with first.quiet(factors), second.quiet(factors):
        return compare(first, second, {name.replace("random", "quiet"): row for name, row in rows.items()})


def compare(first: Logits, second: Logits, rows: Mapping[str, PackedBatch]) -> list[LogitDifference]:
    """The difference of two models on each of some rows."""
    found = []
    for name, row in rows.items():
        expected, other = first(row).double(), second(row).double()
        agreement = float((expected.argmax(-1) == other.argmax(-1)).double().mean())
        gap = float((expected - other).abs().nan_to_num(nan=torch.inf).max())
        found.append(LogitDifference(name, float(expected.abs().max()), gap, agreement, len(row.tokens)))
    return found
