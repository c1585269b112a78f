"""Accuracy of answers about digit scans: exact matches per question, and a page of samples with
their images.

    python examples/evaluate_digits.py --answers out/answers.jsonl --images out/digits/images --page
    out/samples.html

The answers are those of tools/generate.py --input. One counts when it equals the expected text to
the last character. With `--goal` the exit status is 1 when a smaller share of the single scans is
read correctly.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megacp.storage.files import read_regular

READING = "which digits?"
LATER = "The demo's 450 steps do not suffice for several images; STEPS=1300 make demo reads more: docs/measured.md"
_ASKED = re.compile(r"<\|user\|>\n(.*)\n<\|assistant\|>\n$", re.DOTALL)
_STYLE = (
    "body{font-family:sans-serif;margin:2em}td,th{padding:.3em .8em;text-align:left}tr{border-bottom:1px solid #ddd}"
    "table{border-collapse:collapse}img{image-rendering:pixelated;width:48px;margin-right:4px}"
    ".right{color:#060}.wrong{color:#b00;font-weight:bold}"
)


def read_answers(path: Path) -> list[dict[str, Any]]:
    """The lines of `path`, each with its `question`. ValueError names the line that cannot be
    used.
    """
    try:
        lines = path.read_bytes().splitlines()  # of bytes: a text has further ends of lines
    except OSError as error:
        raise ValueError(f"--answers {path}: {error.strerror}") from error
    answers = []
    for number, line in enumerate(lines, 1):
        try:
            answer = json.loads(line)
            asked = _ASKED.search(answer["prompt"])
            words = (answer["expected"], answer["answer"], *answer["images"])
            if asked is None or not all(isinstance(word, str) for word in words):
                raise ValueError("it holds no question with an expected answer")
            answers.append(
                {**answer, "question": asked[1], "right": answer["answer"] == answer["expected"]}
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"--answers {path}:{number} is no line of tools/generate.py: {error!r}"
            ) from error
    if not answers:
        raise ValueError(f"--answers {path} holds no answer")
    return answers


def accuracies(answers: Sequence[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Question (and whether one or several images are shown) -> (right answers, answers)."""
    counts: dict[str, tuple[int, int]] = {}
    for answer in answers:
        shown = len(answer["images"])
        name = f"{answer['question']} ({'1 image' if shown == 1 else '2 to 6 images'})"
        right, total = counts.get(name, (0, 0))
        counts[name] = right + answer["right"], total + 1
    return dict(sorted(counts.items(), key=lambda item: item[0].endswith("6 images)")))


def table(counts: dict[str, tuple[int, int]]) -> str:
    """One line for each question, and one about those of several images."""
    width = max(map(len, counts))
    lines = [
        f"{name:<{width}}  {right / total:7.1%}  {right} of {total}"
        for name, (right, total) in counts.items()
    ]
    return "\n".join(
        [*lines, *([LATER] if any(name.endswith("6 images)") for name in counts) else [])]
    )


def page(
    answers: Sequence[dict[str, Any]], counts: dict[str, tuple[int, int]], images: Path, each: int
) -> str:
    """A self-contained HTML page: the figures, all wrong answers about single scans, then `each`
    records of each size.

    ValueError for an image outside of the folder `images`, by its name or by a link.
    """
    root = images.resolve()

    def picture(file: str) -> str:
        path = (root / file).resolve()
        if not path.is_relative_to(root):
            raise ValueError(
                f"--answers names the image {file}, which is outside of --images {images}"
            )
        data = base64.b64encode(read_regular(path)).decode()
        return f'<img src="data:image/png;base64,{data}" alt="{html.escape(file)}">'

    def row(answer: dict[str, Any]) -> str:
        mark = "right" if answer["right"] else "wrong"
        words = [answer["question"], answer["expected"], answer["answer"]]
        cells = "".join(f"<td>{html.escape(word)}</td>" for word in words[:2])
        return (
            f"<tr><td>{''.join(map(picture, answer['images']))}</td>{cells}"
            f'<td class="{mark}">{html.escape(words[2])}</td></tr>'
        )

    head = "<tr><th>images</th><th>question</th><th>expected</th><th>answer</th></tr>"

    def rows(chosen: Sequence[dict[str, Any]]) -> str:
        return f"<table>{head}{''.join(map(row, chosen))}</table>"

    samples: list[dict[str, Any]] = []
    for size in sorted({len(answer["images"]) for answer in answers}):
        names = list(
            dict.fromkeys(answer["id"] for answer in answers if len(answer["images"]) == size)
        )[:each]
        samples += [answer for answer in answers if answer["id"] in names]
    samples.sort(key=lambda answer: answer["right"])  # wrong ones first
    single = [answer for answer in answers if len(answer["images"]) == 1 and not answer["right"]]
    return (
        f'<!doctype html><html><head><meta charset="utf-8"><title>Held-out digits</title><style>{_STYLE}</style></head>'
        f"<body><h1>Held-out digits</h1><pre>{html.escape(table(counts))}</pre>"
        f"<h2>Wrong answers about single scans</h2>{rows(single)}"
        f"<h2>Samples of all, wrong answers first</h2>{rows(samples)}</body></html>\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Read, count, print, draw; exit status 1 below the goal, 2 with one message on bad input."""
    parser = argparse.ArgumentParser(
        description="Exact matches per question, and a page of samples."
    )
    parser.add_argument("--answers", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument(
        "--images", type=Path, required=True, metavar="DIR", help="where the records' images lie"
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE.html", help="write samples with their images"
    )
    parser.add_argument(
        "--each", type=int, default=6, metavar="N", help="sample records of each number of images"
    )
    parser.add_argument(
        "--goal", type=float, metavar="SHARE", help="of single scans that must be read correctly"
    )
    arguments = parser.parse_args(argv)
    try:
        answers = read_answers(arguments.answers)
        counts = accuracies(answers)
        if arguments.page is not None:
            text = page(answers, counts, arguments.images, arguments.each)
            arguments.page.write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(counts))
    right, total = counts.get(f"{READING} (1 image)", (0, 0))
    if arguments.goal is None or (total and right / total >= arguments.goal):
        return 0
    print(
        f"error: {right} of {total} single scans read correctly, --goal is {arguments.goal:.0%}",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
