"""Descriptions of LoRA adapters in words, for the start of a run, a plan or an export."""

from __future__ import annotations

from collections.abc import Sequence

from megacp.engine.config.model import ModelConfig, joined_words
from megacp.engine.config.run import RunConfig
from megacp.engine.layers.moe import MOE
from megacp.engine.layers.stack import EXPERT_KINDS, layers_of, lora_kinds
from megacp.storage.wording import human_count


def describe_pairs(model: ModelConfig) -> str:
    """Return a description of the model's LoRA adapters.

    For example: `rank 8, alpha 16, on attention.q, experts.gate (rank 4, alpha 8)`.
    """
    usual = model.usual_pair
    sizes = {kind: model.lora_pairs[kind] for kind in lora_kinds(model)}
    names = []
    for word, size in joined_words(sizes).items():
        if size != usual:
            word = f"{word} (rank {size.rank}, alpha {size.alpha:g})"
        names.append(word)
    return f"rank {usual.rank}, alpha {usual.alpha:g}, on {', '.join(names)}"


def layers_in_words(layers: Sequence[int]) -> str:
    """Return ascending layer numbers as ranges, such as `0-2, 4`."""
    # [first, last] of each run of consecutive numbers
    ranges = list[list[int]]()
    for layer in layers:
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return ", ".join(words)


def parts_without_pairs(config: RunConfig) -> list[str]:
    """Return log lines about layers without LoRA adapters, and about untrained experts."""
    model = config.model
    who = "the adapter" if config.checkpoint.load_adapter is not None else "--lora-targets"
    if not model.lora_pairs:
        return []
    layers = layers_of(model)
    # part of a block -> layers in which it has no pair
    bare = dict[str, list[int]]()
    for i, layer in enumerate(layers):
        kinds = layer.lora_linears(model)
        if not kinds:
            bare.setdefault(f"{layer.mixer.name} and MLP", []).append(i)
        elif not any(kind.startswith(f"{layer.mixer.name}.") for kind in kinds):
            bare.setdefault(layer.mixer.name, []).append(i)
    lines = []
    # if all layers have the same kind of mixer, `describe_pairs` is enough
    mixers = {layer.mixer.name for layer in layers}
    if len(mixers) > 1:
        for part, of_part in bare.items():
            shown = layers_in_words(of_part)
            lines.append(f"no LoRA adapters on {part} of layers {shown} ({who} includes none)")
    # most parameters of a model are in its experts, so report it if they stay frozen
    experts = [layer for layer in layers if layer.is_routed]
    if experts and not any(kind in model.lora_pairs for kind in EXPERT_KINDS):
        # weights of one expert
        matrices = sum(linear.inputs * linear.outputs for linear in MOE.of_expert(model).values())
        count = human_count(matrices * model.num_experts * len(experts))
        if config.checkpoint.load_adapter is not None:
            advice = "the loaded adapter does not include them"
        else:
            targets = ",".join([model.lora_targets or "q,v", *EXPERT_KINDS])
            advice = f"--lora-targets {targets} would train LoRA adapters on them"
        lines.append(
            f"experts are not trained: {count} parameters ({model.num_experts} experts in each of "
            f"{len(experts)} layers); {advice}"
        )
    return lines
