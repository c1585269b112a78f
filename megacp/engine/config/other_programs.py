"""Flags and keys of other programs: accepted, translated, or refused with the right name here.

Three tables have all names, in the spelling of a field (`use_flash_attn`):

* `ACCEPTED`: flags of Megatron-LM that ask for something that every run here does, or that no run
  here needs. A value that contradicts is refused. A few accepted flags set a field.
* `INSTEAD`: names whose flag is spelled differently here.
* `NOT_OFFERED`: names without a counterpart, with the reason.

The names were collected from the argument lists of Megatron-LM, Pai-Megatron-Patch, transformers
and TRL, LLaMA-Factory, Axolotl, torchtitan, NeMo Automodel and Molmo2's training code.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megacp.engine.config.run import Value, fields, flag

_CUTOFF = 0.75
"""Similarity from which a known name is suggested. Below it most suggestions are wrong: at 0.5,
`template` resembles keep_last, and `load_in_4bit` load_hf."""
_SHOWN = 100
"""Largest number of characters of a name that is compared with known names."""
_TRUE = "true"
"""Normal form of the value of a switch, which a command line gives without a value."""
_SWITCH = (_TRUE,)


@dataclass(frozen=True)
class Accepted:
    """A flag of another program that a run accepts and does not need."""

    values: tuple[str, ...] | None = _SWITCH
    """Accepted values in the form of `_normal`; None accepts every value."""
    otherwise: str = "it is always on here"
    """Reason why any other value is refused, or the flag to use instead."""
    sets: Mapping[str, Value] = field(default_factory=dict)
    """Fields that the flag sets unless they are given."""
    always: bool = True
    """Whether every run does this. If False, the flag has no effect here."""


def _needless(*values: str, otherwise: str = "") -> Accepted:
    """Return the row of a flag without effect; without `values`, every value is accepted."""
    return Accepted(values or None, otherwise, always=False)


_NO_BIAS_OF_ALL = (
    "give --add-qkv-bias, --add-attention-output-bias or --add-mlp-bias for linear layers with one"
)
_SWITCHES_THAT_ARE_ON = {
    # communication and memory
    "use_distributed_optimizer": "the optimizer state is always sharded",
    "overlap_grad_reduce": "gradients are always reduced during backward",
    "overlap_param_gather": "parameters are gathered as soon as they are updated",
    "accumulate_allreduce_grads_in_fp32": "gradients are always summed in float32",
    # the block
    "swiglu": "the activation is --mlp-activation",
    "group_query_attention": "every layer has --num-query-groups groups",
    "disable_bias_linear": _NO_BIAS_OF_ALL,
    "use_rotary_position_embeddings": "rotary embeddings are the only position embedding",
    "no_position_embedding": "rotary embeddings are the only position embedding",
    "use_flash_attn": "no kernel stores all attention scores, except --attention-kernel dense",
    "moe_grouped_gemm": "the experts of a rank are always multiplied together",
    # the loss and its documents
    "calculate_per_token_loss": "the loss is always a sum over labels, divided once per step",
    "cross_entropy_loss_fusion": "the loss of a step is always fused",
    "reset_position_ids": "use --attention-mask causal for one document per pack",
    "reset_attention_mask": "use --attention-mask causal for one document per pack",
    "eod_mask_loss": "no document predicts the first token of the next one",
    "no_create_attention_mask_in_dataloader": "a mask is never built as a matrix",
    # checkpoints and logs
    "use_checkpoint_args": "a loaded checkpoint always sets the model",
    "auto_detect_ckpt_format": "there is a single format of checkpoints",
    "log_throughput": "the throughput is always logged",
}
_VALUES_THAT_ARE_ON = {
    "normalization": (("rmsnorm",), "every norm is RMSNorm"),
    "position_embedding_type": (("rope",), "rotary embeddings are the only position embedding"),
    "attention_dropout": (("0",), "attention has no dropout; --hidden-dropout exists"),
    "optimizer": (
        ("adam", "adamw", "adamw_torch", "adamw_torch_fused"),
        "AdamW is the only optimizer",
    ),
    "dataloader_type": (("single", "cyclic"), "the order of packs follows from --seed"),
    # the schedules of Megatron that change more than the learning rate
    "lr_warmup_init": (("0",), "the warm-up starts at 0"),
    "weight_decay_incr_style": (("constant",), "--weight-decay is constant"),
    "distributed_backend": (("nccl", "gloo"), "the device decides: NCCL on CUDA, gloo on CPUs"),
    # experts
    "expert_tensor_parallel_size": (
        ("1",),
        "experts are not split over tp; use --expert-model-parallel-size",
    ),
    "moe_token_dispatcher_type": (("alltoall",), "ranks exchange tokens all to all"),
    "moe_router_load_balancing_type": (
        ("aux_loss", "none"),
        "--moe-aux-loss-coeff and --moe-router-bias-update-rate balance experts",
    ),
    "moe_router_dtype": (("fp32",), "router scores are float32"),
    # defaults of Transformer Engine's recipe, which --fp8 delayed uses
    "fp8_amax_history_len": (("1024",), "--fp8 delayed has a history of 1024 steps"),
    "fp8_amax_compute_algo": (("max",), "--fp8 delayed takes the largest value of its history"),
    "fp8_margin": (("0",), "--fp8 delayed has no margin"),
}
_NEEDLESS_SWITCHES = (
    # choices between implementations with the same result
    *("use_mcore_models", "no_masked_softmax_fusion", "no_bias_swiglu_fusion", "no_rope_fusion"),
    *("no_bias_gelu_fusion", "no_bias_dropout_fusion", "no_persist_layer_norm"),
    *("apply_rope_fusion", "bias_swiglu_fusion", "moe_permute_fusion", "moe_router_fusion"),
    *("no_async_tensor_model_parallel_allreduce", "use_cpu_initialization"),
    # data, memory of the host, and logs
    *("mock_data", "no_mmap_bin_files", "manual_gc", "no_one_logger", "log_progress"),
    *("log_timers_to_tensorboard", "log_memory_to_tensorboard", "log_params_norm"),
    *("log_num_zeros_in_grad", "log_validation_ppl_to_tensorboard"),
    *("log_world_size_to_tensorboard", "log_learning_rate_to_tensorboard"),
)
_NEEDLESS_WITH_A_VALUE = (
    *("data_cache_path", "manual_gc_interval", "empty_unused_memory_level"),
    *("make_vocab_size_divisible_by", "tensorboard_queue_size", "timing_log_level"),
    *("timing_log_option", "cross_entropy_fusion_impl", "local_rank", "node_rank"),
    *("fp8_interval",),
)

ACCEPTED: dict[str, Accepted] = {
    **{name: Accepted(otherwise=why) for name, why in _SWITCHES_THAT_ARE_ON.items()},
    **{name: Accepted(values, why) for name, (values, why) in _VALUES_THAT_ARE_ON.items()},
    **{name: _needless(_TRUE, "false") for name in _NEEDLESS_SWITCHES},
    **{name: _needless() for name in _NEEDLESS_WITH_A_VALUE},
    # `bf16: false`, which other programs write into their files, asks for nothing
    "bf16": Accepted((_TRUE, "auto", "false"), "use --dtype", sets={"dtype": "bfloat16"}),
    # only bfloat16 is stable without a loss scale
    "fp16": _needless("false", otherwise="use --dtype bfloat16"),
    # checkpoints have one format, which any grid can read
    "ckpt_format": _needless(
        "torch_dist", "torch", otherwise="there is a single format of checkpoints"
    ),
    # `unfused` and `local` store all scores, which only a test may want
    "attention_backend": _needless(
        "auto", "flash", "fused", otherwise="use --attention-kernel, whose `auto` suits any device"
    ),
}
"""Flags of Megatron-LM, by name."""

_OUR_VALUES: dict[str, dict[str, str]] = {
    # Megatron's flag is a switch, and its norm is over each head
    "qk_layernorm": {_TRUE: "head"},
    "transformer_impl": {"local": "native"},
    "dtype": {"bf16": "bfloat16", "fp32": "float32"},
}
"""Values of other programs for flags that exist here, in the form of `_normal`, with ours."""


@dataclass(frozen=True)
class Advice:
    """A row of `INSTEAD`: names that mean the same, and the flag here."""

    names: str
    """Names, separated by spaces."""
    use: str
    """Flags here."""
    note: str = ""
    """How to convert the value, or where the flag belongs."""


_BUILD = " of `megacp-preprocess build`"
"""Added to flags that belong to another command."""
_ROWS = (
    # The grid. Short names come from the command lines of Megatron-Bridge and Automodel, `_degree`
    # from torchtitan, `sp_size` and `ulysses` from TRL and DeepSpeed.
    Advice(
        "tp tp_size tp_degree tensor_parallel tensor_parallel_size tensor_parallel_degree",
        "--tensor-model-parallel-size",
    ),
    Advice(
        "pp pp_size pp_degree pipeline_parallel pipeline_parallel_size pipeline_parallel_degree",
        "--pipeline-model-parallel-size",
    ),
    Advice(
        "cp cp_size cp_degree context_parallel context_parallel_degree sp_size "
        "sequence_parallel_size sequence_parallel_degree ulysses_size ulysses_degree "
        "context_parallel_config.degree",
        "--context-parallel-size",
    ),
    Advice(
        "ep ep_size ep_degree expert_parallel expert_parallel_size expert_parallel_degree",
        "--expert-model-parallel-size",
    ),
    Advice(
        "dp dp_size dp_degree dp_shard_size dp_replicate_size data_parallel_size "
        "data_parallel_shard_degree data_parallel_replicate_degree",
        "--nproc",
        "dp is the number of ranks / (tp x pp x cp)",
    ),
    Advice(
        "nproc_per_node num_gpus num_processes n_gpu gpus ngpu gpus_per_node",
        "--nproc",
        "or start the ranks with torchrun",
    ),
    Advice(
        "num_layers_per_virtual_pipeline_stage virtual_pipeline_model_parallel_size vpp vp "
        "pp_layers_per_stage pipeline_parallel_layers_per_stage",
        "--num-virtual-stages-per-pipeline-rank",
        "the number of model chunks per rank",
    ),
    Advice("pipeline_parallel_schedule pp_schedule", "--pipeline-schedule"),
    Advice(
        "context_parallel_rotate_method cp_backend context_parallel_config.attention_type "
        "ring_attn_func heads_k_stride",
        "--cp-comm-type",
    ),
    Advice(
        "deepspeed fsdp fsdp_config fsdp_version zero_stage use_torch_fsdp2 use_megatron_fsdp "
        "reshard_after_forward fsdp_reshard_after_forward fsdp_sharding_strategy",
        "--data-parallel-sharding-strategy",
        "ZeRO-3 and full_shard are optim_grads_params",
    ),
    Advice(
        "ddp_timeout timeout_minutes init_timeout_seconds distributed_timeout_seconds",
        "--distributed-timeout-minutes",
    ),
    # Batch and length. Other trainers count rows per device; here a step has a number of packs.
    Advice(
        "per_device_train_batch_size per_device_eval_batch_size train_batch_size batch_size "
        "eval_batch_size local_batch_size device_batch_size device_train_microbatch_size",
        "--micro-batch-size",
        "packs per forward; --global-batch-size counts all packs of a step",
    ),
    Advice("global_train_batch_size", "--global-batch-size"),
    Advice(
        "gradient_accumulation_steps grad_accumulation_steps",
        "--global-batch-size",
        "micro-batch size x dp x accumulation steps",
    ),
    Advice("max_steps steps train_steps num_steps max_duration", "--train-iters"),
    # Megatron can count the length of a run, the warm-up and the decay in samples
    Advice("train_samples", "--train-iters", "samples / --global-batch-size"),
    Advice("train_tokens", "--train-iters", "tokens / --seq-length / --global-batch-size"),
    Advice("num_train_epochs num_epochs epochs", "--train-epochs"),
    Advice(
        "cutoff_len max_length max_seq_length max_seq_len sequence_len sequence_length seq_len "
        "model_max_length packed_sequence_size block_size pack_size max_sequence_length "
        "max_padding_length",
        "--seq-length",
    ),
    # learning rate
    Advice("learning_rate llm_learning_rate", "--lr"),
    Advice("vit_learning_rate", "--vision-lr-multiplier", "a factor of --lr"),
    Advice("connector_learning_rate", "--connector-lr-multiplier", "a factor of --lr"),
    Advice("lr_scheduler_type lr_scheduler decay_type scheduler", "--lr-decay-style"),
    Advice("warmup_steps lr_warmup_steps num_warmup_steps", "--lr-warmup-iters"),
    Advice("lr_warmup_samples", "--lr-warmup-iters", "samples / --global-batch-size"),
    Advice("lr_decay_samples", "--lr-decay-iters", "samples / --global-batch-size"),
    Advice("lr_wsd_decay_samples", "--lr-wsd-decay-iters", "samples / --global-batch-size"),
    Advice("lr_decay_steps", "--lr-decay-iters"),
    Advice("warmup_ratio", "--lr-warmup-fraction"),
    # a share of the peak elsewhere
    Advice(
        "cosine_min_lr_ratio min_lr_ratio min_lr_rate min_lr_factor lr_min",
        "--min-lr",
        "a rate, not a share of --lr",
    ),
    Advice(
        "max_grad_norm max_norm max_grad_norm_clip gradient_clipping gradient_clip_val "
        "clip_grad_norm",
        "--clip-grad",
    ),
    Advice("beta1", "--adam-beta1"),
    Advice("beta2", "--adam-beta2"),
    Advice("betas adam_betas", "--adam-beta1 and --adam-beta2"),
    Advice("adam_epsilon eps epsilon", "--adam-eps"),
    Advice("random_seed data_seed manual_seed", "--seed"),
    # The model and its weights. The config of a folder sets all sizes.
    Advice(
        "model_name_or_path model_name base_model pretrained_model_name_or_path model model_id "
        "model_path hf_checkpoint hf_assets_path initial_load_path",
        "--load-hf",
        "a local folder, for example from `hf download`",
    ),
    Advice("pretrained_checkpoint no_load_optim no_load_rng", "--finetune", "with --load"),
    Advice("train_mode", "--load-hf or --finetune", "to start from weights"),
    Advice("adapter_name_or_path lora_model_dir", "--load-adapter"),
    Advice(
        "finetuning_type adapter use_peft use_lora peft_scheme peft",
        "--lora-rank",
        "without it a run trains all weights",
    ),
    Advice("lora_r lora_dim peft.dim", "--lora-rank"),
    Advice("peft.alpha", "--lora-alpha"),
    Advice(
        "lora_target lora_target_modules lora_target_linear target_modules peft.target_modules",
        "--lora-targets",
        "`all` for all linear layers",
    ),
    Advice(
        "freeze_vision_tower freeze_multi_modal_projector freeze_language_model train_mm_only "
        "freeze_vit freeze_llm ft_vit ft_llm ft_connector freeze_config",
        "--freeze",
        "vision, connector or text",
    ),
    # keys of config.json in a Hugging Face folder
    Advice("num_hidden_layers n_layers n_layer", "--num-layers"),
    Advice("num_key_value_heads n_kv_heads", "--num-query-groups"),
    Advice("intermediate_size", "--ffn-hidden-size"),
    Advice("head_dim", "--kv-channels"),
    Advice("rope_theta", "--rotary-base"),
    Advice("rms_norm_eps layernorm_epsilon norm_eps", "--norm-epsilon"),
    Advice("num_local_experts", "--num-experts"),
    Advice("num_experts_per_tok", "--moe-router-topk"),
    Advice("use_rope_scaling rope_type", "--rope-scaling"),
    Advice("extra_vocab_size padded_vocab_size", "--vocab-size", "0 takes it from the tokenizer"),
    Advice("squared_relu quick_geglu activation_func", "--mlp-activation"),
    Advice("moe_aux_loss_coef router_aux_loss_coef", "--moe-aux-loss-coeff"),
    # Data. A run reads packs; the flags of records and templates belong to their build.
    Advice(
        "dataset datasets dataset_name dataset_dir dataset_path dataset_prepared_path data_files "
        "train_file train_data_path tokenized_path",
        "--data-path",
        "a folder that `megacp-preprocess build` has written",
    ),
    Advice(
        "eval_dataset test_datasets validation_dataset validation_file",
        "--valid-data-path",
        "a folder that `megacp-preprocess build` has written",
    ),
    Advice("mix_strategy interleave_probs", "--data-path", "WEIGHT FOLDER pairs blend datasets"),
    Advice(
        "template chat_template chat_template_path default_chat_template "
        "sft_tokenizer_prompt_format",
        "--chat-template" + _BUILD,
    ),
    Advice(
        "tokenizer tokenizer_type tokenizer_model tokenizer_name tokenizer_path "
        "tokenizer_name_or_path patch_tokenizer_type tiktoken_pattern vocab_file merge_file",
        "--tokenizer" + _BUILD,
    ),
    Advice("val_size val_set_size split valid_size", "--valid-share" + _BUILD),
    Advice("media_dir image_folder image_dir", "--image-root" + _BUILD),
    Advice("image_max_pixels image_min_pixels", "--resize-pixels" + _BUILD),
    Advice("video_max_pixels video_min_pixels", "--video-resize-pixels" + _BUILD),
    Advice("video_maxlen", "--max-frames" + _BUILD),
    Advice("video_fps", "--video-fps" + _BUILD),
    Advice("max_crops", "--max-crops" + _BUILD),
    Advice("preprocessing_num_workers dataset_num_proc dataset_processes", "--workers" + _BUILD),
    Advice("dataloader_num_workers", "--num-workers"),
    Advice(
        "eval_steps eval_strategy evaluation_strategy evals_per_epoch val_every_steps do_eval",
        "--eval-interval",
        "a number of steps",
    ),
    # Numerics and memory.
    Advice(
        "torch_dtype precision mixed_precision mixed_precision_param pure_bf16 params_dtype",
        "--dtype",
    ),
    Advice(
        "flash_attn flash_attention attn_implementation sdp_attention xformers_attention attn",
        "--attention-kernel",
        "`auto` suits any device",
    ),
    Advice(
        "gradient_checkpointing activation_checkpointing recompute_activations recompute_method "
        "recompute_num_layers recompute_modules activation_checkpoint",
        "--recompute-granularity",
    ),
    Advice(
        "cpu_offloading cpu_offloading_num_layers activation_offloading",
        "--activation-offload",
        "a share or a number of layers",
    ),
    Advice(
        "fp8_format fp8_recipe fp8_config fp8_backend enable_fp8",
        "--fp8",
        "delayed, current (tensorwise) or blockwise",
    ),
    # Checkpoints and logs.
    Advice("output_dir save_folder save_dir checkpoint_dir dump_folder", "--save"),
    Advice(
        "save_steps save_freq saves_per_epoch save_strategy ckpt_every_steps checkpoint_every",
        "--save-interval",
        "a number of steps",
    ),
    Advice("save_total_limit keep_latest_k save_num_checkpoints_to_keep", "--keep-last"),
    Advice("async_mode use_async_checkpoint is_async", "--async-save"),
    Advice(
        "resume_from_checkpoint auto_resume_from_checkpoints restore_from",
        "--auto-resume",
        "or --load DIR for another directory",
    ),
    Advice("exit_duration_in_mins", "--exit-duration"),
    Advice("exit_interval", "--train-iters"),
    Advice("logging_steps log_freq log_every_steps tensorboard_log_interval", "--log-interval"),
    Advice("logging_dir save_tb_folder enable_tensorboard", "--tensorboard-dir"),
    Advice("report_to", "--wandb-project, --trackio-project or --tensorboard-dir"),
    Advice("use_wandb enable_wandb wandb.project", "--wandb-project"),
    Advice(
        "profile_step_start profile_step_end profile_steps enable_profiling use_pytorch_profiler "
        "profile_ranks profile_freq",
        "--profile",
        "START:STOP, both included",
    ),
    # Dotted names whose last part would mean something else
    Advice("checkpoint.folder", "--save"),
    Advice("checkpoint.interval", "--save-interval"),
    Advice("optimizer.name", "--lr", "AdamW is the only optimizer"),
)


def _rows_by_name() -> dict[str, Advice]:
    """Return the rows by each of their names."""
    found = {}
    for row in _ROWS:
        found.update(dict.fromkeys(row.names.split(), row))
    return found


INSTEAD = _rows_by_name()
"""Rows of flags that have another name here, by that name."""

_REASONS = (
    # Training. `stage: sft` and `pt` are also here: a run takes any dataset with labels.
    (
        "weights are not quantised; --lora-rank trains adapters on full weights",
        "load_in_4bit load_in_8bit quantization_bit quantization_method quantization_type qlora "
        "double_quantization bnb_4bit_quant_type bnb_4bit_compute_dtype bnb_4bit_use_double_quant "
        "gptq bnb_config_kwargs",
    ),
    (
        "a run pretrains or fine-tunes on labels, without rewards or preferences",
        "stage rl pref_loss pref_beta pref_ftx dpo_beta kto_beta reward_model ref_model do_train "
        "num_generations loss_type",
    ),
    ("AdamW is the only optimizer", "optim use_galore use_apollo use_badam use_muon optim_args"),
    (
        "LoRA is peft's plain form",
        "use_dora use_rslora lora_use_dora lora_use_rslora peft_use_dora pissa_init "
        "loraplus_lr_ratio "
        "lora_modules_to_save additional_target modules_to_save relora_steps",
    ),
    ("embeddings get no noise", "neftune_noise_alpha noisy_embedding_alpha"),
    ("labels are not smoothed", "label_smoothing_factor label_smoothing"),
    (
        "the text model has a single --lr",
        "decoupled_lr decoupled_min_lr embedding_lr embedding_learning_rate",
    ),
    ("gradients are summed in float32", "grad_reduce_in_bf16 mixed_precision_reduce"),
    ("bfloat16 needs no loss scale", "loss_scale initial_loss_scale fp16_opt_level"),
    ("FP8 applies to products, not to stored weights", "fp8_param_gather fp8_param"),
    ("layers have no other precision", "tf32 fp4_format fp4_recipe first_last_layers_bf16"),
    # Data. Most of these are decisions of the build, which happens once, before any run.
    (
        "the build chooses learned text by the chat template and the weights of records",
        "train_on_inputs train_on_prompt mask_history assistant_only_loss completion_only_loss "
        "roles_to_train train_on_eos",
    ),
    ("the build reads all records of its input", "max_samples max_train_samples"),
    ("megacp-preprocess build has one cache, its output", "overwrite_cache"),
    (
        "tokens come with the tokenizer's folder",
        "special_tokens add_tokens resize_vocab tokens add_special_tokens",
    ),
    # Kernels and memory. A run without them computes the same numbers.
    # steps with documents and images differ in their shapes, so a graph would not fit the next one
    (
        "steps are not captured as CUDA graphs",
        "te_rng_tracker external_cuda_graph cuda_graph_scope cuda_graph_impl enable_cuda_graph",
    ),
    ("tp messages do not overlap with products", "tp_comm_overlap enable_async_tensor_parallel"),
    (
        "the optimizer state stays on the device; optim_grads_params of "
        "--data-parallel-sharding-strategy shards most",
        "optimizer_cpu_offload optimizer_offload_fraction use_precision_aware_optimizer "
        "offload_optimizer enable_cpu_offload offload_params",
    ),
    ("attention is multi-head or grouped-query", "multi_latent_attention mtp_num_layers"),
    (
        "megacp-plan balances stages by their cost",
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
        "pipeline_model_parallel_layout pipeline_parallel_split_points",
    ),
    # Models, checkpoints and logs.
    ("model code comes from this package", "trust_remote_code model_type tokenizer_use_fast"),
    (
        "megacp-convert writes a folder, and `hf upload` publishes it",
        "push_to_hub hub_model_id hub_token hub_strategy",
    ),
    (
        "checkpoints always have the whole state",
        "no_save_optim no_save_rng save_only_model save_safetensors last_save_model_only",
    ),
    (
        "a directory with checkpoints is resumed or refused, never overwritten",
        "overwrite_output_dir save_overwrite",
    ),
    ("a run ends after --train-iters or --train-epochs", "early_stopping_patience"),
    # the package reads these variables itself
    (
        "set WANDB_NAME or WANDB_ENTITY in the environment",
        "run_name wandb_name wandb_entity wandb_run_id wandb_exp_name wandb_save_dir wandb_watch "
        "wandb_log_model wandb.name wandb.entity",
    ),
    ("loss plots come from tools/plot_log.py", "plot_loss"),
)
_NO_CHOICE = (
    (
        "every dataset is packed, and each document sees only itself",
        "packing sample_packing neat_packing eval_sample_packing eval_packing packing_strategy "
        "pad_to_sequence_len padding_free group_by_length sft",
    ),
    ("packs are always read while the run trains", "streaming buffer_size prefetch_factor"),
    (
        "layers and loss have fused kernels of their own",
        "liger use_liger_kernel enable_liger_kernel liger_kernel liger_rope liger_rms_norm "
        "liger_glu_activation liger_fused_linear_cross_entropy use_unsloth use_unsloth_gc "
        "unsloth cut_cross_entropy",
    ),
    (
        "a run compiles the parts that gain from it, and no whole model",
        "compile torch_compile torch_compile_backend torch_compile_mode use_compile",
    ),
)


def _reasons_by_name() -> dict[str, str]:
    """Return the words after the colon of a message by each of the names."""
    found = {}
    for reason, names in _REASONS:
        found.update(dict.fromkeys(names.split(), f"not offered, as {reason}"))
    # not missing, but without a flag that switches it off
    for reason, names in _NO_CHOICE:
        found.update(dict.fromkeys(names.split(), f"not offered as a choice, as {reason}"))
    return found


NOT_OFFERED = _reasons_by_name()
"""Reasons by name."""


def advice(name: str) -> str:
    """Return `: use --lr` or `: not offered, as ...` for a name of another program, else "".

    `name` is a key of a file, or a flag with or without its dashes. Of a dotted name such as
    `training.steps`, the whole is looked up first, then its last part.
    """
    key = name.lstrip("-").replace("-", "_").lower()
    # the longest ending first: `peft.dim` has a row, `dim` could mean anything
    for candidate in (key, *_endings(key)):
        if candidate in INSTEAD:
            row = INSTEAD[candidate]
            note = f" ({row.note})" if row.note else ""
            return f": use {row.use}{note}"
        if candidate in NOT_OFFERED:
            return f": {NOT_OFFERED[candidate]}"
        # a section's key that has the same name here, such as `optimizer.lr`
        if candidate in fields() and candidate != key:
            return f": use {flag(candidate)}"
    return ""


def _endings(key: str) -> list[str]:
    """Return the last two parts of a dotted name, then its last part; nothing without a dot."""
    parts = key.split(".")
    if len(parts) == 1:
        return []
    return [".".join(parts[-2:]), parts[-1]]


def nearest(name: str, names: Iterable[str], as_flag: bool = False) -> str:
    """Return `, did you mean ...?` with the most similar of `names`; "" if none is similar."""
    # a long name costs time, and only resembles other long names
    close = difflib.get_close_matches(name[:_SHOWN], list(names), 1, _CUTOFF)
    if not close:
        return ""
    shown = flag(close[0]) if as_flag else close[0]
    return f", did you mean {shown}?"


@dataclass
class Translated:
    """A command line or a file without the names of `ACCEPTED`."""

    words: list[str] = field(default_factory=list)
    """Words of a command line."""
    always: list[str] = field(default_factory=list)
    """Accepted names of things that every run does, as they were given."""
    needless: list[str] = field(default_factory=list)
    """Accepted names that have no effect."""
    problems: list[str] = field(default_factory=list)
    """Reasons why accepted names have values that cannot be accepted."""

    def take(
        self, name: str, shown: str, value: Any, given: Collection[str]
    ) -> Mapping[str, Value]:
        """Record the accepted name `name` with its value; return the fields that it sets.

        `shown` is the name in messages. Fields in `given` keep their own values.
        """
        row = ACCEPTED[name]
        if isinstance(value, (list, tuple)):
            value = f"a {type(value).__name__}"  # a file can have lists that are too long to print
        normal = _normal(value)
        text = shown if normal == _TRUE else f"{shown} {value}"
        if row.values is not None and normal not in row.values:
            self.problems.append(f"{text} is not offered: {row.otherwise}")
            return {}
        if normal == "false":  # a switch that is off asks for nothing
            return {}
        sets = {target: setting for target, setting in row.sets.items() if target not in given}
        # a flag whose only effect was overridden has none
        if sets:
            settings = ", ".join(f"{flag(target)} {setting}" for target, setting in sets.items())
            self.always.append(f"{text} ({settings})")
        elif row.always and not row.sets:
            self.always.append(text)
        else:
            self.needless.append(text)
        return sets


def translate(arguments: Sequence[str]) -> Translated:
    """Translate the flags of a command line; other words stay as they are.

    A flag that sets a field becomes the flag of that field, unless the command line has it.
    """
    found = Translated()
    # a given dtype wins over bf16 on either side of it
    given = {_field(word) for word in arguments if word.startswith("--")}
    for words in by_flag(arguments):
        name, equals, attached = words[0].partition("=")
        key = _field(name)
        value = attached if equals else " ".join(words[1:])
        # our flags first: a name that exists here is never one of another program
        if not name.startswith("--") or key in fields():
            found.words += _with_our_value(key, words, value)
            continue
        if key not in ACCEPTED:
            found.words += words
            continue
        for target, setting in found.take(key, name, value, given).items():
            found.words += [flag(target), str(setting)]
    return found


def _with_our_value(key: str, words: list[str], value: str) -> list[str]:
    """Return the words of one of our flags, with the value of another program replaced."""
    ours = _OUR_VALUES.get(key, {}).get(_normal(value))
    return words if ours is None else [flag(key), ours]


def our_value(key: str, value: Any) -> Any:
    """Return our value for the value of a key in a file, which another program may have written."""
    # numbers and lists have the same form in all programs
    if not isinstance(value, (bool, str)):
        return value
    return _OUR_VALUES.get(key, {}).get(_normal(value), value)


def _field(word: str) -> str:
    """Return the spelling of a field for a flag: `--seq-length=8` -> `seq_length`."""
    return word.partition("=")[0].removeprefix("--").replace("-", "_")


def by_flag(arguments: Sequence[str]) -> list[list[str]]:
    """Group the arguments: each flag with the words after it, up to the next flag."""
    groups: list[list[str]] = []
    for word in arguments:
        # a word before the first flag begins a group too
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    return groups


def _normal(value: Any) -> str:
    """Return a value as text: `true` for a switch, small letters, and numbers as short as `0`."""
    if value is None or value == "":
        return _TRUE
    text = str(value)[:_SHOWN].lower()
    # `0.0` and `0` are the same dropout
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


def accepted_line(always: Sequence[str], needless: Sequence[str]) -> str:
    """Return the line that lists accepted names; "" without any."""
    parts = []
    if always:
        parts.append(f"always on here: {', '.join(dict.fromkeys(always))}")
    if needless:
        parts.append(f"without effect here: {', '.join(dict.fromkeys(needless))}")
    return f"accepted: {'; '.join(parts)}" if parts else ""
