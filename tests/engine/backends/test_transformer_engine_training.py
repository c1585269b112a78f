"""Training steps on Transformer Engine's real modules over gloo, compared with the native backend.

Products, norms, SwiGLU and attention are reference math (engine_layers.py). Tensor and sequence
parallelism, fused gradients, recomputation and the choice of attention are the real code. In
float64 any difference is a mistake; the tolerance 1e-10 is some thousand roundings of the largest
parameters after two updates. The backward runs in a separate thread, like autograd's on CUDA.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megacp.engine.backends import transformer_engine as backend_file
from megacp.engine.backends.native import NativeBackend, NormSpec
from megacp.engine.backends.transformer_engine import TransformerEngineBackend
from megacp.engine.config.run import RunConfig
from megacp.engine.config.training import RECOMPUTE_MODES, TrainingConfig
from megacp.engine.data_parallel.parameter import spec_of
from megacp.engine.layers.table import Linear
from megacp.engine.models import build
from megacp.engine.models.block import Block
from megacp.engine.optim.rules import AdamW
from megacp.engine.step.step import ParallelModel
from megacp.engine.tensor_parallel.linear import LinearSpec
from megacp.training.data.mock import MockRules, mock_batch
from tests.engine.backends.engine_layers import emulated_layers
from tests.engine.backends.engine_stub import needs_engine
from tests.ranks import grid, run_ranks
from tests.reference.sharded_toy import group_of
from tests.reference.training import GEMMA
from tests.reference.training import config_of as config_of_values
from tests.reference.vision import TINY, document_with_images

pytestmark = needs_engine

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_query_groups": 2,
    "vocab_size": 64,
    "seq_length": 64,
    "qk_layernorm": "head",
    "add_qkv_bias": True,
    "cp_layout": "zigzag_document",
}


def config_of(shape: dict[str, int], settings: dict[str, Any]) -> RunConfig:
    return config_of_values({**SIZES, **settings}, shape)


@dataclass
class Trained:
    """Losses of two steps, and the state after them."""

    losses: list[float]
    values: list[np.ndarray]
    specs: list[Any]
    warnings: list[str]
    layers: Counter[str]
    """Number of Transformer Engine modules per block, by class.

    The counts over all blocks are divided by the number of blocks.
    """
    attended: int
    """Number of calls of its attention."""


def step_batches(step: int, mask: str) -> list[Any]:
    """Return the microbatches of a step; those with images are the same in every step."""
    if mask == "images":
        return [document_with_images(), document_with_images((1, 1, 1, 1), (3, 3, 3, 3), 9, seed=2)]
    rules = MockRules(SIZES["vocab_size"], SIZES["seq_length"], mask=mask, ragged=True)
    return [mock_batch([2 * step + i], rules) for i in (0, 1)]


def in_a_thread(function: Any) -> Any:
    """Run the function in a thread without the contexts of its caller."""

    def call(*args: Any, **options: Any) -> None:
        failed: list[BaseException] = []

        def run() -> None:
            try:
                function(*args, **options)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]

    return call


def train(config: RunConfig, here: Any, mask: str) -> Trained:
    """Train two steps of two microbatches, then compute the loss without gradients."""
    model = ParallelModel(config, here)
    losses, warnings, attended = [], [], []
    if packed := getattr(model.backend, "packed", None):
        packed.attention.register_forward_hook(lambda *given: attended.append(1))
    for step in (1, 2):
        batches = step_batches(step, mask)
        losses.append(
            model.train(batches, step, sum(batch.weight_sum for batch in batches), 0).loss
        )
        warnings += model.backend.warnings()
    losses.append(model.evaluate(batches, sum(batch.weight_sum for batch in batches)))
    parameters = [p for chunk in model.chunks for p in chunk.parameters()]
    modules = [m for chunk in model.chunks for block in chunk.blocks for m in block.modules()]
    engine = Counter(
        type(m).__name__ for m in modules if type(m).__module__.startswith("transformer_engine")
    )
    layers = Counter({name: n // SIZES["num_layers"] for name, n in engine.items()})
    values = [p.detach().numpy().copy() for p in parameters]
    return Trained(
        losses, values, [spec_of(p) for p in parameters], warnings, layers, len(attended)
    )


def differences(
    rank: int, world: int, shape: dict[str, int], settings: dict[str, Any], mask: str
) -> tuple[float, bool, Trained]:
    """Compare with the native backend.

    Return the largest difference of losses and parameters, whether all specs agree, and the run on
    Transformer Engine.
    """
    config, here = config_of(shape, settings), grid(**shape)
    expected = train(config, here, mask)
    with emulated_layers(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend_file, "fused_adam", None)  # the real class has no float64
        patch.setattr(build, "select_backend", TransformerEngineBackend_for)
        patch.setattr(torch.autograd, "backward", in_a_thread(torch.autograd.backward))
        found = train(config, here, mask)
    apart = [abs(a - b).max() for a, b in zip(found.values, expected.values, strict=True)]
    apart += [abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True)]
    unfused = [
        [dataclasses.replace(spec, fused_gradient=False) for spec in run.specs]
        for run in (found, expected)
    ]
    assert not expected.layers and not np.isnan(apart).any()
    return float(max(apart)), unfused[0] == unfused[1], found


def TransformerEngineBackend_for(config: RunConfig, here: Any) -> TransformerEngineBackend:
    """Replace `select_backend`."""
    return TransformerEngineBackend(here, config)


SELECTIVE, FULL = {"recompute_granularity": "selective"}, {"recompute_granularity": "full"}
BIASES = {"add_attention_output_bias": True, "add_mlp_bias": True}
REPLICATED = {**BIASES, "sequence_parallel": False}
TILED = {"mlp_chunk_tokens": 24}
PAIRS = {"lora_rank": 3, "lora_alpha": 8.0, "lora_targets": "all"}
CASES = [
    ({}, SELECTIVE, "packed"),
    ({}, {**BIASES, **FULL}, "mixed"),
    ({"tp": 2}, {"add_qkv_bias": False}, "packed"),
    ({"tp": 2}, {**BIASES, **SELECTIVE}, "packed"),
    ({"tp": 2}, {**REPLICATED, **FULL}, "packed"),
    ({"cp": 2}, {"cp_comm_type": "all_gather"}, "packed"),
    ({"cp": 3}, FULL, "packed"),
    ({}, {**TINY, "freeze": "vision"}, "images"),
    ({"tp": 2}, {**TINY, **BIASES, **FULL, "freeze": "text"}, "images"),
    ({}, {**BIASES, **TILED, "activation_offload": 0.5}, "packed"),
    ({"tp": 2}, {**BIASES, **FULL, **TILED, "activation_offload": 1.0}, "packed"),
    ({"tp": 2}, {**REPLICATED, **SELECTIVE, **TILED}, "packed"),
    ({"tp": 2}, {**TINY, **BIASES, **TILED, "freeze": "text"}, "images"),
    ({"tp": 2}, {**BIASES, **PAIRS}, "packed"),
    ({"tp": 2}, {**REPLICATED, **TILED, **PAIRS, "lora_targets": "q,down"}, "packed"),
]
FUSED = Counter({"LayerNormLinear": 1, "LayerNormMLP": 1, "Linear": 1, "RMSNorm": 2})
"""Modules of a block with q/k norms; the linear is the attention's output projection."""
APART = Counter({"RMSNorm": 4, "Linear": 4})


