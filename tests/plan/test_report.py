"""The text of a dry run: right numbers, short at any size."""

from __future__ import annotations

import re

from megacp.core.config.run import RunConfig, with_values
from megacp.core.storage.wording import human_bytes, human_count
from megacp.plan.memory import PHASES
from megacp.plan.report import describe

SMALL = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 2,
    "vocab_size": 4096,
}


def small(**values) -> RunConfig:
    return with_values(RunConfig(), {**SMALL, **values})


def test_eight_ranks_are_shown_in_full() -> None:
    """tp varies fastest, pp slowest."""
    text = describe(small(), 8, [[range(0, 3)], [range(3, 4)]])
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for line in [
        "Dry run: 8 ranks = pp 2 x dp 1 x cp 2 x tp 2",
        "tp 2 1 0 1",
        "cp 2 2 0 2",
        "dp 1 4 0",
        "pp 2 4 0 4",
        "0-1 0 0 0 0-1",
        "2-3 0 0 1 0-1",
        "6-7 1 0 1 0-1",
        "0 0-2 embedding 1,803,776 2",
        "1 3 norm, head 951,040 1",
        "packs 8 of 512 tokens = 4.10 k tokens",
    ]:
        assert line in lines, text
    assert "..." not in text


def test_four_thousand_ranks_fit_on_a_screen() -> None:
    config = small(
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=64,
        context_parallel_size=4,
        num_virtual_stages_per_pipeline_rank=2,
        num_layers=128,
        global_batch_size=512,
    )
    stages = [[range(s, s + 1), range(64 + s, 65 + s)] for s in range(64)]
    text = describe(config, 4096, stages)
    assert text.startswith("Dry run: 4,096 ranks = pp 64 x dp 2 x cp 4 x tp 8\n")
    assert len(text.splitlines()) < 80
    assert max(len(line) for line in text.splitlines()) <= 130
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "4088-4095 63 1 3 0-7" in lines and "... 500 more" in lines and "... 52 more" in lines
    assert any(line.startswith("63 63, 127 norm, head ") for line in lines)


def test_columns_stand_where_a_run_asks_for_them() -> None:
    """Host memory behind the total; what is gathered under full sharding; the total is the largest phase's."""
    stages = [[range(0, 2)], [range(2, 4)]]
    plain, moved = (describe(small(activation_offload=asked), 8, stages) for asked in (0.0, 0.5))
    shared = describe(small(context_parallel_size=1, data_parallel_sharding_strategy="optim_grads_params"), 8, stages)
    assert "host" not in plain and "gathered" not in plain and "gathered" in shared
    (head,) = [line.split() for line in moved.splitlines() if line.startswith("  stage") and "optimizer" in line]
    assert head[-2:] == ["total", "host"]
    for text in (plain, shared):
        table, phases = text.split("Memory of one rank")[1].split("\n\n")[:2]
        head, *rows = [line for line in table.splitlines() if line.startswith("  ")]
        number, *peaks = re.findall(r"stage (\d)|([\d.]+ [KM]iB)", phases)
        total = rows[int(number[0])].rstrip().rsplit("  ", 1)[1]
        assert total in [peak for _, peak in peaks]
        assert [word.split()[0] for word in phases.split(": ")[1].split(", ")] == list(PHASES)
    assert "--vocab-size is 0" in describe(small(vocab_size=0), 8, stages)


def test_numbers_read_well() -> None:
    counts = {0: "0 B", 999: "999 B", 1000: "0.98 KiB", 1536: "1.50 KiB", 10240: "10.0 KiB", 5 << 40: "5.00 TiB"}
    assert {count: human_bytes(count) for count in counts} == counts
    shown = {(7_241_732_096, ""): "7.24 G", (12, ""): "12", (999.6, ""): "1.00 k", (1e15, "FLOP"): "1.00 PFLOP"}
    assert {(count, unit): human_count(count, unit) for count, unit in shown} == shown
