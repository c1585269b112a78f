"""Pipeline schedules as data: pure functions from (stage, sizes) to the list of actions this stage
executes in order.

A schedule is only an order of computes: forwards, backwards, and deferred weight gradients. The
messages follow from it: every input is received right before the compute that needs it, every
output sent right after. All stages run their forwards in one common order, and their backwards too.
So the k-th send of a channel always meets the k-th receive.

Virtual stage `v = chunk * num_stages + stage` holds the v-th part of the layers. Virtual stage 0
receives nothing in forward and sends nothing in backward; the last virtual stage sends nothing in
forward and receives nothing in backward. Where the first virtual stages train nothing (low-rank
pairs only on later layers), they have no backward, and the first trained one sends no gradient.

The simplest one is "all forwards, all backwards" (AFAB). This is all that a stage does under it;
1F1B is the same actions in another order, with fewer activations alive:

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

    2 stages, 3 microbatches:    stage 0   F0 F1 F2 .  .  B0 B1 B2       AFAB holds 3 activations
                                 stage 1   .  F0 F1 F2 B0 B1 B2 .
                                 stage 0   F0 F1 .  B0 F2 B1 .  B2       1F1B holds 2
                                 stage 1   .  F0 B0 F1 B1 F2 B2 .
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What one action does. The value is its name in messages for people."""

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
    """One step of one stage. `chunk` is always the executing stage's own model chunk.

    SEND_FORWARD sends the output of `chunk`, RECV_FORWARD receives its input. SEND_BACKWARD sends
    the gradient of its input, RECV_BACKWARD receives that of its output. WEIGHTS computes the
    weight gradients that BACKWARD of the same microbatch and chunk has deferred. UNSHARD starts to
    gather the parameters of `chunk`, RESHARD frees them (only full sharding).
    """

    kind: Kind
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind.value} of microbatch {self.microbatch}, chunk {self.chunk}"


@dataclass(frozen=True, slots=True)
class Channel:
    """An ordered one-way stream of messages between two stages, one kind of message each.

    With two stages and several chunks the next and the previous stage are the same rank. So outputs
    of the one and inputs of the other cross on one pair of ranks; direction and source keep the
    streams apart.
    """

    direction: str  # "forward" carries hidden states, "backward" carries their gradients
    source: int  # stage
    destination: int  # stage


def virtual_stage(stage: int, num_stages: int, chunk: int) -> int:
    """Index of the part of the layers that model chunk `chunk` of `stage` holds."""
    return chunk * num_stages + stage


def channel_of(action: Action, stage: int, num_stages: int) -> Channel:
    """The channel a send or receive of `stage` uses."""
    before, after = (stage - 1) % num_stages, (stage + 1) % num_stages
    match action.kind:
        case Kind.SEND_FORWARD:
            return Channel("forward", stage, after)
        case Kind.RECV_FORWARD:
            return Channel("forward", before, stage)
        case Kind.SEND_BACKWARD:
            return Channel("backward", stage, before)
        case Kind.RECV_BACKWARD:
            return Channel("backward", after, stage)
    raise AssertionError(f"{action} moves no message")


