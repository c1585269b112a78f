"""Images of a row: spans and bounds for all ranks, and pixels for the rank that encodes them.

Spans and bounds are computed only from tables. The boundary table determines which rank encodes
which image, so ranks never send pixels. A rank that encodes no image (on another pipeline stage, or
if there are more ranks than units) decodes none.

With policy `fail`, a bad image ends the run, and the message includes the image's record. With
`skip`, all ranks drop the whole document, although only one rank has tried to decode the image.
That rank reports the document in `VisionInputs.bad_documents`. The ranks exchange their reports
before a step, and all of them clear the same documents (`training/loop/images.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megacp.engine.rows.batch import PackedBatch, VisionInputs
from megacp.engine.rows.image_shards import REPLICATE, compute_image_shard_boundaries, units_of
from megacp.training.data.reader import Pack, PackImages
from megacp.training.data.vision.rules import ImageError, Pixels


class Decoder(Protocol):
    """Decoder from encoded bytes to pixels. Several threads may use it at once.

    `patch_shape` contains the numbers of patches per crop and of values per patch. `image` returns
    all crops of an image, and `video` the crops of some units of a video, in increasing order. Both
    raise ImageError if the bytes cannot be decoded.
    """

    @property
    def patch_shape(self) -> tuple[int, int]: ...
    def image(self, data: bytes) -> Pixels: ...
    def video(self, data: bytes, frames: Sequence[int]) -> Pixels: ...


@dataclass(frozen=True)
class ImageLoading:
    """Which images one rank decodes, and how."""

    decoder: Decoder
    cp_rank: int = 0
    cp_size: int = 1
    decodes: bool = True
    """Whether this rank decodes images: False on pipeline stages that do not encode them."""
    on_bad_image: str = "fail"
    """fail (end the run) or skip (drop the document)."""
    strategy: str = "stored"
    """Source of the boundary table: stored (computed if the table is missing), computed, or
    replicate (every rank encodes all images).
    """


@dataclass(frozen=True, eq=False)
class RowUnits:
    """Units of all packs in a row, in order."""

    table: np.ndarray
    """tables.UNIT_DTYPE [u]; `segment` is numbered across all packs."""
    pack: np.ndarray
    """Index of each unit's pack in the row, int64 [u]."""
    begin: np.ndarray
    """Row index at which each segment begins, int64 [segments]."""
    first: np.ndarray
    """Row index of each unit's first token, int64 [u]."""
    cum_crops: np.ndarray
    """Cumulative crops in the row up to and including each unit, int64 [u]."""
    cum_pooled: np.ndarray
    """Cumulative pooled tokens up to and including each unit, int64 [u]."""
    grids: np.ndarray | None
    """Rows and columns of each unit's pooled tokens, int64 [u, 2]; None if no pack has grids."""


def row_units(
    images: Sequence[PackImages], num_segments: Sequence[int], begin: np.ndarray
) -> RowUnits:
    """Return the units of packs with `num_segments` segments each.

    Segment s of the row begins at index `begin[s]`.
    """
    pack = np.repeat(np.arange(len(images)), [len(one.units) for one in images])
    table = np.concatenate([one.units for one in images])
    segments_before = np.cumsum(num_segments) - num_segments  # [packs]
    table["segment"] += segments_before[pack]
    cumulative = dict[str, np.ndarray]()
    for name in ("image_stop", "pooled_stop"):
        totals = np.array([int(one.units[name][-1]) if len(one.units) else 0 for one in images])
        before = np.cumsum(totals) - totals  # [packs]
        cumulative[name] = table[name].astype(np.int64) + before[pack]
    grids = [one.grids for one in images if one.grids is not None]
    return RowUnits(
        table=table,
        pack=pack,
        begin=begin,
        first=begin[table["segment"]] + table["start"],
        cum_crops=cumulative["image_stop"],
        cum_pooled=cumulative["pooled_stop"],
        grids=np.concatenate(grids) if grids else None,
    )


