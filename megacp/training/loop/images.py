"""What the images of a run need besides the model: which rank decodes what, and agreement about bad
ones.

With `--on-bad-image skip` all ranks that hold a row leave the same documents out. Each rank reports
before a step what it could not decode, and all clear the union of the reports: packs, weights and
masks stay equal. One small all-reduce a step says whether there is a report at all.
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
    """Images in the sizes of the vision tower; None for a model without one."""
    vision = config.vision
    if not vision.vision_num_layers:
        return None
    # two rows that only the embedding has, else the last two
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
    """What this rank decodes: the images that it encodes, on the first pipeline stage; None without
    a decoder.

    `strategy`: the first way to try of dealing images to ranks, see `ImageLoading`.
    """
    if decoder is None:
        return None
    return ImageLoading(
        decoder,
        rows.axis.rank,
        rows.axis.size,
        decodes=grid.pp.rank == 0,
        on_bad_image=config.data.on_bad_image,
        strategy=strategy
        if config.parallel.vision_shards == "contiguous"
        else config.parallel.vision_shards,
    )


def image_documents(batches: Sequence[PackedBatch]) -> int:
    """Documents of these rows that hold images."""
    features = [
        (batch.document, batch.vision.feature_rows) for batch in batches if batch.vision is not None
    ]
    return sum(len(np.unique(document[rows])) for document, rows in features if len(rows))


def without_bad_images(
    batches: Sequence[PackedBatch], grid: ProcessGrid, replica: int
) -> tuple[list[PackedBatch], list[str]]:
    """The step's microbatches less the documents of which some rank of this replica could not
    decode an image.

    `replica` names the ranks that read the same packs. Every rank of the world calls it together.
    Also returns why, one line for each document left out anywhere, the same on every rank.
    """
    reports = [
        (replica, number, document, reason)
        for number, batch in enumerate(batches)
        for document, reason in (batch.vision.bad_documents if batch.vision is not None else ())
    ]
    count = all_reduce(torch.tensor([float(len(reports))], device=grid.device), grid.world)
    if not count.item():
        return list(batches), []
    everything = sorted(set(sum(gather_objects(reports, grid.world), [])))
    left = []
    for number, batch in enumerate(batches):
        mine = [
            document for of, where, document, _ in everything if (of, where) == (replica, number)
        ]
        left.append(batch.without_documents(mine) if mine else batch)
    first_reasons = {
        report[:3]: report[3] for report in reversed(everything)
    }  # one for each document
    return left, [first_reasons[document] for document in sorted(first_reasons)]
