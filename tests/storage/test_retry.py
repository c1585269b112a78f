"""Retries: what passes is tried again, for a bounded time, and nothing else is."""

from __future__ import annotations

import errno
import logging

import pytest

from megacp.core.storage.retry import RetryRule, UnreachableError, may_pass, retried
from tests.storage.stores import Busy, flaky, memory, under_flaky

QUICK = RetryRule(attempts=4, first_seconds=0.001, most_seconds=0.002)


class ReadTimeoutError(Exception):
    """As botocore's, known by the name of a class above it."""


class HTTPClientError(Exception):
    """The name that the table has."""


class EndpointError(HTTPClientError):
    """A class below it."""


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionResetError("cut"), True),
        (TimeoutError(), True),
        (OSError(errno.EBUSY, "slow down"), True),
        (Busy("slow down"), True),
        (EndpointError("no answer"), True),
        (caused_by(FileNotFoundError("x"), Busy("slow down")), True),  # how fsspec tells of a busy web server
        (FileNotFoundError("x"), False),
        (PermissionError(errno.EACCES, "no"), False),
        (ReadTimeoutError("of another package"), False),
        (ValueError("wrong"), False),
    ],
)
def test_the_tables_say_what_passes(error: Exception, passes: bool) -> None:
    assert may_pass(error) is passes


def test_an_action_is_tried_until_it_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    left = [Busy("slow down"), ConnectionResetError("cut")]

    def action() -> str:
        if left:
            raise left.pop()
        return "done"

    with caplog.at_level(logging.WARNING):
        assert retried(action, "s3://b/c", QUICK) == "done"
    assert [record.message.split(";")[0] for record in caplog.records] == [
        "s3://b/c: ConnectionResetError: cut",
        "s3://b/c: Busy: slow down",
    ]


def test_the_last_failure_names_the_object_and_the_attempts() -> None:
    asked = []

    def action() -> None:
        asked.append(1)
        raise Busy("slow down")

    with pytest.raises(UnreachableError, match=r"^s3://b/c: Busy: slow down \(tried 4 times\)$"):
        retried(action, "s3://b/c", QUICK)
    assert len(asked) == 4


def test_what_does_not_pass_is_tried_once() -> None:
    asked = []

    def action() -> None:
        asked.append(1)
        raise PermissionError("no")

    with pytest.raises(UnreachableError, match=r"^s3://b/c: PermissionError: no$"):
        retried(action, "s3://b/c", QUICK)
    assert len(asked) == 1


def test_an_unreached_store_is_no_damaged_file() -> None:
    """Would catch a reader that skips the rest of a file because the network was down."""
    assert not issubclass(UnreachableError, OSError)


def test_pauses_double_are_spread_and_have_a_limit() -> None:
    rule = RetryRule(attempts=9, first_seconds=1.0, most_seconds=5.0)
    for failures, most in enumerate([1.0, 2.0, 4.0, 5.0, 5.0], 1):
        pauses = {rule.pause(failures) for _ in range(20)}
        assert most / 2 <= min(pauses) < max(pauses) <= most


def test_a_store_that_fails_every_third_request_gives_the_same_bytes() -> None:
    url = memory()
    data = bytes(range(256)) * 50
    with flaky(0.3) as store:
        place = under_flaky(url)
        for number in range(10):
            (place / f"{number}").write(data)
            assert (place / f"{number}").read(100, 12_000) == data[100:12_100]
        assert place.sizes_below() == {f"{number}": len(data) for number in range(10)}
    assert store.failed["short read"] and store.failed["write"]
    assert (url / "3").content(1 << 20) == data
