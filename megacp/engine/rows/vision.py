"""Exchange of image features, from the ranks that encode them to the ranks that need them.

The boundary table determines which rank encodes a feature, and the layout determines which rank has
its token. Every rank has both tables, so ranks need not communicate message sizes. The destination
row of a feature does not depend on the order of ranks in a message. Every rank joins every
exchange, even if it encodes and needs no features, because the backward pass reverses it.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np
import torch

from megacp.attention.ops.device import pinned, to_device
from megacp.distributed.differentiable import copy_to, exchange
from megacp.distributed.grid import Axis
from megacp.engine.rows.batch import VisionInputs
from megacp.engine.rows.image_shards import REPLICATE, compute_image_shard_boundaries


@dataclass(frozen=True, eq=False)
class FeatureRoutes:
    """Source and destination of each feature in a row, from one rank's perspective."""

    cp_rank: int
    source: np.ndarray
    """Rank that encodes each feature, in feature (unit) order: int64 [n]."""
    position: np.ndarray
    """Index of each feature among its source rank's features: int64 [n]."""
    target: np.ndarray
    """Rank that has each feature's token: int64 [n]."""
    row: np.ndarray
    """Local index of that token on the target rank: int64 [n]."""
    counts: np.ndarray
    """Number of features that rank i sends to rank j: int64 [cp, cp]."""

    @functools.cached_property
    def arriving(self) -> np.ndarray:
        """Features whose tokens are on this rank, ascending: int64 [k]."""
        return np.flatnonzero(self.target == self.cp_rank)

    @functools.cached_property
    def leaving(self) -> np.ndarray:
        """Positions of this rank's features in message order: int64 [m].

        Messages are sorted by target, then by feature.
        """
        mine = np.flatnonzero(self.source == self.cp_rank)
        return self.position[mine[np.argsort(self.target[mine], kind="stable")]]

    @functools.cached_property
    def arrival(self) -> np.ndarray:
        """Permutation int64 [k] that puts received features in feature order.

        Features arrive sorted by source, then by feature.
        """
        by_source = np.argsort(self.source[self.arriving], kind="stable")
        return np.argsort(by_source, kind="stable")  # the inverse permutation


def own_routes(indices: np.ndarray, tokens: np.ndarray, cp_rank: int) -> FeatureRoutes:
    """Return the routes for a rank that encodes all features itself.

    `tokens [n]` are the row indices of the features, and `indices [cp, t]` the tokens of each rank.
    """
    cp = len(indices)
    target, row = _holders(indices, tokens)
    # nothing is sent to other ranks: the rank "sends" all features to itself
    counts = np.zeros((cp, cp), np.int64)
    counts[cp_rank, cp_rank] = len(tokens)
    source = np.full(len(tokens), cp_rank)
    position = np.arange(len(tokens))
    return FeatureRoutes(cp_rank, source, position, target, row, counts)


