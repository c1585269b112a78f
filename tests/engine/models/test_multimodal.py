"""Vision tower and connector equal Molmo2 in transformers, in values and all gradients, on one rank
and over tp.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megacp.attention.context_parallel.layout import LAYOUTS
from megacp.engine.config.run import fields
from megacp.engine.config.vision import VISION_FAMILIES
from megacp.engine.data_parallel.parameter import spec_of
from megacp.engine.layers.vision import VISION_KINDS
from megacp.engine.models import multimodal
from megacp.engine.models.build import build_chunks
from megacp.engine.models.language import LanguageModelChunk
from megacp.engine.rows.batch import PackedBatch
from megacp.engine.rows.shard import shard_batch
from megacp.engine.step.step import ParallelModel
from megacp.huggingface.convert.families import FAMILIES
from megacp.training.data.vision.decoding import RULES
from megacp.training.loop.state import RunState, load
from tests.ranks import grid, run_ranks
from tests.reference.packs import random_batch
from tests.reference.sharding import Pieces, assemble, fill, pieces_of
from tests.reference.training import Values, config_of, gradient_pieces, parameter_pieces
from tests.reference.vision import (
    PATCH_DIM,
    THEIRS,
    TINY,
    VOCAB,
    document_with_images,
    random_units,
    their_model,
)
from tests.training.runs import save

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (extra: test)"
)

TOWERS: dict[str, tuple[Values, dict[str, Any]]] = {
    "molmo2": ({}, {}),
    "other layers": ({"vision_feature_layers": (0, 2)}, {"layers": (0, 2)}),
}
WINDOWS = {"images": ((3, 1, 2), (5, 4, 3), 4), "video": ((1, 1, 1), (4, 4, 2), 9)}


def test_a_vision_family_has_a_row_in_every_table() -> None:
    words = fields()["vision_family"].words
    tables = VISION_FAMILIES, VISION_KINDS, RULES, multimodal.TOWERS
    assert all([*table] == words for table in tables) and {*words} <= {*FAMILIES}


def chunk_of(
    values: Values, state: dict[str, torch.Tensor], shape: dict[str, int]
) -> LanguageModelChunk:
    (chunk,) = build_chunks(config_of({**TINY, **values}, shape), grid(**shape))
    fill(chunk, {ours: state[theirs] for ours, theirs in THEIRS.items()})
    return chunk


def state_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def gradients_of(chunk: LanguageModelChunk) -> Pieces:
    assert all(parameter.grad is not None for parameter in chunk.vision.parameters())
    return pieces_of(chunk.vision, {p: p.grad for p in chunk.vision.parameters()})


def encode(
    rank: int,
    world_size: int,
    shape: dict[str, int],
    values: Values,
    state: dict[str, torch.Tensor],
    kind: str,
) -> tuple[np.ndarray, Pieces]:
    """Return features of some crops, and the gradients of a random projection of them."""
    chunk = chunk_of(values, state, shape)
    patches, pooling = (
        torch.from_numpy(x) for x in random_units(np.random.default_rng(1), *WINDOWS[kind])
    )
    features = chunk.vision(patches, pooling)
    (features * direction(features)).sum().backward()
    return features.detach().numpy(), gradients_of(chunk)


def direction(features: torch.Tensor) -> torch.Tensor:
    return torch.randn(
        features.shape, dtype=features.dtype, generator=torch.Generator().manual_seed(2)
    )


def theirs(model: Any, kind: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the same from the float64 model of transformers, with its parameter names."""
    patches, pooling = (
        torch.from_numpy(x) for x in random_units(np.random.default_rng(1), *WINDOWS[kind])
    )
    grids = torch.tensor([[len(pooling), 1, 0, 0]])
    features = torch.cat(model.get_image_features(patches.double(), pooling, grids).pooler_output)
    (features * direction(features)).sum().backward()
    found = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return features.detach().numpy(), found


