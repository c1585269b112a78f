"""Accelerate, and the Trainers of transformers and TRL on it, over a sharded sequence with the mask of packed rows.

    trainer = SFTTrainer(model, args, ...)                 # packing=True, nothing else
    shard_sequences(trainer, cp_size=2)                    # before train()

    accelerator = Accelerator(...)                         # a loop of one's own
    shard_sequences(accelerator, cp_size=2)                # before prepare()

Only objects of the caller are changed: the state and two methods of this accelerator, two methods of this trainer.
Accelerate plugs in its own context parallelism there. So loading, FSDP2 or DDP, clipping, logging and checkpoints are
theirs, and other Accelerators and Trainers of the process stay as they are.

Both FSDP2 and DDP take the mean of gradients over all processes. The Trainers multiply their loss by that number; a
loop of one's own must too: `loss = summed / counted * accelerator.num_processes`, `counted` over all batches of a step.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megacp.core.distributed.collectives import all_reduce
from megacp.core.distributed.grid import Axis, axis_of_mesh
from megacp.core.ops.mask import Metadata
from megacp.huggingface.door.context import context_parallel
from megacp.huggingface.door.mask import DocumentIds, documents_of
from megacp.huggingface.door.multimodal import cut_multimodal, has_towers
from megacp.huggingface.door.transformers import register_with_transformers

_PAD = {"input_ids": 0, "labels": -100, "shift_labels": -100, "attention_mask": 0, "position_ids": 0}
_PAD |= {"token_type_ids": 0}
"""Inputs of a model that lie along the sequence, and what padding gets."""
_OF_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What collators say of packed documents for other kernels; the position ids say it too."""
_HOOKS = ("_prepare_cp", "maybe_context_parallel", "torch_device_mesh", "parallelism_config")
_HANDS_ON = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "paligemma", "glm4v", "glm46v", "gemma4")
"""Model types that say `accepts_loss_kwargs = False`, and yet hand options to the library's loss of shifted labels: the
Trainer gives them no number of tokens, takes the mean of each batch, and divides by the accumulated steps."""
_TRAINER_HOOKS: tuple[str, ...] = ("_prepare_context_parallel_inputs", "prediction_step", "compute_loss_func")
_TRAINER_HOOKS += ("label_smoother", "_loss_shifts_labels", "model_accepts_loss_kwargs")


def shard_sequences(
    target: Any, cp_size: int | None = None, *, transport: str = "kv_exchange", layout: str = "balanced"
) -> Axis:
    """Run what `target` trains under this attention; returns the axis of the ranks that share a row.

    `target`: an Accelerator before `prepare`, or a Trainer of transformers (TRL's too) before `train`. `cp_size`: ranks
    that share a row, neighbours in rank order; they get the same batches. None: as the Accelerator's ParallelismConfig
    says. Give it here for packed rows of TRL, which refuses a ParallelismConfig with cp, and on CPU, where Accelerate
    does. `transport`, `layout`: see `context_parallel`.

    A Trainer packs by position ids that restart; padding is what its attention mask says. In a loop of one's own
    `accelerator.maybe_context_parallel` finds the position ids among its buffers: they count up by one from 0, and
    start again with each document.

    Every process calls it. Raises ValueError for another version of the libraries, after `prepare`, and for a size that
    does not divide the processes. So do options of a Trainer that would see one rank's tokens alone, and a step whose
    ranks hold other rows.
    """
    from accelerate import Accelerator

    accelerator = getattr(target, "accelerator", target)
    missing = [name for name in _HOOKS if not hasattr(type(accelerator), name)]
    if not isinstance(accelerator, Accelerator) or missing:
        kind, lacks = type(target).__name__, f" without {', '.join(missing)}" if missing else ""
        raise ValueError(f"shard_sequences wants an Accelerator or a Trainer, got {kind}{lacks}")
    if accelerator._models:
        raise ValueError("shard_sequences comes before prepare() and train(): this Accelerator has prepared a model")
    _set_size(accelerator, cp_size)
    axis = axis_of_mesh(accelerator.torch_device_mesh["cp"])
    rows = _Blocks(axis, transport, layout)
    accelerator._prepare_cp = functools.partial(_prepare, accelerator, rows)
    if target is not accelerator:
        _shard_trainer(target, rows)
    return axis


