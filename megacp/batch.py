"""PackedBatch: the one value that travels from the loader to the loss, one row of T tokens with everything per token.

Key property: mask, positions, labels and weights are data beside the tokens, so that any
permutation or cut of the row by one index array keeps its meaning; the class checks itself, is never changed in
place, and has a hash by which ranks compare what they read. Rejected: a dict of tensors whose keys and shapes every
consumer has to guess.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

PADDING = -1
"""`document` of a token that belongs to no document."""

_DTYPES = {
    "tokens": np.dtype(np.int64),
    "labels": np.dtype(np.int64),
    "loss_weights": np.dtype(np.float32),
    "position_ids": np.dtype(np.int64),
    "document": np.dtype(np.int32),
    "branch": np.dtype(np.int32),
    "span": np.dtype(np.int32),
}


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One microbatch, numpy arrays [T]. A padding token has document -1, weight 0, label 0, token 0.

    ValueError lists every field of wrong dtype or shape, and weights that are negative, not finite, or on padding.
    """

    tokens: np.ndarray
    """int64 [T], token ids."""
    labels: np.ndarray
    """int64 [T], the id to predict at this place; 0 (a valid id) where nothing is predicted."""
    loss_weights: np.ndarray
    """float32 [T], weight of this place's loss term; 0 means ignore."""
    position_ids: np.ndarray
    """int64 [T], for the rotary embedding; restarts in each document, and at the prefix length in each branch."""
    document: np.ndarray
    """int32 [T], number of the document in this row; -1 = padding."""
    branch: np.ndarray
    """int32 [T], 0 = the document's shared prefix, i >= 1 = its i-th alternative continuation."""
    span: np.ndarray
    """int32 [T], 0 = text, else the group of image tokens that see each other in both directions."""
    pack_ids: tuple[int, ...]
    """Numbers of the packs in this row, in order, as the dataset counts them."""

    def __post_init__(self) -> None:
        reasons = []
        shape = np.shape(self.tokens)
        for name, dtype in _DTYPES.items():
            value = getattr(self, name)
            if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1 or value.shape != shape:
                found = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
                reasons.append(f"{name} must be {dtype} [T] with T = {shape} of tokens, got {found}")
        if not reasons:
            reasons = self._value_reasons()
        if reasons:
            raise ValueError("PackedBatch: " + "; ".join(reasons))

    def _value_reasons(self) -> list[str]:
        reasons = []
        padding = self.document < 0
        if not np.isfinite(self.loss_weights).all() or (self.loss_weights < 0).any():
            reasons.append("loss_weights must be finite and not negative")
        if self.loss_weights[padding].any():
            reasons.append(f"{np.count_nonzero(self.loss_weights[padding])} padding tokens have a loss weight")
        if (self.document < PADDING).any():
            reasons.append(f"document must be at least {PADDING}, got {int(self.document.min())}")
        for name in ("tokens", "labels", "position_ids", "branch", "span"):
            values = getattr(self, name)
            if (values < 0).any():
                reasons.append(f"{name} must not be negative, got {int(values.min())}")
        return reasons

    def __len__(self) -> int:
        """T, padding included."""
        return len(self.tokens)

    @property
    def weight_sum(self) -> float:
        """Sum of the loss weights, in float64: this row's part of the step's loss denominator."""
        return float(self.loss_weights.sum(dtype=np.float64))

    def fingerprint(self) -> int:
        """64-bit hash of every field, signed so that it fits an int64 tensor; equal in every process and on every host.

        Covers fields that a subclass adds, as long as they are arrays, None, or tuples of ints.
        """
        digest = hashlib.blake2b(digest_size=8)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            digest.update(field.name.encode() + b"\0")
            if isinstance(value, np.ndarray):
                digest.update(f"{value.dtype.str}{value.shape}".encode())
                digest.update(np.ascontiguousarray(value).view(np.uint8).data)
            else:
                digest.update(repr(value).encode())
        return int.from_bytes(digest.digest(), "little", signed=True)

    def with_padding_to(self, multiple: int) -> PackedBatch:
        """This batch with padding tokens at the end, so that T is a multiple of `multiple`; itself if it is already.

        Padding: document -1, token, label, weight, branch and span 0, positions 0, 1, 2, ...
        """
        if multiple < 1:
            raise ValueError(f"a batch is padded to a multiple of at least 1, got {multiple}")
        count = -len(self) % multiple
        if not count:
            return self
        tails = {name: np.zeros(count, dtype) for name, dtype in _DTYPES.items()}
        tails["document"] += PADDING
        tails["position_ids"] = np.arange(count, dtype=np.int64)
        padded: dict[str, Any] = {name: np.concatenate((getattr(self, name), tail)) for name, tail in tails.items()}
        return dataclasses.replace(self, **padded)
