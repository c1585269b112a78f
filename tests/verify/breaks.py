"""Mistakes that the tests of this folder must detect; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/distributed/fake_world.py", "tests/verify/test_fake_step.py"): [
        (
            "rows if first else rows[::-1]",
            "rows",
            "sent and received rows of an exchange are not matched",
        ),
        (
            ": tuple[int, ...] = call.elements",
            ": tuple[int, ...] = ()",
            "sizes of collectives are not compared",
        ),
        ("(call.dtype, call.elements)\n", "(call.dtype,)\n", "sizes of messages are not compared"),
        (
            '(_messages(mine, "recv", other)',
            '(_messages(mine, "send", other)',
            "sends are compared with sends",
        ),
    ],
}