def _set_size(accelerator: Any, cp_size: int | None) -> None:
    """Give the accelerator a mesh with an axis `cp`, unless it has one.

    All Accelerators of a process share the attributes of one state; this one gets a copy. What else of Accelerate asks
    the shared state (optimizers, schedulers, autocast) wants devices, dtypes and processes, which are the same in both.
    """
    from accelerate import ParallelismConfig

    world, found = accelerator.num_processes, accelerator.parallelism_config
    has = 1 if found is None else found.cp_size
    if has > 1 and cp_size not in (None, has):
        raise ValueError(f"cp_size is {cp_size}, but the Accelerator's ParallelismConfig has cp_size {has}")
    if has > 1:
        return
    if cp_size is None or cp_size < 2 or world % cp_size:
        raise ValueError(
            f"cp_size is {cp_size} and the Accelerator has no context parallelism of its own: give a size of at least "
            f"2 that divides its {world} processes"
        )
    if found is not None and (found.tp_enabled or found.sp_enabled):
        raise ValueError("shard_sequences shares ranks with data parallelism alone, this Accelerator has tp or sp")
    config = ParallelismConfig(cp_size=cp_size, dp_shard_size=world // cp_size)
    accelerator.state = copy.copy(accelerator.state)
    accelerator.state.parallelism_config = config
    accelerator.state.device_mesh = config.get_device_mesh(accelerator.device.type)


def _prepare(accelerator: Any, rows: _Blocks, *args: Any) -> tuple[Any, ...]:
    """In the place of Accelerate's, which would drop the masks of the model."""
    name = register_with_transformers()
    for module in (x for x in args if isinstance(x, torch.nn.Module)):
        for model in _stock_models(module):
            model.set_attn_implementation(name)
    accelerator._cp_context = functools.partial(rows.of_buffers, accelerator)
    return args


def _stock_models(module: torch.nn.Module) -> list[Any]:
    """The outermost models of transformers in `module`; their own parts follow them."""
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel):
        return [module]
    return [model for child in module.children() for model in _stock_models(child)]


