"""The config that a parity check trains: any run's config made small enough for one process, and its one-process twin.

The layout under test (grid, virtual stages, transport, layout of tokens, recomputation, micro batch) is never touched.
Rows, batch and precision shrink, and a large model loses width, depth and vocabulary. It keeps its heads, groups,
options, ties, towers and at least one layer a stage. Every change is told.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from megacp.core.config.blend import named_folders, shown_path
from megacp.core.config.checks.check import require
from megacp.core.config.run import ON_CPU, RunConfig, Value, fields, flag, flatten, with_values
from megacp.core.data.manifest import MANIFEST_NAME
from megacp.core.data.synthetic.mock import MockRules
from megacp.core.ops.kernels import kernel_problem
from megacp.core.planner.report import human_count
from megacp.core.planner.vision import run_parameters
from megacp.core.training.images import mock_images
from megacp.core.training.sources import open_sources

MAX_PARAMETERS = 20_000_000
"""One process holds the whole model in float64 with its optimizer, and all gradients are collected and compared."""
_DEFAULT_VOCABULARY = 211
_ROW, _ROW_OF_CONFIG = 64, 256
"""Tokens of a row: of the named models, and the most that is left of a config's."""
_EPSILONS = {"float64": 1e-4, "float32": 1e-2, "bfloat16": 1e-2}
"""Least epsilon of AdamW: with 1e-8 its first update is the gradient's sign, and a gradient that is all rounding would
make a whole update of it.
"""
_RATE, _DECAY = 1e-2, 10.0
"""Learning rate, and least weight decay: a tenth of a decayed weight goes with each update, far more than bfloat16
rounds. So a parameter in a wrong group is seen, and one without an update.
"""
_SCHEDULE: dict[str, Value] = {
    "lr_decay_style": "constant",
    "lr_warmup_iters": 0,
    "lr_decay_iters": None,
    "lr_wsd_decay_iters": None,
}
"""A run's first updates may be smaller than rounding: its warm-up is set aside, and the decay that goes with it."""
_OPTIMIZER = {"adam_eps", "lr", "min_lr", "weight_decay", *_SCHEDULE}
"""Flags whose change is told without a config, too."""
_SET_ASIDE: dict[str, Value] = {
    "valid_data_path": None,
    "eval_interval": 0,
    "exit_duration": None,
    "dry_run": False,
    "world_size": None,
}
"""Flags that are no part of a step, besides those of `checkpoint` and `log`."""
MOST_ROW_TOKENS = 4096
"""Tokens of a stored row: one process holds heads x T x T scores of it in float64, 1 GiB at 8 heads."""
_SIZES: dict[str, int] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 8,
    "vocab_size": _DEFAULT_VOCABULARY,
}
_TOWER_LAYERS = 3
_TOWER: dict[str, Value] = {
    "init_method_std": 0.15,  # with 0.02 the tower's gradients are lost in the rounding of the text's
    "vision_num_layers": _TOWER_LAYERS,
    "vision_hidden_size": 32,
    "vision_ffn_hidden_size": 48,
    "vision_num_attention_heads": 8,
    "vision_head_dim": 4,
    "vision_patch_size": 4,
    "vision_image_size": 16,
    "vision_feature_layers": (-1, -2),
    "connector_num_attention_heads": 8,
    "connector_head_dim": 4,
    "connector_ffn_hidden_size": 48,
}
MODELS: dict[str, dict[str, Value]] = {
    "tiny_llm": {**_SIZES},
    "tiny_llama": {
        **_SIZES,
        "untie_embeddings_and_output_weights": True,
        "rope_scaling": "llama3",
        "rope_scaling_factor": 8.0,
        "rope_original_max_positions": 64,
    },
    "tiny_qwen3": {**_SIZES, "qk_layernorm": True, "kv_channels": 16},
    "tiny_olmo2": {
        **_SIZES,
        "norm_position": "after",
        "qk_layernorm": True,
        "qk_layernorm_scope": "all_heads",
        "untie_embeddings_and_output_weights": True,
    },
    "tiny_smollm3": {
        **_SIZES,
        "no_rope_freq": "2",
        "rope_scaling": "yarn",
        "rope_scaling_factor": 4.0,
        "rope_original_max_positions": 16,
    },
    "tiny_biased": {
        **_SIZES,
        "qk_layernorm": True,
        "add_qkv_bias": True,
        "add_attention_output_bias": True,
        "add_mlp_bias": True,
        "hidden_dropout": 0.1,
    },
    "tiny_vlm": {**_SIZES, "untie_embeddings_and_output_weights": True, "additional_vocab_size": 8, **_TOWER},
}
"""Models by name: the plain decoder (tied, grouped queries), options of Llama, Qwen3, OLMo2 and SmolLM3 (with YaRN),
every bias with dropout, and a decoder with a vision tower.
"""
_FIXED_BY_PACKS = {"vocab_size", "vision_patch_size", "vision_image_size"}
"""Flags that stored packs fix: each of their ids has a row, their images have this size."""


