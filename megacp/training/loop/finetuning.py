"""Default length and batch size of a run that starts from a model folder (--load-hf).

These values are common practice for supervised fine-tuning; they were not measured. Flags override
them.
"""

from __future__ import annotations

import math

EPOCHS = 3.0
"""Default --train-epochs, as in LLaMA-Factory's examples and transformers' Trainer."""
# (maximum number of tokens in the dataset, tokens per update). Updates are small for small
# datasets, because a model needs dozens of updates to learn anything.
_UPDATE_TOKENS = (
    (20_000, 1_024),
    (100_000, 2_048),
    (1_000_000, 8_192),
    (10_000_000, 32_768),
    (math.inf, 131_072),
)


def update_tokens(data_tokens: int) -> int:
    """Return the number of tokens per update for a dataset with `data_tokens` tokens."""
    return next(tokens for most, tokens in _UPDATE_TOKENS if data_tokens <= most)


def default_batch(data_tokens: int, row_tokens: int, multiple: int = 1) -> int:
    """Return the default --global-batch-size for rows of `row_tokens`, a multiple of `multiple`.

    `multiple` is the number of rows that all data-parallel ranks process at once.
    """
    rows = max(1, update_tokens(data_tokens) // row_tokens)
    return math.ceil(rows / multiple) * multiple
