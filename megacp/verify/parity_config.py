"""The config that a parity check trains: any run's config made small enough for one process, and its one-process twin.

The layout under test (grid, virtual stages, transport, layout of tokens, recomputation, micro batch) is never touched.
Rows, batch and precision shrink, and a large model loses width, depth and vocabulary. It keeps its heads, groups,
options, ties, towers and at least one layer a stage. Every change is told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from megacp.core.config.blend import named_folders, shown_path
from megacp.core.config.checks import require
from megacp.core.config.run import ON_CPU, RunConfig, Value, fields, flag, flatten, with_values
from megacp.core.data.manifest import MANIFEST_NAME
from megacp.core.data.mock import MockRules
from megacp.core.models.costs import run_parameters
from megacp.core.ops.kernels import kernel_problem
from megacp.core.training.images import mock_images
from megacp.core.training.sources import open_sources

MAX_PARAMETERS = 20_000_000
"""One process holds the whole model in float64 with its optimizer, and all gradients are collected and compared."""
MOST_ROW_TOKENS = 4096
"""Tokens of a stored row: one process holds heads x T x T scores of it in float64, 1 GiB at 8 heads."""
_ROW, _ROW_OF_CONFIG = 64, 256
"""Tokens of a row: of the named models, and the most that is left of a config's."""
_VOCABULARY = 211
_EPSILONS = {"float64": 1e-4, "float32": 1e-2, "bfloat16": 1e-2}
"""Least epsilon of AdamW: with 1e-8 its first update is the gradient's sign, and a gradient that is all rounding would
make a whole update of it.
"""
_SCHEDULE: dict[str, Value] = {
    "lr_decay_style": "constant",
    "lr_warmup_iters": 0,
    "lr_decay_iters": None,
    "lr_wsd_decay_iters": None,
}
"""A run's first updates may be smaller than rounding: its warm-up is set aside, and the decay that goes with it."""
_RATE, _DECAY = 1e-2, 10.0
"""Learning rate, and least weight decay: a tenth of a decayed weight goes with each update, far more than bfloat16
rounds. So a parameter in a wrong group is seen, and one without an update.
"""
_SET_ASIDE: dict[str, Value] = {
    "valid_data_path": None,
    "eval_interval": 0,
    "exit_duration": None,
    "dry_run": False,
    "world_size": None,
}
"""Flags that are no part of a step, besides those of `checkpoint` and `log`."""
_SIZES: dict[str, int] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 8,
    "vocab_size": _VOCABULARY,
}
_TOWER_LAYERS = 3
_TOWER: dict[str, Value] = {
    "init_method_std": 0.15,  # with 0.02 the tower's gradients are lost in the rounding of the text's
    "vision_num_layers": _TOWER_LAYERS,
    "vision_hidden_size": 32,
    "vision_ffn_hidden_size": 48,
    "vision_num_attention_heads": 8,
    "vision_patch_size": 4,
    "vision_image_size": 16,
    "vision_feature_layers": (-1, -2),
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
    "tiny_qwen3": {**_SIZES, "qk_layernorm": "head", "kv_channels": 16},
    "tiny_olmo2": {
        **_SIZES,
        "norm_position": "after",
        "qk_layernorm": "all_heads",
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
        "qk_layernorm": "head",
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
ONE_PROCESS: dict[str, Value] = {
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
    "hierarchical_context_parallel_sizes": None,
    "dynamic_context_parallel": False,
    "vision_shards": "contiguous",
    "data_parallel_sharding_strategy": "optim",
    "num_distributed_optimizer_instances": 1,
}
"""The twin: no parallelism, dense mask, nothing recomputed."""


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
        """Of the one process, on the same rows: dynamic context parallelism joins the packs of dp ranks in one."""
        dynamic = self.config.parallel.dynamic_context_parallel
        joined = self.config.data_parallel_size(self.world_size) if dynamic else 1
        packs = self.config.training.micro_batch_size * joined
        return with_values(self.config, {**ONE_PROCESS, "micro_batch_size": packs})

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
    default = flatten(RunConfig())
    unsaved = {info.name: default[info.name] for info in fields().values() if info.room in ("checkpoint", "log")}
    config = with_values(config, {**unsaved, **_SET_ASIDE})
    original, notes = config, []
    wanted = dict(ON_CPU)
    if kernel_problem(config.training.attention_kernel, "cpu", "float64") is None:
        wanted.pop("attention_kernel")
    config = with_values(config, wanted)
    if reason := _packs_unusable(config, request):
        notes.append(f"random packs are used, not those of --data-path {shown_path(config.data.data_path)}: {reason}")
        config = with_values(config, {"data_path": None})
    kept = request.given | (_FIXED_BY_PACKS if config.data.data_path is not None else set())

    def changed(values: dict[str, Value]) -> RunConfig:
        return with_values(config, {name: value for name, value in values.items() if name not in kept})

    if model is not None:
        config = changed(named_sizes(model, config))
    if config.data.data_path is not None:
        config, _ = open_sources(config)  # refuses what does not fit, before a process starts
    elif config.model.vocab_size == 0:
        config = with_values(config, {"vocab_size": _VOCABULARY})
    world_size = request.world_size or config.model_ranks
    if request.has_config:
        require(config, world_size)
    if run_parameters(config) > MAX_PARAMETERS:
        config = changed(small_sizes(config))
    if (left := run_parameters(config)) > MAX_PARAMETERS:
        raise ValueError(
            f"the model has {left / 1e6:.1f} M parameters with the sizes that are given, a parity check trains it "
            f"whole in one process: at most {MAX_PARAMETERS / 1e6:.1f} M. Keep the layout and give a small model: "
            f"--model tiny_llm, or smaller --num-layers, --hidden-size, --ffn-hidden-size and --vocab-size"
        )
    config = changed(_smaller(config, world_size, request))
    require(config, world_size)
    rules = None
    if config.data.data_path is None:
        mask = request.mask or ("mixed" if config.vision.vision_num_layers else config.data.attention_mask)
        seed, length = config.training.seed, config.data.seq_length
        rules = MockRules(config.model.vocab_size, length, mask, True, seed, mock_images(config))
    told = None if request.has_config else {"adam_eps", "lr", "min_lr", "weight_decay", *_SCHEDULE, *ON_CPU}
    notes += _differences(original, config, told)
    setup = ParitySetup(config, rules, world_size, model, tuple(notes))
    require(setup.reference, 1)
    return setup


def _differences(before: RunConfig, after: RunConfig, told: set[str] | None) -> list[str]:
    """What became of each field of `told` (None: of all), as flags; data paths have their own note."""
    old, new = flatten(before), flatten(after)
    names = [n for n in new if new[n] != old[n] != "auto" and n != "data_path" and (told is None or n in told)]
    return [f"{flag(name)} {_words(new[name])} instead of {_words(old[name])}" for name in names]


def _words(value: Value) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _packs_unusable(config: RunConfig, request: ParityRequest) -> str | None:
    """Why the packs of `--data-path` cannot be used, or None. ValueError where the path stood as a flag."""
    path, length = config.data.data_path, config.data.seq_length
    if path is None:
        return None
    reason = None
    if request.mask is not None:
        reason = f"--mask {request.mask} draws random packs"
    elif absent := [folder for folder in named_folders(path) if not Path(folder, MANIFEST_NAME).is_file()]:
        reason = f"{'it' if isinstance(path, str) else ' and '.join(absent)} holds no {MANIFEST_NAME}"
    elif length > MOST_ROW_TOKENS:
        reason = f"one process would hold a mask of {length:,} x {length:,}, at most {MOST_ROW_TOKENS:,} are taken"
    if reason is not None and "data_path" in request.given:
        raise ValueError(f"--data-path {shown_path(path)}: {reason}; leave it out to check on random packs")
    return reason


def _smaller(config: RunConfig, world_size: int, request: ParityRequest) -> dict[str, Value]:
    """Defaults of a check: float64, a short row, few microbatches, updates that are seen beside rounding."""
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
        "lr": max(_RATE, t.min_lr) if "min_lr" in request.given else _RATE,
        "min_lr": 0.0,
        "weight_decay": max(t.weight_decay, _DECAY),
        **({} if request.given & set(_SCHEDULE) else _SCHEDULE),  # a schedule that flags shape stays
    }


def named_sizes(name: str, config: RunConfig) -> dict[str, Value]:
    """The sizes of a model of `MODELS`, with heads and layers enough for any tp and any number of stages.

    A tower of the config that the named model lacks is made small and kept.
    """
    tp, sizes = max(config.parallel.tensor_model_parallel_size, 1), dict(MODELS[name])
    if config.vision.vision_num_layers and "vision_num_layers" not in sizes:
        sizes |= _small_tower(config)
    groups = math.lcm(_SIZES["num_query_groups"], tp)
    sizes |= {"num_query_groups": groups, "num_attention_heads": 2 * groups, "num_layers": _layers(config)}
    for cut in ("ffn_hidden_size", *(n for n in sizes if n.endswith("_ffn_hidden_size") or n.endswith("tion_heads"))):
        if isinstance(value := sizes[cut], int):
            sizes[cut] = math.lcm(value, tp)
    return {**sizes, **_offload(config, _layers(config))}


def small_sizes(config: RunConfig) -> dict[str, Value]:
    """The config's own model with small widths, few layers and a small vocabulary; heads and options stay."""
    m, tp = config.model, config.parallel.tensor_model_parallel_size
    least = {**_SIZES, "num_layers": _layers(config), "ffn_hidden_size": math.lcm(_SIZES["ffn_hidden_size"], tp)}
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "vocab_size")
    sizes: dict[str, Value] = {name: min(getattr(m, name), least[name]) for name in names}
    sizes |= {"kv_channels": min(m.head_dim, 8), **_offload(config, min(m.num_layers, least["num_layers"]))}
    return {**sizes, **_small_tower(config)} if config.vision.vision_num_layers else sizes


