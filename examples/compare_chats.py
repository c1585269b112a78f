"""Answers of the chat demo before and after training, and what the transformers library answers from the exported folder.

    python examples/compare_chats.py --folder demo_chat_out

Reads what examples/demo_chat.sh has left there. No code of megacp answers here: tokenizer, template, model and cache are
the library's. Writes FOLDER/answers.md and FOLDER/demo_chat.png. The exit status is 1 unless nine of ten trained answers
are right to the last character and the library gives all of them word for word.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Row = tuple[str, str, str, str, str]
"""A question, what is expected, the answers before, after, and by transformers."""


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def by_library(folder: Path, questions: Sequence[str], count: int = 24) -> Iterator[str]:
    """Greedy answers of at most `count` tokens."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    for question in questions:
        talk = [{"role": "user", "content": question}]
        given = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        found = model.generate(**given, max_new_tokens=count, do_sample=False)
        yield tokenizer.decode(found[0, given["input_ids"].shape[1] :], skip_special_tokens=True)


def table(rows: Sequence[Row]) -> str:
    """Markdown; an answer is one line."""
    head = ["| question | before | after | transformers |", "|---|---|---|---|"]
    return "\n".join(
        head + [f"| {' | '.join(' '.join(cell.split()) for cell in (q, *said))} |" for q, _, *said in rows]
    )


def draw(rows: Sequence[Row], losses: Sequence[float], path: Path) -> None:
    """The loss, and beside it the answers before and after."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.6), dpi=110)
    axes = figure.add_axes((0.045, 0.12, 0.2, 0.74))
    axes.plot(range(1, len(losses) + 1), losses, color="#0072b2")
    axes.set(xlabel="optimizer step", ylim=(0, None))
    axes.set_title("loss, nats a token", loc="left", fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    for x, word in ((0.28, "question"), (0.46, "before"), (0.745, "after (green: exact, and transformers agrees)")):
        figure.text(x, 0.9, word, fontsize=11)
    for number, (question, expected, before, after, library) in enumerate(rows):
        height, short = 0.83 - 0.078 * number, " ".join(before.split())
        figure.text(0.28, height, question, fontsize=10)
        figure.text(
            0.46, height, short if len(short) < 47 else f"{short[:44].strip()} ...", fontsize=10, color="#666666"
        )
        figure.text(0.745, height, after, fontsize=10, color="#00734f" if after == expected == library else "#b33000")
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Ask the library, print, draw, judge."""
    parser = argparse.ArgumentParser(description="Answers of the chat demo in columns.")
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="what examples/demo_chat.sh has left")
    folder = parser.parse_args(argv).folder
    asked = [record["messages"][0]["content"] for record in lines(folder / "questions.jsonl")]
    before, after = lines(folder / "before.jsonl"), lines(folder / "after.jsonl")
    said = zip(asked, before, after, by_library(folder / "hf", asked), strict=True)
    rows = [(question, two["expected"], one["answer"], two["answer"], three) for question, one, two, three in said]
    (folder / "answers.md").write_text(table(rows) + "\n", encoding="utf-8")
    losses = [line["loss"] for line in lines(folder / "checkpoints" / "log.jsonl") if line["kind"] == "train"]
    draw(rows, losses, folder / "demo_chat.png")
    exact, same = sum(row[3] == row[1] for row in rows), sum(row[3] == row[4] for row in rows)
    print(f"{table(rows)}\n\n{exact} of {len(rows)} answers are exact, {same} are those of transformers word for word")
    return 0 if exact >= 0.9 * len(rows) and same == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
