"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/attention/ops/device.py", "tests/attention/ops/test_kernels.py"): [
        (
            "if not torch.is_grad_enabled():\n            args",
            "if False:\n            args",
            "offload changes the bits of a compiled chain",
        ),
    ],
    ("megacp/attention/ops/once.py", "tests/attention/ops/test_mask.py"): [
        (
            "key = (kept, more)",
            "key = (kept.__name__, more)",
            "functions of one name share what they derive",
        ),
    ],
    ("megacp/attention/ops/mask.py", "tests/attention/ops/test_mask.py"): [
        (
            "(k.order[j] <= order) & (order < k.leave[j])",
            "k.order[j] <= order",
            "branches and documents see each other",
        ),
        (
            "np.minimum(keys, own + (length == 1))",
            "np.minimum(keys, own)",
            "a query alone does not see itself",
        ),
        (
            "found[group] = np.arange(len(values))",
            "found[group] = np.arange(len(values)) - 1",
            "parts end too early",
        ),
        (
            '+ runs.length, side="left")',
            '+ runs.length, side="right")',
            "runs are cut at their end",
        ),
        (
            "same_span = (span != 0) & (span == k.span[j])",
            "same_span = span == k.span[j]",
            "text outside of spans sees the future",
        ),
        (
            "index - self.row_start[row] + 1",
            "index - self.row_start[row]",
            "keys of a causal query are one short",
        ),
        (
            "self.row_stop[row] - index",
            "self.row_stop[row] - index - 1",
            "keys of a window's query are one short",
        ),
        ("n * (n + 1) // 2", "n * (n - 1) // 2", "the area of a triangle without its diagonal"),
        (
            "steps, self.k_stop, -1)",
            "steps, self.k_stop - 1, -1)",
            "the last key of a tile is not needed",
        ),
        (
            "change[1:] = meta.order[1:] != meta.order[:-1] + 1",
            "change[1:] = False",
            "runs join over gaps",
        ),
        (
            "(np.flatnonzero(runs.leave > 0))",
            "(np.flatnonzero(runs.leave >= 0))",
            "padding is a document",
        ),
        ("(kind[1:] == FULL) & (kind[:-1]", "(kind[:-1]", "a triangle joins a rectangle"),
        (
            "    equal[1:] &= count[1:] == count[:-1]\n",
            "",
            "rows with more tiles are joined",
        ),
        (
            "edge = back - (reach.window - 1)",
            "edge = back - reach.window",
            "a window is a token longer",
        ),
        (
            "[first, first + k.length]",
            "[first]",
            "queries are not cut where keys of their window end",
        ),
        (" & (length > 1) & (high > 0)", " & (length > 1)", "a window sees a branch beside it"),
        (
            "first = back - q.depth[i] % reach.chunk",
            "first = back - reach.chunk",
            "chunks are windows",
        ),
        (", (reach.chunk, 0)]", "]", "queries are not cut where a chunk ends"),
        (
            "cuts.append((reach.chunk, shift))",
            "pass",
            "queries are not cut where a chunk's window begins",
        ),
        (
            "square &= edge >= first",
            "square &= edge >= 0",
            "a window's triangle reaches into the chunk before",
        ),
        (
            "real) - real - left)",
            "real) - real)",
            "a branch is as deep as the branches before it are long",
        ),
    ],
    (
        "megacp/attention/ops/tile_kernels.py",
        "tests/attention/ops/test_kernels.py tests/attention/ops/test_blocks.py",
    ): [
        (
            "earlier = slice(keys.start, keys.start + begin)",
            "earlier = slice(keys.start, keys.start + end)",
            "pairs of a cut triangle are computed twice",
        ),
        (
            "np.tri(*pairs.shape) > 0",
            "np.tri(*pairs.shape, 1) > 0",
            "a masked call sees one key ahead",
        ),
        (
            "if tile.kind == CAUSAL else causal.T",
            "if tile.kind == CAUSAL else causal",
            "a masked window is causal",
        ),
        (
            "if self.kind == WINDOW else tensors",
            "if False else tensors",
            "a window's triangle is a causal one",
        ),
        ("if slope is None else dscores * slope", "", "a cap has the gradient of a straight line"),
        (
            "dq[rows] += found[0]",
            "dq[rows] = found[0]",
            "the query gradient of an earlier call is lost",
        ),
        (
            "        x[part] += piece",
            "        x[part] = piece",
            "the key gradient of an earlier call is lost",
        ),
        (
            "scores - lse.unsqueeze(-1))\n            # [b",
            "scores)\n            # [b",
            "backward without the merged lse",
        ),
        (
            "delta = (out * dout).sum(-1)",
            "delta = 0 * (out * dout).sum(-1)",
            "softmax backward without its row sum",
        ),
        (
            "partial.untouched and call.first:",
            "partial.untouched:",
            "a second call of the same queries overwrites",
        ),
    ],
    (
        "megacp/attention/ops/flex.py",
        "tests/attention/ops/test_flex.py tests/attention/ops/test_blocks.py",
    ): [
        (
            "narrow and width > 128 else {}",
            "False else {}",
            "the backward of wide heads spills four times as much",
        ),
        ("(k_order[j] <= q_order[i])", "(k_order[j] < q_order[i])", "a token does not see itself"),
        ("& (q_order[i] < k_leave[j])", "", "branches see each other on a GPU"),
        (
            "[(q.depth, 0), (k.depth, 0)]",
            "[(k.depth, 0), (q.depth, 0)]",
            "depths of queries and keys are exchanged",
        ),
        (
            "q_depth[i] - k_depth[j] < window",
            "q_depth[i] - k_depth[j] <= window",
            "a window is a token longer",
        ),
        (
            "[(q.depth, 0), (k.depth, 0)]",
            "[(k.depth, 0), (q.depth, 0)]",
            "a query has the depth of a key on a GPU",
        ),
        (
            "np.where(k.span != 0, k.span, _NOBODY)",
            "k.span",
            "text of no span sees the future on a GPU",
        ),
        (
            "np.where(q.leave > 0, q.order, _NOBODY)",
            "q.order",
            "padding in a document sees its prefix",
        ),
        (
            "max(2, *(count.max() for count in counts))",
            "columns",
            "block lists are as wide as there are blocks",
        ),
        (
            "    torch._dynamo.mark_static(x, [1, 3])\n",
            "",
            "a second model's heads have no backward on a GPU",
        ),
        ("(lse / math.log(2))", "(lse * 1.0)", "the operator's lse is in units of log 2"),
        (
            "        lend_scratch(q.device)\n",
            "",
            "a recomputation has no memory for TMA descriptors",
        ),
        ("cap * torch.tanh(score / cap)}", "score}", "FlexAttention knows no cap"),
        (
            "        if self._score:",
            "        if False:",
            "the gradient of a part on a GPU is that without a cap",
        ),
    ],
    ("megacp/attention/ops/pointwise.py", "tests/attention/ops/test_pointwise.py"): [
        ("d_gate * gate_inside", "d_gate", "a clamped gate learns"),
        (
            "up_inside = up.abs() <= _LIMIT",
            "up_inside = up <= _LIMIT",
            "a value clamped from below learns",
        ),
        (
            "addcmul_(wide_x, inward, value=-1)",
            "addcmul_(wide_x, inward, value=1)",
            "sign in the norm's backward",
        ),
        ("* scale**3 / x.shape[-1]", "* scale**2 / x.shape[-1]", "power in the norm's backward"),
        (
            "grad, up, out=for_gate",
            "grad, gate, out=for_gate",
            "SwiGLU's gate takes the wrong half",
        ),
        (
            "weight.to(wide.dtype) + 1).to",
            "weight.to(wide.dtype)).to",
            "a norm around 0 multiplies by its weight",
        ),
        (
            "wide_weight + 1 if",
            "wide_weight if",
            "backward of a norm around 0 multiplies by its weight",
        ),
        ("cat([d_gate, F.gelu", "cat([d_gate, F.silu", "backward of GELU's gate is that of SiLU"),
        ("/ (1.0 - probability)", "", "dropout does not scale what is kept"),
        (
            "int(probability * 2**32)",
            "int((1 - probability) * 2**32)",
            "dropout keeps what it should drop",
        ),
        ("first, first + columns", "0, columns", "tp ranks repeat each other's dropout"),
    ],
    ("megacp/attention/ops/rotary.py", "tests/attention/ops/test_pointwise.py"): [
        (
            "cat([sin * -sign, sin * sign], -1)",
            "cat([sin * sign, sin * -sign], -1)",
            "rotation turns the other way",
        ),
        (
            "_rotate(grads[0], cos, sin, -1),",
            "_rotate(grads[0], cos, sin, 1),",
            "the gradient is rotated forward",
        ),
        ("angles.cos() * factor", "angles.float().cos() * factor", "angles in float32"),
        (
            "(positions / wavelength - low) / (high - low)",
            "(positions / wavelength) / (high - low)",
            "llama3's blend",
        ),
    ],
    ("megacp/attention/context_parallel/transport.py", "tests/attention/ops/test_flex.py"): [
        (
            "if sinks is not None:\n            return super()",
            "if False:\n            return super()",
            "a row whose keys are all here has no sinks",
        ),
    ],
}