def vision_inputs(
    units: RowUnits, tokens: np.ndarray, feature_ids: tuple[int, ...], packs: Sequence[Pack] = ()
) -> VisionInputs:
    """Return the vision inputs of a row with `tokens [T]`, without pixels and boundary table.

    Raise ValueError if a document's numbers of image-patch tokens and features differ. The message
    includes the document and, if `packs` are given, its record.
    """
    in_row = np.flatnonzero(np.isin(tokens, feature_ids))  # indices of image-patch tokens
    # [segments]: number of image-patch tokens, and number of features from the units
    segment_of_token = np.searchsorted(units.begin, in_row, side="right") - 1
    held = np.bincount(segment_of_token, minlength=len(units.begin))
    pooled = np.diff(units.cum_pooled, prepend=0)
    features = np.bincount(units.table["segment"], pooled, len(units.begin)).astype(np.int64)
    for segment in np.flatnonzero(held != features).tolist():
        where = f"{_record(packs, segment)}, " if packs else ""
        ids = ", ".join(map(str, feature_ids))
        counts = (
            f"{features[segment]} image features and {held[segment]} image-patch tokens (id {ids})"
        )
        raise ValueError(f"{where}document {segment} of the row has {counts}: rebuild the dataset")
    patches = np.zeros((0, 0, 0), np.float32)
    pooling = np.zeros((0, 1), np.int64)
    return VisionInputs(units.cum_crops, units.cum_pooled, in_row, None, patches, pooling)


def spans(units: RowUnits, length: int, image_attention: str) -> np.ndarray:
    """Return the spans of a row, int32 [length].

    Image tokens (including markers) that attend to each other in both directions share a number
    above 0: with "example", all image tokens of a document's prefix or of a branch; with "image",
    all tokens of an image or frame. With "causal", all numbers are 0.
    """
    span = np.zeros(length, np.int32)
    if image_attention != "causal":
        # [2, u] -> [u]: units in the same prefix or branch have the same number
        parts = np.stack([units.table["segment"], units.table["branch"]])
        together = np.unique(parts, axis=1, return_inverse=True)[1].reshape(-1)
        number = {"example": together, "image": np.arange(len(units.first))}[image_attention]
        lengths = units.table["num_tokens"]
        for first, count, value in zip(units.first, lengths, number + 1, strict=True):
            span[first : first + count] = value
    return span


def with_images(
    batch: PackedBatch,
    packs: Sequence[Pack],
    begin: np.ndarray,
    image_attention: str,
    loading: ImageLoading | None,
) -> PackedBatch:
    """Return a row of `packs` with the images' spans and bounds, and with pixels for `loading`.

    Segment s begins at index `begin[s]`. A row without images is returned unchanged. Raise
    ValueError that includes the record if the numbers of image-patch tokens and features differ,
    and for a bad image if the policy is `fail`.
    """
    images = [pack.images for pack in packs if pack.images is not None]
    if not images:
        return batch
    units = row_units(images, [len(pack.segments) for pack in packs], begin)
    vision = vision_inputs(units, batch.tokens, images[0].feature_ids, packs)
    if units.grids is not None:
        batch = dataclasses.replace(batch, position_axes=position_axes(batch, units.grids, vision))
    if loading is not None:
        vision = _with_pixels(vision, batch.document, packs, units, loading)
    return dataclasses.replace(batch, span=spans(units, len(batch), image_attention), vision=vision)


def position_axes(batch: PackedBatch, grids: np.ndarray, vision: VisionInputs) -> np.ndarray:
    """Return the positions on three axes, int64 [T, 3], for units with `grids [u, 2]`.

    See `PackedBatch.position_axes`. An image begins at the position after the preceding text. From
    there, row and column positions increase within the image, while the time position is constant.
    In trees, positions follow the paths.
    """
    rows = vision.feature_rows
    stops = vision.cum_token_pooling_bounds
    # [T]: how far each token advances the position. An image advances it by its larger side, at the
    # image's last token.
    step = (batch.leave > 0).astype(np.int64)
    step[rows] = 0
    step[rows[stops - 1]] = grids.max(1)
    # [T]: steps in branches that end before the token, and so are not on its path
    steps_by_leave = np.bincount(batch.leave, step, len(batch) + 1)
    ended = np.cumsum(steps_by_leave)[:-1].astype(np.int64)
    position = np.where(batch.leave > 0, np.cumsum(step) - step - ended, batch.position_ids)
    axes = np.repeat(position[:, None], 3, axis=1)
    pooled = np.diff(stops, prepend=0)  # [u]: tokens of each image
    columns = np.repeat(grids[:, 1], pooled)  # columns of each image token's image
    # index of each token in its image, in row-major order
    within = np.arange(len(rows)) - np.repeat(stops - pooled, pooled)
    axes[rows, 1] += within // columns
    axes[rows, 2] += within % columns
    return axes


