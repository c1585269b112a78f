"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("examples/layout.sh", "tests/examples/test_layout.py"): [
        ('run+=(--config "$best")', "true", "a run does not get its planned layout"),
    ],
}
