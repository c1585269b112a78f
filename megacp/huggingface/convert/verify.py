"""--verify: the model that was written is the one that was read, by every tensor, every field,
logits and token ids.

Tensors are compared bit by bit, then the fields of both configs. The library loads its folder, and
its logits are held against ours in float32: they see what reader and writer get wrong alike. Rows
are one document of noise each: text, several images, images beside a video (on one image alone no
plan sorts, and a wrong order would agree).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megacp.attention.context_parallel.layout import CONTIGUOUS
from megacp.distributed.grid import build_grid
from megacp.distributed.shape import GridShape
from megacp.engine.config.run import RunConfig, flag, with_values
from megacp.engine.data_parallel.parameter import spec_of
from megacp.engine.models.build import build_chunks
from megacp.engine.models.language import LanguageModelChunk
from megacp.engine.rows.batch import PackedBatch, VisionInputs
from megacp.engine.rows.shard import shard_batch
from megacp.huggingface.convert.source import Loaded, in_brief
from megacp.huggingface.convert.tensors import Source, in_dtype, whole
from megacp.huggingface.convert.tokenizer import Given, refuse_difference
from megacp.huggingface.convert.words import resolved
from megacp.prepare.tokenize.tokenizer import PROBE
from megacp.training.data.images import joined, position_axes
from megacp.training.data.vision.molmo2 import Molmo2Rules, frame_layout
from megacp.training.data.vision.rules import VisionRules

_TOLERANCE = 1e-4
"""Part of the largest logit, in float32: a wrong theta is above it, another order of sums mostly
far below.
"""
_ROUNDINGS = 8
"""What float32 moves our logits by, so often, is no difference either: the library's are moved
about as far.
"""
Logits = Callable[[PackedBatch], torch.Tensor]
"""Logits `[T, vocab]` of a row."""
_FRAME = (0, 0)
"""Stands for a frame of a video where an image has its width and height in crops."""
_MEDIA = {
    "random images": ((2, 1), (1, 1), (1, 2)),
    "random images and video": ((2, 1), *(_FRAME,) * 8, (1, 1)),
}


def rows_for(config: RunConfig, rules: VisionRules | None) -> dict[str, PackedBatch]:
    """Random rows that use all of a model: text, and those of _MEDIA for one with a tower whose
    `rules` are known.
    """
    count = min(64, config.model.max_position_embeddings or config.data.seq_length)
    rows = {"random text": _row(config, rules, count, ())}
    if config.vision.vision_num_layers and rules is not None:
        names = _MEDIA if isinstance(rules, Molmo2Rules) else ("random images",)
        rows |= {name: _row(config, rules, 5, _MEDIA[name]) for name in names}
    return rows


def _row(
    config: RunConfig, rules: VisionRules | None, count: int, media: Sequence[tuple[int, int]]
) -> PackedBatch:
    """One document of noise: `media` with `count` random tokens before, between and behind them."""
    rng = np.random.default_rng(0)
    images = list(rules.token_ids.values()) if rules is not None else []
    words = np.setdiff1d(np.arange(config.model.vocab_size), images)
    tokens, span, layouts, pixels = [rng.choice(words, count)], [np.zeros(count, np.int32)], [], []
    for size in media:
        assert rules is not None, "a model with a tower is compared by image rules"
        side = (
            rules.image_size
            if isinstance(rules, Molmo2Rules)
            else 4 * config.vision.vision_patch_size
        )
        width, height = (side * max(1, crops) for crops in size)
        noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        if size == _FRAME and isinstance(rules, Molmo2Rules):
            layout = frame_layout(rules)
            pixels.append(rules.pixels_of_frames(rules.fitted(noise, 1)[None, None]))
        else:
            layout = rules.layout_of_image(width, height)
            pixels.append(rules.pixels_of_image(noise))
        layouts.append(layout)
        tokens += [layout.tokens, rng.choice(words, count)]
        seen = config.data.image_attention != "causal"
        span += [np.full(len(layout.tokens), seen, np.int32), np.zeros(count, np.int32)]
    row, vision = np.concatenate(tokens), None  # int64 [T]
    grids = np.array([layout.grid for layout in layouts if layout.grid is not None], np.int64)
    if rules is not None and media:
        vision = VisionInputs(
            np.cumsum([layout.num_crops for layout in layouts]),
            np.cumsum([len(layout.pooling) for layout in layouts]),
            np.flatnonzero(row == rules.token_ids["image_patch"]),
            None,
            *joined(pixels, rules.patch_shape),
            grids=grids if len(grids) else None,
        )
    leave, weights = np.full(len(row), len(row), np.int32), np.ones(len(row), np.float32)
    spans = np.concatenate(span)
    batch = PackedBatch(
        row, np.zeros_like(row), weights, np.arange(len(row)), leave, spans, (0,), vision
    )
    if vision is None or vision.grids is None:
        return batch
    return dataclasses.replace(batch, position_axes=position_axes(batch, vision.grids, vision))


def tensor_differences(before: Source, after: Source) -> list[str]:
    """Differences of the tensors of two sources, one line each; bits are compared, so NaN equals
    itself.
    """
    found = []
    for name in sorted(before.infos.keys() | after.infos.keys()):
        if before.infos.get(name) != after.infos.get(name):
            found.append(f"{name} is {after.infos.get(name)}, it was {before.infos.get(name)}")
            continue
        first, second = (
            whole(source, name).contiguous().view(torch.uint8) for source in (before, after)
        )
        if not torch.equal(first, second):
            found.append(f"{name} has other bits")
    return found


def our_logits(config: RunConfig, source: Source, dtype: str = "float32") -> Logits:
    """Logits of the weights of `source`, by our names, on one process."""
    own = RunConfig(
        model=config.model, vision=config.vision, data=config.data
    )  # nothing of its grid or its device
    grid = build_grid(GridShape(), 0)
    plain = with_values(own, {"dtype": dtype, "transformer_impl": "native"})
    model: LanguageModelChunk = build_chunks(plain, grid, drawn=lambda name: False)[0].eval()
    with torch.no_grad():
        for parameter in (*model.parameters(), *model.buffers()):
            for piece in spec_of(parameter).pieces:
                piece.of(parameter).copy_(whole(source, piece.name))

    @torch.no_grad()
    def logits(batch: PackedBatch) -> torch.Tensor:
        return model.row_logits(shard_batch(batch, grid.cp, CONTIGUOUS))

    return logits


def library_logits(folder: Path, cls: str, rounded_to: torch.dtype | None = None) -> Logits:
    """Logits by the transformers library in float32, weights of a folder `rounded_to` another dtype
    before. ValueError names missing, unexpected or mismatched tensors.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model, info = getattr(transformers, cls).from_pretrained(
        folder,
        dtype=torch.float32,
        local_files_only=True,
        output_loading_info=True,
        attn_implementation="eager",
    )
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    if wrong := [
        f"{kind}: {in_brief(sorted(map(str, info[kind])))}" for kind in kinds if info.get(kind)
    ]:
        raise ValueError(f"the transformers library reads {folder} with {'; '.join(wrong)}")
    for parameter in model.parameters() if rounded_to is not None else ():
        parameter.data = parameter.data.to(rounded_to).float()
    model.eval()

    @torch.no_grad()
    def logits(batch: PackedBatch) -> torch.Tensor:
        images: dict[str, Any] = {}
        if batch.vision is not None and batch.vision.grids is not None:
            kinds = np.zeros(len(batch), np.int64)
            kinds[batch.vision.feature_rows] = 1
            images = {
                "pixel_values": torch.from_numpy(batch.vision.patches[:, 0]),
                "image_grid_thw": torch.tensor(
                    [[1, 2 * rows, 2 * columns] for rows, columns in batch.vision.grids]
                ),
                "mm_token_type_ids": torch.from_numpy(kinds)[None],
            }
        elif batch.vision is not None:
            pooling = torch.from_numpy(batch.vision.pooling)
            images = {
                "pixel_values": torch.from_numpy(batch.vision.patches),
                "image_token_pooling": pooling,
                "image_grids": torch.tensor([[len(pooling), 1, 0, 0]]),
                "mm_token_type_ids": torch.from_numpy((batch.span > 0).astype(np.int64))[None],
            }
        found: torch.Tensor = model(
            input_ids=torch.from_numpy(batch.tokens)[None], **images
        ).logits[0]
        return found

    return logits


