"""Tensors of one naming seen under another: tables of links, and a view that reads through them
tensor by tensor.

A link says that some of their tensors and some of ours, each joined along dim 0, are the same rows.
That covers renaming, fused projections and a split embedding, in both directions. Nothing is read
before its values are needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megacp.storage.wording import listed

Shape = tuple[int, ...]
STACKS = (".experts.gate_up_proj", ".experts.down_proj")
"""Ends of names of the matrices of all experts, stacked."""
BIASES = (".experts.gate_up_proj_bias", ".experts.down_proj_bias")
WIDE = (".router.correction", ".e_score_correction_bias")
"""Ends of names of what is float32 in a model of any dtype."""
PACKED = ("_blocks", "_scales")
"""Ends of names of what is packed in bytes: numbers of few bits, and the exponents of their blocks.
"""
_TOLD = 20
"""Problems that a message names."""
_COMPARED = 16 << 20
"""Numbers of two tensors that are compared at a time."""


@dataclass(frozen=True)
class Info:
    """Shape and dtype of a tensor."""

    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class Named:
    name: str
    shape: Shape


@dataclass(frozen=True)
class Link:
    """`theirs`, joined along dim 0, equal `ours`, joined along dim 0. Shapes are global, without
    padding.
    """

    theirs: tuple[Named, ...]
    ours: tuple[Named, ...]

    def __post_init__(self) -> None:
        tails = {named.shape[1:] for named in (*self.theirs, *self.ours)}
        rows = {sum(named.shape[0] for named in side) for side in (self.theirs, self.ours)}
        assert len(tails) == 1 and len(rows) == 1, f"{self} does not join"


class Source(Protocol):
    """Tensors by name that are read when asked for, in whole or in part."""

    @property
    def infos(self) -> Mapping[str, Info]:
        """Shape and dtype of every tensor by name."""

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of a tensor, on the CPU."""


def whole(source: Source, name: str) -> torch.Tensor:
    """All of one tensor."""
    return source.rows(name, 0, source.infos[name].shape[0])


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds neither inf nor NaN.

    The least and the largest number are NaN as soon as any number is. Finding both takes one pass
    at the speed of memory and no second tensor; `torch.isfinite(tensor).all()` takes forty times as
    long in bfloat16.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    least, largest = torch.aminmax(tensor)
    return math.isfinite(least.item()) and math.isfinite(largest.item())


def not_finite(name: str, tensor: torch.Tensor) -> str:
    """Say how many numbers of a tensor are inf or NaN; empty if none is."""
    count = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
    return f"{name} ({count:,} of {tensor.numel():,})" if count else ""


