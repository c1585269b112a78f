"""The loader's order: every sample exactly once, the same for every dp size and every resume."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.engine.rows.batch import PackedBatch
from megacp.engine.rows.rank import DataRank
from megacp.training.data import tables
from megacp.training.data.blend import FINEST, BlendOrder, PackBlend, whole_parts
from megacp.training.data.loader import LoaderOptions, PackedLoader, step_batches, validation_steps
from megacp.training.data.order import permuted, samples
from megacp.training.data.reader import Pack, PackedDataset
from tests.training.data.datasets import IMAGE_RULES, random_packs, weighted_images, write_dataset


class Packs:
    """Return `count` packs of one document each; pack i has i % 5 + 2 tokens."""

    def __init__(self, count: int, broken: int | None = None) -> None:
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def pack(self, i: int) -> Pack:
        if i == self.broken:
            raise OSError(f"pack {i} is unreadable")
        length = i % 5 + 2
        segments = np.zeros(1, tables.SEGMENT_DTYPE)
        for name in ("true_length", "padded_length", "prefix_length"):
            segments[name] = length
        return Pack(i, np.full(length, i, np.int32), None, segments)


def ids(batches: list[PackedBatch]) -> list[int]:
    return [i for batch in batches for i in batch.pack_ids]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 1000))
def test_every_epoch_is_a_permutation_and_always_the_same(
    length: int, seed: int, epoch: int
) -> None:
    assert sorted(permuted(np.arange(length), length, seed, epoch).tolist()) == list(range(length))
    # golden: a run that resumes with a newer program must continue the same order
    assert permuted(np.arange(12), 12, seed=1234, epoch=0).tolist() == [
        9,
        10,
        8,
        7,
        11,
        2,
        0,
        3,
        5,
        1,
        6,
        4,
    ]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_resumed_at_any_step_on_any_dp_size_the_global_order_is_unchanged(
    data: st.DataObject,
) -> None:
    # catches samples repeated or skipped by a resume, and a step whose samples depend on dp
    rounds, micro = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    batch = rounds * micro * 4
    count, seed = data.draw(st.integers(1, 60)), data.draw(st.integers(0, 99))
    source = Packs(count)
    options = LoaderOptions(micro, batch, seed=seed, num_threads=0)
    start = data.draw(st.integers(0, 200))
    expected = samples(start, 4 * batch, count, seed).tolist()
    seen, consumed = [], start
    while (
        consumed < start + 4 * batch
    ):  # a "run" of one or two steps on some dp size, then a resume on another
        dp_size = data.draw(st.sampled_from([1, 2, 4]))
        steps = min(data.draw(st.integers(1, 2)), (start + 4 * batch - consumed) // batch)
        loaders = [
            PackedLoader(source, options, DataRank(r, dp_size), consumed) for r in range(dp_size)
        ]
        for _ in range(steps):
            per_rank = [loader.next_step() for loader in loaders]
            assert {len(batches) for batches in per_rank} == {batch // (micro * dp_size)}
            seen += [
                i
                for microbatch in zip(*per_rank, strict=True)
                for b in microbatch
                for i in b.pack_ids
            ]
        assert len({loader.consumed_samples for loader in loaders}) == 1
        consumed = loaders[0].consumed_samples
    assert seen == expected


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_reading_ahead_changes_nothing(num_threads: int) -> None:
    # catches a state that counts steps made ahead but not handed out
    options = LoaderOptions(2, 8, seed=5, num_threads=num_threads)
    source = Packs(13)
    with PackedLoader(source, options, DataRank(1, 2), 3) as loader:
        for step in range(6):
            assert loader.consumed_samples == 3 + 8 * step
            batches = loader.next_step()
            expected = step_batches(source, options, DataRank(1, 2), 3 + 8 * step)
            assert (
                ids(expected)
                == samples(3 + 8 * step, 8, 13, 5).reshape(2, 2, 2)[:, 1].flatten().tolist()
            )
            assert [b.fingerprint() for b in batches] == [b.fingerprint() for b in expected]
            assert sum(b.weight_sum for b in batches) == sum(i % 5 + 1 for i in ids(batches))


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_an_error_surfaces_in_its_own_step_and_what_is_prepared_belongs_to_its_batches(
    threads: int,
) -> None:
    order, prepared = samples(0, 8, 10, seed=0).tolist(), []

    def prepare(batch: PackedBatch) -> tuple[int, ...]:
        prepared.append(batch)
        if order[4] in batch.pack_ids:
            raise ValueError(f"pack {order[4]} has no plan")
        return batch.pack_ids

    options = LoaderOptions(1, 2, num_threads=threads)
    with PackedLoader(Packs(10), options, prepare=prepare) as loader:
        for step in range(2):
            assert loader.next_step() == [(order[2 * step],), (order[2 * step + 1],)]
            assert len(prepared) <= 2 * (step + 1 + max(2, threads))
        with pytest.raises(ValueError, match=f"pack {order[4]} has no plan"):
            loader.next_step()
    with PackedLoader(Packs(10, broken=order[5]), options) as loader:
        assert [ids(loader.next_step()) for _ in range(2)] == [order[:2], order[2:4]]
        for _ in range(2):
            with pytest.raises(OSError, match=f"pack {order[5]} is unreadable"):
                loader.next_step()
        assert loader.consumed_samples == 4


def test_close_ends_the_threads_and_can_be_repeated() -> None:
    loader = PackedLoader(Packs(10), LoaderOptions(1, 2, num_threads=2))
    loader.next_step()
    loader.close()
    loader.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("pack-loader")]
    with pytest.raises(RuntimeError, match="closed"):
        loader.next_step()


@pytest.mark.parametrize(("dp", "threads"), [(1, 0), (2, 2), (3, 1)])
def test_a_run_of_whole_epochs_takes_each_pack_as_often_and_its_last_step_is_short(
    dp: int, threads: int
) -> None:
    options = LoaderOptions(2, 12, seed=3, num_threads=threads, end=80)
    taken, counts = list[int](), list[int]()
    with contextlib.ExitStack() as stack:
        loaders = [PackedLoader(Packs(40), options, DataRank(i, dp), 4) for i in range(dp)]
        for loader in map(stack.enter_context, loaders):
            for _ in range(7):  # 4 + 6 x 12 + 4 samples
                batches = loader.next_step()
                counts.append(len(batches))
                taken += ids([batch for batch in batches if batch.weight_sum > 0])
            assert loader.consumed_samples == 80
    taken += samples(0, 4, 40, 3).tolist()
    assert sorted(taken) == sorted([*range(40)] * 2) and set(counts) == {6 // dp}


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize(("count", "num_steps"), [(21, 2), (21, 3), (21, 9), (16, 5), (1, 1)])
def test_validation_counts_each_pack_once_with_equal_work_on_every_rank(
    dp_size: int, count: int, num_steps: int
) -> None:
    source, options = Packs(count), LoaderOptions(2, 8, num_threads=0)
    ranks = [
        list(validation_steps(source, options, DataRank(r, dp_size), num_steps))
        for r in range(dp_size)
    ]
    assert {len(steps) for steps in ranks} == {min(num_steps, -(-count // 8))}
    assert {len(batches) for steps in ranks for batches in steps} == {8 // (2 * dp_size)}
    weighted = [b for steps in ranks for batches in steps for b in batches if b.weight_sum]
    assert sum(b.leave.any() for steps in ranks for batches in steps for b in batches) == len(
        weighted
    ), "no padding"
    first = range(min(8 * num_steps, count))
    assert sorted(ids(weighted)) == list(first)
    assert sum(b.weight_sum for b in weighted) == sum(i % 5 + 1 for i in first)


def off_by(parts: list[int], dataset: np.ndarray) -> Fraction:
    """Return the largest error of any share after any number of samples, counted in fractions."""
    counts, worst = [0] * len(parts), Fraction(0)
    for number, pick in enumerate(dataset.tolist(), 1):
        counts[pick] += 1
        lags = [
            Fraction(part * number, sum(parts)) - count
            for part, count in zip(parts, counts, strict=True)
        ]
        worst = max(worst, *map(abs, lags))
    return worst


def megatrons(weights: list[float], count: int) -> tuple[list[int], list[int]]:
    """Return dataset and number within it of each sample, by megatron-core's own blend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and megatron at import
        helper = pytest.importorskip(
            "megatron.core.datasets.helpers_cpp", reason="megatron-core is not installed"
        )
    dataset, nth = np.zeros(count, np.int16), np.zeros(count, np.int64)
    normal = np.array(weights, np.float64) / np.sum(np.array(weights, np.float64))
    helper.build_blending_indices(dataset, nth, normal, len(weights), count, False)
    return dataset.tolist(), nth.tolist()


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(0, 10**15), st.integers(0, 40)
)
def test_shares_are_kept_and_any_place_is_found_at_once(
    parts: list[int], start: int, count: int
) -> None:
    order = BlendOrder(parts)
    dataset, nth = order.locate(0, 2 * sum(parts) + 3)
    assert off_by(parts, dataset) < (1 if len(parts) <= 2 else 2)
    assert np.bincount(dataset[: sum(parts)]).tolist() == parts
    for number in range(len(parts)):
        own = nth[dataset == number]
        assert own.tolist() == list(range(len(own)))
    counts = order.counts(start)
    assert counts.sum() == start
    for one, number in zip(
        *(values.tolist() for values in order.locate(start, count)), strict=True
    ):
        assert number == counts[one]
        counts[one] += 1
    assert counts.tolist() == order.counts(start + count).tolist()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_order_is_megatron_cores(data: st.DataObject) -> None:
    """Totals that are powers of two have no rounding in Megatron's floats, and primes have no ties.
    In both cases there is only one answer.
    """
    total = data.draw(st.sampled_from([2, 8, 64, 512, 3, 7, 31, 101, 499]))
    cuts = data.draw(st.sets(st.integers(1, total - 1), max_size=min(6, total - 1)))
    edges = [0, *sorted(cuts), total]
    parts = np.diff(edges).tolist()
    if total % 2 and len(set(parts)) < len(parts):
        return  # equal weights tie, and floats break ties by their rounding
    ours = BlendOrder(parts).locate(0, total)
    assert (ours[0].tolist(), ours[1].tolist()) == megatrons(
        [part / total for part in parts], total
    )
    # golden: a run that resumes with a newer program must continue the same order
    assert BlendOrder([6, 3, 1]).locate(0, 10)[0].tolist() == [0, 1, 0, 2, 0, 1, 0, 0, 1, 0]


