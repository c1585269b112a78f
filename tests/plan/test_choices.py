"""Each choice is a row of a table; checks, memory, time and the model use the row.

A name without a row is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megacp.attention.context_parallel.attention import select_transport
from megacp.attention.context_parallel.layout import LAYOUTS
from megacp.attention.context_parallel.transports import TRANSPORTS, TransportRow
from megacp.attention.ops.kernel import Kernel
from megacp.distributed.grid import Axis, single_axis
from megacp.dry_run import measured
from megacp.dry_run.measured import block_memory
from megacp.dry_run.memory import stage_memory
from megacp.dry_run.messages import step_messages
from megacp.dry_run.packs import PackSample
from megacp.dry_run.part_memory import PartMemory
from megacp.engine.checks import check
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.config.training import RECOMPUTE_MODES, RecomputeMode
from megacp.engine.models.costs import stage_layers
from megacp.engine.step.step import ParallelModel
from megacp.plan.hardware import hardware
from megacp.plan.search import fields_chosen, layouts, search
from megacp.plan.times import step_time
from tests.ranks import grid
from tests.reference.packs import random_batch

CP = 4
H100 = hardware("h100", "infiniband")
TINY = {
    "num_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "vocab_size": 64,
    "seq_length": 4096,
}
Ask = Callable[[RunConfig], Any]


def of_transport(name: str, **values: Any) -> RunConfig:
    """Return a config with a transport that the flag does not accept."""
    config = with_values(RunConfig(), {**TINY, "context_parallel_size": CP, **values})
    return dataclasses.replace(
        config, parallel=dataclasses.replace(config.parallel, cp_comm_type=name)
    )


def of_mode(name: str, **values: Any) -> RunConfig:
    config = with_values(RunConfig(), {**TINY, "global_batch_size": 4, **values})
    return dataclasses.replace(
        config, training=dataclasses.replace(config.training, recompute_granularity=name)
    )


def memory_of(config: RunConfig) -> int:
    return stage_memory(
        config, 0, stage_layers(config, config.model_ranks)[0], config.model_ranks
    ).total


def seconds_of(config: RunConfig) -> float:
    return step_time(config, config.model_ranks, H100, PackSample()).total


def bytes_of(config: RunConfig) -> Any:
    return step_messages(config, config.model_ranks, PackSample())


def train(config: RunConfig) -> Any:
    model = ParallelModel(config, grid())
    batch = random_batch(np.random.default_rng(0), config.data.seq_length, config.model.vocab_size)
    return model.gradients([batch], 1, batch.weight_sum)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither store nor reuse measurements of rows that exist only in these tests."""
    kept: dict[str, PartMemory] = {}
    monkeypatch.setattr(measured, "_remembered", lambda: kept)
    monkeypatch.setattr(measured, "_remember", lambda key, memory: None)
    measured._found.cache_clear()


def defers(config: RunConfig) -> bool:
    return config.parallel.defers_weight_gradients


def has_input_norms(config: RunConfig) -> bool:
    return config.model.has_input_norms


UNKNOWN: dict[str, tuple[dict[str, Any], tuple[Ask, ...]]] = {
    "cp_layout": ({"context_parallel_size": CP}, (memory_of, seconds_of)),
    "recompute_granularity": ({}, (memory_of, seconds_of, train)),
    "data_parallel_sharding_strategy": ({}, (memory_of, seconds_of, train)),
    "pipeline_schedule": (
        {"pipeline_model_parallel_size": 2},
        (defers, memory_of, seconds_of, train),
    ),
    "norm_position": ({}, (has_input_norms, memory_of, seconds_of, train)),
    "linear_attention_rule": ({"linear_attention_freq": "2"}, (memory_of, seconds_of, train)),
}
"""For each flag, other flags that make it matter, and the functions that need its row."""


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_word_without_a_row_fails_by_its_name(name: str) -> None:
    values, asks = UNKNOWN[name]
    config = with_values(RunConfig(), {**TINY, "global_batch_size": 4, **values, name: "nonesuch"})
    assert "nonesuch" in " ".join(check(config, config.model_ranks))
    for ask in asks:
        with pytest.raises(KeyError, match="nonesuch"):
            ask(config)


@pytest.mark.parametrize(
    ("layout", "usable"), [("zigzag", "1000 or 1008"), ("balanced", ""), ("auto", "1000 or 1008")]
)
def test_checks_ask_the_row_of_a_layout(layout: str, usable: str) -> None:
    config = with_values(
        RunConfig(), {**TINY, "context_parallel_size": CP, "cp_layout": layout, "seq_length": 1004}
    )
    reasons = " ".join(check(config, CP))
    assert usable in reasons and bool(reasons) == bool(usable)


