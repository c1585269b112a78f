"""PackedBatch: one row of T tokens with all per-token arrays, from the loader to the loss.

Mask, positions, labels and weights are arrays of the same length as the tokens, so a single index
array can permute or select all of them consistently. A batch validates itself and is immutable.
Ranks compare its hash to verify that they read the same data.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_NAMES_OF_A_PACK = 1 << 24
"""Distance between the token names of two packs. A longer pack shares names with the next pack."""
PADDING = -1  # document number of tokens that belong to no document

_DTYPES: dict[str, np.dtype] = {
    "tokens": np.dtype(np.int64),
    "labels": np.dtype(np.int64),
    "position_ids": np.dtype(np.int64),
    "leave": np.dtype(np.int32),
    "span": np.dtype(np.int32),
    "loss_weights": np.dtype(np.float32),
}


@dataclass(frozen=True, eq=False)
class VisionInputs:
    """Images of a row: data that all ranks share, and the pixels that this rank encodes.

    A unit is an image with all its crops, or one or two video frames. In these names, "image" means
    crop.
    """

    cum_crop_bounds: np.ndarray
    """Number of crops in units 0..u of the row: int64 [u]."""
    cum_token_pooling_bounds: np.ndarray
    """Number of pooled tokens in units 0..u of the row: int64 [u]."""
    feature_rows: np.ndarray
    """Row index of each pooled token's image-patch token, in unit order (ascending): int64 [n]."""
    boundaries: np.ndarray | None
    """Table (BOUNDARY_DTYPE) [P] with the images that each of P ranks encodes, or None."""
    patches: np.ndarray
    """The c crops encoded on this rank: float32 [c, patches per crop, patch_dim]; c may be 0."""
    pooling: np.ndarray
    """Pooling windows of these crops: int64 [m, window], indices into patches.flatten(0, 1).

    -1 is outside the image."""
    strategy: str = ""
    """Source of `boundaries`: stored, computed or replicate."""
    bad_documents: tuple[tuple[int, str], ...] = ()
    """Documents with an image that this rank could not decode (its patches are 0), and the error.
    """
    grids: np.ndarray | None = None
    """Rows and columns of pooled tokens in each of the k units encoded here: int64 [k, 2].

    The crops of these units are single patches. None if all crops have the same size."""

    @property
    def num_crops(self) -> int:
        """Number of crops in the row."""
        return int(self.cum_crop_bounds[-1]) if len(self.cum_crop_bounds) else 0

    @property
    def num_features(self) -> int:
        """Number of pooled tokens in the row."""
        return int(self.cum_token_pooling_bounds[-1]) if len(self.cum_token_pooling_bounds) else 0


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One microbatch as numpy arrays [T]. For padding, token, label, weight and leave are 0.

    A document dropped because of a bad image becomes padding, but keeps its token ids. The
    constructor raises ValueError if arrays are inconsistent.
    """

    tokens: np.ndarray
    """Token ids: int64 [T]."""
    labels: np.ndarray
    """Id to predict at each position: int64 [T]; 0 (a valid id) if nothing is predicted."""
    loss_weights: np.ndarray
    """Weight of the loss at each position: float32 [T]; 0 ignores the position."""
    position_ids: np.ndarray
    """Positions for the rotary embedding: int64 [T].

    A position is the number of preceding tokens on the path from the start of the document."""
    leave: np.ndarray
    """First row index at which no token attends to this token any more: int32 [T]; 0 is padding.

    For a document's prefix, it is the end of the document; for a branch, the end of the branch.
    """
    span: np.ndarray
    """Group of image tokens that attend to each other in both directions: int32 [T]; 0 is text."""
    pack_ids: tuple[int, ...]
    """Dataset indices of the packs in this row, in order."""
    vision: VisionInputs | None = None
    """Images of the row; None for a dataset without images."""
    position_axes: np.ndarray | None = None
    """Time, row and column for a rotary embedding with three axes: int64 [T, 3].

    For text tokens, all three are equal. After an image, text continues at the image's largest
    value + 1. None means that all three equal `position_ids`."""
    pack_lengths: tuple[int, ...] = ()
    """Number of tokens of each pack in this row, including padding; () means a single pack."""

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            value = getattr(self, name)
            if value.dtype != dtype or value.shape != (len(self),):
                raise ValueError(
                    f"{name} must be {dtype} [{len(self)}], but is {value.dtype} {value.shape}"
                )
        # position_axes is optional, so it is not in _DTYPES
        axes = self.position_axes
        if axes is not None and (axes.dtype != np.int64 or axes.shape != (len(self), 3)):
            raise ValueError(
                f"position_axes must be int64 [{len(self)}, 3], but is {axes.dtype} {axes.shape}"
            )
        if not np.isfinite(self.loss_weights).all() or (self.loss_weights < 0).any():
            raise ValueError("loss_weights must be finite and not negative")
        if self.loss_weights[self.leave == 0].any():
            raise ValueError("loss_weights of padding tokens must be 0")

    def __len__(self) -> int:
        """Return T, including padding."""
        return len(self.tokens)

    @property
    def document(self) -> np.ndarray:
        """Number of each token's document in this row: int64 [T]; -1 is padding."""
        real = self.leave > 0
        number = np.full(len(self), PADDING, np.int64)
        # no branch ends later than its document's prefix, so the maximum is the document's end
        end = np.maximum.accumulate(self.leave)
        number[real] = np.unique(end[real], return_inverse=True)[1]
        return number

    @property
    def token_names(self) -> np.ndarray:
        """Identifier of each token, based on its pack and its index in the pack: int64 [T].

        Identifiers do not depend on other packs in the row. Tokens after the last pack continue its
        numbering. Dropout bits are derived from these identifiers.
        """
        ids = self.pack_ids or (0,)
        lengths = self.pack_lengths or (len(self),)
        # extend the last pack to the end of the row
        lengths = (*lengths[:-1], len(self) - sum(lengths[:-1]))
        names = []
        for number, length in zip(ids, lengths, strict=False):
            names.append(np.int64(number) * _NAMES_OF_A_PACK + np.arange(length))
        return np.concatenate(names)

    @property
    def weight_sum(self) -> float:
        """Sum of the loss weights in float64: this row's part of the step's denominator."""
        return float(self.loss_weights.sum(dtype=np.float64))

    @property
    def real_tokens(self) -> int:
        """Number of tokens, excluding padding."""
        return int((self.leave > 0).sum())

    def fingerprint(self) -> int:
        """Return a 64-bit hash of all fields, equal in every process and on every host.

        The hash is signed to fit an int64 tensor. For images, it covers only data that all ranks
        share: bounds and feature rows, but not pixels and grids.
        """
        digest = hashlib.blake2b(digest_size=8)
        # hash the fields in the order of their declaration
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        # each rank reads different pixels, so hash only the shared data of images
        if self.vision is not None:
            values["vision"] = "images"
            shared = ("cum_crop_bounds", "cum_token_pooling_bounds", "feature_rows")
            values |= {f"vision.{name}": getattr(self.vision, name) for name in shared}
        for name, value in values.items():
            digest.update(name.encode() + b"\0")  # separate the name from its value
            if isinstance(value, np.ndarray):
                # include dtype and shape, because equal bytes may represent different numbers
                digest.update(f"{value.dtype.str}{value.shape}".encode())
                digest.update(np.ascontiguousarray(value).view(np.uint8).data)
            else:
                digest.update(repr(value).encode())
        return int.from_bytes(digest.digest(), "little", signed=True)

    def without_documents(self, documents: Sequence[int]) -> PackedBatch:
        """Return a copy of this batch in which some documents are padding.

        Their weights are 0, and no token attends to them. Token ids and images are unchanged.
        """
        gone = np.isin(self.document, documents) & (self.leave > 0)  # [T]
        # batches are immutable, so change copies
        cleared: dict[str, Any] = {}
        for name in ("leave", "labels", "loss_weights", "span"):
            cleared[name] = getattr(self, name).copy()
            cleared[name][gone] = 0
        return dataclasses.replace(self, **cleared)

    def with_padding_to(self, multiple: int) -> PackedBatch:
        """Return this batch padded at the end to a multiple of `multiple` tokens.

        If T already is a multiple, return the batch itself. For padding, token, label, weight,
        leave and span are 0, and positions are 0, 1, 2, ...
        """
        count = -len(self) % multiple
        if not count:
            return self
        # padding by field; only the positions are not 0
        tails = {name: np.zeros(count, dtype) for name, dtype in _DTYPES.items()}
        tails["position_ids"] = np.arange(count, dtype=np.int64)
        if self.position_axes is not None:
            tails["position_axes"] = np.repeat(tails["position_ids"][:, None], 3, axis=1)
        padded: dict[str, Any] = {}
        for name, tail in tails.items():
            padded[name] = np.concatenate((getattr(self, name), tail))
        return dataclasses.replace(self, **padded)
