"""Checks that a grid trains like one process, by comparing every gradient and update in float64.

Both train on the same packs. The grid runs the `ParallelModel` of a training run, and the single
process uses an explicit dense mask. Each rank's shards, including replicas, are compared with the
full tensors by global name. An element that is missing on all ranks counts as wrong. Comparing
losses is not enough, because about half of all gradient bugs leave them plausible. Comparing
parameters is not enough either, because a missing update is only as large as the learning rate. The
comparison therefore includes updates.

Differences are relative: a tensor's largest error divided by its largest value. The divisor is at
least a thousandth of the largest value in the model, because the noise in small tensors comes from
the large ones.

`prepare` makes the config of any run small enough for one process. It never changes the parallel
layout under test: the grid, virtual stages, transport, token layout, recomputation and micro batch
size. It shortens rows, reduces the batch size, uses float64 and, if the model is large, reduces its
width, depth and vocabulary. The model keeps its heads, groups, options, tied weights, and at least
one layer per stage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megacp.attention.ops.kernels import kernel_problem
from megacp.distributed.grid import build_grid
from megacp.engine.checks import require
from megacp.engine.config.blend import named_folders, shown_path
from megacp.engine.config.parallel import ParallelConfig
from megacp.engine.config.run import ON_CPU, RunConfig, Value, fields, flag, flatten, with_values
from megacp.engine.data_parallel.boxes import boxes_of_slice
from megacp.engine.data_parallel.shards import ParameterSlice
from megacp.engine.models.costs import run_parameters
from megacp.engine.optim.lr_schedule import learning_rate
from megacp.engine.rows.batch import PackedBatch
from megacp.engine.step.rows import Rows
from megacp.engine.step.step import ParallelModel
from megacp.training.data.images import ImageLoading
from megacp.training.data.loader import step_batches
from megacp.training.data.manifest import MANIFEST_NAME
from megacp.training.data.mock import MockDecoder, MockRules, mock_batch
from megacp.training.loop.denominator import agree_on_step
from megacp.training.loop.images import image_loading, mock_images
from megacp.training.loop.sources import Sources, loader_options, open_sources
from megacp.verify.cases import MODELS, TINY_SIZES, TINY_TOWER

# The single process needs the whole model in float64 with its optimizer, and attention scores of
# shape [heads, T, T] for a stored row of T tokens.
MAX_PARAMETERS = 20_000_000
MOST_ROW_TOKENS = 4096

# Settings that override even explicit flags, so that updates far exceed float64 rounding errors.
_PRECISION: dict[str, Value] = {
    "dtype": "float64",
    # With 1e-8, the first update would be the gradient's sign, even if the gradient consists of
    # rounding errors.
    "adam_eps": 1e-4,
    "lr": 1e-2,
    "min_lr": 0.0,
    "lr_decay_style": "constant",
    "lr_warmup_iters": 0,  # the first updates of a warm-up may be smaller than rounding errors
    "lr_warmup_fraction": None,
    "lr_decay_iters": None,
    "lr_wsd_decay_iters": None,
}
# Flags that do not affect a step, in addition to the flags of `checkpoint` and `log`.
_SET_ASIDE = (
    "train_epochs",
    "valid_data_path",
    "eval_interval",
    "exit_duration",
    "dry_run",
    "world_size",
)
# Fields that must match stored packs.
_FIXED_BY_PACKS = {"vocab_size", "vision_patch_size", "vision_image_size", "seq_length"}
# The single process has no parallelism. It also uses a dense mask and no recomputation.
ONE_PROCESS: dict[str, Value] = {
    "cp_layout": "contiguous",
    "vision_shards": "contiguous",
    "recompute_granularity": "none",
    "activation_offload": 0.0,
    "mlp_chunk_tokens": 0,
    "attention_kernel": "dense",
}


@dataclass(frozen=True)
class ParitySetup:
    """A config to be compared with one process on the same packs, and notes on changed flags."""

    config: RunConfig
    rules: MockRules | None
    """Rules for random packs; None to use the packs of --data-path."""
    world_size: int
    notes: tuple[str, ...]

    @property
    def reference(self) -> RunConfig:
        """The config of the single process, with the same rows."""
        # Dynamic context parallelism joins the packs of all dp ranks into one row.
        dynamic = self.config.parallel.dynamic_context_parallel
        joined = self.config.data_parallel_size(self.world_size) if dynamic else 1
        packs = self.config.training.micro_batch_size * joined
        alone = replace(self.config, parallel=ParallelConfig())
        return with_values(alone, {**ONE_PROCESS, "micro_batch_size": packs})


def prepare(
    config: RunConfig,
    given: Collection[str] = (),
    has_config: bool = False,
    model: str | None = None,
    mask: str | None = None,
    world_size: int | None = None,
) -> ParitySetup:
    """Return the setup of a check. Raise ValueError with all reasons if the check is impossible.

    `given` lists the fields that were set by flags; they keep their values. `has_config` is true if
    a YAML file was read. `model` is a name in `MODELS`; None selects the model of the YAML file,
    or tiny_llm without a file. `mask` is the mask of random packs (`--attention-mask`).
    `world_size` is tp x pp x cp by default.
    """
    world_size = world_size or config.model_ranks
    model = model or (None if has_config else "tiny_llm")
    # Reset every flag that does not affect a step, such as checkpoints and logs.
    default = flatten(RunConfig())
    unsaved = [info.name for info in fields().values() if info.room in ("checkpoint", "log")]
    original = config = with_values(
        config, {name: default[name] for name in (*unsaved, *_SET_ASIDE)}
    )
    # Apply the settings for a CPU. Keep the attention kernel if it supports float64 on a CPU.
    kernel = kernel_problem(config.training.attention_kernel, "cpu", "float64")
    config = with_values(
        config, {n: value for n, value in ON_CPU.items() if kernel or n != "attention_kernel"}
    )
    # Stored packs cannot be combined with another mask, or used if rows are too long.
    wrong = f"--mask {mask}" if mask else ""
    if config.data.seq_length > MOST_ROW_TOKENS:
        wrong = f"--seq-length {config.data.seq_length} above {MOST_ROW_TOKENS}"
    if wrong and "data_path" in given:
        raise ValueError(
            f"--data-path cannot be combined with {wrong}: omit --data-path to use random packs"
        )
    manifests = [Path(name, MANIFEST_NAME) for name in named_folders(config.data.data_path)]
    elsewhere = not all(manifest.is_file() for manifest in manifests)
    notes = []
    # A YAML file may contain a path on another machine; only an explicit --data-path is binding.
    usable = not wrong and ("data_path" in given or not elsewhere)
    stored = config.data.data_path is not None and usable
    if config.data.data_path is not None and not stored:
        unused = shown_path(config.data.data_path)
        notes.append(f"uses random packs, not those of --data-path {unused}")
        config = with_values(config, {"data_path": None})
    kept = {*given, *(_FIXED_BY_PACKS if stored else ())}

    def changed(values: dict[str, Value]) -> RunConfig:
        return with_values(
            config, {name: value for name, value in values.items() if name not in kept}
        )

    # Use the sizes of a named model first, then reduce them if the model is still too large.
    if model is not None:
        config = changed(_sizes(config, model))
    if stored:
        config, _ = open_sources(config)  # refuse unsuitable packs before any process starts
    elif config.model.vocab_size == 0:
        config = with_values(config, {"vocab_size": TINY_SIZES["vocab_size"]})
    if run_parameters(config) > MAX_PARAMETERS:
        config = changed(_sizes(config, None))
    if (left := run_parameters(config)) > MAX_PARAMETERS:
        raise ValueError(
            f"the flags require {left / 1e6:.1f} M parameters, but one process supports at most "
            f"{MAX_PARAMETERS / 1e6:.1f} M: use --model tiny_llm, or smaller --num-layers, "
            "--hidden-size, --ffn-hidden-size and --vocab-size"
        )
    p, t = config.parallel, config.training
    step = 2 * p.context_parallel_size * p.tensor_model_parallel_size
    tokens = min(256 if has_config else 64, config.data.seq_length)
    # Use more microbatches than stages, so that warm-up, steady state and drain all occur.
    replicas = t.micro_batch_size * max(1, config.data_parallel_size(world_size))
    batch = replicas * max(2, p.pipeline_model_parallel_size + 1)
    # Context and tensor parallelism must divide a row, so its length is a multiple of `step`.
    length = -(-tokens // step) * step
    config = changed({"seq_length": length, "global_batch_size": batch})
    decay = max(t.weight_decay, 0.1)
    config = with_values(config, {**_PRECISION, "weight_decay": decay})
    require(config, world_size)
    # Stored packs need no rules. Random packs get a mask with images if there is a vision tower.
    rules = None
    if not stored:
        mask = mask or ("mixed" if config.vision.vision_num_layers else config.data.attention_mask)
        seed = config.training.seed
        length = config.data.seq_length
        rules = MockRules(config.model.vocab_size, length, mask, True, seed, mock_images(config))
    # Report the fields that the user set and whose values have changed.
    old, new = flatten(original), flatten(config)
    told = [name for name in (new if has_config else given) if old[name] not in (new[name], "auto")]
    notes += [f"{flag(n)} {new[n]} instead of {old[n]}" for n in told if n != "data_path"]
    setup = ParitySetup(config, rules, world_size, tuple(notes))
    require(setup.reference, 1)
    return setup


def _sizes(config: RunConfig, model: str | None) -> dict[str, Value]:
    """Return the sizes of a model in `MODELS`, or the config's reduced sizes if `model` is None.

    There are enough heads and layers for tp and the pipeline stages. If the config has a vision
    tower but the named model has none, the tower is kept with small sizes and its number of heads.
    """
    m = config.model
    p = config.parallel
    tower = config.vision.vision_num_layers > 0
    tp = p.tensor_model_parallel_size
    stages = p.pipeline_model_parallel_size
    layers = max(4, stages * p.num_virtual_stages_per_pipeline_rank)
    ffn = math.lcm(96, tp)
    if model is None:
        layers = min(m.num_layers, layers)
        sizes: dict[str, Value] = {
            name: min(getattr(m, name), TINY_SIZES[name]) for name in ("hidden_size", "vocab_size")
        }
        sizes |= {"kv_channels": min(m.head_dim, 8), "ffn_hidden_size": min(m.ffn_hidden_size, ffn)}
        if m.num_experts > 0:
            sizes["moe_ffn_hidden_size"] = min(m.expert_hidden_size, ffn)
        shared = m.moe_shared_expert_intermediate_size
        if shared:
            sizes["moe_shared_expert_intermediate_size"] = min(shared, ffn)
    else:
        # tp must divide the groups, and each group has two query heads.
        groups = math.lcm(4, tp)
        heads = {"num_query_groups": groups, "num_attention_heads": 2 * groups}
        sizes = {**MODELS[model], **heads, "ffn_hidden_size": ffn}
        if sizes.get("moe_shared_expert_intermediate_size"):
            sizes["moe_shared_expert_intermediate_size"] = ffn
    if tower and "vision_num_layers" not in sizes:
        sizes |= {
            name: value
            for name, value in TINY_TOWER.items()
            if name != "vision_num_attention_heads"
        }
    if tower or "vision_num_layers" in sizes:
        sizes |= {
            name: math.lcm(48, tp)
            for name in ("vision_ffn_hidden_size", "connector_ffn_hidden_size")
        }
    # A stage cannot offload more layers than it has.
    offloaded = min(config.training.activation_offload, float(max(1, layers // stages)))
    return {**sizes, "num_layers": layers, "activation_offload": offloaded}


# The largest relative difference that counts as rounding. A different summation order changes a sum
# by 1e-16 of its largest term. The depth of the model and AdamW's division by the second moment
# increase this to 1e-14. A lost or doubled gradient causes a difference of 0.5 or more.
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Box:
    """A box of a global tensor: one rank's shard of a gradient, parameter or update."""

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: np.ndarray

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as slices of the global tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.values.shape, strict=True))


