"""Build by the rules of Qwen3.5, and check the model's inputs.

These are patches, grids and positions with three axes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacp.engine.config.vision import VisionConfig
from megacp.engine.rows.batch import PackedBatch
from megacp.engine.rows.image_shards import compute_image_shard_boundaries, units_of
from megacp.prepare.verify import verify
from megacp.training.data.collate import collate
from megacp.training.data.images import ImageLoading
from megacp.training.data.reader import PackedDataset
from megacp.training.data.vision.decoding import (
    RulesDecoder,
    load_pixels,
    rules_from_dict,
    video_info,
    video_pixels,
)
from megacp.training.data.vision.qwen3_5 import Qwen35Rules
from megacp.training.data.vision.rules import ImageError
from megacp.training.loop.sources import image_misfits
from tests.prepare.media.pictures import encoded, noise, video
from tests.prepare.media.test_qwen3_5_rules import SMALL, spelled, two_levels
from tests.prepare.packs import builds
from tests.prepare.templates.public import of_trl, write_tokenizer
from tests.reference import qwen_processor as reference
from tests.tools.in_process import preprocessed as tool

pytest.importorskip("av")
GIVEN = dataclasses.replace(SMALL, token_ids={})
IDS = SMALL.token_ids
TIME = re.compile("<[0-9.]+ seconds>")
PLACE = re.compile(r"<\|vision_start\|><\|(?:image|video)_pad\|><\|vision_end\|>")
# Frames per video. A build samples 5 and 8 of them.
FRAMES = {"odd.mp4": 26, "even.mp4": 40}


def parts(*content: dict[str, Any] | str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": x} if isinstance(x, str) else x for x in content]}


def say(role: str, *content: dict[str, Any] | str) -> dict[str, Any]:
    return {"role": role, **parts(*content)}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return 40 records with text, images of all shapes, videos, trees and trees with images."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, frames in FRAMES.items():
        (folder / name).write_bytes(video(frames))
    rng, records = np.random.default_rng(7), list[dict[str, Any]]()
    for i in range(40):
        width, height = (int(side) for side in rng.integers(3, 120, 2))
        (folder / f"{i}.png").write_bytes(encoded(noise(width, height, i)))
        picture, answer = {"type": "image", "path": f"{i}.png"}, say("assistant", f"answer {i}")
        other = {"type": "image", "path": f"{max(i - 1, 0)}.png"}
        film = {"type": "video", "path": sorted(FRAMES)[i % 2]}
        records.append(
            [
                {"text": f"text {i} " * 9},
                {"messages": [say("user", "what? ", picture, " and ", other), answer]},
                parts(picture, "?")
                | {"branches": [{"messages": [say("user", "q", other), answer]}, "caption"]},
                {"messages": [say("user", film, "happens", picture), answer]},
                parts(film)
                | {"branches": [parts(picture, "a") | {"branches": ["b", parts(other)]}]},
            ][i % 5]
        )
    (folder / "c.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / "c.jsonl"


@pytest.fixture(scope="module")
def dataset(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    output = tmp_path_factory.mktemp("built") / "d"
    more = {"seq_length": 2048, "unit_bytes": 1 << 20, "cp_degrees": (1, 2, 3), "pad_multiple": 8}
    builds.run([corpus], output, image_rules=GIVEN, image_root=str(corpus.parent), **more)
    assert verify(output) == []
    return PackedDataset(output)


def rows(dataset: PackedDataset) -> list[list[int]]:
    """Return rows of one pack each, and rows of two consecutive packs."""
    numbers = [*range(len(dataset))]
    return [[i] for i in numbers] + [list(pair) for pair in itertools.pairwise(numbers)]


def loaded(dataset: PackedDataset, numbers: list[int], rank: int = 0, size: int = 1) -> PackedBatch:
    packs, rules = [dataset.pack(i) for i in numbers], rules_from_dict(dataset.manifest.image_rules)
    loading = ImageLoading(RulesDecoder(rules), rank, size)
    return collate(packs, image_attention="causal", loading=loading)


def library_pixels(corpus: Path, name: str) -> tuple[np.ndarray, list[list[int]], str]:
    """Return patches, grids and text of a file by the library's processors."""
    data = (corpus.parent / name).read_bytes()
    if name.endswith(".png"):
        patches, grid = reference.process_image(load_pixels(data, SMALL), SMALL)
        return patches, [grid], reference.image_text(grid, SMALL)
    num_frames, fps = video_info(data, SMALL)
    taken = reference.sampled_frames(num_frames, fps, SMALL)
    assert len(taken) == {"odd.mp4": 5, "even.mp4": 8}[name]
    patches, grid = reference.process_video(np.stack([*video_pixels(data, SMALL)]), SMALL)
    return patches, [[1, *grid[1:]]] * grid[0], reference.video_text(grid, taken, fps, SMALL)