def test_weights_are_exact_as_typed_or_become_parts_of_a_million() -> None:
    assert whole_parts([Fraction("0.1"), Fraction("0.2"), Fraction("0.7")]) == [1, 2, 7]
    assert whole_parts([Fraction(30), Fraction(70)]) == [3, 7] and whole_parts(
        [Fraction("12.5")]
    ) == [1]
    weights = [Fraction(123_456_789), Fraction(987_654_321), Fraction(5_000)]
    parts = whole_parts(weights)
    assert FINEST - 3 < sum(parts) <= FINEST
    assert all(
        0 <= FINEST * w / sum(weights) - part < 1 for part, w in zip(parts, weights, strict=True)
    )
    with pytest.raises(
        ValueError, match="1e-09 of the sum of all weights, but it must be at least 1 / 1,000,000"
    ):
        whole_parts([Fraction(1), Fraction(10**9 + 7)])


def blended(folder: Path, sizes: dict[str, int], weights: list[str]) -> PackBlend:
    """Return datasets of some packs each, created in `folder` if missing."""
    for number, (name, count) in enumerate(sizes.items()):
        if not (folder / name).exists():
            write_dataset(folder / name, [random_packs(np.random.default_rng(number), count)])
    return PackBlend(
        [PackedDataset(folder / name) for name in sizes], [Fraction(w) for w in weights]
    )


