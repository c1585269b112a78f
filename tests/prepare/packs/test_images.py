"""Build datasets with images and videos: the stored data must match the records.

The bytes must not depend on how the dataset was built.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megacp.prepare.packs.run as build_module
from megacp.engine.rows.image_shards import compute_image_shard_boundaries
from megacp.prepare.describe import statistics
from megacp.prepare.tokenize.tokenizer import load_tokenizer
from megacp.prepare.verify import verify
from megacp.training.data.reader import PackedDataset
from megacp.training.data.vision.decoding import RulesDecoder, load_pixels
from megacp.training.data.vision.molmo2 import image_patches
from megacp.training.data.vision.rules import VisionRules
from tests.prepare.media.pictures import TINY, encoded, noise, video
from tests.prepare.media.test_qwen3_5_rules import SMALL
from tests.prepare.packs import builds
from tests.prepare.records.test_read import write as write_table
from tests.prepare.records.test_read import write_tar

pytest.importorskip("av")
RULES, GIVEN = (dataclasses.replace(rules, token_ids={}) for rules in (TINY, SMALL))
VISION: dict[str, Any] = {
    "image_rules": RULES,
    "seq_length": 512,
    "max_crops_per_pack": 40,
    "cp_degrees": (1, 2, 3),
    "unit_bytes": 3000,
}
IDS = TINY.token_ids


def say(role: str, *content: dict[str, Any] | str) -> dict[str, Any]:
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return {"role": role, "content": parts}


def inlined(i: int) -> bytes:
    """Return the image that is embedded in record `i`."""
    return encoded(noise(10 + i, 20, 100 + i))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Return 40 records with text, images (by path and base64), videos and branches.

    The image files are in `images`.
    """
    rng = np.random.default_rng(1)
    (tmp_path / "images").mkdir()
    (tmp_path / "images/v.mp4").write_bytes(video(30))
    records: list[dict[str, Any]] = []
    for i in range(40):
        name, kind = (f"{i}.png", "PNG") if i % 2 else (f"{i}.jpg", "JPEG")
        width, height = (int(side) for side in rng.integers(3, 70, 2))
        data = encoded(noise(width, height, i), kind)
        (tmp_path / "images" / name).write_bytes(data)
        picture = {"type": "image", "path": name}
        answer = say("assistant", f"answer {i}")
        inline = {"type": "image", "base64": base64.b64encode(inlined(i)).decode()}
        records.append(
            [
                {"text": f"text {i} " * 9},
                {"messages": [say("user", "what? ", picture), answer], "weight": 0.5},
                {
                    "content": [picture, inline],
                    "branches": [{"messages": [say("user", "q"), answer]}, "caption"],
                },
                {"messages": [say("user", {"type": "video", "path": "v.mp4"}, "happens"), answer]},
                {"content": [picture], "branches": [{"content": [inline]}, "other"]},
            ][i % 5]
            | {"id": i}
        )
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run(corpus: Path, output: Path, **changes: Any) -> Any:
    return builds.run(
        [corpus], output, **{**VISION, "image_root": str(corpus.parent / "images"), **changes}
    )


def units_of_records(dataset: PackedDataset) -> dict[int, list[tuple[bytes, int, int, int, int]]]:
    """Return the units of each record by offset, in order.

    A unit is (encoded bytes, frame, crops, pooled tokens, branch).
    """
    found: dict[int, list[tuple[bytes, int, int, int, int]]] = {}
    for i in range(len(dataset)):
        pack = dataset.pack(i)
        assert pack.images is not None
        units = pack.images.units
        crops, pooled = (np.diff(units[name], prepend=0) for name in ("image_stop", "pooled_stop"))
        begin = np.cumsum(pack.segments["true_length"]) - pack.segments["true_length"]
        for unit, c, p in zip(units, crops.tolist(), pooled.tolist(), strict=True):
            start = int(begin[unit["segment"]]) + int(unit["start"])
            tokens = pack.tokens[start : start + int(unit["num_tokens"])]
            assert int((tokens == IDS["image_patch"]).sum()) == p and (tokens >= 257).all()
            assert pack.weights is not None and not pack.weights[start : start + len(tokens)].any()
            offset = int(pack.segments["source_offset"][unit["segment"]])
            row = (
                pack.images.read(int(unit["item"])),
                int(unit["frame"]),
                c,
                p,
                int(unit["branch"]),
            )
            found.setdefault(offset, []).append(row)
    return found


