"""The reasons against Transformer Engine's attention and layers, and the settings that need them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from megacp.attention.context_parallel.transports import TRANSPORTS
from megacp.distributed.grid import build_grid
from megacp.distributed.shape import GridShape
from megacp.engine.backends import select
from megacp.engine.backends.apex import apex_status, describe_apex
from megacp.engine.backends.select import backend_problems, engine_reasons, select_backend
from megacp.engine.backends.support import attention_reasons, layer_reasons
from megacp.engine.config.run import RunConfig, with_values
from megacp.train import main
from megacp.training.start.status import REFUSED

COMM_TYPES = [row.name for row in TRANSPORTS.values() if row.engine is not None]

TP, CP, SIZES = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "hierarchical_context_parallel_sizes",
)
WIDE = {"dtype": "bfloat16", "hidden_size": 512, "num_attention_heads": 8, CP: 4, SIZES: (2, 2)}
"""Heads have width 64, which every transport supports."""
SIX = {"num_attention_heads": 6, "kv_channels": 64}

ATTENTION_CASES = [
    ({}, {}),
    (SIX, {"a2a": "across 4 ranks, but a tp rank has 6 heads and 6 query groups"}),
    ({"num_query_groups": 2}, {"a2a": "8 heads and 2 query groups"}),
    (
        {"num_query_groups": 2, SIZES: (4, 1)},
        {
            "a2a": "across 4 ranks",
            "a2a+p2p": "across 4 ranks, but a tp rank has 8 heads and 2 query groups",
        },
    ),
    ({"num_query_groups": 4, TP: 2}, {"a2a": "4 heads and 2 query groups"}),
    ({"kv_channels": 256}, dict.fromkeys(COMM_TYPES, "256")),
]
"""Settings, and the only reason against some transports."""


@pytest.mark.parametrize("settings, expected", ATTENTION_CASES)
def test_attention_is_refused_where_heads_cannot_be_dealt(
    settings: dict, expected: dict[str, str]
) -> None:
    for comm_type in COMM_TYPES:
        config = with_values(RunConfig(), {**WIDE, **settings, "cp_comm_type": comm_type})
        reasons = list(attention_reasons(config))
        assert len(reasons) == (comm_type in expected)
        assert expected.get(comm_type, "") in "".join(reasons)


def test_one_rank_has_no_constraint_of_context_parallelism() -> None:
    settings = {
        **WIDE,
        CP: 1,
        "cp_comm_type": "kv_exchange",
        "num_attention_heads": 7,
        "kv_channels": 64,
    }
    assert list(attention_reasons(with_values(RunConfig(), settings))) == []


def engine_config(**settings: object) -> RunConfig:
    return with_values(
        RunConfig(), {"dtype": "bfloat16", "transformer_impl": "transformer_engine", **settings}
    )


def test_all_reasons_against_transformer_engine_come_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(select, "package_problem", lambda: "it is not installed")
    config = engine_config(
        fp8="delayed", recompute_granularity="full", hidden_size=40, num_attention_heads=5
    )
    problems = "\n".join(backend_problems(config, "cpu"))
    for part in (
        "runs on CUDA",
        "not installed",
        "--recompute-granularity full",
        "--hidden-size 40",
    ):
        assert part in problems
    with pytest.raises(ValueError, match="(?s)runs on CUDA.*not installed.*--hidden-size 40"):
        select_backend(config, build_grid(GridShape(), 0))


def test_every_reason_against_the_layers_of_a_run_can_be_the_only_one() -> None:
    cases = [
        (engine_config(), "cpu", None),
        (engine_config(), "cuda", "it is not installed"),
        (engine_config(fp8="current"), "cuda", None, "compute capability 8.9 or higher"),
        (engine_config(dtype="float64"), "cuda", None),
        (engine_config(fp8="delayed", recompute_granularity="full"), "cuda", None),
        (engine_config(fp8="blockwise", ffn_hidden_size=1000), "cuda", None),
    ]
    found = [list(layer_reasons(*case)) for case in cases]
    assert [len(reasons) for reasons in found] == [1] * len(cases)


def test_a_gpu_without_the_recipe_refuses_it_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(select, "package_problem", lambda: None)
    monkeypatch.setattr(select, "fp8_problem", lambda name: f"no {name} here")
    assert backend_problems(engine_config(fp8="blockwise"), "cuda") == [
        "--transformer-impl transformer_engine and --fp8 blockwise: --fp8 blockwise: no blockwise here"
    ]
    assert backend_problems(engine_config(), "cuda") == []


def test_what_is_imported_finds_how_many_threads_a_rank_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's compiler reads the number once, at its first import."""
    found = list[str]()

    def problem() -> str:
        found.append(os.environ["TORCHINDUCTOR_COMPILE_THREADS"])
        return "not here"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 14)
    for name in ("package_problem", "compiler_problem"):
        monkeypatch.setattr(select, name, problem)
    with mock.patch.dict(os.environ):
        os.environ.pop("TORCHINDUCTOR_COMPILE_THREADS", None)
        assert (
            main(["--nproc", "2", "--vocab-size", "64", "--transformer-impl", "transformer_engine"])
            == REFUSED
        )
    assert found == ["7", "7"]


def test_auto_is_native_on_a_cpu_and_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> str:
        raise AssertionError("the package was looked for")

    monkeypatch.setattr(select, "package_problem", never)
    config = with_values(RunConfig(), {"vocab_size": 64})
    assert backend_problems(config, "cpu") == []
    backend = select_backend(config, build_grid(GridShape(), 0))
    assert backend.name == "native" and backend.warnings() == []


def test_auto_on_cuda_says_why_it_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "package_problem", lambda: "it is not installed")
    backend = select_backend(
        with_values(RunConfig(), {"vocab_size": 64}), build_grid(GridShape(), 0, "cuda")
    )
    (line,) = backend.warnings()
    assert backend.name == "native" and "it is not installed" in line and "float32" in line
    assert backend.warnings() == []


def test_settings_of_transformer_engine_contradict_native_layers() -> None:
    (problem,) = backend_problems(
        with_values(RunConfig(), {"transformer_impl": "native", "fp8": "current"}), None
    )
    assert "--fp8 current" in problem


def test_a_dry_run_asks_only_about_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "package_problem", lambda: "it is not installed")
    assert engine_reasons(engine_config(), None) == []
    assert backend_problems(engine_config(fp8="current"), None) == []


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Put packages on the path that raise when they are imported."""
    for module in modules:
        (folder / module).mkdir(parents=True)
        (folder / module / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "apex", raising=False)


@pytest.mark.parametrize(
    ("modules", "status"),
    [
        (("apex",), "impostor"),
        (("apex", "apex/multi_tensor_apply"), "nvidia without extensions"),
        (("apex", "apex/multi_tensor_apply", "amp_C"), "nvidia"),
    ],
)
def test_the_kind_of_apex_is_found_without_running_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules: tuple[str, ...], status: str
) -> None:
    install(tmp_path, monkeypatch, *modules)
    assert apex_status() == status


def test_an_impostor_is_named_with_the_way_to_the_real_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "apex")
    assert "pip uninstall apex" in describe_apex()
    assert "NVIDIA/apex" in describe_apex()


def test_without_apex_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megacp.engine.backends.apex.find_spec", lambda name: None)
    assert describe_apex() == "apex: not installed, and not needed"
