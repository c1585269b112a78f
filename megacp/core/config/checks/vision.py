"""Contradictions of the vision tower: unread layers, frozen towers, flags that do nothing without a tower."""

from __future__ import annotations

from collections.abc import Iterator

from megacp.core.config.ranges import differ
from megacp.core.config.run import RunConfig, flag, flatten

_FREEZE = ("freeze_vision", "freeze_connector", "freeze_text")


def vision_reasons(config: RunConfig, world: int) -> Iterator[str]:
    """What a tower asks of the other fields, and what has no meaning without one."""
    v, values = config.vision, flatten(config)
    frozen = [name for name in _FREEZE if values[name]]
    rates = {"vision": v.vision_lr_multiplier, "connector": v.connector_lr_multiplier}
    other_rates = {name: f"--{name}-lr-multiplier {rate:g}" for name, rate in rates.items() if differ(rate, 1)}
    given = [*map(flag, frozen), *other_rates.values()]
    if v.vision_num_layers == 0 and given:
        yield f"{', '.join(given)} {'act' if len(given) > 1 else 'acts'} only with --vision-num-layers above 0"
    if config.parallel.vision_shards == "replicate" and config.parallel.vision_feature_exchange != "routed":
        yield (
            f"--vision-shards replicate sends no features, --vision-feature-exchange "
            f"{config.parallel.vision_feature_exchange} would send some: give one of them"
        )
    if v.vision_num_layers > 0:
        yield from _feature_layers(config)
        if config.model.additional_vocab_size == 0:
            yield (
                f"--vision-num-layers {v.vision_num_layers} needs rows for image tokens, which are never predicted: "
                "give --additional-vocab-size (Molmo2 has 128)"
            )
        if len(frozen) == len(_FREEZE):
            yield "--freeze-vision, --freeze-connector and --freeze-text together leave nothing to train"
        idle = [f"{words} with --freeze-{name}" for name, words in other_rates.items() if f"freeze_{name}" in frozen]
        if idle:
            yield f"{', '.join(idle)}: a frozen tower has no learning rate"


def _feature_layers(config: RunConfig) -> Iterator[str]:
    count, (first, second) = config.vision.vision_num_layers, config.vision.vision_feature_layers
    if min(first, second) < -count or max(first, second) >= count:
        yield (
            f"--vision-feature-layers {first} {second} are not both among the {count} layers of --vision-num-layers: "
            f"{-count} to {count - 1}"
        )
        return
    read = max(config.vision.feature_layers) + 1
    if read < count:
        words = " ".join(str(layer - read) for layer in config.vision.feature_layers)
        yield (
            f"--vision-feature-layers {first} {second} leave the last {count - read} of --vision-num-layers {count} "
            f"unread: the same tower is --vision-num-layers {read} --vision-feature-layers {words}"
        )
