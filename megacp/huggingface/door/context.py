"""Attention of models of transformers in a block in which the sequence is sharded.

    register_with_transformers()                                     # attn_implementation="megacp"
    inputs, positions, labels = ...                                  # of the whole sequence, the same on every rank
    labels = shift_labels(labels)                                    # before the cut, see loop
    counted = (labels != -100).sum()
    with context_parallel(axis, model=model, buffers=[inputs, positions, labels], buffer_seq_dims=[1, 1, 1]):
        logits = model(inputs, position_ids=positions).logits        # [B, S / ranks, ...]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / counted
        loss.backward()
    sum_gradients(model.parameters(), axis)

What would see this rank's tokens alone is refused by all ranks alike: by the model's config at the beginning, by the
arguments of its call, or in an attention call. A model that shifts labels itself (`labels=`) is wrong twice once the
sequence is cut: it shifts between tokens that are no neighbours, and divides by the tokens of one rank. Rotary
embedding needs the `position_ids` of the whole sequence among the buffers.

Nothing of torch or of the model is replaced. The registered attention asks `block_of` for the open block: a context
variable in the forward, and in backward, where autograd's threads have none, the block that the layer's forward saw.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import torch

from megacp.core.context_parallel.attention import TRANSPORTS, select_transport
from megacp.core.context_parallel.layout import LAYOUTS
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.context_parallel.transport import Transport
from megacp.core.distributed.collectives import all_reduce, gather_objects
from megacp.core.distributed.grid import Axis
from megacp.core.ops.device import to_device
from megacp.core.ops.kernels import auto_kernel
from megacp.huggingface.door.mask import BatchMask, DocumentIds, batch_mask, batch_mask_problems, in_batch
from megacp.huggingface.door.model_rules import (
    call_problems,
    model_problems,
    position_problems,
    positions_of,
    rotary_length,
    text_config,
    watched_module,
)


def refuse(problems: Sequence[str]) -> None:
    """Raise one ValueError with all `problems`, when there are any."""
    if problems:
        raise ValueError("context_parallel: " + "; ".join(problems))


class ContextParallel:
    """State of a block: which rank holds which tokens, the plans that were made, what one rank has seen."""

    def __init__(
        self, axis: Axis, mask: BatchMask, places: np.ndarray, transport: str | Transport, length: int
    ) -> None:
        self.axis = axis
        self.mask = mask
        """Of the whole rows, padding included."""
        self.length = length
        """Tokens of a whole row, without that padding."""
        self.places = places
        """int64 `[1 or B, ranks, s]`: the places of a row that each rank holds, in the order of the buffers."""
        self.plans: dict[tuple[int, bool], AttentionPlan] = {}
        """By batch rows and `is_causal`; made by the first call and used by all layers."""
        self.is_open = True
        self.modules: set[int] = set()
        """Ids of the modules of the model that runs here."""
        self.language: torch.nn.Module | None = None
        """The part of the model that is called with this rank's tokens; None: the model itself is."""
        self.outside = 0
        """Above 0 while a part runs that has nothing to do with the sequence: then the block is not there."""
        self._choice = transport
        self._transports: dict[tuple[torch.device, str], Transport] = {}
        self._noted: list[str] = []
        self._longest = 0
        self._unsettled = True

    @property
    def local(self) -> np.ndarray:
        """int64 `[1 or B, s]`: the places that this rank holds."""
        return self.places[:, self.axis.rank]

    def cut(self, x: torch.Tensor, dim: int = 1, pad: float = 0.0) -> torch.Tensor:
        """The tokens of this rank of a whole `x[..., S, ...]`, S along `dim`; padding gets `pad`.

        For what is made of the whole sequence in the block, such as `inputs_embeds` with features of images. Autograd
        goes through: the gradient of `x` is that of this rank's tokens, so sum over the ranks what it flows into.
        """
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != self.length:
            refuse([f"cut wants the {self.length} tokens of the whole sequence along dim {dim}, got {tuple(x.shape)}"])
        if len(self.local) > 1 and (dim % x.dim() == 0 or x.shape[0] != len(self.local)):
            refuse([f"cut wants {len(self.local)} batch rows in dim 0, which are dealt differently: {tuple(x.shape)}"])
        return _part_of(x, dim % x.dim(), self.local, pad)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float | None = None
    ) -> torch.Tensor:
        """Attention over the ranks: `q[B, H, s, D]`, `k, v[B, Hkv, s, D or less]` of the tokens this rank holds, in the
        order of the buffers -> `[B, H, s, D or less]`.

        `is_causal` means the mask of the documents. Without it every token sees every other of its document; a branch
        still sees its document's prefix and itself alone, and spans change nothing.
        """
        kind = q.device.type
        if torch.is_autocast_enabled(kind):  # as torch's own call would
            to = torch.get_autocast_dtype(kind)
            q, k, v = (x if x.dtype == torch.float64 else x.to(to) for x in (q, k, v))
        self._refuse_tokens(q, k, is_causal)
        self._settle(q.device)
        batch, _, tokens, width = q.shape
        plan = self._plan(batch, is_causal)
        narrow = v.shape[-1]
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [B, H, s, D] -> [B * s, H, D]
        v = torch.nn.functional.pad(v, (0, width - narrow))  # narrower values, as of latent attention
        order, back = (self._order(plan, name, q.device) for name in ("order", "back"))
        if order is not None:
            q, k, v = (x.index_select(0, order) for x in (q, k, v))
        transport = self.transport_on(q.device, q.dtype)
        scale = width**-0.5 if scale is None else float(scale)
        with torch.autocast(kind, enabled=False):
            out = transport.attend(q, k, v, plan, scale)
        out = (out if back is None else out.index_select(0, back))[..., :narrow]
        return out.unflatten(0, (batch, tokens)).transpose(1, 2)  # [B * s, H, D] -> [B, H, s, D]

    def transport_on(self, device: torch.device, dtype: torch.dtype) -> Transport:
        """The transport for tensors of `dtype` on `device`: the caller's, or one that is built once for each kernel."""
        kernel = auto_kernel(device.type, dtype)
        if (device, kernel) not in self._transports:
            inner = self._choice
            if isinstance(inner, str):
                try:
                    inner = select_transport(inner, kernel, self.axis, device)
                except ValueError as error:
                    raise ValueError(
                        f"context_parallel: {error}. A transport with options is built once, with select_transport("
                        f"{inner!r}, 'auto', axis, device, (A, B)), and given as transport="
                    ) from error
            self._transports[device, kernel] = inner
        return self._transports[device, kernel]

    @contextlib.contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[None]:
        """Inside, attention of `model` belongs to the block, and its calls are checked."""
        self.modules |= {id(module) for module in model.modules()}
        watched = watched_module(model)
        hooks = [] if watched is None else [watched.register_forward_pre_hook(self.check_call, with_kwargs=True)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def check_call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a call of the model that would not see the whole sequence; positions are noted for all ranks."""
        if self.axis.size == 1:
            return
        cut_later = self.language is not None and module is not self.language
        refuse(call_problems(module, args, kwargs, None if cut_later else self.places.shape[2]))
        positions = None if cut_later else positions_of(module, args, kwargs)
        if positions is None or positions.shape[-1] != self.places.shape[2] or positions.is_floating_point():
            return
        values = np.atleast_2d(positions.detach().cpu().numpy())
        images = self.language is not None and values.ndim == 3
        problem = self.mask.misplaced(values.reshape(-1, *values.shape[-2:]), self.local, images)
        rotary = rotary_length(text_config(module))
        self.note(position_problems(problem), rotary.number(int(values.max(initial=0)) + 1) if rotary else 0)

    def note(self, problems: Sequence[str], longest: int = 0) -> None:
        """Remember what is wrong with values of this rank; every rank calls this at the same place, also with none.

        All ranks hear of it in the next attention call and raise alike: a rank that raised at once would leave the
        others in a collective. `longest` must be the same on all ranks.
        """
        self._noted += problems
        self._longest = max(self._longest, longest)
        self._unsettled = True

    @property
    def noted(self) -> list[str]:
        """Problems of this rank that are not settled yet."""
        return list(self._noted)

    def _settle(self, device: torch.device) -> None:
        """Raise one ValueError with the findings of all ranks on every rank; nothing is sent when none can be open."""
        found, longest = self._noted, self._longest
        self._noted, self._longest = [], 0
        if not self._unsettled or self.axis.size == 1:
            refuse(found)
            return
        kind = device if self.axis.backend == "nccl" else torch.device("cpu")
        mine = torch.tensor([bool(found), longest, -longest], dtype=torch.int64, device=kind)
        some, most, least = all_reduce(mine, self.axis, "max").tolist()
        if some:
            every = gather_objects(found, self.axis)
            alike = [text for text in every[0] if all(text in one for one in every)]
            refuse([*alike, *(f"rank {i}: {text}" for i, one in enumerate(every) for text in one if text not in alike)])
        if most != -least:
            refuse(
                [
                    f"this model's rotary angles depend on the longest position, which is {-least} on one rank and "
                    f"{most} on another (rope type dynamic or longrope): such models need sequences within the length "
                    f"they were first trained on, or another rope type"
                ]
            )
        self._unsettled = False

    def _refuse_tokens(self, q: torch.Tensor, k: torch.Tensor, is_causal: bool) -> None:
        queries, keys, held = q.shape[2], k.shape[2], self.places.shape[2]
        if queries != keys:
            refuse(
                [
                    f"{queries} queries and {keys} keys: cross attention and a KV cache are not sharded, use them "
                    f"outside of the block (use_cache=False)"
                ]
            )
        if queries != held:
            refuse(
                [
                    f"{queries} tokens, the buffers hold {held} of {self.mask.length} on this rank: cut every input of "
                    f"the sequence (buffers), and run other towers outside of the block"
                ]
            )
        if self.mask.rows not in (1, q.shape[0]):
            refuse([f"{q.shape[0]} batch rows, document_ids have {self.mask.rows}"])
        if held == 1 < self.mask.length and not is_causal:
            refuse(["one token on a rank and is_causal=False, which may be a decoding step: use fewer ranks"])

    def _plan(self, batch: int, causal: bool) -> AttentionPlan:
        if (batch, causal) not in self.plans:
            self.plans[batch, causal] = self.mask.plan(self.places, batch, self.axis.rank, causal)
        return self.plans[batch, causal]

    def _order(self, plan: AttentionPlan, name: str, device: torch.device) -> torch.Tensor | None:
        """Index `[B * s]` from the buffers' order into the plan's (`order`) or `back`; None where they are one."""
        batch = len(plan.metadata) // self.mask.length

        def build() -> np.ndarray | None:
            cut = in_batch(self.places, batch, self.mask.length)[self.axis.rank]
            if np.array_equal(cut, plan.local):
                return None
            number = np.argsort(cut)  # [B * s]: the buffer index of this rank's tokens, by ascending place
            order = number[np.argsort(np.argsort(plan.local))]  # argsort twice: each plan token numbered by place
            return order if name == "order" else np.argsort(order)

        index = plan.part(f"buffers {name}", build)
        return None if index is None else plan.on_device(f"buffers {name}", device, lambda: index)


_BLOCK: ContextVar[ContextParallel | None] = ContextVar("context_parallel", default=None)
_SEEN: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[ContextParallel]] = weakref.WeakKeyDictionary()
"""The block of the last forward of each attention layer: backward asks for it where the layer is recomputed."""


def current_context() -> ContextParallel | None:
    """The open block of this thread; None outside, and while a tower runs in it."""
    block = _BLOCK.get()
    return None if block is None or block.outside else block


def block_of(module: torch.nn.Module) -> ContextParallel | None:
    """The open block in which an attention layer runs, also where it is recomputed in one of autograd's threads.

    ValueError for a layer that is recomputed behind its block, and for a model that the block was not given.
    """
    block = current_context()
    if block is not None:
        if id(module) not in block.modules:
            refuse([f"{type(module).__name__} is no part of the model that was given as model="])
        _SEEN[module] = weakref.ref(block)
        return block
    if _BLOCK.get() is None and torch._C._current_graph_task_id() != -1 and module in _SEEN:
        block = _SEEN[module]()
        if block is None or not block.is_open:
            refuse(["a layer is recomputed after its block was left: call backward inside the block"])
    return block


@dataclass(eq=False)
class context_parallel(contextlib.AbstractContextManager[ContextParallel]):
    """In the block, `buffers` hold this rank's tokens and attention of `model` runs over all ranks of `axis`.

    Every rank enters with the same whole sequence; forward and backward belong inside. Raises ValueError with all the
    reasons at once, before a message is sent; a second block inside is refused. What one rank alone can see (the values
    of positions and masks) is raised by all ranks in the next attention call. A block that ends without any attention
    call raises as well: what a model computes itself saw this rank's tokens alone.
    """

    axis: Axis
    _: KW_ONLY
    model: torch.nn.Module | None = None
    """The model that runs in the block: of transformers, loaded with the registered attention; it may be wrapped. None:
    the caller calls `ContextParallel.attend` itself."""
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
    `(A, B)` and hand it in: it makes process groups."""
    layout: str = "zigzag"
    """contiguous, zigzag, zigzag_document or balanced: which rank holds which tokens. Results do not depend on it."""
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
        problems = [] if self.layout in LAYOUTS else [f"layout {self.layout} is unknown; choose {', '.join(LAYOUTS)}"]
        if isinstance(self.transport, str) and self.transport not in TRANSPORTS:
            problems.append(f"transport {self.transport} is unknown; choose {', '.join(TRANSPORTS)}")
        if _BLOCK.get() is not None:
            problems.append("a context_parallel block is open already, and blocks cannot be nested")
        unfit = _buffer_problems(self)
        refuse(problems + unfit)
        length = self.buffers[0].shape[self.buffer_seq_dims[0]]
        problems = batch_mask_problems(self.document_ids, length)
        if self.model is not None and self.axis.size > 1:
            problems += model_problems(self.model, length)
        refuse(problems)
        mask, places = self._dealt(batch_mask(self.document_ids, length))
        context = ContextParallel(self.axis, mask, places, self.transport, length)
        # what is wrong with the choice shows here
        context.transport_on(self.buffers[0].device, torch.get_default_dtype())
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._cut(places[:, self.axis.rank]))
            if self.model is not None:
                stack.enter_context(context.watching(self.model))
            token = _BLOCK.set(context)
            stack.callback(setattr, context, "is_open", False)
            stack.callback(_BLOCK.reset, token)
            yield context
        if not context.plans:
            refuse(
                [
                    *context.noted,
                    "no attention was called in the block: a model that computes attention itself (eager), has none or "
                    "calls another library saw this rank's tokens alone",
                ]
            )

    def _dealt(self, mask: BatchMask) -> tuple[BatchMask, np.ndarray]:
        """The mask, filled up where the layout needs it, and the places of every rank."""
        ranks = self.axis.size
        layout = LAYOUTS[self.layout if ranks > 1 else "contiguous"]  # one rank holds the rows as they are
        length = mask.padded_length(layout, ranks)
        if length > mask.length and self.pad_values is None:
            refuse(
                [
                    f"layout {self.layout} cannot deal {mask.length} tokens to {ranks} ranks, the next length is "
                    f"{length}: give pad_values, one for each buffer, or pad to it with document_ids -1"
                ]
            )
        mask = mask.padded_to(length)
        places = mask.deal(layout, ranks)
        if len(places) > 1:
            refuse(
                [
                    f"buffer {number} {tuple(x.shape)} must have the {mask.rows} batch rows in dim 0 and its sequence "
                    f"in a later dim, as this layout deals each row of documents differently: expand it, or choose "
                    f"zigzag or contiguous"
                    for number, (x, dim) in enumerate(zip(self.buffers, self.buffer_seq_dims, strict=True))
                    if dim % x.dim() == 0 or x.shape[0] != mask.rows
                ]
            )
        return mask, places

    @contextlib.contextmanager
    def _cut(self, places: np.ndarray) -> Iterator[None]:
        """In the block each buffer holds its tokens at `places[1 or B, s]`.

        The full data is set aside without a copy and comes back bit for bit. Views of one storage can be cut together,
        because nothing is written into it.
        """
        pads = [0.0] * len(self.buffers) if self.pad_values is None else self.pad_values
        with torch.no_grad():
            whole = [x.data for x in self.buffers]
            triples = zip(whole, self.buffer_seq_dims, pads, strict=True)
            parts = [_part_of(x, dim % x.dim(), places, pad) for x, dim, pad in triples]
        kept = [any(x is y for y in self.no_restore_buffers) for x in self.buffers]
        before = [None if keep else x for x, keep in zip(whole, kept, strict=True)]
        del whole
        for x, part in zip(self.buffers, parts, strict=True):
            x.data = part
        del parts
        try:
            yield
        finally:
            for x, full in zip(self.buffers, before, strict=True):
                if full is not None:
                    x.data = full


