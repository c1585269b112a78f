"""Updated parameters that are gathered while the next step computes: the same run, and nothing read too early."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megacp.core.config.run import RunConfig, with_values
from megacp.core.data.mock import MockRules, mock_batch
from megacp.core.data_parallel.buckets import FlatBuckets, ParameterGather
from megacp.core.distributed.grid import single_axis
from megacp.core.distributed.parameter import ParameterSpec, TensorSlice, attach
from megacp.core.models import build
from megacp.core.training.step import ParallelModel
from megacp.verify.parity import MODELS
from tests.ranks import grid, run_ranks
from tests.tensor_parallel.test_fused_gradient import SIZES

SHAPES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2}, {}),
    ({"dp": 2}, {"data_parallel_sharding_strategy": "optim_grads", "recompute_granularity": "full"}),
    ({"dp": 2, "pp": 2}, {"num_virtual_stages_per_pipeline_rank": 2, "num_layers": 4}),
    ({"cp": 2}, {"dtype": "float32", "untie_embeddings_and_output_weights": True}),
    ({"dp": 2}, {**MODELS["tiny_vlm"], "vocab_size": 64, "seq_length": 64}),  # its rows have no image
]


class Late:
    """A gather that fills its bucket when somebody waits for it, as late as a slow network would."""

    def __init__(self, bucket: torch.Tensor, begun: Any) -> None:
        begun.wait()
        self._bucket, self._values = bucket, bucket.clone()
        bucket.fill_(torch.nan)

    def wait(self) -> None:
        self._bucket.copy_(self._values)


def three_steps(rank: int, world: int, shape: dict[str, int], settings: dict[str, Any], ahead: bool) -> list[Any]:
    """Losses, a validation loss and all parameters in the end."""
    names = {"pp": "pipeline_model_parallel_size", "cp": "context_parallel_size"}
    sizes = {names[key]: n for key, n in shape.items() if key in names}
    config = with_values(RunConfig(), {**SIZES, **sizes, **settings, "lr": 0.01, "lr_warmup_iters": 0})

    def with_parts(chunks: Any, *arguments: Any, **options: Any) -> FlatBuckets:
        return FlatBuckets(chunks, *arguments, **{**options, "parts": build._parts(chunks)})

    with pytest.MonkeyPatch.context() as patch:
        if ahead:
            patch.setattr(build, "FlatBuckets", with_parts)
        model = ParallelModel(config, grid(**shape))
    if ahead:
        flat, start = model.parameters, ParameterGather.start

        def late(gathers: ParameterGather, bucket: int, gather: Any) -> None:
            start(gathers, bucket, Late(flat.buckets[bucket].parameters, gather))  # type: ignore[arg-type, attr-defined]

        flat._gather.start = late.__get__(flat._gather)  # type: ignore[attr-defined]
    rows = [mock_batch([10 * rank * (shape.get("dp", 1) > 1) * (shape.get("pp", 1) == 1) + i], RULES) for i in range(2)]
    found: list[Any] = [model.train(rows, number, 100.0).loss for number in (1, 2)]
    found.append(model.evaluate(rows, 100.0))
    found.append(model.train(rows, 3, 100.0).loss)
    return [found, [part.values.clone().numpy() for part in model.parameters.parameters_held()]]


RULES = MockRules(SIZES["vocab_size"], SIZES["seq_length"], mask="mixed")


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "settings"), SHAPES, ids=str)
def test_a_run_is_the_same_bit_for_bit(shape: dict[str, int], settings: dict[str, Any]) -> None:
    world = int(np.prod(list(shape.values())))
    waiting = run_ranks(three_steps, world, shape, settings, False)
    ahead = run_ranks(three_steps, world, shape, settings, True)
    for (losses, expected), (found_losses, found) in zip(waiting, ahead, strict=True):
        assert found_losses == losses and np.isfinite(losses).all()
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_array_equal(a, b)


class Gather:
    """One under way, which notes when it is waited for."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen

    def wait(self) -> None:
        self.seen.append(self.name)


def test_a_part_waits_for_its_own_buckets_alone() -> None:
    seen: list[str] = []
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    whole = nn.Sequential(first, second)
    whole.extra = nn.Parameter(torch.zeros(1))
    holding = {first.weight: 3, first.bias: 2, second.weight: 1, second.bias: 2, whole.extra: 0}
    gathers = ParameterGather()
    gathers.before_forward([first, second, whole], holding)
    for bucket in range(4):
        gathers.start(bucket, Gather(f"bucket {bucket}", seen))  # type: ignore[arg-type]
    first.register_forward_hook(lambda *arguments: seen.append("first"))
    second.register_forward_hook(lambda *arguments: seen.append("second"))
    for _ in range(2):
        whole(torch.zeros(1, 2))
    once = ["bucket 0", "bucket 2", "bucket 3", "first", "bucket 1", "second"]
    assert seen == [*once, "first", "second"]


def test_a_part_that_no_microbatch_used_has_arrived_when_the_next_gradients_are_summed() -> None:
    seen: list[str] = []
    used, unused = (nn.Linear(2, 2, bias=False) for _ in range(2))
    model = nn.ModuleList([used, unused])
    for number, part in enumerate(model):
        attach(part.weight, ParameterSpec((TensorSlice(f"{number}", (2, 2), (0, 0), (2, 2)),), "normal", 1.0))
    flat = FlatBuckets([model], single_axis("dp_cp"), {}, 4, parts=[used, unused])
    for bucket in range(len(flat.buckets)):
        flat._gather.start(bucket, Gather(f"bucket {bucket}", seen))  # type: ignore[arg-type]
    used(torch.ones(1, 2)).sum().backward()
    assert seen == ["bucket 1"]
    flat.finish()
    assert seen == ["bucket 1", "bucket 0"]
