"""Builds from URLs equal builds from disk, and builds in parts equal a single run."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pyarrow
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megacp.prepare import command as preprocess
from megacp.prepare.media.reader import MediaReader
from megacp.prepare.packs.journal import locked
from megacp.prepare.packs.progress import BuildSummary
from megacp.prepare.packs.run import build
from megacp.prepare.records.read import identity, plan_units, read_extent
from megacp.prepare.records.record import Record
from megacp.prepare.tokenize.kept import kept_tokenizer
from megacp.prepare.verify import verify
from megacp.storage.url import UnreachableError, Url
from megacp.training.data.reader import PackedDataset
from megacp.training.data.vision.rules import ImageError
from tests.prepare.media.pictures import TINY, encoded, noise
from tests.prepare.packs import builds
from tests.prepare.packs.builds import files, run, settings, visible, write_records
from tests.storage.stores import FlakyStore, flaky, memory, under_flaky

LINES = [{"id": i, "text": f"{i} " + "word " * (i % 17)} for i in range(300)]
JSONL = "".join(json.dumps(line) + "\n" for line in LINES).encode()


def parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(LINES), sink, row_group_size=64)
    return sink.getvalue()


def tar() -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for line in LINES:
            info = tarfile.TarInfo(f"{line['id']:05d}.json")
            info.size = len(content := json.dumps(line).encode())
            archive.addfile(info, io.BytesIO(content))
    return sink.getvalue()


FORMS = {
    "a.jsonl": lambda: JSONL,
    "a.jsonl.gz": lambda: gzip.compress(JSONL),
    "a.jsonl.zst": lambda: pyarrow.compress(JSONL, "zstd", asbytes=True),
    "a.json": lambda: json.dumps(LINES, indent=2).encode("utf-8-sig"),
    "a.json.gz": lambda: gzip.compress(json.dumps(LINES).encode()),
    "a.parquet": parquet,
    "a.tar": tar,
}


def records(path: str, unit_bytes: int = 2000) -> list[Any]:
    units = plan_units([path], unit_bytes)
    found = [
        item
        for unit in units
        for extent in unit.extents
        for item in read_extent(extent, media=True)
    ]
    assert all(isinstance(item, Record) for item in found), found[-1]
    return [item.value for item in found if isinstance(item, Record)]


@pytest.mark.parametrize("name", FORMS)
def test_a_store_that_fails_loses_no_record(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megacp.storage.place._BLOCK", 4096)
    url = memory() / name
    url.write(FORMS[name]())
    with flaky(0.2, seed=1) as store:
        assert records(str(under_flaky(url))) == LINES
    assert sum(store.failed.values()), dict(store.asked)


@pytest.mark.parametrize("name", FORMS)
def test_a_store_that_is_gone_ends_the_reading(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    url = memory() / name
    url.write(FORMS[name]())
    place = str(under_flaky(url))
    units = plan_units([place], 1 << 20)
    monkeypatch.setattr(
        FlakyStore, "cat_file", lambda *_, **__: (_ for _ in ()).throw(ConnectionResetError("down"))
    )
    with pytest.raises(UnreachableError, match=r"down \(tried 6 times\)"):
        list(read_extent(units[0].extents[0]))


@pytest.fixture
def corpus(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    builds.write_records(paths[0], 80, seed=1)
    builds.write_records(paths[1], 60, seed=2, first_id=1000)
    return paths


def uploaded(paths: Sequence[Path]) -> Url:
    url = memory()
    for path in paths:
        (url / path.name).write(path.read_bytes())
    return url


def test_a_build_from_a_url_has_the_bytes_of_one_from_a_disk_and_sees_a_changed_object(
    corpus: list[Path], tmp_path: Path
) -> None:
    inputs = uploaded(corpus)
    pattern = f"{inputs}/*.jsonl"
    builds.run(corpus, tmp_path / "local")
    build(settings([pattern], tmp_path / "d"), io.StringIO())
    local, there = (builds.files(tmp_path / name) for name in ("local", "d"))
    assert local.keys() == there.keys()
    shards = [name for name in local if name.startswith("shard_")]
    assert shards and all(local[name] == there[name] for name in shards)
    url = memory()
    for name, data in there.items():  # like a copy by the store's own tool
        (url / name).write(data)
    remote, dataset = PackedDataset(url), PackedDataset(tmp_path / "d")
    assert [remote.pack(i).tokens.tolist() for i in range(len(remote))] == [
        dataset.pack(i).tokens.tolist() for i in range(len(dataset))
    ]
    assert kept_tokenizer(url) == "byte"
    before = identity(f"{inputs}/one.jsonl")
    (inputs / "one.jsonl").write(corpus[0].read_bytes().replace(b"ab", b"ba"))
    assert (
        identity(f"{inputs}/one.jsonl")[1] == before[1]
        and identity(f"{inputs}/one.jsonl") != before
    )
    with pytest.raises(ValueError, match=r"started with other settings or other input.*input"):
        build(settings([pattern], tmp_path / "d"), io.StringIO())
    with pytest.raises(
        ValueError, match="--output s3://b/d: a dataset must be built in a local directory"
    ):
        build(settings(corpus, "s3://b/d"), io.StringIO())


def image_records(places: Sequence[str], folder: Path) -> Path:
    path = folder / "pairs.jsonl"
    rows = [
        {"content": [{"type": "image", "path": p}, {"type": "text", "text": "A cat."}]}
        for p in places
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def items_of(dataset: PackedDataset) -> list[bytes]:
    """Return the stored images in the order of their records."""
    found = {}
    for i in range(len(dataset)):
        pack = dataset.pack(i)
        assert pack.images is not None
        for unit in pack.images.units:
            found[int(pack.segments[int(unit["segment"])]["source_offset"])] = pack.images.read(
                int(unit["item"])
            )
    return [found[offset] for offset in sorted(found)]


IMAGES = {"image_rules": TINY, "seq_length": 512, "unit_bytes": 400}


def test_images_below_a_url_are_fetched_and_those_that_do_not_come_are_refused(
    tmp_path: Path,
) -> None:
    store = memory()
    pictures = [encoded(noise(20 + i, 16, seed=i)) for i in range(5)]
    for i, picture in enumerate(pictures):
        (store / "photos" / f"{i}.png").write(picture)
    (store / "photos" / "bad.png").write(b"<html>")
    path = image_records(
        [f"photos/{name}.png" for name in (0, 1, "gone", 2, 3, "bad", 4, 0)], tmp_path
    )
    builds.run([path], tmp_path / "d", on_error="skip", image_root=str(store), **IMAGES)
    assert items_of(PackedDataset(tmp_path / "d")) == [*pictures, pictures[0]]
    rejects = [
        json.loads(line) for line in (tmp_path / "d" / "rejects.jsonl").read_text().splitlines()
    ]
    assert [line["line"] for line in rejects] == [
        3,
        6,
    ] and "no such file under --image-root" in rejects[0]["reason"]


@pytest.mark.parametrize(
    "place",
    [
        *(
            "https://images.example/a.png",
            "file:///etc/passwd",
            "../a.png",
            "/a.png",
            "%2e%2e/a.png",
            "x/..%5c../a.png",
        ),
        *(".\t./a.png", ".\n.\r/a.png", "%252e%252e/a.png", "x/..;/../a.png", ".%09./a.png"),
    ],
)
def test_nothing_is_fetched_out_of_the_root(tmp_path: Path, place: str) -> None:
    store = memory()
    (store / "a.png").write(encoded(noise(16, 16)))
    path = image_records([place], tmp_path)
    with pytest.raises(ValueError, match=r"use only URLs|absolute|contains"):
        builds.run([path], tmp_path / "out", image_root=str(store / "photos"), **IMAGES)


PICTURE = encoded(noise(20, 16))


class Handler(BaseHTTPRequestHandler):
    """Serve a picture, 16 MB of compressed zeros, and redirects given by the path."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.headers["Host"].partition(":")[0] + self.path)
        lead = {
            "away": "http://localhost:1/photos/a.png",
            "up": "../secret.png",
            "here": "a.png",
        }.get(self.path[8:], "")
        data = gzip.compress(bytes(1 << 24)) if "bomb" in self.path else PICTURE
        self.send_response(302 if lead else 200)
        for name in (
            ("Location", lead),
            ("Content-Encoding", "gzip"),
            ("Content-Length", str(len(data))),
        ):
            self.send_header(*name)
        self.end_headers()
        self.wfile.write(data if self.command == "GET" else b"")

    do_HEAD = do_GET
    log_message = lambda self, *words: None  # noqa: E731