def test_an_exhausted_dataset_begins_its_next_epoch_in_a_new_order(tmp_path: Path) -> None:
    blend = blended(tmp_path, {"large": 40, "small": 7}, ["0.5", "0.5"])
    chosen = blend.samples(0, 84, seed=3)
    small = [i - 40 for i in chosen.tolist() if i >= 40]
    epochs = [small[7 * e : 7 * e + 7] for e in range(6)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 4
    assert np.array_equal(
        np.concatenate([blend.samples(i, 12, seed=3) for i in range(0, 84, 12)]), chosen
    )
    shares = blend.shares(84)
    assert shares == [("large", 0.5, 42 / 40), ("small", 0.5, 6.0)]


def test_a_pack_keeps_its_tokens_and_weights_and_content_make_the_fingerprint(
    tmp_path: Path,
) -> None:
    sizes = {"a": 4, "b": 6}
    blend = blended(tmp_path, sizes, ["1", "2"])
    assert len(blend) == 10
    for i in range(10):
        pack, own = blend.pack(i), blend.datasets[i >= 4].pack(i - 4 * (i >= 4))
        assert pack.index == i and pack.tokens.tolist() == own.tokens.tolist()
    assert blended(tmp_path, sizes, ["0.1", "0.2"]).fingerprint == blend.fingerprint
    assert blended(tmp_path, sizes, ["1", "3"]).fingerprint != blend.fingerprint
    assert (
        blended(tmp_path, dict(reversed(sizes.items())), ["2", "1"]).fingerprint
        != blend.fingerprint
    )
    (tmp_path / "a").rename(tmp_path / "moved")
    assert blended(tmp_path, {"moved": 4, "b": 6}, ["1", "2"]).fingerprint == blend.fingerprint


def test_text_and_images_share_a_row(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    write_dataset(tmp_path / "text", [random_packs(rng, 4)])
    write_dataset(tmp_path / "images", [weighted_images(rng, 4)], image_rules=IMAGE_RULES)
    datasets = [PackedDataset(tmp_path / "text"), PackedDataset(tmp_path / "images")]
    blend = PackBlend(datasets, [Fraction(1), Fraction(1)])
    (batch,) = step_batches(blend, LoaderOptions(8, 8), DataRank(), 0)
    assert sorted(batch.pack_ids) == list(range(8))
    assert batch.vision.num_crops == 4
    (alone,) = step_batches(
        blend, LoaderOptions(1, 1), DataRank(), int(np.flatnonzero(blend.samples(0, 8, 0) < 4)[0])
    )
    assert alone.vision.num_crops == 0


def changed(folder: Path, **values: Any) -> PackedDataset:
    """Return the dataset of a folder with other values in its manifest."""
    manifest = PackedDataset(folder).manifest
    tokenizer = {key: value for key, value in values.items() if hasattr(manifest.tokenizer, key)}
    own = {key: value for key, value in values.items() if key not in tokenizer}
    manifest = dataclasses.replace(
        manifest, tokenizer=dataclasses.replace(manifest.tokenizer, **tokenizer), **own
    )
    manifest.write(folder)
    return PackedDataset(folder)


def test_all_contradictions_of_a_blend_are_told_at_once(tmp_path: Path) -> None:
    rng, datasets = np.random.default_rng(0), []
    changes = {
        "a": {},
        "b": {"sha256": "1" * 64, "chat_template": {"default": "x"}},
        "c": {"begins_with": 3},
    }
    changes["c"]["chat_template"] = {
        "default": ""
    }  # messages without one; `a` has none, and agrees with any
    for name, values in {**changes, "d": {"eos_id": 2, "seq_length": 64}}.items():
        write_dataset(tmp_path / name, [random_packs(rng, 2)])
        datasets.append(changed(tmp_path / name, **values))
    for name, crops in (("e", 4), ("f", 8)):
        write_dataset(
            tmp_path / name,
            [weighted_images(rng, 2)],
            image_rules={**IMAGE_RULES, "max_crops": crops},
        )
        datasets.append(PackedDataset(tmp_path / name))
    with pytest.raises(ValueError) as error:
        PackBlend(datasets, [Fraction(1)] * 6)
    told = str(error.value).replace(f"{tmp_path}/", "").splitlines()
    expected = [
        "b tokenizer a",
        "c --prepend-bos a",
        "c --chat-template b",
        "d --eod-token a (2, not 1)",
    ]
    expected += ["d --seq-length a (64, not 32)", "f image rules e max_crops 8"]
    assert len(told) == len(expected)
    for line, words in zip(told, expected, strict=True):
        assert line.startswith(words[0]) and all(word in line for word in words.split())
