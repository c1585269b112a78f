"""Process settings: the heap of the C library, and defaults for environment variables."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# glibc's numbers of two options (malloc.h): free bytes at the end of the heap that are returned to
# the system, and size from which on memory is mapped separately
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def set_defaults(values: Mapping[str, str]) -> None:
    """Set environment variables of optional packages, unless the user has set them."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def keep_in_heap(largest: int) -> None:
    """Keep freed memory of tensors below `largest` bytes in the heap, to be reused.

    Larger tensors still get separate memory maps. Up to 16 times this size also stays free at the
    end of the heap. Setting one of glibc's options fixes the other one at 128 KiB, so both must be
    set; otherwise most pages of a step would be cleared again.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, largest)
        mallopt(_M_TRIM_THRESHOLD, 16 * largest)


def trim_heap() -> None:
    """Return free pages of the C library's heap to the system.

    CPU training loops call this from time to time.
    """
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)
