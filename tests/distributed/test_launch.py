"""Reading torchrun's environment: what is absent, wrong, and wrong together."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch

from megacp.core.distributed.collectives import all_gather
from megacp.core.distributed.grid import GridShape
from megacp.core.distributed.launch import (
    World,
    device_type,
    meet,
    pick_device,
    set_defaults,
    start,
    stop,
    world_from_environment,
)
from tests.ranks import grid, run_ranks

KEYS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without torchrun."""
    for key in KEYS:
        monkeypatch.delenv(key, raising=False)
    return monkeypatch


def test_without_torchrun_there_is_one_process(environment: pytest.MonkeyPatch) -> None:
    assert world_from_environment() == World(0, 1, 0, 1)


def test_torchruns_variables_are_read(environment: pytest.MonkeyPatch) -> None:
    for key, value in zip(KEYS, ("5", "8", "1", "4"), strict=True):
        environment.setenv(key, value)
    assert world_from_environment() == World(rank=5, size=8, local_rank=1, local_size=4)


def test_every_variable_that_is_no_number_is_named_at_once(environment: pytest.MonkeyPatch) -> None:
    for key, value in zip(KEYS, ("one", "8", "", "-4"), strict=True):
        environment.setenv(key, value)
    with pytest.raises(ValueError, match="RANK='one'") as caught:
        world_from_environment()
    text = str(caught.value)
    assert "LOCAL_RANK=''" in text and "LOCAL_WORLD_SIZE='-4'" in text and "torchrun" in text


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (("8", "8", "0", "8"), "RANK=8 .* WORLD_SIZE=8"),
        (("0", "0", "0", "1"), "WORLD_SIZE=0"),
        (("0", "8", "4", "4"), "LOCAL_RANK=4 .* LOCAL_WORLD_SIZE=4"),
    ],
)
def test_ranks_outside_their_world_are_refused(
    environment: pytest.MonkeyPatch, values: tuple[str, ...], named: str
) -> None:
    for key, value in zip(KEYS, values, strict=True):
        environment.setenv(key, value)
    with pytest.raises(ValueError, match=named):
        world_from_environment()


@pytest.mark.parametrize(("given", "missing"), [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")])
def test_a_rank_without_its_world_is_refused(environment: pytest.MonkeyPatch, given: str, missing: str) -> None:
    """Would catch processes that each train alone and end with status 0."""
    environment.setenv(given, "1")
    with pytest.raises(ValueError, match=f"{given} is set, {missing} is not"):
        world_from_environment()


@pytest.mark.parametrize(
    ("rank", "variables", "told"),
    [
        (1, {}, "MASTER_ADDR is not set, MASTER_PORT is not set"),
        (1, {"MASTER_ADDR": "localhost", "MASTER_PORT": "x"}, "MASTER_PORT='x' is no number of a port"),
        (1, {"MASTER_ADDR": "no machine!", "MASTER_PORT": "1"}, "MASTER_ADDR='no machine!' is no machine"),
        (1, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "nobody listens at MASTER_ADDR=127.0.0.1"),
    ],
)
def test_a_store_that_cannot_be_found_is_one_message(
    environment: pytest.MonkeyPatch, rank: int, variables: dict[str, str], told: str
) -> None:
    for key in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        environment.delenv(key, raising=False)
    for key, text in variables.items():
        environment.setenv(key, text)
    with pytest.raises(ValueError, match=told):
        meet(World(rank, 2), 0.3)


def test_a_port_in_use_is_one_message(environment: pytest.MonkeyPatch) -> None:
    environment.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.create_server(("", 0)) as taken:
        environment.setenv("MASTER_ADDR", "127.0.0.1")
        environment.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(ValueError, match="is in use by another process"):
            meet(World(0, 2), 0.3)


def test_ranks_compute_on_gpus_only_where_each_of_them_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for available, ranks, expected in ((True, 4, "cuda"), (True, 5, "cpu"), (False, 1, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda answer=available: answer)
        assert device_type(World(0, ranks, 0, ranks)) == expected


def test_on_a_cpu_the_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    threads = torch.get_num_threads()
    try:
        assert pick_device(World(0, 4096, 0, 4096)).type == "cpu"
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_one_process_starts_and_stops_without_a_process_group(environment: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    try:
        assert start(GridShape()).world.size == 1
        assert not torch.distributed.is_initialized()
        stop()
    finally:
        torch.set_num_threads(threads)


def test_a_grid_larger_than_the_world_is_refused(environment: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    try:
        with pytest.raises(ValueError, match="needs 2 ranks, the world has 1"):
            start(GridShape(tp=2))
    finally:
        torch.set_num_threads(threads)


def grown_by_collectives(rank: int, world_size: int) -> float:
    """MiB that a hundred all-gathers of fresh 8 MiB outputs leave behind."""
    axis, x = grid(dp=world_size).dp, torch.zeros(1 << 20)
    sizes = []
    for _ in range(2):
        for _ in range(50):
            all_gather(x, axis)
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)
    return sizes[1] - sizes[0]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_rank_does_not_grow_with_the_number_of_collectives() -> None:
    assert max(run_ranks(grown_by_collectives, 2)) < 20  # 60 to 180 with glibc's own threshold


def test_defaults_for_guest_packages_leave_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGACP_TEST_SET", "users")
    monkeypatch.setenv("MEGACP_TEST_UNSET", "")  # so that it is gone after the test
    monkeypatch.delenv("MEGACP_TEST_UNSET")
    set_defaults({"MEGACP_TEST_SET": "ours", "MEGACP_TEST_UNSET": "ours"})
    assert (os.environ["MEGACP_TEST_SET"], os.environ["MEGACP_TEST_UNSET"]) == ("users", "ours")