@pytest.mark.slow
@pytest.mark.parametrize("shape, settings, mask", CASES)
def test_training_on_transformer_engine_is_training_on_native(
    shape: dict[str, int], settings: dict[str, Any], mask: str
) -> None:
    world = int(np.prod([*shape.values()], dtype=int))
    selective = settings.get("recompute_granularity") == "selective" or "lora_rank" in settings
    for worst, same, found in run_ranks(differences, world, shape, settings, mask):
        assert worst < 1e-10
        assert same
        assert found.layers == (APART if selective else FUSED)
        assert len(
            [line for line in found.warnings if "Transformer Engine's fused attention" in line]
        ) == (mask == "packed")
        assert len([line for line in found.warnings if "not fused" in line]) == selective
        rows = (
            2 * 2 + 2
            # one call per block in the steps and in the final loss; recomputation makes no second call
        )
        assert found.attended == SIZES["num_layers"] * rows * (mask == "packed")


@pytest.mark.slow
@pytest.mark.parametrize("more", [FULL, {**REPLICATED, **TILED}], ids=str)
def test_norms_after_a_product_are_the_engines_and_norms_over_all_heads_ours(
    more: dict[str, Any],
) -> None:
    settings = {"norm_position": "after", "qk_layernorm": "all_heads", **more}
    for worst, same, found in run_ranks(differences, 2, {"tp": 2}, settings, "packed"):
        assert worst < 1e-10 and same
        assert found.layers == Counter({"RMSNorm": 2, "Linear": 4})
        assert (
            len(
                [
                    line
                    for line in found.warnings
                    if "not fused" in line or "native, because Transformer" in line
                ]
            )
            == 2
        )


