"""A chunk of the decoder: consecutive blocks, plus the embedding and vision encoder at the start of
the model, and the output head with the loss at its end.

The same class is used for a whole model, a pipeline stage and a virtual stage. Stages exchange only
hidden states.
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
"""Callback that is called with each part as soon as it is built, in the order of the forward pass.
The last call is for the whole chunk, whose parameters include those that belong to no other part.
"""


class OutputHead(nn.Module):
    """Final norm, output projection and loss.

    If the weights are tied, `table` is the embedding's table. The loss computes the logits of
    `chunk_tokens` tokens at once (0: all tokens).
    """

    def __init__(self, norm: nn.Module, table: VocabularyTable, chunk_tokens: int) -> None:
        super().__init__()
        self.norm = norm
        self.table = table
        self.chunk_tokens = chunk_tokens

    def forward(self, hidden: torch.Tensor, target: Target) -> torch.Tensor:
        """Return this rank's part of the loss for `hidden[t/tp, h]`.

        The result is a scalar in fp32 or wider, replicated over tp.
        """
        return self.table.loss(self.norm(hidden), target, self.chunk_tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of `hidden[t/tp, h]` for this rank's vocabulary rows (no padding)."""
        return self.table.logits(self.norm(hidden))


class LanguageModelChunk(nn.Module):
    """Consecutive layers of the decoder.

    A chunk that starts at layer 0 includes the embedding and the vision encoder; a chunk with the
    last layer includes the head. `tied_across` means that embedding and head are copies of one
    table on two stages. The loss computes the logits of `loss_chunk_tokens` tokens at once (0: all
    tokens). `made` is called with every part.
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
        self.backend = backend
        self.has_experts = config.num_experts > 0
        self.vision: VisionEncoder | None = None
        self.is_first = layers.start == 0
        self.is_last = layers.stop == config.num_layers
        tied = not config.untie_embeddings_and_output_weights
        # the gradients of a tied table's two copies are summed over this axis
        shared = ("embedding",) if tied and tied_across else ()
        if self.is_first:
            embedding = vocabulary_table(config, "embedding", config.embedding_rows)
            self.embedding = backend.vocabulary(TableSpec(embedding, shared))
            # a tied table that is also the head is needed until the end, so it stays in the chunk
            if not (tied and self.is_last):
                made(self.embedding, "embedding")
            if vision is not None and vision.vision_num_layers > 0:
                self.vision = VisionEncoder(vision, config, backend, recompute)
                made(self.vision, "vision")
        # build (and, with ZeRO-3, shard) one block at a time
        self.blocks = nn.ModuleList()
        for layer in layers:
            self.blocks.append(Block(layer, config, backend, recompute))
            made(self.blocks[-1], "block")
        if self.is_last:
            norm = backend.norm(NormSpec("final_norm", config.hidden_size, config.norm_epsilon))
            if tied and self.is_first:
                last = self.embedding
            else:
                # a tied copy has the embedding's name, and only one of the two counts in the norm
                name = "embedding" if tied else "head"
                tensor = vocabulary_table(config, name, config.vocab_size)
                last = backend.vocabulary(TableSpec(tensor, shared, counted=not tied))
            self.head = OutputHead(norm, last, loss_chunk_tokens)
            if not (tied and self.is_first):
                made(self.head, "head")
        made(self, "chunk")
        # rotary embedding: frequencies [rotary_dim / 2]
        scaling = RotaryScaling(
            config.rope_scaling,
            config.rope_scaling_factor,
            config.rope_original_max_positions,
            config.yarn_correction_range_round_to_int,
        )
        self.rotary_factor = scaling.attention_factor
        frequencies = inverse_frequencies(config.rotary_dim, config.rotary_base, scaling)
        self.frequencies = frequencies.to(next(self.parameters()).device)
        self.axes = rotary_axes(config.mrope_section, config.rotary_dim // 2)
        self.replaces = vision is not None and vision.family.replaces
        """Whether features replace the embeddings of image tokens instead of being added to them.
        """
        self.multiplier = config.embedding_multiplier
        # with --window-rotary-base, sliding-window layers are not scaled for longer contexts
        self.window_frequencies = None
        if config.window_rotary_base is not None:
            frequencies = inverse_frequencies(
                config.rotary_dim, config.window_rotary_base, RotaryScaling()
            )
            self.window_frequencies = frequencies.to(self.frequencies.device)

    def hidden(self, x: torch.Tensor | None, batch: LocalBatch, tokens: int = 0) -> torch.Tensor:
        """Return the hidden state `[t/tp, h]` after the blocks of this chunk.

        In the first chunk, `x` is the result of `embedded`, or None to compute it here. `tokens` is
        the same as in `Routes`.
        """
        if x is None:
            x = self.embedded(batch)
        positions = batch.position_ids
        if positions.dim() == 2:
            # [t, 3] -> [t, rotary_dim / 2]: each angle follows the time, row or column
            positions = positions[:, self.axes]
        near = far = cos_sin(positions, self.frequencies, self.backend.dtype, self.rotary_factor)
        if self.window_frequencies is not None:
            near = cos_sin(positions, self.window_frequencies, self.backend.dtype)
        # with sequence parallelism, tp ranks have different tokens between linear layers
        if self.backend.sequence_parallel:
            names = slice_of(batch.token_names, self.backend.tp)
            parts = self.backend.tp
        else:
            names = batch.token_names
            parts = single_axis("one")
        routes = Routes.of(batch.plan, parts, x.device, tokens) if self.has_experts else None
        inputs = BlockInputs(batch.plan, (far, near), names, batch.token_names, batch.key, routes)
        # for example, Transformer Engine's FP8 context
        with self.backend.precision():
            for block in self.blocks:
                x = block(x, inputs)
        return x

    def embedded(self, batch: LocalBatch, features: torch.Tensor | None = None) -> torch.Tensor:
        """Return the embeddings of this rank's tokens, including the features of image tokens.

        `features` is the output of `vision` for the batch's images, or None to compute it here.
        Only the first chunk has an embedding. Raise ValueError if the batch has image tokens but
        the model has no vision tower.
        """
        x = self.embedding(batch.tokens)
        if self.multiplier != 1:
            # round the factor to the dtype of the weights, like transformers
            x = x * x.new_full((), self.multiplier)
        if self.vision is None:
            if batch.vision is not None and len(batch.vision.routes.source):
                raise ValueError(
                    f"a row has {len(batch.vision.routes.source)} image tokens, but the model has "
                    "no vision tower: set --vision-num-layers above 0"
                )
            return x
        if batch.vision is None:
            # no rank has images; empty features still give the vision parameters a gradient of 0
            features = self.vision(None, None)
            rows = np.empty(0, np.int64)
        else:
            images = batch.vision
            if features is None:
                features = self.vision(images.patches, images.pooling, images.grids)
            # send features to the cp ranks that have their image tokens
            features, rows = place_features(features, images)
        return add_features(
            x, features, rows, self.backend.tp, self.backend.sequence_parallel, self.replaces
        )

    def row_logits(self, batch: LocalBatch, features: torch.Tensor | None = None) -> torch.Tensor:
        """Return a row's logits in the order of its tokens: `[T, vocabulary rows of this rank]`.

        `features` is the same as in `embedded`. The chunk must be the whole model. Raise ValueError
        if cp ranks share the row.
        """
        hidden = self.hidden(self.embedded(batch, features), batch)
        return batch.in_row_order(self.head.logits(hidden))  # [t, vocabulary] -> [T, vocabulary]

    def forward(
        self, x: torch.Tensor | None, batch: LocalBatch, denominator: float, tokens: int = 0
    ) -> torch.Tensor:
        """Return the hidden state or, in the last chunk, this rank's part of the loss.

        The loss is divided by the step's denominator. It is a scalar in fp32 or wider, replicated
        over tp.
        """
        hidden = self.hidden(x, batch, tokens)
        if not self.is_last:
            return hidden
        return self.head(hidden, Target(batch.labels, batch.loss_weights, denominator))
