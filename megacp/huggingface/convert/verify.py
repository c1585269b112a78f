"""Implements --verify: compares the written model with its input by tensors, config fields, logits
and token ids.

First, the tensors are compared bit by bit, and then the fields of both configs. Finally, the
library loads the Hugging Face folder, and its float32 logits are compared with ours. This finds
errors that the reader and the writer have in common. Each row is one document of random data: text,
several images, or images with a video. A single image would not be enough, because it has only one
possible order.
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

# Accepted difference as a fraction of the largest logit, in float32. A wrong rotary base
# exceeds it; a different summation order usually stays far below it.
_TOLERANCE = 1e-4
# A difference up to this multiple of our float32 rounding error is accepted, too: the library's
# error is similar.
_ROUNDINGS = 8
# A function that returns the logits `[T, vocab]` of a row.
Logits = Callable[[PackedBatch], torch.Tensor]
# Marks a frame of a video; an image has its width and height in crops instead.
_FRAME = (0, 0)
# Name of a row -> its images and frames.
_MEDIA = {
    "random images": ((2, 1), (1, 1), (1, 2)),
    "random images and video": ((2, 1), *(_FRAME,) * 8, (1, 1)),
}


def rows_for(config: RunConfig, rules: VisionRules | None) -> dict[str, PackedBatch]:
    """Return random rows that exercise all parts of a model.

    They have text and, for a model with a tower and known `rules`, the images and videos of _MEDIA.
    """
    # A few tokens are enough to find a difference, and fast on a CPU.
    count = min(64, config.model.max_position_embeddings or config.data.seq_length)
    rows = {"random text": _row(config, rules, count, ())}
    if config.vision.vision_num_layers and rules is not None:
        names = _MEDIA if isinstance(rules, Molmo2Rules) else ("random images",)
        rows |= {name: _row(config, rules, 5, _MEDIA[name]) for name in names}
    return rows


def _row(
    config: RunConfig, rules: VisionRules | None, count: int, media: Sequence[tuple[int, int]]
) -> PackedBatch:
    """Return a document of `media`, with `count` random tokens between and around them."""
    rng = np.random.default_rng(0)
    images = list(rules.token_ids.values()) if rules is not None else []
    # Random text must not contain tokens of images.
    words = np.setdiff1d(np.arange(config.model.vocab_size), images)
    tokens = [rng.choice(words, count)]
    span = [np.zeros(count, np.int32)]  # 1 for tokens of an image that attend to each other
    layouts = []
    pixels = []
    sees_all = config.data.image_attention != "causal"
    for size in media:
        assert rules is not None, "image rules are needed to compare a model with a tower"
        side = 4 * config.vision.vision_patch_size
        if isinstance(rules, Molmo2Rules):
            side = rules.image_size
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
        span += [np.full(len(layout.tokens), sees_all, np.int32), np.zeros(count, np.int32)]
    row = np.concatenate(tokens)  # int64 [T]
    vision: VisionInputs | None = None
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
    leave = np.full(len(row), len(row), np.int32)  # the document has no branch
    weights = np.ones(len(row), np.float32)
    spans = np.concatenate(span)
    batch = PackedBatch(
        row, np.zeros_like(row), weights, np.arange(len(row)), leave, spans, (0,), vision
    )
    if vision is None or vision.grids is None:
        return batch
    return dataclasses.replace(batch, position_axes=position_axes(batch, vision.grids, vision))


def tensor_differences(before: Source, after: Source) -> list[str]:
    """Return a message for each tensor that differs. Bits are compared, so NaN equals itself."""
    found = []
    for name in sorted(before.infos.keys() | after.infos.keys()):
        if before.infos.get(name) != after.infos.get(name):
            found.append(f"{name} is {after.infos.get(name)}, but was {before.infos.get(name)}")
            continue
        first = whole(before, name).contiguous().view(torch.uint8)
        second = whole(after, name).contiguous().view(torch.uint8)
        if not torch.equal(first, second):
            found.append(f"{name} has different values")
    return found


def our_logits(config: RunConfig, source: Source, dtype: str = "float32") -> Logits:
    """Return a function that computes our model's logits with the weights of `source`."""
    # Leave out the run's device grid and device.
    own = RunConfig(model=config.model, vision=config.vision, data=config.data)
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
    """Return a function that computes the logits of a folder with transformers, in float32.

    The weights are first rounded to `rounded_to`, if given. Raise ValueError with missing,
    unexpected or mismatched tensors.
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
    # The library would initialise missing tensors silently.
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    wrong = [
        f"{kind}: {in_brief(sorted(map(str, info[kind])))}" for kind in kinds if info.get(kind)
    ]
    if wrong:
        raise ValueError(f"transformers loads {folder} with {'; '.join(wrong)}")
    if rounded_to is not None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(rounded_to).float()
    model.eval()

    @torch.no_grad()
    def logits(batch: PackedBatch) -> torch.Tensor:
        images: dict[str, Any] = {}
        # Each vision family of the library has its own inputs: first Qwen3.5's, then Molmo2's.
        if batch.vision is not None and batch.vision.grids is not None:
            kinds = np.zeros(len(batch), np.int64)
            kinds[batch.vision.feature_rows] = 1
            images = {
                "pixel_values": torch.from_numpy(batch.vision.patches[:, 0]),
                # in patches; a pooled token has 2 x 2 of them
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
        output = model(input_ids=torch.from_numpy(batch.tokens)[None], **images)
        found: torch.Tensor = output.logits[0]
        return found

    return logits


def logits_of(loaded: Loaded, dtype: torch.dtype | None = None) -> Logits:
    """Return a function that computes the logits of a model, with weights rounded to `dtype`.

    A checkpoint is run with megacp, a folder with the library.
    """
    if loaded.checkpoint is not None:
        return our_logits(loaded.config, in_dtype(loaded.source, dtype))
    return library_logits(loaded.folder, loaded.cls, dtype)


def rounding(loaded: Loaded, dtype: torch.dtype | None, row: PackedBatch) -> float:
    """Return the rounding error of our float32 logits, the largest difference from float64.

    It is large if norms divide by small numbers, and depends on the processor's summation order.
    """
    source = in_dtype(loaded.source, dtype)
    narrow = our_logits(loaded.config, source, "float32")(row).double()
    wide = our_logits(loaded.config, source, "float64")(row).double()
    return float((narrow - wide).abs().max())


def compare_logits(
    first: Logits, second: Logits, row: PackedBatch, rounded: Callable[[], float] = lambda: 0.0
) -> tuple[bool, str]:
    """Return whether two models agree on a row, and a phrase about the difference in their logits.

    `rounded` returns the rounding error; it is called only if the result depends on it.
    """
    # [T, vocab]
    expected = first(row).double()
    other = second(row).double()
    largest = float(expected.abs().max())
    agreement = float((expected.argmax(-1) == other.argmax(-1)).double().mean())
    gap = float((expected - other).abs().nan_to_num(nan=torch.inf).max())
    words = (
        f"largest logit {largest:.4g}, max difference {gap:.3g} "
        f"({gap / max(largest, 1e-30):.2g} of it)"
    )
    agrees = gap <= _TOLERANCE * largest or gap <= _ROUNDINGS * rounded()
    return agrees, f"{words}, same most likely token at {100 * agreement:.2f} %"


def verify_conversion(
    before: Loaded, after: Loaded, dtype: torch.dtype | None, tokenizer: Given | None
) -> bool:
    """Compare the output with the input, cast to `dtype`, and print the result.

    Return whether both are the same model.
    """
    given = in_dtype(before.source, dtype)
    wrong = tensor_differences(given, after.source)
    fields = _field_differences(before, after)
    if wrong:
        print(
            f"verify: {len(wrong)} of {len(given.infos)} tensors differ from the input: "
            f"{in_brief(wrong)}"
        )
    else:
        print(f"verify: all {len(given.infos)} tensors are identical to the input, bit for bit")
    if fields:
        print(f"verify: {in_brief(fields)}")
    else:
        print("verify: all fields of the model are identical to the input")
    if wrong or fields:
        return False
    # Logits are compared only if the tensors and fields are equal.
    rows = rows_for(before.config, before.rules)
    if before.config.vision.vision_num_layers and before.rules is None:
        print("verify: images are not compared: the folder has no processor with image rules")
    first = logits_of(before, dtype)
    second = logits_of(after)
    agrees = {}
    phrases = {}
    for name, row in rows.items():
        rounded = partial(rounding, before, dtype, row)
        agrees[name], phrases[name] = compare_logits(first, second, row, rounded)
    for name, words in phrases.items():
        print(f"verify: {name}: {words}")
    if tokenizer is not None:
        from transformers import AutoTokenizer

        # A large limit avoids a warning about long texts.
        library = AutoTokenizer.from_pretrained(
            after.folder, local_files_only=True, model_max_length=1 << 30
        )
        refuse_difference(
            tokenizer, lambda text: library.encode(text, add_special_tokens=False), PROBE
        )
        print(
            f"verify: transformers' AutoTokenizer gives {len(PROBE)} texts the same ids as "
            "--tokenizer"
        )
    return all(agrees.values())


def _field_differences(before: Loaded, after: Loaded) -> list[str]:
    """Return a message for each flag of the model that differs."""
    # A family's config has only the flags that matter to it.
    names = [
        loaded.family.values(loaded.family.config(loaded.values)).keys()
        for loaded in (before, after)
    ]
    first = resolved(before.values)
    second = resolved(after.values)
    found = []
    for name in names[0] | names[1]:
        # The sequence length belongs to the run, not to the model.
        if name != "seq_length" and first[name] != second[name]:
            found.append(
                f"{flag(name)} is {first[name]} in the input and {second[name]} in the output"
            )
    return found
