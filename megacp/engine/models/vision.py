"""The vision towers: ViTs (Dosovitskiy et al., 2021) that encode each crop, or each image, by
itself.

Patches of a crop or an image see each other and nothing else, so a rank encodes any of them. Only
tp communicates: heads and FFN are cut over it, activations between the linears are replicated.
Sequence parallelism over patches would tie the number of crops of a rank to tp.

Molmo2: crops have learned positions, and the outputs of two blocks side by side leave the tower,
without a final norm. Qwen3.5: images have any number of patches, which stand in blocks of 2 x 2;
the learned positions of a square are resampled to each image, and queries and keys turn by row and
column.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.ops.device import STAND_IN, dense_attention_of_gpu, pinned, to_device
from megacp.attention.ops.kernel import Caller, Heads
from megacp.attention.ops.mask import Metadata
from megacp.attention.ops.once import once
from megacp.attention.ops.rotary import RotaryScaling, cos_sin, inverse_frequencies, rotate
from megacp.engine.backends.native import NativeBackend, NormSpec, layer_norm
from megacp.engine.config.model import ModelConfig
from megacp.engine.config.training import RecomputeMode
from megacp.engine.config.vision import VisionConfig
from megacp.engine.layers.vision import VISION_KINDS, block_linears
from megacp.engine.models.recompute import run_block
from megacp.engine.rows.vision import PatchGrids
from megacp.engine.save import Save
from megacp.engine.tensor_parallel.linear import LinearSpec

Attend = Callable[..., torch.Tensor]
"""q, k, v `[patches, heads/tp, d]` and a `Caller` -> the same shape."""


class VisionBlock(nn.Module):
    """`x[patches, h] -> [patches, h]`, replicated over tp: pre-norm attention and MLP with
    biases.
    """

    def __init__(
        self,
        layer: int,
        config: VisionConfig,
        model: ModelConfig,
        backend: NativeBackend,
        recompute: RecomputeMode,
    ) -> None:
        super().__init__()
        prefix, hidden = f"vision.blocks.{layer}", config.vision_hidden_size
        epsilon = 1e-6  # Molmo2's, in every LayerNorm
        product = functools.partial(LinearSpec.of, prefix, block_linears(config, model))
        self.head_dim, self.widths = config.vision_head_dim, [hidden // backend.tp.size] * 3
        self.attention_norm = layer_norm(
            NormSpec(f"{prefix}.attention_norm", hidden, epsilon), backend.options
        )
        self.qkv = backend.column_linear(product("attention.q", "attention.k", "attention.v"))
        self.output = backend.row_linear(product("attention.output"))
        self.mlp_norm = layer_norm(NormSpec(f"{prefix}.mlp_norm", hidden, epsilon), backend.options)
        self.up = backend.column_linear(product("mlp.up"))
        self.down = backend.row_linear(product("mlp.down"))
        self.activation = nn.GELU("tanh")
        self.recompute = recompute

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Run the block under the recompute mode it was built with."""
        return run_block(self._body, self.recompute, x, attend)

    def _body(self, x: torch.Tensor, attend: Attend, save: Save) -> torch.Tensor:
        qkv = self.qkv(save(self.attention_norm, x)).split(self.widths, -1)
        attended = attend(*(part.unflatten(-1, (-1, self.head_dim)) for part in qkv), save.results)
        x = x + self.output(attended.flatten(1))
        return x + self.down(save(self.activation, self.up(save(self.mlp_norm, x))))


class Tower(nn.Module):
    """What all towers have."""

    def __init__(
        self,
        config: VisionConfig,
        model: ModelConfig,
        backend: NativeBackend,
        recompute: RecomputeMode,
    ) -> None:
        super().__init__()
        self.backend, self.scale = backend, config.vision_head_dim**-0.5
        tower, _ = VISION_KINDS[config.vision_family]
        embedding = itertools.islice(tower.tensors(config, model), 3)  # blocks stand behind it
        self.weight, self.bias, self.positions = map(backend.parameter, embedding)
        self.blocks = nn.ModuleList(
            VisionBlock(layer, config, model, backend, recompute)
            for layer in range(config.vision_num_layers)
        )

    def prepare(self, grids: PatchGrids | None) -> None:
        """Work out on the host what `forward` asks of images; called from the loader's threads."""


class VisionTower(Tower):
    """`patches[c, N, 3 p p] -> [c * N, 2 h]`, the outputs of the two feature layers side by
    side.
    """

    def __init__(
        self,
        config: VisionConfig,
        model: ModelConfig,
        backend: NativeBackend,
        recompute: RecomputeMode,
    ) -> None:
        super().__init__(config, model, backend, recompute)
        self.feature_layers, self.patches = config.feature_layers, config.patches_per_crop

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Caller
    ) -> torch.Tensor:
        """All patches of a crop see each other."""
        # [c * N, heads/tp, d] -> [c, heads/tp, N, d]
        q, k, v = (x.unflatten(0, (-1, self.patches)).transpose(1, 2) for x in (q, k, v))
        # without `call`: a tenth of what the block's products cost, less than the memory is worth
        if q.device.type == STAND_IN:
            attended = dense_attention_of_gpu(q, k, v, self.scale)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return attended.transpose(1, 2).flatten(0, 1)

    def forward(self, patches: torch.Tensor, grids: PatchGrids | None = None) -> torch.Tensor:
        """Encode every crop; `patches` of any float dtype are turned into the model's."""
        x = F.linear(
            patches.to(self.backend.dtype), self.weight, self.bias
        )  # [c, N, 3 p p] -> [c, N, h]
        x = (x + self.positions).flatten(0, 1)  # [c, N, h] -> [c * N, h]
        outputs = []
        for block in self.blocks:
            x = block(x, self._attend)
            outputs.append(x)
        return torch.cat(
            [outputs[layer] for layer in self.feature_layers], -1
        )  # 2 x [c * N, h] -> [c * N, 2 h]