def _buffer_problems(block: context_parallel) -> list[str]:
    """Why the buffers cannot be cut together; an empty list when they can."""
    tensors, dims = list(block.buffers), list(block.buffer_seq_dims)
    counts = {"buffer_seq_dims": dims, "pad_values": tensors if block.pad_values is None else block.pad_values}
    found = [f"{len(tensors)} buffers but {len(x)} {name}" for name, x in counts.items() if len(x) != len(tensors)]
    if not tensors:
        found.append("buffers is empty: they give the sequence length, and the model's inputs must be among them")
    pairs = list(zip(tensors, dims, strict=False))
    for number, (x, dim) in enumerate(pairs):
        if not -x.dim() <= dim < x.dim():
            found.append(f"buffer {number} {tuple(x.shape)} has no dim {dim}")
        elif x.shape[dim] == 0:
            found.append(f"buffer {number} has no token along dim {dim}")
        if x.requires_grad:
            found.append(f"buffer {number} requires grad, and its gradient would have another shape: cut it inside")
        found += [f"buffer {number} is buffer {i} again" for i in range(number) if tensors[i] is x]
    others = sum(not any(x is y for y in tensors) for x in block.no_restore_buffers)
    if others:
        found.append(f"{others} of {len(block.no_restore_buffers)} no_restore_buffers are not among the buffers")
    if not found and len({x.shape[dim] for x, dim in pairs}) > 1:
        lengths = ", ".join(f"{x.shape[dim]} along dim {dim} of buffer {i}" for i, (x, dim) in enumerate(pairs))
        found.append(f"buffers differ in length: {lengths}")
    return found


def _part_of(x: torch.Tensor, dim: int, places: np.ndarray, pad: float) -> torch.Tensor:
    """A copy of the tokens of `x` at `places[1 or B, s]` along `dim >= 0`, `pad` past its end, for autograd too."""
    if len(places) > 1:  # x [B, ..., S, ...], every row with its own places
        return torch.stack([_part_of(row, dim - 1, own[None], pad) for row, own in zip(x, places, strict=True)])
    length = x.shape[dim]
    index = to_device(np.minimum(places[0], length - 1), x.device)  # padding reads the last token, overwritten below
    part = x.index_select(dim, index)
    outside = np.flatnonzero(places[0] >= length)
    return part.index_fill_(dim, to_device(outside, x.device), pad) if len(outside) else part
