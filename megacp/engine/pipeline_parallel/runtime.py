"""Execution of action lists on real ranks: one loop for every pipeline schedule.

A receive is posted at its position in the list, right before the compute that needs it. On NCCL, a
posted receive or send is a kernel that spins until its peer arrives, so a compute that waits for
the whole device also waits for the peer. With one chunk per stage, every schedule finishes even if
all computes wait like this. Interleaved schedules could deadlock, so the first step of a run, which
compiles and loads kernels, uses `one_at_a_time`.

Sends run in the background and keep their tensor alive until they complete. Only hidden states are
sent. Both sides derive the shape from the batch, so microbatches of a step may differ in length.

The list also determines which gradients are computed. A chunk without a backward pass runs under
no_grad, and an input whose gradient is not sent does not require one. If the first stages train
nothing, they have no autograd graph.

Between the forward and the backward pass of a chunk, its input and autograd graph stay in memory.
Of the output, only the graph edge is kept, so its storage is freed once it has been sent.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megacp.distributed.collectives import Pending, irecv, isend
from megacp.distributed.grid import ProcessGrid
from megacp.engine.pipeline_parallel.schedules import (
    Action,
    Channel,
    Kind,
    channel_of,
    virtual_stage,
)
from megacp.engine.timers import Phase, unmeasured

SEND_WINDOW = 2
"""Maximum number of pending sends per channel.

In simulations, the schedules already finish without losing time if it is 1.
"""

ModelChunk = Callable[[Tensor | None, Any], Tensor]
"""Function from (input, batch) to output.

