"""Why a model of transformers cannot run over a sharded sequence, or not with these arguments.

Key property: each reason is read from the config, the class and the arguments, which are the same on all ranks. So all
ranks refuse alike and before a message. The names are those of the library's configs and signatures, across its models.
Rejected: a list of models that are known to work, which is out of date with each release.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megacp.huggingface.door.call_stack import ModuleCall, is_stock_model

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention", "global", "local"}
_TOKENWISE_LAYERS = {"moe", "mlp", "sparse", "dense"}
"""Values of `layer_types` whose layers mix tokens by attention alone, or not at all."""
_RECURRENT: tuple[str, ...] = ("mamba", "rwkv", "deltanet", "deltaattention", "linearattention", "lightning")
_RECURRENT += ("retention", "recurrentblock", "rglru", "shortconv", "hyena", "xlstm")
"""Parts of class names of layers that carry a state or a convolution along the sequence."""
_STATE_SPACE = re.compile("SSM|Ssm(?![a-z])")  # in SeedOssModel these letters are parts of two words
_ONE_ANSWER: tuple[str, ...] = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")
_ONE_ANSWER += ("ForPreTraining", "DoubleHeadsModel")
"""Ends of class names of models that pool the sequence into one vector."""


class RotaryLength(NamedTuple):
    """A rotary embedding whose angles depend on the longest position of a call."""

    kind: str
    limit: int
    """Sequences up to this length all get the same angles."""

    def number(self, longest: int) -> int:
        """A number that must be the same on all ranks, for the length `longest` on one of them."""
        if longest <= self.limit:
            return 0
        return 1 if self.kind == "longrope" else longest


def config_problems(config: Any, tokens: int) -> list[str]:
    """Layers of a text config that see this rank's tokens alone in a sequence of `tokens`."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    strange = sorted({str(kind) for kind in kinds} - _ATTENTION_LAYERS - _TOKENWISE_LAYERS)
    found = []
    if strange:
        found.append(
            f"{_name(config)} has layers of type {', '.join(strange)}, which would see this rank's tokens alone: "
            f"convolutions, state-space, linear and indexed attention along the sequence are not supported"
        )
    scale = getattr(config, "floor_scale", None)
    if getattr(config, "attn_temperature_tuning", False) and scale is not None and tokens >= scale:
        found.append(
            f"{_name(config)} scales queries by their place among this rank's tokens from {scale:g} tokens on "
            f"(attn_temperature_tuning): {tokens} tokens are not supported"
        )
    return found


def rotary_length(config: Any) -> RotaryLength | None:
    """The rope of a text config, where it takes a length from the positions of a call."""
    for rope in _ropes(config):
        kind = str(rope.get("rope_type", rope.get("type", "")))
        if "dynamic" in kind or kind == "longrope":
            limit = getattr(config, "max_position_embeddings", 0)
            if kind == "longrope":
                name = "original_max_position_embeddings"
                limit = rope.get(name) or getattr(config, name, None) or limit
            return RotaryLength(kind, int(limit))
    return None


def call_problems(calls: Sequence[ModuleCall], held: int, inner: int = 0) -> list[str]:
    """Why `calls` of transformers models, outermost first, are not about a sequence with `held` tokens here.

    `inner`: the number of the first one that is given this rank's tokens.
    """
    outer = type(calls[0].module).__name__
    found = _stock_problems(calls, outer) if is_stock_model(calls[0].module) else []
    calls = calls[inner:]
    if not any(_takes_positions(call) for call in calls):
        found.append(f"{outer} takes no position_ids: it numbers the tokens of each rank from 0 by itself")
        return found
    positions = positions_of(calls)
    if positions is None:
        found.append(
            f"{outer} is given no position_ids: it would count the tokens of each rank from 0; put the position_ids of "
            f"the whole sequence among the buffers and hand them to the model"
        )
    elif held not in positions.shape:
        found.append(
            f"position_ids {tuple(positions.shape)} are not those of the {held} tokens on this rank: put them among "
            f"the buffers"
        )
    return found


