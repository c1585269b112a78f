"""One run at a time writes to a directory of checkpoints: a lock that the system frees when its process ends.

Key property: the lock is a POSIX record lock (`fcntl.lockf`) on DIRECTORY/lock, so nothing has to be cleaned up after
kill -9 or a power cut; the text in the file is for people only. It acts between processes of one machine on every local
file system. Between machines it acts on NFS from version 3 on with a lock daemon, on GPFS, BeeGFS, and on Lustre
mounted with `-o flock`. After the death of a machine NFS 4 frees it when the lease runs out. Where the file system has
no locks, `problem` says so and the run goes on unprotected.

Rejected: `flock`, which a forked child of a killed run would keep. Rejected: a file whose existence is the lock, which
outlives its owner.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from megacp.core.storage import files

LOCK_FILE = "lock"
_OWNER = re.compile(rb"(host [^\n]*, process \d+\n)?")
"""What a lock file may hold: it is written over."""
_MOST = 4096


class DirectoryLock:
    """Held from construction to `release` or the end of this process.

    Raises ValueError, with the host and process id of the owner, when another process holds it. Raises it also where
    the lock file is a link or a file of somebody else.
    """

    def __init__(self, directory: Path | str) -> None:
        root = Path(directory)
        root.mkdir(parents=True, exist_ok=True)
        path = root / LOCK_FILE
        self.problem: str | None = None
        """Why there is no protection; None where there is."""
        self._descriptor: int | None = None
        try:
            self._descriptor = files.lock(path)
        except BlockingIOError as taken:
            with files.open_regular(path) as stream:  # another process has the lock, so closing this loses none
                owner = stream.read(_MOST).decode(errors="replace").strip()
            raise ValueError(
                f"--save {directory} is in use by {owner or 'another run'}: choose another directory, or end that run"
            ) from taken
        except files.NoLocksError as error:
            self.problem = f"{path} cannot be locked ({error.strerror}): a second run would not be noticed"
            return
        if not _OWNER.fullmatch(os.pread(self._descriptor, _MOST, 0)):
            self.release()  # a second name of another file, for example
            raise ValueError(f"{path} is no lock of a run and would be written over: move it away")
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"host {socket.gethostname()}, process {os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let the next run in; may be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
