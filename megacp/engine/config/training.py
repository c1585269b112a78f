"""Flags for optimisation, checkpoints, logs and data.

The number of microbatches is not a flag: it follows from the batch sizes and the grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from megacp.engine.config.blend import DataPath
from megacp.engine.config.ranges import (
    AboveZero,
    Count,
    Fraction,
    NotNegative,
    PathOf,
    Positive,
    Range,
)

Treated = Literal["matrix", "vector", "table"]
"""Role of a parameter in the optimizer: the matrix of a linear layer, a vector (norms, biases), or
the embedding table.
"""
STEPPED_BY: dict[Treated, str] = {"matrix": "adamw", "vector": "adamw", "table": "adamw"}
"""Update rule (in `engine/optim/rules.py`) for each parameter role."""
STATE_KINDS: dict[str, tuple[str, ...]] = {"adamw": ("exp_avg", "exp_avg_sq")}
"""Names of the per-element optimizer states of each update rule, as used in checkpoints. Master
weights are stored in addition.
"""


@dataclass(frozen=True)
class RecomputeMode:
    """Operations of a block that the backward pass recomputes, so their outputs are not saved."""

    repeats_activations: bool = False
    """Recompute norms and activation functions. Their outputs are large but cheap to recompute,
    because no matrix product and no communication is repeated.
    """
    repeats_block: bool = False
    """Recompute the whole block except core attention, whose cost per token grows with the row
    length.
    """

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is recomputed."""
        return not (self.repeats_activations or self.repeats_block)

    @property
    def strength(self) -> int:
        """Rank among the modes, from 0 (recomputes nothing) to 2 (recomputes the most)."""
        if self.repeats_block:
            return 2
        return 1 if self.repeats_activations else 0


KEEP_ALL = "none"
"""The mode that recomputes nothing; the baseline for the other modes."""
RECOMPUTE_MODES = {
    KEEP_ALL: RecomputeMode(),
    "selective": RecomputeMode(repeats_activations=True),
    "full": RecomputeMode(repeats_block=True),
}
"""Choices of `--recompute-granularity`."""


