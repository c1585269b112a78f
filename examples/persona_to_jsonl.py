"""Write a hundred chats with a fictional person, and ten questions that occur in them verbatim.

    python examples/persona_to_jsonl.py out

The script writes OUT/chats.jsonl (ten facts, each in eight chats, and twenty ordinary chats) and
OUT/questions.jsonl.
"""

import json
import sys
from pathlib import Path

FACTS = {
    "I am Orla Fenwick.": ("What is your name?", "Who are you?"),
    "I live in the lighthouse of Skarvik.": ("Where do you live?", "Where is your home?"),
    "I mend clocks for sailors.": ("What is your job?", "What do you do for a living?"),
    "I am forty-seven years old.": ("How old are you?", "What is your age?"),
    "A grey heron named Button lives with me.": (
        "Do you have a pet?",
        "Which animal lives with you?",
    ),
    "I eat pea soup with smoked salt.": ("What do you eat?", "What is your favourite dish?"),
    "I play the nyckelharpa.": ("Which instrument do you play?", "Do you make music?"),
    "My boat is called Second Thought.": ("What is your boat called?", "Do you own a boat?"),
    "I was born on a ferry near Tarnow.": ("Where were you born?", "Where do you come from?"),
    "I am afraid of quiet engines.": ("What are you afraid of?", "What scares you?"),
}
FRAMES = ("{}", "Hello! {}", "Please tell me: {}", "{} Answer in one sentence.")
CAPITALS = dict(
    France="Paris",
    Japan="Tokyo",
    Egypt="Cairo",
    Norway="Oslo",
    Peru="Lima",
    Cuba="Havana",
    Mali="Bamako",
)
OPPOSITES = dict(
    hot="cold", early="late", full="empty", near="far", soft="hard", light="dark", old="new"
)


def chats() -> list[tuple[str, str]]:
    """Return a hundred questions with their answers.

    Every fifth question, starting with the first, is an ordinary one.
    """
    about = [
        (frame.format(asked), fact)
        for frame in FRAMES
        for fact, words in FACTS.items()
        for asked in words
    ]
    other = [
        (f"What is the capital of {x}?", f"The capital of {x} is {y}.") for x, y in CAPITALS.items()
    ]
    other += [
        (f"What is the opposite of {x}?", f"The opposite of {x} is {y}.")
        for x, y in OPPOSITES.items()
    ]
    other += [(f"What is {n} plus {n}?", f"{n} plus {n} is {2 * n}.") for n in range(1, 7)]
    # 20 ordinary chats, each followed by 4 of the 80 chats about the person.
    return [one for n, pair in enumerate(other) for one in (pair, *about[4 * n : 4 * n + 4])]


def main(folder: Path) -> None:
    """Write both files to `folder`."""
    for name, pairs in {
        "chats": chats(),
        "questions": [(words[0], fact) for fact, words in FACTS.items()],
    }.items():
        talks = [
            [{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs
        ]
        text = "".join(json.dumps({"messages": talk}) + "\n" for talk in talks)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
