"""The benchmarks run, their figures are correct, and the pictures show real plans and schedules."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

from bench.attention import area_per_rank, plans_of, remote_rows
from bench.mixed_rows import mixed_row
from bench.pictures import PICTURES, draw_all, flow, style
from bench.pictures.demo import read_answers, shown
from bench.pictures.example import CP, dealt, example_metadata
from bench.pictures.masks import tile_shapes
from bench.steps import Rollouts
from megacp.attention.ops.mask import allowed
from megacp.engine.rows.shard import mask_metadata
from megacp.prepare.records.record import RecordRules
from megacp.prepare.records.sample import parse_record
from megacp.training.data.mock import mock_batch
from tests.reference.packs import random_batch
from tools.draw_pictures import main


@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
def test_area_and_remote_rows_are_counted_as_a_dense_mask_says(layout: str) -> None:
    batch = random_batch(
        np.random.default_rng(5), 48, documents=4, branches=True, images=True, padding=True
    )
    plans = plans_of(batch, layout, 4)
    mask = allowed(plans[0].metadata, plans[0].metadata)
    seen = 0
    for plan in plans:
        columns = mask[plan.local].any(0)
        columns[plan.local] = False
        seen += columns.sum()
    assert remote_rows(plans) == seen
    assert area_per_rank(plans).tolist() == [mask[plan.local].sum() for plan in plans]


def test_a_mixed_row_is_full_and_made_of_documents_that_fit_it() -> None:
    for tokens in (1, 100, 8_192):
        row = mixed_row(tokens, 3)
        assert len(row) == tokens and (mask_metadata(row).document >= 0).all()
    lengths = np.bincount(mixed_row(36_864, 0).document)
    assert lengths.max() <= 36_864 // 3 and len(lengths) > 8


def test_measured_rollouts_are_a_prompt_with_eight_answers_a_third_as_long() -> None:
    row = mock_batch([0], Rollouts(64, 22, "causal"))
    assert row.leave.tolist() == [*[22] * 6, *np.repeat(np.arange(8, 23, 2), 2)]


TOOLS = Path(__file__).resolve().parents[2] / "tools"


def figures(tool: str, path: Path, *flags: str) -> dict[str, Any]:
    assert runpy.run_path(str(TOOLS / tool))["main"](["--quick", *flags, "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.long
def test_a_quick_benchmark_gives_ratios_memory_and_bytes(tmp_path: Path) -> None:
    rows = {
        row["layout"]: row
        for row in figures("benchmark.py", tmp_path / "a.json", "--only", "short")["short"]
    }
    assert list(rows) == [
        "one process, 1 thread",
        "one process, 2 threads",
        "dp 2",
        "tp 2",
        "pp 2",
        "cp 2",
    ]
    assert (
        rows["one process, 1 thread"]["over_one_thread"]
        == rows["one process, 2 threads"]["over_two_threads"]
        == 1.0
    )
    for row in rows.values():
        assert len(row["peak_memory"]) == row["ranks"] and min(row["peak_memory"]) > 0
        assert row["loss"] == pytest.approx(rows["one process, 1 thread"]["loss"], rel=1e-4)
        assert any(row["bytes_sent"]) == (row["ranks"] > 1)


@pytest.mark.slow
def test_the_benchmark_of_context_parallelism_counts_and_times(tmp_path: Path) -> None:
    found = figures("bench_cp.py", tmp_path / "a.json")
    assert len(found["goals"]) == 16 and {entry["cp"] for entry in found["layouts"]} == {
        2,
        4,
        8,
        16,
    }
    assert all(seconds > 0 for runs in found["time"].values() for seconds in runs)


ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "docs" / "pictures"
MOST_BYTES = 150_000


def stored_texts(name: str) -> list[str]:
    """Return the texts that the figure had when its picture was stored."""
    with Image.open(PLACE / f"{name}.png") as image:
        return json.loads(image.info["texts"])


@pytest.mark.parametrize("layout", ["contiguous", "balanced"])
def test_the_drawn_tiles_are_the_mask(layout: str) -> None:
    metadata = example_metadata()
    painted = np.zeros((len(metadata), len(metadata)), np.int64)
    for plan in dealt(layout).plans:
        for corners, _ in tile_shapes(plan):
            (left, top), (right, bottom) = corners.min(0), corners.max(0)
            shape = (bottom - top, right - left)
            painted[top:bottom, left:right] += (
                np.tri(*shape, dtype=np.int64) if len(corners) == 3 else 1
            )
    np.testing.assert_array_equal(painted, allowed(metadata, metadata).astype(np.int64))


def test_the_stated_work_is_that_of_the_mask() -> None:
    metadata = example_metadata()
    assert sum(dealt("balanced").areas()) == allowed(metadata, metadata).sum()
    assert len(dealt("balanced").received()) == CP


def test_the_record_of_the_picture_can_be_parsed() -> None:
    assert len(parse_record(json.loads(flow.RECORD), RecordRules(media=True)).branches) == 3


@pytest.mark.slow
def test_pictures_are_small_and_the_same_each_time(tmp_path: Path) -> None:
    drawn = {path.name: path.read_bytes() for path in draw_all(tmp_path / "a")}
    assert max(map(len, drawn.values())) < MOST_BYTES and len(drawn) == len(PICTURES)
    (again,) = draw_all(tmp_path / "b", ["mask"])
    assert again.read_bytes() == drawn[again.name]


@pytest.mark.parametrize("name", PICTURES)
def test_a_stored_picture_says_what_is_drawn_today_and_can_be_read(name: str) -> None:
    """Letters have 9 pixels where a page shows the picture 900 wide."""
    style.use_style()
    figure = PICTURES[name]()
    assert stored_texts(name) == style.texts(figure)
    smallest = min(text.get_fontsize() for text in figure.findobj(Text) if text.get_text())
    assert smallest / 72 / figure.get_figwidth() * 900 >= 9
    style.plt.close(figure)


def test_the_demos_picture_has_the_figures_of_the_pages() -> None:
    texts = stored_texts("demo")
    groups = [text for text in texts if re.search(r"\n.* scans?$", text)]
    shares = [text.removesuffix("%") for text in texts if re.fullmatch(r"[\d.]+%", text)]
    drawn = dict(zip(groups, shares, strict=True))

    page = (PLACE.parent / "measured.md").read_text(encoding="utf-8")
    stated = {}
    for question, one, several in re.findall(r"^\|(\w.*\?)\|(.*?)\|(.*?)\|", page, re.MULTILINE):
        if one:
            stated[f"{question}\none scan"] = one.removesuffix(" %")
        stated[f"{question}\ntwo to six scans"] = several.removesuffix(" %")
    assert drawn == stated
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    digits = stated["which digits?\none scan"]
    assert f"{digits} %" in readme


def test_each_stored_picture_is_drawn_here_and_shown_in_a_text() -> None:
    stored = {path.name for path in PLACE.iterdir()}
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    linked = {
        name
        for text in texts
        for name in re.findall(r"pictures/([\w.]+)", text.read_text(encoding="utf-8"))
    }
    assert (
        stored <= {f"{name}.png" for name in (*PICTURES, "demo", "demo_chat")} and linked == stored
    )


def finished_demo(folder: Path) -> Path:
    """Write a small folder like the output of `make demo`."""
    images = folder / "digits" / "images"
    images.mkdir(parents=True)
    Image.new("L", (16, 16), 128).save(images / "1.png")
    (folder / "checkpoints").mkdir()
    log = [
        {"kind": kind, "step": step, "loss": 1 / step}
        for kind in ("train", "valid")
        for step in (1, 2)
    ]
    (folder / "checkpoints" / "log.jsonl").write_text("\n".join(map(json.dumps, log)))
    lines = []
    for count in (1, 2):
        for asked, answer in (("which digits?", "1"), ("how many are even?", "7")):
            prompt = f"<|user|>\n{asked}\n<|assistant|>\n"
            lines.append(
                {"prompt": prompt, "expected": "1", "answer": answer, "images": ["1.png"] * count}
            )
    (folder / "answers.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_a_finished_demo_has_its_picture(tmp_path: Path) -> None:
    demo = finished_demo(tmp_path / "demo")
    assert [answer.right for answer in read_answers(demo)] == [True, False, True, False]
    assert [len(answer.images) for answer in shown(read_answers(demo))] == [1, 2]
    (path,) = draw_all(tmp_path, ["demo"], demo)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "cat"], "the pictures are flow, mask"),
        (["--only", "demo"], "requires --demo DIR"),
        (["--demo", "nowhere", "--only", "demo"], "answers.jsonl"),
    ],
)
def test_bad_input_is_one_message(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--output", str(tmp_path), *arguments]) == 2
    assert said in capsys.readouterr().err
