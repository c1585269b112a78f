"""Links between the library's tensors and ours, and views that read tensors through these links.

A link states that some of the library's tensors, joined along dim 0, have the same rows as some of
ours, joined alike. Links cover renaming, fused projections and a split embedding, in both
directions. Tensors are read only when their values are needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megacp.storage.wording import listed

Shape = tuple[int, ...]
# Suffixes of stacked expert matrices.
STACKS = (".experts.gate_up_proj", ".experts.down_proj")
# Suffixes of stacked expert biases.
BIASES = (".experts.gate_up_proj_bias", ".experts.down_proj_bias")
# Suffixes of tensors that are float32 in a model of any dtype.
WIDE = (".router.correction", ".e_score_correction_bias")
# Suffixes of packed tensors: numbers of a few bits, and the exponents of their blocks.
PACKED = ("_blocks", "_scales")
# Number of problems that a message lists.
_TOLD = 20
# Number of elements that are compared at a time.
_COMPARED = 16 << 20


@dataclass(frozen=True)
class Info:
    """The shape and dtype of a tensor."""

    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class Named:
    """The name and shape of a tensor."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class Link:
    """Tensors `theirs` and `ours` that have the same rows when each side is joined along dim 0.

    Shapes are global, without padding.
    """

    theirs: tuple[Named, ...]
    ours: tuple[Named, ...]

    def __post_init__(self) -> None:
        # Both sides must have the same rows of the same shape.
        tails = {named.shape[1:] for named in (*self.theirs, *self.ours)}
        their_rows = sum(named.shape[0] for named in self.theirs)
        our_rows = sum(named.shape[0] for named in self.ours)
        assert len(tails) == 1 and their_rows == our_rows, f"{self} does not join"


