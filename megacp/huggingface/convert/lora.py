"""Merges a checkpoint's LoRA pairs into its weights, or exports them as a peft adapter.

A merged weight is W + scale B A, computed in fp32 or wider and rounded once. If the library fuses
linears that have separate pairs (Phi-3's qkv), the adapter has one pair whose rank is the sum of
their ranks: A is stacked, and B is block-diagonal. Linears that share A already form one pair. All
experts of a layer share one pair, as in peft's pairs for parameters: A is ordered by expert, B by
rank. The pair for gate and up is nested one module deeper. In some families, dense MLPs are also
written as parameters, because peft treats modules with these names as experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megacp.attention.ops.dtype import accumulation_dtype
from megacp.engine.config.model import ModelConfig, PairSize
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.layers.table import A, B, lora_kind
from megacp.engine.models.pair_words import describe_pairs
from megacp.engine.tensor_parallel.lora import is_of_a_pair
from megacp.huggingface.convert import hf_files
from megacp.huggingface.convert.config_json import Values
from megacp.huggingface.convert.family import Family
from megacp.huggingface.convert.tensors import STACKS, Info, Link, Named, Source, whole

# Prefix of names in an adapter: the wrapper of peft around the library's model.
_PREFIX = "base_model.model."


def stacks_beside(parameter: str) -> list[str]:
    """Return the names of both expert stacks in the layer that contains `parameter`."""
    return [parameter.partition(".experts.")[0] + end for end in STACKS]


def modules_of_stacks(parameter: str, both: bool) -> str:
    """Return the module in which peft stores the pair of an expert stack.

    `both`: whether both stacks of the layer have a pair.
    """
    module = parameter.rpartition(".")[0]
    # peft wraps the module once per pair, so the first pair is inside the second wrapper.
    if both and parameter.endswith(STACKS[0]):
        return f"{module}.base_layer"
    return module


def experts_in_link(link: Link) -> list[tuple[Named, ...]]:
    """Return each expert's matrices in a stack: gate and up, or down."""
    if link.theirs[0].name.endswith(STACKS[0]):
        return list(zip(link.ours[::2], link.ours[1::2], strict=True))
    return [(down,) for down in link.ours]


