"""A context manager in which a transformers model computes attention over a sharded sequence.

    register_with_transformers()  # attn_implementation="megacp"
    inputs, positions, labels = ...  # the whole sequence, the same on every rank
    labels = shift_labels(labels)  # before sharding, see loop.py
    counted = (labels != -100).sum()
    with context_parallel(
        axis, model=model, buffers=[inputs, positions, labels], buffer_seq_dims=[1, 1, 1]
    ):
        logits = model(inputs, position_ids=positions).logits  # [B, S / ranks, ...]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / counted
        loss.backward()
    sum_gradients(model.parameters(), axis)

All ranks raise the same error for anything that would use only the tokens of one rank. They check
the model's config when the block opens, the arguments of each call to the model, and each attention
call. torch itself is not patched. The registered attention finds the open block with `block_of`;
only the functions of layers with a state are replaced (`recurrent.py`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from megacp.attention.context_parallel.attention import select_transport
from megacp.attention.context_parallel.layout import CONTIGUOUS, LAYOUTS
from megacp.attention.context_parallel.plan import AttentionPlan
from megacp.attention.context_parallel.transport import Transport
from megacp.attention.context_parallel.transports import TRANSPORTS
from megacp.attention.ops.device import to_device
from megacp.attention.ops.kernels import auto_kernel
from megacp.attention.ops.mask import Reach
from megacp.attention.ops.once import once
from megacp.distributed.collectives import all_reduce, gather_objects
from megacp.distributed.grid import Axis
from megacp.integrations.mask import BatchMask, DocumentIds, batch_mask, in_batch
from megacp.integrations.model_rules import (
    argument,
    call_problems,
    model_problems,
    refuse,
    rotary_length,
    stock_model,
)
from megacp.integrations.recurrent import ours_in


class LayerRule(NamedTuple):
    """Properties of a layer's attention in addition to the block's mask."""

    reach: Reach = Reach()
    """The layer's window; only for causal layers."""
    cap: float = 0.0
    """Soft cap: scores become `cap * tanh(score / cap)`; 0 means no cap."""
    sinks: torch.Tensor | None = None
    """An additional score per head, without a value: `[heads]`."""
    spans: bool = True
    """Whether the mask's spans apply."""


_PLAIN = LayerRule()


