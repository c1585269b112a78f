"""Vision towers and connectors: a row for each kind, and the two that a family has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megacp.engine.config.model import ModelConfig
from megacp.engine.config.run import RunConfig
from megacp.engine.config.vision import POOLED_PATCHES, VisionConfig
from megacp.engine.layers.table import Flops, Linear, Tensor, layer_norm_tensors, output_std


@dataclass(frozen=True)
class VisionKind:
    """A kind of tower or connector."""

    tensors: Callable[[VisionConfig, ModelConfig], Iterator[Tensor]]
    flops: Callable[[VisionConfig, ModelConfig, int], Flops]
    """The forward over so many patches: those of a crop, or of the window of one pooled token."""


def _attention(width: int, inputs: int, std: float, last_std: float) -> dict[str, Linear]:
    found = {f"attention.{name}": Linear(inputs, width, std, bias=True) for name in "qkv"}
    return found | {"attention.output": Linear(width, width, last_std, True, "columns")}


def _weights(linears: dict[str, Linear]) -> int:
    return sum(linear.inputs * linear.outputs for linear in linears.values())


def block_linears(v: VisionConfig, model: ModelConfig) -> dict[str, Linear]:
    """Linears of a ViT's block, by the ends of their names."""
    width, ffn, std = v.vision_hidden_size, v.vision_ffn_hidden_size, model.init_method_std
    last_std = output_std(model, v.vision_num_layers)
    mlp = {
        "mlp.up": Linear(width, ffn, std, True),
        "mlp.down": Linear(ffn, width, last_std, True, "columns"),
    }
    return _attention(width, width, std, last_std) | mlp


def _vit_tensors(
    patch: Callable[[VisionConfig], tuple[int, ...]], v: VisionConfig, model: ModelConfig
) -> Iterator[Tensor]:
    width, std = v.vision_hidden_size, model.init_method_std
    yield Tensor("vision.patch_embedding.weight", (width, *patch(v)), std=std, treated="matrix")
    yield Tensor("vision.patch_embedding.bias", (width,), init="zeros", decays=False)
    yield Tensor(
        "vision.position_embedding.weight", (v.patches_per_crop, width), std=std, treated="table"
    )
    for block in (f"vision.blocks.{i}" for i in range(v.vision_num_layers)):
        for part in ("attention", "mlp"):
            yield from layer_norm_tensors(f"{block}.{part}_norm", width)
        for name, linear in block_linears(v, model).items():
            yield from linear.tensors(f"{block}.{name}")


def _vit_flops(v: VisionConfig, model: ModelConfig, patches: int) -> Flops:
    """Each patch sees those of an image as large as the table of positions."""
    weights = (
        v.vision_num_layers * _weights(block_linears(v, model)) + v.vision_hidden_size * v.patch_dim
    )
    pairs = v.vision_num_layers * patches * v.patches_per_crop
    return Flops(2.0 * patches * weights, 4.0 * pairs * v.vision_hidden_size)


def _vit(patch: Callable[[VisionConfig], tuple[int, ...]]) -> VisionKind:
    """A ViT, of which the weight of a patch has this shape."""
    return VisionKind(functools.partial(_vit_tensors, patch), _vit_flops)


def pooling_linears(v: VisionConfig, model: ModelConfig) -> dict[str, Linear]:
    """Attention over patches with the features of two layers, then a SwiGLU MLP."""
    width, std, ffn = (
        v.vision_hidden_size,
        model.init_method_std,
        v.connector_ffn_hidden_size or model.ffn_hidden_size,
    )
    mlp = {"mlp.gate": Linear(width, ffn, std), "mlp.up": Linear(width, ffn, std)}
    mlp["mlp.down"] = Linear(ffn, model.hidden_size, std, cut="columns")
    return _attention(width, 2 * width, std, std) | mlp


def _pooling(v: VisionConfig, model: ModelConfig) -> Iterator[Tensor]:
    for name, linear in pooling_linears(v, model).items():
        yield from linear.tensors(f"connector.{name}")


def _pooling_flops(v: VisionConfig, model: ModelConfig, patches: int) -> Flops:
    """Keys and values are those of each patch; the rest meets the pooled token alone."""
    linears = pooling_linears(v, model)
    each = _weights({name: linears[f"attention.{name}"] for name in "kv"})
    return Flops(
        2.0 * (_weights(linears) + (patches - 1) * each), 4.0 * patches * v.vision_hidden_size
    )


def merging_linears(v: VisionConfig, model: ModelConfig) -> dict[str, Linear]:
    """An MLP of the patches of a window together."""
    joined, std = POOLED_PATCHES * v.vision_hidden_size, model.init_method_std
    down = Linear(joined, model.hidden_size, std, True, "columns")
    return {"mlp.up": Linear(joined, joined, std, bias=True), "mlp.down": down}


def _merging(v: VisionConfig, model: ModelConfig) -> Iterator[Tensor]:
    yield from layer_norm_tensors("connector.norm", v.vision_hidden_size)
    for name, linear in merging_linears(v, model).items():
        yield from linear.tensors(f"connector.{name}")


def _merging_flops(v: VisionConfig, model: ModelConfig, patches: int) -> Flops:
    return Flops(2.0 * _weights(merging_linears(v, model)), 0.0)


VISION_KINDS: dict[str, tuple[VisionKind, VisionKind]] = {
    "molmo2": (_vit(lambda v: (v.patch_dim,)), VisionKind(_pooling, _pooling_flops)),
    "qwen3_5": (
        # colours, frames, rows and columns, as torch's Conv3d has them
        _vit(lambda v: (3, v.family.frames, v.vision_patch_size, v.vision_patch_size)),
        VisionKind(_merging, _merging_flops),
    ),
}
"""Tower and connector of each `--vision-family`."""


def tower_tensors(config: RunConfig) -> Iterator[Tensor]:
    """All of the tower; none without one."""
    tower, _ = VISION_KINDS[config.vision.vision_family]
    return (
        tower.tensors(config.vision, config.model) if config.vision.vision_num_layers else iter(())
    )


def connector_tensors(config: RunConfig) -> Iterator[Tensor]:
    """All of the connector; none without a tower."""
    _, connector = VISION_KINDS[config.vision.vision_family]
    return (
        connector.tensors(config.vision, config.model)
        if config.vision.vision_num_layers
        else iter(())
    )
