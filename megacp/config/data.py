"""Where packs come from: dataset directories, row length, mask, loader threads.

Key property: paths and numbers only; what a dataset holds is read from its manifest by the data room. Rejected: copying
the tokenizer and the packing rules here, where they could disagree with the files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DataConfig:
    """The training and validation packs."""

    data_path: str | None = None
    """Packed dataset directory made by tools/preprocess_data.py; without it random mock packs are used."""

    valid_data_path: str | None = None
    """Packed dataset directory for the validation loss."""

    seq_length: int = 512
    """Tokens of one pack."""

    attention_mask: Literal["packed", "causal"] = "packed"
    """packed: documents of a pack do not see each other; causal: the whole pack is one document."""

    num_workers: int = 1
    """Threads that read packs ahead of the step; 0 reads them when they are needed."""
