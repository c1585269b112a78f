"""Layers, tensors and initial values, compared with lists and distributions written by hand.

Reference and golden tests use the layers and initial weights of the model itself, so they cannot
detect mistakes in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megacp.distributed.grid import single_axis
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.layers.stack import layers_of, model_tensors
from megacp.engine.layers.table import Tensor
from megacp.engine.layers.vision import connector_tensors, tower_tensors
from megacp.engine.models.init import DRAWS, initialise, unsharded
from megacp.engine.tensor_parallel.parameters import LinearOptions, row_parameter

Values = dict[str, Any]
SIX: Values = {"num_layers": 6}
EXPERTS: Values = {**SIX, "num_experts": 4}
WINDOW: Values = {**SIX, "window_size": 9}
MAMBA2: Values = {**SIX, "linear_attention_rule": "mamba2"}

LISTS: list[tuple[Values, str]] = [
    # Each word is a layer: a attention, w with a window, n without rotary embedding, d delta rule,
    # m Mamba-2.
    (SIX, "a a a a a a"),
    ({**SIX, "no_rope_freq": "3"}, "a a n a a n"),
    ({**SIX, "no_rope_freq": "[1,0,0]"}, "n a a n a a"),
    ({**SIX, "no_rope_freq": "[0,0,0,1]"}, "a a a n a a"),
    ({**SIX, "no_rope_freq": "1"}, "n n n n n n"),
    (WINDOW, "w w w w w w"),
    ({**WINDOW, "window_attn_skip_freq": "3"}, "w w a w w a"),
    ({**WINDOW, "window_attn_skip_freq": "[1,0]"}, "w a w a w a"),
    ({**WINDOW, "window_attn_skip_freq": "[0,1,1,1]"}, "a w w w a w"),
    ({**SIX, "linear_attention_freq": "3"}, "d d a d d a"),
    ({**SIX, "linear_attention_freq": "[1,0,0,1]"}, "d a a d d a"),
    ({**SIX, "linear_attention_freq": "[1]"}, "d d d d d d"),
    ({**SIX, "linear_attention_freq": "1"}, "a a a a a a"),
    ({**MAMBA2, "linear_attention_freq": "2"}, "m a m a m a"),
    (MAMBA2, "a a a a a a"),
    # x experts, s experts with a shared expert. Layers without x or s have a dense MLP.
    (EXPERTS, "ax ax ax ax ax ax"),
    ({**EXPERTS, "moe_layer_freq": "2"}, "ax a ax a ax a"),
    ({**EXPERTS, "moe_layer_freq": "3"}, "ax a a ax a a"),
    ({**EXPERTS, "moe_layer_freq": "4"}, "ax a a a ax a"),
    ({**EXPERTS, "moe_layer_freq": "7"}, "ax a a a a a"),
    ({**EXPERTS, "moe_layer_freq": "[0,1,1,1,0,1]"}, "a ax ax ax a ax"),
    ({**EXPERTS, "moe_layer_freq": "3", "moe_shared_expert_intermediate_size": 8}, "as a a as a a"),
    ({**EXPERTS, **WINDOW, "moe_layer_freq": "2", "window_attn_skip_freq": "3"}, "wx w ax w wx a"),
    ({**EXPERTS, **MAMBA2, "moe_layer_freq": "2", "linear_attention_freq": "3"}, "mx m ax m mx a"),
]
"""Patterns as in Megatron: a number N skips the window, state or rotary embedding in the last of every
N layers, but gives experts to the first. In a list, 1 means experts, a window or a state, but no
rotary embedding.
"""


def letters(values: Values) -> str:
    model = with_values(RunConfig(), values).model
    found = []
    for layer in layers_of(model):
        mixer = {"linear_attention": "d", "mamba": "m"}.get(layer.mixer.name, "a")
        if mixer == "a" and layer.window:
            assert layer.window == 9
            mixer = "w"
        if not layer.rotates:
            mixer = "n"
        if layer.shared is not None:
            mixer += "s"
        elif layer.mlp.of_expert(model):
            mixer += "x"
        found.append(mixer)
    return " ".join(found)


@pytest.mark.parametrize(
    ("values", "expected"), LISTS, ids=[str(number) for number in range(len(LISTS))]
)
def test_flags_choose_the_layers_that_a_list_by_hand_has(values: Values, expected: str) -> None:
    assert letters(values) == expected


def test_every_flag_that_chooses_layers_has_a_list_by_hand() -> None:
    flags = {name for name in vars(RunConfig().model) if name.endswith("_freq")}
    assert flags == {name for values, _ in LISTS for name in values if name.endswith("_freq")}


SIZES: Values = {
    **{
        "num_layers": 1,
        "hidden_size": 8,
        "ffn_hidden_size": 12,
        "num_attention_heads": 4,
        "num_query_groups": 2,
    },
    **{"kv_channels": 6, "vocab_size": 10, "init_method_std": 0.5, "linear_num_key_heads": 2},
    **{
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 5,
        "linear_conv_kernel_dim": 3,
    },
}
STATE = "[1]"
DENSE = """
    attention_norm.weight  8     whole    ones
    attention.q.weight     24 8  rows     normal 0.5     matrix
    attention.k.weight     12 8  rows     normal 0.5     matrix
    attention.v.weight     12 8  rows     normal 0.5     matrix
    attention.output.weight 8 24 columns  normal 0.35355 matrix
    mlp_norm.weight        8     whole    ones
    mlp.gate.weight        12 8  rows     normal 0.5     matrix
    mlp.up.weight          12 8  rows     normal 0.5     matrix
    mlp.down.weight        8 12  columns  normal 0.35355 matrix
