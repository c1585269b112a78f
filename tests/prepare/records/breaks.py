"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/prepare/records/indexed.py", "tests/prepare/records/test_indexed.py"): [
        (
            "reader.stored(begin, end)",
            "reader.stored(begin, begin + 1)",
            "only the first sequence of a document is read",
        ),
        (
            "if not data_bytes:",
            "if False:",
            "a document without tokens becomes an end token",
        ),
        (
            "np.searchsorted(starts, (start, stop)).tolist()",
            "np.searchsorted(starts, (start, stop + 1)).tolist()",
            "a document is in two units",
        ),
        ("_version(name) for name", "(1, 1) for name", "a changed file is read as before"),
        ("if reader.modes.any():", "if False:", "images of Megatron are learned as text"),
        ("bounds[-1] == len(reader)", "True", "the sequences after the last document are lost"),
    ],
    ("megacp/prepare/records/documents.py", "tests/prepare/records/test_indexed.py"): [
        (
            "self._eod is not None and ids[-1] != self._eod[0]",
            "self._eod is not None",
            "a document gets a second end token",
        ),
        (
            "(ids < 0) | (ids >= vocab_size)",
            "ids > vocab_size",
            "tokens of another vocabulary are accepted",
        ),
    ],
    ("megacp/prepare/records/read.py", "tests/prepare/records/test_indexed.py"): [
        (
            "return [*_identity(path), *_identity(data_of(path))]",
            "return _identity(path)",
            "a changed .bin is not noticed",
        ),
        (
            "if is_index(extent.path):\n            return 0",
            "if False:\n            return 0",
            "document numbers count the newlines of the index",
        ),
    ],
    ("megacp/prepare/records/read.py", "tests/prepare/records/test_read.py"): [
        (
            'mark = "" if extent.start else',
            "mark = layout.between if extent.start else",
            "later units of an array are lost",
        ),
        (
            "return lines == 0 and are_messages",
            "return False and are_messages",
            "a list of messages is read as an array of records",
        ),
        (
            "return _STREAM if lines else None",
            "return None",
            "a multi-line object is refused line by line",
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
            "one of two different system prompts is lost",
        ),
        (
            "found = {\n        key for key, text in pairs if isinstance(given.get(key), str) and _same(given[key], text)\n    }",
            "found = {key for key, text in pairs if isinstance(given.get(key), str)}",
            "a prompt that differs from the conversation is dropped as a copy",
        ),
        (
            "if are_messages(value):\n        raise",
            "if False:\n        raise",
            "messages are learned as JSON",
        ),
    ],
    ("megacp/prepare/records/turns.py", "tests/prepare/records/test_spellings.py"): [
        ("if len(said) > 1:", "if False:", "one of two texts of a message is lost"),
        ('"model": "assistant"', '"model": "user"', "Gemini's answers are read as questions"),
    ],
    ("megacp/prepare/records/turns.py", "tests/prepare/records/test_samples.py"): [
        (
            "if speaker in rules.context_roles:",
            "if False:",
            "a role in --context-roles is learned",
        ),
    ],
    ("megacp/prepare/records/advice.py", "tests/prepare/records/test_spellings.py"): [
        (
            "if any(name in given for name in _ANSWERED) and not",
            "if False and not",
            "the advice makes a bad answer learned",
        ),
        (
            "any(mark in value.lower() for mark in _SPEAKERS)",
            "False",
            "the advice makes user messages learned",
        ),
    ],
    (
        "megacp/prepare/records/tables.py",
        "tests/prepare/records/test_read.py tests/prepare/packs/test_images.py",
    ): [
        (
            "others.isdisjoint(names) and others",
            "False",
            "the halves of a record become two records",
        ),
        (
            "others.isdisjoint(names) and others",
            "others",
            "two records of the same name are refused as halves",
        ),
        (
            "says and len(seen) == 1 and",
            "says and seen and",
            "the first of two images is assigned to the text",
        ),
        (
            'if value.get("caption") == value["text"]:',
            "if False:",
            "a caption in both members is refused as two forms",
        ),
    ],
    ("megacp/prepare/records/forms.py", "tests/prepare/records/test_samples.py"): [
        (
            "  not places",
            "  False",
            "an image without a placeholder is refused",
        ),
        (
            "weight=each.weight * piece.weight)",
            "weight=each.weight)",
            "the question about an image is learned",
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
            "only the last rollout's weight counts",
        ),
        (
            "(len(left) if part else new[above[number - 1]])",
            "(len(left))",
            "branches of an empty part continue their sibling",
        ),
        (
            "-1 - numbers.setdefault(placed, len(numbers))",
            "-1",
            "rollouts share different images",
        ),
        (
            "max(leaves[above[number - 1]], leaves[number])",
            "leaves[above[number - 1]]",
            "deeper branches do not see the part above",
        ),
    ],
}
