"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/engine/config/run.py", "tests/engine/config/test_homes.py"): [
        (
            "tuple(at_home(str(part)) for part in value)",
            "value",
            "a folder of a blend is named `~`",
        ),
    ],
    ("megacp/engine/config/cli.py", "tests/engine/config/test_homes.py"): [
        ('        self.register("type", Path, _path)\n', "", "results go to a folder named `~`"),
    ],
    ("megacp/engine/config/yaml_file.py", "tests/engine/config/test_yaml_size.py"): [
        (
            "if (\n            len(reasons) >= _MOST_REASONS\n        ):  # a file of something else: the search for near names takes time",
            "if False:  # a file of something else: the search for near names takes time",
            "10,000 unknown keys take four seconds",
        ),
        (
            "_brief.maxlevel = 2",
            "_brief.maxlevel = 18",
            "a list that doubles 60 times is shown whole",
        ),
    ],
    ("megacp/engine/checks.py", "tests/engine/config/test_cli.py"): [
        ("if in_all > MAX_EXPERTS_IN_ALL:", "if False:", "a folder may name experts without end"),
    ],
    ("megacp/engine/config/yaml_file.py", "tests/engine/config/test_cli.py"): [
        ("if key.value in names:", "if False:", "the last of two values of a flag wins"),
        (
            "        if name in values:\n",
            "        if False:\n",
            "a flag stands twice, with - and with _",
        ),
        (
            "if value != RETIRED[name].default:",
            "if False:",
            "a retired setting of a file is silently ignored",
        ),
    ],
}