class Pairs:
    """The LoRA pairs of `source`; also a source whose weights have the pairs merged."""

    def __init__(self, source: Source, config: RunConfig) -> None:
        self.source = source
        self.config = config
        self.infos: Mapping[str, Info] = {
            name: info for name, info in source.infos.items() if not is_of_a_pair(name)
        }

    def __str__(self) -> str:
        return f"LoRA adapters of {describe_pairs(self.config.model)}"

    def size(self, name: str) -> PairSize:
        """Return the rank and alpha of a weight's pair."""
        return self.config.model.lora_pairs[lora_kind(name.removesuffix(".weight"))]

    def down_name(self, name: str) -> str:
        """Return the name of A in a weight's pair. Another linear may have the same A."""
        stem = name.removesuffix(".weight")
        shares = self.size(name).shares
        if shares:
            return f"{stem.rpartition('.')[0]}.{shares}.{A}"
        return f"{stem}.{A}"

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of a tensor, with its pair merged."""
        found = self.source.rows(name, start, stop)
        stem = name.removesuffix("weight")
        if f"{stem}{B}" not in self.source.infos:
            return found
        wide = accumulation_dtype(found.dtype)
        up = self.source.rows(f"{stem}{B}", start, stop).to(wide)  # [rows, r]
        down = whole(self.source, self.down_name(name)).to(wide)  # [r, inputs]
        merged = found.to(wide).addmm(up, down, alpha=self.size(name).scale)  # [rows, inputs]
        return merged.to(found.dtype)


def folded(source: Source, config: RunConfig) -> tuple[Source, RunConfig, Pairs | None]:
    """Return a checkpoint's weights and config with its pairs merged, and the pairs.

    The pairs are None if the checkpoint has none.
    """
    if config.model.lora_rank == 0:
        return source, config, None
    pairs = Pairs(source, config)
    without = {"lora_rank": 0, "lora_alpha": None, "lora_targets": None, "lora_dropout": 0.0}
    return pairs, with_values(config, without), pairs


def write_adapter(
    pairs: Pairs,
    family: Family,
    values: Values,
    folder: Path,
    base: str | None,
    dtype: torch.dtype | None,
) -> int:
    """Write an adapter for the base model `base` to a folder; return its number of elements."""
    from safetensors.torch import save_file

    tensors = dict[str, torch.Tensor]()
    sizes = dict[str, PairSize]()
    for target, module, pair in _joined(pairs, family, values):
        sizes[target] = pair.size
        for end, tensor in ((A, pair.down), (B, pair.up)):
            tensors[f"{_PREFIX}{module}.{end}"] = tensor.to(dtype or tensor.dtype).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    hf_files.write_json(folder / "adapter_config.json", _config(pairs.config.model, sizes, base))
    return sum(tensor.numel() for tensor in tensors.values())


@dataclass(frozen=True)
class _Joined:
    """A `[r, inputs]` and B `[rows, r]` for joined linears."""

    down: torch.Tensor
    up: torch.Tensor
    size: PairSize


def _joined(pairs: Pairs, family: Family, values: Values) -> Iterator[tuple[str, str, _Joined]]:
    """Yield the name of each module or parameter with a pair, the pair's module, and the pair."""
    infos = pairs.source.infos
    links = family.links_of_modules(values)
    targets = set[str]()
    for link in links:
        if any(_stem(named) + B in infos for named in link.ours):
            targets.add(link.theirs[0].name)
    beside_experts = family.peft_converts or any(name.endswith(STACKS) for name in targets)
    for link in links:
        name = link.theirs[0].name
        if name not in targets:
            continue
        if not name.endswith(STACKS):
            module = name.removesuffix(".weight")
            target = name if beside_experts and ".mlp." in link.ours[0].name else module
            yield target, module, _joined_pair(pairs, [link.ours])[0]
            continue
        of_experts = _joined_pair(pairs, experts_in_link(link))
        up = torch.stack([pair.up for pair in of_experts], 2)  # [rows, r, E]
        if family.in_turns and name.endswith(STACKS[0]):
            # Let rows of gate and up alternate.
            up = torch.stack(up.chunk(2), 1).flatten(0, 1)
        down = torch.cat([pair.down for pair in of_experts])
        module = modules_of_stacks(name, targets.issuperset(stacks_beside(name)))
        yield name, module, _Joined(down, up.flatten(1), of_experts[0].size)


def _stem(named: Named) -> str:
    """Return the name of a weight's linear layer, with a trailing dot."""
    return named.name.removesuffix("weight")


def _joined_pair(pairs: Pairs, groups: Sequence[Sequence[Named]]) -> list[_Joined]:
    """Return one pair per group of joined linears, all with the same rank.

    The A matrices of a group are stacked, and each linear's B is in the columns that belong to its
    A. At least one linear of a group must have a pair.
    """
    infos = pairs.source.infos
    has = [f"{_stem(named)}{B}" in infos for named in groups[0]]
    names = [pairs.down_name(named.name) for named, one in zip(groups[0], has, strict=True) if one]
    sizes = [pairs.size(named.name) for named, one in zip(groups[0], has, strict=True) if one]
    # Linears may share an A: `places` contains the index of each pair's A.
    own = list(dict.fromkeys(names))
    places = [own.index(name) for name in names]
    of_groups = []
    ranks = [1] * len(own)  # of each A
    for group in groups:
        with_pair = [named for named, one in zip(group, has, strict=True) if one]
        downs = {pairs.down_name(named.name): named for named in with_pair}
        a = [whole(pairs.source, name) for name in downs]
        b = [whole(pairs.source, f"{_stem(named)}{B}") for named in with_pair]
        of_groups.append((a, b))
        # Zeros that padded an adapter to its rank are not written.
        for place, up in zip(places, b, strict=True):
            ranks[place] = max(ranks[place], _rank(a[place], up))
    return [
        _stacked(group, has, places, ranks, sizes, *of_one)
        for group, of_one in zip(groups, of_groups, strict=True)
    ]


