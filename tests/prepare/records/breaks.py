"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/prepare/records/read.py", "tests/prepare/records/test_read.py"): [
        (
            'mark = "" if extent.start else',
            "mark = layout.between if extent.start else",
            "later units of an array are lost",
        ),
        (
            "return lines == 0 and are_messages",
            "return False and are_messages",
            "lists of messages are one array",
        ),
        (
            "return _STREAM if lines else None",
            "return None",
            "objects over many lines are bad lines",
        ),
    ],
    ("megacp/prepare/packs/unit.py", "tests/prepare/records/test_read.py"): [
        (
            "place.number + self._records_before(place.extent)",
            "place.number",
            "records are numbered by unit",
        ),
    ],
    ("megacp/prepare/records/forms.py", "tests/prepare/records/test_spellings.py"): [
        (
            "if _same(text, _plain(talk.messages[0])):",
            "if True:",
            "of two system prompts one is lost",
        ),
        (
            "found = {\n        key for key, text in pairs if isinstance(given.get(key), str) and _same(given[key], text)\n    }",
            "found = {key for key, text in pairs if isinstance(given.get(key), str)}",
            "a prompt that says something else is taken for a copy",
        ),
        (
            "if are_messages(value):\n        raise",
            "if False:\n        raise",
            "messages are learned as JSON",
        ),
    ],
    ("megacp/prepare/records/turns.py", "tests/prepare/records/test_spellings.py"): [
        ("if len(said) > 1:", "if False:", "of two texts of a message one is lost"),
        ('"model": "assistant"', '"model": "user"', "Gemini's answers are questions"),
    ],
    ("megacp/prepare/records/turns.py", "tests/prepare/records/test_samples.py"): [
        (
            "if speaker in rules.context_roles:",
            "if False:",
            "a role that is named as context is learned",
        ),
    ],
    ("megacp/prepare/records/advice.py", "tests/prepare/records/test_spellings.py"): [
        (
            "if any(name in given for name in _ANSWERED) and not",
            "if False and not",
            "a bad answer is learned as advised",
        ),
        (
            "any(mark in value.lower() for mark in _SPEAKERS)",
            "False",
            "advice learns what users say",
        ),
    ],
    (
        "megacp/prepare/records/tables.py",
        "tests/prepare/records/test_read.py tests/prepare/packs/test_images.py",
    ): [
        ("others.isdisjoint(names) and others", "False", "halves of a record are records"),
        ("others.isdisjoint(names) and others", "others", "two records of one name are halves"),
        (
            "says and len(seen) == 1 and",
            "says and seen and",
            "the first of two images is the text's",
        ),
        (
            'if value.get("caption") == value["text"]:',
            "if False:",
            "a caption that stands twice is two forms",
        ),
    ],
    ("megacp/prepare/records/forms.py", "tests/prepare/records/test_samples.py"): [
        (
            "  not places",
            "  False",
            "an image without a place is refused",
        ),
        (
            "weight=each.weight * piece.weight)",
            "weight=each.weight)",
            "what is asked about an image is learned",
        ),
    ],
    ("megacp/prepare/records/documents.py", "tests/prepare/records/test_trees.py"): [
        (
            "end.weight if branch == number + 1 else 0.0",
            "end.weight",
            "a token that moves is learned in each branch",
        ),
        (
            "+= weights[rollout][start:stop]",
            "= weights[rollout][start:stop]",
            "the last rollout's weight alone counts",
        ),
        (
            "(len(left) if part else new[above[number - 1]])",
            "(len(left))",
            "branches of nothing hang on their sibling",
        ),
        (
            "-1 - numbers.setdefault(placed, len(numbers))",
            "-1",
            "rollouts share images that differ",
        ),
        (
            "max(leaves[above[number - 1]], leaves[number])",
            "leaves[above[number - 1]]",
            "deeper branches do not see it",
        ),
    ],
}
