"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/engine/backends/select.py", "tests/tools/test_check_parity.py"): [
        (
            "        if no_compiler:",
            "        if False:",
            "an old torch fails in its first backward",
        ),
    ],
    ("megacp/verify/plot.py", "tests/tools/test_peers.py"): [
        (
            "losses[max(0, end - MEAN_OF) : end]",
            "losses[:end]",
            "a running mean is of all steps before",
        ),
    ],
    ("megacp/huggingface/convert/tensors.py", "tests/tools/test_convert_checkpoint.py"): [
        (
            "        if name.endswith(WIDE):\n            return found",
            "        if False:\n            return found",
            "corrections are cast",
        ),
        (
            "        if not name.endswith(WIDE):",
            "        if True:",
            "a correction is another dtype",
        ),
    ],
}