def test_checks_ask_a_new_row_of_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYOUTS, "zigzag", dataclasses.replace(LAYOUTS["zigzag"], slices=3))
    config = with_values(RunConfig(), {**TINY, "context_parallel_size": CP, "seq_length": 1000})
    assert "3 slices of --cp-layout zigzag x cp 4 x tp 1 = 12: use 996 or 1008" in " ".join(
        check(config, CP)
    )


class Built(Exception):
    """Raised by the dummy transport when it is built."""


def build(axis: Axis, kernel: Kernel, sizes: tuple[int, ...]) -> None:
    raise Built


@pytest.fixture
def courier(monkeypatch: pytest.MonkeyPatch) -> TransportRow:
    """Return a dummy transport, which splits heads over all ranks like `a2a`."""
    like = TRANSPORTS["a2a"]
    row = dataclasses.replace(like, name="courier", engine=None)
    monkeypatch.setitem(TRANSPORTS, "courier", row)
    return row


@pytest.mark.parametrize("ask", [memory_of, seconds_of, bytes_of])
def test_a_transport_without_a_row_fails_by_its_name(ask: Ask) -> None:
    with pytest.raises(KeyError, match="courier"):
        ask(of_transport("courier"))


def test_checks_refuse_a_word_that_no_flag_knows() -> None:
    assert "courier" in " ".join(check(of_transport("courier"), CP))
    assert "again" in " ".join(check(of_mode("again"), 1))


def test_checks_ask_the_row_of_a_transport(
    courier: TransportRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRANSPORTS, "p2p", dataclasses.replace(courier, name="p2p"))
    reasons = " ".join(check(of_transport("p2p", hidden_size=96, num_attention_heads=6), CP))
    assert "--cp-comm-type p2p cannot distribute heads evenly across 4 ranks" in reasons


@pytest.mark.parametrize("ask", [memory_of, seconds_of, bytes_of])
def test_the_plan_asks_the_row_of_a_transport(courier: TransportRow, ask: Ask) -> None:
    assert (
        ask(of_transport("courier")) == ask(of_transport("a2a")) != ask(of_transport("all_gather"))
    )


def test_the_search_tries_the_layouts_of_the_row(
    courier: TransportRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRANSPORTS, "p2p", dataclasses.replace(courier, name="p2p"))
    found = [
        config.parallel for config, _ in layouts(with_values(RunConfig(), TINY), CP, set(TINY))
    ]
    tried = {
        one.cp_layout
        for one in found
        if one.cp_comm_type == "p2p" and one.context_parallel_size == CP
    }
    assert tried == {"contiguous"}


def test_the_model_builds_its_transport_by_the_row(
    courier: TransportRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRANSPORTS, "courier", dataclasses.replace(courier, build=build))
    two = dataclasses.replace(single_axis("cp"), size=2, global_ranks=(0, 1))
    with pytest.raises(Built):
        select_transport("courier", "math", two, torch.device("cpu"))


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> RecomputeMode:
    """Return a dummy mode that recomputes the same operations as `full`."""
    row = RecomputeMode(repeats_block=True)
    monkeypatch.setitem(RECOMPUTE_MODES, "again", row)
    return row


@pytest.mark.parametrize("ask", [memory_of, seconds_of, bytes_of])
def test_the_plan_asks_the_row_of_a_recomputation_mode(again: RecomputeMode, ask: Ask) -> None:
    assert ask(of_mode("again")) == ask(of_mode("full"))


def test_a_new_recomputation_mode_is_measured_and_trained(again: RecomputeMode) -> None:
    assert block_memory(of_mode("again"), 0).kept == block_memory(of_mode("full"), 0).kept
    values = {"seq_length": 64, "dtype": "float64"}
    assert train(of_mode("again", **values)) == train(of_mode("none", **values))


def test_the_search_asks_the_rows_how_much_is_repeated(
    again: RecomputeMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_values(RunConfig(), {**TINY, "global_batch_size": 4})
    assert "recompute_granularity" in fields_chosen(config)
    # nothing fits, so the search tries every way to save memory and puts the smallest layout first
    small = dataclasses.replace(H100, memory=1e-6)
    monkeypatch.setitem(RECOMPUTE_MODES, "none", again)
    monkeypatch.delitem(RECOMPUTE_MODES, "again")
    monkeypatch.delitem(RECOMPUTE_MODES, "full")
    best, *_ = search(config, 1, {*TINY, "global_batch_size"}, small, PackSample())
    assert best.config.training.recompute_granularity == "none"
