"""What a parity check trains: any run's config made small enough for one process, and the config of that one process.

Key property: the layout under test (grid, virtual stages, transport, layout of tokens, recomputation, micro batch) is
never touched; only rows, batch and precision shrink, and every change is told. Rejected: a config of its own for the
check, which would test a layout that nobody runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megacp.config.checks import require
from megacp.config.run import RunConfig, Value, flag, flatten, with_values
from megacp.context_parallel.auto import refuse_auto
from megacp.data.mock import MockRules
from megacp.planner.costs import model_parameters
from megacp.planner.report import human_count
from megacp.training.images import mock_images

_SIZES: dict[str, Value] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 8,
    "vocab_size": 211,
}
MODELS: dict[str, dict[str, Value]] = {
    "tiny_llm": _SIZES,
    "tiny_llama": {
        **_SIZES,
        "untie_embeddings_and_output_weights": True,
        "rope_scaling": "llama3",
        "rope_scaling_factor": 8.0,
        "rope_original_max_positions": 64,
    },
    "tiny_qwen3": {**_SIZES, "qk_layernorm": True, "kv_channels": 16},
    "tiny_biased": {
        **_SIZES,
        "qk_layernorm": True,
        "add_qkv_bias": True,
        "add_attention_output_bias": True,
        "add_mlp_bias": True,
        "hidden_dropout": 0.1,
    },
    "tiny_vlm": {
        **_SIZES,
        "untie_embeddings_and_output_weights": True,
        "additional_vocab_size": 8,
        "init_method_std": 0.15,  # with 0.02 the tower's gradients are lost in the rounding of the text's
        "vision_num_layers": 3,
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
    },
}
"""Models by name: the plain decoder (tied, grouped queries), Llama's and Qwen3's options, every bias with dropout, and
a decoder with a vision tower.
"""

MAX_PARAMETERS = 20_000_000
"""One process holds the whole model in float64 with its optimizer, and all gradients are collected and compared."""
_DEFAULT_VOCABULARY = 211
_ROW, _ROW_OF_CONFIG = 64, 256
"""Tokens of a row: of the named models, and the most that is left of a config's."""
_EPSILONS = {"float64": 1e-4, "float32": 1e-4, "bfloat16": 1e-2}
"""Least epsilon of AdamW: with 1e-8 its first update is the gradient's sign, and a gradient that is all rounding would
make a whole update of it.
"""
_SET_ASIDE: dict[str, Value] = {
    "data_path": None,
    "valid_data_path": None,
    "save": None,
    "load": None,
    "save_interval": 0,
    "keep_last": 0,
    "eval_interval": 0,
    "log_file": None,
    "tensorboard_dir": None,
    "wandb_project": None,
    "dry_run": False,
    "world_size": None,
}


