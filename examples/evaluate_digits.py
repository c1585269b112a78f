"""Count exact answers about digit scans per question, and write a page of samples with their
images.

    python examples/evaluate_digits.py --answers out/answers.jsonl --images out/digits/images --page
    out/samples.html

`--answers` is the output of tools/generate.py --input. An answer is right if it equals the expected
text exactly. With `--goal`, the exit status is 1 if too few single scans are read correctly.
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
LATER = (
    "The demo's 450 steps are too few for several images; STEPS=1300 make demo reads more: "
    "docs/measured.md"
)
_ASKED = re.compile(r"<\|user\|>\n(.*)\n<\|assistant\|>\n$", re.DOTALL)
_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font-family:sans-serif;margin:1em auto;max-width:70em;padding:0 1em}"
    # wide tables scroll inside their own box, so that the page fits a telephone
    "pre,.wide{overflow-x:auto}td,th{padding:.3em .8em;text-align:left}"
    "tr{border-bottom:1px solid #8888}"
    "table{border-collapse:collapse}img{image-rendering:pixelated;width:48px;margin-right:4px}"
    "body{background:#fff;color:#222}.right{color:#060}.wrong{color:#b00;font-weight:bold}"
    "@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}.right{color:#7d7}.wrong{color:#f88}}"
)


def read_answers(path: Path) -> list[dict[str, Any]]:
    """Return the answers in `path`, each with its `question`.

    Raise ValueError with the number of an invalid line.
    """
    try:
        lines = (
            path.read_bytes().splitlines()
        )  # bytes, because str.splitlines splits at more characters
    except OSError as error:
        raise ValueError(f"--answers {path}: {error.strerror}") from error
    answers = []
    for number, line in enumerate(lines, 1):
        try:
            answer = json.loads(line)
            # A prompt is a user message, followed by the header of the answer.
            asked = _ASKED.search(answer["prompt"])
            words = (answer["expected"], answer["answer"], *answer["images"])
            if asked is None or not all(isinstance(word, str) for word in words):
                raise ValueError("it has no question with an expected answer")
            answers.append(
                {**answer, "question": asked[1], "right": answer["answer"] == answer["expected"]}
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"--answers {path}:{number} is not a line of tools/generate.py: {error!r}"
            ) from error
    if not answers:
        raise ValueError(f"--answers {path} contains no answer")
    return answers


def accuracies(answers: Sequence[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return for each question the numbers of right answers and of answers.

    Questions about one image and about several images are counted separately.
    """
    counts: dict[str, tuple[int, int]] = {}
    for answer in answers:
        shown = len(answer["images"])
        name = f"{answer['question']} ({'1 image' if shown == 1 else '2 to 6 images'})"
        right, total = counts.get(name, (0, 0))
        counts[name] = right + answer["right"], total + 1
    return dict(sorted(counts.items(), key=lambda item: item[0].endswith("6 images)")))


def table(counts: dict[str, tuple[int, int]]) -> str:
    """Return one line per question, and a note if there are records with several images."""
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
    """Return a self-contained HTML page: accuracies, wrong answers about single scans, and samples.

    The samples are `each` records for each number of images. Raise ValueError if an image is
    outside the folder `images`, by its name or through a link.
    """
    # Names come from a file, so check each path before the page embeds it.
    root = images.resolve()

    def picture(file: str) -> str:
        path = (root / file).resolve()
        if not path.is_relative_to(root):
            raise ValueError(
                f"--answers contains the image {file}, which is outside --images {images}"
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
        return f'<div class="wide"><table>{head}{"".join(map(row, chosen))}</table></div>'

    # Take the first `each` records of each number of images, with all their questions.
    samples: list[dict[str, Any]] = []
    for size in sorted({len(answer["images"]) for answer in answers}):
        names = list(
            dict.fromkeys(answer["id"] for answer in answers if len(answer["images"]) == size)
        )[:each]
        samples += [answer for answer in answers if answer["id"] in names]
    samples.sort(key=lambda answer: answer["right"])  # wrong ones first
    single = [answer for answer in answers if len(answer["images"]) == 1 and not answer["right"]]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<title>Held-out digits</title>"
        f"<style>{_STYLE}</style></head>"
        f"<body><h1>Held-out digits</h1><pre>{html.escape(table(counts))}</pre>"
        f"<h2>Wrong answers about single scans</h2>{rows(single)}"
        f"<h2>Samples of all, wrong answers first</h2>{rows(samples)}</body></html>\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the counts and write the page.

    Return 1 if the goal is not reached, or 2 after an error message.
    """
    parser = argparse.ArgumentParser(
        description="Count exact answers per question, and write a page of samples."
    )
    parser.add_argument("--answers", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument(
        "--images", type=Path, required=True, metavar="DIR", help="folder of the records' images"
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE.html", help="write a page of samples with their images"
    )
    parser.add_argument(
        "--each",
        type=int,
        default=6,
        metavar="N",
        help="number of sample records for each number of images (default: 6)",
    )
    parser.add_argument(
        "--goal",
        type=float,
        metavar="SHARE",
        help="required share of correctly read single scans, such as 0.9",
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
        f"error: {right} of {total} single scans read correctly, but --goal is "
        f"{arguments.goal:.0%}",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