"""
"""Name, shape, cut, and distribution with its std, for example 0.35355 = 0.5 / sqrt(2 x 1 layer).
Then the role for the optimizer if it is not `vector`; these tensors have weight decay. Last the axis
of the gradient sum if it is edp.
"""
BIASED = """
    attention_norm.weight  8     whole    ones
    attention.q.weight     24 8  rows     normal 0.5     matrix
    attention.q.bias       24    rows     zeros
    attention.k.weight     12 8  rows     normal 0.5     matrix
    attention.k.bias       12    rows     zeros
    attention.v.weight     12 8  rows     normal 0.5     matrix
    attention.v.bias       12    rows     zeros
    attention.output.weight 8 24 columns  normal 0.35355 matrix
    attention.output.bias  8     whole    zeros
    attention.q_norm.weight 6    whole    ones
    attention.k_norm.weight 6    whole    ones
    attention.sinks        4     rows     normal 0.5
    mlp_norm.weight        8     whole    ones
    mlp.gate.weight        12 8  rows     normal 0.5     matrix
    mlp.gate.bias          12    rows     zeros
    mlp.up.weight          12 8  rows     normal 0.5     matrix
    mlp.up.bias            12    rows     zeros
    mlp.down.weight        8 12  columns  normal 0.35355 matrix
    mlp.down.bias          8     whole    zeros
"""
GATED = """
    attention_norm.weight        8     whole    zeros
    attention_output_norm.weight 8     whole    zeros
    attention.q.weight           48 8  rows     normal 0.5     matrix
    attention.k.weight           12 8  rows     normal 0.5     matrix
    attention.v.weight           12 8  rows     normal 0.5     matrix
    attention.output.weight      8 24  columns  normal 0.35355 matrix
    attention.q_norm.weight      24    rows     zeros
    attention.k_norm.weight      12    rows     zeros
    mlp_norm.weight              8     whole    zeros
    mlp_output_norm.weight       8     whole    zeros
    mlp.gate.weight              12 8  rows     normal 0.5     matrix
    mlp.up.weight                12 8  rows     normal 0.5     matrix
    mlp.down.weight              8 12  columns  normal 0.35355 matrix
