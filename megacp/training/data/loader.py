"""Loader: read the packs of each data-parallel rank, and prepare steps in advance in threads.

A step depends only on the dataset, the seed, the consumed samples, the dp rank and the dp size. A
run can therefore resume from a single integer, on any number of ranks, and uses every sample
exactly once per epoch. The samples in a step are the same for every dp size: microbatch j of rank r
has m of the step's samples, starting at number (j * dp_size + r) * m. Ranks that differ only in tp,
cp or pp read the same packs, and check this by comparing `PackedBatch.fingerprint()`.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megacp.engine.rows.batch import PackedBatch
from megacp.engine.rows.rank import DataRank
from megacp.training.data.blend import PackBlend
from megacp.training.data.collate import collate
from megacp.training.data.images import ImageLoading
from megacp.training.data.order import samples
from megacp.training.data.reader import Pack


class PackSource(Protocol):
    """Source of numbered packs: a PackedDataset, a PackBlend, or any other object with this API.

    `pack` returns pack `i`, 0 <= i < len. The loader's threads call it.
    """

    def __len__(self) -> int: ...
    def pack(self, i: int) -> Pack: ...


ENDLESS = 1 << 62
"""Number of samples for a run that consists only of whole steps."""


@dataclass(frozen=True)
class LoaderOptions:
    """How packs are combined into steps; equal on all ranks."""

    micro_batch_size: int = 1
    global_batch_size: int = 1
    seed: int = 0
    attention_mask: str = "packed"
    """packed: tokens attend only within their document; causal: each pack is one document."""
    image_attention: str = "example"
    """Which image tokens attend to each other in both directions, see `images.spans`."""
    num_threads: int = 1
    """Number of threads that prepare at least two steps in advance; 0 reads a step on request."""
    end: int = ENDLESS
    """Number of samples in the whole run; the last step may have fewer packs."""


def _batches(
    source: PackSource,
    chosen: np.ndarray,
    options: LoaderOptions,
    data_rank: DataRank,
    images: ImageLoading | None,
) -> list[PackedBatch]:
    """Return this rank's microbatches of a step with packs `chosen` [global_batch_size].

    The number -1 means no pack. A microbatch without packs is pack 0 with all tokens made padding.
    """
    # [global_batch_size] -> [microbatch, dp rank, m] -> [microbatch, m]
    mine = chosen.reshape(-1, data_rank.size, options.micro_batch_size)[:, data_rank.index]
    batches = []
    for numbers in mine.tolist():
        present = [i for i in numbers if i >= 0]
        # Ranks run in lockstep, so each needs a microbatch; use pack 0 if there is no other.
        packs = [source.pack(i) for i in present or [0]]
        batch = collate(packs, options.attention_mask, options.image_attention, images)
        if not present:
            batch = batch.without_documents(np.unique(batch.document).tolist())
        batches.append(batch)
    return batches


def step_batches(
    source: PackSource,
    options: LoaderOptions,
    data_rank: DataRank,
    consumed: int,
    images: ImageLoading | None = None,
) -> list[PackedBatch]:
    """Return one rank's microbatches for the step after `consumed` samples.

    Without `images`, no pixels are decoded.
    """
    count = max(0, min(options.global_batch_size, options.end - consumed))
    if isinstance(source, PackBlend):
        found = source.samples(consumed, count, options.seed)
    else:
        found = samples(consumed, count, len(source), options.seed)
    # [count] -> [global_batch_size]: the last step of a run may have fewer samples
    chosen = np.pad(found, (0, options.global_batch_size - count), constant_values=-1)
    return _batches(source, chosen, options, data_rank, images)


class PackedLoader:
    """Endless optimizer steps from a pack source, prepared in threads.

    Call `close`, or use the loader as a context manager.
    """

    def __init__(
        self,
        source: PackSource,
        options: LoaderOptions,
        data_rank: DataRank | None = None,
        consumed_samples: int = 0,
        images: ImageLoading | None = None,
        prepare: Callable[[PackedBatch], Any] = lambda batch: batch,
    ) -> None:
        """Start to read ahead.

        The first step begins after `consumed_samples`, which need not be a multiple of the batch
        size. `images` selects the images that this rank decodes; None decodes none. The threads
        call `prepare` once per batch.
        """
        self._options = options
        self._prepare = prepare
        self._closed = threading.Event()
        self._read = functools.partial(
            step_batches, source, options, data_rank or DataRank(), images=images
        )
        self._requested = consumed_samples  # first sample of the next step to read
        self.consumed_samples = consumed_samples
        """Samples in the steps returned so far, on all ranks. This is the loader's whole state."""
        self._pending: deque[Future[list[Any]]] = deque()  # steps in order
        self._pool: ThreadPoolExecutor | None = None
        if options.num_threads:
            self._pool = ThreadPoolExecutor(options.num_threads, "pack-loader")
        self._request_ahead()

    def _request_ahead(self) -> None:
        """Keep at least two steps in preparation."""
        while self._pool is not None and len(self._pending) < max(2, self._options.num_threads):
            self._pending.append(self._pool.submit(self._make, self._requested))
            self._requested += self._options.global_batch_size

    def _make(self, consumed: int) -> list[Any]:
        """Return the prepared step after `consumed` samples."""
        made = []
        for batch in self._read(consumed):
            # when the loader is closed, wait for at most one batch per thread
            if self._closed.is_set():
                raise RuntimeError("the loader is closed")
            made.append(self._prepare(batch))
        return made

    def next_step(self) -> list[Any]:
        """Return this rank's microbatches of the next step, as returned by `prepare`.

        If reading ahead has failed, raise the error in the step to which it belongs, and in every
        later call.
        """
        if self._closed.is_set():
            raise RuntimeError("the loader is closed")
        if self._pool is None:
            made = self._make(self.consumed_samples)
        else:
            made = self._pending[0].result()  # after an error, the future remains the first
            self._pending.popleft()
            self._request_ahead()
        consumed = self.consumed_samples + self._options.global_batch_size
        self.consumed_samples = min(consumed, self._options.end)
        return made

    def close(self) -> None:
        """Stop reading ahead, and wait for the threads. Repeated calls are allowed."""
        self._closed.set()
        if self._pool is not None:
            self._pending.clear()
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> PackedLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def validation_steps(
    source: PackSource,
    options: LoaderOptions,
    data_rank: DataRank,
    num_steps: int,
    images: ImageLoading | None = None,
) -> Iterator[list[PackedBatch]]:
    """Yield steps with the first num_steps x global_batch_size packs, in stored order.

    The steps end early after the last pack of the dataset or, for a blend, of any of its datasets.
    The last step may have fewer packs, but every rank still gets the same number of microbatches,
    because ranks run in lockstep.
    """
    size = options.global_batch_size
    for start in range(0, num_steps * size, size):
        if isinstance(source, PackBlend):
            found = source.stored(start, size)
        else:
            found = np.arange(start, min(start + size, len(source)))
        if len(found):
            chosen = np.pad(found, (0, size - len(found)), constant_values=-1)
            yield _batches(source, chosen, options, data_rank, images)
        if len(found) < size:
            return