@dataclass(frozen=True)
class StepTrace:
    """One step on one rank: reduced gradients before clipping, parameters, and updates."""

    loss: float
    grad_norm: float
    gradients: tuple[Box, ...]
    parameters: tuple[Box, ...]
    updates: tuple[Box, ...]


@dataclass(frozen=True)
class StepComparison:
    """The comparison of one step of the grid with the same step of one process."""

    step: int
    loss: float  # loss and gradient norm of the single process
    grad_norm: float
    differences: dict[str, float]
    """The largest relative difference on any rank, for each kind of value.

    For tensors, the key includes the name of the worst tensor.
    """

    def beyond(self, tolerance: float = TOLERANCE) -> list[str]:
        """Return a description of each difference above the tolerance."""
        return [
            f"{what} by {value:.1e}"
            for what, value in self.differences.items()
            if not value <= tolerance
        ]


def microbatches(
    config: RunConfig,
    packs: MockRules | Sources,
    step: int,
    rows: Rows,
    loading: ImageLoading | None = None,
) -> list[PackedBatch]:
    """Return one rank's microbatches of a step (counted from 1), from random or stored packs.

    Packs are distributed to ranks as in the loader. `loading` decodes the images.
    """
    size = rows.packs
    first = (step - 1) * config.training.global_batch_size
    if isinstance(packs, Sources):
        return step_batches(
            packs.train, loader_options(config, size), rows.data_rank, first, loading
        )
    # Rows of `size` packs are dealt to the data-parallel ranks in turn.
    count = config.training.global_batch_size // size
    batches = []
    for number in range(rows.data_rank.index, count, rows.data_rank.size):
        begin = first + number * size
        batches.append(mock_batch(range(begin, begin + size), packs, loading))
    return batches


