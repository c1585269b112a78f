"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/training/data/order.py", "tests/training/data/test_loader.py"): [
        (
            "outside[values >= np.uint64(length)]",
            "outside[values > np.uint64(length)]",
            "a sample beyond the dataset",
        ),
        ('f"{seed} {epoch} {length}"', 'f"{seed} {length}"', "every epoch has one order"),
        (
            "(start, start + count, dtype=np.int64),",
            "(0, count, dtype=np.int64),",
            "a resumed run begins anew",
        ),
    ],
    ("megacp/training/data/collate.py", "tests/training/data/test_collate.py"): [
        (
            "label_weights = np.roll(weights, -1)",
            "label_weights = weights.copy()",
            "weights do not move with labels",
        ),
        ("label_weights[last] = 0", "pass", "the last token predicts"),
        ("number - ended[index]", "number", "a branch's positions run on over the branches before"),
        (
            "above and ends[above[-1]] <= first",
            "above and ends[above[-1]] < first",
            "documents are branches",
        ),
        (
            "= np.cumsum(padded) - padded",
            "= np.cumsum(true) - true",
            "segments stand without their padding",
        ),
        (
            "_TokenRuns(true, begin, end[pack_of])",
            "_TokenRuns(true, begin, 0 * pack_of + end[-1])",
            "packs are one",
        ),
        (
            "np.repeat(begin + true, padded)",
            "np.repeat(begin, padded)",
            "padding does not begin at 0",
        ),
        ("whole = begin + segments", "whole = begin.max() + segments", "segments see each other"),
    ],
    ("megacp/training/data/images.py", "tests/training/data/test_images.py"): [
        (
            "np.cumsum(totals) - totals",
            "0 * totals",
            "bounds of the second pack begin at 0",
        ),
        ("number + 1, strict=", "number, strict=", "the first image sees nobody ahead"),
        (
            "(pooling >= 0, pooling + before",
            "(pooling >= 0, pooling",
            "the second image pools the first",
        ),
        ("axis=0, prepend=0)", "axis=0, prepend=1)", "the first image is one crop short"),
    ],
    ("megacp/training/data/blend.py", "tests/training/data/test_loader.py"): [
        ("first = int(nth[here][0])", "first = 0", "each step repeats a dataset's first samples"),
        (
            "chosen[here] = self._first[number] + found",
            "chosen[here] = found",
            "all samples are of the first dataset",
        ),
    ],
    ("megacp/training/data/loader.py", "tests/training/data/test_loader.py"): [
        ("        if not present:\n", "        if False:\n", "stand-in packs are trained on"),
        (
            "min(options.global_batch_size, options.end - consumed)",
            "options.global_batch_size",
            "the last step of an epoch takes packs of the next",
        ),
        ("[:, data_rank.index]", "[:, data_rank.index - 1]", "ranks read the packs of others"),
        (
            "len(found)), constant_values=-1",
            "len(found)), constant_values=0",
            "a short step counts pack 0 again",
        ),
        (
            "consumed = self.consumed_samples + self._options.global_batch_size",
            "consumed = self.consumed_samples",
            "the state of the loader does not change",
        ),
        (
            "self._requested = consumed_samples",
            "self._requested = 0",
            "a resumed loader reads from the start",
        ),
    ],
}
