"""Process settings: the C library's heap, and defaults of other libraries' environment
variables.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's names of two options (malloc.h): free bytes at the heap's end, and those that get a map
of their own.
"""


def set_defaults(values: Mapping[str, str]) -> None:
    """Give environment variables of guest packages these values where the user has set none."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def keep_in_heap(largest: int) -> None:
    """Let the C library use again what tensors below these bytes let go of; larger ones get memory
    maps.

    What is free at the heap's end stays there too, up to sixteen of them: to set one of glibc's
    options fixes the other one at 128 KiB, and most pages of a step would be cleared anew.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, largest)
        mallopt(_M_TRIM_THRESHOLD, 16 * largest)


def trim_heap() -> None:
    """Give free pages of the C library's heap back; a training loop on CPU calls it now and
    then.
    """
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)