def train_rank(
    rank: int,
    world_size: int,
    config: RunConfig,
    rules: MockRules | None,
    steps: int,
    strategy: str = "stored",
) -> list[StepTrace]:
    """Train on this rank and record every step. The process group must already exist.

    `rules` describes random packs; None selects the packs of --data-path. `strategy` is the initial
    distribution of images (see `ImageLoading`).
    """
    grid = build_grid(config.grid_shape(world_size), rank)
    model = ParallelModel(config, grid)
    packs = rules or open_sources(config)[1]
    if isinstance(packs, Sources):
        decoder = packs.decoder
    else:
        decoder = MockDecoder(packs.images) if packs.images is not None else None
    loading = image_loading(config, grid, model.rows, decoder, strategy)
    traces: list[StepTrace] = []
    # An update is the difference between the parameters before and after a step.
    before = _boxes(model.parameters.parameters_held())
    for step in range(1, steps + 1):
        batches = microbatches(config, packs, step, model.rows, loading)
        # Take the step in parts, so that gradients can be copied before the optimizer step.
        agreed = agree_on_step(batches, grid, replica=model.rows.data_rank.index)
        loss = model.gradients(batches, step, agreed.denominator, agreed.tokens)
        model.balance.settle(agreed.tokens)
        gradients = _boxes(model.parameters.gradient_slices())
        norm = model.optimizer.step(learning_rate(step, config.training))
        model.balance.correct()
        after = _boxes(model.parameters.parameters_held())
        pairs = zip(before, after, strict=True)
        updates = tuple(
            Box(new.name, new.global_shape, new.offsets, new.values - old.values)
            for old, new in pairs
        )
        traces.append(StepTrace(loss, norm, gradients, after, updates))
        before = after
    return traces


