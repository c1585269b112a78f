"""The record of calls: what it costs, what it says, and how the answers of all ranks become a report."""

from __future__ import annotations

import contextlib
import io
import time

import pytest
import torch

from megacp.core.distributed.calls import Calls
from megacp.core.distributed.collectives import all_gather, all_reduce, start_all_to_all
from megacp.core.distributed.failure_report import report_failure
from megacp.core.distributed.grid import ProcessGrid
from megacp.core.distributed.hang_report import report
from megacp.core.distributed.p2p import irecv, isend
from megacp.core.distributed.watch import Watch, calls_of, group_name
from tests.ranks import grid, run_ranks


def test_a_call_costs_microseconds() -> None:
    """Would catch a record that a training step notices: some thousand calls a second."""
    calls, x = Calls(), torch.zeros(8)
    best = min(_timed(calls, x) for _ in range(5))
    assert best < 10e-6


def _timed(calls: Calls, x: torch.Tensor) -> float:
    begun = time.perf_counter()
    for _ in range(2000):
        calls.begin("all_gather", x).done = True
    return (time.perf_counter() - begun) / 2000


def _recorded(rank: int, world_size: int) -> list[object]:
    axis = grid(dp=world_size).dp
    axis.calls.__init__()  # type: ignore[misc]  # other tests of this pool have used it
    all_reduce(torch.ones(3), axis)
    all_gather(torch.ones(3), axis)
    pending = start_all_to_all(torch.ones(4), axis)
    under_way = [(call.name, call.number, call.bytes) for call in axis.calls.under_way()]
    pending.wait()
    sent = isend(torch.ones(5), axis, 1) if rank == 0 else irecv(torch.empty(5), axis, 0)
    sent.wait()
    return [under_way, axis.calls.collectives, dict(axis.calls.messages), len(axis.calls.under_way())]


def test_all_ranks_number_their_collectives_alike_and_messages_by_peer() -> None:
    first, second = run_ranks(_recorded, 2)
    assert first == [[("all_to_all", 3, 16)], 3, {("send", 1): 1}, 0]
    assert second == [[("all_to_all", 3, 16)], 3, {("receive", 0): 1}, 0]


def answer(number: int, under_way: list[list[object]], stack: str = "wait") -> dict[str, object]:
    state = {"axis": "tp", "ranks": [0, 1, 2], "number": number, "messages": [], "under_way": under_way}
    return {"stack": [["a.py", 7, stack, "x.wait()"]], "calls": {"g": state}}


def test_the_report_says_who_has_not_called_and_tells_equal_stacks_once() -> None:
    waiting = [["all_reduce", 9, 4096, None, 3.0]]
    text = report({0: answer(9, waiting), 1: answer(9, waiting), 2: answer(8, [], "sleep")}, [])
    assert text == (
        "calls under way:\n"
        "  all_reduce, call 9 on tp (ranks 0, 1, 2): 4,096 bytes, 3.0 s in ranks 0, 1; not called by rank 2\n"
        "stacks:\n"
        '  ranks 0, 1:\n    File "a.py", line 7, in wait\n      x.wait()\n'
        '  rank 2:\n    File "a.py", line 7, in sleep\n      x.wait()'
    )


def test_the_report_names_ranks_that_do_not_answer_and_calls_that_differ_in_size() -> None:
    first, second = answer(9, [["all_reduce", 9, 8, None, 3.0]]), answer(9, [["all_reduce", 9, 16, None, 3.0]])
    text = report({0: first, 1: second}, [2])
    assert "8 or 16 bytes, 3.0 s in ranks 0, 1; not known of rank 2" in text
    assert "  no answer from rank 2: stopped, dead, or cut off from the store" in text


def test_calls_that_somebody_has_not_made_are_told_before_longer_waits() -> None:
    """Would catch the one call that matters behind dozens that only wait for it."""
    both = [["broadcast", 8, 0, None, 90.0], ["all_reduce", 9, 0, None, 3.0]]
    lines = report({0: answer(9, both), 1: answer(9, both), 2: answer(8, both[:1])}, []).splitlines()
    assert "all_reduce, call 9" in lines[1] and "not called by rank 2" in lines[1]
    assert "broadcast, call 8" in lines[2]


