"""The vision encoder: from crops and pooling windows to features of the language model's width.

A rank without crops returns zero features that depend on every trained parameter of vision, with gradient zero. Each
microbatch thus gives each of them a gradient, whatever images it holds; with a frozen language model, the loss would
have no graph otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megacp.core.backends.base import Backend
from megacp.core.config.model import ModelConfig
from megacp.core.config.vision import VisionConfig
from megacp.core.models.connector import Connector
from megacp.core.models.vision import VisionTower


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
    """Vision tower and connector: `patches[c, N, 3 p p]`, `pooling[m, w]` -> features `[m, h]`, replicated over tp."""

    def __init__(self, config: VisionConfig, model: ModelConfig, backend: Backend, recompute: str = "none") -> None:
        super().__init__()
        self.config, self.width = config, model.hidden_size
        self.tower = VisionTower(config, model.init_method_std, backend.tower("vision"), recompute)
        self.connector = Connector(config, model, backend.tower("connector"))

    def forward(self, patches: torch.Tensor | None, pooling: torch.Tensor | None) -> torch.Tensor:
        """Features in the order of `pooling`, whose int64 values are rows of `patches.flatten(0, 1)` or -1.

        Every window holds at least one patch. None, no crops or no windows give features `[0, h]`. Raises ValueError
        when the crops are not those of the config.
        """
        if patches is None or pooling is None:
            return self._nothing()
        expected = (self.config.patches_per_crop, self.config.patch_dim)
        if patches.dim() != 3 or tuple(patches.shape[1:]) != expected:
            raise ValueError(
                f"crops of shape {tuple(patches.shape)} came in, --vision-image-size {self.config.vision_image_size} "
                f"and --vision-patch-size {self.config.vision_patch_size} need (crops, {expected[0]}, {expected[1]}): "
                "was --data-path built with other image sizes?"
            )
        if 0 in (patches.shape[0], pooling.shape[0]):
            return self._nothing()
        return self.connector(self.tower(patches), pooling)

    def _nothing(self) -> torch.Tensor:
        """No features, `[0, h]`; every trained parameter gets the gradient 0 from them."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return _Nothing.apply(self.width, *trained) if trained else self.tower.weight.new_empty(0, self.width)
