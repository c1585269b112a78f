"""Layouts that a plan finds: legal, in order, as flags that a run takes; times by hand and beside published ones."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from megacp.core.config.cli import parse
from megacp.core.config.run import RunConfig, with_values
from megacp.core.models import costs
from megacp.core.ops.mask import Metadata
from megacp.plan import command
from megacp.plan.answer import flags, longest_row, words
from megacp.plan.hardware import GPUS, Hardware, hardware
from megacp.plan.packs import PackSample, sample_of, sample_packs
from megacp.plan.search import Candidate, fullest, search
from megacp.plan.times import step_time
from megacp.train import dry_run
from megacp.verify.gpu_report import BILLION
from tests.data.datasets import random_packs, write_dataset

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
SMALL = {"vocab_size": 4096, "seq_length": 1024, "num_layers": 4, "global_batch_size": 8, "dry_run": True}
H100 = hardware("h100", "infiniband")


def found_for(world: int, given: dict, here: Hardware = H100, **values: object) -> list[Candidate]:
    config = with_values(RunConfig(), {**SMALL, **values, **given})
    return search(config, world, {*SMALL, *values, *given}, here, PackSample())


def test_what_is_found_is_what_a_run_takes_and_holds_as_much_as_its_dry_run_says(tmp_path: Path) -> None:
    given = {"recompute_granularity": "full", "activation_offload": 0.0}
    found = found_for(2, given)
    assert len({words(layout.config, 2) for layout in found}) == len(found) > 10
    for layout in (found[0], found[-1]):
        (tmp_path / "best.yaml").write_text(flags(layout))
        own = [f"--{name.replace('_', '-')}={value}" for name, value in (SMALL | given).items() if name != "dry_run"]
        config = parse(["--config", str(tmp_path / "best.yaml"), *own, "--dry-run", "--world-size", "2"])
        assert "2 ranks" in dry_run(config) and fullest(config, 2) == layout.memory


def test_given_flags_stay_and_the_rest_is_tried() -> None:
    found = found_for(8, {TP: 2, "cp_comm_type": "p2p", "data_parallel_sharding_strategy": "optim"})
    assert {layout.config.parallel.tensor_model_parallel_size for layout in found} == {2}
    assert {layout.config.parallel.cp_comm_type for layout in found} == {"p2p"}
    assert {layout.config.parallel.context_parallel_size for layout in found} == {1, 2, 4}
    assert {layout.config.training.recompute_granularity for layout in found} == {"none", "selective", "full"}


def test_more_memory_never_makes_fewer_layouts_fit_and_the_fastest_that_fits_is_first() -> None:
    gib, fitting = (0.02, 0.04, 1.0), []
    for memory in gib:
        here = Hardware(**{**vars(H100), "memory": memory})
        found = found_for(4, {PP: 1, CP: 2, "cp_comm_type": "p2p"}, here)
        verdicts = [layout.verdict(here) for layout in found]
        assert verdicts == sorted(verdicts, key=("OK", "TIGHT", "OOM").index)
        fitting.append(sum(verdict != "OOM" for verdict in verdicts))
    assert 0 <= fitting[0] < fitting[1] < fitting[2] == len(found)
    assert found[0].time.total <= 1.01 * min(layout.time.total for layout in found)


def test_a_longest_row_fits_and_twice_as_long_a_one_does_not() -> None:
    here = Hardware(**{**vars(H100), "memory": 0.3})
    layout = found_for(2, {PP: 1, TP: 1}, here)[0]
    tokens = longest_row(layout, 2, here)
    sizes = [fullest(with_values(layout.config, {"seq_length": n}), 2).total / 2**30 for n in (tokens, 2 * tokens)]
    assert tokens > 1024 and sizes[0] <= 0.3 < sizes[1]


def test_a_step_of_one_rank_is_its_products_attention_and_passes() -> None:
    """By hand: 1e12 FLOP/s for products, 5e11 and 2e11 for attention, half of it for heads of 32, memory in no time."""
    here = Hardware(1.0, 1e12, dict.fromkeys(("fused", "flex"), (5e11, 2e11)), 1e30, 1, 1, 1, 0, 1e12, "")
    config = with_values(RunConfig(), {**SMALL, "global_batch_size": 2})
    model, tokens = config.model, 2 * 1024
    weights = 4 * (2 * 256 * 256 + 2 * 256 * model.query_groups * model.head_dim + 3 * 256 * model.ffn_hidden_size)
    products = 6 * tokens * (weights + 4096 * 256)
    pairs = 2 * 2 * 4 * 4 * (1024 * 1025 // 2) * model.num_attention_heads * 32
    time = step_time(config, 1, here, PackSample())
    assert (
        time.total == pytest.approx(time.compute) == pytest.approx(products / 1e12 + pairs / 5e11 + 2.5 * pairs / 2e11)
    )
    half = step_time(config, 1, here, PackSample(areas=(0.5,)))
    assert time.total - half.total == pytest.approx((pairs / 5e11 + 2.5 * pairs / 2e11) / 2)


def test_messages_count_where_nothing_hides_them() -> None:
    """Two ranks: K and V of 512 tokens, 2 heads of 32, to the other and back with gradients; parameters and sums."""
    here = Hardware(1.0, 1e30, dict.fromkeys(("fused", "flex"), (1e30, 1e30)), 1e30, 1e9, 1e8, 1, 0, 1e12, "")
    config = with_values(RunConfig(), {**SMALL, "num_query_groups": 2, "global_batch_size": 1, CP: 2})
    one = 4 * 2 * 512 * 2 * 32 * 4 / 1e9  # layers, K and V, tokens, heads and their width, bytes
    ring = step_time(config, 2, here, PackSample())
    assert ring.cp == pytest.approx(3 * one, rel=1e-6)
    exchanged = with_values(config, {"cp_comm_type": "kv_exchange", "cp_layout": "balanced"})
    assert step_time(exchanged, 2, here, PackSample()).cp == pytest.approx(3 * one, rel=1e-6)  # one rank needs all
    apart = sample_of(config, [Metadata.of_documents(np.repeat([0, 1, 2, 3], 256))])
    assert step_time(exchanged, 2, here, apart).cp == 0
    gathered = costs.model_parameters(config.model) * 4 / 2 / 1e9
    assert ring.dp == pytest.approx(2 * gathered - 3 * one, rel=0.02)
    sharded = with_values(config, {"data_parallel_sharding_strategy": "optim_grads_params"})
    assert step_time(sharded, 2, here, PackSample()).dp == pytest.approx(3 * gathered - 3 * one, rel=0.02)
    apart = with_values(config, {CP: 1, PP: 2, "global_batch_size": 4})
    assert step_time(apart, 2, H100, PackSample()).pipeline > 0 == step_time(config, 2, H100, PackSample()).pipeline


def test_uneven_packs_make_ranks_wait() -> None:
    uneven = PackSample(areas=(0.2, 1.0))
    assert PackSample().largest(8, 1) == 1.0 < uneven.largest(8, 16) < uneven.largest(8, 1)
    assert uneven.largest(64, 1) == pytest.approx(1.0 / 0.6, rel=0.05)  # one of 64 has the largest pack


def test_packs_tell_their_areas(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", [random_packs(np.random.default_rng(0), 3)], seq_length=64)
    config = with_values(RunConfig(), {"seq_length": 64, "data_path": str(tmp_path / "data")})
    rows = sample_packs(config)
    assert len(rows.areas) == 3 and all(0 < area <= 1 for area in rows.areas)
    for area, row in zip(rows.areas, rows.rows, strict=True):
        longest = np.bincount(row.document[row.leave > 0]).max()
        assert costs.causal_area(int(longest)) <= area * costs.causal_area(64) + 1


LLAMA3_8B = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "vocab_size": 128_256,
    "untie_embeddings_and_output_weights": True,
    "seq_length": 8192,
    "global_batch_size": 512,
    "dtype": "bfloat16",
    "recompute_granularity": "selective",
}
FLAGPERF = {
    (1, 2): 3698.7,
    (1, 4): 3306.5,
    (2, 2): 3409.2,
    (4, 2): 3006.1,
    (1, 8): 2690.3,
    (8, 1): 2451.2,
    (2, 4): 3042.7,
}
"""Tokens/s of each of eight A100 by (tp, pp): Megatron-Core 0.6 trains Llama 3.1 8B, FlagOpen/FlagPerf,
training/nvidia/llama3_8B-megatron/README.md, 2024."""
TRL = {8: 364.0, 16: 696.0, 32: 1346.0}
"""Seconds of a step of Qwen3-8B on a row of 131,072 tokens a GPU over so many H100: huggingface/trl, pull request 6845,
2026-08."""


def test_nominal_times_are_near_published_ones() -> None:
    """Nothing is fitted to these rows: within 15 % in the median, the fastest of them first. To the H200's all is."""
    for tokens, granularity, seconds in ((8192, "none", 0.147), (32768, "selective", 0.995)):  # docs/measured.md
        sizes = {**BILLION, "seq_length": tokens, "global_batch_size": 1, "recompute_granularity": granularity}
        measured = with_values(RunConfig(), sizes)
        assert step_time(measured, 1, hardware("h200", "infiniband"), PackSample()).total == pytest.approx(
            seconds, rel=0.1
        )
    planned = {}
    for (tp, pp), tokens in FLAGPERF.items():
        config = with_values(RunConfig(), {**LLAMA3_8B, TP: tp, PP: pp, "sequence_parallel": tp > 1})
        seconds = step_time(config, 8, hardware("a100", "infiniband"), PackSample()).total
        planned[tp, pp] = 512 * 8192 / 8 / seconds / tokens
    assert statistics.median(abs(ratio - 1) for ratio in planned.values()) < 0.15
    assert max(planned, key=lambda grid: planned[grid] * FLAGPERF[grid]) == max(FLAGPERF, key=FLAGPERF.__getitem__)
    qwen = {**LLAMA3_8B, "num_layers": 36, "ffn_hidden_size": 12288, "vocab_size": 151_936, "global_batch_size": 1}
    for ranks, seconds in TRL.items():
        flags = {CP: ranks, "seq_length": ranks * 131_072, "recompute_granularity": "full"}
        flags |= {"data_parallel_sharding_strategy": "optim_grads_params", "cp_layout": "zigzag_document"}
        config = with_values(RunConfig(), {**qwen, **flags})
        # it computes attention again, which we keep
        again = 36 * 4 * costs.causal_area(ranks * 131_072) * 4096 / ranks / H100.attention["fused"][0]
        assert step_time(config, ranks, H100, PackSample()).total + again == pytest.approx(seconds, rel=0.15)