def patch_places(grids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Image, row and column `[N]` of each patch of images with `grids[n, 2]` rows and columns of 2
    x 2 blocks.

    Blocks stand row by row, and so do the patches of a block.
    """
    image, rows, columns = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for number, (h, w) in enumerate(grids.tolist()):
        place = np.arange(4 * h * w).reshape(h, 2, w, 2).swapaxes(1, 2).reshape(-1)
        image.append(np.full(len(place), number))
        rows.append(place // (2 * w))
        columns.append(place % (2 * w))
    return np.concatenate(image), np.concatenate(rows), np.concatenate(columns)


def _taps(place: np.ndarray, length: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """The two rows of a table of `side` between which `place` of `length` lies, ends on ends, and
    their weights.
    """
    at = place * (side - 1) / np.maximum(length - 1, 1)
    low = np.minimum(at.astype(np.int64), side - 1)
    return np.stack([low, np.minimum(low + 1, side - 1)], 1), np.stack(
        [1 - (at - low), at - low], 1
    )


def resampled(grids: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows `[N, 4]` of a table of `side x side` positions and their weights for each patch:
    bilinear.
    """
    image, row, column = patch_places(grids)
    (rows, by_row), (columns, by_column) = (
        _taps(place, 2 * grids[image, axis], side) for place, axis in ((row, 0), (column, 1))
    )
    taps = rows[:, :, None] * side + columns[:, None]
    return taps.reshape(-1, 4), (by_row[:, :, None] * by_column[:, None]).reshape(-1, 4)


@once
def patch_plan(
    grids: PatchGrids, side: int, device: torch.device
) -> tuple[AttentionPlan, list[torch.Tensor]]:
    """The plan by which the patches of each image see each other; rows and columns `[N, 2]` and
    `resampled`, in memory that `device` copies from.
    """
    image, row, column = patch_places(grids.sizes)
    plan = AttentionPlan(np.arange(len(image))[None], Metadata.of_documents(image, span=1), 0)
    arrays = np.stack([row, column], 1), *resampled(grids.sizes, side)
    return plan, [pinned(torch.from_numpy(x), device) for x in arrays]


class GridTower(Tower):
    """Qwen3.5's: `patches[c, 1, 2 * 3 p p]` of images, or pairs of frames, with their grids -> `[c,
    h]`.
    """

    def __init__(
        self,
        config: VisionConfig,
        model: ModelConfig,
        backend: NativeBackend,
        recompute: RecomputeMode,
    ) -> None:
        super().__init__(config, model, backend, recompute)
        self.side, self.device, width = (
            config.patches_per_side,
            backend.options.device,
            config.vision_head_dim,
        )
        self.frequencies = inverse_frequencies(width // 2, 1e4, RotaryScaling()).to(self.device)
        heads = config.vision_num_attention_heads // backend.tp.size
        self.heads = Heads(heads, heads, width)

    def prepare(self, grids: PatchGrids | None) -> None:
        assert grids is not None
        self.backend.local_transport.prepare(
            patch_plan(grids, self.side, self.device)[0], self.heads
        )

    def forward(self, patches: torch.Tensor, grids: PatchGrids | None = None) -> torch.Tensor:
        """Encode every image; `patches` of any float dtype are turned into the model's."""
        assert grids is not None, "patches of images without their grids"
        plan, arrays = patch_plan(grids, self.side, self.device)
        assert len(plan.local) == len(patches), "grids of other images than the patches"
        places, taps, weights = (to_device(x, self.device) for x in arrays)
        dtype = self.backend.dtype
        x = F.linear(patches.to(dtype).flatten(0, 1), self.weight.flatten(1), self.bias)
        x = x + F.embedding_bag(
            taps, self.positions, per_sample_weights=weights.to(dtype), mode="sum"
        )
        attend = self.attention(plan, places)
        for block in self.blocks:
            x = block(x, attend)
        return x

    def attention(self, plan: AttentionPlan, places: torch.Tensor) -> Attend:
        """All patches of an image see each other, turned by their rows and columns `[N, 2]`."""
        # [N, d / 2]: by row, and by column
        turns = places.repeat_interleave(len(self.frequencies), 1)
        cos, sin = cos_sin(turns, self.frequencies.repeat(2), self.backend.dtype)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Caller) -> torch.Tensor:
            q, k, v = (
                rotate(q, cos, sin),
                rotate(k, cos, sin),
                v.contiguous(),
            )  # a view would keep the whole product
            return self.backend.local_transport.attend(q, k, v, plan, self.scale, call=call)

        return attend
