"""The vision tower: a ViT (Dosovitskiy et al., 2021) with learned positions that encodes each crop by itself.

A crop is a batch entry: its patches see each other and nothing else, so a rank encodes any set of crops. Only tp
communicates: heads and FFN are cut over it, activations between the linears are replicated. Sequence parallelism over
patches would tie the number of crops of a rank to tp. The outputs of two blocks side by side leave the tower, without a
final norm, as in Molmo2.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from megacp.core.backends.native import NativeBackend, NormSpec
from megacp.core.config.model import VisionConfig
from megacp.core.models.recompute import run_block
from megacp.core.ops.pointwise import gelu_tanh
from megacp.core.tensor_parallel.linear import LinearSpec


class VisionBlock(nn.Module):
    """`x[c * N, h] -> [c * N, h]`, replicated over tp: pre-norm attention and MLP with biases."""

    def __init__(self, layer: int, config: VisionConfig, std: float, backend: NativeBackend, recompute: str) -> None:
        super().__init__()
        prefix, hidden = f"vision.blocks.{layer}", config.vision_hidden_size
        ffn, self.head_dim = config.vision_ffn_hidden_size, config.vision_head_dim
        self.patches, self.scale = config.patches_per_crop, config.vision_head_dim**-0.5
        self.widths = [hidden // backend.tp.size] * 3
        residual_std = std / math.sqrt(2 * config.vision_num_layers)
        attention, mlp, epsilon = f"{prefix}.attention", f"{prefix}.mlp", 1e-6  # Molmo2's, in every LayerNorm
        tensors = (("q", hidden), ("k", hidden), ("v", hidden))
        self.attention_norm = backend.layer_norm(NormSpec(f"{attention}_norm", hidden, epsilon))
        self.qkv = backend.column_linear(LinearSpec(attention, tensors, hidden, True, std))
        self.output = backend.row_linear(LinearSpec(attention, (("output", hidden),), hidden, True, residual_std))
        self.mlp_norm = backend.layer_norm(NormSpec(f"{mlp}_norm", hidden, epsilon))
        self.up = backend.column_linear(LinearSpec(mlp, (("up", ffn),), hidden, True, std))
        self.down = backend.row_linear(LinearSpec(mlp, (("down", hidden),), ffn, True, residual_std))
        self.activation = gelu_tanh
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block under the recompute granularity it was built with."""
        return run_block(self._body, self.recompute, x)

    def _body(self, x: torch.Tensor, save: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = x + self._attend(save(self.attention_norm, x))
        return x + self.down(save(self.activation, self.up(save(self.mlp_norm, x))))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        """All patches of a crop see each other."""
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).unflatten(0, (-1, self.patches)).transpose(1, 2)
            for part in self.qkv(x).split(self.widths, -1)
        )  # [c * N, heads/tp * d] -> [c, N, heads/tp, d] -> [c, heads/tp, N, d]
        out = F.scaled_dot_product_attention(q, k, v, scale=self.scale).transpose(1, 2)
        return self.output(out.flatten(0, 1).flatten(1))  # [c, N, heads/tp, d] -> [c * N, heads/tp * d]


class VisionTower(nn.Module):
    """`patches[c, N, 3 p p] -> [c * N, 2 h]`, the outputs of the two feature layers side by side."""

    def __init__(self, config: VisionConfig, std: float, backend: NativeBackend, recompute: str) -> None:
        super().__init__()
        hidden, name = config.vision_hidden_size, "vision.patch_embedding"
        self.dtype = backend.dtype
        self.weight = backend.replicated(f"{name}.weight", (hidden, config.patch_dim), "normal", std)
        self.bias = backend.replicated(f"{name}.bias", (hidden,), "zeros")
        shape = (config.patches_per_crop, hidden)
        self.positions = backend.replicated("vision.position_embedding.weight", shape, "normal", std)
        self.blocks = nn.ModuleList(
            VisionBlock(layer, config, std, backend, recompute) for layer in range(config.vision_num_layers)
        )
        self.feature_layers = config.feature_layers

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Encode every crop; `patches` of any float dtype are turned into the model's."""
        x = F.linear(patches.to(self.dtype), self.weight, self.bias) + self.positions  # [c, N, 3 p p] -> [c, N, h]
        x = x.flatten(0, 1)  # [c, N, h] -> [c * N, h]
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return torch.cat([outputs[layer] for layer in self.feature_layers], -1)  # 2 x [c * N, h] -> [c * N, 2 h]
