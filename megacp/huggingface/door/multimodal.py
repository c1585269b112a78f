"""Models of text and images over a sharded sequence: towers see whole images, the language model this rank's tokens.

    with context_parallel(axis, buffers=[labels], buffer_seq_dims=[1], ...) as context, cut_multimodal(model, context):
        logits = model(**batch, use_cache=False).logits          # the whole batch in, logits of this rank's tokens out
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / counted
        loss.backward()
    sum_gradients(model.parameters(), axis)

The model itself puts features of images into the embeddings of the whole sequence, computes positions and makes its
mask; what it then hands to its language model is cut there. So no model's merging is written again here.

Each rank runs the towers on whole images of its own, evenly by patches. One exchange then gives every rank the features
of all images. Its backward brings the partial gradients of the features home, so a tower's gradient on a rank is that
of its images, from the tokens of all ranks. Where every rank runs all images, it is that of all images from the rank's
tokens. The sum over ranks is the whole either way.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from megacp.core.data.image_shards import compute_image_shard_boundaries, units_of
from megacp.core.distributed.differentiable import gather_uneven
from megacp.huggingface.door.context import ContextParallel, refuse
from megacp.huggingface.door.model_rules import model_problems

VISION = ("auto", "sharded", "replicated")
"""How the towers of the ranks share the images of a batch."""
_TOKENS = {"inputs_embeds": 1, "attention_mask": 1, "position_ids": -1, "visual_pos_masks": 1, "input_ids": 1}
"""Arguments of language models that lie along the sequence, and the dim that does."""
_CUT_BEFORE = ("labels", "shift_labels")
"""Arguments that the caller's block has cut."""
_OF_TOWERS = {
    "get_image_features": [["pixel_values"], ["pixel_values", "image_grid_thw"]],
    "get_video_features": [["pixel_values_videos", "video_grid_thw"]],
}
"""Methods that turn images into features, and their arguments: images in dim 0, or patches end to end with grids."""


@contextlib.contextmanager
def cut_multimodal(model: torch.nn.Module, context: ContextParallel, vision: str = "auto") -> Iterator[None]:
    """Calls of `model` take the whole sequence, and its language model gets the tokens of this rank.

    `model`: of transformers, with a language model (`get_decoder()`) beside its towers, such as Qwen2.5-VL, Qwen3-VL,
    Gemma 3 and LLaVA. `context`: the open block. Masks in which the tokens of an image see each other need a `Metadata`
    with these spans as the block's `document_ids`; a model that lays one over is refused without.

    `vision`: `sharded`: each rank runs the towers on some of the images; a rank for which none are left runs the
    smallest one for nothing, so that ranks that share weights meet in every layer. `replicated`: all ranks run all.
    `auto`: sharded, where that is exact.

    Raises ValueError for a model without such parts, and for an argument of its language model that lies along the
    sequence in a way that is not known. So it does for `sharded` with towers that cannot be.
    """
    language, towers = _parts(model)
    owner = _module_around(model, language)
    problems = [] if vision in VISION else [f"vision is {vision}; choose {', '.join(VISION)}"]
    kept_whole = _whole_problems(owner, towers)
    refuse(problems + (kept_whole if vision == "sharded" else []))

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
        if id(model) not in context.modules:
            refuse(model_problems(model, context.length) if context.axis.size > 1 else [])
            stack.enter_context(context.watching(model))
        stack.callback(setattr, context, "language", None)
        stack.callback(language.register_forward_pre_hook(cut, with_kwargs=True).remove)
        stack.callback(language.register_forward_pre_hook(context.check_call, with_kwargs=True).remove)
        for module in (part for tower in towers for part in tower.modules()):  # a layer may be recomputed by itself
            stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        if vision != "replicated" and not kept_whole and context.axis.size > 1:
            for name in _methods(owner):
                stack.enter_context(_replaced(owner, name, _ShardedFeatures(owner, name, context)))
        yield


def has_towers(model: torch.nn.Module) -> bool:
    """Whether `cut_multimodal` is for this model."""
    try:
        _parts(model)
    except ValueError:
        return False
    return True


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


def _module_around(model: torch.nn.Module, part: torch.nn.Module) -> torch.nn.Module:
    """The module that has `part` as a child."""
    return next(module for module in model.modules() if any(child is part for child in module.children()))


def _methods(owner: torch.nn.Module) -> list[str]:
    """Methods of a model that turn images into features."""
    return [name for name in _OF_TOWERS if hasattr(owner, name)]


