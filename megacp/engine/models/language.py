"""The decoder as a chunk of a pipeline stage: optional embedding and vision, some blocks, optional
head with loss.

One class is the whole model, a stage or a virtual stage, by the layers it is given. Only the hidden
state crosses a stage boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import nn

from megacp.attention.ops.rotary import RotaryScaling, cos_sin, inverse_frequencies, rotary_axes
from megacp.distributed.differentiable import slice_of
from megacp.distributed.grid import single_axis
from megacp.engine.backends.native import NativeBackend, NormSpec
from megacp.engine.config.model import ModelConfig
from megacp.engine.config.training import KEEP_ALL, RECOMPUTE_MODES, RecomputeMode
from megacp.engine.config.vision import VisionConfig
from megacp.engine.expert_parallel.route import Routes
from megacp.engine.layers.stack import vocabulary_table
from megacp.engine.models.block import Block, BlockInputs
from megacp.engine.models.multimodal import VisionEncoder
from megacp.engine.rows.shard import LocalBatch
from megacp.engine.rows.vision import add_features, place_features
from megacp.engine.tensor_parallel.vocabulary import TableSpec, Target, VocabularyTable

Role = Literal["embedding", "vision", "block", "head", "chunk"]
Made = Callable[[nn.Module, Role], None]
"""Callback for each part as soon as it is built, in the order of the forward pass, and last for the
chunk: for the parameters that are in no other part.
"""


class OutputHead(nn.Module):
    """`table` may be the embedding's; the loss has logits for `chunk_tokens` tokens at a time (0:
    all).
    """

    def __init__(self, norm: nn.Module, table: VocabularyTable, chunk_tokens: int) -> None:
        super().__init__()
        self.norm, self.table, self.chunk_tokens = norm, table, chunk_tokens

    def forward(self, hidden: torch.Tensor, target: Target) -> torch.Tensor:
        """This rank's share of the loss of `hidden[t/tp, h]`, a scalar in fp32 or wider, replicated
        over tp.
        """
        return self.table.loss(self.norm(hidden), target, self.chunk_tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden[t/tp, h]` -> `[t, true vocabulary rows of this rank]`."""
        return self.table.logits(self.norm(hidden))


