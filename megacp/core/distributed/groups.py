"""Process groups of one world: options of NCCL's by what an axis carries, one thread of connections for all of gloo's.

Key property: torch gives each gloo group connections of its own, whose thread wakes up a hundred times a second. A grid
has a dozen groups. Groups made here share the thread of the world's group: ranks that wait cost nothing then. A dozen
groups of eight idle ranks took 0.14 of a core, and take 0.02. Rejected: fewer groups. A mesh, a check of parity and a
message through the host need one for each axis.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

CHANNELS = ("pp_forward", "pp_backward")
"""Axes that carry a pipeline's messages."""
CHANNEL_CTAS = 4
"""Most thread blocks that a pipeline's message takes from the layers under it: its peer needs it a compute later. Not
measured.
"""
URGENT = ("tp", "cp", "cp_inner", "cp_outer", "pp", *CHANNELS)
"""Axes whose messages the next kernel waits for: those of tp would else stand behind a product that fills the GPU.
Those of gradients and parameters have a whole backward's time.
"""
_SHARED = "megacp_gloo"
"""Name by which torch knows gloo groups that share connections; what users see of them is `gloo`."""
_DEVICES = ["cpu", "cuda"]
"""Kinds of tensors that gloo's collectives take."""


def group_options(name: str) -> Any:
    """Options of an axis' process group: under NCCL, messages of `URGENT` axes go before kernels that are queued, and
    those of `CHANNELS` take few thread blocks.
    """
    if name not in URGENT or dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if name in CHANNELS:
        options.config.max_ctas = CHANNEL_CTAS
    return options


def new_group(members: Sequence[int], name: str, timeout: datetime.timedelta | None = None) -> dist.ProcessGroup:
    """The process group of an axis over some global ranks, which alone call it; None: with torch's own timeout.

    torch names such a group after how many its rank has made, so all ranks of a world must make equally many.
    """
    backend = _shared_gloo() if dist.get_backend() == "gloo" else None
    return dist.new_group(
        list(members), timeout, backend, pg_options=group_options(name), use_local_synchronization=True
    )


def _shared_gloo() -> str:
    if _SHARED not in dist.Backend.backend_list:
        dist.Backend.register_backend(_SHARED, _made, extended_api=True, devices=_DEVICES)
    return _SHARED


def _made(wanted: Any, unused_options: Any) -> Any:
    """A gloo group that uses the connections' thread of the world's; `wanted` is what torch wants of it."""
    assert dist.group.WORLD is not None, "a group before its world"
    gloo: Any = dist.ProcessGroupGloo
    world: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    options = gloo._Options()
    options._devices = world.options._devices
    options._threads, options._timeout = 2 * len(options._devices), wanted.timeout  # as many as torch gives one
    options.global_ranks_in_group, options.group_name = wanted.global_ranks_in_group, wanted.group_id
    return gloo(wanted.store, wanted.group_rank, wanted.group_size, options)
