"""Low-rank pairs of a checkpoint: folded into the weights they stand beside, or as an adapter that peft loads.

A folded weight is W + scale B A, summed in fp32 or wider and rounded once. Where the library joins linears that have
pairs of their own (Phi-3's qkv), the adapter has one pair of their ranks together: A stacked, B in blocks. Experts have
one of all of them, as peft has it for a parameter: A by expert, B by rank, and that of gate and up one layer deeper.
Beside experts the other MLPs are told as parameters too: peft takes modules of their names for the experts.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megacp.core.config.model import LINEARS, ModelConfig
from megacp.core.config.run import RunConfig, Value, with_values
from megacp.core.layers.table import A, B
from megacp.core.ops.kernel import accumulation_dtype
from megacp.core.tensor_parallel.lora import is_of_a_pair
from megacp.huggingface.convert import hf_files
from megacp.huggingface.convert.config_json import Values
from megacp.huggingface.convert.decoder import Family
from megacp.huggingface.convert.tensors import STACKS, Info, Link, Named, Source, whole
from megacp.prepare.tokenize.beside import read_object

_BEGIN = "base_model.model."
"""Prefix of names in an adapter: peft's model around the library's."""
READ = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "target_parameters", "exclude_modules", "init_lora_weights"),
)
"""Fields of an adapter_config.json that are read."""
HARMLESS = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "layers_pattern", "megatron_core", "runtime_config", "qalora_group_size", "ensure_weight_tying"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
)
"""What no answer of a saved adapter depends on. Any other field must say that there is nothing."""
_NOTHING = ("null", "false", "[]", "{}", '"none"')
_BESIDE = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights that leave the weights beside the pairs as they are."""
_LINEAR = re.compile(rf"layers\.\d+\.[\w.]+\.({'|'.join(LINEARS)})\.weight")


def _kind(name: str) -> str:
    """What a pair stands beside, in any layer and of any expert: `mlp.experts.gate`."""
    return ".".join(part for part in name.removesuffix(f".{A}").split(".")[2:] if not part.isdigit())


def _stacks_beside(parameter: str) -> list[str]:
    """Both stacks of the experts in a layer."""
    return [parameter.partition(".experts.")[0] + end for end in STACKS]


def _modules(parameter: str, both: bool) -> str:
    """Where peft has the pair of a stack of experts; `both`: of gate and up there is one, and of down."""
    return parameter.rpartition(".")[0] + ".base_layer" * (both and parameter.endswith(STACKS[0]))


def _of_experts(link: Link) -> list[tuple[Named, ...]]:
    """The matrices of each expert in a stack."""
    each = 2 if link.theirs[0].name.endswith(STACKS[0]) else 1
    return list(zip(*(link.ours[first::each] for first in range(each)), strict=True))


