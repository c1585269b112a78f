"""Features of images, from the ranks that encode them to the ranks that hold their tokens.

The boundary table says who encodes a feature, the layout who needs it. Every rank knows both, so
message sizes are computed without a message. The row of a feature never depends on the order of
ranks in a message. Every rank joins every exchange, also a rank that encodes or needs nothing, so
that all join backward, the exchange in reverse.
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
    """Where the features of a row are encoded and needed, seen by one rank of the axis."""

    cp_rank: int
    source: np.ndarray
    """int64 [n], rank that encodes each feature, in feature (unit) order."""
    position: np.ndarray
    """int64 [n], its number among the features that this rank encodes."""
    target: np.ndarray
    """int64 [n], rank that holds its token."""
    row: np.ndarray
    """int64 [n], local index of its token there."""
    counts: np.ndarray
    """int64 [cp, cp], features that rank i sends to rank j."""

    @functools.cached_property
    def arriving(self) -> np.ndarray:
        """Features [k] whose tokens this rank holds, ascending."""
        return np.flatnonzero(self.target == self.cp_rank)

    @functools.cached_property
    def leaving(self) -> np.ndarray:
        """Positions [m] of this rank's features in the order of a message: by target, then in
        feature order.
        """
        mine = np.flatnonzero(self.source == self.cp_rank)
        return self.position[mine[np.argsort(self.target[mine], kind="stable")]]

    @functools.cached_property
    def arrival(self) -> np.ndarray:
        """Puts what arrived, by source and then in feature order, into feature order [k]."""
        return np.argsort(np.argsort(self.source[self.arriving], kind="stable"), kind="stable")


def own_routes(indices: np.ndarray, tokens: np.ndarray, cp_rank: int) -> FeatureRoutes:
    """Routes of a rank that encodes every feature itself, for features at `tokens [n]` of a row
    dealt as `[cp, t]`.
    """
    cp = len(indices)
    target, row = _holders(indices, tokens)
    counts = np.zeros((cp, cp), np.int64)
    counts[cp_rank, cp_rank] = len(tokens)
    return FeatureRoutes(
        cp_rank, np.full(len(tokens), cp_rank), np.arange(len(tokens)), target, row, counts
    )


def _holders(indices: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 [n] twice: the rank that holds each of `tokens`, and its local index there, for
    `indices [cp, t]`.
    """
    holder = np.empty(indices.size, np.int64)  # of each token of the row: rank x t + local index
    holder[indices.reshape(-1)] = np.arange(indices.size)
    rank, local = np.divmod(holder[tokens], indices.shape[1])
    return rank, local


def feature_routes(
    indices: np.ndarray, tokens: np.ndarray, boundaries: np.ndarray, cp_rank: int
) -> FeatureRoutes:
    """Routes of features at `tokens [n]` of a row, dealt as `indices [cp, t]` and encoded as
    `boundaries [cp]`.
    """
    cp = len(indices)
    # [cp]: rank r encodes the features [starts[r], stops[r]), the stretches in the order of the
    # ranks
    starts = boundaries["start_pool_idx"].astype(np.int64)
    stops = boundaries["end_pool_idx"].astype(np.int64)
    assert (stops - starts).sum() == len(tokens), (
        "the table counts other features than the row has tokens for"
    )
    target, row = _holders(indices, tokens)
    source = np.repeat(np.arange(cp), stops - starts)
    position = np.arange(len(tokens)) - np.repeat(starts, stops - starts)
    # pairs (source, target) counted as one number
    counts = np.bincount(source * cp + target, minlength=cp * cp).reshape(cp, cp)
    return FeatureRoutes(cp_rank, source, position, target, row, counts)


def routed(features: torch.Tensor, routes: FeatureRoutes, axis: Axis) -> torch.Tensor:
    """One uneven all-to-all of just the features that each rank needs.

    `[m, h]` encoded here -> `[k, h]` needed here, in feature order; the gradient goes back the same
    way.
    """
    sent = features.index_select(0, to_device(routes.leaving, features.device))
    out = routes.counts[routes.cp_rank].tolist()
    into = routes.counts[:, routes.cp_rank].tolist()
    return exchange(sent, axis, out, into).index_select(
        0, to_device(routes.arrival, features.device)
    )


