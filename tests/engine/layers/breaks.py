"""Mistakes that the tests of this folder detect; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/engine/layers/table.py", "tests/engine/layers/test_by_hand.py"): [
        (
            'yield Tensor(\n                f"{name}.bias", (self.outputs,), cut, "zeros", decays=False, reduced_over=over\n            )',
            'yield Tensor(f"{name}.bias", (self.outputs,), cut, "zeros", decays=False)',
            "bias gradients of experts are summed over dp x cp",
        ),
        (
            '(self.outputs,), cut, "zeros"',
            '(self.outputs,), cut, "ones"',
            "biases of linears are initialised to 1",
        ),
        (
            "1 / math.sqrt(3 * self.inputs)",
            "1 / math.sqrt(self.inputs)",
            "A has a different initial distribution than in peft",
        ),
        (
            "math.sqrt(2 * depth)",
            "math.sqrt(depth)",
            "initial output weights are larger than in GPT-2",
        ),
        (
            '"zeros" if model.apply_layernorm_1p else "ones"',
            '"ones" if model.apply_layernorm_1p else "ones"',
            "norms with weights around 1 start at 2",
        ),
    ],
    ("megacp/engine/layers/stack.py", "tests/engine/layers/test_by_hand.py"): [
        ("routed = routed[::-1]", "routed = routed", "the last of every N layers has experts"),
        ("attend = (True,)", "attend = (False,)", "every layer has a recurrent state"),
        (
            "not still[i % len(still)]",
            "not still[(i + 1) % len(still)]",
            "the wrong layers lack the rotary embedding",
        ),
        (
            "attend[i % len(attend)] else",
            "attend[(i + 1) % len(attend)] else",
            "the wrong layers have a recurrent state",
        ),
    ],
    ("megacp/engine/layers/mamba2.py", "tests/engine/layers/test_by_hand.py"): [
        (
            '"dt_bias", heads, "rows", "step"',
            '"dt_bias", heads, "rows", "log_rate"',
            "step biases are initialised like decay rates",
        ),
        (
            'Tensor("D", heads, "rows", "ones"',
            'Tensor("D", heads, "rows", "zeros"',
            "the skip weight D is initialised to 0",
        ),
    ],
    ("megacp/engine/layers/vision.py", "tests/engine/layers/test_by_hand.py"): [
        (
            "last_std = output_std(model, v.vision_num_layers)",
            "last_std = output_std(model)",
            "the std of tower weights depends on the depth of the text model",
        ),
    ],
    ("megacp/engine/layers/gated_delta.py", "tests/engine/layers/test_by_hand.py"): [
        (
            '"A_log", heads, "rows", "log_rate"',
            '"A_log", heads, "rows", "step"',
            "decay rates are initialised like step biases",
        ),
        (
            "(3 * taps) ** -0.5",
            "taps**-0.5",
            "convolution weights are not initialised like those of torch's Conv1d",
        ),
    ],
    ("megacp/engine/layers/attention.py", "tests/engine/layers/test_by_hand.py"): [
        (
            'heads, "rows", std=model.init_method_std, decays=False',
            'heads, "rows", "zeros", decays=False',
            "sinks are initialised to 0",
        ),
    ],
    ("megacp/engine/models/init.py", "tests/engine/layers/test_by_hand.py"): [
        ("10.0 ** (2 * torch.rand", "10.0 ** (3 * torch.rand", "initial steps are as large as 1"),
        ("0.01 + 15.99 *", "1.0 + 15.0 *", "no initial state decays slowly"),
        (" - 1.0) * math.sqrt(3.0)", " - 1.0)", "uniform draws have a third of the variance"),
    ],
}