class LanguageModelChunk(nn.Module):
    """Layers `layers` of the decoder; embedding and vision when they begin at 0, the head when they
    end the model.

    `tied_across` says that embedding and head are copies of one table on two stages;
    `loss_chunk_tokens`, for how many tokens the loss has logits at a time (0: all). `made` hears of
    every part.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        backend: NativeBackend,
        *,
        recompute: RecomputeMode = RECOMPUTE_MODES[KEEP_ALL],
        tied_across: bool = False,
        vision: VisionConfig | None = None,
        made: Made = lambda part, role: None,
        loss_chunk_tokens: int = 0,
    ) -> None:
        super().__init__()
        self.backend, self.has_experts = backend, config.num_experts > 0
        self.vision: VisionEncoder | None = None
        self.is_first, self.is_last = layers.start == 0, layers.stop == config.num_layers
        tied = not config.untie_embeddings_and_output_weights
        shared = ("embedding",) if tied and tied_across else ()
        if self.is_first:
            embedding = vocabulary_table(config, "embedding", config.embedding_rows)
            self.embedding = backend.vocabulary(TableSpec(embedding, shared))
            if not (tied and self.is_last):
                made(self.embedding, "embedding")
            if vision is not None and vision.vision_num_layers > 0:
                self.vision = VisionEncoder(vision, config, backend, recompute)
                made(self.vision, "vision")
        self.blocks = nn.ModuleList()
        for layer in layers:
            self.blocks.append(Block(layer, config, backend, recompute))
            made(self.blocks[-1], "block")
        if self.is_last:
            norm = backend.norm(NormSpec("final_norm", config.hidden_size, config.norm_epsilon))
            if tied and self.is_first:
                last = self.embedding
            else:
                tensor = vocabulary_table(
                    config, "embedding" if tied else "head", config.vocab_size
                )
                last = backend.vocabulary(TableSpec(tensor, shared, counted=not tied))
            self.head = OutputHead(norm, last, loss_chunk_tokens)
            if not (tied and self.is_first):
                made(self.head, "head")
        made(self, "chunk")
        scaling = RotaryScaling(
            *(config.rope_scaling, config.rope_scaling_factor, config.rope_original_max_positions),
            config.yarn_correction_range_round_to_int,
        )
        self.rotary_factor = scaling.attention_factor
        frequencies = inverse_frequencies(config.rotary_dim, config.rotary_base, scaling)
        self.frequencies = frequencies.to(next(self.parameters()).device)
        self.axes = rotary_axes(config.mrope_section, config.rotary_dim // 2)
        self.replaces = vision is not None and vision.family.replaces
        """Whether features stand in the place of their tokens' embeddings, instead of being added
        to them.
        """
        self.window_frequencies, self.multiplier = None, config.embedding_multiplier
        if config.window_rotary_base is not None:
            frequencies = inverse_frequencies(
                config.rotary_dim, config.window_rotary_base, RotaryScaling()
            )
            self.window_frequencies = frequencies.to(self.frequencies.device)

    def hidden(self, x: torch.Tensor | None, batch: LocalBatch, tokens: int = 0) -> torch.Tensor:
        """The hidden state `[t/tp, h]` after this chunk's blocks; `x` is None on the first chunk,
        or what `embedded` gave. `tokens` as in `Routes`.
        """
        if x is None:
            x = self.embedded(batch)
        positions = batch.position_ids
        if positions.dim() == 2:  # [t, 3]: each angle turns by one of them
            positions = positions[:, self.axes]
        near = far = cos_sin(positions, self.frequencies, self.backend.dtype, self.rotary_factor)
        if self.window_frequencies is not None:
            near = cos_sin(positions, self.window_frequencies, self.backend.dtype)
        names = (
            slice_of(batch.token_names, self.backend.tp)
            if self.backend.sequence_parallel
            else batch.token_names
        )
        parts = self.backend.tp if self.backend.sequence_parallel else single_axis("one")
        routes = Routes.of(batch.plan, parts, x.device, tokens) if self.has_experts else None
        inputs = BlockInputs(batch.plan, (far, near), names, batch.token_names, batch.key, routes)
        with self.backend.precision():
            for block in self.blocks:
                x = block(x, inputs)
        return x

    def embedded(self, batch: LocalBatch, features: torch.Tensor | None = None) -> torch.Tensor:
        """The embedding of this rank's tokens, with the features of images added to their
        image-patch tokens.

        `features`: what `vision` gave for the images of the batch; None computes them. Only on the
        first chunk.
        """
        x = self.embedding(batch.tokens)
        if self.multiplier != 1:
            x = x * x.new_full((), self.multiplier)  # rounded as the weights are, as the library's
        if self.vision is None:
            if batch.vision is not None and len(batch.vision.routes.source):
                raise ValueError(
                    f"a row holds {len(batch.vision.routes.source)} image tokens, but the model "
                    "has no vision tower: "
                    "--vision-num-layers is 0"
                )
            return x
        if batch.vision is None:  # nothing to exchange on any rank
            features, rows = self.vision(None, None), np.empty(0, np.int64)
        else:
            if features is None:
                features = self.vision(
                    batch.vision.patches, batch.vision.pooling, batch.vision.grids
                )
            features, rows = place_features(features, batch.vision)
        return add_features(
            x, features, rows, self.backend.tp, self.backend.sequence_parallel, self.replaces
        )

    def row_logits(self, batch: LocalBatch, features: torch.Tensor | None = None) -> torch.Tensor:
        """Logits `[T, true vocabulary rows of this rank]` in the order of the row.

        `features` as in `embedded`. Only on a chunk that is the whole model. ValueError where cp
        ranks share the row.
        """
        hidden = self.hidden(self.embedded(batch, features), batch)
        return batch.in_row_order(self.head.logits(hidden))  # [t, vocabulary] -> [T, vocabulary]

    def forward(
        self, x: torch.Tensor | None, batch: LocalBatch, denominator: float, tokens: int = 0
    ) -> torch.Tensor:
        """The hidden state, or on the last chunk this rank's share of the loss over the step's
        denominator: a scalar in fp32 or wider, replicated over tp.
        """
        hidden = self.hidden(x, batch, tokens)
        return (
            self.head(hidden, Target(batch.labels, batch.loss_weights, denominator))
            if self.is_last
            else hidden
        )
