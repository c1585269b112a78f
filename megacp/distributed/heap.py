"""Process settings: the heap of the C library, and defaults for environment variables."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# glibc's numbers for two options (malloc.h): the free bytes at the end of the heap above which they
# are returned to the system, and the size above which memory is mapped separately
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def set_defaults(values: Mapping[str, str]) -> None:
    """Set environment variables of optional packages, unless the user has set them."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def keep_in_heap(largest: int) -> None:
    """Keep the freed memory of tensors below `largest` bytes in the heap for reuse.

    Larger tensors still get separate memory maps. Up to 16 times this size also stays free at the
    end of the heap. Setting only one of glibc's options would fix the other at 128 KiB, and most
    pages would be cleared again in every step.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, largest)
        mallopt(_M_TRIM_THRESHOLD, 16 * largest)


def trim_heap() -> None:
    """Return free pages of the C library's heap to the system.

    CPU training loops call this function periodically.
    """
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)
