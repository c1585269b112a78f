"""Train torchtitan 0.3.0's Llama 3 with its parallelisms, pipeline, loss, clipping and optimizer.

Patches: torchtitan chooses CUDA if torch finds no accelerator, so this script reports `cpu` as the
device type. Ring attention uses the CPU kernel (cpu_ring.py). FSDP2 uses plain sums, because gloo
lacks scaled sums.

Settings: attention is torch's `scaled_dot_product_attention`, because FlexAttention has no backward
pass on CPUs. DTensors replace `spmd_types`, which torch 2.13's `fully_shard` does not support.
There is no activation checkpointing, and all values are fp32. The loop replicates
Trainer.train_step without the Trainer itself, its data loader and its metrics.
"""

from __future__ import annotations

import torch
import torch._utils
from cpu_ring import allow_cpu_kernel
from safetensors.torch import load_file
from stepping import Train, Work, plain_sums, serve
from transformers import LlamaConfig

torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.config.configs import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims, utils  # noqa: E402
from torchtitan.distributed.context_parallel import prepare_context_parallel_input  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config  # noqa: E402
from torchtitan.models.llama3 import Llama3Model, parallelize_llama, pipeline_llm  # noqa: E402
from torchtitan.models.llama3.model import Llama3TransformerBlock  # noqa: E402
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter  # noqa: E402

DEVICE = torch.device("cpu")
ANY = {"weight": torch.nn.init.zeros_, "bias": torch.nn.init.zeros_}
"""Initialization that torchtitan's configs require. The loaded weights replace the zeros."""


class Flags:
    """The part of a run's configuration that torchtitan's model reads."""

    def __init__(self, work: Work) -> None:
        axes, replicated = work.axes, work.options.get("data") == "replicate"
        self.training = TrainingConfig(
            seq_len=work.length,
            local_batch_size=work.sequences // axes["dp"],
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        )
        self.parallelism = ParallelismConfig(
            data_parallel_replicate_degree=axes["dp"] if replicated else 1,
            data_parallel_shard_degree=1 if replicated else axes["dp"],
            tensor_parallel_degree=axes["tp"],
            pipeline_parallel_degree=axes["pp"],
            context_parallel_degree=axes["cp"],
            pipeline_parallel_schedule=work.options.get("schedule", "1F1B"),
            pipeline_parallel_microbatch_size=1,
            spmd_backend="partial_dtensor",
        )


def config_of(work: Work) -> Llama3Model.Config:
    """Return torchtitan's config for the Llama in the weights folder."""
    theirs = LlamaConfig.from_pretrained(work.weights)
    dim, heads = theirs.hidden_size, theirs.num_attention_heads

    def norm() -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=dim, eps=theirs.rms_norm_eps, param_init=ANY)

    def block() -> Llama3TransformerBlock.Config:
        attention = make_gqa_config(
            dim=dim,
            n_heads=heads,
            n_kv_heads=theirs.num_key_value_heads,
            wqkv_param_init=ANY,
            wo_param_init=ANY,
            inner_attention=ScaledDotProductAttention.Config(),
            rope=ComplexRoPE.Config(
                dim=dim // heads,
                max_seq_len=work.length,
                theta=theirs.rope_parameters["rope_theta"],
            ),
        )
        mlp = make_ffn_config(
            dim=dim, hidden_dim=theirs.intermediate_size, w1_param_init=ANY, w2w3_param_init=ANY
        )
        return Llama3TransformerBlock.Config(
            attention_norm=norm(), ffn_norm=norm(), attention=attention, feed_forward=mlp
        )

    return Llama3Model.Config(
        dim=dim,
        vocab_size=theirs.vocab_size,
        tok_embeddings=Embedding.Config(
            num_embeddings=theirs.vocab_size, embedding_dim=dim, param_init=ANY
        ),
        norm=norm(),
        lm_head=Linear.Config(in_features=dim, out_features=theirs.vocab_size, param_init=ANY),
        layers=[block() for _ in range(theirs.num_hidden_layers)],
    )


