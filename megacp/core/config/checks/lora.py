"""Contradictions of low-rank pairs: names of linears, ranks above their widths, flags about what is frozen or new."""

from __future__ import annotations

from collections.abc import Iterator

from megacp.core.config.model import LINEARS
from megacp.core.config.ranges import differ
from megacp.core.config.run import RunConfig, flag, flatten

_FREEZE = ("freeze_vision", "freeze_connector", "freeze_text")


def lora_reasons(config: RunConfig, world: int) -> Iterator[str]:
    """What is wrong with the pairs, or with flags of the frozen model beside them."""
    m, values = config.model, flatten(config)
    given = [f"--lora-alpha {m.lora_alpha}"] if (m.lora_alpha or 0) > 0 else []
    given += [f"--lora-targets {m.lora_targets}"] if m.lora_targets is not None else []
    given += [f"--lora-dropout {m.lora_dropout}"] if m.lora_dropout > 0 else []
    if m.lora_rank == 0 and given:
        yield f"{', '.join(given)} {'act' if len(given) > 1 else 'acts'} only with --lora-rank above 0"
    if not m.lora_rank > 0:
        return
    yield from _targets(config)
    rank = f"--lora-rank {m.lora_rank}"
    multipliers = {name: values[f"{name}_lr_multiplier"] for name in ("vision", "connector")}
    rates = [f"--{name}-lr-multiplier {rate}" for name, rate in multipliers.items() if differ(float(str(rate)), 1)]
    if said := [*(flag(name) for name in _FREEZE if values[name]), *rates]:
        yield f"{', '.join(said)} with {rank}: pairs alone are trained, in the decoder, and all else is frozen already"
    if config.training.gradient_accumulation_fusion:
        yield f"--gradient-accumulation-fusion with {rank}: the weights whose gradients it would fuse are frozen"
    tiled = [name for name in m.lora_linears if name in ("gate", "up", "down")]
    if m.lora_dropout > 0 and config.training.mlp_chunk_tokens > 0 and tiled:
        yield (
            f"--lora-dropout {m.lora_dropout} on {', '.join(tiled)} with --mlp-chunk-tokens "
            f"{config.training.mlp_chunk_tokens}: a tile does not know the names of its tokens"
        )
    if config.checkpoint.vision_from_hf is not None:
        yield (
            f"--vision-from-hf {config.checkpoint.vision_from_hf} with {rank}: rows, connector or tower that are new "
            "would stay as they were drawn; train them first"
        )


def _targets(config: RunConfig) -> Iterator[str]:
    m = config.model
    asked = (m.lora_targets or "q,v").replace(",", " ").split()
    known = f"{', '.join(LINEARS)}, or all alone"
    if unknown := [name for name in asked if name not in LINEARS and asked != ["all"]]:
        yield f"--lora-targets {m.lora_targets}: {', '.join(unknown)} is none of {known}"
    elif not asked or len(set(asked)) < len(asked):
        yield f"--lora-targets {m.lora_targets}: names some linears, each once, of {known}"
    widths = {name: min(m.linear_sizes[name]) for name in m.lora_linears}
    if narrow := [f"{name} ({width})" for name, width in widths.items() if m.lora_rank > width]:
        yield (
            f"--lora-rank {m.lora_rank} is above the smaller width of {', '.join(narrow)}: a pair of that rank says "
            "as much as the whole matrix"
        )
