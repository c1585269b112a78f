"""Vision towers and connectors: tensors and FLOPs of each kind, and the kinds of each family."""

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
    """Description of a kind of tower or connector."""

    tensors: Callable[[VisionConfig, ModelConfig], Iterator[Tensor]]
    flops: Callable[[VisionConfig, ModelConfig, int], Flops]
    """Function that returns the FLOPs of the forward pass for a number of patches: those of a crop
    (tower) or of one pooled token (connector).
    """


def _attention(width: int, inputs: int, std: float, last_std: float) -> dict[str, Linear]:
    # inputs of q, k and v may be wider than outputs: a connector reads features of two layers
    found = {f"attention.{name}": Linear(inputs, width, std, bias=True) for name in "qkv"}
    return found | {"attention.output": Linear(width, width, last_std, True, "columns")}


def _weights(linears: dict[str, Linear]) -> int:
    # biases are left out, as in the FLOPs of the decoder
    return sum(linear.inputs * linear.outputs for linear in linears.values())


def block_linears(v: VisionConfig, model: ModelConfig) -> dict[str, Linear]:
    """Return the linear layers of a ViT block by the last part of their names."""
    width = v.vision_hidden_size
    ffn = v.vision_ffn_hidden_size
    std = model.init_method_std
    # based on the depth of the tower, not of the decoder
    last_std = output_std(model, v.vision_num_layers)
    mlp = {
        "mlp.up": Linear(width, ffn, std, True),
        "mlp.down": Linear(ffn, width, last_std, True, "columns"),
    }
    return _attention(width, width, std, last_std) | mlp


def _vit_tensors(
    patch: Callable[[VisionConfig], tuple[int, ...]], v: VisionConfig, model: ModelConfig
) -> Iterator[Tensor]:
    width = v.vision_hidden_size
    std = model.init_method_std
    # `Tower` expects these three tensors first and in this order
    yield Tensor("vision.patch_embedding.weight", (width, *patch(v)), std=std, treated="matrix")
    yield Tensor("vision.patch_embedding.bias", (width,), init="zeros", decays=False)
    yield Tensor(
        "vision.position_embedding.weight", (v.patches_per_crop, width), std=std, treated="table"
    )
    # pre-norm blocks
    for i in range(v.vision_num_layers):
        block = f"vision.blocks.{i}"
        for part in ("attention", "mlp"):
            yield from layer_norm_tensors(f"{block}.{part}_norm", width)
        for name, linear in block_linears(v, model).items():
            yield from linear.tensors(f"{block}.{name}")


def _vit_flops(v: VisionConfig, model: ModelConfig, patches: int) -> Flops:
    """Return the FLOPs of a ViT for images that have one patch per learned position."""
    embedding = v.vision_hidden_size * v.patch_dim
    weights = v.vision_num_layers * _weights(block_linears(v, model)) + embedding
    # all (query, key) pairs within an image
    pairs = v.vision_num_layers * patches * v.patches_per_crop
    return Flops(2.0 * patches * weights, 4.0 * pairs * v.vision_hidden_size)


def _vit(patch: Callable[[VisionConfig], tuple[int, ...]]) -> VisionKind:
    """Return the description of a ViT. `patch` returns a patch's shape in the embedding weight."""
    return VisionKind(functools.partial(_vit_tensors, patch), _vit_flops)


def pooling_linears(v: VisionConfig, model: ModelConfig) -> dict[str, Linear]:
    """Return the linear layers of Molmo2's connector: attention pooling and a SwiGLU MLP."""
    width = v.vision_hidden_size
    std = model.init_method_std
    ffn = v.connector_ffn_hidden_size or model.ffn_hidden_size
    mlp = {"mlp.gate": Linear(width, ffn, std), "mlp.up": Linear(width, ffn, std)}
    mlp["mlp.down"] = Linear(ffn, model.hidden_size, std, cut="columns")
    return _attention(width, 2 * width, std, std) | mlp


def _pooling(v: VisionConfig, model: ModelConfig) -> Iterator[Tensor]:
    for name, linear in pooling_linears(v, model).items():
        yield from linear.tensors(f"connector.{name}")


def _pooling_flops(v: VisionConfig, model: ModelConfig, patches: int) -> Flops:
    """Return the FLOPs of pooling this number of patches into one token."""
    # keys and values are computed per patch, everything else once per pooled token
    linears = pooling_linears(v, model)
    # weights per patch
    each = _weights({name: linears[f"attention.{name}"] for name in "kv"})
    return Flops(
        2.0 * (_weights(linears) + (patches - 1) * each), 4.0 * patches * v.vision_hidden_size
    )


def merging_linears(v: VisionConfig, model: ModelConfig) -> dict[str, Linear]:
    """Return the linear layers of Qwen3.5's connector, an MLP on windows of joined patches."""
    joined = POOLED_PATCHES * v.vision_hidden_size
    std = model.init_method_std
    down = Linear(joined, model.hidden_size, std, True, "columns")
    return {"mlp.up": Linear(joined, joined, std, bias=True), "mlp.down": down}


def _merging(v: VisionConfig, model: ModelConfig) -> Iterator[Tensor]:
    yield from layer_norm_tensors("connector.norm", v.vision_hidden_size)
    for name, linear in merging_linears(v, model).items():
        yield from linear.tensors(f"connector.{name}")


def _merging_flops(v: VisionConfig, model: ModelConfig, patches: int) -> Flops:
    # one row for all patches of a window, so their number does not matter
    return Flops(2.0 * _weights(merging_linears(v, model)), 0.0)


VISION_KINDS: dict[str, tuple[VisionKind, VisionKind]] = {
    "molmo2": (_vit(lambda v: (v.patch_dim,)), VisionKind(_pooling, _pooling_flops)),
    "qwen3_5": (
        # colours, frames, rows, columns: the order in the weight of torch's Conv3d
        _vit(lambda v: (3, v.family.frames, v.vision_patch_size, v.vision_patch_size)),
        VisionKind(_merging, _merging_flops),
    ),
}
"""Tower and connector of each `--vision-family`."""


def tower_tensors(config: RunConfig) -> Iterator[Tensor]:
    """Return an iterator over all tensors of the vision tower; empty if the model has none."""
    if not config.vision.vision_num_layers:
        return iter(())
    tower, _ = VISION_KINDS[config.vision.vision_family]
    return tower.tensors(config.vision, config.model)


def connector_tensors(config: RunConfig) -> Iterator[Tensor]:
    """Return an iterator over all tensors of the connector; empty if the model has no tower."""
    if not config.vision.vision_num_layers:
        return iter(())
    _, connector = VISION_KINDS[config.vision.vision_family]
    return connector.tensors(config.vision, config.model)