class Trainer:
    """The model, sharded across the grid, with a step like torchtitan's Trainer.train_step."""

    def __init__(self, work: Work) -> None:
        allow_cpu_kernel()
        flags, self.work = Flags(work), work
        self.dims = ParallelDims.from_config(flags.parallelism, work.world_size)
        self.dims.build_mesh()
        utils.set_spmd_backend(flags.parallelism.spmd_backend)
        config = config_of(work)
        config.update_from_config(config=flags)
        model = config.build()
        state = Llama3StateDictAdapter(config, None).from_hf(
            load_file(work.weights / "model.safetensors")
        )
        model.load_state_dict(state, strict=True)
        self.loss = CrossEntropyLoss.Config(global_vocab_size=config.vocab_size).build(
            compile_config=CompileConfig()
        )
        common = {
            "parallel_dims": self.dims,
            "training": flags.training,
            "parallelism": flags.parallelism,
            "compile_config": CompileConfig(),
            "ac_config": None,
            "dump_folder": "",
        }
        if self.dims.pp_enabled:
            self.schedule, self.models, self.first, self.last = pipeline_llm(
                model,
                **common,
                device=DEVICE,
                model_config=config,
                parallelize_fn=parallelize_llama,
                loss_fn=self.loss,
            )
        else:
            self.models = [parallelize_llama(model, **common)]
        for part in self.models:
            part.train()
            plain_sums(part)
        values = work.adamw
        self.optimizers = default_adamw(
            values["lr"],
            betas=(values["beta1"], values["beta2"]),
            eps=values["eps"],
            weight_decay=values["weight_decay"],
        ).build(model_parts=self.models)
        self.context = utils.get_spmd_context(parallel_dims=self.dims)
        self.parameters = [parameter for part in self.models for parameter in part.parameters()]

    def given(
        self, ids: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict]:
        """Return this rank's ids and targets, and the extra model inputs with the positions.

        The function corresponds to torchtitan's post_dataloading_process.
        """
        extra = {"positions": torch.arange(ids.shape[1]).expand(ids.shape)}
        if self.dims.cp_enabled:
            return prepare_context_parallel_input(
                ids, targets, extra, self.dims.get_mesh("cp"), DEVICE
            )
        return ids, targets, extra

    def by_stages(
        self, ids: torch.Tensor, targets: torch.Tensor, count: torch.Tensor
    ) -> torch.Tensor | None:
        """Run the forward and backward passes of all microbatches.

        Return the loss on the last stage, None on other stages.
        """
        losses: list[torch.Tensor] | None = [] if self.last else None
        ids, targets, extra = self.given(ids, targets)
        with self.context():
            self.schedule.step(
                *([ids] if self.first else []),
                **extra,
                target=targets if self.last else None,
                losses=losses,
                loss_kwargs={"global_valid_tokens": count},
                return_outputs=False,
            )
        return torch.stack(losses).sum() if losses is not None else None

    def whole(self, ids: torch.Tensor, targets: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Run one microbatch's forward and backward pass; return this rank's part of the loss."""
        ids, targets, extra = self.given(ids, targets)
        with self.context():
            prediction = self.models[0](ids, **extra)
            loss, _ = self.loss(prediction, targets, count)
            del prediction
            loss.backward()
        return loss

    def train(self, tokens: torch.Tensor, labels: torch.Tensor) -> float | None:
        """Train one step; return the loss, or None on ranks that do not have it."""
        self.optimizers.zero_grad()
        parts = self.work.microbatches(tokens, labels)
        # The step's loss is divided by the number of labels on all data-parallel ranks.
        count = sum((targets != IGNORE_INDEX).sum() for _, targets in parts)
        if self.dims.dp_enabled:
            count = utils.dist_sum_tensor(count, self.dims.get_mesh("batch"))
        if self.dims.pp_enabled:
            losses = [self.by_stages(tokens, labels, count)]
        else:
            losses = [self.whole(ids, targets, count) for ids, targets in parts]
        # The norm covers the parameters of all pipeline stages.
        stages = self.dims.get_optional_mesh("pp")
        utils.clip_grad_norm_(
            self.parameters, self.work.adamw["clip_grad"], foreach=True, pp_mesh=stages
        )
        self.optimizers.step()
        if losses[0] is None:
            return None
        total = torch.stack([loss.detach() for loss in losses]).sum()
        return (
            utils.dist_sum(total, self.dims.get_mesh("loss"))
            if self.dims.dp_cp_enabled
            else total.item()
        )


def build(work: Work) -> Train:
    """Return the training step of this rank."""
    return Trainer(work).train


if __name__ == "__main__":
    serve(build)
