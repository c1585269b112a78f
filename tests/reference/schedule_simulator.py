"""Simulated execution of the action lists of all stages. It proves that a schedule finishes and
measures it.

The rules are those of the runtime: a send never waits (unless there is a send window), a receive
waits for its message, and a compute takes its time. Messages of a channel arrive in the order of
their sends. An unexpected message is an error, because real ranks would mistake it for the expected
one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from megacp.engine.pipeline_parallel.schedules import (
    COMPUTE,
    Action,
    Channel,
    Kind,
    channel_of,
    virtual_stage,
)

SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})


@dataclass(frozen=True)
class Simulation:
    """Result of a simulation. Times have the unit of the given durations, and lists are indexed by
    stage.
    """

    makespan: float
    busy: tuple[float, ...]  # time spent in forwards and backwards
    peak_in_flight: tuple[
        int, ...
    ]  # largest number of (microbatch, chunk) with a forward but no backward yet
    # largest number whose weight gradients wait for a separate action
    peak_put_off: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Idle time of the busiest stage relative to its busy time; 0.0 is a perfect pipeline."""
        return self.makespan / max(self.busy) - 1.0


@dataclass
class _Stage:
    """One stage on its way through its list; keys are (microbatch, chunk)."""

    actions: Sequence[Action]
    clock: float = 0.0
    busy: float = 0.0
    peak: int = 0
    peak_put_off: int = 0
    held: set[tuple[int, int]] = field(default_factory=set)  # forwards whose backward has not run
    deferred: set[tuple[int, int]] = field(
        default_factory=set
    )  # backwards whose weight gradients have not run
    done: set[Action] = field(default_factory=set)

    def compute(self, action: Action, duration: float, puts_off: bool) -> None:
        """Execute a compute.

        `puts_off` means that the list has a separate action for its weight gradients.
        """
        key = (action.microbatch, action.chunk)
        self.clock, self.busy = self.clock + duration, self.busy + duration
        if action.kind is Kind.FORWARD:
            self.held.add(key)
            self.peak = max(self.peak, len(self.held))
        elif action.kind is Kind.BACKWARD:
            self.held.discard(key)
            self.deferred |= {key} if puts_off else set()
        else:
            self.deferred.discard(key)
            # count after the next compute: weight gradients that follow their backward at once do
            # not wait
            self.peak_put_off = max(self.peak_put_off, len(self.deferred))


