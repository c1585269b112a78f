"""The architecture of the vision tower and its connector (those of Molmo2), and which towers are trained.

With `vision_num_layers` 0 there is no tower, and no other field here has a meaning. Hugging Face's native `molmo2` has
every field too, so its config can express any tower built here. The connector has the width of the tower, as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megacp.core.config.ranges import MAX_LAYERS, AboveZero, Positive, Range


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the ViT that encodes crops and of the connector that pools its patches; the defaults are Molmo2's."""

    vision_num_layers: Annotated[int, Range(0, MAX_LAYERS)] = 0
    """Blocks of the vision tower; 0 trains a language model without one. Molmo2 has 25."""

    vision_hidden_size: Positive[int] = 1152
    """Width of the vision tower, and of the connector's attention output."""

    vision_ffn_hidden_size: Positive[int] = 4304
    """Width of the hidden layer of the tower's MLPs."""

    vision_num_attention_heads: Positive[int] = 16
    """Query heads of the tower."""

    vision_patch_size: Positive[int] = 14
    """Side of a patch in pixels."""

    vision_image_size: Positive[int] = 378
    """Side of a crop in pixels: crops are squares of (image size / patch size)^2 patches."""

    vision_feature_layers: Annotated[tuple[int, int], Range(-(2**31), 2**31 - 1)] = (-1, -7)
    """The two layers whose outputs go to the connector, in this order: from 0 up, or counted from the end with -1 as
    the last. One of them must be the last layer."""

    connector_ffn_hidden_size: Positive[int | None] = None
    """Width of the SwiGLU projector between pooled patches and text (default: --ffn-hidden-size)."""

    freeze: str | None = None
    """Parts whose weights stay as they are, without gradients and optimizer state: of vision, connector and text (with
    embedding and head) those that are named, with commas between."""

    vision_lr_multiplier: AboveZero[float] = 1.0
    """Learning rate of the vision tower over that of the language model, at every step."""

    connector_lr_multiplier: AboveZero[float] = 1.0
    """Learning rate of the connector over that of the language model, at every step."""

    vision_planned_crops: Positive[int | None] = None
    """Crops of one pack that pipeline stages and memory are planned for (default: those that fill a pack with pooled
    windows of 2 x 2 patches)."""

    @property
    def patches_per_side(self) -> int:
        """Patches along a side of a crop."""
        return self.vision_image_size // self.vision_patch_size

    @property
    def patches_per_crop(self) -> int:
        """Patches of a crop: rows of the table of positions."""
        return self.patches_per_side**2

    @property
    def patch_dim(self) -> int:
        """Numbers of a flattened patch: rows x columns x colours."""
        return 3 * self.vision_patch_size**2

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
