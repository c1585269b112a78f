"""Breaks that the tests of this folder notice; see tests/mutants.py."""

NUMBERS, LAYOUT = "megacp/finetuning/numbers.py", "megacp/finetuning/layout.py"
CHOICES, PAGES = "tests/finetuning/test_choices.py", "tests/finetuning/test_pages.py"

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    (NUMBERS, CHOICES): [
        ("2 ** math.ceil(math.log2(whole))", "whole", "a row has any length"),
        ("if whole > row_tokens:", "if False:", "long documents stop a build"),
        (
            'oversize = "split" if lengths.longest > row_tokens else "error"',
            'oversize = "error"',
            "a long text among conversations stops a build",
        ),
    ],
    (LAYOUT, CHOICES): [
        ("shared = ranks // math.gcd(rows, ranks)", "shared = ranks", "ranks always share a row"),
        ("ways.append(ADAPTERS)", "pass", "a large model never gets adapters"),
        (
            "if needed <= hardware.memory:",
            "if True:",
            "a run is started that does not fit in memory",
        ),
        ("if not full:", "if False:", "adapters are tried for a fault of the flags"),
    ],
    ("megacp/finetuning/flags.py", CHOICES): [
        ("if name in build:", "if name in build - train:", "a common flag misses the build"),
    ],
    ("megacp/finetuning/data.py", CHOICES): [
        ('chosen["columns"] = columns', "pass", "the columns of a table are not read"),
    ],
    ("megacp/prepare/packs/lengths.py", CHOICES): [
        (
            "settings = checked(settings)",
            "settings = settings",
            "a tokenized dataset is measured by one of its files",
        ),
    ],
    ("megacp/finetuning/run.py", "tests/finetuning/test_finetune.py"): [
        (
            "if exported == wanted and",
            "if exported and exported['step'] == step and",
            "another dtype of the export is ignored",
        ),
        (
            '"--save", checkpoints, "--auto-resume"]\n    train +=',
            '"--save", checkpoints]\n    train +=',
            "the same command does not resume",
        ),
    ],
    ("megacp/training/loop/sources.py", PAGES): [
        ("epochs = finetuning.EPOCHS", "epochs = 2.0", "pages promise another number of epochs"),
        (
            'found["global_batch_size"] = batch',
            "pass",
            "a small data set gets one update per epoch",
        ),
    ],
}