"""
MLP = DENSE[DENSE.index("    mlp_norm") :]
DELTA = f"""
    attention_norm.weight                  8      whole    ones
    linear_attention.q.weight              6 8    rows     normal 0.5     matrix
    linear_attention.k.weight              6 8    rows     normal 0.5     matrix
    linear_attention.v.weight              20 8   rows     normal 0.5     matrix
    linear_attention.z.weight              20 8   rows     normal 0.5     matrix
    linear_attention.b.weight              4 8    rows     normal 0.5     matrix
    linear_attention.a.weight              4 8    rows     normal 0.5     matrix
    linear_attention.output.weight         8 20   columns  normal 0.35355 matrix
    linear_attention.convolution_q.weight  6 1 3  rows     uniform 0.33333 decays
    linear_attention.convolution_k.weight  6 1 3  rows     uniform 0.33333 decays
    linear_attention.convolution_v.weight  20 1 3 rows     uniform 0.33333 decays
    linear_attention.dt_bias               4      rows     ones
    linear_attention.A_log                 4      rows     log_rate 1
    linear_attention.norm.weight           5      whole    ones
{MLP}
"""
"""torch's Conv1d draws values up to 1 / sqrt(3 taps), with a standard deviation of 1/3. Qwen3.5
initialises dt_bias to 1 and A_log to the logarithm of a number up to 16.
"""
MAMBA = f"""
    attention_norm.weight       8      whole    ones
    mamba.z.weight              20 8   rows     normal 0.5     matrix
    mamba.x.weight              20 8   rows     normal 0.5     matrix
    mamba.B.weight              6 8    rows     normal 0.5     matrix
    mamba.C.weight              6 8    rows     normal 0.5     matrix
    mamba.dt.weight             4 8    rows     normal 0.5     matrix
    mamba.output.weight         8 20   columns  normal 0.35355 matrix
    mamba.convolution_x.weight  20 1 3 rows     uniform 0.33333 decays
    mamba.convolution_B.weight  6 1 3  rows     uniform 0.33333 decays
    mamba.convolution_C.weight  6 1 3  rows     uniform 0.33333 decays
    mamba.convolution_x.bias    20     rows     zeros
    mamba.convolution_B.bias    6      rows     zeros
    mamba.convolution_C.bias    6      rows     zeros
    mamba.dt_bias               4      rows     step 1
    mamba.A_log                 4      rows     log_rate 1
    mamba.D                     4      rows     ones
    mamba.norm.weight           20     rows     ones
{MLP}
"""
"""Mamba-2 initialises the step bias by a distribution of steps, unlike A_log."""
ATTENDS = DENSE[: DENSE.index("    mlp_norm")]


def of_expert(number: int) -> str:
    """The six tensors of an expert are not cut, and their gradients are summed over edp."""
    rows = ""
    for name, shape, width, std in (
        ("gate", "10 8", 10, 0.5),
        ("up", "10 8", 10, 0.5),
        ("down", "8 10", 8, 0.35355),
    ):
        rows += f"    mlp.experts.{number}.{name}.weight {shape} whole normal {std} matrix edp\n"
        rows += f"    mlp.experts.{number}.{name}.bias {width} whole zeros edp\n"
    return rows


ROUTED = f"""
{ATTENDS}
    mlp_norm.weight             8    whole    ones
    mlp.router.weight           3 8  whole    normal 0.5     matrix
    mlp.router.bias             3    whole    zeros
    mlp.shared_gate.weight      1 8  whole    normal 0.5     matrix
    mlp.shared.gate.weight      14 8 rows     normal 0.5     matrix
    mlp.shared.gate.bias        14   rows     zeros
    mlp.shared.up.weight        14 8 rows     normal 0.5     matrix
    mlp.shared.up.bias          14   rows     zeros
    mlp.shared.down.weight      8 14 columns  normal 0.35355 matrix
    mlp.shared.down.bias        8    whole    zeros
{of_expert(0)}{of_expert(1)}{of_expert(2)}
"""
PAIRS = """
    attention.v.lora_A.weight      2 8  whole    uniform 0.20412 matrix
    attention.v.lora_B.weight      12 2 rows     zeros           matrix
    attention.output.lora_A.weight 2 24 columns  uniform 0.11785 matrix
    attention.output.lora_B.weight 8 2  whole    zeros           matrix
    mlp.experts.0.down.lora_A.weight 2 10 whole  uniform 0.18257 matrix edp
    mlp.experts.0.down.lora_B.weight 8 2  whole  zeros           matrix edp
    mlp.experts.1.down.lora_A.weight 2 10 whole  uniform 0.18257 matrix edp
    mlp.experts.1.down.lora_B.weight 8 2  whole  zeros           matrix edp
