"""Picotron's Llama, parallelisms and pipeline from a checkout (`--picotron DIR`); the loop is that of its train.py.

Patched: empty modules stand for flash_attn, which it imports and does not call on CPU; `torch.cuda.synchronize` does
nothing. Weights come from the folder, as it can only draw random ones. Its data loader is replaced by the given tokens.
Its reduction of gradients, which train.py applies for dp alone, is applied for cp as well. Gradients of its pipeline,
which it does not divide by the microbatches, are divided. The loss is the sum over the tokens of the step, since means
of means weigh a rank by its number of labels. Clipping, which it has not, is one all-reduce and one product.
"""

from __future__ import annotations

import json
import os
import sys
import types
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from stepping import IGNORED, Train, Work, serve, summed, token_loss

BY_COLUMNS = ("q_proj", "k_proj", "v_proj", "up_proj", "gate_proj", "embedding", "final_proj")
BY_ROWS = ("out_proj", "down_proj")


def stand_in(name: str, *attributes: str) -> None:
    """An empty module with names that are imported from it."""
    module = types.ModuleType(name)
    for attribute in attributes:
        setattr(module, attribute, None)
    sys.modules[name] = module


def open_checkout(work: Work) -> None:
    """Make the checkout importable, for fp32 on CPU."""
    os.environ |= {"FLASH_ATTEN": "0", "DTYPE": "float32", "DEVICE": "cpu", "CONTEXT_PARALLEL": "0"}
    for name in ("flash_attn", "flash_attn.layers", "flash_attn.ops", "flash_attn.ops.triton"):
        stand_in(name)
    stand_in("flash_attn.flash_attn_interface", "flash_attn_func")
    stand_in("flash_attn.layers.rotary", "apply_rotary_emb")
    stand_in("flash_attn.ops.triton.layer_norm", "layer_norm_fn")
    torch.cuda.synchronize = lambda device=None: None
    sys.path.insert(0, work.packages["--picotron"])


def config_of(work: Work) -> SimpleNamespace:
    """The fields that its model reads of a transformers config."""
    said = json.loads((work.weights / "config.json").read_text(encoding="utf-8"))
    theta = (said.get("rope_parameters") or {}).get("rope_theta") or said.get("rope_theta", 10000.0)
    return SimpleNamespace(**{**said, "rope_theta": theta, "max_position_embeddings": work.length})


def theirs(name: str) -> str:
    """The Hugging Face name of one of its parameters."""
    if name.startswith("decoder_layers."):
        name = name.replace("decoder_layers.", "model.layers.").replace(".attention.", ".self_attn.")
        return name.replace("out_proj", "o_proj")
    heads = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "final_proj": "lm_head"}
    return f"{heads[name.removesuffix('.weight')]}.weight"


def fill(model: torch.nn.Module, work: Work, tp_rank: int) -> None:
    """Copy the folder's weights, each tp rank its part."""
    weights, tp = load_file(work.weights / "model.safetensors"), work.axes["tp"]
    for name, parameter in model.named_parameters():
        full, module = weights[theirs(name)], name.split(".")[-2]
        if module in BY_COLUMNS:
            full = full.chunk(tp, 0)[tp_rank]
        elif module in BY_ROWS:
            full = full.chunk(tp, 1)[tp_rank]
        parameter.data.copy_(full)


class Batches:
    """What its pipeline takes for a data loader: one step's microbatches."""

    def __init__(self, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.grad_acc_steps, self._parts = len(parts), iter(parts)

    def __next__(self) -> dict[str, Any]:
        ids, targets = next(self._parts)
        return {"input_ids": ids, "target_ids": targets, "position_ids": ids, "hidden_states": None}


def clip(model: torch.nn.Module, work: Work) -> None:
    """Scale gradients to the largest norm of the whole model."""
    total = torch.zeros(())
    for name, parameter in model.named_parameters():
        shared = work.axes["tp"] if "norm" in name else 1
        total += parameter.grad.square().sum() / (shared * work.axes["dp"] * work.axes["cp"])
    dist.all_reduce(total)
    torch._foreach_mul_(
        [p.grad for p in model.parameters()], (work.adamw["clip_grad"] / (total.sqrt() + 1e-6)).clamp(max=1)
    )


def build(work: Work) -> Train:
    """The model on its grid, and a step."""
    open_checkout(work)
    from picotron import process_group_manager as pgm
    from picotron.context_parallel.context_parallel import apply_context_parallel
    from picotron.data_parallel.data_parallel import DataParallelBucket
    from picotron.model import Llama
    from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel, train_step_pipeline_1f1b
    from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel

    sizes = {f"{axis}_size": work.axes[axis] for axis in ("tp", "cp", "pp", "dp")}
    pgm.setup_process_group_manager(**sizes)
    grid, config = pgm.process_group_manager, config_of(work)
    model: Any = Llama(config)
    if work.axes["tp"] > 1:
        model = apply_tensor_parallel(model)
    if work.axes["pp"] > 1:
        model = PipelineParallel(model, config)
    fill(model, work, grid.tp_rank)
    if work.axes["cp"] > 1:
        model = apply_context_parallel(model)
    bare, copies = model, work.axes["dp"] * work.axes["cp"]
    if copies > 1:
        model = DataParallelBucket(model)
    model.train()
    optimizer = work.optimizer(bare.parameters())
    tokens_here = work.length // work.axes["cp"]
    mine = slice(grid.cp_rank * tokens_here, (grid.cp_rank + 1) * tokens_here)

    def by_stages(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        shapes = (len(parts[0][0]), tokens_here, config.hidden_size)
        loss = train_step_pipeline_1f1b(model, Batches(parts), shapes, torch.device("cpu"), torch.float32)
        torch._foreach_div_([parameter.grad for parameter in bare.parameters()], len(parts))
        return loss

    def whole(parts: list[tuple[torch.Tensor, torch.Tensor]], denominator: float) -> float:
        total = 0.0
        for number, (ids, targets) in enumerate(parts):
            model.require_backward_grad_sync = number == len(parts) - 1
            loss = token_loss(model(input_ids=ids[:, mine].contiguous()), targets[:, mine], denominator)
            (loss * copies).backward()
            total += loss.item()
        return total

    def train(tokens: torch.Tensor, labels: torch.Tensor) -> float | None:
        optimizer.zero_grad()
        parts = work.microbatches(tokens, labels)
        loss = by_stages(parts) if work.axes["pp"] > 1 else whole(parts, float((labels != IGNORED).sum()))
        clip(bare, work)
        optimizer.step()
        if copies > 1:
            model.reset()
        if work.axes["pp"] > 1:
            return loss if grid.pp_is_last_stage else None
        return summed(loss, work.world_size) / work.axes["tp"]

    return train


if __name__ == "__main__":
    serve(build)
