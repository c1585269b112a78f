"""One training step under the clock, on every rank: phases with their waits, operators, and the arithmetic limit.

Key property: wall time is split by what the system itself says of the thread: on a core, ready but without one (other
programs), and asleep, which is waiting for other ranks. Operators are told in processor time. Both add up; the rest of
the processor time is Python, autograd's engine and the clock itself. Plain steps, taken by turns with clocked ones,
tell the clock's part.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.profile.operators import Landmarks, OperatorCall, OperatorClock
from bench.steps import Subject
from megacp.core.config.run import RunConfig
from megacp.core.data.synthetic.mock import MockRules
from megacp.core.data_parallel.buckets import FlatBuckets
from megacp.core.distributed.collectives import barrier
from megacp.core.planner.costs import vocabulary_rows

_SCHEDULER = Path("/proc/thread-self/schedstat")
"""Nanoseconds that this thread ran, and that it was ready to run without a core."""
BETWEEN = "between phases"


@dataclass(frozen=True)
class Moment:
    """Clocks of this thread and process."""

    wall: float
    cpu: float
    """Of this thread."""
    ready: float
    """Time it was ready to run and had no core; 0 where the system does not tell."""
    process: float
    """Processor time of all threads."""

    @staticmethod
    def now() -> Moment:
        """This moment."""
        ready = int(_SCHEDULER.read_text(encoding="ascii").split()[1]) * 1e-9 if _SCHEDULER.exists() else 0.0
        return Moment(time.perf_counter(), time.thread_time(), ready, time.process_time())


@dataclass
class ThreadTime:
    """Seconds of a phase or of a step, added up."""

    wall: float = 0.0
    cpu: float = 0.0
    ready: float = 0.0
    process: float = 0.0

    @property
    def asleep(self) -> float:
        """Waiting for other ranks, threads or the system."""
        return max(0.0, self.wall - self.cpu - self.ready)

    def add(self, begin: Moment, end: Moment) -> None:
        """Add the time between two moments."""
        self.wall += end.wall - begin.wall
        self.cpu += end.cpu - begin.cpu
        self.ready += end.ready - begin.ready
        self.process += end.process - begin.process


@dataclass
class ClockedStep:
    """One step of one rank under the clock."""

    step: ThreadTime = field(default_factory=ThreadTime)
    phases: dict[str, ThreadTime] = field(default_factory=dict)
    """Without nesting; `BETWEEN` is the step less all others."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Processor seconds by class of operators."""
    calls: dict[str, int] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    """Operators that have no class."""

    @property
    def python(self) -> float:
        """Processor seconds of the thread outside operators: Python, autograd's engine, the clock."""
        return self.step.cpu - sum(self.seconds.values())

    @property
    def threads(self) -> float:
        """Processor seconds of other threads: gloo's."""
        return self.step.process - self.step.cpu


@dataclass(frozen=True)
class RankProfile:
    """What one rank found."""

    tokens: int
    clocked: list[ClockedStep]
    plain: list[ThreadTime]
    """Steps without the clock, taken by turns with the others."""
    alone: dict[str, float]
    """Processor seconds of the step's products and attention kernels, each call measured alone."""


class Recorder:
    """Clocks a step of a subject when it is told to."""

    def __init__(self) -> None:
        self.phase_name = BETWEEN
        self._recording: ClockedStep | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The context of a phase of the step (`megacp.core.monitor.timers.Phase`)."""
        if self._recording is None:
            yield
            return
        outer, self.phase_name, begin = self.phase_name, name, Moment.now()
        try:
            yield
        finally:
            self.phase_name = outer
            self._recording.phases.setdefault(name, ThreadTime()).add(begin, Moment.now())

    @contextlib.contextmanager
    def clocked(self, clock: OperatorClock, found: ClockedStep) -> Iterator[None]:
        """Record the body as a step."""
        self._recording, begin = found, Moment.now()
        try:
            with clock:
                yield
        finally:
            found.step.add(begin, Moment.now())
            self._recording = None
            parts, whole = list(found.phases.values()), found.step
            rest = {name: getattr(whole, name) - sum(getattr(part, name) for part in parts) for name in vars(whole)}
            found.phases[BETWEEN] = ThreadTime(**rest)
            found.seconds, found.calls = dict(clock.seconds), dict(clock.calls)
            found.unknown = sorted(clock.unknown)


def landmarks_of(subject: Subject) -> Landmarks:
    """What tells a subject's operators apart."""
    parameters = subject.model.parameters
    buckets = parameters.buckets if isinstance(parameters, FlatBuckets) else []
    addresses = frozenset(bucket.gradients.untyped_storage().data_ptr() for bucket in buckets)
    model = subject.config.model
    return Landmarks(vocabulary_rows(model, model.vocab_size, subject.grid.tp.size), addresses)


@functools.cache
def _subject(rank: int, world_size: int, config: RunConfig, rules: MockRules) -> tuple[Subject, Recorder]:
    recorder = Recorder()
    return Subject(rank, world_size, config, rules, recorder.phase), recorder


def profile_rank(rank: int, world_size: int, config: RunConfig, rules: MockRules, rounds: int) -> RankProfile:
    """Warm up, then take plain and clocked steps by turns; last, each rank alone measures its products again."""
    subject, recorder = _subject(rank, world_size, config, rules)
    tokens = subject.measure().tokens
    clocked, plain, calls = [], list[ThreadTime](), dict[str, dict[OperatorCall, int]]()
    for _ in range(rounds):
        span = ThreadTime()
        subject.measure(_spanned(span))
        plain.append(span)
        clock = OperatorClock(landmarks_of(subject), lambda: recorder.phase_name)
        step = ClockedStep()
        subject.measure(recorder.clocked(clock, step))
        clocked.append(step)
        calls = {name: dict(counted) for name, counted in clock.repeatable.items()}
    alone: dict[str, float] = {}
    for turn in range(world_size):
        if turn == rank:
            alone = {
                name: sum(call.alone() * count for call, count in counted.items()) for name, counted in calls.items()
            }
        barrier(subject.grid.world)
    return RankProfile(tokens, clocked, plain, alone)


@contextlib.contextmanager
def _spanned(span: ThreadTime) -> Iterator[None]:
    begin = Moment.now()
    yield
    span.add(begin, Moment.now())
