"""The value of `--data-path`: one dataset, or several datasets with blend weights, as in Megatron.

Weights are stored as exact fractions of the typed decimals, so 0.1 + 0.2 is 0.3.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

DataPath = str | tuple[str, ...]
"""One folder, or WEIGHT FOLDER pairs in command-line order: `("0.7", "a", "0.3", "b")`."""


@dataclass(frozen=True)
class WeightedFolder:
    """A dataset and its weight in a blend."""

    folder: str
    weight: Fraction
    """Relative weight: the share of samples is this weight divided by the sum of all weights."""


def weighted_folders(flag: str, path: DataPath) -> tuple[WeightedFolder, ...]:
    """Return the datasets of `path` whose weight is not 0.

    Raise ValueError that lists all problems, one per line, each with `flag`.
    """
    # a single folder needs no weight
    if isinstance(path, str):
        return (WeightedFolder(path, Fraction(1)),)
    if len(path) == 1:
        return (WeightedFolder(path[0], Fraction(1)),)
    # WEIGHT FOLDER WEIGHT FOLDER ...
    texts = path[::2]
    folders = path[1::2]
    weights = [_number(text) for text in texts]
    if not folders or len(weights) != len(folders) or None in weights:
        raise ValueError(f"{flag} {' '.join(path)}: expected one folder, or pairs of WEIGHT FOLDER")
    pairs = [
        (weight or 0.0, text, folder)
        for weight, text, folder in zip(weights, texts, folders, strict=True)
    ]
    reasons = [
        f"{flag}: {folder} has the weight {text}, but weights must be finite and at least 0"
        for weight, text, folder in pairs
        if not (math.isfinite(weight) and weight >= 0)
    ]
    # weights are relative, so only their sum must not be 0
    if not reasons and not any(weights):
        reasons.append(f"{flag}: all {len(weights)} weights are 0; set at least one above 0")
    # compare real paths: `a`, `./a` and a link to `a` are the same dataset
    places = [os.path.realpath(folder) for folder in folders]
    repeated = {
        folder for folder, place in zip(folders, places, strict=True) if places.count(place) > 1
    }
    for folder in sorted(repeated):
        reasons.append(
            f"{flag} contains {folder} more than once: list it once, with the sum of its weights"
        )
    if reasons:
        raise ValueError("\n".join(reasons))
    # Decimal keeps the typed digits; the floats that were checked above are rounded
    return tuple(
        WeightedFolder(folder, Fraction(Decimal(text))) for weight, text, folder in pairs if weight
    )


def path_problems(flag: str, path: DataPath | None) -> list[str]:
    """Return the problems of `path`; an empty list if it is valid or None."""
    try:
        weighted_folders(flag, "" if path is None else path)
    except ValueError as error:
        return str(error).splitlines()
    return []


def named_folders(path: DataPath | None) -> tuple[str, ...]:
    """Return the folders to read; an empty tuple if `path` is empty or invalid."""
    if not path or path_problems("", path):
        return ()
    return tuple(dataset.folder for dataset in weighted_folders("", path))


def shown_path(path: DataPath | None) -> str:
    """Return the path as typed on the command line; "" for None."""
    return path if isinstance(path, str) else " ".join(path or ())


def _number(text: str) -> float | None:
    """Parse `text` as a number; return None if it is not one."""
    with contextlib.suppress(ValueError):
        return float(text)
    return None
