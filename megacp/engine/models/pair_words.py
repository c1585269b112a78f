"""Low-rank pairs in words: what a run says of them when it starts, and a plan or an export when it
is made.
"""

from __future__ import annotations

from collections.abc import Sequence

from megacp.engine.config.model import ModelConfig, joined_words
from megacp.engine.config.run import RunConfig
from megacp.engine.layers.moe import MOE
from megacp.engine.layers.stack import EXPERT_KINDS, layers_of, lora_kinds
from megacp.storage.wording import human_count


def describe_pairs(model: ModelConfig) -> str:
    """Describe the low-rank pairs in words: `rank 8, alpha 16, on attention.q, experts.gate (rank
    4, alpha 8)`.
    """
    usual = model.usual_pair
    names = []
    for word, size in joined_words(
        {kind: model.lora_pairs[kind] for kind in lora_kinds(model)}
    ).items():
        names.append(word if size == usual else f"{word} (rank {size.rank}, alpha {size.alpha:g})")
    return f"rank {usual.rank}, alpha {usual.alpha:g}, on {', '.join(names)}"


def layers_in_words(layers: Sequence[int]) -> str:
    """Write layer numbers in ascending order as ranges: `0-2, 4`."""
    ranges = list[list[int]]()
    for layer in layers:
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def parts_without_pairs(config: RunConfig) -> list[str]:
    """Say in a line each which layers have no low-rank pairs, and that experts are not trained, if
    they are not.
    """
    model = config.model
    who = "the adapter" if config.checkpoint.load_adapter is not None else "--lora-targets"
    if not model.lora_pairs:
        return []
    layers = layers_of(model)
    bare = dict[str, list[int]]()
    for i, layer in enumerate(layers):
        kinds = layer.lora_linears(model)
        if not kinds:
            bare.setdefault(f"{layer.mixer.name} and MLP", []).append(i)
        elif not any(kind.startswith(f"{layer.mixer.name}.") for kind in kinds):
            bare.setdefault(layer.mixer.name, []).append(i)
    told = []
    # in a model of one kind of mixer the list of kinds says all
    if len({layer.mixer.name for layer in layers}) > 1:
        for part, of_part in bare.items():
            told.append(
                f"no low-rank pairs: {part} of layers {layers_in_words(of_part)} ({who} names none)"
            )
    experts = [layer for layer in layers if layer.is_routed]
    if experts and not any(kind in model.lora_pairs for kind in EXPERT_KINDS):
        matrices = sum(linear.inputs * linear.outputs for linear in MOE.of_expert(model).values())
        count = human_count(matrices * model.num_experts * len(experts))
        if config.checkpoint.load_adapter is not None:
            advice = "the adapter has no pairs on them"
        else:
            targets = model.lora_targets or "q,v"
            advice = (
                f"--lora-targets {','.join([targets, *EXPERT_KINDS])} trains low-rank pairs on them"
            )
        told.append(
            f"experts are not trained: {count} parameters in {model.num_experts} experts of "
            f"{len(experts)} layers; "
            f"{advice}"
        )
    return told