@pytest.mark.slow
def test_gemma_is_the_engines_layers_with_its_norms_behind_them() -> None:
    for worst, same, found in run_ranks(
        differences, 2, {"tp": 2}, {**GEMMA, "kv_channels": 8}, "packed"
    ):
        assert worst < 1e-10 and same
        assert found.layers == Counter(
            {"LayerNormLinear": 1, "LayerNormMLP": 1, "Linear": 1, "RMSNorm": 4}
        )


def mlp_specs(hidden: int, ffn: int, bias: bool) -> tuple[NormSpec, LinearSpec, LinearSpec]:
    """Return the specs of the norm, of gate and up, and of down."""
    gate_up = LinearSpec("mlp", dict.fromkeys(("gate", "up"), Linear(hidden, ffn, 0.02, bias)))
    down = LinearSpec("mlp", {"down": Linear(ffn, hidden, 0.02, bias, "columns")})
    return NormSpec("norm", hidden, 1e-5), gate_up, down


def from_the_export(rank: int, world: int) -> float:
    """Return the largest difference between megacp's MLP and the package's export of
    `LayerNormMLP`.
    """
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(5, 32, generator=generator, dtype=torch.float64)
    config = config_of({}, {"add_mlp_bias": True})
    arguments = mlp_specs(32, 48, True)
    here = grid()
    native = NativeBackend(here, config)
    ours = native.norm_mlp(*arguments)
    with emulated_layers(), torch.no_grad():
        theirs = TransformerEngineBackend(here, config).norm_mlp(*arguments)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.copy_(torch.randn(mine.shape, generator=generator, dtype=torch.float64))
            other.copy_(mine)
        expected = ours(x, lambda function, *inputs: function(*inputs))
        run = theirs(x, None)  # the export needs a forward first
        exported = theirs.layer.onnx_forward(x, False)
    assert (run - expected).abs().max() < 1e-10
    return float((exported - expected).abs().max() / expected.abs().max())


def test_gate_and_up_stand_where_the_package_itself_says_that_its_swiglu_reads_them() -> None:
    """The kernel is megacp's replacement, and the export for inference is the package's.

    The export computes norm and SwiGLU in float32: a few roundings of 2^-24, averaged by a product
    of 48 terms.
    """
    (worst,) = run_ranks(from_the_export, 1)
    assert worst < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("comm_type", ["p2p", "a2a"])
def test_training_over_tp_and_cp_is_training_on_native(comm_type: str) -> None:
    settings = {"cp_comm_type": comm_type, "num_attention_heads": 8, "num_query_groups": 4}
    for worst, same, _ in run_ranks(differences, 4, {"tp": 2, "cp": 2}, settings, "packed"):
        assert worst < 1e-10 and same


def eight_bits(rank: int, world: int) -> dict[str, Any]:
    """Return the `--fp8` contexts in which the linears of decoder and towers run."""
    found: dict[str, Any] = {}
    config = config_of({"tp": world}, {**TINY, "fp8": "delayed"})
    here = grid(tp=world)
    with emulated_layers(), pytest.MonkeyPatch.context() as patch:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

        patch.setattr(State, "reduce_and_update_fp8_tensors", lambda **options: None)
        backend = TransformerEngineBackend(here, config)
        seen: list[bool] = []
        tower = backend.tower("vision").column_linear(
            LinearSpec("vision.x", {"up": Linear(16, 16, 0.02)})
        )
        found["fused"] = [
            isinstance(each.norm_mlp(*mlp_specs(16, 16, False)), backend_file.Fused)
            for each in (backend.tower("vision"), backend)
        ]
        decoder = backend.column_linear(LinearSpec("layers.0.x", {"up": Linear(16, 16, 0.02)}))
        patch.setattr(
            torch.nn.Linear,
            "forward",
            lambda self, x: seen.append(State.is_fp8_enabled()) or x,
            raising=True,
        )
        tower.layer.linear = torch.nn.Linear(1, 1)
        decoder.linear = torch.nn.Linear(1, 1)
        with backend.precision():
            tower(torch.ones(1, 1))
            decoder(torch.ones(1, 1))
            found["recipe"], found["group"] = str(State.get_fp8_recipe()), State.get_fp8_group()
        found["group"] = found["group"] is here.over("tp", "cp").group
        found["seen"], found["after"] = seen, State.is_fp8_enabled()
        found["tokens"] = backend.token_multiple
        found["alone"] = backend_file.fp8_recipe("delayed", False).reduce_amax
    return found


