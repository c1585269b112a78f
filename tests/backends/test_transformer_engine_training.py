"""Whole training steps on Transformer Engine's real modules, over gloo, against the native backend.

Their products, norms and attention are reference math (engine_layers.py); tensor and sequence parallelism, gradients
fused into the buckets, recomputation and the choice of attention are the real code. float64, so a difference is a
mistake: 1e-10 is some thousand roundings of the largest parameters after two updates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megacp.backends import transformer_engine as backend_file
from megacp.backends.native import NativeBackend
from megacp.backends.support import AttentionCase
from megacp.backends.transformer_engine import TransformerEngineBackend
from megacp.config.run import RunConfig, with_values
from megacp.data.mock import MockRules, mock_batch
from megacp.distributed.parameter import spec_of
from megacp.models import build
from megacp.optim.adamw import AdamWSettings, FlatAdamW, SliceRule
from megacp.training.step import Trainee
from tests.backends.engine_layers import emulated_layers
from tests.backends.engine_stub import needs_engine
from tests.ranks import grid, run_ranks
from tests.reference.vision import TINY, document_with_images

pytestmark = needs_engine

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 64,
    "make_vocab_size_divisible_by": 8,
    "seq_length": 64,
    "qk_layernorm": True,
    "add_qkv_bias": True,
    "dtype": "float64",
    "cp_layout": "zigzag_document",
}


def config_of(shape: dict[str, int], settings: dict[str, Any]) -> RunConfig:
    sizes = {"tp": "tensor_model_parallel_size", "cp": "context_parallel_size", "pp": "pipeline_model_parallel_size"}
    return with_values(RunConfig(), {**SIZES, **{sizes[k]: n for k, n in shape.items() if k in sizes}, **settings})


def train(config: RunConfig, here: Any, mask: str) -> tuple[list[float], list[np.ndarray], list[str], list[Any]]:
    """Losses of two steps, the parameters, the news and the specs."""
    trainee = Trainee(config, here)
    if mask == "images":
        batches = [document_with_images(), document_with_images((1, 1, 1, 1), (3, 3, 3, 3), 9, seed=2)]
        denominator = sum(batch.weight_sum for batch in batches)
        found = [trainee.train(batches, step, denominator).loss for step in (1, 2)]
        parameters = [p for chunk in trainee.chunks for p in chunk.parameters()]
        values = [p.detach().numpy().copy() for p in parameters]
        return found, values, trainee.backend.news(), [spec_of(p) for p in parameters]
    rules = MockRules(SIZES["vocab_size"], SIZES["seq_length"], mask=mask, ragged=True)
    losses, news = [], []
    for step in (1, 2):
        batches = [mock_batch([2 * step + i], rules) for i in (0, 1)]
        losses.append(trainee.train(batches, step, sum(batch.weight_sum for batch in batches)).loss)
        news += trainee.backend.news()
    parameters = [p for chunk in trainee.chunks for p in chunk.parameters()]
    return losses, [p.detach().numpy().copy() for p in parameters], news, [spec_of(p) for p in parameters]


def differences(
    rank: int, world: int, shape: dict[str, int], settings: dict[str, Any], mask: str
) -> tuple[float, bool, list[str]]:
    """Largest difference of losses and parameters from native; whether all specs agree; the news."""
    config, here = config_of(shape, settings), grid(**shape)
    expected = train(config, here, mask)
    with emulated_layers(), pytest.MonkeyPatch.context() as patch:
        case = AttentionCase(config.parallel.cp_comm_type, shape.get("cp", 1))
        patch.setattr(backend_file, "attention_case", lambda config: case)  # float64 stands for a half
        patch.setattr(TransformerEngineBackend, "adamw", NativeBackend.adamw)  # FusedAdam has no float64
        patch.setattr(build, "select_backend", TransformerEngineBackend_for)
        found = train(config, here, mask)
    pairs = list(zip(found[1], expected[1], strict=True))
    worst = max([abs(a - b).max() for a, b in pairs] + [abs(a - b) for a, b in zip(found[0], expected[0], strict=True)])
    same = [s.pieces for s in found[3]] == [s.pieces for s in expected[3]] and all(
        (a.partial_over, a.counted, a.std, a.weight_decay) == (b.partial_over, b.counted, b.std, b.weight_decay)
        for a, b in zip(found[3], expected[3], strict=True)
    )
    return float(worst), same, found[2]


def TransformerEngineBackend_for(config: RunConfig, here: Any, watch: Any = None) -> TransformerEngineBackend:
    """In the place of `select_backend`."""
    return TransformerEngineBackend(here, config, watch)


CASES = [
    ({}, {}, "packed"),
    ({}, {"recompute_granularity": "selective"}, "packed"),
    ({}, {"recompute_granularity": "full"}, "mixed"),
    ({"tp": 2}, {"add_attention_output_bias": True, "add_mlp_bias": True}, "packed"),
    ({"tp": 2}, {"sequence_parallel": False, "add_attention_output_bias": True}, "packed"),
    ({"cp": 2}, {"cp_comm_type": "all_gather"}, "packed"),
    ({"tp": 2}, TINY, "images"),
    ({}, {**TINY, "freeze_vision": True}, "images"),
]


@pytest.mark.parametrize("shape, settings, mask", CASES)
def test_training_on_transformer_engine_is_training_on_native(
    shape: dict[str, int], settings: dict[str, Any], mask: str
) -> None:
    """Would catch a gradient counted twice or never, a bias or norm not reduced over tp, and specs that differ."""
    world = int(np.prod([*shape.values()], dtype=int))
    for worst, same, news in run_ranks(differences, world, shape, settings, mask):
        assert worst < 1e-10
        assert same
        assert len([line for line in news if "Transformer Engine's fused one" in line]) == (mask == "packed")


@pytest.mark.slow
@pytest.mark.parametrize("comm_type", ["p2p", "a2a"])
def test_training_over_tp_and_cp_is_training_on_native(comm_type: str) -> None:
    settings = {"cp_comm_type": comm_type, "num_attention_heads": 8, "num_query_groups": 4}
    for worst, same, _ in run_ranks(differences, 4, {"tp": 2, "cp": 2}, settings, "packed"):
        assert worst < 1e-10 and same


def eight_bits(rank: int, world: int) -> dict[str, Any]:
    """What the contexts of `--fp8` say where the decoder's linears and the towers' run."""
    found: dict[str, Any] = {}
    config = config_of({"tp": world}, {**TINY, "fp8": "delayed"})
    here = grid(tp=world)
    with emulated_layers(), pytest.MonkeyPatch.context() as patch:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

        patch.setattr(State, "reduce_and_update_fp8_tensors", lambda **options: None)
        backend = TransformerEngineBackend(here, config)
        seen: list[bool] = []
        tower = backend.tower("vision").column_linear("vision.x", [("up", 16)], 16, bias=False, std=0.02)
        decoder = backend.column_linear("layers.0.x", [("up", 16)], 16, bias=False, std=0.02)
        patch.setattr(
            torch.nn.Linear, "forward", lambda self, x: seen.append(State.is_fp8_enabled()) or x, raising=True
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
    """Would catch crops of 729 patches in an 8-bit product, and largest values that the wrong ranks share."""
    for found in run_ranks(eight_bits, 2):
        assert found["seen"] == [False, True] and not found["after"]
        assert found["group"] and "reduce_amax=True" in found["recipe"] and "DelayedScaling" in found["recipe"]
        assert found["tokens"] == 16 and found["alone"] is False


def adam_difference(rank: int, world: int) -> float:
    """Largest difference of FusedAdam's slices and moments from torch's, over three updates resumed after the first."""
    generator = torch.Generator().manual_seed(3)
    start = [torch.randn(n, generator=generator) for n in (40, 7)]
    gradients = [[torch.randn(n, generator=generator) for n in (40, 7)] for _ in range(3)]
    rules = [SliceRule(True), SliceRule(False, 0.5)]

    def updated(engine: Any) -> list[torch.Tensor]:
        adam = FlatAdamW([x.clone() for x in start], rules, AdamWSettings(), engine)
        adam.update([g.clone() for g in gradients[0]], 1e-2)
        resumed = FlatAdamW([x.clone() for x in adam.slices], rules, AdamWSettings(), engine)
        for mine, theirs in zip(resumed.exp_avg + resumed.exp_avg_sq, adam.exp_avg + adam.exp_avg_sq, strict=True):
            mine.copy_(theirs)
        resumed.set_updates(1)
        for part in gradients[1:]:
            resumed.update([g.clone() for g in part], 1e-2)
        return [*resumed.slices, *resumed.exp_avg, *resumed.exp_avg_sq]

    expected = updated(lambda *args: NativeBackend.adamw(None, *args))  # type: ignore[arg-type]
    with emulated_layers():
        found = updated(lambda *args: TransformerEngineBackend.adamw(None, *args))  # type: ignore[arg-type]
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


def test_fused_adam_updates_slices_as_torch_does_and_resumes() -> None:
    """Would catch L2 decay, missing bias correction, and a count of updates that a resumed run loses."""
    (worst,) = run_ranks(adam_difference, 1)
    assert worst < 1e-6  # float32: 2^-24 relative, over three updates of values up to 3