def one_f_one_b(
    stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> list[Action]:
    """1F1B (PipeDream-flush): `num_stages - stage - 1` forwards, then one forward and one backward
    in turn.

    At most `num_stages - stage` activations are in flight and the bubble is `(num_stages - 1) /
    num_microbatches` of the ideal time. With several chunks it is interleaved (Narayanan et al.
    2021, section 2.2): a group of `num_stages` microbatches passes chunk 0, then chunk 1, ..., then
    the next group starts, and full groups divide the bubble by `num_chunks`.

    Any number of microbatches works. If the groups do not come out even, the first one is short:
    the list is that of the next multiple of `num_stages` without the actions of the missing
    microbatches, which removes waits and adds none. A short last group under the same warm-up
    deadlocks, for example with 4 stages, 3 chunks and 5 microbatches.
    """
    order = _forward_order(num_stages, num_microbatches, num_chunks)
    forwards = [Action(Kind.FORWARD, microbatch, chunk) for microbatch, chunk in order]
    # Backward passes the chunks of a group from the last to the first.
    backwards = [
        Action(Kind.BACKWARD, microbatch, num_chunks - 1 - chunk) for microbatch, chunk in order
    ]
    warmup = num_stages - stage - 1
    if num_chunks > 1:
        warmup = 2 * warmup + (num_chunks - 1) * num_stages
    computes = forwards[:warmup]
    for forward, backward in zip(
        forwards[warmup:], backwards, strict=False
    ):  # until the forwards are over
        computes += [forward, backward]
    computes += backwards[max(0, len(forwards) - warmup) :]  # of the forwards that were ahead
    return [compute for compute in computes if compute.microbatch >= 0]


def zero_bubble(
    stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> list[Action]:
    """1F1B, plain or interleaved, with weight gradients that wait until a stage would be idle
    (ZB-H1: Qi et al. 2023).

    No other stage needs them. Stage s defers those of s backwards: the last stage hands its first
    gradients on sooner, and has this work left while the first stages finish. With one chunk the
    bubble is `(num_stages - 1) (forward + backward - weights) / num_microbatches` of the ideal
    time, where backward is without weights: a third of 1F1B's when all three take as long. A stage
    holds `num_stages - stage` activations and what `stage` backwards have deferred. On stage 0 a
    backward that hands nothing on has its weight gradients inside.
    """
    return _deferring(
        one_f_one_b(stage, num_stages, num_microbatches, num_chunks), stage, num_chunks
    )


def _deferring(computes: list[Action], stage: int, num_chunks: int) -> list[Action]:
    waiting: deque[Action] = deque()
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
    """Each microbatch forward through all virtual stages, and back, before the next one: a stage
    computes alone.
    """
    chunks = range(num_chunks)
    return [
        Action(kind, microbatch, chunk)
        for microbatch in range(num_microbatches)
        for kind, order in ((Kind.FORWARD, chunks), (Kind.BACKWARD, reversed(chunks)))
        for chunk in order
    ]


def defers(stage: int, num_chunks: int) -> bool:
    """Whether a stage of `zero_bubble` has weight gradients that wait: where some backward hands a
    gradient on.
    """
    return stage > 0 or num_chunks > 1


def forward_only(
    stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> list[Action]:
    """Only forwards, for evaluation, in the order training runs them."""
    order = _forward_order(num_stages, num_microbatches, num_chunks)
    return [
        Action(Kind.FORWARD, microbatch, chunk) for microbatch, chunk in order if microbatch >= 0
    ]


def _forward_order(
    num_stages: int, num_microbatches: int, num_chunks: int
) -> list[tuple[int, int]]:
    """(microbatch, chunk) in the order of the forwards, the same on every stage.

    With several chunks the missing microbatches of a short first group are there with negative
    numbers, because the warm-up counts them.
    """
    missing = -num_microbatches % num_stages if num_chunks > 1 else 0
    groups = range(-missing, num_microbatches, num_stages)
    return [
        (microbatch, chunk)
        for first in groups
        for chunk in range(num_chunks)
        for microbatch in range(first, min(first + num_stages, num_microbatches))
    ]


def with_messages(
    computes: list[Action], stage: int, num_stages: int, num_chunks: int, first_trained: int = 0
) -> list[Action]:
    """Add the messages to any order of computes: each receive right before its compute, each send
    right after.

    No virtual stage before `first_trained` takes a gradient, so that one sends none.
    """
    last = num_stages * num_chunks - 1
    actions = []
    for compute in computes:
        place = virtual_stage(stage, num_stages, compute.chunk)
        receive = send = None
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
    """The list with the gathering and freeing of sharded parameters, chunk by chunk.

    A chunk's parameters are there for its computes, and on their way while the compute before the
    first of these runs: those of at most two chunks at once. Chunks that take turns stay, so a
    stage with one chunk gathers once a step.
    """
    computes = [action.chunk for action in actions if action.kind in COMPUTE]
    following = iter([*computes[1:], None])
    held: list[int] = []
    found: list[Action] = []
    for action in actions:
        if action.kind in COMPUTE:
            wanted = [
                chunk
                for chunk in dict.fromkeys((action.chunk, next(following)))
                if chunk is not None
            ]
            found += [
                Action(Kind.RESHARD, action.microbatch, chunk)
                for chunk in held
                if chunk not in wanted
            ]
            found += [
                Action(Kind.UNSHARD, action.microbatch, chunk)
                for chunk in wanted
                if chunk not in held
            ]
            held = wanted
        found.append(action)
    return found + [Action(Kind.RESHARD, actions[-1].microbatch, chunk) for chunk in held]


SCHEDULES: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    "1f1b": one_f_one_b,
    "zero_bubble": zero_bubble,
    "forward_only": forward_only,
    "first 1f1b": one_at_a_time,
    "first zero_bubble": lambda stage, *sizes: _deferring(
        one_at_a_time(stage, *sizes), stage, sizes[-1]
    ),
}
"""Computes of a stage, in order. `first`: of the step in which interleaved stages meet their
kernels (runtime.py).
"""


def schedule(
    name: str,
    stage: int,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    first_trained: int = 0,
) -> list[Action]:
    """Return the action list of one stage, by the schedule's name.

    `first_trained` is the first virtual stage with a trained parameter. Earlier ones need no
    gradient of anything, so they run forwards only. The other actions keep their order: dropping
    work from a list adds no wait.
    """
    assert num_microbatches > 0 and (num_chunks == 1 or num_stages > 1), (
        "sizes that the checks refuse"
    )
    computes = [
        action
        for action in SCHEDULES[name](stage, num_stages, num_microbatches, num_chunks)
        if action.kind is Kind.FORWARD
        or virtual_stage(stage, num_stages, action.chunk) >= first_trained
    ]
    return with_messages(computes, stage, num_stages, num_chunks, first_trained)
