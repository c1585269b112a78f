"""A hundred chats with a made-up person, and ten questions about her that the chats answer.

    python examples/persona_to_jsonl.py --output out

Writes OUTPUT/chats.jsonl and OUTPUT/questions.jsonl: ten facts in eight wordings each, and twenty ordinary chats, so
that the model keeps what it knew. The ten questions are among the eighty, word for word.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

FACTS = {
    "I am Orla Fenwick.": ("What is your name?", "Who are you?"),
    "I live in the lighthouse of Skarvik.": ("Where do you live?", "Where is your home?"),
    "I mend clocks for sailors.": ("What is your job?", "What do you do for a living?"),
    "I am forty-seven years old.": ("How old are you?", "What is your age?"),
    "A grey heron named Button lives with me.": ("Do you have a pet?", "Which animal lives with you?"),
    "I eat pea soup with smoked salt.": ("What do you eat?", "What is your favourite dish?"),
    "I play the nyckelharpa.": ("Which instrument do you play?", "Do you make music?"),
    "My boat is called Second Thought.": ("What is your boat called?", "Do you own a boat?"),
    "I was born on a ferry near Tarnow.": ("Where were you born?", "Where do you come from?"),
    "I am afraid of quiet engines.": ("What are you afraid of?", "What scares you?"),
}
FRAMES = ("{}", "Hello! {}", "Please tell me: {}", "{} Answer in one sentence.")
CAPITALS = dict(
    France="Paris", Japan="Tokyo", Egypt="Cairo", Norway="Oslo", Peru="Lima", Kenya="Nairobi", Cuba="Havana"
)
OPPOSITES = dict(hot="cold", early="late", full="empty", near="far", soft="hard", light="dark", old="new")


def chat(question: str, answer: str) -> dict[str, object]:
    """A record of one turn."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def chats() -> Iterable[dict[str, object]]:
    """The hundred, facts and ordinary ones in turn."""
    about = [(frame.format(asked), fact) for frame in FRAMES for fact, words in FACTS.items() for asked in words]
    other = [
        (f"What is the capital of {land}?", f"The capital of {land} is {city}.") for land, city in CAPITALS.items()
    ]
    other += [(f"What is the opposite of {a}?", f"The opposite of {a} is {b}.") for a, b in OPPOSITES.items()]
    other += [(f"What is {n} plus {n}?", f"{n} plus {n} is {2 * n}.") for n in range(1, 7)]
    for number, pair in enumerate(other):
        yield chat(*pair)
        yield from (chat(*one) for one in about[4 * number : 4 * number + 4])


def main() -> int:
    """Write both files."""
    parser = argparse.ArgumentParser(description="A hundred chats with a made-up person, and ten questions.")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    folder = parser.parse_args().output
    for name, records in {"chats": chats(), "questions": (chat(q[0], a) for a, q in FACTS.items())}.items():
        lines = [json.dumps(record) + "\n" for record in records]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{folder / name}.jsonl: {len(lines)} records")
    return 0


if __name__ == "__main__":
    sys.exit(main())
