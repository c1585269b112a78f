"""The checkpoints of one run: the directory it owns, what is being written there, and when that is committed.

Key property: a save in the background is committed at a step boundary, when the exchange before the step
(`loss.agree`) has told all ranks that all have written; an error of any rank ends the run there. Rejected: committing
from the writing threads, whose collectives would meet those of training in another order on each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megacp.checkpoint.directory import refuse_unpointable, remove_leftovers
from megacp.checkpoint.lock import DirectoryLock
from megacp.checkpoint.pending import PendingCheckpoint
from megacp.checkpoint.together import on_first
from megacp.config.run import RunConfig
from megacp.distributed.grid import Axis
from megacp.training.state import Progress, begin_save
from megacp.training.step import Trainee

DONE, WRITING, FAILED = 0, 1, 2
"""What a rank tells the others of its files; of several ranks the highest counts."""


class Saver:
    """One run's checkpoints below `--save`; without it nothing is written. Collective over `world`.

    Raises ValueError on every rank when another run holds the directory or it cannot be written.
    """

    def __init__(self, config: RunConfig, world: Axis) -> None:
        self._config, self._world = config, world
        self._pending: PendingCheckpoint | None = None
        self._lock: DirectoryLock | None = None
        self._step: int | None = None
        self._path: Path | None = None
        self.distrusted: tuple[Path, ...] = ()
        """Checkpoints that were found damaged when the run looked for a start: --keep-last does not count them."""
        self.notes: list[str] = []
        """What there is to say about the directory at the start."""
        if config.checkpoint.save is not None:
            self.notes = on_first(world, lambda: self._enter(str(config.checkpoint.save)), ValueError)

    def _enter(self, directory: str) -> list[str]:
        refuse_unpointable(directory)
        self._lock = DirectoryLock(directory)
        notes = [self._lock.problem] if self._lock.problem else []
        if not self._lock.problem:
            notes += remove_leftovers(directory)
        return notes

    def resumed(self, step: int, path: Path) -> None:
        """The run starts from this checkpoint: its step needs no saving."""
        self._step, self._path = step, path

    @property
    def news(self) -> int:
        """DONE, WRITING or FAILED on this rank."""
        if self._pending is None:
            return DONE
        return WRITING if self._pending.writing else FAILED if self._pending.failed else DONE

    def settle(self, of_all: int, say: Callable[[str], None]) -> None:
        """Commit what is pending, given the highest `news` of all ranks; SaveError on all when it failed on any."""
        if self._pending is not None and of_all != WRITING:
            self._commit(say)

    def save(self, trainee: Trainee, progress: Progress, say: Callable[[str], None], reason: str) -> None:
        """Save the state after `progress.step`, in the background with --async-save; waits for an earlier one first."""
        step = progress.step
        if self._config.checkpoint.save is None:
            say(f"{reason} after step {step}; no --save, so nothing was written")
            return
        if self._pending is not None:
            self._commit(say)
        if self._step == step:
            say(f"{reason} after step {step}: {self._path}")
            return
        background = self._config.checkpoint.async_save
        self._pending = begin_save(trainee, progress, trainee.config, background)  # auto is resolved there
        self._reason = reason
        if background:
            say(f"saving step {step} in the background")
        else:
            self._commit(say)

    def finish(self, say: Callable[[str], None]) -> None:
        """Wait for what is pending and commit it."""
        if self._pending is not None:
            self._commit(say)

    def close(self) -> None:
        """Let another run have the directory; what is still pending is never committed."""
        if self._lock is not None:
            self._lock.release()

    def _commit(self, say: Callable[[str], None]) -> None:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        self._path = pending.commit(self._config.checkpoint.keep_last, self.distrusted)
        self._step = pending.step
        say(f"{self._reason} after step {pending.step}: {self._path}")
        for note in pending.notes:
            say(note)
