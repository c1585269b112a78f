"""`auto`: what is chosen on machines nobody has, that all ranks choose alike, and a run that tells it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from bench.steps import measure_rank
from megacp.core.config.checks.check import check
from megacp.core.config.run import RunConfig, with_values
from megacp.core.config.yaml_file import from_yaml
from megacp.core.context_parallel.auto import calibration_file
from megacp.core.context_parallel.auto import choose as auto
from megacp.core.context_parallel.auto.counts import exchanged_rows, rank_work
from megacp.core.context_parallel.auto.predict import Candidate, Machine, PassSeconds, Predictor, candidates, choose
from megacp.core.context_parallel.auto.stopwatch import Stopwatch
from megacp.core.context_parallel.layout import LAYOUTS
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.context_parallel.shard import mask_metadata
from megacp.core.context_parallel.sizes import attention_sizes
from megacp.core.data.batch import PackedBatch
from megacp.core.ops.tile_kernels import MathKernel
from megacp.train import main
from megacp.verify import plot
from tests.ranks import grid, run_ranks
from tests.reference.machines import machine
from tests.training.runs import TINY, train_on_rank

CP = "context_parallel_size"
AUTO = {"cp_comm_type": "auto", "cp_layout": "auto"}


def documents(lengths: list[int]) -> PackedBatch:
    """A row of causal documents."""
    document = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    zeros = np.zeros(len(document), np.int32)
    wide = zeros.astype(np.int64)
    weights = np.ones(len(document), np.float32)
    return PackedBatch(wide, wide, weights, wide, document, zeros, zeros, (0,))


def config_of(cp: int, heads: int = 8, groups: int = 8, **values: object) -> RunConfig:
    sizes = {CP: cp, "num_attention_heads": heads, "num_query_groups": groups, "kv_channels": 8, "dtype": "float32"}
    return with_values(RunConfig(), {"vocab_size": 64, "seq_length": 1024, **sizes, **AUTO, **values})  # type: ignore[arg-type]


def plans(row: PackedBatch, layout: str, cp: int) -> list[AttentionPlan]:
    metadata = mask_metadata(row)
    return [AttentionPlan(LAYOUTS[layout].deal(metadata, cp), metadata, rank) for rank in range(cp)]


def predicted(config: RunConfig, constants: Machine, row: PackedBatch) -> dict[Candidate, float]:
    """What `auto.predict` says on ranks, in this one process."""
    sizes, cp = attention_sizes(config, 0), config.parallel.context_parallel_size
    ways = candidates(config.parallel, sizes.heads)
    predictors = {
        name: Predictor(constants, sizes, [rank_work(plan, sizes, MathKernel(), ways) for plan in plans(row, name, cp)])
        for name in {way.layout for way in ways}
    }
    return {way: predictors[way.layout].seconds(way).total for way in ways}


def short_documents(seed: int, tokens: int = 1024) -> list[int]:
    """Lengths of 8 to 400 tokens, median 55."""
    rng, lengths = np.random.default_rng(seed), [0]
    while sum(lengths) < tokens:
        lengths.append(min(int(np.clip(rng.lognormal(4, 0.8), 8, 400)), tokens - sum(lengths)))
    return lengths[1:]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_many_short_documents_on_a_slow_network_take_the_exchange_and_balance(seed: int) -> None:
    """Would catch a prediction without needed rows, or without the slowest rank: what contiguous cuts is uneven."""
    constants = machine(4, 8, pair=2e-9, per_byte=2e-8)
    found = predicted(config_of(4), constants, documents(short_documents(seed)))
    assert choose(found) == Candidate("kv_exchange", "balanced")
    assert found[Candidate("p2p", "zigzag")] > 1.8 * found[Candidate("kv_exchange", "balanced")]


def test_one_long_document_on_a_fast_network_keeps_the_default() -> None:
    """Nothing beats a balanced ring whose messages are hidden, so nothing is switched."""
    constants = machine(4, 8, pair=1e-7, per_byte=1e-10)
    assert choose(predicted(config_of(4), constants, documents([1024]))) == Candidate("p2p", "zigzag")


@pytest.mark.slow
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("lengths", [[1024], [512, 512], [200] * 5 + [24], [64] * 16])
def test_uniform_links_prefer_a2a_where_volume_says_so(cp: int, lengths: list[int]) -> None:
    """With phi the share of K/V that the busiest rank needs: phi x cp > 2/3 (1 + H / Hkv), for gradients as wide as
    keys, whatever the heads.
    """
    row, layout = documents(lengths), "zigzag"
    counts = [exchanged_rows(plan) for plan in plans(row, layout, cp)]
    phi = max(map(max, counts)) / (1024 / cp * (cp - 1))
    for groups, repeat in itertools.product((4, 8), (1, 2, 3, 4, 8)):
        heads = groups * repeat
        config = config_of(cp, heads, groups, cp_layout=layout)
        found = predicted(config, machine(cp, heads, per_byte=1e-9), row)
        swap, exchange = found[Candidate("a2a", layout)], found[Candidate("kv_exchange", layout)]
        says_so = phi * cp > 2 / 3 * (1 + heads / groups)
        assert (swap < exchange) == says_so or swap == pytest.approx(exchange)
        assert phi * found[Candidate("p2p", layout)] == pytest.approx(exchange)  # a ring carries what nobody needs too


def test_many_messages_of_high_latency_lose_to_one() -> None:
    """Would catch latency that is counted once for a whole ring."""
    found = predicted(config_of(8), machine(8, 8, latency=1e-3), documents([1024]))
    assert choose(found).comm_type == "kv_exchange"
    assert found[Candidate("p2p", "zigzag")] == pytest.approx((7 + 7 + 7) * 1e-3)
    assert found[Candidate("kv_exchange", "zigzag")] == pytest.approx(3e-3)
    assert found[Candidate("a2a", "zigzag")] == pytest.approx(4e-3)
    assert found[Candidate("a2a+p2p", "zigzag", (2, 4))] == pytest.approx((4 + 3 + 3 + 3) * 1e-3)


def test_small_tiles_whose_calls_cost_most_go_where_few_are_made() -> None:
    """A rank of whole documents has one call each; rings and cut documents have several."""
    found = predicted(config_of(4), machine(4, 8, call=1e-3), documents([256] * 4))
    assert found[Candidate("p2p", "contiguous")] == found[Candidate("kv_exchange", "contiguous")] == 3.5e-3
    assert found[Candidate("a2a", "zigzag")] == pytest.approx(4 * 3.5e-3)
    assert found[Candidate("p2p", "zigzag")] == pytest.approx(3 * 3.5e-3)  # two beginnings, the end of another document
    assert choose(found) == Candidate("p2p", "contiguous")


@pytest.mark.parametrize(("cp", "heads"), [(2, 8), (4, 8), (8, 4)])
def test_every_choice_is_a_config_that_the_checks_allow(cp: int, heads: int) -> None:
    """Would catch a choice that a user could not have made by flags, and flags of auto left standing."""
    config = config_of(cp, heads, 4, cp_calibration="somewhere.json")
    assert check(config, cp) == []
    for way in candidates(config.parallel, heads):
        found = auto.resolved(config, way)
        assert check(found, cp) == [] and not auto.is_auto(found)
        assert found.parallel.cp_layout == way.layout and found.model == config.model


def test_one_cp_rank_has_nothing_to_choose_and_measures_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calibration.json"
    flags = ["--cp-comm-type", "auto", "--cp-layout", "auto", "--cp-calibration", str(path), "--train-iters", "1"]
    assert main([*TINY, *flags, "--lr-warmup-iters", "0", "--log-file", str(tmp_path / "log.jsonl")]) == 0
    assert not path.exists() and "context parallelism" not in capsys.readouterr().out
    config, choice = auto.resolve_auto(config_of(1), grid(), lambda: [])
    assert choice is None and (config.parallel.cp_comm_type, config.parallel.cp_layout) == ("p2p", "zigzag")
    plain = with_values(config_of(1), {"cp_comm_type": "a2a", "cp_layout": "balanced"})
    assert auto.resolve_auto(plain, grid(), lambda: [])[0] is plain


def rank_files(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def choose_on_rank(rank: int, world_size: int, sizes: dict[str, int], folder: Path) -> tuple[RunConfig, list[str]]:
    """Every rank with a calibration file of its own, as on hosts with different caches."""
    config = config_of(sizes["cp"], seq_length=512, cp_calibration=str(rank_files(folder, rank)))
    rows = [documents([200, 56, 256]), documents([64] * 8)]
    resolved, choice = auto.resolve_auto(config, grid(**sizes), lambda: rows)
    assert choice is not None
    return resolved, [repr(choice.chosen), repr(choice.predicted)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"cp": 2},
        {"cp": 2, "dp": 2},
        pytest.param({"cp": 4}, marks=pytest.mark.slow),
        pytest.param({"cp": 2, "pp": 2}, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "cp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_agree_whatever_their_own_files_say(tmp_path: Path, sizes: dict[str, int]) -> None:
    """Rank 0's file is damaged and measured anew; the others' are left alone and never read."""
    world = int(np.prod(list(sizes.values())))
    for rank in range(world):
        rank_files(tmp_path, rank).write_text(f"damaged {rank}")
    first = run_ranks(choose_on_rank, world, sizes, tmp_path)
    assert len({repr(result) for result in first}) == 1
    (key,) = json.loads(rank_files(tmp_path, 0).read_text())["machines"]
    assert f"cp {sizes['cp']}" in key and "gloo" in key and "float32" in key and "8/8 of 8" in key
    assert rank_files(tmp_path, 1).read_text() == "damaged 1"
    for rank in range(1, world):  # sound files that would lead elsewhere
        slow = machine(sizes["cp"], 8, pair=1e-3 * rank, latency=float(rank))
        calibration_file.write(rank_files(tmp_path, rank), key, slow)
    again = run_ranks(choose_on_rank, world, sizes, tmp_path)
    assert [repr(result) for result in again] == [repr(result) for result in first]


@pytest.mark.slow
def test_the_cost_model_decides_on_ranks_as_it_does_on_paper(tmp_path: Path) -> None:
    """Would catch numbers of one rank taken for those of all."""
    config = config_of(4, seq_length=512)
    key = run_ranks(key_on_rank, 4, config)[0]
    constants = machine(4, 8, pair=1e-9, per_byte=2e-8)
    calibration_file.write(rank_files(tmp_path, 0), key, constants)
    resolved, (chosen, found) = run_ranks(choose_on_rank, 4, {"cp": 4}, tmp_path)[0]
    both = [predicted(config, constants, row) for row in (documents([200, 56, 256]), documents([64] * 8))]
    mean = {way: sum(of_row[way] for of_row in both) / 2 for way in both[0]}
    best = choose(mean)
    assert chosen == repr(best) and resolved.parallel.cp_comm_type == best.comm_type
    assert best.comm_type == "kv_exchange"


def key_on_rank(rank: int, world_size: int, config: RunConfig) -> str:
    over = grid(cp=world_size)
    return auto.machine_key(auto._setup(config, over), over)


def key_of_machines(rank: int, world_size: int, config: RunConfig, machines: int) -> str:
    with mock.patch.object(auto.platform, "node", lambda: f"machine {rank % machines}"):
        return key_on_rank(rank, world_size, config)


@pytest.mark.slow
def test_constants_of_one_machine_are_not_those_of_ranks_on_two() -> None:
    """Would catch messages through a network that are planned at the speed of memory."""
    keys = [run_ranks(key_of_machines, 2, config_of(2), machines) for machines in (1, 2)]
    assert [len({*of_ranks}) for of_ranks in keys] == [1, 1] and keys[0][0] != keys[1][0]


def test_a_report_shows_the_best_the_chosen_and_the_default() -> None:
    ways = candidates(config_of(4).parallel, 8)
    found = {way: PassSeconds(0.010 + number / 1e4, 0.020) for number, way in enumerate(reversed(ways))}
    found = {way: found[way] for way in ways}
    choice = auto.Choice(ways[-1], found, ("measured in 1 s",))
    first, *notes = choice.lines()
    assert first.startswith(f"context parallelism: {ways[-1]}, chosen among {len(ways)};")
    assert "p2p, zigzag (default)" in first and f"{ways[-1]} 30 ms" in first and first.count(" ms") == 5
    assert notes == ["context parallelism: measured in 1 s"]
    measured = PassSeconds(0.011, 0.022)
    assert "predicted 30 ms (10 forward), measured 33 ms (11 forward)" in choice.compared(measured)
    assert choice.figures(measured)["measured_backward"] == 0.022


def test_tools_that_must_know_what_they_run_refuse_auto(capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(2)
    with pytest.raises(ValueError, match="a measurement needs one transport"):
        measure_rank(0, 1, dataclasses.replace(config), None)  # type: ignore[arg-type]
    flags = ["--context-parallel-size", "2", "--cp-comm-type", "auto", "--vocab-size", "64"]
    assert main(["--dry-run", *flags]) == 0
    assert "auto chooses --cp-comm-type or --cp-layout at the start of a run" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_tells_what_it_chose_and_how_good_the_prediction_was(tmp_path: Path) -> None:
    """Would catch a checkpoint that says auto, a second calibration, and a comparison that is never made."""
    calibration, out = tmp_path / "calibration.json", tmp_path / "out"
    flags = [*TINY, "--context-parallel-size", "2", "--cp-comm-type", "auto", "--cp-layout", "auto"]
    flags += ["--cp-calibration", str(calibration), "--lr-decay-iters", "8", "--save", str(out)]
    printed = run_ranks(printed_on_rank, 2, [*flags, "--train-iters", "6"])
    assert printed[1] == ""
    lines = printed[0].splitlines()
    assert lines[1].startswith("context parallelism: ") and "p2p, zigzag (default)" in lines[1]
    assert "measured in" in lines[2] and str(calibration) in lines[2]
    (compared,) = (number for number, line in enumerate(lines) if line.startswith("core attention of a layer and row"))
    assert lines[compared - 1].startswith("step 6/6")
    (forgotten,) = (number for number, line in enumerate(lines) if line == "forgotten")
    assert lines[forgotten - 1].startswith("step 2/6")
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert plot.read_curves(out / "log.jsonl")["train"][0] == [1, 2, 3, 4, 5, 6]
    (figures,) = (row for row in rows if row["kind"] == "attention")
    assert figures["step"] == 6 and min(figures[name] for name in figures if name not in ("kind", "step")) > 0
    saved = from_yaml((out / "step_0000006" / "config.yaml").read_text())
    assert not auto.is_auto(saved)
    chosen = lines[1].removeprefix("context parallelism: ")
    assert chosen.startswith(saved.parallel.cp_comm_type) and f", {saved.parallel.cp_layout}, chosen among" in chosen
    resumed = run_ranks(printed_on_rank, 2, [*flags, "--load", str(out), "--train-iters", "8"])[0].splitlines()
    assert "as measured before" in resumed[2] and resumed[1] == lines[1]
    assert sum(line.startswith("core attention of a layer and row") for line in resumed) == 1  # of a shorter run too


def printed_on_rank(rank: int, world_size: int, flags: list[str]) -> str:
    import contextlib
    import io

    real = Stopwatch.forget

    def forget(watch: Stopwatch) -> None:
        print("forgotten" if rank == 0 else "", end="\n" * (rank == 0))
        real(watch)

    with contextlib.redirect_stdout(io.StringIO()) as text, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stopwatch, "forget", forget)
        assert train_on_rank(rank, world_size, flags) == 0
    return text.getvalue()
