"""Use exact context-parallel attention in your own model, with packed documents, an image span and
a sliding window.

    torchrun --standalone --nproc-per-node 2 examples/attention_only.py

The script prints the largest difference from dense attention in one process, in the output and the
gradients, in float64.
"""

import os

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from megacp.attention import (
    LAYOUTS,
    AttentionPlan,
    Metadata,
    Reach,
    allowed,
    context_parallel_attention,
)
from megacp.distributed import axis_of_mesh


class Attention(nn.Module):
    """An ordinary layer; only the call of `attend` involves the tokens on other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x, attend):
        # x is [tokens of this rank, 32]; only attention needs the tokens of other ranks.
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).unbind(1)  # [tokens, 4 heads, 8] each
        return self.out(attend(q, k, v).flatten(1))


distributed.init_process_group("gloo")
# The axis wraps the process group of a torch DeviceMesh.
axis = axis_of_mesh(
    init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("cp",))["cp"]
)
torch.manual_seed(0)
# Every rank has the same weights and row, because all ranks use the same seed.
layer = Attention().double()
row = torch.randn(64, 32, dtype=torch.float64)  # [tokens, hidden]

# Describe the row on the host, once per batch. All ranks compute the same plan.
document = np.repeat([0, 1, 2], [24, 30, 10])  # three packed documents
span = np.zeros(64, int)
span[26:40] = 1  # an image: its tokens attend to each other in both directions
mask = Metadata.of_documents(document, span=span)
plan = AttentionPlan(LAYOUTS["balanced"].deal(mask, axis.size), mask, axis.rank).within(
    Reach(window=12)
)

mine = torch.from_numpy(plan.local)  # the tokens of this rank
# Each rank has only the gradient from its own tokens, so sum the gradients over the ranks.
sharded = layer(row[mine], lambda q, k, v: context_parallel_attention(q, k, v, plan, axis))
gradients = torch.autograd.grad(sharded.square().sum(), list(layer.parameters()))
for gradient in gradients:
    distributed.all_reduce(gradient)

seen = torch.from_numpy(allowed(mask, mask, Reach(window=12)))  # [64, 64], dense


def dense(q, k, v):
    scores = torch.einsum("qhd,khd->hqk", q, k) / 8**0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


# Every rank also computes the whole row with the dense mask, and compares its own part.
expected = layer(row, dense)
pairs = zip(
    gradients, torch.autograd.grad(expected.square().sum(), list(layer.parameters())), strict=True
)
error = max((one - other).abs().max().item() for one, other in [*pairs, (sharded, expected[mine])])
if axis.rank == 0:
    print(f"{axis.size} ranks, largest difference from dense attention: {error:.1e}", flush=True)
distributed.destroy_process_group()
# Do not wait for gloo's threads, which may abort a successful exit (pytorch issue 190489).
os._exit(0)
