"""Does a grid train like one process? Trains both on the same packs in float64 and compares every
gradient and update.

The grid runs the `ParallelModel` of a training run, one process runs it with a dense explicit mask.
Each rank's shares are held against the full tensors by global name, copies included; an element
that no rank holds counts as wrong. Losses alone would look right under half of all gradient
mistakes, and beside the parameters themselves a missing update is as small as the learning rate: so
what each step added to them is compared too.

Differences are relative: largest error of a tensor over its largest value. Tensors below a
thousandth of the model's largest take that thousandth instead, since their noise comes from the
large ones.

`prepare` makes any run's config small enough for one process. The layout under test (grid, virtual
stages, transport, layout of tokens, recomputation, micro batch) is never touched. Rows, batch and
precision shrink, and a large model loses width, depth and vocabulary; it keeps its heads, groups,
options, ties and at least one layer a stage.
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

MAX_PARAMETERS, MOST_ROW_TOKENS = 20_000_000, 4096
"""One process holds the whole model in float64 with its optimizer, and heads x T x T scores of a
stored row.
"""
_PRECISION: dict[str, Value] = {
    "dtype": "float64",
    # with 1e-8 the first update is the gradient's sign, also of one that is all rounding
    "adam_eps": 1e-4,
    "lr": 1e-2,
    "min_lr": 0.0,
    "lr_decay_style": "constant",
    "lr_warmup_iters": 0,  # a run's first updates may be smaller than rounding
    "lr_warmup_fraction": None,
    "lr_decay_iters": None,
    "lr_wsd_decay_iters": None,
}
"""Replaced also where they stand as flags: updates are to be far above the rounding of float64."""
_SET_ASIDE = (
    "train_epochs",
    "valid_data_path",
    "eval_interval",
    "exit_duration",
    "dry_run",
    "world_size",
)
"""Flags that are no part of a step, besides those of `checkpoint` and `log`."""
_FIXED_BY_PACKS = {"vocab_size", "vision_patch_size", "vision_image_size", "seq_length"}
ONE_PROCESS: dict[str, Value] = {
    "cp_layout": "contiguous",
    "vision_shards": "contiguous",
    "recompute_granularity": "none",
    "activation_offload": 0.0,
    "mlp_chunk_tokens": 0,
    "attention_kernel": "dense",
}
"""The twin has a dense mask and nothing recomputed, besides no parallelism."""


@dataclass(frozen=True)
class ParitySetup:
    """A config to train beside one process on the same packs, and what was changed on the way."""

    config: RunConfig
    rules: MockRules | None
    """Rules of random packs; None takes the packs of --data-path."""
    world_size: int
    notes: tuple[str, ...]

    @property
    def reference(self) -> RunConfig:
        """The config of the one process, on the same rows: dynamic context parallelism joins the
        packs of dp ranks.
        """
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
    """The setup of a check. ValueError lists all reasons against it.

    `given`: fields that stood as flags. `has_config`: a YAML file was read, whose model is taken
    where `model`, a name of `MODELS`, is None. `mask`: of random packs (`--attention-mask`).
    `world_size`: by default tp x pp x cp.
    """
    world_size = world_size or config.model_ranks
    model = model or (None if has_config else "tiny_llm")
    default = flatten(RunConfig())
    unsaved = [info.name for info in fields().values() if info.room in ("checkpoint", "log")]
    original = config = with_values(
        config, {name: default[name] for name in (*unsaved, *_SET_ASIDE)}
    )
    kernel = kernel_problem(config.training.attention_kernel, "cpu", "float64")
    config = with_values(
        config, {n: value for n, value in ON_CPU.items() if kernel or n != "attention_kernel"}
    )
    wrong = f"--mask {mask}" if mask else ""
    if config.data.seq_length > MOST_ROW_TOKENS:
        wrong = f"--seq-length {config.data.seq_length} over {MOST_ROW_TOKENS}"
    if wrong and "data_path" in given:
        raise ValueError(f"--data-path and {wrong}: leave it out to check on random packs")
    elsewhere = not all(
        Path(folder, MANIFEST_NAME).is_file() for folder in named_folders(config.data.data_path)
    )
    notes, stored = (
        [],
        config.data.data_path is not None and not wrong and ("data_path" in given or not elsewhere),
    )
    if config.data.data_path is not None and not stored:
        notes.append(
            f"random packs are used, not those of --data-path {shown_path(config.data.data_path)}"
        )
        config = with_values(config, {"data_path": None})
    kept = {*given, *(_FIXED_BY_PACKS if stored else ())}

    def changed(values: dict[str, Value]) -> RunConfig:
        return with_values(
            config, {name: value for name, value in values.items() if name not in kept}
        )

    if model is not None:
        config = changed(_sizes(config, model))
    if stored:
        config, _ = open_sources(config)  # refuses what does not fit, before a process starts
    elif config.model.vocab_size == 0:
        config = with_values(config, {"vocab_size": TINY_SIZES["vocab_size"]})
    if run_parameters(config) > MAX_PARAMETERS:
        config = changed(_sizes(config, None))
    if (left := run_parameters(config)) > MAX_PARAMETERS:
        raise ValueError(
            f"the flags keep {left / 1e6:.1f} M parameters, one process takes at most "
            f"{MAX_PARAMETERS / 1e6:.1f} M: use --model tiny_llm, or smaller --num-layers, "
            "--hidden-size, --ffn-hidden-size and --vocab-size"
        )
    p, t = config.parallel, config.training
    step = 2 * p.context_parallel_size * p.tensor_model_parallel_size
    tokens = min(256 if has_config else 64, config.data.seq_length)
    # more microbatches than stages, and no multiple of them: warmup, steady state and drain all
    # occur
    replicas = t.micro_batch_size * max(1, config.data_parallel_size(world_size))
    batch = replicas * max(2, p.pipeline_model_parallel_size + 1)
    config = changed({"seq_length": -(-tokens // step) * step, "global_batch_size": batch})
    config = with_values(config, {**_PRECISION, "weight_decay": max(t.weight_decay, 0.1)})
    require(config, world_size)
    rules = None
    if not stored:
        mask = mask or ("mixed" if config.vision.vision_num_layers else config.data.attention_mask)
        seed, length = config.training.seed, config.data.seq_length
        rules = MockRules(config.model.vocab_size, length, mask, True, seed, mock_images(config))
    old, new = flatten(original), flatten(config)
    told = [name for name in (new if has_config else given) if old[name] not in (new[name], "auto")]
    notes += [f"{flag(n)} {new[n]} instead of {old[n]}" for n in told if n != "data_path"]
    setup = ParitySetup(config, rules, world_size, tuple(notes))
    require(setup.reference, 1)
    return setup


def _sizes(config: RunConfig, model: str | None) -> dict[str, Value]:
    """Sizes of a model of `MODELS`, or small ones for the config's own; enough heads and layers for
    its tp and stages.

    A tower of the config that the named model lacks is made small and kept, with its heads.
    """
    m, p, tower = config.model, config.parallel, config.vision.vision_num_layers > 0
    tp, stages = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    layers, ffn = max(4, stages * p.num_virtual_stages_per_pipeline_rank), math.lcm(96, tp)
    if model is None:
        layers = min(m.num_layers, layers)
        sizes: dict[str, Value] = {
            name: min(getattr(m, name), TINY_SIZES[name]) for name in ("hidden_size", "vocab_size")
        }
        sizes |= {"kv_channels": min(m.head_dim, 8), "ffn_hidden_size": min(m.ffn_hidden_size, ffn)}
        sizes |= (
            {"moe_ffn_hidden_size": min(m.expert_hidden_size, ffn)} if m.num_experts > 0 else {}
        )
        shared = m.moe_shared_expert_intermediate_size
        sizes |= {"moe_shared_expert_intermediate_size": min(shared, ffn)} if shared else {}
    else:
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
    offloaded = min(config.training.activation_offload, float(max(1, layers // stages)))
    return {**sizes, "num_layers": layers, "activation_offload": offloaded}


TOLERANCE = 1e-10
"""Largest relative difference that is rounding: a sum in another order moves 1e-16 of its largest
term, depth and AdamW's division by the second moment leave 1e-14. A lost or doubled gradient
differs by 0.5 or more.
"""


@dataclass(frozen=True)
class Box:
    """A box of one global tensor: a rank's share of a gradient or a parameter."""

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
    """One step on one rank: its slices of the summed gradients before clipping, its parameters and
    what was added.
    """

    loss: float
    grad_norm: float
    gradients: tuple[Box, ...]
    parameters: tuple[Box, ...]
    updates: tuple[Box, ...]