def _boxes(slices: Iterable[ParameterSlice]) -> tuple[Box, ...]:
    """Return copies of the boxes in slices of local parameters."""
    return tuple(
        Box(
            box.name.partition(".")[2],
            box.global_shape,
            box.offsets,
            box.tensor.detach().cpu().numpy().copy(),
        )
        for part in slices
        for box in boxes_of_slice("parity", part)
    )


def assemble(boxes: Iterable[Box]) -> dict[str, np.ndarray]:
    """Return full tensors by global name. Elements that are in no box are NaN."""
    full: dict[str, np.ndarray] = {}
    for box in boxes:
        tensor = full.setdefault(box.name, np.full(box.global_shape, np.nan, box.values.dtype))
        tensor[box.slices] = box.values
    return full


def largest_difference(
    reference: Mapping[str, np.ndarray], ranks: Sequence[Sequence[Box]]
) -> tuple[str, float]:
    """Return the name of the tensor with the largest relative difference, and the difference.

    The difference is inf if an element is missing or not finite, or if a tensor is unknown.
    """
    errors = dict.fromkeys(reference, 0.0)
    # Marks the elements that some rank has, to find missing ones.
    covered = {name: np.zeros(tensor.shape, bool) for name, tensor in reference.items()}
    for box in itertools.chain.from_iterable(ranks):
        if box.name not in reference or box.global_shape != reference[box.name].shape:
            return f"{box.name} (the single process has no tensor of this name and shape)", math.inf
        covered[box.name][box.slices] = True
        error = float(np.abs(box.values - reference[box.name][box.slices]).max(initial=0.0))
        errors[box.name] = max(errors[box.name], error if math.isfinite(error) else math.inf)
    for name, held in covered.items():
        if not held.all():
            return f"{name} ({held.size - np.count_nonzero(held)} elements on no rank)", math.inf
    # For small tensors, divide by the floor, because their noise comes from large tensors.
    scales = {name: float(np.abs(tensor).max(initial=0.0)) for name, tensor in reference.items()}
    floor = max(1e-3 * max(scales.values()), np.finfo(np.float64).tiny)
    relative = {name: error / max(scales[name], floor) for name, error in errors.items()}
    worst = max(relative, key=lambda name: relative[name])
    return worst, relative[worst]


def compare(
    reference: Sequence[StepTrace], ranks: Sequence[Sequence[StepTrace]]
) -> list[StepComparison]:
    """Compare each step of the single process (`reference`) with all ranks of the grid."""
    comparisons = []
    for number, expected in enumerate(reference):
        seen = [trace[number] for trace in ranks]
        differences: dict[str, float] = {}
        for what, scalar in (("loss", "loss"), ("gradient norm", "grad_norm")):
            value = getattr(expected, scalar)
            scale = max(abs(value), 1e-300)
            errors = [abs(getattr(trace, scalar) - value) / scale for trace in seen]
            differences[what] = max(error if math.isfinite(error) else math.inf for error in errors)
        # For tensors, the fields of StepTrace are the plurals of these words.
        for kind in ("gradient", "update", "parameter"):
            full = assemble(getattr(expected, f"{kind}s"))
            name, difference = largest_difference(
                full, [getattr(trace, f"{kind}s") for trace in seen]
            )
            differences[f"{kind} of {name}"] = difference
        comparisons.append(
            StepComparison(number + 1, expected.loss, expected.grad_norm, differences)
        )
    return comparisons
