"""A store that outlives the processes: the ranks of one life meet each other and nobody from an earlier one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch.distributed as dist

from megacp.core.distributed import restart_store
from megacp.core.distributed.failure import named
from megacp.core.distributed.restart_store import fresh_store


def _life(store: dist.Store, size: int, delays: Sequence[float], present: Sequence[int]) -> dict[int, dist.Store | str]:
    """What each present rank gets, started after its delay."""
    found: dict[int, dist.Store | str] = {}

    def join(rank: int) -> None:
        time.sleep(delays[rank])
        try:
            found[rank] = fresh_store(store, rank, size, 0.2 if len(present) < size else 20.0)
        except ValueError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in present]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("delays", [(0.0, 0.0, 0.0), (0.3, 0.0, 0.1), (0.0, 0.3, 0.0)], ids=str)
def test_each_life_of_a_run_has_a_part_of_the_store_of_its_own(delays: tuple[float, ...]) -> None:
    """Would catch a rank that meets a dead one: late ranks, a life that never came together, then whole ones."""
    store = dist.HashStore()
    for life in range(2):
        parts = _life(store, 3, delays, (0, 1, 2))
        parts[0].set("who", f"life {life}")  # type: ignore[union-attr]
        assert [parts[rank].get("who") for rank in range(3)] == [f"life {life}".encode()] * 3  # type: ignore[union-attr]
        for present in ((0, 1), (1, 2)):
            broken = _life(store, 3, (0.0, 0.0, 0.0), present)
            assert all("waited 0.2 s for the 3 ranks" in str(text) for text in broken.values())


def _joins(store: dist.Store, rank: int, size: int, seconds: float = 5.0, by_hand: bool = True) -> str:
    """The message of a rank that is refused, empty when it is let in."""
    try:
        fresh_store(store, rank, size, seconds, by_hand)
    except ValueError as error:
        return str(error)
    return ""


def _at_once(joins: Sequence[Callable[[], str]]) -> list[str]:
    found = [""] * len(joins)

    def join(place: int) -> None:
        time.sleep(0.1 * place)
        found[place] = joins[place]()

    threads = [threading.Thread(target=join, args=(place,)) for place in range(len(joins))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.slow
def test_ranks_that_never_come_are_named_by_all_others() -> None:
    store = dist.HashStore()
    found = _at_once([partial(_joins, store, rank, 4, 0.5) for rank in (0, 2)])
    assert all("for the 4 ranks of this run to start: no word from ranks 1, 3" in text for text in found)


@pytest.mark.slow
def test_another_world_size_is_told() -> None:
    store = dist.HashStore()
    found = _at_once([partial(_joins, store, 0, 2, 0.6), partial(_joins, store, 1, 3, 0.4)])
    assert any("rank 1 has WORLD_SIZE=3" in text or "rank 0 has WORLD_SIZE=2" in text for text in found)
    assert all(found)


@pytest.mark.slow
def test_a_rank_number_given_twice_by_hand_ends_all_at_once() -> None:
    """Would catch ranks that wait for the timeout, and one of the two that trains alone with the others."""
    store = dist.HashStore()
    begun = time.monotonic()
    found = _at_once([partial(_joins, store, rank, 3) for rank in (0, 1, 1)])
    assert all("rank 1 was started twice, on" in text for text in found)
    assert time.monotonic() - begun < 4.5


def test_a_rank_that_a_launcher_has_replaced_leaves_the_others_alone() -> None:
    """Would catch a slow machine of an earlier life that ends the next one."""
    store = dist.HashStore()
    joins = [partial(_joins, store, rank, size, 5.0, False) for rank, size in ((1, 3), (1, 2), (0, 2))]
    found = _at_once(joins)
    assert "rank 1 was started twice" in found[0]
    assert found[1:] == ["", ""]


def test_many_ranks_are_counted_and_not_listed() -> None:
    assert named([3]) == "rank 3"
    assert named(list(range(20))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, and 4 more"


def test_a_refused_rank_0_leaves_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a first rank that takes the store away before the others have read why. It heard it from them."""
    left: list[int] = []
    monkeypatch.setattr(restart_store, "_LINGER", 0.6)
    store = dist.HashStore()

    def joins(rank: int) -> str:
        message = _joins(store, rank, 3)
        left.append(rank)
        return message

    _at_once([partial(joins, rank) for rank in (0, 1, 1)])
    assert left == [1, 1, 0]
