"""The loader: which packs each data-parallel rank reads in each step, read and prepared ahead in
threads.

A step is a function of dataset, seed, samples consumed, dp rank and dp size. So a run resumes from
one integer, on any number of ranks, and sees every sample exactly once. The samples of a step are
the same set for every dp size: microbatch j of rank r holds the step's samples from (j * dp_size +
r) * m on. Ranks that differ only in tp, cp or pp read the same packs and compare
`PackedBatch.fingerprint()`.
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
    """What the loader reads from: a PackedDataset, a PackBlend, or anything else with numbered
    packs.

    `pack`: pack `i`, 0 <= i < len; called from the loader's threads.
    """

    def __len__(self) -> int: ...
    def pack(self, i: int) -> Pack: ...


ENDLESS = 1 << 62
"""Samples of a run that takes only whole steps."""


@dataclass(frozen=True)
class LoaderOptions:
    """How packs become steps; equal on all ranks."""

    micro_batch_size: int = 1
    global_batch_size: int = 1
    seed: int = 0
    attention_mask: str = "packed"
    """packed: documents do not see each other; causal: a pack is one document."""
    image_attention: str = "example"
    """Which image tokens see each other in both directions: see `images.spans`."""
    num_threads: int = 1
    """Threads that make steps ahead, at least two steps; 0 makes each step when it is asked for."""
    end: int = ENDLESS
    """Samples of the whole run, whose last step may be short of packs."""


def _batches(
    source: PackSource,
    chosen: np.ndarray,
    options: LoaderOptions,
    data_rank: DataRank,
    images: ImageLoading | None,
) -> list[PackedBatch]:
    """This rank's microbatches of a step's packs [global_batch_size]. -1 is none: pack 0, all of it
    as padding.
    """
    # [global_batch_size] -> [microbatch, dp rank, m] -> [microbatch, m]
    mine = chosen.reshape(-1, data_rank.size, options.micro_batch_size)[:, data_rank.index]
    batches = []
    for numbers in mine.tolist():
        present = [i for i in numbers if i >= 0]
        packs = [
            source.pack(i) for i in present or [0]
        ]  # ranks run in lockstep: none has an empty microbatch
        batch = collate(packs, options.attention_mask, options.image_attention, images)
        batches.append(
            batch if present else batch.without_documents(np.unique(batch.document).tolist())
        )
    return batches


def step_batches(
    source: PackSource,
    options: LoaderOptions,
    data_rank: DataRank,
    consumed: int,
    images: ImageLoading | None = None,
) -> list[PackedBatch]:
    """The microbatches of one rank for the step that begins after `consumed` samples; a pure
    function.

    Without `images` no pixels are decoded.
    """
    count = max(0, min(options.global_batch_size, options.end - consumed))
    if isinstance(source, PackBlend):
        found = source.samples(consumed, count, options.seed)
    else:
        found = samples(consumed, count, len(source), options.seed)
    chosen = np.pad(found, (0, options.global_batch_size - count), constant_values=-1)
    return _batches(source, chosen, options, data_rank, images)


class PackedLoader:
    """Endless optimizer steps from a pack source, made ahead in threads. Close it, or use it as a
    context manager.
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
        """`consumed_samples`, any number >= 0, is the state to resume from; it need not be a
        multiple of the batch.

        `images`: what this rank decodes; None decodes nothing. `prepare` is called in the threads
        once for each batch.
        """
        self._options = options
        self._prepare = prepare
        self._closed = threading.Event()
        self._read = functools.partial(
            step_batches, source, options, data_rank or DataRank(), images=images
        )
        self._requested = consumed_samples  # where the next step to read begins
        self.consumed_samples = consumed_samples
        """Samples in the steps handed out so far, over all ranks: the loader's whole state."""
        self._pending: deque[Future[list[Any]]] = deque()
        self._pool = (
            ThreadPoolExecutor(options.num_threads, "pack-loader") if options.num_threads else None
        )
        self._request_ahead()

    def _request_ahead(self) -> None:
        while self._pool is not None and len(self._pending) < max(2, self._options.num_threads):
            self._pending.append(self._pool.submit(self._make, self._requested))
            self._requested += self._options.global_batch_size

    def _make(self, consumed: int) -> list[Any]:
        made = []
        for batch in self._read(consumed):
            if (
                self._closed.is_set()
            ):  # a run that ends waits for one plan, not for those of all steps ahead
                raise RuntimeError("the loader is closed")
            made.append(self._prepare(batch))
        return made

    def next_step(self) -> list[Any]:
        """What `prepare` made of this rank's microbatches of the next step; without it, the
        microbatches themselves.

        An error met while reading ahead is raised here, in the step it belongs to, and again at
        every further call.
        """
        if self._closed.is_set():
            raise RuntimeError("the loader is closed")
        if self._pool is None:
            made = self._make(self.consumed_samples)
        else:
            made = self._pending[0].result()  # an error stays in front, and is met again
            self._pending.popleft()
            self._request_ahead()
        self.consumed_samples = min(
            self.consumed_samples + self._options.global_batch_size, self._options.end
        )
        return made

    def close(self) -> None:
        """Stop reading ahead and wait for the threads; may be called twice."""
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
    """The first num_steps x global_batch_size packs in stored order, each once: the same for every
    evaluation.

    Ends early when the dataset does, or the first one of a blend. Its last step may be short of
    packs. Every rank still gets the same number of microbatches, since ranks run in lockstep.
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
