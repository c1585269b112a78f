"""The checkpoints of one run: the directory it owns, what is being written there, and when that is
committed.

A save in the background is committed at a step boundary: the exchange before the step
(`agree_on_step`) has then reported to all ranks that all have written. An error of any rank ends
the run there. Weights that hold NaN end the run. Weights without an update since the last
checkpoint are not written again. Nothing is removed while updates are being skipped.
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
"""What a rank reports to the others of its files; of several ranks the highest counts."""
_LATE_SECONDS = 40.0
"""How long another machine may see a file late on NFS: its caches of names hold for 30 s."""


def _require_lock(directory: str, owner: str, rank: int) -> None:
    """ValueError where this machine does not see the lock that rank 0 has written."""
    if rank == 0:  # which would lose a POSIX lock by closing its file once more
        return
    try:
        found = seen(lambda: read_regular(Path(directory, LOCK_FILE)), _LATE_SECONDS).decode(
            errors="replace"
        )
    except OSError:
        found = ""
    if found != owner:
        raise ValueError(
            f"--save {directory} is not one directory for all machines: the lock of {owner}, rank "
            "0, is not there"
        )


class Saver:
    """One run's checkpoints below `--save`; without it nothing is written. Collective over `world`.

    Raises ValueError on every rank when another run holds the directory or it cannot be written.
    """

    def __init__(self, config: RunConfig, world: Axis) -> None:
        self._config, self._world = config, world
        self._pending: PendingCheckpoint | None = None
        self._lock: DirectoryLock | None = None
        self._step: int | None = None
        self._updates: int | None = None
        self.newest: Place | None = None
        """The last checkpoint that this run has written or was resumed from; its weights are
        finite.
        """
        self.keeps_all = False
        """Whether old checkpoints stay, whatever --keep-last says: the run has just skipped a step.
        """
        self.notes: list[str] = []
        """What there is to say about the directory at the start."""
        if (save := config.checkpoint.save) is not None:
            self.notes, owner = on_rank_0(world, lambda: self._enter(save), ValueError)
            if owner:
                on_all_ranks(world, lambda: _require_lock(save, owner, world.rank), ValueError)

    def _enter(self, directory: str) -> tuple[list[str], str]:
        """What there is to say, and what stands in the lock, if there is one."""
        if is_url(directory):
            return [
                f"{directory} cannot be locked: a second run that saves there would not be noticed"
            ], ""
        self._lock = DirectoryLock(directory)
        if self._lock.problem:
            return [self._lock.problem], ""
        return remove_leftovers(directory), self._lock.owner

    def resumed(self, step: int, updates: int, path: Place) -> None:
        """The run starts from this checkpoint; where it lies in --save, its step and its weights
        need no saving.
        """
        self.newest = path
        save = self._config.checkpoint.save
        if save is not None and path.resolve().parent == place_of(save).resolve():
            self._step, self._updates = step, updates

    @property
    def save_state(self) -> int:
        """DONE, WRITING or SAVE_FAILED on this rank."""
        if self._pending is None:
            return DONE
        return WRITING if self._pending.writing else SAVE_FAILED if self._pending.failed else DONE

    def settle(self, of_all: int, say: Callable[[str], None]) -> None:
        """Commit what is pending, given the highest `save_state`; SaveError on all ranks when it
        failed on any.
        """
        if of_all != WRITING:
            self.finish(say)

    def save(
        self, model: ParallelModel, state: RunState, say: Callable[[str], None], reason: str
    ) -> None:
        """Save the state after `state.step`, in the background with --async-save; waits for an
        earlier one first.
        """
        step = state.step
        if self._config.checkpoint.save is None:
            say(f"{reason} after step {step}; no --save, so nothing was written")
            return
        self.finish(say)
        if self._step == step:
            say(f"{reason} after step {step}: {self.newest}")
            return
        updates = model.optimizer.updates
        if self._updates == updates:
            say(
                f"{reason} after step {step}: no update since step {self._step}, whose checkpoint "
                f"is {self.newest}"
            )
            return
        if damaged := damaged_tensors(saved_boxes(model), self._world):
            raise AnomalyError(f"the weights after step {step} are not finite: {damaged}")
        background = self._config.checkpoint.async_save
        self._pending = begin_save(model, state, model.config, background)  # auto is resolved there
        self._reason, self._pending_updates = reason, updates
        if background:
            say(f"saving step {step} in the background")
        else:
            self.finish(say)

    def finish(self, say: Callable[[str], None]) -> None:
        """Wait for what is pending, if anything is, and commit it."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        keep_last = 0 if self.keeps_all else self._config.checkpoint.keep_last
        self.newest = pending.commit(keep_last)
        self._step, self._updates = pending.step, self._pending_updates
        say(f"{self._reason} after step {pending.step}: {self.newest}")
        for note in pending.notes:
            say(note)

    def close(self) -> None:
        """Let another run have the directory; what is still pending is never committed."""
        if self._lock is not None:
            self._lock.release()
