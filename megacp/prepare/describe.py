"""Describe a packed dataset as text: single packs (`inspect`) or all of it (`stats`).

The data is read in the same way as in training.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from megacp.prepare.records.documents import learned_tokens
from megacp.prepare.tokenize.tokenizer import Tokenizer
from megacp.storage.files import StrPath
from megacp.storage.url import Url
from megacp.storage.wording import counted
from megacp.training.data.collate import parents
from megacp.training.data.reader import Pack, PackedDataset
from megacp.training.data.tables import BRANCH_DTYPE, FLAG_SPLIT, FLAG_TRUNCATED

_LEAST = 8
"""Minimum number of characters to show of a run, even if later runs are then cut off."""


def describe_pack(
    dataset: PackedDataset,
    index: int,
    tokenizer: Tokenizer,
    characters: int = 240,
    documents: int = 10,
) -> str:
    """Describe one pack: length, loss weights, source and an excerpt of each document.

    Only the first `documents` are shown (0: all), with `characters` of text each. Learned text is
    between \u00ab and \u00bb. Raise ValueError if pack `index` does not exist.
    """
    pack = pack_of(dataset, index)
    manifest = dataset.manifest
    padded = int(pack.segments["padded_length"].sum())
    share = padded / manifest.seq_length
    lines = [
        f"pack {index} of {len(dataset)}: {counted(len(pack.segments), 'document')}, "
        f"{counted(len(pack.tokens), 'token')}, {learned_of_pack(pack)} learned, {padded} padded, "
        f"{share:.2%} of --seq-length {manifest.seq_length}; \u00ablearned\u00bb"
    ]
    for number, (here, branches) in enumerate(pack_documents(pack)):
        # --documents 0 shows all documents
        if documents and number >= documents:
            more = counted(len(pack.segments) - number, "more document")
            lines.append(f"  {more}; --documents 0 shows all")
            break
        row = pack.segments[number]
        tokens = pack.tokens[here]
        # the summary line of the document
        weights = "weights all 1"
        learned = np.ones(len(tokens), bool)
        if pack.weights is not None:
            own = pack.weights[here]
            learned = own > 0
            low = float(own.min())
            high = float(own.max())
            weights = f"weights {low:g}..{high:g}, {int(learned.sum())} counted"
        note = ""
        if row["flags"] & FLAG_TRUNCATED:
            note = " (truncated)"
        if row["flags"] & FLAG_SPLIT:
            note = f" (piece from token {row['source_start']})"
        source = f"{manifest.sources[row['source_file']]} @ {row['source_offset']}"
        lines.append(f"  [{number}] {counted(len(tokens), 'token')}{note}  {weights}  {source}")
        # its text: the prefix, then the branches, indented by their depth
        for i, (first, last, above) in enumerate(document_parts(len(tokens), branches)):
            shown = _marked(tokens[first:last], learned[first:last], tokenizer, characters)
            if not above:
                lines += [f"      {shown}", *_images(pack, number)]
                continue
            name = f"branch {i}"
            if len(above) > 1:  # of another branch
                name += f" of {above[-1]}"
            indent = "  " * len(above)
            lines.append(f"{indent}    {name}: {counted(last - first, 'token')}  {shown}")
    return "\n".join(lines + _boundaries(pack))


def pack_of(dataset: PackedDataset, index: int) -> Pack:
    """Return the pack of --pack. Raise ValueError if it does not exist."""
    if not 0 <= index < len(dataset):
        raise ValueError(
            f"--pack {index} does not exist: the dataset has packs 0 to {len(dataset) - 1}"
        )
    return dataset.pack(index)


def pack_documents(pack: Pack) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield the token slice of each document, with its branches (rows of tables.BRANCH_DTYPE)."""
    start = 0
    branch = 0
    # without branches, every document gets an empty slice
    table = np.empty(0, BRANCH_DTYPE) if pack.branches is None else pack.branches
    for row in pack.segments:
        length, count = int(row["true_length"]), int(row["num_branches"])
        yield slice(start, start + length), table[branch : branch + count]
        start += length
        branch += count