def test_every_image_and_frame_is_stored_as_it_came_with_its_tokens(
    corpus: Path, tmp_path: Path
) -> None:
    summary = run(corpus, tmp_path / "d")
    dataset = PackedDataset(tmp_path / "d")
    assert summary.documents == 40 and verify(tmp_path / "d") == []
    assert dataset.manifest.image_rules == TINY.to_dict() and dataset.manifest.num_token_ids == 265
    found, decoder = units_of_records(dataset), RulesDecoder(TINY)
    offset = 0
    for i, line in enumerate(corpus.read_bytes().splitlines(keepends=True)):
        units, images = found.get(offset, []), corpus.parent / "images"
        data = (images / (f"{i}.png" if i % 2 else f"{i}.jpg")).read_bytes()
        if i % 5 == 3:
            assert [(item, frame) for item, frame, *_ in units] == [
                ((images / "v.mp4").read_bytes(), f) for f in range(12)
            ]
            patches, pooling = decoder.video(units[0][0], range(3, 7))
            assert len(patches) == 4 and len(pooling) == sum(row[3] for row in units[3:7])
        else:
            expected = [(data, -1), (inlined(i), -1)]
            assert [row[:2] for row in units] == expected[: (0, 1, 2, 0, 2)[i % 5]]
            assert [row[4] for row in units] == [[], [0], [0, 0], [], [0, 1]][i % 5]
        for item, frame, crops, pooled, _ in units:
            if frame < 0:
                patches, pooling = decoder.image(item)
                assert (len(patches), len(pooling)) == (crops, pooled)
                assert np.array_equal(patches, image_patches(load_pixels(item, TINY), TINY))
        offset += len(line)


def test_no_pack_exceeds_either_budget_and_its_boundaries_are_those_of_its_units(
    corpus: Path, tmp_path: Path
) -> None:
    run(corpus, tmp_path / "d", unit_bytes=1 << 20)
    dataset = PackedDataset(tmp_path / "d")
    crops = 0
    for i in range(len(dataset)):
        pack = dataset.pack(i)
        assert pack.images is not None and int(pack.segments["padded_length"].sum()) <= 512
        units = pack.images.units
        total = int(units["image_stop"][-1]) if len(units) else 0
        assert total <= 40
        crops += total
        for degree in (1, 2, 3) if len(units) else ():
            expected = compute_image_shard_boundaries(
                units["image_stop"], units["pooled_stop"], degree
            )
            assert np.array_equal(pack.images.boundaries[degree], expected)
    assert crops == statistics(tmp_path / "d")["image_crops"] > 100


def test_the_bytes_do_not_depend_on_workers_or_on_what_was_there(
    corpus: Path, tmp_path: Path
) -> None:
    units = len(run(corpus, tmp_path / "one", seed=3).results)
    run(corpus, tmp_path / "two", seed=3, workers=2)
    assert builds.files(tmp_path / "one") == builds.files(tmp_path / "two")
    (tmp_path / "two" / "shard_00001" / "images.bin").unlink()
    assert units > 3 and run(corpus, tmp_path / "two", seed=3, workers=2).units_resumed == units - 1
    assert builds.files(tmp_path / "two") == builds.files(tmp_path / "one")


def test_a_shard_holds_so_many_records_that_several_workers_have_work(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "RECORDS_OF_A_SHARD", 10)
    whole = len(run(corpus, tmp_path / "d", unit_bytes=0).results)
    (tmp_path / "empty.jsonl").touch()
    more = {**VISION, "image_root": str(corpus.parent / "images"), "unit_bytes": 0}
    after_nothing = builds.run([tmp_path / "empty.jsonl", corpus], tmp_path / "e", **more).results
    assert (
        3 <= whole <= 5 and len([result for result in after_nothing if result.documents]) == whole
    )
    text = tmp_path / "t.jsonl"
    builds.write_records(text, 40)
    assert (
        len(builds.run([text], tmp_path / "t", unit_bytes=0).results) == 1
    )  # the rule for text has not changed


