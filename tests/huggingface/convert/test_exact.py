"""Loss, logits and gradients against the library's models in float64, on one process and on several
ranks.

The library computes norms, softmax and rotary angles in float32 for any dtype of the model. These
tests replace its float32 by float64, so the two implementations differ only by the order of sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megacp.attention.ops.rotary import RotaryScaling, inverse_frequencies
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.rows.batch import PackedBatch, VisionInputs
from megacp.engine.rows.image_shards import REPLICATE
from megacp.engine.step.step import ParallelModel
from megacp.huggingface.convert.families import of_config
from megacp.huggingface.convert.tensors import WIDE, Mapped, whole
from tests.huggingface.convert.models import MODELS, Tensors, correct
from tests.ranks import grid, run_ranks
from tests.reference.precision import float32_is_float64
from tests.reference.sharding import Pieces, assemble, fill
from tests.reference.training import AXIS_FLAGS, pieces_of_slices

pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")

TOKENS = 40
NAMES = [name for name in MODELS if "molmo2" not in name]
# Frames, rows and columns of the patches of three images, with 6, 4 and 4 tokens.
GRIDS = np.array([[1, 4, 6], [2, 2, 4], [1, 8, 2]])


def row() -> PackedBatch:
    """Return a row of one document, because the library has no mask for packs."""
    rng, leave = np.random.default_rng(0), np.full(TOKENS, TOKENS, np.int32)
    tokens, labels = rng.integers(0, 97, TOKENS), rng.integers(0, 97, TOKENS)
    return PackedBatch(
        tokens, labels, np.ones(TOKENS, np.float32), np.arange(TOKENS), leave, 0 * leave, (0,)
    )


def row_with_images(model: Any) -> tuple[PackedBatch, dict[str, Any]]:
    """Return a row with images between texts, and the library's inputs for them."""
    rng, c = np.random.default_rng(3), model.config
    tokens, kinds = [], []
    for frames, rows, columns in GRIDS.tolist():
        per_frame = rows * columns // 4
        parts = [
            rng.integers(0, 97, 3),
            *[[c.vision_start_token_id, *[c.image_token_id] * per_frame]] * frames,
            [5],
        ]
        tokens += [int(x) for part in parts for x in part]
    tokens += rng.integers(0, 97, 40 - len(tokens)).tolist()
    ids = torch.tensor(tokens)[None]
    kinds = (ids == c.image_token_id).int()
    single = torch.tensor([[1, h, w] for t, h, w in GRIDS.tolist() for _ in range(t)])
    positions = (
        model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=single)[0][:, 0]
        .t()
        .numpy()
    )
    patches, leave = rng.standard_normal((56, 96)), np.full(TOKENS, TOKENS, np.int32)
    cum = np.cumsum(single.prod(1).numpy())
    vision = VisionInputs(
        *(cum, cum // 4, np.flatnonzero(kinds[0].numpy()), None, patches[:, None]),
        *(np.arange(56).reshape(-1, 4), REPLICATE),
        grids=single.numpy()[:, 1:] // 2,
    )
    labels, more = (
        rng.integers(0, 97, TOKENS),
        {"image_grid_thw": single, "mm_token_type_ids": kinds},
    )
    fields = (
        ids[0].numpy(),
        labels,
        np.ones(TOKENS, np.float32),
        np.arange(TOKENS),
        leave,
        0 * leave,
    )
    return PackedBatch(*fields, (0,), vision, positions), {
        "pixel_values": torch.from_numpy(patches),
        **more,
    }


def batch_of(name: str, model: Any = None) -> tuple[PackedBatch, dict[str, Any]]:
    """Return the row of a model, and the library's inputs in addition to its tokens."""
    if "images" not in name:
        return row(), {}
    return row_with_images(model)


def library_of(
    name: str, patch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], float, Any, Any, np.ndarray, PackedBatch]:
    """Return our flags, and the library's loss, weights, gradients (by our names) and logits."""
    torch.manual_seed(0)
    with float32_is_float64(patch):
        model = MODELS[name]().to(torch.float64)
        model.config._attn_implementation = model.config._experts_implementation = "eager"
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in key and key.endswith("weight") else 0.0, 0.2)
            correct(model)
        batch, images = batch_of(name, model)
        logits = model.eval()(torch.from_numpy(batch.tokens)[None], **images).logits[0]
        loss = F.cross_entropy(logits, torch.from_numpy(batch.labels))
        loss.backward()
    content = model.config.to_dict()
    architecture = of_config(content)
    values = architecture.values(content)
    named = dict(model.named_parameters())  # a tied head is named once
    beside = {key: x for key, x in model.named_buffers() if key.endswith(WIDE)}
    links = architecture.links(values, architecture.layout_of(Tensors(named).infos))
    trained = [link for link in links if not link.theirs[0].name.endswith(WIDE)]
    weights, gradients = (
        {ours.name: whole(mapped, ours.name).clone() for link in chosen for ours in link.ours}
        for chosen, mapped in (
            (chosen, Mapped(architecture.opened(Tensors(tensors)), chosen, to_ours=True))
            for chosen, tensors in (
                (links, {k: p.detach() for k, p in named.items()} | beside),
                (trained, {k: p.grad for k, p in named.items() if p.grad is not None}),
            )
        )
    )
    return values, loss.item(), weights, gradients, logits.detach().numpy(), batch


