"""Breaks that the tests in this folder must notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/engine/expert_parallel/layer.py", "tests/dry_run/test_memory.py"): [
        (
            "backend.tiled(Experts(prefix, here, config, backend.options))",
            "Experts(prefix, here, config, backend.options)",
            "experts process all rows at once",
        ),
    ],
    ("megacp/dry_run/parts.py", "tests/dry_run/test_memory.py"): [
        (
            "dp=math.lcm(max(1, ep), ranks) // ranks",
            "dp=max(1, ep // ranks)",
            "expert groups that do not divide a replica cannot be measured",
        ),
        (
            "            self._inside_a_chain = False\n        self._see(result)\n",
            "            self._inside_a_chain = False\n",
            "the results of a chain are not counted",
        ),
        ("        self.alive -= size\n", "        pass\n", "a freed storage still counts"),
        (
            "part = Block(layer, model, backend, config.training.recompute_mode)",
            "part = Block(layer, model, backend, type(config.training)().recompute_mode)",
            "a block is measured without its recomputation",
        ),
        (
            "    kept = follow.alive - before - own\n",
            "    kept = follow.alive - before\n",
            "a block's output counts as a saved activation",
        ),
    ],
    ("megacp/dry_run/memory.py", "tests/dry_run/test_memory.py"): [
        (
            "            gone += block.kept\n",
            "            gone += 0\n",
            "finished blocks still count during the backward of a larger one",
        ),
        (
            "blocks[-1][-1].work)",
            "max(blocks[-1]).work)",
            "the largest block's work is added to the head's gradient",
        ),
    ],
    ("megacp/plan/picture.py", "tests/dry_run/test_memory.py"): [
        (
            'Kind.BACKWARD: ("table", "backward", "vision")',
            'Kind.BACKWARD: ("forward",)',
            "backward needs no memory for a block's work",
        ),
    ],
    ("megacp/dry_run/in_flight.py", "tests/dry_run/test_memory.py"): [
        (
            "            if compute.chunk == 0:\n                rows += 1\n",
            "            rows += 1\n",
            "microbatches of later chunks count as rows",
        ),
    ],
    ("megacp/engine/models/recompute.py", "tests/dry_run/test_memory.py"): [
        (
            "            if place is None:",
            "            if True:",
            "queries are saved in addition to the output of attention",
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
            "full recomputation does not exchange heads a third time",
        ),
        (
            "        found -= microbatches",
            "        found -= 0 * microbatches",
            "parameters that stay gathered are gathered again for backward",
        ),
    ],
    ("megacp/dry_run/packs.py", "tests/dry_run/test_packs.py"): [
        (
            "reshape(ranks // group, -1)",
            "reshape(ranks, -1)",
            "ranks that exchange heads have different areas",
        ),
        ("one.leave + start, 0)", "one.leave, 0)", "documents of joined packs see each other"),
    ],
}
