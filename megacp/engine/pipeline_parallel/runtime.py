"""Execute any action list on real ranks: the one loop behind every pipeline schedule.

The loop knows no schedule. A receive is posted where the list has it, right before the compute that
needs it. On NCCL a posted receive, or a send, is a kernel that spins until the other side comes: a
compute that waits for the whole device then waits for that side. With one chunk a stage, every
schedule ends even if all computes do. Interleaved ones might not, so a run's first step takes
`one_at_a_time`, in which kernels are compiled and loaded.

Sends run in the background and hold their tensor until they are through. Only hidden states travel,
and both sides know their shape from the batch, so the microbatches of a step may differ in length.

The list also decides what needs a gradient: a chunk without a backward runs under no_grad, and an
input whose gradient is not sent asks for none. Where the first stages train nothing, autograd would
find no graph there.

Between a forward and its backward the input and the autograd graph stay in memory. Of the output
only the graph's edge is kept, so its storage is free as soon as it is sent.
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
"""Most sends of one channel under way; the schedules end, and lose no time, with 1 (proven in
simulation).
"""

ModelChunk = Callable[[Tensor | None, Any], Tensor]
"""(input hidden[t, h], or None on virtual stage 0; batch) -> output hidden[t, h], or the scalar
loss on the last one.

It must not change its input in place: the input is a leaf of the autograd graph."""


class Parameters(Protocol):
    """Gathers the parameters of this stage's chunks and sums their gradients: see
    `ShardedParameters`.
    """

    def unshard(self, chunk: int) -> None: ...
    def reshard(self, chunk: int) -> None: ...
    def start_backward(self, chunk: int, last: bool) -> None: ...
    def end_backward(self, chunk: int) -> None: ...


class DeferredGradients(Protocol):
    """Keeps the weight gradients that backwards defer: see `DeferredWeightGradients`."""

    def begin(self) -> None: ...
    def keep(self, key: tuple[int, int]) -> None: ...
    def add(self, key: tuple[int, int], last: bool) -> None: ...


@dataclass(frozen=True)
class HiddenStates:
    """What travels between stages, and how a batch comes to this one."""

    shape: Callable[[Any], tuple[int, ...]]
    """batch -> shape of the hidden states this rank passes on, (t/cp(/tp), h); the same function on
    all stages.
    """
    dtype: torch.dtype
    move: Callable[[Any], Any] = lambda batch: batch
    """A batch on the host -> on the device, from its first chunk of this stage to its last: the
    pixels of a whole step never stand on it at once."""


def open_channels(grid: ProcessGrid, num_chunks: int) -> None:
    """Pass one element over every channel that `num_chunks` chunks use, in one order that all
    stages share.

    Call it once before the first `run` on NCCL: it builds a communicator at the first message of a
    pair, and blocks both ranks until it stands. Inside a schedule the two could build different
    ones and wait for each other.
    """
    num_stages, rank = grid.pp.size, grid.pp.rank
    for direction, step in (("forward", 1), ("backward", -1)) if num_stages > 1 else ():
        for source in range(num_stages):
            destination = (source + step) % num_stages
            if destination != source + step and num_chunks == 1:
                continue  # around the end go only the messages from one chunk to the next
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
    """Execute this stage's action list over one step; every stage calls it with its own list of the
    same schedule.

    `chunks[c]` is model chunk c of this stage, that is virtual stage `c * num_stages + stage`;
    `batches[i]` is microbatch i. The chunk of the last virtual stage returns the microbatch's
    scalar loss, already divided by the step's denominator. Parameter gradients accumulate in the
    parameters; `parameters` hears of every backward, and what a chunk's last one makes final may be
    reduced while it runs. `deferred` is needed by a list with WEIGHTS actions. `phase` gives the
    context of every arrival, forward, backward and wait for another stage.

    Returns the detached losses in microbatch order on the rank of the last virtual stage, [] on the
    others. With a forward-only list call it under `torch.no_grad()`. Other ranks are left waiting
    when a chunk raises: the launcher (or the process group's timeout) ends them.
    """
    trained = {action.chunk for action in actions if action.kind is Kind.BACKWARD}
    handing_back = {action.chunk for action in actions if action.kind is Kind.SEND_BACKWARD}
    assert len(batches) == len({action.microbatch for action in actions}), (
        f"{len(batches)} batches for other actions"
    )
    assert torch.is_grad_enabled() or not trained, "a training schedule under no_grad"
    stage = _Stage(chunks, batches, grid, hidden, trained, handing_back, parameters, deferred)
    final = {(a.kind, a.chunk): a for a in actions}
    if deferred is not None:
        deferred.begin()
    for action in actions:
        key = action.microbatch, action.chunk
        last = final[action.kind, action.chunk] == action  # of its chunk in this step
        match action.kind:
            case Kind.FORWARD:
                with phase("shard"):
                    batch = stage.on_device.pop(action.microbatch, None) or hidden.move(
                        batches[action.microbatch]
                    )
                    if action.chunk < len(chunks) - 1:
                        stage.on_device[action.microbatch] = batch
                with phase("forward"):
                    stage.forward(key, batch)
                del batch  # its pixels leave the device now, not when the next ones come
            case Kind.BACKWARD:
                with phase("backward"):
                    stage.backward(key, last)
            case Kind.WEIGHTS:
                assert deferred is not None, f"{action}: no weight gradient was deferred"
                with phase("backward"):
                    deferred.add(key, last)
            case Kind.RECV_FORWARD:
                with phase("pipeline exchange"):
                    stage.inputs[key] = stage.receive(action).requires_grad_(
                        action.chunk in stage.handing_back
                    )
            case Kind.RECV_BACKWARD:
                with phase("pipeline exchange"):
                    stage.output_gradients[key] = stage.receive(action)
            case Kind.SEND_FORWARD | Kind.SEND_BACKWARD:
                with phase("pipeline exchange"):
                    stage.send(action, stage.outgoing.pop(key))
            case Kind.UNSHARD | Kind.RESHARD:
                assert parameters is not None, f"{action}: nobody holds parameters"
                with phase("parameter exchange"):
                    (parameters.unshard if action.kind is Kind.UNSHARD else parameters.reshard)(
                        action.chunk
                    )
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
    handing_back: set[int]  # those whose backward sends the gradient of its input
    parameters: Parameters | None
    deferred: DeferredGradients | None
    on_device: dict[int, Any] = field(
        default_factory=dict
    )  # microbatches that later chunks of this stage take
    sending: defaultdict[Channel, deque[Pending]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    inputs: dict[tuple[int, int], Tensor] = field(
        default_factory=dict
    )  # until its gradient is sent, or else its forward
    losses_to_go: dict[tuple[int, int], Tensor] = field(
        default_factory=dict
    )  # with graph, until the backward
    edges: dict[tuple[int, int], GradientEdge] = field(
        default_factory=dict
    )  # of the outputs, until the backward
    output_gradients: dict[tuple[int, int], Tensor] = field(
        default_factory=dict
    )  # received, until the backward
    outgoing: dict[tuple[int, int], Tensor] = field(
        default_factory=dict
    )  # computed, until the send that follows
    losses: dict[int, Tensor] = field(default_factory=dict)

    def virtual_stage(self, chunk: int) -> int:
        """The virtual stage that this stage's model chunk `chunk` is."""
        return virtual_stage(self.grid.pp.rank, self.grid.pp.size, chunk)

    def is_last(self, chunk: int) -> bool:
        """Whether model chunk `chunk` is the last virtual stage, the one that computes the loss."""
        return self.virtual_stage(chunk) == self.grid.pp.size * len(self.chunks) - 1

    def forward(self, key: tuple[int, int], batch: Any) -> None:
        microbatch, chunk = key
        # the input waits for its gradient only where the backward sends it
        entry = self.inputs.get(key) if chunk in self.handing_back else self.inputs.pop(key, None)
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
                f"virtual stage {self.virtual_stage(chunk)} does not depend on its input"
            )
            self.outgoing[key] = gradient

    def receive(self, action: Action) -> Tensor:
        """The next message of its channel; on CUDA the device waits for it, not the host."""
        channel = channel_of(action, self.grid.pp.rank, self.grid.pp.size)
        shape = self.hidden.shape(self.batches[action.microbatch])
        buffer = torch.empty(shape, dtype=self.hidden.dtype, device=self.grid.device)
        axis = self.grid.pipeline_channel(channel.direction, channel.source)
        return irecv(buffer, axis, channel.source).wait()

    def send(self, action: Action, x: Tensor) -> None:
        """Start a send, after the oldest of its channel when the window is full."""
        shape = tuple(self.hidden.shape(self.batches[action.microbatch]))
        assert tuple(x.shape) == shape and x.dtype == self.hidden.dtype, (
            f"{action}: {tuple(x.shape)} {x.dtype} computed, the peer expects {shape} "
            f"{self.hidden.dtype}"
        )
        channel = channel_of(action, self.grid.pp.rank, self.grid.pp.size)
        under_way = self.sending[channel]
        if len(under_way) >= SEND_WINDOW:
            under_way.popleft().wait()
        axis = self.grid.pipeline_channel(channel.direction, channel.source)
        under_way.append(isend(x, axis, channel.destination))

    def finish(self) -> None:
        """Wait for the sends under way; nothing else may be left."""
        for under_way in self.sending.values():
            for handle in under_way:
                handle.wait()
        left = (self.inputs, self.losses_to_go, self.edges, self.output_gradients, self.outgoing)
        assert not any(left), f"the action list left work undone: {[list(d) for d in left]}"
