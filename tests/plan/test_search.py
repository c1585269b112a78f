"""Layouts from a plan are valid, sorted, and given as flags that a run accepts.

Their times agree with values computed by hand and with published ones.
"""

from __future__ import annotations

import functools
import json
import re
import statistics
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megacp.attention.ops.mask import Metadata
from megacp.dry_run.packs import PackSample, sample_of, sample_packs
from megacp.engine.backends.select import backend_problems
from megacp.engine.checks import require
from megacp.engine.config.cli import parse
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.config.training import RECOMPUTE_MODES, RecomputeMode
from megacp.engine.models import costs
from megacp.plan import command
from megacp.plan import search as search_room
from megacp.plan.answer import Answer, behind, flags, longest_row, words
from megacp.plan.hardware import GPUS, Hardware, hardware
from megacp.plan.search import Candidate, fullest, layouts, search
from megacp.plan.times import StepTime, step_time
from megacp.train import dry_run
from megacp.verify.gpu_report import BILLION
from tests.huggingface.convert.models import made
from tests.training.data.datasets import random_packs, write_dataset

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
SMALL = {
    "vocab_size": 4096,
    "seq_length": 1024,
    "num_layers": 4,
    "global_batch_size": 8,
    "dry_run": True,
}
H100 = hardware("h100", "infiniband")


def found_for(world: int, given: dict, here: Hardware = H100, **values: object) -> list[Candidate]:
    config = with_values(RunConfig(), {**SMALL, **values, **given})
    return search(config, world, {*SMALL, *values, *given}, here, PackSample())


def test_what_is_found_is_what_a_run_takes_and_holds_as_much_as_its_dry_run_says(
    tmp_path: Path,
) -> None:
    given = {"recompute_granularity": "full", "activation_offload": 0.0}
    found = found_for(2, given)
    assert len({words(layout.config, 2) for layout in found}) == len(found) > 4
    for layout in (found[0], found[-1]):
        (tmp_path / "best.yaml").write_text(flags(layout))
        own = [
            f"--{name.replace('_', '-')}={value}"
            for name, value in (SMALL | given).items()
            if name != "dry_run"
        ]
        config = parse(
            ["--config", str(tmp_path / "best.yaml"), *own, "--dry-run", "--world-size", "2"]
        )
        assert dry_run(config) and fullest(config, 2) == layout.memory


def test_what_is_legal_for_a_plan_passes_a_runs_own_checks() -> None:
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 64, "moe_router_topk": 2, PP: 2, TP: 1}
    found = found_for(4, {**experts, "num_layers": 2}, Hardware(**{**vars(H100), "memory": 0.03}))
    assert len(found) > 10
    for layout in found:
        require(layout.config, 4, backend_problems(layout.config, None))


def test_given_flags_stay_and_the_rest_is_tried() -> None:
    given = {TP: 2, "cp_layout": "zigzag_document", "data_parallel_sharding_strategy": "optim"}
    config = with_values(RunConfig(), {**SMALL, **given})
    tried = [one.parallel for one, _ in layouts(config, 16, {*SMALL, *given})]
    assert {one.tensor_model_parallel_size for one in tried} == {2}
    assert {one.context_parallel_size for one in tried} == {1, 2, 4, 8}
    assert {one.cp_comm_type for one in tried if one.context_parallel_size > 1} == {
        "p2p",
        "all_gather",
        "a2a+p2p",
    }
    assert {one.hierarchical_context_parallel_sizes for one in tried} == {
        None,
        (2, 2),
        (2, 4),
        (4, 2),
    }
    assert {one.num_virtual_stages_per_pipeline_rank for one in tried} == {1, 2}
    assert {layout.config.parallel.cp_layout for layout in found_for(8, given)} == {
        "zigzag_document"
    }


def test_sizes_divide_the_ranks_though_the_layers_do_not_divide_so() -> None:
    sizes = {
        **SMALL,
        "num_layers": 6,
        "num_attention_heads": 12,
        "num_query_groups": 12,
        "hidden_size": 192,
    }
    config = with_values(RunConfig(), {**sizes, "global_batch_size": 12, "seq_length": 1152})
    tried = [one.parallel for one, _ in layouts(config, 12, {*sizes, "micro_batch_size"})]
    assert {one.pipeline_model_parallel_size for one in tried} == {1, 2, 3, 4, 6}
    assert {one.tensor_model_parallel_size for one in tried} >= {1, 2, 3, 4, 6}