def in_flight_bound(stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> int:
    """Return the largest number of (microbatch, chunk) activations of a stage: its warm-up plus
    one.
    """
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
    first_trained: int = 0,
) -> Simulation:
    """Execute the lists of all stages (`stages[i]` is stage i's list) until they end.

    `backward_time` excludes weight gradients if any stage has separate actions for them, each of
    which takes `weights_time`; in lists without such actions, a backward takes both times.
    `send_window` is the maximum number of messages of a channel that are sent but not received
    before the next send waits. Virtual stages before `first_trained` have no backward and store
    nothing for it.

    An assertion fails if no stage can continue, if a message meets the wrong receive or is never
    received, or if an action runs twice or before the actions that it needs.
    """
    times = {Kind.FORWARD: forward_time, Kind.BACKWARD: backward_time, Kind.WEIGHTS: weights_time}
    runs, count = [_Stage(actions) for actions in stages], len(stages)
    puts_off = [
        {(a.microbatch, a.chunk) for a in actions if a.kind is Kind.WEIGHTS} for actions in stages
    ]
    sent: dict[Channel, list[tuple[int, int, float]]] = defaultdict(
        list
    )  # microbatch, virtual stage of sender, time
    taken: dict[Channel, list[float]] = defaultdict(list)

    def goes_on(stage: int) -> bool:
        """Run the next action of a stage, unless another stage must act first."""
        run = runs[stage]
        if len(run.done) == len(run.actions):
            return False
        action = run.actions[len(run.done)]
        place = virtual_stage(stage, count, action.chunk)
        if action.kind in COMPUTE:
            deferred = (action.microbatch, action.chunk) in puts_off[stage]
            both = action.kind is Kind.BACKWARD and not deferred and any(puts_off)
            run.compute(action, times[action.kind] + (weights_time if both else 0.0), deferred)
            if place < first_trained:
                assert action.kind is Kind.FORWARD, (
                    f"stage {stage} trains nothing and runs: {action}"
                )
                run.held.discard((action.microbatch, action.chunk))
        else:
            channel = channel_of(action, stage, count)
            out, back = sent[channel], taken[channel]
            if action.kind in SENDS:
                if send_window is not None and len(out) - len(back) >= send_window:
                    return False
                if send_window is not None and len(out) >= send_window:
                    run.clock = max(run.clock, back[len(out) - send_window])
                out.append((action.microbatch, place, run.clock))
            elif len(out) == len(back):
                return False
            else:
                microbatch, sender, arrival = out[len(back)]
                source = place - 1 if action.kind is Kind.RECV_FORWARD else place + 1
                assert (microbatch, sender) == (action.microbatch, source), (
                    f"the {channel} brings another message"
                )
                run.clock = max(run.clock, arrival)
                back.append(run.clock)
        assert action not in run.done, f"stage {stage} runs twice: {action}"
        for needed in _needs(action.kind, place > 0, place < count * num_chunks - 1):
            before = Action(needed, action.microbatch, action.chunk)
            assert before in run.done, (
                f"stage {stage} runs {action} without an earlier {needed.value}"
            )
        run.done.add(action)
        return True

    # a list, so that every stage gets a turn
    while any([goes_on(stage) for stage in range(count)]):
        pass
    for run in runs:
        assert len(run.done) == len(run.actions), f"a deadlock before {run.actions[len(run.done)]}"
        assert (
            not run.held
            and not run.deferred
            or not any(a.kind is Kind.BACKWARD for a in run.actions)
        )
    assert all(len(taken[channel]) == len(out) for channel, out in sent.items()), (
        "a message nobody receives"
    )
    return Simulation(
        makespan=max(run.clock for run in runs),
        busy=tuple(run.busy for run in runs),
        peak_in_flight=tuple(run.peak for run in runs),
        peak_put_off=tuple(run.peak_put_off for run in runs),
    )


def _needs(kind: Kind, has_before: bool, has_after: bool) -> list[Kind]:
    """Return the earlier actions for the same (microbatch, chunk) that an action needs.

    The flags say whether there are stages before and after.
    """
    return {
        Kind.FORWARD: [Kind.RECV_FORWARD] * has_before,
        Kind.BACKWARD: [Kind.FORWARD] + [Kind.RECV_BACKWARD] * has_after,
        Kind.WEIGHTS: [Kind.BACKWARD],
        Kind.SEND_BACKWARD: [Kind.BACKWARD],
        Kind.SEND_FORWARD: [Kind.FORWARD],
        Kind.RECV_BACKWARD: [Kind.FORWARD],
    }.get(kind, [])


def hangs_where_computes_wait(stages: Sequence[Sequence[Action]]) -> list[Action]:
    """Return the actions at which stages wait forever if every compute waits for the whole device;
    [] if all end.

    On NCCL a message is a kernel on both sides. A compute that waits for its device waits for every
    message that its stage has posted, until the peer arrives. A receive is posted right before it
    is needed.
    """
    at, sent, asked = [0] * len(stages), Counter[Channel](), Counter[Channel]()

    def goes_on(stage: int) -> bool:
        action = stages[stage][at[stage]] if at[stage] < len(stages[stage]) else None
        if action is None:
            return False
        if action.kind in COMPUTE:
            mine = [
                channel
                for channel in sent | asked
                if stage in (channel.source, channel.destination)
            ]
            late = [
                c for c in mine if (sent[c] > asked[c] if c.source == stage else asked[c] > sent[c])
            ]
            if late:
                return False
        elif action.kind in SENDS | {Kind.RECV_FORWARD, Kind.RECV_BACKWARD}:
            (sent if action.kind in SENDS else asked)[channel_of(action, stage, len(stages))] += 1
        at[stage] += 1
        return True

    while any([goes_on(stage) for stage in range(len(stages))]):
        pass
    return [
        actions[place] for actions, place in zip(stages, at, strict=True) if place < len(actions)
    ]
