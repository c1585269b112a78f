"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/prepare/records/conversation.py", "tests/prepare/templates/test_learned.py"): [
        (
            'call, "arguments") if takes else',
            'call, "arguments") if False else',
            "arguments are encoded twice",
        ),
    ],
    ("megacp/prepare/records/answers.py", "tests/prepare/templates/test_learned.py"): [
        (
            'return _Opening(\n            "empty_thoughts" if is_after_thought or here != prompt else "no_thoughts",\n            alone,\n            here,\n            added,\n        )',
            'return _Opening("empty_thoughts" if is_after_thought or here != prompt else "no_thoughts")',
            "an empty thought is learned",
        ),
        (
            'solid("".join(around)) == solid(alone)',
            "bool(around)",
            "the text at the beginning of every answer is never learned",
        ),
        ("if here is None:", "if False:", "a prompt that opens a thought refuses earlier answers"),
        ("= here[len(os.path", "= prompt[len(os.path", "prompts end without the empty thought"),
    ],
    ("megacp/prepare/records/conversation.py", "tests/prepare/templates/test_conversation.py"): [
        ("at - len(THOUGHT) if", "at if", "a thought in the content lacks its beginning"),
        ('r" \\1 "', 'r"\\1"', "a thought that touches its tags is refused"),
        (
            "elif self._is_taken_for_words(i):",
            "elif False:",
            "thought tags of another template are learned",
        ),
        ("PLACE + THOUGHT_END, 1)", "THOUGHT_END, 1)", "an empty thought is written twice"),
        ("if takes else", "if True else", "an object is written instead of a string"),
    ],
    ("megacp/prepare/records/answers.py", "tests/prepare/templates/test_conversation.py"): [
        (
            '_UNASKED.sub("", prompt) + THOUGHT',
            '"-"',
            "a thought is refused where the prompt asks for none",
        ),
        (
            "== solid(alone) + THOUGHT",
            "== 0",
            "a template is refused if its prompt opens a thought that it never writes",
        ),
        (
            "return self._renderings.tried([*before, message]) or self._renderings.with_message(\n            i, message\n        )",
            "return self._renderings.tried([*before, message])",
            "the empty thought of an answer before any question is learned",
        ),
        (" if i else self._opened()", "", "the text before a first answer is learned with it"),
    ],
    ("megacp/prepare/records/answers.py", "tests/prepare/templates/test_marks.py"): [
        (
            "if self._text_from(begin, pattern.head) != pattern.head_text:",
            "if False:",
            "an answer begins at the offset of another answer",
        ),
        (
            "if self._text_from(end, pattern.tail) != pattern.tail_text:",
            "if False:",
            "an answer stops at the offset of another answer",
        ),
        ("_some_of(matched)):", "[]):", "no matched answer is also located by renderings"),
        (
            "matched.append(i)",
            "answer = self._rendered(i)",
            "each answer costs additional renderings",
        ),
    ],
    ("megacp/prepare/records/renderings.py", "tests/prepare/templates/test_marks.py"): [
        ("if text == self.text:", "if True:", "marks are used although the template sees them"),
        (
            "if silent and self._is_written_for(silent):",
            "if False:",
            "each omitted thought costs a rendering",
        ),
    ],
    ("megacp/prepare/records/marks.py", "tests/prepare/templates/test_marks.py"): [
        (
            'place[1] == "" or place not in',
            "place not in",
            "a turn begins where a template loops over all messages",
        ),
    ],
    ("megacp/prepare/records/conversation.py", "tests/prepare/templates/test_marks.py"): [
        (
            "THOUGHT_WORDS if key in REASONING else key",
            "key",
            "each written thought costs a rendering",
        ),
        ("return self._places_at_once() or", "return", "each image costs a rendering"),
    ],
    ("megacp/prepare/records/conversation.py", "tests/prepare/templates/test_ends.py"): [
        ("return after + len(token)", "return stop", "the token of the next turn is not learned"),
        ("return stop + len(self._closing)", "return stop", "the last answer has no end"),
        (
            'self.answers["no_end"] += len(self._learned',
            "0 * len(self._learned",
            "blocks without an end are not counted",
        ),
    ],
    ("megacp/prepare/records/chat_template.py", "tests/prepare/templates/test_ends.py"): [
        (
            "of_turn or goes_on or",
            "of_turn or",
            "a shared prefix ends with a token that no branch has",
        ),
        (
            "if calls else self._after_answer",
            "if False else self._after_answer",
            "a call ends like an answer",
        ),
    ],
    ("megacp/prepare/records/answers.py", "tests/prepare/templates/test_ends.py"): [
        (
            "if written[:i] == self._messages[:i]:",
            "if True:",
            "an answer after a call whose thought is dropped is refused",
        ),
    ],
    ("megacp/prepare/records/renderings.py", "tests/prepare/templates/test_ends.py"): [
        (
            "if alone and alone != self.tried(",
            "if True or (",
            "a content that is never written next to a call is dropped silently",
        ),
        (
            'written[i] = {**written[i], "content": ""}',
            "pass",
            "an answer after a call with a content is refused",
        ),
    ],
    ("megacp/prepare/tokenize/beside.py", "tests/prepare/templates/test_ends.py"): [
        (
            'values.get("text_config")',
            "None",
            "the end tokens of a model with a vision tower are not read",
        ),
    ],
    ("megacp/prepare/packs/progress.py", "tests/prepare/templates/test_ends.py"): [
        ("if no_end:", "if False:", "a build without learned ends prints no warning"),
    ],
    ("megacp/prepare/records/sandbox.py", "tests/prepare/templates/test_sandbox.py"): [
        (
            "resource.setrlimit(resource.RLIMIT_AS, limits)",
            "pass",
            "the memory limit of one rendering remains",
        ),
        (
            '_Lazy(found) if hasattr(found, "__next__") else found',
            "found",
            "a generator's address is learned",
        ),
        ("return _Function(value) if", "return value if", "a method's address is learned"),
        ('made.filters["random"] = _by_chance', "pass", "a build is not reproducible"),
        (
            "if not all(address in there",
            "if not all(True",
            "the address of an object is learned",
        ),
    ],
    ("megacp/prepare/packs/run.py", "tests/prepare/templates/test_choice.py"): [
        (
            "if writers and writers !=",
            "if False and writers !=",
            "a build continues with a different chat template",
        ),
    ],
    ("megacp/prepare/records/forms.py", "tests/prepare/templates/test_learned.py"): [
        (
            "key: without_nulls(value) for",
            "key: value for",
            "nulls are learned from JSONL, but not from tables",
        ),
    ],
    ("megacp/prepare/records/tables.py", "tests/prepare/templates/test_learned.py"): [
        ('== "arrow.json"', '== ""', "a call in a JSON column stays a string"),
    ],
}
