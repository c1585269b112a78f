"""Mistakes that the tests of this folder detect; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/engine/expert_parallel/router.py", "tests/engine/models/test_language.py"): [
        (
            "scores.gather(1, chosen).softmax(-1)",
            "of_all(scores, chosen)",
            "chosen experts have less than all weight",
        ),
    ],
    ("megacp/engine/expert_parallel/exchange.py", "tests/engine/models/test_language.py"): [
        ("range(1, slots.shape[1])", "range(1, 1)", "one expert of a token is heard"),
        (
            "route.collect(column.squeeze(1))",
            "0 * route.collect(column.squeeze(1))",
            "the router learns nothing",
        ),
    ],
    ("megacp/engine/expert_parallel/experts.py", "tests/engine/models/test_language.py"): [
        (
            "save(activate, gate_up, weights), groups, weights",
            "save(activate, gate_up, weights), groups",
            "the bias of down is not weighted",
        ),
        (
            "_weights(weighed, ones",
            "_weights(grad, ones",
            "the gradient of a bias ignores the weights of rows",
        ),
        (
            "d_weights = (grad",
            "d_weights = 0 * (grad",
            "a weight learns nothing of the bias it weighs",
        ),
        ("(active.to(weights.dtype) * weights)", "active", "experts are not weighed"),
        ("(wide * weights).to(grad.dtype)", "grad", "experts learn as if they were not weighed"),
        (
            "(wide * active.detach())",
            "(wide * given[:, :1])",
            "the gradient of a weight is not that of what it weighs",
        ),
    ],
    ("megacp/engine/expert_parallel/layer.py", "tests/engine/models/test_language.py"): [
        (
            "        scores = with_terms(scores",
            "        scores = scores if self.balance.correction is None else scores + "
            "self.balance.correction\n        scores = with_terms(scores",
            "the correction is in the weight",
        ),
        (
            "choice = choice + self.balance.correction",
            "choice = choice + 0",
            "the correction corrects nothing",
        ),
        (" * self.factor  # [t, k]", "  # [t, k]", "weights of experts are not scaled"),
        ("else made + of_all", "else made + 0 * of_all", "a shared expert is not heard"),
        (
            "sigmoid_gate(made, product(",
            "sigmoid_gate(made, product(0 * ",
            "a shared expert is half heard by all",
        ),
    ],
    ("megacp/engine/expert_parallel/balance.py", "tests/engine/models/test_language.py"): [
        ("return (grad + ", "return (0 * grad + ", "terms of balance replace the loss"),
        (
            "(grad + added,)",
            "(grad,)",
            "balance terms have no gradient",
        ),
        (
            "counts.sum() - len(counts) * counts",
            "len(counts) * counts - counts.sum()",
            "busy experts get even more tokens",
        ),
    ],
    ("megacp/engine/models/mamba2.py", "tests/engine/models/test_language.py"): [
        ("F.silu(z)).unflatten", "z).unflatten", "Mamba-2's gate lacks its SiLU"),
        ("read + x * self.skip.unsqueeze(-1)", "read", "the skip path of Mamba-2 is lost"),
        (
            "unflatten(-1, (self.groups, -1)).to",
            "unflatten(-1, (1, -1)).to",
            "the norm covers all groups together",
        ),
        ("dt.to(wide) + self.dt_bias.to(wide)", "dt.to(wide)", "the step size lacks its bias"),
    ],
    ("megacp/engine/layers/stack.py", "tests/engine/models/test_language.py tests/engine/layers"): [
        (
            '("", "_output") if both else ("",)',
            '("",)',
            "a block with both kinds of norms gets only one kind",
        ),
        (
            "0 if open_to_all[i % len(open_to_all)] else model",
            "model",
            "all layers have the sliding window",
        ),
    ],
    ("megacp/engine/models/delta_net.py", "tests/engine/models/test_language.py"): [
        (
            "F.softplus(a.to(wide) + self",
            "F.softplus(a.to(wide)) + 0 * (self",
            "the bias of the decay is lost",
        ),
        (
            "save(self._gated, out, z)",
            "save(self._gated, out, torch.ones_like(z))",
            "the output gate is ignored",
        ),
    ],
    ("megacp/engine/models/attention.py", "tests/engine/models/test_language.py"): [
        ("self.scale, self.sinks, save", "self.scale, None, save", "attention sinks are ignored"),
        (
            "config.attention_scale",
            "config.hidden_size**-0.5",
            "scores are scaled by the hidden size",
        ),
        ("plan.within(self.reach)", "plan", "sliding windows are ignored"),
        (
            "if self.rotates:",
            "if True:",
            "layers without a rotary embedding have one",
        ),
    ],
    ("megacp/engine/models/block.py", "tests/engine/models/test_language.py"): [
        (
            "inputs, 2 * self.layer + 1)",
            "inputs, 2 * self.layer)",
            "attention and MLP share dropout masks",
        ),
        ("x = x + self._drop(attended", "x = self._drop(attended", "the first residual is lost"),
        ("return x + self._drop(self", "return self._drop(self", "the second residual is lost"),
        (
            "inputs.key + site * 0x9E",
            "inputs.key + 0 * site * 0x9E",
            "all layers share dropout masks",
        ),
    ],
    ("megacp/engine/models/language.py", "tests/engine/models/test_language.py"): [
        ("x = x * x.new_full", "x + x * x.new_full", "the embedding multiplier is ignored"),
        (
            "(far, near), names",
            "(far, far), names",
            "layers with a window use the angles of layers without one",
        ),
        (
            "frequencies = inverse_frequencies(\n                config.rotary_dim, config.window_rotary_base, RotaryScaling()\n            )",
            "frequencies = inverse_frequencies(config.rotary_dim, config.window_rotary_base, scaling)",
            "the rotary base of windows is scaled for long contexts",
        ),
        (
            "self.backend.dtype)",
            "self.backend.dtype, self.rotary_factor)",
            "the angles of windows have YaRN's factor",
        ),
    ],
    (
        "megacp/engine/models/block.py",
        "tests/engine/models/test_language.py tests/dry_run/test_memory.py",
    ): [
        (
            '"_output_norm" if config.has_input_norms else',
            '"_norm" if config.has_input_norms else',
            "input and output norms of a block have the same name",
        ),
        (
            "inputs.rotary[self.has_window]",
            "inputs.rotary[0]",
            "every layer uses the angles of layers without a window",
        ),
    ],
    ("megacp/engine/models/recompute.py", "tests/engine/models/test_language.py"): [
        (
            "results = KeptResults(hooks or HELD)",
            "results = body.__self__.__dict__.setdefault('kept', KeptResults(hooks or HELD))",
            "a microbatch gets the attention output of a different microbatch",
        ),
        ("if self._given is not None:", "if False:", "full recomputation repeats attention"),
    ],
    ("megacp/engine/models/offload.py", "tests/engine/models/test_language.py"): [
        (
            "int(x.storage_offset()), x.shape",
            "0, x.shape",
            "views of a storage are restored at offset 0",
        ),
        (
            "if handle not in self._open:",
            "if True:",
            "each view copies the whole storage again",
        ),
        (" or handle in self._staying", "", "weights are offloaded to the host"),
    ],
    ("megacp/attention/ops/rotary.py", "tests/engine/models/test_language.py"): [
        ("    if scaling.rounds:", "    if True:", "every yarn rounds"),
    ],
    ("megacp/engine/config/model.py", "tests/engine/models/test_pair_words.py"): [
        (
            'kind.endswith(f".{name}")]',
            'kind == f"attention.{name}"]',
            "words of --lora-targets mean only linears of attention",
        ),
    ],
    ("megacp/engine/models/pair_words.py", "tests/engine/models/test_pair_words.py"): [
        (
            "elif not any(kind.startswith(",
            "elif False and any(kind.startswith(",
            "a mixer without LoRA pairs is not reported",
        ),
    ],
    ("megacp/engine/models/multimodal.py", "tests/engine/models/test_multimodal.py"): [
        ("* valid[..., None]", "", "positions outside the image count in the mean"),
        (
            "scores.masked_fill(~valid[:, None], -torch.inf)",
            "scores",
            "positions outside the image get attention weight",
        ),
        (
            "/ valid.sum(1, keepdim=True)",
            "/ (0 * valid + 1).sum(1, keepdim=True)",
            "the mean is over the whole window",
        ),
    ],
    ("megacp/engine/models/vision.py", "tests/engine/models/test_multimodal.py"): [
        (
            "for layer in self.feature_layers",
            "for layer in self.feature_layers[::-1]",
            "feature layers are swapped",
        ),
        ("(x + self.positions).flatten", "x.flatten", "patches have no position"),
        (
            "self.scale = config.vision_head_dim**-0.5",
            "self.scale = config.vision_head_dim**-1",
            "the tower scales its scores by 1 / d instead of 1 / sqrt(d)",
        ),
        ("x = x + self.output(attend", "x = self.output(attend", "the tower's residual is lost"),
    ],
}
