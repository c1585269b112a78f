"""The planner's page fits a telephone, can be read in both colour schemes, and tells the truth."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from megacp.dry_run.packs import PackSample
from megacp.engine.config.run import RunConfig, with_values
from megacp.plan.answer import Answer
from megacp.plan.hardware import Hardware, hardware
from megacp.plan.picture import page
from tests.browser import looks

SIZES = {
    "vocab_size": 4096,
    "seq_length": 1024,
    "num_layers": 4,
    "global_batch_size": 8,
    "pipeline_model_parallel_size": 2,
    "data_parallel_sharding_strategy": "optim",
    "dry_run": True,
}
H100 = hardware("h100", "infiniband")


@functools.cache
def answer_of(gib: float) -> Answer:
    here = Hardware(**{**vars(H100), "memory": gib})
    return Answer(with_values(RunConfig(), SIZES), 4, frozenset(SIZES), here, PackSample())


def shares(pattern: str, text: str) -> list[float]:
    """Return the percentages in a style that matches a pattern with one group, as shares of 1."""
    return [float(found) / 100 for found in re.findall(pattern, text)]


def panels(text: str) -> list[str]:
    """Return the sections of a page, each from its title."""
    return text.split("<h2>")[1:]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("gib", [0.02, 1.0])
def test_a_plan_fits_the_screen_and_can_be_read(tmp_path: Path, gib: float, dark: bool) -> None:
    """With 0.02 GiB, no layout fits, and lines mark the memory of a GPU."""
    shown = looks("".join(page(answer_of(gib))), tmp_path, [1280, 400], dark=dark)
    assert [look.width for look in shown] == [1280, 400]
    for look in shown:
        assert look.is_dark == dark and (look.page_luminance < 0.1) == dark
        assert look.overflow == 0
        assert look.faint() == []
        assert min(one["pixels"] for one in look.texts) >= 12
        assert "Memory of layout 1 during a step" in look.text


def test_a_full_bar_of_memory_is_the_memory_of_a_gpu() -> None:
    answer = answer_of(1.0)
    _, memory, timeline, _ = panels("".join(page(answer)))
    assert "A full bar is the memory of a GPU, 1 GiB." in memory and 'class="limit"' not in memory
    assert ">1 GiB</span></div>" in memory and ">1 GiB</span></div>" in timeline
    lengths = [sum(shares(r"width:([\d.]+)%", bar)) for bar in memory.split('class="bar"')[1:]]
    # each part is rounded to a hundredth of a percent
    assert lengths == pytest.approx([one.layout.gib for one in answer.best], abs=1e-3)


def test_a_bar_longer_than_the_memory_has_a_line_at_the_memory() -> None:
    answer = answer_of(0.02)
    most = max(one.layout.gib for one in answer.best)
    assert most > 0.02
    _, memory, timeline, _ = panels("".join(page(answer)))
    marks = shares(r'class="limit" style="left:([\d.]+)%', memory)
    assert marks == pytest.approx([0.02 / most] * len(answer.best), abs=1e-4)
    height = re.findall(r'class="over" x1="0" x2="\d+" y1="([\d.]+)"', timeline)
    peak = answer.best[0].layout.gib
    assert [float(one) for one in height] == pytest.approx([1 - 0.02 / peak], abs=1e-4)


@pytest.mark.parametrize("gib", [0.02, 1.0])
def test_the_timeline_is_as_high_as_the_fullest_rank(gib: float) -> None:
    answer = answer_of(gib)
    timeline = panels("".join(page(answer)))[2]
    heights = [1 - float(y) for y in re.findall(r"[ ,](0\.\d{4}) ", timeline)]
    peak = answer.best[0].layout.gib
    assert max(heights) * max(gib, peak) == pytest.approx(peak, rel=2e-3)
    # the triangle is on top of the peak
    assert shares(r'class="peak" style="left:[\d.]+%;bottom:([\d.]+)%', timeline) == pytest.approx(
        [peak / max(gib, peak)], abs=1e-3
    )


@pytest.mark.parametrize("gib", [0.02, 1.0])
def test_bars_of_time_include_their_small_parts(gib: float) -> None:
    """With 0.02 GiB, the optimizer takes less than a hundredth of a step."""
    answer = answer_of(gib)
    times = panels("".join(page(answer)))[0]
    assert (">other</span>" in times) == (gib == 0.02)
    slowest = max(one.layout.time.total for one in answer.best)
    lengths = [sum(shares(r"width:([\d.]+)%", bar)) for bar in times.split('class="bar"')[1:]]
    expected = [one.layout.time.total / slowest for one in answer.best]
    assert lengths == pytest.approx(expected, abs=1e-3)


def test_a_memory_term_has_one_colour_on_the_page() -> None:
    _, memory, timeline, _ = panels("".join(page(answer_of(1.0))))
    entry = r'<i style="background:(#\w+)"></i>activations'
    assert re.findall(entry, memory) == re.findall(entry, timeline) != []
