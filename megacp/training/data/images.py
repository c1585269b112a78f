"""The images of a row: spans and bounds for all ranks, from tables alone; pixels for the rank that
encodes them.

The boundary table says which rank encodes which image, so no rank sends pixels to another. A rank
that encodes nothing (another pipeline stage, more ranks than units) decodes nothing.

A bad image: `fail` ends the run and names the record. `skip` drops the whole document, on all ranks
alike, though one rank alone has seen the fault. That rank reports it
(`VisionInputs.bad_documents`), the ranks exchange their reports before a step, and each clears the
same documents (`training/loop/images.py`).
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
    """Encoded bytes to pixels; called from several threads at once. ImageError says what is wrong
    with the bytes.

    `patch_shape`: patches of a crop, numbers of a patch. `image`: all crops of an image. `video`:
    those of some units of a video, whose numbers rise.
    """

    @property
    def patch_shape(self) -> tuple[int, int]: ...
    def image(self, data: bytes) -> Pixels: ...
    def video(self, data: bytes, frames: Sequence[int]) -> Pixels: ...


@dataclass(frozen=True)
class ImageLoading:
    """What one rank decodes and how."""

    decoder: Decoder
    cp_rank: int = 0
    cp_size: int = 1
    decodes: bool = True
    """False on pipeline stages that encode no images."""
    on_bad_image: str = "fail"
    """fail: the run ends; skip: the document is dropped."""
    strategy: str = "stored"
    """stored (computed where there is no such table), computed or replicate."""


@dataclass(frozen=True, eq=False)
class RowUnits:
    """The units of all packs of a row, in order."""

    table: np.ndarray
    """tables.UNIT_DTYPE [u], with `segment` counted over all packs."""
    pack: np.ndarray
    """Index into the packs of the row, int64 [u]."""
    begin: np.ndarray
    """Place in the row at which each segment begins, int64 [segments]."""
    first: np.ndarray
    """Place of the unit's first token in the row, int64 [u]."""
    cum_crops: np.ndarray
    """int64 [u], as are pooled tokens."""
    cum_pooled: np.ndarray
    grids: np.ndarray | None
    """int64 [u, 2], as of a pack; None where no pack has some."""


def row_units(
    images: Sequence[PackImages], num_segments: Sequence[int], begin: np.ndarray
) -> RowUnits:
    """Units of packs with `num_segments` segments each, where segment s of the row begins at index
    `begin[s]`.
    """
    pack = np.repeat(np.arange(len(images)), [len(one.units) for one in images])
    table = np.concatenate([one.units for one in images])
    table["segment"] += (np.cumsum(num_segments) - num_segments)[
        pack
    ]  # segments of the packs before
    cumulative = dict[str, np.ndarray]()
    for name in ("image_stop", "pooled_stop"):
        totals = np.array([int(one.units[name][-1]) if len(one.units) else 0 for one in images])
        cumulative[name] = table[name].astype(np.int64) + (np.cumsum(totals) - totals)[pack]
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
    """What all ranks know of the images of a row of `tokens [T]`: no pixels, and no boundary table
    yet.

    ValueError names the document that has other image-patch tokens than features, with `packs` its
    record too.
    """
    in_row = np.flatnonzero(np.isin(tokens, feature_ids))  # image-patch tokens
    # [segments]: image-patch tokens of each, and the features that its units make
    held = np.bincount(
        np.searchsorted(units.begin, in_row, side="right") - 1, minlength=len(units.begin)
    )
    pooled = np.diff(units.cum_pooled, prepend=0)
    features = np.bincount(units.table["segment"], pooled, len(units.begin)).astype(np.int64)
    for segment in np.flatnonzero(held != features).tolist():
        where = f"{_record(packs, segment)}, " if packs else ""
        ids = ", ".join(map(str, feature_ids))
        counts = (
            f"{features[segment]} image features and {held[segment]} image-patch tokens (id {ids})"
        )
        raise ValueError(f"{where}document {segment} of its row: {counts}")
    patches, pooling = np.zeros((0, 0, 0), np.float32), np.zeros((0, 1), np.int64)
    return VisionInputs(units.cum_crops, units.cum_pooled, in_row, None, patches, pooling)


def spans(units: RowUnits, length: int, image_attention: str) -> np.ndarray:
    """int32 [length]: image tokens (markers included) that see each other in both directions share
    a number above 0.

    "example": all of a source document, or of one of its branches; "image": each image or frame by
    itself; "causal": none.
    """
    span = np.zeros(length, np.int32)
    if image_attention != "causal":
        # [2, u] -> [u]: units of one part of a document share a number
        parts = np.stack([units.table["segment"], units.table["branch"]])
        together = np.unique(parts, axis=1, return_inverse=True)[1].reshape(-1)
        number = {"example": together, "image": np.arange(len(units.first))}[image_attention]
        for first, count, value in zip(
            units.first, units.table["num_tokens"], number + 1, strict=True
        ):
            span[first : first + count] = value
    return span