def ours(
    rank: int,
    world_size: int,
    shape: dict[str, int],
    values: dict[str, Any],
    weights: dict[str, torch.Tensor],
    batch: PackedBatch,
) -> tuple[float, Pieces, np.ndarray | None]:
    if values[
        "num_experts"
    ]:  # ranks with other tokens share them: tp ranks need sequence parallelism for that
        shape = {**shape, "ep": shape.get("tp", 1) * shape.get("cp", 1)}
        values = {**values, "sequence_parallel": "tp" in shape}
    axes = {flag: shape.get(axis, 1) for axis, flag in AXIS_FLAGS.items()}
    config = with_values(
        RunConfig(),
        {**values, **axes, "seq_length": TOKENS, "dtype": "float64", "global_batch_size": 1},
    )
    model = ParallelModel(config, grid(**shape))
    for chunk in model.chunks:
        fill(chunk, weights)
    loss = model.gradients([batch], 1, float(TOKENS))
    found = pieces_of_slices(model.parameters.gradient_slices())
    logits = None
    if world_size == 1:
        with torch.no_grad():
            logits = model.chunks[0].row_logits(model.shard(batch, 1)).numpy()
    return loss, found, logits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [{}, {"tp": 2}, {"pp": 2}, {"cp": 2}], ids=str)
def test_loss_logits_and_gradients_are_those_of_the_library(
    name: str, shape: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    values, loss, weights, gradients, logits, batch = library_of(name, monkeypatch)
    given = shape, values, weights, batch
    results = run_ranks(ours, 2, *given) if shape else [ours(0, 1, *given)]
    for found, _, _ in results:
        assert abs(found - loss) <= 1e-12 * loss
    if not shape:
        assert (
            results[0][2] is not None
            and np.abs(results[0][2] - logits).max() <= 1e-12 * np.abs(logits).max()
        )
    summed = assemble([pieces for _, pieces, _ in results])
    assert summed.keys() == gradients.keys()
    floor = 1e-3 * max(float(expected.abs().max()) for expected in gradients.values())
    # the gradient of a key bias without rotary embedding is only rounding
    for (
        key,
        expected,
    ) in gradients.items():
        scale = max(float(expected.abs().max()), floor)
        assert np.abs(summed[key] - expected.numpy()).max() <= 1e-10 * scale, key


@pytest.mark.parametrize("more", [{}, {"factor": 1.0}], ids=str)
def test_yarn_frequencies_are_the_librarys_at_real_sizes(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With heads of 128 and 32,768 positions, wrong rounding of the ramp's ends is visible."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        **more,
    }
    theirs = transformers.Qwen3Config(head_dim=128, rope_parameters=rope)
    with float32_is_float64(monkeypatch):
        expected, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    model = with_values(RunConfig(), of_config(theirs.to_dict()).values(theirs.to_dict())).model
    scaling = RotaryScaling(
        model.rope_scaling, model.rope_scaling_factor, model.rope_original_max_positions
    )
    found = inverse_frequencies(model.head_dim, model.rotary_base, scaling)
    assert scaling.attention_factor == factor
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
