"""A tiny vision-language model trains alike on any grid; frozen towers stay as they are, others keep their own rate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megacp.core.data.batch import PackedBatch
from megacp.core.training.state import RunState, load
from megacp.core.training.step import ParallelModel
from tests.ranks import grid, run_ranks
from tests.reference.packs import random_batch
from tests.reference.sharding import Pieces, assemble
from tests.reference.training import Values, config_of, gradient_pieces, parameter_pieces
from tests.reference.vision import TINY, VOCAB, document_with_images
from tests.training.runs import save


def microbatches() -> list[PackedBatch]:
    """Images, text alone, a video: the second makes every rank starve."""
    text = random_batch(np.random.default_rng(5), 40, VOCAB, documents=3, number=1)
    return [document_with_images(), text, document_with_images((1, 1, 1, 1), (3, 3, 3, 3), 9, seed=2)]


def trained(
    rank: int, world_size: int, shape: dict[str, int], values: Values, steps: int = 2
) -> tuple[list[float], Pieces, Pieces]:
    """Losses and norms of some steps, the first step's gradients, and the final weights."""
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


def whole(shape: dict[str, int], values: Values) -> tuple[list[float], dict[str, np.ndarray], dict[str, np.ndarray]]:
    ranks = int(np.prod(list(shape.values()), initial=1))
    results = run_ranks(trained, ranks, shape, values) if ranks > 1 else [trained(0, 1, shape, values)]
    assert all(numbers == results[0][0] for numbers, _, _ in results)
    return results[0][0], *(assemble(result[i] for result in results) for i in (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "extra"),
    [
        ({"tp": 2}, {}),
        ({"tp": 4}, {"recompute_granularity": "full", "cross_entropy_chunk_tokens": 5}),
        ({"tp": 4}, {"sequence_parallel": False, "recompute_granularity": "selective"}),
        ({"pp": 2}, {"num_virtual_stages_per_pipeline_rank": 2}),
        ({"tp": 2, "pp": 2}, {"recompute_granularity": "selective"}),
        ({"tp": 2}, {"sequence_parallel": False, "cross_entropy_chunk_tokens": 1000}),
    ],
    ids=str,
)
def test_every_grid_gives_the_loss_and_all_gradients_of_one_process(shape: dict[str, int], extra: Values) -> None:
    expected, found = whole({}, {}), whole(shape, extra)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-11)
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert mine.keys() == theirs.keys() and any(name.startswith("connector") for name in mine)
        for name, value in mine.items():  # float64 through 3 + 1 + 4 layers
            largest = np.abs(theirs[name]).max()
            assert largest > 0
            np.testing.assert_allclose(value, theirs[name], rtol=1e-10, atol=1e-10 * max(largest, 1e-3), err_msg=name)


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
    """Loss and norm of one step, gradients, new weights, and what the optimizer holds: names, elements of gradients."""
    values = {**TINY, **PLAIN, "cross_entropy_chunk_tokens": 9, "freeze": ",".join(towers) or None}
    model = ParallelModel(config_of(values, shape), grid(**shape))
    batches = microbatches()
    loss = model.gradients(batches, 1, sum(batch.weight_sum for batch in batches))
    pieces = gradient_pieces(model)
    state = {piece.name for part in model.optimizer.state_slices()["exp_avg"] for piece in part.spec.pieces}
    elements = sum(bucket.gradients.numel() for bucket in model.parameters.buckets)
    norm = model.optimizer.step(0.01)
    assert all(bool(np.isnan(values).all()) == (name not in state) for (name, _), (_, values) in pieces.items())
    trained = {key: value for key, value in pieces.items() if key[0] in state}
    return [loss, norm], trained, parameter_pieces(model), (state, elements)


@pytest.mark.slow
@pytest.mark.parametrize(
    "towers", [("vision",), ("connector",), ("text",), ("vision", "text"), ("vision", "connector")]
)
@pytest.mark.parametrize("shape", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_a_frozen_tower_stays_and_the_others_get_their_gradients(
    shape: dict[str, int], towers: tuple[str, ...]
) -> None:
    _, first, _ = trained(0, 1, {}, PLAIN, steps=1)
    _, _, initial = trained(0, 1, {}, PLAIN, steps=0)
    gradients, weights = assemble([first]), assemble([initial])
    ranks = 2 if shape else 1
    results = run_ranks(trained_frozen, 2, shape, towers) if shape else [trained_frozen(0, 1, shape, towers)]
    frozen = frozen_names(set(weights), towers)
    found = assemble(result[1] for result in results)
    assert found.keys() == weights.keys() - frozen == set().union(*(result[3][0] for result in results))
    for name, value in found.items():
        np.testing.assert_allclose(value, gradients[name], rtol=1e-10, atol=1e-10, err_msg=name)
    squares = sum(float((gradients[name] ** 2).sum()) for name in found)
    np.testing.assert_allclose(results[0][0][1], squares**0.5, rtol=1e-10)
    after = assemble(result[2] for result in results)
    for name, value in after.items():
        assert np.array_equal(value, weights[name]) == (name in frozen), name
    if ranks == 1:  # 64-element alignment of every parameter
        assert results[0][3][1] < sum(value.size + 64 for name, value in weights.items() if name not in frozen) + 640


def test_a_tower_has_its_own_learning_rate_at_every_update() -> None:
    """The first update of AdamW, decay included, is proportional to the rate."""
    _, _, before = trained(0, 1, {}, PLAIN, steps=0)
    _, _, plain = trained(0, 1, {}, PLAIN, steps=1)
    rates = {"vision_lr_multiplier": 0.25, "connector_lr_multiplier": 3.0}
    _, _, scaled = trained(0, 1, {}, {**PLAIN, **rates}, steps=1)
    old, one, other = assemble([before]), assemble([plain]), assemble([scaled])
    for name, start in old.items():
        factor = {"vision": 0.25, "connector": 3.0}.get(name.split(".")[0], 1.0)
        # a difference of weights near 1: 2^-52 absolute
        np.testing.assert_allclose(other[name] - start, factor * (one[name] - start), rtol=1e-9, atol=1e-14)
        assert np.abs(one[name] - start).max() > 0


def saved(rank: int, world_size: int, shape: dict[str, int], root: str) -> Pieces:
    config = config_of({**TINY, "freeze": "vision", "save": root}, shape)
    model = ParallelModel(config, grid(**shape))
    batches = microbatches()
    model.train(batches, 1, sum(batch.weight_sum for batch in batches))
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
    with pytest.raises(ValueError, match="has --freeze vision, this run None"):
        loaded(0, 1, {}, str(tmp_path), {"freeze": None})
