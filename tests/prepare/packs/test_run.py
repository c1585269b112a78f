"""Builds give the same bytes however they run, lose nothing, and print one clear error."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megacp.prepare.packs.run as build_module
from megacp.prepare.packs.unit import UnitBuilder
from megacp.prepare.records import read
from megacp.prepare.records.read import Unit
from megacp.prepare.tokenize.kept import kept_tokenizer
from megacp.prepare.tokenize.tokenizer import load_tokenizer
from megacp.prepare.verify import verify
from megacp.training.data.reader import PackedDataset
from megacp.training.data.tables import FLAG_SPLIT, FLAG_TRUNCATED
from tests.prepare.packs.builds import documents, expected, files, run, write_records


@pytest.mark.parametrize("finished", [False, True])
def test_what_a_killed_build_was_just_writing_is_gone_when_the_next_one_ends(
    tmp_path: Path, finished: bool
) -> None:
    a = tmp_path / "a.jsonl"
    write_records(a, 30)
    run([a], tmp_path / "whole")
    if finished:
        run([a], tmp_path / "d")
    left = [".build/.00002.json.c8d21ca78463.partial", ".shard_00007.partial/tokens.bin"]
    left += (
        [".manifest.json.0011aabbccdd.partial", "tokenizer/.tokenizer.json.ab.partial"]
        if finished
        else []
    )
    for name in left:
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_bytes(b"{")
    assert run([a], tmp_path / "d").already_complete == finished
    assert files(tmp_path / "d") == files(tmp_path / "whole")


class _Killed(BaseException):
    """Simulated kill; no code may catch it."""


@pytest.mark.parametrize("survived", [0, 1, 3])
def test_a_build_killed_anywhere_and_run_again_has_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    a = tmp_path / "a.jsonl"
    write_records(a, 150)
    run([a], tmp_path / "whole")

    class Dies(UnitBuilder):
        left = survived

        def __call__(self, task: Unit) -> Any:
            result = super().__call__(task)  # the shard exists, but is not in the journal yet
            if Dies.left == 0:
                raise _Killed
            Dies.left -= 1
            return result

    monkeypatch.setattr(build_module, "UnitBuilder", Dies)
    with pytest.raises(_Killed):
        run([a], tmp_path / "d")
    assert not (tmp_path / "d/manifest.json").exists()
    monkeypatch.setattr(build_module, "UnitBuilder", UnitBuilder)
    summary = run([a], tmp_path / "d", workers=2)
    assert summary.units_resumed == survived
    assert files(tmp_path / "d") == files(tmp_path / "whole")


def test_a_shard_that_was_lost_is_built_again(tmp_path: Path) -> None:
    a = tmp_path / "a.jsonl"
    write_records(a, 100)
    run([a], tmp_path / "d")
    before = files(tmp_path / "d")
    (tmp_path / "d/shard_00001/tokens.bin").unlink()
    run([a], tmp_path / "d")
    assert files(tmp_path / "d") == before


def test_other_settings_or_input_are_refused_by_name_and_overwrite_replaces(tmp_path: Path) -> None:
    a = tmp_path / "a.jsonl"
    write_records(a, 20)
    run([a], tmp_path / "d")
    before = files(tmp_path / "d")
    with pytest.raises(
        ValueError, match="oversize: .error. before, .drop. now; seq_length: 128 before, 256 now"
    ):
        run([a], tmp_path / "d", seq_length=256, oversize="drop")
    records = write_records(a, 20, seed=9)
    with pytest.raises(
        ValueError, match="input: .*nothing was overwritten|nothing was overwritten.*input: "
    ):
        run([a], tmp_path / "d")
    assert files(tmp_path / "d") == before
    run([a], tmp_path / "d", overwrite=True, seq_length=256)
    assert documents(tmp_path / "d") == expected(records)


def test_a_directory_with_other_files_is_left_alone_even_with_overwrite(tmp_path: Path) -> None:
    a = tmp_path / "a.jsonl"
    write_records(a, 3)
    (tmp_path / "d").mkdir()
    (tmp_path / "d/thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="contains files but no dataset .thesis.tex."):
        run([a], tmp_path / "d", overwrite=True)
    assert (tmp_path / "d/thesis.tex").read_text() == "years of work"


def test_all_wrong_settings_are_listed_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        changes = {"seq_length": 100, "pad_multiple": 16, "workers": 0, "max_errors": 3}
        run([tmp_path / "none.jsonl"], tmp_path / "d", **changes)
    text = str(error.value)
    fit = "--seq-length 100 is not a multiple of --pad-multiple 16"
    for part in ("none.jsonl", fit, "--workers is 0", "--max-errors"):
        assert part in text
    assert "--max-errors 3 needs --on-error skip" in text and not (tmp_path / "d").exists()


# ---- bad records


def spoiled(path: Path, position: int, line: bytes) -> list[dict[str, Any]]:
    records = write_records(path, 60)
    lines = path.read_bytes().splitlines(keepends=True)
    lines.insert(position, line + b"\n")
    path.write_bytes(b"".join(lines))
    return records


@pytest.mark.parametrize(
    ("line", "workers"),
    [(b"{", 1), (b'{"text": 1}', 1), (b'{"t": "x"}', 1), (b'{"text": "\xff"}', 1), (b"{", 2)],
)
def test_a_bad_line_ends_the_build_with_its_place(
    tmp_path: Path, line: bytes, workers: int
) -> None:
    a = tmp_path / "a.jsonl"
    spoiled(a, 50, line)
    with pytest.raises(ValueError, match=f"{a}:51: .*byte offset"):
        run([a], tmp_path / "d", workers=workers)
    assert not (tmp_path / "d/manifest.json").exists()


def test_more_bad_records_than_max_errors_end_the_build(tmp_path: Path) -> None:
    a = tmp_path / "a.jsonl"
    spoiled(a, 50, b"{\n{\n{")
    run([a], tmp_path / "enough", on_error="skip", max_errors=3)
    with pytest.raises(ValueError, match=r"3 bad records, more than --max-errors 2"):
        run([a], tmp_path / "d", on_error="skip", max_errors=2)


# ---- lengths


def test_a_piece_says_whether_its_document_was_split_or_truncated(tmp_path: Path) -> None:
    a = tmp_path / "a.jsonl"
    a.write_text(json.dumps({"text": "x" * 300}) + "\n" + json.dumps({"text": "short"}) + "\n")
    for name, flag, count in (("split", FLAG_SPLIT, 3), ("truncate", FLAG_TRUNCATED, 1)):
        run([a], tmp_path / name, oversize=name)
        dataset = PackedDataset(tmp_path / name)
        flags = np.concatenate([dataset.pack(i).segments["flags"] for i in range(len(dataset))])
        assert sorted(flags.tolist()) == [0] + [flag] * count


class CountedFile(io.FileIO):
    """File that adds up the bytes that are read from it."""

    total = 0

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        CountedFile.total += count or 0
        return count or 0


def test_lines_of_dropped_and_bad_records_are_counted_in_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build reads the file twice, plus a buffer per unit, even if it leaves out many records."""
    a, wrong = tmp_path / "a.jsonl", {7: "x" * 300, 17: ["no text"]}
    a.write_text(
        "".join(json.dumps({"text": wrong.get(i % 20, "short" * 20)}) + "\n" for i in range(3000))
    )
    monkeypatch.setattr(read, "open_input", lambda path: io.BufferedReader(CountedFile(path)))
    monkeypatch.setattr(read, "SAMPLED_BYTES", 1)
    CountedFile.total = 0
    summary = run([a], tmp_path / "d", oversize="drop", on_error="skip", unit_bytes=1 << 14)
    assert len(summary.results) == 22 and CountedFile.total < 4 * a.stat().st_size
    rejects = [
        json.loads(line)["line"] for line in (tmp_path / "d/rejects.jsonl").read_text().splitlines()
    ]
    assert rejects == [i + 1 for i in range(3000) if i % 20 in wrong]


