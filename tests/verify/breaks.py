"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/distributed/fake_world.py", "tests/verify/test_fake_step.py"): [
        (
            "rows if first else rows[::-1]",
            "rows",
            "what one rank sends another must be what it receives",
        ),
        (
            ": tuple[int, ...] = call.elements",
            ": tuple[int, ...] = ()",
            "sizes of a collective do not matter",
        ),
        ("(call.dtype, call.elements)\n", "(call.dtype,)\n", "sizes of a message do not matter"),
        (
            '(_messages(mine, "recv", other)',
            '(_messages(mine, "send", other)',
            "sends are held against sends",
        ),
    ],
}
