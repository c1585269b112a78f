"""Activation offload: keeps saved tensors of some blocks in host memory until the backward pass.

A block copies each storage once, no matter how many views of it are saved.

- Forward pass: the copy to the host starts when a tensor is saved. The device memory is released
  when the next block finishes its forward pass, or starts its backward pass.
- Backward pass: when a block starts, the copies back to the device start for the block before it.

On CUDA, each direction has a separate stream, host buffers are pinned, and events order the copies.
Parameters, tensors that all blocks share, small tensors, and inputs received from another pipeline
stage stay on the device.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

PLAIN: set[type] = {torch.Tensor}
"""Types of tensors to offload. A subclass may have content outside its storage."""
SMALLEST = 2048
"""Minimum size in bytes of a storage to offload. Small storages, such as statistics of a few rows,
are not worth the time for a copy.
"""

Event = Any
"""`torch.cuda.Event`, or None on the CPU."""


class Lane:
    """Ordered copies in one direction: on a separate stream on CUDA, immediately on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        """Start a copy that waits for the current stream and for the event `after`.

        Return an event that marks the end of the copy. On a CPU, where the copy is complete on
        return, return None.
        """
        if self.stream is None:
            target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        if after is not None:
            self.stream.wait_event(after)
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, event: Event) -> None:
        """Make the current stream, but not the host, wait for the end of a copy."""
        if event is not None and self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(event)


@dataclass
class HostBuffer:
    """Reusable host memory, pinned for a GPU."""

    content: torch.Tensor  # uint8 [size]
    used: Event = None
    """Event at the end of the last copy that reads or writes the buffer."""

    @property
    def size(self) -> int:
        """Size in bytes."""
        return len(self.content)


@dataclass
class HostMemory:
    """A pipeline stage's host buffers and lanes, and its latest forward pass."""

    device: torch.device
    free: list[HostBuffer] = field(default_factory=list)
    """Unused buffers, sorted by size."""
    allocated: int = 0
    """Total size of all buffers, in bytes."""

    def __post_init__(self) -> None:
        self.away = Lane(self.device)
        self.back = Lane(self.device)
        self.latest: Passage | None = None
        """Latest forward pass of a block, if it has not released its device memory yet."""

    def leave_before(self, passage: Passage) -> None:
        """Release the latest forward pass's device memory before `passage` starts its backward.

        The latest forward pass may belong to a later microbatch. Without this call, its memory
        would be released only by the next forward pass.
        """
        if self.latest is not None and self.latest is not passage:
            self.latest.leave()
            self.latest = None

    def take(self, size: int) -> HostBuffer:
        """Return the smallest free buffer of `size` to 2 x `size` bytes, or a new one.

        Rows have different lengths, so exact sizes would rarely match.
        """
        place = bisect.bisect_left(self.free, size, key=lambda buffer: buffer.size)
        if place < len(self.free) and self.free[place].size <= 2 * size:
            return self.free.pop(place)
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            # torch's allocator rounds the size of pinned memory up to a power of two anyway
            size = 1 << (size - 1).bit_length()
        self.allocated += size
        return HostBuffer(torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu))

    def give(self, buffer: HostBuffer) -> None:
        """Add `buffer`, which is no longer in use, to the free buffers."""
        bisect.insort(self.free, buffer, key=lambda other: other.size)


