"""Lazy exports: public names of a package are imported on first use.

Only some modules of a package such as `megacp.attention` need torch. If `__init__` imported all of
them, even programs that only count tokens would load torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def exports(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for `package` that imports public names on demand.

    `homes` maps each public name to its module, relative to the package.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return find
