"""The optimisation (batch, schedule, AdamW, precision, recomputation, validation), checkpoints,
logs and data.

The number of microbatches is no field: it follows from the batch sizes and the grid.
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
"""What a parameter is to its optimizer: a linear map, values that stand for themselves, or rows
that are looked up.
"""
STEPPED_BY: dict[Treated, str] = {"matrix": "adamw", "vector": "adamw", "table": "adamw"}
"""The rule of `engine/optim/rules.py` that steps it."""
STATE_KINDS: dict[str, tuple[str, ...]] = {"adamw": ("exp_avg", "exp_avg_sq")}
"""What a rule keeps of every element, by the names in checkpoints; master weights stand beside it.
"""


@dataclass(frozen=True)
class RecomputeMode:
    """What a block computes again in backward instead of keeping it."""

    repeats_activations: bool = False
    """Norms and activation functions. Their outputs are large and cheap: no product and no message
    is repeated.
    """
    repeats_block: bool = False
    """The whole block except core attention, whose output is kept because its cost grows with the
    row's length.
    """

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is computed again."""
        return not (self.repeats_activations or self.repeats_block)

    @property
    def strength(self) -> int:
        """Rank among the modes by how much they repeat; 0 repeats nothing."""
        if self.repeats_block:
            return 2
        return 1 if self.repeats_activations else 0


KEEP_ALL = "none"
"""The mode that repeats nothing, with which others are compared."""
RECOMPUTE_MODES = {
    KEEP_ALL: RecomputeMode(),
    "selective": RecomputeMode(repeats_activations=True),
    "full": RecomputeMode(repeats_block=True),
}
"""Rows of `--recompute-granularity`."""