def test_a_seed_shuffles_documents_and_none_keeps_their_order(tmp_path: Path) -> None:
    a = tmp_path / "a.jsonl"
    a.write_text("".join(json.dumps({"text": f"{i:03d}"}) + "\n" for i in range(60)))
    seeds = {"none": None, "one": 1, "again": 1, "two": 2}
    for name, seed in seeds.items():
        run([a], tmp_path / name, seed=seed, unit_bytes=1 << 20)
    tokens = {name: (tmp_path / name / "shard_00000/tokens.bin").read_bytes() for name in seeds}
    assert (
        tokens["one"] == tokens["again"]
        and len({tokens["none"], tokens["one"], tokens["two"]}) == 3
    )
    assert (
        documents(tmp_path / "none") == documents(tmp_path / "one") == documents(tmp_path / "two")
    )


# ---- weights and branches


def test_branches_are_stored_behind_their_prefix(tmp_path: Path) -> None:
    a = tmp_path / "a.jsonl"
    user = {"role": "user", "content": "Q"}
    unlearned = {"text": "T", "branches": [{"messages": [user]}, {"messages": [user, user]}]}
    a.write_text(json.dumps(unlearned) + "\n" + json.dumps({"text": "x"}) + "\n")
    run([a], tmp_path / "d", seq_length=34)
    pack = PackedDataset(tmp_path / "d").pack(0)
    said = b"<|user|>\nQ"
    assert pack.tokens.tolist() == [*b"T", *said, 256, *said, *b"\n", *said, 256]
    assert pack.branches is not None and pack.branches.tolist() == [(1, 11, 12), (12, 22, 34)]
    assert int(pack.segments["prefix_length"][0]) == 1 and verify(tmp_path / "d") == []


def test_the_tokenizer_is_kept_with_the_dataset(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(["a b c"], vocab_size=300, show_progress=False)
    bpe.save_model(str(tmp_path))
    a = tmp_path / "a.jsonl"
    records = write_records(a, 10)
    with pytest.raises(ValueError, match="--eod-token, or use --no-append-eod"):
        run([a], tmp_path / "d", tokenizer=f"{tmp_path}/vocab.json,{tmp_path}/merges.txt")
    run(
        [a],
        tmp_path / "d",
        tokenizer=f"{tmp_path}/vocab.json,{tmp_path}/merges.txt",
        append_eod=False,
    )
    kept = load_tokenizer(kept_tokenizer(tmp_path / "d"))
    assert kept.info() == PackedDataset(tmp_path / "d").manifest.tokenizer
    assert kept.decode(documents(tmp_path / "d")[3]) == records[3]["text"]
