"""Linears with LoRA pairs, and messages about layers without them."""

from __future__ import annotations

from typing import Any

import pytest

from megacp.engine.config.model import LORA_KINDS, PairSize
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.layers.stack import lora_kinds
from megacp.engine.models.pair_words import describe_pairs, parts_without_pairs

HYBRID: dict[str, Any] = {"num_layers": 6, "linear_attention_freq": "3", "lora_rank": 4}
EXPERTS: dict[str, Any] = {
    "num_layers": 4,
    "num_experts": 8,
    "moe_layer_freq": "[0,1,1,1]",
    "lora_rank": 4,
}
EXPERTS |= {"hidden_size": 64, "moe_ffn_hidden_size": 20}


def config(**values: Any) -> RunConfig:
    return with_values(RunConfig(), values)


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        (HYBRID, ["attention.q", "attention.v", "linear_attention.q", "linear_attention.v"]),
        (HYBRID | {"lora_targets": "attention.q"}, ["attention.q"]),
        (HYBRID | {"lora_targets": "linear_attention.b, output"}, ["attention.output"]),
        (
            HYBRID | {"linear_attention_rule": "mamba2", "lora_targets": "output"},
            ["attention.output", "mamba.output"],
        ),
        (EXPERTS | {"lora_targets": "gate"}, ["mlp.gate", "experts.gate"]),
        (
            EXPERTS | {"moe_shared_expert_intermediate_size": 16, "lora_targets": "up"},
            ["mlp.up", "shared.up", "experts.up"],
        ),
        (EXPERTS | {"lora_targets": "experts.down,q"}, ["attention.q", "experts.down"]),
    ],
)
def test_a_word_means_all_kinds_of_its_name_and_a_kind_only_itself(
    values: dict[str, Any], kinds: list[str]
) -> None:
    found = [*lora_kinds(config(**values).model)]
    if "linear_attention.b" in values.get("lora_targets", ""):
        kinds = ["attention.output", "linear_attention.output", "linear_attention.b"]
    assert found == kinds


def test_all_words_are_the_kinds_without_the_rates_and_the_gate_of_a_state() -> None:
    words = {f"linear_attention.{name}" for name in "zba"}
    assert set(config(lora_rank=4, lora_targets="all").model.lora_pairs) == set(LORA_KINDS) - words


def test_the_last_word_that_names_a_kind_decides_its_size() -> None:
    model = config(
        lora_rank=4, lora_alpha=2.0, lora_targets="v:8:3,gate,mlp.gate:2:5,q:3:7,attention.q"
    ).model
    assert (
        model.lora_pairs["attention.v"]
        == model.lora_pairs["linear_attention.v"]
        == PairSize(8, 3.0)
    )
    assert model.lora_pairs["attention.q"] == model.lora_pairs["experts.gate"] == PairSize(4, 2.0)
    assert model.lora_pairs["linear_attention.q"] == PairSize(3, 7.0)
    assert (
        model.lora_pairs["mlp.gate"] == PairSize(2, 5.0)
        and model.lora_pairs["mlp.gate"].scale == 2.5
    )
    told = (
        "rank 4, alpha 2, on attention.q, attention.v (rank 8, alpha 3), mlp.gate (rank 2, alpha 5)"
    )
    assert describe_pairs(model) == told


def test_a_run_says_which_layers_of_a_hybrid_have_no_pairs() -> None:
    states = "0-1, 3-4"
    mamba = HYBRID | {"linear_attention_rule": "mamba2"}
    told = f"no LoRA adapters on mamba and MLP of layers {states} (--lora-targets includes none)"
    assert parts_without_pairs(config(**mamba)) == [told]
    told = f"no LoRA adapters on mamba of layers {states} (--lora-targets includes none)"
    assert parts_without_pairs(config(**mamba, lora_targets="q,up")) == [told]
    told = f"no LoRA adapters on linear_attention and MLP of layers {states} (the adapter includes none)"
    assert parts_without_pairs(
        config(**HYBRID, lora_targets="attention.q", load_adapter="a", load_hf="b")
    ) == [told]
    told = "no LoRA adapters on attention and MLP of layers 2, 5 (--lora-targets includes none)"
    assert parts_without_pairs(config(**HYBRID, lora_targets="linear_attention.z")) == [told]
    assert parts_without_pairs(config(**HYBRID)) == []
    assert parts_without_pairs(config(num_layers=2, lora_rank=4)) == []
    assert parts_without_pairs(config(**HYBRID | {"lora_rank": 0})) == []


def test_a_run_says_that_experts_are_not_trained_and_what_trains_them() -> None:
    count = 3 * 64 * 20 * 8 * 3  # weights of all experts in three layers
    assert count == 92_160
    flags = "--lora-targets q,v,experts.gate,experts.up,experts.down"
    told = (
        f"experts are not trained: 92.2 k parameters (8 experts in each of 3 layers); {flags} would "
        "train LoRA adapters on them"
    )
    assert parts_without_pairs(config(**EXPERTS)) == [told]
    assert parts_without_pairs(config(**EXPERTS, lora_targets="v,experts.up")) == []
    assert parts_without_pairs(config(**EXPERTS, lora_targets="up")) == []
    (told,) = parts_without_pairs(config(**EXPERTS, load_adapter="a", load_hf="b"))
    assert told.endswith(
        "(8 experts in each of 3 layers); the loaded adapter does not include them"
    )