def _stock_problems(calls: Sequence[ModuleCall], outer: str) -> list[str]:
    """Answers, losses and options of a model of transformers that are not sums over tokens."""
    found = [
        f"{type(module).__name__} pools the sequence into one answer, from this rank's tokens alone: call its base "
        f"model and pool the gathered tokens outside of the block"
        for module, _, _ in calls
        if type(module).__name__.endswith(_ONE_ANSWER)
    ]
    given = [name for name in ("labels", "shift_labels", "num_items_in_batch") if _anywhere(calls, name) is not None]
    token_by_token = bool(_anywhere(calls, "fused_lm_head")) and "shift_labels" in given  # TRL divides itself
    if "labels" in given and len(given) < 3 and not token_by_token:
        found.append(
            f"{outer} is given labels: it would shift them inside this rank's part and divide by this rank's tokens; "
            f"give shift_labels (shifted before the cut) and num_items_in_batch too, or compute the loss from logits"
        )
    if _router_logits(calls):
        found.append(
            f"{outer} has output_router_logits: its load-balancing loss is not a sum over tokens, and that of one rank "
            f"is wrong; set it to False"
        )
    return found


def positions_of(calls: Sequence[ModuleCall]) -> torch.Tensor | None:
    """The `position_ids` given to the outermost model that takes any."""
    for call in calls:
        if _takes_positions(call):
            value = _argument(call, "position_ids")
            return value if isinstance(value, torch.Tensor) else None
    return None


def text_config(model: torch.nn.Module) -> Any:
    """The config of a model's language part, or of the model, or None."""
    config = getattr(model, "config", None)
    inner = getattr(config, "get_text_config", None)
    return inner() if callable(inner) else config


def watched_module(model: torch.nn.Module) -> torch.nn.Module | None:
    """The outermost module of `model` that takes `position_ids`, else the outermost of transformers, else None."""
    stock = [x for x in model.modules() if is_stock_model(x)]
    return next(
        (x for x in model.modules() if "position_ids" in _signature(type(x).forward)), stock[0] if stock else None
    )


def recurrent_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Modules whose class is named like a layer that carries a state along the sequence."""
    for module in model.modules():
        name = type(module).__name__
        if _STATE_SPACE.search(name) or any(part in name.lower().replace("_", "") for part in _RECURRENT):
            yield module


def model_problems(model: torch.nn.Module, tokens: int) -> list[str]:
    """Why `model` cannot run in a block over `tokens` at all; reasons that depend on a call are found in the call."""
    stock = next((x for x in model.modules() if is_stock_model(x)), None)
    return [] if stock is None else config_problems(text_config(stock), tokens)


def _takes_positions(call: ModuleCall) -> bool:
    """Its signature says so; one that takes any keyword may drop this one."""
    return "position_ids" in _signature(type(call.module).forward)


def _argument(call: ModuleCall, name: str) -> Any:
    if name in call.kwargs:
        return call.kwargs[name]
    names = _signature(type(call.module).forward)
    return call.args[names[name]] if names.get(name, len(call.args)) < len(call.args) else None


def _anywhere(calls: Sequence[ModuleCall], name: str) -> Any:
    """The first value given under this name, from the outside in."""
    return next((x for x in (_argument(call, name) for call in calls) if x is not None), None)


def _router_logits(calls: Sequence[ModuleCall]) -> bool:
    asked = _anywhere(calls, "output_router_logits")
    return bool(getattr(text_config(calls[0].module), "output_router_logits", False) if asked is None else asked)


@functools.cache
def _signature(forward: Callable[..., Any]) -> Mapping[str, int]:
    """Names of the arguments of a class's `forward` and their places among positional ones, `self` left out."""
    try:
        names = list(inspect.signature(forward).parameters)
    except (TypeError, ValueError):
        return {}
    return {name: place for place, name in enumerate(names[1:])}


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """The parameter sets of a config's rotary embeddings: one, or one for each type of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(config, name, None)
        if isinstance(rope, Mapping) and rope:
            inner = [value for value in rope.values() if isinstance(value, Mapping)]
            return inner or [rope]
    return []


def _name(config: Any) -> str:
    return str(getattr(config, "model_type", "") or type(config).__name__)
