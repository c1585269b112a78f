"""Executes the action lists of all stages on paper: proves that a schedule ends, and measures it.

The rules are those of the runtime: a send never waits (unless a send window is given), a receive waits for its message,
a compute takes its time. Messages of a channel arrive in the order sent. A message that its receive does not expect is
an error, since real ranks would take it for the other one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
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
class _Stage:
    """One stage on its way through its list."""

    actions: Sequence[Action]
    clock: float = 0.0
    busy: float = 0.0
    peak: int = 0
    peak_put_off: int = 0
    held: set[tuple[int, int]] = field(default_factory=set)  # forwards whose backward has not run
    deferred: set[tuple[int, int]] = field(default_factory=set)  # backwards whose weight gradients have not run
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
    forward_time: float = 1.0,
    backward_time: float = 1.0,
    *,
    weights_time: float = 1.0,
    send_window: int | None = None,
) -> Simulation:
    """Execute the lists of all stages (`stages[i]` is stage i's list) until they end.

    `backward_time` is without weight gradients where these have actions of their own on some stage, `weights_time`
    each; a backward of such lists without that action takes both. `send_window` is the most messages of a channel sent
    and not yet received before the next send waits. An assertion fails when nobody can go on, and when a message meets
    the wrong receive, is never received, or an action runs twice or before what it needs.
    """
    times = {Kind.FORWARD: forward_time, Kind.BACKWARD: backward_time, Kind.WEIGHTS: weights_time}
    run = _Run(num_chunks, times, send_window, [_Stage(actions) for actions in stages])
    while sum(run.advance(stage) for stage in range(len(stages))):
        pass
    for state in run.stages:
        assert len(state.done) == len(state.actions), f"a deadlock before {state.actions[len(state.done)]}"
        assert not state.held and not state.deferred or not any(a.kind is Kind.BACKWARD for a in state.actions)
    assert all(len(run.taken[channel]) == len(sent) for channel, sent in run.sent.items()), "a message nobody receives"
    return Simulation(
        makespan=max(stage.clock for stage in run.stages),
        busy=tuple(stage.busy for stage in run.stages),
        peak_in_flight=tuple(stage.peak for stage in run.stages),
        peak_put_off=tuple(stage.peak_put_off for stage in run.stages),
    )


@dataclass
class _Run:
    num_chunks: int
    times: dict[Kind, float]
    send_window: int | None
    stages: list[_Stage]
    sent: dict[Channel, list[tuple[int, int, float]]] = field(default_factory=lambda: defaultdict(list))
    """Of each channel the messages: microbatch, virtual stage of the sender, time."""
    taken: dict[Channel, list[float]] = field(default_factory=lambda: defaultdict(list))

    def advance(self, stage: int) -> int:
        """Run one stage until it has to wait; the number of actions it ran."""
        state = self.stages[stage]
        before = len(state.done)
        while len(state.done) < len(state.actions):
            action = state.actions[len(state.done)]
            if self.waits(stage, action):
                break
            assert action not in state.done, f"stage {stage} runs twice: {action}"
            for needed in self.needs(stage, action):
                needs = Action(needed, action.microbatch, action.chunk)
                assert needs in state.done, f"stage {stage} runs {action} without an earlier {needed.value}"
            if action.kind in COMPUTE:
                self.compute(state, action)
            else:
                self.communicate(stage, action)
            state.done.add(action)
        return len(state.done) - before

    def waits(self, stage: int, action: Action) -> bool:
        """Whether another stage must do something before `action` can go on."""
        if action.kind in COMPUTE:
            return False
        channel = channel_of(action, stage, len(self.stages))
        under_way = len(self.sent[channel]) - len(self.taken[channel])
        if action.kind in SENDS:
            return self.send_window is not None and under_way >= self.send_window
        return under_way == 0

    def compute(self, state: _Stage, action: Action) -> None:
        key = (action.microbatch, action.chunk)
        duration = self.times[action.kind]
        if action.kind is Kind.BACKWARD and key not in state.puts_off and any(s.puts_off for s in self.stages):
            duration += self.times[Kind.WEIGHTS]
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

    def communicate(self, stage: int, action: Action) -> None:
        state = self.stages[stage]
        place = virtual_stage(stage, len(self.stages), action.chunk)
        channel = channel_of(action, stage, len(self.stages))
        sent, taken = self.sent[channel], self.taken[channel]
        if action.kind in SENDS:
            if self.send_window is not None and len(sent) >= self.send_window:
                state.clock = max(state.clock, taken[len(sent) - self.send_window])
            sent.append((action.microbatch, place, state.clock))
            return
        source = place - 1 if action.kind is Kind.RECV_FORWARD else place + 1
        microbatch, sender, arrival = sent[len(taken)]
        assert (microbatch, sender) == (action.microbatch, source), f"the {channel} brings another message"
        state.clock = max(state.clock, arrival)
        taken.append(state.clock)

    def needs(self, stage: int, action: Action) -> list[Kind]:
        """What the same stage must have done for the same (microbatch, chunk) before `action`."""
        place, last = virtual_stage(stage, len(self.stages), action.chunk), len(self.stages) * self.num_chunks - 1
        match action.kind:
            case Kind.FORWARD:
                return [Kind.RECV_FORWARD] if place > 0 else []
            case Kind.BACKWARD:
                return [Kind.FORWARD] + ([Kind.RECV_BACKWARD] if place < last else [])
            case Kind.WEIGHTS | Kind.SEND_BACKWARD:
                return [Kind.BACKWARD]
            case Kind.SEND_FORWARD | Kind.RECV_BACKWARD:
                return [Kind.FORWARD]
        return []
