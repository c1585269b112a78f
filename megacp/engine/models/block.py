"""A decoder block: attention and MLP with norms, residuals, dropout and recomputation.

The body calls `save` to mark values that may be recomputed, regardless of the recompute mode.
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

# layer descriptions (without torch) -> modules
MIXERS: dict[LayerKind, type[nn.Module]] = {
    ATTENTION: SelfAttention,
    GATED_DELTA: GatedDeltaNet,
    MAMBA2: Mamba2,
}


@dataclass(frozen=True)
class BlockInputs:
    """Inputs of a microbatch that all blocks share."""

    plan: AttentionPlan
    rotary: tuple[Angles, Angles]
    """Angles for layers without a window, and for layers with a window."""
    token_names: torch.Tensor
    """Grid-independent identifiers of the tokens in this rank's residual stream: int64 `[t/tp]`."""
    all_token_names: torch.Tensor
    """Token identifiers of all tp ranks: int64 `[t]`."""
    key: int
    """Seed for dropout masks."""
    routes: Routes | None = None
    """Routes of tokens to experts; None for a model without experts."""


class Block(nn.Module):
    """Decoder block: `x[t/tp, h] -> [t/tp, h]`. The layer index is global."""

    def __init__(
        self, layer: int, config: ModelConfig, backend: NativeBackend, recompute: RecomputeMode
    ) -> None:
        super().__init__()
        prefix = f"layers.{layer}"
        described = layers_of(config)[layer]
        self.layer = layer
        self.has_window = described.window > 0
        self.dropout = config.hidden_dropout
        self.attention = MIXERS[described.mixer](layer, config, backend)
        hidden = config.hidden_size
        linears = described.mlp.linears(config)
        epsilon = config.norm_epsilon
        # if a part has both norms, they need two names; a single norm has the short name
        ending = "_output_norm" if config.has_input_norms else "_norm"

        def output_norm(part: str) -> nn.Module:
            if not config.has_output_norms:
                return nn.Identity()
            return backend.norm(NormSpec(f"{prefix}.{part}{ending}", hidden, epsilon))

        # norms on the outputs of attention and MLP, before the residual sum
        self.attention_norm = output_norm("attention")
        self.mlp_norm = output_norm("mlp")
        self.is_routed = described.is_routed
        if self.is_routed:
            self.mlp: nn.Module = MixtureOfExperts(layer, config, backend)
        else:
            input_norm = None
            if config.has_input_norms:
                input_norm = NormSpec(f"{prefix}.mlp_norm", hidden, epsilon)
            products = [
                LinearSpec.of(f"{prefix}.mlp", linears, *product)
                for product in described.mlp.products
            ]
            self.mlp = backend.norm_mlp(input_norm, *products)
        # The chunk enters the precision context for all its blocks. Recomputation happens in the
        # backward pass, outside that context, so the block must enter it again.
        self.precision = backend.precision if recompute.repeats_block else contextlib.nullcontext
        self.recompute = recompute
        self.pairs = [module for module in self.modules() if isinstance(module, LowRank)]
        self.offload: BlockOffload | None = None
        """Offload of saved tensors to host memory; None keeps them on the device."""

    def forward(self, x: torch.Tensor, inputs: BlockInputs) -> torch.Tensor:
        """Run the block with its recompute mode and offload; return `[t/tp, h]`."""
        # the common case, without hooks for saved tensors
        if self.offload is None and self.recompute.keeps_all:
            return self._body(x, inputs, keep)
        run = functools.partial(run_block, self._body, self.recompute)
        if self.offload is None:
            return run(x, inputs)
        # parameters and tensors that all blocks share stay on the device anyway
        staying = (*self.parameters(), *sum(inputs.rotary, ()), inputs.token_names)
        return self.offload(run, x, inputs, staying)

    def _body(self, x: torch.Tensor, inputs: BlockInputs, save: Save) -> torch.Tensor:
        # LoRA pairs need token identifiers for dropout masks, but layers do not pass them on
        for pairs in self.pairs:
            pairs.names = DropoutNames(inputs.key, inputs.token_names, inputs.all_token_names)
        with self.precision():
            rotary = inputs.rotary[self.has_window]
            attended = self.attention_norm(self.attention(x, inputs.plan, rotary, save))
            x = x + self._drop(attended, inputs, 2 * self.layer)
            # experts also need the routes of this microbatch
            made = self.mlp(x, save, inputs.routes) if self.is_routed else self.mlp(x, save)
            return x + self._drop(self.mlp_norm(made), inputs, 2 * self.layer + 1)

    def _drop(self, x: torch.Tensor, inputs: BlockInputs, site: int) -> torch.Tensor:
        """Apply dropout to `x`; `site` distinguishes the dropouts of all layers, two per layer."""
        # the odd constant makes the keys of neighbouring sites differ in all 64 bits (SplitMix64)
        key = inputs.key + site * 0x9E3779B97F4A7C15
        return dropout(x, key, inputs.token_names, self.dropout if self.training else 0.0)


def offload_blocks(
    chunks: Sequence[nn.ModuleList], counts: Sequence[int], device: torch.device
) -> None:
    """Offload the saved tensors of the first `counts[c]` blocks of each chunk c.

    The backward pass runs the first blocks last, so it needs their tensors last.
    """
    memory = HostMemory(device)
    for blocks, count in zip(chunks, counts, strict=True):
        if not count:
            continue
        # one more block, whose backward pass starts the copies back for the block before it
        for place, block in enumerate(blocks[: count + 1]):
            assert isinstance(block, Block)
            block.offload = BlockOffload(memory, travels=place < count, first=place == 0)
