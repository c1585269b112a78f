"""The described tensors are those that are built: names, shapes, cuts and draws, on every grid."""

from __future__ import annotations

import itertools
from collections import defaultdict
from unittest import mock

import pytest
import torch

from megacp.core.config.run import RunConfig, with_values
from megacp.core.distributed.grid import Axis, GridShape, ProcessGrid, single_axis
from megacp.core.distributed.parameter import spec_of
from megacp.core.layers.stack import model_tensors
from megacp.core.layers.vision import connector_tensors, tower_tensors
from megacp.core.models import build
from megacp.verify.parity import MODELS, prepare

Sizes = tuple[int, int, int, int]
QUICK: list[Sizes] = [(2, 2, 2, 2)]
GRIDS = [
    (tp, pp, cp, virtual)
    for tp, pp, cp in itertools.product((1, 2, 4, 8), repeat=3)
    for virtual in ((1, 2) if pp > 1 else (1,))
    if tp * pp * cp == 8
]
"""Every (tp, pp, cp, virtual stages) of 8 ranks."""
AXES = ("tensor_model", "pipeline_model", "context")
PAIRS = {"lora_rank": 2, "lora_targets": "all"}
CUT = {"rows": 0, "columns": 1, "whole": None}
TABLES = ("embedding.weight", "head.weight")
"""Cut after padding, so not evenly."""


def alone(shape: GridShape, rank: int) -> ProcessGrid:
    """The grid of a rank that sends nothing, whose parameters have no values."""
    names = [("tp",), ("cp",), ("dp",), ("pp",), ("cp", "dp"), ("tp", "cp")]
    members = {name: shape.members(rank, name) for name in names}
    axes = {name: Axis("_".join(name), len(ranks), ranks.index(rank), ranks) for name, ranks in members.items()}
    world = Axis("world", shape.world_size, rank, tuple(range(shape.world_size)))
    return ProcessGrid(shape, rank, torch.device("meta"), axes, single_axis("embedding"), {}, world)


def held(config: RunConfig, shape: GridShape, rank: int) -> set[tuple[object, ...]]:
    """What a rank holds: name, shape, offsets and shape of the piece, draw and decay."""
    with mock.patch.object(build, "initialise"):
        chunks = build.build_chunks(config, alone(shape, rank))
    found = set()
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        spec = spec_of(parameter)
        draw = (spec.init, spec.std if spec.init in ("normal", "uniform", "log_rate") else 0.0, spec.weight_decay)
        found |= {(p.name, p.global_shape, *draw, p.offsets, p.shape) for p in spec.pieces}
    return found


@pytest.mark.parametrize("grids", [QUICK, pytest.param(GRIDS, marks=pytest.mark.slow)], ids=["one grid", "all grids"])
@pytest.mark.parametrize("name", [*MODELS, "tiny_biased with pairs", "tiny_qwen3_5 with pairs"])
def test_the_pieces_of_all_built_parameters_are_exactly_the_described_tensors(name: str, grids: list[Sizes]) -> None:
    """A cut tensor is on the tp ranks part by part, a whole one on each of them; stages hold nothing else."""
    for tp, pp, cp, virtual in grids:
        given = {f"{axis}_parallel_size": n for axis, n in zip(AXES, (tp, pp, cp), strict=True)}
        given |= {"num_virtual_stages_per_pipeline_rank": virtual, **(PAIRS if "pairs" in name else {})}
        config = prepare(with_values(RunConfig(), given), given, model=name.split()[0]).config
        shape, parts = GridShape(tp=tp, pp=pp, cp=cp), defaultdict(list)
        for rank in range(tp):
            stages = (held(config, shape, stage * tp * cp + rank) for stage in range(pp))
            for *tensor, offsets, sizes in set().union(*stages):  # both ends of a pipeline hold a tied table
                parts[tuple(tensor)].append(list(zip(offsets, sizes, strict=True)))
        tensors = (*model_tensors(config.model), *tower_tensors(config), *connector_tensors(config))
        expected = {(t.name, t.shape, t.init, t.std, t.decays): t for t in tensors}
        assert parts.keys() == expected.keys()
        for key, tensor in expected.items():
            for dim, size in enumerate(tensor.shape):
                firsts, sizes = zip(*(piece[dim] for piece in parts[key]), strict=True)
                if CUT[tensor.cut] == dim:
                    assert (*firsts, size) == (0, *itertools.accumulate(sizes)), key
                    assert tensor.name in TABLES or {*sizes} == {size // tp}, key
                else:
                    assert (firsts, sizes) == ((0,) * tp, (size,) * tp), key
