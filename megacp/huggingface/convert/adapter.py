"""Reads a LoRA adapter saved by peft as a source of LoRA pairs with our tensor names.

If the library fuses linears that we keep separate (Phi-3's qkv, gate and up of stacked experts),
the adapter has one pair for the fused linear. If the B of that pair is block-diagonal, each of our
linears gets its block. Otherwise, they share A, and each gets its rows of B. All experts of a layer
share one pair if the library stores their matrices as one parameter (A ordered by expert, B by
rank); otherwise, each linear of each expert has its own pair.

A run has one rank and one alpha for each kind of linear. Pairs with a smaller rank are padded with
zeros, which stay zero during training. If the scale of a pair differs, the ratio is multiplied into
its B.
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
# Prefix of names in an adapter: the wrapper of peft around the library's model.
PREFIX = "base_model.model."
# Part of a text model's names if the model has a vision tower. Adapters trained on only the text
# model lack it.
_TOWER_PART = "language_model."
# Supported dtypes of an adapter.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class _PairPlace:
    """A module or parameter for which an adapter may have a pair."""

    target: str
    """Name of the module or parameter, as the config refers to it."""
    field: str
    """Config field that selects the target."""
    module: str
    """Module name under which the file stores the pair."""
    ours: tuple[tuple[Named, ...], ...]
    """Our linears that the pair covers: one group, or for a stack one group per expert."""
    is_stack: bool = False


@dataclass(frozen=True)
class _Pair:
    """A `[r, inputs]` and B `[rows, r]` for one or more of our linears, joined."""

    name: str
    ours: tuple[Named, ...]
    down: torch.Tensor
    up: torch.Tensor
    size: PairSize


class Adapter:
    """The pairs of an adapter as a source with our names, and the flags with which a run continues
    their training.
    """

    def __init__(self, folder: Path, family: Family, values: Values) -> None:
        """Read an adapter for a model of `family` that has the flags `values`.

        Raise ValueError with the invalid field or tensor if a run cannot train its pairs.
        """
        self._in_turns = family.in_turns
        self._config = AdapterConfig(folder / NAME)
        tensors = _tensors_of(folder / WEIGHTS)
        pairs = self._pairs(family, values, tensors)
        # `_pairs` removes the tensors that it uses, so any remaining ones are unknown.
        if tensors:
            names = listed([shown(name) for name in tensors], 3)
            raise ValueError(
                f"{WEIGHTS} has {names}, but the model has no such linear that supports LoRA"
            )
        # After the split, each pair belongs to exactly one of our linears.
        apart = list(_split(list(_without_empty(pairs))))
        self._require_all_layers(apart, family, values)
        self._sizes = _size_by_kind(apart)
        self._tensors = dict[str, torch.Tensor]()
        self.infos: dict[str, Info] = {}
        for pair in apart:
            self._keep(pair)
        self.flags = self._flags()
        self.notes = list[str]()
        """Messages about settings that are read but ignored."""
        if self._config.dropout > 0:
            self.notes.append(
                f"{NAME}: lora_dropout {self._config.dropout:g} is ignored; set --lora-dropout"
            )

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of a tensor, zero-padded to the rank of its kind of linear."""
        tensor = self._tensors[name]
        shape = self.infos[name].shape
        found = tensor.new_zeros(stop - start, *shape[1:])
        stored = tensor[start:stop]
        found[: stored.shape[0], : stored.shape[1]] = stored
        return found

    def _pairs(
        self, family: Family, values: Values, tensors: dict[str, torch.Tensor]
    ) -> list[_Pair]:
        """Return the file's pairs, and remove their tensors from `tensors`.

        Raise ValueError if the config and the file disagree.
        """
        links = [link for link in family.links_of_modules(values) if _can_have_pairs(link)]
        # The file's names may differ from the model's by a prefix.
        prefix = _prefix_in_file(tensors, links[0].theirs[0].name)
        modules = {name.rpartition(".lora_")[0] for name in tensors}
        names = {link.theirs[0].name for link in links}
        single = [
            link
            for link in family.links(values)
            if _can_have_pairs(link) and link.theirs[0].name not in names
        ]
        # The library's modules stack experts as parameters, which target_modules cannot match.
        # Single experts are considered only if the file has pairs for them.
        if not any(prefix.of(link).removesuffix(".weight") in modules for link in single):
            single = []
        # Match all names at once, within one time limit.
        about = self._config.about(_names_of([*links, *single], prefix))
        self._require_parameters(prefix.of(link) for link in links)
        pairs = list[_Pair]()
        for place in self._places([*links, *single], prefix, about):
            if self._has(place, about[place.target], modules):
                # Used tensors are removed from `tensors`.
                down = tensors.pop(f"{place.module}.{A}", None)
                up = tensors.pop(f"{place.module}.{B}", None)
                if down is None or up is None:
                    raise ValueError(f"{WEIGHTS}: {place.module} has no {A if down is None else B}")
                pairs += self._of_place(place, about[place.target], down, up)
        return pairs

    def _require_parameters(self, names: Iterable[str]) -> None:
        """Raise ValueError if the config targets a parameter that the model does not have."""
        # A target matches the end of a name, at a dot.
        ends = set[str]()
        for name in names:
            parts = name.split(".")
            ends |= {".".join(parts[first:]) for first in range(len(parts))}
        strange = [shown(target) for target in self._config.target_parameters if target not in ends]
        if strange:
            raise ValueError(
                f"{NAME} has target_parameters {listed(strange, 3)}, but the model has no such "
                "linear"
            )

    def _places(
        self, links: Sequence[Link], prefix: _Prefix, about: Mapping[str, TargetSaid]
    ) -> Iterator[_PairPlace]:
        """Yield every module or parameter for which the file may have a pair."""
        for link in links:
            name = prefix.of(link)
            if name.endswith(STACKS):
                # The module of a stack's pair depends on whether both stacks of the layer have one.
                both = all(about[other].is_parameter for other in stacks_beside(name))
                module = modules_of_stacks(name, both)
                experts = tuple(experts_in_link(link))
                yield _PairPlace(name, "target_parameters", module, experts, is_stack=True)
                continue
            module = name.removesuffix(".weight")
            if about[name].is_parameter and about[module].is_module:
                raise ValueError(
                    f"{NAME} selects {module} in both target_modules and target_parameters; use "
                    "one of them"
                )
            if about[name].is_parameter:
                yield _PairPlace(name, "target_parameters", module, (link.ours,))
            else:
                yield _PairPlace(module, "target_modules", module, (link.ours,))

    def _has(self, place: _PairPlace, said: TargetSaid, modules: frozenset[str] | set[str]) -> bool:
        """Return whether the file has a pair there. Raise ValueError if the config disagrees."""
        # Only target_parameters can select a stack.
        if place.is_stack and not said.is_parameter:
            return False
        has = place.module in modules
        is_target = said.is_parameter if place.field == "target_parameters" else said.is_module
        if has != is_target:
            count = "a" if has else "no"
            raise ValueError(
                f"{self._config.told(place.field)}, but {place.target} has {count} pair"
            )
        return has

    def _of_place(
        self, place: _PairPlace, said: TargetSaid, down: torch.Tensor, up: torch.Tensor
    ) -> Iterator[_Pair]:
        """Check a pair's tensors and yield it; split a stack's pair into one pair per expert."""
        count = len(place.ours)
        links = place.ours[0]
        rows = sum(named.shape[0] for named in links)
        inputs = links[0].shape[1]
        rank = said.size.rank
        # Check the rank first: its message is clearer than the one about shapes.
        if down.dim() == 2 and down.shape[0] != rank * count:
            found: int | str = f"{down.shape[0]} / {count}"
            if down.shape[0] % count == 0:
                found = down.shape[0] // count
            raise ValueError(f"{place.target} has rank {found}, but {NAME} has rank {rank}")
        shape_of_down = (rank * count, inputs)
        shape_of_up = (rows, rank * count)
        if tuple(down.shape) != shape_of_down or tuple(up.shape) != shape_of_up:
            raise ValueError(
                f"{place.target} has shapes {tuple(down.shape)} of A and {tuple(up.shape)} of B, "
                f"but the model requires {shape_of_down} and {shape_of_up}"
            )
        for tensor, end in ((down, A), (up, B)):
            if tensor.dtype not in _DTYPES:
                raise ValueError(
                    f"{place.module}.{end} has dtype {tensor.dtype}; supported dtypes are "
                    f"{listed(_DTYPES, 9)}"
                )
            if not tensor.isfinite().all():
                raise ValueError(f"{place.module}.{end} contains inf or NaN values")
        if not place.is_stack:
            yield _Pair(place.target, links, down, up, said.size)
            return
        # [E r, inputs] -> [E, r, inputs]; B is ordered by rank: [rows, r E] -> [E, rows, r]
        downs = down.unflatten(0, (count, rank))
        ups = up.unflatten(1, (rank, count)).permute(2, 0, 1)
        if self._in_turns and place.target.endswith(STACKS[0]):
            # Their gate and up rows alternate; ours are all gate rows, then all up rows.
            ups = torch.cat([ups[:, ::2], ups[:, 1::2]], 1)
        for ours, a, b in zip(place.ours, downs, ups, strict=True):
            yield _Pair(place.target, ours, a, b, said.size)

    def _require_all_layers(self, pairs: Sequence[_Pair], family: Family, values: Values) -> None:
        """Raise ValueError if a kind of linear has pairs in only some layers or experts."""
        # A run adds pairs by kind of linear, so a kind must have them everywhere.
        found = {_stem(pair.ours[0]) for pair in pairs}
        if not found:
            raise ValueError(f"{WEIGHTS} has no pair for any linear of the model")
        kinds = {lora_kind(stem) for stem in found}
        of_model: list[str] = []
        for link in family.links_of_modules(values):
            if _can_have_pairs(link):
                of_model += map(_stem, link.ours)
        missing = defaultdict[str, set[int]](set)  # kind -> layers without a pair
        for stem in of_model:
            if lora_kind(stem) in kinds and stem not in found:
                missing[lora_kind(stem)].add(int(stem.split(".")[1]))
        if missing:
            reasons = [
                f"{kind} has no pair in layers {layers_in_words(sorted(which))}"
                for kind, which in missing.items()
            ]
            reason = "; ".join(reasons)
            if self._config.layers is not None:
                reason += f" ({NAME} has layers_to_transform {shown(self._config.layers)})"
            raise ValueError(
                f"{reason}: a run trains each kind of linear in all layers and experts, or in none"
            )

    def _keep(self, pair: _Pair) -> None:
        """Store a pair, rescaled to the scale of its kind; `rows` pads it to the kind's rank."""
        # A kind has one scale, so B is multiplied by the ratio of the scales.
        stem = _stem(pair.ours[0])
        size = self._sizes[lora_kind(stem)]
        up = pair.up
        if not math.isclose(pair.size.scale, size.scale, rel_tol=1e-12):
            wide = up.double() * (pair.size.scale / size.scale)
            up = wide.to(accumulation_dtype(up.dtype))
        rows, inputs = pair.ours[0].shape
        for end, tensor, shape in ((A, pair.down, (size.rank, inputs)), (B, up, (rows, size.rank))):
            # A shared A is stored only with the linear that has it.
            if end == A and size.shares:
                continue
            self._tensors[f"{stem}.{end}"] = tensor
            self.infos[f"{stem}.{end}"] = Info(shape, tensor.dtype)

    def _flags(self) -> dict[str, Value]:
        """Return the flags for a run that trains these pairs."""
        sizes = list(self._sizes.values())
        # --lora-rank and --lora-alpha set the usual size; --lora-targets lists all other sizes.
        usual = self._config.usual
        if usual not in sizes:
            # No pair has the config's usual size, so take the most frequent one.
            usual = replace(max(sizes, key=sizes.count), shares="")
        words = []
        for word, size in joined_words(self._sizes).items():
            # Write whole numbers without a fraction.
            alpha = str(size.alpha).removesuffix(".0")
            if size != usual:
                word = f"{word}:{size.rank}:{alpha}"
            words.append(word)
        return {"lora_rank": usual.rank, "lora_alpha": usual.alpha, "lora_targets": ",".join(words)}


