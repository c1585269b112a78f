"""The vision tower: its flags, and the row of each family of towers, as far as flags say what it
is.

A new family needs a row here and a row for its preprocessing rules (`training/data/vision`), the
sizes and costs of its tower and connector (`engine/layers/vision.py`), their modules
(`engine/models/multimodal.py`) and the names of its tensors in a Hugging Face folder
(`huggingface/convert`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megacp.engine.config.ranges import MAX_LAYERS, AboveZero, Positive, Range

POOLED_PATCHES = 4
"""Patches of a planned pooled token: 2 x 2, as images have."""


@dataclass(frozen=True)
class VisionFamily:
    """A family of towers: what follows from its name, for all that reads the flags."""

    has_grids: bool = False
    """Images have any shape, and each patch is a crop of its own; else crops are squares of
    patches.
    """
    frames: int = 1
    """Frames of a patch."""
    replaces: bool = False
    """Features stand in the place of their tokens' embeddings, else they are added to them."""
    is_causal: bool = False
    """No image token sees one behind it."""
    has_feature_layers: bool = False
    """The outputs of --vision-feature-layers leave the tower, else that of the last layer."""
    head_multiple: int = 1
    """What the width of a head is a multiple of; by row and by column angles turn pairs."""
    token_rows: int = 0
    """Rows of the embedding for image tokens that the vocabulary lacks."""


VISION_FAMILIES: dict[str, VisionFamily] = {
    "molmo2": VisionFamily(has_feature_layers=True, token_rows=128),
    "qwen3_5": VisionFamily(
        has_grids=True, frames=2, replaces=True, is_causal=True, head_multiple=4
    ),
}
"""Families by the words of --vision-family."""


@dataclass(frozen=True)
class VisionConfig:
    """The ViT that encodes crops, the connector that pools its patches, and which towers are
    trained; as Molmo2's.

    With `vision_num_layers` 0 there is no tower, and no other field here has a meaning. The
    connector has the width of the tower.
    """

    vision_num_layers: Annotated[int, Range(0, MAX_LAYERS)] = 0
    """Blocks of the vision tower; 0 trains a language model without one. Molmo2 has 25."""

    vision_family: Literal["molmo2", "qwen3_5"] = "molmo2"
    """What the tower is: Molmo2's (square crops, outputs of two layers, attention over windows of
    patches) or Qwen3.5's (whole images of any shape, patches of two frames, 2 x 2 of them side by
    side)."""

    vision_hidden_size: Positive[int] = 1152
    """Width of the vision tower, and of the connector's attention output."""

    vision_ffn_hidden_size: Positive[int] = 4304
    """Width of the hidden layer of the tower's MLPs."""

    vision_num_attention_heads: Positive[int] = 16
    """Query heads of the tower."""

    vision_patch_size: Positive[int] = 14
    """Side of a patch in pixels."""

    vision_image_size: Positive[int] = 378
    """Side of a crop in pixels: crops are squares of (image size / patch size)^2 patches. Of
    Qwen3.5 that of the square whose learned positions are resampled for each image (768)."""

    vision_feature_layers: Annotated[tuple[int, int], Range(-(2**31), 2**31 - 1)] = (-1, -7)
    """The two layers whose outputs go to the connector, in this order: from 0 up, or counted from
    the end with -1 as the last. One of them must be the last layer."""

    connector_ffn_hidden_size: Positive[int | None] = None
    """Width of the SwiGLU projector between pooled patches and text (default: --ffn-hidden-size).
    """

    freeze: str | None = None
    """Parts whose weights stay as they are, without gradients and optimizer state: of vision,
    connector and text (with embedding and head) those that are named, with commas between."""

    vision_lr_multiplier: AboveZero[float] = 1.0
    """Learning rate of the vision tower over that of the language model, at every step."""

    connector_lr_multiplier: AboveZero[float] = 1.0
    """Learning rate of the connector over that of the language model, at every step."""

    vision_planned_crops: Positive[int | None] = None
    """Crops of one pack that pipeline stages and memory are planned for (default: those that fill a
    pack with pooled windows of 2 x 2 patches)."""

    @property
    def patches_per_side(self) -> int:
        """Patches along a side of a crop."""
        return self.vision_image_size // self.vision_patch_size

    @property
    def patches_per_crop(self) -> int:
        """Rows of the table of positions; of Molmo2 the patches of a crop."""
        return self.patches_per_side**2

    @property
    def family(self) -> VisionFamily:
        """The row of `vision_family`."""
        return VISION_FAMILIES[self.vision_family]

    @property
    def crop_patches(self) -> int:
        """Patches of a crop; of images of any shape one, so that crops are their patches."""
        return 1 if self.family.has_grids else self.patches_per_crop

    @property
    def patch_dim(self) -> int:
        """Numbers of a flattened patch: frames x rows x columns x colours."""
        return self.family.frames * 3 * self.vision_patch_size**2

    @property
    def smallest_image(self) -> tuple[int, int]:
        """Crops and pooled tokens of the smallest image, with windows of 2 x 2 patches."""
        return (
            (POOLED_PATCHES, 1)
            if self.family.has_grids
            else (1, (-(-self.patches_per_side // 2)) ** 2)
        )

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers whose outputs go to the connector, counted from 0."""
        return tuple(layer % self.vision_num_layers for layer in self.vision_feature_layers)

    @property
    def frozen(self) -> tuple[str, ...]:
        """The words of `freeze`."""
        return tuple((self.freeze or "").replace(",", " ").split())

    @property
    def vision_head_dim(self) -> int:
        """Width of one head, of the tower and of the attention that pools patches."""
        return self.vision_hidden_size // self.vision_num_attention_heads
