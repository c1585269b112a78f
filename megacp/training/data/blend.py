"""Several datasets read as one: which dataset every sample comes from, and which sample of it.

The rule is megatron-core's: the dataset that lags most behind its weight is next. The order repeats
after `sum(parts)` samples, so one period is kept and any sample is found at once. A dataset that is
exhausted begins its next epoch in a new order.
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
"""Most samples of a period. Weights that need more are rounded down to parts of a million."""


def whole_parts(weights: Sequence[Fraction]) -> list[int]:
    """Weights as whole samples of a period: exact where at most `FINEST` are needed, else whole
    parts of it.

    ValueError: a weight is less than a part.
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
            f"a weight is {smallest:.2g} of all weights, a dataset gets at least 1 of {FINEST:,} "
            "samples"
        )
    return rounded


class BlendOrder:
    """Which dataset gives sample n of a blend, and how many samples it gave before; for any n >=
    0.
    """

    def __init__(self, parts: Sequence[int]) -> None:
        """`parts`: of each dataset in a period, all above 0."""
        chosen = array("h")
        lags = list(parts)  # weight x samples - samples of the dataset, in units of 1 / total
        for number in range(total := sum(parts)):
            pick = lags.index(
                max(lags)
            )  # the dataset that is furthest behind, the first of several
            chosen.append(pick)
            if (
                number
            ):  # before the first sample Megatron counts one: the first two see the same weights
                lags = list(map(operator.add, lags, parts))
            lags[pick] -= total
        self._parts = np.array(parts, np.int64)
        self._dataset = np.frombuffer(chosen, np.int16)  # [period]
        self._before = np.empty(total, np.int32)  # [period]: earlier samples of the same dataset
        for number, part in enumerate(parts):
            self._before[self._dataset == number] = np.arange(
                part
            )  # it has `part` samples in a period

    def locate(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Dataset, and number within it, of samples `start` .. `start + count - 1`; int64 [count]
        each.
        """
        periods, within = np.divmod(
            np.arange(start, start + count, dtype=np.int64), len(self._dataset)
        )
        dataset = self._dataset[within].astype(np.int64)
        return dataset, periods * self._parts[dataset] + self._before[within]

    def counts(self, number: int) -> np.ndarray:
        """Samples of each dataset among the first `number`, int64 [datasets]."""
        periods, within = divmod(number, len(self._dataset))
        return periods * self._parts + np.bincount(
            self._dataset[:within], minlength=len(self._parts)
        )


class BlendShare(NamedTuple):
    """What one dataset has given to a run: its share of all samples (of all weights before the
    first), its epochs.
    """

    name: str
    share: float
    epoch: float


class PackBlend:
    """Datasets that fit each other as one source of packs. Their packs are numbered one dataset
    after another.
    """

    def __init__(self, datasets: Sequence[PackedDataset], weights: Sequence[Fraction]) -> None:
        """ValueError lists every contradiction between the datasets, or names a weight that is too
        small.
        """
        folders = [str(one.directory) for one in datasets]
        manifests = [one.manifest for one in datasets]
        if reasons := contradictions(folders, manifests):
            raise ValueError("\n".join(reasons))
        self.datasets = tuple(datasets)
        self._parts = whole_parts(weights)
        # a dataset is named after its folder, and by the whole path where two folders have one name
        last = [folder.rstrip("/").rpartition("/")[2] for folder in folders]
        self._names = [
            name if last.count(name) == 1 else folder
            for name, folder in zip(last, folders, strict=True)
        ]
        self._order = BlendOrder(self._parts)
        self._first = np.concatenate(
            ([0], np.cumsum([len(one) for one in datasets]))
        )  # [datasets + 1]
        self._feature_ids = next((one.feature_ids for one in manifests if one.image_rules), ())

    def __len__(self) -> int:
        """Packs of all datasets."""
        return int(self._first[-1])

    def pack(self, i: int) -> Pack:
        """Pack `i`, 0 <= i < len, from any thread."""
        number = int(np.searchsorted(self._first, i, side="right")) - 1
        found = replace(self.datasets[number].pack(i - int(self._first[number])), index=i)
        if found.images is None and self._feature_ids:
            return replace(
                found,
                images=PackImages(np.zeros(0, UNIT_DTYPE), {}, lambda item: b"", self._feature_ids),
            )
        return found

    def samples(self, start: int, count: int, seed: int) -> np.ndarray:
        """Packs of samples `start` .. `start + count - 1`, int64 [count]: each dataset in its own
        endless order.
        """
        dataset, nth = self._order.locate(start, count)
        chosen = np.empty(count, np.int64)
        for number in np.unique(dataset).tolist():
            here = dataset == number  # rising numbers without a gap: the dataset's next samples
            # datasets of one length must not be shuffled alike
            digest = hashlib.blake2b(f"{seed} dataset {number}".encode(), digest_size=8).digest()
            own_seed = int.from_bytes(digest, "little")
            first = int(nth[here][0])
            found = samples(first, int(here.sum()), len(self.datasets[number]), own_seed)
            chosen[here] = (
                self._first[number] + found
            )  # from packs of the dataset to packs of the blend
        return chosen

    def stored(self, start: int, count: int) -> np.ndarray:
        """`samples` with each dataset in stored order; they end before the first pack that would
        come again.
        """
        dataset, nth = self._order.locate(start, count)
        again = np.flatnonzero(nth >= np.diff(self._first)[dataset])
        stop = int(again[0]) if len(again) else count
        return (self._first[dataset] + nth)[:stop]

    def shares(self, consumed: int) -> list[BlendShare]:
        """What each dataset gave to the first `consumed` samples."""
        counts = self._order.counts(consumed).tolist()
        of = counts if consumed else self._parts  # of no samples a share is the weight
        return [
            BlendShare(name, part / sum(of), count / len(dataset))
            for name, count, part, dataset in zip(
                self._names, counts, of, self.datasets, strict=True
            )
        ]

    @property
    def fingerprint(self) -> str:
        """Hash of the weights and of the datasets as they were built."""
        built = [self._parts, [one.fingerprint for one in self.datasets]]
        return hashlib.sha256(json.dumps(built).encode()).hexdigest()


def contradictions(folders: Sequence[str], manifests: Sequence[DatasetManifest]) -> list[str]:
    """All in which datasets of a run must not differ from the first, or from the first with images
    or messages.
    """
    reasons = []
    pictured = next((number for number, one in enumerate(manifests) if one.image_rules), 0)
    known = manifests[pictured].image_rules or {}
    expected = _decided(manifests[0])
    talking = next((number for number, one in enumerate(manifests) if one.chat_template), 0)
    template = (manifests[talking].chat_template or {}).get("default")
    alpaca = next(
        (number for number, one in enumerate(manifests) if "alpaca" in (one.answer_forms or {})),
        None,
    )
    for folder, manifest in zip(folders, manifests, strict=True):
        for what, value in _decided(manifest).items():
            if value != expected[what]:
                shown = f" ({value}, not {expected[what]})" if isinstance(value, int | None) else ""
                reasons.append(f"{folder} was built with another {what} than {folders[0]}{shown}")
        if manifest.chat_template and manifest.chat_template["default"] != template:
            reasons.append(
                f"{folder} was built with another --chat-template than {folders[talking]}"
            )
        conversations = {"chat_template", "messages"} & (manifest.answer_forms or {}).keys()
        if alpaca is not None and conversations:
            reasons.append(
                f"{folders[alpaca]} has answers after Alpaca's prompt, and {folder} has "
                "conversations in another form: "
                "build both with one --chat-template"
            )
        rules = manifest.image_rules or known
        if keys := sorted(key for key in {*rules, *known} if rules.get(key) != known.get(key)):
            differing = ", ".join(f"{key} {rules.get(key)}, not {known.get(key)}" for key in keys)
            reasons.append(
                f"{folder} was built with other image rules than {folders[pictured]}: {differing}"
            )
    return reasons


def _decided(manifest: DatasetManifest) -> dict[str, Any]:
    """What must be alike in datasets of one run, by what decides it."""
    return {
        "tokenizer": manifest.tokenizer.sha256,
        "--prepend-bos": manifest.tokenizer.begins_with,
        "--eod-token": manifest.ends_with,
        "--seq-length": manifest.seq_length,
        "--pad-multiple": manifest.pad_multiple,
    }
