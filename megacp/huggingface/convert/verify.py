"""--verify: the model that was written is the one that was read, by every tensor, every field, logits and token ids.

Tensors of both are compared bit by bit through the tables, so a row that no probe's token names is seen; then the
fields of both configs. The library loads its folder, and its logits are held against ours in float32: they see a theta
that is lost, or halves that were meant to be pairs, which reader and writer may get wrong alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megacp.core.config.run import RunConfig, flag, with_values
from megacp.core.context_parallel.layout import select_layout
from megacp.core.context_parallel.shard import shard_batch
from megacp.core.data.batch import PackedBatch
from megacp.core.distributed.grid import GridShape, build_grid
from megacp.core.distributed.parameter import spec_of
from megacp.core.models.build import build_chunks
from megacp.core.models.language import LanguageModelChunk
from megacp.huggingface.convert.decoder import resolved
from megacp.huggingface.convert.noise import rows_for
from megacp.huggingface.convert.source import Loaded, listed
from megacp.huggingface.convert.tensors import Source, in_dtype, whole
from megacp.huggingface.convert.tokenizer import Given, refuse_difference
from megacp.prepare.tokenize.tokenizer import PROBE

TOLERANCE = 1e-4
"""Of the largest logit, in float32: a wrong theta is above it, another order of sums far below."""
Logits = Callable[[PackedBatch], torch.Tensor]
"""Logits `[T, vocab]` of a row."""


@dataclass(frozen=True)
class LogitDifference:
    """How far logits `[T, vocab]` of two models are apart."""

    name: str
    largest: float
    """Logit of the first."""
    difference: float
    agreement: float
    """Share of tokens with the same likeliest next one."""
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


def tensor_differences(before: Source, after: Source) -> list[str]:
    """Differences of the tensors of two sources, one line each; bits are compared, so NaN equals itself."""
    found = [f"{name} is in one of the two alone" for name in sorted(before.infos.keys() ^ after.infos.keys())]
    for name in (name for name in before.infos if name in after.infos):
        if before.infos[name] != after.infos[name]:
            found.append(f"{name} is {after.infos[name]}, it was {before.infos[name]}")
            continue
        tensors = whole(before, name), whole(after, name)
        bits = [tensor.contiguous().view(torch.uint8).reshape(len(tensor), -1) for tensor in tensors]
        if not torch.equal(*bits):
            rows = (bits[0] != bits[1]).any(dim=1).nonzero().flatten()
            found.append(f"{name} differs in {len(rows)} row{'s' * (len(rows) > 1)}, first {int(rows[0])}")
    return found


def field_differences(before: Loaded, after: Loaded) -> list[str]:
    """Flags that a family's config speaks of and that differ between two models, one line each."""
    names = [loaded.family.values(loaded.family.config(loaded.values)).keys() for loaded in (before, after)]
    first, second = resolved(before.values), resolved(after.values)
    return [
        f"{flag(name)} is {first[name]} in what was read and {second[name]} in what was written"
        for name in names[0] | names[1]
        if name != "seq_length" and first[name] != second[name]  # rows are the run's
    ]


def our_logits(config: RunConfig, source: Source) -> Logits:
    """Logits of the weights of `source`, by our names, on one process in float32."""
    own = RunConfig(model=config.model, vision=config.vision, data=config.data)  # nothing of its grid or its device
    grid = build_grid(GridShape(), 0)
    plain = with_values(own, {"dtype": "float32", "transformer_impl": "native"})
    model: LanguageModelChunk = build_chunks(plain, grid)[0].eval()
    with torch.no_grad():
        for parameter in model.parameters():
            for piece in spec_of(parameter).pieces:
                piece.of(parameter).copy_(whole(source, piece.name))

    @torch.no_grad()
    def logits(batch: PackedBatch) -> torch.Tensor:
        return model.row_logits(shard_batch(batch, grid.cp, select_layout("contiguous")))

    return logits


def library_logits(folder: Path, cls: str, rounded_to: torch.dtype | None = None) -> Logits:
    """Logits of a row that is one document by the transformers library, in float32, with the weights of a folder
    `rounded_to` another dtype before. ValueError names missing, unexpected or mismatched tensors.
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
    model.eval()

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
        found: torch.Tensor = model(input_ids=torch.from_numpy(batch.tokens)[None], **images).logits[0]
        return found

    return logits


def logits_of(loaded: Loaded, dtype: torch.dtype | None = None) -> Logits:
    """A model to ask for logits, its weights rounded to `dtype`: a checkpoint of ours, or a folder by the library."""
    if loaded.checkpoint is not None:
        return our_logits(loaded.config, in_dtype(loaded.source, dtype))
    return library_logits(loaded.folder, loaded.family.cls, dtype)


def compare(first: Logits, second: Logits, rows: Mapping[str, PackedBatch]) -> list[LogitDifference]:
    """The difference of two models on each of some rows."""
    found = []
    for name, row in rows.items():
        expected, other = first(row).double(), second(row).double()
        agreement = float((expected.argmax(-1) == other.argmax(-1)).double().mean())
        gap = float((expected - other).abs().nan_to_num(nan=torch.inf).max())
        found.append(LogitDifference(name, float(expected.abs().max()), gap, agreement, len(row.tokens)))
    return found


def verify(before: Loaded, after: Loaded, dtype: torch.dtype | None, tokenizer: Given | None) -> bool:
    """Print how far the result is from what was read, cast to `dtype`; whether it is the same model.

    `tokenizer`: that of a run, whose ids the written folder must give.
    """
    given = in_dtype(before.source, dtype)
    wrong, fields = tensor_differences(given, after.source), field_differences(before, after)
    if wrong:
        print(f"verify: {len(wrong)} of {len(given.infos)} tensors are not those of what was read: {listed(wrong)}")
    else:
        print(f"verify: all {len(given.infos)} tensors are those of what was read, bit for bit")
    print(f"verify: {listed(fields)}" if fields else "verify: all fields of the model are those of what was read")
    if wrong or fields:
        return False
    rows = rows_for(before.config, before.probe_rules if before.config.vision.vision_num_layers else None)
    found = compare(logits_of(before, dtype), logits_of(after), rows)
    for difference in found:
        print(f"verify: {difference}")
    if tokenizer is not None:
        from transformers import AutoTokenizer

        library = AutoTokenizer.from_pretrained(after.folder, local_files_only=True, model_max_length=1 << 30)
        refuse_difference(tokenizer, lambda text: library.encode(text, add_special_tokens=False), PROBE)
        print(f"verify: {len(PROBE)} texts get the ids of --tokenizer from the library's AutoTokenizer")
    return all(difference.is_small for difference in found)
