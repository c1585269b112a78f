"""Breaks the code in more than 350 places, one at a time, and says which of them the fast tests do not see.

`make mutants` takes half an hour on two cores. `python tests/mutants.py ring mask` takes the breaks whose file or
sentence holds one of these words. Each is made in a copy of the tree, whose tests are first run unbroken. The exit
status is 1 when fewer than 97 % die.
"""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FAST = "not slow and not faults and not gpu"
SECONDS = 240
LEAST = 0.97

POINTWISE = "tests/attention/ops/test_pointwise.py"
ATTENTION = "tests/attention/context_parallel/test_attention.py tests/attention/context_parallel/test_layout.py"
LAYOUT = "tests/attention/context_parallel/test_layout.py"
TP = "tests/engine/tensor_parallel"
TYPES = "tests/engine/tensor_parallel/test_types.py"
PP = "tests/engine/pipeline_parallel"
DP = "tests/engine/data_parallel tests/engine/optim"
GRID = "tests/distributed/test_grid.py tests/distributed/test_collectives.py tests/distributed/test_collectives.py"
MODEL = "tests/engine/models/test_language.py"
GOLDEN = "tests/training/test_golden_gradients.py"
STATES = "tests/attention/context_parallel/test_states.py"
IMAGES = "tests/training/data/test_images.py"
ENGINE = "tests/engine/backends/test_transformer_engine_training.py"
SELECTOR = "tests/engine/backends/test_selector.py tests/engine/backends/test_transformer_engine_calls.py"

EXPERTS = "tests/engine/expert_parallel"
BY_HAND = "tests/engine/layers/test_by_hand.py"
CLUSTER, TIMES = "tests/plan/test_cluster.py", "tests/plan/test_times.py"

