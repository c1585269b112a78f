"""Large results of CPU ranks in memory that is used again.

The C library maps a large tensor anew each time and the kernel clears its pages: a tenth of a step
of long rows, and a quarter where other programs use the memory. Kept in its heap they are soon cut
for smaller ones, and a rank grows by a half. Blocks here are whole, and together never larger than
what was in use at once. A block is free when the last tensor on it is gone, whoever held it:
autograd, a view, a message. A tensor on a block cannot be resized.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence

import torch

LARGE = 4 << 20
"""Bytes from which on a tensor gets a block."""


class _Lease(weakref.ref):
    """Tells when no tensor needs a block any more."""

    block: mmap.mmap


class LargeBlocks:
    """Blocks that are free, by size, and those in use. Any thread may take and let go."""

    def __init__(self) -> None:
        self.active, self.smallest = False, LARGE
        """Whether tensors get blocks, and the bytes from which on."""
        self.held = self._used = self._peak = 0
        """Bytes of all blocks, of those in use, and the most that were in use at once."""
        self._free: dict[int, list[mmap.mmap]] = defaultdict(list)
        self._leases: dict[int, _Lease] = {}
        self._ended: deque[_Lease] = deque()
        """Leases whose tensors are gone. No Python runs when one dies: what a signal raises there
        would be lost.
        """
        self._lock = threading.RLock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor that holds the values of an earlier one; OSError where the system has
        no memory.
        """
        count = math.prod(shape)
        step = max(mmap.PAGESIZE, 1 << ((count * dtype.itemsize).bit_length() - 4))
        size = (
            -(-count * dtype.itemsize // step) * step
        )  # eight sizes in an octave; pages nobody touches cost nothing
        with self._lock:
            while self._ended:  # what tensors have let go of
                lease = self._ended.popleft()
                del self._leases[id(lease)]
                self._free[len(lease.block)].append(lease.block)
                self._used -= len(lease.block)
            block = self._free[size].pop() if self._free[size] else self._new(size)
            view = memoryview(block)  # torch holds it as long as a tensor is on the block
            lease = _Lease(view, self._ended.append)
            lease.block = block
            self._leases[id(lease)] = lease
            self._used += size
            self._peak = max(self._peak, self._used)
        return torch.frombuffer(view, dtype=dtype, count=count).view(shape)

    def _new(self, size: int) -> mmap.mmap:
        """Free blocks beyond the most that were in use go back to the system: the smallest that is
        enough first.
        """
        most = max(self._peak, self._used + size)
        while (excess := self.held + size - most) > 0 and (
            sizes := [s for s, blocks in self._free.items() if blocks]
        ):
            given = min((s for s in sizes if s >= excess), default=max(sizes))
            self._free[given].pop()  # its last holder: the map ends here
            self.held -= given
        block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.held += size
        return block


BLOCKS = LargeBlocks()
"""Blocks of this process; a rank makes them `active`."""


def _takes_block(shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a block is used: not in a compiled program, nor under autocast, whose operators write
    to no tensor.
    """
    if torch.compiler.is_compiling() or not BLOCKS.active or like.device.type != "cpu":
        return False
    return math.prod(shape) * dtype.itemsize >= BLOCKS.smallest and not torch.is_autocast_enabled(
        "cpu"
    )


def empty(
    shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A contiguous tensor with any values, of the device and dtype of another one where no dtype is
    given.
    """
    if _takes_block(shape, like, dtype or like.dtype):
        with contextlib.suppress(OSError, OverflowError):  # torch says how much memory is missing
            return BLOCKS.empty(shape, dtype or like.dtype)
    return like.new_empty(shape, dtype=dtype)


def zeros(
    shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`empty`, all 0."""
    return empty(shape, like, dtype).zero_()


def large_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a[..., h] b[h, f] -> [..., f]`, in a block where no gradient is recorded."""
    shape = (*a.shape[:-1], b.shape[1])
    if torch.is_grad_enabled() or a.dim() < 2 or not _takes_block(shape, a, a.dtype):
        return a @ b
    out = empty(shape, a)
    torch.mm(a.flatten(0, -2), b, out=out.view(-1, b.shape[1]))
    return out