@dataclass(eq=False)
class ContextParallel:
    """State of an open block: the tokens of each rank, the plans, and this rank's problems."""

    axis: Axis
    mask: BatchMask
    """Mask of the whole rows, including padding."""
    length: int
    """Number of tokens in a whole row, without padding."""
    places: np.ndarray
    """Row indices of each rank's tokens, in buffer order: int64 `[1 or B, ranks, s]`."""
    transport: str | Transport
    plans: dict[tuple[int, bool, bool], AttentionPlan] = field(default_factory=dict)
    """Plans by number of batch rows, `is_causal` and `spans`. All layers share them."""
    modules: set[int] = field(default_factory=set)
    """Ids of the modules in the model that runs in the block."""
    language: torch.nn.Module | None = None
    """Submodule that is called with this rank's tokens; None means the model itself."""
    outside: int = 0
    """Number of running modules that do not process the sequence, such as a vision tower. While it
    is above 0, attention runs as if there were no block.
    """
    noted: list[str] = field(default_factory=list)
    """This rank's problems, which the next attention call reports to all ranks."""
    _transports: dict[tuple[torch.device, str, float], Transport] = field(default_factory=dict)
    _longest: int = 0
    _unsettled: bool = True

    @property
    def local(self) -> np.ndarray:
        """Row indices of this rank's tokens: int64 `[1 or B, s]`."""
        return self.places[:, self.axis.rank]

    def cut(self, x: torch.Tensor, dim: int = 1, pad: float = 0.0) -> torch.Tensor:
        """Return this rank's tokens of `x[..., S, ...]`, with S along `dim` and padding `pad`.

        Use this function for tensors that are computed for the whole sequence inside the block,
        such as `inputs_embeds` with image features. The function is differentiable. The gradient of
        `x` covers only this rank's tokens, so sum the gradients of its inputs across ranks.
        """
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != self.length:
            refuse(
                f"cut expects the {self.length} tokens of the whole sequence along dim {dim}, got "
                f"the shape {tuple(x.shape)}"
            )
        return _part_of(x, dim % x.dim(), self.local, pad)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        is_causal: bool,
        scale: float | None = None,
        layer: LayerRule = _PLAIN,
    ) -> torch.Tensor:
        """Return the attention of this rank's queries to the keys of all ranks.

        `q[B, H, s, D]` and `k, v[B, Hkv, s, D or less]` belong to this rank's tokens, in buffer
        order; the result is `[B, H, s, D or less]`. With `is_causal`, each document is causal.
        Without it, every token attends to its whole document; a token of a branch still attends
        only to the document's prefix and to its branch.
        """
        kind = q.device.type
        held = self.places.shape[2]
        if torch.is_autocast_enabled(kind):  # cast as torch's own attention does
            to = torch.get_autocast_dtype(kind)
            q, k, v = (x if x.dtype == torch.float64 else x.to(to) for x in (q, k, v))
        if q.shape[2] != held or k.shape[2] != held:
            refuse(
                f"{q.shape[2]} queries and {k.shape[2]} keys, but the buffers have {held} of "
                f"{self.mask.length} tokens on this rank: add every input with a sequence "
                "dimension to the buffers; KV caches (use_cache) and cross attention cannot be "
                "sharded"
            )
        if len(self.mask.document) not in (1, len(q)):
            refuse(f"{len(q)} batch rows, but document_ids have {len(self.mask.document)}")
        # A window of at least the whole sequence has no effect.
        reach = Reach(*(size if size < self.length else 0 for size in layer.reach))
        if any(reach) and not is_causal:
            refuse(
                f"a window of {max(reach)} tokens without a causal mask, in a sequence of "
                f"{self.length} tokens, is not supported"
            )
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, s, D] -> [B, s, H, D]
        # Latent attention has narrower values: pad them to the width of the keys.
        width = q.shape[-1]
        narrow = v.shape[-1]
        v = torch.nn.functional.pad(v, (0, width - narrow))  # [B, s, Hkv, D]
        transport = self.transport_on(q.device, q.dtype, layer.cap)

        def of_rows(
            plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> torch.Tensor:
            scaled = width**-0.5 if scale is None else float(scale)
            return transport.attend(q, k, v, plan.within(reach), scaled, layer.sinks)

        out = self.along(of_rows, q, k, v, causal=is_causal, spans=layer.spans)
        return out[..., :narrow].transpose(1, 2)  # [B, s, H, D] -> [B, H, s, D or less]

    def along(
        self,
        function: Callable[..., torch.Tensor],
        *tensors: torch.Tensor,
        causal: bool = True,
        spans: bool = True,
    ) -> torch.Tensor:
        """Return `function(plan, ...)` for `tensors[B, s, ...]` of this rank's tokens.

        The function receives the tensors as rows `[B * s, ...]` in the plan's order. Its result is
        reordered and returned as `[B, s, ...]`. `causal` and `spans` select the plan, see
        `BatchMask.plan`.
        """
        # All ranks raise noted problems together before they exchange data.
        batch = len(tensors[0])
        device = tensors[0].device
        self._settle(device)
        # A mask without spans has the same plan with and without `spans`.
        key = batch, causal, spans or not self.mask.span.any()
        if key not in self.plans:
            self.plans[key] = self.mask.plan(self.places, batch, self.axis.rank, *key[1:])
        plan = self.plans[key]
        rows = [x.flatten(0, 1) for x in tensors]  # [B * s, ...]
        orders = self._orders(key, device)
        if orders is not None:
            rows = [x.index_select(0, orders[0]) for x in rows]
        with torch.autocast(device.type, enabled=False):
            out = function(plan, *rows)
        if orders is not None:
            out = out.index_select(0, orders[1])
        return out.unflatten(0, (batch, -1))  # [B * s, ...] -> [B, s, ...]

    @once
    def _orders(
        self, key: tuple[int, bool, bool], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return indices `[B * s]` that convert buffer order to a plan's order, and back.

        Return None if both orders are the same.
        """
        local = self.plans[key].local
        cut = in_batch(self.places, key[0], self.mask.length)[self.axis.rank]
        if np.array_equal(cut, local):
            return None
        # Sort the plan's tokens by index: two argsorts give the sorting rank of each. Then look up
        # the buffer position of the token with that sorting rank.
        rank = np.argsort(np.argsort(local))
        order = np.argsort(cut)[rank]
        return to_device(order, device), to_device(np.argsort(order), device)

    def transport_on(self, device: torch.device, dtype: torch.dtype, cap: float = 0.0) -> Transport:
        """Return the caller's transport, or one for `dtype` on `device`, built once per kernel."""
        if not isinstance(self.transport, str):
            if cap:
                refuse(
                    f"the model has a soft cap of {cap:g}: give transport by its name, not as an "
                    "object from select_transport"
                )
            return self.transport
        key = device, auto_kernel(device.type, dtype), cap
        if key not in self._transports:
            self._transports[key] = select_transport(
                self.transport, key[1], self.axis, device, cap=cap
            )
        return self._transports[key]

    @contextlib.contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[None]:
        """Run the attention and states of `model` in this block, and check calls to it."""
        self.modules |= {id(module) for module in model.modules()}
        # Check only calls to transformers models: the arguments of other models are unknown.
        stock = stock_model(model)
        hook = None
        if stock is not None:
            hook = stock.register_forward_pre_hook(self.check_call, with_kwargs=True)
        try:
            with ours_in(model, self.along, self.axis):
                yield
        finally:
            if hook is not None:
                hook.remove()

    def check_call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ValueError for a call to a transformers model that cannot use a sharded sequence.

        Wrong position ids are noted instead, because only this rank can detect them.
        """
        if self.axis.size == 1:
            return
        # A model with towers receives the whole sequence and shards it for its language model.
        cut_later = self.language is not None and module is not self.language
        refuse(*call_problems(module, args, kwargs, None if cut_later else self.places.shape[2]))
        positions = None if cut_later else argument(module, args, kwargs, "position_ids")
        if positions is None:
            return
        # [B, S], or [axes, B, S] in models with several position axes
        values = np.atleast_2d(positions.detach().cpu().numpy())
        images = self.language is not None and values.ndim == 3
        problem = self.mask.misplaced(values.reshape(-1, *values.shape[-2:]), self.local, images)
        if problem:
            problem += (
                ": add the position_ids of the whole sequence to the buffers, and also give "
                "document_ids if they restart"
            )
        self.note(problem)
        length = rotary_length(module.config.get_text_config(), int(values.max(initial=0)) + 1)
        self._longest = max(self._longest, length)

    def note(self, problem: str) -> None:
        """Record a problem with this rank's values, or "" for no problem.

        All ranks call this at the same point. In the next attention call, they exchange their
        problems and raise together. If a rank raised immediately, the other ranks would wait for it
        in a collective.
        """
        if problem:
            self.noted.append(problem)
        self._unsettled = True

    def _settle(self, device: torch.device) -> None:
        """Raise the same ValueError on every rank if any rank has noted a problem.

        Nothing is sent if `note` has not been called since the last time.
        """
        if not self._unsettled:
            return
        kind = device if self.axis.backend == "nccl" else torch.device("cpu")
        # One message: whether any rank has a problem, the maximum length, and the negated minimum.
        values = [bool(self.noted), self._longest, -self._longest]
        mine = torch.tensor(values, dtype=torch.int64, device=kind)
        some, most, least = all_reduce(mine, self.axis, "max").tolist()
        # Reset before raising, so that a later call does not report the same problems.
        found = self.noted
        self.noted = []
        self._longest = 0
        self._unsettled = False
        if some:
            problems = []
            for rank, noted in enumerate(gather_objects(found, self.axis)):
                problems += [f"rank {rank}: {problem}" for problem in noted]
            refuse(*problems)
        if most != -least:
            refuse(
                "this model's rotary angles depend on the longest position, which is "
                f"{-least} on one rank and {most} on another (rope type dynamic or longrope): use "
                "sequences no longer than the original training length"
            )


# The open block of this process, if any. All threads share it, because autograd recomputes layers
# in another thread.
_open: list[ContextParallel] = []
# Attention layers whose last forward pass ran in a block.
_last_in_block: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def current_context() -> ContextParallel | None:
    """Return the open block, or None outside a block and while a tower runs."""
    if not _open or _open[0].outside:
        return None
    return _open[0]


def block_of(module: torch.nn.Module) -> ContextParallel | None:
    """Return the open block in which an attention layer runs, or None.

    Raise ValueError if the layer is recomputed after its block has ended, or if it does not belong
    to the block's model.
    """
    block = current_context()
    if block is not None:
        if id(module) not in block.modules:
            refuse(f"{type(module).__name__} does not belong to the model given as model=")
        # Remember the layer: its recomputation must not run outside the block.
        _last_in_block.add(module)
    elif not _open and module in _last_in_block:
        if torch._C._current_graph_task_id() != -1:  # in the backward pass
            refuse(
                "a layer is recomputed after its block has ended: call backward() inside the block"
            )
        _last_in_block.discard(module)
    return block


@dataclass(eq=False)
class context_parallel(contextlib.AbstractContextManager[ContextParallel]):
    """Block in which `buffers` contain this rank's tokens, and `model` attends to all tokens.

    Every rank of `axis` enters the block with the same whole sequence. The forward and the backward
    pass must run inside the block, and blocks cannot be nested.

    Raise ValueError for wrong arguments, before any message is sent. For wrong positions or masks,
    which only one rank can detect, all ranks raise ValueError in the next attention call. A block
    without attention calls raises ValueError when it ends: the model computed its own attention,
    and only among the tokens of one rank.
    """

    axis: Axis
    _: KW_ONLY
    model: torch.nn.Module | None = None
    """Transformers model with the registered attention, possibly wrapped (FSDP, DDP); None if the
    caller uses `attend` directly.
    """
    buffers: Sequence[torch.Tensor]
    """Tensors to shard: token ids, position ids, shifted labels, tables of rotary angles. Inside
    the block, the same objects contain S / ranks tokens. Their data is restored when the block
    ends, even after an exception."""
    buffer_seq_dims: Sequence[int]
    """The sequence dimension of each buffer."""
    no_restore_buffers: Collection[torch.Tensor] = ()
    """Buffers that stay sharded after the block."""
    pad_values: Sequence[float] | None = None
    """Padding value of each buffer, in case the layout needs a longer sequence. No token attends to
    padding, and padding's attention output is zero. For labels, use a value that the loss ignores.
    """
    document_ids: DocumentIds = None
    """Documents of the whole sequence as int `[B, S]` or `[S]`, -1 at padding. Tokens attend only
    to their own document. None means that each batch row is one document. A `Metadata` of S (or
    B * S) tokens can add branches and spans."""
    transport: str | Transport = "p2p"
    """p2p, all_gather, a2a or kv_exchange, or an object from `select_transport`. For `a2a+p2p`,
    which creates process groups, build the object once with sizes `(A, B)` and pass it."""
    layout: str = "zigzag"
    """Placement of tokens on ranks: contiguous, zigzag, zigzag_document or balanced. It does not
    affect results."""

    def __enter__(self) -> ContextParallel:
        self._block = self._opened()
        return self._block.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._block.__exit__(*error)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[ContextParallel]:
        axis, model, buffers, layout = self.axis, self.model, self.buffers, self.layout
        if layout not in LAYOUTS:
            refuse(f"layout {layout} is unknown: choose one of {', '.join(LAYOUTS)}")
        if isinstance(self.transport, str) and self.transport not in TRANSPORTS:
            refuse(f"transport {self.transport} is unknown: choose one of {', '.join(TRANSPORTS)}")
        if _open:
            refuse("a context_parallel block is already open, and blocks cannot be nested")
        pads = [0.0] * len(buffers) if self.pad_values is None else self.pad_values
        if not buffers or not len(buffers) == len(self.buffer_seq_dims) == len(pads):
            refuse("give buffers, and one buffer_seq_dims and pad_values entry per buffer")
        if any(x.requires_grad for x in buffers):
            refuse(
                "a buffer requires grad, but its gradient would have a different shape: use cut() "
                "inside the block"
            )
        lengths = [x.shape[dim] for x, dim in zip(buffers, self.buffer_seq_dims, strict=True)]
        if len(set(lengths)) > 1:
            refuse(
                "buffers must have equal lengths along buffer_seq_dims, got "
                f"{', '.join(map(str, lengths))}"
            )
        length = lengths[0]
        ranks = axis.size
        if model is not None and ranks > 1:
            refuse(*model_problems(model, length))
        # A single rank does not reorder the rows.
        dealing = LAYOUTS[layout] if ranks > 1 else CONTIGUOUS
        mask = batch_mask(self.document_ids, length).padded(dealing, ranks)
        if mask.length > length and self.pad_values is None:
            refuse(
                f"layout {layout} cannot distribute {length} tokens over {ranks} ranks, the next "
                f"valid length is {mask.length}: give one entry of pad_values per buffer, or pad "
                "the buffers to this length, with -1 in document_ids"
            )
        places = mask.deal(dealing, ranks)
        # Negative dimensions count from the end; `_part_of` expects them from the start.
        triples = [
            (x, dim % x.dim(), pad)
            for x, dim, pad in zip(buffers, self.buffer_seq_dims, pads, strict=True)
        ]
        if len(places) > 1 and any(dim == 0 or len(x) != len(places) for x, dim, _ in triples):
            refuse(
                f"each buffer must have the {len(places)} batch rows in dim 0, because layout "
                f"{layout} distributes each row differently: expand the buffer, or choose the "
                "layout zigzag or contiguous"
            )
        context = ContextParallel(axis, mask, length, places, self.transport)
        # Build the transport now, so that an invalid choice raises before the first call.
        context.transport_on(buffers[0].device, torch.get_default_dtype())
        with torch.no_grad():
            parts = [_part_of(x.data, dim, context.local, pad) for x, dim, pad in triples]
        # Keep the full data without a copy. Nothing is written to it, so buffers may also be views
        # of the same storage.
        whole = []
        for x in buffers:
            # `in` would compare the values of tensors
            if not any(x is y for y in self.no_restore_buffers):
                whole.append((x, x.data))
        for x, part in zip(buffers, parts, strict=True):
            x.data = part
        del parts
        try:
            with context.watching(model) if model is not None else contextlib.nullcontext():
                _open.append(context)
                yield context
        finally:
            _open.clear()
            for x, full in whole:
                x.data = full
        # Every attention call uses a plan, so without plans there were no calls.
        if not context.plans:
            refuse(
                *context.noted,
                "no attention was called in the block: the model computes attention itself (eager) "
                "or with another library, and only among the tokens of one rank; use "
                'attn_implementation="megacp" if the model supports it',
            )


def _part_of(x: torch.Tensor, dim: int, places: np.ndarray, pad: float) -> torch.Tensor:
    """Return a differentiable copy of `x` at indices `places[1 or B, s]` along `dim >= 0`.

    Indices past the end of `x` give the value `pad`.
    """
    if len(places) > 1:  # x [B, ..., S, ...], with different indices in each row
        rows = zip(x, places, strict=True)
        return torch.stack([_part_of(row, dim - 1, own[None], pad) for row, own in rows])
    length = x.shape[dim]
    # Padding first copies the last token and is then overwritten.
    index = to_device(np.minimum(places[0], length - 1), x.device)
    part = x.index_select(dim, index)
    outside = np.flatnonzero(places[0] >= length)
    if len(outside):
        part.index_fill_(dim, to_device(outside, x.device), pad)
    return part