def test_the_sheet_has_a_source_for_every_gpu() -> None:
    for name in GPUS:
        own = hardware(name, "ethernet")
        assert "datasheet" in own.source and own.products < own.peak and own.outside < own.inside


def test_the_command_prints_the_best_writes_its_flags_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--vocab-size", "4096", "--num-layers", "2", "--seq-length", "512", "--global-batch-size", "4"]
    asked = ["--world-size", "2", *sizes, "--pipeline-model-parallel-size", "1", "--cp-comm-type", "p2p"]
    drawn = ["--simulate", "20", "--slow-ranks", "1", "--slow-factor", "1.5"]
    assert command.main([*asked, *drawn, "--gpu", "a100", "--output", str(tmp_path / "plans" / "best.yaml")]) == 0
    said = capsys.readouterr().out
    assert "20 drawn steps" in said and "slow ranks 5" in said  # about half as long again
    assert " OK " in said and "Longest row" in said and (tmp_path / "plans" / "best.yaml").read_text().rstrip() in said
    assert command.main([*asked, "--json"]) == 0
    first, *_ = json.loads(capsys.readouterr().out)
    assert first["fits"] == "OK" and first["seconds"]["total"] > 0 and first["bytes"]["total"] > 0
    troubles = ([*asked, "--jitter=1", "--json"], "--json"), ([*asked, "--contention=0.5"], "0.5")
    for wrong, word in (*troubles, (sizes, "--world-size"), ([*asked, "--tensor-model-parallel-size", "3"], "3")):
        assert command.main(wrong) == 2 and word in capsys.readouterr().err
    large = ["--num-layers", "16", "--hidden-size", "8192", "--num-attention-heads", "64", "--ffn-hidden-size", "28672"]
    assert command.main([*asked, *large, "--context-parallel-size", "1", "--recompute-granularity", "full"]) == 0
    assert (
        "None fits" in (out := capsys.readouterr().out)
        and "4 GPUs this fits: dp 4, all sharded" in out
        and " OOM " in out
    )
