"""Large results of CPU ranks in memory that is used again.

Key property: a block is free when the last tensor on it is gone, whoever held it: autograd, a view, a message. torch
then lets go of the object that stands for the block, and that tells. So no block is written while it can be read.

The C library maps a large tensor anew each time and the kernel clears its pages: a tenth of a step of long rows, and a
quarter where other programs use the memory. Kept in its heap they are soon cut for smaller ones, and a rank grows by a
half. Blocks here are whole, and together never larger than what was in use at once: where one of a new size would
be too much, free ones of other sizes go back to the system first. Free ones stay beside what else a program allocates
at another time, until `give_back`. A tensor on a block cannot be resized.

Rejected: huge pages, which are cleared as well. Rejected: an arena for a step, which must know when autograd is done.
Rejected: torch's use counts of storages, which are private.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

import torch

LARGE = 4 << 20
"""Bytes from which on a tensor gets a block."""
_WINDOW = 1 << 16
"""Blocks taken from one `release` to the next: more than a microbatch of a large model takes."""


class _Lease(weakref.ref):
    """Tells when no tensor needs a block any more."""

    block: mmap.mmap


class LargeBlocks:
    """Blocks that are free, by size, and those in use. Any thread may take and let go."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = defaultdict(list)
        self._leases: dict[int, _Lease] = {}
        self._ended: deque[_Lease] = deque()
        """Leases whose tensors are gone. No Python runs when one dies: what a signal raises there would be lost."""
        self._lock = threading.RLock()
        self.active, self.smallest = False, LARGE
        """Whether tensors get blocks, and the bytes from which on."""
        self._held = self._used = 0
        self._peak = self._peak_before = 0
        """Most bytes in use at once since the last `release`, and in the time before it."""
        self._taken = 0

    @property
    def used(self) -> int:
        """Bytes of the blocks in use."""
        with self._lock:
            self._collect()
            return self._used

    @property
    def held(self) -> int:
        """Bytes of all blocks."""
        return self._held

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor that holds the values of an earlier one; OSError where the system has no memory."""
        count = math.prod(shape)
        with self._lock:
            self._taken += 1
            if self._taken % _WINDOW == 0:
                self.release()
            view = self._take(_block_size(count * dtype.itemsize))
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
            self._collect()
            for lease in [lease for lease in list(self._leases.values()) if lease() is None]:
                self._end(lease)
            # counted anew: a signal that raised between two lines has left these wrong, and may have left such leases
            self._used = sum(len(lease.block) for lease in self._leases.values())
            self._held = self._used + sum(size * len(blocks) for size, blocks in self._free.items())
            self._peak_before, self._peak = self._peak, self._used
            self._shrink(max(self._peak, self._peak_before))

    def give_back(self) -> None:
        """Let all free blocks go back to the system."""
        with self._lock:
            self._collect()
            self._shrink(0)

    def forked(self) -> None:
        """For a new process: another thread may have had the lock when this one was copied."""
        self._lock = threading.RLock()

    def _take(self, size: int) -> memoryview:
        """The bytes of a block; it is free again once nothing refers to them."""
        self._collect()
        peak = max(self._peak, self._used + size)
        block = self._free[size].pop() if self._free[size] else self._new(size, max(peak, self._peak_before))
        view = memoryview(block)
        lease = _Lease(view, self._ended.append)
        lease.block = block
        self._leases[id(lease)] = lease
        self._used += size
        self._peak = peak
        return view

    def _new(self, size: int, most: int) -> mmap.mmap:
        self._shrink(most - size)
        try:
            block = _map(size)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise  # a signal's
            self._shrink(0)
            block = _map(size)
        self._held += size
        return block

    def _shrink(self, most: int) -> None:
        """Give free blocks back until `most` bytes are held at most: the smallest that is enough, else the largest."""
        while (excess := self._held - most) > 0 and (sizes := [size for size, blocks in self._free.items() if blocks]):
            size = min((size for size in sizes if size >= excess), default=max(sizes))
            self._free[size].pop()  # its last holder: the map ends here
            self._held -= size

    def _collect(self) -> None:
        """Take up what tensors have let go of."""
        with contextlib.suppress(IndexError):  # nothing is left, maybe as a signal's handler was here meanwhile
            while True:
                self._end(self._ended.popleft())

    def _end(self, lease: _Lease) -> None:
        if self._leases.pop(id(lease), None) is not None:  # else a signal raised before it stood there
            self._free[len(lease.block)].append(lease.block)
            self._used -= len(lease.block)


def _map(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _block_size(size: int) -> int:
    """One of eight sizes in an octave; pages beyond `size` that nobody touches take no memory."""
    step = max(mmap.PAGESIZE, 1 << (size.bit_length() - 4))
    return -(-size // step) * step


BLOCKS = LargeBlocks()
"""Those of this process."""


def reuse_large_blocks() -> None:
    """Let `empty`, `zeros` and `product` of this process use blocks, where the system maps memory so."""
    BLOCKS.active = hasattr(mmap, "MAP_ANONYMOUS")


if hasattr(os, "register_at_fork"):  # a child would keep the pages of free blocks that its parent writes to
    os.register_at_fork(before=BLOCKS.give_back, after_in_child=BLOCKS.forked)


def takes_block(shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether a tensor of this shape, on the device of another one, gets a block.

    None does in a program that torch compiles, nor under autocast, which does not know operators that write to a given
    tensor.
    """
    if torch.compiler.is_compiling() or not BLOCKS.active or like.device.type != "cpu":
        return False
    large = math.prod(shape) * (dtype or like.dtype).itemsize >= BLOCKS.smallest
    return large and not torch.is_autocast_enabled("cpu")


def empty(shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A contiguous tensor with any values, of the device and dtype of another one where no dtype is given."""
    if takes_block(shape, like, dtype):
        try:
            return BLOCKS.empty(shape, dtype or like.dtype)
        except OSError as error:
            if error.errno != errno.ENOMEM:  # else torch says how much memory is missing
                raise
    return like.new_empty(shape, dtype=dtype)


def zeros(shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`empty`, all 0."""
    if takes_block(shape, like, dtype):
        return empty(shape, like, dtype).zero_()
    return like.new_zeros(shape, dtype=dtype)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a[..., h] b[h, f] -> [..., f]`, in a block where no gradient is recorded."""
    shape = (*a.shape[:-1], b.shape[1])
    if torch.is_grad_enabled() or a.dim() < 2 or not takes_block(shape, a):
        return a @ b
    out = empty(shape, a)
    torch.mm(a.flatten(0, -2), b, out=out.view(-1, b.shape[1]))
    return out