def named(value: Any) -> list[str]:
    """Return the files that a record names, in the order of its tokens."""
    if isinstance(value, dict):
        own = [value["path"]] if "path" in value else []
        return own + [
            name for key in ("content", "messages", "branches") for name in named(value.get(key))
        ]
    return [name for one in value for name in named(one)] if isinstance(value, list) else []


def test_a_build_stores_the_tokens_and_grids_of_the_library_and_its_rows_have_the_patches(
    corpus: Path, dataset: PackedDataset
) -> None:
    records = {0: ""}
    for line in corpus.read_bytes().splitlines(keepends=True):
        records[max(records)] = line.decode()
        records[max(records) + len(line)] = ""
    seen, special = 0, [*IDS.values()]
    for i in range(len(dataset)):
        pack, batch = dataset.pack(i), loaded(dataset, [i])
        begin, patches, grids = 0, list[np.ndarray](), list[list[int]]()
        for row in pack.segments:
            tokens = pack.tokens[begin : begin + int(row["true_length"])]
            weights = pack.weights[begin : begin + len(tokens)]
            begin += len(tokens)
            files = [
                library_pixels(corpus, name)
                for name in named(json.loads(records[int(row["source_offset"])]))
            ]
            expected = [token for *_, text in files for token in spelled(text, SMALL)]
            assert tokens[np.isin(tokens, special)].tolist() == expected
            assert not weights[np.isin(tokens, special)].any()
            text = bytes(tokens[tokens < 256].tolist()).decode()
            assert TIME.findall(text) == TIME.findall("".join(of for *_, of in files))
            patches += [one for one, *_ in files]
            grids += [grid for _, of, _ in files for grid in of]
        vision = batch.vision
        assert (
            vision is not None
            and vision.patches.shape[1:] == SMALL.patch_shape
            and begin == len(pack.tokens)
        )
        seen += len(grids)
        if not grids:
            continue
        assert np.array_equal(vision.grids * SMALL.merge_size, np.array(grids)[:, 1:])
        assert np.abs(vision.patches[:, 0] - np.concatenate(patches)).max() <= two_levels(SMALL)
        assert np.array_equal(vision.pooling, np.arange(len(vision.patches)).reshape(-1, 4))
        assert vision.cum_crop_bounds.tolist() == np.cumsum(np.array(grids).prod(1)).tolist()
        assert np.isin(
            batch.tokens[vision.feature_rows], [IDS["image_patch"], IDS["video_patch"]]
        ).all()
    assert seen > 100


