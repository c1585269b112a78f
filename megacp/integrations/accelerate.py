"""Sharded sequences in Accelerate, and in the Trainers of transformers and TRL that use it.

Only the caller's objects are changed, in the places where Accelerate adds its own context
parallelism. FSDP2 and DDP average gradients over all processes. Your own loop must therefore divide
its loss by the number of labels in all batches of a step, and multiply it by
`accelerator.num_processes`, as the Trainers do.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from megacp.attention.ops.mask import Metadata
from megacp.distributed.collectives import all_reduce
from megacp.distributed.grid import Axis, axis_of_mesh
from megacp.integrations.context import context_parallel
from megacp.integrations.loop import shift_labels
from megacp.integrations.mask import DocumentIds, documents_of, trees_of
from megacp.integrations.model_rules import HANDS_ON, SEES_WITHIN_IMAGES, stock_model
from megacp.integrations.multimodal import cut_multimodal, find_towers
from megacp.integrations.transformers import register_with_transformers

# Model inputs with a sequence dimension, and their padding values.
_PAD = {
    "input_ids": 0,
    "labels": -100,
    "shift_labels": -100,
    "attention_mask": 0,
    "position_ids": 0,
}
_PAD |= {"token_type_ids": 0}
# Inputs that describe packed documents for other kernels, redundantly with position ids.
_OF_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
# `context_parallel` with a fixed axis, transport and layout.
_Block = Callable[..., contextlib.AbstractContextManager[Any]]


def shard_sequences(
    target: Any,
    cp_size: int | None = None,
    *,
    transport: str = "kv_exchange",
    layout: str = "balanced",
    trees: bool = False,
) -> Axis:
    """Shard the training sequences of a Trainer or an Accelerator across `cp_size` ranks.

    Every process calls this function before `train()` or `prepare()`. It returns the axis of ranks
    that share a sequence.

    * `target`: a Trainer of transformers or TRL, or an Accelerator.
    * `cp_size`: number of neighbouring ranks that share a sequence; they receive the same batches.
      None uses the Accelerator's ParallelismConfig, which TRL rejects with packing, and Accelerate
      rejects on CPUs.
    * `transport`, `layout`: see `context_parallel`.
    * `trees`: whether branches begin where position ids decrease to a number above 0, see
      `trees_of`. In a Trainer, a branch's first token repeats the last shared token, without a
      label.

    In a Trainer, a document begins where position ids restart, and the attention mask marks
    padding. In your own loop, `accelerator.maybe_context_parallel` recognises the position ids
    among its buffers because they count up by one from 0 in each document.

    Raise ValueError if `prepare` was already called, if `cp_size` does not divide the number of
    processes, if an option of the Trainer would use only the tokens of one rank, or for trees with
    images. Training steps raise ValueError if ranks have different rows, or if branches begin with
    a label.
    """
    from accelerate import Accelerator

    accelerator = getattr(target, "accelerator", target)
    if not isinstance(accelerator, Accelerator):
        raise ValueError(
            f"shard_sequences expects an Accelerator or a Trainer, got {type(target).__name__}"
        )
    if accelerator._models:
        raise ValueError(
            "this Accelerator has already prepared a model: call shard_sequences before prepare() "
            "and train()"
        )
    _set_size(accelerator, cp_size)
    axis = axis_of_mesh(accelerator.torch_device_mesh["cp"])
    block = functools.partial(context_parallel, axis, transport=transport, layout=layout)

    def of_buffers(
        buffers: Sequence[torch.Tensor],
        buffer_seq_dims: Sequence[int],
        no_restore_buffers: Any = None,
    ) -> contextlib.AbstractContextManager[Any]:
        """Return the block for `Accelerator.maybe_context_parallel`."""
        _refuse_other_rows(axis, buffers)
        # The buffers have no names. Find the position ids by their values: they define documents.
        counting = []
        for x, dim in zip(buffers, buffer_seq_dims, strict=True):
            if dim % x.dim() == 1 and _counts(x, trees):
                counting.append(x)
        if not counting or any(not torch.equal(x, counting[0]) for x in counting):
            raise ValueError(
                f"{len(counting)} of the {len(buffers)} buffers look like position ids [B, S] "
                "(counting up by one from 0 in each document): pass exactly one, because position "
                "ids define the documents"
            )
        return block(
            model=accelerator._models[0] if accelerator._models else None,
            buffers=buffers,
            buffer_seq_dims=buffer_seq_dims,
            no_restore_buffers=no_restore_buffers or (),
            document_ids=trees_of(counting[0]) if trees else documents_of(counting[0]),
        )

    def prepare(*args: Any) -> tuple[Any, ...]:
        """Return `args`, in place of Accelerate's preparation, which would drop the model's masks.

        Set the attention of their models, and the block for `maybe_context_parallel`.
        """
        for module in args:
            if not isinstance(module, torch.nn.Module):
                continue
            stock = stock_model(module)
            if stock is not None:
                stock.set_attn_implementation(register_with_transformers())
        accelerator._cp_context = of_buffers
        return args

    accelerator._prepare_cp = prepare
    if target is not accelerator:
        _shard_trainer(target, axis, block, trees)
    return axis


def _set_size(accelerator: Any, cp_size: int | None) -> None:
    """Give the accelerator a mesh with an axis `cp`, unless it already has one.

    All Accelerators in a process share one state, so this one gets a copy.

    Raise ValueError if `cp_size` is invalid or contradicts the ParallelismConfig.
    """
    from accelerate import ParallelismConfig

    world = accelerator.num_processes
    found = accelerator.parallelism_config
    has = 1 if found is None else found.cp_size
    if has > 1 and cp_size in (None, has):
        return
    if has > 1 or cp_size is None or cp_size < 2 or world % cp_size:
        raise ValueError(
            f"cp_size is {cp_size}, and {has} in the Accelerator's ParallelismConfig: set one of "
            f"them to a size of at least 2 that divides the {world} processes"
        )
    if found is not None and (found.tp_enabled or found.sp_enabled):
        raise ValueError(
            "shard_sequences supports only data parallelism, but this Accelerator's "
            "ParallelismConfig has tp or sp"
        )
    config = ParallelismConfig(cp_size=cp_size, dp_shard_size=world // cp_size)
    accelerator.state = copy.copy(accelerator.state)
    accelerator.state.parallelism_config = config
    accelerator.state.device_mesh = config.get_device_mesh(accelerator.device.type)


def _counts(x: torch.Tensor, trees: bool) -> bool:
    """Return whether `x[B, S]` looks like position ids.

    They count up by one from 0 in each document; with `trees`, branches may restart above 0.
    """
    if x.dim() != 2 or x.is_floating_point() or x.dtype == torch.bool:
        return False
    up = x.diff(dim=1) == 1  # [B, S - 1]
    restarts = x[:, 1:] == 0
    if trees:  # a branch may begin at any position up to the previous one
        restarts = (x.diff(dim=1) < 1) & (x[:, 1:] >= 0)
    begins_at_0 = bool((x[:, 0] == 0).all())
    counts = x.shape[1] == 1 or bool(up.any())  # a row of zeros does not count up
    return begins_at_0 and bool((up | restarts).all()) and counts


def _refuse_other_rows(axis: Axis, buffers: Sequence[torch.Tensor]) -> None:
    """Raise ValueError on all ranks of the axis if they have different rows.

    This happens if a loader gives each rank its own batches. One small message per step compares
    checksums of the integer tensors and their shapes.
    """
    # A 32-bit CRC fits into int64. The maximum of its negative gives the minimum.
    found = 0
    for x in buffers:
        if x.is_floating_point():
            continue
        data = x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        found = zlib.crc32(str(tuple(x.shape)).encode(), found)
        found = zlib.crc32(data, found)
    device = buffers[0].device if axis.backend == "nccl" else torch.device("cpu")
    most, least = all_reduce(torch.tensor([found, -found], device=device), axis, "max").tolist()
    if most != -least:
        raise ValueError(
            f"the {axis.size} ranks that share a sequence have different rows: their loader must "
            "give all of them the same batch (an IterableDataset's loader gives each process a "
            "different batch unless dispatch_batches=False)"
        )


def _block_of_inputs(
    axis: Axis, block: _Block, model: torch.nn.Module, inputs: dict[str, Any], trees: bool
) -> contextlib.AbstractContextManager[Any]:
    """Return a block for a model's inputs, and add missing inputs to `inputs`.

    A model with towers receives the whole batch; only its labels are sharded here.
    """
    for name in _OF_PACKING:
        inputs.pop(name, None)
    # An unknown input of a text model may have an entry per token. Models with towers have many
    # other inputs.
    towers = find_towers(model) is not None
    ids = inputs.get("input_ids")
    labels = inputs.get("labels")
    tensors = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    strange = [name for name in tensors if name not in _PAD]
    unusable = labels is None if towers else bool(strange)
    if ids is None or ids.dim() != 2 or unusable:
        raise ValueError(
            "a sharded sequence needs input_ids [B, S], and labels if it has images; it may have "
            f"{', '.join(list(_PAD)[1:])}; unknown: {', '.join(strange) or 'other inputs'}. Remove "
            "these inputs, because they may need sharding"
        )
    _refuse_other_rows(axis, list(tensors.values()))
    if towers:
        documents = _documents_with_images(model, inputs)
    else:
        whole_rows = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
        inputs.setdefault("position_ids", whole_rows)
        read_documents = trees_of if trees else documents_of
        documents = read_documents(inputs["position_ids"], inputs.get("attention_mask"))
    if labels is not None and "shift_labels" not in inputs:
        if trees:
            # A branch begins where positions do not increase by one: [B, S - 1]
            begins = inputs["position_ids"].diff(dim=1) != 1
            number = int((begins & (labels[:, 1:] != -100)).sum())
            if number:
                raise ValueError(
                    f"{number} branches begin with a label, but the preceding token in the row "
                    "does not predict it: begin each branch with an unlabelled copy of the token "
                    "that it continues, or pass shift_labels"
                )
        # Packed documents begin without a label, so shift_labels needs no document_ids here.
        inputs["shift_labels"] = shift_labels(labels)
    # The inputs of a model with towers are sharded later, by `cut_multimodal`.
    sharded = ("labels", "shift_labels") if towers else tuple(_PAD)
    names = [name for name in sharded if name in inputs]
    buffers = [inputs[name] for name in names]
    return block(
        model=model,
        buffers=buffers,
        buffer_seq_dims=[1] * len(buffers),
        no_restore_buffers=buffers,
        pad_values=[_PAD[name] for name in names],
        document_ids=documents,
    )


def _documents_with_images(model: torch.nn.Module, inputs: Mapping[str, Any]) -> DocumentIds:
    """Return the mask of rows with images.

    In transformers, the first of four position axes, `[4, B, S]`, contains text positions. In Gemma
    3 and 4, the tokens of an image attend to each other: consecutive tokens whose `token_type_ids`
    are 1, or 2 for videos.
    """
    positions = inputs.get("position_ids")
    mask = inputs.get("attention_mask")
    if positions is not None and positions.dim() == 3:
        positions = positions[0] if len(positions) == 4 else None
    config: Any = model.config
    kinds = None
    if getattr(config, "model_type", "") in SEES_WITHIN_IMAGES:
        kinds = inputs.get("token_type_ids")
    text = config.get_text_config()
    if getattr(text, "use_bidirectional_attention", None) == "vision":  # Gemma 4
        kinds = inputs.get("mm_token_type_ids")
    ids = inputs["input_ids"]
    if positions is None and mask is None:
        mask = torch.ones_like(ids)
    found = documents_of(positions, mask)
    if kinds is None:
        return found
    # [B, S]; a single row of documents represents all rows
    numbers = np.broadcast_to(found.cpu().numpy(), ids.shape)
    row = np.arange(len(ids))[:, None]
    # Renumber the documents so that no number occurs in two rows, and number the images.
    document = np.where(numbers >= 0, numbers + row * (numbers.max() + 1), numbers).reshape(-1)
    image = ((kinds == 1) | (kinds == 2)).cpu().numpy()
    begins = np.diff(image, axis=1, prepend=False) & image  # [B, S]
    # [B * S]: the image number of each image token, 0 for text
    number = (begins.cumsum() * image.reshape(-1)).astype(np.int64)
    return Metadata.of_documents(document, span=number)


def _shard_trainer(trainer: Any, axis: Axis, block: _Block, trees: bool) -> None:
    """Run a Trainer's training and evaluation steps in blocks.

    Raise ValueError for options that cannot be exact with sharded sequences.
    """
    # Both options compute the loss from labels that are not shifted.
    wrong = {
        "compute_loss_func": trainer.compute_loss_func,
        "label_smoothing_factor": trainer.label_smoother,
    }
    given = [name for name, value in wrong.items() if value is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)} would shift the labels within the tokens of one rank: remove it"
        )
    predict = trainer.prediction_step
    accelerator = trainer.accelerator
    counted = not trainer.model_accepts_loss_kwargs  # whether labels are counted here
    of_trl = hasattr(trainer, "_total_train_tokens")
    if trees and find_towers(accelerator.unwrap_model(trainer.model)):
        raise ValueError(
            "trees must be text: for trees with images, pass a Metadata to context_parallel"
        )
    if counted and accelerator.unwrap_model(trainer.model).config.model_type not in HANDS_ON:
        raise ValueError(
            f"{type(trainer.model).__name__} does not accept num_items_in_batch, so its loss would "
            "be a mean over the tokens of one rank"
        )

    def prepare(
        model: torch.nn.Module, inputs: Mapping[str, Any]
    ) -> tuple[Callable[[], Any], dict[str, Any]]:
        """Return a function that opens a step's block, and the step's inputs."""
        bare = accelerator.unwrap_model(trainer.model)
        found = {name: x for name, x in inputs.items() if x is not None}
        if of_trl:  # without a mask, TRL would count padding too
            found.setdefault("attention_mask", torch.ones_like(found["input_ids"]))
        cut = _block_of_inputs(axis, block, bare, found, trees)
        if counted and "shift_labels" in found:
            # The Trainer averages over processes. With this divisor, the average is the mean over
            # the row's labels.
            labels = (found["shift_labels"] != -100).sum().double()
            found["num_items_in_batch"] = labels / axis.size

        @contextlib.contextmanager
        def both() -> Iterator[None]:
            with cut as context:
                images: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
                if find_towers(bare):
                    images = cut_multimodal(bare, context)
                with images:
                    yield

        return both, found

    def gather(losses: torch.Tensor) -> torch.Tensor:
        """Return the losses of all rows, without repetition.

        The library assumes that every process has its own rows, but `axis.size` processes share
        theirs.
        """
        # [processes, rows]; keep only the rows of each axis' first rank
        every = accelerator.gather(losses).view(-1, axis.size, len(losses))[:, 0].flatten()
        # The last batch of a loader is padded with repeated rows: drop them.
        state = accelerator.gradient_state
        if state.end_of_dataloader and state.remainder > 0:
            return every[: state.remainder]
        return every

    def prediction_step(
        model: torch.nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: Any = None,
    ) -> tuple[Any, None, None]:
        """Return the evaluation loss of a batch, computed in a block."""
        if not prediction_loss_only:
            raise ValueError(
                "each rank has only its own tokens' logits of a sharded sequence: evaluate without "
                "compute_metrics, and do not call predict"
            )
        if of_trl:  # TRL's own step does not open a block
            opened, found = prepare(model, trainer._prepare_inputs(inputs))
            # TRL averages over the labels of its rows. If it averages tokens across devices, it
            # multiplies the mean by the number of processes.
            times = accelerator.num_processes if trainer.args.average_tokens_across_devices else 1
            number = (found["shift_labels"] != -100).sum() * times / axis.size
            with torch.no_grad(), trainer.compute_loss_context_manager(), opened():
                loss = trainer.compute_loss(model, found, num_items_in_batch=number)
        else:
            loss, _, _ = predict(model, inputs, prediction_loss_only, ignore_keys)
        trainer.gather_function = gather  # the evaluation loop resets it
        # Each rank has the loss of its tokens times the number of processes. The mean over the
        # axis is the row's loss.
        if loss is not None:
            loss = all_reduce(loss, axis) / axis.size
        return loss, None, None

    trainer._prepare_context_parallel_inputs = prepare
    trainer.prediction_step = prediction_step
