"""One run at a time writes to a directory of checkpoints: a lock that the system lets go of when its process ends.

Key property: the lock is a POSIX record lock (`fcntl.lockf`) on DIRECTORY/lock, so nothing has to be cleaned up after
kill -9 or a lost power supply; what the file says is for people only. It acts between processes of one machine on every
local file system, and between machines on NFS from version 3 on with a lock daemon (after the death of a whole
machine NFS 4 frees it when the lease runs out), GPFS, BeeGFS, and Lustre mounted with `-o flock`. Where the file system
has no locks, `problem` says so and the run goes on unprotected. Rejected: `flock`, which a forked child of a killed run
would keep, and a file whose existence is the lock, which outlives its owner.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

LOCK_FILE = "lock"


class DirectoryLock:
    """Held from construction to `release` or the end of this process. Raises ValueError, with the host and process id
    of the owner, when another process holds it."""

    def __init__(self, directory: Path | str) -> None:
        root = Path(directory)
        root.mkdir(parents=True, exist_ok=True)
        self.problem: str | None = None
        """Why there is no protection; None where there is."""
        descriptor = os.open(root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._descriptor: int | None = descriptor
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as taken:
            owner = os.pread(descriptor, 400, 0).decode(errors="replace").strip()
            self.release()
            raise ValueError(
                f"--save {directory} is in use by {owner or 'another run'}: choose another directory, or end that run"
            ) from taken
        except OSError as error:
            self.problem = f"{root / LOCK_FILE} cannot be locked ({error.strerror}): a second run would not be noticed"
            return
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"host {socket.gethostname()}, process {os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let the next run in; may be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