def _record(packs: Sequence[Pack], segment: int) -> str:
    """Return the origin of a segment in the row, as text for an error message."""
    for pack in packs:
        if segment < len(pack.segments):
            return pack.record(segment)
        segment -= len(pack.segments)
    raise IndexError(f"the row has fewer segments, by {segment + 1}")


def _with_pixels(
    vision: VisionInputs,
    document: np.ndarray,
    packs: Sequence[Pack],
    units: RowUnits,
    loading: ImageLoading,
) -> VisionInputs:
    """Return the vision inputs with a boundary table for `cp_size` ranks and this rank's pixels."""
    images = [pack.images for pack in packs if pack.images is not None]
    shape = loading.decoder.patch_shape
    table = units.table
    bounds = units.cum_crops, units.cum_pooled
    stored = None
    # a stored table is only valid for its own pack, not for a row of several packs
    if len(images) == 1 and loading.strategy == "stored":
        stored = images[0].boundaries.get(loading.cp_size)
    if loading.strategy == REPLICATE:
        strategy, rank, ranks = REPLICATE, 0, 1  # every rank encodes all images
    else:
        strategy = "computed" if stored is None else "stored"
        rank, ranks = loading.cp_rank, loading.cp_size
    boundaries = compute_image_shard_boundaries(*bounds, ranks) if stored is None else stored
    mine = list(units_of(boundaries, units.cum_crops, rank)) if loading.decodes else []
    sizes = np.diff(np.stack(bounds, 1), axis=0, prepend=0)  # [u, (crops, pooled)]
    found: list[Pixels] = []
    bad: dict[int, str] = {}

    def file(unit: int) -> tuple[int, ...]:
        """Return a key by which units are grouped to read a file once for all frames of a video.

        An image that occurs twice is read twice.
        """
        pack = int(units.pack[unit])
        item = int(table["item"][unit])
        return pack, item, -1 if table["frame"][unit] >= 0 else unit

    for _, group in itertools.groupby(mine, file):
        item = list(group)
        first = item[0]
        frames = table["frame"][item].tolist()  # -1: an image
        is_video = frames[0] >= 0
        crops, pooled = sizes[item].sum(0).tolist()
        try:
            data = images[int(units.pack[first])].read(int(table["item"][first]))
            if is_video:
                pixels = loading.decoder.video(data, frames)
            else:
                pixels = loading.decoder.image(data)
            expected = (crops, *shape), pooled
            sized = pixels[0].shape, len(pixels[1])
            if sized != expected:
                raise ImageError(
                    f"it decodes to patches and pooled tokens of {sized}, but the dataset has "
                    f"{expected}"
                )
            found.append(pixels)
        except ImageError as error:
            kind = "video" if is_video else "image"
            record = _record(packs, int(table["segment"][first]))
            reason = f"{record}: {kind} {table['item'][first]}: {error}"
            if loading.on_bad_image == "fail":
                raise ValueError(
                    f"{reason} (use --on-bad-image skip to drop such documents)"
                ) from None
            bad.setdefault(int(document[units.first[first]]), reason)
            # Use zeros as placeholder pixels: their features are finite, and no token attends to
            # them.
            window = 1 if units.grids is None else crops // pooled
            patches = np.zeros((crops, *shape), np.float32)
            found.append((patches, np.zeros((pooled, window), np.int64)))
    patches, pooling = joined(found, shape)
    return dataclasses.replace(
        vision,
        boundaries=boundaries,
        strategy=strategy,
        grids=None if units.grids is None else units.grids[mine],
        patches=patches,
        pooling=pooling,
        bad_documents=tuple(sorted(bad.items())),
    )


def joined(found: Sequence[Pixels], patch_shape: tuple[int, int]) -> Pixels:
    """Return the concatenated pixels of several items.

    Windows are padded with -1, and pooling indices count from the first item's first patch.
    """
    no_patches = np.zeros((0, *patch_shape), np.float32)  # determines the shape without items
    patches = np.concatenate([no_patches, *(pixels for pixels, _ in found)])
    window = max((pooling.shape[1] for _, pooling in found), default=1)  # the widest of all items
    rows = [np.zeros((0, window), np.int64)]
    before = 0
    for pixels, pooling in found:
        moved = np.where(pooling >= 0, pooling + before, -1)
        missing = window - pooling.shape[1]
        rows.append(np.pad(moved, ((0, 0), (0, missing)), constant_values=-1))
        before += pixels.shape[0] * pixels.shape[1]  # crops x patches per crop
    return patches, np.concatenate(rows)
