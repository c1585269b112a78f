"""Pipeline schedules as data: pure functions from (stage, sizes) to a stage's list of actions.

A schedule is an order of computes: forward passes, backward passes, and deferred weight gradients.
The order of computes determines the messages: a stage receives every input right before the compute
that needs it, and sends every output right after the compute. All stages run forward passes in the
same order, and backward passes too, so a channel's k-th send always matches its k-th receive.

Virtual stage `v = chunk * num_stages + stage` has the v-th part of the layers. Virtual stage 0
receives nothing in the forward pass and sends nothing in the backward pass, and for the last
virtual stage it is the reverse. If the first virtual stages have no trained parameters (LoRA only
in later layers), they have no backward pass, and the first trained stage sends no gradient.

The simplest schedule runs all forward passes and then all backward passes (AFAB). The following
code is the complete work of a stage with AFAB. 1F1B runs the same actions in a different order,
which keeps fewer activations:

    for microbatch in range(m):                            # stage s of p, one chunk
        x = recv(s - 1) if s > 0 else None                 # RECV_FORWARD: hidden [t, h]
        outputs[microbatch] = chunk(x, batches[microbatch])  # FORWARD; on stage p - 1 the loss
        inputs[microbatch] = x
        if s < p - 1:
            send(outputs[microbatch], s + 1)               # SEND_FORWARD
    for microbatch in range(m):
        if s < p - 1:
            grad = recv(s + 1)                             # RECV_BACKWARD: gradient of the output
            outputs[microbatch].backward(grad)             # BACKWARD
        else:
            outputs[microbatch].backward()                 # of the loss
        if s > 0:
            send(inputs[microbatch].grad, s - 1)           # SEND_BACKWARD

    2 stages, 3 microbatches:    stage 0   F0 F1 F2 .  .  B0 B1 B2       AFAB keeps 3 activations
                                 stage 1   .  F0 F1 F2 B0 B1 B2 .
                                 stage 0   F0 F1 .  B0 F2 B1 .  B2       1F1B keeps 2
                                 stage 1   .  F0 B0 F1 B1 F2 B2 .
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Kind of an action. The value is its name in messages."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHTS = "weight gradients"
    SEND_FORWARD = "send-forward"
    RECV_FORWARD = "recv-forward"
    SEND_BACKWARD = "send-backward"
    RECV_BACKWARD = "recv-backward"
    UNSHARD = "unshard"
    RESHARD = "reshard"


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHTS})


@dataclass(frozen=True, slots=True)
class Action:
    """An action of a stage. `chunk` is always a model chunk of the executing stage.

    * SEND_FORWARD sends the output of `chunk`; RECV_FORWARD receives its input.
    * SEND_BACKWARD sends the gradient of its input; RECV_BACKWARD receives the gradient of its
      output.
    * WEIGHTS computes the weight gradients that BACKWARD has deferred for the same microbatch and
      chunk.
    * UNSHARD starts to gather the parameters of `chunk`, and RESHARD frees them (only with full
      sharding).
    """

    kind: Kind
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind.value} of microbatch {self.microbatch}, chunk {self.chunk}"


@dataclass(frozen=True, slots=True)
class Channel:
    """An ordered one-way stream of messages of one kind between two stages.

    With two stages and several chunks, the next and the previous stage are on the same rank.
    Several streams then share a pair of ranks, distinguished by direction and source.
    """

    direction: str  # "forward" carries hidden states, "backward" carries their gradients
    source: int  # stage
    destination: int  # stage


def virtual_stage(stage: int, num_stages: int, chunk: int) -> int:
    """Return the index of the virtual stage for model chunk `chunk` of `stage`."""
    return chunk * num_stages + stage


def channel_of(action: Action, stage: int, num_stages: int) -> Channel:
    """Return the channel that a send or receive action of `stage` uses."""
    before = (stage - 1) % num_stages
    after = (stage + 1) % num_stages
    match action.kind:
        case Kind.SEND_FORWARD:
            return Channel("forward", stage, after)
        case Kind.RECV_FORWARD:
            return Channel("forward", before, stage)
        case Kind.SEND_BACKWARD:
            return Channel("backward", stage, before)
        case Kind.RECV_BACKWARD:
            return Channel("backward", after, stage)
    raise AssertionError(f"{action}: this action sends and receives nothing")


def one_f_one_b(
    stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> list[Action]:
    """Return a stage's computes in 1F1B (PipeDream-flush).

    After a warm-up of `num_stages - stage - 1` forward passes, forward and backward passes
    alternate. At most `num_stages - stage` activations are alive, and the bubble is `(num_stages -
    1) / num_microbatches` of the ideal time.

    Several chunks are interleaved (Narayanan et al. 2021, section 2.2): a group of `num_stages`
    microbatches passes through chunk 0, then chunk 1 and so on, before the next group starts. Full
    groups divide the bubble by `num_chunks`.

    Any number of microbatches works. If it is not a multiple of `num_stages`, the first group is
    short: the list is that for the next multiple, without the actions of the missing microbatches.
    Removing them removes waits and adds none. A short last group with the same warm-up would
    deadlock, for example with 4 stages, 3 chunks and 5 microbatches.
    """
    # initially include the missing microbatches, so that the warm-up counts full groups
    order = _forward_order(num_stages, num_microbatches, num_chunks)
    forwards = [Action(Kind.FORWARD, microbatch, chunk) for microbatch, chunk in order]
    # backward passes of a group go from the last chunk to the first
    backwards = []
    for microbatch, chunk in order:
        backwards.append(Action(Kind.BACKWARD, microbatch, num_chunks - 1 - chunk))
    # number of forward passes before the first gradient from a later stage can arrive
    warmup = num_stages - stage - 1
    if num_chunks > 1:
        warmup = 2 * warmup + (num_chunks - 1) * num_stages
    computes = forwards[:warmup]
    # alternate until all forward passes have run
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        computes += [forward, backward]
    # the remaining backward passes belong to the warm-up
    computes += backwards[max(0, len(forwards) - warmup) :]
    return [compute for compute in computes if compute.microbatch >= 0]


def zero_bubble(
    stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> list[Action]:
    """Return a stage's computes in 1F1B, plain or interleaved, with deferred weight gradients.

    This is ZB-H1 (Qi et al. 2023). No other stage needs the weight gradients, so they fill time in
    which a stage would otherwise be idle. Stage s defers the weight gradients of s backward passes.
    The last stage can therefore send its first gradients sooner, and does the deferred work while
    the first stages finish.

    With one chunk, the bubble is `(num_stages - 1) (forward + backward - weights) /
    num_microbatches` of the ideal time, where `backward` excludes the weight gradients. If all
    three take equally long, this is a third of 1F1B's bubble. A stage keeps `num_stages - stage`
    activations and the deferred products of `stage` backward passes. On stage 0, a backward pass
    that sends no gradient includes its weight gradients.
    """
    computes = one_f_one_b(stage, num_stages, num_microbatches, num_chunks)
    return _deferring(computes, stage, num_chunks)


def _deferring(computes: list[Action], stage: int, num_chunks: int) -> list[Action]:
    """Add a WEIGHTS action for every BACKWARD, `stage` backward passes later or at the end."""
    waiting: deque[Action] = deque()  # WEIGHTS actions to be placed
    found = []
    for compute in computes:
        found.append(compute)
        if compute.kind is Kind.BACKWARD and defers(stage, num_chunks):
            waiting.append(Action(Kind.WEIGHTS, compute.microbatch, compute.chunk))
            if len(waiting) > stage:
                found.append(waiting.popleft())
    return [*found, *waiting]


def one_at_a_time(
    stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> list[Action]:
    """Return a stage's computes in a schedule in which only one stage works at a time.

    Each microbatch passes forward and backward through all virtual stages before the next starts.
    """
    computes = []
    for microbatch in range(num_microbatches):
        for chunk in range(num_chunks):
            computes.append(Action(Kind.FORWARD, microbatch, chunk))
        for chunk in reversed(range(num_chunks)):
            computes.append(Action(Kind.BACKWARD, microbatch, chunk))
    return computes


def defers(stage: int, num_chunks: int) -> bool:
    """Return whether a stage defers weight gradients in `zero_bubble`.

    Stage 0 with a single chunk does not: it sends no gradients that another stage waits for.
    """
    return stage > 0 or num_chunks > 1


def forward_only(
    stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> list[Action]:
    """Return a stage's computes for evaluation: the forward passes, in the order of training."""
    computes = []
    for microbatch, chunk in _forward_order(num_stages, num_microbatches, num_chunks):
        if microbatch >= 0:
            computes.append(Action(Kind.FORWARD, microbatch, chunk))
    return computes


