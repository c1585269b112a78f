"""Models of text and images over a sharded sequence: towers see whole images, the language model this rank's tokens.

    with context_parallel(axis, buffers=[labels], buffer_seq_dims=[1], ...) as context, cut_multimodal(model, context):
        logits = model(**batch, use_cache=False).logits          # the whole batch in, logits of this rank's tokens out
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / counted
        loss.backward()
    sum_gradients(model.parameters(), axis)

Key property: the model itself puts features of images into the embeddings of the whole sequence, computes positions and
makes its mask; what it then hands to its language model is cut there. So no model's merging is written again here.
Rejected: cutting the ids, as a rank cannot count which features belong to its tokens.

Every rank runs the towers on all images. A tower's gradient on a rank is that of the rank's tokens; the sum over ranks
is the whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from megacp.sdpa.call import refuse
from megacp.sdpa.mode import ContextParallel

_TOKENS = {"inputs_embeds": 1, "attention_mask": 1, "position_ids": -1, "visual_pos_masks": 1, "input_ids": 1}
"""Arguments of language models that lie along the sequence, and the dim that does."""


@contextlib.contextmanager
def cut_multimodal(model: torch.nn.Module, context: ContextParallel) -> Iterator[None]:
    """Calls of `model` take the whole sequence, and its language model gets the tokens of this rank.

    `model`: of transformers, with a language model (`get_decoder()`) beside its towers, such as Qwen2.5-VL, Qwen3-VL,
    Gemma 3 and LLaVA. `context`: the open block. Masks in which the tokens of an image see each other need a `Metadata`
    with these spans as the block's `document_ids`; a model that lays one over is refused without.

    Raises ValueError for a model without such parts, and for an argument of its language model that lies along the
    sequence in a way that is not known.
    """
    language, towers = _parts(model)

    def cut(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            refuse([f"{type(module).__name__} is given arguments without names, which cannot be told apart"])
        return args, _cut_arguments(context, kwargs)

    def enter(*_: Any) -> None:
        context.outside += 1

    def leave(*_: Any) -> None:
        context.outside -= 1

    with contextlib.ExitStack() as stack:
        context.language = language
        stack.callback(setattr, context, "language", None)
        stack.callback(language.register_forward_pre_hook(cut, with_kwargs=True).remove)
        for module in (part for tower in towers for part in tower.modules()):  # a layer may be recomputed by itself
            stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


def _parts(model: torch.nn.Module) -> tuple[torch.nn.Module, list[torch.nn.Module]]:
    """The language model, and what stands beside it on the way there but heads."""
    stock: Any = model
    language = stock.get_decoder() if hasattr(model, "get_decoder") else None
    path = [name for name, module in model.named_modules() if module is language]
    if not path or not path[0]:
        refuse([f"{type(model).__name__} has no language model of its own: cut_multimodal is for models with towers"])
    head = stock.get_output_embeddings()
    towers, here = [], model
    for name in path[0].split("."):
        towers += [child for other, child in here.named_children() if other != name and child is not head]
        here = getattr(here, name)
    if not towers:
        refuse([f"{type(model).__name__} has nothing beside its language model: call it in the block as it is"])
    return here, towers


def _cut_arguments(context: ContextParallel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a language model was given, of this rank's tokens alone."""
    whole = context.length
    known = {**_TOKENS, "deepstack_visual_embeds": 0}
    strange = [
        name for name, x in kwargs.items() if isinstance(x, torch.Tensor) and name not in known and whole in x.shape
    ]
    refuse([f"{name} of the language model lies along the sequence in a way that is not known" for name in strange])
    embeds = next(x for x in (kwargs.get("inputs_embeds"), kwargs.get("input_ids")) if x is not None)
    found = {**kwargs}
    if found.get("position_ids") is None:  # the model would count the tokens of this rank
        found["position_ids"] = torch.arange(whole, device=embeds.device).repeat(embeds.shape[0], 1)
    for name, dim in _TOKENS.items():
        x = found.get(name)
        if isinstance(x, torch.Tensor):
            found[name] = _cut_axes(context, x) if name == "position_ids" and x.dim() == 3 else context.cut(x, dim)
    mask, features = kwargs.get("visual_pos_masks"), kwargs.get("deepstack_visual_embeds")
    if mask is not None and features is not None:
        number = (mask.flatten().cumsum(0) - 1).view_as(mask)  # [B, S]: the row of features of each image token
        rows = context.cut(number)[found["visual_pos_masks"]]
        found["deepstack_visual_embeds"] = [x[rows] for x in features]
    return found


def _cut_axes(context: ContextParallel, positions: torch.Tensor) -> torch.Tensor:
    """Positions `[axes, B, S]`, such as time, height and width -> `[axes, B, s]`."""
    return torch.stack([context.cut(axis) for axis in positions])
