"""The packs of a run: dataset directories, row length, mask, loader threads.

Paths and numbers only: the data room reads a dataset's tokenizer and packing rules from its manifest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megacp.core.config.blend import DataPath
from megacp.core.config.ranges import NotNegative, Positive


@dataclass(frozen=True)
class DataConfig:
    """The training and validation packs."""

    data_path: DataPath | None = None
    """Packed dataset directory made by tools/preprocess_data.py, or its URL (needs the extra `store`), or several with
    weights: `0.7 captions 0.3 text`. Without it random mock packs are used."""

    valid_data_path: DataPath | None = None
    """Packed dataset directory or URL for the validation loss, or several with weights."""

    seq_length: Positive[int] = 512
    """Tokens of one pack; a run takes those of --data-path where no flag says how many."""

    attention_mask: Literal["packed", "causal"] = "packed"
    """packed: documents of a pack do not see each other; causal: the whole pack is one document."""

    image_attention: Literal["example", "image", "causal"] = "example"
    """Which image tokens see each other in both directions: all of a document (example, Molmo2's rule), those of one
    image or frame (image), or none (causal)."""

    on_bad_image: Literal["fail", "skip"] = "fail"
    """What happens when an image cannot be decoded: fail ends the run, skip leaves out its whole document and logs
    it."""

    num_workers: NotNegative[int] = 1
    """Threads that read packs and decode images, each a step ahead of the others; 0 does it when they are needed."""
