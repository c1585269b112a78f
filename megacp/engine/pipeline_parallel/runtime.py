"""Execution of an action list on real ranks: one loop for every pipeline schedule.

The loop does not depend on the schedule. A receive is posted at its place in the list, right before
the compute that needs it. On NCCL, a posted receive or send is a kernel that spins until its peer
arrives. A compute that waits for the whole device then also waits for the peer. With one chunk per
stage, every schedule finishes even if all computes wait like this. Interleaved schedules might
deadlock, so the first step of a run, which compiles and loads kernels, uses `one_at_a_time`.

Sends run in the background and keep their tensor alive until they complete. Only hidden states are
sent. Both sides know their shape from the batch, so microbatches of a step may differ in length.

The list also determines gradients. A chunk without a backward runs under no_grad, and an input
whose gradient is not sent does not require one. If the first stages train nothing, autograd would
find no graph there.

Between a forward and its backward, the input and the autograd graph stay in memory. Only the graph
edge of the output is kept, so the output's storage is freed as soon as it has been sent.
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

Simulation shows that with 1 the schedules already finish without losing time.
"""

ModelChunk = Callable[[Tensor | None, Any], Tensor]
"""Function from (input, batch) to output.

The input is hidden[t, h], or None on virtual stage 0. The output is hidden[t, h], or the scalar
loss on the last virtual stage. The function must not change its input in place, because the input
is a leaf of the autograd graph."""


class Parameters(Protocol):
    """The methods of `ShardedParameters` that the loop calls."""

    def unshard(self, chunk: int) -> None: ...
    def reshard(self, chunk: int) -> None: ...
    def start_backward(self, chunk: int, last: bool) -> None: ...
    def end_backward(self, chunk: int) -> None: ...


class DeferredGradients(Protocol):
    """The methods of `DeferredWeightGradients` that the loop calls."""

    def begin(self) -> None: ...
    def keep(self, key: tuple[int, int]) -> None: ...
    def add(self, key: tuple[int, int], last: bool) -> None: ...


@dataclass(frozen=True)
class HiddenStates:
    """The hidden states that stages exchange, and the transfer of a batch to the device."""

    shape: Callable[[Any], tuple[int, ...]]
    """Function from a batch to the shape of the hidden states that this rank passes on.

    The shape is (t/cp(/tp), h). All stages use the same function.
    """
    dtype: torch.dtype
    move: Callable[[Any], Any] = lambda batch: batch
    """Function that moves a batch from the host to the device.

    The loop keeps the result from the batch's first chunk on this stage to its last, so the device
    never stores the pixels of a whole step."""


def open_channels(grid: ProcessGrid, num_chunks: int) -> None:
    """Send one element over every channel of `num_chunks` chunks, in the same order on all stages.

    Call it once before the first `run` on NCCL. NCCL builds a communicator at the first message
    between two ranks, and blocks both ranks until it is ready. Inside a schedule, two ranks could
    build different communicators and wait for each other.
    """
    num_stages = grid.pp.size
    rank = grid.pp.rank
    if num_stages == 1:
        return
    for direction, step in (("forward", 1), ("backward", -1)):
        for source in range(num_stages):
            destination = (source + step) % num_stages
            if destination != source + step and num_chunks == 1:
                continue  # only messages from one chunk to the next wrap around
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
    """Execute this stage's action list for one step.

    Every stage calls this function with its list of the same schedule. `chunks[c]` is model chunk c
    of this stage, which is virtual stage `c * num_stages + stage`. `batches[i]` is microbatch i.
    The chunk of the last virtual stage returns the microbatch's scalar loss, already divided by the
    step's denominator.

    Gradients accumulate in the parameters. `parameters` is notified of every backward, and may
    reduce final gradients while the last backward of a chunk still runs. A list with WEIGHTS
    actions needs `deferred`. `phase` returns a context for every transfer, forward, backward and
    wait for another stage.

    Return the detached losses in microbatch order on the rank of the last virtual stage, and [] on
    the other ranks. With a forward-only list, call it under `torch.no_grad()`. If a chunk raises,
    other ranks keep waiting until the launcher or the process group's timeout ends them.
    """
    trained = {action.chunk for action in actions if action.kind is Kind.BACKWARD}
    handing_back = {action.chunk for action in actions if action.kind is Kind.SEND_BACKWARD}
    microbatches = {action.microbatch for action in actions}
    assert len(batches) == len(microbatches), (
        f"{len(batches)} batches, but the actions are for {len(microbatches)} microbatches"
    )
    assert torch.is_grad_enabled() or not trained, "a training schedule cannot run under no_grad"
    stage = _Stage(chunks, batches, grid, hidden, trained, handing_back, parameters, deferred)
    # the last action of each kind and chunk: its gradients are final
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
                del batch  # free its pixels now instead of when the next batch arrives
            case Kind.BACKWARD:
                with phase("backward"):
                    stage.backward(key, last)
            case Kind.WEIGHTS:
                assert deferred is not None, f"{action}: `deferred` is needed for this action"
                with phase("backward"):
                    deferred.add(key, last)
            case Kind.RECV_FORWARD:
                # without a gradient to send back, autograd need not compute it
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
                assert parameters is not None, f"{action}: `parameters` is needed for this action"
                with phase("parameter exchange"):
                    if action.kind is Kind.UNSHARD:
                        parameters.unshard(action.chunk)
                    else:
                        parameters.reshard(action.chunk)
    stage.finish()
    return [stage.losses[microbatch] for microbatch in sorted(stage.losses)]