def with_images(
    batch: PackedBatch,
    packs: Sequence[Pack],
    begin: np.ndarray,
    image_attention: str,
    loading: ImageLoading | None,
) -> PackedBatch:
    """The row of `packs` with the spans and bounds of its images, and the pixels that `loading`
    asks for.

    Segment s begins at index `begin[s]`; without images it is the row itself. ValueError names the
    record whose image-patch tokens are not as many as its features, and that of a bad image when
    the policy is `fail`.
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
    """int64 [T, 3], as `PackedBatch` says, for units of `grids [u, 2]`: along the paths of trees
    too.

    An image's tokens begin where the text before it ends; rows and columns count on from there,
    time does not.
    """
    rows, stops = vision.feature_rows, vision.cum_token_pooling_bounds
    step = (batch.leave > 0).astype(np.int64)  # [T]: how far a token moves what stands behind it
    step[rows] = 0
    step[rows[stops - 1]] = grids.max(1)  # the last token of an image, for all of it
    ended = np.cumsum(np.bincount(batch.leave, step, len(batch) + 1))[:-1].astype(
        np.int64
    )  # in parts that end before
    position = np.where(batch.leave > 0, np.cumsum(step) - step - ended, batch.position_ids)
    axes = np.repeat(position[:, None], 3, axis=1)
    pooled = np.diff(stops, prepend=0)  # [u]: tokens of each image
    columns = np.repeat(grids[:, 1], pooled)  # of the image of each of its tokens
    within = np.arange(len(rows)) - np.repeat(
        stops - pooled, pooled
    )  # index in its image, row by row
    axes[rows, 1] += within // columns
    axes[rows, 2] += within % columns
    return axes


def _record(packs: Sequence[Pack], segment: int) -> str:
    """Where a segment of the row comes from, as words for an error."""
    return [pack.record(number) for pack in packs for number in range(len(pack.segments))][segment]


def _with_pixels(
    vision: VisionInputs,
    document: np.ndarray,
    packs: Sequence[Pack],
    units: RowUnits,
    loading: ImageLoading,
) -> VisionInputs:
    """The images of a row with their boundary table for `cp_size` ranks and the pixels that this
    rank encodes.
    """
    images = [pack.images for pack in packs if pack.images is not None]
    shape = loading.decoder.patch_shape
    table = units.table
    bounds = units.cum_crops, units.cum_pooled
    # a row of several packs has other bounds than each of them
    stored = (
        images[0].boundaries.get(loading.cp_size)
        if len(images) == 1 and loading.strategy == "stored"
        else None
    )
    strategy = (
        loading.strategy
        if loading.strategy == REPLICATE
        else "computed"
        if stored is None
        else "stored"
    )
    rank, ranks = (0, 1) if strategy == REPLICATE else (loading.cp_rank, loading.cp_size)
    boundaries = compute_image_shard_boundaries(*bounds, ranks) if stored is None else stored
    mine = list(units_of(boundaries, units.cum_crops, rank)) if loading.decodes else []
    sizes = np.diff(np.stack(bounds, 1), axis=0, prepend=0)  # [u, (crops, pooled)]
    found: list[Pixels] = []
    bad: dict[int, str] = {}

    def file(unit: int) -> tuple[int, ...]:
        """Frames of one video stand together, and their file is read once; an image that is named
        twice stays two.
        """
        return (
            int(units.pack[unit]),
            int(table["item"][unit]),
            -1 if table["frame"][unit] >= 0 else unit,
        )

    for _, group in itertools.groupby(mine, file):
        item = list(group)
        first = item[0]
        frames = table["frame"][item].tolist()  # -1: an image
        crops, pooled = sizes[item].sum(0).tolist()
        try:
            data = images[int(units.pack[first])].read(int(table["item"][first]))
            pixels = (
                loading.decoder.video(data, frames)
                if frames[0] >= 0
                else loading.decoder.image(data)
            )
            expected = (crops, *shape), pooled
            if (sized := (pixels[0].shape, len(pixels[1]))) != expected:
                raise ImageError(
                    f"it decodes to patches and pooled tokens {sized}, the dataset has {expected}"
                )
            found.append(pixels)
        except ImageError as error:
            what = "video" if frames[0] >= 0 else "image"
            reason = (
                f"{_record(packs, int(table['segment'][first]))}: {what} "
                f"{table['item'][first]}: {error}"
            )
            if loading.on_bad_image == "fail":
                raise ValueError(
                    f"{reason} (--on-bad-image skip leaves such documents out)"
                ) from None
            bad.setdefault(int(document[units.first[first]]), reason)
            # a stand-in: its features are finite, and no token sees them
            window = 1 if units.grids is None else crops // pooled
            found.append(
                (np.zeros((crops, *shape), np.float32), np.zeros((pooled, window), np.int64))
            )
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
    """Pixels of several items as one: windows filled up with -1, indices counted from the first
    item's patches.
    """
    patches = np.concatenate(
        [np.zeros((0, *patch_shape), np.float32), *(pixels for pixels, _ in found)]
    )
    window = max((pooling.shape[1] for _, pooling in found), default=1)  # patches of the largest
    rows = [np.zeros((0, window), np.int64)]
    before = 0
    for pixels, pooling in found:
        moved = np.where(pooling >= 0, pooling + before, -1)
        rows.append(np.pad(moved, ((0, 0), (0, window - pooling.shape[1])), constant_values=-1))
        before += pixels.shape[0] * pixels.shape[1]  # crops x patches of a crop
    return patches, np.concatenate(rows)