@dataclass(frozen=True)
class ParitySetup:
    """A config to train beside one process on the same packs, and what was changed on the way."""

    config: RunConfig
    """Of the grid."""
    rules: MockRules | None
    """Of random packs; None takes those of --data-path."""
    world_size: int
    model: str | None
    """The name in `MODELS` of the sizes; None when they are the config's own."""
    notes: tuple[str, ...]

    @property
    def reference(self) -> RunConfig:
        """Of the one process: no parallelism, dense mask, nothing recomputed."""
        return one_process(self.config, self.world_size)

    @property
    def packs(self) -> str:
        """Which packs, in words."""
        if self.rules is None:
            return f"packs of {shown_path(self.config.data.data_path)}, mask {self.config.data.attention_mask}"
        return f"random packs, mask {self.rules.mask}"


@dataclass(frozen=True)
class ParityRequest:
    """The flags of a check besides those of a run."""

    given: frozenset[str]
    """Fields of a run that stood as flags: they are kept."""
    has_config: bool = False
    """A YAML file was read: its contradictions are told before anything is made smaller."""
    model: str | None = None
    """A name of `MODELS`; None keeps the sizes of the config, or takes tiny_llm without one."""
    mask: str | None = None
    """One of `MASKS`; None takes `--attention-mask`."""
    world_size: int | None = None
    """Default: tp x pp x cp."""


def prepare(config: RunConfig, request: ParityRequest) -> ParitySetup:
    """The setup of a check. ValueError lists all reasons against it."""
    model = request.model if request.model or request.has_config else "tiny_llm"
    if model is not None and model not in MODELS:
        raise ValueError(f"--model {model} is unknown; choose {', '.join(MODELS)}, or give sizes with --config")
    notes: list[str] = []
    config = with_values(config, _aside())
    config = _on_cpu(config, notes)
    config = _with_packs(config, request, notes)
    kept = request.given | (_FIXED_BY_PACKS if config.data.data_path is not None else set())
    if model is not None:
        sizes = named_sizes(model, config)
        config = with_values(config, {name: value for name, value in sizes.items() if name not in kept})
    if config.data.data_path is not None:
        config, _ = open_sources(config)  # refuses what does not fit, before a process starts
    elif config.model.vocab_size == 0:
        config = with_values(config, {"vocab_size": _DEFAULT_VOCABULARY})
        notes.append(f"--vocab-size {_DEFAULT_VOCABULARY}, as no dataset is there to say")
    world_size = request.world_size or config.model_ranks
    if request.has_config:
        require(config, world_size)
    config = _small_enough(config, kept, notes)
    before = flatten(config)
    for name, value in _smaller(config, world_size, request).items():
        if name in request.given or before[name] == value:
            continue
        config = with_values(config, {name: value})
        if request.has_config or name in _OPTIMIZER:
            notes.append(f"{flag(name)} {value} instead of {before[name]} (as a flag yours is kept)")
    require(config, world_size)
    rules = None
    if config.data.data_path is None:
        default = "mixed" if config.vision.vision_num_layers else config.data.attention_mask
        length, mask = config.data.seq_length, request.mask or default
        images = mock_images(config)
        rules = MockRules(config.model.vocab_size, length, mask, True, config.training.seed, images)
    setup = ParitySetup(config, rules, world_size, model, tuple(notes))
    require(setup.reference, 1)
    return setup


def _aside() -> dict[str, Value]:
    """Fields that are no part of a step, at their defaults: nothing is saved, loaded or logged."""
    default = flatten(RunConfig())
    rooms = {info.name: default[info.name] for info in fields().values() if info.room in ("checkpoint", "log")}
    return {**rooms, **_SET_ASIDE}