TABLE: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("engine/backends/support.py", "tests/engine/backends/test_support.py"): [
        ("m.head_dim > WIDEST_HEAD", "False", "heads of 256 get wrong gradients on CUDA"),
    ],
    ("engine/backends/select.py", "tests/tools/test_check_parity.py"): [
        ("        if no_compiler:", "        if False:", "an old torch fails in its first backward"),
    ],
    ("training/start/launch.py", "tests/engine/backends/test_support.py"): [
        (
            "    if count:\n        set_defaults",
            "    if False:\n        set_defaults",
            "each rank compiles with all cores",
        ),
    ],
    ("plan/command.py", "tests/plan/test_here.py"): [
        ("own.output is not None and fits", "own.output is not None", "a layout that does not fit is started"),
    ],
    ("plan/hardware.py", "tests/plan/test_here.py"): [
        ("memory=gib or row.memory", "memory=row.memory", "an A100 of 40 GB is planned as one of 80"),
    ],
    ("plan/resumed.py", "tests/plan/test_here.py"): [
        ("    if manifest.world_size != world_size:", "    if True:", "a resumed run gets another layout"),
    ],
    ("plan/answer.py", "tests/plan/test_here.py"): [
        ('given | {"dtype"} if self.keeps_dtype', "given if self.keeps_dtype", "a plan makes a run one of bfloat16"),
    ],
    ("engine/backends/recurrent.py", STATES): [
        ("keep_in_heap(STATE_TEMPORARIES)", "pass", "the pages of a rule's temporaries are cleared each time"),
    ],
    ("training/start/launch.py", "tests/distributed/test_large_blocks.py"): [
        ("    torch.set_flush_denormal(True)\n", "", "states that have decayed take ten times as long"),
    ],
    ("attention/ops/device.py", "tests/attention/ops/test_kernels.py"): [
        ("if not torch.is_grad_enabled():  #", "if False:  #", "offload changes the bits of a compiled chain"),
    ],
    ("engine/checks.py", f"{EXPERTS}/test_layer.py tests/engine/config/test_cli.py"): [
        ("m.moe_router_topk == 1 and not m", "not m", "routers that learn are refused"),
        ("m.moe_router_topk == 1 and not m.moe_router_pre_softmax", "False", "a router that cannot learn is trained"),
        (
            'or "text" in config.frozen_parts:\n        return\n    told',
            ":\n        return\n    told",
            "a frozen router is refused too",
        ),
        ("elif m.num_experts == 1 and", "elif False and", "one expert has a router without a gradient"),
        ("    if best > groups:", "    if False:", "more groups may be chosen than there are"),
    ],
    ("engine/expert_parallel/router.py", f"{EXPERTS}/test_router.py"): [
        ("torch.where(are_equal, first, torch", "torch.where(~are_equal, first, torch", "equal rows have other scores"),
        ("    bits ^= bits >> 32", "    bits >>= 32", "rows are taken for equal by half of their bits"),
        ("positive = weight + 0.0", "positive = weight.clone()", "a row with -0.0 is not the one with 0.0"),
        ("    if scores.dtype == torch.float64:", "    if False:", "rounding decides between nearly equal scores"),
        ("gaps > NOISE * largest", "gaps > 1e6 * NOISE * largest", "clearly different scores are taken for equal"),
        (".masked_fill(scores.isinf(), 0.0)", "", "a closed group makes all scores equal"),
    ],
    ("engine/expert_parallel/layer.py", f"{EXPERTS}/test_router.py"): [
        ("products.index_select(1, first_of_equals(self.router))", "products", "equal rows have other scores"),
        (
            "            scores = scores + self.router_bias\n        choice",
            "            pass\n        choice",
            "biases do not choose",
        ),
    ],
    ("engine/expert_parallel/router.py", EXPERTS): [
        (
            "scores.argsort(dim=-1, descending=True, stable=True)[:, :count].sort",
            "scores.topk(count).indices.sort",
            "equal scores of experts have no order",
        ),
        ("    wide = accumulation_dtype(x.dtype)", "    wide = x.dtype", "scores of experts are rounded to bf16"),
    ],
    ("engine/expert_parallel/router.py", MODEL): [
        ("scores.gather(1, chosen).softmax(-1)", "of_all(scores, chosen)", "chosen experts have less than all weight"),
    ],
    ("engine/expert_parallel/route.py", EXPERTS): [
        ("self.ends.clamp(place.start, place.stop)", "self.ends.clamp(0, place.stop)", "a tile has rows of others"),
        ("place.start, place.stop)", "place.start, place.stop - 1)", "the last row of a tile is behind all experts"),
        ("plan.metadata.leave[held] > 0", "plan.metadata.leave[held] >= 0", "padding is routed"),
        ("plan.local.reshape(tp.size, -1)[tp.rank]", "plan.local", "tp ranks route tokens of each other"),
        ("return all_to_all(rows.", "return self.axis.size * all_to_all(rows.", "gradients of experts times ep"),
        ("return arrived.argsort(stable=True)", "return torch.arange(len(arrived))", "rows stay by their source"),
    ],
    ("engine/expert_parallel/exchange.py", EXPERTS): [
        ("rows.shape[1])  #", "-1)  #", "a rank without tokens has no shape"),
    ],
    ("engine/expert_parallel/exchange.py", MODEL): [
        ("range(1, slots.shape[1])", "range(1, 1)", "one expert of a token is heard"),
        ("route.collect(column.squeeze(1))", "0 * route.collect(column.squeeze(1))", "the router learns nothing"),
    ],
    ("engine/expert_parallel/experts.py", EXPERTS): [
        ("grouped_mm(grad.t(), x", "grouped_mm(2 * grad.t(), x", "one kernel doubles the gradients of experts"),
        ("grouped_mm(x, matrices,", "grouped_mm(x, matrices.flip(0),", "one kernel takes another expert's matrix"),
        ("alpha=size.scale", "alpha=1", "pairs of experts have a weight of 1"),
        ("self.low, groups)", "self.low.detach(), groups)", "pairs of experts learn one matrix of two"),
        ("zip(*downs, strict", "zip(*(a[::-1] for a in downs), strict", "pairs stand beside other experts"),
        ("None if x is None else _w", "None if x is None or not len(x) else _w", "a rank without rows has no gradient"),
    ],
    ("engine/expert_parallel/layer.py", "tests/plan/test_memory.py"): [
        (
            "backend.tiled(Experts(prefix, here, config, backend.options))",
            "Experts(prefix, here, config, backend.options)",
            "experts run over all rows at once",
        ),
    ],
    ("engine/layers/moe.py", "tests/plan/test_costs.py"): [
        ("min(config.parallel.moe_planned_imbalance, most_load(config))", "most_load(config)", "the worst is planned"),
        ("(4 + full) * row", "(2 + full) * row", "the plan forgets what backward sends of rows"),
    ],
    ("engine/models/costs.py", "tests/plan/test_costs.py"): [
        ("cost + factor * count", "cost + 0 * count", "stages are cut as if loads were even"),
    ],
    ("engine/layers/table.py", BY_HAND): [
        (
            '"zeros", decays=False, reduced_over=over)',
            '"zeros", decays=False)',
            "biases of experts are summed over dp x cp",
        ),
        ('(self.outputs,), cut, "zeros"', '(self.outputs,), cut, "ones"', "biases of linears begin at 1"),
        ("1 / math.sqrt(3 * self.inputs)", "1 / math.sqrt(self.inputs)", "A is not drawn as peft draws it"),
        ("std / math.sqrt(2 * (layers", "std / math.sqrt((layers", "outputs are drawn larger than GPT-2's"),
        (
            '"zeros" if model.apply_layernorm_1p else "ones"',
            '"ones" if model.apply_layernorm_1p else "ones"',
            "norms around 1 begin at 2",
        ),
    ],
    ("engine/layers/stack.py", BY_HAND): [
        ("routed = routed[::-1]", "routed = routed", "the last of every N layers has experts"),
        ("attend = (True,)", "attend = (False,)", "every layer has a state"),
        ("not still[i % len(still)]", "not still[(i + 1) % len(still)]", "other layers are without rotary embedding"),
        ("attend[i % len(attend)] else", "attend[(i + 1) % len(attend)] else", "other layers have a state"),
    ],
    ("engine/layers/mamba2.py", BY_HAND): [
        ('"dt_bias", heads, "rows", "step"', '"dt_bias", heads, "rows", "log_rate"', "steps are drawn as rates are"),
        (
            'Tensor("D", heads, "rows", "ones"',
            'Tensor("D", heads, "rows", "zeros"',
            "nothing passes a state by at first",
        ),
    ],
    ("engine/layers/vision.py", BY_HAND): [
        (
            "last_std = output_std(model, v.vision_num_layers)",
            "last_std = output_std(model)",
            "towers are drawn by the depth of the text",
        ),
    ],
    ("engine/layers/gated_delta.py", BY_HAND): [
        ('"A_log", heads, "rows", "log_rate"', '"A_log", heads, "rows", "step"', "rates are drawn as steps are"),
        ("(3 * taps) ** -0.5", "taps**-0.5", "taps are not drawn as torch's Conv1d draws them"),
    ],
    ("engine/layers/attention.py", BY_HAND): [
        (
            'heads, "rows", std=model.init_method_std, decays=False',
            'heads, "rows", "zeros", decays=False',
            "sinks begin at 0",
        ),
    ],
    ("engine/models/init.py", BY_HAND): [
        ("10.0 ** (2 * torch.rand", "10.0 ** (3 * torch.rand", "steps of states are up to 1"),
        ("0.01 + 15.99 *", "1.0 + 15.0 *", "no state decays slowly"),
        (" - 1.0) * math.sqrt(3.0)", " - 1.0)", "even draws have a third of the variance"),
    ],
    ("engine/expert_parallel/layer.py", f"{EXPERTS}/test_router.py {EXPERTS}/test_layer.py"): [
        ("if self.groups[0] > 1:", "if self.groups[0] > 2:", "two groups of experts are one"),
    ],
    ("engine/expert_parallel/exchange.py", f"{EXPERTS}/test_layer.py"): [
        ("slots[:, 0].to(accumulation_dtype(slots.dtype))", "slots[:, 0]", "outputs of experts are summed in bf16"),
    ],
    ("engine/layers/table.py", EXPERTS): [
        (
            '"uniform", down_std, treated="matrix", reduced_over=over)',
            '"uniform", down_std, treated="matrix")',
            "pairs of experts are summed over dp x cp",
        ),
    ],
    ("engine/expert_parallel/experts.py", MODEL): [
        ("groups, weights)\n", "groups)\n", "the bias of down is not weighed"),
        (
            "_weights(weighed, weighed.new_ones",
            "_weights(grad, weighed.new_ones",
            "a bias learns as if it were not weighed",
        ),
        ("d_weights = (grad", "d_weights = 0 * (grad", "a weight learns nothing of the bias it weighs"),
        ("(active.to(weights.dtype) * weights)", "active", "experts are not weighed"),
        ("(wide * weights).to(grad.dtype)", "grad", "experts learn as if they were not weighed"),
        ("(wide * active.detach())", "(wide * given[:, :1])", "the gradient of a weight is not that of what it weighs"),
    ],
    ("engine/expert_parallel/layer.py", MODEL): [
        (
            "        scores = with_terms(scores",
            "        scores = scores if self.balance.correction is None else scores + self.balance.correction\n"
            "        scores = with_terms(scores",
            "the correction is in the weight",
        ),
        ("choice = choice + self.balance.correction", "choice = choice + 0", "the correction corrects nothing"),
        (" * self.factor, route)", ", route)", "weights of experts are not scaled"),
        ("else made + of_all", "else made + 0 * of_all", "a shared expert is not heard"),
        ("sigmoid_gate(made, product(", "sigmoid_gate(made, product(0 * ", "a shared expert is half heard by all"),
    ],
    ("engine/layers/moe.py", "tests/plan/test_memory.py"): [
        ("rows * columns + opened", "rows * columns", "the plan does not know what a gate keeps"),
    ],
    ("engine/expert_parallel/layer.py", EXPERTS): [
        (
            "[shared_gate_tensor(config)], backend.options)",
            '[shared_gate_tensor(config)], backend.tower("vision").options)',
            "the gradient of a shared expert's gate is not summed over tp",
        ),
        ("routes.by_layer.get(self.layer)", "routes.by_layer.get(-1)", "a layer computed again may choose others"),
        (
            "[router_tensor(config)], backend.options)",
            '[router_tensor(config)], __import__("dataclasses").replace(backend.options, sequence_parallel=False))',
            "the gradient of the router is not summed over tp",
        ),
        ("range(self.axis.rank * own,", "range(0 * own,", "all ep ranks begin with the first experts"),
    ],
    ("engine/data_parallel/full_shard.py", EXPERTS): [
        ("axis = self.axes[spec.reduced_over]", "axis = self.axes[DATA]", "parts of experts are named as over dp x cp"),
    ],
    ("engine/data_parallel/fully_shard.py", EXPERTS): [
        ("_mesh(axes[parameter].group", "_mesh(others.group", "experts are gathered over dp x cp"),
    ],
    ("engine/expert_parallel/balance.py", EXPERTS): [
        ("for axis in self.axes:", "for axis in self.axes[:1]:", "documents are counted on one rank of their row"),
        ("for axis in self.axes:", "for axis in self.axes[1:]:", "documents are counted on one tp rank"),
        ("(document.unsqueeze(1) * experts", "(0 * document.unsqueeze(1)", "documents of a row are one"),
        ("self.topk * routes.tokens)", "self.topk * len(chosen))", "the term of documents times microbatches"),
        ("self.z / routes.tokens)", "self.z / len(chosen))", "the z-loss times ranks and microbatches"),
        ("dtype=torch.int64, device=device)", "dtype=torch.bfloat16, device=device)", "tokens are counted in bf16"),
        ("dtype=torch.float32, device=device)", "dtype=torch.bfloat16, device=device)", "corrections are rounded"),
        (", self.grid.ep), self.grid.edp)", ", self.grid.ep), self.grid.ep)", "corrections are not summed over tp"),
        ("all_reduce(counts, self.grid.ep)", "counts", "corrections are those of an ep rank"),
        ("                layer.counts.zero_()", "                pass", "counts of a step begin with the last one's"),
        ("table[:, :2].sum(0)", "table[0, :2]", "terms of the first rank are logged"),
    ],
    ("engine/expert_parallel/balance.py", MODEL): [
        ("return (grad + ", "return (0 * grad + ", "terms of balance replace the loss"),
        ("torch.autograd.grad(total, given)[0]", "0 * given.detach()", "terms of balance have no gradient"),
        ("(counts.sum() - len(counts) * counts)", "(len(counts) * counts - counts.sum())", "busy experts get more"),
    ],
    ("engine/expert_parallel/router.py", "tests/engine/expert_parallel/test_balance.py"): [
        ("1 / (1 + torch.exp(-scores))", "scores.sigmoid()", "equal sigmoids are chosen by where they stand"),
        (".topk(2, sorted=False).values.sum(-1)", ".amax(-1)", "a group counts by its best expert"),
    ],
    ("engine/expert_parallel/layer.py", "tests/engine/expert_parallel/test_balance.py"): [
        (
            "            if routes.tokens > 0:\n    ",
            "        if routes.tokens > 0:\n",
            "a layer that is computed again counts its tokens twice",
        ),
    ],
    ("engine/step/step.py", "tests/engine/expert_parallel/test_balance.py"): [
        (
            "self._pipeline(rows, 0, denominator, False)()",
            "self._pipeline(rows, 0, denominator, False, 9)()",
            "evaluation is counted",
        ),
        ("            self.balance.correct()", "        self.balance.correct()", "a skipped step moves corrections"),
        ("tokens=tokens) for", "tokens=tokens * (chunk is self.chunks[0])) for", "later virtual stages have no terms"),
    ],
    ("training/loop/state.py", "tests/engine/expert_parallel/test_balance.py"): [
        ("parameters_to_load(), *model.balance.slices()]", "parameters_to_load()]", "corrections begin at 0 again"),
    ],
    ("engine/models/init.py", "tests/training/test_full_sharding.py"): [
        (".to(dtype)", "", "a 16-bit model's masters begin with other bits under full sharding"),
    ],
    ("training/loop/state.py", "tests/huggingface/convert/test_start.py"): [
        ("else lambda name: False", "else lambda name: True", "weights are drawn before a checkpoint is read"),
        ("lambda name: weights is None or", "lambda name: True or", "weights are drawn before --load-hf is read"),
    ],
    ("training/loop/state.py", "tests/engine/expert_parallel/test_layer.py"): [
        ("boxes_to_load([], model.optimizer.state_slices())", "[]", "moments of a resumed run begin at 0 again"),
    ],
    ("engine/models/build.py", EXPERTS): [
        (
            "any(axis.size > instances for axis in reduced.values())",
            "reduced[DATA].size > instances",
            "experts stay whole where a rank shares nothing else",
        ),
        ("{EXPERTS: grid.edp}", '{EXPERTS: grid.over("dp", "cp")}', "gradients of experts are summed over dp x cp"),
    ],
    ("engine/tensor_parallel/parameters.py", EXPERTS): [
        (" or first.reduced_over == EXPERTS", "", "experts are counted on one tp rank"),
    ],
    ("distributed/shape.py", EXPERTS): [
        ("first + place % self.ep,", "first,", "all ranks hold the experts of the first"),
        ("place // self.ep * self.ep", "place // self.tp * self.tp", "experts are shared by tp"),
    ],
    ("distributed/grid.py", EXPERTS): [
        ("if one.global_ranks == members", "if one.global_ranks == members[:0]", "experts make groups that there are"),
        ("name=name, traffic=Counter()", "name=name", "messages of experts are counted as of another axis"),
    ],
    ("attention/ops/once.py", "tests/attention/ops/test_mask.py"): [
        ("key = (kept, more)", "key = (kept.__name__, more)", "functions of one name share what they derive"),
    ],
    ("attention/ops/mask.py", "tests/attention/ops/test_mask.py"): [
        ("& (q.order[i] < k.leave[j])", "", "branches and documents see each other"),
        ("np.minimum(keys, own + (length == 1))", "np.minimum(keys, own)", "a query alone does not see itself"),
        ("found[group] = np.arange(len(values))", "found[group] = np.arange(len(values)) - 1", "parts end too early"),
        ('+ runs.length, side="left")', '+ runs.length, side="right")', "runs are cut at their end"),
        ("same_span = (q.span[i] != 0) & ", "same_span = ", "text of no span sees the future"),
        ("index - self.row_start[row] + 1,", "index - self.row_start[row],", "keys of a causal query are one short"),
        ("self.row_stop[row] - index", "self.row_stop[row] - index - 1", "keys of a window's query are one short"),
        ("n * (n + 1) // 2)", "n * (n - 1) // 2)", "the area of a triangle without its diagonal"),
        ("steps, self.k_stop, -1)", "steps, self.k_stop - 1, -1)", "the last key of a tile is not needed"),
        ("change[1:] = meta.order[1:] != meta.order[:-1] + 1", "change[1:] = False", "runs join over gaps"),
        ("(np.flatnonzero(runs.leave > 0))", "(np.flatnonzero(runs.leave >= 0))", "padding is a document"),
        ("& (kind[:-1] == FULL) & (start[1:]", "& (start[1:]", "a triangle joins a rectangle"),
        ("& (count[1:] == count[:-1])", "", "rows that see more join"),
        ("edge = back - (reach.window - 1)", "edge = back - reach.window", "a window is a token longer"),
        ("[first, first + k.length]", "[first]", "queries are not cut where keys of their window end"),
        (" & (length > 1) & (high > 0)", " & (length > 1)", "a window sees a branch beside it"),
        ("first = back - q.depth[i] % reach.chunk", "first = back - reach.chunk", "chunks are windows"),
        ("(reach.chunk, 0), (", "(", "queries are not cut where a chunk ends"),
        ("(reach.chunk if part else 0, shift)", "(0, shift)", "queries are not cut where a chunk's window begins"),
        ("square &= edge >= first", "square &= edge >= 0", "a window's triangle reaches into the chunk before"),
        ("real) - real - left)", "real) - real)", "a branch is as deep as the branches before it are long"),
    ],
    ("attention/ops/tile_kernels.py", "tests/attention/ops/test_kernels.py tests/attention/ops/test_blocks.py"): [
        ("keys.start + begin),), FULL", "keys.start + end),), FULL", "pairs of a cut triangle are computed twice"),
        ("np.tri(*pairs.shape) > 0", "np.tri(*pairs.shape, 1) > 0", "a masked call sees one key ahead"),
        ("if tile.kind == CAUSAL else causal.T", "if tile.kind == CAUSAL else causal", "a masked window is causal"),
        ("if self.kind == WINDOW else tensors", "if False else tensors", "a window's triangle is a causal one"),
        ("if slope is None else dscores * slope", "", "a cap has the gradient of a straight line"),
        ("dq[rows] += found[0]", "dq[rows] = found[0]", "the query gradient of an earlier call is lost"),
        ("        x[part] += piece", "        x[part] = piece", "the key gradient of an earlier call is lost"),
        ("scores - lse.unsqueeze(-1))\n            q,", "scores)\n            q,", "backward without the merged lse"),
        ("delta = (out * dout).sum(-1)", "delta = 0 * (out * dout).sum(-1)", "softmax backward without its row sum"),
        ("partial.untouched and call.first:", "partial.untouched:", "a second call of the same queries overwrites"),
    ],
    ("attention/ops/cudnn.py", "tests/engine/backends/test_transformer_engine_attention.py"): [
        ("heads.dim > WIDEST_HEAD", "False", "cuDNN's kernel gives heads of 256 wrong gradients"),
        ("area != table.area", "False", "image spans are causal to cuDNN's kernel"),
        ("table.reach.chunk or", "", "chunks are no part of cuDNN's mask"),
        ("            if partial.untouched:", "            if True:", "the last part of a row is its result"),
        ("saved.lse[rows], saved", "saved.lse[rows] * 0, saved", "a part's backward knows nothing of the others"),
        ("total.index_add_(0, where", "total.index_copy_(0, where", "gradients of one call replace another's"),
        ("np.where(follows, np.roll(seen[steps], 1), 0)", "0", "a step has the keys of the one before it again"),
        ("    whole = x.new_zeros(", "    whole = x.new_ones(", "padding attends to something"),
        (
            "                partial.out[rows], partial.lse[rows] = mine",
            "                pass",
            "scattered rows are lost",
        ),
    ],
    ("attention/ops/cudnn.py", SELECTOR): [
        ("< LEAST_RELEASE", ">= LEAST_RELEASE", "the newest release is refused"),
        ('requires_grad": False', 'requires_grad": True', "the selector is asked about a bias"),
        (")[2]\n", ")[0]\n", "the selector is asked about flash attention"),
        ('startswith("Disabling Fused', 'startswith("Disabling Flash', "a refusal without its words"),
    ],
    ("attention/ops/flex.py", "tests/attention/ops/test_flex.py tests/attention/ops/test_blocks.py"): [
        ("narrow and width > 128 else {}", "False else {}", "the backward of wide heads spills four times as much"),
        ("(k_order[j] <= q_order[i])", "(k_order[j] < q_order[i])", "a token does not see itself"),
        ("& (q_order[i] < k_leave[j])", "", "branches see each other on a GPU"),
        ("[(q.depth, 0), (k.depth, 0)]", "[(k.depth, 0), (q.depth, 0)]", "depths of queries and keys are exchanged"),
        ("q_depth[i] - k_depth[j] < window", "q_depth[i] - k_depth[j] <= window", "a window is a token longer"),
        ("[(q.depth, 0), (k.depth, 0)]", "[(k.depth, 0), (q.depth, 0)]", "a query has the depth of a key on a GPU"),
        ("np.where(k.span != 0, k.span, _NOBODY)", "k.span", "text of no span sees the future on a GPU"),
        ("np.where(q.leave > 0, q.order, _NOBODY)", "q.order", "padding in a document sees its prefix"),
        ("max(2, *(count.max() for count in counts))", "columns", "block lists are as wide as there are blocks"),
        ("    torch._dynamo.mark_static(x, [1, 3])\n", "", "a second model's heads have no backward on a GPU"),
        ("(lse / math.log(2))", "(lse * 1.0)", "the operator's lse is in units of log 2"),
        ("        lend_scratch(q.device)\n", "", "a recomputation has no memory for TMA descriptors"),
        ("cap * torch.tanh(score / cap)}", "score}", "FlexAttention knows no cap"),
        ("        if self._score:", "        if False:", "the gradient of a part on a GPU is that without a cap"),
    ],
    ("attention/ops/kernel.py", ATTENTION): [
        ("out.mul_(torch.exp(lse - total).unsqueeze(-1))", "out.mul_(1.0)", "a sink takes no weight"),
        ("    lse.copy_(total)\n\n\ndef sinks", "\n\ndef sinks", "backward knows of no sink"),
        ("return -(weights * inner)", "return (weights * inner)", "sinks are pulled the other way"),
    ],
    ("attention/ops/pointwise.py", POINTWISE): [
        (" * (gate <= _LIMIT)", "", "a clamped gate learns"),
        ("(up.abs() <= _LIMIT)", "(up <= _LIMIT)", "a value clamped from below learns"),
        ("addcmul_(wide_x, inward, value=-1)", "addcmul_(wide_x, inward, value=1)", "sign in the norm's backward"),
        ("* scale**3 / x.shape[-1]", "* scale**2 / x.shape[-1]", "power in the norm's backward"),
        ("mul(grad, up, out=for_gate)", "mul(grad, gate, out=for_gate)", "SwiGLU's gate takes the wrong half"),
        ("weight.to(wide.dtype) + 1).to", "weight.to(wide.dtype)).to", "a norm around 0 multiplies by its weight"),
        ("wide_weight + 1 if", "wide_weight if", "backward of a norm around 0 multiplies by its weight"),
        ("cat([d_gate, F.gelu", "cat([d_gate, F.silu", "backward of GELU's gate is that of SiLU"),
        ("/ (1.0 - probability)", "", "dropout does not scale what is kept"),
        ("int(probability * 2**32)", "int((1 - probability) * 2**32)", "dropout keeps what it should drop"),
        ("first, first + columns", "0, columns", "tp ranks repeat each other's dropout"),
    ],
    ("attention/ops/rotary.py", POINTWISE): [
        ("cat([sin * -sign, sin * sign], -1)", "cat([sin * sign, sin * -sign], -1)", "rotation turns the other way"),
        ("(grads[0], cos, sin, -1), None,", "(grads[0], cos, sin, 1), None,", "the gradient is rotated forward"),
        ("angles.cos() * factor", "angles.float().cos() * factor", "angles in float32"),
        ("(positions / wavelength - low) / (high - low)", "(positions / wavelength) / (high - low)", "llama3's blend"),
    ],
    ("attention/context_parallel/transport.py", ATTENTION): [
        ("k, v))\n        return call", "k, v)) and (q, k, v)\n        return call", "a transposed view is misread"),
        ("out, lse, douts", "out, torch.zeros_like(lse), douts", "backward of a block without the merged log-sum-exp"),
    ],
    ("attention/context_parallel/transport.py", "tests/attention/ops/test_flex.py"): [
        ("if sinks is not None:  # they", "if False:  # they", "a row whose keys are all here has no sinks"),
    ],
    ("attention/context_parallel/ring.py", ATTENTION): [
        ("gradient:\n                    dkv", "False:\n                    dkv", "the visiting gradient is dropped"),
        ("home += gradient.wait()", "gradient.wait()", "gradients of other ranks never come home"),
        ("(self.axis.rank - step) % self.axis", "(self.axis.rank + step) % self.axis", "the ring turns the other way"),
        ("if step < last else None", "if step < last - 1 else None", "the last hop is not made"),
        ("else self.axis.size - last", "else 1", "a gradient goes to the next rank where the ring has stopped"),
        ("1 + max(seen, default=0)", "plan.cp", "the ring goes round though nobody looks so far"),
        ("1 + max(seen, default=0)", "max(seen, default=1)", "the ring stops a step early"),
    ],
    ("attention/context_parallel/all_gather.py", ATTENTION): [
        ("row[plan.cp_rank * len(mine)", "row[0 * len(mine)", "own gradients stand at rank 0"),
        ("plan.order[~mine[plan.order]]", "plan.order[mine[plan.order]]", "the keys of others are one's own"),
    ],
    ("attention/context_parallel/a2a.py", ATTENTION): [
        ("out.index_select(0, plan.departure(n, q.device))", "out", "the output goes back in the grouped order"),
        ("sinks.chunk(n)[self.axis.rank]", "sinks.chunk(n)[0]", "all ranks have the sinks of the first heads"),
        ("x.unflatten(1, (n, -1))", "x.unflatten(1, (-1, n)).transpose(1, 2)", "heads are dealt in turns"),
        ("expand(t, groups, copies, d).", "detach().expand(t, groups, copies, d).", "copied K/V get no gradient"),
        ("x.unsqueeze(2).expand(t, groups, copies, d)", "torch.stack([x] * copies, 2)", "copies are summed in bf16"),
    ],
    ("attention/context_parallel/kv_exchange.py", ATTENTION): [
        ("leaving[order] = theirs", "leaving = theirs.clone()", "gradients go back in the row's order"),
        ("dkv.index_add_", "dkv.index_copy_", "a key that several ranks need keeps one gradient"),
        ("plan.tiles(plan.local, keys[order])", "plan.tiles(plan.local, keys)", "arrived keys are out of order"),
    ],
    ("attention/context_parallel/state_plan.py", STATES): [
        ("while path and path[-1][0] <= real[start]", "while False", "a document goes on from the one before it"),
        ("itertools.pairwise([*starts, len(real)]", "zip(starts, [*starts[1:], len(real)], strict=True", "no document"),
        ("| ends_here[tokens[:-1]]", "", "a branch begins where its sibling ends"),
        ("& (owner[tokens] != rank)", "& (owner[tokens] == rank)", "the tokens before a run are not sent"),
    ],
    ("attention/context_parallel/states.py", STATES): [
        ("turned(one[..., :of_turn], behind[crossing.entries[entry].other]) + ", "", "states of far ranks are lost"),
        ("joint[states.own_entries, ..., :width] =", "joint[:0, ..., :width] =", "maps are lost"),
        ("        state[states.own_entries] = torch.stack(came)", "        pass", "states do not cross ranks"),
        ("        after[states.own_exits] = torch.stack(owed)", "        pass", "their gradients do not come home"),
        ("behind[exit_] += turned_back(", "behind[exit_] += 0 * turned_back(", "gradients pass one rank alone"),
        (">= LARGE", "< 0", "all heads of long rows are in memory at once"),
        ("(turn_gradient(", "(0 * turn_gradient(", "A has no gradient"),
        (".flip(1)  # [m", "  # [m", "the taps of a segment's first tokens are in the wrong order"),
    ],
    ("attention/context_parallel/fused_states.py", "tests/attention/context_parallel/test_fused_states.py"): [
        ("joint[1:, ..., :keys] = torch.eye", "joint[:0, ..., :keys] = torch.eye", "maps of a kernel are lost"),
        ("= 1 + depth.get(segments[n].before, -1)", "= 0", "branches of a kernel begin with zeros"),
        ("np.arange(counts.sum()) - first", "np.arange(counts.sum())", "chunks of a kernel are counted over segments"),
        (
            "            if out.grad_fn is not None:",
            "            if False:",
            "autograd's thread has no memory for Triton",
        ),
    ],
    ("engine/models/mamba2.py", MODEL): [
        ("F.silu(z)).unflatten", "z).unflatten", "Mamba-2's gate is no SiLU"),
        ("read + x * self.skip.unsqueeze(-1)", "read", "nothing passes a state by"),
        ("unflatten(-1, (self.groups, -1)).to", "unflatten(-1, (1, -1)).to", "all groups are normed together"),
        ("dt.to(wide) + self.dt_bias.to(wide)", "dt.to(wide)", "steps have no bias"),
    ],
    ("attention/ops/recurrence.py", STATES): [
        ("yield since[:, :, -1:], (b", "yield since[:, :, :1], (b", "a state decays by one token of a chunk alone"),
        (".masked_fill(~past, -torch.inf)", "", "a token reads what later ones write"),
        ("return turn * grad if", "return grad if", "the gradient of a diagonal map passes as it is"),
        ("v * beta, k * beta * since", "v * beta, k * beta", "old states do not decay inside a chunk"),
        ("dx[:-back].addcmul_(wide[back:]", "dx[back:].addcmul_(wide[:-back]", "gradients of taps go forward"),
    ],
    ("engine/layers/table.py", f"{TP} tests/huggingface/convert/test_families.py"): [
        (' cut: Cut = "rows" if self.cut == "rows" else "whole"', ' cut: Cut = "rows"', "a bias behind columns is cut"),
        ('"columns" if self.cut == "columns"', '"columns" if self.cut == "rows"', "the other side of A is cut"),
        ('self.std, treated="matrix"', 'self.std, treated="vector"', "a weight is stepped as a vector"),
    ],
    ("engine/layers/stack.py", f"{MODEL} tests/engine/layers"): [
        ('("", "_output") if both else ("",)', '("",)', "a block has two norms at most"),
        ("0 if open_to_all[i % len(open_to_all)] else model", "model", "all layers have the window"),
    ],
    ("engine/models/delta_net.py", MODEL): [
        ("F.softplus(a.to(wide) + self", "F.softplus(a.to(wide)) + 0 * (self", "the bias of the decay is lost"),
        ("save(self._gated, out, z)", "save(self._gated, out, torch.ones_like(z))", "the output has no gate"),
    ],
    ("engine/models/vision.py", "tests/huggingface/convert/test_exact.py"): [
        ("np.full(len(place), number)", "np.full(len(place), 0)", "images see each other"),
        (".swapaxes(1, 2).reshape(-1)", ".reshape(-1)", "patches stand row by row"),
    ],
    ("attention/ops/rotary.py", "tests/huggingface/convert/test_exact.py"): [
        ("            axes[angle] = axis", "            axes[angle] = 0", "image tokens turn by time alone"),
    ],
    ("attention/context_parallel/plan.py", f"{LAYOUT} {ATTENTION}"): [
        ("_position[self.indices[first :", "indices.reshape(-1)[self.indices[first :", "arrival in another order"),
        ("first = self.cp_rank // size * size", "first = self.cp_rank", "the group of a rank begins at itself"),
        ("self.metadata.take(keys), self.reach)", "self.metadata.take(keys))", "tiles forget how far layers look"),
        ("// size, self.order, self.reach)", "// size, self.order)", "groups of ranks forget how far layers look"),
    ],
    ("attention/context_parallel/layout.py", LAYOUT): [
        ("return rank, 2 * cp - 1 - rank", "return rank, cp + rank", "zigzag is not even"),
        ("missing = -(last - first) % (2 * cp)", "missing = -(last - first) % cp", "documents are filled up to half"),
        ("return math.lcm(self.slices * cp, cp * tp)", "return self.slices * cp", "rows do not divide by tp"),
    ],
    ("attention/context_parallel/balance.py", LAYOUT): [
        ("+ metadata.leave) - 1", "+ metadata.leave)", "a key crosses one cut more than it is seen over"),
        ("metadata.cost_within(reach) * layers", "metadata.cost * layers", "the balance knows no window"),
        ("error <= max(AREA_SLACK", "error >= max(AREA_SLACK", "ranks take stretches of another area"),
    ],
    ("attention/context_parallel/transports.py", "tests/attention/context_parallel/test_layout.py"): [
        ("if needed <= FEW_KEYS:", "if needed > FEW_KEYS:", "auto takes the exchange for dense masks"),
        ("heads % cp == 0 and", "", "auto takes a2a where heads do not divide"),
    ],
    ("engine/rows/shard.py", LAYOUT): [
        ("(mask_metadata(batch), cp, tp)", "(mask_metadata(batch), cp, 1)", "padding forgets tp"),
        ("padded.tokens, padded.labels,", "padded.tokens, np.roll(padded.labels, -1),", "labels are shifted twice"),
    ],
    ("engine/rows/vision.py", "tests/attention/context_parallel/test_vision.py"): [
        ("(cp), stops - starts", "(cp)[::-1], (stops - starts)[::-1]", "features come from the wrong rank"),
        (
            "features.index_select(0, to_device(here, x.device))",
            "features[: len(here)]",
            "a tp slice takes the first features",
        ),
        ("= copy_to(features, tp)\n", "= features\n", "the features' gradient is not summed over tp"),
        ('np.argsort(self.target[mine], kind="stable")', "np.arange(len(mine))", "features leave in their own order"),
    ],
    ("engine/tensor_parallel/parameters.py", f"{TP} {MODEL}"): [
        ("options.sequence_parallel if", "0 * options.sequence_parallel if", "norms are not summed"),
        ("counted=tp.rank == 0", "counted=True", "replicas count several times in the norm"),
        ("offsets[dim] = tp.rank * shape[dim]", "offsets[dim] = 0", "all ranks save the first rows"),
    ],
    ("engine/tensor_parallel/parameters.py", TYPES): [
        ("is None else partial_over_tp", "is None else False", "norms of heads are not summed"),
        ('if first.cut != "whole" or first', "if first", "the norm sees what is cut on one tp rank"),
    ],
    ("engine/tensor_parallel/linear.py", f"{TP} {MODEL}"): [
        ("y = reduce_from(product(", "y = (lambda y, tp: y)(product(", "a row linear without its sum"),
        ("copy_to(x, options.tp), weight", "x, weight", "a column linear's input gradient is not summed"),
        ("squares / (x.shape[-1] * axis.size)", "squares / x.shape[-1]", "a norm over columns divides by its own"),
    ],
    ("engine/tensor_parallel/linear.py", TYPES): [
        ("(dx, ctx.axis) if gathers and", "(dx, ctx.axis) if False and", "a gathered input's gradient stays partial"),
        ("copy_to(x, options.tp)", "copy_to(copy_to(x, options.tp), options.tp)", "the input gradient is summed twice"),
        (
            "product(x, self.weight, options.weight_gradients), options.tp)",
            "reduce_from(product(x, self.weight, options.weight_gradients), options.tp), options.tp)",
            "a row linear is summed twice",
        ),
    ],
    ("engine/tensor_parallel/lora.py", TYPES): [
        ("else copy_to(u, self.tp)", "else u", "the gradient of a pair is not summed"),
    ],
    ("engine/tensor_parallel/vocabulary.py", TYPES): [
        ("else collectives.all_reduce)(", "else lambda x, axis: x)(", "the gradient of the head's input is not summed"),
        ("reduce_scatter_to(x, tp) if", "reduce_scatter_to(reduce_from(x, tp), tp) if", "rows are summed twice"),
        (
            "collectives.all_gather(torch.stack([lse, target])[None], axis)",
            "torch.stack([lse, target])[None]",
            "the loss is over the columns of one rank",
        ),
    ],
    ("distributed/differentiable.py", TYPES): [
        (".all_gather, collectives.reduce_scatter", ".all_gather, slice_of", "the gradient of a gather is not summed"),
    ],
    ("distributed/collectives.py", TYPES): [
        ("x = x.contiguous().clone()", "x = x.contiguous()", "what is reduced is overwritten"),
    ],
    ("distributed/grid.py", TYPES): [
        ('return self.axes["tp",]', 'return self.axes["cp",]', "tensor-parallel messages go over cp"),
    ],
    ("engine/tensor_parallel/weight_gradients.py", f"{TP} {PP}"): [
        ("add_(grad.t() @ x)", "copy_(grad.t() @ x)", "a fused gradient overwrites that of the microbatch before"),
        ("last and not uses", "not uses", "buckets hear of gradients that are not final"),
    ],
    ("engine/tensor_parallel/vocabulary.py", TP): [
        (
            "(column == local[:, None])",
            "(column == local[:, None].clamp(min=0))",
            "on CUDA labels of other tp ranks pull at column 0",
        ),
        ("logits[:, table.true_rows :] = 0.0", "pass", "padded rows get a gradient"),
        ("(-scale).masked_fill(elsewhere, 0.0)", "(-scale)", "every rank subtracts the label"),
        ("shared[:, 1].sum(0)", "shared[:, 1].amax(0)", "the target logit is the highest of the ranks"),
        (").sum() / denominator", ").mean() / denominator", "the loss is a mean of a rank"),
        ("None if dx is None else dx.mul_(grad)", "dx", "the loss is not scaled in backward"),
        ("shape, weight, wide if tokens > step else None", "shape, weight, None", "chunks are summed in bfloat16"),
        ("x = x.masked_fill(elsewhere[:, None], 0.0)", "x = x", "row 0 stands in for tokens of other ranks"),
        ("(local >= self.true_rows)", "(local > self.true_rows)", "one row too many is looked up"),
    ],
    ("engine/tensor_parallel/lora.py", TP): [
        ("x, True, self.first), self.down)", "x, True), self.down)", "tp ranks share dropout columns"),
        ("else copy_to(u, self.tp)", "else u", "A's gradient is of this rank's heads"),
        ("F.linear(u, self.ups[0]), alpha=self.scale)", "F.linear(u, self.ups[0]))", "alpha / rank is left out"),
        ("next(ups)), alpha=size.scale)", "next(ups)))", "alpha / rank is left out of what is cut by rows"),
    ],
    ("engine/models/delta_net.py", GOLDEN): [
        ("backend.norm(norm, over_heads=True)", "backend.norm(norm)", "gated norms of heads are not summed over tp"),
    ],
    ("engine/models/attention.py", MODEL): [
        ("self.scale, self.sinks, save", "self.scale, None, save", "sinks are not asked"),
        ("config.attention_scale, Reach", "config.hidden_size**-0.5, Reach", "scores are scaled by the hidden size"),
        ("plan.within(self.reach)", "plan", "layers have no window"),
        ("(part, *rotary) if self.rotates", "(part, *rotary) if True", "layers without rotary embedding have one"),
    ],
    ("engine/models/block.py", MODEL): [
        ("inputs, 2 * self.layer + 1)", "inputs, 2 * self.layer)", "attention and MLP share dropout bits"),
        ("x = x + self._drop(attended", "x = self._drop(attended", "the first residual is lost"),
        ("return x + self._drop(self", "return self._drop(self", "the second residual is lost"),
        ("inputs.key + site * 0x9E", "inputs.key + 0 * site * 0x9E", "all layers share dropout bits"),
    ],
    ("engine/models/block.py", ENGINE): [
        ("with self.precision():", "with contextlib.nullcontext():", "a block is computed again in 16 bits"),
    ],
    ("engine/models/language.py", MODEL): [
        ("x = x * x.new_full", "x + x * x.new_full", "the embedding is not multiplied"),
        ("(far, near), names", "(far, far), names", "layers with a window have the angles of the others"),
        ("window_rotary_base, RotaryScaling())", "window_rotary_base, scaling)", "a window's own base is stretched"),
        ("self.backend.dtype)", "self.backend.dtype, self.rotary_factor)", "a window's own angles have YaRN's factor"),
    ],
    ("dry_run/memory.py", "tests/plan/test_memory.py"): [
        ("gone + kept, behind", "gone, behind", "blocks that are done count while a larger one works"),
        ("blocks[-1][-1][0])", "max(blocks[-1])[0])", "the largest block runs beside the head's gradient"),
    ],
    ("plan/search.py", "tests/plan/test_search.py"): [
        ("return bool(check(", "return False and bool(check(", "no choice of a table is left out"),
        ("not check(one, world_size) and not problems(one)", "True", "layouts are shown that no run takes"),
        ("if p.pipeline_model_parallel_size > 1 else _NOTHING", "", "schedules of one stage are layouts of their own"),
        ('"OK": well, "OOM"', '"OOM"', "what saves memory is tried where nothing has to"),
        ("and saved[2] == more[2] for", "for", "tiles that need more rule out none"),
        ("(less[1] == 0 or less[0] == saved[0])", "True", "what sends much to the host rules out less"),
        ("if layout.memory.host > host", "if False", "the host holds all"),
        ("_divisors(PP, world_size, ", "_divisors(PP, config.model.num_layers, ", "stages divide the layers"),
        ("told.get(name, value) == value", "True", "flags that were given are tried anew"),
    ],
    ("plan/times.py", "tests/plan/test_search.py"): [
        ("ATTENTION_BACKWARD * back,", "back,", "attention's backward takes as long as its forward"),
        ("(gather + scatter, backward", "(scatter, backward", "parameters are gathered once"),
        ("swap * (1 + full)", "2 * swap", "heads are swapped twice in backward"),
    ],
    ("dry_run/messages.py", "tests/plan/test_search.py"): [
        ("blocks = sample.shared(config)[1]", "blocks = ranks - 1", "kv_exchange sends all keys"),
    ],
    ("plan/picture.py", "tests/plan/test_memory.py"): [
        (
            'Kind.BACKWARD: ("table", "backward", "vision")',
            'Kind.BACKWARD: ("forward",)',
            "backward needs no work of a block",
        ),
    ],
    ("plan/answer.py", "tests/plan/test_search.py"): [
        ("for part in range(9, 16)", "for part in range(9, 9)", "the longest row is a power of 2"),
        ("self.given - {name}", "self.given", "no flag is freed"),
        (
            "max(more, key=lambda name: more[name])",
            "min(more, key=lambda name: more[name])",
            "the least term is blamed",
        ),
    ],
    ("plan/cluster.py", CLUSTER): [
        ("1 - (1 - trouble.slow_ranks) ** ranks", "trouble.slow_ranks", "a group has one rank that may be slow"),
        (", -1, together).max(-1)", ", -1, together)[..., 0]", "replicas that gather parameters do not wait"),
        ("hardware.outside / trouble.contention", "hardware.outside", "links are never shared"),
    ],
    ("dry_run/packs.py", CLUSTER): [
        ("reshape(ranks // group, -1)", "reshape(ranks, -1)", "ranks that swap heads are as uneven as their tokens"),
        ("one.leave + start, 0)", "one.leave, 0)", "joined packs see each other"),
    ],
    ("engine/pipeline_parallel/timeline.py", CLUSTER): [
        ("[action.microbatch] if many", "[0] if many", "all microbatches take the time of the first"),
    ],
    ("plan/times.py", "tests/plan/test_published.py"): [
        ("hardware.ring(tp, 1)", "hardware.link(tp, 1)", "tp over machines has one adapter"),
        ("hardware.ring(part.ranks", "hardware.link(part.ranks", "sums over machines have one adapter"),
        ("hops = (part.ranks - 1) *", "hops =", "a ring takes one hop"),
    ],
    ("plan/hardware.py", "tests/plan/test_published.py"): [
        ("* max(1, GPUS_OF_A_MACHINE // stride))", ")", "a ring enters a machine by one adapter"),
    ],
    ("dry_run/memory.py", "tests/plan/test_published.py"): [
        ("optimizer=share * (kinds + narrow) * wide", "optimizer=share * kinds * wide", "master weights take no place"),
    ],
    ("dry_run/messages.py", "tests/plan/test_calibrate.py"): [
        ("return 1.0 + 2 * microbatches", "return 2 * microbatches", "a stage gathers its one chunk never"),
    ],
    ("plan/times.py", "tests/plan/test_calibrate.py"): [
        ("at_once / cores - 1", "at_once / cores - 9", "stages that share cores are as fast as alone"),
        ("= turns * span if", "= 0 * span if", "ranks that share cores are as fast as alone"),
        ("(flops.matmul - grouped + experts)", "flops.matmul", "experts are as fast as large products"),
        ("(hardware.beside if world_size > 1 else 1.0)", "1.0", "ranks do not slow one another"),
        ("2 * (pairs + passes + calls)", "2 * (pairs + passes)", "the host calls nothing in backward"),
        ("(len(chunks) - (stage == end))", "len(chunks)", "the model's first chunk waits for a message"),
    ],
    ("dry_run/messages.py", TIMES): [
        (
            "in shared_parts(config, chunks, world_size):",
            "in shared_parts(config, chunks, world_size)[:1]:",
            "experts stay",
        ),
        ("parameters if config.parallel.sharding.parameters else trained", "parameters", "frozen weights travel"),
    ],
    ("plan/times.py", TIMES): [
        ('(3 - ("text" in config.frozen_parts))', "3", "a frozen head has the gradient of its weight"),
        ("            gather = 0.0  #", "            pass  #", "sums of ZeRO-2 gather in each microbatch"),
        ("_Part(work=every - once,", "_Part(work=2 * once,", "a frozen tower runs backward"),
        ("return sample.causal * (", "return 1.0 * (", "spans and branches take cuDNN's kernel"),
        ('"gathered": hardware.ring', '"gathered": hardware.link', "gathered keys leave by one adapter"),
    ],
    ("plan/hardware.py", TIMES): [
        ("self.outside * (ranks - 1) / away", "self.outside", "all that is sent to all leaves the machine"),
    ],
    ("dry_run/memory.py", TIMES): [
        ("max(1, ranks * tp // ep), ep", "ranks, ep", "experts are shared as other weights are"),
    ],
    ("dry_run/packs.py", TIMES): [
        ("not row.span.any() and ", "", "spans of images are causal"),
    ],
    ("plan/hardware.py", "tests/plan/test_calibrate.py"): [
        ("seconds - self.overlap * under", "seconds - under", "a CPU computes and sends at once"),
    ],
    ("plan/calibrate.py", "tests/plan/test_calibrate.py"): [
        ("logs -= np.clip", "logs += np.clip", "a fit goes away from what was measured"),
    ],
    ("dry_run/activations.py", "tests/plan/test_memory.py"): [
        ("begins and compute.chunk == 0", "begins", "microbatches of later chunks are counted as rows of images"),
    ],
    ("engine/models/block.py", f"{MODEL} tests/plan/test_memory.py"): [
        (
            '"_output_norm" if config.has_input_norms else',
            '"_norm" if config.has_input_norms else',
            "a norm after attention has the tensor of the one before",
        ),
        ("inputs.rotary[self.has_window]", "inputs.rotary[0]", "every layer has the angles of one without a window"),
    ],
    ("engine/models/costs.py", GOLDEN): [
        ("if not adapted.isdisjoint(layers))", "if True)", "a stage that trains nothing has a backward"),
    ],
    ("engine/models/language.py", GOLDEN): [
        ("slice_of(batch.token_names, self.backend.tp)", "batch.token_names[: len(x)]", "tp ranks share dropout rows"),
        ('("embedding",) if tied and tied_across else ()', "()", "tied copies are not summed"),
        ("counted=not tied)", "counted=True)", "a tied table counts twice in the norm"),
    ],
    ("engine/pipeline_parallel/schedules.py", PP): [
        ("if len(waiting) > stage:", "if len(waiting) > stage + 1:", "one more weight gradient is deferred"),
        ("warmup = num_stages - stage - 1\n", "warmup = num_stages - stage\n", "warm-up of 1F1B holds one more"),
        ("num_chunks - 1 - chunk) for", "chunk) for", "backward passes the chunks in forward order"),
        ("return chunk * num_stages + stage", "return stage * num_stages + chunk", "virtual stages in another order"),
        ("-num_microbatches % num_stages if num_chunks > 1 else 0", "0", "a short group is the last"),
        ('Channel("backward", stage, before)', 'Channel("backward", stage, after)', "gradients go forward"),
        ("warmup = 2 * warmup +", "warmup = warmup +", "interleaved stages warm up half as long"),
        ("stage > 0 or num_chunks > 1", "True", "the first stage defers for nothing"),
        ('"first 1f1b": one_at_a_time', '"first 1f1b": one_f_one_b', "a first step may hang on a GPU"),
        ("RECV_FORWARD if place > 0", "RECV_FORWARD if place >= 0", "the first stage receives"),
        ("place > first_trained else", "place > 0 else", "stages that train nothing are sent gradients"),
    ],
    ("engine/pipeline_parallel/runtime.py", PP): [
        ("if len(under_way) >= SEND_WINDOW:", "if False:", "the window of sends is unbounded"),
        ("[self.output_gradients.pop(key)]", "[self.output_gradients.pop(key) * 2]", "a gradient doubles at a stage"),
        ("outgoing[key] = gradient", "outgoing[key] = gradient.clone().zero_()", "stages before get no gradient"),
        ("final[action.kind, action.chunk] == action", "True", "every backward is called the last"),
    ],
    ("engine/pipeline_parallel/partition.py", PP): [
        ("squares + cost * cost, counts", "squares - cost * cost, counts", "the least even cut"),
    ],
    ("engine/pipeline_parallel/timeline.py", PP): [
        ("later(arrival, done", "max(0.0, done", "a stage of the dry run waits for no other"),
    ],
    ("engine/data_parallel/buckets.py", DP): [
        ("(spec.rule, spec.weight_decay, spec", "(spec.rule, spec", "norms share a bucket with what decays"),
        ("low = max(begin, slot.start)", "low = slot.start", "a slice begins before its parameter"),
        ("high = min(end, slot.start", "high = max(end, slot.start", "a slice ends behind its parameter"),
        (", ALIGNMENT * ranks[slots[0].spec.reduced_over])", ", 1)", "buckets do not divide by the ranks"),
        ("(spec.reduced_over, spec.partial", "(spec.partial", "a bucket is of two axes"),
        ("(bucket.plan.slots[number]).add_", "(bucket.plan.slots[number]).copy_", "microbatches overwrite each other"),
        ("is None else total.add_(found)", "is None else found", "sharded gradients of earlier microbatches are lost"),
        ("shard_start = axis.rank * self.shard_elements", "shard_start = 0", "every rank updates the first slice"),
        ("            bucket.gradients.zero_()", "            pass", "gradients of the last step stay"),
        ("if len(self._arrived[index]) < len(", "if not self._arrived[index] and len(", "a bucket leaves early"),
    ],
    ("engine/data_parallel/shards.py", f"{DP} {GOLDEN}"): [
        ("name in spec.partial_over]", "name not in spec.partial_over]", "others are summed over tp"),
        ("and self.copies[spec.reduced_over].rank == 0", "", "copies of instances count in the norm"),
        ("sorted(self.copies.items())", "()", "instances are not summed"),
        ("if spec.reduced_over == name]", "]", "instances sum what another axis reduces"),
        ("for i in group]), axis)", "for i in group]), single_axis(str(axis)))", "partial sums stay partial"),
    ],
    ("engine/backends/transformer_engine.py", SELECTOR): [
        ('_P2P_COMM": "1"', '_P2P_COMM": "0"', "the ring makes a communicator for each pair"),
        ("if deterministic else (longest,)", "if False else (longest,)", "one document is the worst row"),
    ],
    ("engine/optim/sharded.py", DP): [
        ("settings.weight_decay if spec.weight_decay else 0.0", "settings.weight_decay", "norms decay"),
        ("if not x.numel():", "if False:", "FusedAdam gets empty slices"),
        ("return all_reduce(total, world).sqrt().item()", "return total.sqrt().item()", "the norm of a rank"),
        ("(1.0 if counted else 0.0)", "1.0", "copies count in the norm"),
        (".double().square().sum()", ".square().sum().double()", "squares are summed in float32"),
        ("min(1.0, clip_grad / (norm + 1e-6))", "clip_grad / (norm + 1e-6)", "small gradients grow"),
        ("self.updates += 1", "self.updates += 2", "an update counts twice"),
        ("shard.values.copy_(master)", "pass", "a model in bfloat16 never learns"),
        ("master.copy_(shard.values)", "pass", "masters of the random weights stay after a load"),
        ("if x.dtype != shard.narrow", "if x.dtype == shard.narrow", "masters are not saved"),
    ],
    ("engine/optim/rules.py", DP): [
        ("= lr * group.lr_multiplier", "= lr", "towers learn at the rate of the text"),
        ("1.0 / scale, device", "scale, device", "clipping multiplies instead of dividing"),
    ],
    ("engine/optim/lr_schedule.py", "tests/engine/optim/test_sharded.py"): [
        ("lr * update / top", "lr * (update - 1) / top", "the first update has rate 0"),
        ("train_iters) + 1", "train_iters)", "the last update has rate 0"),
        ("settings.lr_decay_iters or settings", "settings", "--lr-decay-iters does nothing"),
        ("0.5 * (1.0 + math.cos(math.pi * part))", "math.cos(math.pi * part / 2)", "another cosine"),
        ("(end - length)", "top", "WSD falls from the start"),
    ],
    ("distributed/grid.py", f"{GRID} tests/engine/pipeline_parallel/test_runtime.py"): [
        ("[axis.rank % inner :: inner]", "[axis.rank // inner :: inner]", "outer groups of other ranks"),
        ("axis.rank // inner * inner", "axis.rank % inner * inner", "inner groups of other ranks"),
        ("self.channels[direction,", 'self.channels["forward",', "both directions share a channel"),
        ("(stages[0], stages[-1])", "stages[:2]", "the embedding's copies are those of the first stages"),
    ],
    ("distributed/shape.py", GRID): [
        ('AXES = ("tp", "cp", "dp", "pp")', 'AXES = ("cp", "tp", "dp", "pp")', "cp varies fastest"),
    ],
    ("distributed/grid.py", "tests/training/test_denominator.py"): [
        ("([self.ep], [self.edp]) if", "([], []) if", "ranks with experts first meet in a step"),
        ('self.over("dp", "cp"), *edp', "*edp", "ranks that sum gradients first meet in a step"),
        ("self.embedding, self.world]", "self.world]", "stages of tied embeddings first meet in a step"),
    ],
    ("distributed/same_host.py", "tests/distributed/test_same_host.py"): [
        ("except ProcessLookupError as error:", "except ZeroDivisionError as error:", "a rank that ended is not named"),
        (
            '        except OSError as error:\n            why = f"the memory',
            '        except ZeroDivisionError as error:\n            why = f"the memory',
            "the owner of a memory that may not be read is not named",
        ),
        ("if _has_ended(process):\n", "if False:\n", "a rank that ended before it called is waited for"),
    ],
    ("training/start/launch.py", GRID): [
        ("cause = cause.__cause__", "cause = None", "a rank that is lost while it saves is not named"),
        ('store.set(f"joins/{rendezvous.rank}", "")', "pass", "ranks that join are named instead of the one missing"),
    ],
    ("distributed/fake_world.py", "tests/verify/test_fake_step.py"): [
        ("rows if first else rows[::-1]", "rows", "what one rank sends another must be what it receives"),
        (": tuple[int, ...] = call.elements", ": tuple[int, ...] = ()", "sizes of a collective do not matter"),
        ("(c.dtype, c.elements) for c", "(c.dtype,) for c", "sizes of a message do not matter"),
        ('(_messages(mine, "recv", other)', '(_messages(mine, "send", other)', "sends are held against sends"),
    ],
    ("engine/models/recompute.py", MODEL): [
        (
            "KeptResults(hooks or HELD), use",
            "body.__self__.__dict__.setdefault('kept', KeptResults(hooks or HELD)), use",
            "a microbatch is handed what another's attention gave",
        ),
        ("if self._given is not None:", "if False:", "attention of a block is computed again"),
    ],
    ("engine/models/recompute.py", ATTENTION): [
        ("marks[place].grad", "marks[0].grad", "queries stand for the keys that are made again"),
    ],
    ("engine/models/recompute.py", "tests/plan/test_memory.py"): [
        ("            if place is None:", "            if True:", "queries are kept beside what attention gave"),
    ],
    ("engine/models/offload.py", MODEL): [
        ("int(x.storage_offset()), x.shape", "0, x.shape", "parts of a tensor come back as its beginning"),
        ("if handle not in self._open:", "if True:", "each part of a tensor is copied with the whole of it"),
        (" or handle in self._staying", "", "weights are copied to the host"),
    ],
    ("distributed/differentiable.py", GRID): [
        ("(x, axis, _identity, collectives.all_reduce)", "(x, axis, _identity, _identity)", "copy_to sums nothing"),
        ("all_reduce, _identity", "all_reduce, collectives.all_reduce", "reduce_from sums twice"),
        ("over, out_splits, in_splits", "over, in_splits, out_splits", "an exchange's gradient takes the way there"),
    ],
    ("training/loop/denominator.py", f"{GOLDEN} tests/training/test_denominator.py"): [
        ("return self.weight or 1.0", "return 1.0", "sums are not divided"),
        ("total = table[first, 2:4].sum", "total = table[:, 2:4].sum", "all ranks count, not one of each replica"),
        ('("flops", "image_documents")', '("flops", "image_documents", "stop_reason")', "stop reasons add up"),
    ],
    ("engine/step/decision.py", "tests/training/test_health.py"): [
        ("math.isfinite(loss) and math.isfinite(grad_norm)", "math.isfinite(loss)", "a gradient of NaN is an update"),
    ],
    ("training/loop/health.py", "tests/training/test_health.py"): [
        ("            self.skipped_in_a_row = 0\n", "", "skipped steps are never forgotten"),
        ("value <= factor * usual", "value <= usual", "every step above the median is a spike"),
        ("value <= factor * last and", "False and", "a spike is told at every step"),
        (" and 0.5 * median < usual < 2.0 * median", "", "a spike is told once in a run"),
        ("if self.skipped_in_a_row <", "if self.skipped_in_a_row <=", "one more step is skipped"),
    ],
    ("training/data/order.py", "tests/training/data/test_loader.py"): [
        ("outside[values >= np.uint64(length)]", "outside[values > np.uint64(length)]", "a sample beyond the dataset"),
        ('f"{seed} {epoch} {length}"', 'f"{seed} {length}"', "every epoch has one order"),
        ("(start, start + count, dtype=np.int64),", "(0, count, dtype=np.int64),", "a resumed run begins anew"),
    ],
    ("training/loop/state.py", "tests/training/test_saving.py"): [
        ("fresh_pairs = stored.model.lora_rank == 0", "fresh_pairs = True", "--finetune drops the pairs of a LoRA run"),
    ],
    ("training/loop/sources.py", "tests/training/test_start.py"): [
        ("sum(one.num_packs for one in manifests)", "manifests[0].num_packs", "packs of a blend are its first part's"),
        ("round(training.train_epochs * packs)", "int(training.train_epochs * packs)", "epochs are cut to whole packs"),
        ("round(training.train_epochs * packs", "int(-(-training.train_epochs * packs // 1)", "1.1 x 10 packs are 12"),
        ("step + max(0, -(-(end - consumed)", "max(0, -(-end", "epochs are counted anew after a resumption"),
        ("_FEW_UPDATES or warmup > steps / 2)", "_FEW_UPDATES)", "a run that only warms up is not told"),
    ],
    ("training/loop/stored.py", "tests/huggingface/convert/test_start.py"): [
        ("FINETUNING_RATE_OF_PAIRS if config.model.lora_rank else ", "", "pairs learn at the rate of whole weights"),
        ("stored.training.lr, f", "config.training.lr, f", "a run goes on at the default rate"),
    ],
    ("training/data/collate.py", "tests/training/data/test_collate.py"): [
        ("label_weights = np.roll(weights, -1)", "label_weights = weights.copy()", "weights do not move with labels"),
        ("label_weights[last] = 0", "pass", "the last token predicts"),
        ("number - ended[index]", "number", "a branch's positions run on over the branches before"),
        ("above and ends[above[-1]] <= first", "above and ends[above[-1]] < first", "documents are branches"),
        ("= np.cumsum(padded) - padded", "= np.cumsum(true) - true", "segments stand without their padding"),
        ("_TokenRuns(true, begin, end[pack_of])", "_TokenRuns(true, begin, 0 * pack_of + end[-1])", "packs are one"),
        ("np.repeat(begin + true, padded)", "np.repeat(begin, padded)", "padding does not begin at 0"),
        ("whole = begin + segments", "whole = begin.max() + segments", "segments see each other"),
    ],
    ("engine/rows/image_shards.py", "tests/prepare/media/test_molmo2_rules.py"): [
        ("running[start] + low, start) - 1", "running[start] + low, start)", "a rank takes one unit too many"),
        ("start = min(room, units - (filled - rank - 1))", "start = room", "ranks starve"),
        ('(start, stop), side="right"', '(start, stop), side="left"', "units of a rank are one off"),
    ],
    ("training/data/images.py", IMAGES): [
        ("(np.cumsum(totals) - totals)", "0 * (np.cumsum(totals) - totals)", "bounds of the second pack begin at 0"),
        ("number + 1, strict=", "number, strict=", "the first image sees nobody ahead"),
        ("(pooling >= 0, pooling + before", "(pooling >= 0, pooling", "the second image pools the first"),
        ("axis=0, prepend=0)", "axis=0, prepend=1)", "the first image is one crop short"),
    ],
    ("training/data/blend.py", "tests/training/data/test_loader.py"): [
        ("first = int(nth[here][0])", "first = 0", "each step repeats a dataset's first samples"),
        ("= self._first[number] + found", "= found", "all samples are of the first dataset"),
    ],
    (
        "engine/data_parallel/boxes.py",
        "tests/training/checkpoint/test_storage.py tests/training/checkpoint/test_commit.py",
    ): [
        ("last = -(-low // row), high //", "last = low // row, high //", "a partial first row is taken for whole"),
        ("if counts(part.spec))", "if True)", "copies are saved twice"),
        ("low = max(part.start, begin)", "low = part.start", "a slice of two tensors"),
        ("high - last * row)\n\n", "high - last * row - 1)\n\n", "the last partial row is one short"),
        ("zip(piece.offsets, offsets", "zip((0,) * len(offsets), offsets", "every rank saves at the beginning"),
    ],
    ("verify/plot.py", "tests/tools/test_peers.py"): [
        ("losses[max(0, end - MEAN_OF) : end]", "losses[:end]", "a running mean is of all steps before"),
    ],
    ("training/start/processes.py", "tests/training/test_start.py"): [
        ("or not all(handles(", "or not any(handles(", "a rank waits for one that Ctrl-C has ended"),
        ("    if ended_by:  # by a", "    if False:  # by a", "Ctrl-C between two starts is lost"),
        ("if status not in (0, STOPPED)]", "if status]", "a rank that saved and stopped has failed"),
        ("first or max(ended)", "first or (0, 0)", "a stopped run has finished"),
    ],
    ("training/start/script.py", "tests/training/test_start.py"): [
        ("        raise RuntimeError(said)", "        raise ValueError(said)", "a failure is a refusal"),
        ("run.terminate()", "run.kill()", "Ctrl-C of a notebook ends a run that has not saved"),
        ('flag(name if value else f"no_{name}")', "flag(name)", "False of a script is True"),
    ],
    ("huggingface/convert/card.py", "tests/huggingface/convert/test_card.py"): [
        ('value.rstrip("/").rpartition("/")[2]', "value", "a model card holds paths of a machine"),
        ("hub = re.fullmatch(", "hub = re.match(", "a path is the name of a model on a hub"),
    ],
    ("training/checkpoint/outcome.py", "tests/training/checkpoint/test_commit.py"): [
        (" if other == own]", "]", "a copy on another machine is hashed by no rank that sees it"),
        (
            '        found.append(f"{one.st_dev} {one.st_ino}',
            '        (f"{one.st_dev} {one.st_ino}',
            "folders of one machine are one copy",
        ),
    ],
    ("huggingface/convert/config_json.py", "tests/huggingface/convert/test_families.py"): [
        ('*root.glob("*.py"), ', "", "masks ask a config for more than its class has"),
    ],
    ("huggingface/convert/family.py", "tests/huggingface/convert/test_families.py"): [
        (
            'values["num_experts"]\n        return',
            'values["num_experts"] - 1\n        return',
            "the converter drops an expert",
        ),
    ],
    ("huggingface/convert/moe.py", "tests/huggingface/convert/test_families.py"): [
        ('"moe_shared_expert_gate": True}', '"moe_shared_expert_gate": False}', "the gate of a shared expert is open"),
        ('_BLOCK, "mlp")', '_BLOCK, "moe")', "stacked experts have Mixtral's own word"),
        ("range(every - 1, v", "range(0, v", "the first of N layers has experts"),
        ("c.only(router_jitter_noise=0.0, clip_qkv=None)", "pass", "queries are not clipped, in silence"),
        ('resolved(v)["ffn_hidden_size"]', 'v["ffn_hidden_size"]', "experts have the width of no layer"),
    ],
    ("huggingface/convert/gpt_oss.py", "tests/huggingface/convert/test_families.py"): [
        ("(blocks & 15)", "(blocks >> 4)", "the high bits of a byte are read twice"),
        ("scales.float() - 127", "scales.float() - 128", "blocks of four bits have half their size"),
        ("torch.stack(found.chunk(2, 1), 2).flatten(1, 2)", "found", "gates are written before ups"),
        ('"truncate": False}', '"truncate": True}', "the ends of a silent config's yarn are rounded"),
    ],
    ("huggingface/convert/gpt_oss.py", "tests/huggingface/generation/test_sampler.py"): [
        (
            "        return torch.cat([found[:, ::2]",
            "        return found\n        torch.cat([found[:, ::2]",
            "gate and up in turns",
        ),
        (
            "found = found.transpose(1, 2)\n        if not",
            "found = found.reshape(len(found), found.shape[2], -1)\n        if not",
            "stacks stay as they lie",
        ),
    ],
    ("huggingface/convert/gpt_oss.py", "tests/huggingface/convert/test_malformed_weights.py"): [
        ("elif scales != blocks[:3]:", "elif len(scales) != 3:", "scales of one column are broadcast"),
        ("if infos[name].dtype != torch.uint8:", "if False:", "scales in bfloat16 are exponents"),
        ("if stack in infos:", "if False:", "a packed tensor hides a plain one"),
        ("if (scales == _NAN).any():", "if False:", "a scale that is NaN is called too large"),
        ("if not is_finite(found):", "if False:", "an expert is infinite"),
    ],
    ("huggingface/convert/tensors.py", "tests/huggingface/convert/test_malformed_weights.py"): [
        ("if experts and count != experts:", "if False:", "twice as many experts of half the rows are read"),
        ("if not is_finite(cast):", "if False:", "a cast makes infinite weights"),
        ("math.isfinite(largest.item())", "True", "inf is finite"),
    ],
    ("huggingface/convert/hf_files.py", "tests/huggingface/convert/test_malformed_weights.py"): [
        ("if not is_finite(found):", "if False:", "weights that are NaN are trained"),
        ("if size < expected:", "if False:", "half a download has no sizes"),
    ],
    ("huggingface/convert/source.py", "tests/huggingface/convert/test_tied_heads.py"): [
        ("if same_values(weights, name_of_embedding, name_of_head):", "if True:", "a head that differs is dropped"),
        (
            "return _LinksOfFile(apart, infos, True, note)",
            "return _LinksOfFile(apart, infos)",
            "two heads, one is tied",
        ),
        ("if name_of_embedding not in infos:", "if False:", "a head is not taken for the embedding"),
    ],
    ("huggingface/convert/text_part.py", "tests/huggingface/convert/test_tied_heads.py"): [
        ("or not part.asks_text", "or True", "a tie that only the text's config says is lost"),
        ('"gemma3_text", tied=True', '"gemma3_text", tied=False', "a silent Gemma 3 has a head of its own"),
    ],
    ("huggingface/convert/text_part.py", "tests/huggingface/convert/test_text_part.py"): [
        ("if name not in _SECTIONS}", "if True}", "sections of rotary axes are refused"),
        (
            "{**part.defaults, **outside, **inside}",
            "{**outside, **inside, **part.defaults}",
            "silence wins over a config",
        ),
        ('for begin in ("", "model.")', 'for begin in ("",)', "a tower by its newer names is unexpected"),
    ],
    ("storage/cache.py", "tests/storage/test_cache.py"): [
        ("stated == _hashes(kept / _FILES)", "True", "what is in the cache is believed"),
        ("files.sync_below(made)", "pass", "a folder has its name before its files are on disk"),
        ("        if not _is_whole(kept):", "        if not kept.exists():", "a damaged folder stays for ever"),
    ],
    ("prepare/tokenize/beside.py", "tests/prepare/test_malformed_tokenizers.py"): [
        ("name not in known and name not in found]", "False]", "a post-processor makes Rust panic"),
        ("if adds is not None and not isinstance(adds, bool):", "if False:", "a word as a switch is no switch"),
    ],
    ("attention/ops/rotary.py", MODEL): [
        ("    if scaling.rounds:", "    if True:", "every yarn rounds"),
    ],
    ("huggingface/convert/moe.py", "tests/tools/test_convert_checkpoint.py"): [],
    ("huggingface/convert/tensors.py", "tests/tools/test_convert_checkpoint.py"): [
        (
            "        if name.endswith(WIDE):\n            return found",
            "        if False:\n            return found",
            "corrections are cast",
        ),
        ("        if not name.endswith(WIDE):", "        if True:", "a correction is another dtype"),
    ],
    ("huggingface/convert/moe.py", "tests/huggingface/convert/test_exact.py"): [
        ("i >= first for i", "i > first for i", "one dense layer more than first_k_dense_replace says"),
        ("width * c.number(", "1 * c.number(", "shared experts of a GLM have the width of one column each"),
        ('not c.switch("norm_topk_prob", True)', 'c.switch("norm_topk_prob", True)', "sigmoids are shares, or not"),
        ("and not c.switch", "and c.switch", "a token's weights are those of all experts, or not"),
        (
            "for e in range(experts) for name in names]",
            "for name in names for e in range(experts)]",
            "stacked gates stand before all ups",
        ),
    ],
    ("huggingface/convert/moe.py", "tests/huggingface/generation/test_sampler.py"): [
        ('("w1", "w3", "w2")', '("w3", "w1", "w2")', "gate and up of a Mixtral are each other's"),
    ],
    ("huggingface/convert/tensors.py", "tests/huggingface/convert/test_exact.py"): [
        ("found[start - first * rows : stop", "found[0 : stop", "an expert's rows begin at its stack's"),
    ],
    ("training/checkpoint/storage.py", "tests/training/checkpoint/test_storage.py"): [
        ("functools.cache(self._index.header)", "self._index.header", "a file's header is made for each tensor"),
    ],
    ("huggingface/generate_command.py", "tests/huggingface/convert/test_template_of_training.py"): [
        (
            "if kept is None and not generator.step and",
            "if kept is None and generator.step and",
            "a folder's template is unread",
        ),
    ],
    ("prepare/media/processor_files.py", "tests/prepare/media/test_processor_files.py"): [
        ("    inside = whole.get(key)\n", "    inside = None\n", "older processor files count before the newest"),
        ("if has_older:", "if True:", "older names of sizes count for videos"),
        ('"size" not in part or (size is None and has_older)', "size is None", "a null is a missing size"),
        ('"do_normalize": (True, False)', '"do_normalize": (True, True)', "videos that stay bytes are normalised"),
        ("_normalized(_CLIP_MEAN, _CLIP_DEVIATION)", "_normalized(_HALF, _HALF)", "a missing mean is another one"),
        ("if _acts_otherwise(given, expected):", "if False:", "steps that a folder leaves out are taken"),
        ("        if not problems and all(", "        if all(", "videos follow images against the library"),
    ],
    ("prepare/command.py", "tests/huggingface/convert/test_folder_rules.py"): [
        ("**told.values, **of_folder", "**of_folder", "a build does not follow the folder's processor files"),
        ("    if overridden:\n", "    if False:\n", "a flag overrides the folder's files in silence"),
    ],
    ("train.py", "tests/huggingface/convert/test_folder_rules.py"): [
        (
            "if misfits := weights.image_misfits(where, sources.image_rules):",
            "if misfits := list[str]():",
            "packs by other image rules than the folder's are trained on",
        ),
    ],
    ("training/loop/state.py", "tests/huggingface/convert/test_folder_rules.py"): [
        (
            "if image_rules is None and weights is not None and weights.image_rules is not None:",
            "if image_rules is None and weights is not None and False:",
            "the export of a run on text has no processor files",
        ),
        (
            "image_rules=state.image_rules or was.image_rules",
            "image_rules=state.image_rules",
            "a finetuning on text forgets the image rules",
        ),
    ],
    ("huggingface/convert/source.py", "tests/huggingface/convert/test_folder_rules.py"): [
        ("        refuse_embedded_adapter(path, adapter)\n", "", "an adapter in a model's folder is ignored"),
        ("layers <= int(numbered[1]) < layers + further", "layers <= int(numbered[1])", "any further layer is dropped"),
    ],
    ("huggingface/convert/config_json.py", "tests/huggingface/convert/test_folder_rules.py"): [
        ("if not value or same(value, _USUAL.get(key))", "if True", "fields that are not used are not told"),
    ],
    ("huggingface/convert/start.py", "tests/huggingface/convert/test_start.py"): [
        (
            '{f"--load-hf {name}": folder / name for name in loaded.files}',
            "dict[str, Path]()",
            "a model is not compared",
        ),
        ("for name in ADAPTER_FILES}", "for name in ()}", "an adapter is not compared"),
    ],
    (
        "training/checkpoint/directory.py",
        "tests/training/checkpoint/test_commit.py tests/training/checkpoint/test_storage.py",
    ): [
        ("older[keep_last - 1 :]", "older[keep_last:]", "one checkpoint more is kept"),
        ("lambda folder: serials[folder], reverse=True", "lambda folder: serials[folder]", "the oldest is the newest"),
    ],
    ("prepare/tokenize/tokenizer.py", "tests/prepare/test_tokenizer.py"): [
        (" or _has_newer(text)", "", "new letters are cut by the engine's own tables"),
    ],
    ("prepare/packs/packing.py", "tests/prepare/packs/test_packing.py"): [
        ("min(len(available), -(-remaining // each))", "len(available)", "more packs are taken than items are left"),
        ('np.argsort(-lengths, kind="stable")', 'np.argsort(lengths, kind="stable")', "the shortest first"),
        ("(start + longest, lengths[document])", "(start + longest, start + longest)", "the last piece is too long"),
        ("[: opened + 1] >= need_crops", "[: opened + 1] >= 0", "the second budget does not count"),
    ],
    ("prepare/packs/unit.py", "tests/prepare/test_public_chats.py"): [
        ("if is_valid != settings.is_valid", "if is_valid < settings.is_valid", "what is validated is learned too"),
    ],
    ("prepare/records/read.py", "tests/prepare/test_public_chats.py tests/prepare/records/test_read.py"): [
        ('line + element.count("\\n"), offset + size', "line, offset + size", "lines inside an element do not count"),
        ("stop is not None and offset >= stop:", "stop is not None and offset > stop:", "an element is in two units"),
        ("if before[1] != mark or end", "if end", "an array without a comma goes in"),
    ],
    ("prepare/records/read.py", "tests/prepare/records/test_read.py"): [
        (
            'mark = "" if extent.start else',
            "mark = layout.between if extent.start else",
            "later units of an array are lost",
        ),
        ("return lines == 0 and are_messages", "return False and are_messages", "lists of messages are one array"),
        ("return _STREAM if lines else None", "return None", "objects over many lines are bad lines"),
    ],
    ("prepare/packs/unit.py", "tests/prepare/records/test_read.py"): [
        ("place.number + self._records_before(place.extent)", "place.number", "records are numbered by unit"),
    ],
    ("prepare/packs/unit.py", "tests/prepare/packs/test_answer_forms.py"): [
        ("self._forms.update(entry.forms)", "pass", "nobody knows in which form answers are learned"),
    ],
    ("prepare/packs/run.py", "tests/prepare/packs/test_answer_forms.py"): [
        ("if forms[AS_MESSAGES] and forms[ALPACA]:", "if False:", "a dataset has answers in two forms"),
    ],
    ("prepare/records/forms.py", "tests/prepare/packs/test_answer_forms.py"): [
        ("not (has_template or rules.form == AS_MESSAGES)", "True", "a template does not write Alpaca's records"),
    ],
    ("prepare/records/sample.py", "tests/prepare/packs/test_answer_forms.py"): [
        ("if not is_read and value not in", "if False and value not in", "a variable that no template reads is lost"),
    ],
    ("prepare/records/forms.py", "tests/prepare/records/test_spellings.py"): [
        ("if _same(text, _plain(talk.messages[0])):", "if True:", "of two system prompts one is lost"),
        ("and _same(given[key], text)}", "}", "a prompt that says something else is taken for a copy"),
        ("if are_messages(value):\n        raise", "if False:\n        raise", "messages are learned as JSON"),
    ],
    ("prepare/records/turns.py", "tests/prepare/records/test_spellings.py"): [
        ("if len(said) > 1:", "if False:", "of two texts of a message one is lost"),
        ('"model": "assistant"', '"model": "user"', "Gemini's answers are questions"),
    ],
    ("prepare/records/turns.py", "tests/prepare/records/test_samples.py"): [
        ("if speaker in rules.context_roles:", "if False:", "a role that is named as context is learned"),
    ],
    ("prepare/records/advice.py", "tests/prepare/records/test_spellings.py"): [
        (
            "if any(name in given for name in _ANSWERED) and not",
            "if False and not",
            "a bad answer is learned as advised",
        ),
        ("any(mark in value.lower() for mark in _SPEAKERS)", "False", "advice learns what users say"),
    ],
    ("prepare/records/read.py", "tests/prepare/packs/test_run.py"): [
        ("or extent.start < self._offset:", "or True:", "each unit counts lines from the file's first byte"),
    ],
    ("prepare/packs/unit.py", "tests/prepare/packs/test_folders.py"): [
        ("document.weights[start:stop]", "document.weights[: stop - start]", "all pieces are learned as the first"),
        ("(place.extent) + place.line", "(place.extent) + 1", "every reject stands in the first line of its unit"),
    ],
    ("prepare/records/tables.py", "tests/prepare/records/test_read.py tests/prepare/packs/test_images.py"): [
        ("others.isdisjoint(names) and others", "False", "halves of a record are records"),
        ("others.isdisjoint(names) and others", "others", "two records of one name are halves"),
        ("says and len(seen) == 1 and", "says and seen and", "the first of two images is the text's"),
        ('if value.get("caption") == value["text"]:', "if False:", "a caption that stands twice is two forms"),
    ],
    ("prepare/records/forms.py", "tests/prepare/records/test_samples.py"): [
        ("if not places and values and", "if False and values and", "an image without a place is refused"),
        ("weight=each.weight * piece.weight)", "weight=each.weight)", "what is asked about an image is learned"),
    ],
    ("storage/files.py", "tests/test_results.py"): [
        (
            '    if stat.S_ISLNK(mode):\n        raise ValueError(f"{flag}',
            '    if False:\n        raise ValueError(f"{flag}',
            "a result is written through a link",
        ),
        ("    if not overwrite:", "    if False:", "a result replaces a file without a word"),
        ("        write_new(path, data)", "        write_atomically(path, data)", "a file that appears is replaced"),
    ],
    ("training/start/launch.py", "tests/distributed/test_interrupts.py"): [
        ("socket.create_server((_LOOPBACK, 0))", 'socket.create_server(("", 0))', "other machines reach the store"),
    ],
    ("training/checkpoint/outcome.py", "tests/training/checkpoint/test_sharers.py"): [
        ("    if local:\n", "    if True:\n", "each machine hashes what is in a store"),
    ],
    ("engine/config/run.py", "tests/engine/config/test_homes.py"): [
        ("tuple(at_home(str(part)) for part in value)", "value", "a folder of a blend is named `~`"),
    ],
    ("engine/config/cli.py", "tests/engine/config/test_homes.py"): [
        ('        self.register("type", Path, _path)\n', "", "results go to a folder named `~`"),
    ],
    ("engine/config/yaml_file.py", "tests/engine/config/test_yaml_size.py"): [
        ("if len(reasons) >= _MOST_REASONS:", "if False:", "10,000 unknown keys take four seconds"),
        ("elif len(node.value) > _REPEATED:", "elif False:", "a text of 1 MB is repeated 5,000 times"),
    ],
    ("storage/wording.py", "tests/storage/test_wording.py"): [
        ("    return escaped(text)", "    return text", "a name steers the terminal"),
        ("_LONG_WORD.sub(lambda found: _without_middle(found[0], _WORD), text)", "text", "a name of 10 MB is shown"),
        ("\\u2028-\\u202e", "\\u2028-\\u2029", "a name turns the direction of a message"),
    ],
    ("engine/config/cli.py", "tests/storage/test_wording.py"): [
        ("_print_message(for_terminal(message), file)", "_print_message(message, file)", "a flag steers the terminal"),
    ],
    ("plan/sheet.py", "tests/plan/test_sheet.py"): [
        ("isinstance(value, bool) or not", "not", "a truth is a number of a machine"),
        ("elif not allowed.holds(value):", "elif value < 0:", "NaN is a number of a machine"),
        ("        if name not in known:", "        if False:", "an unknown field is not read and not told"),
    ],
    ("storage/files.py", "tests/prepare/media/test_reader.py"): [
        ("os.open(name, _FOR_READING | os.O_NOFOLLOW, ", "os.open(name, _FOR_READING, ", "an exchanged file leads out"),
        (
            "os.open(folder, _FOR_READING | os.O_DIRECTORY | os.O_NOFOLLOW, ",
            "os.open(folder, _FOR_READING | os.O_DIRECTORY, ",
            "an exchanged folder leads out",
        ),
    ],
    ("prepare/media/reader.py", "tests/prepare/media/test_reader.py"): [
        ("return url.content(limit)", "return url.content(LARGEST_ITEM)", "an image without an end takes 2 GiB"),
        ("read_within(stream, path, limit)", "read_within(stream, path, LARGEST_ITEM)", "files have no bound"),
        ("if os.path.commonpath((path, str(self._root))) != self._root:", "if False:", "a path leads out of the root"),
    ],
    ("prepare/media/reader.py", "tests/prepare/packs/test_urls.py"): [
        ("if (top.scheme, top.host, top.port) == server", "", "a redirect leads to another host"),
        ("if not url.raw_path.startswith(inside) or", "if", "a redirect leads out of the folder"),
        ("        path = plain\n", "        return False\n", "escapes of dots are no dots"),
    ],
    ("storage/url.py", "tests/storage/test_web.py"): [
        ("begin + _ANSWER_SECONDS +", "begin + 1e9 +", "a server sends a byte per second for ever"),
        (" + content.tell() / _LEAST_RATE", "", "a large file of a slow line is refused"),
        ("and (match is None or match[1] not in _WEB)", "", "an IPv6 address is taken for a chain of URLs"),
        ("return outcome.result(seconds)", "return outcome.result()", "a store that does not answer is waited for"),
        ('"response_class": _bounded_response(),', "", "an index page fills the memory"),
    ],
    ("storage/url.py", "tests/prepare/packs/test_urls.py"): [
        ('"auto_decompress": False,', "", "a server's few bytes unpack to many"),
        ("[url.guard] if url.guard else []", "[]", "nobody looks where a redirect leads"),
    ],
    ("prepare/records/documents.py", "tests/prepare/records/test_trees.py"): [
        ("end.weight if branch == number + 1 else 0.0", "end.weight", "a token that moves is learned in each branch"),
        ("+= weights[rollout][start:stop]", "= weights[rollout][start:stop]", "the last rollout's weight alone counts"),
        ("(len(left) if part else new[above[number - 1]])", "(len(left))", "branches of nothing hang on their sibling"),
        ("-1 - numbers.setdefault(placed, len(numbers))", "-1", "rollouts share images that differ"),
        (
            "max(leaves[above[number - 1]], leaves[number])",
            "leaves[above[number - 1]]",
            "deeper branches do not see it",
        ),
    ],
    ("prepare/records/conversation.py", "tests/prepare/test_public_chats.py"): [
        ("self.answers[answer.thought] += 1", "pass", "answers with thoughts are not counted"),
        ("self._weights[i] = 0.0", "pass", "an answer is learned without its thought"),
        ("for a, b, w in self.learned)", "for a, b, w in self.learned[:1])", "the last answer is not learned"),
    ],
    ("huggingface/convert/lora.py", "tests/huggingface/convert/test_lora.py"): [
        ("for pair in of_experts], 2)", "for pair in of_experts], 1)", "B of experts is written by expert"),
        ('.base_layer" if both and', '.base_layer" if False and', "gate and up of experts have the place of down"),
        ("if family.in_turns and name", "if False and name", "gate and up of a written pair are not in turns"),
        ("name if beside_experts and", "name if False and", "peft takes an MLP beside experts for them"),
    ],
    ("huggingface/convert/lora.py", "tests/huggingface/convert/test_adapters.py"): [
        (
            "is_exact = math.frexp(rank / size.rank)[0] == 0.5",
            "is_exact = False",
            "zeros of a rank leave another alpha",
        ),
        ("ranks[place] = max(ranks[place], _rank(a[place], up))", "ranks[place] = len(a[place])", "zeros are exported"),
    ],
    ("huggingface/convert/adapter.py", "tests/huggingface/convert/test_lora.py"): [
        (
            "up.unflatten(1, (rank, count)).permute(2, 0, 1)",
            "up.unflatten(1, (count, rank)).transpose(0, 1)",
            "B is by expert",
        ),
        ("if self._in_turns and place", "if False and place", "gate and up of a read pair are not in turns"),
    ],
    ("huggingface/convert/adapter.py", "tests/huggingface/convert/test_adapters.py"): [
        ("sorted(used[kinds]) or range(len(kinds))", "range(len(kinds))", "a joined linear without a pair gets one"),
        ("        if missing:\n", "        if False:\n", "pairs in some layers become pairs of all"),
        ("            if in_blocks:\n", "            if False:\n", "pairs that were joined stay joined"),
        ("known[0] if known else table)", "table)", "an adapter of the text model does not fit its tower"),
    ],
    ("huggingface/convert/adapter.py", "tests/huggingface/convert/test_malformed_adapters.py"): [
        ("        if strange:\n", "        if False:\n", "a target parameter of no linear is not told"),
        ("if not tensor.isfinite().all():", "if False:", "pairs that are not finite are trained"),
    ],
    ("huggingface/convert/adapter_config.py", "tests/huggingface/convert/test_malformed_adapters.py"): [
        ("is not None and not is_sound(value)", "is not None and False", "a field may have any type"),
        ("        if strange:\n", "        if False:\n", "DoRA is read as plain pairs"),
    ],
    ("huggingface/convert/adapter_config.py", "tests/huggingface/convert/test_adapters.py"): [
        (
            "for pattern, number in self._alphas if pattern.match(name)",
            "for pattern, number in ()",
            "one alpha for all",
        ),
        ("alpha * rank**0.5 if self._is_root else alpha", "alpha", "alpha is divided by a rank, not by its root"),
    ],
    ("engine/config/model.py", "tests/engine/models/test_pair_words.py"): [
        ('kind.endswith(f".{name}")]', 'kind == f"attention.{name}"]', "words mean linears of attention alone"),
    ],
    ("engine/models/pair_words.py", "tests/engine/models/test_pair_words.py"): [
        ("elif not any(kind.startswith(", "elif False and any(kind.startswith(", "a mixer without pairs is not told"),
    ],
    ("engine/checks.py", "tests/engine/config/test_cli.py"): [
        ("if in_all > MAX_EXPERTS_IN_ALL:", "if False:", "a folder may name experts without end"),
    ],
    ("prepare/tokenize/tokenizer.py", "tests/huggingface/convert/test_tokenizer.py"): [
        ("(tokens := tokens_beside(folder) - tokenizer.own)", "(tokens := set())", "tokens beside a model are ignored"),
    ],
    ("prepare/records/conversation.py", "tests/prepare/templates/test_learned.py"): [
        ('call, "arguments") if takes else', 'call, "arguments") if False else', "arguments are encoded twice"),
    ],
    ("prepare/records/answers.py", "tests/prepare/templates/test_learned.py"): [
        ('"no_thoughts", alone, here, added)', '"no_thoughts")', "an empty thought is learned"),
        ('solid("".join(around)) == solid(alone)', "bool(around)", "what begins every answer is never learned"),
        ("if here is None:", "if False:", "a prompt that opens a thought refuses earlier answers"),
        ("= here[len(os.path", "= prompt[len(os.path", "a model is asked after no empty thought"),
    ],
    ("prepare/records/conversation.py", "tests/prepare/templates/test_conversation.py"): [
        ("at - len(THOUGHT) if", "at if", "a thought in the content lacks its beginning"),
        ('r" \\1 "', 'r"\\1"', "a thought that touches its marks is refused"),
        ("elif self._is_taken_for_words(i):", "elif False:", "marks of another template's thoughts are learned"),
        ("PLACE + THOUGHT_END, 1)", "THOUGHT_END, 1)", "an empty thought stands twice"),
        ("if takes else", "if True else", "an object stands where a string is meant"),
    ],
    ("prepare/records/answers.py", "tests/prepare/templates/test_conversation.py"): [
        ('_UNASKED.sub("", prompt) + THOUGHT', '"-"', "a thought is refused where the prompt asks for none"),
        (
            "== solid(alone) + THOUGHT",
            "== 0",
            "a template whose prompt opens a thought that it never writes is refused",
        ),
        (
            " or self._renderings.with_message(i, message)",
            "",
            "the empty thought of an answer before any question is learned",
        ),
        (" if i else self._opened()", "", "the text before a first answer is learned with it"),
    ],
    ("prepare/records/answers.py", "tests/prepare/templates/test_marks.py"): [
        (
            "if self._text_from(begin, pattern.head) != pattern.head_text:",
            "if False:",
            "an answer begins as many characters after its turn as another one",
        ),
        (
            "if self._text_from(end, pattern.tail) != pattern.tail_text:",
            "if False:",
            "an answer stops as many characters before the next turn as another one",
        ),
        ("_some_of(matched)):", "[]):", "no matched answer is also located by renderings"),
        ("matched.append(i)", "answer = self._rendered(i)", "each answer costs renderings of its own"),
    ],
    ("prepare/records/renderings.py", "tests/prepare/templates/test_marks.py"): [
        ("if text == self.text:", "if True:", "a template that sees the marks is believed"),
        ("if silent and self._is_written_for(silent):", "if False:", "each thought that is left out costs a rendering"),
    ],
    ("prepare/records/marks.py", "tests/prepare/templates/test_marks.py"): [
        ('place[1] == "" or place not in', "place not in", "a turn begins where a template looks through all messages"),
    ],
    ("prepare/records/conversation.py", "tests/prepare/templates/test_marks.py"): [
        ("THOUGHT_WORDS if key in REASONING else key", "key", "each thought that is written costs a rendering"),
        ("return self._places_at_once() or", "return", "each image costs a rendering"),
    ],
    ("prepare/records/conversation.py", "tests/prepare/templates/test_ends.py"): [
        ("return after + len(token)", "return stop", "the token of the next turn is not learned"),
        ("return stop + len(self._closing)", "return stop", "the last answer has no end"),
        (
            'self.answers["no_end"] += len(self._learned',
            "0 * len(self._learned",
            "blocks without an end are not counted",
        ),
    ],
    ("prepare/records/chat_template.py", "tests/prepare/templates/test_ends.py"): [
        ("of_turn or goes_on or", "of_turn or", "a shared beginning ends with a token that no branch has"),
        ("if calls else self._after_answer", "if False else self._after_answer", "a call ends like an answer"),
    ],
    ("prepare/records/answers.py", "tests/prepare/templates/test_ends.py"): [
        (
            "if written[:i] == self._messages[:i]:",
            "if True:",
            "an answer after a call whose thought is dropped is refused",
        ),
    ],
    ("prepare/records/renderings.py", "tests/prepare/templates/test_ends.py"): [
        (
            "if alone and alone != self.tried(",
            "if True or (",
            "what is never written next to a call is dropped silently",
        ),
        ('written[i] = {**written[i], "content": ""}', "pass", "an answer after a call with a content is refused"),
    ],
    ("prepare/tokenize/beside.py", "tests/prepare/templates/test_ends.py"): [
        ('values.get("text_config")', "None", "the ends of a folder with a tower are not read"),
    ],
    ("prepare/packs/progress.py", "tests/prepare/templates/test_ends.py"): [
        ("if no_end:", "if False:", "a build that learns no end is silent"),
    ],
    ("training/data/manifest.py", "tests/prepare/test_public_chats.py"): [
        ("not (counts[0] and opens)", "not counts[0]", "ordinary chats are told about thoughts"),
    ],
    ("prepare/records/sandbox.py", "tests/prepare/templates/test_sandbox.py"): [
        ("resource.setrlimit(resource.RLIMIT_AS, limits)", "pass", "the limit of one rendering stays"),
        ('_Lazy(found) if hasattr(found, "__next__") else found', "found", "a generator's address is learned"),
        ("return _Function(value) if", "return value if", "a method's address is learned"),
        ('made.filters["random"] = _by_chance', "pass", "a build cannot be repeated"),
        ("if not all(address in there", "if not all(True", "an address that nobody wrote is learned"),
    ],
    ("prepare/packs/run.py", "tests/prepare/templates/test_choice.py"): [
        ("if writers and writers !=", "if False and writers !=", "a build goes on with another chat template"),
    ],
    ("prepare/media/reader.py", "tests/prepare/packs/test_qwen_images.py"): [
        ("(max(a, start) + by, min(b, stop) + by, w)", "(a, b, w)", "what is learned does not move behind a video"),
    ],
    ("prepare/records/forms.py", "tests/prepare/templates/test_learned.py"): [
        ("key: without_nulls(value) for", "key: value for", "nulls of columns are learned from lines alone"),
    ],
    ("prepare/records/tables.py", "tests/prepare/templates/test_learned.py"): [
        ('== "arrow.json"', '== ""', "a call is a string in a column of JSON"),
    ],
    ("integrations/mask.py", "tests/integrations/test_context.py"): [
        ("leave[path[low:height]]", "leave[path[low + 1 : height]]", "a branch sees the beginning of another one"),
        ("path[low:high], height = places[start:stop], high", "height = 0", "a branch that ended sees later ones"),
    ],
    ("prepare/records/chat_template.py", "tests/huggingface/generation/test_prompt.py"): [
        ("if prompt and self.before_answers and", "if False and", "nothing stands behind a prompt"),
        (
            "**self.variables, **variables,",
            "**variables, **self.variables,",
            "a flag wins over what a record says of its template",
        ),
    ],
    ("huggingface/generate_command.py", "tests/huggingface/generation/test_prompt.py"): [
        ("(real or empty <= none)", "real", "answers behind nothing are asked behind an empty thought"),
    ],
    ("training/data/vision/decoding.py", "tests/prepare/media/test_pixels.py"): [
        ("if i not in known]", "if i not in []]", "frames that are kept are decoded again"),
        ("= self._videos.pop(data, {})", "= self._videos.pop(data[:0], {})", "kept frames are forgotten"),
        ("len(video[0]) + sum", "sum", "kept files cost nothing"),
    ],
    ("engine/data_parallel/full_shard.py", GOLDEN): [
        ("* (parameter.numel() // shape[0])", "", "a part's place counts rows, not elements"),
        ("            parameter.grad = None", "            pass", "gradients of the last step stay in full shards"),
    ],
    ("distributed/collectives.py", f"{GRID} {ATTENTION}"): [
        ("for step in (by, -by))", "for step in (-by, by))", "shifts go to the rank before"),
        ("own if in_place else", "torch.empty_like(own) if in_place else", "a sum stands beside what it is the sum of"),
        ("own if in_place else torch.empty_like(own)", "own", "a sum is written over an input that is still needed"),
    ],
    ("engine/step/step.py", f"{GOLDEN} tests/training/test_denominator.py"): [
        ('f"{self.config.training.seed}/{step}"', 'f"{self.config.training.seed}"', "every step has one dropout mask"),
        ("self.grid.tp.rank == 0  #", "True  #", "the loss counts once for each tp rank"),
        ("chunk.eval()", "chunk.train()", "evaluation drops out"),
        ("check(loss, norm)", "check(loss, 0.0)", "nobody looks at the norm"),
    ],
    ("engine/step/rows.py", "tests/training/test_denominator.py"): [
        ("packs * grid.dp.size", "packs", "dynamic context parallelism forgets the packs of other ranks"),
    ],
    ("training/data/loader.py", "tests/training/data/test_loader.py"): [
        ("batch if present else", "batch if True else", "packs that stand in are trained on"),
        (
            "min(options.global_batch_size, options.end - consumed)",
            "options.global_batch_size",
            "the last step of an epoch takes packs of the next",
        ),
        ("[:, data_rank.index]", "[:, data_rank.index - 1]", "ranks read the packs of others"),
        ("len(found)), constant_values=-1", "len(found)), constant_values=0", "a short step counts pack 0 again"),
        (
            "min(self.consumed_samples + self._options",
            "min(self.consumed_samples + 0 * self._options",
            "the loader's state stays",
        ),
        ("self._requested = consumed_samples", "self._requested = 0", "a resumed loader reads from the start"),
    ],
    ("engine/models/multimodal.py", "tests/engine/models/test_multimodal.py"): [
        ("* valid[..., None]", "", "patches outside of the image count in the mean"),
        ("scores.masked_fill(~valid[:, None], -torch.inf)", "scores", "patches outside of the image get weight"),
        ("/ valid.sum(1, keepdim=True)", "/ (0 * valid + 1).sum(1, keepdim=True)", "the mean is over the whole window"),
    ],
    ("engine/config/vision.py", "tests/plan/test_costs.py tests/engine/config/test_cli.py"): [
        ("is_causal=True, ", "", "image tokens that the library masks may see each other"),
        (", head_multiple=4", "", "angles by row and column turn half a pair"),
        ("(POOLED_PATCHES, 1) if", "(1, 1) if", "a planned image of any shape is one patch"),
    ],
    ("engine/layers/vision.py", "tests/plan/test_costs.py tests/huggingface/convert/test_families.py"): [
        ('std=std, treated="table")', "std=std)", "positions are stepped as a vector"),
        ('for name in "kv"}', 'for name in "qkv"}', "the query of a window is counted for each patch"),
    ],
    ("engine/step/step.py", "tests/training/test_vision_dataset.py"): [
        ("if self.chunks[0].vision is not None:", "if False:", "patches are planned in the step"),
    ],
    ("attention/context_parallel/state_transport.py", "tests/training/test_vision_dataset.py"): [
        ("(False, True) if self.fused", "() if self.fused", "segments of states are planned in the step"),
    ],
    ("engine/models/vision.py", "tests/engine/models/test_multimodal.py"): [
        ("for layer in self.feature_layers", "for layer in self.feature_layers[::-1]", "feature layers are swapped"),
        ("(x + self.positions).flatten", "x.flatten", "patches have no position"),
        (
            "self.backend, self.scale = backend, config.vision_head_dim**-0.5",
            "self.backend, self.scale = backend, config.vision_head_dim**-1",
            "scale",
        ),
        ("x = x + self.output(attend", "x = self.output(attend", "the tower's residual is lost"),
    ],
    ("training/data/vision/qwen3_5.py", "tests/prepare/media/test_qwen3_5_rules.py"): [
        ("round(count / step) * step", "count", "the frames of a video are not counted in pairs"),
        ("(0, 2, 5, 3, 6, 8, 1, 4, 7)", "(0, 2, 3, 5, 6, 8, 1, 4, 7)", "the patches of a token are torn apart"),
        ("(width, pixels.shape[0])", "(pixels.shape[1], height)", "columns are blended before rows"),
        ("+ [frames[-1] / fps]", "+ [frames[0] / fps]", "half a pair has the mean of two times"),
        ("shrink = math.sqrt(count *", "shrink = math.sqrt(", "each frame has all pixels of the video"),
        ('"video_patch", self)', '"image_patch", self)', "a video is told as images"),
    ],
    ("training/data/images.py", "tests/prepare/packs/test_qwen_images.py"): [
        ("- step - ended", "- step", "a branch counts on behind its sibling"),
        ("= grids.max(1)", "= grids[:, 0]", "text goes on within a wide image"),
        ("within // columns", "within % columns", "rows count columns"),
        ("units.grids[mine]", "units.grids", "a rank has the grids of all ranks"),
    ],
    ("training/data/vision/decoding.py", "tests/prepare/packs/test_qwen_images.py"): [
        ("known.get(i, known[first])", "known.get(i, 0 * known[first])", "half a pair is followed by black"),
    ],
    ("prepare/packs/writer.py", "tests/prepare/packs/test_qwen_images.py"): [
        ("_GRID_ROW.pack(*unit.grid)", "_GRID_ROW.pack(*unit.grid[::-1])", "grids are stored lying down"),
    ],
    ("training/data/vision/molmo2.py", "tests/prepare/media/test_molmo2_rules.py"): [
        ("(m // 2, m - m // 2)", "(m - m // 2, m // 2)", "the larger half of padding stands first"),
        ("index[:-1, :, -right:]", "index[1:, :, -right:]", "a margin is cut at the wrong side"),
        ("grid + rules.patches_per_crop", "grid", "high-resolution windows pool the small crop"),
        ("* np.float32(255) for", "* np.float32(256) for", "pixels are scaled by 256"),
        (".swapaxes(1, 2).reshape(rows * columns", ".reshape(rows * columns", "windows are rows of patches"),
        ("+ np.float32(0.5)) - np.float32(0.5)", "+ np.float32(0.5)) - np.float32(0)", "pixels are half a place off"),
    ],
}
"""(file below megacp, the tests that are to see it) -> (text that stands there once, what it becomes, the mistake)."""


