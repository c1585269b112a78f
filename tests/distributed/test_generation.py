"""A store that outlives the processes: the ranks of one life meet each other and nobody from an earlier one."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from megacp.distributed.generation import fresh_store


def _life(store: dist.Store, size: int, delays: Sequence[float], present: Sequence[int]) -> dict[int, dist.Store | str]:
    """What each present rank gets, started after its delay."""
    found: dict[int, dist.Store | str] = {}

    def join(rank: int) -> None:
        time.sleep(delays[rank])
        try:
            found[rank] = fresh_store(store, rank, size, 0.2 if len(present) < size else 20.0)
        except RuntimeError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in present]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("delays", [(0.0, 0.0, 0.0), (0.3, 0.0, 0.1), (0.0, 0.3, 0.0)], ids=str)
def test_each_life_of_a_run_has_a_part_of_the_store_of_its_own(delays: tuple[float, ...]) -> None:
    """Would catch a rank that meets a dead one: late ranks, a life that never came together, then whole ones."""
    store = dist.HashStore()
    for life in range(3):
        parts = _life(store, 3, delays, (0, 1, 2))
        parts[0].set("who", f"life {life}")  # type: ignore[union-attr]
        assert [parts[rank].get("who") for rank in range(3)] == [f"life {life}".encode()] * 3  # type: ignore[union-attr]
        for present in ((0, 1), (1, 2)):
            broken = _life(store, 3, (0.0, 0.0, 0.0), present)
            assert all("waited 0.2 s for the 3 ranks" in str(text) for text in broken.values())
