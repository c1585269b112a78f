"""torchtitan 0.2.2's Llama 3 with its own parallelisms, pipeline, loss, clipping and optimizer.

Patched: torchtitan takes CUDA where torch sees no accelerator, so it is told `cpu`. Ring attention gets the CPU's
kernel (cpu_ring.py). FSDP2 takes plain sums, as gloo has no scaled ones.
Set: rotary scaling factor 1 (its default stretches frequencies), no checkpointing of activations, fp32 throughout.
The loop is that of its Trainer.train_step; the Trainer itself, its data loader and its metrics are left out.
"""

from __future__ import annotations

import torch
import torch._utils
from cpu_ring import allow_cpu_kernel
from safetensors.torch import load_file
from stepping import Train, Work, plain_sums, serve
from transformers import LlamaConfig

torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components.loss import IGNORE_INDEX, cross_entropy_loss  # noqa: E402
from torchtitan.components.optimizer import build_optimizers  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.distributed import ParallelDims, utils  # noqa: E402
from torchtitan.distributed.context_parallel import prepare_context_parallel_input  # noqa: E402
from torchtitan.distributed.pipeline_parallel import pipeline_llm  # noqa: E402
from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama  # noqa: E402
from torchtitan.models.llama3.model.args import RoPEScalingArgs  # noqa: E402
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter  # noqa: E402

DEVICE = torch.device("cpu")


def job(work: Work) -> JobConfig:
    """The flags of a run."""
    config, values = JobConfig(), work.adamw
    config.training.seq_len = work.length
    config.training.local_batch_size = work.sequences // work.axes["dp"]
    config.training.mixed_precision_param = config.training.mixed_precision_reduce = "float32"
    config.parallelism.tensor_parallel_degree = work.axes["tp"]
    config.parallelism.pipeline_parallel_degree = work.axes["pp"]
    config.parallelism.context_parallel_degree = work.axes["cp"]
    config.parallelism.pipeline_parallel_schedule = work.options.get("schedule", "1F1B")
    config.parallelism.pipeline_parallel_microbatch_size = work.options.get("microbatch", 1)
    config.activation_checkpoint.mode = "none"
    config.optimizer.lr, config.optimizer.eps = values["lr"], values["eps"]
    config.optimizer.beta1, config.optimizer.beta2 = values["beta1"], values["beta2"]
    config.optimizer.weight_decay = values["weight_decay"]
    return config


def unsharded(work: Work) -> tuple[Transformer, TransformerModelArgs]:
    """The model with the weights of the folder, by torchtitan's own adapter."""
    theirs = LlamaConfig.from_pretrained(work.weights)
    args = TransformerModelArgs(
        dim=theirs.hidden_size,
        n_layers=theirs.num_hidden_layers,
        n_heads=theirs.num_attention_heads,
        n_kv_heads=theirs.num_key_value_heads,
        vocab_size=theirs.vocab_size,
        norm_eps=theirs.rms_norm_eps,
        rope_theta=theirs.rope_parameters["rope_theta"],
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
        max_seq_len=work.length,
    )
    model = Transformer(args)
    state = Llama3StateDictAdapter(args, None).from_hf(load_file(work.weights / "model.safetensors"))
    model.load_state_dict(state, strict=True)
    return model, args


def dims_of(work: Work) -> ParallelDims:
    """torchtitan's grid; dp is FSDP2's, or DDP's where the cell says `replicate`."""
    axes, replicated = work.axes, work.options.get("data") == "replicate"
    replicas, shards = (axes["dp"], 1) if replicated else (1, axes["dp"])
    return ParallelDims(replicas, shards, axes["cp"], axes["tp"], axes["pp"], ep=1, etp=1, world_size=work.world_size)


class Trainer:
    """The model, cut as the grid says, and a step as torchtitan's Trainer.train_step makes it."""

    def __init__(self, work: Work) -> None:
        allow_cpu_kernel()
        config, self.work, self.dims = job(work), work, dims_of(work)
        self.dims.build_mesh()
        model, args = unsharded(work)
        if self.dims.pp_enabled:
            self.schedule, self.models, self.first, self.last = pipeline_llm(
                model, self.dims, config, DEVICE, args, parallelize_llama, cross_entropy_loss
            )
        else:
            self.models = [parallelize_llama(model, self.dims, config)]
        for part in self.models:
            part.train()
            plain_sums(part)
        self.optimizers = build_optimizers(self.models, config.optimizer, self.dims)
        self.context = utils.get_train_context(self.dims.tp_enabled)
        self.parameters = [parameter for part in self.models for parameter in part.parameters()]

    def by_stages(self, ids: torch.Tensor, targets: torch.Tensor, count: torch.Tensor) -> torch.Tensor | None:
        """Forward and backward of all microbatches; the loss on the last stage."""
        losses: list[torch.Tensor] | None = [] if self.last else None
        with self.context():
            given = (ids,) if self.first else ()
            target = targets if self.last else None
            self.schedule.step(*given, target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).sum() / count if losses is not None else None

    def whole(self, ids: torch.Tensor, targets: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Forward and backward of one microbatch; this rank's part of the loss."""
        extra: dict = {}
        if self.dims.cp_enabled:
            mesh = self.dims.get_mesh("cp")
            ids, targets, extra = prepare_context_parallel_input(ids, targets, extra, mesh, DEVICE)
        with self.context():
            prediction = self.models[0](ids, **extra)
            loss = cross_entropy_loss(prediction, targets) / count
            del prediction
            loss.backward()
        return loss

    def train(self, tokens: torch.Tensor, labels: torch.Tensor) -> float | None:
        """One step."""
        self.optimizers.zero_grad()
        parts = self.work.microbatches(tokens, labels)
        count = sum((targets != IGNORE_INDEX).sum() for _, targets in parts).float()
        if self.dims.dp_enabled:
            count = torch.tensor(utils.dist_sum(count, self.dims.get_mesh("batch")))
        if self.dims.pp_enabled:
            losses = [self.by_stages(tokens, labels, count)]
        else:
            losses = [self.whole(ids, targets, count) for ids, targets in parts]
        stages = self.dims.get_optional_mesh("pp")
        utils.clip_grad_norm_(self.parameters, self.work.adamw["clip_grad"], foreach=True, pp_mesh=stages)
        self.optimizers.step()
        if losses[0] is None:
            return None
        total = torch.stack([loss.detach() for loss in losses]).sum()
        return utils.dist_sum(total, self.dims.get_mesh("loss")) if self.dims.dp_cp_enabled else total.item()


def build(work: Work) -> Train:
    """The step of a trainer for this rank."""
    return Trainer(work).train


if __name__ == "__main__":
    serve(build)