def _whole_problems(owner: torch.nn.Module, towers: Sequence[torch.nn.Module]) -> list[str]:
    """Why the images cannot be dealt to ranks; an empty list when features of an image are its own affair."""
    name = type(owner).__name__
    found = [] if _methods(owner) else [f"{name} has no {' or '.join(_OF_TOWERS)}: its towers run on all ranks"]
    for method in _methods(owner):
        signature = inspect.signature(getattr(owner, method)).parameters.values()
        given = [x.name for x in signature if x.kind is not inspect.Parameter.VAR_KEYWORD]
        if given not in _OF_TOWERS[method]:
            words = " or ".join(", ".join(names) for names in _OF_TOWERS[method])
            found.append(f"{method} of {name} takes {', '.join(given)}; images can be told apart in {words}")
    norms = {type(x).__name__ for part in towers for x in part.modules() if "BatchNorm" in type(x).__name__}
    found += [f"{kind} in the towers of {name} has statistics of all images" for kind in sorted(norms)]
    return found


@contextlib.contextmanager
def _replaced(module: torch.nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """In the block, `module.name` is `function`."""
    before = vars(module).get(name)
    setattr(module, name, function)
    try:
        yield
    finally:
        delattr(module, name)
        if before is not None:
            setattr(module, name, before)


class _ShardedFeatures:
    """A method that turns images into features, of which this rank computes those of its images."""

    def __init__(self, owner: torch.nn.Module, name: str, context: ContextParallel) -> None:
        self._stock: Callable[..., Any] = getattr(owner, name)
        self._of_all = name.split("_")[1] + "_"  # how options begin that describe all images
        self._context = context

    def __call__(self, pixels: torch.Tensor, grid: torch.Tensor | None = None, **options: Any) -> Any:
        """`pixels[images, ...]`, or `[patches, ...]` with `grid[images, 3]` -> what the method gives for all images."""
        given = () if grid is None else (grid,)
        # a method may call the other one; and options that describe all images cannot be dealt
        whole = any(name.startswith(self._of_all) and x is not None for name, x in options.items())
        if self._context.outside or whole or len(pixels) == 0:
            return self._stock(pixels, *given, **options)
        sizes = [1] * len(pixels) if grid is None else grid.prod(-1).tolist()  # patches of each image
        if sum(sizes) != len(pixels):
            refuse([f"the images of the batch have {len(pixels)} patches, their grids have {sum(sizes)}"])
        self._context.outside += 1
        try:
            return self._gathered(pixels, grid, options, sizes)
        finally:
            self._context.outside -= 1

    def _gathered(
        self, pixels: torch.Tensor, grid: torch.Tensor | None, options: dict[str, Any], sizes: Sequence[int]
    ) -> Any:
        axis, ends = self._context.axis, np.cumsum(sizes)
        shares = image_shares(sizes, axis.size)
        mine = shares[axis.rank] or range(int(np.argmin(sizes)), int(np.argmin(sizes)) + 1)
        first = int(ends[mine.start]) - sizes[mine.start]
        own = pixels[first : int(ends[mine.stop - 1])]
        given = () if grid is None else (grid[mine.start : mine.stop],)
        out = self._stock(own, *given, **options)
        layers = [out.pooler_output, *(getattr(out, "deepstack_features", None) or [])]
        parts = [torch.cat(tuple(layer)) for layer in layers]  # [tokens, H] each, of images end to end
        tokens = len(parts[0])
        if any(len(part) != tokens for part in parts) or any(size * tokens % len(own) for size in sizes):
            refuse([f"{len(own)} patches became {tokens} tokens, which other images do not: give vision='replicated'"])
        counts = [size * tokens // len(own) for size in sizes]  # tokens of each image
        rows = torch.cat(parts, -1) if shares[axis.rank] else torch.cat(parts, -1)[:0]
        every = gather_uneven(rows, axis, [sum(counts[i] for i in share) for share in shares])
        found = [part.split(counts) for part in every.split([part.shape[-1] for part in parts], -1)]
        if not isinstance(out.pooler_output, tuple):  # [images, tokens, H]
            found = [torch.stack(images) for images in found]
        deep = {"deepstack_features": found[1:]} if found[1:] else {}
        return type(out)(pooler_output=found[0], **deep)


def image_shares(sizes: Sequence[int], ranks: int) -> list[range]:
    """The images of each rank, in order, evenly by their patches `sizes`; ranks behind the last image have none."""
    ends = np.cumsum(sizes)
    table = compute_image_shard_boundaries(ends, ends, ranks)
    return [units_of(table, ends, rank) for rank in range(ranks)]


def _cut_arguments(context: ContextParallel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a language model was given, of this rank's tokens alone."""
    whole = context.length
    known = {**_TOKENS, "deepstack_visual_embeds": 0, **dict.fromkeys(_CUT_BEFORE)}
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
