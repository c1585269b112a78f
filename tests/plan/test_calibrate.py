"""A measured machine: `--gpu` accepts its sheet, and its host, cores and dtype change a plan as
computed by hand.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megacp.dry_run.memory import stage_parameters
from megacp.dry_run.packs import PackSample
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.models.costs import stage_layers
from megacp.engine.pipeline_parallel.schedules import (
    Kind,
    one_f_one_b,
    with_messages,
    with_parameters,
)
from megacp.plan import calibrate, command
from megacp.plan.calibrate import RUNS, known_before, scaled
from megacp.plan.hardware import Hardware, hardware
from megacp.plan.times import step_time

CP, PP = "context_parallel_size", "pipeline_model_parallel_size"
VIRTUAL, SHARDED = "num_virtual_stages_per_pipeline_rank", "data_parallel_sharding_strategy"
SMALL = {
    "vocab_size": 4096,
    "seq_length": 1024,
    "num_layers": 4,
    "global_batch_size": 4,
    "dtype": "float32",
}
FREE = Hardware(
    1.0, 1e30, dict.fromkeys(("fused", "flex"), (1e30, 1e30)), 1e30, 1e30, 1e30, 1e30, 0, 1e12, ""
)


def seconds(here: Hardware, world: int = 1, **values: object) -> float:
    return step_time(with_values(RunConfig(), {**SMALL, **values}), world, here, PackSample()).total


def test_the_hosts_calls_count_where_no_compute_hides_them() -> None:
    """Each of 4 packs takes 1 ms forward and 2 ms backward in each of 4 blocks.

    Recomputation adds 1 ms.
    """
    alone = replace(FREE, calls=1e-3, overlap=0.0)
    assert seconds(alone) == pytest.approx(4 * 4 * 3e-3)
    assert seconds(alone, recompute_granularity="full") == pytest.approx(4 * 4 * 4e-3)
    slow = replace(alone, products=1e9)  # a block takes seconds
    assert seconds(replace(slow, overlap=1.0)) == pytest.approx(seconds(replace(slow, calls=0.0)))
    assert seconds(slow) == pytest.approx(seconds(replace(slow, calls=0.0)) + 4 * 4 * 3e-3)


def test_ranks_beyond_the_cores_take_turns_and_idle_stages_leave_them_theirs() -> None:
    one = replace(FREE, calls=1e-3, overlap=0.0, cores=1.0)
    assert (
        seconds(one, 2)
        == pytest.approx(seconds(one))
        == pytest.approx(2 * seconds(replace(one, cores=2.0), 2))
    )
    bubble = step_time(
        with_values(RunConfig(), {**SMALL, PP: 2}), 2, replace(one, cores=2.0), PackSample()
    )
    assert bubble.pipeline > 0 and bubble.total - bubble.pipeline == pytest.approx(seconds(one) / 2)
    assert seconds(one, 2, **{PP: 2}) == pytest.approx(seconds(one))
    # by hand: three microbatches take 18 ms through four stages; for 6 ms, three stages compute at
    # the same time
    assert seconds(replace(one, cores=2.0), 4, **{PP: 4, "global_batch_size": 3}) == pytest.approx(
        21e-3
    )


def test_ranks_slow_those_beside_them() -> None:
    alone = replace(FREE, calls=1e-3, overlap=0.0)
    crowded = replace(alone, beside=1.5)
    assert seconds(crowded) == seconds(alone) and seconds(crowded, 2) == pytest.approx(
        1.5 * seconds(alone, 2)
    )


def test_products_of_experts_are_slower() -> None:
    """Computed by hand for 4 packs, 4 blocks and 1,024 tokens; backward costs twice the forward.

    A token uses two experts of three matrices, and a router.
    """
    two = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "hidden_size": 256}
    full = replace(FREE, products=1e9)
    more = seconds(replace(full, experts=0.5), **two) - seconds(full, **two)
    assert more == pytest.approx(4 * 4 * 3 * 2 * 1024 * 256 * (2 * 3 * 64 + 8) / 1e9)


def test_messages_under_computes_count_where_a_rank_does_both() -> None:
    slow = replace(
        FREE, products=1e9, attention=dict.fromkeys(FREE.attention, (1e9, 1e9)), inside=1e8
    )
    ring = with_values(RunConfig(), {**SMALL, CP: 2})
    hidden, shown = (
        step_time(ring, 2, replace(slow, overlap=share), PackSample()) for share in (1.0, 0.0)
    )
    assert hidden.cp == hidden.dp == 0 < min(shown.cp, shown.dp)
    # The first of two stages receives gradients of four microbatches, 256 numbers for each of 1,024
    # tokens. The last stage receives states.
    piped = with_values(RunConfig(), {**SMALL, PP: 2})
    hidden, shown = (
        step_time(piped, 2, replace(slow, overlap=share), PackSample()) for share in (1.0, 0.0)
    )
    assert hidden.pp == 0 and shown.pp == pytest.approx(4 * 1024 * 256 * 4 / 1e8)


@pytest.mark.parametrize(("chunks", "near"), [(1, 1e-9), (2, 0.05)])
def test_a_stage_gathers_chunks_as_often_as_its_list_says(chunks: int, near: float) -> None:
    """In two replicas of two stages, a rank receives half of the last stage's parameters.

    It sends half of each microbatch's gradient sums.
    """
    values = {
        **SMALL,
        PP: 2,
        VIRTUAL: chunks,
        "global_batch_size": 32,
        SHARDED: "optim_grads_params",
    }
    config = with_values(RunConfig(), values)
    here = replace(FREE, products=1e9, inside=1e8, overlap=0.0)  # the last stage has the most work
    actions = with_parameters(with_messages(one_f_one_b(1, 2, 16, chunks), 1, 2, chunks))
    gathered = sum(action.kind is Kind.UNSHARD for action in actions) / chunks
    one = stage_parameters(config, stage_layers(config, 4)[1]) * 4 / 2 / 1e8
    assert step_time(config, 4, here, PackSample()).dp == pytest.approx(
        (gathered + 16) * one, rel=near
    )


@pytest.mark.parametrize(
    ("device", "dtype", "thin"), [("cpu", "float32", "thin"), ("cuda", "bfloat16", "short")]
)
def test_a_sheet_comes_near_to_what_was_measured_and_a_plan_takes_it(
    device: str,
    dtype: str,
    thin: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The machine has half the product rate and twice the call time of the values known before."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *of: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *of: (0, 140 * 2**30))
    monkeypatch.setattr(calibrate, "FIT_ROUNDS", 4)
    true = scaled(
        known_before(device, "h100"), {("reached", "products"): 0.5, ("terms", "calls"): 2.0}
    )
    runs = {name: RUNS[device][name] for name in ("wide", thin)}
    monkeypatch.setattr(calibrate, "RUNS", {device: runs})
    monkeypatch.setattr(calibrate.ShortRun, "trained", lambda run, *of: [[run.planned(true)]])
    sheet = str(tmp_path / "here.yaml")
    assert command.main(["calibrate", "--device", device, "--output", sheet]) == 0
    here = hardware(sheet, "ethernet")
    for run in runs.values():
        near = step_time(run.config(dtype), 1, here, PackSample()).total
        assert near == pytest.approx(run.planned(true), rel=0.01)
    assert (here.dtype, here.overlap) == (dtype, float(device == "cuda"))
    sizes = [
        "--num-layers",
        "2",
        "--seq-length",
        "512",
        "--global-batch-size",
        "2",
        "--vocab-size",
        "4096",
    ]
    assert command.main(["--gpu", sheet, "--world-size", "1", *sizes]) == 0
    said = capsys.readouterr().out
    assert (
        f"Times measured in {dtype}" in said and "Nominal" not in said and f"dtype: {dtype}" in said
    )
    assert (
        command.main(["--gpu", "h300", "--world-size", "1", *sizes]) == 2
        and "h300" in capsys.readouterr().err
    )