def assert_equal(found: tuple[np.ndarray, dict[str, np.ndarray]], expected: Any) -> None:
    """In float64 after 3 + 1 layers, errors are relative to the largest element of a tensor."""
    values, gradients = expected
    assert (
        np.abs(found[0] - values).max() <= 1e-10 * np.abs(values).max()
        and np.abs(values).max() > 0.1
    )
    assert {THEIRS[name] for name in found[1]} == set(gradients)
    largest = max(np.abs(gradient).max() for gradient in gradients.values())
    for name, gradient in found[
        1
    ].items():  # the bias of a key does not change the softmax: its gradient is 0 up to rounding
        twin = gradients[THEIRS[name]]
        assert np.abs(gradient - twin).max() <= 1e-10 * max(np.abs(twin).max(), 1e-3 * largest), (
            name
        )


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("kind", WINDOWS)
def test_features_and_all_gradients_equal_those_of_transformers(name: str, kind: str) -> None:
    values, sizes = TOWERS[name]
    model = their_model(**sizes).double()
    features, pieces = encode(0, 1, {}, values, state_of(model), kind)
    assert_equal((features, assemble([pieces])), theirs(model, kind))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_tp_gives_the_features_and_gradients_of_transformers(
    ranks: int, sequence_parallel: bool
) -> None:
    model = their_model().double()
    values = {"sequence_parallel": sequence_parallel}
    results = run_ranks(encode, ranks, {"tp": ranks}, values, state_of(model), "images")
    expected = theirs(model, "images")
    gradients = assemble(pieces for _, pieces in results)
    for features, _ in results:
        assert_equal((features, gradients), expected)


@pytest.mark.parametrize(("crops", "windows"), [(0, 0), (2, 0)])
def test_a_rank_without_images_gives_every_parameter_the_gradient_zero(
    crops: int, windows: int
) -> None:
    chunk = chunk_of({}, state_of(their_model().double()), {})
    empty = torch.zeros(windows, 4, dtype=torch.int64)
    features = chunk.vision(torch.zeros(crops, 16, PATCH_DIM), empty)
    assert features.shape == (0, 32) and features.dtype == torch.float64 and features.requires_grad
    torch.zeros(7, 32, dtype=torch.float64).index_add(
        0, torch.empty(0, dtype=torch.int64), features
    ).sum().backward()
    assert all(not values.any() for _, values in gradients_of(chunk).values())


def test_crops_of_another_size_are_refused_with_both_sizes() -> None:
    chunk = chunk_of({}, state_of(their_model().double()), {})
    with pytest.raises(
        ValueError, match=r"\(2, 9, 48\), but --vision-image-size 16 .*\(crops, 16, 48\)"
    ):
        chunk.vision(torch.zeros(2, 9, PATCH_DIM), torch.zeros(1, 4, dtype=torch.int64))


def logits(
    rank: int,
    world_size: int,
    shape: dict[str, int],
    values: Values,
    state: dict[str, torch.Tensor],
    batch: PackedBatch,
) -> np.ndarray:
    chunk = chunk_of(values, state, shape)
    mine = grid(**shape)
    local = shard_batch(batch, mine.cp, LAYOUTS["contiguous"], tp=mine.tp.size)
    with torch.no_grad():
        return chunk.row_logits(local).numpy()


def their_logits(model: Any, batch: PackedBatch, video: bool) -> np.ndarray:
    assert batch.vision is not None
    patches, pooling = (
        torch.from_numpy(batch.vision.patches),
        torch.from_numpy(batch.vision.pooling),
    )
    units = np.diff(batch.vision.cum_token_pooling_bounds, prepend=0)
    inputs: dict[str, Any]
    if video:
        grids = torch.tensor([[len(units), int(units[0]), 1]])
        inputs = {
            "pixel_values_videos": patches,
            "video_token_pooling": pooling,
            "video_grids": grids,
        }
    else:
        grids = torch.tensor([[int(count), 1, 0, 0] for count in units])
        inputs = {"pixel_values": patches, "image_token_pooling": pooling, "image_grids": grids}
    seen = torch.from_numpy((batch.span > 0).astype(np.int64))[None]
    with torch.no_grad():
        out = model(
            input_ids=torch.from_numpy(batch.tokens)[None],
            mm_token_type_ids=seen,
            use_cache=False,
            **inputs,
        )
    return out.logits[0].numpy()


DOCUMENTS = {
    "images": lambda: document_with_images(),
    "video": lambda: document_with_images((1, 1, 1, 1), (3, 3, 3, 3), 9),
}


