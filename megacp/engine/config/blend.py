"""What `--data-path` names: one dataset, or several with the weights by which they are blended, as
in Megatron.

Weights are exact fractions of the decimals as they were typed, so 0.1 + 0.2 is 0.3.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

DataPath = str | tuple[str, ...]
"""One folder, or WEIGHT FOLDER pairs as they stand on a command line."""


@dataclass(frozen=True)
class WeightedFolder:
    """A dataset and its share of the samples, over the sum of all weights of its blend."""

    folder: str
    weight: Fraction


def weighted_folders(flag: str, path: DataPath) -> tuple[WeightedFolder, ...]:
    """The datasets that `path` names, those of weight 0 left out. ValueError lists all that is
    wrong.
    """
    if isinstance(path, str) or len(path) == 1:
        return (WeightedFolder(path if isinstance(path, str) else path[0], Fraction(1)),)
    weights, folders = [_number(text) for text in path[::2]], path[1::2]
    if not folders or len(weights) != len(folders) or None in weights:
        raise ValueError(f"{flag} {' '.join(path)}: it takes one folder, or pairs of WEIGHT FOLDER")
    pairs = [
        (weight or 0.0, text, folder)
        for weight, text, folder in zip(weights, path[::2], folders, strict=True)
    ]
    reasons = [
        f"{flag}: {folder} has the weight {text}, it must be at least 0"
        for weight, text, folder in pairs
        if not (math.isfinite(weight) and weight >= 0)
    ]
    if not reasons and not any(weights):
        reasons.append(f"{flag}: all {len(weights)} weights are 0")
    places = [os.path.realpath(folder) for folder in folders]
    for folder in sorted(
        {folder for folder, place in zip(folders, places, strict=True) if places.count(place) > 1}
    ):
        reasons.append(f"{flag} names {folder} more than once: give it the sum of its weights")
    if reasons:
        raise ValueError("\n".join(reasons))
    return tuple(
        WeightedFolder(folder, Fraction(Decimal(text))) for weight, text, folder in pairs if weight
    )


def path_problems(flag: str, path: DataPath | None) -> list[str]:
    """Why `path` names no datasets; empty when it does, or when nothing is given."""
    try:
        weighted_folders(flag, "" if path is None else path)
    except ValueError as error:
        return str(error).splitlines()
    return []


def named_folders(path: DataPath | None) -> tuple[str, ...]:
    """The folders that are read; none where `path_problems` has something to say."""
    return (
        tuple(one.folder for one in weighted_folders("", path))
        if path and not path_problems("", path)
        else ()
    )


def shown_path(path: DataPath | None) -> str:
    """The path as it was typed."""
    return path if isinstance(path, str) else " ".join(path or ())


def _number(text: str) -> float | None:
    with contextlib.suppress(ValueError):
        return float(text)
    return None
