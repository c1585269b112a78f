"""Vision towers: ViTs (Dosovitskiy et al., 2021) that encode each crop or image independently.

Patches attend only to patches of the same crop or image, so any rank can encode any crop or image.
Only tp ranks communicate: tp splits heads and MLP, and activations between the linear layers are
replicated. Sequence parallelism over patches would restrict the number of crops per rank to
multiples of tp.

Molmo2: crops have learned positions. The tower concatenates the outputs of two blocks, without a
final norm.

Qwen3.5: images have any number of patches, which are ordered by 2 x 2 blocks. The learned positions
of a square are resampled for each image. Queries and keys have rotary embeddings by row and column.
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
"""Core attention, from q, k and v `[patches, heads/tp, d]` and a `Caller` to the same shape."""


class VisionBlock(nn.Module):
    """Pre-norm ViT block with biases: `x[patches, h] -> [patches, h]`, replicated over tp."""

    def __init__(
        self,
        layer: int,
        config: VisionConfig,
        model: ModelConfig,
        backend: NativeBackend,
        recompute: RecomputeMode,
    ) -> None:
        super().__init__()
        prefix = f"vision.blocks.{layer}"
        hidden = config.vision_hidden_size
        epsilon = 1e-6  # in every LayerNorm of both families
        product = functools.partial(LinearSpec.of, prefix, block_linears(config, model))
        self.head_dim = config.vision_head_dim
        # widths of q, k and v in the fused output of this tp rank
        self.widths = [hidden // backend.tp.size] * 3
        norm = NormSpec(f"{prefix}.attention_norm", hidden, epsilon)
        self.attention_norm = layer_norm(norm, backend.options)
        self.qkv = backend.column_linear(product("attention.q", "attention.k", "attention.v"))
        self.output = backend.row_linear(product("attention.output"))
        norm = NormSpec(f"{prefix}.mlp_norm", hidden, epsilon)
        self.mlp_norm = layer_norm(norm, backend.options)
        self.up = backend.column_linear(product("mlp.up"))
        self.down = backend.row_linear(product("mlp.down"))
        self.activation = nn.GELU("tanh")
        self.recompute = recompute

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Run the block with its recompute mode; return `[patches, h]`."""
        return run_block(self._body, self.recompute, x, attend)

    def _body(self, x: torch.Tensor, attend: Attend, save: Save) -> torch.Tensor:
        qkv = self.qkv(save(self.attention_norm, x)).split(self.widths, -1)
        # [patches, heads/tp * d] -> [patches, heads/tp, d]
        attended = attend(*(part.unflatten(-1, (-1, self.head_dim)) for part in qkv), save.results)
        x = x + self.output(attended.flatten(1))
        return x + self.down(save(self.activation, self.up(save(self.mlp_norm, x))))


class Tower(nn.Module):
    """Base class of all towers: patch embedding, learned positions and blocks."""

    def __init__(
        self,
        config: VisionConfig,
        model: ModelConfig,
        backend: NativeBackend,
        recompute: RecomputeMode,
    ) -> None:
        super().__init__()
        self.backend = backend
        self.scale = config.vision_head_dim**-0.5
        tower, _ = VISION_KINDS[config.vision_family]
        # the first three tensors belong to the embedding; the tensors of the blocks follow
        embedding = itertools.islice(tower.tensors(config, model), 3)
        self.weight, self.bias, self.positions = map(backend.parameter, embedding)
        self.blocks = nn.ModuleList(
            VisionBlock(layer, config, model, backend, recompute)
            for layer in range(config.vision_num_layers)
        )

    def prepare(self, grids: PatchGrids | None) -> None:
        """Compute the plan for images on the host, in a data loader thread, before `forward`."""


class VisionTower(Tower):
    """Molmo2's tower: `patches[c, N, 3 p p] -> [c * N, 2 h]`, the features of two layers."""

    def __init__(
        self,
        config: VisionConfig,
        model: ModelConfig,
        backend: NativeBackend,
        recompute: RecomputeMode,
    ) -> None:
        super().__init__(config, model, backend, recompute)
        self.feature_layers = config.feature_layers
        self.patches = config.patches_per_crop

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Caller
    ) -> torch.Tensor:
        """Let all patches of a crop attend to each other."""
        # [c * N, heads/tp, d] -> [c, heads/tp, N, d]
        q, k, v = (x.unflatten(0, (-1, self.patches)).transpose(1, 2) for x in (q, k, v))
        # Do not use `call`, which would keep the output instead of recomputing it: attention takes
        # only a tenth of the block's time for products, so saving memory is worth more.
        if q.device.type == STAND_IN:
            attended = dense_attention_of_gpu(q, k, v, self.scale)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return attended.transpose(1, 2).flatten(0, 1)

    def forward(self, patches: torch.Tensor, grids: PatchGrids | None = None) -> torch.Tensor:
        """Encode every crop. `patches` of any float dtype are converted to the model's dtype."""
        x = F.linear(patches.to(self.backend.dtype), self.weight, self.bias)  # [c, N, h]
        x = (x + self.positions).flatten(0, 1)  # [c * N, h]
        outputs = []
        for block in self.blocks:
            x = block(x, self._attend)
            outputs.append(x)
        # 2 x [c * N, h] -> [c * N, 2 h]
        return torch.cat([outputs[layer] for layer in self.feature_layers], -1)


