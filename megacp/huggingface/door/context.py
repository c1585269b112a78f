"""Attention of other people's models: a block in which their attention call runs over a sharded sequence.

Key property: a `TorchFunctionMode` sees the call `scaled_dot_product_attention` and hands it to the transport; torch is
not patched. What would see this rank's tokens alone is refused by all ranks alike: a mask tensor, dropout, a KV cache,
another attention function, a convolution over the sequence, a model without positions. Rejected: replacing torch's
functions or DTensor's dispatch for the whole process, which another model in it would meet.

    inputs, positions, labels = ...                                  # of the whole sequence, the same on every rank
    labels = shift_labels(labels)                                    # before the cut, see loop
    counted = (labels != -100).sum()
    with context_parallel(grid.cp, buffers=[inputs, positions, labels], buffer_seq_dims=[1, 1, 1]):
        logits = model(inputs, positions)                            # [B, S / ranks, ...]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / counted
        loss.backward()
    sum_gradients(model.parameters(), grid.cp)

A model that shifts labels itself (`labels=` of transformers) is wrong twice. Once the sequence is cut it shifts between
tokens that are no neighbours, and it divides by the tokens of one rank. Shift before, or hand the cut `shift_labels=`
and `num_items_in_batch=counted` to a model that takes them. Rotary embedding needs the `position_ids` of the whole
sequence among the buffers: a model without them counts each rank's tokens from 0. Models of transformers are refused
where they do either; with other models this shows only with `model=`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import torch

from megacp.core.context_parallel.attention import TRANSPORTS
from megacp.core.context_parallel.layout import LAYOUTS
from megacp.core.context_parallel.transport import Transport
from megacp.core.distributed.grid import Axis
from megacp.huggingface.door.buffers import SequenceBuffers
from megacp.huggingface.door.call import refuse
from megacp.huggingface.door.call_stack import ModuleCall
from megacp.huggingface.door.mask import BatchMask, DocumentIds, batch_mask, batch_mask_problems
from megacp.huggingface.door.mode import ContextParallel, current_context
from megacp.huggingface.door.model_rules import model_problems, recurrent_modules, watched_module


@dataclass(eq=False)
class context_parallel(contextlib.AbstractContextManager[ContextParallel]):
    """In the block, `buffers` hold this rank's tokens and attention runs over all ranks of `axis`.

    Every rank enters with the same whole sequence. Forward and backward of `scaled_dot_product_attention` belong inside
    the block: `q[B, H, s, D]`, `k, v[B, Hkv, s, D]` of the tokens this rank holds, in the order of the buffers.
    `is_causal=True` in the call means the mask of the documents. `is_causal=False` (without a mask) drops its order:
    every token sees every other of its document; a branch still sees its document's prefix and itself alone, and spans
    change nothing.

    Raises ValueError with all the reasons at once, before a message is sent; a second block inside is refused. Calls
    are checked one by one, and those that cannot be taken over raise ValueError too. What one rank alone can see (the
    values of positions and masks) is raised by all ranks in the next attention call. A block that ends without any
    attention call raises as well: what a model computes itself (eager) saw this rank's tokens alone.
    """

    axis: Axis
    _: KW_ONLY
    buffers: Sequence[torch.Tensor]
    """Tensors to cut: token ids, position ids, shifted labels, weights, tables of rotary angles over the sequence.
    The object stays, its data becomes that of S / ranks tokens, and comes back at the end, also after an exception."""
    buffer_seq_dims: Sequence[int]
    """The dim of each buffer that has the S tokens."""
    no_restore_buffers: Collection[torch.Tensor] = ()
    """Buffers that stay cut."""
    pad_values: Sequence[float] | None = None
    """Values that fill each buffer up where the layout needs a longer sequence. Added tokens belong to no document: no
    token sees them and their attention is zero. Give labels a value that the loss ignores."""
    document_ids: DocumentIds = None
    """Int tensor `[B, S]` or `[S]` of the whole sequence, -1 = padding; tokens see their own document alone. None: each
    batch row is one document. A `Metadata` of S (or B * S) tokens adds branches and spans."""
    transport: str | Transport = "p2p"
    """p2p, all_gather, a2a or kv_exchange, or what `select_transport` built. Build `a2a+p2p` once with
    `TransportOptions(hierarchy=(A, B))` and hand it in: it makes process groups."""
    layout: str = "zigzag"
    """contiguous, zigzag, zigzag_document or balanced: which rank holds which tokens. Results do not depend on it."""
    model: torch.nn.Module | None = None
    """The model that runs in the block: one that takes `position_ids` must then be given them, and layers that carry a
    state along the sequence are refused. Models of transformers are recognised without it unless they are compiled."""
    _block: contextlib.AbstractContextManager[ContextParallel] | None = field(default=None, init=False, repr=False)

    def __enter__(self) -> ContextParallel:
        self._block = self._opened()
        return self._block.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        block, self._block = self._block, None
        assert block is not None
        return block.__exit__(kind, error, trace)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[ContextParallel]:
        held = SequenceBuffers(
            list(self.buffers), list(self.buffer_seq_dims), self.pad_values, list(self.no_restore_buffers)
        )
        problems = _choice_problems(self.layout, self.transport)
        if current_context() is not None:
            problems.append("a context_parallel block is open already, and blocks cannot be nested")
        unfit = held.problems()
        problems += unfit or batch_mask_problems(self.document_ids, held.length)
        if self.model is not None and self.axis.size > 1 and not unfit:
            problems += model_problems(self.model, held.length)
        refuse(problems)
        rows = batch_mask(self.document_ids, held.length)
        mask, places = _dealt(rows, self.axis.size, self.layout, self.pad_values is not None)
        refuse(held.row_problems(mask.rows) if len(places) > 1 else [])
        context = ContextParallel(self.axis, mask, places, self.transport, held.length)
        # what is wrong with the choice shows here
        context.transport_on(held.tensors[0].device, torch.get_default_dtype())
        with held.cut(places[:, self.axis.rank]), _watched(self.model, context), context:
            yield context
        if not context.plans:
            refuse(
                [
                    *context.agreement.noted,
                    "no scaled_dot_product_attention was called in the block: a model that computes attention itself "
                    "(eager), has none or calls another library saw this rank's tokens alone",
                ]
            )


@contextlib.contextmanager
def _watched(model: torch.nn.Module | None, context: ContextParallel) -> Iterator[None]:
    """In the block, calls of `model` are checked."""
    with contextlib.ExitStack() as hooks:
        if model is not None and context.axis.size > 1:

            def look(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if current_context() is context:
                    context.check_model_calls([ModuleCall(module, args, kwargs)])

            watched = watched_module(model)
            if watched is not None:
                hooks.callback(watched.register_forward_pre_hook(look, with_kwargs=True).remove)
            for layer in recurrent_modules(model):
                hooks.callback(layer.register_forward_pre_hook(_refuse_layer).remove)
        yield


def _refuse_layer(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
    refuse(
        [
            f"{type(module).__name__} carries a state along the sequence and would see this rank's tokens alone: such "
            f"layers are not supported"
        ]
    )


def _dealt(mask: BatchMask, ranks: int, layout: str, padded: bool) -> tuple[BatchMask, np.ndarray]:
    """The mask, filled up where the layout needs it and `padded` allows it, and the places of every rank."""
    chosen = LAYOUTS[layout if ranks > 1 else "contiguous"]  # one rank holds the rows as they are
    length = mask.padded_length(chosen, ranks)
    if length > mask.length and not padded:
        refuse(
            [
                f"layout {layout} cannot deal {mask.length} tokens to {ranks} ranks, the next length is {length}: "
                f"give pad_values, one for each buffer, or pad to it with document_ids -1"
            ]
        )
    mask = mask.padded_to(length)
    return mask, mask.deal(chosen, ranks)


def _choice_problems(layout: str, transport: str | Transport) -> list[str]:
    found = [] if layout in LAYOUTS else [f"layout {layout} is unknown; choose {', '.join(LAYOUTS)}"]
    if isinstance(transport, str) and transport not in TRANSPORTS:
        found.append(f"transport {transport} is unknown; choose {', '.join(TRANSPORTS)}")
    return found
