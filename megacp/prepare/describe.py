"""A packed dataset in words: one pack (`inspect`), or all of it (`stats`), read as training reads
it.
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
"""Characters that are shown of a run, though later ones then are not seen."""


def describe_pack(
    dataset: PackedDataset,
    index: int,
    tokenizer: Tokenizer,
    characters: int = 240,
    documents: int = 10,
) -> str:
    """One pack: a line for each of its first `documents` (0: all) with length, loss weights and
    source, and its text.

    What is learned of a text stands between \u00ab and \u00bb. ValueError when there is no such
    pack.
    """
    pack, manifest = pack_of(dataset, index), dataset.manifest
    padded = int(pack.segments["padded_length"].sum())
    lines = [
        f"pack {index} of {len(dataset)}: {counted(len(pack.segments), 'document')}, "
        f"{len(pack.tokens)} tokens, "
        f"{learned_of_pack(pack)} learned, {padded} padded, "
        f"{padded / manifest.seq_length:.2%} of --seq-length {manifest.seq_length}; "
        "\u00ablearned\u00bb"
    ]
    for number, (here, branches) in enumerate(pack_documents(pack)):
        if documents and number >= documents:
            lines.append(f"  {len(pack.segments) - number} more documents; --documents 0 shows all")
            break
        row, tokens = pack.segments[number], pack.tokens[here]
        weights, note = "weights all 1", " (truncated)" if row["flags"] & FLAG_TRUNCATED else ""
        if pack.weights is not None:
            own = pack.weights[here]
            weights = (
                f"weights {float(own.min()):g}..{float(own.max()):g}, {int((own > 0).sum())} "
                "counted"
            )
        if row["flags"] & FLAG_SPLIT:
            note = f" (piece from token {row['source_start']})"
        source = f"{manifest.sources[row['source_file']]} @ {row['source_offset']}"
        lines.append(f"  [{number}] {len(tokens)} tokens{note}  {weights}  {source}")
        learned = np.ones(len(tokens), bool) if pack.weights is None else pack.weights[here] > 0
        for i, (first, last, above) in enumerate(document_parts(len(tokens), branches)):
            shown = _marked(tokens[first:last], learned[first:last], tokenizer, characters)
            if not above:
                lines += [f"      {shown}", *_images(pack, number)]
                continue
            name = f"branch {i} of {above[-1]}" if len(above) > 1 else f"branch {i}"
            lines.append(f"{'  ' * len(above)}    {name}: {last - first} tokens  {shown}")
    return "\n".join(lines + _boundaries(pack))


def pack_of(dataset: PackedDataset, index: int) -> Pack:
    """The pack that --pack names. ValueError when there is none."""
    if not 0 <= index < len(dataset):
        raise ValueError(f"--pack {index}: the dataset has packs 0 to {len(dataset) - 1}")
    return dataset.pack(index)


def pack_documents(pack: Pack) -> Iterator[tuple[slice, np.ndarray]]:
    """Slices of the tokens of a pack's documents, each with its rows of tables.BRANCH_DTYPE."""
    start = branch = 0
    table = np.empty(0, BRANCH_DTYPE) if pack.branches is None else pack.branches
    for row in pack.segments:
        length, count = int(row["true_length"]), int(row["num_branches"])
        yield slice(start, start + length), table[branch : branch + count]
        start, branch = start + length, branch + count


def document_parts(length: int, branches: np.ndarray) -> list[tuple[int, int, list[int]]]:
    """First token, end, and the numbers of what it continues (0 = the prefix) of each part of a
    document of tokens.
    """
    begins, found = [0, *branches["start"].tolist(), length], list[tuple[int, int, list[int]]]()
    for i, parent in enumerate(
        parents(np.array(begins[:-1]), np.array([length, *branches["leave"]])).tolist()
    ):
        found.append((begins[i], begins[i + 1], [*found[parent][2], parent] if i else []))
    return found


def learned_of_pack(pack: Pack) -> int:
    """How many tokens of a pack training learns."""
    learned = 0
    for here, rows in pack_documents(pack):
        weights = None if pack.weights is None else pack.weights[here]
        learned += learned_tokens(pack.tokens[here], weights, rows["start"], rows["leave"])
    return learned


def _learned(dataset: PackedDataset) -> int:
    """Learned tokens of a dataset; the bytes are read only where there are weights or branches."""
    total, first = 0, 0
    for shard in dataset.manifest.shards:
        names = {file.name for file in shard.files}
        if {"weights.bin", "branches.npy"} & names:
            total += sum(learned_of_pack(dataset.pack(first + i)) for i in range(shard.num_packs))
        else:
            total += shard.num_tokens - shard.num_segments
        first += shard.num_packs
    return total


