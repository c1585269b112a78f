"""Fake steps without a GPU: they finish, ranks make matching calls, and the dry run predicts their
memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megacp.distributed.fake_world import Call, differences
from megacp.distributed.shape import GridShape
from tests.engine.backends.engine_stub import needs_engine
from tests.verify.fake_cases import CASES, ENGINE

ROOT = Path(__file__).resolve().parents[2]
OTHERS = [name for name in CASES if name != "4d"]
PARTS = [pytest.param(["4d"], id="4d")]
PARTS += [
    pytest.param(OTHERS[first::7], id=OTHERS[first], marks=pytest.mark.long) for first in range(7)
]
PARTS += [pytest.param([*ENGINE], id="engine", marks=(needs_engine, pytest.mark.long))]


def steps_of(names: list[str]) -> dict[str, dict[str, Any]]:
    """Return the output of `fake_cases` by case."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.verify.fake_cases", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-3000:]
    return {found["name"]: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", PARTS)
def test_steps_on_a_device_that_is_not_there_agree_and_hold_what_was_planned(
    names: list[str],
) -> None:
    """A step fails if an operator mixes devices, a graph breaks, or the host reads a tensor."""
    found = steps_of(names)
    assert list(found) == names
    for name, step in found.items():
        assert step["wrong"] == [], name
        # The dry run assumes native layers. Transformer Engine's ring keeps one more tensor per
        # layer, with the size of the queries.
        bound = 1.07 if name in ENGINE else 1.05
        assert step["peak"] / bound <= step["planned"] <= step["peak"] * bound, f"{name}: {step}"
        if name != "4d":
            continue
        # Collectives must use the groups that are created before the first step. Messages have
        # separate groups.
        shape = GridShape(tp=2, cp=2, dp=2, pp=2)
        meet = [
            shape.members(0, axes)
            for axes in (("tp",), ("cp",), ("cp", "dp"), ("tp", "cp", "dp", "pp"))
        ]
        collectives = [tuple(ranks) for _, ranks, is_message in step["groups"] if not is_message]
        assert set(collectives) <= set(meet) and len(collectives) == len(set(collectives))


GROUP = ("g", (0, 1))
FLOATS = ("torch.float32", (4,))


def call(
    name: str,
    *what: Any,
    sent: tuple[int, ...] = (),
    received: tuple[int, ...] = (),
    peer: int = -1,
) -> Call:
    return Call(f"c10d::{name}", *GROUP, *(what or FLOATS), sent, received, peer)


@pytest.mark.parametrize(
    ("here", "there", "agrees"),
    [
        ([call("allreduce_")], [call("allreduce_")], True),
        ([call("allreduce_")], [], False),
        ([call("allreduce_")], [call("allreduce_", "torch.bfloat16", (4,))], False),
        ([call("allreduce_")], [call("allreduce_", "torch.float32", (8,))], False),
        ([call("a"), call("b")], [call("b"), call("a")], False),
        (
            [call("alltoall_", sent=(1, 2), received=(1, 5))],
            [call("alltoall_", sent=(5, 3), received=(2, 3))],
            True,
        ),
        (
            [call("alltoall_", sent=(1, 2), received=(1, 4))],
            [call("alltoall_", sent=(5, 3), received=(2, 3))],
            False,
        ),
        ([call("send", peer=1)], [call("recv_", peer=0)], True),
        ([call("send", peer=1)], [call("recv_", "torch.float32", (8,), peer=0)], False),
        ([call("send", peer=1)], [], False),
    ],
)
def test_two_ranks_must_make_the_same_calls_in_one_order(
    here: list[Call], there: list[Call], agrees: bool
) -> None:
    assert bool(differences(0, here, 1, there)) != agrees


@pytest.mark.slow
@pytest.mark.long
def test_the_tool_prints_what_a_rank_of_any_world_holds() -> None:
    flags = "--fake --world-size 1024 --rank 513 --num-layers 2 --vocab-size 512 --seq-length 1024 --dtype bfloat16"
    grid = "--tensor-model-parallel-size 4 --context-parallel-size 8 --global-batch-size 32"
    tool = [sys.executable, "tools/check_gpu.py"]
    done = subprocess.run(
        [*tool, *flags.split(), *grid.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("rank ")] == [
        "513",
        "514",
        "517",
        "545",
    ]
    refused = subprocess.run(
        [*tool, "--fake", "--hidden-size", "3"], cwd=ROOT, capture_output=True, text=True
    )
    assert refused.returncode == 2 and "--hidden-size 3" in refused.stderr
