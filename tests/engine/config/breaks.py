"""Mistakes that the tests of this folder detect; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/engine/config/run.py", "tests/engine/config/test_homes.py"): [
        (
            "tuple(at_home(str(part)) for part in value)",
            "value",
            "`~` is not expanded in the folders of a blend",
        ),
    ],
    ("megacp/engine/config/cli.py", "tests/engine/config/test_homes.py"): [
        (
            '        self.register("type", Path, _path)\n',
            "",
            "results are written to a folder named `~`",
        ),
    ],
    ("megacp/engine/config/yaml_file.py", "tests/engine/config/test_yaml_size.py"): [
        (
            "if len(reasons) >= _MOST_REASONS:",
            "if False:",
            "10,000 unknown keys take four seconds",
        ),
        (
            "_brief.maxlevel = 2",
            "_brief.maxlevel = 18",
            "a list that doubles 60 times is printed in full",
        ),
    ],
    ("megacp/engine/checks.py", "tests/engine/config/test_cli.py"): [
        (
            "if in_all > MAX_EXPERTS_IN_ALL:",
            "if False:",
            "the number of experts in a Hugging Face folder has no limit",
        ),
    ],
    ("megacp/engine/config/yaml_file.py", "tests/engine/config/test_cli.py"): [
        ("if key.value in names:", "if False:", "a repeated key silently keeps its last value"),
        (
            "        if name in values:  #",
            "        if False:  #",
            "a flag may be set twice, once with - and once with _",
        ),
        (
            "if value != retired.default:",
            "if False:",
            "a retired setting of a file is silently ignored",
        ),
    ],
}
