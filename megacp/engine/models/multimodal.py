"""The vision encoder, which converts image crops to features with the language model's width.

A rank without crops returns empty features that depend on every trained vision parameter, with a
gradient of zero. This ensures that every microbatch gives every parameter a gradient, with or
without images. Otherwise, the loss would have no autograd graph if the language model is frozen.

The connector turns each window of patches into one feature. In Molmo2, the query of a window is the
mean of its patches. Attention pools the patches, and a SwiGLU MLP projects the result. Window
positions outside the image are -1; they are excluded from the mean and get no attention weight.
Windows are independent, so they can be distributed across ranks in any way. tp splits heads and
MLP, and inputs and outputs are replicated.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megacp.attention.ops.dtype import accumulation_dtype
from megacp.attention.ops.pointwise import swiglu
from megacp.engine.backends.native import NativeBackend, NormSpec, layer_norm
from megacp.engine.config.model import ModelConfig
from megacp.engine.config.training import RecomputeMode
from megacp.engine.config.vision import VisionConfig
from megacp.engine.layers.vision import merging_linears, pooling_linears
from megacp.engine.models.vision import GridTower, Tower, VisionTower
from megacp.engine.rows.vision import PatchGrids
from megacp.engine.tensor_parallel.linear import LinearSpec


class Connector(nn.Module):
    """Molmo2's connector: `features[c * N, 2 h]`, `pooling[m, w]` -> `[m, text h]`."""

    def __init__(self, config: VisionConfig, model: ModelConfig, backend: NativeBackend) -> None:
        super().__init__()
        product = functools.partial(LinearSpec.of, "connector", pooling_linears(config, model))
        self.head_dim = config.vision_head_dim
        self.scale = config.vision_head_dim**-0.5
        self.query = backend.column_linear(product("attention.q"))
        self.key_value = backend.column_linear(product("attention.k", "attention.v"))
        self.output = backend.row_linear(product("attention.output"))
        self.gate_up = backend.column_linear(product("mlp.gate", "mlp.up"))
        self.down = backend.row_linear(product("mlp.down"))

    def forward(self, features: torch.Tensor, pooling: torch.Tensor) -> torch.Tensor:
        """Pool each window of features and project the result.

        `pooling` contains int64 row indices of `features`, or -1 for positions outside the image.
        Every window has at least one valid position.
        """
        valid = pooling >= 0  # [m, w]
        # positions outside the image select patch 0, and are then set to 0
        rows = pooling.clamp(min=0).flatten()
        windows = features.index_select(0, rows)
        windows = windows.unflatten(0, pooling.shape) * valid[..., None]  # [m, w, 2 h]
        # query: mean of the valid patches, [m, 2 h]
        query = windows.sum(1) / valid.sum(1, keepdim=True).to(windows.dtype)
        q = self.query(query).unflatten(-1, (-1, self.head_dim))  # [m, heads/tp, d]
        k, v = self.key_value(windows).chunk(2, -1)
        k = k.unflatten(-1, (-1, self.head_dim))  # [m, w, heads/tp, d]
        v = v.unflatten(-1, (-1, self.head_dim))
        # softmax in fp32 or wider; the weight outside the image is 0
        scores = torch.einsum("mhd,mwhd->mhw", q, k).to(accumulation_dtype(q.dtype)) * self.scale
        weights = torch.softmax(scores.masked_fill(~valid[:, None], -torch.inf), -1)
        pooled = torch.einsum("mhw,mwhd->mhd", weights.to(v.dtype), v)
        return self.down(swiglu(self.gate_up(self.output(pooled.flatten(1)))))


class Merger(nn.Module):
    """Qwen3.5's connector: `features[c, h]`, `pooling[m, 4]` -> `[m, text h]`."""

    def __init__(self, config: VisionConfig, model: ModelConfig, backend: NativeBackend) -> None:
        super().__init__()
        linears = merging_linears(config, model)
        norm = NormSpec("connector.norm", config.vision_hidden_size, 1e-6)
        self.norm = layer_norm(norm, backend.options)
        self.up = backend.column_linear(LinearSpec.of("connector", linears, "mlp.up"))
        self.down = backend.row_linear(LinearSpec.of("connector", linears, "mlp.down"))

    def forward(self, features: torch.Tensor, pooling: torch.Tensor) -> torch.Tensor:
        """Concatenate each window's patches and project; `pooling` contains int64 row indices."""
        # [c, h] -> [m, 4 h]
        windows = self.norm(features).index_select(0, pooling.flatten()).view(len(pooling), -1)
        return self.down(F.gelu(self.up(windows)))


TOWERS: dict[str, tuple[type[Tower], type[nn.Module]]] = {
    "molmo2": (VisionTower, Connector),
    "qwen3_5": (GridTower, Merger),
}
"""Tower and connector of each `--vision-family`."""


class _Nothing(torch.autograd.Function):
    """An empty tensor `[0, width]` that depends on the parameters, with a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, width: int, *parameters: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor with the dtype and device of the parameters."""
        ctx.save_for_backward(*parameters)
        return parameters[0].new_empty(0, width)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return zeros for every parameter."""
        return None, *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


class VisionEncoder(nn.Module):
    """Vision tower and connector: `patches[c, N, 3 p p]`, `pooling[m, w]` -> features `[m, h]`.

    All of these tensors are replicated over tp.
    """

    def __init__(
        self,
        config: VisionConfig,
        model: ModelConfig,
        backend: NativeBackend,
        recompute: RecomputeMode,
    ) -> None:
        super().__init__()
        self.config = config
        self.width = model.hidden_size
        # towers replicate activations over tp, so they do not use sequence parallelism
        tower, connector = TOWERS[config.vision_family]
        self.tower = tower(config, model, backend.tower("vision"), recompute)
        self.connector = connector(config, model, backend.tower("connector"))

    def forward(
        self,
        patches: torch.Tensor | None,
        pooling: torch.Tensor | None,
        grids: PatchGrids | None = None,
    ) -> torch.Tensor:
        """Return the features of all windows, in the order of `pooling`.

        `pooling` contains int64 row indices of `patches.flatten(0, 1)`, or -1; every window has at
        least one patch. `grids` are the image sizes, for families that need them. Without crops or
        windows, the features are `[0, h]`. Raise ValueError if crops have the wrong size.
        """
        if patches is None or pooling is None:
            return self._nothing()
        expected = (self.config.crop_patches, self.config.patch_dim)
        if patches.dim() != 3 or tuple(patches.shape[1:]) != expected:
            raise ValueError(
                f"got crops of shape {tuple(patches.shape)}, but --vision-image-size "
                f"{self.config.vision_image_size} and --vision-patch-size "
                f"{self.config.vision_patch_size} need (crops, {expected[0]}, {expected[1]}): set "
                "these flags to the sizes that --data-path was built with"
            )
        if 0 in (patches.shape[0], pooling.shape[0]):
            return self._nothing()
        return self.connector(self.tower(patches, grids), pooling)

    def _nothing(self) -> torch.Tensor:
        """Return empty features `[0, h]` that give every trained parameter a gradient of 0."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if trained:
            return _Nothing.apply(self.width, *trained)
        return next(self.parameters()).new_empty(0, self.width)
