"""PackedBatch: one row of T tokens with everything per token, from the loader to the loss.

Mask, positions, labels and weights are arrays beside the tokens. One index array permutes or cuts
them all, and the row keeps its meaning. A batch checks itself, never changes, and has a hash by
which ranks compare what they read.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_NAMES_OF_A_PACK = 1 << 24
"""Distance between the names of two packs' tokens; longer packs share names with the next one."""
PADDING = -1  # number of the document of a token that belongs to none

_DTYPES: dict[str, np.dtype] = {
    **dict.fromkeys(("tokens", "labels", "position_ids"), np.dtype(np.int64)),
    **dict.fromkeys(("leave", "span"), np.dtype(np.int32)),
    "loss_weights": np.dtype(np.float32),
}


@dataclass(frozen=True, eq=False)
class VisionInputs:
    """The images of a row: what all ranks know of them, and the pixels of those that this rank
    encodes.

    A unit is an image with all its crops, or a frame of a video, or two; "image" in these names
    means crop.
    """

    cum_crop_bounds: np.ndarray
    """int64 [u], crops in units 0..u of the row."""
    cum_token_pooling_bounds: np.ndarray
    """int64 [u], pooled tokens in units 0..u of the row."""
    feature_rows: np.ndarray
    """int64 [n], index in the row of the image-patch token of each pooled token, in unit order,
    rising.
    """
    boundaries: np.ndarray | None
    """Table [P] of which rank encodes what (BOUNDARY_DTYPE), for one number P of ranks; or None."""
    patches: np.ndarray
    """float32 [c, patches of a crop, patch_dim], the c crops encoded here; c may be 0."""
    pooling: np.ndarray
    """int64 [m, window] of the pooled tokens of those crops: indices into patches.flatten(0, 1), -1
    = outside.
    """
    strategy: str = ""
    """How `boundaries` was found: stored, computed or replicate."""
    bad_documents: tuple[tuple[int, str], ...] = ()
    """Documents of which this rank could not decode an image, and why; its patches then are 0."""
    grids: np.ndarray | None = None
    """int64 [k, 2], rows and columns of the pooled tokens of each of the k units encoded here,
    whose crops are single patches; None: crops are of one size."""

    @property
    def num_crops(self) -> int:
        """Crops of the row."""
        return int(self.cum_crop_bounds[-1]) if len(self.cum_crop_bounds) else 0

    @property
    def num_features(self) -> int:
        """Pooled tokens of the row."""
        return int(self.cum_token_pooling_bounds[-1]) if len(self.cum_token_pooling_bounds) else 0


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One microbatch, numpy arrays [T]. A padding token has leave 0, weight 0, label 0, token 0.

    A document that was dropped for a bad image is padding that keeps its token ids. ValueError says
    what is wrong.
    """

    tokens: np.ndarray
    """int64 [T], token ids."""
    labels: np.ndarray
    """int64 [T], the id to predict at this position; 0 (a valid id) where nothing is predicted."""
    loss_weights: np.ndarray
    """float32 [T], weight of this position's loss term; 0 means ignore."""
    position_ids: np.ndarray
    """int64 [T], for the rotary embedding; tokens before this one on the path from its document's
    beginning.
    """
    leave: np.ndarray
    """int32 [T], the index in the row where the part ends that sees this token: of a document's
    prefix the end of the document, of a branch its own; 0 = padding."""
    span: np.ndarray
    """int32 [T], 0 = text, else the group of image tokens that see each other in both directions.
    """
    pack_ids: tuple[int, ...]
    """Numbers of the packs in this row, in order, as the dataset counts them."""
    vision: VisionInputs | None = None
    """Its images; None for a dataset without any."""
    position_axes: np.ndarray | None = None
    """int64 [T, 3], time, row and column of each token for a rotary embedding with three axes;
    None: each is `position_ids`. Those of text are equal; behind an image it goes on at the image's
    largest + 1."""
    pack_lengths: tuple[int, ...] = ()
    """Tokens of each pack in this row, its padding included; () = one pack is the whole row."""

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            if (value := getattr(self, name)).dtype != dtype or value.shape != (len(self),):
                raise ValueError(
                    f"{name} must be {dtype} [{len(self)}], got {value.dtype} {value.shape}"
                )
        axes = self.position_axes
        if axes is not None and (axes.dtype != np.int64 or axes.shape != (len(self), 3)):
            raise ValueError(
                f"position_axes must be int64 [{len(self)}, 3], got {axes.dtype} {axes.shape}"
            )
        if not np.isfinite(self.loss_weights).all() or (self.loss_weights < 0).any():
            raise ValueError("loss_weights must be finite and not negative")
        if self.loss_weights[self.leave == 0].any():
            raise ValueError("padding tokens have a loss weight")

    def __len__(self) -> int:
        """T, padding included."""
        return len(self.tokens)

    @property
    def document(self) -> np.ndarray:
        """int64 [T], number of the document in this row; -1 = padding."""
        real = self.leave > 0
        number = np.full(len(self), PADDING, np.int64)
        end = np.maximum.accumulate(self.leave)  # nothing in a document ends later than its prefix
        number[real] = np.unique(end[real], return_inverse=True)[1]
        return number

    @property
    def token_names(self) -> np.ndarray:
        """int64 [T]: names a token by its pack and its index in it, whichever packs share the row.

        Tokens beyond the last pack count on from it. Dropout is keyed by these names.
        """
        ids, lengths = self.pack_ids or (0,), self.pack_lengths or (len(self),)
        rest = (
            *lengths[:-1],
            len(self) - sum(lengths[:-1]),
        )  # the last pack goes on to the end of the row
        return np.concatenate(
            [np.int64(i) * _NAMES_OF_A_PACK + np.arange(n) for i, n in zip(ids, rest, strict=False)]
        )

    @property
    def weight_sum(self) -> float:
        """Sum of the loss weights, in float64: this row's part of the step's loss denominator."""
        return float(self.loss_weights.sum(dtype=np.float64))

    @property
    def real_tokens(self) -> int:
        """Tokens without padding."""
        return int((self.leave > 0).sum())

    def fingerprint(self) -> int:
        """64-bit hash of every field, signed so that it fits an int64 tensor; equal in every
        process and on every host.

        Of the images it covers what is the same on all ranks: bounds and rows of features, not
        pixels and grids.
        """
        digest = hashlib.blake2b(digest_size=8)
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.vision is not None:
            values["vision"] = "images"
            shared = ("cum_crop_bounds", "cum_token_pooling_bounds", "feature_rows")
            values |= {f"vision.{name}": getattr(self.vision, name) for name in shared}
        for name, value in values.items():
            digest.update(name.encode() + b"\0")  # no name runs into its value
            if isinstance(
                value, np.ndarray
            ):  # dtype and shape too: equal bytes may be other numbers
                digest.update(f"{value.dtype.str}{value.shape}".encode())
                digest.update(np.ascontiguousarray(value).view(np.uint8).data)
            else:
                digest.update(repr(value).encode())
        return int.from_bytes(digest.digest(), "little", signed=True)

    def without_documents(self, documents: Sequence[int]) -> PackedBatch:
        """This batch with some documents as padding: weight 0, and no token sees them. Ids and
        images stay.
        """
        gone = np.isin(self.document, documents) & (self.leave > 0)  # [T]
        cleared: dict[str, Any] = {}
        for name in ("leave", "labels", "loss_weights", "span"):
            cleared[name] = getattr(self, name).copy()
            cleared[name][gone] = 0
        return dataclasses.replace(self, **cleared)

    def with_padding_to(self, multiple: int) -> PackedBatch:
        """This batch with padding tokens at the end, so that T is a multiple of `multiple`; itself
        if it is already.

        Padding: token, label, weight, leave and span 0, positions 0, 1, 2, ...
        """
        count = -len(self) % multiple
        if not count:
            return self
        tails = {name: np.zeros(count, dtype) for name, dtype in _DTYPES.items()}
        tails["position_ids"] = np.arange(count, dtype=np.int64)
        if self.position_axes is not None:
            tails["position_axes"] = np.repeat(tails["position_ids"][:, None], 3, axis=1)
        padded: dict[str, Any] = {
            name: np.concatenate((getattr(self, name), tail)) for name, tail in tails.items()
        }
        return dataclasses.replace(self, **padded)
