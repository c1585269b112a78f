"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/engine/pipeline_parallel/schedules.py", "tests/engine/pipeline_parallel"): [
        (
            "if len(waiting) > stage:",
            "if len(waiting) > stage + 1:",
            "one more weight gradient is deferred",
        ),
        (
            "warmup = num_stages - stage - 1\n",
            "warmup = num_stages - stage\n",
            "warm-up of 1F1B holds one more",
        ),
        (
            "microbatch, num_chunks - 1 - chunk)",
            "microbatch, chunk)",
            "backward passes the chunks in forward order",
        ),
        (
            "return chunk * num_stages + stage",
            "return stage * num_stages + chunk",
            "virtual stages in another order",
        ),
        (
            "-num_microbatches % num_stages if num_chunks > 1 else 0",
            "0",
            "a short group is the last",
        ),
        (
            'Channel("backward", stage, before)',
            'Channel("backward", stage, after)',
            "gradients go forward",
        ),
        ("warmup = 2 * warmup +", "warmup = warmup +", "interleaved stages warm up half as long"),
        ("stage > 0 or num_chunks > 1", "True", "the first stage defers for nothing"),
        (
            '"first 1f1b": one_at_a_time',
            '"first 1f1b": one_f_one_b',
            "a first step may hang on a GPU",
        ),
        ("RECV_FORWARD if place > 0", "RECV_FORWARD if place >= 0", "the first stage receives"),
        (
            "place > first_trained else",
            "place > 0 else",
            "stages that train nothing are sent gradients",
        ),
    ],
    ("megacp/engine/pipeline_parallel/runtime.py", "tests/engine/pipeline_parallel"): [
        ("if len(under_way) >= SEND_WINDOW:", "if False:", "the window of sends is unbounded"),
        (
            "[self.output_gradients.pop(key)]",
            "[self.output_gradients.pop(key) * 2]",
            "a gradient doubles at a stage",
        ),
        (
            "outgoing[key] = gradient",
            "outgoing[key] = gradient.clone().zero_()",
            "stages before get no gradient",
        ),
        ("final[action.kind, action.chunk] == action", "True", "every backward is called the last"),
    ],
    ("megacp/engine/pipeline_parallel/partition.py", "tests/engine/pipeline_parallel"): [
        ("squares + cost * cost, counts", "squares - cost * cost, counts", "the least even cut"),
    ],
    ("megacp/engine/pipeline_parallel/timeline.py", "tests/engine/pipeline_parallel"): [
        ("max(arrival, done", "max(0.0, done", "a stage of the dry run waits for no other"),
    ],
}