@pytest.mark.parametrize("named", [True, False])
def test_a_server_is_asked_below_what_is_allowed_alone_and_nothing_is_unpacked(named: bool) -> None:
    """URLs, including redirects, are compared as the client requests them."""
    Handler.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        reader = MediaReader(
            TINY, *((None, [f"{url}/photos/"]) if named else (f"{url}/photos", ()))
        )
        read = lambda name: reader._from_path(f"{url}/photos/{name}" if named else name)  # noqa: E731
        assert read("a.png") == read("here") == PICTURE and len(read("bomb")) < 1 << 15
        for name in ("away", "up"):
            with pytest.raises(ImageError, match="leads to .*--image-urls"):
                read(name)
        others = [
            url.replace("127.0.0.1", "localhost"),
            url.replace("//", "//127.0.0.1@localhost:1/"),
            f"{url}/x",
        ]
        for place in (
            *(f"{other}/photos" for other in others),
            f"{url}/photosmore",
            f"{url}/photos/..",
        ):
            with pytest.raises(ImageError, match="--image-urls|the path contains"):
                reader._from_path(f"{place}/a.png")
        server.shutdown()
    assert Handler.asked and all(place.startswith("127.0.0.1/photos/") for place in Handler.asked)


def test_a_store_is_read_below_the_urls_that_are_named_alone() -> None:
    store = memory() / "a"
    (store / "x.png").write(PICTURE)
    reader = MediaReader(TINY, None, [str(store)])
    assert reader._from_path(f"{store}/x.png") == PICTURE
    for place in (f"{store}more/x.png", f"{store}/../b.png"):
        with pytest.raises(ImageError, match="--image-urls|the path contains"):
            reader._from_path(place)


