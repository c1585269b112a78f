"""Random packs in place of a dataset, for `megacp.train` without `--data-path` and parity checks.

Pack `i` depends only on (seed, i). It is collated like a stored pack, so checks with mock rows also
hold for real rows. Tokens are a random walk through the vocabulary: three of four steps go to the
next id. A model can learn this, so if the loss does not decrease on mock packs, there is a bug. The
"encoded bytes" of an image are the seed and sizes from which the decoder draws pixels.
"""

from __future__ import annotations

import dataclasses
import itertools
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
"""Masks of mock rows: one document; several documents; documents with branches, nested branches,
image spans, or branches and image spans."""
# seed, pack, item, crops (for a video: frames), pooled tokens of the image or of a frame
_ITEM = struct.Struct("<5q")


@dataclass(frozen=True)
class MockImages:
    """Properties of mock images that fit a model."""

    patches_per_crop: int
    patch_dim: int
    image_patch: int
    """Token id of a pooled feature, above the text ids. The next id marks the start and the end of
    each image.
    """
    attention: str = "example"
    """Value of --image-attention."""

    @property
    def has_grids(self) -> bool:
        """Whether a crop is one patch, for images of any shape. A token then has four patches."""
        return self.patches_per_crop == 1


@dataclass(frozen=True)
class MockRules:
    """Properties of mock packs, and a source of such packs for the loader."""

    vocab_size: int
    seq_length: int
    """Maximum number of tokens in a pack."""
    mask: str = "packed"
    """One of `MASKS`."""
    ragged: bool = False
    """Whether packs have different lengths, inner padding and random weights, many of them 0.
    Otherwise, packs are full and all weights are 1.
    """
    seed: int = 0
    images: MockImages | None = None
    """Images for packs with mask `image` or `mixed`; None draws spans without images."""

    def __len__(self) -> int:
        """Return the number of packs in an epoch."""
        return 65_536

    def pack(self, i: int) -> Pack:
        """Return pack `i` as a dataset would store it. `mock_batch` adds spans."""
        rng = np.random.default_rng([self.seed, i])
        total = self.seq_length
        if self.ragged:
            total -= int(rng.integers(0, self.seq_length // 4 + 1))
        # cut the pack into documents at random positions
        count = 1
        if self.mask != "causal":
            count = int(rng.integers(1, max(min(5, total // 2), 1) + 1))
        cuts = np.sort(rng.choice(np.arange(1, total), count - 1, replace=False))
        padded = np.diff(np.concatenate(([0], cuts, [total])))
        true = padded - (rng.integers(0, np.minimum(padded, 4)) if self.ragged else 0)
        trees = [self._tree(rng, length) for length in true.tolist()]  # one per document
        # (segment, branch, start, stop) of each prefix and branch, with indices in the segment
        runs = []
        rows = []  # rows of the branch table
        for segment, tree in enumerate(trees):
            for branch, (start, stop, leave) in enumerate(tree):
                runs.append((segment, branch, start, stop))
                if branch > 0:
                    rows.append((start, stop - start, leave))
        branches = np.array(rows, BRANCH_DTYPE)
        segments = np.zeros(count, SEGMENT_DTYPE)
        segments["true_length"] = true
        segments["padded_length"] = padded
        segments["num_branches"] = [len(tree) - 1 for tree in trees]
        segments["first_branch"] = np.cumsum(segments["num_branches"]) - segments["num_branches"]
        segments["prefix_length"] = [tree[0][1] for tree in trees]
        num_tokens = int(true.sum())
        # text ids are below image ids
        words = min(self.vocab_size, self.images.image_patch) if self.images else self.vocab_size
        steps = np.where(rng.random(num_tokens) < 0.75, 1, rng.integers(0, words, num_tokens))
        tokens = np.cumsum(steps) % words
        weights = None
        images = None
        if self.ragged:  # three of ten weights are 0
            values = rng.uniform(0.25, 1.0, num_tokens)
            values[rng.random(num_tokens) >= 0.7] = 0.0
            weights = values.astype(np.float32)
        if self.images is not None and self.mask in ("image", "mixed"):
            images = _with_images(tokens, runs, np.cumsum(true) - true, self.images, self.seed, i)
            if weights is None:
                weights = np.ones(num_tokens, np.float32)
            weights[tokens >= words] = 0.0  # image tokens are not predicted
        return Pack(i, tokens, weights, segments, branches if len(branches) else None, images)

    def _tree(self, rng: np.random.Generator, length: int) -> list[_Node]:
        """Return a random prefix and random branches for a document with `length` tokens."""
        if self.mask == "tree":
            return _nodes(rng, 0, length, TREE_DEPTH)
        if self.mask in ("branches", "mixed") and length >= 2 and rng.random() >= 0.3:
            chosen = int(rng.integers(1, min(3, length - 1) + 1))
            starts = np.sort(rng.choice(np.arange(1, length), chosen, replace=False)).tolist()
            ends = [*starts[1:], length]
            return [(0, starts[0], length), *zip(starts, ends, ends, strict=True)]
        return [(0, length, length)]


_Node = tuple[int, int, int]
"""First token of a prefix or branch, end of its own tokens, and end of its subtree."""
TREE_DEPTH = 4
"""Maximum depth of branches."""


def _nodes(rng: np.random.Generator, start: int, stop: int, depth: int) -> list[_Node]:
    """Return the nodes of a random tree on tokens [start, stop), in token order."""
    if depth == 0 or stop - start < 2 or rng.random() < 0.3:
        own = stop
    else:
        own = int(rng.integers(start + 1, stop))
    found = [(start, own, stop)]
    while own < stop:
        end = int(rng.integers(own + 1, stop + 1))
        found += _nodes(rng, own, end, depth - 1)
        own = end
    return found


def mock_batch(
    numbers: Sequence[int], rules: MockRules, loading: ImageLoading | None = None
) -> PackedBatch:
    """Return a microbatch of the mock packs `numbers`, with spans if the mask has them.

    The packs are collated like stored packs. `loading` selects the images that a rank decodes.
    """
    packs = [rules.pack(i) for i in numbers]
    if rules.images is not None:
        return collate(packs, image_attention=rules.images.attention, loading=loading)
    if rules.mask not in ("image", "mixed"):
        return collate(packs, loading=loading)
    batch = collate(packs)
    rng = np.random.default_rng([rules.seed, *numbers, len(numbers)])
    return dataclasses.replace(batch, span=_spans(rng, batch.document, batch.leave))


def _spans(rng: np.random.Generator, document: np.ndarray, leave: np.ndarray) -> np.ndarray:
    """Return random spans, int32 [T]: a range of tokens in most prefixes and branches."""
    span = np.zeros(len(document), np.int32)
    # a run ends where the document or the branch changes
    change = np.flatnonzero(np.diff(document) | np.diff(leave)) + 1
    bounds = [0, *change.tolist(), len(document)]
    for number, (start, stop) in enumerate(itertools.pairwise(bounds), 1):
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
    """Overwrite ranges of `tokens` with images; return the images and their tables.

    Most runs get images, if there is space. See `MockRules.pack` for `runs`. Segment s begins at
    token `before[s]` of the pack.
    """
    rng = np.random.default_rng([seed, pack, 1])
    rows: list[tuple[int, ...]] = []
    grids: list[tuple[int, int]] = []  # grid of each unit
    items: list[bytes] = []
    crops_so_far = pooled_so_far = 0  # cumulative in the pack
    for segment, branch, start, stop in runs:
        at = start  # start of the next image within the segment
        while rng.random() < 0.7:
            video = rng.random() < 0.4
            crops = int(rng.integers(1, 6 if video else 4))
            pooled = int(rng.integers(1, 5))
            at += int(rng.integers(0, 4))
            # (crops, frame) of each unit: a video has one unit per frame
            parts = [(1, frame) for frame in range(crops)] if video else [(crops, -1)]
            if images.has_grids:
                grid = (2, pooled // 2) if pooled > 1 else (1, 1)
                pooled = grid[0] * grid[1]
                crops = 4 * pooled
                parts = [(crops, frame) for _, frame in parts]
            if at + len(parts) * (pooled + 2) >= stop:  # no space left in this run
                break
            for number, frame in parts:
                first = before[segment] + at
                tokens[first : first + pooled + 2] = images.image_patch + 1
                tokens[first + 1 : first + 1 + pooled] = images.image_patch
                crops_so_far += number
                pooled_so_far += pooled
                item = len(items)
                stops = crops_so_far, pooled_so_far
                rows.append((segment, item, at, pooled + 2, *stops, frame, branch))
                if images.has_grids:
                    grids.append(grid)
                at += pooled + 2
            items.append(_ITEM.pack(seed, pack, len(items), crops, pooled))
    units = np.array(rows, UNIT_DTYPE)
    bounds = units["image_stop"].astype(np.int64), units["pooled_stop"].astype(np.int64)
    # Only every second pack has stored tables, so that rows combine packs with and without tables.
    degrees = (1, 2, 3, 4, 8) if pack % 2 == 0 and len(units) else ()
    tables = {degree: compute_image_shard_boundaries(*bounds, degree) for degree in degrees}
    shapes = np.array(grids, np.int64).reshape(-1, 2) if images.has_grids else None
    return PackImages(units, tables, items.__getitem__, (images.image_patch,), shapes)


class MockDecoder:
    """Decoder of mock images, see `images.Decoder`."""

    def __init__(self, images: MockImages) -> None:
        self.patch_shape = images.patches_per_crop, images.patch_dim

    def image(self, data: bytes) -> Pixels:
        """Return all crops of an image, with normally distributed values and random windows."""
        seed, pack, item, crops, pooled = _ITEM.unpack(data)
        return self._drawn([seed, pack, item], crops, pooled)

    def video(self, data: bytes, frames: Sequence[int]) -> Pixels:
        """Return some frames of a video. A frame does not depend on which others are decoded."""
        seed, pack, item, crops, pooled = _ITEM.unpack(data)
        crops = crops if self.patch_shape[0] == 1 else 1
        drawn = [self._drawn([seed, pack, item, frame], crops, pooled) for frame in frames]
        return joined(drawn, self.patch_shape)

    def _drawn(self, seed: Sequence[int], crops: int, pooled: int) -> Pixels:
        """Return patches with normally distributed values, and random windows."""
        rng = np.random.default_rng(seed)
        patches = rng.standard_normal((crops, *self.patch_shape), np.float32)
        if self.patch_shape[0] == 1:
            return patches, np.arange(crops).reshape(pooled, 4)
        # each window pools four patches, some of them outside
        windows = rng.integers(0, crops * self.patch_shape[0], (pooled, 4))
        outside = rng.random(windows.shape) < 0.2
        outside[:, 0] = False  # a window has at least one patch
        return patches, np.where(outside, -1, windows)