@dataclass(frozen=True, eq=False)
class PatchGrids:
    """Images of any size; what a tower works out of them stands with it, made once."""

    sizes: np.ndarray
    """int64 `[n, 2]`: rows and columns of the pooled tokens of each."""


@dataclass(frozen=True, eq=False)
class LocalVision:
    """One rank's share of the images of a microbatch."""

    patches: torch.Tensor
    """float32 or narrower `[c, patches of a crop, patch_dim]`, c may be 0."""
    pooling: torch.Tensor
    """int64 `[m, window]`, indices into patches.flatten(0, 1), -1 = outside; m features are encoded
    here.
    """
    routes: FeatureRoutes
    axis: Axis
    """The ranks over which tokens and images are dealt."""
    replicated: bool = False
    """Every rank encodes all features, so none is sent."""
    grids: PatchGrids | None = None
    """Grids of the units encoded here; None where the positions of tokens have one axis."""

    def to(self, device: torch.device) -> LocalVision:
        """This share, made on the host, with its tensors on `device`."""
        patches, pooling = (to_device(values, device) for values in (self.patches, self.pooling))
        return dataclasses.replace(self, patches=patches, pooling=pooling)

    def packed_for(self, device: torch.device, dtype: torch.dtype) -> LocalVision:
        """This share with pixels no wider than a tower of `dtype`, which narrows them anyway, in
        memory that `device` copies from; called from the loader's threads.
        """
        patches = (
            self.patches.to(dtype) if dtype.itemsize < self.patches.dtype.itemsize else self.patches
        )
        return dataclasses.replace(
            self, patches=pinned(patches, device), pooling=pinned(self.pooling, device)
        )


def place_features(features: torch.Tensor, vision: LocalVision) -> tuple[torch.Tensor, np.ndarray]:
    """Features `[m, h]` encoded on this rank -> (`[k, h]` of this rank's tokens, their local
    indices int64 `[k]`, which stay on the host).

    All ranks of the axis call it together.
    """
    assert len(features) == vision.routes.counts[vision.routes.cp_rank].sum(), (
        "features that no boundary counts"
    )
    routes = vision.routes
    if vision.replicated:  # it encoded those of all its tokens
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
    """`x` plus `features [k, h]` (replicated over tp) at token indices `rows [k]`, or with
    `replaces` in its place.

    `sliced` (sequence parallel): `x [t/tp, h]` is tp rank j's slice of the tokens, which uses other
    features on each rank, so their gradients are summed over tp; otherwise `x [t, h]`, alike on all
    tp ranks.
    """
    if sliced:
        features = copy_to(features, tp)
        first = tp.rank * len(x)  # this rank's tokens are [first, first + len(x))
        here = np.flatnonzero((rows >= first) & (rows < first + len(x)))
        features = features.index_select(0, to_device(here, x.device))
        rows = rows[here] - first
    index = to_device(rows, x.device)
    return (x.index_fill(0, index, 0) if replaces else x).index_add(0, index, features.to(x.dtype))


def local_vision(vision: VisionInputs, indices: np.ndarray, axis: Axis) -> LocalVision:
    """This rank's share of a row's images, on the host, for tokens dealt as `indices [cp, t]`.

    Without a boundary table for just these ranks it is computed from the bounds, as the loader
    would have.
    """
    patches = torch.from_numpy(vision.patches)
    pooling = torch.from_numpy(vision.pooling)
    grids = None if vision.grids is None else PatchGrids(vision.grids)
    if vision.strategy == REPLICATE:
        routes = own_routes(indices, vision.feature_rows, axis.rank)
        return LocalVision(patches, pooling, routes, axis, True, grids)
    boundaries = vision.boundaries
    if boundaries is None or len(boundaries) != axis.size:
        bounds = vision.cum_crop_bounds, vision.cum_token_pooling_bounds
        boundaries = compute_image_shard_boundaries(*bounds, axis.size)
    routes = feature_routes(indices, vision.feature_rows, boundaries, axis.rank)
    return LocalVision(patches, pooling, routes, axis, grids=grids)
