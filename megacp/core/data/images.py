"""The images of a row: spans and bounds for all ranks, pixels for the rank that encodes them.

The boundary table says which rank encodes which image, so no rank sends pixels to another. A rank that encodes nothing
(another pipeline stage, more ranks than units) decodes nothing.

A bad image: `fail` ends the run with the record's place. `skip` drops the whole document, on all ranks alike, though
one rank alone has seen the fault. That rank reports it (`VisionInputs.bad_documents`), the ranks exchange their reports
before a step, and each clears the same documents (`training/images.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megacp.core.data.batch import PackedBatch, VisionInputs
from megacp.core.data.image_shards import (
    REPLICATE,
    ImageShards,
    VisionCost,
    image_shards,
    longest_first,
    replicated,
    unit_costs,
)
from megacp.core.data.pixels import ImageError
from megacp.core.data.reader import Pack
from megacp.core.data.row_images import ImageCountError, PackImages, RowUnits, spans, vision_inputs

Pixels = tuple[np.ndarray, np.ndarray]
"""float32 [c, patches of a crop, patch_dim]; int64 [pooled tokens, window] into its patches, -1 = outside."""


class Decoder(Protocol):
    """Encoded bytes to pixels, by the image rules of a dataset. Called from several threads at once."""

    @property
    def patch_shape(self) -> tuple[int, int]:
        """Patches of a crop, numbers of a patch."""
        ...

    def image(self, data: bytes) -> Pixels:
        """All crops of an image. ImageError says what is wrong with it."""
        ...

    def video(self, data: bytes, frames: Sequence[int]) -> Pixels:
        """Some of the sampled frames of a video (their numbers rise), one crop each. ImageError likewise."""
        ...


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
    """The first strategy to try: stored tables, the function on the bounds, equal counts of units; or longest_first, or
    replicate."""
    cost: VisionCost | None = None
    """What longest_first weighs units by; None weighs crops, as the stored tables do."""


def with_images(
    batch: PackedBatch, packs: Sequence[Pack], units: RowUnits, image_attention: str, loading: ImageLoading | None
) -> PackedBatch:
    """The row of `packs` with the spans and bounds of its images `units`, and the pixels that `loading` asks for.

    ValueError names the record whose image-patch tokens are not as many as its features, and that of a bad image when
    the policy is `fail`.
    """
    assert packs[0].images is not None
    try:
        vision = vision_inputs(units, batch.tokens, packs[0].images.image_patch)
    except ImageCountError as error:
        raise ValueError(f"{_record(packs, error.segment)}, document {error.segment} of its row: {error}") from error
    if loading is not None:
        vision = _with_pixels(vision, batch.document, packs, units, loading)
    return dataclasses.replace(batch, span=spans(units, len(batch), image_attention), vision=vision)


def _record(packs: Sequence[Pack], segment: int) -> str:
    """Where a segment of the row comes from, as words for an error."""
    return [pack.record(number) for pack in packs for number in range(len(pack.segments))][segment]


def _with_pixels(
    vision: VisionInputs, document: np.ndarray, packs: Sequence[Pack], units: RowUnits, loading: ImageLoading
) -> VisionInputs:
    """The images of a row with their boundary table for `cp_size` ranks and the pixels that this rank encodes."""
    images = [pack.images for pack in packs if pack.images is not None]
    shards = _shards(images, units, loading)
    mine = shards.units(units.cum_crops, loading.cp_rank) if loading.decodes else np.zeros(0, np.int64)
    found: dict[int, Pixels] = {}
    bad: dict[int, str] = {}
    for item in _items(units, mine):
        first, is_video = item[0], units.frame[item[0]] >= 0
        sizes = [_sizes(units, unit) for unit in item]
        try:
            data = images[int(units.pack[first])].read(int(units.item[first]))
            frames = [int(units.frame[unit]) for unit in item]
            pixels = loading.decoder.video(data, frames) if is_video else loading.decoder.image(data)
            _refuse_other_sizes(pixels, np.sum(sizes, 0), loading.decoder.patch_shape)
            found.update(zip(item, _split(pixels, sizes), strict=True))
        except ImageError as error:
            what = "video" if is_video else "image"
            reason = f"{_record(packs, int(units.segment[first]))}: {what} {units.item[first]}: {error}"
            if loading.on_bad_image == "fail":
                raise ValueError(f"{reason} (--on-bad-image skip leaves such documents out)") from None
            bad.setdefault(int(document[units.first[first]]), reason)
            found.update(
                (unit, _blank(size, loading.decoder.patch_shape)) for unit, size in zip(item, sizes, strict=True)
            )
    patches, pooling = joined([found[unit] for unit in mine.tolist()], loading.decoder.patch_shape)
    return dataclasses.replace(
        vision,
        boundaries=shards.boundaries,
        strategy=shards.strategy,
        first_crop=shards.first_crop(loading.cp_rank) if len(mine) else 0,
        unit_order=shards.order,
        patches=patches,
        pooling=pooling,
        bad_documents=tuple(sorted(bad.items())),
    )


def _shards(images: Sequence[PackImages], units: RowUnits, loading: ImageLoading) -> ImageShards:
    """Who encodes what, by the strategy of `loading` or the first after it that can."""
    bounds = units.cum_crops, units.cum_pooled
    if loading.strategy == REPLICATE:
        return replicated(*bounds)
    if loading.strategy == "longest_first":
        costs = None if loading.cost is None else unit_costs(*bounds, loading.cost)
        return longest_first(*bounds, loading.cp_size, costs)
    # a row of several packs has other bounds than each of them
    usable = len(images) == 1 and loading.strategy == "stored"
    stored = images[0].boundaries.get(loading.cp_size) if usable else None
    return image_shards(bounds, loading.cp_size, stored, units_known=loading.strategy != "uniform")


def _items(units: RowUnits, mine: np.ndarray) -> list[list[int]]:
    """The units that a rank decodes, those of one video together with rising frames, so each file is read once."""
    items: dict[tuple[int, ...], list[int]] = {}
    for unit in sorted(mine.tolist()):
        frame = () if units.frame[unit] >= 0 else (unit,)  # an image that is named twice stays two
        items.setdefault((int(units.pack[unit]), int(units.item[unit]), *frame), []).append(unit)
    return list(items.values())


def _sizes(units: RowUnits, unit: int) -> tuple[int, int]:
    """Crops and pooled tokens of a unit."""
    crops, pooled = (int(cum[unit]) - int(cum[unit - 1] if unit else 0) for cum in (units.cum_crops, units.cum_pooled))
    return crops, pooled


def _split(pixels: Pixels, sizes: Sequence[tuple[int, int]]) -> Iterator[Pixels]:
    """The pixels of several units as those of each: indices count from its own patches."""
    (patches, pooling), crop, row = pixels, 0, 0
    for crops, pooled in sizes:
        windows = pooling[row : row + pooled]
        yield patches[crop : crop + crops], np.where(windows >= 0, windows - crop * patches.shape[1], -1)
        crop, row = crop + crops, row + pooled


def _refuse_other_sizes(pixels: Pixels, sizes: np.ndarray, patch_shape: tuple[int, int]) -> None:
    patches, pooling = pixels
    if patches.shape != (sizes[0], *patch_shape) or len(pooling) != sizes[1]:
        raise ImageError(
            f"it decodes to patches {patches.shape} and {len(pooling)} pooled tokens, the dataset was built for "
            f"{(int(sizes[0]), *patch_shape)} and {sizes[1]}"
        )
    if empty := int((pooling < 0).all(1).sum()):
        raise ImageError(f"{empty} of its {len(pooling)} pooled tokens have no patch inside of the image")


def _blank(sizes: tuple[int, int], patch_shape: tuple[int, int]) -> Pixels:
    """Stand-in for a bad image: its features are finite, and no token sees them."""
    return np.zeros((sizes[0], *patch_shape), np.float32), np.zeros((sizes[1], 1), np.int64)


def joined(found: Sequence[Pixels], patch_shape: tuple[int, int]) -> Pixels:
    """Pixels of several items as one: windows filled up with -1, indices counted from the first item's patches."""
    patches = np.concatenate([np.zeros((0, *patch_shape), np.float32), *(pixels for pixels, _ in found)])
    window = max((pooling.shape[1] for _, pooling in found), default=1)
    rows = [np.zeros((0, window), np.int64)]
    before = 0
    for pixels, pooling in found:
        moved = np.where(pooling >= 0, pooling + before, -1)
        rows.append(np.pad(moved, ((0, 0), (0, window - pooling.shape[1])), constant_values=-1))
        before += pixels.shape[0] * pixels.shape[1]
    return patches, np.concatenate(rows)
