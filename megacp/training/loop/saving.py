"""Checkpoints of one run: lock the directory, save, and commit finished saves.

A background save is committed between two steps, once the exchange before a step (`agree_on_step`)
has shown that every rank has finished writing. A write error on any rank ends the run at that
point. NaN weights also end the run. A save is skipped if no update was made since the last
checkpoint. Checkpoints are not removed while updates are being skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megacp.distributed.grid import Axis
from megacp.engine.config.run import RunConfig
from megacp.engine.step.step import ParallelModel
from megacp.storage.files import read_regular, seen
from megacp.storage.place import Place, place_of
from megacp.storage.url import is_url
from megacp.training.checkpoint.commit import PendingCheckpoint
from megacp.training.checkpoint.directory import LOCK_FILE, DirectoryLock, remove_leftovers
from megacp.training.checkpoint.outcome import on_all_ranks, on_rank_0
from megacp.training.loop.health import AnomalyError, damaged_tensors
from megacp.training.loop.state import RunState, begin_save, saved_boxes

DONE, WRITING, SAVE_FAILED = 0, 1, 2
"""State of a rank's checkpoint files; ranks agree on the maximum before each step."""
_LATE_SECONDS = 40.0
"""Time to wait for a new file on NFS: other machines cache file names for 30 s."""


def _require_lock(directory: str, owner: str, rank: int) -> None:
    """Raise ValueError if this machine cannot find the lock that rank 0 has written."""
    if rank == 0:  # opening and closing the file would release this process's POSIX lock
        return
    try:
        content = seen(lambda: read_regular(Path(directory, LOCK_FILE)), _LATE_SECONDS)
        found = content.decode(errors="replace")
    except OSError:
        found = ""
    if found != owner:
        raise ValueError(
            f"--save {directory} is not the same directory on all machines: this machine cannot "
            f"find the lock of rank 0 ({owner}); use a directory that all machines share"
        )


class Saver:
    """Writer of a run's checkpoints in `--save`; without `--save`, it writes nothing.

    The constructor is collective over `world`. It raises ValueError on every rank if another run
    has locked the directory or if the directory is not writable.
    """

    def __init__(self, config: RunConfig, world: Axis) -> None:
        self._config = config
        self._world = world
        self._pending: PendingCheckpoint | None = None
        self._lock: DirectoryLock | None = None
        self._step: int | None = None  # of the last checkpoint in --save
        self._updates: int | None = None  # optimizer updates in that checkpoint
        self.newest: Place | None = None
        """The latest checkpoint that this run has written or resumed from; its weights are finite.
        """
        self.keeps_all = False
        """Whether to ignore --keep-last, because the last update was skipped."""
        self.notes: list[str] = []
        """Log lines about the directory, to print at the start of the run."""
        save = config.checkpoint.save
        if save is not None:
            self.notes, owner = on_rank_0(world, lambda: self._enter(save), ValueError)
            if owner:
                on_all_ranks(world, lambda: _require_lock(save, owner, world.rank), ValueError)

    def _enter(self, directory: str) -> tuple[list[str], str]:
        """Lock the directory; return log lines, and the content of the lock file.

        The content is "" if the directory cannot be locked.
        """
        # an object store has no locks
        if is_url(directory):
            warning = f"{directory} cannot be locked: another run that saves there is not detected"
            return [warning], ""
        self._lock = DirectoryLock(directory)
        if self._lock.problem:
            return [self._lock.problem], ""
        return remove_leftovers(directory), self._lock.owner

    def resumed(self, step: int, updates: int, path: Place) -> None:
        """Record the checkpoint from which the run resumes.

        If the checkpoint is in --save, its step need not be saved again.
        """
        self.newest = path
        save = self._config.checkpoint.save
        # a checkpoint from another directory must be saved again in --save
        if save is not None and path.resolve().parent == place_of(save).resolve():
            self._step = step
            self._updates = updates

    @property
    def save_state(self) -> int:
        """DONE, WRITING or SAVE_FAILED for this rank."""
        if self._pending is None:
            return DONE
        if self._pending.writing:
            return WRITING
        return SAVE_FAILED if self._pending.failed else DONE

    def settle(self, of_all: int, say: Callable[[str], None]) -> None:
        """Commit the pending checkpoint unless a rank is still writing.

        `of_all` is the highest `save_state` of all ranks. Raise SaveError on all ranks if the save
        failed on any of them.
        """
        if of_all != WRITING:  # done on all ranks or failed on any; `finish` then raises
            self.finish(say)

    def save(
        self, model: ParallelModel, state: RunState, say: Callable[[str], None], reason: str
    ) -> None:
        """Save the state after `state.step`; with --async-save, in the background.

        First, finish an earlier save that is still pending.
        """
        step = state.step
        if self._config.checkpoint.save is None:
            say(f"{reason} after step {step}; nothing was saved, because --save is not set")
            return
        self.finish(say)
        # The step may already be saved, for example if --save-interval was reached before a stop.
        if self._step == step:
            say(f"{reason} after step {step}: {self.newest}")
            return
        updates = model.optimizer.updates
        # All steps since the last checkpoint were skipped, so the weights are unchanged.
        if self._updates == updates:
            say(
                f"{reason} after step {step}: no update since step {self._step}, which is saved in "
                f"{self.newest}"
            )
            return
        damaged = damaged_tensors(saved_boxes(model), self._world)
        if damaged:
            raise AnomalyError(f"the weights after step {step} are not finite: {damaged}")
        background = self._config.checkpoint.async_save
        # `model.config` has no unresolved `auto` values
        self._pending = begin_save(model, state, model.config, background)
        self._reason = reason
        self._pending_updates = updates
        if background:
            say(f"saving step {step} in the background")
        else:
            self.finish(say)

    def finish(self, say: Callable[[str], None]) -> None:
        """Wait for the pending checkpoint, if any, and commit it."""
        if self._pending is None:
            return
        # `commit` is collective: it waits until all ranks have written their files
        pending = self._pending
        self._pending = None  # a failed commit is not tried again
        keep_last = 0 if self.keeps_all else self._config.checkpoint.keep_last
        self.newest = pending.commit(keep_last)
        self._step = pending.step
        self._updates = self._pending_updates
        say(f"{self._reason} after step {pending.step}: {self.newest}")
        for note in pending.notes:
            say(note)

    def close(self) -> None:
        """Release the directory for other runs, without committing a pending checkpoint."""
        if self._lock is not None:
            self._lock.release()
