"""Folders of safetensors: the library reads the written files, tensors are read separately, and
damage is reported.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megacp.distributed.grid import single_axis
from megacp.huggingface.convert import hf_files
from megacp.huggingface.convert.tensors import whole
from tests.huggingface.convert.models import Tensors, save

safetensors = pytest.importorskip(
    "safetensors.torch", reason="safetensors is not installed (extra: hf)"
)
ROOT = Path(__file__).resolve().parents[3]


ONE = single_axis("world")
ALL = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = {f"tensor{'x' * i}": (i + 1, 8) for i in range(6)} | {"vector": (5,)}


def source_of(*dtypes: torch.dtype) -> Tensors:
    return Tensors(
        {
            name: torch.randn(SHAPES[name]).to(dtypes[i % len(dtypes)])
            for i, name in enumerate(SHAPES)
        }
    )


@pytest.mark.parametrize("limit", [1 << 30, 100, 1])
def test_shards_hold_each_tensor_once_and_the_library_reads_them(
    limit: int, tmp_path: Path
) -> None:
    source = source_of(*ALL)
    paths = hf_files.write_tensors(source, tmp_path, limit, ONE)
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
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    advice = (
        r"has neither .*pickled files are not supported \(pytorch_model.bin\). .*save_pretrained"
    )
    with pytest.raises(ValueError, match=advice):
        hf_files.SafetensorsFolder(tmp_path)
    hf_files.write_tensors(source_of(torch.float32), tmp_path, 100, ONE)
    index = json.loads((tmp_path / hf_files.INDEX).read_text())
    first = min(tmp_path.glob("model-00001*"))
    for change, message in (
        ({**index["weight_map"], "vector": first.name}, "disagree on vector"),
        ({**index["weight_map"], "more": first.name}, "disagree on more"),
        ({"vector": "../model.safetensors"}, "not a safetensors file in this folder"),
        ({}, "has no weight_map"),
    ):
        (tmp_path / hf_files.INDEX).write_text(json.dumps({"weight_map": change}))
        with pytest.raises(ValueError, match=message):
            hf_files.SafetensorsFolder(tmp_path)
    (tmp_path / hf_files.INDEX).write_text(json.dumps(index))
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(
        ValueError,
        match=r"model-00001-of-.*safetensors: the file is incomplete \(\d+ bytes found, \d+ "
        r"expected\)",
    ):
        hf_files.SafetensorsFolder(tmp_path)
    hf_files.write_tensors(source_of(torch.float32), tmp_path, 1 << 30, ONE)
    with pytest.raises(ValueError, match=r"has both"):
        hf_files.SafetensorsFolder(tmp_path)


def test_a_new_folder_appears_when_it_is_whole_and_leaves_nothing_when_it_fails(
    tmp_path: Path,
) -> None:
    with hf_files.new_folder(tmp_path / "deep" / "a", ONE) as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "deep" / "a").exists()
    assert (tmp_path / "deep" / "a" / "file").read_text() == "x"
    with pytest.raises(KeyError), hf_files.new_folder(tmp_path / "b", ONE):
        raise KeyError
    with pytest.raises(ValueError, match="a exists and is never overwritten"):
        with hf_files.new_folder(tmp_path / "deep" / "a", ONE):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


KILLED = """
import os, sys
from pathlib import Path
from megacp.huggingface import convert_command
from megacp.huggingface.convert import export

def write(*given):
    print("writing", flush=True)
    sys.stdin.read()

export.write_hf = write
sys.exit(convert_command.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_conversion_that_is_ended_leaves_nothing_for_ever(number: int, tmp_path: Path) -> None:
    """SIGTERM removes the partly written folder. After SIGKILL, the next start removes it, and no
    other folder.
    """
    save("llama 2", tmp_path / "a")
    flags = [
        "--from",
        "hf",
        "--to",
        "hf",
        "--input",
        str(tmp_path / "a"),
        "--output",
        str(tmp_path / "b"),
    ]
    command = [sys.executable, "-c", KILLED, *flags]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as running:
        assert running.stdout is not None and running.stdout.readline() == b"writing\n"
        with hf_files.new_folder(tmp_path / "b", ONE) as mine:
            assert len(list(tmp_path.glob("b.tmp-*"))) == 2, "both live"
            running.send_signal(number)
            assert running.wait(30) == (128 + number if number == signal.SIGTERM else -number)
            assert mine.is_dir() and len(list(tmp_path.glob("b.tmp-*"))) == 1 + (
                number == signal.SIGKILL
            )
    shutil.rmtree(tmp_path / "b")
    with hf_files.new_folder(tmp_path / "b", ONE):
        assert len(list(tmp_path.glob("b.tmp-*"))) == 1
