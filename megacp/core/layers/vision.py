"""Vision towers and connectors: the blocks of a ViT, which all families share, and a row for what is a family's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megacp.core.config.model import ModelConfig
from megacp.core.config.run import RunConfig
from megacp.core.config.vision import POOLED_PATCHES, VisionConfig
from megacp.core.layers.table import Linear, Tensor, output_std


@dataclass(frozen=True)
class VisionKind:
    """A family's own tensors."""

    patch: Callable[[VisionConfig], tuple[int, ...]]
    """The shape of a patch, as the weight of its embedding has it."""
    connector: Callable[[VisionConfig, ModelConfig], dict[str, Linear]]
    """Linears of the connector by the ends of their names."""
    normed: bool = False
    """Whether the connector begins with a LayerNorm."""


def _attention(width: int, inputs: int, std: float, last_std: float) -> dict[str, Linear]:
    found = {f"attention.{name}": Linear(inputs, width, std, bias=True) for name in "qkv"}
    return found | {"attention.output": Linear(width, width, last_std, True, "columns")}


def _pooling(v: VisionConfig, model: ModelConfig) -> dict[str, Linear]:
    """Attention over patches with the features of two layers, then a SwiGLU MLP."""
    width, std, ffn = v.vision_hidden_size, model.init_method_std, v.connector_ffn_hidden_size or model.ffn_hidden_size
    mlp = {"mlp.gate": Linear(width, ffn, std), "mlp.up": Linear(width, ffn, std)}
    mlp["mlp.down"] = Linear(ffn, model.hidden_size, std, cut="columns")
    return _attention(width, 2 * width, std, std) | mlp


def _merging(v: VisionConfig, model: ModelConfig) -> dict[str, Linear]:
    """An MLP of the patches of a window together."""
    joined, std = POOLED_PATCHES * v.vision_hidden_size, model.init_method_std
    down = Linear(joined, model.hidden_size, std, True, "columns")
    return {"mlp.up": Linear(joined, joined, std, bias=True), "mlp.down": down}


VISION_KINDS: dict[str, VisionKind] = {
    "molmo2": VisionKind(lambda v: (v.patch_dim,), _pooling),
    # colours, frames, rows, columns, as torch's Conv3d has it
    "qwen3_5": VisionKind(lambda v: (3, v.family.frames, *[v.vision_patch_size] * 2), _merging, normed=True),
}
"""By `--vision-family`."""


def _layer_norm(name: str, width: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (width,), init="ones", decays=False)
    yield Tensor(f"{name}.bias", (width,), init="zeros", decays=False)


def tower_tensors(config: RunConfig) -> Iterator[Tensor]:
    """All of the tower; none without one."""
    v, std = config.vision, config.model.init_method_std
    if not v.vision_num_layers:
        return
    width, ffn, last_std = v.vision_hidden_size, v.vision_ffn_hidden_size, output_std(config.model, v.vision_num_layers)
    yield Tensor("vision.patch_embedding.weight", (width, *VISION_KINDS[v.vision_family].patch(v)), std=std)
    yield Tensor("vision.patch_embedding.bias", (width,), init="zeros", decays=False)
    yield Tensor("vision.position_embedding.weight", (v.patches_per_crop, width), std=std)
    mlp = {"mlp.up": Linear(width, ffn, std, True), "mlp.down": Linear(ffn, width, last_std, True, "columns")}
    for block in (f"vision.blocks.{i}" for i in range(v.vision_num_layers)):
        for part in ("attention", "mlp"):
            yield from _layer_norm(f"{block}.{part}_norm", width)
        for name, linear in (_attention(width, width, std, last_std) | mlp).items():
            yield from linear.tensors(f"{block}.{name}")


def connector_tensors(config: RunConfig) -> Iterator[Tensor]:
    """All of the connector; none without a tower."""
    v = config.vision
    if not v.vision_num_layers:
        return
    if VISION_KINDS[v.vision_family].normed:
        yield from _layer_norm("connector.norm", v.vision_hidden_size)
    for name, linear in VISION_KINDS[v.vision_family].connector(v, config.model).items():
        yield from linear.tensors(f"connector.{name}")
