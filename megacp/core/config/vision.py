"""The architecture of the vision tower and its connector (those of Molmo2), and which towers are trained.

With `vision_num_layers` 0 there is no tower, and no other field here has a meaning. Hugging Face's native `molmo2` has
every field too, so its config can express any tower built here. The connector has the width of the tower, as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

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

    vision_num_query_groups: Positive[int | None] = None
    """Key/value heads of the tower (default: as many as query heads)."""

    vision_head_dim: Positive[int] = 72
    """Width of one head of the tower."""

    vision_patch_size: Positive[int] = 14
    """Side of a patch in pixels."""

    vision_image_size: Positive[int] = 378
    """Side of a crop in pixels: crops are squares of (image size / patch size)^2 patches."""

    vision_feature_layers: Annotated[tuple[int, int], Range(-(2**31), 2**31 - 1)] = (-1, -7)
    """The two layers whose outputs go to the connector, in this order: from 0 up, or counted from the end with -1 as
    the last. One of them must be the last layer."""

    vision_norm_epsilon: AboveZero[float] = 1e-6
    """Epsilon inside the tower's LayerNorm."""

    vision_activation: Literal["gelu_tanh", "gelu"] = "gelu_tanh"
    """Activation of the tower's MLPs: GELU by its tanh approximation, or exact."""

    connector_num_attention_heads: Positive[int] = 16
    """Query heads of the attention that pools patches."""

    connector_num_query_groups: Positive[int | None] = None
    """Key/value heads of the attention that pools patches (default: as many as query heads)."""

    connector_head_dim: Positive[int] = 72
    """Width of one head of the attention that pools patches."""

    connector_ffn_hidden_size: Positive[int | None] = None
    """Width of the SwiGLU projector between pooled patches and text (default: --ffn-hidden-size)."""

    freeze_vision: bool = False
    """Leave the vision tower as it is: no gradients, no optimizer state."""

    freeze_connector: bool = False
    """Leave the connector as it is."""

    freeze_text: bool = False
    """Leave the language model as it is, its embedding and head included."""

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
    def vision_groups(self) -> int:
        """Key/value heads of the tower."""
        return self.vision_num_query_groups or self.vision_num_attention_heads

    @property
    def connector_groups(self) -> int:
        """Key/value heads of the connector."""
        return self.connector_num_query_groups or self.connector_num_attention_heads
