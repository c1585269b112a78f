"""Choose the row length and the learning rate of a fine-tuning run.

Batch and epochs are the defaults of every run with --load-hf (megacp.training.loop.finetuning). The
tables are common practice for supervised fine-tuning, not measurements. Every flag replaces its
number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megacp.engine.config.run import Value
from megacp.prepare.packs.lengths import Lengths
from megacp.training.loop.finetuning import update_tokens

WARMUP = 0.05
"""Share of the steps in which the learning rate grows."""
# Parameters of a model up to which full training uses a learning rate. Smaller models tolerate
# higher rates: the alignment-handbook trains SmolLM2 with 1e-3 (135 M and 360 M parameters) and
# 3e-4 (1.7 B), at large batches. Ours are lower, because our batches are small.
_RATES = (
    (300e6, 3e-4),
    (1e9, 5e-5),
    (4e9, 2e-5),
    (math.inf, 1e-5),
)
LORA_RATE = 2e-4
"""Learning rate of LoRA adapters, for data sets of up to `_SMALL` tokens."""
LARGE_LORA_RATE = 1e-4
_SMALL = 10_000_000
ADAPTERS: dict[str, Value] = {"lora_rank": 16, "lora_alpha": 32, "lora_targets": "all"}
"""Sizes of adapters, where a model does not fit as a whole."""
# RowChoice are at most this long, unless a document is longer. GPUs need larger rows to be busy.
_ROW_TOKENS = {"cpu": 2_048, "cuda": 8_192}


@dataclass(frozen=True)
class RowChoice:
    """How documents are packed into rows."""

    tokens: int
    """Tokens of a row."""
    oversize: str
    """What happens to documents that are longer than a row: a value of --oversize."""
    reason: str


def peak_rate(parameters: int, data_tokens: int, uses_lora: bool) -> float:
    """Return the peak learning rate for a model of `parameters` parameters."""
    if uses_lora:
        return LORA_RATE if data_tokens <= _SMALL else LARGE_LORA_RATE
    return next(rate for most, rate in _RATES if parameters <= most)


def rows(
    lengths: Lengths, device_type: str, positions: int | None, given: int | None = None
) -> RowChoice:
    """Return the row length for documents of these lengths.

    `positions` is the maximum length that the model supports, or None if it is unknown; `given` is
    a row length that the user wants. A chosen row is a power of two, so that any number of ranks
    that is a power of two can share it.
    """
    usual = given or min(update_tokens(lengths.all_tokens), _ROW_TOKENS[device_type])
    whole = lengths.longest_whole
    if whole == 0:
        # Plain texts can be cut, so their length does not matter.
        return RowChoice(usual, "split", "longer texts continue in the next row")
    needed = given or 2 ** math.ceil(math.log2(whole))
    row_tokens = min(max(usual, needed), positions or math.inf)
    reason = f"the longest document has {whole:,} tokens"
    if not lengths.is_whole:
        reason = f"the longest of the first {lengths.documents:,} documents has {whole:,} tokens"
    if whole > row_tokens:
        why = "" if given else f", but the model supports {positions:,}"
        return RowChoice(int(row_tokens), "drop", f"{reason}{why}; longer ones are left out")
    if not lengths.is_whole:
        return RowChoice(int(row_tokens), "drop", f"{reason}; longer ones are left out")
    # A text among conversations may be longer than the row.
    oversize = "split" if lengths.longest > row_tokens else "error"
    return RowChoice(int(row_tokens), oversize, reason)
