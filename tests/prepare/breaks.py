"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/prepare/tokenize/beside.py", "tests/prepare/test_malformed_tokenizers.py"): [
        ("name not in known and name not in found]", "False]", "a post-processor makes Rust panic"),
        (
            "if adds is not None and not isinstance(adds, bool):",
            "if False:",
            "a text is accepted as a boolean",
        ),
    ],
    ("megacp/prepare/tokenize/tokenizer.py", "tests/prepare/test_tokenizer.py"): [
        (" or _has_newer(text)", "", "new letters are split by the engine's Unicode tables"),
    ],
    ("megacp/prepare/packs/unit.py", "tests/prepare/test_public_chats.py"): [
        (
            "if is_valid != settings.is_valid",
            "if is_valid < settings.is_valid",
            "validation records are also in the training set",
        ),
    ],
    (
        "megacp/prepare/records/read.py",
        "tests/prepare/test_public_chats.py tests/prepare/records/test_read.py",
    ): [
        (
            'line += element.count("\\n")',
            "line += 0",
            "lines inside an element are not counted",
        ),
        (
            "stop is not None and offset >= stop:",
            "stop is not None and offset > stop:",
            "an element is in two units",
        ),
        ("if before[1] != mark or end", "if end", "an array without a comma is accepted"),
    ],
    ("megacp/prepare/records/conversation.py", "tests/prepare/test_public_chats.py"): [
        ("self.answers[answer.thought] += 1", "pass", "answers with thoughts are not counted"),
        ("self._weights[i] = 0.0", "pass", "an answer is learned without its thought"),
        (
            "for a, b, w in self.learned)",
            "for a, b, w in self.learned[:1])",
            "the last answer is not learned",
        ),
    ],
    ("megacp/training/data/manifest.py", "tests/prepare/test_public_chats.py"): [
        (
            "not (counts[0] and opens)",
            "not counts[0]",
            "the summary of ordinary chats mentions thoughts",
        ),
    ],
}
