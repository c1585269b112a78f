"""Activation offload: what autograd saves in some decoder blocks waits for its backward in host
memory.

Whole storages travel, once a block, whatever views of them are saved. Forward: a copy begins where
a tensor is saved, and the device's memory is let go when the next block is done, or begins its
backward. Backward: when a block begins, the storages of the block before it come back. On CUDA both
directions have a stream of their own, host buffers are pinned, and events order the copies.
Parameters, what all blocks share, small tensors, and a pipeline's received input stay.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

PLAIN: set[type] = {torch.Tensor}
"""Tensors that travel; a subclass may hold more than its storage."""
SMALLEST = 2048
"""Bytes of the smallest storage that travels: statistics of few rows cost more calls than they
free.
"""

Event = Any
"""`torch.cuda.Event`, or None on the CPU."""


class Lane:
    """Copies of one direction, one behind the other: a stream on CUDA; on the CPU a copy is done
    when it is asked.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        """Begin a copy behind the work of the current stream and the event `after`; the event of
        its end.
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
        """Let the current stream wait for a copy."""
        if event is not None and self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(event)


@dataclass
class HostBuffer:
    """Host memory that is used again and again: uint8 `[size]`, pinned for a GPU."""

    content: torch.Tensor
    used: Event = None
    """The end of the last copy that reads or writes it."""

    @property
    def size(self) -> int:
        return len(self.content)


@dataclass
class HostMemory:
    """Host buffers and lanes of a stage, and the block whose copies are under way."""

    device: torch.device
    free: list[HostBuffer] = field(default_factory=list)
    """Buffers that nothing waits in, by size."""
    allocated: int = 0
    """Bytes of all buffers."""

    def __post_init__(self) -> None:
        self.away, self.back = Lane(self.device), Lane(self.device)
        self.latest: Passage | None = None

    def leave_before(self, passage: Passage) -> None:
        """The backward of `passage` begins: what the last block of a later microbatch saved leaves
        for it now, not with the next forward."""
        if self.latest is not None and self.latest is not passage:
            self.latest.leave()
            self.latest = None

    def take(self, size: int) -> HostBuffer:
        """The smallest free buffer of `size` to twice as many bytes, or a new one: rows of a run
        differ in length.
        """
        place = bisect.bisect_left(self.free, size, key=lambda buffer: buffer.size)
        if place < len(self.free) and self.free[place].size <= 2 * size:
            return self.free.pop(place)
        on_gpu = self.device.type == "cuda"
        size = (
            1 << (size - 1).bit_length() if on_gpu else size
        )  # as torch's allocator rounds pinned memory up
        self.allocated += size
        return HostBuffer(torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu))

    def give(self, buffer: HostBuffer) -> None:
        """Take back a buffer that nothing waits in any more."""
        bisect.insort(self.free, buffer, key=lambda other: other.size)


class SavedStorage:
    """The storage of a saved tensor: on the device, on the host, or both while a copy is under way.
    Gone with its last `HostView`."""

    def __init__(self, memory: HostMemory, x: torch.Tensor) -> None:
        self.memory = memory
        self.size = x.untyped_storage().nbytes()
        self.host = memory.take(self.size)
        whole = x.detach().as_strided((self.size // x.itemsize,), (1,), 0)
        self.on_device: torch.Tensor | None = whole.view(torch.uint8)
        self.left = memory.away.copy(self.host.content[: self.size], self.on_device, self.host.used)
        self.arrived: Event = None
        self.wanted = False

    def leave(self) -> None:
        """Let go of the device's memory once it is copied, unless backward has asked for it
        already.
        """
        if not self.wanted:
            self.memory.away.wait(self.left)
            self.on_device = None

    def come_back(self) -> torch.Tensor:
        """The bytes on the device, where they arrive behind the event `arrived`."""
        self.wanted = True
        if self.on_device is None:
            self.on_device = torch.empty(self.size, dtype=torch.uint8, device=self.memory.device)
            self.arrived = self.memory.back.copy(
                self.on_device, self.host.content[: self.size], self.left
            )
        return self.on_device

    def __del__(self) -> None:
        self.memory.back.wait(
            self.arrived
        )  # also where nobody used it: its memory is about to be another's
        self.host.used = self.left if self.arrived is None else self.arrived
        self.memory.give(self.host)


class HostView(NamedTuple):
    """What autograd holds instead of a tensor: a storage and where in it the tensor lies."""

    stored: SavedStorage
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class Passage:
    """One forward of one block: its hooks, and the storages that wait for its backward."""

    def __init__(self, memory: HostMemory, staying: Iterable[torch.Tensor]) -> None:
        self.memory = memory
        self._staying = {x.untyped_storage()._cdata for x in staying}
        # by torch's handle of the storage; holds them until the block is done, so that no handle is
        # met twice
        self._open: dict[int, SavedStorage] = {}
        self._stored: list[weakref.ref[SavedStorage]] = []

    def pack(self, x: torch.Tensor) -> torch.Tensor | HostView:
        """What autograd saves of a tensor."""
        activation = (
            x.dtype.is_floating_point or x.dtype == torch.bool
        )  # integers are indices and names of tokens
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
        """The tensor that was packed."""
        if isinstance(held, torch.Tensor):
            return held
        content = held.stored.come_back()
        self.memory.back.wait(held.stored.arrived)
        with torch.no_grad():
            return content.view(held.dtype).as_strided(held.shape, held.stride, held.offset)

    def close(self) -> None:
        """The block's forward is done: from here on its storages belong only to autograd."""
        self._open.clear()

    def leave(self) -> None:
        """Let go of the device's memory."""
        for stored in filter(None, (reference() for reference in self._stored)):
            stored.leave()

    def come_back(self) -> None:
        """Begin to bring back what autograd still holds."""
        for stored in filter(None, (reference() for reference in self._stored)):
            stored.come_back()


@dataclass(frozen=True)
class BlockOffload:
    """The part of one block in it."""

    memory: HostMemory
    travels: bool
    """False for the first block that keeps its own: it brings back those of the one before."""
    first: bool
    """Whether the chunk begins here."""

    def __call__(
        self,
        run: Callable[..., torch.Tensor],
        x: torch.Tensor,
        inputs: Any,
        staying: Iterable[torch.Tensor],
    ) -> torch.Tensor:
        """`run(x, inputs, hooks=...)`; the tensors `staying` are never copied."""
        if not torch.is_grad_enabled():
            return run(x, inputs)
        memory = self.memory
        received = (
            (x,) if x.is_leaf and x.requires_grad else ()
        )  # a pipeline holds it until its gradient is sent
        passage = Passage(memory, (*staying, *received)) if self.travels else None
        out = run(x, inputs, hooks=(passage.pack, passage.unpack) if passage else None)
        if passage:
            passage.close()
            if out.requires_grad:
                out.register_hook(lambda grad: memory.leave_before(passage))
        previous, memory.latest = memory.latest, passage
        if previous:
            previous.leave()  # its copies had the time of this block
            if not self.first and out.requires_grad:
                out.register_hook(lambda grad: previous.come_back())  # this block's backward begins
        return out