def _on_cpu(config: RunConfig, notes: list[str]) -> RunConfig:
    """The config with its GPU-only choices replaced; each change is told."""
    before = flatten(config)
    wanted = dict(ON_CPU)
    if kernel_problem(config.training.attention_kernel, "cpu", "float64") is None:
        wanted.pop("attention_kernel")
    for name, value in wanted.items():
        if before[name] not in (value, "auto"):
            notes.append(f"{flag(name)} {value} instead of {before[name]}: the check runs on CPUs")
    return with_values(config, wanted)


def _with_packs(config: RunConfig, request: ParityRequest, notes: list[str]) -> RunConfig:
    """The config, without `--data-path` where its packs cannot be used; that is told."""
    path, length = config.data.data_path, config.data.seq_length
    if path is None:
        return config
    reason = None
    if request.mask is not None:
        reason = f"--mask {request.mask} draws random packs"
    elif absent := [folder for folder in named_folders(path) if not Path(folder, MANIFEST_NAME).is_file()]:
        reason = f"{'it' if isinstance(path, str) else ' and '.join(absent)} holds no {MANIFEST_NAME}"
    elif length > MOST_ROW_TOKENS:
        reason = f"one process would hold a mask of {length:,} x {length:,}, at most {MOST_ROW_TOKENS:,} are taken"
    if reason is None:
        return config
    if "data_path" in request.given:
        raise ValueError(f"--data-path {shown_path(path)}: {reason}; leave it out to check on random packs")
    notes.append(f"random packs are used, not those of --data-path {shown_path(path)}: {reason}")
    return with_values(config, {"data_path": None})


def _small_enough(config: RunConfig, kept: Collection[str], notes: list[str]) -> RunConfig:
    """The config with a model that one process can hold. Raises ValueError when flags keep it too large."""
    parameters = run_parameters(config)
    if parameters <= MAX_PARAMETERS:
        return config
    before = flatten(config)
    sizes = {name: value for name, value in small_sizes(config).items() if name not in kept and before[name] != value}
    config = with_values(config, sizes)
    left = run_parameters(config)
    if left > MAX_PARAMETERS:
        raise ValueError(
            f"the model has {human_count(left)} parameters with the sizes that are given, a parity check trains it "
            f"whole in one process: at most {human_count(MAX_PARAMETERS)}. Keep the layout and give a small model: "
            f"--model tiny_llm, or smaller --num-layers, --hidden-size, --ffn-hidden-size and --vocab-size"
        )
    changes = ", ".join(
        f"{flag(name)} {_words(value)} instead of {_words(before[name])}" for name, value in sizes.items()
    )
    notes.append(f"the model has {human_count(parameters)} parameters; small sizes take their place: {changes}")
    return config