class Source(Protocol):
    """Named tensors that are read on demand, in whole or in part."""

    @property
    def infos(self) -> Mapping[str, Info]:
        """The shape and dtype of every tensor, by name."""

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of a tensor, on the CPU."""


def whole(source: Source, name: str) -> torch.Tensor:
    """Return all rows of a tensor."""
    return source.rows(name, 0, source.infos[name].shape[0])


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has neither inf nor NaN.

    The minimum and the maximum are NaN if any number is. Finding both takes one pass at memory
    speed and no second tensor; `torch.isfinite(tensor).all()` takes forty times as long in
    bfloat16.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    least, largest = torch.aminmax(tensor)
    return math.isfinite(least.item()) and math.isfinite(largest.item())


def not_finite(name: str, tensor: torch.Tensor) -> str:
    """Return a phrase with the number of inf and NaN values; empty if there are none."""
    count = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
    return f"{name} ({count:,} of {tensor.numel():,})" if count else ""


def same_values(source: Source, first: str, second: str) -> bool:
    """Return whether two tensors have equal values, even if their dtypes differ.

    Only parts of both tensors are in memory at a time.
    """
    info = source.infos[first]
    if info.shape != source.infos[second].shape or not info.shape:
        return False
    rows = info.shape[0]
    # Compare blocks of rows in the wider of both dtypes.
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
    """Return a message for each tensor that is missing, unexpected or has a wrong shape.

    Unexpected tensors are accepted if their name ends with one of `ignored`.
    """
    # Missing tensors first, then unexpected ones and wrong shapes.
    shapes = {named.name: named.shape for named in wanted}
    found = [f"{name} is missing" for name in shapes if name not in infos]
    for name, info in infos.items():
        if name not in shapes:
            if not name.endswith(tuple(ignored)):
                found.append(f"{name} is unexpected")
        elif tuple(info.shape) != shapes[name]:
            found.append(
                f"{name} has shape {tuple(info.shape)}, but the config requires {shapes[name]}"
            )
    return found


class Mapped:
    """A view of a source with the names on the other side of `links`.

    Rows that come from a single tensor are not copied.
    """

    def __init__(self, source: Source, links: Sequence[Link], to_ours: bool) -> None:
        """View `source`, which must have the tensors of the links.

        `to_ours`: whether the view has our names. Raise ValueError if tensors of a link differ in
        dtype.
        """
        self._source = source
        # name -> the tensors of its link, and its first row in them
        self._parts: dict[str, tuple[tuple[Named, ...], int]] = {}
        self._infos: dict[str, Info] = {}
        for link in links:
            sources, targets = (link.theirs, link.ours) if to_ours else (link.ours, link.theirs)
            dtypes = {source.infos[part.name].dtype for part in sources}
            if len(dtypes) > 1:
                names = ", ".join(
                    f"{part.name} {source.infos[part.name].dtype}" for part in sources
                )
                raise ValueError(f"tensors to be joined have different dtypes: {names}")
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
        # From here on, rows are counted in the joined sources.
        start += first
        stop += first
        found = []
        begin = 0  # first row of a part
        for part in sources:
            low = max(start, begin)
            high = min(stop, begin + part.shape[0])
            if low < high:
                found.append(self._source.rows(part.name, low - begin, high - begin))
            begin += part.shape[0]
        return found[0] if len(found) == 1 else torch.cat(found)


class Joined:
    """A view of a source in which stacks `[n, rows, columns]` become `[n rows, columns]`.

    Stacked biases are joined in the same way.
    """

    def __init__(self, source: Source, experts: int = 0) -> None:
        """View `source`, whose stacks must have `experts` matrices; 0 accepts any number.

        Raise ValueError for a stack of another size. Without the check, a stack of twice as
        many matrices with half the rows would have the same joined shape.
        """
        self._source = source
        self.infos: dict[str, Info] = {**source.infos}
        self._rows: dict[str, int] = {}  # rows of one matrix
        wrong: list[str] = []
        for name, info in source.infos.items():
            is_stack = name.endswith(STACKS) and len(info.shape) == 3
            is_bias = name.endswith(BIASES) and len(info.shape) == 2
            if is_stack or is_bias:
                count, self._rows[name], *columns = info.shape
                if experts and count != experts:
                    wrong.append(f"{name} has {count} experts, but the config requires {experts}")
                # The matrices of all experts, joined along dim 0.
                self.infos[name] = Info((count * self._rows[name], *columns), info.dtype)
            elif name.endswith(WIDE):
                self.infos[name] = Info(info.shape, torch.float32)
        if wrong:
            raise ValueError(listed(wrong, _TOLD, "; "))

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name not in self._rows:
            return self._source.rows(name, start, stop).to(self.infos[name].dtype)
        # Read every matrix that contains some of these rows, and return only the rows.
        rows = self._rows[name]
        first = start // rows
        found = self._source.rows(name, first, -(-stop // rows)).flatten(0, 1)
        return found[start - first * rows : stop - first * rows]


class Cast:
    """A view of a source that is cast to a dtype, except tensors that are always float32."""

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        self._source = source
        self._dtype = dtype

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
        # A large number becomes inf in float16.
        if not is_finite(cast):
            dtype = str(self._dtype).removeprefix("torch.")
            raise ValueError(f"{not_finite(name, cast)} has numbers too large for {dtype}")
        return cast


def in_dtype(source: Source, dtype: torch.dtype | None) -> Source:
    """Return a source with its tensors in a dtype; None leaves them unchanged."""
    return source if dtype is None else Cast(source, dtype)


def dtypes(source: Source) -> dict[torch.dtype, str]:
    """Return each dtype with the first tensor that has it.

    Tensors that are always float32 are ignored.
    """
    first: dict[torch.dtype, str] = {}
    for name, info in source.infos.items():
        if not name.endswith(WIDE):
            first.setdefault(info.dtype, name)
    return first


def one_dtype(source: Source) -> torch.dtype:
    """Return the common dtype of all tensors, because a megacp checkpoint has one dtype.

    Raise ValueError with one tensor of each dtype if their dtypes differ.
    """
    first = dtypes(source)
    if len(first) != 1:
        words = " and ".join(
            f"{name} {str(dtype).removeprefix('torch.')}" for dtype, name in first.items()
        )
        raise ValueError(f"the tensors have different dtypes ({words}): choose one with --dtype")
    return next(iter(first))


def num_bytes(info: Info) -> int:
    """Return the size of a tensor in memory and on disk, in bytes."""
    return math.prod(info.shape) * info.dtype.itemsize