@pytest.mark.parametrize("kind", DOCUMENTS)
@pytest.mark.parametrize("tp", [1, 2])
def test_logits_of_a_document_equal_those_of_transformers(kind: str, tp: int) -> None:
    model, batch = their_model(), DOCUMENTS[kind]()
    batch = batch.with_padding_to(2)
    expected = their_logits(model, batch, kind == "video")
    arguments = ({"tp": tp}, {"dtype": "float32"}, state_of(model), batch)
    parts = run_ranks(logits, tp, *arguments) if tp > 1 else [logits(0, 1, *arguments)]
    found = np.concatenate(parts, 1)
    true = batch.document >= 0
    assert found.shape == expected.shape and np.abs(expected).max() > 1
    # fp32 after 8 layers: sums in a different order give a few dozen times 2^-24 of the largest logit
    assert np.abs(found - expected)[true].max() <= 1e-5 * np.abs(expected).max()


def test_a_row_with_images_is_refused_by_a_model_without_a_tower() -> None:
    text = {
        name: value for name, value in TINY.items() if not name.startswith(("vision", "connector"))
    }
    (chunk,) = build_chunks(config_of(text, {}), grid())
    local = shard_batch(document_with_images(), grid().cp, LAYOUTS["contiguous"])
    with pytest.raises(ValueError, match="a row has 9 image tokens, .* set --vision-num-layers"):
        chunk.hidden(None, local)


def test_the_weights_of_the_language_model_do_not_depend_on_the_tower() -> None:
    text = {
        name: value for name, value in TINY.items() if not name.startswith(("vision", "connector"))
    }
    found = []
    for values in (text, TINY):
        (chunk,) = build_chunks(config_of(values, {}), grid())
        found.append(assemble([pieces_of(chunk, {p: p.data for p in chunk.parameters()})]))
    plain, seeing = found
    assert all(np.array_equal(seeing[name], plain[name]) for name in plain)
    added = seeing.keys() - plain.keys()
    assert (
        all(name.startswith(("vision.", "connector.")) for name in added)
        and len(added) == 3 + 3 * 16 + 11
    )
    assert all(spec_of(p).weight_decay == (p.dim() > 1) for p in chunk.vision.parameters())


def microbatches() -> list[PackedBatch]:
    """Return batches with images, only text, and a video. The second one has no image on any rank."""
    text = random_batch(np.random.default_rng(5), 40, VOCAB, documents=3, number=1)
    return [
        document_with_images(),
        text,
        document_with_images((1, 1, 1, 1), (3, 3, 3, 3), 9, seed=2),
    ]


def trained(
    rank: int, world_size: int, shape: dict[str, int], values: Values, steps: int = 2
) -> tuple[list[float], Pieces, Pieces]:
    """Return losses and norms of some steps, gradients of the first step, and final weights."""
    config = config_of({**TINY, **values}, shape)
    model = ParallelModel(config, grid(**shape))
    batches = microbatches()
    denominator = sum(batch.weight_sum for batch in batches)
    numbers, first = [], None
    for step in range(1, steps + 1):
        loss = model.gradients(batches, step, denominator)
        first = first or gradient_pieces(model)
        numbers += [loss, model.optimizer.step(config.training.lr)]
    return numbers, first or {}, parameter_pieces(model)


TRAINED_TOWERS = {
    "vision": ("vision.",),
    "connector": ("connector.",),
    "text": ("embedding.", "layers.", "final_norm", "head."),
}
PLAIN = {"clip_grad": 0.0}


def frozen_names(names: set[str], towers: tuple[str, ...]) -> set[str]:
    return {name for name in names for tower in towers if name.startswith(TRAINED_TOWERS[tower])}


def trained_frozen(
    rank: int, world_size: int, shape: dict[str, int], towers: tuple[str, ...]
) -> tuple[list[float], Pieces, Pieces, tuple[set[str], int]]:
    """Return loss and norm of one step, gradients, new weights, and optimizer contents.

    The optimizer contents are parameter names and the number of gradient elements.
    """
    values = {**TINY, **PLAIN, "cross_entropy_chunk_tokens": 9, "freeze": ",".join(towers) or None}
    model = ParallelModel(config_of(values, shape), grid(**shape))
    batches = microbatches()
    loss = model.gradients(batches, 1, sum(batch.weight_sum for batch in batches))
    pieces = gradient_pieces(model)
    state = {
        piece.name
        for part in model.optimizer.state_slices()["exp_avg"]
        for piece in part.spec.pieces
    }
    elements = sum(bucket.gradients.numel() for bucket in model.parameters.buckets)
    norm = model.optimizer.step(0.01)
    assert all(
        bool(np.isnan(values).all()) == (name not in state)
        for (name, _), (_, values) in pieces.items()
    )
    trained = {key: value for key, value in pieces.items() if key[0] in state}
    return [loss, norm], trained, parameter_pieces(model), (state, elements)


