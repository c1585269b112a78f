"""Mistakes that the tests of this folder detect; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/huggingface/convert/gpt_oss.py", "tests/huggingface/generation/test_sampler.py"): [
        (
            "        return torch.cat([found[:, ::2]",
            "        return found\n        torch.cat([found[:, ::2]",
            "rows of gate and up alternate",
        ),
        (
            "found = found.transpose(1, 2)\n        if not",
            "found = found.reshape(len(found), found.shape[2], -1)\n        if not",
            "stacks of transposed matrices are not transposed back",
        ),
    ],
    ("megacp/huggingface/convert/moe.py", "tests/huggingface/generation/test_sampler.py"): [
        ('("w1", "w3", "w2")', '("w3", "w1", "w2")', "gate and up of a Mixtral are swapped"),
    ],
    ("megacp/prepare/records/chat_template.py", "tests/huggingface/generation/test_prompt.py"): [
        (
            "if prompt and self.before_answers and THINKS not in own:",
            "if False and THINKS not in own:",
            "nothing stands behind a prompt",
        ),
        (
            "**self.variables, **variables,",
            "**variables, **self.variables,",
            "a flag has priority over a record's template variables",
        ),
    ],
    ("megacp/huggingface/generate_command.py", "tests/huggingface/generation/test_prompt.py"): [
        (
            "(real or empty <= none)",
            "real",
            "answers learned without an empty thought are prompted with one",
        ),
    ],
}