class Pairs:
    """The pairs in `source`, with the weights that they stand beside; itself a source with the pairs folded in."""

    def __init__(self, source: Source, config: RunConfig) -> None:
        self.source, self.config = source, config
        self.infos: Mapping[str, Info] = {name: info for name, info in source.infos.items() if not is_of_a_pair(name)}

    def __str__(self) -> str:
        m = self.config.model
        linears = ", ".join(m.lora_linears)
        return f"low-rank pairs of rank {m.lora_rank}, alpha {m.lora_rank * m.lora_scale:g}, on {linears}"

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of a tensor."""
        found, stem = self.source.rows(name, start, stop), name.removesuffix("weight")
        if f"{stem}{A}" not in self.source.infos:
            return found
        wide = accumulation_dtype(found.dtype)
        up, down = self.source.rows(f"{stem}{B}", start, stop), whole(self.source, f"{stem}{A}")
        # [rows, r] x [r, inputs] -> [rows, inputs]
        scale = self.config.model.lora_scale
        return found.to(wide).addmm(up.to(wide), down.to(wide), alpha=scale).to(found.dtype)


class Adapter:
    """The pairs of an adapter that peft has written, by our names; a source."""

    def __init__(self, folder: Path, family: Family, values: Values) -> None:
        """ValueError says what a run cannot have of it: parts beside pairs, another scale, pairs in some layers."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        links = family.links_of_modules(values)
        content = self._content = read_object(folder / "adapter_config.json")
        others = [name for name in content if name not in (*READ, *HARMLESS)]
        strange = [name for name in others if json.dumps(content[name]) not in _NOTHING]
        if content.get("peft_type") != "LORA" or strange:
            raise ValueError(
                f"adapter_config.json says {', '.join(strange) or 'another peft_type'}: pairs alone are read"
            )
        if (start := content.get("init_lora_weights", True)) not in _BESIDE:
            raise ValueError(
                f"adapter_config.json says init_lora_weights {start}, which changes the weights beside the pairs: save "
                "plain pairs with peft's path_initial_model_for_weight_conversion"
            )
        self.rank, self._tensors = int(content["r"]), dict[str, torch.Tensor]()
        self._power = 0.5 if content.get("use_rslora") else 1  # of the rank that an alpha is divided by
        self.alpha = float(content["lora_alpha"]) * self.rank ** (1 - self._power)
        try:
            read = load_file(folder / "adapter_model.safetensors")
        except SafetensorError as error:
            raise ValueError(f"adapter_model.safetensors: {error}") from error
        theirs = {name.removeprefix(_BEGIN): x for name, x in read.items()}
        mlps = [f".{link.theirs[0].name}" for link in links if ".mlp." in link.ours[0].name]
        for target in content.get("target_parameters") or ():
            if not any(name.endswith(f".{target}") for name in mlps):
                raise ValueError(f"adapter_config.json says target_parameters {target}: no MLP of the model has it")
        for link in links:
            if not _LINEAR.fullmatch(link.ours[0].name):
                continue
            name = link.theirs[0].name
            if name.endswith(STACKS):
                self._add_experts(link, theirs, family.in_turns)
                continue
            module = name.removesuffix(".weight")
            as_parameter = self._is_target(name, "target_parameters")
            target, said = (name, "target_parameters") if as_parameter else (module, "target_modules")
            if self._has(module, target, theirs, said):
                down, up = theirs.pop(f"{module}.{A}"), theirs.pop(f"{module}.{B}")
                self._add(name, link.ours, down, self._weighed(target, down, up))
        found = Counter(_kind(name) for name in self._tensors if name.endswith(A))
        linears = (named.name for link in links for named in link.ours if _LINEAR.fullmatch(named.name))
        of_model = Counter(_kind(f"{name.removesuffix('weight')}{A}") for name in linears)
        if theirs or not found or any(count != of_model[kind] for kind, count in found.items()):
            left = f"{next(iter(theirs))} has no place in the model" if theirs else f"pairs of {dict(found)}"
            raise ValueError(f"{left}: each kind of linear has a pair in all layers or in none")
        kinds = {kind.rpartition(".")[2] for kind in found}
        targets = ",".join(name for name in LINEARS if name in kinds)
        self.flags: dict[str, Value] = {"lora_rank": self.rank, "lora_targets": targets}
        self.flags["lora_alpha"] = self.alpha
        self.infos: Mapping[str, Info] = {name: Info(tuple(x.shape), x.dtype) for name, x in self._tensors.items()}

    def _has(self, module: str, target: str, theirs: Mapping[str, torch.Tensor], said: str) -> bool:
        """Whether the file has the pair of a module. ValueError where its config says otherwise of the target."""
        has = f"{module}.{A}" in theirs
        if has != self._is_target(target, said):
            told = f"adapter_config.json says {said} {self._content.get(said)}"
            raise ValueError(f"{told}, and {target} has {'a' if has else 'no'} pair")
        return has

    def _add_experts(self, link: Link, theirs: dict[str, torch.Tensor], in_turns: bool) -> None:
        """A `[E r, inputs]`, by expert, and B `[rows, r E]`, by rank, of all experts of a layer."""
        name = link.theirs[0].name
        both = all(self._is_target(other, "target_parameters") for other in _stacks_beside(name))
        module, experts = _modules(name, both), _of_experts(link)
        if not self._is_target(name, "target_parameters") or not self._has(module, name, theirs, "target_parameters"):
            return
        down, up = theirs.pop(f"{module}.{A}"), theirs.pop(f"{module}.{B}")
        rank = len(down) // len(experts)
        downs, ups = down.unflatten(0, (-1, rank)), up.unflatten(1, (rank, -1)).permute(2, 0, 1)
        if in_turns and name.endswith(STACKS[0]):
            ups = torch.cat([ups[:, ::2], ups[:, 1::2]], 1)
        for ours, a, b in zip(experts, downs, ups, strict=True):
            self._add(name, ours, a, self._weighed(name, a, b))

    def _is_target(self, module: str, said: str) -> bool:
        """Whether peft puts a pair beside a module, or a parameter, when it loads the adapter."""

        def among(names: Any) -> bool:
            if isinstance(names, str):
                return names == "all-linear" or re.fullmatch(names, module) is not None
            return any(f".{module}".endswith(f".{name}") for name in names or ())

        return among(self._content.get(said)) and not among(self._content.get("exclude_modules"))

    def _weighed(self, module: str, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """B of a module for the one alpha / rank of a run: times its own over that, rounded once, where it has one."""

        def own(name: str, other: float) -> Any:
            patterns = (self._content.get(name) or {}).items()
            return next((x for pattern, x in patterns if re.match(rf"(.*\.)?({pattern})$", module)), other)

        rank = own("rank_pattern", self.rank)
        if down.shape[0] != rank:
            raise ValueError(f"{module}: rank {down.shape[0]}, adapter_config.json says {rank}")
        scale, common = own("alpha_pattern", self._content["lora_alpha"]) / rank**self._power, self.alpha / self.rank
        if math.isclose(scale, common, rel_tol=1e-12):
            return up
        return (up.double() * (scale / common)).to(accumulation_dtype(up.dtype))

    def _add(self, name: str, links: tuple[Named, ...], down: torch.Tensor, up: torch.Tensor) -> None:
        """A `[r, inputs]` and B `[rows, r]` of a module, which may be several of our linears joined."""
        ours, rows = len(links), [named.shape[0] for named in links]
        if up.shape[0] != sum(rows) or down.shape[1:] != links[0].shape[1:] or down.shape[0] != up.shape[1]:
            raise ValueError(f"{name}: A {tuple(down.shape)}, B {tuple(up.shape)} do not fit the model")
        ups, some = up.split(rows), [i for i, x in enumerate(up.split(rows)) if x.any()]
        if 1 < len(some) < ours and down.shape[0] == len(some) * self.rank:  # pairs of some, as `_joined` writes them
            self._add(name, tuple(links[i] for i in some), down, torch.cat([ups[i] for i in some]))
            return
        if down.shape[0] == ours * self.rank:  # a pair of each
            downs, ups = down.split(self.rank), [x[:, i * self.rank :][:, : self.rank] for i, x in enumerate(ups)]
            if not torch.equal(torch.block_diag(*ups), up):
                raise ValueError(f"{name}: its pair of rank {down.shape[0]} is none of {ours} linears")
        elif down.shape[0] == self.rank:
            downs = (down,) * ours
        else:
            raise ValueError(f"{name}: rank {down.shape[0]}, of others {self.rank}: one is needed")
        for named, a, b in zip(links, downs, ups, strict=True):
            stem = named.name.removesuffix("weight")
            self._tensors |= {f"{stem}{A}": a, f"{stem}{B}": b}

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of a tensor."""
        return self._tensors[name][start:stop]


def folded(source: Source, config: RunConfig) -> tuple[Source, RunConfig, Pairs | None]:
    """A checkpoint's weights and config as those of a model without pairs, and the pairs that it has."""
    if config.model.lora_rank == 0:
        return source, config, None
    pairs = Pairs(source, config)
    without = {"lora_rank": 0, "lora_alpha": None, "lora_targets": None, "lora_dropout": 0.0}
    return pairs, with_values(config, without), pairs


def write_adapter(
    pairs: Pairs, family: Family, values: Values, folder: Path, base: str | None, dtype: torch.dtype | None
) -> int:
    """Fill a folder that peft loads, for the model named `base`; its elements."""
    from safetensors.torch import save_file

    tensors, ranks = dict[str, torch.Tensor](), dict[str, int]()
    for target, module, rank, down, up in _joined(pairs, family, values):
        ranks[target] = rank
        for end, tensor in ((A, down), (B, up)):
            tensors[f"{_BEGIN}{module}.{end}"] = tensor.to(dtype or tensor.dtype).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    hf_files.write_json(folder / "adapter_config.json", _config(pairs.config.model, ranks, base))
    return sum(tensor.numel() for tensor in tensors.values())


def _joined(pairs: Pairs, family: Family, values: Values) -> Iterator[tuple[str, str, int, torch.Tensor, torch.Tensor]]:
    """Each module or parameter of the library that has a pair: its name, where peft has it, rank, A and B."""
    infos, links = pairs.source.infos, family.links_of_modules(values)
    targets = {link.theirs[0].name for link in links if any(_stem(named) + A in infos for named in link.ours)}
    beside_experts = any(name.endswith(STACKS) for name in targets)
    for link in links:
        name = link.theirs[0].name
        if name not in targets:
            continue
        if not name.endswith(STACKS):
            down, up = _pair(pairs, link.ours)
            module = name.removesuffix(".weight")
            target = name if beside_experts and ".mlp." in link.ours[0].name else module
            yield target, module, len(down), down, up
            continue
        downs, ups = zip(*(_pair(pairs, ours) for ours in _of_experts(link)), strict=True)
        up = torch.stack(ups, 2)  # [rows, r, E]
        if family.in_turns and name.endswith(STACKS[0]):
            up = torch.stack(up.chunk(2), 1).flatten(0, 1)
        both = targets.issuperset(_stacks_beside(name))
        yield name, _modules(name, both), len(downs[0]), torch.cat(downs), up.flatten(1)


def _stem(named: Named) -> str:
    return named.name.removesuffix("weight")


def _pair(pairs: Pairs, ours: Sequence[Named]) -> tuple[torch.Tensor, torch.Tensor]:
    """A `[r, inputs]` and B `[rows, r]` of joined linears, of which one at least has a pair."""
    infos = pairs.source.infos
    downs = [whole(pairs.source, f"{_stem(named)}{A}") for named in ours if f"{_stem(named)}{A}" in infos]
    ups = [
        whole(pairs.source, f"{_stem(named)}{B}")
        if f"{_stem(named)}{A}" in infos
        else downs[0].new_zeros(named.shape[0], 0)
        for named in ours
    ]
    return torch.cat(downs), torch.block_diag(*ups)


def _config(model: ModelConfig, ranks: Mapping[str, int], base: str | None) -> dict[str, Any]:
    """An adapter_config.json; `ranks` by module or parameter. With a larger rank, of joined ones, alpha grows."""
    alpha = model.lora_rank * model.lora_scale
    others = {module: rank for module, rank in ranks.items() if rank != model.lora_rank}
    parameters = sorted(name for name in ranks if name.endswith((*STACKS, ".weight")))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": model.lora_rank,
        "lora_alpha": alpha,
        "lora_dropout": model.lora_dropout,
        "target_modules": sorted(ranks.keys() - set(parameters)) or None,
        **({"target_parameters": parameters} if parameters else {}),
        "rank_pattern": others,
        "alpha_pattern": {module: alpha * rank / model.lora_rank for module, rank in others.items()},
    }