def test_a_text_that_spells_an_image_token_is_refused(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(["a b c"], vocab_size=300, show_progress=False)
    bpe.add_special_tokens(["<im_patch>", "<|endoftext|>"])
    bpe.save(str(tmp_path / "tokenizer.json"))
    corpus = tmp_path / "c.jsonl"
    picture = {"type": "image", "base64": base64.b64encode(encoded(noise(9, 9))).decode()}
    words = {"type": "text", "text": "a <im_patch> b"}
    sound = {"content": [picture, {"type": "text", "text": "a b"}]}
    corpus.write_text(json.dumps(sound) + "\n" + json.dumps({"content": [picture, words]}) + "\n")
    settings = {**VISION, "tokenizer": str(tmp_path / "tokenizer.json")}
    with pytest.raises(ValueError, match="c.jsonl:2: .* the special token image_patch"):
        builds.run([corpus], tmp_path / "d", **settings)
    builds.run([corpus], tmp_path / "d", **settings, on_error="skip")
    rules = PackedDataset(tmp_path / "d").manifest.image_rules
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert rules is not None and rules["token_ids"]["image_patch"] == tokenizer.token_id(
        "<im_patch>"
    )
    assert (
        min(i for name, i in rules["token_ids"].items() if name != "image_patch")
        == tokenizer.vocab_size
    )


@pytest.mark.parametrize("rules", [RULES, GIVEN], ids=["molmo2", "qwen3_5"])
def test_a_caption_is_learned_behind_its_image_from_every_container(
    tmp_path: Path, rules: VisionRules
) -> None:
    """Parquet of `datasets`, a tar of img2dataset and lines with absolute paths give one dataset."""
    (tmp_path / "a.jpg").write_bytes(encoded(noise(40, 20), "JPEG"))
    picture = (tmp_path / "a.jpg").read_bytes()
    parts = {"content": [{"type": "image", "path": "a.jpg"}, {"type": "text", "text": "A cat."}]}
    (tmp_path / "parts.jsonl").write_text(json.dumps(parts))
    (tmp_path / "path.jsonl").write_text(
        json.dumps({"image": str(tmp_path / "a.jpg"), "caption": "A cat."})
    )
    write_table(
        tmp_path / "table.parquet",
        [{"image": {"bytes": picture, "path": "elsewhere.png"}, "text": "A cat."}],
    )
    told = {
        "caption": "A cat.",
        "url": "u",
        "status": "success",
        "error_message": None,
        "exif": "{}",
    }
    members = [("1.v2.jpg", picture), ("1.v2.json", json.dumps(told).encode())]
    write_tar(tmp_path / "json.tar", members)
    write_tar(tmp_path / "both.tar", [*members, ("1.v2.txt", b"A cat.")])
    found = []
    for source in ("parts.jsonl", "path.jsonl", "table.parquet", "both.tar", "json.tar"):
        output = tmp_path / f"of {source}"
        builds.run(
            [tmp_path / source], output, image_rules=rules, image_root=str(tmp_path), seq_length=512
        )
        pack = PackedDataset(output).pack(0)
        assert (
            pack.weights is not None and pack.images is not None and pack.images.read(0) == picture
        )
        assert pack.tokens[pack.weights > 0].tolist() == [*b"A cat.", 256]
        found.append((pack.tokens.tolist(), pack.weights.tolist(), pack.images.units.tolist()))
    assert all(each == found[0] for each in found)


def test_a_webdataset_tar_names_its_images_and_one_that_nobody_names_is_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "w.tar"
    picture = encoded(noise(20, 20))
    words = {"type": "text", "text": "a"}
    named = json.dumps({"content": [{"type": "image", "member": "png"}, words]}).encode()
    climbs = json.dumps({"content": [{"type": "image", "member": "../../secret.png"}]}).encode()
    members = {
        "1.json": named,
        "1.png": picture,
        "2.txt": b"text",
        "2.png": picture,
        "2.x.png": picture,
    }
    write_tar(path, [*members.items(), ("3.json", climbs), ("3.png", picture)])
    builds.run([path], tmp_path / "d", **VISION, on_error="skip")
    assert [row[:2] for row in units_of_records(PackedDataset(tmp_path / "d"))[0]] == [
        (picture, -1)
    ]
    reasons = [
        json.loads(line)["reason"]
        for line in (tmp_path / "d/rejects.jsonl").read_text().splitlines()
    ]
    assert (
        "does not refer to its member '2.png'" in reasons[0]
        and "does not refer to its member '3.png'" in reasons[1]
    )


@pytest.mark.parametrize("damage", ["units.npy", "images.bin", "shards_cp2.npy"])
def test_verify_finds_damaged_images_and_tables(corpus: Path, tmp_path: Path, damage: str) -> None:
    run(corpus, tmp_path / "d", unit_bytes=1 << 20)
    path = tmp_path / "d/shard_00000" / damage
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    reasons = verify(tmp_path / "d")
    assert reasons and any(damage in reason for reason in reasons)
