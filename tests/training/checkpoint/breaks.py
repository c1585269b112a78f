"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    (
        "megacp/engine/data_parallel/boxes.py",
        "tests/training/checkpoint/test_storage.py tests/training/checkpoint/test_commit.py",
    ): [
        (
            "first = -(-low // row)",
            "first = low // row",
            "a partial first row is taken for whole",
        ),
        ("if counts(part.spec):", "if True:", "copies are saved twice"),
        ("low = max(part.start, begin)", "low = part.start", "a slice of two tensors"),
        (
            "high - last * row)\n\n",
            "high - last * row - 1)\n\n",
            "the last partial row is one short",
        ),
        (
            "zip(piece.offsets, offsets",
            "zip((0,) * len(offsets), offsets",
            "every rank saves at the beginning",
        ),
    ],
    ("megacp/training/checkpoint/outcome.py", "tests/training/checkpoint/test_commit.py"): [
        (" if other == own]", "]", "a copy on another machine is hashed by no rank that sees it"),
        (
            '        found.append(f"{one.st_dev} {one.st_ino}',
            '        (f"{one.st_dev} {one.st_ino}',
            "folders of one machine are one copy",
        ),
    ],
    ("megacp/training/checkpoint/storage.py", "tests/training/checkpoint/test_storage.py"): [
        (
            "functools.cache(self._index.header)",
            "self._index.header",
            "a file's header is made for each tensor",
        ),
    ],
    (
        "megacp/training/checkpoint/directory.py",
        "tests/training/checkpoint/test_commit.py tests/training/checkpoint/test_storage.py",
    ): [
        ("older[keep_last - 1 :]", "older[keep_last:]", "one checkpoint more is kept"),
        (
            "lambda folder: serials[folder], reverse=True",
            "lambda folder: serials[folder]",
            "the oldest is the newest",
        ),
    ],
    ("megacp/training/checkpoint/outcome.py", "tests/training/checkpoint/test_sharers.py"): [
        ("    if local:\n", "    if True:\n", "each machine hashes what is in a store"),
    ],
}
