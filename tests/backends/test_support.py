"""The constraint matrix of Transformer Engine's attention, and what a run may ask of its layers."""

from __future__ import annotations

import dataclasses

import pytest

from megacp.backends import select
from megacp.backends.select import backend_problems, engine_reasons, select_backend
from megacp.backends.support import ATTENTION, COMM_TYPES, ENGINE, AttentionCase, RunCase, attention_case, refusals
from megacp.config.run import RunConfig, with_values
from megacp.distributed.grid import GridShape, build_grid

YES = dict.fromkeys(COMM_TYPES, True)
NO = dict.fromkeys(COMM_TYPES, False)
ONLY_P2P = {**NO, "p2p": True}
WINDOWED = {**NO, "all_gather": True, "a2a": True}

MATRIX = [
    ({"layout": "bshd", "mask": "causal"}, YES),
    ({"layout": "sbhd", "mask": "causal"}, YES),
    ({"layout": "bshd", "mask": "no_mask"}, YES),
    ({"layout": "sbhd", "mask": "no_mask"}, YES),
    ({"layout": "bshd", "mask": "padding"}, NO),
    ({"layout": "sbhd", "mask": "padding_causal"}, NO),
    ({"layout": "thd", "mask": "padding"}, YES),
    ({"layout": "thd", "mask": "padding_causal"}, YES),
    ({"layout": "thd", "mask": "padding_causal", "padded_lengths": False}, NO),
    ({"layout": "thd", "mask": "causal"}, NO),
    ({"layout": "bshd", "mask": "arbitrary"}, NO),
    ({"layout": "bshd", "mask": "causal_bottom_right"}, NO),
    ({"layout": "thd", "mask": "padding_causal_bottom_right"}, NO),
    ({"score_mod": True}, NO),
    ({"bias": "alibi", "layout": "bshd", "mask": "causal"}, NO),
    ({"softcap": True}, NO),
    ({"bias": "post_scale_bias", "layout": "bshd", "mask": "no_mask"}, ONLY_P2P),
    ({"bias": "post_scale_bias", "layout": "thd"}, NO),
    ({"window": True}, WINDOWED),
    ({"degree": 4, "inner": 2, "heads": 6, "groups": 6}, {**YES, "a2a": False}),
    ({"degree": 4, "inner": 4, "heads": 8, "groups": 2}, {**YES, "a2a": False, "a2a+p2p": False}),
    ({"head_dim": 60}, NO),
    ({"head_dim": 256}, NO),
    ({"dtype": "float32"}, NO),
    ({"capability": (8, 0)}, NO),
    ({"capability": (8, 9), "layout": "bshd", "mask": "causal"}, YES),
    ({"capability": (12, 0)}, YES),
    ({"capability": (12, 0), "cudnn": 91700}, NO),
]


@pytest.mark.parametrize("changes, expected", MATRIX)
@pytest.mark.parametrize("comm_type", COMM_TYPES)
def test_the_matrix_says_yes_and_no_where_transformer_engine_does(changes, expected, comm_type: str) -> None:
    case = AttentionCase(**{"comm_type": comm_type, "inner": 2, **changes})
    assert (refusals(case, ATTENTION) == []) == expected[comm_type]


def test_every_row_of_the_matrix_is_the_only_reason_of_some_case() -> None:
    """Would catch a row that never acts, or that hides behind another."""
    cases = [AttentionCase(**{"comm_type": c, "inner": 2, **changes}) for changes, _ in MATRIX for c in COMM_TYPES]
    cases.append(AttentionCase(comm_type="kv_exchange"))
    alone = {
        row for case in cases if len(found := [row for row in ATTENTION if row.broken(case)]) == 1 for row in found
    }
    assert len(alone) == len(ATTENTION)


def test_one_rank_has_no_constraint_of_context_parallelism() -> None:
    case = AttentionCase(comm_type="kv_exchange", degree=1, heads=7, groups=7, padded_lengths=False)
    assert refusals(case, ATTENTION) == []
    assert len(refusals(dataclasses.replace(case, degree=2), ATTENTION)) == 2


