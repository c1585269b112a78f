"""What the operating system refuses while a dataset is built, as one message: which path, how many bytes, what to do.

Key property: a full disk reads the same whichever write met it, in this process or in a worker. The bare OSError names
no file after `write`.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StorageFault(ValueError):
    """The disk is full, or a path cannot be read or written."""


@contextmanager
def told(output: Path, shard: Path | None = None) -> Iterator[None]:
    """Turn an OSError into a StorageFault of `output`; `shard`: its folder that is being written."""
    try:
        yield
    except OSError as error:
        raise StorageFault(_message(error, output, shard)) from error


def _message(error: OSError, output: Path, shard: Path | None) -> str:
    reason = error.strerror or str(error)  # numpy raises "N requested and M written" without a number
    if error.errno is not None and error.errno not in _FULL:
        if error.filename is None:
            return f"{reason}, while the input was read or --output {output} was written"
        name = os.fsdecode(error.filename)
        inside = Path(os.path.abspath(name)).is_relative_to(os.path.abspath(output))
        return f"--output {output}: {name}: {reason}" if inside else f"{name}: {reason}"
    written = f", {_size(shard):,} bytes of {shard.name} were written" if shard is not None else ""
    return (
        f"--output {output}: {reason}{written}, {_free(output):,} bytes are free there; "
        "what is finished stays: make room and run the same command again"
    )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*") if path.is_file())


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
