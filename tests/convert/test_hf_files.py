"""Folders of safetensors: what is written is what the library reads, one tensor at a time, and damage is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megacp.convert import hf_files
from megacp.convert.mapping import Info, whole

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed (extra: hf)")
ROOT = Path(__file__).resolve().parents[2]


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


SHAPES = {f"tensor{'x' * i}": (i + 1, 8) for i in range(6)} | {"vector": (5,)}
ALL = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("limit", [1 << 30, 100, 1])
def test_shards_hold_each_tensor_once_and_the_library_reads_them(limit: int, tmp_path: Path) -> None:
    source = Counting(SHAPES, ALL)
    paths = hf_files.write_tensors(source, tmp_path, limit)
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
    hf_files.write_tensors(Counting(SHAPES, ALL[:1]), tmp_path, 100)
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
    hf_files.check_sums(tmp_path)
    hf_files.write_sums(tmp_path)
    hf_files.check_sums(tmp_path)
    subprocess.run(["sha256sum", "--check", "--quiet", hf_files.SUMS], cwd=tmp_path, check=True)
    (tmp_path / "a").write_text("won")
    (tmp_path / "b").unlink()
    with pytest.raises(ValueError, match="a is not the file that was hashed; b cannot be read: No such file"):
        hf_files.check_sums(tmp_path)


def test_sums_of_other_programs_are_read_and_the_card_may_be_edited(tmp_path: Path) -> None:
    """Would catch `sha256sum --binary` and a blank line read as another name: `Is a directory`."""
    (tmp_path / "a b").write_text("one")
    (tmp_path / "README.md").write_text("card")
    hf_files.write_sums(tmp_path)
    (tmp_path / "README.md").write_text("a better card")
    hf_files.check_sums(tmp_path)
    made = subprocess.run(["sha256sum", "--binary", "a b"], cwd=tmp_path, check=True, capture_output=True, text=True)
    (tmp_path / hf_files.SUMS).write_text(f"\n{made.stdout}\r\n\n")
    hf_files.check_sums(tmp_path)
    (tmp_path / hf_files.SUMS).write_text(made.stdout + "what is this\n")
    with pytest.raises(ValueError, match="SHA256SUMS, line 2: 'what is this' is not a sha256"):
        hf_files.check_sums(tmp_path)
    (tmp_path / hf_files.SUMS).write_text(made.stdout)
    (tmp_path / "a b").write_text("won")
    with pytest.raises(ValueError, match="a b is not the file that was hashed"):
        hf_files.check_sums(tmp_path)


def test_one_file_beside_an_index_is_refused(tmp_path: Path) -> None:
    """The library reads the single file, whatever the index says: either may be stale."""
    hf_files.write_tensors(Counting(SHAPES, ALL[:1]), tmp_path, 100)
    hf_files.write_tensors(Counting(SHAPES, ALL[:1]), tmp_path, 1 << 30)
    with pytest.raises(ValueError, match=r"has both model\.safetensors and model\.safetensors\.index\.json"):
        hf_files.SafetensorsFolder(tmp_path)


def test_a_new_folder_appears_when_it_is_whole_and_leaves_nothing_when_it_fails(tmp_path: Path) -> None:
    with hf_files.new_folder(tmp_path / "deep" / "a") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "deep" / "a").exists()
    assert (tmp_path / "deep" / "a" / "file").read_text() == "x"
    with pytest.raises(KeyError), hf_files.new_folder(tmp_path / "b"):
        raise KeyError
    with pytest.raises(ValueError, match="a exists; nothing is ever written over"):
        with hf_files.new_folder(tmp_path / "deep" / "a"):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


PEAK = """
import sys, json
from pathlib import Path
import torch
from megacp.convert.hf_files import SafetensorsFolder, write_tensors
from megacp.convert.mapping import Link, Mapped, Named

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
write_tensors(Watched(source, links, True), Path(sys.argv[2]), int(sys.argv[3]))
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
