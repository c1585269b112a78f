"""Accelerate, and the Trainers of transformers and TRL on it, over a sharded sequence with the mask
of packed rows.

Only objects of the caller are changed, where Accelerate plugs in its own context parallelism. FSDP2
and DDP take the mean of gradients over all processes: a loop of one's own multiplies its loss by
`accelerator.num_processes`, as the Trainers do, after dividing by the labels of all batches of a
step.
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

_PAD = {
    "input_ids": 0,
    "labels": -100,
    "shift_labels": -100,
    "attention_mask": 0,
    "position_ids": 0,
}
_PAD |= {"token_type_ids": 0}
"""Inputs of a model that lie along the sequence, and what padding gets."""
_OF_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What collators say of packed documents for other kernels; the position ids say it too."""
_Block = Callable[..., contextlib.AbstractContextManager[Any]]
"""`context_parallel` with axis, transport and layout."""


def shard_sequences(
    target: Any,
    cp_size: int | None = None,
    *,
    transport: str = "kv_exchange",
    layout: str = "balanced",
    trees: bool = False,
) -> Axis:
    """Run what `target` trains under this attention; returns the axis of the ranks that share a
    row.

    `target`: an Accelerator before `prepare`, or a Trainer of transformers (TRL's too) before
    `train`. `cp_size`: ranks that share a row, neighbours in rank order; they get the same batches.
    None: as the Accelerator's ParallelismConfig says, which TRL refuses with packing and Accelerate
    on CPU. `transport`, `layout`: see `context_parallel`.

    A Trainer packs by position ids that restart; padding is what its attention mask says. In a loop
    of one's own `accelerator.maybe_context_parallel` finds the position ids among its buffers: they
    count up by one from 0, and start again with each document. `trees`: where they go back to a
    number above 0 a branch begins, see `trees_of`. Its first token has no label in a Trainer: it
    repeats the last shared one, which predicts one token alone.

    Every process calls it. ValueError after `prepare`, for a size that does not divide the
    processes, for options of a Trainer that would see one rank's tokens alone, for trees with
    images, and in a step whose ranks hold other rows or whose branches begin with a label.
    """
    from accelerate import Accelerator

    accelerator = getattr(target, "accelerator", target)
    if not isinstance(accelerator, Accelerator):
        raise ValueError(
            f"shard_sequences wants an Accelerator or a Trainer, got {type(target).__name__}"
        )
    if accelerator._models:
        raise ValueError(
            "shard_sequences comes before prepare() and train(): this Accelerator has prepared a model"
        )
    _set_size(accelerator, cp_size)
    axis = axis_of_mesh(accelerator.torch_device_mesh["cp"])
    block = functools.partial(context_parallel, axis, transport=transport, layout=layout)

    def of_buffers(
        buffers: Sequence[torch.Tensor],
        buffer_seq_dims: Sequence[int],
        no_restore_buffers: Any = None,
    ) -> contextlib.AbstractContextManager[Any]:
        """A block as `Accelerator.maybe_context_parallel` asks for it."""
        _refuse_other_rows(axis, buffers)
        counting = [
            x
            for x, dim in zip(buffers, buffer_seq_dims, strict=True)
            if dim % x.dim() == 1 and _counts(x, trees)
        ]
        if not counting or any(not torch.equal(x, counting[0]) for x in counting):
            raise ValueError(
                f"{len(counting)} of the {len(buffers)} buffers look like position ids [B, S] "
                "(from 0 up by one, again "
                f"with each document), exactly one must: they say which tokens are one document"
            )
        return block(
            model=accelerator._models[0] if accelerator._models else None,
            buffers=buffers,
            buffer_seq_dims=buffer_seq_dims,
            no_restore_buffers=no_restore_buffers or (),
            document_ids=trees_of(counting[0]) if trees else documents_of(counting[0]),
        )

    def prepare(*args: Any) -> tuple[Any, ...]:
        """Prepare instead of Accelerate, which would drop the masks of the model."""
        for module in (x for x in args if isinstance(x, torch.nn.Module)):
            if (stock := stock_model(module)) is not None:
                stock.set_attn_implementation(register_with_transformers())
        accelerator._cp_context = of_buffers
        return args

    accelerator._prepare_cp = prepare
    if target is not accelerator:
        _shard_trainer(target, axis, block, trees)
    return axis


