"""A build in parts and its directory: the bytes of one run, one whole build at a time; datasets that are merged."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megacp.prepare import command as preprocess
from megacp.prepare.build.journal import locked
from megacp.prepare.build.merge import merge
from megacp.prepare.build.run import BuildSummary, build
from megacp.prepare.verify import verify
from tests.prepare.build.builds import documents, expected, files, run, settings, visible, write_records


def part(inputs: list[Path], output: Path, index: int, count: int, **changes: Any) -> tuple[int, int]:
    """Units of a part, and those that were there."""
    summary = build(settings(inputs, output, **changes), io.StringIO(), part=(index, count))
    return len(summary.results), summary.units_resumed


def finish(inputs: list[Path], output: Path, **changes: Any) -> BuildSummary:
    return build(settings(inputs, output, **changes), io.StringIO(), builds_missing=False)


def test_parts_in_any_order_have_the_bytes_of_one_run(tmp_path: Path) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write_records(a, 120, 1, 0)
    write_records(b, 60, 2, 1000)
    units = len(run([a, b], tmp_path / "one", seed=3).results)
    assert units > 4
    made = [part([a, b], tmp_path / "parts", index, 3, seed=3) for index in (2, 0, 1)]
    assert sum(count for count, _ in made) == units and not any(there for _, there in made)
    assert not (tmp_path / "parts/manifest.json").exists()
    summary = finish([a, b], tmp_path / "parts", seed=3)
    assert (summary.units_resumed, summary.documents) == (units, 180)
    assert visible(tmp_path / "parts") == visible(tmp_path / "one")
    assert verify(tmp_path / "parts") == []
    assert finish([a, b], tmp_path / "parts", seed=3).already_complete
    assert part([a, b], tmp_path / "parts", 1, 3, seed=3)[1] == len(range(1, units, 3))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    a = tmp_path / "a.jsonl"
    write_records(a, 150)
    units = len(run([a], tmp_path / "one").results)
    part([a], tmp_path / "d", 0, 4)
    part([a], tmp_path / "d", 2, 4)
    odd = [unit for unit in range(units) if unit % 2]
    with pytest.raises(ValueError, match=f"lacks {len(odd)} of {units} units, {', '.join(map(str, odd))} "):
        finish([a], tmp_path / "d")
    assert not (tmp_path / "d/manifest.json").exists()
    part([a], tmp_path / "d", 3, 4)
    (tmp_path / "d/shard_00002/tokens.bin").unlink()  # a shard that was lost counts as missing
    with pytest.raises(ValueError, match=r"lacks \d+ of \d+ units, 1, 2, 5"):
        finish([a], tmp_path / "d")
    with pytest.raises(ValueError, match=r"begun with other settings .*seq_length: 128 before, 256 now"):
        part([a], tmp_path / "d", 1, 4, seq_length=256)
    assert build(settings([a], tmp_path / "d"), io.StringIO()).units_resumed == units - len(odd[::2]) - 1
    assert visible(tmp_path / "d") == visible(tmp_path / "one")


@pytest.mark.slow
def test_parts_of_other_processes_build_at_the_same_time(tmp_path: Path) -> None:
    a = tmp_path / "a.jsonl"
    write_records(a, 60)
    command = [sys.executable, "-c", "import sys; from megacp.prepare.command import main; sys.exit(main())"]
    flags = ["--input", str(a), "--output", str(tmp_path / "d"), "--tokenizer", "byte", "--seq-length", "128"]
    flags += ["--unit-bytes", "1000", "--workers", "1"]
    parts = [
        subprocess.Popen([*command, "build", *flags, "--units", f"{i}/3"], env={**os.environ}) for i in (0, 1, 2, 1)
    ]
    assert [process.wait(timeout=120) for process in parts] == [0, 0, 0, 0]
    assert preprocess.main(["finish", *flags]) == 0
    assert preprocess.main(["build", *[text.replace(f"{tmp_path}/d", f"{tmp_path}/one") for text in flags]]) == 0
    assert visible(tmp_path / "d") == visible(tmp_path / "one")


@pytest.mark.parametrize("text", ["3", "3/3", "-1/3", "a/b", "1/0", "0/3/4", ""])
def test_a_part_is_a_number_below_a_count(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--input", "a", "--output", "d", "--tokenizer", "byte", "--seq-length", "8"]
    assert preprocess.main(["build", *flags, f"--units={text}"]) == 2
    assert "expected I/N with 0 <= I < N" in capsys.readouterr().err
    assert preprocess.main(["build", *flags, "--units", "0/2", "--overwrite"]) == 2
    assert "would delete what other parts have built" in capsys.readouterr().err


def test_a_whole_build_keeps_all_others_out_and_parts_share(tmp_path: Path) -> None:
    def other(shared: bool) -> subprocess.CompletedProcess[str]:
        code = "import sys; from pathlib import Path; from megacp.prepare.build.journal import locked"
        command = [sys.executable, "-c", f"{code}\nwith locked(Path(sys.argv[1]), {shared}): print('in')"]
        return subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=60)

    with locked(tmp_path):
        for shared in (False, True):
            assert "another build is writing to it" in other(shared).stderr
    with locked(tmp_path, shared=True):
        assert other(True).stdout == "in\n" and "another build is writing to it" in other(False).stderr
    assert other(False).returncode == 0


def test_a_damaged_file_of_a_unit_is_named_and_built_again_once_it_is_gone(tmp_path: Path) -> None:
    write_records(tmp_path / "a.jsonl", 60)
    run([tmp_path / "a.jsonl"], tmp_path / "d")
    before, unit = files(tmp_path / "d"), tmp_path / "d/.build/00001.json"
    unit.write_bytes(unit.read_bytes()[:40])
    with pytest.raises(ValueError, match=f"{unit} is damaged"):
        run([tmp_path / "a.jsonl"], tmp_path / "d")
    unit.unlink()
    run([tmp_path / "a.jsonl"], tmp_path / "d")
    assert files(tmp_path / "d") == before


def test_merged_datasets_hold_the_documents_of_all(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    records = [write_records(path, 40, seed) for seed, path in enumerate(paths)]
    for path in paths:
        run([path], tmp_path / path.stem)
    manifest = merge([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "both"))
    assert documents(tmp_path / "both") == expected(records[0]) + expected(records[1])
    assert manifest.sources == tuple(map(str, paths)) and verify(tmp_path / "both") == []
    with pytest.raises(ValueError, match="merged dataset; nothing was overwritten"):
        run([paths[0]], tmp_path / "both")


def test_datasets_that_do_not_fit_are_refused_with_all_mismatches(tmp_path: Path) -> None:
    a = tmp_path / "a.jsonl"
    write_records(a, 5)
    run([a], tmp_path / "one")
    run([a], tmp_path / "two", seq_length=256, pad_multiple=2)
    with pytest.raises(ValueError, match="two has seq_length 256, not 128, pad_multiple 2, not 1$"):
        merge([str(tmp_path / "one"), str(tmp_path / "two")], str(tmp_path / "both"))
    with pytest.raises(ValueError, match="at least two"):
        merge([str(tmp_path / "one")], str(tmp_path / "both"))
    with pytest.raises(ValueError, match="is one of the datasets"):
        merge([str(tmp_path / "one"), str(tmp_path / "one")], str(tmp_path / "one"))
    assert not (tmp_path / "both").exists()


def test_documents_with_and_without_an_end_are_not_merged(tmp_path: Path) -> None:
    a = tmp_path / "a.jsonl"
    write_records(a, 5)
    ends, without = str(tmp_path / "ends"), str(tmp_path / "open")
    run([a], tmp_path / "ends")
    run([a], tmp_path / "open", append_eod=False)
    with pytest.raises(ValueError, match=r"open has a last token none, not 256 .--append-eod, --eod-token"):
        merge([ends, ends, without], str(tmp_path / "no"))
    assert merge([ends, ends], str(tmp_path / "1")).document_end == {"token": 256}
    assert merge([without, without], str(tmp_path / "2")).document_end == {"token": None}


def test_a_damaged_part_is_not_merged(tmp_path: Path) -> None:
    a = tmp_path / "a.jsonl"
    write_records(a, 5)
    run([a], tmp_path / "one")
    run([a], tmp_path / "two")
    path = tmp_path / "two/shard_00000/tokens.bin"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="two/shard_00000/tokens.bin: sha256"):
        merge([str(tmp_path / "one"), str(tmp_path / "two")], str(tmp_path / "both"))
    assert not (tmp_path / "both/manifest.json").exists()