def _forward_order(
    num_stages: int, num_microbatches: int, num_chunks: int
) -> list[tuple[int, int]]:
    """Return (microbatch, chunk) in the order of forward passes, which is the same on all stages.

    With several chunks, the missing microbatches of a short first group have negative numbers. The
    list includes them, because the warm-up counts them.
    """
    missing = -num_microbatches % num_stages if num_chunks > 1 else 0
    order = []
    for first in range(-missing, num_microbatches, num_stages):
        # a group passes through all chunks before the next group starts
        group = range(first, min(first + num_stages, num_microbatches))
        for chunk in range(num_chunks):
            order += [(microbatch, chunk) for microbatch in group]
    return order


def with_messages(
    computes: list[Action], stage: int, num_stages: int, num_chunks: int, first_trained: int = 0
) -> list[Action]:
    """Add sends and receives to a list of computes, and return the new list.

    Each receive is right before its compute, and each send right after its compute. Virtual stages
    before `first_trained` need no gradient, so `first_trained` sends none.
    """
    last = num_stages * num_chunks - 1
    actions = []
    for compute in computes:
        place = virtual_stage(stage, num_stages, compute.chunk)
        receive = send = None
        # the ends of the model have only one neighbour; WEIGHTS needs no message
        if compute.kind is Kind.FORWARD:
            receive = Kind.RECV_FORWARD if place > 0 else None
            send = Kind.SEND_FORWARD if place < last else None
        elif compute.kind is Kind.BACKWARD:
            receive = Kind.RECV_BACKWARD if place < last else None
            send = Kind.SEND_BACKWARD if place > first_trained else None
        kinds = [kind for kind in (receive, compute.kind, send) if kind is not None]
        actions += [Action(kind, compute.microbatch, compute.chunk) for kind in kinds]
    return actions