def test_chats_and_videos_have_the_ids_of_the_library_from_their_first_token_to_their_last(
    corpus: Path, tmp_path: Path
) -> None:
    """Write a tokenizer with the special tokens and a template that uses them."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    write_tokenizer(tmp_path)
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    made.add_special_tokens([*Qwen35Rules.token_texts.values()])
    made.save(str(tmp_path / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    theirs.chat_template = of_trl("qwen3_5_think")
    (tmp_path / "chat.jinja").write_text(theirs.chat_template)
    one, other = ({"type": "image", "path": f"{i}.png"} for i in (3, 4))
    film, second = ({"type": "video", "path": name} for name in FRAMES)
    answer = say("assistant", "The answer is 42.")
    talks = [
        [say("user", one, "What? ", film, one, other, " Why?", second, "The"), answer],
        [say("user", "Look: ", film), say("user", "The answer", one), answer],
        [say("user", "Look: ", film), say("user", second, second), answer],
    ]
    branches = [{"messages": talk[1:]} for talk in talks[1:]]
    films = parts("Look: ", film, second, " The answer") | {"weight": 0.0}
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": talks[0]}) + "\n")
    (tmp_path / "b.jsonl").write_text(
        json.dumps({"messages": talks[1][:1], "branches": branches}) + "\n"
    )
    (tmp_path / "v.jsonl").write_text(json.dumps(films) + "\n" + json.dumps({"text": "so"}))
    more = {
        "image_rules": GIVEN,
        "image_root": str(corpus.parent),
        "seq_length": 4096,
        "append_eod": False,
    }
    more |= {
        "tokenizer": str(tmp_path / "tokenizer.json"),
        "chat_template": str(tmp_path / "chat.jinja"),
    }
    for name in "cbv":
        builds.run([tmp_path / f"{name}.jsonl"], tmp_path / name, **more)
    pack = PackedDataset(tmp_path / "b").pack(0)
    shared, *starts = [*pack.branches["start"].tolist(), len(pack.tokens)]
    tree = [
        pack.tokens[:shared].tolist() + pack.tokens[a:b].tolist()
        for a, b in itertools.pairwise([shared, *starts])
    ]
    for talk, tokens in zip(talks, [*builds.documents(tmp_path / "c"), *tree], strict=True):
        chat, names = PLACE.split(theirs.apply_chat_template(talk, tokenize=False)), named(talk)
        seen = [library_pixels(corpus, name)[2] for name in names]
        whole = "".join(
            text for pair in itertools.zip_longest(chat, seen, fillvalue="") for text in pair
        )
        assert len(chat) == len(names) + 1 and tokens == theirs.encode(
            whole, add_special_tokens=False
        )
    for name, count in {"c": 1, "b": 2}.items():
        pack = PackedDataset(tmp_path / name).pack(0)
        assert (
            theirs.decode(pack.tokens[pack.weights > 0].tolist())
            == "The answer is 42.<|im_end|>\n" * count
        )
        assert len(pack.images.units) == {"c": 3 + 3 + 4, "b": 3 + 1 + 4 + 4}[name]
    whole = "".join(
        ["Look: ", *(library_pixels(corpus, name)[2] for name in FRAMES), " The answer"]
    )
    assert builds.documents(tmp_path / "v")[0] == theirs.encode(whole, add_special_tokens=False)


def test_positions_are_those_of_the_library_along_every_path(dataset: PackedDataset) -> None:
    paths = 0
    for numbers in rows(dataset):
        batch = loaded(dataset, numbers)
        assert batch.position_axes is not None and batch.position_axes.dtype == np.int64
        grids = batch.vision.grids * SMALL.merge_size
        bounds = batch.vision.cum_token_pooling_bounds
        starts = batch.vision.feature_rows[bounds - np.diff(bounds, prepend=0)]
        ends = np.flatnonzero((batch.leave > 0) & (np.append(batch.leave[1:], 0) != batch.leave))
        for end in (
            ends.tolist()
        ):  # the tokens visible to a part's last token are one document of the library
            path = np.flatnonzero((np.arange(len(batch)) <= end) & (batch.leave > end))
            on_path = np.flatnonzero(np.isin(starts, path))
            kinds = batch.tokens[starts[on_path]]
            given = [
                [[1, *grids[unit].tolist()] for unit in on_path[kinds == IDS[name]]]
                for name in ("image_patch", "video_patch")
            ]
            expected = reference.positions(batch.tokens[path], *given, SMALL)
            assert np.array_equal(batch.position_axes[path], expected)
            paths += 1
        padding = batch.leave == 0
        assert np.array_equal(
            batch.position_axes[padding], np.repeat(batch.position_ids[padding][:, None], 3, 1)
        )
    assert paths > 80


def test_ranks_share_the_patches_of_a_row_evenly_and_know_their_grids(
    dataset: PackedDataset,
) -> None:
    for numbers in rows(dataset):
        whole = loaded(dataset, numbers)
        shares = [loaded(dataset, numbers, rank, 3) for rank in range(3)]
        assert len({part.fingerprint() for part in [whole, *shares]}) == 1
        assert np.array_equal(
            np.concatenate([part.vision.patches for part in shares]), whole.vision.patches
        )
        assert np.array_equal(
            np.concatenate([part.vision.grids for part in shares]), whole.vision.grids
        )
        bounds = whole.vision.cum_crop_bounds, whole.vision.cum_token_pooling_bounds
        table = compute_image_shard_boundaries(*bounds, 3)
        for rank, part in enumerate(shares):
            assert np.array_equal(part.vision.boundaries, table)
            assert len(part.vision.grids) == len(units_of(table, bounds[0], rank))
            assert part.vision.grids.prod(1).sum() * 4 == len(part.vision.patches)
        largest = np.diff(bounds[0], prepend=0).max(initial=0)
        assert (
            max(len(part.vision.patches) for part in shares) <= whole.vision.num_crops / 3 + largest
        )


def test_a_text_shard_has_no_images_and_its_rows_no_axes(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": "only text"}) + "\n")
    builds.run([tmp_path / "t.jsonl"], tmp_path / "d", image_rules=GIVEN)
    names = {path.name for path in (tmp_path / "d/shard_00000").iterdir()}
    assert names == {"checksums.npy", "packs.npy", "segments.npy", "tokens.bin", "tokens.idx"}
    assert verify(tmp_path / "d") == []
    batch = loaded(PackedDataset(tmp_path / "d"), [0])
    assert (
        batch.position_axes is None and batch.vision.grids is None and not len(batch.vision.patches)
    )


def test_flags_choose_the_family_and_its_sizes(corpus: Path, tmp_path: Path) -> None:
    def built(*more: object) -> Any:
        basic = [
            "build",
            "--input",
            corpus,
            "--output",
            tmp_path / "d",
            "--tokenizer",
            "byte",
            "--seq-length",
            2048,
        ]
        return tool(*basic, "--image-root", corpus.parent, "--workers", 1, *more)

    sizes = [
        "--patch-size",
        4,
        "--resize-pixels",
        "300,6000",
        "--video-resize-pixels",
        "2000,30000",
    ]
    done = built("--vision-family", "qwen3_5", *sizes, "--max-frames", 12)
    assert done.returncode == 0, done.stderr
    dataset = PackedDataset(tmp_path / "d")
    rules = rules_from_dict(dataset.manifest.image_rules)
    assert rules == SMALL and dataset.manifest.feature_ids == (257, 258)
    towers = (
        VisionConfig(2),
        VisionConfig(2, "qwen3_5"),
        VisionConfig(2, "qwen3_5", vision_patch_size=4),
    )
    told = [
        "built with --vision-family qwen3_5",
        "patches of 4 pixels in windows of 2, but the model expects 14 in windows of 2",
    ]
    found = [image_misfits("d", rules, tower) for tower in towers]
    assert (
        all(text in reason for text, (reason,) in zip(told, found[:2], strict=True))
        and found[2] == []
    )
    page = tool("inspect", tmp_path / "d", "--pack", 1, "--html", tmp_path / "pack.html")
    assert page.returncode == 0 and "frame 3" in (tmp_path / "pack.html").read_text()
    folder, other = (write_tokenizer(tmp_path / name).parent for name in ("model", "other"))
    (other / "config.json").write_text('{"model_type": "qwen2_5_vl", "vision_config": {}}')
    (folder / "config.json").write_text('{"model_type": "qwen3_5"}')
    done = built("--tokenizer", folder, *sizes, "--oversize", "drop", "--overwrite")
    assert done.returncode == 0 and "--vision-family qwen3_5: taken from " in done.stderr
    assert PackedDataset(tmp_path / "d").manifest.image_rules["family"] == "qwen3_5"
    done = built(
        "--tokenizer", folder / "tokenizer.json", *sizes, "--oversize", "drop", "--overwrite"
    )
    assert done.returncode == 0 and "--vision-family qwen3_5: taken from " in done.stderr, (
        "a file in the folder"
    )
    for flags, told in (
        (
            ["--vision-family", "llava"],
            "--vision-family is 'llava', but must be one of molmo2, qwen3_5",
        ),
        (["--vision-family", "qwen3_5", "--max-crops", 2], "unknown keys max_crops"),
        (["--resize-pixels", "1,2"], "unknown keys resize_pixels"),
        (["--tokenizer", folder, "--vision-family", "molmo2"], "config.json belongs to a qwen3_5"),
        (["--tokenizer", folder, "--max-crops", 2], "unknown keys max_crops"),
        (["--tokenizer", other], "config.json belongs to a qwen2_5_vl"),
    ):
        refused = built(*flags)
        assert refused.returncode == 2 and told in refused.stderr


def test_a_bad_image_leaves_windows_of_the_family_that_no_token_sees(
    dataset: PackedDataset,
) -> None:

    class Broken(RulesDecoder):
        def image(self, data: bytes) -> Any:
            raise ImageError("half a PNG")

    rules = rules_from_dict(dataset.manifest.image_rules)
    for numbers in rows(dataset):
        packs, whole = [dataset.pack(i) for i in numbers], loaded(dataset, numbers)
        loading = ImageLoading(Broken(rules), on_bad_image="skip")
        left = collate(packs, image_attention="causal", loading=loading)
        assert left.vision.pooling.shape == whole.vision.pooling.shape
        assert left.vision.patches.shape == whole.vision.patches.shape
        assert left.fingerprint() == whole.fingerprint()
