"""What the operating system refuses while a dataset is built, as one message: which path, and what to do."""

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
def storage_faults(output: Path) -> Iterator[None]:
    """Turn an OSError into a StorageFault of `output`: after `write`, the bare one names no file."""
    try:
        yield
    except OSError as error:
        reason, name = error.strerror or str(error), os.fsdecode(error.filename or "")
        if error.errno is None or error.errno in _FULL:  # numpy raises "N requested and M written" without a number
            free = shutil.disk_usage(next(folder for folder in (output, *output.absolute().parents) if folder.exists()))
            raise StorageFault(
                f"--output {output}: {reason}, {free.free:,} bytes are free there; "
                "what is finished stays: make room and run the same command again"
            ) from error
        somewhere = f"while the input was read or --output {output} was written"
        raise StorageFault(f"{name}: {reason}" if name else f"{reason}, {somewhere}") from error
