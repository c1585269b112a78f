"""Parts of an object that are computed once and kept with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

Owner = TypeVar("Owner")


More = TypeVarTuple("More")


Part = TypeVar("Part")


def once(derive: Callable[[Owner, *More], Part]) -> Callable[[Owner, *More], Part]:
    """`derive`, run once for each owner and further arguments: what it returns is kept with the
    owner, as its part. Threads hand an owner over, and do not share it.

    A plan or a table has parts of many rooms, made for all layers together. They are named by their
    functions.
    """

    @functools.wraps(derive)
    def kept(owner: Owner, *more: *More) -> Part:
        parts: dict[object, Part] = vars(owner).setdefault("_parts", {})
        key = (kept, more)
        if key not in parts:
            parts[key] = derive(owner, *more)
        return parts[key]

    return kept
