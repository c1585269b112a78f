"""Vision-language models on sharded sequences: towers process whole images, the language model
processes this rank's tokens.

The model inserts image features into the embeddings of the whole sequence. The arguments of its
language model are then sharded. Each rank runs the towers on some of the images, balanced by number
of patches. One exchange gives every rank the features of all images. In its backward pass, the
exchange sums the gradients of all ranks for each image.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from megacp.distributed.differentiable import gather_uneven
from megacp.engine.rows.image_shards import compute_image_shard_boundaries, units_of
from megacp.integrations.context import ContextParallel
from megacp.integrations.model_rules import model_problems, refuse

# Language model arguments with a sequence dimension, and that dimension.
_TOKENS = {
    "inputs_embeds": 1,
    "attention_mask": 1,
    "position_ids": -1,
    "visual_pos_masks": 1,
    "input_ids": 1,
}
_TOKENS["per_layer_inputs"] = 1  # of Gemma 4
# Arguments that may have this length by chance, or that the caller's block shards.
_OTHERS = ("deepstack_visual_embeds", "labels", "shift_labels")
# Methods that compute features, with their supported arguments: images in dim 0, or concatenated
# patches with grids.
_OF_TOWERS = {
    "get_image_features": [["pixel_values"], ["pixel_values", "image_grid_thw"]],
    "get_video_features": [["pixel_values_videos", "video_grid_thw"]],
}


@contextlib.contextmanager
def cut_multimodal(
    model: torch.nn.Module, context: ContextParallel, vision: str = "sharded"
) -> Iterator[None]:
    """Shard the inputs of the language model in `model`, which is called with the whole sequence.

    * `model`: a transformers model with a language model (`get_decoder()`) and towers, such as
      Qwen2.5-VL, Qwen3-VL, Gemma 3 or LLaVA.
    * `context`: the open block. If the tokens of an image attend to each other, its `document_ids`
      must be a `Metadata` with these spans; otherwise calls raise ValueError.
    * `vision`: with `sharded`, each rank runs the towers on some of the images, if that is exact. A
      rank without images runs the smallest image and discards the result, because FSDP ranks must
      all run every layer. With `replicated`, all ranks run all images.

    Raise ValueError if the model lacks these parts, or if its language model receives an unknown
    argument with a sequence dimension.
    """
    parts = find_towers(model)
    if parts is None:
        raise ValueError(
            f"{type(model).__name__} has no towers in addition to a language model: call it in "
            "the context_parallel block without cut_multimodal"
        )
    language, towers = parts
    # The module that directly contains the language model also computes the image features.
    owner = model
    for module in model.modules():
        if any(child is language for child in module.children()):
            owner = module
            break
    if vision not in ("sharded", "replicated"):
        refuse(f"vision is {vision}: choose sharded or replicated")

    def cut(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        return args, _cut_arguments(context, kwargs)

    # A tower processes whole images, so its attention must not use the open block.
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
        # The context counts running modules, because hooks of nested modules are nested too.
        for tower in towers:
            # Every submodule gets the hooks, because recomputation may call it separately.
            for module in tower.modules():
                stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        if vision == "sharded" and context.axis.size > 1 and told_apart(owner, towers):
            for name in _OF_TOWERS:
                if hasattr(owner, name):
                    stock = getattr(owner, name)
                    sharded = functools.partial(_sharded_features, context, name, stock)
                    setattr(owner, name, sharded)
                    stack.callback(delattr, owner, name)
        yield


def find_towers(model: torch.nn.Module) -> tuple[torch.nn.Module, list[torch.nn.Module]] | None:
    """Return the language model and the towers of `model`.

    Towers are the siblings of all modules on the path to the language model, except output heads.
    Return None if there is no language model or no tower.
    """
    stock: Any = model
    language = stock.get_decoder() if hasattr(model, "get_decoder") else None
    path = next((name for name, module in model.named_modules() if module is language), "")
    if not path:
        return None
    # Output heads are not towers: they run after the language model, on this rank's tokens.
    head = stock.get_output_embeddings()
    towers = []
    here = model
    for name in path.split("."):
        for sibling, child in here.named_children():
            if sibling != name and child is not head:
                towers.append(child)
        here = getattr(here, name)
    return (here, towers) if towers else None


def told_apart(owner: torch.nn.Module, towers: Sequence[torch.nn.Module]) -> bool:
    """Return whether images can be distributed across ranks.

    The methods must accept any subset of the images, and an image's features must not depend on
    other images (as they do with batch norms).
    """
    for name, known in _OF_TOWERS.items():
        if not hasattr(owner, name):
            continue
        parameters = inspect.signature(getattr(owner, name)).parameters.values()
        named = [x.name for x in parameters if x.kind is not inspect.Parameter.VAR_KEYWORD]
        if named not in known:
            return False
    modules = itertools.chain.from_iterable(tower.modules() for tower in towers)
    return not any("BatchNorm" in type(module).__name__ for module in modules)


def _sharded_features(
    context: ContextParallel,
    name: str,
    stock: Callable[..., Any],
    pixels: torch.Tensor,
    grid: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """Compute the features of this rank's images, and return the features of all images.

    This function replaces the method `name` of a model and returns the same result as the original,
    `stock`. `pixels` is `[images, ...]`, or `[patches, ...]` with `grid[images, 3]`.
    """
    grids = () if grid is None else (grid,)
    # Options that describe all images (image_..., video_...) cannot be distributed.
    prefix = name.split("_")[1] + "_"
    whole = any(key.startswith(prefix) and x is not None for key, x in options.items())
    # One method may call the other; then the images are already distributed.
    if context.outside or whole or len(pixels) == 0:
        return stock(pixels, *grids, **options)
    sizes = [1] * len(pixels)  # patches of each image
    if grid is not None:
        sizes = grid.prod(-1).tolist()
    axis = context.axis
    ends = np.cumsum(sizes)
    shares = image_shares(sizes, axis.size)
    smallest = int(np.argmin(sizes))
    # A rank without images runs the smallest image, see `cut_multimodal`.
    mine = shares[axis.rank] or range(smallest, smallest + 1)
    own = pixels[int(ends[mine.start]) - sizes[mine.start] : int(ends[mine.stop - 1])]
    context.outside += 1
    try:
        own_grids = [x[mine.start : mine.stop] for x in grids]
        out = stock(own, *own_grids, **options)
    finally:
        context.outside -= 1
    layers = [out.pooler_output, *(getattr(out, "deepstack_features", None) or [])]
    parts = [torch.cat(tuple(layer)) for layer in layers]  # [tokens, H] each, images concatenated
    tokens = len(parts[0])
    same_tokens = all(len(part) == tokens for part in parts)
    # Token counts of other ranks' images are known only if they are proportional to patch counts.
    proportional = all(size * tokens % len(own) == 0 for size in sizes)
    if not same_tokens or not proportional:
        refuse(
            f"{len(own)} patches became {tokens} tokens, but the images' numbers of tokens are not "
            "proportional to their numbers of patches: use vision='replicated'"
        )
    counts = [size * tokens // len(own) for size in sizes]  # tokens of each image
    rows = torch.cat(parts, -1)  # [tokens, sum of H]: one exchange for all layers
    if not shares[axis.rank]:
        rows = rows[:0]  # the smallest image ran only so that this rank takes part in every layer
    tokens_per_rank = [sum(counts[share.start : share.stop]) for share in shares]
    every = gather_uneven(rows, axis, tokens_per_rank)  # [tokens of all images, sum of H]
    widths = [part.shape[-1] for part in parts]
    found = [part.split(counts) for part in every.split(widths, -1)]
    if not isinstance(out.pooler_output, tuple):  # [images, tokens, H]
        found = [torch.stack(images) for images in found]
    features, *deepstack = found
    if deepstack:
        return type(out)(pooler_output=features, deepstack_features=deepstack)
    return type(out)(pooler_output=features)


def image_shares(sizes: Sequence[int], ranks: int) -> list[range]:
    """Return the consecutive images of each rank, balanced by their numbers of patches, `sizes`.

    The last ranks may have no images.
    """
    ends = np.cumsum(sizes)
    table = compute_image_shard_boundaries(ends, ends, ranks)
    return [units_of(table, ends, rank) for rank in range(ranks)]


def _cut_arguments(context: ContextParallel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a language model, with only this rank's tokens."""
    whole = context.length
    for name, x in kwargs.items():
        known = name in _TOKENS or name in _OTHERS
        if isinstance(x, torch.Tensor) and not known and whole in x.shape:
            refuse(
                f"{name} of the language model has a dimension as long as the sequence, but it is "
                "unknown whether to shard it: this model is not supported"
            )
    embeds = kwargs.get("inputs_embeds")
    if embeds is None:
        embeds = kwargs["input_ids"]
    found = dict(kwargs)
    if found.get("position_ids") is None:  # the model would number this rank's tokens from 0
        positions = torch.arange(whole, device=embeds.device)
        found["position_ids"] = positions.repeat(embeds.shape[0], 1)
    for name, dim in _TOKENS.items():
        x = found.get(name)
        if not isinstance(x, torch.Tensor):
            continue
        if name == "position_ids":
            # A single row may represent all rows, but each row may be sharded differently.
            x = x.expand(*x.shape[:-2], len(embeds), -1)
            if x.dim() == 3:  # [axes, B, S], such as time, height and width
                found[name] = torch.stack([context.cut(axis) for axis in x])
                continue
        found[name] = context.cut(x, dim)
    mask = kwargs.get("visual_pos_masks")
    features = kwargs.get("deepstack_visual_embeds")
    if mask is not None and features is not None:
        # [B, S]: the index of each image token's row in the features
        number = (mask.flatten().cumsum(0) - 1).view_as(mask)
        rows = context.cut(number)[found["visual_pos_masks"]]
        found["deepstack_visual_embeds"] = [x[rows] for x in features]
    return found
