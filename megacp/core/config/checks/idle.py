"""Flags that a run is given and that do nothing in it.

Key property: they are told, not refused, as one config file may serve runs that switch a part of it off. Each row of a
table says which flags act only under what. Rejected: silence, which lets a mistyped plan look like one that is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dataclasses import fields as fields_of

from megacp.core.config.run import RunConfig, flag, flatten
from megacp.core.config.vision import VisionConfig

_TOWER = tuple(one.name for one in fields_of(VisionConfig) if one.name != "vision_num_layers")


@dataclass(frozen=True)
class _Needs:
    """Flags that act only where something holds."""

    names: tuple[str, ...]
    holds: Callable[[RunConfig], bool]
    otherwise: str
    """What is so where it does not hold."""


_TABLE = (
    _Needs(("valid_data_path", "eval_iters"), lambda c: c.training.eval_interval > 0, "--eval-interval is 0"),
    _Needs(
        ("min_lr", "lr_decay_iters"),
        lambda c: c.training.lr_decay_style != "constant",
        "--lr-decay-style is constant",
    ),
    _Needs(("lr_wsd_decay_style",), lambda c: c.training.lr_decay_style == "WSD", "--lr-decay-style is not WSD"),
    _Needs(("profile_dir", "profile_ranks"), lambda c: c.log.profile is not None, "there is no --profile"),
    _Needs(
        ("rope_low_freq_factor", "rope_high_freq_factor"),
        lambda c: c.model.rope_scaling == "llama3",
        "--rope-scaling is not llama3",
    ),
    _Needs(
        ("rope_original_max_positions",),
        lambda c: c.model.rope_scaling in ("llama3", "yarn"),
        "--rope-scaling is neither llama3 nor yarn",
    ),
    _Needs(
        ("yarn_correction_range_round_to_int",),
        lambda c: c.model.rope_scaling == "yarn",
        "--rope-scaling is not yarn",
    ),
    _Needs(("rope_scaling",), lambda c: c.model.rope_scaling_factor != 1.0, "--rope-scaling-factor is 1"),
    _Needs(("max_bad_image_share",), lambda c: c.data.on_bad_image == "skip", "--on-bad-image is not skip"),
    _Needs(
        ("on_bad_image", "vision_shards", "image_attention", *_TOWER),
        lambda c: c.vision.vision_num_layers > 0,
        "--vision-num-layers is 0",
    ),
)


def idle_notes(config: RunConfig) -> Iterator[str]:
    """A line for each reason why flags with other values than their defaults do nothing."""
    given, defaults = flatten(config), flatten(RunConfig())
    for row in _TABLE:
        idle = [flag(name) for name in row.names if given[name] != defaults[name]]
        if idle and not row.holds(config):
            yield f"no effect: {', '.join(idle)}, because {row.otherwise}"
    t = config.training
    steps = t.train_iters if t.lr_decay_iters is None else t.lr_decay_iters
    if steps == 1 and t.lr_decay_style != "constant" and t.lr_warmup_iters == 0 and t.min_lr == 0.0:
        yield f"no effect: --lr {t.lr:g}, because --lr-decay-style {t.lr_decay_style} ends at 0 in its only step"
