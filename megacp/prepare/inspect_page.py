"""Write a pack as one HTML page with its texts, branches, images and frames.

The page is a single file without external resources. Every character from the dataset is escaped,
so a record can neither run scripts in a browser nor fetch anything.
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
"""Maximum side length of an image on the page, in pixels."""
_STYLE = """
:root { --learned: #bfe8bf; --unit: #ffe2b0; --branch: #b8c8e8; --crop: #286; }
@media (prefers-color-scheme: dark) { :root { --learned: #1e5230; --unit: #5c4310;
  --branch: #4a5f8a; --crop: #6c9; } }
.text { white-space: pre-wrap; margin: 0; font: 14px/1.6 ui-monospace, monospace; }
.branch { border-left: 4px solid var(--branch); padding-left: 1em; margin: .5em 0 .5em 1em; }
/* on a telephone, deep branches still need room for their text */
@media (max-width: 40em) { .branch { border-left-width: 3px; padding-left: .5em;
  margin-left: .2em; } }
mark { background: var(--learned); color: inherit; }
.unit { background: var(--unit); padding: 0 .3em; margin-right: .2em; }
img { image-rendering: pixelated; max-width: 100%; }
.grid { display: grid; gap: 1em .5em; margin-top: .6em;
  grid-template-columns: repeat(auto-fill, minmax(min(20em, 100%), 1fr)); }
svg { margin-left: .5em; }
rect { fill: var(--learned); fill-opacity: .5; stroke: var(--crop);
  vector-effect: non-scaling-stroke; }
"""


def write_page(
    path: str | os.PathLike[str],
    dataset: PackedDataset,
    index: int,
    tokenizer: Tokenizer,
    overwrite: bool = False,
) -> None:
    """Write pack `index` as a page.

    Raise ValueError if the pack does not exist, or if `path` exists and `overwrite` is not set.
    """
    # a lone surrogate in a text must not prevent writing the page
    page = "".join(_page(dataset, index, tokenizer))
    write_result("--html", path, page.encode(errors="replace"), overwrite)


def _page(dataset: PackedDataset, index: int, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the page piece by piece."""
    pack = pack_of(dataset, index)
    manifest = dataset.manifest
    yield page_head(f"Pack {index} of {dataset.directory}", _STYLE)
    yield f"<p>{len(pack.segments)} documents, "
    yield f"{len(pack.tokens)} tokens of {manifest.seq_length}, "
    yield f"{learned_of_pack(pack)} learned. <mark>Marked</mark> text is learned; "
    yield '<span class="unit">boxes</span> are images and frames.'
    if pack.branches is not None and len(pack.branches):
        # otherwise the text above would seem to lack its last token
        yield " A branch may begin with the last token of the text that it continues."
    yield "</p>"
    rules = None if manifest.image_rules is None else rules_from_dict(manifest.image_rules)
    for number, (here, branches) in enumerate(pack_documents(pack)):
        row = pack.segments[number]
        length = here.stop - here.start
        source = f"{manifest.sources[row['source_file']]} @ {row['source_offset']}"
        note = f'<span class="note">{length} tokens, {escape(source)}</span>'
        yield f"<h2>Document {number} {note}</h2>"
        # the prefix, then the branches, each in a box inside the box of the part that it continues
        depth = 0
        for part, (first, last, above) in enumerate(document_parts(length, branches)):
            runs = "".join(_runs(pack, number, here.start, (first, last), tokenizer))
            if part:
                # close the boxes of the branches that this one does not continue
                yield "</div>" * (depth - len(above) + 1)
                yield f'<div class="branch"><h3>Branch {part}, {last - first} tokens</h3>'
            yield f'<p class="text">{runs}</p>'
            depth = len(above)
        yield "</div>" * depth
        if rules is not None and pack.images is not None:
            yield from _figures(pack, number, rules)
    yield "</body></html>\n"


def _runs(
    pack: Pack, number: int, start: int, part: tuple[int, int], tokenizer: Tokenizer
) -> Iterator[str]:
    """Yield the text of a part (first, last) of a document, in runs of equal loss weight.

    The document begins at token `start` of the pack. A unit (image or frame) becomes a box.
    """
    first, last = part
    here = slice(start + first, start + last)
    tokens = pack.tokens[here]
    weights = np.ones(len(tokens), np.float32)
    if pack.weights is not None:
        weights = np.array(pack.weights[here])
    weights[0] = 0.0  # no token of this part predicts its first token
    # boxes of units as (first token, end, name); the last entry only marks the end of the text
    boxes = [(len(tokens), len(tokens), "")]
    if pack.images is not None:
        units = pack.images.units
        is_inside = (units["start"] >= first) & (units["start"] < last)
        units = units[(units["segment"] == number) & is_inside]
        starts = (units["start"] - first).tolist()
        counts = units["num_tokens"].tolist()
        inner = []
        for box, count, unit in zip(starts, counts, units, strict=True):
            inner.append((box, box + count, _unit_name(unit)))
        boxes = [*inner, *boxes]
    begin = 0
    for box, end, name in boxes:
        # the text before the box
        for here in runs_of(weights[begin:box]):
            run = tokens[begin:box][here]
            weight = float(weights[begin + here.start])
            # special image tokens above the vocabulary have no text
            text = escape(tokenizer.decode(run[run < tokenizer.vocab_size]))
            yield f'<mark title="weight {weight:g}">{text}</mark>' if weight > 0 else text
        if name:
            yield f'<span class="unit">{name}, {end - box} tokens</span>'
        # the text continues after the box
        begin = max(begin, box, end)


def _unit_name(unit: np.void) -> str:
    """Return the name of an image (frame -1) or a video frame."""
    name = f"item {unit['item']}"
    if unit["frame"] >= 0:
        name += f" frame {unit['frame']}"
    return name


def _figures(pack: Pack, segment: int, rules: VisionRules) -> Iterator[str]:
    """Yield the images of a document, each next to its crops, and the frames of its videos."""
    from PIL import Image

    assert pack.images is not None
    units = pack.images.units
    # pictures are decoded as in training, from the bytes stored in the pack
    yield '<div class="grid">'
    own = units[units["segment"] == segment]
    for item, rows in itertools.groupby(own, key=lambda unit: int(unit["item"])):
        taken = list(rows)
        data = pack.images.read(item)
        if taken[0]["frame"] < 0:
            pictures = iter([load_pixels(data, rules)])
        else:
            pictures = video_pixels(data, rules)
        # a unit may consist of several frames: show its first
        first = itertools.islice(pictures, 0, None, rules.frames_of_unit)
        for unit, pixels in zip(taken, first, strict=False):
            width_of_image = pixels.shape[1]
            height_of_image = pixels.shape[0]

            # the picture is part of the page, as a data URL
            image = Image.fromarray(pixels)
            stream = io.BytesIO()
            image.thumbnail((_THUMBNAIL, _THUMBNAIL))
            image.save(stream, "PNG")
            url = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
            # a small image is enlarged by a whole factor
            factor = max(1, _THUMBNAIL // (2 * max(image.size)))
            width = image.width * factor
            caption = f"{_unit_name(unit)}: {width_of_image} x {height_of_image}"

            # draw the frames of overlapping high-resolution crops
            crops = ""
            (high, wide), boxes = rules.crop_boxes(width_of_image, height_of_image)
            if unit["frame"] < 0 and len(boxes) > 1:
                frames = ""
                for x, y, side in boxes:
                    frames += f'<rect x="{x}" y="{y}" width="{side}" height="{side}"/>'
                crops = f'<svg viewBox="0 0 {wide} {high}" width="{_THUMBNAIL // 4}">{frames}</svg>'
                caption = f"{caption}, {len(boxes)} crops"
            yield f'<figure><img src="{url}" width="{width}" alt="{caption}">{crops}'
            yield f"<figcaption>{caption}</figcaption></figure>"
    yield "</div>"