@dataclass
class _Stage:
    """State of one step on one stage. A key is (microbatch, chunk)."""

    chunks: Sequence[ModelChunk]
    batches: Sequence[Any]
    grid: ProcessGrid
    hidden: HiddenStates
    trained: set[int]  # chunks with a backward
    handing_back: set[int]  # chunks whose backward sends the gradient of the input
    parameters: Parameters | None
    deferred: DeferredGradients | None
    # microbatches that later chunks of this stage need
    on_device: dict[int, Any] = field(default_factory=dict)
    # pending sends, oldest first
    sending: defaultdict[Channel, deque[Pending]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    # received inputs, until their gradient is sent or (without a gradient) until their forward
    inputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    # losses with their graph, until the backward
    losses_to_go: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    # graph edges of the outputs, until the backward
    edges: dict[tuple[int, int], GradientEdge] = field(default_factory=dict)
    # received gradients of outputs, until the backward
    output_gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    # computed outputs and input gradients, until the following send
    outgoing: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    # detached losses by microbatch
    losses: dict[int, Tensor] = field(default_factory=dict)

    def virtual_stage(self, chunk: int) -> int:
        """Return the virtual stage of this stage's model chunk `chunk`."""
        return virtual_stage(self.grid.pp.rank, self.grid.pp.size, chunk)

    def is_last(self, chunk: int) -> bool:
        """Whether model chunk `chunk` is the last virtual stage, which computes the loss."""
        return self.virtual_stage(chunk) == self.grid.pp.size * len(self.chunks) - 1

    def forward(self, key: tuple[int, int], batch: Any) -> None:
        """Run the forward of a chunk; keep the output for its send and the graph for backward."""
        microbatch, chunk = key
        # keep the input only if the backward sends its gradient
        if chunk in self.handing_back:
            entry = self.inputs.get(key)
        else:
            entry = self.inputs.pop(key, None)
        # a chunk without a backward saves nothing, whatever its recomputation and offload do
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
        """Run the backward of a chunk; keep the gradient of its input if it will be sent."""
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
                "input, so there is no gradient to send"
            )
            self.outgoing[key] = gradient

    def receive(self, action: Action) -> Tensor:
        """Return the next message of the action's channel; on CUDA only the device waits for it."""
        channel = channel_of(action, self.grid.pp.rank, self.grid.pp.size)
        shape = self.hidden.shape(self.batches[action.microbatch])
        buffer = torch.empty(shape, dtype=self.hidden.dtype, device=self.grid.device)
        axis = self.grid.pipeline_channel(channel.direction, channel.source)
        return irecv(buffer, axis, channel.source).wait()

    def send(self, action: Action, x: Tensor) -> None:
        """Start a send; if the window of its channel is full, wait for the oldest send first."""
        shape = tuple(self.hidden.shape(self.batches[action.microbatch]))
        assert tuple(x.shape) == shape and x.dtype == self.hidden.dtype, (
            f"{action}: the tensor is {tuple(x.shape)} {x.dtype}, but the peer expects {shape} "
            f"{self.hidden.dtype}"
        )
        channel = channel_of(action, self.grid.pp.rank, self.grid.pp.size)
        under_way = self.sending[channel]
        if len(under_way) >= SEND_WINDOW:
            under_way.popleft().wait()
        axis = self.grid.pipeline_channel(channel.direction, channel.source)
        under_way.append(isend(x, axis, channel.destination))

    def finish(self) -> None:
        """Wait for the pending sends, and check that the step left no work undone."""
        for under_way in self.sending.values():
            for handle in under_way:
                handle.wait()
        left = (self.inputs, self.losses_to_go, self.edges, self.output_gradients, self.outgoing)
        assert not any(left), f"the action list left work undone: {[list(d) for d in left]}"