def _words(value: Value) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _smaller(config: RunConfig, world_size: int, request: ParityRequest) -> dict[str, Value]:
    """Defaults of a check: float64, a short row, few microbatches, an epsilon above rounding."""
    p, t = config.parallel, config.training
    step = 2 * p.context_parallel_size * p.tensor_model_parallel_size
    length = min(_ROW_OF_CONFIG, config.data.seq_length) if request.has_config else _ROW
    if config.data.data_path is not None:
        length = step = config.data.seq_length  # as it was packed
    # more microbatches than stages, and no multiple of them: warmup, steady state and drain all occur
    replicas = t.micro_batch_size * max(1, config.data_parallel_size(world_size))
    batch = replicas * max(2, p.pipeline_model_parallel_size + 1)
    dtype = t.dtype if "dtype" in request.given else "float64"
    return {
        "dtype": dtype,
        "seq_length": -(-length // step) * step,
        "global_batch_size": min(batch, t.global_batch_size) if request.has_config else batch,
        "adam_eps": max(t.adam_eps, _EPSILONS[dtype]),
        **_updates(config, request),
    }


def _updates(config: RunConfig, request: ParityRequest) -> dict[str, Value]:
    """A rate and a decay whose updates are seen beside rounding; of a schedule that flags shape nothing is changed."""
    t = config.training
    shape = {} if request.given & set(_SCHEDULE) else _SCHEDULE
    rate = max(_RATE, t.min_lr) if "min_lr" in request.given else _RATE
    return {"lr": rate, "min_lr": 0.0, "weight_decay": max(t.weight_decay, _DECAY), **shape}


def one_process(config: RunConfig, world_size: int) -> RunConfig:
    """One process, on the same rows: dynamic context parallelism joins the packs of dp ranks in one."""
    joined = config.data_parallel_size(world_size) if config.parallel.dynamic_context_parallel else 1
    return with_values(
        config,
        {
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "context_parallel_size": 1,
            "num_virtual_stages_per_pipeline_rank": 1,
            "pipeline_schedule": "1f1b",
            "recompute_granularity": "none",
            "activation_offload": 0.0,
            "mlp_chunk_tokens": 0,
            "attention_kernel": "dense",
            "cp_comm_type": "p2p",
            "cp_layout": "contiguous",
            "cp_calibration": None,
            "hierarchical_context_parallel_sizes": None,
            "cp_exchange_stages": 1,
            "dynamic_context_parallel": False,
            "vision_shards": "contiguous",
            "vision_feature_exchange": "routed",
            "data_parallel_sharding_strategy": "optim",
            "num_distributed_optimizer_instances": 1,
            "micro_batch_size": config.training.micro_batch_size * joined,
        },
    )


def named_sizes(name: str, config: RunConfig) -> dict[str, Value]:
    """The sizes of a model of `MODELS`, with heads and layers enough for any tp and any number of stages.

    A tower of the config that the named model lacks is made small and kept.
    """
    sizes, tp = MODELS[name], max(config.parallel.tensor_model_parallel_size, 1)
    groups = math.lcm(_SIZES["num_query_groups"], tp)
    towers = {} if "vision_num_layers" in sizes or not config.vision.vision_num_layers else small_tower(config)
    grown = {
        name: math.lcm(value, tp)
        for name, value in sizes.items()
        if name.startswith(("vision_num_attention", "connector_num_attention", "vision_ffn", "connector_ffn"))
        and isinstance(value, int)
    }
    layers = max(_SIZES["num_layers"], _stages(config))
    return {
        **sizes,
        **towers,
        **grown,
        "num_query_groups": groups,
        "num_attention_heads": groups * (_SIZES["num_attention_heads"] // _SIZES["num_query_groups"]),
        "ffn_hidden_size": math.lcm(_SIZES["ffn_hidden_size"], tp),
        "num_layers": layers,
        "activation_offload": _offload(config, layers),
    }


def _offload(config: RunConfig, layers: int) -> float:
    """`--activation-offload` of a model with so many layers."""
    blocks = layers // config.parallel.pipeline_model_parallel_size
    return min(config.training.activation_offload, float(max(1, blocks)))


def small_sizes(config: RunConfig) -> dict[str, Value]:
    """The config's own model with small widths, few layers and a small vocabulary; heads and options stay."""
    m = config.model
    least = {
        "num_layers": max(_SIZES["num_layers"], _stages(config)),
        "hidden_size": _SIZES["hidden_size"],
        "ffn_hidden_size": math.lcm(_SIZES["ffn_hidden_size"], config.parallel.tensor_model_parallel_size),
        "vocab_size": _DEFAULT_VOCABULARY,
    }
    sizes: dict[str, Value] = {name: min(getattr(m, name), value) for name, value in least.items()}
    sizes["kv_channels"] = min(m.head_dim, 8)
    sizes["activation_offload"] = _offload(config, min(m.num_layers, least["num_layers"]))
    return {**sizes, **small_tower(config)} if config.vision.vision_num_layers else sizes


def small_tower(config: RunConfig) -> dict[str, Value]:
    """The tower of the config in the sizes of tiny_vlm; its heads stay, and which feature comes first."""
    v, tp = config.vision, config.parallel.tensor_model_parallel_size
    layers = min(v.vision_num_layers, _TOWER_LAYERS)
    features = (-1, -min(2, layers))
    is_last_first = max(v.feature_layers) == v.feature_layers[0]
    kept = {"vision_num_attention_heads", "connector_num_attention_heads"}
    return {
        **{name: value for name, value in _TOWER.items() if name not in kept},
        "vision_num_layers": layers,
        "vision_feature_layers": features if is_last_first else features[::-1],
        "vision_ffn_hidden_size": math.lcm(48, tp),
        "connector_ffn_hidden_size": math.lcm(48, tp),
    }


def _stages(config: RunConfig) -> int:
    p = config.parallel
    return p.pipeline_model_parallel_size * p.num_virtual_stages_per_pipeline_rank
