"""Executes the action lists of all stages on paper: proves that a schedule ends, and measures it.

The rules are those of the runtime: a send never waits (unless a send window is given), a receive waits for its message,
a compute takes its time. Messages of a channel arrive in the order sent. A message that its receive does not expect is
an error, since real ranks would take it for the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megacp.core.pipeline_parallel.schedules import (
    COMPUTE,
    SENDS,
    Action,
    Channel,
    Kind,
    channel_of,
    virtual_stage,
)

Seconds = float | Callable[[int, int], float]
"""One duration for all, or a function of (virtual stage, microbatch): packs and stages may differ."""


class ScheduleError(Exception):
    """The action lists cannot be executed as written."""


class DeadlockError(ScheduleError):
    """Every unfinished stage waits for another one."""


@dataclass(frozen=True)
class Simulation:
    """What an execution of the lists gave; times in the unit of the given durations, lists indexed by stage."""

    makespan: float
    busy: tuple[float, ...]  # time spent in forwards and backwards
    peak_in_flight: tuple[int, ...]  # most (microbatch, chunk) forwarded and not yet backwarded at once
    peak_put_off: tuple[int, ...]  # most whose weight gradients wait for an action of their own

    @property
    def bubble(self) -> float:
        """Idle time of the busiest stage relative to its busy time, the ideal: 0.0 is a perfect pipeline."""
        return self.makespan / max(self.busy) - 1.0


@dataclass
class _Stream:
    """One channel's messages: what was sent and when it is there, and when each was taken."""

    sent: list[tuple[tuple[int, int], float]] = field(
        default_factory=list
    )  # ((microbatch, source virtual stage), time)
    taken: list[float] = field(default_factory=list)


@dataclass
class _Stage:
    """One stage on its way through its list."""

    actions: Sequence[Action]
    next: int = 0
    clock: float = 0.0
    busy: float = 0.0
    peak: int = 0
    held: set[tuple[int, int]] = field(default_factory=set)  # forwards whose backward has not run
    deferred: set[tuple[int, int]] = field(default_factory=set)  # backwards whose weight gradients have not run
    peak_put_off: int = 0
    done: set[Action] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.puts_off = {(a.microbatch, a.chunk) for a in self.actions if a.kind is Kind.WEIGHTS}