def same_values(source: Source, first: str, second: str) -> bool:
    """Return whether two tensors hold the same numbers, in whatever dtypes; a part of both is in
    memory at a time.
    """
    info = source.infos[first]
    if info.shape != source.infos[second].shape or not info.shape:
        return False
    rows = info.shape[0]
    step = max(1, _COMPARED // max(1, math.prod(info.shape[1:])))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        one = source.rows(first, start, stop)
        other = source.rows(second, start, stop)
        wide = torch.promote_types(one.dtype, other.dtype)
        if not torch.equal(one.to(wide), other.to(wide)):
            return False
    return True


def tensor_problems(
    infos: Mapping[str, Info], wanted: Iterable[Named], ignored: Sequence[str] = ()
) -> list[str]:
    """Tensors that are missing, unexpected or of another shape, a line each, but for ends of names
    in `ignored`.
    """
    shapes = {named.name: named.shape for named in wanted}
    found = [f"{name} is missing" for name in shapes if name not in infos]
    for name, info in infos.items():
        if name not in shapes:
            found += [] if name.endswith(tuple(ignored)) else [f"{name} is unexpected"]
        elif tuple(info.shape) != shapes[name]:
            found.append(f"{name} has shape {tuple(info.shape)}, the config says {shapes[name]}")
    return found


class Mapped:
    """A source seen under the names of the other side of `links`; rows that lie in one tensor are
    not copied.
    """

    def __init__(self, source: Source, links: Sequence[Link], to_ours: bool) -> None:
        """The source must hold what the links ask for. ValueError when tensors to be joined differ
        in dtype.
        """
        self._source = source
        self._parts: dict[str, tuple[tuple[Named, ...], int]] = {}
        self._infos: dict[str, Info] = {}
        for link in links:
            sources, targets = (link.theirs, link.ours) if to_ours else (link.ours, link.theirs)
            dtypes = {source.infos[part.name].dtype for part in sources}
            if len(dtypes) > 1:
                names = ", ".join(
                    f"{part.name} {source.infos[part.name].dtype}" for part in sources
                )
                raise ValueError(f"tensors that belong together have different dtypes: {names}")
            first = 0
            for target in targets:
                self._parts[target.name] = (sources, first)
                self._infos[target.name] = Info(target.shape, *dtypes)
                first += target.shape[0]

    @property
    def infos(self) -> Mapping[str, Info]:
        return self._infos

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        sources, first = self._parts[name]
        start, stop = first + start, first + stop  # now rows of what all sources are joined
        found, begin = [], 0
        for part in sources:
            low, high = max(start, begin), min(stop, begin + part.shape[0])
            if low < high:
                found.append(self._source.rows(part.name, low - begin, high - begin))
            begin += part.shape[0]
        return found[0] if len(found) == 1 else torch.cat(found)


class Joined:
    """A source whose stacks of matrices, `[n, rows, columns]`, and of biases, are seen as one `[n
    rows, columns]`.
    """

    def __init__(self, source: Source, experts: int = 0) -> None:
        """`experts`: how many matrices each stack must have; 0: any number.

        Raises ValueError for a stack of another number. Joined, twice as many of half the rows have
        the same shape.
        """
        self._source = source
        self.infos: dict[str, Info] = {**source.infos}
        self._rows = dict[str, int]()  # of one matrix
        wrong = list[str]()
        for name, info in source.infos.items():
            if (name.endswith(STACKS), name.endswith(BIASES), len(info.shape)) in (
                (1, 0, 3),
                (0, 1, 2),
            ):
                count, self._rows[name], *columns = info.shape
                if experts and count != experts:
                    wrong.append(f"{name} has {count} experts, the config says {experts}")
                self.infos[name] = Info((count * self._rows[name], *columns), info.dtype)
            elif name.endswith(WIDE):
                self.infos[name] = Info(info.shape, torch.float32)
        if wrong:
            raise ValueError(listed(wrong, _TOLD, "; "))

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name not in self._rows:
            return self._source.rows(name, start, stop).to(self.infos[name].dtype)
        rows = self._rows[name]
        first = start // rows
        found = self._source.rows(name, first, -(-stop // rows)).flatten(0, 1)  # whole matrices
        return found[start - first * rows : stop - first * rows]


class Cast:
    """A source with its tensors cast to another dtype, but for those that are float32 in any."""

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        self._source, self._dtype = source, dtype

    @property
    def infos(self) -> Mapping[str, Info]:
        infos = self._source.infos.items()
        return {
            name: info if name.endswith(WIDE) else Info(info.shape, self._dtype)
            for name, info in infos
        }

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        found = self._source.rows(name, start, stop)
        if name.endswith(WIDE):
            return found
        cast = found.to(self._dtype)
        if not is_finite(cast):
            dtype = str(self._dtype).removeprefix("torch.")
            raise ValueError(f"{not_finite(name, cast)} has numbers that are too large for {dtype}")
        return cast


def in_dtype(source: Source, dtype: torch.dtype | None) -> Source:
    """A source with its tensors in a dtype; None leaves them as they are."""
    return source if dtype is None else Cast(source, dtype)


def dtypes(source: Source) -> dict[torch.dtype, str]:
    """The dtypes of tensors, without what is float32 in any model, and the first name of each."""
    first: dict[torch.dtype, str] = {}
    for name, info in source.infos.items():
        if not name.endswith(WIDE):
            first.setdefault(info.dtype, name)
    return first


def one_dtype(source: Source) -> torch.dtype:
    """The dtype of all tensors. ValueError names two that differ: a checkpoint of ours has one."""
    first = dtypes(source)
    if len(first) != 1:
        words = " and ".join(
            f"{name} {str(dtype).removeprefix('torch.')}" for dtype, name in first.items()
        )
        raise ValueError(f"the tensors have different dtypes ({words}): choose one with --dtype")
    return next(iter(first))


def num_bytes(info: Info) -> int:
    """Size of a tensor in memory and on disk."""
    return math.prod(info.shape) * info.dtype.itemsize