class Break(NamedTuple):
    """One mistake: `old`, which stands once in the file, becomes `new`, and some of `tests` are to fail."""

    file: str
    tests: str
    old: str
    new: str
    what: str


BREAKS = [Break(f"megacp/{file}", tests, *row) for (file, tests), rows in TABLE.items() for row in rows]


def lost(root: Path = ROOT) -> list[str]:
    """Breaks whose text no longer stands exactly once in its file."""
    found = {row: (root / row.file).read_text(encoding="utf-8").count(row.old) for row in BREAKS}
    return [f"{row.file} holds {count} times: {row.old}" for row, count in found.items() if count != 1]


def passes(tests: str, tree: Path) -> bool:
    """Whether the fast tests of these files pass in a copy of the tree; one that hangs does not."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", FAST, *tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    assert done.returncode in (0, 1, 2, 5), done.stdout.decode()[-2000:]
    return done.returncode in (0, 5)  # 5: none of them is fast


def dies(row: Break, tree: Path) -> bool:
    """Whether a test fails with the break in a copy of the tree, which is then as it was."""
    path = tree / row.file
    whole = path.read_text(encoding="utf-8")
    broken = whole.replace(row.old, row.new)
    compile(broken, row.what, "exec")  # any test would see an error of syntax
    path.write_text(broken, encoding="utf-8")
    try:
        return not passes(row.tests, tree)
    finally:
        path.write_text(whole, encoding="utf-8")


def copied(root: Path, tree: Path) -> Path:
    """A copy of what git knows of a tree."""
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, check=True, text=True).stdout
    for file in listed.splitlines():
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / file, tree / file)
    return tree


def main(words: list[str], root: Path = ROOT) -> int:
    """Run the chosen breaks on two copies of the tree, print what becomes of each; 1 when too many survive."""
    chosen = [row for row in BREAKS if not words or any(word in f"{row.file} {row.what}" for word in words)]
    if reasons := lost(root):
        print("\n".join(reasons))
        return 1
    survived: list[Break] = []
    with tempfile.TemporaryDirectory() as above, concurrent.futures.ThreadPoolExecutor(2) as pool:
        trees = [copied(root, Path(above, name)) for name in ("a", "b")]
        free = threading.local()

        def tree() -> Path:
            if not hasattr(free, "tree"):
                free.tree = trees.pop()
            return free.tree  # type: ignore[no-any-return]  # one of a thread

        suites = list(dict.fromkeys(row.tests for row in chosen))
        whole = pool.map(lambda tests: passes(tests, tree()), suites)
        if failing := [tests for tests, good in zip(suites, whole, strict=True) if not good]:
            print("these tests fail, or hang, before anything is broken: " + ", ".join(failing))
            return 1
        for row, died in zip(chosen, pool.map(lambda row: dies(row, tree()), chosen), strict=True):
            print(f"{'killed  ' if died else 'SURVIVED'}  {row.file}: {row.what}", flush=True)
            survived += [] if died else [row]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} breaks were seen")
    return int(len(survived) > (1 - LEAST) * len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