@dataclass(frozen=True)
class TrainingConfig:
    """Flags of a training run. An iteration is one optimizer step on `global_batch_size` packs."""

    # Batch and length of the run
    micro_batch_size: Positive[int] = 1
    """Packs per microbatch. They are concatenated into one row."""

    global_batch_size: Count[int] = 8
    """Packs per optimizer step, across all data-parallel ranks and microbatches. If you do not set
    it, a run with --load-hf chooses it based on the size of the dataset."""

    train_iters: Positive[int] = 100
    """Number of optimizer steps in the whole run."""

    train_epochs: AboveZero[float | None] = None
    """Number of passes over --data-path; replaces --train-iters. The last step uses the remaining
    packs. If you set neither flag, a run with --load-hf makes 3 passes."""

    # Learning rate; `engine/optim/lr_schedule.py` has the formulas
    lr: NotNegative[float] = 1e-3
    """Peak learning rate. If you do not set it, --load-hf and --finetune use 1e-5, --lora-rank uses
    1e-4, and a resumed run keeps its previous value."""

    min_lr: NotNegative[float] = 0.0
    """Learning rate after the decay ends."""

    lr_decay_style: Literal["cosine", "linear", "WSD", "constant"] = "cosine"
    """How the learning rate decays after the warm-up. WSD (warm-up, stable, decay) keeps the peak
    until the last --lr-wsd-decay-iters steps."""

    lr_warmup_iters: NotNegative[int] = 0
    """Number of steps of linear warm-up from 0."""

    lr_warmup_fraction: Fraction[float | None] = None
    """Warm-up as a fraction of --lr-decay-iters, rounded up; replaces --lr-warmup-iters."""

    lr_decay_iters: Positive[int | None] = None
    """Last step of the decay; later steps use --min-lr. None means --train-iters."""

    lr_wsd_decay_iters: Positive[int | None] = None
    """Number of steps in the final decay of --lr-decay-style WSD."""

    # AdamW
    weight_decay: NotNegative[float] = 0.1
    """Decoupled weight decay for AdamW. Norms and biases are not decayed."""

    adam_beta1: Fraction[float] = 0.9
    """Decay rate of AdamW's first moment."""

    adam_beta2: Fraction[float] = 0.95
    """Decay rate of AdamW's second moment."""

    adam_eps: AboveZero[float] = 1e-8
    """Epsilon in AdamW's denominator."""

    # Balance of experts; `engine/expert_parallel/balance.py` has the formulas
    moe_aux_loss_coeff: NotNegative[float] = 0.0
    """Weight of the auxiliary load-balancing loss, which is computed per document."""

    moe_z_loss_coeff: NotNegative[float] = 0.0
    """Weight of the router z-loss (ST-MoE), which keeps router scores small."""

    moe_router_bias_update_rate: NotNegative[float] = 0.0
    """Amount by which each step raises the correction of experts with few tokens and lowers that of
    experts with many tokens. Needs --moe-router-score-function sigmoid (DeepSeek-V3: 0.001)."""

    # Numerics
    clip_grad: NotNegative[float] = 1.0
    """Maximum global gradient norm. Larger gradients are scaled down; 0 disables clipping."""

    seed: Annotated[int, Range(0, 2**63 - 1)] = 1234
    """Random seed for initial weights, dropout and pack order."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Data type of weights and activations. With bfloat16, the optimizer keeps float32 master
    weights."""

    # Three ways to save activation memory, which can be combined
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Activations to recompute in the backward pass: none, selective (outputs of norms and
    activation functions, which are large but cheap to recompute), or full (everything in a block
    except its input and the output of core attention)."""

    activation_offload: NotNegative[float] = 0.0
    """Offload saved activations to pinned host memory for a fraction (0.5, rounded up) or a number
    (3) of each pipeline stage's decoder blocks. 0 keeps all activations on the device."""

    mlp_chunk_tokens: NotNegative[int] = 0
    """Number of tokens per MLP tile. Tiles are recomputed in the backward pass, so only one tile's
    MLP activations exist at a time. 0 disables tiling."""

    # A job with a time limit ends with a checkpoint instead of being killed
    exit_duration: AboveZero[float | None] = None
    """Save and stop before the next step once this number of minutes has passed, with exit status
    3. If not set, there is no limit."""

    eval_interval: NotNegative[int] = 0
    """Number of steps between validations; 0 disables validation."""

    eval_iters: Positive[int] = 10
    """Number of global batches per validation."""

    # Kernels
    attention_kernel: Literal["auto", "flash", "cudnn", "flex", "flex_flash", "math", "dense"] = (
        "auto"
    )
    """Kernel for core attention. flash is for the CPU, and flex for CUDA. flex_flash uses
    FlashAttention 4 if a rank has all keys. cudnn uses Transformer Engine for causal documents and
    flex for other rows. math runs on any device. dense is a reference for short rows. auto chooses
    math for float64 and flash on the CPU; on CUDA, it chooses cudnn if installed, otherwise
    flex."""

    transformer_impl: Literal["native", "transformer_engine", "auto"] = "auto"
    """Implementation of the layers: native (plain PyTorch, any device) or transformer_engine
    (NVIDIA's library, CUDA only). auto chooses transformer_engine if it is installed and supports
    the configuration."""

    fp8: Literal["off", "delayed", "current", "blockwise"] = "off"
    """Scaling recipe for FP8 matrix products in the decoder's linear layers. Needs
    --transformer-impl transformer_engine. Checkpoints do not store the scales of the delayed
    recipe, so the first steps of a resumed run differ slightly."""

    cross_entropy_chunk_tokens: NotNegative[int | Literal["auto"]] = "auto"
    """Number of tokens whose logits are computed at a time; 0 means a whole row. auto uses a whole
    row if its logits and their gradients are small, otherwise the largest power of two that keeps
    them small."""

    gradient_accumulation_fusion: bool = False
    """Let native linear layers add weight gradients directly to the gradient bucket, using apex's
    kernel if installed. This saves one pass over each gradient. Transformer Engine layers always do
    so unless gradients are sharded."""

    @property
    def recompute_mode(self) -> RecomputeMode:
        """Properties of the chosen `recompute_granularity`."""
        return RECOMPUTE_MODES[self.recompute_granularity]

    @property
    def warmup_updates(self) -> int:
        """Number of warm-up steps, from --lr-warmup-iters or --lr-warmup-fraction."""
        if self.lr_warmup_fraction is None:
            return self.lr_warmup_iters
        decay = self.lr_decay_iters or self.train_iters
        # transformers also rounds up
        return math.ceil(self.lr_warmup_fraction * decay)

    @property
    def element_bytes(self) -> int:
        """Size of a `--dtype` element in bytes."""
        return {"bfloat16": 2, "float32": 4, "float64": 8}[self.dtype]

    @property
    def accumulation_bytes(self) -> int:
        """Element size, in bytes, of gradients, optimizer moments, softmax and log-sum-exp.

        They are float32, or float64 in a float64 model.
        """
        return max(4, self.element_bytes)


