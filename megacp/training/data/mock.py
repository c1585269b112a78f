"""Random packs without a dataset: for `megacp.train` without `--data-path`, and for parity checks.

Pack `i` is a function of (seed, i) and goes through the same `collate` as a stored pack, so what is
proven on mock rows holds for real ones. Tokens are a random walk over the vocabulary (three steps
in four go to the next id): a loss that does not fall on mock packs is a fault. The "encoded bytes"
of its images are the numbers from which the mock decoder draws pixels.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megacp.engine.rows.batch import PackedBatch
from megacp.engine.rows.image_shards import compute_image_shard_boundaries
from megacp.training.data.collate import collate
from megacp.training.data.images import ImageLoading, joined
from megacp.training.data.reader import Pack, PackImages
from megacp.training.data.tables import BRANCH_DTYPE, SEGMENT_DTYPE, UNIT_DTYPE
from megacp.training.data.vision.rules import Pixels

MASKS = ("causal", "packed", "branches", "tree", "image", "mixed")
"""What a mock row's mask is made of: one document; several; several with branches, with branches of
branches, with image spans, with branches and spans."""
_ITEM = struct.Struct(
    "<5q"
)  # seed, pack, item, crops (frames of a video), pooled tokens of the image or a frame


@dataclass(frozen=True)
class MockImages:
    """What mock images look like, in the sizes of a model."""

    patches_per_crop: int
    patch_dim: int
    image_patch: int
    """Token id of a pooled feature, above the ids of text; the id after it stands before and after
    each image.
    """
    attention: str = "example"
    """--image-attention."""

    @property
    def has_grids(self) -> bool:
        """Whether crops are single patches, four of a token, of images of any shape."""
        return self.patches_per_crop == 1


@dataclass(frozen=True)
class MockRules:
    """What mock packs look like, and a source of them for the loader."""

    vocab_size: int
    seq_length: int
    """Most tokens of a pack."""
    mask: str = "packed"
    """One of `MASKS`."""
    ragged: bool = False
    """Packs of different lengths with padding inside and random weights, many 0; else full packs,
    all weights 1.
    """
    seed: int = 0
    images: MockImages | None = None
    """Images in the packs of the masks `image` and `mixed`; None draws spans without images."""

    def __len__(self) -> int:
        """Packs in an epoch."""
        return 65_536

    def pack(self, i: int) -> Pack:
        """Pack `i` as a dataset would store it; spans are no part of it (see `mock_batch`)."""
        rng = np.random.default_rng([self.seed, i])
        total = self.seq_length
        if self.ragged:
            total -= int(rng.integers(0, self.seq_length // 4 + 1))
        count = 1 if self.mask == "causal" else int(rng.integers(1, max(min(5, total // 2), 1) + 1))
        cuts = np.sort(rng.choice(np.arange(1, total), count - 1, replace=False))
        padded = np.diff(np.concatenate(([0], cuts, [total])))
        true = padded - (rng.integers(0, np.minimum(padded, 4)) if self.ragged else 0)
        trees: list[list[_Node]] = [[(0, n, n)] for n in true.tolist()]  # of each document
        for tree, length in zip(trees, true.tolist(), strict=True):
            if self.mask == "tree":
                tree[:] = _nodes(rng, 0, length, TREE_DEPTH)
            elif self.mask in ("branches", "mixed") and length >= 2 and rng.random() >= 0.3:
                chosen = int(rng.integers(1, min(3, length - 1) + 1))
                starts = np.sort(rng.choice(np.arange(1, length), chosen, replace=False)).tolist()
                ends = [*starts[1:], length]
                tree[:] = [(0, starts[0], length), *zip(starts, ends, ends, strict=True)]
        # (segment, branch, start, stop) of each prefix and branch, tokens within the segment
        runs = [
            (segment, branch, start, stop)
            for segment, tree in enumerate(trees)
            for branch, (start, stop, _) in enumerate(tree)
        ]
        branches = np.array(
            [(start, stop - start, leave) for tree in trees for start, stop, leave in tree[1:]],
            BRANCH_DTYPE,
        )
        segments = np.zeros(count, SEGMENT_DTYPE)
        segments["true_length"], segments["padded_length"] = true, padded
        segments["num_branches"] = [len(tree) - 1 for tree in trees]
        segments["first_branch"] = np.cumsum(segments["num_branches"]) - segments["num_branches"]
        segments["prefix_length"] = [tree[0][1] for tree in trees]
        num_tokens = int(true.sum())
        words = min(self.vocab_size, self.images.image_patch) if self.images else self.vocab_size
        steps = np.where(rng.random(num_tokens) < 0.75, 1, rng.integers(0, words, num_tokens))
        tokens = np.cumsum(steps) % words
        weights, images = None, None
        if self.ragged:  # three in ten are 0
            weights = (rng.uniform(0.25, 1.0, num_tokens) * (rng.random(num_tokens) < 0.7)).astype(
                np.float32
            )
        if self.images is not None and self.mask in ("image", "mixed"):
            images = _with_images(tokens, runs, np.cumsum(true) - true, self.images, self.seed, i)
            read_only = tokens >= words  # tokens of images are not predicted
            weights = np.where(
                read_only, 0, np.ones(num_tokens) if weights is None else weights
            ).astype(np.float32)
        return Pack(i, tokens, weights, segments, branches if len(branches) else None, images)


_Node = tuple[int, int, int]
"""First token of a prefix or branch, the end of its own tokens, and that of its subtree."""
TREE_DEPTH = 4
"""Branches above one another at the most."""


def _nodes(rng: np.random.Generator, start: int, stop: int, depth: int) -> list[_Node]:
    """A random tree over tokens start..stop, in the order of its tokens."""
    own = (
        stop
        if depth == 0 or stop - start < 2 or rng.random() < 0.3
        else int(rng.integers(start + 1, stop))
    )
    found = [(start, own, stop)]
    while own < stop:
        end = int(rng.integers(own + 1, stop + 1))
        found += _nodes(rng, own, end, depth - 1)
        own = end
    return found


def mock_batch(
    numbers: Sequence[int], rules: MockRules, loading: ImageLoading | None = None
) -> PackedBatch:
    """One microbatch of the mock packs `numbers`, collated like stored ones, with spans where the
    mask has them.

    `loading` decodes the images of one rank.
    """
    packs = [rules.pack(i) for i in numbers]
    if rules.images is not None or rules.mask not in ("image", "mixed"):
        return collate(
            packs,
            image_attention=rules.images.attention if rules.images else "example",
            loading=loading,
        )
    batch = collate(packs)
    rng = np.random.default_rng([rules.seed, *numbers, len(numbers)])
    return dataclasses.replace(batch, span=_spans(rng, batch.document, batch.leave))


def _spans(rng: np.random.Generator, document: np.ndarray, leave: np.ndarray) -> np.ndarray:
    """int32 [T]: a stretch of image tokens in most prefixes and branches."""
    span = np.zeros(len(document), np.int32)
    change = np.flatnonzero(np.diff(document) | np.diff(leave)) + 1
    bounds = np.concatenate(([0], change, [len(document)]))
    for number, (start, stop) in enumerate(
        zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True), 1
    ):
        if document[start] < 0 or stop - start < 2 or rng.random() < 0.3:
            continue
        first, last = np.sort(rng.choice(np.arange(start, stop + 1), 2, replace=False)).tolist()
        span[first:last] = number
    return span


def _with_images(
    tokens: np.ndarray,
    runs: Sequence[tuple[int, int, int, int]],
    before: np.ndarray,
    images: MockImages,
    seed: int,
    pack: int,
) -> PackImages:
    """Overwrite stretches of `tokens` with images and return their tables; two runs in three get
    some, while room is.

    `runs`: as in `MockRules.pack`, where segment s begins at token `before[s]` of the pack.
    """
    rng = np.random.default_rng([seed, pack, 1])
    rows: list[tuple[int, ...]] = []
    grids: list[tuple[int, int]] = []  # of each unit
    items: list[bytes] = []
    crops_so_far = pooled_so_far = 0
    for segment, branch, start, stop in runs:
        at = start  # where the next image begins, within the segment
        while rng.random() < 0.7:
            video = rng.random() < 0.4
            crops, pooled = int(rng.integers(1, 6 if video else 4)), int(rng.integers(1, 5))
            at += int(rng.integers(0, 4))
            parts = [(1, frame) for frame in range(crops)] if video else [(crops, -1)]
            if images.has_grids:
                grid = (2, pooled // 2) if pooled > 1 else (1, 1)
                pooled = grid[0] * grid[1]
                crops = 4 * pooled
                parts = [(crops, frame) for _, frame in parts]
            if at + len(parts) * (pooled + 2) >= stop:
                break
            for number, frame in parts:
                first = before[segment] + at
                tokens[first : first + pooled + 2] = images.image_patch + 1
                tokens[first + 1 : first + 1 + pooled] = images.image_patch
                crops_so_far += number
                pooled_so_far += pooled
                rows.append(
                    (
                        segment,
                        len(items),
                        at,
                        pooled + 2,
                        crops_so_far,
                        pooled_so_far,
                        frame,
                        branch,
                    )
                )
                grids += [grid] if images.has_grids else []
                at += pooled + 2
            items.append(_ITEM.pack(seed, pack, len(items), crops, pooled))
    units = np.array(rows, UNIT_DTYPE)
    bounds = units["image_stop"].astype(np.int64), units["pooled_stop"].astype(np.int64)
    # every other pack has stored tables, so that rows with and without them stand side by side
    degrees = (1, 2, 3, 4, 8) if pack % 2 == 0 and len(units) else ()
    tables = {degree: compute_image_shard_boundaries(*bounds, degree) for degree in degrees}
    shapes = np.array(grids, np.int64).reshape(-1, 2) if images.has_grids else None
    return PackImages(units, tables, items.__getitem__, (images.image_patch,), shapes)


class MockDecoder:
    """The `Decoder` of mock images."""

    def __init__(self, images: MockImages) -> None:
        self.patch_shape = images.patches_per_crop, images.patch_dim

    def image(self, data: bytes) -> Pixels:
        """All crops of an image, normal patches and windows anywhere in them."""
        seed, pack, item, crops, pooled = _ITEM.unpack(data)
        return self._drawn([seed, pack, item], crops, pooled)

    def video(self, data: bytes, frames: Sequence[int]) -> Pixels:
        """Some frames; each is the same whatever others are asked for."""
        seed, pack, item, crops, pooled = _ITEM.unpack(data)
        crops = crops if self.patch_shape[0] == 1 else 1
        return joined(
            [self._drawn([seed, pack, item, frame], crops, pooled) for frame in frames],
            self.patch_shape,
        )

    def _drawn(self, seed: Sequence[int], crops: int, pooled: int) -> Pixels:
        rng = np.random.default_rng(seed)
        patches = rng.standard_normal((crops, *self.patch_shape), np.float32)
        if self.patch_shape[0] == 1:
            return patches, np.arange(crops).reshape(pooled, 4)
        windows = rng.integers(
            0, crops * self.patch_shape[0], (pooled, 4)
        )  # each pools four patches, some outside
        outside = rng.random(windows.shape) < 0.2
        outside[:, 0] = False  # a window has at least one patch
        return patches, np.where(outside, -1, windows)
