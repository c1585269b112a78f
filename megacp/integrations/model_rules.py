"""Checks whether a transformers model, or a call to it, supports a sharded sequence.

Each check depends only on the config, the class and the arguments, which are the same on all ranks.
So all ranks raise the same error before any message is sent. Names come from the library's configs
and signatures.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

# Values of `layer_types` for attention layers.
_ATTENTION_LAYERS = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "attention",
    "global",
    "local",
}
# Values of `layer_types` for layers that mix tokens only with attention, or not at all.
_TOKENWISE_LAYERS = {"moe", "mlp", "sparse", "dense"}
# Models whose other kinds of layers call functions that `recurrent.py` replaces, and these kinds.
_STATEFUL = {
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"), {"linear_attention"}
    ),
    **dict.fromkeys(("bamba", "granitemoehybrid", "nemotron_h"), {"linear_attention"}),
    **dict.fromkeys(("falcon_h1", "zamba2"), {"linear_attention", "hybrid"}),
    **dict.fromkeys(("lfm2", "lfm2_moe"), {"conv"}),
}
# Model types with `accepts_loss_kwargs = False` that still pass options to the library's loss. The
# Trainer does not pass them the number of tokens. It averages over each batch, and divides by the
# number of accumulation steps.
HANDS_ON: tuple[str, ...] = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
)
HANDS_ON += ("gemma3", "gemma4", "paligemma", "glm4v", "glm46v")
# Model types in which the tokens of an image attend to each other, marked by `token_type_ids`.
SEES_WITHIN_IMAGES = ("gemma3",)
# Layers other than attention that mix tokens, for models whose config has no layer types.
_MIXING = (torch.nn.RNNBase, torch.nn.Conv1d, torch.nn.MultiheadAttention)
# Class name endings of models that pool the sequence into one vector.
_ONE_ANSWER: tuple[str, ...] = (
    "ForSequenceClassification",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
)
_ONE_ANSWER += ("ForPreTraining", "DoubleHeadsModel")


def refuse(*problems: str) -> None:
    """Raise ValueError with all `problems`, if there are any."""
    if problems:
        raise ValueError("context_parallel: " + "; ".join(problems))


def stock_model(module: torch.nn.Module) -> Any:
    """Return the outermost transformers model in `module`, or None."""
    from transformers import PreTrainedModel

    return next((x for x in module.modules() if isinstance(x, PreTrainedModel)), None)


def model_problems(model: torch.nn.Module, tokens: int) -> list[str]:
    """Return the reasons why `model` cannot run in any block of `tokens` tokens.

    `call_problems` returns the reasons that depend on a call.
    """
    stock = stock_model(model)
    if stock is None:
        return []  # the caller's own model, which calls our attention
    from transformers import AttentionInterface

    config = stock.config.get_text_config()
    language = stock.get_decoder() if hasattr(stock, "get_decoder") else stock
    name = str(getattr(config, "model_type", "") or type(config).__name__)

    # Find layers that mix tokens without attention. If the config has no layer types, search for
    # modules that are known to mix tokens.
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    known = _ATTENTION_LAYERS | _TOKENWISE_LAYERS | _STATEFUL.get(name, set())
    strange = {str(kind) for kind in kinds} - known
    if not strange and name not in _STATEFUL:
        strange = {type(x).__name__ for x in language.modules() if isinstance(x, _MIXING)}
    found = []
    if strange:
        found.append(
            f"{name} has layers of type {', '.join(sorted(strange))}, which would process only "
            "the tokens of one rank: layers that mix tokens without attention are supported only "
            f"in {', '.join(_STATEFUL)}"
        )
    scale = getattr(config, "floor_scale", None)
    if getattr(config, "attn_temperature_tuning", False) and scale is not None and tokens >= scale:
        found.append(
            f"{name} scales queries according to their index on the rank (attn_temperature_tuning),"
            f" which is wrong for {scale:g} or more tokens: {tokens} tokens are not supported"
        )
    # Other implementations ignore the open block; ours has the attribute `is_sharded`.
    chosen = config._attn_implementation
    if not found and not hasattr(AttentionInterface().get(chosen), "is_sharded"):
        found.append(
            f'attn_implementation="{chosen}" attends only to the tokens of one rank: '
            'call register_with_transformers() and model.set_attn_implementation("megacp")'
        )
    return found


def rotary_length(config: Any, longest: int) -> int:
    """Return a number that must be equal on all ranks if their rotary angles are to agree.

    `longest` is the largest position on this rank plus one. The number is 0 if the angles do not
    depend on it, as for most rope types, and for lengths up to the trained length.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    limit = getattr(config, "max_position_embeddings", 0)
    # Some models have one set of parameters per layer type.
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
    """Return the reasons why a call to a transformers model cannot use a sharded sequence.

    `held` is the number of tokens on this rank, or None if the sequence is sharded later, inside
    the model.
    """
    name = type(module).__name__
    value = functools.partial(argument, module, args, kwargs)
    found = []
    if name.endswith(_ONE_ANSWER):
        found.append(
            f"{name} pools the sequence into one output, but receives only the tokens of one "
            "rank: call its base model"
        )
    given = [x for x in ("labels", "shift_labels", "num_items_in_batch") if value(x) is not None]
    # TRL's fused head returns a loss per token, and TRL divides the sum.
    token_by_token = bool(value("fused_lm_head")) and "shift_labels" in given
    if "labels" in given and len(given) < 3 and not token_by_token:
        found.append(
            f"{name} receives labels: it would shift them within the tokens of one rank and divide "
            "the loss by that rank's number of labels; also pass shift_labels (shifted before "
            "sharding) and num_items_in_batch, or compute the loss from the logits"
        )
    # The argument of a call overrides the config.
    router = value("output_router_logits")
    if router is None:
        router = getattr(module.config.get_text_config(), "output_router_logits", False)
    if router:
        found.append(
            f"{name} has output_router_logits: its load-balancing loss is not a sum over tokens; "
            "disable it, in TRL with SFTConfig(router_aux_loss_coef=0.0)"
        )
    # Position ids must refer to the whole sequence, and be sharded like the tokens.
    if held is None:
        return found
    positions = value("position_ids")
    if "position_ids" not in _signature(type(module).forward):
        found.append(
            f"{name} does not accept position_ids: it would number each rank's tokens from 0"
        )
    elif positions is None:
        found.append(
            f"{name} receives no position_ids: it would number each rank's tokens from 0; add the "
            "position_ids of the whole sequence to the buffers and pass them to the model"
        )
    elif positions.shape[-1] != held:
        found.append(
            f"position_ids {tuple(positions.shape)} are not in the buffers: this rank has {held} "
            "tokens; add the position_ids to the buffers"
        )
    return found


def argument(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str
) -> Any:
    """Return the argument `name` of a call to `module.forward`, or None if it is not passed."""
    if name in kwargs:
        return kwargs[name]
    # The argument may also be positional.
    place = _signature(type(module).forward).get(name, len(args))
    if place >= len(args):
        return None
    return args[place]


@functools.cache
def _signature(forward: Callable[..., Any]) -> Mapping[str, int]:
    """Return each argument's position in the signature of `forward`, without `self`."""
    _, *names = inspect.signature(forward).parameters
    return {name: place for place, name in enumerate(names)}
