"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/storage/files.py", "tests/test_results.py"): [
        (
            "name = os.fspath(path)\n    if stat.S_ISLNK(mode):",
            "name = os.fspath(path)\n    if False:",
            "a result is written through a link",
        ),
        ("    if not overwrite:", "    if False:", "a result replaces a file without a word"),
        (
            "        write_new(path, data)",
            "        write_atomically(path, data)",
            "a file that appears is replaced",
        ),
    ],
}
