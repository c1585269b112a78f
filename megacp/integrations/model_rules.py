"""Why a model of transformers cannot run over a sharded sequence, or not with these arguments.

Each reason is read from the config, the class and the arguments, which are the same on all ranks:
so all ranks refuse alike and before a message. The names are those of the library's configs and
signatures, across its models.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

_ATTENTION_LAYERS = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "attention",
    "global",
    "local",
}
_TOKENWISE_LAYERS = {"moe", "mlp", "sparse", "dense"}
"""Values of `layer_types` whose layers mix tokens by attention alone, or not at all."""
_STATEFUL = {
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"), {"linear_attention"}
    ),
    **dict.fromkeys(("bamba", "granitemoehybrid", "nemotron_h"), {"linear_attention"}),
    **dict.fromkeys(("falcon_h1", "zamba2"), {"linear_attention", "hybrid"}),
    **dict.fromkeys(("lfm2", "lfm2_moe"), {"conv"}),
}
"""Models whose layers of other kinds call the functions of `recurrent`, and those kinds."""
HANDS_ON: tuple[str, ...] = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
)
HANDS_ON += ("gemma3", "gemma4", "paligemma", "glm4v", "glm46v")
"""Model types that say `accepts_loss_kwargs = False`, and yet hand options to the library's loss of
shifted labels: the Trainer gives them no number of tokens, takes the mean of each batch, and
divides by the accumulated steps.
"""
SEES_WITHIN_IMAGES = ("gemma3",)
"""Model types in which the tokens of an image see each other, as `token_type_ids` say."""
_MIXING = (torch.nn.RNNBase, torch.nn.Conv1d, torch.nn.MultiheadAttention)
"""Layers that mix tokens beside the registered attention, in models whose config names no types."""
_ONE_ANSWER: tuple[str, ...] = (
    "ForSequenceClassification",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
)
_ONE_ANSWER += ("ForPreTraining", "DoubleHeadsModel")
"""Ends of class names of models that pool the sequence into one vector."""


def refuse(*problems: str) -> None:
    """Raise one ValueError with all `problems`, when there are any."""
    if problems:
        raise ValueError("context_parallel: " + "; ".join(problems))


def stock_model(module: torch.nn.Module) -> Any:
    """The outermost model of transformers in `module`, or None."""
    from transformers import PreTrainedModel

    return next((x for x in module.modules() if isinstance(x, PreTrainedModel)), None)


def model_problems(model: torch.nn.Module, tokens: int) -> list[str]:
    """Why `model` cannot run in a block over `tokens` at all; reasons that depend on a call are
    found in the call.
    """
    stock = stock_model(model)
    if stock is None:
        return []  # a model of the caller's own, which calls our attention
    from transformers import AttentionInterface

    config, language = (
        stock.config.get_text_config(),
        (stock.get_decoder() if hasattr(stock, "get_decoder") else stock),
    )
    name = str(getattr(config, "model_type", "") or type(config).__name__)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    strange = (
        {str(kind) for kind in kinds}
        - _ATTENTION_LAYERS
        - _TOKENWISE_LAYERS
        - _STATEFUL.get(name, set())
    )
    if name not in _STATEFUL:
        strange = strange or {
            type(x).__name__ for x in language.modules() if isinstance(x, _MIXING)
        }
    found = []
    if strange:
        found.append(
            f"{name} has layers of type {', '.join(sorted(strange))}, which would see this rank's "
            "tokens alone: "
            f"what mixes tokens beside attention is supported in {', '.join(_STATEFUL)} alone"
        )
    scale = getattr(config, "floor_scale", None)
    if getattr(config, "attn_temperature_tuning", False) and scale is not None and tokens >= scale:
        found.append(
            f"{name} scales queries by their place among this rank's tokens from {scale:g} tokens "
            "on "
            f"(attn_temperature_tuning): {tokens} tokens are not supported"
        )
    chosen = config._attn_implementation
    if not found and not hasattr(AttentionInterface().get(chosen), "is_sharded"):
        found.append(
            f'attn_implementation="{chosen}" of transformers sees the tokens of one rank alone: call '
            f'register_with_transformers() and model.set_attn_implementation("megacp")'
        )
    return found


def rotary_length(config: Any, longest: int) -> int:
    """A number that must be the same on all ranks, whose positions end at `longest - 1`, for equal
    rotary angles.

    0 where angles do not depend on the longest position of a call: for most types, and up to the
    trained length.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    for one in [
        rope,
        *(value for value in rope.values() if isinstance(value, Mapping)),
    ]:  # or one a type of layer
        kind, limit = str(one.get("rope_type")), getattr(config, "max_position_embeddings", 0)
        if kind == "longrope":
            name = "original_max_position_embeddings"
            return int(longest > (one.get(name) or getattr(config, name, None) or limit))
        if "dynamic" in kind and longest > limit:
            return longest
    return 0


def call_problems(
    module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], held: int | None
) -> list[str]:
    """Why a call of a stock model is not about a sequence with `held` tokens here; None: it is cut
    further inside.
    """
    name = type(module).__name__
    value = functools.partial(argument, module, args, kwargs)
    found = []
    if name.endswith(_ONE_ANSWER):
        found.append(
            f"{name} pools the sequence into one answer, from this rank's tokens alone: call its "
            "base model"
        )
    given = [x for x in ("labels", "shift_labels", "num_items_in_batch") if value(x) is not None]
    token_by_token = bool(value("fused_lm_head")) and "shift_labels" in given  # TRL divides itself
    if "labels" in given and len(given) < 3 and not token_by_token:
        found.append(
            f"{name} is given labels: it would shift them inside this rank's part and divide by "
            "this rank's tokens; "
            "give shift_labels (shifted before the cut) and num_items_in_batch too, or compute "
            "the loss from logits"
        )
    router = value("output_router_logits")
    if (
        getattr(module.config.get_text_config(), "output_router_logits", False)
        if router is None
        else router
    ):
        found.append(
            f"{name} has output_router_logits: its load-balancing loss is not a sum over tokens; "
            "switch it off, in TRL "
            f"by SFTConfig(router_aux_loss_coef=0.0)"
        )
    if held is None:
        return found
    positions = value("position_ids")
    if "position_ids" not in _signature(type(module).forward):
        found.append(
            f"{name} takes no position_ids: it numbers the tokens of each rank from 0 by itself"
        )
    elif positions is None:
        found.append(
            f"{name} is given no position_ids: it would count the tokens of each rank from 0; put "
            "the position_ids of "
            f"the whole sequence among the buffers and hand them to the model"
        )
    elif positions.shape[-1] != held:
        found.append(
            f"position_ids {tuple(positions.shape)} are not among the buffers: this rank has "
            f"{held} tokens"
        )
    return found


def argument(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str
) -> Any:
    """What a call gives `module.forward` as `name`, by name or by place; None where it does not."""
    if name in kwargs:
        return kwargs[name]
    names = _signature(type(module).forward)
    return args[names[name]] if names.get(name, len(args)) < len(args) else None


@functools.cache
def _signature(forward: Callable[..., Any]) -> Mapping[str, int]:
    """Names of the arguments of a class's `forward` and their places among positional ones, `self`
    left out.
    """
    return {
        name: place for place, name in enumerate(list(inspect.signature(forward).parameters)[1:])
    }
