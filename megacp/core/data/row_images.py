"""The images of a row, from tables alone: bounds over all its packs, rows of pooled tokens, spans of the mask.

Everything follows from the stored units and the row's token ids, alike on all ranks; no pixel is read. A row with
another number of image-patch tokens than pooled tokens is refused, with both counts and the record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megacp.core.data.batch import VisionInputs

IMAGE_ATTENTIONS = ("example", "image", "causal")
"""Values of `--image-attention`."""


class ImageCountError(ValueError):
    """Image features and image-patch tokens differ in number; `segment` of the row is where."""

    def __init__(self, features: int, tokens: int, image_patch: int, segment: int) -> None:
        self.segment = segment
        super().__init__(f"{features} image features and {tokens} image-patch tokens (id {image_patch})")


@dataclass(frozen=True, eq=False)
class PackImages:
    """The images of one pack, as stored."""

    units: np.ndarray
    """tables.UNIT_DTYPE [u], with `segment` counted from the first segment of the pack; u = 0 for text alone."""
    boundaries: Mapping[int, np.ndarray]
    """BOUNDARY_DTYPE [P] by CP degree P, for the degrees that were planned."""
    read: Callable[[int], bytes]
    """Encoded bytes of an item (an image or a video) by its number in the units; called from any thread."""
    image_patch: int
    """Token id that stands where a pooled feature is added."""


@dataclass(frozen=True, eq=False)
class RowUnits:
    """The units of all packs of a row, in order; int64 [u] each but for `begin`."""

    begin: np.ndarray
    """Place in the row at which each segment begins, int64 [segments]."""
    pack: np.ndarray
    """Index into the packs of the row."""
    segment: np.ndarray
    """Index into the segments of all packs."""
    first: np.ndarray
    """Place of the unit's first token in the row."""
    num_tokens: np.ndarray
    item: np.ndarray
    frame: np.ndarray
    """Frame of a video; -1 for an image."""
    cum_crops: np.ndarray
    cum_pooled: np.ndarray

    def __len__(self) -> int:
        return len(self.pack)


def row_units(images: Sequence[PackImages], num_segments: Sequence[int], begin: np.ndarray) -> RowUnits:
    """Units of packs with `num_segments` segments each, where segment s of the row begins at place `begin[s]`."""
    counts = [len(pack.units) for pack in images]
    pack = np.repeat(np.arange(len(images)), counts)
    units = np.concatenate([pack.units for pack in images])
    before = np.cumsum(num_segments) - num_segments
    segment = units["segment"] + before[pack]
    cumulative = []
    for name in ("image_stop", "pooled_stop"):
        totals = np.array([int(one.units[name][-1]) if len(one.units) else 0 for one in images])
        cumulative.append(units[name].astype(np.int64) + (np.cumsum(totals) - totals)[pack])
    return RowUnits(
        begin=begin,
        pack=pack,
        segment=segment,
        first=begin[segment] + units["start"],
        num_tokens=units["num_tokens"].astype(np.int64),
        item=units["item"].astype(np.int64),
        frame=units["frame"].astype(np.int64),
        cum_crops=cumulative[0],
        cum_pooled=cumulative[1],
    )


def vision_inputs(units: RowUnits, tokens: np.ndarray, image_patch: int) -> VisionInputs:
    """What all ranks know of the images of a row of `tokens [T]`: no pixels, and no boundary table yet.

    ImageCountError: a unit has not as many image-patch tokens as image features, or some lie outside all units.
    """
    of_token = np.repeat(np.arange(len(units)), units.num_tokens)
    within = np.arange(len(of_token)) - (np.cumsum(units.num_tokens) - units.num_tokens)[of_token]
    candidates = units.first[of_token] + within
    is_patch = tokens[candidates] == image_patch
    found = np.bincount(of_token[is_patch], minlength=len(units))
    features = np.diff(units.cum_pooled, prepend=0)
    if (found != features).any():
        unit = int(np.flatnonzero(found != features)[0])
        raise ImageCountError(int(features[unit]), int(found[unit]), image_patch, int(units.segment[unit]))
    in_row = np.flatnonzero(tokens == image_patch)
    places = candidates[is_patch]
    strays = np.setdiff1d(in_row, places)
    if len(strays):
        segment = int(np.searchsorted(units.begin, strays[0], side="right")) - 1
        held = int(np.count_nonzero(np.searchsorted(units.begin, in_row, side="right") - 1 == segment))
        raise ImageCountError(int(features[units.segment == segment].sum()), held, image_patch, segment)
    return VisionInputs(
        cum_crop_bounds=units.cum_crops,
        cum_token_pooling_bounds=units.cum_pooled,
        feature_rows=places,
        boundaries=None,
        first_crop=0,
        patches=np.zeros((0, 0, 0), np.float32),
        pooling=np.zeros((0, 1), np.int64),
    )


def spans(units: RowUnits, length: int, image_attention: str) -> np.ndarray:
    """int32 [length]: image tokens (markers included) that see each other in both directions share a number above 0.

    "example": all of a source document; "image": each image or frame by itself; "causal": none. ValueError: another
    word.
    """
    if image_attention not in IMAGE_ATTENTIONS:
        raise ValueError(f"--image-attention is {image_attention!r}, allowed are {', '.join(IMAGE_ATTENTIONS)}")
    span = np.zeros(length, np.int32)
    if image_attention != "causal":
        number = units.segment if image_attention == "example" else np.arange(len(units))
        for first, count, value in zip(units.first, units.num_tokens, number + 1, strict=True):
            span[first : first + count] = value
    return span