@dataclass(frozen=True)
class _Blocks:
    """Makes the block around the rows of a step."""

    axis: Axis
    transport: str
    layout: str

    def of_buffers(
        self,
        accelerator: Any,
        buffers: Sequence[torch.Tensor],
        buffer_seq_dims: Sequence[int],
        no_restore_buffers: Any = None,
    ) -> context_parallel:
        """A block as `Accelerator.maybe_context_parallel` asks for it."""
        self._refuse_other_rows(buffers)
        counting = [x for x, dim in zip(buffers, buffer_seq_dims, strict=True) if dim % x.dim() == 1 and _counts(x)]
        if not counting or any(not torch.equal(x, counting[0]) for x in counting):
            raise ValueError(
                f"{len(counting)} of the {len(buffers)} buffers look like position ids [B, S] (from 0 up by one, again "
                f"with each document), exactly one must: they say which tokens are one document"
            )
        return context_parallel(
            self.axis,
            model=accelerator._models[0] if accelerator._models else None,
            buffers=buffers,
            buffer_seq_dims=buffer_seq_dims,
            no_restore_buffers=no_restore_buffers or (),
            document_ids=documents_of(counting[0]),
            transport=self.transport,
            layout=self.layout,
        )

    def of_inputs(
        self, model: torch.nn.Module, inputs: dict[str, Any]
    ) -> tuple[Callable[[], context_parallel], dict[str, Any]]:
        """A block for the inputs of a model, and the inputs that lie in it."""
        inputs = {name: x for name, x in inputs.items() if name not in _OF_PACKING and x is not None}
        strange = [name for name, x in inputs.items() if isinstance(x, torch.Tensor) and name not in _PAD]
        ids = inputs.get("input_ids")
        if strange or ids is None or ids.dim() != 2:
            raise ValueError(
                f"a sharded sequence has input_ids [B, S] and may have {', '.join(list(_PAD)[1:])}; nothing is known "
                f"of {', '.join(strange) or 'inputs without input_ids'}, which may be of one rank's tokens alone"
            )
        mask = inputs.get("attention_mask")
        if "position_ids" not in inputs:
            inputs["position_ids"] = torch.arange(ids.shape[1], device=ids.device).repeat(ids.shape[0], 1)
        if "labels" in inputs and "shift_labels" not in inputs:
            inputs["shift_labels"] = _shifted(inputs["labels"])
        names = [name for name in _PAD if name in inputs]
        buffers = [inputs[name] for name in names]
        self._refuse_other_rows(buffers)
        return self._block(model, buffers, names, documents_of(inputs["position_ids"], mask)), inputs

    def of_images(self, model: torch.nn.Module, inputs: dict[str, Any]) -> tuple[Callable[[], Any], dict[str, Any]]:
        """A block for the inputs of a model with towers: it takes the whole batch, and labels alone are cut."""
        inputs = {name: x for name, x in inputs.items() if name not in _OF_PACKING and x is not None}
        if "input_ids" not in inputs or "labels" not in inputs:
            raise ValueError(f"a sharded sequence with images has input_ids and labels [B, S], got {', '.join(inputs)}")
        self._refuse_other_rows([x for x in inputs.values() if isinstance(x, torch.Tensor)])
        inputs["labels"] = inputs["labels"].clone()  # the loader's stay whole
        inputs.setdefault("shift_labels", _shifted(inputs["labels"]))
        names = [name for name in ("labels", "shift_labels") if name in inputs]
        block = self._block(model, [inputs[name] for name in names], names, _documents_with_images(model, inputs))

        @contextlib.contextmanager
        def both() -> Iterator[None]:
            with block() as context, cut_multimodal(model, context):
                yield

        return both, inputs

    def _block(
        self, model: torch.nn.Module, buffers: list[torch.Tensor], names: Sequence[str], documents: DocumentIds
    ) -> Callable[[], context_parallel]:
        return functools.partial(
            context_parallel,
            self.axis,
            model=model,
            buffers=buffers,
            buffer_seq_dims=[1] * len(buffers),
            no_restore_buffers=buffers,
            pad_values=[_PAD[name] for name in names],
            document_ids=documents,
            transport=self.transport,
            layout=self.layout,
        )

    def _refuse_other_rows(self, buffers: Sequence[torch.Tensor]) -> None:
        """Raise ValueError on all ranks of the axis where they hold other rows, as of a loader that deals to each rank.

        Compares 32-bit sums of the integer tensors and their shapes: one small message a step.
        """
        found = 0
        for x in (x for x in buffers if not x.is_floating_point()):
            found = zlib.crc32(str(tuple(x.shape)).encode(), found)
            found = zlib.crc32(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes(), found)
        device = buffers[0].device if self.axis.backend == "nccl" else torch.device("cpu")
        most, least = all_reduce(torch.tensor([found, -found], device=device), self.axis, "max").tolist()
        if most != -least:
            raise ValueError(
                f"the {self.axis.size} ranks that share a row hold other rows: their loader must give all of them the "
                f"same batch (a loader that dispatches, as of an IterableDataset, gives each process its own: set "
                f"dispatch_batches=False, and let its dataset give all of them the same)"
            )


def _shifted(labels: torch.Tensor) -> torch.Tensor:
    """Labels `[B, S]` as the Trainers' losses shift them: documents of packed rows begin without one."""
    return torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()