def _stacked(
    group: Sequence[Named],
    has: Sequence[bool],
    places: Sequence[int],
    ranks: Sequence[int],
    sizes: Sequence[PairSize],
    downs: Sequence[torch.Tensor],
    ups: Sequence[torch.Tensor],
) -> _Joined:
    """Stack the pairs of joined linears.

    `has`: whether each linear of the group has a pair. `places`: for each of `ups`, the index of
    its A in `downs`. `ranks`: rank of each of `downs`.
    """
    cut = [_cut(size, ranks[place]) for place, size in zip(places, sizes, strict=True)]
    scale = cut[0].scale
    given = iter(zip(places, sizes, ups, strict=True))
    blocks = []  # B of each linear, [rows, sum of ranks]
    for named, one in zip(group, has, strict=True):
        block = downs[0].new_zeros(named.shape[0], sum(ranks))
        if one:
            place, size, up = next(given)
            up = up[:, : ranks[place]]
            # The joined pair has one scale, so B is multiplied by the ratio.
            factor = size.scale / scale
            if not math.isclose(factor, 1.0, rel_tol=1e-12):
                up = (up.double() * factor).to(accumulation_dtype(up.dtype))
            first = sum(ranks[:place])
            block = block.to(up.dtype)
            block[:, first : first + ranks[place]] = up
        blocks.append(block)
    down = torch.cat([of_one[:rank] for of_one, rank in zip(downs, ranks, strict=True)])
    alpha = scale * sum(ranks)
    if all(math.isclose(size.scale, scale, rel_tol=1e-12) for size in cut):
        # The sum of the alphas of all A gives the same scale without rounding.
        alpha_of_place = {place: size.alpha for place, size in zip(places, cut, strict=True)}
        alpha = sum(alpha_of_place.values())
    return _Joined(down, torch.cat(blocks), PairSize(sum(ranks), alpha))


def _cut(size: PairSize, rank: int) -> PairSize:
    """Return the size of a pair that is cut to `rank`, which removes its zero padding.

    If the ranks differ by a power of two, alpha is kept, because multiplying B by that power is
    exact; the adapter had this alpha before it was padded.
    """
    if rank == size.rank:
        return replace(size, shares="")
    is_exact = math.frexp(rank / size.rank)[0] == 0.5
    return PairSize(rank, size.alpha if is_exact else size.scale * rank)


def _rank(down: torch.Tensor, up: torch.Tensor) -> int:
    """Return the rank of a pair without its padding, whose rows of A and columns of B are zero.

    The rank is at least 1.
    """
    used = (down != 0).any(1) | (up != 0).any(0)
    return max([1, *(used.nonzero().flatten() + 1).tolist()])


def _config(model: ModelConfig, sizes: Mapping[str, PairSize], base: str | None) -> dict[str, Any]:
    """Return an adapter_config.json; `sizes` maps modules and parameters to their pair sizes."""
    usual = model.usual_pair
    # Names of parameters end in `.weight` or are stacks; other names are modules.
    parameters = sorted(name for name in sizes if name.endswith((*STACKS, ".weight")))
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": usual.rank,
        "lora_alpha": usual.alpha,
        # peft does not support dropout for pairs of parameters.
        "lora_dropout": 0.0 if parameters else model.lora_dropout,
        "target_modules": sorted(sizes.keys() - set(parameters)) or None,
        "rank_pattern": {
            name: size.rank for name, size in sizes.items() if size.rank != usual.rank
        },
        "alpha_pattern": {
            name: size.alpha for name, size in sizes.items() if size.alpha != usual.alpha
        },
    }
    if parameters:
        content["target_parameters"] = parameters
    return content
