"""The model on one process equals a naive decoder in plain torch. Initial weights, recomputation,
offload and dropout are tested as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megacp.attention.ops.tile_kernels import FlashKernel
from megacp.dry_run import memory
from megacp.dry_run.measured import block_memory
from megacp.engine.config.run import RunConfig
from megacp.engine.models import block, offload
from megacp.engine.models.build import build_chunks
from megacp.engine.models.offload import HostMemory, Passage
from megacp.engine.step.step import ParallelModel
from tests.ranks import grid, run_ranks
from tests.reference import decoder
from tests.reference.packs import random_batch
from tests.reference.sharding import Pieces, assemble, pieces_of
from tests.reference.training import (
    BALANCE,
    GEMMA,
    GPT_OSS,
    MAMBA2,
    MOE,
    QWEN3_5,
    SIGMOID,
    Values,
    config_of,
    parameter_pieces,
    step_batches,
    train,
)
from tests.reference.vision import TINY, document_with_images

MODELS: dict[str, Values] = {
    "tied, grouped queries": {"num_query_groups": 2},
    "tied, loss in chunks": {"cross_entropy_chunk_tokens": 7},
    "untied, loss token by token": {
        "untie_embeddings_and_output_weights": True,
        "cross_entropy_chunk_tokens": 1,
    },
    "untied, q/k norms": {
        "untie_embeddings_and_output_weights": True,
        "qk_layernorm": "head",
        "kv_channels": 10,
    },
    "norms after, q/k norms over all heads": {
        "norm_position": "after",
        "qk_layernorm": "all_heads",
        "num_query_groups": 2,
    },
    "layers without rope, yarn, windows with a base of their own": {
        "no_rope_freq": "3",
        "window_size": 9,
        "window_attn_skip_freq": "2",
        "window_rotary_base": 300.0,
        "rope_scaling": "yarn",
        "rope_scaling_factor": 4.0,
        "rope_original_max_positions": 4000,
        "rotary_base": 50.0,
    },
    "as Gemma 3": GEMMA,
    "as Qwen3.5": QWEN3_5,
    "with Mamba-2": MAMBA2,
    "with experts": MOE,
    "experts by their share of all, norms after": {
        **MOE,
        **{"moe_router_pre_softmax": True, "moe_aux_loss_coeff": 0.2, "moe_z_loss_coeff": 0.1},
        "norm_position": "after",
        "moe_layer_freq": "2",
        "mlp_activation": "geglu",
    },
    "experts and a shared one": {**MOE, "moe_shared_expert_intermediate_size": 24},
    "experts and a gated one": {
        **MOE,
        "moe_shared_expert_intermediate_size": 24,
        "moe_shared_expert_gate": True,
    },
    "experts by sigmoids in groups, all terms of balance": {**MOE, **SIGMOID, **BALANCE},
    "experts by sigmoids as they are, biased scores, a correction": {
        **{
            **MOE,
            "moe_router_bias": True,
            "moe_router_pre_softmax": True,
            "moe_router_score_function": "sigmoid",
        },
        "moe_router_bias_update_rate": 0.05,
    },
    "as gpt-oss": GPT_OSS,
    "windows in two layers of three": {"window_size": 7, "window_attn_skip_freq": "3"},
    "all biases": {
        "add_qkv_bias": True,
        "add_attention_output_bias": True,
        "add_mlp_bias": True,
        "rotary_base": 500.0,
    },
}


def initial_weights(values: Values) -> dict[str, torch.Tensor]:
    found = assemble([parameter_pieces(ParallelModel(config_of(values, {}), grid()))])
    return {name: torch.from_numpy(array) for name, array in found.items()}


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        *((name, "auto") for name in MODELS),
        ("tied, grouped queries", "dense"),
        ("as Gemma 3", "dense"),
    ],
)
def test_one_process_equals_the_naive_decoder_over_two_steps(name: str, kernel: str) -> None:
    """Compare loss, gradient norm, all gradients and all weights in float64.

    After 4 layers, a relative tolerance of 1e-10 is generous.
    """
    values = {**MODELS[name], "attention_kernel": kernel}
    config, steps = config_of(values, {}), [step_batches(3, 1), step_batches(3, 2)]
    reports, gradients, weights, _ = train(grid(), config, steps)
    twins, first, expected = decoder.train(
        initial_weights(values), steps, config.model, config.training
    )
    np.testing.assert_allclose(reports, twins, rtol=1e-11)
    assert twins[0][1] > config.training.clip_grad, "clipping belongs to the test"
    for found, twin in ((assemble([gradients[0]]), first), (assemble([weights]), expected)):
        assert found.keys() == twin.keys()
        for key, value in found.items():
            np.testing.assert_allclose(
                value, twin[key], rtol=1e-10, atol=1e-10 * twin[key].abs().max(), err_msg=key
            )


def weights_of_a_grid(rank: int, world_size: int, shape: dict[str, int], values: Values) -> Pieces:
    chunks = build_chunks(config_of(values, shape), grid(**shape))
    found: Pieces = {}
    for chunk in chunks:
        found |= pieces_of(chunk, {p: p.data for p in chunk.parameters()})
    return found


@pytest.mark.parametrize(
    ("shape", "extra"),
    [
        ({"tp": 4}, {}),
        ({"tp": 2, "pp": 2}, {"untie_embeddings_and_output_weights": True}),
        ({"pp": 2, "cp": 2}, {"num_virtual_stages_per_pipeline_rank": 2}),
        ({"pp": 4}, {}),
    ],
    ids=str,
)
def test_the_same_seed_gives_the_same_bits_on_any_grid(
    shape: dict[str, int], extra: Values
) -> None:
    values = {
        "qk_layernorm": "head",
        "add_mlp_bias": True,
        "vocab_size": 131,
        "ffn_hidden_size": 160,
        **extra,
    }
    one = {k: v for k, v in values.items() if k != "num_virtual_stages_per_pipeline_rank"}
    whole = {name: tensor.numpy() for name, tensor in initial_weights(one).items()}
    found = assemble(run_ranks(weights_of_a_grid, 4, shape, values))
    assert found.keys() == whole.keys()
    assert all(np.array_equal(found[name], whole[name]) for name in whole)


def test_initial_weights_have_their_standard_deviation_and_other_seeds_other_bits() -> None:
    weights = initial_weights(
        {"hidden_size": 256, "ffn_hidden_size": 512, "num_layers": 2, "init_method_std": 0.02}
    )
    for name, tensor in weights.items():
        if "norm" in name:
            assert (tensor == 1).all()
            continue
        std = (
            0.02 / 2 if name.endswith(("output.weight", "down.weight")) else 0.02
        )  # sqrt(2 x 2 layers) = 2
        assert abs(tensor.std() / std - 1) < 0.05 and abs(tensor.mean()) < std / 20, name
    gates = [weights[f"layers.{i}.mlp.gate.weight"] for i in range(2)]
    assert not torch.equal(*gates) and not torch.equal(gates[0][:64], gates[0][64:128])
    other = initial_weights({"seed": 1})["embedding.weight"]
    assert not torch.equal(other, initial_weights({"seed": 2})["embedding.weight"])


def test_every_layer_and_sublayer_draws_its_own_dropout_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = []

    def spy(
        x: torch.Tensor, key: int, token_names: torch.Tensor, probability: float
    ) -> torch.Tensor:
        keys.append(key & (2**64 - 1))
        return x

    monkeypatch.setattr(block, "dropout", spy)
    model = ParallelModel(config_of({"hidden_dropout": 0.5}, {}), grid())
    model.chunks[0].hidden(None, model.shard(step_batches(1, 4)[0], 1))
    assert len(keys) == len(set(keys)) == 2 * 4


def test_attention_of_a_block_that_is_computed_again_runs_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel runs forward once per layer and microbatch. Results have the same bits as without
    recomputation.
    """
    calls, attend = [], FlashKernel.attend
    monkeypatch.setattr(FlashKernel, "attend", lambda *given: calls.append(1) or attend(*given))
    found, counts = [], []
    for recompute in ("none", "full"):
        calls.clear()
        found.append(train(grid(), small(recompute_granularity=recompute), [step_batches(2, 1)]))
        counts.append(len(calls))
    assert_same_bits(found[1], found[0])
    assert counts == [4 * 2 * 2] * 2, "with the validation"


