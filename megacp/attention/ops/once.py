"""Derived values, computed once and stored with the object that they are derived from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

Owner = TypeVar("Owner")
More = TypeVarTuple("More")
Part = TypeVar("Part")


def once(derive: Callable[[Owner, *More], Part]) -> Callable[[Owner, *More], Part]:
    """Return `derive` with its results cached in its first argument, the owner.

    Several packages derive parts from a plan or a table, and all layers share them. The key of a
    part is its function and the remaining arguments. An owner may be handed to another thread, but
    threads must not use it concurrently.
    """

    @functools.wraps(derive)
    def kept(owner: Owner, *more: *More) -> Part:
        # stored in the owner's __dict__, so that parts are freed together with it
        parts: dict[object, Part] = vars(owner).setdefault("_parts", {})
        key = (kept, more)
        if key not in parts:
            parts[key] = derive(owner, *more)
        return parts[key]

    return kept
