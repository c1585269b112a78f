"""The gated MLP: gate and up in one product, and down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from megacp.engine.config.model import ModelConfig
from megacp.engine.config.run import RunConfig
from megacp.engine.layers.table import LayerKind, Linear, Share, output_std

GATE_UP, DOWN = ("gate", "up"), ("down",)
"""Linears of its two products."""
Width = Callable[[ModelConfig], int]


def _width(model: ModelConfig) -> int:
    return model.ffn_hidden_size


def _linears(width: Width, model: ModelConfig) -> dict[str, Linear]:
    hidden, ffn, bias = model.hidden_size, width(model), model.add_mlp_bias
    return {
        "gate": Linear(hidden, ffn, model.init_method_std, bias),
        "up": Linear(hidden, ffn, model.init_method_std, bias),
        "down": Linear(ffn, hidden, output_std(model), bias, "columns"),
    }


def _kept(name: str, width: Width, share: Share) -> tuple[int, int]:
    """Gate and up, and SwiGLU's output: 3 f / tp a token; nothing of tiles."""
    if share.tiled:
        return 0, 0
    wide = share.tokens * width(share.model) // share.tp
    return 2 * wide + wide * (share.cheap and share.reads_again(name, DOWN)), 0


def tile_work(config: RunConfig, width: Width = _width) -> int:
    """Bytes of one tile while its backward runs; 0 where the MLP runs over the row at once."""
    share, t = Share(config), config.training
    tokens = min(t.mlp_chunk_tokens, share.tokens)
    rows = tokens // (share.tp if config.parallel.sequence_parallel else 1)
    elements = rows * config.model.hidden_size + 3 * tokens * width(config.model) // share.tp
    return elements * t.element_bytes + rows * t.accumulation_bytes


def _work(name: str, width: Width, share: Share) -> int:
    """SwiGLU's gradient becomes that of gate and up (2 f a token / tp), from the gradient of its output (f). The
    gradient of the block (h) stands beside.

    Its output (f) is gone by then. Over tiles (`tile_work`) the input's gradient stands beside, and sums of the three
    weights' gradients, wide and once more in the model's dtype.
    """
    config, hidden, ffn = share.config, share.model.hidden_size, width(share.model)
    if share.tiled:
        tile = min(config.training.mlp_chunk_tokens, share.tokens)
        weights = 3 * hidden * ffn // share.tp * (share.wide_size + share.size)
        beside = (2 * share.residual + 2 * tile * ffn // share.tp) * share.size
        return tile_work(config, width) + beside + weights * ("text" not in config.frozen_parts)
    # selective keeps no output of SwiGLU that could go, nor does a frozen product
    held = 2 if share.cheap and share.reads_again(name, DOWN) else 3
    # gathered for the last product
    whole = share.tokens * hidden if config.parallel.sequence_parallel and share.tp > 1 else 0
    return (share.residual + whole + held * share.tokens * ffn // share.tp) * share.size


def gated_mlp(name: str, width: Width) -> LayerKind:
    """An MLP of a width, whose input something else keeps."""
    rows = partial(_linears, width), (GATE_UP, DOWN), partial(_kept, name, width), partial(_work, name, width)
    return LayerKind(name, *rows)


def _kept_with_input(share: Share) -> tuple[int, int]:
    return _MLP.kept(share)[0] - share.unread("mlp", GATE_UP) * (not share.tiled), 0


_MLP = gated_mlp("mlp", _width)
DENSE = replace(_MLP, kept=_kept_with_input)