def _holders(indices: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rank and the local index of each token in `tokens`, both int64 [n].

    `indices [cp, t]` are the tokens of each rank.
    """
    # [T]: rank * t + local index of each token of the row
    holder = np.empty(indices.size, np.int64)
    holder[indices.reshape(-1)] = np.arange(indices.size)
    rank, local = np.divmod(holder[tokens], indices.shape[1])
    return rank, local


def feature_routes(
    indices: np.ndarray,
    tokens: np.ndarray,
    boundaries: np.ndarray,
    cp_rank: int,
) -> FeatureRoutes:
    """Return the routes for features at row indices `tokens [n]`.

    `indices [cp, t]` are the tokens of each rank, and `boundaries [cp]` the images of each rank.
    """
    cp = len(indices)
    # [cp]: rank r encodes features [starts[r], stops[r]), and the ranges are consecutive
    starts = boundaries["start_pool_idx"].astype(np.int64)
    stops = boundaries["end_pool_idx"].astype(np.int64)
    assert (stops - starts).sum() == len(tokens), (
        f"the boundary table has {(stops - starts).sum()} features, but the row has {len(tokens)} "
        "image-patch tokens"
    )
    target, row = _holders(indices, tokens)
    source = np.repeat(np.arange(cp), stops - starts)
    # index within the range of the source rank
    position = np.arange(len(tokens)) - np.repeat(starts, stops - starts)
    # encode each pair (source, target) as one number to count it
    counts = np.bincount(source * cp + target, minlength=cp * cp).reshape(cp, cp)
    return FeatureRoutes(cp_rank, source, position, target, row, counts)


def routed(features: torch.Tensor, routes: FeatureRoutes, axis: Axis) -> torch.Tensor:
    """Send features to the ranks that need them, in one uneven all-to-all.

    `features[m, h]` were encoded on this rank. Return the features `[k, h]` that this rank needs,
    in feature order. In the backward pass, their gradients are sent back.
    """
    sent = features.index_select(0, to_device(routes.leaving, features.device))  # message order
    # number of features sent to and received from each rank
    out = routes.counts[routes.cp_rank].tolist()
    into = routes.counts[:, routes.cp_rank].tolist()
    received = exchange(sent, axis, out, into)
    return received.index_select(0, to_device(routes.arrival, features.device))


@dataclass(frozen=True, eq=False)
class PatchGrids:
    """Grids of images with different sizes; towers cache tensors that they derive from a grid."""

    sizes: np.ndarray
    """Rows and columns of the pooled tokens of each image: int64 `[n, 2]`."""


@dataclass(frozen=True, eq=False)
class LocalVision:
    """One rank's share of a microbatch's images."""

    patches: torch.Tensor
    """Crops, in float32 or a narrower dtype: `[c, patches per crop, patch_dim]`; c may be 0."""
    pooling: torch.Tensor
    """Pooling windows of the m features encoded on this rank: int64 `[m, window]`.

    The values are indices into patches.flatten(0, 1); -1 is outside the image."""
    routes: FeatureRoutes
    axis: Axis
    """Axis of the ranks that share the tokens and images of the row."""
    replicated: bool = False
    """Whether every rank encodes all features, so that none are sent."""
    grids: PatchGrids | None = None
    """Grids of the units encoded here; None if all crops have the same size."""

    def to(self, device: torch.device) -> LocalVision:
        """Return a copy of this share, which is on the host, with its tensors on `device`."""
        patches = to_device(self.patches, device)
        pooling = to_device(self.pooling, device)
        return dataclasses.replace(self, patches=patches, pooling=pooling)

    def packed_for(self, device: torch.device, dtype: torch.dtype) -> LocalVision:
        """Return a copy of this share in pinned memory, with pixels in `dtype` if it is narrower.

        The tower would convert them to its dtype anyway. Data loader threads call this method.
        """
        patches = self.patches
        if dtype.itemsize < patches.dtype.itemsize:
            patches = patches.to(dtype)
        pooling = pinned(self.pooling, device)
        return dataclasses.replace(self, patches=pinned(patches, device), pooling=pooling)


def place_features(features: torch.Tensor, vision: LocalVision) -> tuple[torch.Tensor, np.ndarray]:
    """Exchange features `[m, h]`, which this rank has encoded, across the axis (collective).

    Return the features `[k, h]` of this rank's tokens, and the tokens' local indices int64 `[k]` on
    the host.
    """
    routes = vision.routes
    expected = routes.counts[routes.cp_rank].sum()
    assert len(features) == expected, (
        f"the tower returned {len(features)} features, but the routes expect {expected}"
    )
    if vision.replicated:  # this rank has encoded the features of all its tokens
        own = features.index_select(0, to_device(routes.position[routes.arriving], features.device))
    else:
        own = routed(features, routes, vision.axis)
    return own, routes.row[routes.arriving]


def add_features(
    x: torch.Tensor,
    features: torch.Tensor,
    rows: np.ndarray,
    tp: Axis,
    sliced: bool,
    replaces: bool = False,
) -> torch.Tensor:
    """Add `features [k, h]` to `x` at token indices `rows [k]`, or replace `x` there.

    All tp ranks have the same features. With `sliced` (sequence parallelism), `x [t/tp, h]` is this
    tp rank's slice of the tokens. Each tp rank then uses different features, so their gradients are
    summed over tp. Otherwise, `x [t, h]` is the same on all tp ranks.
    """
    if sliced:
        features = copy_to(features, tp)
        first = tp.rank * len(x)  # this rank's tokens are [first, first + len(x))
        # select the features of this slice on the host, without waiting for the device
        here = np.flatnonzero((rows >= first) & (rows < first + len(x)))
        features = features.index_select(0, to_device(here, x.device))
        rows = rows[here] - first
    index = to_device(rows, x.device)
    if replaces:
        x = x.index_fill(0, index, 0)
    return x.index_add(0, index, features.to(x.dtype))


def local_vision(vision: VisionInputs, indices: np.ndarray, axis: Axis) -> LocalVision:
    """Return this rank's share of a row's images, on the host.

    `indices [cp, t]` are the tokens of each rank. If there is no boundary table for this number of
    ranks, compute it from the bounds, as the loader would do.
    """
    patches = torch.from_numpy(vision.patches)
    pooling = torch.from_numpy(vision.pooling)
    grids = None if vision.grids is None else PatchGrids(vision.grids)
    # every rank has all pixels, so no exchange is necessary
    if vision.strategy == REPLICATE:
        routes = own_routes(indices, vision.feature_rows, axis.rank)
        return LocalVision(patches, pooling, routes, axis, True, grids)
    # a stored table is valid for only one number of ranks
    boundaries = vision.boundaries
    if boundaries is None or len(boundaries) != axis.size:
        bounds = vision.cum_crop_bounds, vision.cum_token_pooling_bounds
        boundaries = compute_image_shard_boundaries(*bounds, axis.size)
    routes = feature_routes(indices, vision.feature_rows, boundaries, axis.rank)
    return LocalVision(patches, pooling, routes, axis, grids=grids)