"""
"""peft draws A by Kaiming initialisation with a = sqrt(5): values up to 1 / sqrt(inputs), with a
standard deviation of 1 / sqrt(3 x inputs).
"""
BIASES = dict.fromkeys(("add_qkv_bias", "add_attention_output_bias", "add_mlp_bias"), True)
ROUTER: Values = {"num_experts": 3, "moe_ffn_hidden_size": 10}
LAYERS: dict[str, tuple[Values, str]] = {
    "attention, dense": ({}, DENSE),
    "biases, sinks, norms of heads": (
        {**BIASES, "softmax_type": "learnable", "qk_layernorm": "head"},
        BIASED,
    ),
    "gates, norms around 1, before and after": (
        {
            **{"attention_output_gate": True, "apply_layernorm_1p": True, "norm_position": "both"},
            "qk_layernorm": "all_heads",
        },
        GATED,
    ),
    "gated delta rule": ({"linear_attention_freq": STATE}, DELTA),
    "Mamba-2": ({"linear_attention_freq": STATE, "linear_attention_rule": "mamba2"}, MAMBA),
    "experts": (
        {
            **{
                **ROUTER,
                "add_mlp_bias": True,
                "moe_router_bias": True,
                "moe_shared_expert_gate": True,
            },
            "moe_shared_expert_intermediate_size": 14,
        },
        ROUTED,
    ),
}


def described(rows: str) -> dict[str, tuple[Any, ...]]:
    """Return name -> shape, cut, distribution, std, whether it decays, role, axis."""
    found = {}
    for name, *words in map(str.split, filter(str.strip, rows.splitlines())):
        axis = "edp" if words[-1] == "edp" else "dp_cp"
        place = next(i for i, word in enumerate(words) if word.isalpha())
        shape, cut, draw = tuple(map(int, words[:place])), words[place], words[place + 1]
        std = next((float(word) for word in words[place + 2 :] if word[0].isdigit()), 0.0)
        rule = next((word for word in words if word in ("matrix", "table")), "vector")
        found[name] = shape, cut, draw, std, rule != "vector" or "decays" in words, rule, axis
    return found


def made(config: RunConfig) -> dict[str, tuple[Any, ...]]:
    tensors = [*model_tensors(config.model), *tower_tensors(config), *connector_tensors(config)]
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    rows = {}
    for t in tensors:
        row = t.shape, t.cut, t.init, round(t.std, 5), t.decays, t.treated, t.reduced_over
        rows[t.name.removeprefix("layers.0.")] = row
    return rows


ENDS = """
    embedding.weight   10 8 rows  normal 0.5 table
    final_norm.weight  8    whole ones
