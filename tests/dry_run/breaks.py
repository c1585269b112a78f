"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/engine/expert_parallel/layer.py", "tests/dry_run/test_memory.py"): [
        (
            "backend.tiled(Experts(prefix, here, config, backend.options))",
            "Experts(prefix, here, config, backend.options)",
            "experts run over all rows at once",
        ),
    ],
    ("megacp/dry_run/parts.py", "tests/dry_run/test_memory.py"): [
        (
            "dp=math.lcm(max(1, ep), ranks) // ranks",
            "dp=max(1, ep // ranks)",
            "groups of experts that do not divide a replica are not measured",
        ),
        (
            "            self._inside_a_chain = False\n        self._see(result)\n",
            "            self._inside_a_chain = False\n",
            "the results of a chain are not counted",
        ),
        ("        self.alive -= size\n", "        pass\n", "a storage that died still counts"),
        (
            "part = Block(layer, model, backend, config.training.recompute_mode)",
            "part = Block(layer, model, backend, type(config.training)().recompute_mode)",
            "a block is measured without its recomputation",
        ),
        (
            "    kept = follow.alive - before - own\n",
            "    kept = follow.alive - before\n",
            "the result of a block counts as kept by it",
        ),
    ],
    ("megacp/dry_run/memory.py", "tests/dry_run/test_memory.py"): [
        (
            "            gone += block.kept\n",
            "            gone += 0\n",
            "blocks that are done count while a larger one works",
        ),
        (
            "blocks[-1][-1].work)",
            "max(blocks[-1]).work)",
            "the largest block runs beside the head's gradient",
        ),
    ],
    ("megacp/plan/picture.py", "tests/dry_run/test_memory.py"): [
        (
            'Kind.BACKWARD: ("table", "backward", "vision")',
            'Kind.BACKWARD: ("forward",)',
            "backward needs no work of a block",
        ),
    ],
    ("megacp/dry_run/in_flight.py", "tests/dry_run/test_memory.py"): [
        (
            "begins and compute.chunk == 0",
            "begins",
            "microbatches of later chunks are counted as rows of images",
        ),
    ],
    ("megacp/engine/models/recompute.py", "tests/dry_run/test_memory.py"): [
        (
            "            if place is None:",
            "            if True:",
            "queries are kept beside what attention gave",
        ),
    ],
    ("megacp/dry_run/messages.py", "tests/dry_run/test_messages.py"): [
        (
            "        count += parts\n",
            "        pass\n",
            "inputs gathered again for weight gradients are not counted",
        ),
        (
            "(3 if full else 2) * swap",
            "2 * swap",
            "full recomputation does not swap heads a third time",
        ),
        (
            "        found -= microbatches",
            "        found -= 0 * microbatches",
            "parameters that stay whole are gathered again for backward",
        ),
    ],
    ("megacp/dry_run/packs.py", "tests/dry_run/test_packs.py"): [
        (
            "reshape(ranks // group, -1)",
            "reshape(ranks, -1)",
            "ranks that swap heads are as uneven as their tokens",
        ),
        ("one.leave + start, 0)", "one.leave, 0)", "joined packs see each other"),
    ],
}