def _documents_with_images(model: torch.nn.Module, inputs: Mapping[str, Any]) -> DocumentIds:
    """The mask of rows with images. Position ids `[4, B, S]` begin with those of the text, as transformers has it.

    In Gemma 3 the tokens of an image see each other: neighbours whose `token_type_ids` are 1.
    """
    positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    if positions is not None and positions.dim() == 3:
        positions = positions[0] if len(positions) == 4 else None
    kinds = inputs.get("token_type_ids") if getattr(model.config, "model_type", "") == "gemma3" else None
    if positions is None and mask is None and kinds is None:
        return None
    ids = inputs["input_ids"]
    found = documents_of(positions, torch.ones_like(ids) if positions is None and mask is None else mask)
    if kinds is None:
        return found
    document = np.broadcast_to(found.cpu().numpy(), ids.shape)
    image = (kinds == 1).cpu().numpy()
    begins = np.diff(image, axis=1, prepend=False) & image  # [B, S]
    number = (begins.cumsum() * image.reshape(-1)).astype(np.int64)
    flat = np.where(document < 0, document, document + np.arange(len(ids))[:, None] * ids.shape[1]).reshape(-1)
    return Metadata(flat, np.zeros_like(flat), number, np.arange(len(flat)))


def _counts(x: torch.Tensor) -> bool:
    """Whether `x[B, S]` counts up by one from 0, and starts again any number of times."""
    if x.dim() != 2 or x.is_floating_point() or x.dtype == torch.bool:
        return False
    up = x.diff(dim=1) == 1
    return bool((x[:, 0] == 0).all() and (up | (x[:, 1:] == 0)).all() and (x.shape[1] == 1 or up.any()))


def _shard_trainer(trainer: Any, rows: _Blocks) -> None:
    """Let the steps of a Trainer run in blocks."""
    missing = [name for name in _TRAINER_HOOKS if not hasattr(trainer, name)]
    if missing:
        raise ValueError(f"{type(trainer).__name__} has no {', '.join(missing)}: no Trainer of transformers 5")
    wrong = {"compute_loss_func": trainer.compute_loss_func, "label_smoothing_factor": trainer.label_smoother}
    if given := [name for name, value in wrong.items() if value is not None]:
        raise ValueError(f"{', '.join(given)} would shift the labels of one rank's tokens alone: leave it out")
    predict, accelerator, axis = trainer.prediction_step, trainer.accelerator, rows.axis
    counted = not trainer.model_accepts_loss_kwargs
    if counted and trainer.accelerator.unwrap_model(trainer.model).config.model_type not in _HANDS_ON:
        raise ValueError(
            f"{type(trainer.model).__name__} takes no num_items_in_batch: its loss is a mean over one rank's tokens"
        )

    def prepare(model: torch.nn.Module, inputs: Mapping[str, Any]) -> tuple[Callable[[], Any], dict[str, Any]]:
        bare = accelerator.unwrap_model(trainer.model)
        block, found = rows.of_images(bare, dict(inputs)) if has_towers(bare) else rows.of_inputs(bare, dict(inputs))
        if counted and "shift_labels" in found:
            # the Trainer takes the mean of processes, which is that of the row with its sum over these labels
            found["num_items_in_batch"] = (found["shift_labels"] != -100).sum().double() / axis.size
        return block, found

    def gather(losses: torch.Tensor) -> torch.Tensor:
        """Losses of all rows, each once; the library takes every process for one with rows of its own."""
        every = accelerator.gather(losses).view(-1, axis.size, len(losses))[:, 0].flatten()
        state = accelerator.gradient_state
        return every[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else every

    def prediction_step(
        model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, None, None]:
        if not prediction_loss_only:
            raise ValueError(
                "logits of a sharded sequence are of one rank's tokens: evaluate without compute_metrics, or predict "
                "in a process of its own"
            )
        loss, _, _ = predict(model, inputs, prediction_loss_only, ignore_keys)
        trainer.gather_function = gather  # the loop sets it back
        # each rank has the part of its tokens, times all processes: the mean is that of the row
        return None if loss is None else all_reduce(loss, axis) / axis.size, None, None

    trainer._prepare_context_parallel_inputs = prepare
    trainer.prediction_step = prediction_step
