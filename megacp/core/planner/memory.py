"""Bytes on one rank, term by term, and the phase of a step in which most of them live at once.

Every term knows the axis that shrinks it. Weights fall with tp and pp, and under full sharding with dp x cp like the
optimizer's state; gradients as `--data-parallel-sharding-strategy` says (planner/states.py); activations with cp and tp
(planner/activations.py; without sequence parallelism only those inside attention and MLP fall with tp).

The estimate leaves out the framework itself, kernels' scratch space, fragmentation, and collectives' copies. It counts
sums of gradients from the first microbatch on, and one block's work on top of all that is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megacp.core.config.run import RunConfig
from megacp.core.pipeline_parallel.schedules import defers
from megacp.core.planner import vision
from megacp.core.planner.activations import (
    block_work,
    in_flight,
    in_flight_rows,
    layer_activations,
    layer_put_off,
    offloaded_blocks,
    put_off,
    residual_elements,
    tokens_per_rank,
)
from megacp.core.planner.costs import vocabulary_rows
from megacp.core.planner.states import StateMemory, stage_state

LOSS_WORK = 2**29
"""Most bytes of logits and their gradient under `--cross-entropy-chunk-tokens auto`."""

STATE = ("weights", "gradients", "optimizer")
PHASES: dict[str, tuple[str, ...]] = {
    "forward": (*STATE, "gathered", "sums", "activations", "messages"),
    "loss": (*STATE, "gathered_head", "sums", "activations", "messages", "head"),
    "backward": (*STATE, "gathered", "sums", "unreduced", "activations", "messages", "block"),
    "optimizer": (*STATE, "update"),
    "checkpoint": (*STATE, "saved"),
}
"""The terms that live in each phase of a step."""


@dataclass(frozen=True)
class RankMemory(StateMemory):
    """Bytes of each term on one rank of a pipeline stage: those of `StateMemory`, and what a microbatch needs."""

    activations: int = 0
    """What blocks and vision keep for all microbatches in flight."""
    messages: int = 0
    """Hidden states and their gradients under way between stages."""
    block: int = 0
    """Work of one block's backward (`activations.block_work`), and a tied table's gradient that waits for its other
    part."""
    head: int = 0
    """Logits or their gradient for a chunk of tokens, the final norm and the table's gradient; on the last stage."""
    host: int = 0
    """Activations that wait in host memory; in no phase."""

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes of each phase at its highest."""
        return {phase: sum(getattr(self, term) for term in terms) for phase, terms in PHASES.items()}

    @property
    def total(self) -> int:
        """Bytes on the device in the largest phase."""
        return max(self.peaks.values())


def _logit_bytes(config: RunConfig) -> int:
    """Bytes of one token's logits on a rank: softmax and gradient take their place, halves have a wide copy beside."""
    model, t = config.model, config.training
    copy = t.accumulation_bytes if t.accumulation_bytes > t.element_bytes else 0
    rows = vocabulary_rows(model, model.vocab_size, config.parallel.tensor_model_parallel_size)
    return rows * (t.element_bytes + copy)


