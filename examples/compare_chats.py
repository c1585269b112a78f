"""Compare the answers of the chat demo before training, after training, and from transformers after
the export.

    python examples/compare_chats.py --folder demo_chat_out

The last column uses no code of megacp: the tokenizer, template, model and cache are those of
transformers. The script writes answers.md and demo_chat.png to the folder. The exit status is 0 if
at least nine of ten answers are exactly right and transformers gives all answers word for word.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def by_library(folder: Path, questions: Sequence[str]) -> list[str]:
    """Return greedy answers from transformers, with the demo's limit of 24 tokens."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    answers = []
    for question in questions:
        talk = [{"role": "user", "content": question}]
        given = tokenizer.apply_chat_template(
            talk, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        found = model.generate(**given, max_new_tokens=24, do_sample=False)
        answers.append(
            tokenizer.decode(found[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
        )
    return answers


def draw(
    rows: Sequence[Sequence[str]], right: Sequence[bool], losses: Sequence[float], path: Path
) -> None:
    """Draw the loss and, to its right, the answers before and after training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.4, 4.9), dpi=95)
    figure.text(
        0.035,
        0.94,
        "make demo-chat: SmolLM2-135M learns a hundred chats on two CPU ranks",
        fontsize=14,
    )
    # Left: the loss curve.
    axes = figure.add_axes((0.035, 0.11, 0.2, 0.7))
    axes.plot(range(1, len(losses) + 1), losses, color="#0072b2")
    axes.set(xlabel="optimizer step", ylim=(0, None))
    axes.set_title("loss, nats per token", loc="left", fontsize=11)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    # Right: one line of text per question. The first line has the titles.
    heads = [("question", "before", "after (green: exact, and transformers agrees)")]
    for number, (question, before, after, *_) in enumerate([*heads, *rows]):
        color = ["#b33000", "#00734f"][right[number - 1]] if number else "black"
        cells = (
            (question, "black"),
            (textwrap.shorten(before, 46, placeholder=" ..."), "#666666"),
            (after, color),
        )
        for x, (text, shade) in zip((0.275, 0.45, 0.715), cells, strict=True):
            figure.text(x, 0.84 - 0.074 * number, text, fontsize=10, color=shade, parse_math=False)
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Ask transformers, print and draw the table, and return the exit status."""
    parser = argparse.ArgumentParser(description="Compare the answers of the chat demo.")
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        metavar="DIR",
        help="output folder of examples/demo_chat.sh",
    )
    folder = parser.parse_args(argv).folder
    questions = [record["messages"][0]["content"] for record in lines(folder / "questions.jsonl")]
    before, after = lines(folder / "before.jsonl"), lines(folder / "after.jsonl")
    said = [[line["answer"] for line in answers] for answers in (before, after)]
    rows = list(zip(questions, *said, by_library(folder / "run" / "model", questions), strict=True))
    # An answer must equal the trained answer, and transformers must give the same text.
    exact = [line["answer"] == line["expected"] for line in after]
    same = [ours == theirs for _, _, ours, theirs in rows]

    table = [("question", "before", "after", "transformers"), ("---",) * 4, *rows]
    text = "\n".join(f"| {' | '.join(' '.join(cell.split()) for cell in row)} |" for row in table)
    (folder / "answers.md").write_text(text + "\n", encoding="utf-8")
    losses = [
        line["loss"]
        for line in lines(folder / "run" / "checkpoints" / "log.jsonl")
        if line["kind"] == "train"
    ]
    draw(
        rows, [a and b for a, b in zip(exact, same, strict=True)], losses, folder / "demo_chat.png"
    )
    print(
        f"{text}\n\n{sum(exact)} of {len(rows)} answers are exact, {sum(same)} equal those of "
        "transformers word for word"
    )
    return 0 if sum(exact) >= 0.9 * len(rows) and all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
