"""Models of text and images over a sharded sequence: towers see whole images, the language model
this rank's tokens.

The model itself puts features of images into the embeddings of the whole sequence; what it then
hands to its language model is cut there. Each rank runs the towers on whole images of its own,
evenly by patches. One exchange gives every rank the features of all images, and its backward brings
the partial gradients home: their sum over ranks is the whole.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from megacp.distributed.differentiable import gather_uneven
from megacp.engine.rows.image_shards import compute_image_shard_boundaries, units_of
from megacp.integrations.context import ContextParallel
from megacp.integrations.model_rules import model_problems, refuse

_TOKENS = {
    "inputs_embeds": 1,
    "attention_mask": 1,
    "position_ids": -1,
    "visual_pos_masks": 1,
    "input_ids": 1,
}
_TOKENS["per_layer_inputs"] = 1  # of Gemma 4
"""Arguments of language models that lie along the sequence, and the dim that does."""
_OTHERS = ("deepstack_visual_embeds", "labels", "shift_labels")
"""Arguments that may be as long by chance, or are cut by the caller's block."""
_OF_TOWERS = {
    "get_image_features": [["pixel_values"], ["pixel_values", "image_grid_thw"]],
    "get_video_features": [["pixel_values_videos", "video_grid_thw"]],
}
"""Methods that turn images into features, and their arguments: images in dim 0, or patches end to
end with grids.
"""


