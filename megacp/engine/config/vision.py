"""Flags of the vision tower, and the table of vision families.

To add a family, add a row to `VISION_FAMILIES`, and also:

- preprocessing rules in `training/data/vision`,
- sizes and costs of its tower and connector in `engine/layers/vision.py`,
- their modules in `engine/models/multimodal.py`,
- the tensor names in its Hugging Face folders in `huggingface/convert`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megacp.engine.config.ranges import MAX_LAYERS, AboveZero, Positive, Range

POOLED_PATCHES = 4
"""Patches per pooled token that the planner assumes: 2 x 2, as for images."""


@dataclass(frozen=True)
class VisionFamily:
    """Properties shared by all vision towers of a family."""

    has_grids: bool = False
    """Whether images may have any shape. Each patch then counts as a crop. If False, crops are
    squares of patches.
    """
    frames: int = 1
    """Number of video frames per patch."""
    replaces: bool = False
    """Whether image features replace the token embeddings. If False, they are added to them."""
    is_causal: bool = False
    """Whether attention among image tokens is causal."""
    has_feature_layers: bool = False
    """Whether the tower returns the outputs of --vision-feature-layers. If False, it returns only
    its last layer's output.
    """
    head_multiple: int = 1
    """Required divisor of the head width. It is 4 if rotary angles follow rows and columns, because
    each angle rotates a pair of dimensions.
    """
    token_rows: int = 0
    """Number of embedding rows for image tokens that are not in the text vocabulary."""


VISION_FAMILIES: dict[str, VisionFamily] = {
    "molmo2": VisionFamily(has_feature_layers=True, token_rows=128),
    "qwen3_5": VisionFamily(
        has_grids=True, frames=2, replaces=True, is_causal=True, head_multiple=4
    ),
}
"""Choices of `--vision-family`."""


@dataclass(frozen=True)
class VisionConfig:
    """Flags for the vision tower (a ViT), the connector that pools its patches, and frozen parts.

    If `vision_num_layers` is 0, the model has no tower, and the other fields have no effect. The
    connector has the same width as the tower.
    """

    vision_num_layers: Annotated[int, Range(0, MAX_LAYERS)] = 0
    """Number of blocks in the vision tower (Molmo2: 25). 0 trains a language model without
    vision."""

    vision_family: Literal["molmo2", "qwen3_5"] = "molmo2"
    """Type of the vision tower. molmo2 encodes square crops; its connector uses attention to pool
    windows of patches from two layers. qwen3_5 encodes whole images of any shape, with patches that
    cover two frames; its connector concatenates 2 x 2 patches."""

    vision_hidden_size: Positive[int] = 1152
    """Width of the vision tower and of the connector's attention output."""

    vision_ffn_hidden_size: Positive[int] = 4304
    """Width of the hidden layer in the tower's MLPs."""

    vision_num_attention_heads: Positive[int] = 16
    """Number of query heads in the vision tower."""

    # Images
    vision_patch_size: Positive[int] = 14
    """Side length of a patch in pixels."""

    vision_image_size: Positive[int] = 378
    """Side length of a crop in pixels; a crop has (image size / patch size)^2 patches. For qwen3_5:
    side length of the square whose learned position embeddings are resampled for each image
    (768)."""

    # Connector
    vision_feature_layers: Annotated[tuple[int, int], Range(-(2**31), 2**31 - 1)] = (-1, -7)
    """Two layers whose outputs the connector receives, in this order. Layers are numbered from 0;
    negative numbers count from the end, so -1 is the last layer. One of the two must be the last
    layer."""

    connector_ffn_hidden_size: Positive[int | None] = None
    """Hidden width of the SwiGLU projector from pooled patches to the decoder. None means
    --ffn-hidden-size."""

    # Training of the parts. --lora-rank freezes all of them, regardless of --freeze.
    freeze: str | None = None
    """Parts to freeze, separated by commas: vision, connector, text (includes embedding and output
    head). Frozen parts have no gradients and no optimizer state."""

    vision_lr_multiplier: AboveZero[float] = 1.0
    """Learning rate of the vision tower, as a multiple of --lr."""

    connector_lr_multiplier: AboveZero[float] = 1.0
    """Learning rate of the connector, as a multiple of --lr."""

    # Packs of a dataset differ in their number of images, so stages need a typical number
    vision_planned_crops: Positive[int | None] = None
    """Number of crops per pack to assume when planning pipeline stages and memory. If not set, the
    plan assumes enough crops to fill a pack with pooled windows of 2 x 2 patches."""

    @property
    def patches_per_side(self) -> int:
        """Number of patches along one side of a crop."""
        return self.vision_image_size // self.vision_patch_size

    @property
    def patches_per_crop(self) -> int:
        """Number of learned positions, which for molmo2 is the number of patches per crop."""
        return self.patches_per_side**2

    @property
    def family(self) -> VisionFamily:
        """Properties of the chosen `vision_family`."""
        return VISION_FAMILIES[self.vision_family]

    @property
    def crop_patches(self) -> int:
        """Number of patches per crop; 1 if each patch counts as a crop (`has_grids`)."""
        return 1 if self.family.has_grids else self.patches_per_crop

    @property
    def patch_dim(self) -> int:
        """Length of a flattened patch: frames x rows x columns x colours."""
        # RGB has 3 colours
        return self.family.frames * 3 * self.vision_patch_size**2

    @property
    def smallest_image(self) -> tuple[int, int]:
        """Number of crops and pooled tokens of the smallest image, for windows of 2 x 2 patches."""
        if self.family.has_grids:
            return (POOLED_PATCHES, 1)
        # an odd last row or column of patches makes smaller windows, so round up
        windows_per_side = -(-self.patches_per_side // 2)
        return (1, windows_per_side**2)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers whose outputs are passed to the connector, counted from 0."""
        # -1 % layers is the last layer
        return tuple(layer % self.vision_num_layers for layer in self.vision_feature_layers)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Frozen parts that `freeze` lists."""
        return tuple((self.freeze or "").replace(",", " ").split())

    @property
    def vision_head_dim(self) -> int:
        """Width of a head, both in the tower and in the connector's attention."""
        return self.vision_hidden_size // self.vision_num_attention_heads
