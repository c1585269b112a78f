"""Public names of a package, imported from their modules when they are first used.

A package such as `megacp.attention` has modules with and without torch. Importing all of them in
its `__init__` would load torch for every module below it, also for those that only count tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def exports(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package: `homes` maps each public name to its module below the
    package.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return find
