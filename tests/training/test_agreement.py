"""What ranks state at the start: every difference is told with both values, and a directory must be one for all."""

from __future__ import annotations

import socket

import pytest

from megacp.core.config.cli import parse
from megacp.core.config.run import fields, flag
from megacp.core.distributed.launch import Meeting
from megacp.core.training.agreement import MAY_DIFFER, require_agreement, statement
from megacp.core.training.sources import open_sources
from tests.distributed.test_launch import at_once
from tests.training.runs import TINY

HOST = socket.gethostname()


def stated(*flags: str) -> dict[str, str]:
    config, sources = open_sources(parse([*TINY, *flags]))
    return statement(config, sources, "cpu")


@pytest.mark.slow
def test_every_flag_is_stated_but_those_that_may_differ() -> None:
    """Would catch a new flag that ranks may set differently without anybody having thought of it."""
    told = stated()
    assert {name for name in fields() if flag(name) not in told} == set(MAY_DIFFER)


@pytest.mark.slow
def test_data_and_software_are_stated() -> None:
    assert stated("--seq-length", "128")["the fingerprint of --data-path"] != stated()["the fingerprint of --data-path"]
    named = "the version of megacp", "the source of megacp (sha256)", "the version of torch", "the version of Python"
    assert all(stated()[name] for name in (*named, "the device"))


def agreed(statements: list[dict[str, str]], problems: dict[int, str] | None = None) -> list[str]:
    def action(meeting: Meeting) -> str:
        require_agreement(meeting, statements[meeting.rank], (problems or {}).get(meeting.rank, ""))
        return "agreed"

    return at_once(len(statements), action)


def test_equal_statements_agree_also_where_machines_read_their_own_copy() -> None:
    assert agreed([stated(), stated("--num-workers", "3"), stated()]) == ["agreed"] * 3


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([0.01, 0.01, 0.5, 0.01], f"0.5 on rank 2 (host {HOST}); 0.01 on ranks 0, 1, 3 (host {HOST})"),
        ([0.5, 0.01, 0.01, 0.01], f"0.5 on rank 0 (host {HOST}); 0.01 on ranks 1, 2, 3 (host {HOST})"),
        (
            [0.01, 0.5, 0.7, 0.01],
            f"0.5 on rank 1 (host {HOST}), 0.7 on rank 2 (host {HOST}); 0.01 on ranks 0, 3 (host {HOST})",
        ),
    ],
)
@pytest.mark.slow
def test_a_difference_is_told_with_its_ranks_on_every_rank(values: list[float], told: str) -> None:
    refusals = agreed([stated("--lr", str(value)) for value in values])
    assert len(set(refusals)) == 1
    assert refusals[0].endswith(f"\n  - --lr: {told}")


def test_every_difference_is_told_at_once() -> None:
    (refusal, _) = agreed([stated(), stated("--seed", "2", "--num-layers", "2") | {"the version of torch": "1.0"}])
    assert all(f"\n  - {name}: " in refusal for name in ("--seed", "--num-layers", "the version of torch"))
    assert refusal.count("  - ") == 3


def test_a_problem_of_one_rank_is_told_by_all_of_them() -> None:
    refusals = agreed([stated(), {}], {1: "--data-path is not here"})
    assert refusals == [f"refused: rank 1 (host {HOST}): --data-path is not here"] * 2


def test_a_problem_of_all_ranks_is_told_as_it_is() -> None:
    assert agreed([{}, {}], dict.fromkeys((0, 1), "no such flag")) == ["refused: no such flag"] * 2
