"""Ranks that meet in a store: one verdict for all, and a deadline for whoever does not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from megacp.core.distributed.failure import within
from megacp.core.distributed.meeting import Meeting


def at_once(size: int, action: Callable[[Meeting], str], seconds: float = 5.0, absent: int = -1) -> list[str]:
    """What `action` returns or raises on every rank of a meeting, as threads over one store."""
    store = dist.HashStore()
    found = [""] * size

    def join(rank: int) -> None:
        try:
            found[rank] = action(Meeting(rank, size, store, seconds))
        except ValueError as error:
            found[rank] = f"refused: {error}"

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size) if rank != absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_rank_0_judges_the_values_of_all_in_rank_order() -> None:
    verdicts = at_once(3, lambda meeting: meeting.judged("t", str(meeting.rank), ",".join))
    assert verdicts == ["0,1,2"] * 3


def test_one_rank_meets_itself() -> None:
    assert Meeting(0, 1, None, 0.0).judged("t", "a", ",".join) == "a"


def test_a_rank_that_gives_no_value_is_named_on_all_others() -> None:
    verdicts = at_once(3, lambda meeting: meeting.judged("t", "a", ",".join), 0.2, absent=1)
    assert verdicts == ["refused: no word on the t from rank 1", "", "refused: no word on the t from rank 1"]


def test_rank_0_leaves_after_the_others_have_read() -> None:
    """Would catch a store that goes with rank 0 before the others know why they are refused."""
    left: list[int] = []

    def action(meeting: Meeting) -> str:
        if meeting.rank == 1:
            time.sleep(0.3)
        verdict = meeting.judged("t", "a", ",".join)
        meeting.heard_by_all("t")
        left.append(meeting.rank)
        return verdict

    assert at_once(2, action) == ["a,a"] * 2
    assert sorted(left) == [0, 1]


@pytest.mark.parametrize("absent", [-1, 2], ids=["all ranks", "a spare is not waited for"])
def test_rank_0_ends_after_the_others(absent: int) -> None:
    """Would catch a good run that ends with torch's stack of a rank whose store went with rank 0."""
    ended: list[int] = []

    def action(meeting: Meeting) -> str:
        if meeting.rank == 1:
            time.sleep(0.3)
            ended.append(1)
        meeting.end(2)
        ended.append(meeting.rank)
        return ""

    begin = time.monotonic()
    at_once(2 if absent < 0 else 3, action, absent=absent)
    assert ended.index(1) < ended.index(0) and time.monotonic() - begin < 4.0


def test_what_takes_too_long_is_left_behind() -> None:
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        within(0.1, lambda: time.sleep(3))


def test_what_ends_in_time_returns_or_raises_as_it_did() -> None:
    def refuse() -> None:
        raise KeyError("why")

    assert within(5.0, lambda: 7) == 7
    with pytest.raises(KeyError, match="why"):
        within(5.0, refuse)
