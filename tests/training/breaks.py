"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/training/loop/reporting.py", "tests/training/test_start.py"): [
        ("training.lr <= _LARGEST_LR", "True", "a learning rate of 5 is not warned about"),
        ("if config.model.num_experts:", "if False:", "the first line lacks ep"),
    ],
    ("megacp/engine/models/init.py", "tests/training/test_full_sharding.py"): [
        (".to(dtype)", "", "a 16-bit model's masters begin with other bits under full sharding"),
    ],
    ("megacp/engine/models/delta_net.py", "tests/training/test_golden_gradients.py"): [
        (
            "backend.norm(norm, over_heads=True)",
            "backend.norm(norm)",
            "gated norms of heads are not summed over tp",
        ),
    ],
    ("megacp/engine/models/costs.py", "tests/training/test_golden_gradients.py"): [
        (
            "if not adapted.isdisjoint(layers))",
            "if True)",
            "a stage that trains nothing has a backward",
        ),
    ],
    ("megacp/engine/models/language.py", "tests/training/test_golden_gradients.py"): [
        (
            "slice_of(batch.token_names, self.backend.tp)",
            "batch.token_names[: len(x)]",
            "tp ranks share dropout rows",
        ),
        ('("embedding",) if tied and tied_across else ()', "()", "tied copies are not summed"),
        ("counted=not tied)", "counted=True)", "a tied table counts twice in the norm"),
    ],
    ("megacp/distributed/grid.py", "tests/training/test_denominator.py"): [
        ("axes.append(self.ep)", "pass", "ranks that share experts first meet in a step"),
        (
            'axes.append(self.over("dp", "cp"))',
            "pass",
            "ranks that sum gradients first meet in a step",
        ),
        (
            "self.embedding, self.world]",
            "self.world]",
            "stages of tied embeddings first meet in a step",
        ),
    ],
    (
        "megacp/training/loop/denominator.py",
        "tests/training/test_golden_gradients.py tests/training/test_denominator.py",
    ): [
        ("return self.weight or 1.0", "return 1.0", "sums are not divided"),
        (
            "total = table[first, 2:4].sum",
            "total = table[:, 2:4].sum",
            "all ranks count, not one of each replica",
        ),
        (
            '("flops", "image_documents")',
            '("flops", "image_documents", "stop_reason")',
            "stop reasons add up",
        ),
    ],
    ("megacp/engine/step/decision.py", "tests/training/test_health.py"): [
        (
            "math.isfinite(loss) and math.isfinite(grad_norm)",
            "math.isfinite(loss)",
            "a gradient of NaN is an update",
        ),
    ],
    ("megacp/training/loop/health.py", "tests/training/test_health.py"): [
        ("            self.skipped_in_a_row = 0\n", "", "skipped steps are never forgotten"),
        ("value <= factor * usual", "value <= usual", "every step above the median is a spike"),
        ("value <= factor * last and", "False and", "a spike is told at every step"),
        (" and 0.5 * median < usual < 2.0 * median", "", "a spike is told once in a run"),
        ("if self.skipped_in_a_row <", "if self.skipped_in_a_row <=", "one more step is skipped"),
    ],
    ("megacp/training/loop/state.py", "tests/training/test_saving.py"): [
        (
            "fresh_pairs = stored.model.lora_rank == 0",
            "fresh_pairs = True",
            "--finetune drops the pairs of a LoRA run",
        ),
    ],
    ("megacp/training/loop/sources.py", "tests/training/test_start.py"): [
        (
            "sum(one.num_packs for one in manifests)",
            "manifests[0].num_packs",
            "packs of a blend are its first part's",
        ),
        (
            "round(training.train_epochs * packs)",
            "int(training.train_epochs * packs)",
            "epochs are cut to whole packs",
        ),
        (
            "round(training.train_epochs * packs",
            "int(-(-training.train_epochs * packs // 1)",
            "1.1 x 10 packs are 12",
        ),
        (
            "return step + max(0, steps_left), end",
            "return -(-end // batch), end",
            "a resumed run counts its epochs again from the first sample",
        ),
        (
            "_FEW_UPDATES or warmup > steps / 2",
            "_FEW_UPDATES",
            "no warning about a run that only warms up",
        ),
    ],
    ("megacp/training/start/processes.py", "tests/training/test_start.py"): [
        (
            "or not all(handles(",
            "or not any(handles(",
            "a rank waits for one that Ctrl-C has ended",
        ),
        (
            "    if ended_by:  # a signal arrived",
            "    if False:  # by a",
            "Ctrl-C between two starts is lost",
        ),
        (
            "if status not in (0, STOPPED)]",
            "if status]",
            "a rank that saved and stopped has failed",
        ),
        ("first or max(ended)", "first or (0, 0)", "a stopped run has finished"),
    ],
    ("megacp/training/start/script.py", "tests/training/test_start.py"): [
        (
            "        raise RuntimeError(said)",
            "        raise ValueError(said)",
            "a failure is a refusal",
        ),
        ("run.terminate()", "run.kill()", "Ctrl-C of a notebook ends a run that has not saved"),
        ('flag(name if value else f"no_{name}")', "flag(name)", "False of a script is True"),
    ],
    ("megacp/engine/data_parallel/full_shard.py", "tests/training/test_golden_gradients.py"): [
        ("* (parameter.numel() // shape[0])", "", "a part's place counts rows, not elements"),
        (
            "            parameter.grad = None",
            "            pass",
            "gradients of the last step stay in full shards",
        ),
    ],
    (
        "megacp/engine/step/step.py",
        "tests/training/test_golden_gradients.py tests/training/test_denominator.py",
    ): [
        (
            'f"{self.config.training.seed}/{step}"',
            'f"{self.config.training.seed}"',
            "every step has one dropout mask",
        ),
        ("self.grid.tp.rank == 0:  #", "True:  #", "the loss counts once for each tp rank"),
        ("chunk.eval()", "chunk.train()", "evaluation drops out"),
        ("check(loss, norm)", "check(loss, 0.0)", "nobody looks at the norm"),
    ],
    ("megacp/engine/step/rows.py", "tests/training/test_denominator.py"): [
        (
            "packs * grid.dp.size",
            "packs",
            "dynamic context parallelism forgets the packs of other ranks",
        ),
    ],
    ("megacp/engine/step/step.py", "tests/training/test_vision_dataset.py"): [
        ("if self.chunks[0].vision is not None:", "if False:", "patches are planned in the step"),
    ],
    (
        "megacp/attention/context_parallel/state_transport.py",
        "tests/training/test_vision_dataset.py",
    ): [
        (
            "            segment_levels(whole, self.device, False)\n            segment_levels(whole, self.device, True)",
            "            pass",
            "segments of states are planned in the step",
        ),
    ],
    ("megacp/training/start/layout.py", "tests/training/test_start.py"): [
        (
            "if set(check(elsewhere, ranks)) <= set(check(elsewhere, usual)):",
            "if False:",
            "a new layout is advised although the old one is valid",
        ),
    ],
    ("megacp/training/start/help.py", "tests/training/test_start.py"): [
        ("_WIDEST = 100", "_WIDEST = 1000", "a line of help is as wide as the terminal"),
    ],
}
