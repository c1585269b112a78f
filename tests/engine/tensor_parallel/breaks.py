"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    (
        "megacp/engine/layers/table.py",
        "tests/engine/tensor_parallel tests/huggingface/convert/test_families.py",
    ): [
        (
            ' cut: Cut = "rows" if self.cut == "rows" else "whole"',
            ' cut: Cut = "rows"',
            "a bias behind columns is cut",
        ),
        (
            '"columns" if self.cut == "columns"',
            '"columns" if self.cut == "rows"',
            "the other side of A is cut",
        ),
        (
            'self.std,\n            treated="matrix",',
            'self.std,\n            treated="vector",',
            "a weight is stepped as a vector",
        ),
    ],
    (
        "megacp/engine/tensor_parallel/parameters.py",
        "tests/engine/tensor_parallel tests/engine/models/test_language.py",
    ): [
        (
            "options.sequence_parallel if",
            "0 * options.sequence_parallel if",
            "norms are not summed",
        ),
        ("counted=tp.rank == 0", "counted=True", "replicas count several times in the norm"),
        (
            "offsets[dim] = tp.rank * shape[dim]",
            "offsets[dim] = 0",
            "all ranks save the first rows",
        ),
    ],
    ("megacp/engine/tensor_parallel/parameters.py", "tests/engine/tensor_parallel/test_types.py"): [
        ("is None else partial_over_tp", "is None else False", "norms of heads are not summed"),
        (
            'if first.cut != "whole" or first',
            "if first",
            "the norm sees what is cut on one tp rank",
        ),
    ],
    (
        "megacp/engine/tensor_parallel/linear.py",
        "tests/engine/tensor_parallel tests/engine/models/test_language.py",
    ): [
        (
            "y = reduce_from(product(",
            "y = (lambda y, tp: y)(product(",
            "a row linear without its sum",
        ),
        (
            "copy_to(x, options.tp), weight",
            "x, weight",
            "a column linear's input gradient is not summed",
        ),
        (
            "squares / (x.shape[-1] * axis.size)",
            "squares / x.shape[-1]",
            "a norm over columns divides by its own",
        ),
    ],
    ("megacp/engine/tensor_parallel/linear.py", "tests/engine/tensor_parallel/test_types.py"): [
        (
            "if gathers and dx is not None",
            "if False and dx is not None",
            "a gathered input's gradient stays partial",
        ),
        (
            "copy_to(x, options.tp)",
            "copy_to(copy_to(x, options.tp), options.tp)",
            "the input gradient is summed twice",
        ),
        (
            "product(x, self.weight, options.weight_gradients), options.tp)",
            "reduce_from(product(x, self.weight, options.weight_gradients), options.tp), options.tp)",
            "a row linear is summed twice",
        ),
    ],
    ("megacp/engine/tensor_parallel/lora.py", "tests/engine/tensor_parallel/test_types.py"): [
        ("else copy_to(u, self.tp)", "else u", "the gradient of a pair is not summed"),
    ],
    ("megacp/engine/tensor_parallel/vocabulary.py", "tests/engine/tensor_parallel/test_types.py"): [
        (
            "else collectives.all_reduce)(",
            "else lambda x, axis: x)(",
            "the gradient of the head's input is not summed",
        ),
        (
            "reduce_scatter_to(x, tp) if",
            "reduce_scatter_to(reduce_from(x, tp), tp) if",
            "rows are summed twice",
        ),
        (
            "shared = collectives.all_gather(local_terms, axis)",
            "shared = local_terms",
            "the loss is over the columns of one rank",
        ),
    ],
    ("megacp/distributed/differentiable.py", "tests/engine/tensor_parallel/test_types.py"): [
        (
            ".all_gather, collectives.reduce_scatter",
            ".all_gather, slice_of",
            "the gradient of a gather is not summed",
        ),
    ],
    ("megacp/distributed/collectives.py", "tests/engine/tensor_parallel/test_types.py"): [
        ("x = x.contiguous().clone()", "x = x.contiguous()", "what is reduced is overwritten"),
    ],
    ("megacp/distributed/grid.py", "tests/engine/tensor_parallel/test_types.py"): [
        (
            'return self.axes["tp",]',
            'return self.axes["cp",]',
            "tensor-parallel messages go over cp",
        ),
    ],
    (
        "megacp/engine/tensor_parallel/weight_gradients.py",
        "tests/engine/tensor_parallel tests/engine/pipeline_parallel",
    ): [
        (
            "add_(grad.t() @ x)",
            "copy_(grad.t() @ x)",
            "a fused gradient overwrites that of the microbatch before",
        ),
        ("last and not uses", "not uses", "buckets hear of gradients that are not final"),
    ],
    ("megacp/engine/tensor_parallel/vocabulary.py", "tests/engine/tensor_parallel"): [
        (
            "(column == local[:, None])",
            "(column == local[:, None].clamp(min=0))",
            "on CUDA labels of other tp ranks pull at column 0",
        ),
        ("logits[:, table.true_rows :] = 0.0", "pass", "padded rows get a gradient"),
        ("(-scale).masked_fill(elsewhere, 0.0)", "(-scale)", "every rank subtracts the label"),
        (
            "shared[:, 1].sum(0)",
            "shared[:, 1].amax(0)",
            "the target logit is the highest of the ranks",
        ),
        (").sum() / denominator", ").mean() / denominator", "the loss is a mean of a rank"),
        ("None if dx is None else dx.mul_(grad)", "dx", "the loss is not scaled in backward"),
        (
            "shape, weight, wide if tokens > step else None",
            "shape, weight, None",
            "chunks are summed in bfloat16",
        ),
        (
            "x = x.masked_fill(elsewhere[:, None], 0.0)",
            "x = x",
            "tokens of other ranks are embedded as row 0",
        ),
        ("(local >= self.true_rows)", "(local > self.true_rows)", "one row too many is looked up"),
    ],
    ("megacp/engine/tensor_parallel/lora.py", "tests/engine/tensor_parallel"): [
        (
            "self.dropped(x, whole=True, first=self.first)",
            "self.dropped(x, whole=True)",
            "tp ranks share dropout columns",
        ),
        ("else copy_to(u, self.tp)", "else u", "A's gradient is of this rank's heads"),
        (
            "F.linear(u, self.ups[0]), alpha=self.scale)",
            "F.linear(u, self.ups[0]))",
            "alpha / rank is left out",
        ),
        (
            "next(ups)), alpha=size.scale)",
            "next(ups)))",
            "alpha / rank is left out of what is cut by rows",
        ),
    ],
}