@dataclass(frozen=True)
class _Prefix:
    """The part of layer names before `layers.`, in the model's table and in a file."""

    table: str
    file: str

    def of(self, link: Link) -> str:
        """Return the name of a link's tensor in the file."""
        return self.file + link.theirs[0].name.removeprefix(self.table)


def _stem(named: Named) -> str:
    """Return the name of one of our linears: its weight's name without `.weight`."""
    return named.name.removesuffix(".weight")


def _can_have_pairs(link: Link) -> bool:
    """Return whether a link's weights belong to decoder linears to which a run can add pairs."""
    name = link.ours[0].name
    return (
        name.startswith("layers.")
        and name.endswith(".weight")
        and lora_kind(_stem(link.ours[0])) in LORA_KINDS
    )


def _names_of(links: Iterable[Link], prefix: _Prefix) -> Iterator[str]:
    """Yield the module and parameter names by which a config may refer to the links."""
    for link in links:
        name = prefix.of(link)
        yield name
        if name.endswith(STACKS):
            yield from stacks_beside(name)
        else:
            yield name.removesuffix(".weight")


def _tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors by name, with peft's prefix removed.

    Raise ValueError if a name lacks the prefix.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    # Pickled files can run code when they are loaded.
    if not path.exists() and path.with_suffix(".bin").exists():
        raise ValueError(
            f"{path.with_suffix('.bin').name} is refused, because loading it could execute "
            "code: save the adapter as safetensors"
        )
    try:
        files.open_regular(path).close()  # the library would wait for the writer of a pipe
        read = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{WEIGHTS}: {shown(str(error))}") from error
    lacking = [shown(name) for name in read if not name.startswith(PREFIX)]
    if lacking:
        raise ValueError(
            f"{WEIGHTS} has {listed(lacking, 3)} without peft's prefix {PREFIX}; save the adapter "
            "with peft"
        )
    return {name.removeprefix(PREFIX): tensor for name, tensor in read.items()}