@dataclass(frozen=True)
class TrainingConfig:
    """One training run. An iteration is one optimizer step over `global_batch_size` packs."""

    micro_batch_size: Positive[int] = 1
    """Packs that one rank group computes at once, concatenated to one row."""

    global_batch_size: Count[int] = 8
    """Packs per optimizer step over all data-parallel ranks and microbatches."""

    train_iters: Positive[int] = 100
    """Optimizer steps of the whole run."""

    train_epochs: AboveZero[float | None] = None
    """Passes over --data-path, in place of --train-iters; the last step takes the packs that are
    left.
    """

    lr: NotNegative[float] = 1e-3
    """Highest learning rate. Where no flag says it: 1e-5 from weights only (--load-hf, --finetune),
    1e-4 with low-rank pairs, and as before where a run goes on."""

    min_lr: NotNegative[float] = 0.0
    """Learning rate behind the last update of the decay."""

    lr_decay_style: Literal["cosine", "linear", "WSD", "constant"] = "cosine"
    """Shape of the decay after warmup; WSD stays at the top and falls over the last
    --lr-wsd-decay-iters.
    """

    lr_warmup_iters: NotNegative[int] = 0
    """Steps over which the learning rate rises linearly from 0."""

    lr_warmup_fraction: Fraction[float | None] = None
    """The warm-up as a share of the steps of the decay, rounded up, in place of --lr-warmup-iters.
    """

    lr_decay_iters: Positive[int | None] = None
    """Last step of the decay (default: --train-iters); later ones have --min-lr."""

    lr_wsd_decay_iters: Positive[int | None] = None
    """Steps of the final fall of the WSD schedule."""

    weight_decay: NotNegative[float] = 0.1
    """Decoupled weight decay of AdamW; norms and biases have none."""

    adam_beta1: Fraction[float] = 0.9
    """Decay of AdamW's first moment."""

    adam_beta2: Fraction[float] = 0.95
    """Decay of AdamW's second moment."""

    adam_eps: AboveZero[float] = 1e-8
    """Epsilon in AdamW's denominator."""

    moe_aux_loss_coeff: NotNegative[float] = 0.0
    """Coefficient of a term beside the loss by which the experts of each document are given equally
    many tokens.
    """

    moe_z_loss_coeff: NotNegative[float] = 0.0
    """Coefficient of a term beside the loss that keeps the scores of experts small (ST-MoE's
    z-loss).
    """

    moe_router_bias_update_rate: NotNegative[float] = 0.0
    """How far a step moves the corrections by which experts are chosen, towards those with few
    tokens of the step; needs --moe-router-score-function sigmoid (DeepSeek-V3: 0.001)."""

    clip_grad: NotNegative[float] = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it; 0 switches clipping
    off.
    """

    seed: Annotated[int, Range(0, 2**63 - 1)] = 1234
    """Seed of initial weights, dropout and the order of the packs."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of weights and activations; with bfloat16 the optimizer keeps float32 master weights."""

    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Activations computed again in backward: none, selective (cheap large ones), full (all but a
    block's input and what its attention gave)."""

    activation_offload: NotNegative[float] = 0.0
    """What decoder blocks save for backward waits in (pinned) host memory: in each pipeline stage
    of this part of its blocks (0.5, rounded up) or of this many (3; at most all); 0 keeps all on
    the device."""

    mlp_chunk_tokens: NotNegative[int] = 0
    """Tokens of a rank's row that the MLP of a block takes at a time, computed again in backward:
    so many gates and ups exist at once; 0 takes the row."""

    exit_duration: AboveZero[float | None] = None
    """Minutes after which the run saves and stops at the next step, with exit status 3."""

    eval_interval: NotNegative[int] = 0
    """Steps between validation losses; 0 never validates."""

    eval_iters: Positive[int] = 10
    """Global batches of one validation loss."""

    attention_kernel: Literal["auto", "flash", "cudnn", "flex", "flex_flash", "math", "dense"] = (
        "auto"
    )
    """Kernel of core attention: flash for the CPU, flex for CUDA, flex_flash with FlashAttention 4
    where a rank has all keys, cudnn by Transformer Engine for causal documents and flex for other
    rows, math anywhere, dense a small reference; auto is flash, on CUDA cudnn where it is
    installed, else flex, or math for float64."""

    transformer_impl: Literal["native", "transformer_engine", "auto"] = "auto"
    """Whose layers are used: native (plain torch, any device) or transformer_engine (NVIDIA's,
    CUDA); auto takes the latter where it is installed and suits."""

    fp8: Literal["off", "delayed", "current", "blockwise"] = "off"
    """Products of the decoder's linears in 8 bits, with this recipe for the scales; needs
    transformer_engine. Delayed scales are in no checkpoint: a resumed run measures them anew, and
    its first steps differ."""

    cross_entropy_chunk_tokens: NotNegative[int | Literal["auto"]] = "auto"
    """Tokens whose logits exist at once; 0 takes all of a row, auto too where logits and gradients
    are small, else the largest power of two that keeps them so."""

    gradient_accumulation_fusion: bool = False
    """Native linears add their weight gradient to the gradient bucket themselves (by apex's kernel
    where installed): one pass less over each. Transformer Engine's do where gradients are not
    sharded."""

    @property
    def recompute_mode(self) -> RecomputeMode:
        """The row of the recompute granularity."""
        return RECOMPUTE_MODES[self.recompute_granularity]

    @property
    def warmup_updates(self) -> int:
        """Updates of the warm-up; a share is rounded up, as by transformers."""
        share = self.lr_warmup_fraction
        return (
            self.lr_warmup_iters
            if share is None
            else math.ceil(share * (self.lr_decay_iters or self.train_iters))
        )

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of `--dtype`."""
        return {"bfloat16": 2, "float32": 4, "float64": 8}[self.dtype]

    @property
    def accumulation_bytes(self) -> int:
        """Bytes of an element of gradients, moments, softmax and log-sum-exp: fp32, or float64 for
        a float64 model.
        """
        return max(4, self.element_bytes)


@dataclass(frozen=True)
class CheckpointConfig:
    """Where checkpoints are written and read."""

    save: PathOf[str | None] = None
    """Directory for checkpoints, or a URL such as s3://bucket/run (needs the extra `store`); also
    written at the end of the run and on SIGTERM."""

    load: PathOf[str | None] = None
    """Checkpoint directory or URL to resume from, on this or any other grid."""

    load_hf: PathOf[str | None] = None
    """Hugging Face folder whose model, weights and tokenizer the run starts from, at step 0 with a
    fresh optimizer; unread once --auto-resume finds a checkpoint."""

    vision_from_hf: PathOf[str | None] = None
    """Molmo2 folder whose vision tower is added to the text model of --load-hf, with what fits of
    its connector; `none` adds a new one of the --vision flags. The embedding gets rows for image
    tokens (--additional-vocab-size, 128)."""

    load_adapter: PathOf[str | None] = None
    """Folder of a LoRA adapter, as peft writes it, whose pairs the run starts with beside the model
    of --load-hf.
    """

    auto_resume: bool = False
    """Go on from the newest checkpoint in --save, for runs that are restarted (torchrun
    --max-restarts, a job queue). Only when no checkpoint was ever written there, start from --load,
    --load-hf or step 0, and say so."""

    finetune: bool = False
    """Take only the weights of --load and start at step 0 with a fresh optimizer, on any data."""

    save_interval: NotNegative[int] = 0
    """Steps between checkpoints; 0 saves only at the end."""

    keep_last: NotNegative[int] = 0
    """Newest checkpoints to keep; 0 keeps all."""

    async_save: bool = False
    """Write checkpoints in the background from a copy in memory; an error ends the run at the next
    step.
    """


@dataclass(frozen=True)
class LogConfig:
    """What is reported and where. JSONL is always written."""

    log_interval: Positive[int] = 1
    """Steps between lines on the console."""

    log_file: PathOf[str | None] = None
    """JSONL file with one line per step (default: log.jsonl in a local --save, else
    megacp_log.jsonl); /dev/null writes none."""

    tensorboard_dir: PathOf[str | None] = None
    """Directory for TensorBoard events (needs the extra `log`)."""

    wandb_project: str | None = None
    """Weights & Biases project (needs the extra `log`)."""

    trackio_project: str | None = None
    """Trackio project, on this machine or where TRACKIO_SPACE_ID says (needs the package
    `trackio`).
    """

    profile: str | None = None
    """START:STOP, the first and the last step of which rank 0 writes a trace (chrome JSON), and the
    log says where the time of a step went, phase by phase over the ranks, and which rank was the
    slowest."""


@dataclass(frozen=True)
class DataConfig:
    """The training and validation packs; a dataset says itself which tokenizer and packing rules it
    has.
    """

    data_path: PathOf[DataPath | None] = None
    """Packed dataset directory made by tools/preprocess_data.py, or its URL (needs the extra
    `store`), or several with weights: `0.7 captions 0.3 text`. Without it random mock packs are
    used."""

    valid_data_path: PathOf[DataPath | None] = None
    """Packed dataset directory or URL for the validation loss, or several with weights."""

    seq_length: Positive[int] = 512
    """Tokens of one pack; a run takes those of --data-path where no flag says how many."""

    attention_mask: Literal["packed", "causal"] = "packed"
    """packed: documents of a pack do not see each other; causal: the whole pack is one document."""

    image_attention: Literal["example", "image", "causal"] = "example"
    """Which image tokens see each other in both directions: all of a document (example, Molmo2's
    rule), those of one image or frame (image), or none (causal)."""

    on_bad_image: Literal["fail", "skip"] = "fail"
    """What happens when an image cannot be decoded: fail ends the run, skip leaves out its whole
    document and logs it."""

    num_workers: NotNegative[int] = 1
    """Threads that read packs and decode images, each a step ahead of the others; 0 does it when
    they are needed. A rank keeps up to 512 MiB of videos and frames, so that one in several rows is
    decoded once."""
