"""The bucket plan: every parameter once, alike with alike, in the order of the backward pass."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megacp.core.data_parallel.layout import ALIGNMENT, plan_buckets, slices_of
from megacp.core.distributed.parameter import ParameterSpec, TensorSlice, attach


def parameter(elements: int, decay: bool = True, partial: tuple[str, ...] = (), counted: bool = True) -> nn.Parameter:
    piece = TensorSlice("p", (elements,), (0,), (elements,))
    spec = ParameterSpec((piece,), weight_decay=decay, partial_over=partial, counted=counted)
    return attach(nn.Parameter(torch.zeros(elements)), spec)


kinds = st.tuples(st.integers(1, 300), st.booleans(), st.sampled_from([(), ("tp",)]), st.booleans())


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.lists(kinds, max_size=8), min_size=1, max_size=3), st.integers(1, 4), st.integers(1, 900))
def test_every_parameter_has_one_place_among_its_like(chunks: list[list[tuple]], size: int, limit: int) -> None:
    models = [nn.ParameterList([parameter(*kind) for kind in chunk]) for chunk in chunks]
    order = [p for model in reversed(models) for p in reversed(list(model))]
    plans = plan_buckets(models, size, limit)
    assert sorted(id(s.parameter) for plan in plans for s in plan.slots) == sorted(map(id, order))
    for plan in plans:
        assert plan.elements % (size * ALIGNMENT) == 0
        assert len(plan.slots) == 1 or sum(s.parameter.numel() for s in plan.slots) <= limit
        end = 0
        for slot in plan.slots:
            assert slot.start >= end and slot.start % ALIGNMENT == 0
            end = slot.start + slot.parameter.numel()
            key = (slot.spec.partial_over, slot.spec.weight_decay, slot.spec.counted)
            assert key == (plan.partial_over, plan.weight_decay, plan.counted)
            assert any(p is slot.parameter for p in models[plan.chunk])
        assert end <= plan.elements
    place = {id(p): i for i, p in enumerate(order)}
    completed = [place[id(plan.slots[-1].parameter)] for plan in plans]
    assert completed == sorted(completed)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.integers(1, 5))
def test_the_slices_of_all_ranks_are_the_parameters(sizes: list[int], ranks: int) -> None:
    plan = plan_buckets([nn.ParameterList([parameter(n) for n in sizes])], ranks, 10_000)[0]
    shard = plan.elements // ranks
    owners = {id(slot.spec): torch.zeros(slot.parameter.numel()) for slot in plan.slots}
    for rank in range(ranks):
        for part in slices_of(plan, rank * shard, torch.ones(shard)):
            owners[id(part.spec)][part.start : part.start + part.values.numel()] += part.values
    assert all((owned == 1).all() for owned in owners.values())
