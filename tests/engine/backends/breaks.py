"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/engine/backends/support.py", "tests/engine/backends/test_support.py"): [
        ("m.head_dim > WIDEST_HEAD", "False", "heads of 256 get wrong gradients on CUDA"),
    ],
    ("megacp/training/start/launch.py", "tests/engine/backends/test_support.py"): [
        (
            '    if count == 0:\n        return "cpu"',
            '    if True:\n        return "cpu" if count == 0 else "cuda"',
            "each rank compiles with all cores",
        ),
    ],
    (
        "megacp/attention/ops/cudnn.py",
        "tests/engine/backends/test_transformer_engine_attention.py",
    ): [
        ("heads.dim > WIDEST_HEAD", "False", "cuDNN's kernel gives heads of 256 wrong gradients"),
        ("area != table.area", "False", "image spans are causal to cuDNN's kernel"),
        ("table.reach.chunk or", "", "chunks are no part of cuDNN's mask"),
        (
            "            if partial.untouched:",
            "            if True:",
            "the last part of a row is its result",
        ),
        (
            "saved.lse[rows], saved",
            "saved.lse[rows] * 0, saved",
            "a part's backward knows nothing of the others",
        ),
        (
            "total.index_add_(0, where",
            "total.index_copy_(0, where",
            "gradients of one call replace another's",
        ),
        (
            "np.where(follows, np.roll(seen[steps], 1), 0)",
            "0",
            "a step has the keys of the one before it again",
        ),
        ("    whole = x.new_zeros(", "    whole = x.new_ones(", "padding attends to something"),
        (
            "                partial.out[rows] = out_rows",
            "                pass",
            "scattered rows are lost",
        ),
    ],
    (
        "megacp/attention/ops/cudnn.py",
        "tests/engine/backends/test_selector.py tests/engine/backends/test_transformer_engine_calls.py",
    ): [
        ("< LEAST_RELEASE", ">= LEAST_RELEASE", "the newest release is refused"),
        ('requires_grad": False', 'requires_grad": True', "the selector is asked about a bias"),
        (")[2]\n", ")[0]\n", "the selector is asked about flash attention"),
        (
            'startswith("Disabling Fused',
            'startswith("Disabling Flash',
            "a refusal without its words",
        ),
    ],
    (
        "megacp/engine/models/block.py",
        "tests/engine/backends/test_transformer_engine_training.py",
    ): [
        (
            "self.precision()",
            "contextlib.nullcontext()",
            "a block is computed again in 16 bits",
        ),
    ],
    (
        "megacp/engine/backends/transformer_engine.py",
        "tests/engine/backends/test_selector.py tests/engine/backends/test_transformer_engine_calls.py",
    ): [
        ('_P2P_COMM": "1"', '_P2P_COMM": "0"', "the ring makes a communicator for each pair"),
        (
            "    if deterministic:",
            "    if False:",
            "a row of one document is taken for the worst case",
        ),
    ],
    ("megacp/attention/context_parallel/transports.py", "tests/engine/backends/test_thd.py"): [
        (
            'one_group="a2a", groups_of_one="p2p"',
            'one_group="p2p", groups_of_one="a2a"',
            "Transformer Engine swaps heads where it should send K/V",
        ),
    ],
}
