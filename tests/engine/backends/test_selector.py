"""Decisions about Transformer Engine: by its release, and by its selector of attention kernels.

The selector is the package's. Below it, a replacement for cuDNN (`engine_math.cudnn_support`)
accepts or rejects a call, for a Hopper GPU.
"""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacp.attention.context_parallel.transports import TRANSPORTS
from megacp.attention.ops.kernel import Heads
from megacp.distributed.grid import build_grid
from megacp.distributed.shape import GridShape
from megacp.engine.backends import thd
from megacp.engine.backends.select import select_backend
from megacp.engine.backends.support import attention_reasons
from megacp.engine.backends.thd import PackedAttention
from megacp.engine.backends.transformer_engine import selector_problem
from megacp.engine.config.run import RunConfig, with_values
from tests.engine.backends.engine_math import UTILS, selecting
from tests.engine.backends.engine_stub import NEWEST, OLDER, needs_engine, needs_release

COMM_TYPES = [row.name for row in TRANSPORTS.values() if row.engine is not None]

RELEASES = [
    pytest.param(release, marks=(needs_release(release), pytest.mark.slow)) for release in OLDER
]
RELEASES += [pytest.param(NEWEST, marks=needs_engine)]
WIDTH = 128


def packed(
    comm_type: str, cp: int, inner: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Return megacp's attention over ranks that do not exist."""
    parts = [SimpleNamespace(group=object() if size > 1 else None) for size in (inner, cp // inner)]
    monkeypatch.setattr(thd, "split_axis", lambda axis, inner: parts)
    attention = SimpleNamespace(
        deterministic=deterministic, set_context_parallel_group=lambda **options: None
    )
    axis: Any = SimpleNamespace(size=cp, group=object(), global_ranks=tuple(range(cp)))
    return PackedAttention(attention, WIDTH**-0.5, axis, comm_type, inner, torch.device("cpu"))


def accepts(
    comm_type: str,
    cp: int,
    inner: int,
    heads: Heads,
    deterministic: bool,
    row: tuple[int, int, int],
) -> bool:
    """Ask the selector about a row of `tokens` with `count` sequences of up to `length` tokens."""
    utils = sys.modules[UTILS]
    count, length, tokens = row
    known = utils.AttentionParams.__dataclass_fields__
    asked = {
        "qkv_layout": "thd_thd_thd",
        "batch_size": count,
        "num_heads": heads.heads,
        "num_gqa_groups": heads.groups,
        "max_seqlen_q": length,
        "max_seqlen_kv": length,
        "num_tokens_q": tokens // cp,
        "num_tokens_kv": tokens // cp,
        "head_dim_qk": heads.dim,
        "head_dim_v": heads.dim,
        "attn_mask_type": "padding_causal",
        "window_size": (-1, 0),
        "core_attention_bias_requires_grad": False,
        "context_parallel": cp > 1,
        "cp_comm_type": comm_type,
        "cp_size": cp,
        "cp_size_a2a": inner if comm_type == "a2a+p2p" else 1,
        "deterministic": deterministic,
    }
    return bool(
        utils.get_attention_backend(
            utils.AttentionParams(**{k: v for k, v in asked.items() if k in known})
        )[2]
    )


def rows_of(tokens: int, cp: int) -> list[tuple[int, int, int]]:
    """Return rows with one long document and as short ones as possible in the rest of the row."""
    least = 2 * cp
    lengths = range(least, tokens + 1, least * max(1, tokens // least // 48))
    return [(1 + (tokens - length) // least, length, tokens) for length in (*lengths, tokens)]


@needs_engine
@pytest.mark.parametrize("comm_type", COMM_TYPES)
def test_our_decision_is_the_selectors_for_every_row_of_a_run(
    comm_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = set()
    with selecting():
        for cp, heads, groups, deterministic, tokens in itertools.product(
            (2, 3, 4, 8), (3, 8, 9, 16), (1, 3, 8), (False, True), (384, 9216)
        ):
            inner = 3 if cp == 3 else 2
            if heads % groups:
                continue
            settings = {
                "context_parallel_size": cp,
                "num_attention_heads": heads,
                "num_query_groups": groups,
            }
            settings |= {
                "kv_channels": WIDTH,
                "hierarchical_context_parallel_sizes": (inner, cp // inner),
            }
            config = with_values(RunConfig(), {**settings, "cp_comm_type": comm_type})
            ours = packed(comm_type, cp, inner, deterministic, monkeypatch)
            shape, taken = Heads(heads, groups, WIDTH), ours.cp["cp_comm_type"]
            problem = selector_problem(ours, shape, torch.bfloat16, tokens, tokens)
            if not list(
                attention_reasons(config)
            ):  # the forward would reject these arguments, but the selector does not check them
                theirs = all(
                    accepts(taken, cp, inner, shape, deterministic, row)
                    for row in rows_of(tokens, cp)
                )
                assert (problem is None) == theirs, (
                    cp,
                    heads,
                    groups,
                    deterministic,
                    tokens,
                    problem,
                )
                decided.add((deterministic, tokens, theirs))
    assert {(False, 9216, True), (True, 384, True), (True, 9216, False)} <= decided
    assert (False, 384, False) in decided or "a2a" not in comm_type  # an odd number of heads


@needs_engine
def test_a_refusal_is_told_in_the_selectors_words(
    monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    with selecting():
        attention = packed("a2a", 3, 3, False, monkeypatch)
        odd = selector_problem(attention, Heads(9, 3, 64), torch.bfloat16, 96, 96)
        assert "1 sequences of up to 96 tokens" in str(odd)
        assert "divisible by 2 (got num_heads = 9, num_gqa_groups = 3)" in str(odd)
        narrow = selector_problem(attention, Heads(6, 6, 60), torch.bfloat16, 96, 96)
        assert "heads of 60 and 60" in str(narrow)
        monkeypatch.setattr(sys.modules[UTILS], "get_device_compute_capability", lambda: (7, 5))
        assert "compute capability < sm80" in str(
            selector_problem(attention, Heads(6, 6, 64), torch.bfloat16, 96, 96)
        )
    assert capfd.readouterr() == ("", "")


SETTINGS = {"dtype": "bfloat16", "vocab_size": 64, "hidden_size": 64, "num_attention_heads": 8}


@pytest.mark.parametrize("release", RELEASES)
def test_auto_takes_releases_from_2_18_on_and_says_why_not_an_older_one(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = build_grid(GridShape(), 0, "cuda")
    with selecting(release):
        backend = select_backend(with_values(RunConfig(), SETTINGS), place)
        told = backend.warnings()
        if release in ("2.18", "2.20"):
            assert backend.name == "transformer_engine" and not told
        else:
            assert backend.name == "native" and f"Transformer Engine {release}." in told[0]
            assert "2.18 or newer" in told[0]
            with pytest.raises(
                ValueError, match=f"--transformer-impl transformer_engine: .* {release}"
            ):
                select_backend(
                    with_values(
                        RunConfig(), {**SETTINGS, "transformer_impl": "transformer_engine"}
                    ),
                    place,
                )
        refused = [
            comm_type
            for comm_type in COMM_TYPES
            if selector_problem(
                packed(comm_type, 4, 2, False, monkeypatch), Heads(8, 8, 64), torch.bfloat16, 96, 96
            )
        ]
    # up to 2.14, all_gather and a2a+p2p pass the selector but fail an assertion in the forward
    assert refused == {"2.18": ["a2a+p2p"]}.get(release, [])


@needs_engine
def test_determinism_is_asked_for_as_the_attention_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    with selecting():
        backend = select_backend(
            with_values(RunConfig(), {**SETTINGS, "seq_length": 8192}),
            build_grid(GridShape(), 0, "cuda"),
        )
    (line,) = backend.warnings()
    assert "native for every row" in line and "workspace limitation" in line
