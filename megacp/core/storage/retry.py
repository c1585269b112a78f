"""An action on an object store, tried again while its failure is one that passes.

Key property: what is tried again is data, three tables below, and every wait is bounded, spread at random and logged.
A store that is not reached ends as one ValueError that names the object. It is no OSError: a reader of records takes
those for damage of the file, and would go on behind it.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Answers of a server that passes: it is busy, or something behind it is."""
NUMBERS = frozenset(
    {
        *(errno.EIO, errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED),
        *(errno.ECONNABORTED, errno.EPIPE, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN),
    }
)
"""Of an OSError; s3fs gives EIO and EBUSY for the store's own errors."""
CLASSES = frozenset(
    {
        *("TimeoutError", "ConnectionError", "HTTPClientError", "ResponseStreamingError", "IncompleteRead"),
        *("ClientConnectionError", "ClientPayloadError", "RemoteProtocolError", "TransportError", "ProtocolError"),
    }
)
"""Names of exceptions, or of a class above them: of Python, botocore, aiohttp, httpx and urllib3, none imported."""


class UnreachableError(ValueError):
    """An object that cannot be read or written, however often it was tried; the message names it."""


class RedirectError(ValueError):
    """A server names another place for an object, where none but the asked one may be read."""


@dataclass(frozen=True)
class RetryRule:
    """How often an action is tried, and the seconds between: they double, up to the most."""

    attempts: int = 6
    first_seconds: float = 0.2
    most_seconds: float = 15.0

    def pause(self, failures: int) -> float:
        """Seconds after that many failures: at random from half of them on, so that ranks do not come back together."""
        seconds = min(self.most_seconds, self.first_seconds * 2 ** (failures - 1))
        return seconds * random.uniform(0.5, 1.0)


RULE = RetryRule()
"""At most about 12 seconds of waiting."""


def retried(action: Callable[[], _T], what: str, rule: RetryRule = RULE) -> _T:
    """`action`, again while it fails in a way that passes; `what` names the object in the log and in errors.

    FileNotFoundError names the object. RedirectError: as `action` raised it, or made another error from it.
    UnreachableError: anything else, or the last attempt failed, too.
    """
    for failures in range(1, rule.attempts + 1):
        try:
            return action()
        except Exception as error:
            passes = may_pass(error)
            if refusal := next((one for one in _chain(error) if isinstance(one, RedirectError)), None):
                raise refusal from error if refusal is not error else None
            if isinstance(error, FileNotFoundError) and not passes:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), what) from error
            if isinstance(error, ValueError) and not passes:
                raise
            if failures == rule.attempts or not passes:
                times = f" (tried {failures} times)" if failures > 1 else ""
                raise UnreachableError(f"{what}: {_reason(error)}{times}") from error
            seconds = rule.pause(failures)
            _log.warning("%s: %s; again in %.1f s (%d of %d)", what, _reason(error), seconds, failures, rule.attempts)
        time.sleep(seconds)
    raise ValueError(f"{rule} tries nothing")


def may_pass(error: BaseException) -> bool:
    """Whether an error, or one that it was made from, is in one of the tables."""
    return any(
        _status(one) in STATUSES
        or (isinstance(one, OSError) and one.errno in NUMBERS)
        or bool(CLASSES & {kind.__name__ for kind in type(one).__mro__})
        for one in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__


def _status(error: BaseException) -> int | None:
    """The number of a server's answer, where the libraries keep it."""
    answer = getattr(error, "response", None)
    found = getattr(answer, "status_code", None) or getattr(error, "status", None) or getattr(error, "code", None)
    return found if isinstance(found, int) else None


def _reason(error: BaseException) -> str:
    """One line; some libraries answer with a page."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
