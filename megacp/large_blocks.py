"""Large results of CPU ranks in memory that is used again.

Key property: a block is free when the last tensor on it is gone, whoever held it: autograd, a view, a message. torch
then lets go of the object that stands for the block, and that tells. So no block is written while it can be read.

The C library maps a large tensor anew each time and the kernel clears its pages: a tenth of a step of long rows, and a
quarter where other programs use the memory. Kept in its heap they are soon cut for smaller ones, and a rank grows by a
half. Blocks here are whole, and together never larger than what was in use at once: where one of a new size would
be too much, free ones of other sizes go back to the system first. So a peak is that of tensors without blocks.

Rejected: huge pages, which are cleared as well. Rejected: an arena for a step, which must know when autograd is done.
Rejected: torch's use counts of storages, which are private.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

LARGE = 4 << 20
"""Bytes from which on a tensor gets a block."""


class _Lease(weakref.ref):
    """Tells when no tensor needs a block any more."""

    block: mmap.mmap


class LargeBlocks:
    """Blocks that are free, by size, and those in use. Any thread may take and let go."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = defaultdict(list)
        self._leases: dict[int, _Lease] = {}
        self._lock = threading.RLock()  # the collector may let go of tensors anywhere, also in a thread that has it
        self.active, self.smallest = False, LARGE
        """Whether tensors get blocks, and the bytes from which on."""
        self.held = self.used = 0
        """Bytes of all blocks, and of those in use."""
        self._peak = self._peak_before = 0
        """Most bytes in use at once since the last `release`, and in the time before it."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor that holds the values of an earlier one."""
        count = math.prod(shape)
        with self._lock:
            block = self._take(_block_size(count * dtype.itemsize))
            view = memoryview(block)
            lease = _Lease(view, self._returned)
            lease.block = block
            self._leases[id(lease)] = lease
        return torch.frombuffer(view, dtype=dtype, count=count).view(shape)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let torch allocate large tensors too, so that its profiler hears of them."""
        active, self.active = self.active, False
        try:
            yield
        finally:
            self.active = active

    def release(self) -> None:
        """Forget what was in use before the last call; free blocks beyond the peak since then go back to the system."""
        with self._lock:
            self._peak_before, self._peak = self._peak, self.used
            self._shrink()

    def _take(self, size: int) -> mmap.mmap:
        self.used += size
        self._peak = max(self._peak, self.used)
        if self._free[size]:
            return self._free[size].pop()
        self.held += size
        self._shrink()
        return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _shrink(self) -> None:
        """Give free blocks back, large ones first, until no more are held than were in use at once."""
        for size in sorted(self._free, reverse=True):
            while self._free[size] and self.held > max(self._peak, self._peak_before):
                self._free[size].pop()  # its last holder: the map ends here
                self.held -= size

    def _returned(self, lease: Any) -> None:
        with self._lock:
            del self._leases[id(lease)]
            self._free[len(lease.block)].append(lease.block)
            self.used -= len(lease.block)


def _block_size(size: int) -> int:
    """One of eight sizes in an octave; pages beyond `size` that nobody touches take no memory."""
    step = max(mmap.PAGESIZE, 1 << (size.bit_length() - 4))
    return -(-size // step) * step


BLOCKS = LargeBlocks()
"""Those of this process."""


def reuse_large_blocks() -> None:
    """Let `empty`, `zeros` and `product` of this process use blocks, where the system maps memory so."""
    BLOCKS.active = hasattr(mmap, "MAP_ANONYMOUS")


def takes_block(shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether a tensor of this shape, on the device of another one, gets a block."""
    if not BLOCKS.active or like.device.type != "cpu":
        return False
    return math.prod(shape) * (dtype or like.dtype).itemsize >= BLOCKS.smallest


def empty(shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A contiguous tensor with any values, of the device and dtype of another one where no dtype is given."""
    if takes_block(shape, like, dtype):
        return BLOCKS.empty(shape, dtype or like.dtype)
    return like.new_empty(shape, dtype=dtype)


def zeros(shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`empty`, all 0."""
    if takes_block(shape, like, dtype):
        return empty(shape, like, dtype).zero_()
    return like.new_zeros(shape, dtype=dtype)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a[n, h] b[h, f] -> [n, f]`, not differentiable where it is large."""
    shape = (a.shape[0], b.shape[1])
    return torch.mm(a, b, out=empty(shape, a)) if takes_block(shape, a) else a @ b