TOKENS, MICROBATCHES = 48, 3
RECOMPUTE = pytest.mark.parametrize("recompute", ["none", "selective", "full"])


class Late:
    """A pending copy."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run: Callable[[], None] | None = run


class LateLane:
    """Copies as late as possible: on waiting, and with NaN if the source no longer exists."""

    def __init__(self, device: torch.device) -> None:
        self.sizes: list[int] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Late | None) -> Late:
        self.sizes.append(len(source))
        # Do not keep a device storage alive. A view of a host buffer would be deleted at once, so
        # keep it.
        held = (lambda: source) if source._is_view() else weakref.ref(source)
        target.fill_(255)  # NaN in every dtype

        def run(after: Late | None = after) -> None:
            self.wait(after)
            there = held()
            target.fill_(255) if there is None else target.copy_(there)

        return Late(run)

    def wait(self, event: Late | None) -> None:
        if event is not None and event.run is not None:
            run, event.run = event.run, None
            run()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "Lane", LateLane)
    monkeypatch.setattr(offload, "SMALLEST", 1)  # offload even tiny tensors


def small(**values: Any) -> RunConfig:
    return config_of({"attention_kernel": "flash", **values}, {})


def packs(seed: int = 1, tokens: int = TOKENS) -> list[Any]:
    """Return microbatches of equal length."""
    rng = np.random.default_rng(seed)
    return [random_batch(rng, tokens, 53, documents=3, number=i) for i in range(MICROBATCHES)]


def step(model: ParallelModel, number: int = 1, tokens: int = TOKENS) -> None:
    batches = packs(number, tokens)
    model.gradients(batches, number, sum(batch.weight_sum for batch in batches))
    model.parameters.zero()


def road(model: ParallelModel) -> HostMemory:
    return model.chunks[0].blocks[0].offload.memory


def assert_same_bits(found: Any, expected: Any) -> None:
    """Compare two results of `train`: losses, norms, gradients, weights and validation loss."""
    assert found[0] == expected[0] and found[3] == expected[3]
    for mine, other in zip((*found[1], found[2]), (*expected[1], expected[2]), strict=True):
        for name, (_, values) in mine.items():
            np.testing.assert_array_equal(values, other[name][1], err_msg=str(name))


@RECOMPUTE
@pytest.mark.parametrize(
    "values", [{"hidden_dropout": 0.1}, {"qk_layernorm": "head"}, {"mlp_chunk_tokens": 20}]
)
@pytest.mark.slow
def test_the_bytes_are_those_that_the_planner_counts(
    late: None, recompute: str, values: dict[str, Any]
) -> None:
    # GPU kernels pad rows to 128 tokens and heads to 16 columns
    sizes = {"seq_length": 128, "kv_channels": 16}
    config = small(recompute_granularity=recompute, activation_offload=0.5, **sizes, **values)
    model = ParallelModel(config, grid())
    step(model, tokens=128)
    sent, came = road(model).away.sizes, road(model).back.sizes
    assert sum(sent) == MICROBATCHES * 2 * block_memory(config, 0).kept
    assert sorted(sent) == sorted(came)
    assert (
        recompute != "full" or len(sent) == MICROBATCHES * 2 * 3
    )  # input of the block, output and log-sum-exp of attention
    planned = memory.stage_memory(config, 0, [range(4)], 1)
    assert road(model).allocated == planned.host == 2 * block_memory(config, 0).kept


@RECOMPUTE
def test_a_step_leaves_nothing_behind_and_the_next_one_allocates_nothing(
    late: None, recompute: str
) -> None:
    model = ParallelModel(small(recompute_granularity=recompute, activation_offload=3), grid())
    host = road(model)
    held = []
    for number in (1, 2, 3):
        step(model, number)
        held.append((host.allocated, sum(buffer.size for buffer in host.free)))
    assert held == [(host.allocated, host.allocated)] * 3


def test_without_gradients_nothing_is_copied(late: None) -> None:
    model = ParallelModel(small(activation_offload=0.5), grid())
    batches = packs()
    model.evaluate(batches, sum(batch.weight_sum for batch in batches))
    assert road(model).allocated == 0 and road(model).away.sizes == []


def test_views_aliases_and_strides_come_back_as_they_were(late: None) -> None:
    host = HostMemory(torch.device("cpu"))
    base = torch.arange(24.0).view(4, 6)
    views = [base.t(), base[1:3, ::2], base[0].expand(5, 6), base.view(-1)[3:]]
    staying = torch.ones(4, 6)
    passage = Passage(host, (staying,))
    held = [passage.pack(view) for view in views]
    assert passage.pack(same := staying.t()) is same
    passage.close()
    expected = [(view.clone(), view.stride(), view.storage_offset()) for view in views]
    passage.leave()
    del base, views
    found = [passage.unpack(place) for place in held]
    for x, (values, stride, offset) in zip(found, expected, strict=True):
        assert torch.equal(x, values) and (x.stride(), x.storage_offset()) == (stride, offset)
    assert len({x.untyped_storage().data_ptr() for x in found}) == 1
    assert (host.away.sizes, host.back.sizes) == ([96], [96])


def test_a_buffer_serves_rows_of_other_lengths() -> None:
    host = HostMemory(torch.device("cpu"))
    for buffer in [host.take(size) for size in (1000, 3000)]:
        host.give(buffer)
    assert [host.take(size).size for size in (900, 1400, 1600)] == [1000, 1400, 3000]
    assert host.allocated == 1000 + 3000 + 1400


def moved_and_plain(
    rank: int, world: int, shape: dict[str, int], values: dict[str, Any], images: bool
) -> None:
    """Assert that two steps have the same bits on this rank with and without offload."""
    steps = [step_batches(4, seed) for seed in (1, 2)]
    if images:
        steps = [
            [document_with_images(), document_with_images((1, 1, 1, 1), (3, 3, 3, 3), 9, seed=2)]
        ] * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "Lane", LateLane)
        patch.setattr(offload, "SMALLEST", 1)
        plain, moved = (
            train(
                grid(**shape),
                config_of(
                    {"attention_kernel": "flash", **values, "activation_offload": asked}, shape
                ),
                steps,
            )
            for asked in (0.0, 0.9)
        )
    assert_same_bits(moved, plain)


V = "num_virtual_stages_per_pipeline_rank"


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, values",
    [
        ({"pp": 2}, {}),
        ({"pp": 2}, {V: 2, "recompute_granularity": "selective"}),
        ({"pp": 2}, {V: 2, "recompute_granularity": "full", "mlp_chunk_tokens": 20}),
        ({"tp": 2}, {"recompute_granularity": "selective", "gradient_accumulation_fusion": True}),
        *(
            ({"cp": 2}, {"cp_comm_type": name})
            for name in ("p2p", "all_gather", "a2a", "kv_exchange")
        ),
        *(({"pp": 2}, {**TINY, "freeze": frozen}) for frozen in (None, "text")),
        ({"tp": 2}, {**TINY, "freeze": "vision", "recompute_granularity": "full"}),
    ],
)
def test_ranks_have_the_same_bits(shape: dict[str, int], values: dict[str, Any]) -> None:
    run_ranks(moved_and_plain, 2, shape, values, "vision_num_layers" in values)
