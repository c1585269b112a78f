"""Activation offload: the same bits, every byte counted, nothing held after a step.

The copies of `LateLane` happen when somebody waits for them, as late as a GPU could make them. A wait that is forgotten
thus shows on a CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megacp.core.config.run import RunConfig
from megacp.core.models import offload
from megacp.core.models.offload import HostMemory, Passage
from megacp.core.training.step import ParallelModel
from megacp.plan import activations, memory
from tests.ranks import grid, run_ranks
from tests.reference.packs import random_batch
from tests.reference.training import config_of, step_batches, train
from tests.reference.vision import TINY, document_with_images

TOKENS, MICROBATCHES = 48, 3
RECOMPUTE = pytest.mark.parametrize("recompute", ["none", "selective", "full"])


class Late:
    """A copy that has not happened yet."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run: Callable[[], None] | None = run


class LateLane:
    """Copies that happen when they are waited for, and not at all once their source is gone."""

    def __init__(self, device: torch.device) -> None:
        self.sizes: list[int] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Late | None) -> Late:
        self.sizes.append(len(source))
        # a storage on its way out is held by nobody but its owner; a part of a host buffer is a view that dies at once
        held = (lambda: source) if source._is_view() else weakref.ref(source)
        target.fill_(255)  # NaN in every dtype

        def run(after: Late | None = after) -> None:
            self.wait(after)
            there = held()
            target.fill_(255) if there is None else target.copy_(there)

        return Late(run)

    def wait(self, event: Late | None) -> None:
        if event is not None and event.run is not None:
            run, event.run = event.run, None
            run()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "Lane", LateLane)
    monkeypatch.setattr(offload, "SMALLEST", 1)  # so that tiny rows travel whole


def small(**values: Any) -> RunConfig:
    return config_of({"attention_kernel": "flash", **values}, {})


def packs(seed: int = 1) -> list[Any]:
    """Microbatches of equal length."""
    rng = np.random.default_rng(seed)
    return [random_batch(rng, TOKENS, 53, documents=3, number=i) for i in range(MICROBATCHES)]


def step(model: ParallelModel, number: int = 1) -> None:
    batches = packs(number)
    model.gradients(batches, number, sum(batch.weight_sum for batch in batches))
    model.parameters.zero()


def road(model: ParallelModel) -> HostMemory:
    return model.chunks[0].blocks[0].offload.memory


def assert_same_bits(found: Any, expected: Any) -> None:
    """Of what `train` returns: losses and norms, gradients, weights, the validation loss."""
    assert found[0] == expected[0] and found[3] == expected[3]
    for mine, other in zip((*found[1], found[2]), (*expected[1], expected[2]), strict=True):
        for name, (_, values) in mine.items():
            np.testing.assert_array_equal(values, other[name][1], err_msg=str(name))


@RECOMPUTE
@pytest.mark.parametrize("values", [{"hidden_dropout": 0.1}, {"qk_layernorm": "head"}, {"mlp_chunk_tokens": 20}])
@pytest.mark.slow
def test_the_bytes_are_those_that_the_planner_counts(late: None, recompute: str, values: dict[str, Any]) -> None:
    config = small(recompute_granularity=recompute, seq_length=TOKENS, activation_offload=0.5, **values)
    model = ParallelModel(config, grid())
    step(model)
    sent, came = road(model).away.sizes, road(model).back.sizes
    assert sum(sent) == MICROBATCHES * 2 * activations.layer_activations(config, recompute)
    assert sorted(sent) == sorted(came)
    assert recompute != "full" or len(sent) == MICROBATCHES * 2
    planned = memory.stage_memory(config, 0, [range(4)], 1)
    assert road(model).allocated == planned.host == 2 * activations.layer_activations(config, recompute)


@RECOMPUTE
def test_a_step_leaves_nothing_behind_and_the_next_one_allocates_nothing(late: None, recompute: str) -> None:
    model = ParallelModel(small(recompute_granularity=recompute, activation_offload=3), grid())
    host = road(model)
    held = []
    for number in (1, 2, 3):
        step(model, number)
        held.append((host.allocated, sum(buffer.size for buffer in host.free)))
    assert held == [(host.allocated, host.allocated)] * 3


def test_without_gradients_nothing_is_copied(late: None) -> None:
    model = ParallelModel(small(activation_offload=0.5), grid())
    batches = packs()
    model.evaluate(batches, sum(batch.weight_sum for batch in batches))
    assert road(model).allocated == 0 and road(model).away.sizes == []


def test_views_aliases_and_strides_come_back_as_they_were(late: None) -> None:
    host = HostMemory(torch.device("cpu"))
    base = torch.arange(24.0).view(4, 6)
    views = [base.t(), base[1:3, ::2], base[0].expand(5, 6), base.view(-1)[3:]]
    passage = Passage(host, ())
    held = [passage.pack(view) for view in views]
    passage.close()
    expected = [(view.clone(), view.stride(), view.storage_offset()) for view in views]
    passage.leave()
    del base, views
    found = [passage.unpack(place) for place in held]
    for x, (values, stride, offset) in zip(found, expected, strict=True):
        assert torch.equal(x, values) and (x.stride(), x.storage_offset()) == (stride, offset)
    assert len({x.untyped_storage().data_ptr() for x in found}) == 1
    assert (host.away.sizes, host.back.sizes) == ([96], [96])


def test_a_buffer_serves_rows_of_other_lengths() -> None:
    host = HostMemory(torch.device("cpu"))
    for buffer in [host.take(size) for size in (1000, 3000)]:
        host.give(buffer)
    assert [host.take(size).size for size in (900, 1400, 1600)] == [1000, 1400, 3000]
    assert host.allocated == 1000 + 3000 + 1400


def moved_and_plain(rank: int, world: int, shape: dict[str, int], values: dict[str, Any], images: bool) -> None:
    """Two steps with and without offload have the same bits on this rank."""
    steps = [step_batches(4, seed) for seed in (1, 2)]
    if images:
        steps = [[document_with_images(), document_with_images((1, 1, 1, 1), (3, 3, 3, 3), 9, seed=2)]] * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "Lane", LateLane)
        patch.setattr(offload, "SMALLEST", 1)
        plain, moved = (
            train(
                grid(**shape),
                config_of({"attention_kernel": "flash", **values, "activation_offload": asked}, shape),
                steps,
            )
            for asked in (0.0, 0.9)
        )
    assert_same_bits(moved, plain)


V = "num_virtual_stages_per_pipeline_rank"


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, values",
    [
        ({"pp": 2}, {}),
        ({"pp": 2}, {V: 2, "recompute_granularity": "selective"}),
        ({"pp": 2}, {V: 2, "recompute_granularity": "full", "mlp_chunk_tokens": 20}),
        ({"tp": 2}, {"recompute_granularity": "selective", "gradient_accumulation_fusion": True}),
        *(({"cp": 2}, {"cp_comm_type": name}) for name in ("p2p", "all_gather", "a2a", "kv_exchange")),
        *(({"pp": 2}, {**TINY, "freeze": frozen}) for frozen in (None, "text")),
        ({"tp": 2}, {**TINY, "freeze": "vision", "recompute_granularity": "full"}),
    ],
)
def test_ranks_have_the_same_bits(shape: dict[str, int], values: dict[str, Any]) -> None:
    run_ranks(moved_and_plain, 2, shape, values, "vision_num_layers" in values)