def test_the_report_says_how_many_messages_a_peer_has_made() -> None:
    receiver = answer(3, [["receive", 7, 64, 1, 2.0]])
    sender = answer(3, [])
    sender["calls"]["g"]["messages"] = [["send", 0, 6]]  # type: ignore[index]
    text = report({0: receiver, 1: sender}, [])
    assert "receive from rank 1, message 7 on tp: 64 bytes, 2.0 s in rank 0; rank 1 has made 6" in text


def _asked(rank: int, world_size: int) -> str:
    """Rank 0 gives up in a call that rank 1 does not make."""
    place: ProcessGrid = grid(dp=world_size)
    with Watch(place):
        if rank == 1:
            time.sleep(4.0)
            return ""
        call = place.dp.calls.begin("all_gather", torch.ones(2))
        try:
            raise RuntimeError("Timed out waiting 1ms")
        except RuntimeError as error:
            text = report_failure(error, "step 1", place.world, 2.5)
        call.done = True
        assert group_name(place.dp) and calls_of(place.dp)["axis"] == "dp"
        return text


@pytest.mark.slow
def test_a_rank_that_hangs_answers_with_its_stack() -> None:
    """Would catch a question that only a rank in good order can answer."""
    text, _ = run_ranks(_asked, 2)
    assert "rank 0 failed in step 1: RuntimeError: Timed out waiting 1ms" in text
    assert "on dp (ranks 0, 1): 8 bytes" in text and "not called by rank 1" in text
    assert "in _asked\n      time.sleep(4.0)" in text
    assert 'in _asked\n      raise RuntimeError("Timed out' in text, "where it failed, not where it reports that"


def _reported(rank: int, world_size: int) -> tuple[str, float]:
    """Rank 2 gives up first and asks; rank 0 holds the store; rank 1 hangs."""
    place: ProcessGrid = grid(dp=world_size)
    with Watch(place):
        if rank == 1:
            time.sleep(6.0)
            return "", 0.0
        time.sleep(0.0 if rank == 2 else 0.5)
        text = report_failure(RuntimeError("timed out"), "step 1", place.world, 1.5)
        return text, time.monotonic()


@pytest.mark.slow
def test_the_rank_with_the_store_leaves_no_earlier_than_others_that_ask_or_listen() -> None:
    """Would catch a store that goes while another rank still gathers the answers."""
    (waited, left), _, (text, told) = run_ranks(_reported, 3)
    assert "calls under way:" in text and "the rank that gave up first tells" in waited
    assert left > told - 0.02, "the clock is read a moment after the store hears of it"


def _alone(rank: int, world_size: int) -> float:
    """Seconds of the report; rank 1 fails by itself, and the others in a collective with it."""
    place: ProcessGrid = grid(dp=world_size)
    begun = time.monotonic()
    error = ValueError("bad input") if rank == 1 else RuntimeError("connection closed by peer")
    report_failure(error, "step 1", place.world, 3.0)
    time.sleep(1.0)  # the store goes with rank 0
    return time.monotonic() - begun - 1.0


def test_a_failure_that_all_ranks_have_told_is_reported_at_once() -> None:
    """Would catch ranks that wait for one that has left: every failure of a run would end seconds later."""
    assert max(run_ranks(_alone, 3)) < 2.0


def test_groups_whose_ranks_have_made_different_numbers_of_calls_are_told() -> None:
    """Would catch a hang on GPUs, where no call is under way for the host."""
    text = report({0: answer(9, []), 1: answer(9, []), 2: answer(8, [])}, [])
    assert "  collectives made on tp: 8 by rank 2; 9 by ranks 0, 1" in text


def _stalled(rank: int, world_size: int) -> str:
    """What is printed when no rank makes a call."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told), Watch(grid(dp=world_size), 1.5):
        time.sleep(6.0)
    return told.getvalue()


@pytest.mark.slow
def test_ranks_that_make_no_calls_are_told_of_once() -> None:
    """Would catch a hang on NCCL, which ends the process before it can say anything."""
    texts = [text for text in run_ranks(_stalled, 2) if text]
    assert len(texts) == 1
    assert "has made no call for 1.5 s; if this is a hang:" in texts[0]
    assert "ranks 0, 1:" in texts[0] and "in _stalled\n      time.sleep(6.0)" in texts[0]
