"""The simulator finds what is wrong with a wrong schedule."""

from __future__ import annotations

import pytest

from megacp.core.pipeline_parallel.schedules import Action, Kind, schedule
from tests.reference.schedule_simulator import DeadlockError, ScheduleError, simulate


def lists(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> list[list[Action]]:
    name = "1f1b" if num_chunks == 1 else "interleaved"
    return [schedule(name, stage, num_stages, num_microbatches, num_chunks) for stage in range(num_stages)]


def swapped(actions: list[Action], a: Action, b: Action) -> list[Action]:
    exchange = {a: b, b: a}
    return [exchange.get(action, action) for action in actions]


def test_a_deadlock_names_who_waits_for_whom() -> None:
    """Stage 1 wants microbatch 1 before it gives back microbatch 0, stage 0 the other way round."""
    zero, one = lists(2, 2)
    move = Action(Kind.RECV_BACKWARD, 0, 0)
    zero.remove(move)
    zero.insert(zero.index(Action(Kind.FORWARD, 1, 0)), move)
    one = [a for a in one if a.kind in (Kind.RECV_FORWARD, Kind.FORWARD)] + [
        a for a in one if a.kind in (Kind.BACKWARD, Kind.SEND_BACKWARD)
    ]
    with pytest.raises(DeadlockError) as caught:
        simulate([zero, one], 1)
    text = str(caught.value)
    assert "stage 0 waits for stage 1 at recv-backward of microbatch 0" in text
    assert "stage 1 waits for stage 0 at recv-forward of microbatch 1" in text


def test_a_full_send_window_can_deadlock() -> None:
    """Gradients of stage 1 pile up while stage 0 insists on finishing its forwards: it needs room for more than one."""
    zero, one = lists(2, 4)
    forwards = [a for a in zero if a.kind in (Kind.FORWARD, Kind.SEND_FORWARD)]
    zero = forwards + [a for a in zero if a not in forwards]
    simulate([zero, one], 1)
    simulate([zero, one], 1, send_window=3)
    with pytest.raises(DeadlockError, match="stage 0 waits for stage 1 at send-forward of microbatch 3"):
        simulate([zero, one], 1, send_window=1)


def test_messages_that_cross_on_a_channel_are_an_error() -> None:
    """Would catch two stages whose orders differ: on ranks the tensors would be taken for each other."""
    zero, one = lists(2, 4)
    wrong = swapped(one, Action(Kind.RECV_FORWARD, 2, 0), Action(Kind.RECV_FORWARD, 3, 0))
    with pytest.raises(ScheduleError, match=r"message 2 of the forward channel .* expects microbatch 3"):
        simulate([zero, wrong], 1)


def test_chunks_taken_for_each_other_are_an_error() -> None:
    """With two stages and two chunks both chunks' outputs leave on one channel."""
    zero, one = lists(2, 2, 2)
    exchange = {1: 0, 0: 1}
    wrong = [Action(a.kind, a.microbatch, exchange[a.chunk]) if a.kind is Kind.RECV_FORWARD else a for a in one]
    with pytest.raises(ScheduleError, match=r"virtual stage 0, but .* virtual stage 2"):
        simulate([zero, wrong], 2)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (Action(Kind.RECV_FORWARD, 1, 0), "without an earlier recv-forward|expects microbatch 2"),
        (Action(Kind.FORWARD, 1, 0), "without an earlier forward"),
        (Action(Kind.BACKWARD, 1, 0), "without an earlier backward"),
        (Action(Kind.SEND_BACKWARD, 2, 0), "stage 0 waits for stage 1 at recv-backward of microbatch 2"),
    ],
)
def test_a_missing_action_is_an_error(missing: Action, message: str) -> None:
    zero, one = lists(2, 3)
    assert missing in one
    one.remove(missing)
    with pytest.raises(ScheduleError, match=message):
        simulate([zero, one], 1)


def test_a_repeated_action_an_unread_message_and_a_lost_microbatch_are_errors() -> None:
    zero, one = lists(2, 3)
    with pytest.raises(ScheduleError, match="stage 1 runs twice: forward of microbatch 0, chunk 0"):
        simulate([zero, [*one[:2], one[1], *one[2:]]], 1)
    with pytest.raises(
        ScheduleError, match="1 messages of the backward channel from stage 1 to stage 0 are never received"
    ):
        simulate([zero[:-2], one], 1)
    with pytest.raises(ScheduleError, match="not every chunk runs the backward of the same microbatches"):
        simulate([zero[:-1], one], 1)


def test_times_are_those_of_a_hand_drawn_pipeline() -> None:
    """Two stages, two microbatches, forward 1 and backward 2: 6 of work each, one forward + backward of bubble."""
    result = simulate(lists(2, 2), 1, 1.0, 2.0)
    assert (result.makespan, result.busy, result.peak_in_flight) == (9.0, (6.0, 6.0), (2, 1))
    assert result.bubble == 0.5
    # A message takes 0.5: forward 0 there, backward 0 back, and backward 1 back after it.
    assert simulate(lists(2, 1), 1, 1.0, 2.0, message_time=0.5).makespan == 7.0
    # Durations by (virtual stage, microbatch): the second stage is twice as slow.
    slow = simulate(lists(2, 1), 1, lambda place, _: 1.0 + place, lambda place, _: 2.0 + 2 * place)
    assert (slow.makespan, slow.busy) == (9.0, (3.0, 6.0))
