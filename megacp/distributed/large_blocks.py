"""Reusable memory blocks for large results on CPU ranks.

The C library maps new memory for every large tensor, and the kernel clears its pages. For long
rows, this takes a tenth of a step, or a quarter while other programs use the memory. If large
tensors were kept in the C library's heap instead, smaller tensors would soon fragment it, and the
memory of a rank would grow by half.

Blocks are never split, and their total size never exceeds the peak that was in use. A block becomes
free when its last tensor is gone, even if that tensor was held by autograd, a view or a message. A
tensor in a block cannot be resized.
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
"""Minimum size in bytes of a tensor that gets a block."""


class _Lease(weakref.ref):
    """A weak reference to a block's memory; its callback reports when no tensor uses the block."""

    block: mmap.mmap


class LargeBlocks:
    """Free blocks by size, and blocks in use; safe to use from several threads."""

    def __init__(self) -> None:
        self.active = False
        """Whether tensors get blocks."""
        self.smallest = LARGE
        """Minimum size in bytes of tensors that get blocks."""
        self.held = 0
        """Bytes of all blocks."""
        self._used = 0
        """Bytes of the blocks in use."""
        self._peak = 0
        """Largest number of bytes that were in use at the same time."""
        self._free: dict[int, list[mmap.mmap]] = defaultdict(list)
        self._leases: dict[int, _Lease] = {}
        self._ended: deque[_Lease] = deque()
        """Leases whose tensors are gone. Their callback only appends to this list and runs no
        Python code, because an exception from a signal handler would be lost there.
        """
        self._lock = threading.RLock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor with undefined values.

        Raise OSError if the system is out of memory.
        """
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        # round up to one of eight sizes per octave; pages that are never touched cost nothing
        step = max(mmap.PAGESIZE, 1 << (nbytes.bit_length() - 4))
        size = -(-nbytes // step) * step
        with self._lock:
            while self._ended:  # collect the blocks of tensors that are gone
                lease = self._ended.popleft()
                del self._leases[id(lease)]
                self._free[len(lease.block)].append(lease.block)
                self._used -= len(lease.block)
            block = self._free[size].pop() if self._free[size] else self._new(size)
            view = memoryview(block)  # torch keeps it while a tensor uses the block
            lease = _Lease(view, self._ended.append)
            lease.block = block
            self._leases[id(lease)] = lease
            self._used += size
            self._peak = max(self._peak, self._used)
        return torch.frombuffer(view, dtype=dtype, count=count).view(shape)

    def _new(self, size: int) -> mmap.mmap:
        """Return a new block, after returning free blocks beyond the peak to the system.

        The smallest sufficient block is returned first.
        """
        most = max(self._peak, self._used + size)
        while (excess := self.held + size - most) > 0:
            sizes = [s for s, blocks in self._free.items() if blocks]
            if not sizes:
                break
            given = min((s for s in sizes if s >= excess), default=max(sizes))
            self._free[given].pop()  # drops the last reference, which unmaps the block
            self.held -= given
        block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.held += size
        return block


BLOCKS = LargeBlocks()
"""Blocks of this process; each rank sets `active` if it uses them."""


def _takes_block(shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a result of this shape gets a block.

    Compiled programs use no blocks. Neither does code under autocast, because its operators cannot
    write to a given tensor.
    """
    if torch.compiler.is_compiling() or not BLOCKS.active or like.device.type != "cpu":
        return False
    if math.prod(shape) * dtype.itemsize < BLOCKS.smallest:
        return False
    return not torch.is_autocast_enabled("cpu")


def empty(
    shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a contiguous tensor with undefined values on the device of `like`.

    The dtype defaults to `like.dtype`.
    """
    if _takes_block(shape, like, dtype or like.dtype):
        # on failure, fall back to torch, whose error reports how much memory is missing
        with contextlib.suppress(OSError, OverflowError):
            return BLOCKS.empty(shape, dtype or like.dtype)
    return like.new_empty(shape, dtype=dtype)


def zeros(
    shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a contiguous tensor of zeros on the device of `like`; see `empty`."""
    return empty(shape, like, dtype).zero_()


def large_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return `a[..., h] b[h, f] -> [..., f]`, in a block if no gradient is recorded."""
    shape = (*a.shape[:-1], b.shape[1])
    if torch.is_grad_enabled() or a.dim() < 2 or not _takes_block(shape, a, a.dtype):
        return a @ b
    out = empty(shape, a)
    torch.mm(a.flatten(0, -2), b, out=out.view(-1, b.shape[1]))
    return out