def in_flight_bound(stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> int:
    """Most (microbatch, chunk) activations that a stage holds at once in training: its warm-up, and one more."""
    after = num_stages - stage - 1
    warmup = after if num_chunks == 1 else 2 * after + (num_chunks - 1) * num_stages
    return min(warmup + 1, num_microbatches * num_chunks)


def simulate(
    stages: Sequence[Sequence[Action]],
    num_chunks: int,
    forward_time: Seconds = 1.0,
    backward_time: Seconds = 1.0,
    *,
    weights_time: Seconds = 1.0,
    message_time: float = 0.0,
    send_window: int | None = None,
) -> Simulation:
    """Execute the lists of all stages (`stages[i]` is stage i's list) until they end.

    `backward_time` is without weight gradients where these have actions of their own on some stage, `weights_time`
    each; a backward of such lists without that action takes both.
    `send_window` is the most messages of a channel sent and not yet received before the next send waits; None for no
    limit. Raises DeadlockError when nobody can go on, ScheduleError when a message meets the wrong receive, is never
    received, an action runs twice or before what it needs, or a (microbatch, chunk) lacks a forward.
    """
    run = _Run(
        num_chunks,
        {Kind.FORWARD: forward_time, Kind.BACKWARD: backward_time, Kind.WEIGHTS: weights_time},
        message_time,
        send_window,
        [_Stage(actions) for actions in stages],
        any(action.kind is Kind.WEIGHTS for actions in stages for action in actions),
    )
    while sum(run.advance(stage) for stage in range(len(stages))):
        pass
    run.check_ended()
    return Simulation(
        makespan=max(stage.clock for stage in run.stages),
        busy=tuple(stage.busy for stage in run.stages),
        peak_in_flight=tuple(stage.peak for stage in run.stages),
        peak_put_off=tuple(stage.peak_put_off for stage in run.stages),
    )


@dataclass
class _Run:
    num_chunks: int
    times: dict[Kind, Seconds]
    message_time: float
    send_window: int | None
    stages: list[_Stage]
    apart: bool
    """Weight gradients have a time of their own, also inside of a backward."""
    streams: dict[Channel, _Stream] = field(default_factory=dict)

    def advance(self, stage: int) -> int:
        """Run one stage until it has to wait; the number of actions it ran."""
        state = self.stages[stage]
        before = state.next
        while state.next < len(state.actions):
            action = state.actions[state.next]
            if self.waits_for(stage, action) is not None:
                break
            self.check_ready(stage, action)
            self.execute(stage, action)
            state.done.add(action)
            state.next += 1
        return state.next - before

    def waits_for(self, stage: int, action: Action) -> int | None:
        """The stage that must do something before `action` can go on, or None."""
        if action.kind in COMPUTE:
            return None
        channel = channel_of(action, stage, len(self.stages))
        stream = self.streams.setdefault(channel, _Stream())
        if action.kind in SENDS:
            full = self.send_window is not None and len(stream.sent) - len(stream.taken) >= self.send_window
            return channel.destination if full else None
        return channel.source if len(stream.taken) == len(stream.sent) else None

    def execute(self, stage: int, action: Action) -> None:
        state = self.stages[stage]
        place = virtual_stage(stage, len(self.stages), action.chunk)
        key = (action.microbatch, action.chunk)
        if action.kind in COMPUTE:
            inside = action.kind is Kind.BACKWARD and key not in state.puts_off
            parts = [self.times[action.kind]] + [self.times[Kind.WEIGHTS]] * (inside and self.apart)
            duration = sum(given(place, action.microbatch) if callable(given) else given for given in parts)
            state.clock += duration
            state.busy += duration
            if action.kind is Kind.FORWARD:
                state.held.add(key)
                state.peak = max(state.peak, len(state.held))
            elif action.kind is Kind.BACKWARD:
                state.held.discard(key)
                # with an action of their own weight gradients wait for it, if only for a moment
                state.deferred |= {key} & state.puts_off
            else:
                state.deferred.discard(key)
                # counted after the next of them: one that follows its backward at once has not waited
                state.peak_put_off = max(state.peak_put_off, len(state.deferred))
            return
        channel = channel_of(action, stage, len(self.stages))
        stream = self.streams[channel]
        if action.kind in SENDS:
            if self.send_window is not None and len(stream.sent) >= self.send_window:
                state.clock = max(state.clock, stream.taken[len(stream.sent) - self.send_window])
            stream.sent.append(((action.microbatch, place), state.clock + self.message_time))
            return
        source = place - 1 if action.kind is Kind.RECV_FORWARD else place + 1
        (label, arrival), number = stream.sent[len(stream.taken)], len(stream.taken)
        if label != (action.microbatch, source):
            raise ScheduleError(
                f"message {number} of the {channel} is microbatch {label[0]} of virtual stage {label[1]}, but the "
                f"receiver expects microbatch {action.microbatch} of virtual stage {source}"
            )
        state.clock = max(state.clock, arrival)
        stream.taken.append(state.clock)

    def check_ready(self, stage: int, action: Action) -> None:
        """Raise ScheduleError when the stage has not yet done what `action` needs, or has done it before."""
        done = self.stages[stage].done
        if action in done:
            raise ScheduleError(f"stage {stage} runs twice: {action}")
        for needed in self.needs(stage, action):
            if Action(needed, action.microbatch, action.chunk) not in done:
                raise ScheduleError(f"stage {stage} runs {action} without an earlier {needed.value}")

    def needs(self, stage: int, action: Action) -> list[Kind]:
        """What the same stage must have done for the same (microbatch, chunk) before `action`."""
        place, last = virtual_stage(stage, len(self.stages), action.chunk), len(self.stages) * self.num_chunks - 1
        match action.kind:
            case Kind.FORWARD:
                return [Kind.RECV_FORWARD] if place > 0 else []
            case Kind.BACKWARD:
                return [Kind.FORWARD] + ([Kind.RECV_BACKWARD] if place < last else [])
            case Kind.WEIGHTS:
                return [Kind.BACKWARD]
            case Kind.SEND_FORWARD | Kind.RECV_BACKWARD:
                return [Kind.FORWARD]
            case Kind.SEND_BACKWARD:
                return [Kind.BACKWARD]
        return []

    def check_ended(self) -> None:
        """Raise unless every list was executed, every message was received and all chunks saw the same microbatches."""
        waiting = [stage for stage, state in enumerate(self.stages) if state.next < len(state.actions)]
        if waiting:
            lines = []
            for stage in waiting:
                action = self.stages[stage].actions[self.stages[stage].next]
                lines.append(f"stage {stage} waits for stage {self.waits_for(stage, action)} at {action}")
            raise DeadlockError("deadlock: " + "; ".join(lines))
        for channel, stream in self.streams.items():
            if len(stream.taken) < len(stream.sent):
                raise ScheduleError(
                    f"{len(stream.sent) - len(stream.taken)} messages of the {channel} are never received"
                )
        for kind in COMPUTE:
            seen = [
                {a.microbatch for a in state.done if a.kind is kind and a.chunk == chunk}
                for state in self.stages
                for chunk in range(self.num_chunks)
                if kind is not Kind.WEIGHTS or any(a.kind is kind for a in state.actions)
            ]
            if any(microbatches != seen[0] for microbatches in seen):
                raise ScheduleError(f"not every chunk runs the {kind.value} of the same microbatches")