def _prefix_in_file(names: Iterable[str], example: str) -> _Prefix:
    """Return the prefix of decoder layers in a file, with or without `language_model.`.

    `example` is a tensor name from the model's table. Raise ValueError if the prefix is wrong or
    missing, or if there are two different prefixes.
    """
    table = example.partition("layers.")[0]
    plain = table.replace(_TOWER_PART, "")
    # The position of the text model depends on the versions of the library and of peft.
    allowed = (table, plain, f"{plain}{_TOWER_PART}", f"{_TOWER_PART}{plain}")
    begins = (re.match(r"(.*?)layers\.\d+\.", name) for name in names)
    found = list(dict.fromkeys(match[1] for match in begins if match))
    known = [prefix for prefix in found if prefix in allowed]
    if len(known) > 1:
        raise ValueError(
            f"{WEIGHTS}: tensor names have two different prefixes, {PREFIX}{known[0]} and "
            f"{PREFIX}{known[1]}"
        )
    if found and not known:
        missing = plain.removesuffix(found[0]) or plain
        raise ValueError(
            f"{WEIGHTS}: layer names begin with {shown(PREFIX + found[0])}, but the model's "
            f"names begin with {PREFIX}{table}: the prefix {shown(missing)} is missing or wrong"
        )
    return _Prefix(table, known[0] if known else table)