def _images(pack: Pack, segment: int) -> list[str]:
    """A line for each image and each video of a segment: where its tokens are, what it was cut
    into.
    """
    if pack.images is None:
        return []
    units = pack.images.units
    crops, pooled = (np.diff(units[name], prepend=0) for name in ("image_stop", "pooled_stop"))
    here = np.flatnonzero(units["segment"] == segment)
    lines = []
    for rows in (
        np.split(here, np.flatnonzero(np.diff(units["item"][here])) + 1) if len(here) else []
    ):
        first, last = units[rows[0]], units[rows[-1]]
        what = "image" if first["frame"] < 0 else f"video frames {first['frame']}..{last['frame']}"
        branch = f" in branch {first['branch']}" if first["branch"] else ""
        lines.append(
            f"      {what}{branch}: tokens "
            f"{first['start']}..{last['start'] + last['num_tokens'] - 1}, "
            f"{crops[rows].sum()} crops, {pooled[rows].sum()} pooled tokens, "
            f"{len(pack.images.read(int(first['item']))):,} bytes"
        )
    return lines


def _boundaries(pack: Pack) -> list[str]:
    """A line for each planned CP degree: the crops that each rank encodes."""
    if pack.images is None or not len(pack.images.units):
        return []
    units = pack.images.units
    lines = [
        f"  {len(units)} units, {units['image_stop'][-1]} crops, {units['pooled_stop'][-1]} pooled "
        "tokens"
    ]
    for degree, table in sorted(pack.images.boundaries.items()):
        ranges = [f"{row['start_image_idx']}-{row['end_image_idx']}" for row in table]
        lines.append(
            f"  cp {degree}: crops {' '.join(ranges)}, at most {table['max_num_tokens'][0]} tokens "
            "a rank"
        )
    return lines


def _marked(tokens: np.ndarray, learned: np.ndarray, tokenizer: Tokenizer, characters: int) -> str:
    """A text of tokens [n] with marks around what is learned. All runs share the characters, so
    that each is seen.

    Of what is learned the beginning is shown, of what stands before it the end too.
    """
    runs = [
        (tokens[run][tokens[run] < tokenizer.vocab_size], learned[run.start])
        for run in runs_of(learned)
    ]
    texts = [
        (tokenizer.decode(own), is_learned) for own, is_learned in runs if len(own)
    ]  # above are image tokens
    share, marked, left = _share([len(text) for text, _ in texts], characters), "", characters
    for text, is_learned in texts:
        if left <= 0:
            marked += "..."
            break
        half, left = 0 if is_learned else share // 2, left - min(len(text), share)
        shown = (
            text if len(text) <= share else f"{text[: share - half]}...{text[len(text) - half :]}"
        )
        marked += f"\u00ab{shown}\u00bb" if is_learned else shown
    return repr(marked)


def _share(lengths: list[int], characters: int) -> int:
    """The most that each text may have so that all have no more than the characters, but at least
    some.
    """
    left = characters
    for rest, length in zip(range(len(lengths), 0, -1), sorted(lengths), strict=True):
        if length * rest > left:
            return max(left // rest, min(_LEAST, characters))
        left -= length
    return characters


def runs_of(values: np.ndarray) -> Iterator[slice]:
    """The longest runs of equal neighbours in values [n], in order."""
    edges = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    return (slice(start, stop) for start, stop in itertools.pairwise(edges) if start < stop)


def statistics(directory: StrPath | Url) -> dict[str, Any]:
    """Counts, efficiencies and the histogram of document lengths, as builtin types."""
    dataset = PackedDataset(directory)
    manifest = dataset.manifest
    segments = [dataset.shard(number).segments for number in range(len(manifest.shards))]
    lengths = np.concatenate([table["true_length"] for table in segments]).astype(np.int64)
    flags = np.concatenate([table["flags"] for table in segments])
    places = len(dataset) * manifest.seq_length
    padded = sum(shard.num_padded_tokens for shard in manifest.shards)
    bins = np.bincount(np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64))
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
    if manifest.image_rules is not None:
        shards = [dataset.shard(number) for number in range(len(manifest.shards))]
        frames = np.concatenate(
            [np.empty(0, np.int32), *(s.units["frame"] for s in shards if s.units is not None)]
        )
        crops = np.concatenate([shard.packs["num_crops"] for shard in shards])
        found |= {
            "images": int((frames < 0).sum()),
            "videos": int((frames == 0).sum()),
            "image_units": len(frames),
        }
        found |= {"image_crops": int(crops.sum()), "most_crops_of_a_pack": int(crops.max())}
        sizes = (
            file.size
            for shard in manifest.shards
            for file in shard.files
            if file.name == "images.bin"
        )
        found["image_bytes"] = sum(sizes)
    return found


def statistics_text(values: dict[str, Any]) -> str:
    """What `statistics` returns, for people: a line for each value, tables below their names."""
    lines = []
    for name, value in values.items():
        words = name.replace("_", " ")
        if isinstance(value, dict):
            lines += [words, *(f"    {count:>14,}  {key}" for key, count in value.items())]
        elif isinstance(value, float):
            lines.append(f"{words:<24}{value:.3%}")
        else:
            lines.append(f"{words:<24}{value if isinstance(value, str) else f'{value:,}'}")
    return "\n".join(lines)
