"""The archive of a box: only what `torch.save` writes for a tensor is unpacked."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megacp.checkpoint.archive import refuse_growth
from megacp.checkpoint.commit import load_checkpoint
from megacp.checkpoint.manifest import MANIFEST_FILE, _checksum
from tests.checkpoint.test_commit import WORLD, boxes, save

pytestmark = pytest.mark.timeout(60)


def archive(**entries: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as out:
        for name, content in entries.items():
            kind = zipfile.ZIP_DEFLATED if len(content) > 100_000 else zipfile.ZIP_STORED
            out.writestr(f"archive/{name.replace('__', '.').replace('_', '/')}", content, kind)
    return stream.getvalue()


def reduced(module: str, name: str, argument: int) -> bytes:
    return f"\x80\x02c{module}\n{name}\n".encode("latin-1") + pickle.dumps((argument,), 2)[2:-1] + b"R."


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_a_tensor_of_torch_passes_wherever_it_stands_in_a_file(dtype: torch.dtype) -> None:
    content = saved(torch.zeros(3, 5).to(dtype))
    refuse_growth(io.BytesIO(b"before" + content + b"after"), 6, len(content), "x")


BAD = {
    "a compressed gigabyte": archive(data__pkl=b"\x80\x02N.", data_0=bytes(1 << 28)),
    "an array of a terabyte": archive(data__pkl=reduced("builtins", "bytearray", 10**12)),
    "something else of torch": archive(data__pkl=reduced("torch._utils", "_rebuild_parameter", 1)),
    "a long pickle": archive(data__pkl=b"\x80\x02" + b"N0" * 40_000 + b"N."),
    "no pickle": archive(data_0=b"1234"),
    "no archive": b"x" * 1000,
    "nothing": b"",
}


@pytest.mark.parametrize("kind", BAD)
def test_anything_else_is_refused_by_its_place(kind: str) -> None:
    with pytest.raises(ValueError, match="^here is no archive of a tensor: "):
        refuse_growth(io.BytesIO(BAD[kind]), 0, len(BAD[kind]), "here")


@pytest.mark.parametrize("kind", [*BAD, "another shape"])
def test_a_payload_with_right_hashes_is_not_unpacked_for_that(tmp_path: Path, kind: str) -> None:
    """Would catch `torch.load` of bytes that grow: this one file would take all memory of the machine."""
    folder = save(tmp_path, 1)
    shard = folder / "__0_0.distcp"
    room = shard.stat().st_size
    bad = BAD[kind][:room] if kind in BAD else saved(torch.zeros(2))
    bad = bytes(room - len(bad)) + bad  # an archive is found from its end
    shard.write_bytes(bad)
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest["files"][shard.name]["sha256"] = hashlib.sha256(bad).hexdigest()
    manifest.pop("checksum")
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest | {"checksum": _checksum(manifest)}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loaded = load_checkpoint(tmp_path, WORLD)
    with pytest.raises(ValueError, match="__0_0.distcp from byte 0 on is no archive|does not hold what its index says"):
        loaded.read(boxes(0))
    with pytest.raises(ValueError, match="cannot be read: "):
        list(loaded.whole_tensors())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
