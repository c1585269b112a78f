"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/engine/optim/lr_schedule.py", "tests/engine/optim/test_sharded.py"): [
        ("lr * update / top", "lr * (update - 1) / top", "the first update has rate 0"),
        ("train_iters) + 1", "train_iters)", "the last update has rate 0"),
        ("settings.lr_decay_iters or settings", "settings", "--lr-decay-iters does nothing"),
        (
            "0.5 * (1.0 + math.cos(math.pi * part))",
            "math.cos(math.pi * part / 2)",
            "another cosine",
        ),
        ("(end - length)", "top", "WSD falls from the start"),
    ],
}
