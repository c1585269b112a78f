"""Loss, logits and gradients of the library's models in float64, on one process and on ranks.

The library computes norms, softmax and rotary angles in float32 whatever the model's dtype. Here its float32 is
float64, so the two differ by the order of sums alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megacp.core.config.run import RunConfig, with_values
from megacp.core.data.batch import PackedBatch
from megacp.core.ops.rotary import RotaryScaling, inverse_frequencies
from megacp.core.training.step import ParallelModel
from megacp.huggingface.convert.families import of_config
from megacp.huggingface.convert.tensors import Mapped, whole
from tests.huggingface.convert.models import MODELS, Tensors
from tests.ranks import grid, run_ranks
from tests.reference.precision import float32_is_float64
from tests.reference.sharding import Pieces, assemble, fill
from tests.reference.training import AXIS_FLAGS, pieces_of_slices

pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")

TOKENS = 40
NAMES = [name for name in MODELS if "molmo2" not in name]


def row() -> PackedBatch:
    """One document: the library has no mask of packs."""
    rng, leave = np.random.default_rng(0), np.full(TOKENS, TOKENS, np.int32)
    tokens, labels = rng.integers(0, 97, TOKENS), rng.integers(0, 97, TOKENS)
    return PackedBatch(tokens, labels, np.ones(TOKENS, np.float32), np.arange(TOKENS), leave, 0 * leave, (0,))


def library_of(name: str, patch: pytest.MonkeyPatch) -> tuple[dict[str, Any], float, Any, Any, np.ndarray]:
    """Our values, its loss, its weights and gradients by our names, its logits."""
    torch.manual_seed(0)
    with float32_is_float64(patch):
        model = MODELS[name]().to(torch.float64)
        model.config._attn_implementation = "eager"
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in key and key.endswith("weight") else 0.0, 0.2)
        logits = model.eval()(torch.from_numpy(row().tokens)[None]).logits[0]
        loss = F.cross_entropy(logits, torch.from_numpy(row().labels))
        loss.backward()
    content = model.config.to_dict()
    architecture = of_config(content)
    values = architecture.values(content)
    links = architecture.links(values)
    named = dict(model.named_parameters())  # a tied head is named once
    weights, gradients = (
        {ours.name: whole(mapped, ours.name).clone() for link in links for ours in link.ours}
        for mapped in (
            Mapped(Tensors({k: p.detach() for k, p in named.items()}), links, to_ours=True),
            Mapped(Tensors({k: p.grad for k, p in named.items() if p.grad is not None}), links, to_ours=True),
        )
    )
    return values, loss.item(), weights, gradients, logits.detach().numpy()


def ours(
    rank: int, world_size: int, shape: dict[str, int], values: dict[str, Any], weights: dict[str, torch.Tensor]
) -> tuple[float, Pieces, np.ndarray | None]:
    axes = {flag: shape.get(axis, 1) for axis, flag in AXIS_FLAGS.items()}
    config = with_values(
        RunConfig(), {**values, **axes, "seq_length": TOKENS, "dtype": "float64", "global_batch_size": 1}
    )
    model = ParallelModel(config, grid(**shape))
    for chunk in model.chunks:
        fill(chunk, weights)
    loss = model.gradients([row()], 1, float(TOKENS))
    found = pieces_of_slices(model.parameters.gradient_slices())
    logits = None
    if world_size == 1:
        with torch.no_grad():
            logits = model.chunks[0].row_logits(model.shard(row(), 1)).numpy()
    return loss, found, logits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [{}, {"tp": 2}, {"pp": 2}, {"cp": 2}], ids=str)
def test_loss_logits_and_gradients_are_those_of_the_library(
    name: str, shape: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    values, loss, weights, gradients, logits = library_of(name, monkeypatch)
    results = run_ranks(ours, 2, shape, values, weights) if shape else [ours(0, 1, shape, values, weights)]
    for found, _, _ in results:
        assert abs(found - loss) <= 1e-12 * loss
    if not shape:
        assert results[0][2] is not None and np.abs(results[0][2] - logits).max() <= 1e-12 * np.abs(logits).max()
    summed = assemble([pieces for _, pieces, _ in results])
    assert summed.keys() == gradients.keys()
    floor = 1e-3 * max(float(expected.abs().max()) for expected in gradients.values())
    for key, expected in gradients.items():  # a bias of keys without rotary embedding has no gradient but rounding
        scale = max(float(expected.abs().max()), floor)
        assert np.abs(summed[key] - expected.numpy()).max() <= 1e-10 * scale, key


@pytest.mark.parametrize("more", [{}, {"factor": 1.0}], ids=str)
def test_yarn_frequencies_are_the_librarys_at_real_sizes(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 128 and 32,768 positions: ends of the blend that are rounded the wrong way show here."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768, **more}
    theirs = transformers.Qwen3Config(head_dim=128, rope_parameters=rope)
    with float32_is_float64(monkeypatch):
        expected, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    model = with_values(RunConfig(), of_config(theirs.to_dict()).values(theirs.to_dict())).model
    scaling = RotaryScaling(model.rope_scaling, model.rope_scaling_factor, model.rope_original_max_positions)
    found = inverse_frequencies(model.head_dim, model.rotary_base, scaling)
    assert scaling.attention_factor == factor
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
