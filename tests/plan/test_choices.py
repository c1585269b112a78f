"""A choice is a row of a table: checks, memory, seconds and the model ask the row, and a name without a row fails."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megacp.attention.context_parallel.attention import select_transport
from megacp.attention.context_parallel.transports import TRANSPORTS, TransportRow
from megacp.attention.ops.kernel import Kernel
from megacp.distributed.grid import Axis, single_axis
from megacp.dry_run.memory import stage_memory
from megacp.dry_run.packs import PackSample
from megacp.engine.checks import check
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.models.costs import stage_layers
from megacp.plan.hardware import hardware
from megacp.plan.search import layouts
from megacp.plan.times import step_time

CP = 4
H100 = hardware("h100", "infiniband")
TINY = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 8, "vocab_size": 64, "seq_length": 4096}


def config_of(transport: str, **values: object) -> RunConfig:
    config = with_values(RunConfig(), {**TINY, "context_parallel_size": CP, **values})
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, cp_comm_type=transport))


def memory_of(config: RunConfig) -> int:
    return stage_memory(config, 0, stage_layers(config, CP)[0], CP).total


def seconds_of(config: RunConfig) -> float:
    return step_time(config, CP, H100, PackSample()).total


class Built(Exception):
    """Raised by the dummy transport when it is built."""


def build(axis: Axis, kernel: Kernel, sizes: tuple[int, ...]) -> None:
    raise Built


@pytest.fixture
def courier(monkeypatch: pytest.MonkeyPatch) -> TransportRow:
    """A dummy transport in the place of `p2p`: like `a2a` it splits heads over all ranks."""
    row = TransportRow("p2p", build, heads="all", layouts=("contiguous",), best_layout="contiguous")
    monkeypatch.setitem(TRANSPORTS, "p2p", row)
    return row


@pytest.mark.parametrize("ask", [memory_of, seconds_of, lambda config: check(config, CP)])
def test_a_transport_without_a_row_fails_by_its_name(ask: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TRANSPORTS, "kv_exchange")
    with pytest.raises(KeyError, match="kv_exchange"):
        ask(config_of("kv_exchange"))  # type: ignore[operator]


def test_checks_ask_the_row_of_a_transport(courier: TransportRow) -> None:
    reasons = " ".join(check(config_of("p2p", hidden_size=96, num_attention_heads=6), CP))
    assert "--cp-comm-type p2p deals heads over 4 ranks" in reasons


def test_the_dry_run_asks_the_row_of_a_transport(courier: TransportRow) -> None:
    assert memory_of(config_of("p2p")) == memory_of(config_of("a2a")) != memory_of(config_of("all_gather"))


def test_the_planner_asks_the_row_of_a_transport(courier: TransportRow) -> None:
    assert seconds_of(config_of("p2p")) == seconds_of(config_of("a2a")) != seconds_of(config_of("all_gather"))
    found = [config.parallel for config, _ in layouts(with_values(RunConfig(), TINY), CP, set(TINY))]
    tried = {one.cp_layout for one in found if one.cp_comm_type == "p2p" and one.context_parallel_size == CP}
    assert tried == {"contiguous"}


def test_the_model_builds_its_transport_by_the_row(courier: TransportRow) -> None:
    two = dataclasses.replace(single_axis("cp"), size=2, global_ranks=(0, 1))
    with pytest.raises(Built):
        select_transport("p2p", "math", two, torch.device("cpu"))
