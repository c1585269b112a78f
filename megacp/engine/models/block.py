"""One decoder block: attention and MLP, norms before or after them, with residuals, dropout and
recomputation.

The body says which values it would save. The recompute mode is chosen once, outside of it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.ops.pointwise import dropout
from megacp.engine.backends.native import NativeBackend, NormSpec
from megacp.engine.config.model import ModelConfig
from megacp.engine.config.training import RecomputeMode
from megacp.engine.expert_parallel.layer import MixtureOfExperts
from megacp.engine.expert_parallel.route import Routes
from megacp.engine.layers.attention import ATTENTION
from megacp.engine.layers.gated_delta import GATED_DELTA
from megacp.engine.layers.mamba2 import MAMBA2
from megacp.engine.layers.stack import layers_of
from megacp.engine.layers.table import LayerKind
from megacp.engine.models.attention import Angles, SelfAttention
from megacp.engine.models.delta_net import GatedDeltaNet
from megacp.engine.models.mamba2 import Mamba2
from megacp.engine.models.offload import BlockOffload, HostMemory
from megacp.engine.models.recompute import run_block
from megacp.engine.save import Save, keep
from megacp.engine.tensor_parallel.linear import LinearSpec
from megacp.engine.tensor_parallel.lora import DropoutNames, LowRank

MIXERS: dict[LayerKind, type[nn.Module]] = {
    ATTENTION: SelfAttention,
    GATED_DELTA: GatedDeltaNet,
    MAMBA2: Mamba2,
}


@dataclass(frozen=True)
class BlockInputs:
    """What every block of a microbatch shares: the plan, rotary angles, and the names of its
    dropout bits.
    """

    plan: AttentionPlan
    rotary: tuple[Angles, Angles]
    """Angles of layers without a window, and of those with one."""
    token_names: torch.Tensor
    """int64 `[t/tp]`: names of the tokens of the residual stream on this rank."""
    all_token_names: torch.Tensor
    """int64 `[t]`: those of all tp ranks."""
    key: int
    routes: Routes | None = None
    """To experts, where there are any."""


class Block(nn.Module):
    """`x[t/tp, h] -> [t/tp, h]`; the layer index is global."""

    def __init__(
        self, layer: int, config: ModelConfig, backend: NativeBackend, recompute: RecomputeMode
    ) -> None:
        super().__init__()
        prefix = f"layers.{layer}"
        described = layers_of(config)[layer]
        self.layer, self.has_window = layer, described.window > 0
        self.dropout = config.hidden_dropout
        self.attention = MIXERS[described.mixer](layer, config, backend)
        hidden, linears = config.hidden_size, described.mlp.linears(config)
        epsilon = config.norm_epsilon
        ending = "_output_norm" if config.has_input_norms else "_norm"

        def output_norm(part: str) -> nn.Module:
            if not config.has_output_norms:
                return nn.Identity()
            return backend.norm(NormSpec(f"{prefix}.{part}{ending}", hidden, epsilon))

        self.attention_norm, self.mlp_norm = output_norm("attention"), output_norm("mlp")
        """Norms of the outputs, where they stand after attention and MLP."""
        self.is_routed = described.is_routed
        if self.is_routed:
            self.mlp: nn.Module = MixtureOfExperts(layer, config, backend)
        else:
            self.mlp = backend.norm_mlp(
                NormSpec(f"{prefix}.mlp_norm", hidden, epsilon) if config.has_input_norms else None,
                *(
                    LinearSpec.of(f"{prefix}.mlp", linears, *product)
                    for product in described.mlp.products
                ),
            )
        self.precision = backend.precision if recompute.repeats_block else contextlib.nullcontext
        self.recompute = recompute
        self.pairs = [module for module in self.modules() if isinstance(module, LowRank)]
        self.offload: BlockOffload | None = None
        """Takes what is saved to host memory and back; None leaves it on the device."""

    def forward(self, x: torch.Tensor, inputs: BlockInputs) -> torch.Tensor:
        """Run the block under the recompute mode it was built with."""
        if self.offload is None and self.recompute.keeps_all:
            return self._body(x, inputs, keep)
        run = functools.partial(run_block, self._body, self.recompute)
        if self.offload is None:
            return run(x, inputs)
        return self.offload(
            run, x, inputs, (*self.parameters(), *sum(inputs.rotary, ()), inputs.token_names)
        )

    def _body(self, x: torch.Tensor, inputs: BlockInputs, save: Save) -> torch.Tensor:
        for pairs in self.pairs:
            pairs.names = DropoutNames(inputs.key, inputs.token_names, inputs.all_token_names)
        with (
            self.precision()
        ):  # the block that is computed again in backward stands in no other context
            rotary = inputs.rotary[self.has_window]
            attended = self.attention_norm(self.attention(x, inputs.plan, rotary, save))
            x = x + self._drop(attended, inputs, 2 * self.layer)
            made = self.mlp(x, save, inputs.routes) if self.is_routed else self.mlp(x, save)
            return x + self._drop(self.mlp_norm(made), inputs, 2 * self.layer + 1)

    def _drop(self, x: torch.Tensor, inputs: BlockInputs, site: int) -> torch.Tensor:
        # the odd constant spreads keys of neighbouring sites over all 64 bits (SplitMix64)
        key = inputs.key + site * 0x9E3779B97F4A7C15
        return dropout(x, key, inputs.token_names, self.dropout if self.training else 0.0)


def offload_blocks(
    chunks: Sequence[nn.ModuleList], counts: Sequence[int], device: torch.device
) -> None:
    """Let the first `counts[c]` blocks of each chunk keep on the host what they save; they wait
    longest for it.
    """
    memory = HostMemory(device)
    for blocks, count in zip(chunks, counts, strict=True):
        for place, block in enumerate(
            blocks[: count + 1] if count else ()
        ):  # one more, which brings them back
            assert isinstance(block, Block)
            block.offload = BlockOffload(memory, travels=place < count, first=place == 0)
