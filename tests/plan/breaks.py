"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/plan/command.py", "tests/plan/test_here.py"): [
        (
            "own.output is not None and fits",
            "own.output is not None",
            "a layout that does not fit is started",
        ),
    ],
    ("megacp/plan/hardware.py", "tests/plan/test_here.py"): [
        (
            "memory=gib or row.memory",
            "memory=row.memory",
            "an A100 of 40 GB is planned as one of 80",
        ),
    ],
    ("megacp/plan/resumed.py", "tests/plan/test_here.py"): [
        (
            "    if manifest.world_size != world_size:",
            "    if True:",
            "a resumed run gets another layout",
        ),
        (
            "if not fits(kept, world_size, hardware):",
            "if False:",
            "a resumed run keeps a layout that does not fit",
        ),
    ],
    ("megacp/plan/answer.py", "tests/plan/test_here.py"): [
        (
            'given | {"dtype"} if self.keeps_dtype',
            "given if self.keeps_dtype",
            "a plan makes a run one of bfloat16",
        ),
    ],
    ("megacp/engine/layers/moe.py", "tests/plan/test_costs.py"): [
        (
            "min(config.parallel.moe_planned_imbalance, most_load(config))",
            "most_load(config)",
            "the worst is planned",
        ),
        ("(4 + full) * row", "(2 + full) * row", "the plan forgets what backward sends of rows"),
    ],
    ("megacp/engine/models/costs.py", "tests/plan/test_costs.py"): [
        ("cost + factor * count", "cost + 0 * count", "stages are cut as if loads were even"),
    ],
    ("megacp/plan/search.py", "tests/plan/test_search.py"): [
        (
            '_modes().index(values["recompute_granularity"])',
            'RECOMPUTE_MODES[values["recompute_granularity"]].strength',
            "of two modes that repeat as much one is not tried",
        ),
        (
            "if not check(with_values(base, {**plainest",
            "if True or not check(with_values(base, {**plainest",
            "no choice of a table is left out",
        ),
        (
            "not check(one, world_size) and not problems(one)",
            "True",
            "layouts are shown that no run takes",
        ),
        (
            "if p.pipeline_model_parallel_size > 1:\n        schedules",
            "if True:\n        schedules",
            "schedules of one stage are layouts of their own",
        ),
        ('if verdict == "OK":', "if False:", "what saves memory is tried where nothing has to"),
        ("and saved[2] == more[2] for", "for", "tiles that need more rule out none"),
        (
            "less[1] == 0 or less[0] == saved[0]",
            "True",
            "what sends much to the host rules out less",
        ),
        ("if layout.memory.host > host", "if False", "the host holds all"),
        (
            "_divisors(PP, world_size, ",
            "_divisors(PP, config.model.num_layers, ",
            "stages divide the layers",
        ),
        ("told.get(name, value) == value", "True", "flags that were given are tried anew"),
    ],
    ("megacp/plan/times.py", "tests/plan/test_search.py"): [
        (
            "attention_backward = ATTENTION_BACKWARD * back",
            "attention_backward = back",
            "attention's backward takes as long as its forward",
        ),
        ("(gather + scatter, backward", "(scatter, backward", "parameters are gathered once"),
        (
            "    swap_backward = swap\n",
            "    swap_backward = 2 * swap\n",
            "heads are swapped twice in backward",
        ),
    ],
    ("megacp/dry_run/messages.py", "tests/plan/test_search.py"): [
        ("blocks = sample.shared(config)[1]", "blocks = ranks - 1", "kv_exchange sends all keys"),
    ],
    ("megacp/plan/answer.py", "tests/plan/test_search.py"): [
        ("for part in range(9, 16)", "for part in range(9, 9)", "the longest row is a power of 2"),
        ("self.given - {name}", "self.given", "no flag is freed"),
        (
            "max(more, key=lambda name: more[name])",
            "min(more, key=lambda name: more[name])",
            "the least term is blamed",
        ),
        (
            "if gain >= _FASTER:",
            "if False:",
            "a faster layout after the first one does not say that it is faster",
        ),
        ("_LINE = 79", "_LINE = 99", "a text is wider than a terminal"),
    ],
    ("megacp/plan/picture.py", "tests/plan/test_picture.py"): [
        (
            "end = max(available, needed)",
            "end = needed",
            "the memory of the fullest layout looks like the memory of a GPU",
        ),
        (
            "end = max(available, peak.total / 2**30)",
            "end = peak.total / 2**30",
            "the timeline always looks full",
        ),
        ("found[_REST] = rest", "pass", "bars lack their small parts"),
        (
            "_bars(answer, memory, colors)",
            "_bars(answer, memory, _colors(memory.bars))",
            "a term changes its colour within a page",
        ),
    ],
    ("megacp/plan/times.py", "tests/plan/test_published.py"): [
        (
            "hardware.ring(p.tensor_model_parallel_size, 1)",
            "hardware.link(p.tensor_model_parallel_size, 1)",
            "tp over machines has one adapter",
        ),
        (
            "hardware.ring(part.ranks",
            "hardware.link(part.ranks",
            "sums over machines have one adapter",
        ),
        (
            "hops = (part.ranks - 1) * hardware.latency / 4 * buckets",
            "hops = hardware.latency / 4 * buckets",
            "a ring takes one hop",
        ),
    ],
    ("megacp/plan/hardware.py", "tests/plan/test_published.py"): [
        (
            "adapters = max(1, GPUS_OF_A_MACHINE // stride)",
            "adapters = 1",
            "a ring enters a machine by one adapter",
        ),
    ],
    ("megacp/dry_run/memory.py", "tests/plan/test_published.py"): [
        (
            "        state += 1  # master weights",
            "        pass",
            "master weights use no memory",
        ),
    ],
    ("megacp/dry_run/messages.py", "tests/plan/test_calibrate.py"): [
        (
            "return 1.0 + 2 * microbatches",
            "return 2 * microbatches",
            "a stage gathers its one chunk never",
        ),
    ],
    ("megacp/plan/times.py", "tests/plan/test_calibrate.py"): [
        (
            "at_once / cores - 1",
            "at_once / cores - 9",
            "stages that share cores are as fast as alone",
        ),
        ("waiting = turns * span", "waiting = 0.0", "ranks that share cores are as fast as alone"),
        (
            "(flops.matmul - grouped + experts)",
            "flops.matmul",
            "experts are as fast as large products",
        ),
        (
            "slower = hardware.beside if world_size > 1 else 1.0",
            "slower = 1.0",
            "ranks do not slow one another",
        ),
        (
            "2 * (pairs + passes + calls)",
            "2 * (pairs + passes)",
            "the host calls nothing in backward",
        ),
        (
            "len(chunks) - 1 if stage == 0 else len(chunks)",
            "len(chunks)",
            "the model's first chunk waits for a message",
        ),
    ],
    ("megacp/dry_run/messages.py", "tests/plan/test_times.py"): [
        (
            "in shared_parts(config, chunks, world_size):",
            "in shared_parts(config, chunks, world_size)[:1]:",
            "experts stay",
        ),
        (
            "parameters if config.parallel.sharding.parameters else trained",
            "parameters",
            "frozen weights travel",
        ),
    ],
    ("megacp/plan/times.py", "tests/plan/test_times.py"): [
        (
            'products = 2 if "text" in config.frozen_parts else 3',
            "products = 3",
            "a frozen head has the gradient of its weight",
        ),
        (
            "            gather = 0.0  #",
            "            pass  #",
            "sums of ZeRO-2 gather in each microbatch",
        ),
        ("_Part(work=every - once,", "_Part(work=2 * once,", "a frozen tower runs backward"),
        ("return sample.causal", "return 1.0", "spans and branches take cuDNN's kernel"),
        (
            '"gathered": hardware.ring',
            '"gathered": hardware.link',
            "gathered keys leave by one adapter",
        ),
    ],
    ("megacp/plan/hardware.py", "tests/plan/test_times.py"): [
        (
            "self.outside * (ranks - 1) / away",
            "self.outside",
            "all that is sent to all leaves the machine",
        ),
    ],
    ("megacp/dry_run/memory.py", "tests/plan/test_times.py"): [
        ("max(1, ranks * tp // ep), ep", "ranks, ep", "experts are shared as other weights are"),
    ],
    ("megacp/dry_run/packs.py", "tests/plan/test_times.py"): [
        ("not row.span.any() and ", "", "rows with spans count as causal"),
    ],
    ("megacp/plan/hardware.py", "tests/plan/test_calibrate.py"): [
        ("seconds - self.overlap * under", "seconds - under", "a CPU computes and sends at once"),
    ],
    ("megacp/plan/calibrate.py", "tests/plan/test_calibrate.py"): [
        ("logs -= np.clip", "logs += np.clip", "a fit goes away from what was measured"),
    ],
    ("megacp/plan/sheet.py", "tests/plan/test_sheet.py"): [
        ("isinstance(value, bool) or not", "not", "a truth is a number of a machine"),
        ("elif not allowed.holds(value):", "elif value < 0:", "NaN is a number of a machine"),
        (
            "        if name not in known:",
            "        if False:",
            "an unknown field is not read and not told",
        ),
    ],
    (
        "megacp/engine/config/vision.py",
        "tests/plan/test_costs.py tests/engine/config/test_cli.py",
    ): [
        ("is_causal=True, ", "", "image tokens that the library masks may see each other"),
        (", head_multiple=4", "", "angles by row and column turn half a pair"),
        (
            "return (POOLED_PATCHES, 1)",
            "return (1, 1)",
            "a planned image of any shape is one patch",
        ),
    ],
    (
        "megacp/engine/layers/vision.py",
        "tests/plan/test_costs.py tests/huggingface/convert/test_families.py",
    ): [
        (
            'yield Tensor(\n        "vision.position_embedding.weight", (v.patches_per_crop, width), std=std, treated="table"\n    )',
            'yield Tensor("vision.position_embedding.weight", (v.patches_per_crop, width), std=std)',
            "positions are stepped as a vector",
        ),
        (
            'for name in "kv"}',
            'for name in "qkv"}',
            "the query of a window is counted for each patch",
        ),
    ],
    ("megacp/dry_run/packs.py", "tests/plan/test_choices.py"): [
        (
            "layout = LAYOUTS[name]",
            "layout = LAYOUTS.get(name, BALANCED)",
            "a layout that is unknown is planned as another one",
        ),
    ],
    ("megacp/engine/config/training.py", "tests/plan/test_choices.py"): [
        (
            "return RECOMPUTE_MODES[self.recompute_granularity]",
            "return RECOMPUTE_MODES.get(self.recompute_granularity, RECOMPUTE_MODES[KEEP_ALL])",
            "an unknown recomputation mode repeats nothing",
        ),
    ],
    ("megacp/engine/config/parallel.py", "tests/plan/test_choices.py"): [
        (
            "return PIPELINE_SCHEDULES[self.pipeline_schedule].defers_weight_gradients",
            'return self.pipeline_schedule == "zero_bubble"',
            "a schedule is compared by its name",
        ),
    ],
    ("megacp/engine/checks.py", "tests/plan/test_choices.py"): [
        (
            "return LAYOUTS[parallel.cp_layout].slices",
            "return 1",
            "checks do not ask a layout for its slices",
        ),
    ],
    ("megacp/plan/hardware.py", "tests/plan/test_gpus.py"): [
        (
            "return text.lower().replace",
            "return text.replace",
            "`--gpu H100` is the name of a missing file",
        ),
        (
            "for end in range(start + 1, len(words) + 1):",
            "for end in range(start + 1, start + 2):",
            "a GeForce RTX 4090 counts as an H100",
        ),
        (
            'sheet["host"] = own.pop("host", sheet["host"])',
            'own.pop("host", None)',
            "cards on PCI Express 4 offload at the rate of PCI Express 5",
        ),
    ],
}
