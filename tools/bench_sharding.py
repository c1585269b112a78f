"""Training steps under each sharding strategy beside a stock decoder under plain `fully_shard`, on two ranks.

    python tools/bench_sharding.py [--quick] [--json FILE]

The ways take turns, one step each. The stock decoder is transformers' Llama of the same size with torch's AdamW, the
same tokens and microbatches, and the same causal rows.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # bench/ is not installed

from bench.report import Goal, Part, Seconds, benchmark_parser, run_parts, take_turns, timed
from bench.steps import QUICK_SIZES, SIZES, measure_rank
from megacp.core.config.run import RunConfig, with_values
from megacp.core.data.synthetic.mock import MockRules
from megacp.core.distributed.collectives import barrier
from megacp.core.distributed.fully_shard import shard_plainly
from megacp.core.distributed.grid import GridShape, build_grid
from megacp.core.distributed.spawn import RankPool
from megacp.core.planner.report import table

STRATEGIES = ("optim", "optim_grads", "optim_grads_params")
PEER = "plain fully_shard"
SHARED = {"untie_embeddings_and_output_weights": True}


@functools.cache
def _peer(config: RunConfig, rank: int, world_size: int) -> Callable[[], None]:
    """The training step of the stock model, which ends on all ranks together."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model, data = config.model, config.data
    world = build_grid(GridShape(dp=world_size), rank).world
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            intermediate_size=model.ffn_hidden_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=model.query_groups,
            max_position_embeddings=data.seq_length,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
    )
    shard_plainly([*llama.model.layers, llama], world)
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-3, foreach=True)
    microbatches = config.training.global_batch_size // world_size

    def step() -> None:
        for _ in range(microbatches):
            ids = torch.randint(0, model.vocab_size, (1, data.seq_length))
            (llama(input_ids=ids, labels=ids).loss / microbatches).backward()
        torch.nn.utils.clip_grad_norm_(llama.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        barrier(world)

    return step


def _peer_rank(rank: int, world_size: int, config: RunConfig) -> Seconds:
    return timed(_peer(config, rank, world_size))[1]


def strategies_part(quick: bool, rounds: int) -> Part:
    """Steps of two ranks, by turns; the first of each way warms up and is left out."""
    sizes = {**(QUICK_SIZES if quick else SIZES), **SHARED}
    config = with_values(RunConfig(), sizes)
    rules = MockRules(config.model.vocab_size, config.data.seq_length, "causal", seed=1)
    with ExitStack() as stack:
        ways: dict[str, Callable[[], Sequence[Seconds]]] = {}
        for strategy in STRATEGIES:
            ours = with_values(config, {"data_parallel_sharding_strategy": strategy})
            pool = stack.enter_context(RankPool(2))
            ways[strategy] = functools.partial(pool.run, measure_rank, ours, rules)
        ways[PEER] = functools.partial(stack.enter_context(RankPool(2)).run, _peer_rank, config)
        found = {name: steps[1:] for name, steps in take_turns(ways, rounds + 1).items()}
    wall = {name: [max(rank.wall for rank in step) for step in steps] for name, steps in found.items()}
    cpu = {name: statistics.median(sum(rank.cpu for rank in step) for step in steps) for name, steps in found.items()}
    # in pairs: both ways of a pair ran in the same moments
    over = {name: statistics.median(a / b for a, b in zip(wall["optim"], wall[name], strict=True)) for name in wall}
    tokens = config.training.global_batch_size * config.data.seq_length
    rows = [["two ranks", "tokens/s", "/optim", "CPU s"]]
    rows += [
        [
            name,
            f"{tokens / statistics.median(wall[name]):,.0f}",
            f"{over[name]:.2f}",
            f"{cpu[name]:.2f}",
        ]
        for name in wall
    ]
    full = STRATEGIES[-1]
    figures: dict[str, Any] = {"seconds": wall, "cpu_seconds": cpu, "over_optim": over}
    goals = [
        Goal("tokens/s of optim_grads_params over optim", over[full], 0.85, ">="),
        Goal("tokens/s of optim_grads_params over plain fully_shard", over[full] / over[PEER], 1.0, ">="),
    ]
    return Part({"strategies": figures}, goals, table(rows))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    about = "Measure what sharding gradients and parameters costs on this machine's CPU."
    parser = benchmark_parser(about, ["strategies"])
    parser.add_argument("--rounds", type=int, metavar="N", help="steps measured of each way (default 7, quick 1)")
    arguments = parser.parse_args(argv)
    rounds = arguments.rounds or (1 if arguments.quick else 7)
    return run_parts(
        {"strategies": functools.partial(strategies_part, arguments.quick, rounds)}, arguments, rounds=rounds
    )


if __name__ == "__main__":
    sys.exit(main())