@dataclass(frozen=True)
class ParitySetup:
    """Two configs to train on the same packs, and what was changed on the way."""

    config: RunConfig
    """Of the grid."""
    reference: RunConfig
    """Of the one process: no parallelism, dense mask, nothing recomputed."""
    rules: MockRules
    world_size: int
    model: str | None
    """The name in `MODELS` of the sizes; None when they are the config's own."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """What the command line of a check says besides the flags of a run."""

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


def prepare(config: RunConfig, request: Request) -> ParitySetup:
    """The setup of a check. Raises ValueError with all reasons why there can be none."""
    refuse_auto(config, "a parity check")
    model = request.model if request.model or request.has_config else "tiny_llm"
    if model is not None and model not in MODELS:
        raise ValueError(f"--model {model} is unknown; choose {', '.join(MODELS)}, or give sizes with --config")
    notes: list[str] = []
    if config.data.data_path is not None:
        notes.append(f"random packs are used, not those of --data-path {config.data.data_path}")
    named = {} if model is None else _fitting(MODELS[model], config)
    sizes = {name: value for name, value in named.items() if name not in request.given}
    config = with_values(config, {**_SET_ASIDE, **sizes})
    if config.model.vocab_size == 0:
        config = with_values(config, {"vocab_size": _DEFAULT_VOCABULARY})
        notes.append(f"--vocab-size {_DEFAULT_VOCABULARY}, as no dataset is there to say")
    world_size = request.world_size or config.model_ranks
    if request.has_config:
        require(config, world_size)
    before = flatten(config)
    for name, value in _smaller(config, world_size, request).items():
        if name in request.given or before[name] == value:
            continue
        config = with_values(config, {name: value})
        if request.has_config or name == "adam_eps":
            notes.append(f"{flag(name)} {value} instead of {before[name]} (as a flag yours is kept)")
    require(config, world_size)
    reference = _one_process(config, world_size)
    require(reference, 1)
    _refuse_large(config)
    mask = request.mask or config.data.attention_mask
    rules = MockRules(
        config.model.vocab_size,
        config.data.seq_length,
        mask,
        ragged=True,
        seed=config.training.seed,
        images=mock_images(config),
    )
    return ParitySetup(config, reference, rules, world_size, model, tuple(notes))


def _fitting(sizes: Mapping[str, Value], config: RunConfig) -> dict[str, Value]:
    """The sizes of a named model, with heads and layers enough for any tp and any number of stages."""
    p, groups, heads = config.parallel, int(sizes["num_query_groups"] or 1), int(sizes["num_attention_heads"] or 1)
    tp, stages = p.tensor_model_parallel_size, p.pipeline_model_parallel_size * p.num_virtual_stages_per_pipeline_rank
    wide = math.lcm(groups, max(tp, 1))
    towers: dict[str, Value] = {
        name: math.lcm(int(value), max(tp, 1))
        for name, value in sizes.items()
        if name.startswith(("vision_num_attention", "connector_num_attention", "vision_ffn", "connector_ffn"))
        and isinstance(value, int)
    }
    return {
        **sizes,
        **towers,
        "num_query_groups": wide,
        "num_attention_heads": wide * (heads // groups),
        "ffn_hidden_size": math.lcm(int(sizes["ffn_hidden_size"] or 1), max(tp, 1)),
        "num_layers": max(int(sizes["num_layers"] or 1), stages),
    }


def _refuse_large(config: RunConfig) -> None:
    parameters = model_parameters(config.model)
    if parameters > MAX_PARAMETERS:
        raise ValueError(
            f"the model has {human_count(parameters)} parameters, a parity check trains it whole in one process: "
            f"at most {human_count(MAX_PARAMETERS)}. Keep the layout and give a small model: --model tiny_llm, or "
            f"--num-layers, --hidden-size, --ffn-hidden-size and --vocab-size"
        )


def _smaller(config: RunConfig, world_size: int, request: Request) -> dict[str, Value]:
    """What a check uses unless it is given: float64, a short row, few microbatches, an epsilon above rounding."""
    p, t = config.parallel, config.training
    step = 2 * p.context_parallel_size * p.tensor_model_parallel_size
    length = min(_ROW_OF_CONFIG, config.data.seq_length) if request.has_config else _ROW
    # more microbatches than stages, and no multiple of them: warmup, steady state and drain all occur
    replicas = t.micro_batch_size * max(1, config.data_parallel_size(world_size))
    batch = replicas * max(2, p.pipeline_model_parallel_size + 1)
    dtype = t.dtype if "dtype" in request.given else "float64"
    return {
        "dtype": dtype,
        "seq_length": -(-length // step) * step,
        "global_batch_size": min(batch, t.global_batch_size) if request.has_config else batch,
        "adam_eps": max(t.adam_eps, _EPSILONS[dtype]),
    }


def _one_process(config: RunConfig, world_size: int) -> RunConfig:
    """One process, on the same rows: dynamic context parallelism joins the packs of dp ranks in one."""
    joined = config.data_parallel_size(world_size) if config.parallel.dynamic_context_parallel else 1
    return with_values(
        config,
        {
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "context_parallel_size": 1,
            "num_virtual_stages_per_pipeline_rank": 1,
            "recompute_granularity": "none",
            "attention_kernel": "dense",
            "cp_comm_type": "p2p",
            "cp_layout": "contiguous",
            "hierarchical_context_parallel_sizes": None,
            "cp_exchange_stages": 1,
            "dynamic_context_parallel": False,
            "micro_batch_size": config.training.micro_batch_size * joined,
        },
    )
