"""Low-rank pairs of a checkpoint: folded into the weights they stand beside, or as an adapter that peft loads.

A folded weight is W + scale B A, summed in fp32 or wider and rounded once. Where the library joins linears that have
pairs of their own (Phi-3's qkv), the adapter has one pair of their ranks together: A stacked, B in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megacp.core.config.model import ModelConfig
from megacp.core.config.run import RunConfig, with_values
from megacp.core.ops.kernel import accumulation_dtype
from megacp.core.tensor_parallel.lora import A, B, is_of_a_pair
from megacp.huggingface.convert import hf_files
from megacp.huggingface.convert.tensors import Info, Link, Source, whole

_BEGIN = "base_model.model."
"""Of names in an adapter: peft's model around the library's."""


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


def folded(source: Source, config: RunConfig) -> tuple[Source, RunConfig, Pairs | None]:
    """A checkpoint's weights and config as those of a model without pairs, and the pairs that it has."""
    if config.model.lora_rank == 0:
        return source, config, None
    pairs = Pairs(source, config)
    without = {"lora_rank": 0, "lora_alpha": None, "lora_targets": None, "lora_dropout": 0.0}
    return pairs, with_values(config, without), pairs


def write_adapter(pairs: Pairs, links: list[Link], folder: Path, base: str | None, dtype: torch.dtype | None) -> int:
    """Fill a folder that peft loads, for the model named `base`, by the links of that model; its elements."""
    from safetensors.torch import save_file

    tensors, ranks = dict[str, torch.Tensor](), dict[str, int]()
    for module, down, up in _joined(pairs, links):
        ranks[module] = down.shape[0]
        for end, tensor in ((A, down), (B, up)):
            tensors[f"{_BEGIN}{module}.{end}"] = tensor.to(dtype or tensor.dtype).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    hf_files.write_json(folder / "adapter_config.json", _config(pairs.config.model, ranks, base))
    return sum(tensor.numel() for tensor in tensors.values())


def _joined(pairs: Pairs, links: list[Link]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Each module of the library that has a pair, its A `[r, inputs]` and its B `[rows, r]`."""
    infos = pairs.source.infos
    for link in links:
        stems = [named.name.removesuffix("weight") for named in link.ours]
        if not any(f"{stem}{A}" in infos for stem in stems):
            continue
        downs = [whole(pairs.source, f"{stem}{A}") for stem in stems if f"{stem}{A}" in infos]
        ups = [
            whole(pairs.source, f"{stem}{B}") if f"{stem}{A}" in infos else downs[0].new_zeros(named.shape[0], 0)
            for stem, named in zip(stems, link.ours, strict=True)
        ]
        yield link.theirs[0].name.removesuffix(".weight"), torch.cat(downs), torch.block_diag(*ups)


def _config(model: ModelConfig, ranks: Mapping[str, int], base: str | None) -> dict[str, Any]:
    """An adapter_config.json; `ranks` by module. Joined linears have a larger rank, and alpha grows with it."""
    alpha = model.lora_rank * model.lora_scale
    others = {module: rank for module, rank in ranks.items() if rank != model.lora_rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": model.lora_rank,
        "lora_alpha": alpha,
        "lora_dropout": model.lora_dropout,
        "target_modules": sorted(ranks),
        "rank_pattern": others,
        "alpha_pattern": {module: alpha * rank / model.lora_rank for module, rank in others.items()},
    }