"""


TOWER: Values = {
    **{
        "vision_num_layers": 2,
        "vision_hidden_size": 6,
        "vision_ffn_hidden_size": 14,
        "vision_num_attention_heads": 2,
    },
    **{
        "vision_patch_size": 2,
        "vision_image_size": 4,
        "connector_ffn_hidden_size": 16,
        "additional_vocab_size": 3,
    },
    "untie_embeddings_and_output_weights": True,
}


def ends_of_a_tower(patch: str) -> str:
    """A patch has 2 x 2 pixels of three colours, and a crop has 2 x 2 patches."""
    return f"""
        vision.patch_embedding.weight    6 {patch} whole normal 0.5 matrix
        vision.patch_embedding.bias      6         whole zeros
        vision.position_embedding.weight 4 6       whole normal 0.5 table
    """


def attention_of_a_tower(block: str, inputs: int, std: float) -> str:
    rows = f"{block}.attention.output.weight 6 6 columns normal {std} matrix\n"
    rows += f"{block}.attention.output.bias 6 whole zeros\n"
    for name in "qkv":
        rows += f"{block}.attention.{name}.weight 6 {inputs} rows normal 0.5 matrix\n"
        rows += f"{block}.attention.{name}.bias 6 rows zeros\n"
    return rows


def block_of_a_tower(number: int) -> str:
    """The std of outputs is 0.25 = 0.5 / sqrt(2 x 2 layers)."""
    block = f"vision.blocks.{number}"
    return f"""
        {block}.attention_norm.weight 6    whole   ones
        {block}.attention_norm.bias   6    whole   zeros
        {block}.mlp_norm.weight       6    whole   ones
        {block}.mlp_norm.bias         6    whole   zeros
        {block}.mlp.up.weight         14 6 rows    normal 0.5  matrix
        {block}.mlp.up.bias           14   rows    zeros
        {block}.mlp.down.weight       6 14 columns normal 0.25 matrix
        {block}.mlp.down.bias         6    whole   zeros
    """ + attention_of_a_tower(block, 6, 0.25)


CONNECTORS: dict[str, str] = {
    "molmo2": ends_of_a_tower("12")
    + """
        connector.mlp.gate.weight 16 6 rows    normal 0.5 matrix
        connector.mlp.up.weight   16 6 rows    normal 0.5 matrix
        connector.mlp.down.weight 8 16 columns normal 0.5 matrix
    """
    + attention_of_a_tower("connector", 12, 0.5),
    "qwen3_5": ends_of_a_tower("3 2 2 2")
    + """
        connector.norm.weight     6     whole   ones
        connector.norm.bias       6     whole   zeros
        connector.mlp.up.weight   24 24 rows    normal 0.5 matrix
        connector.mlp.up.bias     24    rows    zeros
        connector.mlp.down.weight 8 24  columns normal 0.5 matrix
        connector.mlp.down.bias   8     whole   zeros
    """,
}
"""Molmo2 pools features of two layers, each of width 6, by attention. Qwen3.5 concatenates four
patches of two frames.
"""


@pytest.mark.parametrize("family", CONNECTORS)
def test_tensors_of_a_tower_are_those_of_a_list_by_hand(family: str) -> None:
    found = made(with_values(RunConfig(), {**SIZES, **TOWER, "vision_family": family}))
    seen = {name: row for name, row in found.items() if name.startswith(("vision.", "connector."))}
    assert seen == described(CONNECTORS[family] + block_of_a_tower(0) + block_of_a_tower(1))


@pytest.mark.parametrize("name", LAYERS)
def test_tensors_of_a_layer_are_those_of_a_list_by_hand(name: str) -> None:
    values, rows = LAYERS[name]
    ends = ENDS.replace("ones", "zeros") if "apply_layernorm_1p" in values else ENDS
    assert made(with_values(RunConfig(), {**SIZES, **values})) == described(ends + rows)


def test_tables_of_the_vocabulary_are_those_of_a_list_by_hand() -> None:
    values = {**SIZES, "untie_embeddings_and_output_weights": True, "additional_vocab_size": 3}
    rows = "head.weight 10 8 rows normal 0.5 table\n" + ENDS.replace("10 8", "13 8") + DENSE
    assert made(with_values(RunConfig(), values)) == described(rows)


def test_low_rank_pairs_are_those_of_a_list_by_hand() -> None:
    values = {**SIZES, **ROUTER, "num_experts": 2, "lora_rank": 2, "lora_targets": "v,output,down"}
    found = made(with_values(RunConfig(), values))
    assert {name: row for name, row in found.items() if "lora" in name} == described(PAIRS)


def test_norms_after_a_part_replace_those_before_it() -> None:
    found = made(with_values(RunConfig(), {**SIZES, "norm_position": "after"}))
    assert found == described(ENDS + DENSE)


def test_outputs_of_deep_models_are_drawn_smaller() -> None:
    """The std of outputs is divided by sqrt(2 x layers) in every layer."""
    found = made(with_values(RunConfig(), {**SIZES, "num_layers": 8}))
    smaller = {name for name, row in found.items() if row[3] == 0.125}
    names = ("attention.output.weight", "mlp.down.weight")
    assert smaller == {*names} | {
        f"layers.{layer}.{name}" for layer in range(1, 8) for name in names
    }


MANY = 4096


def drawn(init: str, std: float) -> torch.Tensor:
    """Return the sorted initial values of a parameter with this distribution."""
    options = LinearOptions(single_axis("tp"), False, torch.float64, torch.device("cpu"))
    parameter = row_parameter("by_hand", [Tensor("x", (MANY,), init=init, std=std)], options)
    initialise([unsharded(parameter)], torch.float64, seed=1)
    return parameter.detach().sort().values


QUANTILES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": torch.special.ndtri,
    "uniform": lambda p: (2 * p - 1) * 3**0.5,  # standard deviation 1
    "log_rate": lambda p: torch.log(0.01 + (16 - 0.01) * p),  # A is uniform up to 16, without 0
    # steps are log-uniform from 0.001 to 0.1, and the bias is the inverse softplus of a step
    "step": lambda p: torch.log(torch.expm1(0.001 * 100**p)),
}
"""Quantile functions: a fraction p of the numbers is below the value."""


@pytest.mark.parametrize("name", QUANTILES)
def test_numbers_are_drawn_from_the_distribution_that_is_written_by_hand(name: str) -> None:
    """Kolmogorov-Smirnov test: the largest distance of the two cumulative distributions exceeds
    1.95 / sqrt(n) only once in 1,000 draws.
    """
    values = drawn(name, 1.0)
    p = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    below = torch.searchsorted(values, QUANTILES[name](p)) / MANY
    assert (below - p).abs().max() < 1.95 / MANY**0.5
    torch.testing.assert_close(drawn(name, 0.5), values * 0.5)


def test_every_draw_has_a_distribution_by_hand() -> None:
    assert QUANTILES.keys() == DRAWS.keys()
    assert (drawn("ones", 0.0) == 1).all() and (drawn("zeros", 0.0) == 0).all()
