"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/integrations/mask.py", "tests/integrations/test_context.py"): [
        (
            "leave[path[low:height]]",
            "leave[path[low + 1 : height]]",
            "a branch sees the beginning of another one",
        ),
        (
            "        path[low:high] = places[start:stop]\n        height = high",
            "        height = 0",
            "a branch that ended sees later ones",
        ),
    ],
}