@dataclass(frozen=True)
class StepComparison:
    """One step of the grid beside the same step of one process."""

    step: int
    loss: float  # of the one process, as is the norm
    grad_norm: float
    differences: dict[str, float]
    """The largest relative one of all ranks by kind of value; for tensors the words name the worst
    one.
    """

    def beyond(self, tolerance: float = TOLERANCE) -> list[str]:
        """Differences above the tolerance, as words."""
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
    """One rank's microbatches of a step, random or stored, dealt as the loader does; `loading`
    decodes their images.
    """
    size = rows.packs
    first = (step - 1) * config.training.global_batch_size
    if isinstance(packs, Sources):
        return step_batches(
            packs.train, loader_options(config, size), rows.data_rank, first, loading
        )
    return [
        mock_batch(range(first + number * size, first + (number + 1) * size), packs, loading)
        for number in range(
            rows.data_rank.index, config.training.global_batch_size // size, rows.data_rank.size
        )
    ]


def train_rank(
    rank: int,
    world_size: int,
    config: RunConfig,
    rules: MockRules | None,
    steps: int,
    strategy: str = "stored",
) -> list[StepTrace]:
    """Train on this rank (a process group of `world_size` ranks exists) and record every step.

    `rules`: of random packs, None takes those of --data-path. `strategy`: how to deal images first,
    see `ImageLoading`.
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
    before = _boxes(model.parameters.parameters_held())
    for step in range(1, steps + 1):
        batches = microbatches(config, packs, step, model.rows, loading)
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
    """Copies of the boxes that slices of local parameters hold."""
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
    """Full tensors by global name; elements that no box holds are NaN."""
    full: dict[str, np.ndarray] = {}
    for box in boxes:
        tensor = full.setdefault(box.name, np.full(box.global_shape, np.nan, box.values.dtype))
        tensor[box.slices] = box.values
    return full


def largest_difference(
    reference: Mapping[str, np.ndarray], ranks: Sequence[Sequence[Box]]
) -> tuple[str, float]:
    """The tensor that is farthest from the full one, and how far; inf for what is missing, unknown,
    or not finite.
    """
    errors = dict.fromkeys(reference, 0.0)
    covered = {name: np.zeros(tensor.shape, bool) for name, tensor in reference.items()}
    for box in itertools.chain.from_iterable(ranks):
        if box.name not in reference or box.global_shape != reference[box.name].shape:
            return f"{box.name} (the one process has no tensor of this name and shape)", math.inf
        covered[box.name][box.slices] = True
        error = float(np.abs(box.values - reference[box.name][box.slices]).max(initial=0.0))
        errors[box.name] = max(errors[box.name], error if math.isfinite(error) else math.inf)
    for name, held in covered.items():
        if not held.all():
            return f"{name} ({held.size - np.count_nonzero(held)} elements on no rank)", math.inf
    scales = {name: float(np.abs(tensor).max(initial=0.0)) for name, tensor in reference.items()}
    floor = max(1e-3 * max(scales.values()), np.finfo(np.float64).tiny)
    relative = {name: error / max(scales[name], floor) for name, error in errors.items()}
    worst = max(relative, key=lambda name: relative[name])
    return worst, relative[worst]


def compare(
    reference: Sequence[StepTrace], ranks: Sequence[Sequence[StepTrace]]
) -> list[StepComparison]:
    """Step by step: `reference` of the one process against `ranks[rank]` of the grid."""
    comparisons = []
    for number, expected in enumerate(reference):
        seen = [trace[number] for trace in ranks]
        differences: dict[str, float] = {}
        for what, scalar in (("loss", "loss"), ("gradient norm", "grad_norm")):
            value = getattr(expected, scalar)
            errors = [
                abs(getattr(trace, scalar) - value) / max(abs(value), 1e-300) for trace in seen
            ]
            differences[what] = max(error if math.isfinite(error) else math.inf for error in errors)
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