The input is hidden[t, h], or None on virtual stage 0. The output is hidden[t, h], or the scalar
loss on the last virtual stage. The function must not change its input in place, because the input
is a leaf of the autograd graph."""


class Parameters(Protocol):
    """Methods of `ShardedParameters` that the loop calls."""

    def unshard(self, chunk: int) -> None: ...
    def reshard(self, chunk: int) -> None: ...
    def start_backward(self, chunk: int, last: bool) -> None: ...
    def end_backward(self, chunk: int) -> None: ...


class DeferredGradients(Protocol):
    """Methods of `DeferredWeightGradients` that the loop calls."""

    def begin(self) -> None: ...
    def keep(self, key: tuple[int, int]) -> None: ...
    def add(self, key: tuple[int, int], last: bool) -> None: ...


@dataclass(frozen=True)
class HiddenStates:
    """Shape and dtype of the hidden states that stages exchange, and how batches are moved."""

    shape: Callable[[Any], tuple[int, ...]]
    """Function from a batch to the shape of the hidden states that this rank sends.

    The shape is (t/cp(/tp), h). All stages use the same function.
    """
    dtype: torch.dtype
    move: Callable[[Any], Any] = lambda batch: batch
    """Function that moves a batch from the host to the device.

    The loop keeps the result only between the batch's first and last chunk on this stage, so the
    device never stores the pixels of a whole step."""


def open_channels(grid: ProcessGrid, num_chunks: int) -> None:
    """Send one element through every channel of `num_chunks` chunks, in equal order on all ranks.

    On NCCL, call this once before the first `run`. At the first message between two ranks, NCCL
    builds a communicator and blocks both ranks until it is ready. Within a schedule, two ranks
    could build different communicators and wait for each other forever.
    """
    num_stages = grid.pp.size
    rank = grid.pp.rank
    if num_stages == 1:
        return
    for direction, step in (("forward", 1), ("backward", -1)):
        for source in range(num_stages):
            destination = (source + step) % num_stages
            if destination != source + step and num_chunks == 1:
                continue  # only messages between chunks wrap around
            axis = grid.pipeline_channel(direction, source)
            one = torch.zeros(1, device=grid.device)
            if rank == source:
                isend(one, axis, destination).wait()
            elif rank == destination:
                irecv(one, axis, source).wait()


def run(
    actions: Sequence[Action],
    chunks: Sequence[ModelChunk],
    batches: Sequence[Any],
    grid: ProcessGrid,
    hidden: HiddenStates,
    parameters: Parameters | None = None,
    phase: Phase = unmeasured,
    deferred: DeferredGradients | None = None,
) -> list[Tensor]:
    """Execute this stage's action list for one step and return the losses.

    Every stage calls this function with its own list of the same schedule. `chunks[c]` is model
    chunk c of this stage, that is, virtual stage `c * num_stages + stage`. `batches[i]` is
    microbatch i. The chunk of the last virtual stage returns the microbatch's scalar loss, already
    divided by the step's denominator.

    Gradients accumulate in the parameters. `parameters` is notified of every backward pass, and may
    reduce final gradients while the last backward pass of a chunk is still running. A list with
    WEIGHTS actions needs `deferred`. `phase` returns a context for every transfer, forward pass,
    backward pass and wait for another stage.

    On the rank of the last virtual stage, return the detached losses in microbatch order; on other
    ranks, []. Call this under `torch.no_grad()` if the list has only forward passes. If a chunk
    raises an exception, other ranks wait until the launcher or the process group's timeout ends
    them.
    """
    trained = {action.chunk for action in actions if action.kind is Kind.BACKWARD}
    handing_back = {action.chunk for action in actions if action.kind is Kind.SEND_BACKWARD}
    microbatches = {action.microbatch for action in actions}
    assert len(batches) == len(microbatches), (
        f"got {len(batches)} batches, but the actions are for {len(microbatches)} microbatches"
    )
    assert torch.is_grad_enabled() or not trained, "a training schedule cannot run under no_grad"
    stage = _Stage(chunks, batches, grid, hidden, trained, handing_back, parameters, deferred)
    # the last action of each kind and chunk, after which gradients are final
    final = {(a.kind, a.chunk): a for a in actions}
    if deferred is not None:
        deferred.begin()
    for action in actions:
        key = action.microbatch, action.chunk
        last = final[action.kind, action.chunk] == action
        match action.kind:
            case Kind.FORWARD:
                with phase("shard"):
                    batch = stage.on_device.pop(action.microbatch, None)
                    batch = batch or hidden.move(batches[action.microbatch])
                    if action.chunk < len(chunks) - 1:
                        stage.on_device[action.microbatch] = batch
                with phase("forward"):
                    stage.forward(key, batch)
                del batch  # free its pixels now, before the next batch arrives
            case Kind.BACKWARD:
                with phase("backward"):
                    stage.backward(key, last)
            case Kind.WEIGHTS:
                assert deferred is not None, f"the action `{action}` needs `deferred`"
                with phase("backward"):
                    deferred.add(key, last)
            case Kind.RECV_FORWARD:
                # autograd need not compute a gradient that is not sent back
                needs_gradient = action.chunk in stage.handing_back
                with phase("pipeline exchange"):
                    stage.inputs[key] = stage.receive(action).requires_grad_(needs_gradient)
            case Kind.RECV_BACKWARD:
                with phase("pipeline exchange"):
                    stage.output_gradients[key] = stage.receive(action)
            case Kind.SEND_FORWARD | Kind.SEND_BACKWARD:
                with phase("pipeline exchange"):
                    stage.send(action, stage.outgoing.pop(key))
            case Kind.UNSHARD | Kind.RESHARD:
                assert parameters is not None, f"the action `{action}` needs `parameters`"
                with phase("parameter exchange"):
                    if action.kind is Kind.UNSHARD:
                        parameters.unshard(action.chunk)
                    else:
                        parameters.reshard(action.chunk)
    stage.finish()
    return [stage.losses[microbatch] for microbatch in sorted(stage.losses)]


@dataclass
class _Stage:
    """State of one step on one stage. Keys are (microbatch, chunk)."""

    chunks: Sequence[ModelChunk]
    batches: Sequence[Any]
    grid: ProcessGrid
    hidden: HiddenStates
    trained: set[int]  # chunks with a backward pass
    handing_back: set[int]  # chunks that send the gradient of their input
    parameters: Parameters | None
    deferred: DeferredGradients | None
    # microbatches that later chunks of this stage need
    on_device: dict[int, Any] = field(default_factory=dict)
    # pending sends, oldest first
    sending: defaultdict[Channel, deque[Pending]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    # received inputs, until their gradient is sent or, without a gradient, until the forward pass
    inputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    # losses with their graph, until the backward pass
    losses_to_go: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    # graph edges of the outputs, until the backward pass
    edges: dict[tuple[int, int], GradientEdge] = field(default_factory=dict)
    # received gradients of outputs, until the backward pass
    output_gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    # computed outputs and input gradients, until they are sent
    outgoing: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    # detached losses by microbatch
    losses: dict[int, Tensor] = field(default_factory=dict)

    def virtual_stage(self, chunk: int) -> int:
        """Return the virtual stage of this stage's model chunk `chunk`."""
        return virtual_stage(self.grid.pp.rank, self.grid.pp.size, chunk)

    def is_last(self, chunk: int) -> bool:
        """Return whether `chunk` of this stage is the model's last one, which computes the loss."""
        return self.virtual_stage(chunk) == self.grid.pp.size * len(self.chunks) - 1

    def forward(self, key: tuple[int, int], batch: Any) -> None:
        """Run a chunk's forward pass; keep the output and, if it is trained, the graph."""
        microbatch, chunk = key
        # keep the input only if its gradient will be sent
        if chunk in self.handing_back:
            entry = self.inputs.get(key)
        else:
            entry = self.inputs.pop(key, None)
        # without a backward pass, nothing is saved, regardless of recomputation and offload
        with torch.set_grad_enabled(chunk in self.trained):
            output = self.chunks[chunk](entry, batch)
        if self.is_last(chunk):
            self.losses[microbatch] = output.detach()
            if chunk in self.trained:
                self.losses_to_go[key] = output
            return
        self.outgoing[key] = output.detach()
        if chunk in self.trained:
            self.edges[key] = get_gradient_edge(output)

    def backward(self, key: tuple[int, int], last: bool) -> None:
        """Run a chunk's backward pass, and keep the gradient of its input if it will be sent."""
        _, chunk = key
        if self.parameters is not None:
            self.parameters.start_backward(chunk, last)
        if self.is_last(chunk):
            torch.autograd.backward([self.losses_to_go.pop(key)])
        else:
            torch.autograd.backward([self.edges.pop(key)], [self.output_gradients.pop(key)])
        if self.deferred is not None:
            self.deferred.keep(key)
        if self.parameters is not None:
            self.parameters.end_backward(chunk)
        if chunk in self.handing_back:
            gradient = self.inputs.pop(key).grad
            assert gradient is not None, (
                f"the output of virtual stage {self.virtual_stage(chunk)} does not depend on its "
                "input, so there is no input gradient to send"
            )
            self.outgoing[key] = gradient

    def receive(self, action: Action) -> Tensor:
        """Receive the next message in the action's channel; on CUDA, only the device waits."""
        channel = channel_of(action, self.grid.pp.rank, self.grid.pp.size)
        shape = self.hidden.shape(self.batches[action.microbatch])
        buffer = torch.empty(shape, dtype=self.hidden.dtype, device=self.grid.device)
        axis = self.grid.pipeline_channel(channel.direction, channel.source)
        return irecv(buffer, axis, channel.source).wait()

    def send(self, action: Action, x: Tensor) -> None:
        """Start to send `x`; if the channel's window is full, first wait for the oldest send."""
        shape = tuple(self.hidden.shape(self.batches[action.microbatch]))
        assert tuple(x.shape) == shape and x.dtype == self.hidden.dtype, (
            f"{action}: the tensor has shape {tuple(x.shape)} and dtype {x.dtype}, but the peer "
            f"expects {shape} and {self.hidden.dtype}"
        )
        channel = channel_of(action, self.grid.pp.rank, self.grid.pp.size)
        under_way = self.sending[channel]
        if len(under_way) >= SEND_WINDOW:
            under_way.popleft().wait()
        axis = self.grid.pipeline_channel(channel.direction, channel.source)
        under_way.append(isend(x, axis, channel.destination))

    def finish(self) -> None:
        """Wait for pending sends, and check that the step is complete."""
        for under_way in self.sending.values():
            for handle in under_way:
                handle.wait()
        left = (self.inputs, self.losses_to_go, self.edges, self.output_gradients, self.outgoing)
        assert not any(left), f"the action list is incomplete: {[list(d) for d in left]} are left"
