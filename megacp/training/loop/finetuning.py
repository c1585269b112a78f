"""Default numbers of a run that starts from a model folder (--load-hf).

They are common practice for supervised fine-tuning, not measurements. Every flag replaces its
number.
"""

from __future__ import annotations

import math

EPOCHS = 3.0
"""Default --train-epochs. LLaMA-Factory's examples and transformers' Trainer have the same default.
"""
# Tokens of an update, for data sets of up to a number of tokens. Small data sets get small updates:
# a model needs some dozens of updates to learn anything.
_UPDATE_TOKENS = (
    (20_000, 1_024),
    (100_000, 2_048),
    (1_000_000, 8_192),
    (10_000_000, 32_768),
    (math.inf, 131_072),
)


def update_tokens(data_tokens: int) -> int:
    """Return the tokens of an update for a data set of `data_tokens` tokens."""
    return next(tokens for most, tokens in _UPDATE_TOKENS if data_tokens <= most)


def default_batch(data_tokens: int, row_tokens: int, multiple: int = 1) -> int:
    """Return the default --global-batch-size: a multiple of `multiple`, in rows of `row_tokens`.

    `multiple` is the number of rows that the data-parallel ranks compute at once.
    """
    rows = max(1, update_tokens(data_tokens) // row_tokens)
    return math.ceil(rows / multiple) * multiple
