"""Folders of safetensors: what is written is what the library reads, one tensor at a time, and damage is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megacp.core.distributed.grid import single_axis
from megacp.huggingface.convert import hf_files
from megacp.huggingface.convert.tables.mapping import Info, whole

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed (extra: hf)")
ROOT = Path(__file__).resolve().parents[3]


class Counting:
    """Tensors made when they are asked for; knows how many of them are alive at once."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtypes: list[torch.dtype]) -> None:
        self.infos = {name: Info(shape, dtypes[i % len(dtypes)]) for i, (name, shape) in enumerate(shapes.items())}
        self.order: list[str] = []

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        self.order.append(name)
        info = self.infos[name]
        torch.manual_seed(len(name))
        return torch.randn(info.shape, dtype=torch.float32)[start:stop].to(info.dtype)


ONE = single_axis("world")
SHAPES = {f"tensor{'x' * i}": (i + 1, 8) for i in range(6)} | {"vector": (5,)}
ALL = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("limit", [1 << 30, 100, 1])
def test_shards_hold_each_tensor_once_and_the_library_reads_them(limit: int, tmp_path: Path) -> None:
    source = Counting(SHAPES, ALL)
    paths = hf_files.write_tensors(source, tmp_path, limit, ONE)
    assert sorted(source.order) == sorted(SHAPES)
    found = {}
    for path in tmp_path.glob("*.safetensors"):
        found |= safetensors.load_file(path)
    assert found.keys() == SHAPES.keys()
    assert all(torch.equal(found[name], whole(source, name)) for name in SHAPES)
    assert all(found[name].dtype == source.infos[name].dtype for name in SHAPES)
    if limit == 1:
        assert len(paths) == len(SHAPES) + 1 and paths[0].name == "model-00001-of-00007.safetensors"
        index = json.loads((tmp_path / hf_files.INDEX).read_text())
        assert index["weight_map"].keys() == SHAPES.keys()
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    again = hf_files.SafetensorsFolder(tmp_path)
    assert dict(again.infos) == source.infos
    assert torch.equal(again.rows("tensorxxx", 1, 3), whole(source, "tensorxxx")[1:3])


def test_a_folder_that_is_not_whole_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has neither model.safetensors nor model.safetensors.index.json$"):
        hf_files.SafetensorsFolder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pickled files are not read \(pytorch_model.bin\)"):
        hf_files.SafetensorsFolder(tmp_path)
    hf_files.write_tensors(Counting(SHAPES, ALL[:1]), tmp_path, 100, ONE)
    index = json.loads((tmp_path / hf_files.INDEX).read_text())
    first = min(tmp_path.glob("model-00001*"))
    content = first.read_bytes()
    first.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="model-00001-of-.*safetensors cannot be read"):
        hf_files.SafetensorsFolder(tmp_path)
    first.write_bytes(content)
    for change, message in (
        ({**index["weight_map"], "vector": first.name}, "disagree on vector"),
        ({**index["weight_map"], "more": first.name}, "disagree on more"),
        ({"vector": "../model.safetensors"}, "no safetensors file of this folder"),
        ({}, "has no weight_map"),
    ):
        (tmp_path / hf_files.INDEX).write_text(json.dumps({"weight_map": change}))
        with pytest.raises(ValueError, match=message):
            hf_files.SafetensorsFolder(tmp_path)


def test_hashes_tell_which_file_was_changed(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")
    (tmp_path / "b").write_text("two")
    hf_files.check_sums(tmp_path, ONE)
    hf_files.write_sums(tmp_path, ONE)
    hf_files.check_sums(tmp_path, ONE)
    subprocess.run(["sha256sum", "--check", "--quiet", hf_files.SUMS], cwd=tmp_path, check=True)
    (tmp_path / "a").write_text("won")
    (tmp_path / "b").unlink()
    with pytest.raises(ValueError, match="a is not the file that was hashed; b cannot be read: No such file"):
        hf_files.check_sums(tmp_path, ONE)
    (tmp_path / hf_files.SUMS).write_text("\n")
    with pytest.raises(ValueError, match="SHA256SUMS lists no file"):
        hf_files.check_sums(tmp_path, ONE)


def test_a_list_of_hashes_names_nothing_but_regular_files_of_its_folder(tmp_path: Path) -> None:
    """Would catch /dev/zero hashed without end, a pipe waited for, and a file of somebody else."""
    (tmp_path / "a").write_text("one")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "zero").symlink_to("/dev/zero")
    sums = tmp_path / hf_files.SUMS
    for name, message in (
        ("/dev/zero", "line 1: '/dev/zero' leads out of the folder"),
        ("../a", "line 1: '../a' leads out of the folder"),
        ("folder/../../a", "leads out of the folder"),
        ("pipe", "pipe is a named pipe, no regular file"),
        ("zero", "zero is a device, no regular file"),
        ("folder", "folder is a directory, no regular file"),
        ("a\0b", "leads out of the folder"),
    ):
        sums.write_text(f"{'0' * 64}  {name}\n")
        with pytest.raises(ValueError, match=message):
            hf_files.check_sums(tmp_path, ONE)
    sums.unlink()
    os.mkfifo(sums)
    with pytest.raises(ValueError, match="SHA256SUMS is a named pipe"):
        hf_files.check_sums(tmp_path, ONE)