def with_parameters(actions: list[Action]) -> list[Action]:
    """Add UNSHARD and RESHARD actions for sharded parameters, and return the new list.

    A chunk's parameters are gathered during the preceding compute and freed when neither the
    current nor the next compute uses them. At most two chunks are gathered at the same time. Chunks
    that alternate stay gathered, and a stage with a single chunk gathers it once per step.
    """
    computes = [action.chunk for action in actions if action.kind in COMPUTE]
    following = iter([*computes[1:], None])
    held: list[int] = []  # chunks that are gathered at this point
    found: list[Action] = []
    for action in actions:
        if action.kind in COMPUTE:
            # the chunks of this compute and of the next one, without duplicates
            wanted = [action.chunk]
            chunk_after = next(following)
            if chunk_after is not None and chunk_after != action.chunk:
                wanted.append(chunk_after)
            # free chunks first, so that the gather can use their memory
            for chunk in held:
                if chunk not in wanted:
                    found.append(Action(Kind.RESHARD, action.microbatch, chunk))
            for chunk in wanted:
                if chunk not in held:
                    found.append(Action(Kind.UNSHARD, action.microbatch, chunk))
            held = wanted
        found.append(action)
    return found + [Action(Kind.RESHARD, actions[-1].microbatch, chunk) for chunk in held]


def _first_zero_bubble(
    stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> list[Action]:
    computes = one_at_a_time(stage, num_stages, num_microbatches, num_chunks)
    return _deferring(computes, stage, num_chunks)


SCHEDULES: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    "1f1b": one_f_one_b,
    "zero_bubble": zero_bubble,
    "forward_only": forward_only,
    "first 1f1b": one_at_a_time,
    "first zero_bubble": _first_zero_bubble,
}
"""Functions that return a stage's computes in order, by schedule name.

The `first` schedules are for interleaved stages' first step, which compiles and loads kernels (see
runtime.py).
"""


def schedule(
    name: str,
    stage: int,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    first_trained: int = 0,
) -> list[Action]:
    """Return a stage's action list in the schedule called `name`.

    `first_trained` is the first virtual stage with a trained parameter. Earlier virtual stages need
    no gradients, so they only run forward passes. The remaining actions keep their order, because
    removing work from a list adds no waits.
    """
    assert num_microbatches > 0 and (num_chunks == 1 or num_stages > 1), (
        f"no schedule for {num_microbatches} microbatches on {num_stages} stages with {num_chunks} "
        "chunks each: `check` should have refused this configuration"
    )
    # drop backward passes and weight gradients of virtual stages that train nothing
    computes = []
    for action in SCHEDULES[name](stage, num_stages, num_microbatches, num_chunks):
        trained = virtual_stage(stage, num_stages, action.chunk) >= first_trained
        if trained or action.kind is Kind.FORWARD:
            computes.append(action)
    return with_messages(computes, stage, num_stages, num_chunks, first_trained)
