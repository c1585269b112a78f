"""A LoRA adapter that peft has written, as a source of low-rank pairs by our names.

Where the library joins linears that we hold apart (Phi-3's qkv, gate and up of stacked experts),
the adapter has one pair for all of them. If its B is in blocks, each linear gets its own part, else
all share A, each with its rows of B. Experts have one pair for all of them if the library holds
their matrices as one parameter (A by expert, B by rank), or one pair for each linear of each
expert.

A run has one rank and one alpha for each kind of linear. Pairs of one kind with other ranks get
zeros, which stay zero in training; pairs with another scale get it in their B.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megacp.attention.ops.dtype import accumulation_dtype
from megacp.engine.config.model import LORA_KINDS, PairSize, joined_words
from megacp.engine.config.run import Value
from megacp.engine.layers.table import A, B, lora_kind
from megacp.engine.models.pair_words import layers_in_words
from megacp.huggingface.convert.adapter_config import NAME, AdapterConfig, TargetSaid
from megacp.huggingface.convert.config_json import Values, shown
from megacp.huggingface.convert.family import Family
from megacp.huggingface.convert.lora import experts_in_link, modules_of_stacks, stacks_beside
from megacp.huggingface.convert.tensors import STACKS, Info, Link, Named
from megacp.storage import files
from megacp.storage.wording import listed

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of names in an adapter: peft's model around the library's."""
_TOWER_PART = "language_model."
"""Part of the names of a text model that has a vision tower before it; adapters of the text model
lack it.
"""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class _PairPlace:
    """Where an adapter may have a pair."""

    target: str
    """The module or parameter, as the config names it."""
    field: str
    """The field of the config that names it."""
    module: str
    """The module whose pair it is in the file."""
    ours: tuple[tuple[Named, ...], ...]
    """Our linears that the pair stands beside, joined; for a stack those of each expert."""
    is_stack: bool = False


@dataclass(frozen=True)
class _Pair:
    """A `[r, inputs]` and B `[rows, r]` beside some joined linears of ours."""

    name: str
    ours: tuple[Named, ...]
    down: torch.Tensor
    up: torch.Tensor
    size: PairSize


