"""Reasons why a transformers model, or a call of it, cannot run over a sharded sequence.

Each reason follows from the config, the class and the arguments, which are the same on all
ranks. So all ranks refuse alike, before any message. Names come from the library's configs and
signatures.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

# Values of `layer_types` whose layers are attention.
_ATTENTION_LAYERS = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "attention",
    "global",
    "local",
}
# Values of `layer_types` whose layers mix tokens by attention only, or not at all.
_TOKENWISE_LAYERS = {"moe", "mlp", "sparse", "dense"}
# Models with other kinds of layers, which call the functions of `recurrent.py`, and the kinds.
_STATEFUL = {
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"), {"linear_attention"}
    ),
    **dict.fromkeys(("bamba", "granitemoehybrid", "nemotron_h"), {"linear_attention"}),
    **dict.fromkeys(("falcon_h1", "zamba2"), {"linear_attention", "hybrid"}),
    **dict.fromkeys(("lfm2", "lfm2_moe"), {"conv"}),
}
# Model types with `accepts_loss_kwargs = False` that still pass options to the library's loss. The
# Trainer does not give them the number of tokens. It takes the mean of each batch, and divides by
# the accumulated steps.
HANDS_ON: tuple[str, ...] = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
)
HANDS_ON += ("gemma3", "gemma4", "paligemma", "glm4v", "glm46v")
# Model types whose image tokens (by `token_type_ids`) attend to each other.
SEES_WITHIN_IMAGES = ("gemma3",)
# Other layers that mix tokens, in models whose config has no layer types.
_MIXING = (torch.nn.RNNBase, torch.nn.Conv1d, torch.nn.MultiheadAttention)
# Endings of class names of models that pool the sequence into one vector.
_ONE_ANSWER: tuple[str, ...] = (
    "ForSequenceClassification",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
)
_ONE_ANSWER += ("ForPreTraining", "DoubleHeadsModel")


def refuse(*problems: str) -> None:
    """Raise one ValueError with all `problems`, if there are any."""
    if problems:
        raise ValueError("context_parallel: " + "; ".join(problems))


def stock_model(module: torch.nn.Module) -> Any:
    """Return the outermost transformers model in `module`, or None."""
    from transformers import PreTrainedModel

    return next((x for x in module.modules() if isinstance(x, PreTrainedModel)), None)


def model_problems(model: torch.nn.Module, tokens: int) -> list[str]:
    """Return the reasons why `model` can never run in a block over `tokens` tokens.

    Reasons that depend on a call are found in the call (`call_problems`).
    """
    stock = stock_model(model)
    if stock is None:
        return []  # the caller's own model, which calls our attention
    from transformers import AttentionInterface

    config = stock.config.get_text_config()
    language = stock.get_decoder() if hasattr(stock, "get_decoder") else stock
    name = str(getattr(config, "model_type", "") or type(config).__name__)

    # Layers that mix tokens in another way than attention. If the config has no layer types, look
    # for modules that are known to mix tokens.
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    known = _ATTENTION_LAYERS | _TOKENWISE_LAYERS | _STATEFUL.get(name, set())
    strange = {str(kind) for kind in kinds} - known
    if not strange and name not in _STATEFUL:
        strange = {type(x).__name__ for x in language.modules() if isinstance(x, _MIXING)}
    found = []
    if strange:
        found.append(
            f"{name} has layers of type {', '.join(sorted(strange))}, which would only see the "
            "tokens of one rank: layers that mix tokens without attention are supported in "
            f"{', '.join(_STATEFUL)}"
        )
    scale = getattr(config, "floor_scale", None)
    if getattr(config, "attn_temperature_tuning", False) and scale is not None and tokens >= scale:
        found.append(
            f"{name} scales queries by their place among the tokens of a rank from {scale:g} "
            "tokens "
            f"(attn_temperature_tuning): {tokens} tokens are not supported"
        )
    # Other implementations do not know the open block; ours has the attribute `is_sharded`.
    chosen = config._attn_implementation
    if not found and not hasattr(AttentionInterface().get(chosen), "is_sharded"):
        found.append(
            f'attn_implementation="{chosen}" of transformers only sees the tokens of one rank: '
            'call register_with_transformers() and model.set_attn_implementation("megacp")'
        )
    return found


def rotary_length(config: Any, longest: int) -> int:
    """Return a number that must be equal on all ranks for equal rotary angles.

    `longest - 1` is the last position of this rank. The number is 0 if angles do not depend on the
    longest position: for most types, and up to the trained length.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    limit = getattr(config, "max_position_embeddings", 0)
    # Some models have one set of parameters per type of layer.
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    for one in [rope, *nested]:
        kind = str(one.get("rope_type"))
        if kind == "longrope":
            # longrope has two sets of angles, below and above this length
            name = "original_max_position_embeddings"
            return int(longest > (one.get(name) or getattr(config, name, None) or limit))
        # dynamic angles change with every length above the trained one
        if "dynamic" in kind and longest > limit:
            return longest
    return 0


def call_problems(
    module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], held: int | None
) -> list[str]:
    """Return the reasons why a call of a transformers model does not fit this rank's `held` tokens.

    `held` is None if the sequence is sharded later, inside the model.
    """
    name = type(module).__name__
    value = functools.partial(argument, module, args, kwargs)
    found = []
    if name.endswith(_ONE_ANSWER):
        found.append(
            f"{name} pools the sequence into one answer, but only sees the tokens of one rank: "
            "call "
            "its base model"
        )
    given = [x for x in ("labels", "shift_labels", "num_items_in_batch") if value(x) is not None]
    # TRL's fused head returns the loss of each token, and TRL divides it.
    token_by_token = bool(value("fused_lm_head")) and "shift_labels" in given
    if "labels" in given and len(given) < 3 and not token_by_token:
        found.append(
            f"{name} receives labels: it would shift them within the tokens of one rank and divide "
            "by the number of these; also give shift_labels (shifted before sharding) and "
            "num_items_in_batch, or compute the loss from logits"
        )
    # The argument of a call overrides the config.
    router = value("output_router_logits")
    if router is None:
        router = getattr(module.config.get_text_config(), "output_router_logits", False)
    if router:
        found.append(
            f"{name} has output_router_logits: its load-balancing loss is not a sum over tokens; "
            "switch it off, in TRL with SFTConfig(router_aux_loss_coef=0.0)"
        )
    # Position ids must count through the whole sequence, and be sharded like the tokens.
    if held is None:
        return found
    positions = value("position_ids")
    if "position_ids" not in _signature(type(module).forward):
        found.append(
            f"{name} takes no position_ids: it would number the tokens of each rank from 0"
        )
    elif positions is None:
        found.append(
            f"{name} receives no position_ids: it would number the tokens of each rank from 0; put "
            "the position_ids of the whole sequence among the buffers and give them to the model"
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
    """Return the argument `name` of a call of `module.forward`, or None if it is not given."""
    if name in kwargs:
        return kwargs[name]
    # An argument may also be given by its position.
    place = _signature(type(module).forward).get(name, len(args))
    if place >= len(args):
        return None
    return args[place]


@functools.cache
def _signature(forward: Callable[..., Any]) -> Mapping[str, int]:
    """Return the arguments of a class's `forward` with their places, without `self`."""
    _, *names = inspect.signature(forward).parameters
    return {name: place for place, name in enumerate(names)}