def _set_size(accelerator: Any, cp_size: int | None) -> None:
    """Give the accelerator a mesh with an axis `cp`, unless it has one.

    All Accelerators of a process share the attributes of one state; this one gets a copy.
    """
    from accelerate import ParallelismConfig

    world, found = accelerator.num_processes, accelerator.parallelism_config
    has = 1 if found is None else found.cp_size
    if has > 1 and cp_size in (None, has):
        return
    if has > 1 or cp_size is None or cp_size < 2 or world % cp_size:
        raise ValueError(
            f"cp_size is {cp_size}, that of the Accelerator's ParallelismConfig is {has}: give one "
            "size of at least 2 "
            f"that divides the {world} processes"
        )
    if found is not None and (found.tp_enabled or found.sp_enabled):
        raise ValueError(
            "shard_sequences shares ranks with data parallelism alone, this Accelerator has tp or sp"
        )
    config = ParallelismConfig(cp_size=cp_size, dp_shard_size=world // cp_size)
    accelerator.state = copy.copy(accelerator.state)
    accelerator.state.parallelism_config = config
    accelerator.state.device_mesh = config.get_device_mesh(accelerator.device.type)


def _counts(x: torch.Tensor, trees: bool) -> bool:
    """Whether `x[B, S]` counts up by one from 0, and starts again any number of times; `trees`: at
    0 or above.
    """
    if x.dim() != 2 or x.is_floating_point() or x.dtype == torch.bool:
        return False
    up = x.diff(dim=1) == 1
    back = (x.diff(dim=1) < 1) & (x[:, 1:] >= 0) if trees else x[:, 1:] == 0
    return bool((x[:, 0] == 0).all() and (up | back).all() and (x.shape[1] == 1 or up.any()))


def _refuse_other_rows(axis: Axis, buffers: Sequence[torch.Tensor]) -> None:
    """Raise ValueError on all ranks of the axis where they hold other rows, as of a loader that
    deals to each rank.

    Compares 32-bit sums of the integer tensors and their shapes: one small message a step.
    """
    found = 0
    for x in (x for x in buffers if not x.is_floating_point()):
        found = zlib.crc32(str(tuple(x.shape)).encode(), found)
        found = zlib.crc32(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes(), found)
    device = buffers[0].device if axis.backend == "nccl" else torch.device("cpu")
    most, least = all_reduce(torch.tensor([found, -found], device=device), axis, "max").tolist()
    if most != -least:
        raise ValueError(
            f"the {axis.size} ranks that share a row hold other rows: their loader must give all "
            "of them the same "
            "batch (a loader of an IterableDataset gives each process its own: set "
            "dispatch_batches=False)"
        )


def _block_of_inputs(
    axis: Axis, block: _Block, model: torch.nn.Module, inputs: dict[str, Any], trees: bool
) -> contextlib.AbstractContextManager[Any]:
    """A block for the inputs of a model, which it completes.

    A model with towers takes the whole batch, and only its labels are cut.
    """
    for name in _OF_PACKING:
        inputs.pop(name, None)
    towers, ids, labels = (
        find_towers(model) is not None,
        inputs.get("input_ids"),
        inputs.get("labels"),
    )
    strange = [
        name for name, x in inputs.items() if isinstance(x, torch.Tensor) and name not in _PAD
    ]
    if ids is None or ids.dim() != 2 or (labels is None if towers else strange):
        raise ValueError(
            f"a sharded sequence has input_ids [B, S], may have {', '.join(list(_PAD)[1:])}, and "
            "with images has "
            f"labels; nothing is known of {', '.join(strange) or 'other inputs'}, maybe of one "
            "rank's tokens alone"
        )
    _refuse_other_rows(axis, [x for x in inputs.values() if isinstance(x, torch.Tensor)])
    if towers:
        documents = _documents_with_images(model, inputs)
    else:
        inputs.setdefault(
            "position_ids", torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
        )
        documents = (trees_of if trees else documents_of)(
            inputs["position_ids"], inputs.get("attention_mask")
        )
    if labels is not None and "shift_labels" not in inputs:
        if trees and (
            number := int(
                ((inputs["position_ids"].diff(dim=1) != 1) & (labels[:, 1:] != -100)).sum()
            )
        ):
            raise ValueError(
                f"{number} branches begin with a label, and what they continue stands elsewhere: "
                "begin each one with a "
                f"copy of the token that it continues, without a label, or give shift_labels"
            )
        inputs["shift_labels"] = shift_labels(
            labels
        )  # documents of packed rows begin without a label
    names = [name for name in (("labels", "shift_labels") if towers else _PAD) if name in inputs]
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
    """The mask of rows with images. Position ids `[4, B, S]` begin with those of the text, as
    transformers has it.

    In Gemma 3 and 4 the tokens of an image see each other: neighbours whose `token_type_ids` are 1,
    or 2 of a video.
    """
    positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    if positions is not None and positions.dim() == 3:
        positions = positions[0] if len(positions) == 4 else None
    config: Any = model.config
    kinds = (
        inputs.get("token_type_ids")
        if getattr(config, "model_type", "") in SEES_WITHIN_IMAGES
        else None
    )
    if (
        getattr(config.get_text_config(), "use_bidirectional_attention", None) == "vision"
    ):  # Gemma 4
        kinds = inputs.get("mm_token_type_ids")
    ids = inputs["input_ids"]
    found = documents_of(
        positions, torch.ones_like(ids) if positions is None and mask is None else mask
    )
    if kinds is None:
        return found
    numbers = np.broadcast_to(found.cpu().numpy(), ids.shape)
    row = np.arange(len(ids))[:, None]  # no number in two rows
    document = np.where(numbers >= 0, numbers + row * (numbers.max() + 1), numbers).reshape(-1)
    image = ((kinds == 1) | (kinds == 2)).cpu().numpy()
    begins = np.diff(image, axis=1, prepend=False) & image  # [B, S]
    number = (begins.cumsum() * image.reshape(-1)).astype(np.int64)
    return Metadata.of_documents(document, span=number)


def _shard_trainer(trainer: Any, axis: Axis, block: _Block, trees: bool) -> None:
    """Let the steps of a Trainer run in blocks."""
    wrong = {
        "compute_loss_func": trainer.compute_loss_func,
        "label_smoothing_factor": trainer.label_smoother,
    }
    if given := [name for name, value in wrong.items() if value is not None]:
        raise ValueError(
            f"{', '.join(given)} would shift the labels of one rank's tokens alone: leave it out"
        )
    predict, accelerator, counted = (
        trainer.prediction_step,
        trainer.accelerator,
        not trainer.model_accepts_loss_kwargs,
    )
    of_trl = hasattr(trainer, "_total_train_tokens")
    if trees and find_towers(accelerator.unwrap_model(trainer.model)):
        raise ValueError(
            "trees are rows of text: for those with images give context_parallel a Metadata"
        )
    if counted and accelerator.unwrap_model(trainer.model).config.model_type not in HANDS_ON:
        raise ValueError(
            f"{type(trainer.model).__name__} takes no num_items_in_batch: its loss is a mean over "
            "one rank's tokens"
        )

    def prepare(
        model: torch.nn.Module, inputs: Mapping[str, Any]
    ) -> tuple[Callable[[], Any], dict[str, Any]]:
        bare = accelerator.unwrap_model(trainer.model)
        found = {name: x for name, x in inputs.items() if x is not None}
        if of_trl:  # it counts what the mask says, and filled tokens without one
            found.setdefault("attention_mask", torch.ones_like(found["input_ids"]))
        cut = _block_of_inputs(axis, block, bare, found, trees)
        if counted and "shift_labels" in found:
            # the Trainer takes the mean of processes, which is that of the row with its sum over
            # these labels
            found["num_items_in_batch"] = (found["shift_labels"] != -100).sum().double() / axis.size

        @contextlib.contextmanager
        def both() -> Iterator[None]:
            with (
                cut as context,
                cut_multimodal(bare, context) if find_towers(bare) else contextlib.nullcontext(),
            ):
                yield

        return both, found

    def gather(losses: torch.Tensor) -> torch.Tensor:
        """Losses of all rows, each once; the library takes every process for one with rows of its
        own.
        """
        every = accelerator.gather(losses).view(-1, axis.size, len(losses))[:, 0].flatten()
        state = accelerator.gradient_state
        return (
            every[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else every
        )

    def prediction_step(
        model: torch.nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: Any = None,
    ) -> tuple[Any, None, None]:
        if not prediction_loss_only:
            raise ValueError(
                "logits of a sharded sequence are of one rank's tokens: evaluate without compute_metrics"
            )
        if of_trl:  # its own step opens no block
            opened, found = prepare(model, trainer._prepare_inputs(inputs))
            # TRL takes the mean of its rows' labels, and multiplies it by the processes where it is
            # given their number
            times = accelerator.num_processes if trainer.args.average_tokens_across_devices else 1
            number = (found["shift_labels"] != -100).sum() * times / axis.size
            with torch.no_grad(), trainer.compute_loss_context_manager(), opened():
                loss = trainer.compute_loss(model, found, num_items_in_batch=number)
        else:
            loss, _, _ = predict(model, inputs, prediction_loss_only, ignore_keys)
        trainer.gather_function = gather  # the loop sets it back
        # each rank has the part of its tokens, times all processes: the mean is that of the row
        return None if loss is None else all_reduce(loss, axis) / axis.size, None, None

    trainer._prepare_context_parallel_inputs = prepare
    trainer.prediction_step = prediction_step
