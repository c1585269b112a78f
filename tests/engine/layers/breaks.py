"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/engine/layers/table.py", "tests/engine/layers/test_by_hand.py"): [
        (
            'yield Tensor(\n                f"{name}.bias", (self.outputs,), cut, "zeros", decays=False, reduced_over=over\n            )',
            'yield Tensor(f"{name}.bias", (self.outputs,), cut, "zeros", decays=False)',
            "biases of experts are summed over dp x cp",
        ),
        (
            '(self.outputs,), cut, "zeros"',
            '(self.outputs,), cut, "ones"',
            "biases of linears begin at 1",
        ),
        (
            "1 / math.sqrt(3 * self.inputs)",
            "1 / math.sqrt(self.inputs)",
            "A is not drawn as peft draws it",
        ),
        (
            "std / math.sqrt(2 * (layers",
            "std / math.sqrt((layers",
            "outputs are drawn larger than GPT-2's",
        ),
        (
            '"zeros" if model.apply_layernorm_1p else "ones"',
            '"ones" if model.apply_layernorm_1p else "ones"',
            "norms around 1 begin at 2",
        ),
    ],
    ("megacp/engine/layers/stack.py", "tests/engine/layers/test_by_hand.py"): [
        ("routed = routed[::-1]", "routed = routed", "the last of every N layers has experts"),
        ("attend = (True,)", "attend = (False,)", "every layer has a state"),
        (
            "not still[i % len(still)]",
            "not still[(i + 1) % len(still)]",
            "other layers are without rotary embedding",
        ),
        (
            "attend[i % len(attend)] else",
            "attend[(i + 1) % len(attend)] else",
            "other layers have a state",
        ),
    ],
    ("megacp/engine/layers/mamba2.py", "tests/engine/layers/test_by_hand.py"): [
        (
            '"dt_bias", heads, "rows", "step"',
            '"dt_bias", heads, "rows", "log_rate"',
            "steps are drawn as rates are",
        ),
        (
            'Tensor("D", heads, "rows", "ones"',
            'Tensor("D", heads, "rows", "zeros"',
            "nothing passes a state by at first",
        ),
    ],
    ("megacp/engine/layers/vision.py", "tests/engine/layers/test_by_hand.py"): [
        (
            "last_std = output_std(model, v.vision_num_layers)",
            "last_std = output_std(model)",
            "towers are drawn by the depth of the text",
        ),
    ],
    ("megacp/engine/layers/gated_delta.py", "tests/engine/layers/test_by_hand.py"): [
        (
            '"A_log", heads, "rows", "log_rate"',
            '"A_log", heads, "rows", "step"',
            "rates are drawn as steps are",
        ),
        ("(3 * taps) ** -0.5", "taps**-0.5", "taps are not drawn as torch's Conv1d draws them"),
    ],
    ("megacp/engine/layers/attention.py", "tests/engine/layers/test_by_hand.py"): [
        (
            'heads, "rows", std=model.init_method_std, decays=False',
            'heads, "rows", "zeros", decays=False',
            "sinks begin at 0",
        ),
    ],
    ("megacp/engine/models/init.py", "tests/engine/layers/test_by_hand.py"): [
        ("10.0 ** (2 * torch.rand", "10.0 ** (3 * torch.rand", "steps of states are up to 1"),
        ("0.01 + 15.99 *", "1.0 + 15.0 *", "no state decays slowly"),
        (" - 1.0) * math.sqrt(3.0)", " - 1.0)", "even draws have a third of the variance"),
    ],
}
