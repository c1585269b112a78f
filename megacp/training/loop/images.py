"""Images of a run: which rank decodes which images, and how ranks agree on bad images.

With `--on-bad-image skip`, all ranks that read a row must drop the same documents. Before a step,
each rank reports the documents that it could not decode. All ranks drop the union of the reported
documents, so packs, weights and masks remain equal. One small all-reduce per step checks whether
there are any reports.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megacp.distributed.collectives import all_reduce, gather_objects
from megacp.distributed.grid import ProcessGrid
from megacp.engine.config.run import RunConfig
from megacp.engine.rows.batch import PackedBatch
from megacp.engine.step.rows import Rows
from megacp.training.data.images import Decoder, ImageLoading
from megacp.training.data.mock import MockImages


def mock_images(config: RunConfig) -> MockImages | None:
    """Return mock images that fit the vision tower; None for a model without a tower."""
    vision = config.vision
    if not vision.vision_num_layers:
        return None
    # use two ids above the vocabulary if the embedding has rows for them, else its last two ids
    first = min(config.model.vocab_size, config.model.embedding_rows - 2)
    return MockImages(
        vision.crop_patches, vision.patch_dim, first, attention=config.data.image_attention
    )


def image_loading(
    config: RunConfig,
    grid: ProcessGrid,
    rows: Rows,
    decoder: Decoder | None,
    strategy: str = "stored",
) -> ImageLoading | None:
    """Return how this rank loads images; None without a decoder.

    Ranks of the first pipeline stage decode the images that they encode. `strategy` is the first
    way of assigning images to ranks to try, see `ImageLoading`.
    """
    if decoder is None:
        return None
    # "contiguous" is the default, for which `strategy` may use the dataset's table of shards
    shards = config.parallel.vision_shards
    return ImageLoading(
        decoder,
        rows.axis.rank,
        rows.axis.size,
        decodes=grid.pp.rank == 0,
        on_bad_image=config.data.on_bad_image,
        strategy=strategy if shards == "contiguous" else shards,
    )


def image_documents(batches: Sequence[PackedBatch]) -> int:
    """Return the number of documents with images in these rows."""
    total = 0
    for batch in batches:
        if batch.vision is not None and len(batch.vision.feature_rows):
            documents = batch.document[batch.vision.feature_rows]  # of each image feature
            total += len(np.unique(documents))
    return total


def without_bad_images(
    batches: Sequence[PackedBatch], grid: ProcessGrid, replica: int
) -> tuple[list[PackedBatch], list[str]]:
    """Return a step's microbatches without documents that have bad images, and the reasons.

    A document is dropped if any rank of its replica could not decode one of its images. `replica`
    identifies the ranks that read the same packs. The reasons, one line per document dropped on any
    replica, are equal on all ranks. Collective across all ranks.
    """
    reports = []
    for number, batch in enumerate(batches):
        if batch.vision is not None:
            for document, reason in batch.vision.bad_documents:
                reports.append((replica, number, document, reason))
    # usually no rank has a report, so the more expensive gather is not needed
    count = all_reduce(torch.tensor([float(len(reports))], device=grid.device), grid.world)
    if not count.item():
        return list(batches), []
    everything = sorted(set(sum(gather_objects(reports, grid.world), [])))
    remaining = []
    for number, batch in enumerate(batches):
        place = (replica, number)
        bad = [document for of, where, document, _ in everything if (of, where) == place]
        remaining.append(batch.without_documents(bad) if bad else batch)
    # Ranks may report different reasons for a document; log the first in sorted order.
    first_reasons = dict[tuple[int, int, int], str]()
    for of, where, document, reason in everything:
        first_reasons.setdefault((of, where, document), reason)
    return remaining, list(first_reasons.values())