def loss_chunk_tokens(config: RunConfig) -> int:
    """Tokens whose logits exist at once; 0 for all of a row. `auto` takes all where they fit into `LOSS_WORK`, else the
    largest power of two of them that does.
    """
    asked, each = config.training.cross_entropy_chunk_tokens, _logit_bytes(config)
    if asked != "auto":
        return asked
    if tokens_per_rank(config) * each <= LOSS_WORK:
        return 0
    return 1 << max(LOSS_WORK // each, 1).bit_length() - 1


def _loss_in_chunks(config: RunConfig) -> bool:
    return 0 < loss_chunk_tokens(config) < tokens_per_rank(config)


def head_work(config: RunConfig) -> int:
    """Bytes of the last stage's head for one microbatch: final norm in and out, the gradient of the latter, logits of a
    chunk with what takes their place. Sequence parallelism gathers the norm's output and has its gradient for all tp.

    The table's own gradient is none of it: `head_gradient`.
    """
    model, p = config.model, config.parallel
    tp, size, tokens = p.tensor_model_parallel_size, config.training.element_bytes, tokens_per_rank(config)
    residual, whole = tokens * model.hidden_size * size // (tp if p.sequence_parallel else 1), 0
    if p.sequence_parallel and tp > 1:
        whole = tokens * model.hidden_size * size
    chunk = loss_chunk_tokens(config) if _loss_in_chunks(config) else tokens
    return 2 * residual + (2 * whole or residual) + chunk * _logit_bytes(config)


def head_gradient(config: RunConfig) -> int:
    """Bytes of the table's gradient, which the loss makes in its forward: in the dtype of sums while chunks add to it,
    so that no chunk rounds it. It cannot go to a bucket at once, because backward may scale the loss.
    """
    if "text" in config.frozen_parts:
        return 0
    each = config.training.accumulation_bytes if _loss_in_chunks(config) else config.training.element_bytes
    rows = vocabulary_rows(config.model, config.model.vocab_size, config.parallel.tensor_model_parallel_size)
    return rows * config.model.hidden_size * each


def message_bytes(config: RunConfig, stage: int, chunks: int) -> int:
    """Hidden states and gradients under way: two sends each way, a receive ahead, and the gradient that is at work."""
    stages = config.parallel.pipeline_model_parallel_size
    before, after = (stage > 0 or chunks > 1, stage < stages - 1 or chunks > 1) if stages > 1 else (False, False)
    return (3 * before + 4 * after) * residual_elements(config) * config.training.element_bytes


def _put_off(config: RunConfig, stage: int, layers: int, freed: int, world_size: int) -> int:
    """Bytes of the weight gradients that wait, of chunks with so many layers.

    In the first block, the last to run backward, those of the blocks behind it may be more than the `freed` bytes of
    activations that these had on the device.
    """
    p = config.parallel
    if p.pipeline_schedule != "zero_bubble" or not defers(stage, p.num_virtual_stages_per_pipeline_rank):
        return 0
    waiting = layer_put_off(config)
    return put_off(config, stage, world_size) * layers * waiting + max(0, (layers - 1) * waiting - freed)


def stage_memory(config: RunConfig, stage: int, chunks: Sequence[range], world_size: int) -> RankMemory:
    """Bytes on one rank of a pipeline stage that holds the layers `chunks` (one range for each model chunk)."""
    p, granularity = config.parallel, config.training.recompute_granularity
    size, wide = config.training.element_bytes, config.training.accumulation_bytes
    held, layer = in_flight(config, stage, world_size), layer_activations(config, granularity)
    counts = offloaded_blocks(config, chunks)
    staying = max(len(layers) - count for layers, count in zip(chunks, counts, strict=True))
    received = residual_elements(config) * size if any(counts) and (stage, len(chunks)) != (0, 1) else 0
    at_once = max(staying, min(2, max(map(len, chunks)))) if any(counts) else staying
    activations = held * received + ((held - 1) * staying + at_once) * layer
    activations += _put_off(config, stage, max(map(len, chunks)), (at_once - 1) * layer, world_size)
    if stage == 0:
        activations += in_flight_rows(config, world_size) * vision.vision_activations(config, size, wide, world_size)
    last = stage == p.pipeline_model_parallel_size - 1
    shared = p.pipeline_model_parallel_size == 1 and not config.model.untie_embeddings_and_output_weights
    return RankMemory(
        **vars(stage_state(config, chunks, world_size, layer, layer_activations(config, "none"))),
        activations=activations,
        messages=message_bytes(config, stage, len(chunks)),
        block=block_work(config) + (head_gradient(config) if shared else 0),
        head=head_work(config) + head_gradient(config) if last else 0,
        host=held * (max(counts) * layer - received),
    )
