"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/engine/backends/recurrent.py", "tests/attention/context_parallel/test_states.py"): [
        (
            "keep_in_heap(STATE_TEMPORARIES)",
            "pass",
            "the pages of a rule's temporaries are cleared each time",
        ),
    ],
    (
        "megacp/attention/ops/kernel.py",
        "tests/attention/context_parallel/test_attention.py tests/attention/context_parallel/test_layout.py",
    ): [
        (
            "out.mul_(torch.exp(lse - total).unsqueeze(-1))",
            "out.mul_(1.0)",
            "a sink takes no weight",
        ),
        ("    lse.copy_(total)\n\n\ndef sinks", "\n\ndef sinks", "backward knows of no sink"),
        ("return -(weights * inner)", "return (weights * inner)", "sinks are pulled the other way"),
    ],
    (
        "megacp/attention/context_parallel/transport.py",
        "tests/attention/context_parallel/test_attention.py tests/attention/context_parallel/test_layout.py",
    ): [
        (
            "k, v))\n        return call",
            "k, v)) and (q, k, v)\n        return call",
            "a transposed view is misread",
        ),
        (
            "out, lse, douts",
            "out, torch.zeros_like(lse), douts",
            "backward of a block without the merged log-sum-exp",
        ),
    ],
    (
        "megacp/attention/context_parallel/ring.py",
        "tests/attention/context_parallel/test_attention.py tests/attention/context_parallel/test_layout.py",
    ): [
        (
            "gradient:\n                    dkv",
            "False:\n                    dkv",
            "the visiting gradient is dropped",
        ),
        ("home += gradient.wait()", "gradient.wait()", "gradients of other ranks never come home"),
        (
            "(self.axis.rank - step) % size",
            "(self.axis.rank + step) % size",
            "the ring turns the other way",
        ),
        ("if step < last else None", "if step < last - 1 else None", "the last hop is not made"),
        (
            "else self.axis.size - last",
            "else 1",
            "a gradient goes to the next rank where the ring has stopped",
        ),
        (
            "            steps = 1 + step",
            "            pass\n    steps = plan.cp",
            "the ring makes a full round for short windows",
        ),
        ("steps = 1 + step", "steps = max(1, step)", "the ring stops a step early"),
    ],
    (
        "megacp/attention/context_parallel/all_gather.py",
        "tests/attention/context_parallel/test_attention.py tests/attention/context_parallel/test_layout.py",
    ): [
        ("first = plan.cp_rank * len(mine)", "first = 0", "own gradients are stored for rank 0"),
        (
            "plan.order[~mine[plan.order]]",
            "plan.order[mine[plan.order]]",
            "the keys of others are one's own",
        ),
    ],
    (
        "megacp/attention/context_parallel/a2a.py",
        "tests/attention/context_parallel/test_attention.py tests/attention/context_parallel/test_layout.py",
    ): [
        (
            "exchange(out.index_select(0, departure), ",
            "exchange(out, ",
            "the output is sent back in the grouped order",
        ),
        (
            "sinks.chunk(n)[self.axis.rank]",
            "sinks.chunk(n)[0]",
            "all ranks have the sinks of the first heads",
        ),
        (
            "x.unflatten(1, (n, -1))",
            "x.unflatten(1, (-1, n)).transpose(1, 2)",
            "heads are dealt in turns",
        ),
        (
            "expand(t, groups, copies, d).",
            "detach().expand(t, groups, copies, d).",
            "copied K/V get no gradient",
        ),
        (
            "x.unsqueeze(2).expand(t, groups, copies, d)",
            "torch.stack([x] * copies, 2)",
            "copies are summed in bf16",
        ),
    ],
    (
        "megacp/attention/context_parallel/kv_exchange.py",
        "tests/attention/context_parallel/test_attention.py tests/attention/context_parallel/test_layout.py",
    ): [
        (
            "leaving[order] = theirs",
            "leaving = theirs.clone()",
            "gradients go back in the row's order",
        ),
        ("dkv.index_add_", "dkv.index_copy_", "a key that several ranks need keeps one gradient"),
        (
            "plan.tiles(plan.local, keys[order])",
            "plan.tiles(plan.local, keys)",
            "arrived keys are out of order",
        ),
    ],
    (
        "megacp/attention/context_parallel/state_plan.py",
        "tests/attention/context_parallel/test_states.py",
    ): [
        (
            "while path and path[-1][0] <= real[start]",
            "while False",
            "a document goes on from the one before it",
        ),
        (
            "itertools.pairwise([*starts, len(real)]",
            "zip(starts, [*starts[1:], len(real)], strict=True",
            "no document",
        ),
        ("| ends_here[tokens[:-1]]", "", "a branch begins where its sibling ends"),
        (
            "& (owner[wanted] != rank)",
            "& (owner[wanted] == rank)",
            "the tokens before a run are not sent",
        ),
    ],
    (
        "megacp/attention/context_parallel/states.py",
        "tests/attention/context_parallel/test_states.py",
    ): [
        (
            "turned(one[..., :of_turn], came) + ",
            "",
            "states of far ranks are lost",
        ),
        ("joint[states.own_entries, ..., :width] =", "joint[:0, ..., :width] =", "maps are lost"),
        (
            "        state[states.own_entries] = torch.stack(came)",
            "        pass",
            "states do not cross ranks",
        ),
        (
            "        after[states.own_exits] = torch.stack(owed)",
            "        pass",
            "their gradients do not come home",
        ),
        (
            "after[exit_] += turned_back(",
            "after[exit_] += 0 * turned_back(",
            "gradients do not pass through a rank",
        ),
        (">= LARGE", "< 0", "all heads of long rows are in memory at once"),
        (
            "turn_gradient(turn, after, state),",
            "0 * turn_gradient(turn, after, state),",
            "A has no gradient",
        ),
        (
            "past = past.flip(1)",
            "past = past.flip(2)",
            "the taps of a segment's first tokens are in the wrong order",
        ),
    ],
    (
        "megacp/attention/context_parallel/fused_states.py",
        "tests/attention/context_parallel/test_fused_states.py",
    ): [
        (
            "joint[1:, ..., :keys] = torch.eye",
            "joint[:0, ..., :keys] = torch.eye",
            "maps of a kernel are lost",
        ),
        ("= 1 + depth.get(segments[n].before, -1)", "= 0", "branches of a kernel begin with zeros"),
        (
            "np.arange(counts.sum()) - first",
            "np.arange(counts.sum())",
            "chunks of a kernel are counted over segments",
        ),
        (
            "            if out.grad_fn is not None:",
            "            if False:",
            "autograd's thread has no memory for Triton",
        ),
    ],
    ("megacp/attention/ops/recurrence.py", "tests/attention/context_parallel/test_states.py"): [
        (
            "yield since[:, :, -1:], (b",
            "yield since[:, :, :1], (b",
            "a state decays by one token of a chunk alone",
        ),
        (".masked_fill(~past, -torch.inf)", "", "a token reads what later ones write"),
        (
            "return turn * grad if",
            "return grad if",
            "the gradient of a diagonal map passes as it is",
        ),
        (
            "v * beta, k * beta * since",
            "v * beta, k * beta",
            "old states do not decay inside a chunk",
        ),
        (
            "dx[:-back].addcmul_(wide[back:]",
            "dx[back:].addcmul_(wide[:-back]",
            "gradients of taps go forward",
        ),
    ],
    (
        "megacp/attention/context_parallel/plan.py",
        "tests/attention/context_parallel/test_layout.py tests/attention/context_parallel/test_attention.py",
    ): [
        (
            "np.argsort(self._position[gathered])",
            "np.argsort(self.indices.reshape(-1)[gathered])",
            "arrival in another order",
        ),
        (
            "first = self.cp_rank // size * size",
            "first = self.cp_rank",
            "the group of a rank begins at itself",
        ),
        (
            "self.metadata.take(keys), self.reach)",
            "self.metadata.take(keys))",
            "tiles forget how far layers look",
        ),
        (
            "// size, self.order, self.reach)",
            "// size, self.order)",
            "groups of ranks forget how far layers look",
        ),
    ],
    (
        "megacp/attention/context_parallel/layout.py",
        "tests/attention/context_parallel/test_layout.py",
    ): [
        ("return rank, 2 * cp - 1 - rank", "return rank, cp + rank", "zigzag is not even"),
        (
            "missing = -(last - first) % (2 * cp)",
            "missing = -(last - first) % cp",
            "documents are filled up to half",
        ),
        (
            "return math.lcm(self.slices * cp, cp * tp)",
            "return self.slices * cp",
            "rows do not divide by tp",
        ),
    ],
    (
        "megacp/attention/context_parallel/balance.py",
        "tests/attention/context_parallel/test_layout.py",
    ): [
        (
            "+ metadata.leave) - 1",
            "+ metadata.leave)",
            "a key crosses one cut more than it is seen over",
        ),
        (
            "metadata.cost_within(reach) * layers",
            "metadata.cost * layers",
            "the balance knows no window",
        ),
        (
            "error <= max(AREA_SLACK",
            "error >= max(AREA_SLACK",
            "ranks take stretches of another area",
        ),
    ],
    (
        "megacp/attention/context_parallel/transports.py",
        "tests/attention/context_parallel/test_layout.py",
    ): [
        (
            "if needed <= FEW_KEYS:",
            "if needed > FEW_KEYS:",
            "auto takes the exchange for dense masks",
        ),
        ("heads % cp == 0 and", "", "auto takes a2a where heads do not divide"),
    ],
    ("megacp/engine/rows/shard.py", "tests/attention/context_parallel/test_layout.py"): [
        ("(mask_metadata(batch), cp, tp)", "(mask_metadata(batch), cp, 1)", "padding forgets tp"),
        (
            "padded.tokens, padded.labels,",
            "padded.tokens, np.roll(padded.labels, -1),",
            "labels are shifted twice",
        ),
    ],
    ("megacp/engine/rows/vision.py", "tests/attention/context_parallel/test_vision.py"): [
        (
            "(cp), stops - starts",
            "(cp)[::-1], (stops - starts)[::-1]",
            "features come from the wrong rank",
        ),
        (
            "features.index_select(0, to_device(here, x.device))",
            "features[: len(here)]",
            "a tp slice takes the first features",
        ),
        (
            "= copy_to(features, tp)\n",
            "= features\n",
            "the features' gradient is not summed over tp",
        ),
        (
            'np.argsort(self.target[mine], kind="stable")',
            "np.arange(len(mine))",
            "features leave in their own order",
        ),
    ],
    (
        "megacp/engine/models/recompute.py",
        "tests/attention/context_parallel/test_attention.py tests/attention/context_parallel/test_layout.py",
    ): [
        ("marks[place].grad", "marks[0].grad", "queries stand for the keys that are made again"),
    ],
}
