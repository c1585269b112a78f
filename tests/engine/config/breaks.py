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
    ("megacp/engine/config/other_programs.py", "tests/engine/config/test_other_programs.py"): [
        ("_CUTOFF = 0.75", "_CUTOFF = 0.5", "`template` suggests --keep-last"),
        (
            "if row.values is not None and normal not in row.values:",
            "if False:",
            "--normalization LayerNorm trains with RMSNorm",
        ),
        (
            "for target, setting in row.sets.items() if target not in given}",
            "for target, setting in row.sets.items()}",
            "--bf16 wins over --dtype",
        ),
        (
            "        if sets:\n",
            "        if row.sets:\n",
            "a run with --bf16 and --dtype float64 says that it uses bfloat16",
        ),
        (
            "for candidate in (key, *_endings(key)):",
            "for candidate in (key,):",
            "names with a section get no advice",
        ),
        (
            "return words if ours is None else [flag(key), ours]",
            "return words",
            "Megatron's bare --qk-layernorm is refused",
        ),
        ('return f"{float(text):g}"', "return text", "a dropout of 0.0 is refused"),
    ],
    (
        "megacp/engine/config/yaml_file.py",
        "tests/engine/config/test_other_programs.py",
    ): [
        ("return {**implied, **values}", "return values", "bf16 in a file has no effect"),
        (
            'reasons += [f"{source}: {problem}" for problem in accepted.problems]',
            "pass",
            "a file may ask for LayerNorm",
        ),
    ],
    ("megacp/engine/config/cli.py", "tests/engine/config/test_other_programs.py"): [
        (
            "_segments(translate(argv).words):",
            "_segments(argv):",
            "the dtype that --bf16 sets is not a given flag",
        ),
        (
            "hint = advice(name) or nearest(",
            "hint = nearest(",
            "names of other programs get no advice",
        ),
    ],
}