@contextlib.contextmanager
def cut_multimodal(
    model: torch.nn.Module, context: ContextParallel, vision: str = "sharded"
) -> Iterator[None]:
    """Calls of `model` take the whole sequence, and its language model gets the tokens of this
    rank.

    `model`: of transformers, with a language model (`get_decoder()`) beside its towers, such as
    Qwen2.5-VL, Qwen3-VL, Gemma 3 and LLaVA. `context`: the open block. Masks in which the tokens of
    an image see each other need a `Metadata` with these spans as the block's `document_ids`; a
    model that lays one over is refused without.

    `vision`: `sharded`: each rank runs the towers on some of the images, where that is exact; a
    rank for which none are left runs the smallest one for nothing, so that ranks that share weights
    meet in every layer. `replicated`: all ranks run all.

    Raises ValueError for a model without such parts, and for an argument of its language model that
    lies along the sequence in a way that is not known.
    """
    parts = find_towers(model)
    if parts is None:
        raise ValueError(
            f"{type(model).__name__} has no towers beside a language model: call it in the block "
            "as it is"
        )
    language, towers = parts
    owner = next(
        module
        for module in model.modules()
        if any(child is language for child in module.children())
    )
    if vision not in ("sharded", "replicated"):
        refuse(f"vision is {vision}; choose sharded or replicated")

    def cut(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        return args, _cut_arguments(context, kwargs)

    def enter(*_: Any) -> None:
        context.outside += 1

    def leave(*_: Any) -> None:
        context.outside -= 1

    with contextlib.ExitStack() as stack:
        context.language = language
        stack.callback(setattr, context, "language", None)
        if id(model) not in context.modules:
            if context.axis.size > 1:
                refuse(*model_problems(model, context.length))
            stack.enter_context(context.watching(model))
        stack.callback(language.register_forward_pre_hook(cut, with_kwargs=True).remove)
        stack.callback(
            language.register_forward_pre_hook(context.check_call, with_kwargs=True).remove
        )
        for module in (
            part for tower in towers for part in tower.modules()
        ):  # a layer may be recomputed by itself
            stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        if vision == "sharded" and context.axis.size > 1 and told_apart(owner, towers):
            for name in (name for name in _OF_TOWERS if hasattr(owner, name)):
                setattr(
                    owner,
                    name,
                    functools.partial(_sharded_features, context, name, getattr(owner, name)),
                )
                stack.callback(delattr, owner, name)
        yield


def find_towers(model: torch.nn.Module) -> tuple[torch.nn.Module, list[torch.nn.Module]] | None:
    """The language model, and what stands beside it on the way there but heads; None where either
    is missing.
    """
    stock: Any = model
    language = stock.get_decoder() if hasattr(model, "get_decoder") else None
    path = next((name for name, module in model.named_modules() if module is language), "")
    head = stock.get_output_embeddings() if path else None
    towers, here = [], model
    for name in path.split(".") if path else []:
        towers += [
            child for other, child in here.named_children() if other != name and child is not head
        ]
        here = getattr(here, name)
    return (here, towers) if towers else None


def told_apart(owner: torch.nn.Module, towers: Sequence[torch.nn.Module]) -> bool:
    """Whether images can be dealt to ranks: methods take them one by one, and features of one are
    its own affair.
    """
    for name in (name for name in _OF_TOWERS if hasattr(owner, name)):
        signature = inspect.signature(getattr(owner, name)).parameters.values()
        if [
            x.name for x in signature if x.kind is not inspect.Parameter.VAR_KEYWORD
        ] not in _OF_TOWERS[name]:
            return False
    return not any("BatchNorm" in type(x).__name__ for tower in towers for x in tower.modules())


def _sharded_features(
    context: ContextParallel,
    name: str,
    stock: Callable[..., Any],
    pixels: torch.Tensor,
    grid: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """Compute the features of this rank's images and gather all others', instead of a model's
    method `name`.

    `pixels[images, ...]`, or `[patches, ...]` with `grid[images, 3]` -> what `stock` gives for all
    images.
    """
    # a method may call the other one; and options that describe all images cannot be dealt
    whole = any(
        option.startswith(name.split("_")[1] + "_") and x is not None
        for option, x in options.items()
    )
    if context.outside or whole or len(pixels) == 0:
        return stock(pixels, *(() if grid is None else (grid,)), **options)
    sizes = [1] * len(pixels) if grid is None else grid.prod(-1).tolist()  # patches of each image
    axis, ends = context.axis, np.cumsum(sizes)
    shares = image_shares(sizes, axis.size)
    smallest = int(np.argmin(sizes))
    mine = shares[axis.rank] or range(smallest, smallest + 1)
    own = pixels[int(ends[mine.start]) - sizes[mine.start] : int(ends[mine.stop - 1])]
    context.outside += 1
    try:
        out = stock(own, *(() if grid is None else (grid[mine.start : mine.stop],)), **options)
    finally:
        context.outside -= 1
    layers = [out.pooler_output, *(getattr(out, "deepstack_features", None) or [])]
    parts = [torch.cat(tuple(layer)) for layer in layers]  # [tokens, H] each, of images end to end
    tokens = len(parts[0])
    if any(len(part) != tokens for part in parts) or any(
        size * tokens % len(own) for size in sizes
    ):
        refuse(
            f"{len(own)} patches became {tokens} tokens, which other images do not: give "
            "vision='replicated'"
        )
    counts = [size * tokens // len(own) for size in sizes]  # tokens of each image
    rows = torch.cat(parts, -1) if shares[axis.rank] else torch.cat(parts, -1)[:0]
    every = gather_uneven(rows, axis, [sum(counts[i] for i in share) for share in shares])
    found = [part.split(counts) for part in every.split([part.shape[-1] for part in parts], -1)]
    if not isinstance(out.pooler_output, tuple):  # [images, tokens, H]
        found = [torch.stack(images) for images in found]
    return type(out)(
        pooler_output=found[0], **({"deepstack_features": found[1:]} if found[1:] else {})
    )


def image_shares(sizes: Sequence[int], ranks: int) -> list[range]:
    """The images of each rank, in order, evenly by their patches `sizes`; ranks behind the last
    image have none.
    """
    ends = np.cumsum(sizes)
    table = compute_image_shard_boundaries(ends, ends, ranks)
    return [units_of(table, ends, rank) for rank in range(ranks)]


def _cut_arguments(context: ContextParallel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a language model was given, of this rank's tokens alone."""
    whole = context.length
    for name, x in kwargs.items():
        if (
            isinstance(x, torch.Tensor)
            and name not in _TOKENS
            and name not in _OTHERS
            and whole in x.shape
        ):
            refuse(
                f"{name} of the language model lies along the sequence in a way that is not known"
            )
    embeds = next(
        x for x in (kwargs.get("inputs_embeds"), kwargs.get("input_ids")) if x is not None
    )
    found = {**kwargs}
    if found.get("position_ids") is None:  # the model would count the tokens of this rank
        found["position_ids"] = torch.arange(whole, device=embeds.device).repeat(embeds.shape[0], 1)
    for name, dim in _TOKENS.items():
        x = found.get(name)
        if isinstance(x, torch.Tensor):
            if name == "position_ids":  # one row may stand for all, which are cut differently
                x = x.expand(*x.shape[:-2], len(embeds), -1)
            axes = (
                name == "position_ids" and x.dim() == 3
            )  # [axes, B, S], such as time, height and width
            found[name] = (
                torch.stack([context.cut(axis) for axis in x]) if axes else context.cut(x, dim)
            )
    mask, features = kwargs.get("visual_pos_masks"), kwargs.get("deepstack_visual_embeds")
    if mask is not None and features is not None:
        number = (mask.flatten().cumsum(0) - 1).view_as(
            mask
        )  # [B, S]: the row of features of each image token
        rows = context.cut(number)[found["visual_pos_masks"]]
        found["deepstack_visual_embeds"] = [x[rows] for x in features]
    return found