def document_parts(length: int, branches: np.ndarray) -> list[tuple[int, int, list[int]]]:
    """Return the parts of a document: (first token, end, numbers of the parts that it continues).

    Part 0 is the prefix; all other parts are branches.
    """
    begins = [0, *branches["start"].tolist(), length]
    leaves = np.array([length, *branches["leave"]])
    found: list[tuple[int, int, list[int]]] = []
    for i, parent in enumerate(parents(np.array(begins[:-1]), leaves).tolist()):
        above = [*found[parent][2], parent] if i else []
        found.append((begins[i], begins[i + 1], above))
    return found


def learned_of_pack(pack: Pack) -> int:
    """Return the number of tokens of a pack that contribute to the loss."""
    learned = 0
    for here, rows in pack_documents(pack):
        weights = None if pack.weights is None else pack.weights[here]
        learned += learned_tokens(pack.tokens[here], weights, rows["start"], rows["leave"])
    return learned


def _learned(dataset: PackedDataset) -> int:
    """Return the number of learned tokens; read only shards that have weights or branches."""
    total = 0
    first = 0
    for shard in dataset.manifest.shards:
        # a shard has these files only if some document needs them
        names = {file.name for file in shard.files}
        if {"weights.bin", "branches.npy"} & names:
            for index in range(first, first + shard.num_packs):
                total += learned_of_pack(dataset.pack(index))
        else:
            # every token except the first of each document
            total += shard.num_tokens - shard.num_segments
        first += shard.num_packs
    return total


def _images(pack: Pack, segment: int) -> list[str]:
    """Return a line for each image and video of a segment: its tokens, crops and size."""
    # a text dataset has no table of images
    if pack.images is None:
        return []
    units = pack.images.units
    # the table has running totals; their differences are the numbers of each unit
    crops = np.diff(units["image_stop"], prepend=0)
    pooled = np.diff(units["pooled_stop"], prepend=0)
    here = np.flatnonzero(units["segment"] == segment)
    if not len(here):
        return []
    # one group of rows for each item: an image, or all frames of a video
    changes = np.flatnonzero(np.diff(units["item"][here])) + 1
    lines = []
    for rows in np.split(here, changes):
        first = units[rows[0]]
        last = units[rows[-1]]
        what = "image"
        if first["frame"] >= 0:
            what = f"video frames {first['frame']}..{last['frame']}"
        branch = f" in branch {first['branch']}" if first["branch"] else ""
        stop = last["start"] + last["num_tokens"] - 1
        size = len(pack.images.read(int(first["item"])))
        lines.append(
            f"      {what}{branch}: tokens "
            f"{first['start']}..{stop}, "
            f"{counted(int(crops[rows].sum()), 'crop')}, "
            f"{counted(int(pooled[rows].sum()), 'pooled token')}, {counted(size, 'byte')}"
        )
    return lines


def _boundaries(pack: Pack) -> list[str]:
    """Return a line for each planned context-parallel size with the crops of each rank."""
    if pack.images is None or not len(pack.images.units):
        return []
    units = pack.images.units
    lines = [
        f"  {counted(len(units), 'unit')}, {counted(int(units['image_stop'][-1]), 'crop')}, "
        f"{counted(int(units['pooled_stop'][-1]), 'pooled token')}"
    ]
    # the split of the crops is stored for each size in --cp-degrees
    for degree, table in sorted(pack.images.boundaries.items()):
        ranges = [f"{row['start_image_idx']}-{row['end_image_idx']}" for row in table]
        lines.append(
            f"  cp {degree}: crops {' '.join(ranges)}, at most {table['max_num_tokens'][0]} tokens "
            "a rank"
        )
    return lines


def _marked(tokens: np.ndarray, learned: np.ndarray, tokenizer: Tokenizer, characters: int) -> str:
    """Return an excerpt of tokens [n] with marks around learned text.

    The runs share the characters, so that each is visible. A learned run shows its beginning; other
    runs also show their end, which is the context of the learned text.
    """
    texts = []  # (text, whether it is learned)
    for run in runs_of(learned):
        ids = tokens[run]
        ids = ids[ids < tokenizer.vocab_size]  # image tokens have larger ids
        if len(ids):
            texts.append((tokenizer.decode(ids), learned[run.start]))
    share = _share([len(text) for text, _ in texts], characters)
    marked = ""
    left = characters
    for text, is_learned in texts:
        if left <= 0:
            marked += "..."
            break
        left -= min(len(text), share)
        shown = text
        if len(text) > share:
            half = 0 if is_learned else share // 2
            shown = f"{text[: share - half]}...{text[len(text) - half :]}"
        marked += f"\u00ab{shown}\u00bb" if is_learned else shown
    return repr(marked)


