"""A pack as one page of HTML: its texts with what is learned of them, its branches, its images and
frames.

The page is one file that loads nothing. Every character of a dataset is escaped, so a record can
neither run in a browser nor fetch.
"""

from __future__ import annotations

import base64
import io
import itertools
import os
from collections.abc import Iterator
from html import escape

import numpy as np

from megacp.prepare.describe import (
    document_parts,
    learned_of_pack,
    pack_documents,
    pack_of,
    runs_of,
)
from megacp.prepare.tokenize.tokenizer import Tokenizer
from megacp.storage.files import write_result
from megacp.storage.page import page_head
from megacp.training.data.reader import Pack, PackedDataset
from megacp.training.data.vision.decoding import load_pixels, rules_from_dict, video_pixels
from megacp.training.data.vision.rules import VisionRules

_THUMBNAIL = 224
"""Pixels of the longer side of an image."""
_STYLE = """
.text { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; margin: 0; }
.branch { border-left: 4px solid #b8c8e8; padding-left: 1em; margin: .5em 0 .5em 1em; }
mark { background: #bfe8bf; color: inherit; } .unit { background: #ffe2b0; padding: 0 .3em; margin-right: .2em; }
img { image-rendering: pixelated; max-width: 100%; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(20em, 1fr)); gap: .5em; }
svg { margin-left: .5em; } rect { fill: #bfe8bf80; stroke: #286; vector-effect: non-scaling-stroke; }
"""


def write_page(
    path: str | os.PathLike[str],
    dataset: PackedDataset,
    index: int,
    tokenizer: Tokenizer,
    overwrite: bool = False,
) -> None:
    """Write pack `index` as a page. Raises ValueError when there is no such pack, or `path` is
    taken.
    """
    page = "".join(_page(dataset, index, tokenizer))
    write_result("--html", path, page.encode(errors="replace"), overwrite)


def _page(dataset: PackedDataset, index: int, tokenizer: Tokenizer) -> Iterator[str]:
    pack, manifest = pack_of(dataset, index), dataset.manifest
    yield page_head(f"Pack {index} of {dataset.directory}", _STYLE)
    yield f"<p>{len(pack.segments)} documents, {len(pack.tokens)} tokens of {manifest.seq_length}, "
    yield f"{learned_of_pack(pack)} learned. <mark>Marked</mark> text is learned; "
    yield '<span class="unit">boxes</span> are images and frames.</p>'
    rules = None if manifest.image_rules is None else rules_from_dict(manifest.image_rules)
    for number, (here, branches) in enumerate(pack_documents(pack)):
        row, length = pack.segments[number], here.stop - here.start
        source = f"{manifest.sources[row['source_file']]} @ {row['source_offset']}"
        yield f'<h2>Document {number} <span class="note">{length} tokens, {escape(source)}</span></h2>'
        depth = 0
        for part, (first, last, above) in enumerate(document_parts(length, branches)):
            text = f'<p class="text">{"".join(_runs(pack, number, here.start, (first, last), tokenizer))}</p>'
            head = f'<div class="branch"><h3>Branch {part}, {last - first} tokens</h3>'
            yield "</div>" * (depth - len(above) + 1) + head + text if part else text
            depth = len(above)
        yield "</div>" * depth
        if rules is not None and pack.images is not None:
            yield from _figures(pack, number, rules)
    yield "</body></html>\n"


def _runs(
    pack: Pack, number: int, start: int, part: tuple[int, int], tokenizer: Tokenizer
) -> Iterator[str]:
    """Tokens of a part of the document that begins at `start`, in runs of one loss weight; a unit
    is a box.
    """
    first, last = part
    tokens = pack.tokens[start + first : start + last]
    weights = np.ones(len(tokens), np.float32)
    if pack.weights is not None:
        weights = np.array(pack.weights[start + first : start + last])
    weights[0] = 0.0  # nothing before it in its part predicts it
    boxes = [(len(tokens), len(tokens), "")]
    if pack.images is not None:
        units = pack.images.units
        here = units[
            (units["segment"] == number) & (units["start"] >= first) & (units["start"] < last)
        ]
        starts = (here["start"] - first).tolist()
        named = zip(starts, here["num_tokens"].tolist(), map(_unit_name, here), strict=True)
        boxes = [*((box, box + count, name) for box, count, name in named), *boxes]
    begin = 0
    for box, end, name in boxes:
        for here in runs_of(weights[begin:box]):
            run, weight = tokens[begin:box][here], float(weights[begin + here.start])
            text = escape(tokenizer.decode(run[run < tokenizer.vocab_size]))
            yield f'<mark title="weight {weight:g}">{text}</mark>' if weight > 0 else text
        if name:
            yield f'<span class="unit">{name}, {end - box} tokens</span>'
        begin = max(begin, box, end)


def _unit_name(unit: np.void) -> str:
    return (
        f"item {unit['item']}"
        if unit["frame"] < 0
        else f"item {unit['item']} frame {unit['frame']}"
    )


def _figures(pack: Pack, segment: int, rules: VisionRules) -> Iterator[str]:
    """The images of a document, each beside its crops, and the frames of its videos."""
    from PIL import Image

    assert pack.images is not None
    units = pack.images.units
    yield '<div class="grid">'
    for item, rows in itertools.groupby(
        units[units["segment"] == segment], key=lambda unit: int(unit["item"])
    ):
        taken, data = list(rows), pack.images.read(item)
        pictures = (
            iter([load_pixels(data, rules)]) if taken[0]["frame"] < 0 else video_pixels(data, rules)
        )
        first = itertools.islice(pictures, 0, None, rules.frames_of_unit)  # of each unit's frames
        for unit, pixels in zip(taken, first, strict=False):
            image, stream = Image.fromarray(pixels), io.BytesIO()
            image.thumbnail((_THUMBNAIL, _THUMBNAIL))
            image.save(stream, "PNG")
            url = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
            width = image.width * max(
                1, _THUMBNAIL // (2 * max(image.size))
            )  # a small one is enlarged, pixel by pixel
            caption, crops = f"{_unit_name(unit)}: {pixels.shape[1]} x {pixels.shape[0]}", ""
            (high, wide), boxes = rules.crop_boxes(pixels.shape[1], pixels.shape[0])
            if (
                unit["frame"] < 0 and len(boxes) > 1
            ):  # the overlapping frames of its high-resolution crops
                frames = "".join(
                    f'<rect x="{x}" y="{y}" width="{side}" height="{side}"/>'
                    for x, y, side in boxes
                )
                crops = f'<svg viewBox="0 0 {wide} {high}" width="{_THUMBNAIL // 4}">{frames}</svg>'
                caption = f"{caption}, {len(boxes)} crops"
            yield f'<figure><img src="{url}" width="{width}" alt="{caption}">{crops}<figcaption>{caption}</figcaption>'
            yield "</figure>"
    yield "</div>"