class Adapter:
    """The pairs of an adapter; a source whose tensors have our names, and the flags of a run that
    goes on with them.
    """

    def __init__(self, folder: Path, family: Family, values: Values) -> None:
        """Raise ValueError for an adapter whose pairs a run cannot have, with the field or tensor
        at fault.
        """
        self._in_turns = family.in_turns
        self._config = AdapterConfig(folder / NAME)
        tensors = _tensors_of(folder / WEIGHTS)
        pairs = self._pairs(family, values, tensors)
        if tensors:
            names = listed([shown(name) for name in tensors], 3)
            raise ValueError(
                f"{WEIGHTS}: {names}: no linear of the model that can have a pair has this name"
            )
        apart = list(_split(list(_without_empty(pairs))))
        self._require_all_layers(apart, family, values)
        self._sizes = _size_by_kind(apart)
        self._tensors = dict[str, torch.Tensor]()
        self.infos: dict[str, Info] = {}
        for pair in apart:
            self._keep(pair)
        self.flags = self._flags()
        self.notes = list[str]()
        """Lines about what is read and not used."""
        if self._config.dropout > 0:
            self.notes.append(
                f"{NAME}: lora_dropout {self._config.dropout:g} is not used, --lora-dropout decides"
            )

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of a tensor, with zeros up to the rank of its kind."""
        tensor, shape = self._tensors[name], self.infos[name].shape
        found = tensor.new_zeros(stop - start, *shape[1:])
        held = tensor[start:stop]
        found[: held.shape[0], : held.shape[1]] = held
        return found

    def _pairs(
        self, family: Family, values: Values, tensors: dict[str, torch.Tensor]
    ) -> list[_Pair]:
        """Take the pairs out of the tensors of the file. ValueError if the config says otherwise
        than the file.
        """
        links = [link for link in family.links_of_modules(values) if _can_have_pairs(link)]
        prefix = _prefix_in_file(tensors, links[0].theirs[0].name)
        modules = {name.rpartition(".lora_")[0] for name in tensors}
        held = {link.theirs[0].name for link in links}
        single = [
            link
            for link in family.links(values)
            if _can_have_pairs(link) and link.theirs[0].name not in held
        ]
        # parameters are no modules: a config's target_modules reach single experts only if the file
        # has them
        if not any(prefix.of(link).removesuffix(".weight") in modules for link in single):
            single = []
        about = self._config.about(_names_of([*links, *single], prefix))
        self._require_parameters(prefix.of(link) for link in links)
        pairs = list[_Pair]()
        for place in self._places([*links, *single], prefix, about):
            if self._has(place, about[place.target], modules):
                down = tensors.pop(f"{place.module}.{A}", None)
                up = tensors.pop(f"{place.module}.{B}", None)
                if down is None or up is None:
                    raise ValueError(f"{WEIGHTS}: {place.module} has no {A if down is None else B}")
                pairs += self._of_place(place, about[place.target], down, up)
        return pairs

    def _require_parameters(self, names: Iterable[str]) -> None:
        """Refuse a target parameter that is none of the model's."""
        ends = set[str]()
        for name in names:
            parts = name.split(".")
            ends |= {".".join(parts[first:]) for first in range(len(parts))}
        strange = [shown(target) for target in self._config.target_parameters if target not in ends]
        if strange:
            raise ValueError(
                f"{NAME} says target_parameters {listed(strange, 3)}: no linear of the model has "
                "this name"
            )

    def _places(
        self, links: Sequence[Link], prefix: _Prefix, about: Mapping[str, TargetSaid]
    ) -> Iterator[_PairPlace]:
        """List where the file may have pairs."""
        for link in links:
            name = prefix.of(link)
            if name.endswith(STACKS):
                both = all(about[other].is_parameter for other in stacks_beside(name))
                module = modules_of_stacks(name, both)
                yield _PairPlace(
                    name, "target_parameters", module, tuple(experts_in_link(link)), is_stack=True
                )
                continue
            module = name.removesuffix(".weight")
            if about[name].is_parameter and about[module].is_module:
                raise ValueError(
                    f"{NAME} names {module} in target_modules and in target_parameters"
                )
            if about[name].is_parameter:
                yield _PairPlace(name, "target_parameters", module, (link.ours,))
            else:
                yield _PairPlace(module, "target_modules", module, (link.ours,))

    def _has(self, place: _PairPlace, said: TargetSaid, modules: frozenset[str] | set[str]) -> bool:
        """Return whether the file has a pair. ValueError if the config says otherwise."""
        if place.is_stack and not said.is_parameter:
            return False
        has = place.module in modules
        is_target = said.is_parameter if place.field == "target_parameters" else said.is_module
        if has != is_target:
            raise ValueError(
                f"{self._config.told(place.field)}, and {place.target} has {'a' if has else 'no'} "
                "pair"
            )
        return has

    def _of_place(
        self, place: _PairPlace, said: TargetSaid, down: torch.Tensor, up: torch.Tensor
    ) -> Iterator[_Pair]:
        """Check a pair's shapes, and give the pair of a stack as those of its experts."""
        count, links = len(place.ours), place.ours[0]
        rows, inputs = sum(named.shape[0] for named in links), links[0].shape[1]
        rank = said.size.rank
        if down.dim() == 2 and down.shape[0] != rank * count:
            held = (
                down.shape[0] // count
                if down.shape[0] % count == 0
                else f"{down.shape[0]} / {count}"
            )
            raise ValueError(f"{place.target}: rank {held}, {NAME} says {rank}")
        wanted = (rank * count, inputs), (rows, rank * count)
        if (tuple(down.shape), tuple(up.shape)) != wanted:
            raise ValueError(
                f"{place.target}: A {tuple(down.shape)} and B {tuple(up.shape)} do not fit the "
                "model, which needs "
                f"{wanted[0]} and {wanted[1]}"
            )
        for tensor, end in ((down, A), (up, B)):
            if tensor.dtype not in _DTYPES:
                raise ValueError(
                    f"{place.module}.{end} has dtype {tensor.dtype}, known are {listed(_DTYPES, 9)}"
                )
            if not tensor.isfinite().all():
                raise ValueError(f"{place.module}.{end} has values that are not finite")
        if not place.is_stack:
            yield _Pair(place.target, links, down, up, said.size)
            return
        # [E r, inputs] -> [E, r, inputs]; B is by rank: [rows, r E] -> [E, rows, r]
        downs = down.unflatten(0, (count, rank))
        ups = up.unflatten(1, (rank, count)).permute(2, 0, 1)
        if self._in_turns and place.target.endswith(STACKS[0]):
            ups = torch.cat([ups[:, ::2], ups[:, 1::2]], 1)
        for ours, a, b in zip(place.ours, downs, ups, strict=True):
            yield _Pair(place.target, ours, a, b, said.size)

    def _require_all_layers(self, pairs: Sequence[_Pair], family: Family, values: Values) -> None:
        """Refuse an adapter with pairs of one kind in some layers, or beside some experts, but not
        in all.
        """
        found = {_stem(pair.ours[0]) for pair in pairs}
        if not found:
            raise ValueError(f"{WEIGHTS} has no pair of a linear of the model")
        kinds = {lora_kind(stem) for stem in found}
        of_model = [
            _stem(n)
            for link in family.links_of_modules(values)
            if _can_have_pairs(link)
            for n in link.ours
        ]
        missing = defaultdict[str, set[int]](set)
        for stem in of_model:
            if lora_kind(stem) in kinds and stem not in found:
                missing[lora_kind(stem)].add(int(stem.split(".")[1]))
        if missing:
            told = [
                f"{kind} has no pair in layers {layers_in_words(sorted(which))}"
                for kind, which in missing.items()
            ]
            layers = self._config.layers
            said = "" if layers is None else f" ({NAME} says layers_to_transform {shown(layers)})"
            raise ValueError(
                f"{'; '.join(told)}{said}: a run trains each kind of linear in all layers and "
                "experts that have it, or "
                "in none"
            )

    def _keep(self, pair: _Pair) -> None:
        """Keep a pair with the rank and the scale of its kind."""
        stem = _stem(pair.ours[0])
        size = self._sizes[lora_kind(stem)]
        up = pair.up
        if not math.isclose(pair.size.scale, size.scale, rel_tol=1e-12):
            wide = up.double() * (pair.size.scale / size.scale)
            up = wide.to(accumulation_dtype(up.dtype))
        rows, inputs = pair.ours[0].shape
        for end, tensor, shape in ((A, pair.down, (size.rank, inputs)), (B, up, (rows, size.rank))):
            if end == A and size.shares:
                continue
            self._tensors[f"{stem}.{end}"] = tensor
            self.infos[f"{stem}.{end}"] = Info(shape, tensor.dtype)

    def _flags(self) -> dict[str, Value]:
        """Return the flags of a run that trains these pairs."""
        sizes = list(self._sizes.values())
        usual = self._config.usual
        if usual not in sizes:
            usual = replace(max(sizes, key=sizes.count), shares="")
        words = []
        for word, size in joined_words(self._sizes).items():
            alpha = str(size.alpha).removesuffix(".0")
            words.append(word if size == usual else f"{word}:{size.rank}:{alpha}")
        return {"lora_rank": usual.rank, "lora_alpha": usual.alpha, "lora_targets": ",".join(words)}