def test_the_decoder_runs_in_eight_bits_and_the_towers_do_not() -> None:
    for found in run_ranks(eight_bits, 2):
        assert found["seen"] == found["fused"] == [False, True] and not found["after"]
        assert (
            found["group"]
            and "reduce_amax=True" in found["recipe"]
            and "DelayedScaling" in found["recipe"]
        )
        assert found["tokens"] == 16 and found["alone"] is False


def recomputed_in_eight_bits(rank: int, world: int) -> list[tuple[bool, bool, str]]:
    """Record each forward of a block: whether it runs in this thread and with FP8, the recipe, and
    the final state.
    """
    config = config_of({}, {**FULL, "fp8": "current"})
    seen: list[tuple[bool, bool, str]] = []
    with emulated_layers():
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

        def look() -> None:
            mine = threading.current_thread() is threading.main_thread()
            seen.append((mine, State.is_fp8_enabled(), type(State.get_fp8_recipe()).__name__))

        class Spy(torch.nn.Module):
            def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
                look()
                return x.square()

        backend = TransformerEngineBackend(grid(), config)
        block = Block(0, config.model, backend, RECOMPUTE_MODES["full"])
        block.attention = Spy()
        block.mlp = torch.nn.Identity()
        block.mlp.forward = lambda x, save: x
        x = torch.ones(2, SIZES["hidden_size"], dtype=torch.float64, requires_grad=True)
        inputs: Any = SimpleNamespace(plan=None, rotary=((), ()), token_names=None, key=1)
        with backend.precision():
            out = block(x, inputs)
        in_a_thread(torch.autograd.backward)([out.sum()])
        seen.append((State.is_fp8_enabled(), bool((x.grad == 6).all()), ""))
    return seen


def test_a_block_is_computed_again_in_eight_bits_in_the_thread_of_backward() -> None:
    (seen,) = run_ranks(recomputed_in_eight_bits, 1)
    recipe = "Float8CurrentScaling"
    assert seen == [(True, True, recipe), (False, True, recipe), (False, True, "")]


def adam_difference(rank: int, world: int) -> float:
    """Return the largest difference of FusedAdam's slices and moments from torch's.

    There are three updates, with a resume after the first.
    """
    generator = torch.Generator().manual_seed(3)
    hows = [(40, 0.1, 1.0), (7, 0.0, 0.5), (9, 0.1, 0.5)]
    start = [torch.randn(n, generator=generator) for n, _, _ in hows]
    gradients = [[torch.randn(n, generator=generator) for n, _, _ in hows] for _ in range(3)]

    def updated(engine: Any) -> list[torch.Tensor]:
        groups = [group_of(x.clone(), *how) for x, (_, *how) in zip(start, hows, strict=True)]
        for updates, of_update in enumerate(gradients):
            if updates < 2:  # a fresh start, and a start from the state after the first update
                groups = copy.deepcopy(groups)
                rule = AdamW(groups, TrainingConfig(), engine)
                rule.set_updates(updates)
            for group, gradient in zip(groups, of_update, strict=True):
                group.slices[0].grad = gradient.clone()
            rule.update(1e-2, 1.0)
        return [x for group in groups for x in (*group.slices, *group.state[0].values())]

    expected = updated(None)
    with emulated_layers():
        found = updated(backend_file.fused_adam)
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


def test_fused_adam_updates_slices_as_torch_does_and_resumes() -> None:
    (worst,) = run_ranks(adam_difference, 1)
    assert worst < 1e-6  # float32: 2^-24 relative, over three updates of values up to 3