class SavedStorage:
    """Storage of a saved tensor: on the device, on the host, or on both during a copy.

    When its last `HostView` is deleted, the storage is deleted too and its host buffer is freed.
    """

    def __init__(self, memory: HostMemory, x: torch.Tensor) -> None:
        self.memory = memory
        self.size = x.untyped_storage().nbytes()
        self.host = memory.take(self.size)
        # the whole storage as bytes, regardless of which view of it `x` is
        whole = x.detach().as_strided((self.size // x.itemsize,), (1,), 0)
        self.on_device: torch.Tensor | None = whole.view(torch.uint8)
        # the buffer's previous user may still be copying
        self.left = memory.away.copy(self.host.content[: self.size], self.on_device, self.host.used)
        """Event at the end of the copy to the host."""
        self.arrived: Event = None
        """Event at the end of the copy back."""
        self.wanted = False
        """Whether the backward pass has requested the storage."""

    def leave(self) -> None:
        """Release the device memory after the copy, unless the backward pass already needs it."""
        if not self.wanted:
            self.memory.away.wait(self.left)
            self.on_device = None

    def come_back(self) -> torch.Tensor:
        """Start the copy back if necessary; return the bytes, valid after the event `arrived`."""
        self.wanted = True
        if self.on_device is None:
            self.on_device = torch.empty(self.size, dtype=torch.uint8, device=self.memory.device)
            self.arrived = self.memory.back.copy(
                self.on_device, self.host.content[: self.size], self.left
            )
        return self.on_device

    def __del__(self) -> None:
        # wait even if the bytes were never used, because torch may now reuse their device memory
        self.memory.back.wait(self.arrived)
        self.host.used = self.left if self.arrived is None else self.arrived
        self.memory.give(self.host)


class HostView(NamedTuple):
    """Replacement for a saved tensor in the autograd graph: its storage and its view."""

    stored: SavedStorage
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class Passage:
    """A block's forward pass: hooks for saved tensors, and storages until the backward pass."""

    def __init__(self, memory: HostMemory, staying: Iterable[torch.Tensor]) -> None:
        self.memory = memory
        self._staying = {x.untyped_storage()._cdata for x in staying}
        # Storages of the current forward pass, by torch's handle. They are kept alive until the
        # block is done, because torch could otherwise reuse a handle.
        self._open: dict[int, SavedStorage] = {}
        # weak references, so that only autograd determines how long a storage exists
        self._stored: list[weakref.ref[SavedStorage]] = []

    def pack(self, x: torch.Tensor) -> torch.Tensor | HostView:
        """Return the object to save instead of `x`, or `x` itself if it stays on the device."""
        # integer tensors are indices and token identifiers, which all blocks share
        activation = x.dtype.is_floating_point or x.dtype == torch.bool
        if not activation or type(x) not in PLAIN or x.device.type != self.memory.device.type:
            return x
        storage = x.untyped_storage()
        handle = storage._cdata
        if storage.nbytes() < SMALLEST or handle in self._staying:
            return x
        if handle not in self._open:
            self._open[handle] = SavedStorage(self.memory, x)
            self._stored.append(weakref.ref(self._open[handle]))
        return HostView(self._open[handle], x.dtype, int(x.storage_offset()), x.shape, x.stride())

    def unpack(self, held: torch.Tensor | HostView) -> torch.Tensor:
        """Return the tensor that was given to `pack`, copied back to the device."""
        if isinstance(held, torch.Tensor):
            return held
        content = held.stored.come_back()
        self.memory.back.wait(held.stored.arrived)
        with torch.no_grad():
            return content.view(held.dtype).as_strided(held.shape, held.stride, held.offset)

    def close(self) -> None:
        """End the block's forward pass. Afterwards, only autograd keeps its storages alive."""
        self._open.clear()

    def leave(self) -> None:
        """Release the device memory of all storages that autograd still needs."""
        for reference in self._stored:
            stored = reference()
            if stored is not None:
                stored.leave()

    def come_back(self) -> None:
        """Start to copy all storages that autograd still needs back to the device."""
        for reference in self._stored:
            stored = reference()
            if stored is not None:
                stored.come_back()


@dataclass(frozen=True)
class BlockOffload:
    """Offload of one block. Calling it runs the block with hooks for saved tensors."""

    memory: HostMemory
    travels: bool
    """Whether to offload this block. False for the first block that is not offloaded, which only
    starts the copies back for the block before it.
    """
    first: bool
    """Whether this is the first block of its chunk."""

    def __call__(
        self,
        run: Callable[..., torch.Tensor],
        x: torch.Tensor,
        inputs: Any,
        staying: Iterable[torch.Tensor],
    ) -> torch.Tensor:
        """Return `run(x, inputs, hooks=...)`. Tensors in `staying` are never offloaded."""
        if not torch.is_grad_enabled():
            return run(x, inputs)
        memory = self.memory
        passage = None
        hooks = None
        if self.travels:
            # the pipeline keeps a received input until it has sent its gradient
            received = (x,) if x.is_leaf and x.requires_grad else ()
            passage = Passage(memory, (*staying, *received))
            hooks = (passage.pack, passage.unpack)
        out = run(x, inputs, hooks=hooks)
        if passage:
            passage.close()
            if out.requires_grad:
                out.register_hook(lambda grad: memory.leave_before(passage))
        # release the device memory of the block before this one
        previous = memory.latest
        memory.latest = passage
        if previous:
            # its copies could finish during this block's forward pass
            previous.leave()
            if not self.first and out.requires_grad:
                # a gradient for `out` means that this block's backward pass starts
                out.register_hook(lambda grad: previous.come_back())
        return out