DENSE = {"seq_length": 16384, "num_layers": 8, "data_parallel_sharding_strategy": "optim"}
EXPERTS = {
    "num_experts": 16,
    "moe_ffn_hidden_size": 256,
    "moe_router_topk": 4,
    "expert_model_parallel_size": 1,
}
EXPERTS |= {"seq_length": 4096, "data_parallel_sharding_strategy": "optim_grads_params"}


@pytest.mark.parametrize(
    ("given", "memory", "host_memory", "host"),
    [
        *(
            (DENSE, memory, host_memory, 1e9)
            for memory in (0.2, 0.3, 0.35, 0.4, 0.7)
            for host_memory in (0.05, 9)
        ),
        pytest.param(
            DENSE, 0.4, 9, 8.1e10, id="what selective recomputation leaves goes to the host in time"
        ),
        pytest.param(EXPERTS, 0.22, 9, 1e9, id="a tile needs more than all rows"),
    ],
)
def test_nothing_that_is_left_out_of_what_saves_memory_is_better(
    given: dict, memory: float, host_memory: float, host: float
) -> None:
    here = replace(H100, memory=memory, host_memory=host_memory, host=host)
    given = {**given, PP: 1, TP: 1, CP: 1, "micro_batch_size": 1, "global_batch_size": 2}
    base = with_values(RunConfig(), {**SMALL, **given, "dtype": "bfloat16"})
    timed = functools.partial(step_time, world_size=2, hardware=here, sample=PackSample())
    every = [with_values(base, choice) for choice in search_room._savings()]
    kept = [Candidate(one, {}, fullest(one, 2), timed) for one in every]
    best = min(
        (one for one in kept if one.memory.host <= host_memory * 2**30),
        key=lambda one: one.order(here),
    )
    verdict, *order = found_for(2, given, here)[0].order(here)
    assert (verdict, *order[:2]) == best.order(here)[:3], (
        "of equally fast ones a larger one may stand first"
    )
    assert verdict < 2 or order[2] == best.gib


def test_modes_that_repeat_equally_much_are_all_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    base = with_values(RunConfig(), SMALL)
    before = {search_room._saved(base, choice) for choice in search_room._savings()}
    monkeypatch.setitem(RECOMPUTE_MODES, "norms", RecomputeMode(repeats_activations=True))
    after = {search_room._saved(base, choice) for choice in search_room._savings()}
    assert 3 * len(after) == 4 * len(before)