def _small_tower(config: RunConfig) -> dict[str, Value]:
    """The tower of the config in the sizes of tiny_vlm; its heads stay, and which feature comes first."""
    v, tp = config.vision, config.parallel.tensor_model_parallel_size
    layers = min(v.vision_num_layers, _TOWER_LAYERS)
    features = (-1, -min(2, layers))
    is_last_first = max(v.feature_layers) == v.feature_layers[0]
    return {
        **{name: value for name, value in _TOWER.items() if not name.endswith("attention_heads")},
        "vision_num_layers": layers,
        "vision_feature_layers": features if is_last_first else features[::-1],
        "vision_ffn_hidden_size": math.lcm(48, tp),
        "connector_ffn_hidden_size": math.lcm(48, tp),
    }


def _layers(config: RunConfig) -> int:
    """As few layers as the stages allow."""
    p = config.parallel
    return max(_SIZES["num_layers"], p.pipeline_model_parallel_size * p.num_virtual_stages_per_pipeline_rank)


def _offload(config: RunConfig, layers: int) -> dict[str, Value]:
    """`--activation-offload` of a model with so many layers."""
    blocks = layers // config.parallel.pipeline_model_parallel_size
    return {"activation_offload": min(config.training.activation_offload, float(max(1, blocks)))}
