"""A pack as one page of HTML: what is learned of its texts, its images with their crops, its branches, its mask.

The page is one file that loads nothing. Every character of a dataset is escaped, so a record can neither run in a
browser nor fetch.
"""

from __future__ import annotations

import base64
import io
import itertools
import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import numpy as np

from megacp.core.data.collate import collate
from megacp.core.data.decoding import load_pixels, video_pixels
from megacp.core.data.geometry import ImageRules, crop_boxes
from megacp.core.data.reader import Pack, PackedDataset
from megacp.core.storage.files import write_atomically
from megacp.prepare.describe import learned_of_pack
from megacp.prepare.tokenize.tokenizer import Tokenizer

_THUMBNAIL, _MASK = 320, 256
"""Pixels of the longer side of an image, and of the mask's side."""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 62em; padding: 0 1em; color: #222; }
h1 { font-size: 1.3em; } h2 { font-size: 1.05em; margin: 2em 0 .3em; border-top: 1px solid #ccc; padding-top: .6em; }
h3 { font-size: .95em; margin: .6em 0 .2em; font-weight: 600; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; margin: 0; }
.branch { border-left: 4px solid #b8c8e8; padding-left: 1em; margin: .5em 0 .5em 1em; }
mark { background: #bfe8bf; color: inherit; } .unit { background: #ffe2b0; border-radius: 3px; padding: 0 .3em; }
.note { color: #666; } figure { display: inline-block; margin: .5em 1em .5em 0; vertical-align: top; }
figcaption { font-size: .8em; color: #666; } svg, img { display: block; } .mask { image-rendering: pixelated; }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write_page(path: str | os.PathLike[str], dataset: PackedDataset, index: int, tokenizer: Tokenizer) -> None:
    """Write pack `index` as a page. ValueError when there is no such pack, or `path` cannot be written."""
    if not 0 <= index < len(dataset):
        raise ValueError(f"--pack {index}: the dataset has packs 0 to {len(dataset) - 1}")
    text = "".join(_page(dataset, index, tokenizer))
    try:
        write_atomically(Path(path), text.encode(errors="replace"))
    except OSError as error:
        raise ValueError(f"--html {os.fspath(path)}: {error.strerror}") from error


def _page(dataset: PackedDataset, index: int, tokenizer: Tokenizer) -> Iterator[str]:
    pack, manifest = dataset.pack(index), dataset.manifest
    title = escape(f"Pack {index} of {dataset.directory}")
    yield f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><style>{_STYLE}</style></head><body>'
    yield f"<h1>{title}</h1><p>{len(pack.segments)} documents, {len(pack.tokens)} tokens of {manifest.seq_length}, "
    yield f"{learned_of_pack(pack)} learned. <mark>Marked</mark> text is learned; "
    yield '<span class="unit">boxes</span> are images and frames.</p>'
    yield _mask_figure(pack)
    rules = None if manifest.image_rules is None else ImageRules.from_dict(manifest.image_rules)
    stops = np.cumsum(pack.segments["true_length"], dtype=np.int64).tolist()
    branch = 0
    for number, (start, stop) in enumerate(zip([0, *stops], stops, strict=False)):
        row = pack.segments[number]
        count = int(row["num_branches"])
        branches = [] if pack.branches is None else pack.branches["start"][branch : branch + count].tolist()
        branch += count
        source = f"{manifest.sources[row['source_file']]} @ {row['source_offset']}"
        yield f'<h2>Document {number} <span class="note">{stop - start} tokens, {escape(source)}</span></h2>'
        yield from _parts(pack, number, start, stop, branches, tokenizer)
        if rules is not None and pack.images is not None:
            yield from _figures(pack, number, rules)
    yield "</body></html>\n"


def _parts(pack: Pack, number: int, start: int, stop: int, branches: list[int], tokenizer: Tokenizer) -> Iterator[str]:
    """The prefix of one document, tokens start..stop of a pack, then each of its branches."""
    for part, (first, last) in enumerate(itertools.pairwise([0, *branches, stop - start])):
        text = f'<p class="text">{"".join(_runs(pack, number, start, (first, last), tokenizer))}</p>'
        head = f'<div class="branch"><h3>Branch {part}, {last - first} tokens</h3>'
        yield f"{head}{text}</div>" if part else text


def _runs(pack: Pack, number: int, start: int, part: tuple[int, int], tokenizer: Tokenizer) -> Iterator[str]:
    """Tokens of a part of the document that begins at `start`, in runs of one loss weight; a unit is a box."""
    first, last = part
    tokens = pack.tokens[start + first : start + last]
    weights = np.ones(len(tokens), np.float32)
    if pack.weights is not None:
        weights = np.array(pack.weights[start + first : start + last])
    weights[0] = 0.0  # nothing before it in its part predicts it
    boxes = [(len(tokens), len(tokens), "")]
    if pack.images is not None:
        units = pack.images.units
        here = units[(units["segment"] == number) & (units["start"] >= first) & (units["start"] < last)]
        starts = (here["start"] - first).tolist()
        named = zip(starts, here["num_tokens"].tolist(), map(_unit_name, here), strict=True)
        boxes = [*((box, box + count, name) for box, count, name in named), *boxes]
    begin = 0
    for box, end, name in boxes:
        while begin < box:
            differs = np.flatnonzero(weights[begin:box] != weights[begin])
            stop = begin + int(differs[0]) if len(differs) else box
            text = escape(_decoded(tokens[begin:stop], tokenizer))
            yield f'<mark title="weight {float(weights[begin]):g}">{text}</mark>' if weights[begin] > 0 else text
            begin = stop
        if name:
            yield f'<span class="unit">{name}, {end - box} tokens</span>'
        begin = max(begin, end)


def _decoded(tokens: np.ndarray, tokenizer: Tokenizer) -> str:
    """Text; an end of document that has none, as in most tokenizers, becomes a sign."""
    known, end = tokens[tokens < tokenizer.vocab_size], tokenizer.eos_id
    if end is None or tokenizer.decode([end]):
        return tokenizer.decode(known)
    pieces = np.split(known, np.flatnonzero(known == end))
    return "\u00b6".join(tokenizer.decode(piece[piece != end]) for piece in pieces)


def _unit_name(unit: np.void) -> str:
    return f"item {unit['item']}" if unit["frame"] < 0 else f"item {unit['item']} frame {unit['frame']}"


def _figures(pack: Pack, segment: int, rules: ImageRules) -> Iterator[str]:
    """The images of a document with their crops drawn, and the frames of its videos."""
    assert pack.images is not None
    units = pack.images.units
    here = units[units["segment"] == segment]
    for item, rows in itertools.groupby(here, key=lambda unit: int(unit["item"])):
        taken = list(rows)
        data = pack.images.read(item)
        if taken[0]["frame"] < 0:
            pixels = load_pixels(data, rules)
            boxes = crop_boxes(pixels.shape[1], pixels.shape[0], rules)
            yield _figure(
                pixels,
                boxes,
                f"{_unit_name(taken[0])}: {pixels.shape[1]} x {pixels.shape[0]}, {len(boxes)} crops and the whole",
            )
        else:
            for unit, pixels in zip(taken, video_pixels(data, rules), strict=False):
                yield _figure(pixels, [], _unit_name(unit))


def _figure(pixels: np.ndarray, boxes: Sequence[tuple[float, float, float, float]], caption: str) -> str:
    """A picture with the outlines of its crops, each a little inside of the one before so that overlaps are seen."""
    from PIL import Image

    image = Image.fromarray(pixels)
    scale = min(1.0, _THUMBNAIL / max(image.size))
    width, height = (max(1, round(side * scale)) for side in image.size)
    shown = image.resize((width, height))
    outlines = "".join(
        f'<rect x="{x0 * width + 1 + i % 3:.1f}" y="{y0 * height + 1 + i % 3:.1f}" '
        f'width="{max(1.0, (x1 - x0) * width - 2 - 2 * (i % 3)):.1f}" '
        f'height="{max(1.0, (y1 - y0) * height - 2 - 2 * (i % 3)):.1f}" fill="none" stroke="{_COLOURS[i % 3]}"/>'
        for i, (x0, y0, x1, y1) in enumerate(boxes)
    )
    return (
        f'<figure><svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">'
        f'<image href="{_data_url(shown)}" width="{width}" height="{height}"/>{outlines}</svg>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


_COLOURS = ("#e6194b", "#0082c8", "#f58231")


def _mask_figure(pack: Pack) -> str:
    """Which of evenly chosen tokens (rows) see which (columns): the rule of ops/mask.py on a few hundred of them."""
    from PIL import Image

    batch = collate([pack])
    chosen = np.unique(np.linspace(0, len(batch) - 1, min(_MASK, len(batch))).astype(np.int64))
    document, branch, span = (values[chosen] for values in (batch.document, batch.branch, batch.span))
    place = batch.position_ids[chosen]
    same = (document[:, None] == document) & (document >= 0)
    visible = (branch == 0) | (branch[:, None] == branch)
    before = (place <= place[:, None]) | ((span[:, None] != 0) & (span[:, None] == span))
    seen = (same & visible & before)[..., None]  # [rows, columns, 1]
    picture = np.where(seen, np.array([40, 90, 160], np.uint8), np.array([240, 240, 240], np.uint8))
    url = _data_url(Image.fromarray(picture))
    return (
        f'<figure><img class="mask" width="{_MASK}" height="{_MASK}" alt="mask" src="{url}">'
        f"<figcaption>Mask: a row sees its dark columns; {len(chosen)} of {len(batch)} tokens</figcaption></figure>"
    )


def _data_url(image: object) -> str:
    stream = io.BytesIO()
    image.save(stream, "PNG")  # type: ignore[attr-defined]  # typed as object: pillow is an extra
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
