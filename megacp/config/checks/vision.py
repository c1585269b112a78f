"""Contradictions of the vision tower: sizes over tp, pixels over patches, layers that nobody reads, frozen towers.

Key property: rows of the same table as `checks`; without a tower only a flag that would silently do nothing is told.
Rejected: asserts in the layers, which tell one reason on every rank after the process groups exist.
"""

from __future__ import annotations

from megacp.config.checks.rules import Rule, registrar
from megacp.config.run import RunConfig, flag, flatten

VISION_RULES: list[Rule] = []
_rule = registrar(VISION_RULES)

_TP, _LAYERS = "tensor_model_parallel_size", "vision_num_layers"
_FREEZE = ("freeze_vision", "freeze_connector", "freeze_text")
_MULTIPLIERS = ("vision_lr_multiplier", "connector_lr_multiplier")


def _over(config: RunConfig, name: str, divisor: str) -> str | None:
    """The reason when the field `name` is no multiple of the field `divisor`; a field of None is left to its rule."""
    values = flatten(config)
    number, by = values[name], values[divisor]
    if number is None or by is None or config.vision.vision_num_layers == 0 or number % by == 0:  # type: ignore[operator]
        return None
    return f"{flag(name)} {number} is no multiple of {flag(divisor)} {by}"


def _multiple(name: str, divisor: str) -> None:
    def find(config: RunConfig, world: int) -> str | None:
        return _over(config, name, divisor)

    find.__name__ = f"_{name}_over_{divisor}"
    _rule(_LAYERS, name, divisor)(find)


_multiple("vision_image_size", "vision_patch_size")
_multiple("vision_ffn_hidden_size", _TP)
_multiple("connector_ffn_hidden_size", _TP)
for _tower in ("vision", "connector"):
    _multiple(f"{_tower}_num_attention_heads", _TP)
    _multiple(f"{_tower}_num_query_groups", _TP)
    _multiple(f"{_tower}_num_attention_heads", f"{_tower}_num_query_groups")


@_rule(_LAYERS, "vision_feature_layers")
def _feature_layers_exist(config: RunConfig, world: int) -> str | None:
    count, chosen = config.vision.vision_num_layers, config.vision.vision_feature_layers
    if count == 0 or all(-count <= layer < count for layer in chosen):
        return None
    return (
        f"--vision-feature-layers {chosen[0]} {chosen[1]} are not both among the {count} layers of "
        f"--vision-num-layers: {-count} to {count - 1}"
    )


@_rule(_LAYERS, "vision_feature_layers")
def _last_vision_layer_is_read(config: RunConfig, world: int) -> str | None:
    count, chosen = config.vision.vision_num_layers, config.vision.vision_feature_layers
    if count == 0 or not all(-count <= layer < count for layer in chosen):
        return None
    read = max(config.vision.feature_layers) + 1
    if read == count:
        return None
    words = " ".join(str(layer - read) for layer in config.vision.feature_layers)
    return (
        f"--vision-feature-layers {chosen[0]} {chosen[1]} leave the last {count - read} of --vision-num-layers {count} "
        f"unread: the same tower is --vision-num-layers {read} --vision-feature-layers {words}"
    )


@_rule(_LAYERS, "additional_vocab_size")
def _image_tokens_have_rows(config: RunConfig, world: int) -> str | None:
    if config.vision.vision_num_layers == 0 or config.model.additional_vocab_size > 0:
        return None
    return (
        f"--vision-num-layers {config.vision.vision_num_layers} needs rows for image tokens, which are never "
        "predicted: give --additional-vocab-size (Molmo2 has 128)"
    )


@_rule(_LAYERS, *_FREEZE)
def _something_is_trained(config: RunConfig, world: int) -> str | None:
    v = config.vision
    if v.vision_num_layers == 0 or not (v.freeze_vision and v.freeze_connector and v.freeze_text):
        return None
    return "--freeze-vision, --freeze-connector and --freeze-text together leave nothing to train"


@_rule(_LAYERS, *_FREEZE, *_MULTIPLIERS)
def _tower_flags_need_a_tower(config: RunConfig, world: int) -> str | None:
    v = config.vision
    values = flatten(config)
    given = [flag(name) for name in _FREEZE if values[name]]
    given += [f"{flag(name)} {values[name]:g}" for name in _MULTIPLIERS if values[name] != 1.0]
    if v.vision_num_layers > 0 or not given:
        return None
    return f"{', '.join(given)} {'act' if len(given) > 1 else 'acts'} only with --vision-num-layers above 0"


@_rule(_LAYERS, *_FREEZE, *_MULTIPLIERS)
def _frozen_towers_have_no_rate(config: RunConfig, world: int) -> str | None:
    v = config.vision
    towers = (
        (v.freeze_vision, "vision", v.vision_lr_multiplier),
        (v.freeze_connector, "connector", v.connector_lr_multiplier),
    )
    idle = [
        f"--{name}-lr-multiplier {rate:g} with --freeze-{name}"
        for frozen, name, rate in towers
        if frozen and rate != 1.0
    ]
    if v.vision_num_layers == 0 or not idle:
        return None
    return f"{', '.join(idle)}: a frozen tower has no learning rate"
