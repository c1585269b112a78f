"""The range of every number and the words of every choice: what a single field may hold.

Key property: one table row per number, so that a new field without a row fails a test. Rejected: `__post_init__` in the
dataclasses, which raises at the first wrong value and hides the rest.
"""

from __future__ import annotations

import math
import types
import typing
from dataclasses import dataclass

from megacp.config.run import FieldInfo, Value


@dataclass(frozen=True)
class Range:
    """Allowed values of a number: low <= value <= high, an end left out where it is open."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def holds(self, value: float) -> bool:
        """Whether the value is inside; NaN never is."""
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below

    def __str__(self) -> str:
        parts = []
        if self.low > -math.inf:
            parts.append(f"{'above' if self.low_open else 'at least'} {self.low:g}")
        if self.high < math.inf:
            parts.append(f"{'below' if self.high_open else 'at most'} {self.high:g}")
        return " and ".join(parts) or "a finite number"


POSITIVE = Range(low=1)
NOT_NEGATIVE = Range(low=0, high=math.inf, high_open=True)
ABOVE_ZERO = Range(low=0, low_open=True, high=math.inf, high_open=True)
FRACTION = Range(low=0, high=1, high_open=True)

RANGES: dict[str, Range] = {
    "tensor_model_parallel_size": POSITIVE,
    "pipeline_model_parallel_size": POSITIVE,
    "context_parallel_size": POSITIVE,
    "num_virtual_stages_per_pipeline_rank": POSITIVE,
    "hierarchical_context_parallel_sizes": POSITIVE,
    "cp_exchange_stages": POSITIVE,
    "ddp_bucket_size": POSITIVE,
    "distributed_timeout_minutes": ABOVE_ZERO,
    "num_layers": POSITIVE,
    "hidden_size": POSITIVE,
    "ffn_hidden_size": POSITIVE,
    "num_attention_heads": POSITIVE,
    "num_query_groups": POSITIVE,
    "kv_channels": POSITIVE,
    "vocab_size": NOT_NEGATIVE,
    "additional_vocab_size": NOT_NEGATIVE,
    "rotary_base": Range(low=1, low_open=True, high=math.inf, high_open=True),
    "rope_scaling_factor": Range(low=1, high=math.inf, high_open=True),
    "rope_low_freq_factor": ABOVE_ZERO,
    "rope_high_freq_factor": ABOVE_ZERO,
    "rope_original_max_positions": POSITIVE,
    "max_position_embeddings": POSITIVE,
    "norm_epsilon": ABOVE_ZERO,
    "init_method_std": NOT_NEGATIVE,
    "hidden_dropout": FRACTION,
    "make_vocab_size_divisible_by": POSITIVE,
    "vision_num_layers": NOT_NEGATIVE,
    "vision_hidden_size": POSITIVE,
    "vision_ffn_hidden_size": POSITIVE,
    "vision_num_attention_heads": POSITIVE,
    "vision_num_query_groups": POSITIVE,
    "vision_head_dim": POSITIVE,
    "vision_patch_size": POSITIVE,
    "vision_image_size": POSITIVE,
    "vision_feature_layers": Range(low=-(2**31), high=2**31 - 1),
    "vision_norm_epsilon": ABOVE_ZERO,
    "connector_num_attention_heads": POSITIVE,
    "connector_num_query_groups": POSITIVE,
    "connector_head_dim": POSITIVE,
    "connector_ffn_hidden_size": POSITIVE,
    "vision_lr_multiplier": ABOVE_ZERO,
    "connector_lr_multiplier": ABOVE_ZERO,
    "vision_planned_crops": POSITIVE,
    "seq_length": POSITIVE,
    "num_workers": NOT_NEGATIVE,
    "micro_batch_size": POSITIVE,
    "global_batch_size": POSITIVE,
    "train_iters": POSITIVE,
    "lr": NOT_NEGATIVE,
    "min_lr": NOT_NEGATIVE,
    "lr_warmup_iters": NOT_NEGATIVE,
    "lr_decay_iters": POSITIVE,
    "lr_wsd_decay_iters": POSITIVE,
    "weight_decay": NOT_NEGATIVE,
    "adam_beta1": FRACTION,
    "adam_beta2": FRACTION,
    "adam_eps": ABOVE_ZERO,
    "clip_grad": NOT_NEGATIVE,
    "seed": Range(low=0, high=2**63 - 1),
    "exit_duration": ABOVE_ZERO,
    "eval_interval": NOT_NEGATIVE,
    "eval_iters": POSITIVE,
    "max_skipped_steps": NOT_NEGATIVE,
    "loss_spike_factor": NOT_NEGATIVE,
    "grad_norm_spike_factor": NOT_NEGATIVE,
    "spike_window": Range(low=4, high=10_000),
    "max_bad_image_share": Range(low=0, high=1),
    "save_interval": NOT_NEGATIVE,
    "keep_last": NOT_NEGATIVE,
    "checkpoint_timeout_minutes": ABOVE_ZERO,
    "log_interval": POSITIVE,
    "timing_log_interval": NOT_NEGATIVE,
    "world_size": POSITIVE,
}
"""The range of every number; None (a default to be derived) is always allowed."""


def problem_of_value(info: FieldInfo, value: Value) -> str | None:
    """Why a field cannot hold this value: missing, not one of its words, out of range; None when it can."""
    parts = typing.get_args(info.hint) if isinstance(info.hint, types.UnionType) else (info.hint,)
    if value is None:
        return None if type(None) in parts else "needs a value"
    choices = typing.get_args(info.hint) if typing.get_origin(info.hint) is typing.Literal else ()
    if choices:
        return None if value in choices else f"got {value!r}, allowed are {', '.join(choices)}"
    allowed = RANGES.get(info.name)
    if allowed is None:
        return "an empty string is no name" if value == "" else None
    if isinstance(value, (bool, str)):
        return f"expected a number, got {value!r}"
    if isinstance(value, tuple):
        return None if all(map(allowed.holds, value)) else f"got {_words(value)}, each must be {allowed}"
    return None if allowed.holds(value) else f"got {value}, it must be {allowed}"


def _words(values: tuple[int, ...]) -> str:
    return " ".join(map(str, values))
