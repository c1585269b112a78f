"""The images of a run: which rank decodes which images, and agreement about bad ones.

With `--on-bad-image skip`, all ranks that read a row leave out the same documents. Before a step,
each rank reports the documents that it could not decode. All ranks clear the union of the reports,
so packs, weights and masks stay equal. One small all-reduce per step finds out whether there are
any reports.
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
    """Return generated images that fit the vision tower; None for a model without one."""
    vision = config.vision
    if not vision.vision_num_layers:
        return None
    # two ids above the vocabulary if the embedding has rows for them, else the last two ids
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
    """Return the plan for decoding images on this rank; None without a decoder.

    A rank decodes the images that it encodes, on the first pipeline stage. `strategy` is the first
    way of dealing images to ranks to try, see `ImageLoading`.
    """
    if decoder is None:
        return None
    # "contiguous" is the default: use the dataset's tables of contiguous shards if it has them
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
    """Return the step's microbatches without the documents with bad images, and the reasons.

    A document is left out if any rank of its replica could not decode one of its images. `replica`
    identifies the ranks that read the same packs. The reasons have one line per document left out
    on any replica and are equal on all ranks. Collective over the world.
    """
    reports = []
    for number, batch in enumerate(batches):
        if batch.vision is not None:
            for document, reason in batch.vision.bad_documents:
                reports.append((replica, number, document, reason))
    # usually no rank has a report, and the more expensive gather is not needed
    count = all_reduce(torch.tensor([float(len(reports))], device=grid.device), grid.world)
    if not count.item():
        return list(batches), []
    everything = sorted(set(sum(gather_objects(reports, grid.world), [])))
    remaining = []
    for number, batch in enumerate(batches):
        place = (replica, number)
        bad = [document for of, where, document, _ in everything if (of, where) == place]
        remaining.append(batch.without_documents(bad) if bad else batch)
    # Ranks may report different reasons for a document: the first one in sorted order is logged.
    first_reasons = dict[tuple[int, int, int], str]()
    for of, where, document, reason in everything:
        first_reasons.setdefault((of, where, document), reason)
    return remaining, list(first_reasons.values())
