"""The vision encoder: from crops and pooling windows to features of the language model's width.

A rank without crops returns zero features that depend on every trained parameter of vision, with
gradient zero. Each microbatch thus gives each of them a gradient, whatever images it holds; with a
frozen language model, the loss would have no graph otherwise.

In the connector each window of patches becomes one feature. A window's query is the mean of its
patches; attention over the patches pools them, and a SwiGLU MLP projects the result (Molmo2's
adapter). A slot of a window that lies outside of the image is -1: it counts in no mean and gets no
weight. Windows do not see each other, so they may be dealt to ranks in any way. Heads and FFN are
cut over tp; inputs and output are replicated over it.
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
    """`features[c * N, 2 h]`, `pooling[m, w]` -> `[m, text h]`, replicated over tp."""

    def __init__(self, config: VisionConfig, model: ModelConfig, backend: NativeBackend) -> None:
        super().__init__()
        product = functools.partial(LinearSpec.of, "connector", pooling_linears(config, model))
        self.head_dim, self.scale = config.vision_head_dim, config.vision_head_dim**-0.5
        self.query = backend.column_linear(product("attention.q"))
        self.key_value = backend.column_linear(product("attention.k", "attention.v"))
        self.output = backend.row_linear(product("attention.output"))
        self.gate_up = backend.column_linear(product("mlp.gate", "mlp.up"))
        self.down = backend.row_linear(product("mlp.down"))

    def forward(self, features: torch.Tensor, pooling: torch.Tensor) -> torch.Tensor:
        """Pool and project; `pooling` int64 holds rows of `features`, -1 where a window leaves the
        image.
        """
        valid = pooling >= 0  # [m, w]
        windows = features.index_select(
            0, pooling.clamp(min=0).flatten()
        )  # a slot outside takes patch 0, zeroed next
        windows = (
            windows.unflatten(0, pooling.shape) * valid[..., None]
        )  # [m * w, 2h] -> [m, w, 2h]
        query = windows.sum(1) / valid.sum(1, keepdim=True).to(
            windows.dtype
        )  # mean of the valid patches: [m, 2h]
        q = self.query(query).unflatten(
            -1, (-1, self.head_dim)
        )  # [m, heads/tp * d] -> [m, heads/tp, d]
        k, v = (
            part.unflatten(-1, (-1, self.head_dim)) for part in self.key_value(windows).chunk(2, -1)
        )
        # one query a window, k, v [m, w, heads/tp, d]; softmax in fp32 or wider, and every window
        # has a valid slot
        scores = torch.einsum("mhd,mwhd->mhw", q, k).to(accumulation_dtype(q.dtype)) * self.scale
        weights = torch.softmax(
            scores.masked_fill(~valid[:, None], -torch.inf), -1
        )  # 0 outside the image
        pooled = torch.einsum("mhw,mwhd->mhd", weights.to(v.dtype), v)
        return self.down(swiglu(self.gate_up(self.output(pooled.flatten(1)))))


class Merger(nn.Module):
    """Qwen3.5's connector: `features[c, h]`, `pooling[m, 4]` -> `[m, text h]`: an MLP of four
    patches together.
    """

    def __init__(self, config: VisionConfig, model: ModelConfig, backend: NativeBackend) -> None:
        super().__init__()
        linears = merging_linears(config, model)
        self.norm = layer_norm(
            NormSpec("connector.norm", config.vision_hidden_size, 1e-6), backend.options
        )
        self.up = backend.column_linear(LinearSpec.of("connector", linears, "mlp.up"))
        self.down = backend.row_linear(LinearSpec.of("connector", linears, "mlp.down"))

    def forward(self, features: torch.Tensor, pooling: torch.Tensor) -> torch.Tensor:
        """Join and project; `pooling` int64 holds rows of `features`."""
        windows = self.norm(features).index_select(0, pooling.flatten()).view(len(pooling), -1)
        return self.down(F.gelu(self.up(windows)))


TOWERS: dict[str, tuple[type[Tower], type[nn.Module]]] = {
    "molmo2": (VisionTower, Connector),
    "qwen3_5": (GridTower, Merger),
}
"""Tower and connector of each `--vision-family`."""


class _Nothing(torch.autograd.Function):
    """An empty `[0, width]` that depends on the parameters."""

    @staticmethod
    def forward(ctx: Any, width: int, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*parameters)
        return parameters[0].new_empty(0, width)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


class VisionEncoder(nn.Module):
    """Vision tower and connector: `patches[c, N, 3 p p]`, `pooling[m, w]` -> features `[m, h]`,
    replicated over tp.
    """

    def __init__(
        self,
        config: VisionConfig,
        model: ModelConfig,
        backend: NativeBackend,
        recompute: RecomputeMode,
    ) -> None:
        super().__init__()
        self.config, self.width = config, model.hidden_size
        tower, connector = TOWERS[config.vision_family]
        self.tower = tower(config, model, backend.tower("vision"), recompute)
        self.connector = connector(config, model, backend.tower("connector"))

    def forward(
        self,
        patches: torch.Tensor | None,
        pooling: torch.Tensor | None,
        grids: PatchGrids | None = None,
    ) -> torch.Tensor:
        """Features in the order of `pooling`, whose int64 values are rows of `patches.flatten(0,
        1)` or -1.

        `grids`: those of the images, of a family that needs them.

        Every window holds at least one patch. None, no crops or no windows give features `[0, h]`.
        ValueError for crops of another size.
        """
        if patches is None or pooling is None:
            return self._nothing()
        expected = (self.config.crop_patches, self.config.patch_dim)
        if patches.dim() != 3 or tuple(patches.shape[1:]) != expected:
            raise ValueError(
                f"crops of shape {tuple(patches.shape)} came in, --vision-image-size "
                f"{self.config.vision_image_size} "
                f"and --vision-patch-size {self.config.vision_patch_size} need (crops, "
                f"{expected[0]}, {expected[1]}): "
                "was --data-path built with other image sizes?"
            )
        if 0 in (patches.shape[0], pooling.shape[0]):
            return self._nothing()
        return self.connector(self.tower(patches, grids), pooling)

    def _nothing(self) -> torch.Tensor:
        """No features, `[0, h]`; every trained parameter gets the gradient 0 from them."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if trained:
            return _Nothing.apply(self.width, *trained)
        return next(self.parameters()).new_empty(0, self.width)