def logits_of(loaded: Loaded, dtype: torch.dtype | None = None) -> Logits:
    """A model to ask for logits, its weights rounded to `dtype`: a checkpoint of ours, or a folder
    by the library.
    """
    if loaded.checkpoint is not None:
        return our_logits(loaded.config, in_dtype(loaded.source, dtype))
    return library_logits(loaded.folder, loaded.cls, dtype)


def rounding(loaded: Loaded, dtype: torch.dtype | None, row: PackedBatch) -> float:
    """How far float32 moves our logits: far where norms divide by little, and by the processor's
    order of sums.
    """
    source = in_dtype(loaded.source, dtype)
    narrow, wide = (
        our_logits(loaded.config, source, name)(row).double() for name in ("float32", "float64")
    )
    return float((narrow - wide).abs().max())


def compare_logits(
    first: Logits, second: Logits, row: PackedBatch, rounded: Callable[[], float] = lambda: 0.0
) -> tuple[bool, str]:
    """Whether two models agree on a row, and how far their logits are apart; `rounded` is asked
    where it decides.
    """
    expected, other = first(row).double(), second(row).double()
    largest = float(expected.abs().max())
    agreement = float((expected.argmax(-1) == other.argmax(-1)).double().mean())
    gap = float((expected - other).abs().nan_to_num(nan=torch.inf).max())
    words = (
        f"largest logit {largest:.4g}, max difference {gap:.3g} "
        f"({gap / max(largest, 1e-30):.2g} of it)"
    )
    agrees = gap <= _TOLERANCE * largest or gap <= _ROUNDINGS * rounded()
    return agrees, f"{words}, same likeliest token at {100 * agreement:.2f} %"