def _without_empty(pairs: Sequence[_Pair]) -> Iterator[_Pair]:
    """Yield the pairs, without linears whose rows of B are zero in all layers.

    Such linears have no pair. In an untrained adapter, all rows are zero, and all linears are kept.
    """
    # Joined kinds -> indices of the linears that have a nonzero B in some layer.
    used = defaultdict[tuple[str, ...], set[int]](set)
    for pair in pairs:
        blocks = pair.up.split([named.shape[0] for named in pair.ours])
        kinds = tuple(lora_kind(_stem(named)) for named in pair.ours)
        used[kinds] |= {i for i, block in enumerate(blocks) if block.any()}
    for pair in pairs:
        kinds = tuple(lora_kind(_stem(named)) for named in pair.ours)
        # If no linear was trained, keep all of them.
        kept = sorted(used[kinds]) or range(len(kinds))
        blocks = pair.up.split([named.shape[0] for named in pair.ours])
        ours = tuple(pair.ours[i] for i in kept)
        yield _Pair(pair.name, ours, pair.down, torch.cat([blocks[i] for i in kept]), pair.size)


def _split(pairs: Sequence[_Pair]) -> Iterator[_Pair]:
    """Split pairs of joined linears into one pair per linear.

    If B is block-diagonal in all layers, the pair was joined from one pair per linear, so each
    linear gets its part of A and B. Otherwise, all linears share the A of the first one, and each
    gets its rows of B.
    """
    # Pairs of the same joined kinds are split alike in all layers.
    groups = defaultdict[tuple[str, ...], list[_Pair]](list)
    for pair in pairs:
        groups[tuple(lora_kind(_stem(named)) for named in pair.ours)].append(pair)
    for group in groups.values():
        in_blocks = _in_blocks(group)
        for pair in group:
            if in_blocks:
                # The scale, alpha / rank, stays the same.
                count = len(pair.ours)
                size = PairSize(pair.size.rank // count, pair.size.alpha / count)
                downs = pair.down.split(size.rank)
                for named, down, up in zip(pair.ours, downs, _blocks(pair), strict=True):
                    yield _Pair(pair.name, (named,), down, up, size)
                continue
            size = pair.size
            ups = pair.up.split([named.shape[0] for named in pair.ours])
            for named, up in zip(pair.ours, ups, strict=True):
                yield _Pair(pair.name, (named,), pair.down, up, size)
                # All linears after the first share its A.
                size = replace(size, shares=_stem(pair.ours[0]).rpartition(".")[2])


def _blocks(pair: _Pair) -> list[torch.Tensor]:
    """Return the diagonal blocks of a joined pair's B, one per linear."""
    rank = pair.size.rank // len(pair.ours)
    rows = pair.up.split([named.shape[0] for named in pair.ours])
    return [of_one[:, i * rank : (i + 1) * rank] for i, of_one in enumerate(rows)]


def _in_blocks(pairs: Sequence[_Pair]) -> bool:
    """Return whether the B of every pair is block-diagonal with blocks of equal rank.

    Each linear's block must be nonzero in at least one pair.
    """
    count = len(pairs[0].ours)
    used = [False] * count
    for pair in pairs:
        if count == 1 or pair.size.rank % count:
            return False
        blocks = _blocks(pair)
        # A number outside the blocks means that the linears share A.
        if not torch.equal(torch.block_diag(*blocks), pair.up):
            return False
        used = [before or bool(block.any()) for before, block in zip(used, blocks, strict=True)]
    return all(used)


def _size_by_kind(pairs: Iterable[_Pair]) -> dict[str, PairSize]:
    """Return the pair size for each kind of linear: its largest rank, with that pair's alpha.

    Linears share A only if they do so in all layers.
    """
    found = dict[str, PairSize]()
    # Kind -> the linears whose A its pairs share; "" for a pair with its own A.
    shares = defaultdict[str, set[str]](set)
    for pair in pairs:
        kind = lora_kind(_stem(pair.ours[0]))
        shares[kind].add(pair.size.shares)
        if kind not in found or pair.size.rank > found[kind].rank:
            found[kind] = replace(pair.size, shares="")
    for kind, of_kind in shares.items():
        (first, *further) = of_kind
        of_first = found.get(f"{kind.partition('.')[0]}.{first}")
        if first and not further and of_first == found[kind]:
            found[kind] = replace(found[kind], shares=first)
    return found