def test_what_acts_on_nothing_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one stage the schedule does not matter; with enough memory, ways to save it do not."""
    chosen = [
        one for _, one in layouts(with_values(RunConfig(), {**SMALL, PP: 1}), 4, {*SMALL, PP})
    ]
    assert not any("pipeline_schedule" in one for one in chosen)
    tried = mock.Mock(wraps=search_room.fullest)
    monkeypatch.setattr(search_room, "fullest", tried)
    found_for(4, {PP: 1})
    assert {call.args[0].training.recompute_granularity for call in tried.mock_calls} == {"none"}


def test_more_memory_never_makes_fewer_layouts_fit_or_the_best_slower() -> None:
    """If memory is small, the plan chooses options that save it."""
    fitting, seconds, savings = [], [], []
    for memory in (0.02, 0.03, 0.04, 1.0):
        here = Hardware(**{**vars(H100), "memory": memory})
        found = found_for(4, {PP: 1, CP: 2, "cp_comm_type": "p2p"}, here)
        verdicts = [layout.verdict(here) for layout in found]
        assert verdicts == sorted(verdicts, key=("OK", "TIGHT", "OOM").index)
        fitting.append(sum(verdict == "OK" for verdict in verdicts))
        seconds += [one.time.total for one in found[: fitting[-1]]][:1]
        savings.append(found[0].chosen["recompute_granularity"])
    assert 0 == fitting[0] < fitting[1] < fitting[2] < fitting[3] and seconds == sorted(
        seconds, reverse=True
    )
    assert (savings[0], savings[-1]) == ("full", "none")


def test_a_flag_that_alone_forbids_what_fits_is_named() -> None:
    """Each of two ranks has all parameters, and saving activations is not enough, but tp 2 is."""
    given = {
        PP: 1,
        CP: 1,
        TP: 1,
        "recompute_granularity": "none",
        "data_parallel_sharding_strategy": "optim",
    }
    here = Hardware(**{**vars(H100), "memory": 0.05})
    config = with_values(RunConfig(), {**SMALL, **given})
    answer = Answer(config, 2, frozenset({*SMALL, *given}), here, PackSample())
    assert answer.best[0].verdict == "OOM" and [name for name, _ in answer.freed()] == [TP]
    assert answer.changes()[0].startswith("without --tensor-model-parallel-size: tp 2")


def test_a_slower_layout_names_the_term_that_grows_most() -> None:
    first, *others = found_for(4, {PP: 1, "cp_comm_type": "p2p"})
    said = [behind(one, first, H100) for one in (first, *others)]
    assert said[0] == "" and all(said[1:])
    one = others[-1]
    more = {name: seconds - vars(first.time)[name] for name, seconds in vars(one.time).items()}
    largest = max(more, key=more.__getitem__)
    assert said[-1].startswith(f"slower: {largest} +")
    assert one.time.total > 1.01 * first.time.total


def layout_of(seconds: float, share: float, offload: float = 0.0) -> Candidate:
    """Return a layout with a step time, a share of an H100's memory, and an offloaded share."""
    config = with_values(RunConfig(), {**SMALL, "activation_offload": offload})
    nothing = dict.fromkeys((field.name for field in fields(StepTime)), 0.0)
    time = StepTime(**{**nothing, "compute": seconds})
    memory: Any = SimpleNamespace(total=share * H100.memory * 2**30)
    return Candidate(config, {}, memory, lambda _: time)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (layout_of(0.8, 0.95), "25.0 % faster, but fills 95 % of the memory"),
        (layout_of(1.2, 0.95), "fills 95 % of the memory"),
        (layout_of(0.5, 1.2), "100.0 % faster, but needs 120 % of the memory"),
        (layout_of(1.5, 0.2), "slower: compute +0.5 s"),
        (layout_of(0.998, 0.6), "0.2 % faster, but needs 7.91 GiB more"),
        (layout_of(1.0, 0.6), "as fast, but needs 7.91 GiB more"),
        (layout_of(1.001, 0.4, 0.5), "as fast, but offloads more to the host"),
        (layout_of(1.0, 0.5), "needs as much memory"),
    ],
)
def test_a_layout_says_in_words_why_it_is_not_the_first(layout: Candidate, reason: str) -> None:
    best = layout_of(1.0, 0.5)
    assert behind(layout, best, H100) == reason
    # the sorting key agrees that the layout is not better
    assert layout.order(H100) >= best.order(H100)


def test_layouts_that_do_not_fit_differ_by_their_memory() -> None:
    best = layout_of(1.0, 1.2)
    assert behind(layout_of(0.8, 1.3), best, H100) == "25.0 % faster, but needs 7.91 GiB more"
    assert behind(layout_of(1.2, 1.3), best, H100) == "needs 7.91 GiB more"


