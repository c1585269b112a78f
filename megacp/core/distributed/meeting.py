"""Where all ranks of a run meet before any process group exists: one table in the run's store.

Key property: an agreement here needs neither a grid nor a shape. Ranks that were started with different grids, sizes or
timeouts still hear of each other. Every wait has a deadline and names the ranks that did not come. Rejected: an
all-gather, whose group needs the timeout and the world size that are to be compared.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

import torch.distributed as dist

from megacp.core.distributed.failure import named, within

_FROZEN = 60.0
"""Seconds beyond all deadlines after which a store that answers nothing is given up."""
_GRACE = 10.0
"""Seconds that other ranks wait longer than rank 0, to hear from it whom it missed."""
_READING = 5.0
"""Seconds that rank 0 waits for others to read."""


class Meeting:
    """One rank's seat: `store` is the part that only the ranks of this life know (None for a run of one rank)."""

    def __init__(self, rank: int, size: int, store: dist.Store | None, seconds: float) -> None:
        self.rank, self.size, self.store, self.seconds = rank, size, store, seconds
        self.host = socket.gethostname()

    def judged(self, topic: str, value: str, judge: Callable[[list[str]], str], also: float = 0.0) -> str:
        """Rank 0's verdict on the values of all ranks, in rank order; every rank calls it once for a topic.

        `also`: seconds that a rank may need for its value besides those of the meeting. Raises ValueError on every
        rank, naming the ranks that gave no value in time.
        """
        if self.store is None:
            return judge([value])
        seconds = self.seconds + also
        try:
            answer = within(seconds + _FROZEN, lambda: self._answer(topic, value, judge, seconds))
        except (TimeoutError, dist.DistError) as lost:
            why = str(lost).strip().partition("\n")[0]
            raise ValueError(f"rank {self.rank} on {self.host} lost the run's store: {why}") from lost
        if answer[0] == "0":
            raise ValueError(answer[1:])
        return answer[1:]

    def _answer(self, topic: str, value: str, judge: Callable[[list[str]], str], seconds: float) -> str:
        """The verdict behind a 1, or a 0 and why there is none."""
        assert self.store is not None
        self.store.set(f"{topic}/value/{self.rank}", value)
        if self.rank != 0:
            found = self._values([f"{topic}/verdict"], seconds + _GRACE)
            if found is None:
                return f"0rank {self.rank} on {self.host}: no verdict from rank 0 on the {topic} of the ranks"
            (answer,) = found
            self.store.add(f"{topic}/read", 1)
        else:
            keys = [f"{topic}/value/{rank}" for rank in range(self.size)]
            values = self._values(keys, seconds)
            silent = [rank for rank, key in enumerate(keys) if not self.store.check([key])] if values is None else []
            answer = "1" + judge(values) if values else f"0no word on the {topic} from {named(silent)}"
            self.store.set(f"{topic}/verdict", answer)
        return answer

    def told(self, topic: str, value: str) -> str:
        """Rank 0's value, on every rank."""
        return self.judged(topic, value, lambda values: values[0])

    def heard_by_all(self, topic: str, ranks: int | None = None) -> None:
        """Wait, on rank 0, until the others (of the first `ranks`) have read a verdict: it may hold the store."""
        if self.store is not None and self.rank == 0:
            others = (self.size if ranks is None else ranks) - 1
            deadline = time.monotonic() + _READING
            while self.store.add(f"{topic}/read", 0) < others and time.monotonic() < deadline:
                time.sleep(0.02)

    def end(self, ranks: int) -> None:
        """This rank needs the store no more; rank 0, which may hold it, waits for the others of the first `ranks`.

        torch prints a page of stack for a rank whose store has gone, also at the end of a good run.
        """
        store = self.store
        if store is None:
            return

        def say() -> None:
            if self.rank != 0:
                store.add("end/read", 1)
            self.heard_by_all("end", ranks)

        with contextlib.suppress(TimeoutError, dist.DistError):
            within(2 * _READING, say)

    def _values(self, keys: list[str], seconds: float) -> list[str] | None:
        """The values of all keys, None when they are not there in time."""
        assert self.store is not None
        deadline = time.monotonic() + seconds
        pause = 0.005
        while not self.store.check(keys):
            if time.monotonic() >= deadline:
                return None
            time.sleep(pause)
            pause = min(0.1, 1.5 * pause)
        return [self.store.get(key).decode() for key in keys]