@pytest.mark.slow
@pytest.mark.parametrize(
    "towers", [("vision",), ("connector",), ("text",), ("vision", "text"), ("vision", "connector")]
)
@pytest.mark.parametrize("shape", [{}, {"pp": 2}], ids=str)
def test_a_frozen_tower_stays_and_the_others_get_their_gradients(
    shape: dict[str, int], towers: tuple[str, ...]
) -> None:
    _, first, _ = trained(0, 1, {}, PLAIN, steps=1)
    _, _, initial = trained(0, 1, {}, PLAIN, steps=0)
    gradients, weights = assemble([first]), assemble([initial])
    ranks = 2 if shape else 1
    results = (
        run_ranks(trained_frozen, 2, shape, towers)
        if shape
        else [trained_frozen(0, 1, shape, towers)]
    )
    frozen = frozen_names(set(weights), towers)
    found = assemble(result[1] for result in results)
    assert (
        found.keys()
        == weights.keys() - frozen
        == set().union(*(result[3][0] for result in results))
    )
    for name, value in found.items():
        np.testing.assert_allclose(value, gradients[name], rtol=1e-10, atol=1e-10, err_msg=name)
    squares = sum(float((gradients[name] ** 2).sum()) for name in found)
    np.testing.assert_allclose(results[0][0][1], squares**0.5, rtol=1e-10)
    after = assemble(result[2] for result in results)
    for name, value in after.items():
        assert np.array_equal(value, weights[name]) == (name in frozen), name
    if ranks == 1:  # each parameter is aligned to 64 elements
        assert (
            results[0][3][1]
            < sum(value.size + 64 for name, value in weights.items() if name not in frozen) + 640
        )


def test_a_tower_has_its_own_learning_rate_at_every_update() -> None:
    """The first update of AdamW, including weight decay, is proportional to the learning rate."""
    _, _, before = trained(0, 1, {}, PLAIN, steps=0)
    _, _, plain = trained(0, 1, {}, PLAIN, steps=1)
    rates = {"vision_lr_multiplier": 0.25, "connector_lr_multiplier": 3.0}
    _, _, scaled = trained(0, 1, {}, {**PLAIN, **rates}, steps=1)
    old, one, other = assemble([before]), assemble([plain]), assemble([scaled])
    for name, start in old.items():
        factor = {"vision": 0.25, "connector": 3.0}.get(name.split(".")[0], 1.0)
        # a difference of weights near 1 has an absolute error of 2^-52
        np.testing.assert_allclose(
            other[name] - start, factor * (one[name] - start), rtol=1e-9, atol=1e-14
        )
        assert np.abs(one[name] - start).max() > 0


def saved(rank: int, world_size: int, shape: dict[str, int], root: str) -> Pieces:
    config = config_of({**TINY, "freeze": "vision", "save": root}, shape)
    model = ParallelModel(config, grid(**shape))
    batches = microbatches()
    model.train(batches, 1, sum(batch.weight_sum for batch in batches), 0)
    save(model, RunState(step=1), config)
    return parameter_pieces(model)


def loaded(rank: int, world_size: int, shape: dict[str, int], root: str, values: Values) -> Pieces:
    config = config_of({**TINY, "freeze": "vision", "load": root, **values}, shape)
    model = ParallelModel(config, grid(**shape))
    for chunk in model.chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(7.0)
    load(model, RunState(), config)
    return parameter_pieces(model)


@pytest.mark.slow
def test_checkpoints_hold_frozen_weights_and_load_on_other_grids(tmp_path: Path) -> None:
    expected = assemble(run_ranks(saved, 2, {"tp": 2}, str(tmp_path)))
    for shape in ({"pp": 2}, {"dp": 2}):
        found = assemble(run_ranks(loaded, 2, shape, str(tmp_path), {}))
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in found)
    with pytest.raises(ValueError, match="has --freeze vision, but this run has None"):
        loaded(0, 1, {}, str(tmp_path), {"freeze": None})