@pytest.mark.parametrize("gib", [0.05, 0.5])
def test_a_longest_row_fits_and_one_an_eighth_longer_does_not(gib: float) -> None:
    here = Hardware(**{**vars(H100), "memory": gib})
    layout = found_for(2, {PP: 1, TP: 1}, here)[0]
    tokens = longest_row(layout, 2, here)
    sizes = [
        fullest(with_values(layout.config, {"seq_length": n}), 2).total / 2**30
        for n in (tokens, tokens * 9 // 8)
    ]
    assert (tokens > 1024) == (gib == 0.5) and sizes[0] <= gib < sizes[1]


def test_a_step_of_one_rank_is_its_products_attention_and_passes() -> None:
    """Computed by hand with 1e12 FLOP/s for products, and 5e11 and 2e11 for attention.

    Heads of 32 halve the rates of attention, and memory accesses take no time.
    """
    here = Hardware(
        1.0, 1e12, dict.fromkeys(("fused", "flex"), (5e11, 2e11)), 1e30, 1, 1, 1, 0, 1e12, ""
    )
    config = with_values(RunConfig(), {**SMALL, "global_batch_size": 2})
    model, tokens = config.model, 2 * 1024
    weights = 4 * (
        2 * 256 * 256
        + 2 * 256 * model.query_groups * model.head_dim
        + 3 * 256 * model.ffn_hidden_size
    )
    products = 6 * tokens * (weights + 4096 * 256)
    pairs = 2 * 2 * 4 * 4 * (1024 * 1025 // 2) * model.num_attention_heads * 32
    time = step_time(config, 1, here, PackSample())
    assert (
        time.total
        == pytest.approx(time.compute)
        == pytest.approx(products / 1e12 + pairs / 5e11 + 2.5 * pairs / 2e11)
    )
    half = step_time(config, 1, here, PackSample(areas=(0.5,)))
    assert time.total - half.total == pytest.approx((pairs / 5e11 + 2.5 * pairs / 2e11) / 2)
    # gate and up are computed again
    tiles = step_time(with_values(config, {"mlp_chunk_tokens": 256}), 1, here, PackSample())
    assert tiles.again == pytest.approx(2 * tokens * 4 * 2 * 256 * model.ffn_hidden_size / 1e12)


def test_messages_count_where_nothing_hides_them() -> None:
    """Two ranks exchange K and V of 512 tokens, with 2 heads of 32, and their gradients.

    They also exchange parameters and gradient sums.
    """
    here = Hardware(
        1.0, 1e30, dict.fromkeys(("fused", "flex"), (1e30, 1e30)), 1e30, 1e9, 1e8, 1, 0, 1e12, ""
    )
    config = with_values(
        RunConfig(), {**SMALL, "num_query_groups": 2, "global_batch_size": 1, CP: 2}
    )
    one = 4 * 2 * 512 * 2 * 32 * 4 / 1e9  # layers, K and V, tokens, heads and their width, bytes
    ring = step_time(config, 2, here, PackSample())
    # For half of the heads, a rank sends q of 8 heads, k and v, and gets the output back. Backward
    # sends the same amount in the opposite directions.
    swapped = 4 * (2 * 2 + 2 * 8) * 512 * 32 * 4 / 2 / 1e9
    heads = with_values(config, {"cp_comm_type": "a2a", "cp_layout": "contiguous"})
    assert step_time(heads, 2, here, PackSample()).cp == pytest.approx(2 * swapped, rel=1e-6)
    again = with_values(heads, {"recompute_granularity": "full"})
    assert step_time(again, 2, here, PackSample()).cp == pytest.approx(3 * swapped, rel=1e-6)
    both = {CP: 4, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 2)}
    sent = step_time(with_values(config, both), 4, here, PackSample()).cp
    assert sent == pytest.approx(2 * swapped / 2 + 3 * one / 2, rel=1e-6)
    assert ring.cp == pytest.approx(3 * one, rel=1e-6)
    exchanged = with_values(config, {"cp_comm_type": "kv_exchange", "cp_layout": "balanced"})
    # one rank needs all keys
    assert step_time(exchanged, 2, here, PackSample()).cp == pytest.approx(3 * one, rel=1e-6)
    apart = sample_of(config, [Metadata.of_documents(np.repeat([0, 1, 2, 3], 256))])
    assert step_time(exchanged, 2, here, apart).cp == 0
    gathered = costs.model_parameters(config.model) * 4 / 2 / 1e9
    assert ring.dp == pytest.approx(2 * gathered - 3 * one, rel=0.02)
    sharded = with_values(config, {"data_parallel_sharding_strategy": "optim_grads_params"})
    assert step_time(sharded, 2, here, PackSample()).dp == pytest.approx(
        3 * gathered - 3 * one, rel=0.02
    )
    apart = with_values(config, {CP: 1, PP: 2, "global_batch_size": 4})
    assert (
        step_time(apart, 2, H100, PackSample()).pipeline
        > 0
        == step_time(config, 2, H100, PackSample()).pipeline
    )
    # Four microbatches arrive at the last stage in sequence. It then waits until the last gradient
    # arrives at the first stage.
    passed, sent = step_time(apart, 2, here, PackSample()), 1024 * 256 * 4 / 1e9
    assert (passed.pp, passed.pipeline) == pytest.approx((4 * sent, sent), rel=1e-6)


def test_uneven_packs_make_ranks_wait() -> None:
    uneven = PackSample(areas=(0.2, 1.0))
    assert PackSample().largest(8, 1) == 1.0 < uneven.largest(8, 16) < uneven.largest(8, 1)
    # one of 64 ranks has the largest pack
    assert uneven.largest(64, 1) == pytest.approx(1.0 / 0.6, rel=0.05)


def test_packs_tell_their_areas(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", [random_packs(np.random.default_rng(0), 3)], seq_length=64)
    config = with_values(RunConfig(), {"seq_length": 64, "data_path": str(tmp_path / "data")})
    rows = sample_packs(config)
    assert len(rows.areas) == 3 and all(0 < area <= 1 for area in rows.areas)
    for area, row in zip(rows.areas, rows.rows, strict=True):
        longest = np.bincount(row.document[row.leave > 0]).max()
        assert costs.causal_area(int(longest)) <= area * costs.causal_area(64) + 1
    # two documents of 24 tokens, and one that is truncated to 16
    stated = sample_packs(with_values(config, {"data_path": None}), [24])
    assert stated.area == pytest.approx((2 * 300 + 136) / 2080) and len(stated.rows) == 64


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
"""Tokens/s of each of eight A100 by (tp, pp): Megatron-Core 0.6 trains Llama 3.1 8B,
FlagOpen/FlagPerf, training/nvidia/llama3_8B-megatron/README.md, 2024."""
TRL = {8: 364.0, 16: 696.0, 32: 1346.0}
"""Seconds per step of Qwen3-8B with a row of 131,072 tokens per GPU, by number of H100s:
huggingface/trl, pull request 6845, 2026-08.
"""


def test_nominal_times_are_near_published_ones() -> None:
    """The median error is within 15 %, and the fastest layouts come first.

    Constants are fitted only to the H200 rows.
    """
    for tokens, granularity, seconds in (
        (8192, "none", 0.147),
        (32768, "selective", 0.995),
    ):  # docs/gpu_results.md
        sizes = {
            **BILLION,
            "seq_length": tokens,
            "global_batch_size": 1,
            "recompute_granularity": granularity,
        }
        measured = with_values(RunConfig(), sizes)
        assert step_time(
            measured, 1, hardware("h200", "infiniband"), PackSample()
        ).total == pytest.approx(seconds, rel=0.1)
    planned = {}
    for (tp, pp), tokens in FLAGPERF.items():
        config = with_values(
            RunConfig(), {**LLAMA3_8B, TP: tp, PP: pp, "sequence_parallel": tp > 1}
        )
        seconds = step_time(config, 8, hardware("a100", "infiniband"), PackSample()).total
        planned[tp, pp] = 512 * 8192 / 8 / seconds / tokens
    assert statistics.median(abs(ratio - 1) for ratio in planned.values()) < 0.15
    assert max(planned, key=lambda grid: planned[grid] * FLAGPERF[grid]) == max(
        FLAGPERF, key=FLAGPERF.__getitem__
    )
    qwen = {
        **LLAMA3_8B,
        "num_layers": 36,
        "ffn_hidden_size": 12288,
        "vocab_size": 151_936,
        "global_batch_size": 1,
    }
    for ranks, seconds in TRL.items():
        flags = {CP: ranks, "seq_length": ranks * 131_072, "recompute_granularity": "full"}
        flags |= {
            "data_parallel_sharding_strategy": "optim_grads_params",
            "cp_layout": "zigzag_document",
        }
        config = with_values(RunConfig(), {**qwen, **flags})
        # TRL recomputes attention, which we keep
        again = (
            36 * 4 * costs.causal_area(ranks * 131_072) * 4096 / ranks / H100.attention["fused"][0]
        )
        assert step_time(config, ranks, H100, PackSample()).total + again == pytest.approx(
            seconds, rel=0.15
        )


def test_the_sheet_has_a_source_for_every_gpu() -> None:
    for name in GPUS:
        own = hardware(name, "ethernet")
        assert (
            re.search("datasheet|whitepaper", own.source)
            and own.products < own.peak
            and own.outside < own.inside
        )


class _Page(HTMLParser):
    """Counts the elements of a page that could load something, and its bars and areas."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads, self.drawn = list[str](), [0, 0]
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [tag] * (
            tag in ("script", "link", "img") or not {"src", "href"}.isdisjoint(dict(attrs))
        )
        self.drawn[0] += ("class", "bar") in attrs
        self.drawn[1] += tag == "polygon"


def test_the_command_prints_the_best_writes_its_flags_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [
        "--vocab-size",
        "4096",
        "--num-layers",
        "2",
        "--seq-length",
        "512",
        "--global-batch-size",
        "4",
    ]
    none = ["--documents", "0"]
    asked = [
        "--world-size",
        "2",
        *sizes,
        "--pipeline-model-parallel-size",
        "1",
        "--cp-comm-type",
        "p2p",
    ]
    written = [
        "--output",
        str(tmp_path / "plans" / "best.yaml"),
        "--html",
        str(tmp_path / "plans" / "best.html"),
    ]
    assert command.main([*asked, "--gpu", "a100", *written]) == 0
    said, text = capsys.readouterr().out, (tmp_path / "plans" / "best.html").read_text()
    assert max(map(len, said.splitlines())) < 80  # a terminal has 80 columns
    best = next(line for line in said.splitlines() if line.startswith("  1  ")).split("  ")
    assert all(cell.strip() in text for cell in best) and (page := _Page(text)).loads == []
    # Each layout has a line of numbers and a line with its name, and two bars.
    assert page.drawn == [sum(line[:5].strip().isdigit() for line in said.splitlines()), 3]
    assert " OK " in said and "tokens fit with layout 1" in said
    assert (tmp_path / "plans" / "best.yaml").read_text().rstrip() in said
    assert command.main([*asked, "--json"]) == 0
    first, *_ = json.loads(capsys.readouterr().out)
    assert first["fits"] == "OK" and first["seconds"]["total"] > 0 and first["bytes"]["total"] > 0
    wrongs = (
        ([*asked, "--documents", "513"], "512"),
        (sizes, "--world-size"),
        ([*asked, "--tensor-model-parallel-size", "3"], "3"),
        ([*asked, *none], "0"),
    )
    wordless = (["--world-size", "2"], "--vocab-size"), ([*asked, "--seq-length", "0"], "got 0")
    for wrong, word in (*wordless, *wrongs):
        assert command.main(wrong) == 2 and word in capsys.readouterr().err
    assert command.main([*asked, "--dtype", "float32"]) == 0 and "not float32" in " ".join(
        capsys.readouterr().out.split()
    )
    large = [
        "--num-layers",
        "16",
        "--hidden-size",
        "8192",
        "--num-attention-heads",
        "64",
        "--ffn-hidden-size",
        "28672",
    ]
    unwritten = ["--output", str(tmp_path / "none.yaml"), "--context-parallel-size", "1"]
    assert command.main([*asked, *large, *unwritten, "--recompute-granularity", "full"]) == 1
    assert not (tmp_path / "none.yaml").exists()
    said = " ".join(capsys.readouterr().out.split())
    assert all(
        word in said
        for word in (
            "None fits",
            " OOM ",
            "h200 GPUs",
            "4 GPUs with --global-batch-size 8: dp 4, all sharded",
        )
    )


@pytest.mark.slow  # imports transformers
def test_a_folder_of_a_model_and_packs_become_flags_in_one_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
    made("Qwen3", vocab_size=100).save_pretrained(tmp_path / "hf")
    write_dataset(tmp_path / "packs", [random_packs(np.random.default_rng(0), 3)], seq_length=64)
    start = ["--load-hf", str(tmp_path / "hf"), "--data-path", str(tmp_path / "packs")]
    asked = [*start, "--world-size", "4", "--pipeline-model-parallel-size", "2"]
    assert command.main([*asked, "--output", str(tmp_path / "best.yaml")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 45 and "rows of 64 tokens" in lines[0] and lines[-1] == "dtype: bfloat16"
    config = parse([*start, "--config", str(tmp_path / "best.yaml"), "--dry-run"])
    assert config.training.dtype == "bfloat16"
    assert (
        command.main([*asked, "--documents", "8"]) == 2
        and "--documents 8" in capsys.readouterr().err
    )
