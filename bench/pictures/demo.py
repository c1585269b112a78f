"""What `make demo` learned: its loss curve, exact answers by question, and held-out scans beside
the answers.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from bench.pictures import style
from megacp.verify.plot import MEAN_OF, read_curves, running_mean

_ASKED = re.compile(r"<\|user\|>\n(.*)\n<\|assistant\|>\n$", re.DOTALL)
_COLUMNS, _ROWS = 4, 3


@dataclass(frozen=True)
class Answer:
    """One question about held-out scans."""

    question: str
    expected: str
    answer: str
    images: tuple[str, ...]

    @property
    def right(self) -> bool:
        """Equal to the last character."""
        return self.answer == self.expected

    @property
    def group(self) -> str:
        """The question, and whether one or several scans are shown."""
        return f"{self.question}\n{'one scan' if len(self.images) == 1 else 'two to six scans'}"


def read_answers(demo: Path) -> list[Answer]:
    """The answers of a finished demo."""
    answers = []
    for text in (
        (demo / "answers.jsonl").read_bytes().splitlines()
    ):  # of bytes: a text has further ends of lines
        line = json.loads(text)
        asked = _ASKED.search(line["prompt"])
        question = asked[1] if asked else line["prompt"]
        answers.append(Answer(question, line["expected"], line["answer"], tuple(line["images"])))
    return answers


def shown(answers: Sequence[Answer]) -> list[Answer]:
    """Answers to draw: the first single scans and the first sets of several in turn, their
    questions in turn too.
    """
    asked: dict[tuple[str, ...], list[Answer]] = {}
    for answer in answers:
        asked.setdefault(answer.images, []).append(answer)
    half = _COLUMNS * _ROWS // 2
    single = [asked[scans] for scans in asked if len(scans) == 1][:half]
    several = [asked[scans] for scans in asked if 1 < len(scans) <= 3][:half]
    return [
        questions[number % len(questions)]
        for number, pair in enumerate(zip(single, several, strict=False))
        for questions in pair
    ]


def _draw_loss(axes: Axes, curves: dict[str, dict[int, float]]) -> None:
    steps, losses = list(curves["train"]), list(curves["train"].values())
    axes.plot(steps, losses, color=style.lighter(style.SKY, 0.55), linewidth=1, label="training")
    axes.plot(
        steps, running_mean(losses), color=style.BLUE, linewidth=2, label=f"mean of {MEAN_OF} steps"
    )
    held_out = list(curves["valid"]), list(curves["valid"].values())
    axes.plot(*held_out, "o-", color=style.VERMILION, linewidth=1.4, markersize=5, label="held out")
    axes.set_xlabel("optimizer step")
    axes.set_title("loss, nats a token", loc="left", fontsize=13)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    style.quiet(("top", "right"), axes)


def _draw_shares(axes: Axes, answers: Sequence[Answer], steps: int) -> None:
    total, right = Counter(a.group for a in answers), Counter(a.group for a in answers if a.right)
    groups = sorted(total, key=lambda group: (group.endswith("six scans"), group))
    shares = [right[group] / total[group] for group in groups]
    axes.barh(range(len(groups)), shares, color=style.GREEN, height=0.66)
    for number, share in enumerate(shares):
        late = "" if share >= 0.5 else ": takes more steps"
        axes.text(share + 0.01, number, f"{share:.1%}{late}", va="center", fontsize=11)
    axes.set(xlim=(0, 1.18), xticks=[], ylim=(len(groups) - 0.4, -0.6))
    axes.set_yticks(range(len(groups)), groups, fontsize=11)
    axes.set_title(f"exactly right after {steps} steps", loc="left", fontsize=13)
    style.quiet(("top", "right", "bottom"), axes)


def _draw_answer(figure: Figure, answer: Answer, images: Path, corner: tuple[float, float]) -> None:
    left, top = corner
    size = 0.068
    for number, name in enumerate(answer.images):
        step = number * (size * 0.62 if len(answer.images) > 1 else size)
        scan = figure.add_axes(
            (left + step, top, size * (0.58 if len(answer.images) > 1 else 0.95), 0.13)
        )
        with Image.open(images / name) as image:
            scan.imshow(image.convert("L"), cmap="gray", interpolation="nearest")
        scan.set(xticks=[], yticks=[])
    mark, color = (
        ("right", style.GREEN) if answer.right else (f"no: {answer.expected}", style.VERMILION)
    )
    figure.text(left, top - 0.028, answer.question, fontsize=11, color=style.GREY)
    figure.text(left, top - 0.064, answer.answer, fontsize=14, weight="bold")
    figure.text(
        left + 0.016 + 0.0098 * len(answer.answer), top - 0.064, mark, fontsize=11, color=color
    )


def draw_demo(demo: Path) -> Figure:
    """The folder that a finished `make demo` left."""
    answers, curves = read_answers(demo), read_curves(demo / "checkpoints" / "log.jsonl")
    figure = plt.figure(figsize=(14.4, 7.0))
    style.title(figure, "make demo: 8 CPU ranks learn to read handwritten digits", 0.955)
    _draw_loss(figure.add_axes((0.045, 0.53, 0.32, 0.33)), curves)
    _draw_shares(figure.add_axes((0.15, 0.05, 0.215, 0.355)), answers, max(curves["train"]))
    figure.text(0.41, 0.872, "scans that the model never saw, its answers below", fontsize=13)
    for number, answer in enumerate(shown(answers)):
        row, column = divmod(number, _COLUMNS)
        corner = (0.41 + 0.148 * column, 0.72 - 0.295 * row)
        _draw_answer(figure, answer, demo / "digits" / "images", corner)
    return figure
