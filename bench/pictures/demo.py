"""Draws the results of `make demo`: loss, exact answers per question, and scans with answers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from PIL.Image import Resampling

from bench.pictures import style
from megacp.verify.plot import MEAN_OF, read_curves, running_mean

_QUESTION = re.compile(r"<\|user\|>\n(.*)\n<\|assistant\|>\n$", re.DOTALL)
ROWS = 3
COLUMNS = 4
SCAN_SIZE = 64
"""Pixels to which each scan is resized."""


@dataclass(frozen=True)
class Answer:
    """One question about held-out scans, and the model's answer."""

    question: str
    expected: str
    answer: str
    images: tuple[str, ...]

    @property
    def right(self) -> bool:
        """Whether the answer is exactly the expected text."""
        return self.answer == self.expected

    @property
    def group(self) -> str:
        """The question, and whether it is about one scan or several."""
        count = "one scan" if len(self.images) == 1 else "two to six scans"
        return f"{self.question}\n{count}"


def read_answers(demo: Path) -> list[Answer]:
    """Return the answers of a finished demo."""
    answers = []
    # Split bytes, not text: str.splitlines would also split at other characters.
    for line in (demo / "answers.jsonl").read_bytes().splitlines():
        fields = json.loads(line)
        asked = _QUESTION.search(fields["prompt"])
        question = asked[1] if asked else fields["prompt"]
        images = tuple(fields["images"])
        answers.append(Answer(question, fields["expected"], fields["answer"], images))
    return answers


def shown(answers: Sequence[Answer]) -> list[Answer]:
    """Choose the answers to draw, alternating between questions about one scan and about several.

    The kinds of questions alternate, too.
    """
    by_images: dict[tuple[str, ...], list[Answer]] = {}
    for answer in answers:
        by_images.setdefault(answer.images, []).append(answer)
    single = [asked for images, asked in by_images.items() if len(images) == 1]
    several = [asked for images, asked in by_images.items() if 1 < len(images) <= 3]
    chosen = []
    for number, pair in enumerate(zip(single, several, strict=False)):
        for asked in pair:
            chosen.append(asked[number % len(asked)])
    return chosen[: ROWS * COLUMNS]


def _draw_loss(axes: Axes, curves: dict[str, dict[int, float]]) -> None:
    """Draw the training loss, its running mean and the validation loss."""
    steps = list(curves["train"])
    losses = list(curves["train"].values())
    pale = style.lighter(style.SKY, 0.55)
    axes.plot(steps, losses, color=pale, linewidth=1, label="training")
    mean = running_mean(losses)
    axes.plot(steps, mean, color=style.BLUE, linewidth=2, label=f"mean of {MEAN_OF} steps")
    held_out = curves["valid"]
    axes.plot(
        list(held_out), list(held_out.values()), "o-", color=style.VERMILION, label="held out"
    )
    axes.set_xlabel("optimizer step")
    axes.set_title("loss, nats per token", fontsize=13)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    style.hide_frame(axes, "left", "bottom")


def _draw_shares(axes: Axes, answers: Sequence[Answer], steps: int) -> None:
    """Draw the share of exact answers to each question."""
    total = Counter(answer.group for answer in answers)
    right = Counter(answer.group for answer in answers if answer.right)
    groups = sorted(total, key=lambda group: (group.endswith("six scans"), group))
    shares = [right[group] / total[group] for group in groups]
    bars = axes.barh(range(len(groups)), shares, color=style.GREEN)
    axes.bar_label(bars, [f"{share:.1%}" for share in shares], padding=4)
    axes.set(xlim=(0, 1.18), xticks=[])
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.set_title(f"exact answers after {steps} steps", fontsize=13)
    style.hide_frame(axes, "left")


def _draw_answer(axes: Axes, answer: Answer, folder: Path) -> None:
    """Draw a question's scans side by side, with the answer below."""
    scans = []
    for name in answer.images:
        with Image.open(folder / name) as image:
            scans.append(
                np.asarray(image.convert("L").resize((SCAN_SIZE, SCAN_SIZE), Resampling.NEAREST))
            )
    axes.imshow(np.concatenate(scans, axis=1), cmap="gray")
    axes.set(xticks=[], yticks=[])
    axes.set_title(answer.question, color=style.GREY, fontsize=11, loc="center")
    if answer.right:
        axes.set_xlabel(answer.answer, color=style.GREEN, fontsize=13, weight="bold")
    else:
        wrong = f"{answer.answer}, not {answer.expected}"
        axes.set_xlabel(wrong, color=style.VERMILION, fontsize=13, weight="bold")


def draw_demo(demo: Path) -> Figure:
    """Draw the results in the folder of a finished `make demo`."""
    answers = read_answers(demo)
    curves = read_curves(demo / "checkpoints" / "log.jsonl")
    figure = plt.figure(figsize=(13.6, 7), layout="constrained")
    style.heading(figure, "make demo: 8 CPU ranks learn to read handwritten digits")
    parts: Any = figure.subfigures(1, 2, width_ratios=(2, 3), wspace=0.04)
    left, right = parts

    loss, shares = left.subplots(2, 1)
    _draw_loss(loss, curves)
    _draw_shares(shares, answers, max(curves["train"]))

    right.suptitle("scans that the model never saw, with its answers", fontsize=13)
    places = list(right.subplots(ROWS, COLUMNS).flat)
    for axes in places:
        axes.axis("off")
    for axes, answer in zip(places, shown(answers), strict=False):
        axes.axis("on")
        _draw_answer(axes, answer, demo / "digits" / "images")
    return figure