def patch_places(grids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the image number, row and column of each patch, all `[N]`.

    `grids[n, 2]` contains the rows and columns of each image, in blocks of 2 x 2 patches. The order
    is row by row over blocks, and row by row within each block.
    """
    # empty arrays allow concatenation if there are no images
    empty = np.zeros(0, np.int64)
    image = [empty]
    rows = [empty]
    columns = [empty]
    for number, (h, w) in enumerate(grids.tolist()):
        # patch numbers [2 h, 2 w] row by row, reordered block by block
        place = np.arange(4 * h * w).reshape(h, 2, w, 2).swapaxes(1, 2).reshape(-1)
        image.append(np.full(len(place), number))
        rows.append(place // (2 * w))
        columns.append(place % (2 * w))
    return np.concatenate(image), np.concatenate(rows), np.concatenate(columns)


def _taps(place: np.ndarray, length: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the two table rows to interpolate linearly for each patch, and their weights.

    Both results are `[N, 2]`. The first of `length` places corresponds to row 0, and the last one
    to row `side - 1`.
    """
    at = place * (side - 1) / np.maximum(length - 1, 1)
    low = np.minimum(at.astype(np.int64), side - 1)
    high = np.minimum(low + 1, side - 1)
    part = at - low
    return np.stack([low, high], 1), np.stack([1 - part, part], 1)


def resampled(grids: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the four learned positions to interpolate bilinearly for each patch, with weights.

    The results are row indices `[N, 4]` in a table of `side x side` positions, and weights
    `[N, 4]`.
    """
    image, row, column = patch_places(grids)
    rows, by_row = _taps(row, 2 * grids[image, 0], side)
    columns, by_column = _taps(column, 2 * grids[image, 1], side)
    # all four combinations of two rows and two columns
    taps = rows[:, :, None] * side + columns[:, None]
    weights = by_row[:, :, None] * by_column[:, None]
    return taps.reshape(-1, 4), weights.reshape(-1, 4)


@once
def patch_plan(
    grids: PatchGrids, side: int, device: torch.device
) -> tuple[AttentionPlan, list[torch.Tensor]]:
    """Return the attention plan for images, and the tensors that depend on their sizes.

    According to the plan, patches of the same image attend to each other. The tensors are rows and
    columns `[N, 2]` and the results of `resampled`, in host memory (pinned for a GPU).
    """
    image, row, column = patch_places(grids.sizes)
    plan = AttentionPlan(np.arange(len(image))[None], Metadata.of_documents(image, span=1), 0)
    arrays = np.stack([row, column], 1), *resampled(grids.sizes, side)
    return plan, [pinned(torch.from_numpy(x), device) for x in arrays]


class GridTower(Tower):
    """Qwen3.5's tower: `patches[c, 1, 2 * 3 p p] -> [c, h]`, for images or pairs of frames."""

    def __init__(
        self,
        config: VisionConfig,
        model: ModelConfig,
        backend: NativeBackend,
        recompute: RecomputeMode,
    ) -> None:
        super().__init__(config, model, backend, recompute)
        self.side = config.patches_per_side
        self.device = backend.options.device
        width = config.vision_head_dim
        # half of the dimensions rotate by row, the other half by column
        self.frequencies = inverse_frequencies(width // 2, 1e4, RotaryScaling()).to(self.device)
        heads = config.vision_num_attention_heads // backend.tp.size
        self.heads = Heads(heads, heads, width)

    def prepare(self, grids: PatchGrids | None) -> None:
        """Compute the plan for images on the host, in a data loader thread, before `forward`."""
        assert grids is not None
        plan, _ = patch_plan(grids, self.side, self.device)
        self.backend.local_transport.prepare(plan, self.heads)

    def forward(self, patches: torch.Tensor, grids: PatchGrids | None = None) -> torch.Tensor:
        """Encode every image. `patches` of any float dtype are converted to the model's dtype."""
        assert grids is not None, "the tower needs the grids of the images"
        plan, arrays = patch_plan(grids, self.side, self.device)
        assert len(plan.local) == len(patches), "grids and patches belong to different images"
        places, taps, weights = (to_device(x, self.device) for x in arrays)
        dtype = self.backend.dtype
        x = F.linear(patches.to(dtype).flatten(0, 1), self.weight.flatten(1), self.bias)
        # weighted sum of four learned positions per patch
        x = x + F.embedding_bag(
            taps, self.positions, per_sample_weights=weights.to(dtype), mode="sum"
        )
        attend = self.attention(plan, places)
        for block in self.blocks:
            x = block(x, attend)
        return x

    def attention(self, plan: AttentionPlan, places: torch.Tensor) -> Attend:
        """Return core attention for images, with rotary embeddings by row and column `[N, 2]`."""
        # [N, 2] -> [N, d / 2]: angles by row, then angles by column
        turns = places.repeat_interleave(len(self.frequencies), 1)
        cos, sin = cos_sin(turns, self.frequencies.repeat(2), self.backend.dtype)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Caller) -> torch.Tensor:
            q, k = (rotate(part, cos, sin) for part in (q, k))
            # a view would keep the whole fused product alive until the backward pass
            v = v.contiguous()
            return self.backend.local_transport.attend(q, k, v, plan, self.scale, call=call)

        return attend