def test_a_run_is_asked_about_its_tensor_ranks_heads() -> None:
    settings = {
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 4,
        "cp_comm_type": "a2a",
        "num_attention_heads": 16,
        "num_query_groups": 4,
        "hidden_size": 1024,
        "dtype": "bfloat16",
    }
    case = attention_case(with_values(RunConfig(), settings))
    assert (case.heads, case.groups, case.swapped, case.head_dim) == (8, 2, 4, 64)
    assert "8 heads and 2 groups" in refusals(case, ATTENTION)[0]


def engine_config(**settings: object) -> RunConfig:
    return with_values(RunConfig(), {"dtype": "bfloat16", "transformer_impl": "transformer_engine", **settings})


def test_all_reasons_against_transformer_engine_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "package_problem", lambda: "it is not installed")
    config = engine_config(fp8="delayed", recompute_granularity="full", hidden_size=40, num_attention_heads=5)
    problems = "\n".join(backend_problems(config, "cpu"))
    for part in ("runs on CUDA", "not installed", "--recompute-granularity full", "--hidden-size 40"):
        assert part in problems
    with pytest.raises(ValueError, match="(?s)runs on CUDA.*not installed.*--hidden-size 40"):
        select_backend(config, build_grid(GridShape(), 0))


def test_every_row_about_a_run_can_refuse() -> None:
    """Would catch a row that never acts."""
    vocabulary = {"tensor_model_parallel_size": 2, "vocab_size": 1000, "make_vocab_size_divisible_by": 128}
    cases = [
        (engine_config(), "cpu", None),
        (engine_config(), "cuda", "it is not installed"),
        (engine_config(fp8="current"), "cuda", None, "compute capability 8.9 or higher"),
        (engine_config(dtype="float64"), "cuda", None),
        (engine_config(fp8="delayed", recompute_granularity="full"), "cuda", None),
        (engine_config(fp8="blockwise", ffn_hidden_size=1000), "cuda", None),
        (engine_config(cross_entropy_fusion_impl="te", **vocabulary), "cuda", None),
    ]
    found = [refusals(RunCase(*case), ENGINE) for case in cases]
    assert [len(reasons) for reasons in found] == [1] * len(ENGINE)


def test_a_gpu_without_the_recipe_refuses_it_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch an error of the first forward pass, after process groups and weights exist."""
    monkeypatch.setattr(select, "package_problem", lambda: None)
    monkeypatch.setattr(select, "fp8_problem", lambda name: f"no {name} here")
    assert backend_problems(engine_config(fp8="blockwise"), "cuda") == [
        "--transformer-impl transformer_engine and --fp8 blockwise: --fp8 blockwise: no blockwise here"
    ]
    assert backend_problems(engine_config(), "cuda") == []


def test_auto_is_native_on_a_cpu_and_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> str:
        raise AssertionError("the package was looked for")

    monkeypatch.setattr(select, "package_problem", never)
    config = with_values(RunConfig(), {"vocab_size": 64})
    assert backend_problems(config, "cpu") == []
    backend = select_backend(config, build_grid(GridShape(), 0))
    assert backend.name == "native" and backend.news() == []


def test_auto_on_cuda_says_why_it_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "package_problem", lambda: "it is not installed")
    backend = select_backend(with_values(RunConfig(), {"vocab_size": 64}), build_grid(GridShape(), 0, "cuda"))
    (line,) = backend.news()
    assert backend.name == "native" and "it is not installed" in line and "float32" in line
    assert backend.news() == []


def test_settings_of_transformer_engine_contradict_native_layers() -> None:
    config = with_values(
        RunConfig(), {"transformer_impl": "native", "fp8": "current", "cross_entropy_fusion_impl": "te"}
    )
    problems = backend_problems(config, None)
    assert len(problems) == 2 and "--fp8 current" in problems[0] and "--cross-entropy-fusion-impl te" in problems[1]


def test_a_dry_run_asks_only_about_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "package_problem", lambda: "it is not installed")
    assert engine_reasons(engine_config(), None) == []
    assert backend_problems(engine_config(fp8="current"), None) == []