@dataclass(frozen=True)
class _Prefix:
    """How names before `layers.` begin in the model's table, and in a file."""

    table: str
    file: str

    def of(self, link: Link) -> str:
        """The file's name of a link's tensor."""
        return self.file + link.theirs[0].name.removeprefix(self.table)


def _stem(named: Named) -> str:
    """The name of a linear of ours: that of its weight without the end."""
    return named.name.removesuffix(".weight")


def _can_have_pairs(link: Link) -> bool:
    """Whether a link is of weights of the decoder beside which a run can have pairs."""
    name = link.ours[0].name
    return (
        name.startswith("layers.")
        and name.endswith(".weight")
        and lora_kind(_stem(link.ours[0])) in LORA_KINDS
    )


def _names_of(links: Iterable[Link], prefix: _Prefix) -> Iterator[str]:
    """Names by which a config may speak of links: a module's, and that of its parameter."""
    for link in links:
        name = prefix.of(link)
        yield name
        if name.endswith(STACKS):
            yield from stacks_beside(name)
        else:
            yield name.removesuffix(".weight")


def _tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of an adapter, by their names without peft's prefix. ValueError if a name
    lacks it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.exists() and path.with_suffix(".bin").exists():
        raise ValueError(
            f"{path.with_suffix('.bin').name} is not read, it runs code: save the adapter as "
            "safetensors"
        )
    try:
        files.open_regular(path).close()  # the library would wait for the writer of a pipe
        read = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{WEIGHTS}: {shown(str(error))}") from error
    lacking = [shown(name) for name in read if not name.startswith(PREFIX)]
    if lacking:
        raise ValueError(
            f"{WEIGHTS}: {listed(lacking, 3)}: the prefix {PREFIX} of peft's names is missing"
        )
    return {name.removeprefix(PREFIX): tensor for name, tensor in read.items()}


