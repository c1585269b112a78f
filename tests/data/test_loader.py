"""The loader's order: every sample exactly once, the same for every dp size and every resume."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.core.data import tables
from megacp.core.data.batch import PackedBatch
from megacp.core.data.loader import DataRank, LoaderOptions, PackedLoader, step_batches, validation_steps
from megacp.core.data.order import permuted, samples
from megacp.core.data.reader import Pack


class Packs:
    """`count` packs of one document each; pack i has i % 5 + 2 tokens."""

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
def test_every_epoch_is_a_permutation_and_always_the_same(length: int, seed: int, epoch: int) -> None:
    assert sorted(permuted(np.arange(length), length, seed, epoch).tolist()) == list(range(length))
    # golden: a run that resumes with a newer program must continue the same order
    assert permuted(np.arange(12), 12, seed=1234, epoch=0).tolist() == [9, 10, 8, 7, 11, 2, 0, 3, 5, 1, 6, 4]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_resumed_at_any_step_on_any_dp_size_the_global_order_is_unchanged(data: st.DataObject) -> None:
    # catches samples repeated or skipped by a resume, and a step whose samples depend on dp
    rounds, micro = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    batch = rounds * micro * 4
    count, seed = data.draw(st.integers(1, 60)), data.draw(st.integers(0, 99))
    source = Packs(count)
    options = LoaderOptions(micro, batch, seed=seed, num_threads=0)
    start = data.draw(st.integers(0, 200))
    expected = samples(start, 4 * batch, count, seed).tolist()
    seen, consumed = [], start
    while consumed < start + 4 * batch:  # a "run" of one or two steps on some dp size, then a resume on another
        dp_size = data.draw(st.sampled_from([1, 2, 4]))
        steps = min(data.draw(st.integers(1, 2)), (start + 4 * batch - consumed) // batch)
        loaders = [PackedLoader(source, options, DataRank(r, dp_size), consumed) for r in range(dp_size)]
        for _ in range(steps):
            per_rank = [loader.next_step() for loader in loaders]
            assert {len(batches) for batches in per_rank} == {batch // (micro * dp_size)}
            seen += [i for microbatch in zip(*per_rank, strict=True) for b in microbatch for i in b.pack_ids]
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
            assert ids(expected) == samples(3 + 8 * step, 8, 13, 5).reshape(2, 2, 2)[:, 1].flatten().tolist()
            assert [b.fingerprint() for b in batches] == [b.fingerprint() for b in expected]
            assert sum(b.weight_sum for b in batches) == sum(i % 5 + 1 for i in ids(batches))


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_an_error_surfaces_in_its_own_step_and_what_is_prepared_belongs_to_its_batches(threads: int) -> None:
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


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize(("count", "num_steps"), [(21, 2), (21, 3), (21, 9), (16, 5), (1, 1)])
def test_validation_counts_each_pack_once_with_equal_work_on_every_rank(
    dp_size: int, count: int, num_steps: int
) -> None:
    source, options = Packs(count), LoaderOptions(2, 8, num_threads=0)
    ranks = [list(validation_steps(source, options, DataRank(r, dp_size), num_steps)) for r in range(dp_size)]
    assert {len(steps) for steps in ranks} == {min(num_steps, -(-count // 8))}
    assert {len(batches) for steps in ranks for batches in steps} == {8 // (2 * dp_size)}
    weighted = [b for steps in ranks for batches in steps for b in batches if b.weight_sum]
    first = range(min(8 * num_steps, count))
    assert sorted(ids(weighted)) == list(first)
    assert sum(b.weight_sum for b in weighted) == sum(i % 5 + 1 for i in first)