def test_json_is_a_regular_file_of_bounded_size_and_depth(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for content, message in (
        (b"[" * 100_000, "no JSON: it is nested too deeply"),
        (b'{"a":' * 100_000, "no JSON: it is nested too deeply"),
        (b'{"a": NaN}', "no JSON: it holds NaN"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "no JSON: Exceeds the limit"),
        (b"\xff", "no JSON: .*utf-8"),
        (b"[]", "holds a list, expected an object"),
        (b"", "no JSON"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"config.json (is )?{message}"):
            hf_files.read_json(path)
    path.write_bytes(b"{}" + b" " * 100)
    with pytest.raises(ValueError, match="config.json has more than 64 bytes"):
        hf_files.read_json(path, 64)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="config.json is a named pipe"):
        hf_files.read_json(path)
    with pytest.raises(ValueError, match="is a directory, no regular file"):
        hf_files.read_json(tmp_path)


def crafted(tensors: dict[str, Any], data: int = 32, length: int | None = None) -> bytes:
    """A safetensors file with any header."""
    text = json.dumps(tensors).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


def described(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


LIES: dict[str, bytes] = {
    "nothing": b"",
    "a short length": b"\1\0",
    "a length beyond the file": crafted({"a": described(0, 32, [8])}, length=1 << 20),
    "an endless length": crafted({"a": described(0, 32, [8])}, length=(1 << 64) - 1),
    "offsets that overlap": crafted({"a": described(0, 16, [4]), "b": described(8, 24, [4])}, 24),
    "one place for two": crafted({"a": described(0, 32, [8]), "b": described(0, 32, [8])}),
    "a gap": crafted({"a": described(0, 8, [2]), "b": described(16, 32, [4])}),
    "bytes after the end": crafted({"a": described(0, 16, [4])}),
    "an end beyond the file": crafted({"a": described(0, 64, [16])}),
    "an end before the begin": crafted({"a": described(32, 0, [8])}),
    "a shape of other bytes": crafted({"a": described(0, 32, [9])}),
    "a shape that overflows": crafted({"a": described(0, 32, [1 << 62, 8])}),
    "a product that wraps to the right one": crafted({"a": described(0, 0, [1 << 32, 1 << 32])}, 0),
    "a negative size": crafted({"a": described(0, 32, [-8])}),
    "a size of text": crafted({"a": described(0, 32, ["8"])}),  # type: ignore[list-item]
    "no dtype": crafted({"a": {"shape": [8], "data_offsets": [0, 32]}}),
    "another dtype": crafted({"a": described(0, 32, [4], "I64")}),
    "an unknown dtype": crafted({"a": described(0, 32, [4], "F128")}),
    "a header that is no object": crafted([1, 2]),  # type: ignore[arg-type]
    "a header nested too deeply": (100_000).to_bytes(8, "little") + b'{"a":' * 20_000,
    "pickled weights": b"\x80\x02}q\0." * 100,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused_before_a_tensor_is_read(lie: str, tmp_path: Path) -> None:
    """Would catch bytes of one tensor, or of nothing, taken for another's."""
    (tmp_path / hf_files.SINGLE).write_bytes(LIES[lie])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        hf_files.SafetensorsFolder(tmp_path)


def test_weights_are_regular_files_of_the_folder_that_an_index_names(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / hf_files.SINGLE)
    with pytest.raises(ValueError, match="model.safetensors is a named pipe"):
        hf_files.SafetensorsFolder(tmp_path)
    (tmp_path / hf_files.SINGLE).unlink()
    hf_files.write_tensors(Counting(SHAPES, ALL[:1]), tmp_path / "..", 1 << 30, ONE)
    for name in ("../model.safetensors", "/etc/model.safetensors", "..", "a\0.safetensors", ".safetensors/x"):
        (tmp_path / hf_files.INDEX).write_text(json.dumps({"weight_map": {"vector": name}}))
        with pytest.raises(ValueError, match="no safetensors file of this folder"):
            hf_files.SafetensorsFolder(tmp_path)
    for content in ({"weight_map": {"vector": 3}}, {"weight_map": ["a"]}, {"weight_map": None}):
        (tmp_path / hf_files.INDEX).write_text(json.dumps(content))
        with pytest.raises(ValueError, match="has no weight_map of tensors and files"):
            hf_files.SafetensorsFolder(tmp_path)


def test_sums_of_other_programs_are_read_and_the_card_may_be_edited(tmp_path: Path) -> None:
    """Would catch `sha256sum --binary` and a blank line read as another name: `Is a directory`."""
    (tmp_path / "a b").write_text("one")
    (tmp_path / "README.md").write_text("card")
    hf_files.write_sums(tmp_path, ONE)
    (tmp_path / "README.md").write_text("a better card")
    hf_files.check_sums(tmp_path, ONE)
    made = subprocess.run(["sha256sum", "--binary", "a b"], cwd=tmp_path, check=True, capture_output=True, text=True)
    (tmp_path / hf_files.SUMS).write_text(f"\n{made.stdout}\r\n\n")
    hf_files.check_sums(tmp_path, ONE)
    (tmp_path / hf_files.SUMS).write_text(made.stdout + "what is this\n")
    with pytest.raises(ValueError, match="SHA256SUMS, line 2: 'what is this' is not a sha256"):
        hf_files.check_sums(tmp_path, ONE)
    (tmp_path / hf_files.SUMS).write_text(made.stdout)
    (tmp_path / "a b").write_text("won")
    with pytest.raises(ValueError, match="a b is not the file that was hashed"):
        hf_files.check_sums(tmp_path, ONE)


def test_one_file_beside_an_index_is_refused(tmp_path: Path) -> None:
    """The library reads the single file, whatever the index says: either may be stale."""
    hf_files.write_tensors(Counting(SHAPES, ALL[:1]), tmp_path, 100, ONE)
    hf_files.write_tensors(Counting(SHAPES, ALL[:1]), tmp_path, 1 << 30, ONE)
    with pytest.raises(ValueError, match=r"has both model\.safetensors and model\.safetensors\.index\.json"):
        hf_files.SafetensorsFolder(tmp_path)


def test_a_new_folder_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a model of empty files after the power was lost."""
    synced: list[str] = []

    def sync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        assert not (tmp_path / "a").exists() or synced[-1] == tmp_path.name

    monkeypatch.setattr("os.fsync", sync)
    with hf_files.new_folder(tmp_path / "a", ONE) as folder:
        (folder / "file").write_text("x")
        (folder / "below").mkdir()
        (folder / "below" / "other").write_text("y")
    assert {"file", "other", "below"} <= set(synced)


def test_a_new_folder_appears_when_it_is_whole_and_leaves_nothing_when_it_fails(tmp_path: Path) -> None:
    with hf_files.new_folder(tmp_path / "deep" / "a", ONE) as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "deep" / "a").exists()
    assert (tmp_path / "deep" / "a" / "file").read_text() == "x"
    with pytest.raises(KeyError), hf_files.new_folder(tmp_path / "b", ONE):
        raise KeyError
    with pytest.raises(ValueError, match="a exists; nothing is ever written over"):
        with hf_files.new_folder(tmp_path / "deep" / "a", ONE):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


PEAK = """
import sys, json
from pathlib import Path
import torch
from megacp.huggingface.convert.hf_files import SafetensorsFolder
from megacp.huggingface.convert.hf_files import write_tensors
from megacp.core.distributed.grid import single_axis
from megacp.huggingface.convert.tables.mapping import Link
from megacp.huggingface.convert.tables.mapping import Mapped
from megacp.huggingface.convert.tables.mapping import Named

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) >> 10

class Watched(Mapped):
    peak = 0
    def rows(self, *where):
        found = super().rows(*where)
        found.sum()
        Watched.peak = max(Watched.peak, anonymous())
        return found

source = SafetensorsFolder(Path(sys.argv[1]))
names = sorted(source.infos)
side = tuple(Named(name, source.infos[name].shape) for name in names)
links = [Link((one,), (Named(f"new.{one.name}", one.shape),)) for one in side[2:]]
links.append(Link(side[:2], (Named("joined", (2 * side[0].shape[0], side[0].shape[1])),)))
torch.zeros(8).sum()
before = anonymous()
write_tensors(Watched(source, links, True), Path(sys.argv[2]), int(sys.argv[3]), single_axis("world"))
print(Watched.peak - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("limit", [1 << 40, 1])
def test_memory_holds_one_tensor_at_a_time_however_large_model_and_shards_are(limit: int, tmp_path: Path) -> None:
    """40 tensors of 4 MiB: renamed ones are copied from file to file, two joined ones take 8 MiB. Would catch a state
    dict (160 MiB) and a writer that fills a shard in memory.
    """
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    tensors = {f"t{i:02d}": torch.full((1024, 1024), float(i)) for i in range(40)}
    safetensors.save_file(tensors, tmp_path / "in" / "model.safetensors")
    arguments = [sys.executable, "-c", PEAK, str(tmp_path / "in"), str(tmp_path / "out"), str(limit)]
    done = subprocess.run(arguments, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120)
    assert int(done.stdout) <= 8 + 4, "MiB: the largest tensor, and half as much again for buffers"
    assert len(hf_files.SafetensorsFolder(tmp_path / "out").infos) == 39
