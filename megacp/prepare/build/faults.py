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
        reason = error.strerror or str(error)  # numpy raises "N requested and M written" without a number
        name = os.fsdecode(error.filename) if error.filename is not None else ""
        if error.errno is None or error.errno in _FULL:
            there = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
            message = (
                f"--output {output}: {reason}, {shutil.disk_usage(there).free:,} bytes are free there; "
                "what is finished stays: make room and run the same command again"
            )
        elif not name:
            message = f"{reason}, while the input was read or --output {output} was written"
        else:
            inside = Path(os.path.abspath(name)).is_relative_to(os.path.abspath(output))
            message = f"--output {output}: {name}: {reason}" if inside else f"{name}: {reason}"
        raise StorageFault(message) from error
