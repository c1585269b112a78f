"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    (
        "megacp/engine/checks.py",
        "tests/engine/expert_parallel/test_layer.py tests/engine/config/test_cli.py",
    ): [
        ("m.moe_router_topk == 1 and not m", "not m", "routers that learn are refused"),
        (
            "m.moe_router_topk == 1 and not m.moe_router_pre_softmax",
            "False",
            "a router that cannot learn is trained",
        ),
        (
            'or "text" in config.frozen_parts:\n        return\n    no_gradient',
            ":\n        return\n    no_gradient",
            "a frozen router is refused too",
        ),
        (
            "elif m.num_experts == 1 and",
            "elif False and",
            "one expert has a router without a gradient",
        ),
        ("    if best > groups:", "    if False:", "more groups may be chosen than there are"),
    ],
    ("megacp/engine/expert_parallel/router.py", "tests/engine/expert_parallel/test_router.py"): [
        (
            "torch.where(are_equal, first, own",
            "torch.where(~are_equal, first, own",
            "equal rows have other scores",
        ),
        (
            "    bits ^= bits >> 32",
            "    bits >>= 32",
            "rows are taken for equal by half of their bits",
        ),
        (
            "positive = weight + 0.0",
            "positive = weight.clone()",
            "a row with -0.0 is not the one with 0.0",
        ),
        (
            "    if scores.dtype == torch.float64:",
            "    if False:",
            "rounding decides between nearly equal scores",
        ),
        (
            "gaps > NOISE * largest",
            "gaps > 1e6 * NOISE * largest",
            "clearly different scores are taken for equal",
        ),
        (".masked_fill(scores.isinf(), 0.0)", "", "a closed group makes all scores equal"),
    ],
    ("megacp/engine/expert_parallel/layer.py", "tests/engine/expert_parallel/test_router.py"): [
        (
            "products.index_select(1, first_of_equals(self.router))",
            "products",
            "equal rows have other scores",
        ),
        (
            "            scores = scores + self.router_bias\n        choice",
            "            pass\n        choice",
            "biases do not choose",
        ),
    ],
    ("megacp/engine/expert_parallel/router.py", "tests/engine/expert_parallel"): [
        (
            "scores.argsort(dim=-1, descending=True, stable=True)\n",
            "scores.topk(count).indices\n",
            "equal scores of experts have no order",
        ),
        (
            "    wide = accumulation_dtype(x.dtype)",
            "    wide = x.dtype",
            "scores of experts are rounded to bf16",
        ),
    ],
    ("megacp/engine/expert_parallel/route.py", "tests/engine/expert_parallel"): [
        (
            "self.ends.clamp(place.start, place.stop)",
            "self.ends.clamp(0, place.stop)",
            "a tile has rows of other tiles",
        ),
        (
            "place.start, place.stop).diff",
            "place.start, place.stop - 1).diff",
            "the last row of a tile belongs to no expert",
        ),
        ("plan.metadata.leave[held] > 0", "plan.metadata.leave[held] >= 0", "padding is routed"),
        (
            "plan.local.reshape(tp.size, -1)[tp.rank]",
            "plan.local",
            "tp ranks route tokens of each other",
        ),
        (
            "return all_to_all(rows.",
            "return self.axis.size * all_to_all(rows.",
            "gradients of experts times ep",
        ),
        (
            "return arrived.argsort(stable=True)",
            "return torch.arange(len(arrived))",
            "rows stay by their source",
        ),
    ],
    ("megacp/engine/expert_parallel/exchange.py", "tests/engine/expert_parallel"): [
        (
            "slots.view(*route.chosen.shape, rows.shape[1])",
            "slots.view(*route.chosen.shape, -1)",
            "the shape of no tokens cannot be inferred",
        ),
    ],
    ("megacp/engine/expert_parallel/experts.py", "tests/engine/expert_parallel"): [
        (
            "grouped_mm(grad.t(), x",
            "grouped_mm(2 * grad.t(), x",
            "one kernel doubles the gradients of experts",
        ),
        (
            "grouped_mm(x, matrices,",
            "grouped_mm(x, matrices.flip(0),",
            "one kernel takes another expert's matrix",
        ),
        ("alpha=size.scale", "alpha=1", "pairs of experts have a weight of 1"),
        (
            "self.low, groups)",
            "self.low.detach(), groups)",
            "pairs of experts learn one matrix of two",
        ),
        (
            "zip(*downs, strict",
            "zip(*(a[::-1] for a in downs), strict",
            "pairs belong to the wrong experts",
        ),
        (
            "None if x is None else _w",
            "None if x is None or not len(x) else _w",
            "a rank without rows has no gradient",
        ),
    ],
    (
        "megacp/engine/expert_parallel/layer.py",
        "tests/engine/expert_parallel/test_router.py tests/engine/expert_parallel/test_layer.py",
    ): [
        ("if self.groups[0] > 1:", "if self.groups[0] > 2:", "two groups of experts are one"),
    ],
    ("megacp/engine/expert_parallel/exchange.py", "tests/engine/expert_parallel/test_layer.py"): [
        (
            "slots[:, 0].to(accumulation_dtype(slots.dtype))",
            "slots[:, 0]",
            "outputs of experts are summed in bf16",
        ),
    ],
    ("megacp/engine/layers/table.py", "tests/engine/expert_parallel"): [
        (
            'yield Tensor(\n                f"{name}.{A}",\n                (size.rank, self.inputs),\n                down_cut,\n                "uniform",\n                down_std,\n                treated="matrix",\n                reduced_over=over,\n            )',
            'yield Tensor(\n                f"{name}.{A}",\n                (size.rank, self.inputs),\n                down_cut,\n                "uniform",\n                down_std,\n                treated="matrix",\n            )',
            "gradients of the LoRA pairs of experts are summed over dp x cp",
        ),
    ],
    ("megacp/engine/expert_parallel/layer.py", "tests/engine/expert_parallel"): [
        (
            "[shared_gate_tensor(config)], backend.options)",
            '[shared_gate_tensor(config)], backend.tower("vision").options)',
            "the gradient of a shared expert's gate is not summed over tp",
        ),
        (
            "routes.by_layer.get(self.layer)",
            "routes.by_layer.get(-1)",
            "a layer computed again may choose others",
        ),
        (
            "[router_tensor(config)], backend.options)",
            '[router_tensor(config)], __import__("dataclasses").replace(backend.options, sequence_parallel=False))',
            "the gradient of the router is not summed over tp",
        ),
        (
            "range(self.axis.rank * own,",
            "range(0 * own,",
            "all ep ranks begin with the first experts",
        ),
    ],
    ("megacp/engine/data_parallel/full_shard.py", "tests/engine/expert_parallel"): [
        (
            "axis = self.axes[spec.reduced_over]",
            "axis = self.axes[DATA]",
            "parts of experts are named as over dp x cp",
        ),
    ],
    ("megacp/engine/data_parallel/fully_shard.py", "tests/engine/expert_parallel"): [
        ("_mesh(axes[parameter].group", "_mesh(others.group", "experts are gathered over dp x cp"),
    ],
    ("megacp/engine/expert_parallel/balance.py", "tests/engine/expert_parallel"): [
        (
            "for axis in self.axes:",
            "for axis in self.axes[:1]:",
            "documents are counted on one rank of their row",
        ),
        (
            "for axis in self.axes:",
            "for axis in self.axes[1:]:",
            "documents are counted on one tp rank",
        ),
        (
            "(document.unsqueeze(1) * experts",
            "(0 * document.unsqueeze(1)",
            "documents of a row are one",
        ),
        (
            "self.topk * routes.tokens)",
            "self.topk * len(chosen))",
            "the term of documents times microbatches",
        ),
        (
            "self.z / routes.tokens)",
            "self.z / len(chosen))",
            "the z-loss times ranks and microbatches",
        ),
        (
            "dtype=torch.int64, device=device)",
            "dtype=torch.bfloat16, device=device)",
            "tokens are counted in bf16",
        ),
        (
            "dtype=torch.float32, device=device)",
            "dtype=torch.bfloat16, device=device)",
            "corrections are rounded",
        ),
        (
            ", self.grid.ep), self.grid.edp)",
            ", self.grid.ep), self.grid.ep)",
            "corrections are not summed over tp",
        ),
        ("all_reduce(counts, self.grid.ep)", "counts", "corrections are those of an ep rank"),
        (
            "                layer.counts.zero_()",
            "                pass",
            "counts of a step begin with the last one's",
        ),
        ("table[:, :2].sum(0)", "table[0, :2]", "terms of the first rank are logged"),
    ],
    ("megacp/engine/expert_parallel/router.py", "tests/engine/expert_parallel/test_balance.py"): [
        (
            "1 / (1 + torch.exp(-scores))",
            "scores.sigmoid()",
            "equal sigmoids are chosen by where they stand",
        ),
        (".topk(2, sorted=False).values.sum(-1)", ".amax(-1)", "a group counts by its best expert"),
    ],
    ("megacp/engine/expert_parallel/layer.py", "tests/engine/expert_parallel/test_balance.py"): [
        (
            "            if routes.tokens > 0:\n    ",
            "        if routes.tokens > 0:\n",
            "a layer that is computed again counts its tokens twice",
        ),
    ],
    ("megacp/engine/step/step.py", "tests/engine/expert_parallel/test_balance.py"): [
        (
            "self._pipeline(rows, 0, denominator, False)()",
            "self._pipeline(rows, 0, denominator, False, 9)()",
            "evaluation is counted",
        ),
        (
            "            self.balance.correct()",
            "        self.balance.correct()",
            "a skipped step moves corrections",
        ),
        (
            "tokens=tokens) for",
            "tokens=tokens * (chunk is self.chunks[0])) for",
            "later virtual stages have no terms",
        ),
    ],
    ("megacp/training/loop/state.py", "tests/engine/expert_parallel/test_balance.py"): [
        (
            "parameters_to_load(), *model.balance.slices()]",
            "parameters_to_load()]",
            "corrections begin at 0 again",
        ),
    ],
    ("megacp/training/loop/state.py", "tests/engine/expert_parallel/test_layer.py"): [
        (
            "boxes_to_load([], model.optimizer.state_slices())",
            "[]",
            "moments of a resumed run begin at 0 again",
        ),
    ],
    ("megacp/engine/models/build.py", "tests/engine/expert_parallel"): [
        (
            "any(axis.size > instances for axis in reduced.values())",
            "reduced[DATA].size > instances",
            "experts stay whole where a rank shares nothing else",
        ),
        (
            "reduced[EXPERTS] = grid.edp",
            'reduced[EXPERTS] = grid.over("dp", "cp")',
            "gradients of experts are summed over dp x cp",
        ),
    ],
    ("megacp/engine/tensor_parallel/parameters.py", "tests/engine/expert_parallel"): [
        (" or first.reduced_over == EXPERTS", "", "experts are counted on one tp rank"),
    ],
    ("megacp/distributed/shape.py", "tests/engine/expert_parallel"): [
        ("first + place % self.ep,", "first,", "all ranks hold the experts of the first"),
        ("place // self.ep * self.ep", "place // self.tp * self.tp", "experts are shared by tp"),
    ],
    ("megacp/distributed/grid.py", "tests/engine/expert_parallel"): [
        (
            "if one.global_ranks == members",
            "if one.global_ranks == members[:0]",
            "experts make groups that there are",
        ),
        (
            "name=name, traffic=Counter()",
            "name=name",
            "messages of experts are counted as of another axis",
        ),
    ],
}