def _prefix_in_file(names: Iterable[str], example: str) -> _Prefix:
    """Find how a file's names of decoder layers begin, with or without `language_model.`.

    `example` is a name of the model's own table. Raise ValueError that names the missing prefix,
    and for two forms.
    """
    table = example.partition("layers.")[0]
    plain = table.replace(_TOWER_PART, "")
    allowed = (table, plain, f"{plain}{_TOWER_PART}", f"{_TOWER_PART}{plain}")
    begins = (re.match(r"(.*?)layers\.\d+\.", name) for name in names)
    found = list(dict.fromkeys(match[1] for match in begins if match))
    known = [prefix for prefix in found if prefix in allowed]
    if len(known) > 1:
        raise ValueError(
            f"{WEIGHTS}: names begin in two ways, {PREFIX}{known[0]} and {PREFIX}{known[1]}"
        )
    if found and not known:
        raise ValueError(
            f"{WEIGHTS}: names of layers begin with {shown(PREFIX + found[0])}, the model's with "
            f"{PREFIX}{table}: "
            f"the prefix {shown(_missing(found[0], plain))} is missing or another one"
        )
    return _Prefix(table, known[0] if known else table)


def _missing(found: str, wanted: str) -> str:
    """The beginning of `wanted` that `found` lacks, or all of it."""
    return wanted.removesuffix(found) or wanted


def _without_empty(pairs: Sequence[_Pair]) -> Iterator[_Pair]:
    """Leave out joined linears whose rows of B are zero in all layers while others' are not: they
    have no pair.

    Of an adapter that has not been trained all rows are zero, and all joined linears have one.
    """
    used = defaultdict[tuple[str, ...], set[int]](set)
    for pair in pairs:
        blocks = pair.up.split([named.shape[0] for named in pair.ours])
        kinds = tuple(lora_kind(_stem(named)) for named in pair.ours)
        used[kinds] |= {i for i, block in enumerate(blocks) if block.any()}
    for pair in pairs:
        kinds = tuple(lora_kind(_stem(named)) for named in pair.ours)
        kept = sorted(used[kinds]) or range(len(kinds))
        blocks = pair.up.split([named.shape[0] for named in pair.ours])
        ours = tuple(pair.ours[i] for i in kept)
        yield _Pair(pair.name, ours, pair.down, torch.cat([blocks[i] for i in kept]), pair.size)


def _split(pairs: Sequence[_Pair]) -> Iterator[_Pair]:
    """Give each of some joined linears its own pair.

    If B is in blocks wherever these linears are joined, each has its own part of A and B: pairs of
    each have been joined. Otherwise all share the A of the first, each with its rows of B.
    """
    groups = defaultdict[tuple[str, ...], list[_Pair]](list)
    for pair in pairs:
        groups[tuple(lora_kind(_stem(named)) for named in pair.ours)].append(pair)
    for group in groups.values():
        in_blocks = _in_blocks(group)
        for pair in group:
            if in_blocks:
                count, size = len(pair.ours), pair.size
                size = PairSize(size.rank // count, size.alpha / count)
                for named, down, up in zip(
                    pair.ours, pair.down.split(size.rank), _blocks(pair), strict=True
                ):
                    yield _Pair(pair.name, (named,), down, up, size)
                continue
            size = pair.size
            for named, up in zip(
                pair.ours, pair.up.split([named.shape[0] for named in pair.ours]), strict=True
            ):
                yield _Pair(pair.name, (named,), pair.down, up, size)
                size = replace(size, shares=_stem(pair.ours[0]).rpartition(".")[2])


def _blocks(pair: _Pair) -> list[torch.Tensor]:
    """Cut the blocks on the diagonal out of the B of joined linears."""
    rank = pair.size.rank // len(pair.ours)
    rows = pair.up.split([named.shape[0] for named in pair.ours])
    return [of_one[:, i * rank : (i + 1) * rank] for i, of_one in enumerate(rows)]


def _in_blocks(pairs: Sequence[_Pair]) -> bool:
    """Whether B of all these pairs of joined linears is in equal blocks, of which each has been
    trained somewhere.
    """
    count = len(pairs[0].ours)
    used = [False] * count
    for pair in pairs:
        if count == 1 or pair.size.rank % count:
            return False
        blocks = _blocks(pair)
        if not torch.equal(torch.block_diag(*blocks), pair.up):
            return False
        used = [before or bool(block.any()) for before, block in zip(used, blocks, strict=True)]
    return all(used)


def _size_by_kind(pairs: Iterable[_Pair]) -> dict[str, PairSize]:
    """Return the size of each kind: the first of those with the largest rank.

    Linears share A only if they do in all layers.
    """
    found = dict[str, PairSize]()
    shares = defaultdict[str, set[str]](set)
    for pair in pairs:
        kind = lora_kind(_stem(pair.ours[0]))
        shares[kind].add(pair.size.shares)
        if kind not in found or pair.size.rank > found[kind].rank:
            found[kind] = replace(pair.size, shares="")
    for kind, of_kind in shares.items():
        (first, *others) = of_kind
        if first and not others and found.get(f"{kind.partition('.')[0]}.{first}") == found[kind]:
            found[kind] = replace(found[kind], shares=first)
    return found
