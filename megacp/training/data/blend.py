"""Blends of several datasets: determine each sample's dataset, and its number in that dataset.

The rule is megatron-core's: the next sample comes from the dataset whose share is furthest below
its weight. The order repeats after `sum(parts)` samples. Only one period is stored, so any sample
is found in constant time. An exhausted dataset begins its next epoch in a new order.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
from array import array
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from megacp.training.data.manifest import DatasetManifest
from megacp.training.data.order import samples
from megacp.training.data.reader import Pack, PackedDataset, PackImages
from megacp.training.data.tables import UNIT_DTYPE

FINEST = 1_000_000
"""Maximum number of samples in a period. Finer weights are rounded down to millionths."""


def whole_parts(weights: Sequence[Fraction]) -> list[int]:
    """Return each dataset's number of samples in a period.

    The weights are exact if at most `FINEST` samples are needed. Otherwise, they are rounded down
    to multiples of 1 / `FINEST`. Raise ValueError if a weight becomes 0.
    """
    common = math.lcm(*(weight.denominator for weight in weights))
    parts = [int(weight * common) for weight in weights]
    parts = [part // math.gcd(*parts) for part in parts]
    total = sum(parts)
    if total <= FINEST:
        return parts
    rounded = [part * FINEST // total for part in parts]
    if 0 in rounded:
        smallest = float(min(weights) / sum(weights))
        raise ValueError(
            f"the smallest weight is {smallest:.2g} of the sum of all weights, but it must be at "
            f"least 1 / {FINEST:,}; use a larger weight"
        )
    return rounded


class BlendOrder:
    """Dataset of each sample n >= 0 in a blend, and the sample's number in this dataset."""

    def __init__(self, parts: Sequence[int]) -> None:
        """Compute one period. `parts` are each dataset's samples in a period, all above 0."""
        chosen = array("h")
        total = sum(parts)
        # weight x samples so far - the dataset's samples so far, in units of 1 / total
        lags = list(parts)
        for number in range(total):
            pick = lags.index(max(lags))  # the first dataset with the largest lag
            chosen.append(pick)
            # Megatron counts one sample before the first, so the first two use the same weights.
            if number:
                lags = list(map(operator.add, lags, parts))
            lags[pick] -= total
        self._parts = np.array(parts, np.int64)
        self._dataset = np.frombuffer(chosen, np.int16)  # [period]
        self._before = np.empty(total, np.int32)  # [period]: earlier samples of the same dataset
        for number, part in enumerate(parts):
            # the dataset has `part` samples in a period
            self._before[self._dataset == number] = np.arange(part)

    def locate(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the dataset of each sample `start` .. `start + count - 1`, and its number there.

        Both arrays are int64 [count].
        """
        numbers = np.arange(start, start + count, dtype=np.int64)
        periods, within = np.divmod(numbers, len(self._dataset))
        dataset = self._dataset[within].astype(np.int64)
        return dataset, periods * self._parts[dataset] + self._before[within]

    def counts(self, number: int) -> np.ndarray:
        """Return each dataset's count among the first `number` samples, int64 [datasets]."""
        periods, within = divmod(number, len(self._dataset))
        in_last_period = np.bincount(self._dataset[:within], minlength=len(self._parts))
        return periods * self._parts + in_last_period


class BlendShare(NamedTuple):
    """A dataset's share of all samples so far, and its epochs so far.

    Before the first sample, the share follows from the weights.
    """

    name: str
    share: float
    epoch: float


class PackBlend:
    """Several compatible datasets as one source of packs, numbered dataset by dataset."""

    def __init__(self, datasets: Sequence[PackedDataset], weights: Sequence[Fraction]) -> None:
        """Raise ValueError for contradictions between the datasets, or if a weight is too small."""
        folders = [str(one.directory) for one in datasets]
        manifests = [one.manifest for one in datasets]
        reasons = contradictions(folders, manifests)
        if reasons:
            raise ValueError("\n".join(reasons))
        self.datasets = tuple(datasets)
        self._parts = whole_parts(weights)
        # A dataset's name is its folder's name, or the whole path if two folders share a name.
        last = [folder.rstrip("/").rpartition("/")[2] for folder in folders]
        self._names = []
        for name, folder in zip(last, folders, strict=True):
            self._names.append(name if last.count(name) == 1 else folder)
        self._order = BlendOrder(self._parts)
        # [datasets + 1]: number of each dataset's first pack
        self._first = np.concatenate(([0], np.cumsum([len(one) for one in datasets])))
        self._feature_ids = next((one.feature_ids for one in manifests if one.image_rules), ())

    def __len__(self) -> int:
        """Return the number of packs in all datasets."""
        return int(self._first[-1])

    def pack(self, i: int) -> Pack:
        """Return pack `i`, 0 <= i < len. Any thread may call this."""
        number = int(np.searchsorted(self._first, i, side="right")) - 1
        found = replace(self.datasets[number].pack(i - int(self._first[number])), index=i)
        # In a blend with images, every row needs vision inputs, even if the pack is text.
        if found.images is None and self._feature_ids:
            no_units = np.zeros(0, UNIT_DTYPE)
            no_images = PackImages(no_units, {}, lambda item: b"", self._feature_ids)
            return replace(found, images=no_images)
        return found

    def samples(self, start: int, count: int, seed: int) -> np.ndarray:
        """Return the packs for samples `start` .. `start + count - 1`, int64 [count].

        Each dataset has its own endless order.
        """
        dataset, nth = self._order.locate(start, count)
        chosen = np.empty(count, np.int64)
        for number in np.unique(dataset).tolist():
            here = dataset == number  # consecutive samples of the dataset
            # datasets of equal length must not be shuffled in the same way
            digest = hashlib.blake2b(f"{seed} dataset {number}".encode(), digest_size=8).digest()
            own_seed = int.from_bytes(digest, "little")
            first = int(nth[here][0])
            found = samples(first, int(here.sum()), len(self.datasets[number]), own_seed)
            chosen[here] = self._first[number] + found
        return chosen

    def stored(self, start: int, count: int) -> np.ndarray:
        """Return the packs of samples `start` .. `start + count - 1`, each dataset in stored order.

        The result ends before the first pack that would be repeated.
        """
        dataset, nth = self._order.locate(start, count)
        lengths = np.diff(self._first)  # [datasets]
        again = np.flatnonzero(nth >= lengths[dataset])
        stop = int(again[0]) if len(again) else count
        return (self._first[dataset] + nth)[:stop]

    def shares(self, consumed: int) -> list[BlendShare]:
        """Return each dataset's share of the first `consumed` samples."""
        counts = self._order.counts(consumed).tolist()
        parts = counts if consumed else self._parts  # without samples, the weights are the shares
        total = sum(parts)
        shares = []
        for name, count, part, dataset in zip(
            self._names, counts, parts, self.datasets, strict=True
        ):
            shares.append(BlendShare(name, part / total, count / len(dataset)))
        return shares

    @property
    def fingerprint(self) -> str:
        """Hash of the weights and the datasets' contents."""
        built = [self._parts, [one.fingerprint for one in self.datasets]]
        return hashlib.sha256(json.dumps(built).encode()).hexdigest()


def contradictions(folders: Sequence[str], manifests: Sequence[DatasetManifest]) -> list[str]:
    """Return the differences that datasets in the same run must not have.

    Each dataset is compared with the first one or, for images and messages, with the first one that
    has any.
    """
    reasons = []
    expected = _decided(manifests[0])
    pictured = 0  # the first dataset with images
    talking = 0  # the first dataset with a chat template
    alpaca = None  # the first dataset with Alpaca's prompts
    for number in reversed(range(len(manifests))):
        manifest = manifests[number]
        if manifest.image_rules:
            pictured = number
        if manifest.chat_template:
            talking = number
        if "alpaca" in (manifest.answer_forms or {}):
            alpaca = number
    known = manifests[pictured].image_rules or {}
    template = (manifests[talking].chat_template or {}).get("default")
    for folder, manifest in zip(folders, manifests, strict=True):
        for what, value in _decided(manifest).items():
            if value != expected[what]:
                # hashes are omitted, because they are meaningless to a user
                shown = f" ({value}, not {expected[what]})" if isinstance(value, int | None) else ""
                reasons.append(f"{folder} was built with another {what} than {folders[0]}{shown}")
        if manifest.chat_template and manifest.chat_template["default"] != template:
            reasons.append(
                f"{folder} was built with another --chat-template than {folders[talking]}"
            )
        conversations = {"chat_template", "messages"} & (manifest.answer_forms or {}).keys()
        if alpaca is not None and conversations:
            reasons.append(
                f"{folders[alpaca]} has answers after Alpaca's prompt, but {folder} has "
                "conversations in a different form: rebuild both with the same --chat-template"
            )
        rules = manifest.image_rules or known  # a text dataset fits any rules
        keys = sorted(key for key in {*rules, *known} if rules.get(key) != known.get(key))
        if keys:
            differing = ", ".join(f"{key} {rules.get(key)}, not {known.get(key)}" for key in keys)
            reasons.append(
                f"{folder} was built with different image rules than {folders[pictured]}: "
                f"{differing}"
            )
    return reasons


def _decided(manifest: DatasetManifest) -> dict[str, Any]:
    """Return the values that must be equal in all datasets of a run, by the flag that sets them."""
    return {
        "tokenizer": manifest.tokenizer.sha256,
        "--prepend-bos": manifest.tokenizer.begins_with,
        "--eod-token": manifest.ends_with,
        "--seq-length": manifest.seq_length,
        "--pad-multiple": manifest.pad_multiple,
    }
