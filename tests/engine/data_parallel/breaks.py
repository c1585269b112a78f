"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/engine/data_parallel/buckets.py", "tests/engine/data_parallel tests/engine/optim"): [
        (
            "(spec.rule, spec.weight_decay, spec",
            "(spec.rule, spec",
            "norms share a bucket with what decays",
        ),
        ("low = max(begin, slot.start)", "low = slot.start", "a slice begins before its parameter"),
        (
            "high = min(end, slot.start",
            "high = max(end, slot.start",
            "a slice ends behind its parameter",
        ),
        (
            "multiple = ALIGNMENT * ranks[slots[0].spec.reduced_over]",
            "multiple = 1",
            "buckets do not divide by the ranks",
        ),
        ("(spec.reduced_over, spec.partial", "(spec.partial", "a bucket is of two axes"),
        (
            "(bucket.plan.slots[number]).add_",
            "(bucket.plan.slots[number]).copy_",
            "microbatches overwrite each other",
        ),
        (
            "is None else total.add_(found)",
            "is None else found",
            "sharded gradients of earlier microbatches are lost",
        ),
        (
            "shard_start = axis.rank * self.shard_elements",
            "shard_start = 0",
            "every rank updates the first slice",
        ),
        (
            "            bucket.gradients.zero_()",
            "            pass",
            "gradients of the last step stay",
        ),
        (
            "if len(self._arrived[index]) < len(",
            "if not self._arrived[index] and len(",
            "a bucket leaves early",
        ),
    ],
    (
        "megacp/engine/data_parallel/shards.py",
        "tests/engine/data_parallel tests/engine/optim tests/training/test_golden_gradients.py",
    ): [
        (
            "name in spec.partial_over]",
            "name not in spec.partial_over]",
            "others are summed over tp",
        ),
        (
            "and self.copies[spec.reduced_over].rank == 0",
            "",
            "copies of instances count in the norm",
        ),
        ("sorted(self.copies.items())", "()", "instances are not summed"),
        ("if spec.reduced_over == name]", "]", "instances sum what another axis reduces"),
        (
            "for i in group]), axis)",
            "for i in group]), single_axis(str(axis)))",
            "partial sums stay partial",
        ),
    ],
    ("megacp/engine/optim/sharded.py", "tests/engine/data_parallel tests/engine/optim"): [
        (
            "settings.weight_decay if spec.weight_decay else 0.0",
            "settings.weight_decay",
            "norms decay",
        ),
        (
            "not x.numel()",
            "False",
            "FusedAdam gets empty slices",
        ),
        (
            "return all_reduce(total, world).sqrt().item()",
            "return total.sqrt().item()",
            "the norm of a rank",
        ),
        ("(1.0 if counted else 0.0)", "1.0", "copies count in the norm"),
        (".double().square().sum()", ".square().sum().double()", "squares are summed in float32"),
        (
            "min(1.0, clip_grad / (norm + 1e-6))",
            "clip_grad / (norm + 1e-6)",
            "small gradients grow",
        ),
        ("self.updates += 1", "self.updates += 2", "an update counts twice"),
        ("shard.values.copy_(master)", "pass", "a model in bfloat16 never learns"),
        ("master.copy_(shard.values)", "pass", "masters of the random weights stay after a load"),
        ("if x.dtype != shard.narrow", "if x.dtype == shard.narrow", "masters are not saved"),
    ],
    ("megacp/engine/optim/rules.py", "tests/engine/data_parallel tests/engine/optim"): [
        ("= lr * group.lr_multiplier", "= lr", "towers learn at the rate of the text"),
        ("1.0 / scale, device", "scale, device", "clipping multiplies instead of dividing"),
    ],
}
