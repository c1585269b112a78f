"""Low-rank pairs of a checkpoint: folded into the weights they stand beside, or as an adapter that
peft loads.

A folded weight is W + scale B A, summed in fp32 or wider and rounded once. Where the library joins
linears that have pairs of their own (Phi-3's qkv), the adapter has one pair of their ranks
together: A stacked, B in blocks. Linears that share A have one pair as it is. Experts have one of
all of them, as peft has it for a parameter: A by expert, B by rank, and that of gate and up one
layer deeper. Of some families the other MLPs are written as parameters too, because peft takes
modules of their names for the experts.
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

_PREFIX = "base_model.model."
"""Prefix of names in an adapter: peft's model around the library's."""


def stacks_beside(parameter: str) -> list[str]:
    """Name both stacks of the experts in a layer."""
    return [parameter.partition(".experts.")[0] + end for end in STACKS]


def modules_of_stacks(parameter: str, both: bool) -> str:
    """Name the module where peft has the pair of a stack of experts; `both`: both stacks of the
    layer have one.
    """
    module = parameter.rpartition(".")[0]
    return f"{module}.base_layer" if both and parameter.endswith(STACKS[0]) else module


def experts_in_link(link: Link) -> list[tuple[Named, ...]]:
    """Return the matrices of each expert in a stack."""
    each = 2 if link.theirs[0].name.endswith(STACKS[0]) else 1
    return list(zip(*(link.ours[first::each] for first in range(each)), strict=True))


class Pairs:
    """The pairs in `source`, with the weights that they stand beside; itself a source with the
    pairs folded in.
    """

    def __init__(self, source: Source, config: RunConfig) -> None:
        self.source, self.config = source, config
        self.infos: Mapping[str, Info] = {
            name: info for name, info in source.infos.items() if not is_of_a_pair(name)
        }

    def __str__(self) -> str:
        return f"low-rank pairs of {describe_pairs(self.config.model)}"

    def size(self, name: str) -> PairSize:
        """Rank and alpha of the pair beside a weight."""
        return self.config.model.lora_pairs[lora_kind(name.removesuffix(".weight"))]

    def down_name(self, name: str) -> str:
        """The matrix A of the pair beside a weight, which may be that of another linear."""
        stem = name.removesuffix(".weight")
        shares = self.size(name).shares
        return f"{stem.rpartition('.')[0]}.{shares}.{A}" if shares else f"{stem}.{A}"

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of a tensor."""
        found, stem = self.source.rows(name, start, stop), name.removesuffix("weight")
        if f"{stem}{B}" not in self.source.infos:
            return found
        wide = accumulation_dtype(found.dtype)
        up, down = (
            self.source.rows(f"{stem}{B}", start, stop),
            whole(self.source, self.down_name(name)),
        )
        # [rows, r] x [r, inputs] -> [rows, inputs]
        scale = self.size(name).scale
        return found.to(wide).addmm(up.to(wide), down.to(wide), alpha=scale).to(found.dtype)


def folded(source: Source, config: RunConfig) -> tuple[Source, RunConfig, Pairs | None]:
    """A checkpoint's weights and config as those of a model without pairs, and the pairs that it
    has.
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
    """Fill a folder that peft loads, for the model named `base`; its elements."""
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
    """A `[r, inputs]` and B `[rows, r]` of joined linears."""

    down: torch.Tensor
    up: torch.Tensor
    size: PairSize


def _joined(pairs: Pairs, family: Family, values: Values) -> Iterator[tuple[str, str, _Joined]]:
    """Yield each module or parameter of the library that has a pair: its name, the pair's module,
    and the pair.
    """
    infos, links = pairs.source.infos, family.links_of_modules(values)
    targets = {
        link.theirs[0].name
        for link in links
        if any(_stem(named) + B in infos for named in link.ours)
    }
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
            up = torch.stack(up.chunk(2), 1).flatten(0, 1)
        down = torch.cat([pair.down for pair in of_experts])
        module = modules_of_stacks(name, targets.issuperset(stacks_beside(name)))
        yield name, module, _Joined(down, up.flatten(1), of_experts[0].size)


def _stem(named: Named) -> str:
    return named.name.removesuffix("weight")


def _joined_pair(pairs: Pairs, groups: Sequence[Sequence[Named]]) -> list[_Joined]:
    """Return a pair of each group of joined linears, all of one rank; at least one linear of a
    group has a pair.

    All A of a group are stacked, and B of a linear is in the columns of its A.
    """
    infos = pairs.source.infos
    has = [f"{_stem(named)}{B}" in infos for named in groups[0]]
    names = [pairs.down_name(named.name) for named, one in zip(groups[0], has, strict=True) if one]
    sizes = [pairs.size(named.name) for named, one in zip(groups[0], has, strict=True) if one]
    own = list(dict.fromkeys(names))
    places = [own.index(name) for name in names]
    of_groups = []
    ranks = [1] * len(own)
    for group in groups:
        with_pair = [named for named, one in zip(group, has, strict=True) if one]
        downs = {pairs.down_name(named.name): named for named in with_pair}
        a = [whole(pairs.source, name) for name in downs]
        b = [whole(pairs.source, f"{_stem(named)}{B}") for named in with_pair]
        of_groups.append((a, b))
        # zeros that an adapter got for its rank are not written
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
    """Stack the pairs of joined linears; `places`: which of `downs` belongs to each of `ups`,
    `ranks`: of `downs`.
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
        alpha = sum(dict(zip(places, (size.alpha for size in cut), strict=True)).values())
    return _Joined(down, torch.cat(blocks), PairSize(sum(ranks), alpha))


def _cut(size: PairSize, rank: int) -> PairSize:
    """Return the size of a pair without the zeros above its rank.

    Alpha stays if B then changes by a power of two, without rounding: it did not change when the
    zeros were added.
    """
    if rank == size.rank:
        return replace(size, shares="")
    is_exact = math.frexp(rank / size.rank)[0] == 0.5
    return PairSize(rank, size.alpha if is_exact else size.scale * rank)


def _rank(down: torch.Tensor, up: torch.Tensor) -> int:
    """Return the rank of a pair without its last rows of A and columns of B that are zero; at least
    1.
    """
    used = (down != 0).any(1) | (up != 0).any(0)
    return max([1, *(used.nonzero().flatten() + 1).tolist()])


def _config(model: ModelConfig, sizes: Mapping[str, PairSize], base: str | None) -> dict[str, Any]:
    """Return an adapter_config.json; `sizes` by module or parameter."""
    usual = model.usual_pair
    parameters = sorted(name for name in sizes if name.endswith((*STACKS, ".weight")))
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": usual.rank,
        "lora_alpha": usual.alpha,
        # peft has no dropout on pairs beside parameters
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
