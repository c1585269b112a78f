"""Breaks the code in more than a hundred places, one at a time, and says which of them the fast tests do not see.

`make mutants` takes half an hour on two cores. `python tests/mutants.py ring mask` takes the breaks whose file or
sentence holds one of these words. Each is made in a copy of the tree. The exit status is 1 when fewer than 97 % die.
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

MASK = "tests/ops/test_mask.py"
KERNELS = "tests/ops/test_kernels.py tests/ops/test_calls.py"
FLEX = "tests/ops/test_flex.py tests/ops/test_blocks.py"
POINTWISE = "tests/ops/test_pointwise.py"
CP = "tests/context_parallel"
ATTENTION = "tests/context_parallel/test_attention.py tests/context_parallel/test_a2a.py"
LAYOUT = "tests/context_parallel/test_layout.py"
IMAGES = "tests/context_parallel/test_vision.py tests/data"
TP = "tests/tensor_parallel"
LORA = "tests/models/test_lora.py"
PP = "tests/pipeline_parallel"
DP = "tests/data_parallel tests/optim"
GRID = "tests/distributed"
MODEL = "tests/models/test_language.py"
DATA = "tests/data"
TRAIN = "tests/training/test_loss.py tests/training/test_golden_gradients.py"
HEALTH = "tests/training/test_health.py"
SAVE = "tests/checkpoint"
PACK = "tests/prepare/build"


class Break(NamedTuple):
    """One mistake: `old`, which stands once in the file, becomes `new`, and some of `tests` are to fail."""

    file: str
    old: str
    new: str
    what: str
    tests: str


def in_file(file: str, tests: str, *rows: tuple[str, str, str]) -> list[Break]:
    return [Break(file, *row, tests) for row in rows]


BREAKS = [
    *in_file(
        "megacp/core/ops/mask.py",
        MASK,
        (
            "full = visible & ((k.order[j] < q.order[i]) | same_span)",
            "full = (visible & (k.order[j] < q.order[i])) | same_span",
            "spans of different branches see each other",
        ),
        (
            "full = visible & ((k.order[j] < q.order[i])",
            "full = visible & ((k.order[j] <= q.order[i])",
            "a causal square is full",
        ),
        (
            "causal = visible & (k.order[j] == q.order[i]) & ~same_span",
            "causal = visible & (k.order[j] == q.order[i])",
            "a span's own square is causal",
        ),
        (
            "visible = (k.branch[j] == 0) | (k.branch[j] == q.branch[i])",
            "visible = (k.branch[j] <= q.branch[i])",
            "a branch sees an earlier one",
        ),
        (
            "same_span = (q.span[i] != 0) & (q.span[i] == k.span[j])",
            "same_span = q.span[i] == k.span[j]",
            "text of no span sees the future",
        ),
        (
            "index - self.row_start[row] + 1, 0)",
            "index - self.row_start[row], 0)",
            "keys of a causal query are one short",
        ),
        (
            "n * (n + 1) // 2, n * (self.k_stop",
            "n * (n - 1) // 2, n * (self.k_stop",
            "the area of a triangle without its diagonal",
        ),
        ("steps, self.k_stop, -1)", "steps, self.k_stop - 1, -1)", "the last key of a tile is not needed"),
        ("change[1:] = meta.order[1:] != meta.order[:-1] + 1", "change[1:] = False", "runs join over gaps"),
        (
            "return runs.take(np.flatnonzero(runs.document >= 0))",
            "return runs.take(np.flatnonzero(runs.document >= -1))",
            "padding is a document",
        ),
        (
            'first = np.searchsorted(ends, runs.order, side="right")',
            'first = np.searchsorted(ends, runs.order, side="left")',
            "runs are cut at their own begin",
        ),
        ("(kind[1:] == FULL) & (kind[:-1] == FULL) & (k.start", "(k.start", "a triangle joins a rectangle"),
    ),
    *in_file(
        "megacp/core/ops/tile_kernels.py",
        KERNELS,
        (
            "pairs[np.tri(*pairs.shape) > 0 if tile.kind == CAUSAL else ...] = 0.0",
            "pairs[np.tri(*pairs.shape, 1) > 0 if tile.kind == CAUSAL else ...] = 0.0",
            "a masked call sees one key ahead",
        ),
        (
            "            dq[rows] += found[0]",
            "            dq[rows] = found[0]",
            "the query gradient of an earlier call is lost",
        ),
        ("        x[part] += piece", "        x[part] = piece", "the key gradient of an earlier call is lost"),
        (
            "weights = torch.exp(scores - lse.unsqueeze(-1))\n            q, out",
            "weights = torch.exp(scores - scores.amax(-1, keepdim=True))\n            q, out",
            "backward without the merged log-sum-exp",
        ),
        ("delta = (out * dout).sum(-1)", "delta = 0 * (out * dout).sum(-1)", "softmax backward without its row sum"),
        (
            "            if partial.untouched and call.first:",
            "            if partial.untouched:",
            "a second call of the same queries overwrites",
        ),
    ),
    *in_file(
        "megacp/core/ops/flex.py",
        FLEX,
        ("seen = (k_place[j] <= q_place[i])", "seen = (k_place[j] < q_place[i])", "a token does not see itself"),
        ("np.where(k.span != 0, k.span, _NOBODY)", "k.span", "text of no span sees the future on a GPU"),
        ("(-1, (q.document", "(_NOBODY, (q.document", "padded queries see padded keys"),
    ),
    *in_file(
        "megacp/core/ops/pointwise.py",
        POINTWISE,
        ("addcmul_(wide_x, inward, value=-1)", "addcmul_(wide_x, inward, value=1)", "sign in the norm's backward"),
        ("* scale**3 / x.shape[-1]", "* scale**2 / x.shape[-1]", "power in the norm's backward"),
        (
            "torch.mul(grad, up, out=for_gate)",
            "torch.mul(grad, gate, out=for_gate)",
            "SwiGLU's gate takes the wrong half",
        ),
        ("/ (1.0 - probability)", "", "dropout does not scale what is kept"),
        ("int(probability * 2**32)", "int((1 - probability) * 2**32)", "dropout keeps what it should drop"),
        (
            "column = torch.arange(first, first + columns",
            "column = torch.arange(0, columns",
            "tp ranks repeat each other's dropout",
        ),
    ),
    *in_file(
        "megacp/core/ops/rotary.py",
        POINTWISE,
        (
            "torch.cat([sin * -sign, sin * sign], -1)",
            "torch.cat([sin * sign, sin * -sign], -1)",
            "rotation turns the other way",
        ),
        (
            "return _rotate(grads[0], cos, sin, -1), None, None",
            "return _rotate(grads[0], cos, sin, 1), None, None",
            "the gradient is rotated forward",
        ),
        (
            "angles = positions.double()[:, None, None]",
            "angles = positions.float()[:, None, None]",
            "angles in float32",
        ),
        (
            "smooth = (positions / wavelength - low) / (high - low)",
            "smooth = (positions / wavelength) / (high - low)",
            "llama3's blend",
        ),
    ),
    *in_file(
        "megacp/core/context_parallel/transport.py",
        ATTENTION,
        (
            "q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))\n        return _AttendBlocks",
            "return _AttendBlocks",
            "a transposed view is read past its end",
        ),
        (
            "saved, wide = Saved(q, out, lse, douts[0].contiguous())",
            "saved, wide = Saved(q, out, torch.zeros_like(lse), douts[0].contiguous())",
            "backward of a block without the merged log-sum-exp",
        ),
    ),
    *in_file(
        "megacp/core/context_parallel/ring.py",
        ATTENTION,
        (
            "                if gradient:\n                    dkv += gradient.wait()\n",
            "",
            "the visiting gradient is dropped",
        ),
        (
            "            home += gradient.wait()",
            "            gradient.wait()",
            "gradients of other ranks never come home",
        ),
        (
            "plan.table((self.axis.rank - step) % self.axis.size)",
            "plan.table((self.axis.rank + step) % self.axis.size)",
            "the ring turns the other way",
        ),
        ("if step < size - 1 else None", "if step < size - 2 else None", "the last hop is not made"),
    ),
    *in_file(
        "megacp/core/context_parallel/all_gather.py",
        ATTENTION,
        ("row[plan.cp_rank * len(mine)", "row[0 * len(mine)", "own gradients stand at rank 0"),
        (
            "return plan.order[~mine[plan.order]]",
            "return plan.order[mine[plan.order]]",
            "the keys of others are one's own",
        ),
    ),
    *in_file(
        "megacp/core/context_parallel/a2a.py",
        ATTENTION,
        ("out.index_select(0, plan.departure(n, q.device))", "out", "the output goes back in the grouped order"),
        (
            "outgoing = torch.cat([x.unflatten(1, (n, -1))",
            "outgoing = torch.cat([x.unflatten(1, (-1, n)).transpose(1, 2)",
            "heads are dealt in turns",
        ),
        (
            ".expand(t, groups, copies, d).flatten(1, 2)",
            ".detach().expand(t, groups, copies, d).flatten(1, 2)",
            "copied K/V get no gradient",
        ),
    ),
    *in_file(
        "megacp/core/context_parallel/kv_exchange.py",
        ATTENTION,
        ("leaving[order] = theirs", "leaving = theirs.clone()", "gradients go back in the row's order"),
        (
            "dkv.index_add_(0, rows, values)",
            "dkv.index_copy_(0, rows, values)",
            "a key that several ranks need keeps one gradient",
        ),
        (
            "order = np.argsort(position[keys])",
            "order = np.argsort(keys)",
            "arrived keys in another order than their tiles",
        ),
    ),
    *in_file(
        "megacp/core/context_parallel/plan.py",
        LAYOUT + " " + ATTENTION,
        (
            "return np.argsort(self._position[self.indices[first : first + size].reshape(-1)])",
            "return np.argsort(self.indices[first : first + size].reshape(-1))",
            "arrival by the row instead of the plan's order",
        ),
        ("first = self.cp_rank // size * size", "first = self.cp_rank", "the group of a rank begins at itself"),
    ),
    *in_file(
        "megacp/core/context_parallel/layout.py",
        LAYOUT,
        ("return rank, 2 * cp - 1 - rank", "return rank, cp + rank", "zigzag is not even"),
        ("missing = -(last - first) % (2 * cp)", "missing = -(last - first) % cp", "documents are filled up to half"),
        ("return math.lcm(self.chunks * cp, cp * tp)", "return self.chunks * cp", "rows do not divide by tp"),
    ),
    *in_file(
        "megacp/core/context_parallel/balance.py",
        LAYOUT,
        (
            "last = np.where(metadata.branch == 0, _last(metadata.document), _last(of_branch))",
            "last = _last(metadata.document)",
            "a branch's keys cross to other branches",
        ),
        ("(area[high] - area[low]) / left)", "area[-1] / cp)", "errors pile up on the last rank"),
    ),
    *in_file(
        "megacp/core/context_parallel/choose.py",
        "tests/context_parallel/test_choose.py",
        ("if needed <= FEW_ROWS:", "if needed > FEW_ROWS:", "auto takes the exchange for dense masks"),
        ("heads % cp == 0 and", "", "auto takes a2a where heads do not divide"),
    ),
    *in_file(
        "megacp/core/context_parallel/shard.py",
        LAYOUT,
        (
            "padded = batch.with_padding_to(layout.padded_length(mask_metadata(batch), cp, tp))",
            "padded = batch.with_padding_to(layout.padded_length(mask_metadata(batch), cp, 1))",
            "padding forgets tp",
        ),
        (
            "fields = (padded.tokens, padded.labels,",
            "fields = (padded.tokens, np.roll(padded.labels, -1),",
            "labels are shifted twice",
        ),
    ),
    *in_file(
        "megacp/core/context_parallel/vision.py",
        IMAGES,
        (
            "np.repeat(np.arange(cp), stops - starts)",
            "np.repeat(np.arange(cp)[::-1], (stops - starts)[::-1])",
            "features come from the wrong rank",
        ),
        (
            "chosen = features.index_select(0, _index(here, x))",
            "chosen = features[: len(here)]",
            "a tp slice takes the first features",
        ),
        ("    features = copy_to(features, tp)\n", "", "the features' gradient is not summed over tp"),
        ('np.argsort(self.target[mine], kind="stable")', "np.arange(len(mine))", "features leave in their own order"),
    ),
    *in_file(
        "megacp/core/tensor_parallel/linear.py",
        TP + " " + MODEL,
        (
            "y = reduce_from(product(x, self.weight, options.weight_gradients), options.tp)",
            "y = product(x, self.weight, options.weight_gradients)",
            "a row linear without its sum",
        ),
        (
            "return product(copy_to(x, options.tp), weight",
            "return product(x, weight",
            "a column linear's input gradient is not summed",
        ),
        (
            "partial = options.sequence_parallel if partial_over_tp is None else partial_over_tp",
            "partial = False",
            "gradients of norms are not summed over tp",
        ),
        ("counted=options.tp.rank == 0", "counted=True", "replicas count several times in the norm"),
        ("squares / (x.shape[-1] * axis.size)", "squares / x.shape[-1]", "a norm over columns divides by its own"),
        ("begin, name = tp.rank * local[0]", "begin, name = 0 * local[0]", "all ranks save the first rows"),
    ),
    *in_file(
        "megacp/core/tensor_parallel/weight_gradients.py",
        TP + " " + PP,
        (
            "total.add_(grad.t() @ x)",
            "total.copy_(grad.t() @ x)",
            "a fused gradient overwrites that of the microbatch before",
        ),
        (
            "if last and not uses[product.weight]:",
            "if not uses[product.weight]:",
            "buckets hear of gradients that are not final",
        ),
    ),
    *in_file(
        "megacp/core/tensor_parallel/chunked_loss.py",
        TP,
        ("logits[:, options.true_rows :] = 0.0", "pass", "padded rows get a gradient"),
        ("(-scale).masked_fill(elsewhere, 0.0)", "(-scale)", "every rank subtracts the label"),
        ("shared[:, 1].sum(0)", "shared[:, 1].amax(0)", "the target logit is the highest of the ranks"),
        (").sum() / denominator", ").mean() / denominator", "the loss is a mean of a rank"),
        ("None if dx is None else dx.mul_(grad)", "None if dx is None else dx", "the loss is not scaled in backward"),
        (
            "zeros(weight.shape, weight, wide if tokens > step else None)",
            "zeros(weight.shape, weight, None)",
            "chunks are summed in bfloat16",
        ),
    ),
    *in_file(
        "megacp/core/tensor_parallel/embedding.py",
        TP,
        ("x = x.masked_fill(elsewhere[:, None], 0.0)", "x = x", "row 0 stands in for tokens of other ranks"),
        (
            "elsewhere = (local < 0) | (local >= self.true_rows)",
            "elsewhere = (local < 0) | (local > self.true_rows)",
            "one row too many is looked up",
        ),
    ),
    *in_file(
        "megacp/core/tensor_parallel/lora.py",
        LORA,
        (
            "partial = options.sequence_parallel and tp.size > 1  # each",
            "partial = False  # each",
            "A is not summed over tp",
        ),
        ("x, True, self.first), self.down)", "x, True), self.down)", "tp ranks share dropout columns"),
        (
            "return torch.add(y, F.linear(u, self.up), alpha=self.scale)",
            "return torch.add(y, F.linear(u, self.up))",
            "alpha / rank is left out",
        ),
    ),
    *in_file(
        "megacp/core/models/attention.py",
        MODEL,
        (
            "self.scale = config.head_dim**-0.5",
            "self.scale = config.hidden_size**-0.5",
            "scores are scaled by the hidden size",
        ),
        (
            "q, k = (rotate(part, *rotary) if self.rotates",
            "q, k = (rotate(part, *rotary) if True",
            "layers without rotary embedding have one",
        ),
    ),
    *in_file(
        "megacp/core/models/block.py",
        MODEL,
        ("inputs, 2 * self.layer + 1)", "inputs, 2 * self.layer)", "attention and MLP share dropout bits"),
        ("x = x + self._drop(attended", "x = self._drop(attended", "the first residual is lost"),
    ),
    *in_file(
        "megacp/core/models/language.py",
        MODEL,
        (
            "slice_of(batch.token_names, self.backend.tp) if self.backend.sequence_parallel else batch.token_names",
            "batch.token_names[: len(x)]",
            "tp ranks share dropout rows",
        ),
    ),
    *in_file(
        "megacp/core/pipeline_parallel/schedules.py",
        PP,
        (
            "            if len(waiting) > stage:",
            "            if len(waiting) > stage + 1:",
            "one more weight gradient is deferred",
        ),
        (
            "return num_stages - stage - 1\n    return",
            "return num_stages - stage\n    return",
            "warm-up of 1F1B holds one more",
        ),
        ("num_chunks - 1 - chunk) for", "chunk) for", "backward passes the chunks in forward order"),
        ("return chunk * num_stages + stage", "return stage * num_stages + chunk", "virtual stages in another order"),
        (
            "missing = -num_microbatches % num_stages if num_chunks > 1 else 0",
            "missing = 0",
            "a short group is the last",
        ),
        (
            'return Channel("backward", stage, before)',
            'return Channel("backward", stage, after)',
            "gradients go forward",
        ),
    ),
    *in_file(
        "megacp/core/pipeline_parallel/runtime.py",
        PP,
        ("if len(under_way) >= self.links.send_window:", "if False:", "the window of sends is unbounded"),
        (
            "            torch.autograd.backward([self.edges.pop(key)], [self.output_gradients.pop(key)])",
            "            torch.autograd.backward([self.edges.pop(key)], [self.output_gradients.pop(key) * 2])",
            "a gradient doubles at a stage",
        ),
        (
            "            self.outgoing[key] = gradient",
            "            self.outgoing[key] = gradient.clone().zero_()",
            "stages before get no gradient",
        ),
        ("final[action.kind, action.chunk] == action", "True", "every backward is called the last"),
    ),
    *in_file(
        "megacp/core/pipeline_parallel/partition.py",
        PP,
        (
            "options.append((squares + cost * cost, counts",
            "options.append((squares - cost * cost, counts",
            "the least even cut",
        ),
    ),
    *in_file(
        "megacp/core/data_parallel/buckets.py",
        DP,
        (
            "bucket.gradient_of(bucket.plan.slots[number]).add_(parameter.grad)",
            "bucket.gradient_of(bucket.plan.slots[number]).copy_(parameter.grad)",
            "microbatches overwrite each other",
        ),
        (
            "total is None else total.add_(found)",
            "total is None else found",
            "sharded gradients of earlier microbatches are lost",
        ),
        (
            "self.shard_start = axis.rank * self.shard_elements",
            "self.shard_start = 0",
            "every rank updates the first slice",
        ),
        ("                bucket.gradients.zero_()", "                pass", "gradients of the last step stay"),
        (
            "            if len(self._arrived[index]) < len(self.buckets[index].plan.slots):",
            "            if not self._arrived[index]:",
            "a bucket leaves with its first gradient",
        ),
    ),
    *in_file(
        "megacp/core/data_parallel/shards.py",
        DP,
        (
            "if name in shard.partial_over]",
            "if name not in shard.partial_over]",
            "the wrong gradients are summed over tp",
        ),
        (
            "return self.shards[index].counted and self.saves",
            "return self.shards[index].counted",
            "copies of instances count in the norm",
        ),
        (
            "axes = [(self.copies, list(range(len(found))))] if self.copies.size > 1 else []",
            "axes = []",
            "instances are not summed",
        ),
    ),
    *in_file(
        "megacp/core/data_parallel/layout.py",
        DP,
        (
            "(spec.partial_over, spec.weight_decay, spec.counted, spec.lr_multiplier)",
            "(spec.partial_over, spec.counted, spec.lr_multiplier)",
            "norms share a bucket with what decays",
        ),
        ("low = max(begin, slot.start)", "low = slot.start", "a slice begins before its parameter"),
    ),
    *in_file(
        "megacp/core/optim/adamw.py",
        DP,
        ("settings.weight_decay if rule.decayed else 0.0", "settings.weight_decay", "norms decay"),
        ('group["lr"] = lr * multiplier', 'group["lr"] = lr', "towers learn at the rate of the text"),
        ("1.0 / scale, device", "scale, device", "clipping multiplies instead of dividing"),
    ),
    *in_file(
        "megacp/core/optim/clip.py",
        DP,
        ("return all_reduce(total, world).sqrt().item()", "return total.sqrt().item()", "the norm of a rank"),
        ("(1.0 if counted else 0.0)", "1.0", "copies count in the norm"),
        (".double().square().sum()", ".square().sum().double()", "squares are summed in float32"),
        ("min(1.0, clip_grad / (norm + 1e-6))", "clip_grad / (norm + 1e-6)", "small gradients grow"),
    ),
    *in_file(
        "megacp/core/optim/lr_schedule.py",
        "tests/optim/test_lr_schedule.py",
        (
            "return schedule.lr * update / schedule.lr_warmup_iters",
            "return schedule.lr * (update - 1) / schedule.lr_warmup_iters",
            "the first update has rate 0",
        ),
        ("0.5 * (1.0 + math.cos(math.pi * part))", "math.cos(math.pi * part / 2)", "another cosine"),
        (
            "start = schedule.lr_decay_iters - schedule.lr_wsd_decay_iters",
            "start = schedule.lr_warmup_iters",
            "WSD falls from the start",
        ),
    ),
    *in_file(
        "megacp/core/distributed/grid.py",
        GRID,
        ('AXES = ("tp", "cp", "dp", "pp")', 'AXES = ("cp", "tp", "dp", "pp")', "cp varies fastest"),
        (
            "axis.global_ranks[axis.rank % inner :: inner]",
            "axis.global_ranks[axis.rank // inner :: inner]",
            "outer groups of other ranks",
        ),
    ),
    *in_file(
        "megacp/core/distributed/differentiable.py",
        GRID,
        (
            "return _dual(x, axis, _identity, collectives.all_reduce)",
            "return _dual(x, axis, _identity, _identity)",
            "copy_to sums nothing",
        ),
        (
            "return _dual(x, axis, collectives.all_reduce, _identity)",
            "return _dual(x, axis, collectives.all_reduce, collectives.all_reduce)",
            "reduce_from sums twice",
        ),
        (
            "lambda rows, over: collectives.all_to_all(rows, over, out_splits, in_splits)",
            "lambda rows, over: collectives.all_to_all(rows, over, in_splits, out_splits)",
            "an exchange's gradient takes the way there",
        ),
    ),
    *in_file(
        "megacp/core/training/loss.py",
        TRAIN,
        ("return self.weight or 1.0", "return 1.0", "sums are not divided"),
        (
            "weight, total = table[first, 2:4].sum(0)",
            "weight, total = table[:, 2:4].sum(0)",
            "all ranks count, not one of each replica",
        ),
        (
            '_SUMMED = ("flops", "image_documents")',
            '_SUMMED = ("flops", "image_documents", "stop_reason")',
            "stop reasons add up",
        ),
    ),
    *in_file(
        "megacp/core/training/health.py",
        HEALTH,
        (
            "if math.isfinite(loss) and math.isfinite(grad_norm):",
            "if math.isfinite(loss):",
            "a gradient of NaN is an update",
        ),
        ("            self.skipped_in_a_row = 0\n", "", "skipped steps are never forgotten"),
        ("value <= factor * usual", "value <= usual", "every step above the median is a spike"),
        (
            "if not limit or self.skipped_in_a_row < limit:",
            "if not limit or self.skipped_in_a_row <= limit:",
            "one more step is skipped",
        ),
    ),
    *in_file(
        "megacp/core/data/order.py",
        DATA,
        (
            "outside = outside[values >= np.uint64(length)]",
            "outside = outside[values > np.uint64(length)]",
            "a sample beyond the dataset",
        ),
        ('f"{seed} {epoch} {length}"', 'f"{seed} {length}"', "every epoch has one order"),
        (
            "np.arange(start, start + count, dtype=np.int64), length)",
            "np.arange(0, count, dtype=np.int64), length)",
            "a resumed run begins anew",
        ),
    ),
    *in_file(
        "megacp/core/data/collate.py",
        DATA,
        (
            "labels, label_weights = np.roll(stored, -1), np.roll(weights, -1)",
            "labels, label_weights = np.roll(stored, -1), weights",
            "weights do not move with labels",
        ),
        ("labels[last], label_weights[last] = 0, 0", "labels[last] = 0", "the last token predicts"),
        (
            "position=np.concatenate((zeros, prefix[owner]))[order]",
            "position=np.concatenate((zeros, 0 * prefix[owner]))[order]",
            "branches begin at position 0",
        ),
        (
            "(runs.branch[1:] > 1) & (stored",
            "(runs.branch[1:] > 0) & (stored",
            "a prefix with one branch predicts nothing",
        ),
        (
            "begin = np.cumsum(padded) - padded",
            "begin = np.cumsum(true) - true",
            "segments stand without their padding",
        ),
    ),
    *in_file(
        "megacp/core/data/image_shards.py",
        DATA,
        (
            "room = bisect.bisect_right(running, running[start] + low, start) - 1",
            "room = bisect.bisect_left(running, running[start] + low, start)",
            "a rank takes one unit too many",
        ),
        ("start = min(room, units - (filled - rank - 1))", "start = room", "ranks starve"),
        ("each + (rank < rest)", "each + (rank <= rest)", "uniform shards hold one unit too many"),
        ('np.argsort(-costs, kind="stable")', 'np.argsort(costs, kind="stable")', "the cheapest first"),
        (
            'np.searchsorted(cum_crop_bounds, (start, stop), side="right")',
            'np.searchsorted(cum_crop_bounds, (start, stop), side="left")',
            "units of a rank are one off",
        ),
    ),
    *in_file(
        "megacp/core/data/row_images.py",
        DATA,
        (
            "(np.cumsum(totals) - totals)[pack]",
            "0 * (np.cumsum(totals) - totals)[pack]",
            "bounds of the second pack begin at 0",
        ),
        (
            "zip(units.first, units.num_tokens, number + 1, strict=True)",
            "zip(units.first, units.num_tokens, number, strict=True)",
            "the first image sees nobody ahead",
        ),
    ),
    *in_file(
        "megacp/core/data/blend.py",
        DATA,
        (
            "first, own = int(nth[here][0]), _seed(seed, number)",
            "first, own = 0, _seed(seed, number)",
            "each step repeats a dataset's first samples",
        ),
        (
            "chosen[here] = self._first[number] + samples(",
            "chosen[here] = samples(",
            "all samples are of the first dataset",
        ),
    ),
    *in_file(
        "megacp/core/checkpoint/names.py",
        SAVE,
        (
            "first, last = -(-low // row), high // row",
            "first, last = low // row, high // row",
            "a partial first row is taken for whole",
        ),
        ("if copies or part.spec.counted)", "if True)", "copies are saved twice"),
        ("low = max(part.start, begin)", "low = part.start", "a slice of two tensors"),
    ),
    *in_file(
        "megacp/core/checkpoint/directory.py",
        SAVE,
        ("older[keep_last - 1 :]", "older[keep_last:]", "one checkpoint more is kept"),
        (
            "key=lambda folder: serials[folder], reverse=True)",
            "key=lambda folder: serials[folder])",
            "the oldest is the newest",
        ),
    ),
    *in_file(
        "megacp/prepare/build/packing.py",
        PACK,
        (
            "needed = min(len(available), -(-remaining // each))",
            "needed = len(available)",
            "more packs are taken than items are left",
        ),
        (
            'order = np.argsort(-lengths, kind="stable")',
            'order = np.argsort(lengths, kind="stable")',
            "the shortest first",
        ),
        (
            "np.minimum(start + longest, lengths[document])",
            "start + longest",
            "the last piece is as long as the others",
        ),
        (
            "(free_crops[: opened + 1] >= need_crops)",
            "(free_crops[: opened + 1] >= 0)",
            "the second budget does not count",
        ),
    ),
]


def dies(row: Break, tree: Path) -> bool:
    """Whether a test fails, or hangs, with the break in a copy of the tree, which is then as it was."""
    path = tree / row.file
    whole = path.read_text(encoding="utf-8")
    assert whole.count(row.old) == 1, f"{row.file} holds {whole.count(row.old)} times: {row.old}"
    path.write_text(whole.replace(row.old, row.new), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", FAST, *row.tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=SECONDS, check=False)
        assert done.returncode in (0, 1, 2), done.stdout.decode()[-2000:]
        return done.returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(whole, encoding="utf-8")


def main(words: list[str], root: Path = ROOT) -> int:
    """Run the chosen breaks on two copies of the tree, print what becomes of each; 1 when too many survive."""
    chosen = [row for row in BREAKS if not words or any(word in f"{row.file} {row.what}" for word in words)]
    survived: list[Break] = []
    with tempfile.TemporaryDirectory() as above, concurrent.futures.ThreadPoolExecutor(2) as pool:
        listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, check=True, text=True).stdout
        trees: list[Path] = []
        for name in ("a", "b"):
            trees.append(Path(above, name))
            for file in listed.splitlines():
                (trees[-1] / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / file, trees[-1] / file)
        free = threading.local()

        def tried(row: Break) -> tuple[Break, bool]:
            if not hasattr(free, "tree"):
                free.tree = trees.pop()
            return row, dies(row, free.tree)

        for row, died in pool.map(tried, chosen):
            print(f"{'killed  ' if died else 'SURVIVED'}  {row.file}: {row.what}", flush=True)
            survived += [] if died else [row]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} breaks were seen")
    return int(len(survived) > (1 - LEAST) * len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