def _share(lengths: list[int], characters: int) -> int:
    """Return the maximum length per text with which all texts together fit, but at least _LEAST."""
    # give short texts all of their length, and divide the remainder among the longer ones
    left = characters
    for rest, length in zip(range(len(lengths), 0, -1), sorted(lengths), strict=True):
        if length * rest > left:
            return max(left // rest, min(_LEAST, characters))
        left -= length
    return characters


def runs_of(values: np.ndarray) -> Iterator[slice]:
    """Yield the maximal runs of equal values [n] as slices, in order."""
    changes = np.flatnonzero(values[1:] != values[:-1]) + 1
    edges = [0, *changes.tolist(), len(values)]
    return (slice(start, stop) for start, stop in itertools.pairwise(edges) if start < stop)


def statistics(directory: StrPath | Url) -> dict[str, Any]:
    """Return counts, efficiencies and the histogram of document lengths, as builtin types."""
    dataset = PackedDataset(directory)
    # these tables are small; tokens are read only to count learned ones
    manifest = dataset.manifest
    shards = [dataset.shard(number) for number in range(len(manifest.shards))]
    segments = [shard.segments for shard in shards]
    lengths = np.concatenate([table["true_length"] for table in segments]).astype(np.int64)
    flags = np.concatenate([table["flags"] for table in segments])
    places = len(dataset) * manifest.seq_length  # tokens if all packs were full
    padded = sum(shard.num_padded_tokens for shard in manifest.shards)
    # bin i counts lengths in (2^(i-1), 2^i]
    exponents = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    bins = np.bincount(exponents)
    # the names are printed, and are keys of `stats --json`
    found = {
        "directory": str(directory),
        "tokenizer": manifest.tokenizer.kind,
        "vocab_size": manifest.tokenizer.vocab_size,
        "seq_length": manifest.seq_length,
        "pad_multiple": manifest.pad_multiple,
        "shards": len(manifest.shards),
        "packs": len(dataset),
        "documents": len(lengths),
        "tokens": manifest.num_tokens,
        "learned_tokens": _learned(dataset),
        "packing_efficiency": manifest.packing_efficiency,
        "padded_share": padded / places if places else 0.0,
        "length_histogram": {
            f"<= {1 << i}": count for i, count in enumerate(bins.tolist()) if count
        },
        "split_pieces": int(((flags & FLAG_SPLIT) > 0).sum()),
        "truncated": int(((flags & FLAG_TRUNCATED) > 0).sum()),
        "rejected": manifest.num_rejected,
    }
    # only a dataset with images has these values
    if manifest.image_rules is not None:
        # frame -1 is an image, and frame 0 the first one of a video
        tables = [shard.units["frame"] for shard in shards if shard.units is not None]
        frames = np.concatenate([np.empty(0, np.int32), *tables])
        crops = np.concatenate([shard.packs["num_crops"] for shard in shards])
        found |= {
            "images": int((frames < 0).sum()),
            "videos": int((frames == 0).sum()),
            "image_units": len(frames),
        }
        found |= {"image_crops": int(crops.sum()), "most_crops_of_a_pack": int(crops.max())}
        image_bytes = 0
        for shard_entry in manifest.shards:
            for file in shard_entry.files:
                if file.name == "images.bin":
                    image_bytes += file.size
        found["image_bytes"] = image_bytes
    return found


def statistics_text(values: dict[str, Any]) -> str:
    """Format the result of `statistics`: a line for each value, tables below their names."""
    lines = []
    for name, value in values.items():
        words = name.replace("_", " ")
        # a histogram becomes a table
        if isinstance(value, dict):
            lines.append(words)
            for key, count in value.items():
                lines.append(f"    {count:>14,}  {key}")
        elif isinstance(value, float):
            lines.append(f"{words:<24}{value:.3%}")
        else:
            shown = value if isinstance(value, str) else f"{value:,}"
            lines.append(f"{words:<24}{shown}")
    return "\n".join(lines)