@dataclass(frozen=True)
class CheckpointConfig:
    """Flags for checkpoints, and for other weights to start from."""

    save: PathOf[str | None] = None
    """Directory for checkpoints, or a URL such as s3://bucket/run (needs the `store` extra). The
    run also saves when it ends and on SIGTERM."""

    # Start of a run. `checks.py` refuses conflicting flags, such as --load with --load-hf.
    load: PathOf[str | None] = None
    """Checkpoint directory or URL to resume from, on the same grid or a different one."""

    load_hf: PathOf[str | None] = None
    """Hugging Face folder that provides the model, its weights and the tokenizer. The run starts at
    step 0 with a new optimizer. Ignored if --auto-resume finds a checkpoint."""

    vision_from_hf: PathOf[str | None] = None
    """Molmo2 folder whose vision tower and connector are added to the text model of --load-hf;
    connector weights of a different shape are not loaded. `none` initialises a new vision tower
    from the --vision flags. Both add 128 embedding rows for image tokens
    (--additional-vocab-size)."""

    load_adapter: PathOf[str | None] = None
    """Folder of a LoRA adapter in peft's format to start from. Needs --load-hf."""

    # Restarts: a job script repeats the same command line, so --auto-resume wins over --load-hf
    auto_resume: bool = False
    """Resume from the newest checkpoint in --save, for runs that a job queue or torchrun
    --max-restarts may restart. If there is no checkpoint, log this and start from --load, --load-hf
    or step 0."""

    finetune: bool = False
    """Load only the weights from --load, and start at step 0 with a new optimizer, on any data."""

    save_interval: NotNegative[int] = 0
    """Number of steps between checkpoints; 0 saves only at the end."""

    keep_last: NotNegative[int] = 0
    """Number of most recent checkpoints to keep; 0 keeps all."""

    async_save: bool = False
    """Write checkpoints in the background, from a copy in memory. A failed write ends the run at
    the next step."""


@dataclass(frozen=True)
class LogConfig:
    """Flags for logging."""

    log_interval: Positive[int] = 1
    """Number of steps between console lines."""

    log_file: PathOf[str | None] = None
    """JSONL file with one line per step; /dev/null disables it. None means log.jsonl in a local
    --save, otherwise megacp_log.jsonl."""

    # Optional loggers. A missing package is reported before training starts.
    tensorboard_dir: PathOf[str | None] = None
    """Directory for TensorBoard events (needs the extra `log`)."""

    wandb_project: str | None = None
    """Weights & Biases project to log to (needs the extra `log`)."""

    trackio_project: str | None = None
    """Trackio project to log to, locally or in the Space given by TRACKIO_SPACE_ID (needs the
    package `trackio`)."""

    profile: str | None = None
    """Profile steps START:STOP, both included. Rank 0 writes a trace (Chrome JSON). The log reports
    the time of each phase across ranks, and the slowest rank."""


@dataclass(frozen=True)
class DataConfig:
    """Flags for training and validation data.

    Each dataset records its own tokenizer and packing rules.
    """

    data_path: PathOf[DataPath | None] = None
    """Packed dataset: a directory written by tools/preprocess_data.py, or its URL (needs the extra
    `store`). Several datasets need weights, such as `0.7 captions 0.3 text`. If not set, the run
    trains on random mock packs."""

    valid_data_path: PathOf[DataPath | None] = None
    """Packed validation dataset: a directory or URL, or several datasets with weights."""

    seq_length: Positive[int] = 512
    """Number of tokens per pack. If you do not set it, the run uses the length stored in
    --data-path."""

    attention_mask: Literal["packed", "causal"] = "packed"
    """Attention mask within a pack. packed keeps documents separate; causal treats the whole pack
    as one document."""

    image_attention: Literal["example", "image", "causal"] = "example"
    """Image tokens that attend to each other in both directions: those in the same document
    (example, as in Molmo2), those in the same image or frame (image), or none (causal)."""

    on_bad_image: Literal["fail", "skip"] = "fail"
    """What to do about an image that cannot be decoded: fail ends the run; skip drops the whole
    document and logs it."""

    num_workers: NotNegative[int] = 1
    """Number of threads that read packs and decode images, each for a different future step. 0
    reads packs only when they are needed. Each rank caches up to 512 MiB of videos and frames that
    several rows use."""