def verify_conversion(
    before: Loaded, after: Loaded, dtype: torch.dtype | None, tokenizer: Given | None
) -> bool:
    """Print how far the result is from what was read, cast to `dtype`; whether it is the same
    model.
    """
    given = in_dtype(before.source, dtype)
    wrong = tensor_differences(given, after.source)
    names = [
        loaded.family.values(loaded.family.config(loaded.values)).keys()
        for loaded in (before, after)
    ]
    first, second = resolved(before.values), resolved(after.values)
    fields = [
        f"{flag(name)} is {first[name]} in what was read and {second[name]} in what was written"
        for name in names[0] | names[1]
        if name != "seq_length" and first[name] != second[name]  # rows are the run's
    ]
    if wrong:
        print(
            f"verify: {len(wrong)} of {len(given.infos)} tensors are not those of what was read: "
            f"{in_brief(wrong)}"
        )
    else:
        print(f"verify: all {len(given.infos)} tensors are those of what was read, bit for bit")
    print(
        f"verify: {in_brief(fields)}"
        if fields
        else "verify: all fields of the model are those of what was read"
    )
    if wrong or fields:
        return False
    rows = rows_for(before.config, before.rules)
    if before.config.vision.vision_num_layers and before.rules is None:
        print(
            "verify: no images are compared: the folder has no processor that says how they become tokens"
        )
    models = logits_of(before, dtype), logits_of(after)
    found = {
        name: compare_logits(*models, row, partial(rounding, before, dtype, row))
        for name, row in rows.items()
    }
    for name, (_, words) in found.items():
        print(f"verify: {name}: {words}")
    if tokenizer is not None:
        from transformers import AutoTokenizer

        library = AutoTokenizer.from_pretrained(
            after.folder, local_files_only=True, model_max_length=1 << 30
        )
        refuse_difference(
            tokenizer, lambda text: library.encode(text, add_special_tokens=False), PROBE
        )
        print(
            f"verify: {len(PROBE)} texts get the ids of --tokenizer from the library's "
            "AutoTokenizer"
        )
    return all(agrees for agrees, _ in found.values())
