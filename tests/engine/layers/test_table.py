"""A model builds exactly the described tensors (names, shapes, cuts, distributions) on every grid."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from unittest import mock

import pytest

from megacp.distributed.grid import Axis, ProcessGrid, build_grid
from megacp.distributed.shape import GridShape
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.data_parallel.parameter import spec_of
from megacp.engine.layers.stack import model_tensors
from megacp.engine.layers.vision import connector_tensors, tower_tensors
from megacp.engine.models import build
from megacp.verify.cases import MODELS
from megacp.verify.parity import prepare

FLAGS = [f"{axis}_parallel_size" for axis in ("tensor_model", "context", "pipeline_model")]
FLAGS += ["num_virtual_stages_per_pipeline_rank"]
Sizes = tuple[int, int, int, int]
QUICK: list[Sizes] = [(2, 2, 2, 2)]
SIZES = itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), (1, 2))
GRIDS = [
    (tp, cp, pp, virtual) for tp, cp, pp, virtual in SIZES if tp * cp * pp == 8 and virtual <= pp
]
PAIRS = {"lora_rank": 2, "lora_targets": "q,k,v,output,gate,up,down,mlp.up:3:1"}
STATE_PAIRS = {
    "lora_rank": 2,
    "lora_targets": "q,k,v,output,gate,up,down,linear_attention.z,linear_attention.b:3:4",
}
CUT = {"rows": 0, "columns": 1, "whole": None}
TABLES = ("embedding.weight", "head.weight")
"""Tables that are cut after padding, so ranks may have different numbers of true rows."""


def _pairs(name: str) -> dict[str, object]:
    """Return LoRA flags if the name asks for them; linears of one product have two ranks."""
    if "pairs" not in name:
        return {}
    return STATE_PAIRS if "qwen3_5" in name else PAIRS


def alone(shape: GridShape, rank: int) -> ProcessGrid:
    """Return the grid of one rank without communication; parameters are meta tensors."""
    one = build_grid(GridShape(), 0, "meta")
    members = {names: shape.members(rank, names) for names in one.axes} | {
        ("world",): tuple(range(shape.world_size))
    }
    members |= zip([("ep",), ("edp",)], shape.experts(rank), strict=True)
    axes = {
        names: Axis(names[0], len(ranks), ranks.index(rank), ranks)
        for names, ranks in members.items()
    }
    return replace(one, shape=shape, rank=rank, world=axes.pop(("world",)), axes=axes)


def held(config: RunConfig, shape: GridShape, rank: int) -> set[tuple[object, ...]]:
    """Return the pieces of a rank: name, shape, distribution, role, offsets, shape of the piece."""
    with mock.patch.object(build, "initialise"):
        chunks = build.build_chunks(config, alone(shape, rank))
    found = set()
    for spec in (spec_of(parameter) for chunk in chunks for parameter in chunk.parameters()):
        drawn = (spec.init, spec.std, spec.weight_decay, spec.treated, spec.reduced_over)
        found |= {(p.name, p.global_shape, *drawn, p.offsets, p.shape) for p in spec.pieces}
    return found


@pytest.mark.parametrize(
    "grids", [QUICK, pytest.param(GRIDS, marks=pytest.mark.slow)], ids=["one grid", "all grids"]
)
@pytest.mark.parametrize("name", [*MODELS, "tiny_biased with pairs", "tiny_qwen3_5 with pairs"])
def test_the_pieces_of_all_built_parameters_are_exactly_the_described_tensors(
    name: str, grids: list[Sizes]
) -> None:
    """Cut tensors are divided over tp ranks, whole ones are on each of them, and stages have no
    other tensors.
    """
    for grid in grids:
        given = dict(zip(FLAGS, grid, strict=True)) | _pairs(name)
        config = prepare(with_values(RunConfig(), given), given, model=name.split()[0]).config
        shape, parts = GridShape(*grid[:2], pp=grid[2], ep=1), defaultdict(list)
        for rank in range(shape.tp):
            stages = (held(config, shape, first + rank) for first in range(0, 8, 8 // shape.pp))
            for *tensor, offsets, sizes in set().union(
                *stages
            ):  # the first and the last stage have a copy of a tied table
                parts[tuple(tensor)].append(list(zip(offsets, sizes, strict=True)))
        tensors = (*model_tensors(config.model), *tower_tensors(config), *connector_tensors(config))
        expected = {
            (t.name, t.shape, t.init, t.std, t.decays, t.treated, t.reduced_over): t
            for t in tensors
        }
        assert parts.keys() == expected.keys()
        for key, tensor in expected.items():
            for dim, size in enumerate(tensor.shape):
                firsts, sizes = zip(*(piece[dim] for piece in parts[key]), strict=True)
                if CUT[tensor.cut] != dim:
                    assert (firsts, sizes) == ((0,) * shape.tp, (size,) * shape.tp), key
                    continue
                assert (*firsts, size) == (0, *itertools.accumulate(sizes)), key
                assert tensor.name in TABLES or {*sizes} == {size // shape.tp}, key
