"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/prepare/records/contents.py", "tests/prepare/test_mistakes.py"): [
        (
            "if kind.suffix == suffix or",
            "if True or",
            "a compressed file is refused at its first byte",
        ),
        (
            "suffix in _BINARY_SUFFIXES and is_json",
            "False",
            "JSON with the name of a Parquet file is called damaged",
        ),
        (
            "is_json or not text",
            "not text",
            "JSON with an unusual name is refused",
        ),
    ],
    ("megacp/prepare/records/record.py", "tests/prepare/test_mistakes.py"): [
        (
            'if before.endswith(",") and rest[:1] in ("}", "]"):',
            "if False:",
            "a trailing comma is called a missing name",
        ),
    ],
    ("megacp/prepare/packs/unit.py", "tests/prepare/test_mistakes.py"): [
        (
            "if entry.items or len(entry.parts) > 1:",
            "if False:",
            "the advice is to split documents that cannot be cut",
        ),
        ("    if entry.forms:\n", "    if False:\n", "the advice is to split conversations"),
    ],
    ("megacp/prepare/packs/settings.py", "tests/prepare/test_mistakes.py"): [
        (
            "[value] if isinstance(value, str | os.PathLike) else value",
            "value",
            "a text becomes its characters",
        ),
    ],
    ("megacp/prepare/records/chat_template.py", "tests/prepare/test_mistakes.py"): [
        (
            "if choice.endswith(_TEMPLATE_SUFFIX) and not",
            "if False and not",
            "a missing template is reported without advice",
        ),
    ],
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