def part(
    inputs: list[Path], output: Path, index: int, count: int, **changes: Any
) -> tuple[int, int]:
    """Build a part. Return its number of units, and how many existed before."""
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
    with pytest.raises(
        ValueError, match=f"lacks {len(odd)} of {units} units, {', '.join(map(str, odd))}:"
    ):
        finish([a], tmp_path / "d")
    assert not (tmp_path / "d/manifest.json").exists()
    part([a], tmp_path / "d", 3, 4)
    (tmp_path / "d/shard_00002/tokens.bin").unlink()  # a shard that was lost counts as missing
    with pytest.raises(ValueError, match=r"lacks \d+ of \d+ units, 1, 2, 5"):
        finish([a], tmp_path / "d")
    with pytest.raises(
        ValueError, match=r"started with other settings .*seq_length: 128 before, 256 now"
    ):
        part([a], tmp_path / "d", 1, 4, seq_length=256)
    assert (
        build(settings([a], tmp_path / "d"), io.StringIO()).units_resumed
        == units - len(odd[::2]) - 1
    )
    assert visible(tmp_path / "d") == visible(tmp_path / "one")


@pytest.mark.slow
def test_parts_of_other_processes_build_at_the_same_time(tmp_path: Path) -> None:
    a = tmp_path / "a.jsonl"
    write_records(a, 60)
    command = [
        sys.executable,
        "-c",
        "import sys; from megacp.prepare.command import main; sys.exit(main())",
    ]
    flags = [
        "--input",
        str(a),
        "--output",
        str(tmp_path / "d"),
        "--tokenizer",
        "byte",
        "--seq-length",
        "128",
    ]
    flags += ["--unit-bytes", "1000", "--workers", "1"]
    parts = [
        subprocess.Popen([*command, "build", *flags, "--units", f"{i}/3"], env={**os.environ})
        for i in (0, 1, 2, 1)
    ]
    assert [process.wait(timeout=120) for process in parts] == [0, 0, 0, 0]
    assert preprocess.main(["finish", *flags]) == 0
    assert (
        preprocess.main(
            ["build", *[text.replace(f"{tmp_path}/d", f"{tmp_path}/one") for text in flags]]
        )
        == 0
    )
    assert visible(tmp_path / "d") == visible(tmp_path / "one")


@pytest.mark.parametrize("text", ["3", "3/3", "-1/3", "a/b", "1/0", "0/3/4", ""])
def test_a_part_is_a_number_below_a_count(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--input", "a", "--output", "d", "--tokenizer", "byte", "--seq-length", "8"]
    assert preprocess.main(["build", *flags, f"--units={text}"]) == 2
    assert "expected I/N with 0 <= I < N" in capsys.readouterr().err
    assert preprocess.main(["build", *flags, "--units", "0/2", "--overwrite"]) == 2
    assert "--overwrite with --units" in capsys.readouterr().err


def test_a_whole_build_keeps_all_others_out_and_parts_share(tmp_path: Path) -> None:
    def other(shared: bool) -> subprocess.CompletedProcess[str]:
        code = (
            "import sys; from pathlib import Path; from megacp.prepare.packs.journal import locked"
        )
        command = [
            sys.executable,
            "-c",
            f"{code}\nwith locked(Path(sys.argv[1]), {shared}): print('in')",
        ]
        return subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=60)

    with locked(tmp_path):
        for shared in (False, True):
            assert "another build is writing to it" in other(shared).stderr
    with locked(tmp_path, shared=True):
        assert (
            other(True).stdout == "in\n" and "another build is writing to it" in other(False).stderr
        )
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
