"""Attention of models of transformers in a block in which the sequence is sharded.

    register_with_transformers()                                     # attn_implementation="megacp"
    inputs, positions, labels = ...                                  # of the whole sequence, the
    same on every rank labels = shift_labels(labels)                                    # before the
    cut, see loop counted = (labels != -100).sum() with context_parallel(axis, model=model,
    buffers=[inputs, positions, labels], buffer_seq_dims=[1, 1, 1]):
        logits = model(inputs, position_ids=positions).logits        # [B, S / ranks, ...]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / counted
        loss.backward()
    sum_gradients(model.parameters(), axis)

What would see this rank's tokens alone is refused by all ranks alike: by the model's config at the
beginning, by the arguments of its call, or in an attention call. Nothing of torch is replaced, and
of the model states alone (`recurrent.py`): the registered attention asks `block_of` for the open
block.
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
    """What a layer's attention has beside the mask of the block."""

    reach: Reach = Reach()
    """How far it looks; only for causal layers."""
    cap: float = 0.0
    """Scores become `cap * tanh(score / cap)`; 0: as they are."""
    sinks: torch.Tensor | None = None
    """`[heads]`: one more score a head, without a value."""
    spans: bool = True
    """Whether the spans of the mask hold."""


_PLAIN = LayerRule()


@dataclass(eq=False)
class ContextParallel:
    """State of a block: which rank holds which tokens, the plans that were made, what one rank has
    seen.
    """

    axis: Axis
    mask: BatchMask
    """Mask of the whole rows, padding included."""
    length: int
    """Tokens of a whole row, without that padding."""
    places: np.ndarray
    """int64 `[1 or B, ranks, s]`: the places of a row that each rank holds, in the order of the
    buffers.
    """
    transport: str | Transport
    plans: dict[tuple[int, bool, bool], AttentionPlan] = field(default_factory=dict)
    """Plans by batch rows, `is_causal` and `spans`; made by the first call and used by all layers.
    """
    modules: set[int] = field(default_factory=set)
    """Ids of the modules of the model that runs here."""
    language: torch.nn.Module | None = None
    """The part of the model that is called with this rank's tokens; None: the model itself is."""
    outside: int = 0
    """Parts under way that have nothing to do with the sequence: while one runs, the block is not
    there.
    """
    noted: list[str] = field(default_factory=list)
    """What this rank alone has seen, until the next attention call reports it to all."""
    _transports: dict[tuple[torch.device, str, float], Transport] = field(default_factory=dict)
    _longest: int = 0
    _unsettled: bool = True

    @property
    def local(self) -> np.ndarray:
        """int64 `[1 or B, s]`: the places that this rank holds."""
        return self.places[:, self.axis.rank]

    def cut(self, x: torch.Tensor, dim: int = 1, pad: float = 0.0) -> torch.Tensor:
        """The tokens of this rank of a whole `x[..., S, ...]`, S along `dim`; padding gets `pad`.

        For what is made of the whole sequence in the block, such as `inputs_embeds` with features
        of images. Autograd goes through: the gradient of `x` is that of this rank's tokens, so sum
        over the ranks what it flows into.
        """
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != self.length:
            refuse(
                f"cut wants the {self.length} tokens of the whole sequence along dim {dim}, got "
                f"{tuple(x.shape)}"
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
        """Attention over the ranks: `q[B, H, s, D]`, `k, v[B, Hkv, s, D or less]` of the tokens
        this rank holds, in the order of the buffers -> `[B, H, s, D or less]`. `is_causal` means
        the mask of the documents. Without it every token sees its whole document; a branch still
        sees its document's prefix and itself alone.
        """
        kind, held = q.device.type, self.places.shape[2]
        if torch.is_autocast_enabled(kind):  # as torch's own call would
            to = torch.get_autocast_dtype(kind)
            q, k, v = (x if x.dtype == torch.float64 else x.to(to) for x in (q, k, v))
        if q.shape[2] != held or k.shape[2] != held:
            refuse(
                f"{q.shape[2]} queries and {k.shape[2]} keys, the buffers hold {held} of "
                f"{self.mask.length} tokens on "
                "this rank: every input of the sequence must be among the buffers, and a KV cache "
                "(use_cache) and "
                f"cross attention are not sharded"
            )
        if len(self.mask.document) not in (1, len(q)):
            refuse(f"{len(q)} batch rows, document_ids have {len(self.mask.document)}")
        reach = Reach(
            *(size if size < self.length else 0 for size in layer.reach)
        )  # a longer one leaves nothing out
        if any(reach) and not is_causal:
            refuse(
                f"a window of {max(reach)} tokens that also look ahead, in a sequence of "
                f"{self.length}"
            )
        width, narrow = q.shape[-1], v.shape[-1]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, s, D] -> [B, s, H, D]
        v = torch.nn.functional.pad(
            v, (0, width - narrow)
        )  # narrower values, as of latent attention
        transport = self.transport_on(q.device, q.dtype, layer.cap)

        def of_rows(
            plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> torch.Tensor:
            scaled = width**-0.5 if scale is None else float(scale)
            return transport.attend(q, k, v, plan.within(reach), scaled, layer.sinks)

        return self.along(of_rows, q, k, v, causal=is_causal, spans=layer.spans)[
            ..., :narrow
        ].transpose(1, 2)

    def along(
        self,
        function: Callable[..., torch.Tensor],
        *tensors: torch.Tensor,
        causal: bool = True,
        spans: bool = True,
    ) -> torch.Tensor:
        """`function(plan, ...)` of `tensors[B, s, ...]` of this rank's tokens, as rows `[B * s,
        ...]` in the plan's order; its result as `[B, s, ...]`. The plan is of a causal mask, or of
        one without order.
        """
        self._settle(tensors[0].device)
        batch, device = len(tensors[0]), tensors[0].device
        key = batch, causal, spans or not self.mask.span.any()
        if key not in self.plans:
            self.plans[key] = self.mask.plan(self.places, batch, self.axis.rank, *key[1:])
        plan = self.plans[key]
        rows = [x.flatten(0, 1) for x in tensors]
        orders = self._orders(key, device)
        if orders is not None:
            rows = [x.index_select(0, orders[0]) for x in rows]
        with torch.autocast(device.type, enabled=False):
            out = function(plan, *rows)
        if orders is not None:
            out = out.index_select(0, orders[1])
        return out.unflatten(0, (batch, -1))

    @once
    def _orders(
        self, key: tuple[int, bool, bool], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Indices `[B * s]` that bring tokens from the buffers' order into a plan's, and back;
        None: they are one.
        """
        local = self.plans[key].local
        cut = in_batch(self.places, key[0], self.mask.length)[self.axis.rank]
        if np.array_equal(cut, local):
            return None
        # argsort twice numbers the plan's tokens by place; argsort of `cut` says where the buffers
        # hold each number
        order = np.argsort(cut)[np.argsort(np.argsort(local))]
        return to_device(order, device), to_device(np.argsort(order), device)

    def transport_on(self, device: torch.device, dtype: torch.dtype, cap: float = 0.0) -> Transport:
        """The transport for tensors of `dtype` on `device`: the caller's, or one that is built once
        for each kernel.
        """
        if not isinstance(self.transport, str):
            if cap:
                refuse(
                    f"a soft cap of {cap:g} comes with the model: give transport by its name, not "
                    "as an object"
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
        """Give attention and states of `model` to the block while it lasts, and check its calls."""
        self.modules |= {id(module) for module in model.modules()}
        stock = stock_model(model)
        hook = (
            None
            if stock is None
            else stock.register_forward_pre_hook(self.check_call, with_kwargs=True)
        )
        try:
            with ours_in(model, self.along, self.axis):
                yield
        finally:
            if hook is not None:
                hook.remove()

    def check_call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a call of a stock model that would not see the whole sequence; positions are noted
        for all ranks.
        """
        if self.axis.size == 1:
            return
        cut_later = self.language is not None and module is not self.language
        refuse(*call_problems(module, args, kwargs, None if cut_later else self.places.shape[2]))
        positions = None if cut_later else argument(module, args, kwargs, "position_ids")
        if positions is None:
            return
        values = np.atleast_2d(positions.detach().cpu().numpy())
        images = self.language is not None and values.ndim == 3
        problem = self.mask.misplaced(values.reshape(-1, *values.shape[-2:]), self.local, images)
        advice = "put those of the whole sequence among the buffers, and where they restart give document_ids too"
        self.note(f"{problem}: {advice}" if problem else "")
        self._longest = max(
            self._longest,
            rotary_length(module.config.get_text_config(), int(values.max(initial=0)) + 1),
        )

    def note(self, problem: str) -> None:
        """Remember what is wrong with values of this rank; every rank calls this at the same place,
        also with "".

        All ranks hear of it in the next attention call and raise alike: a rank that raised at once
        would leave the others in a collective.
        """
        self.noted += [problem] if problem else []
        self._unsettled = True

    def _settle(self, device: torch.device) -> None:
        """Raise one ValueError with the findings of all ranks on every rank; nothing is sent when
        none can be open.
        """
        if not self._unsettled:
            return
        kind = device if self.axis.backend == "nccl" else torch.device("cpu")
        mine = torch.tensor(
            [bool(self.noted), self._longest, -self._longest], dtype=torch.int64, device=kind
        )
        some, most, least = all_reduce(mine, self.axis, "max").tolist()
        found, self.noted, self._longest, self._unsettled = self.noted, [], 0, False
        if some:
            every = gather_objects(found, self.axis)
            refuse(
                *(
                    f"rank {number}: {problem}"
                    for number, one in enumerate(every)
                    for problem in one
                )
            )
        if most != -least:
            refuse(
                f"this model's rotary angles depend on the longest position, which is {-least} on "
                f"one rank and {most} "
                "on another (rope type dynamic or longrope): stay within the length that it was "
                "first trained on"
            )


_open: list[ContextParallel] = []
"""The block of this process, if any. No thread has its own: autograd's recompute layers in theirs.
"""
_last_in_block: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Attention layers whose last forward was in a block."""


def current_context() -> ContextParallel | None:
    """The open block; None outside, and while a tower runs in it."""
    return _open[0] if _open and not _open[0].outside else None


def block_of(module: torch.nn.Module) -> ContextParallel | None:
    """The open block in which an attention layer runs.

    ValueError for a layer that is recomputed behind its block, and for a model that the block was
    not given.
    """
    block = current_context()
    if block is not None:
        if id(module) not in block.modules:
            refuse(f"{type(module).__name__} is no part of the model that was given as model=")
        _last_in_block.add(module)
    elif not _open and module in _last_in_block:
        if torch._C._current_graph_task_id() != -1:  # in backward
            refuse("a layer is recomputed after its block was left: call backward inside the block")
        _last_in_block.discard(module)
    return block


@dataclass(eq=False)
class context_parallel(contextlib.AbstractContextManager[ContextParallel]):
    """A block in which `buffers` hold this rank's tokens and attention of `model` runs over all
    ranks of `axis`.

    Every rank enters with the same whole sequence; forward and backward belong inside. Raises
    ValueError before a message is sent; a second block inside is refused. What one rank alone can
    see (the values of positions and masks) is raised by all ranks in the next attention call. A
    block that ends without any attention call raises as well: what a model computes itself saw this
    rank's tokens alone.
    """

    axis: Axis
    _: KW_ONLY
    model: torch.nn.Module | None = None
    """Model of transformers with the registered attention; it may be wrapped. None: the caller
    calls `attend`.
    """
    buffers: Sequence[torch.Tensor]
    """Tensors to cut: token ids, position ids, shifted labels, tables of rotary angles over the
    sequence. The object stays, its data becomes that of S / ranks tokens, and comes back at the
    end, also after an exception."""
    buffer_seq_dims: Sequence[int]
    """The dim of each buffer that has the S tokens."""
    no_restore_buffers: Collection[torch.Tensor] = ()
    """Buffers that stay cut."""
    pad_values: Sequence[float] | None = None
    """Values that fill each buffer up where the layout needs a longer sequence. Added tokens belong
    to no document: no token sees them and their attention is zero. Give labels a value that the
    loss ignores."""
    document_ids: DocumentIds = None
    """Int tensor `[B, S]` or `[S]` of the whole sequence, -1 = padding; tokens see only their own
    document. None: each batch row is one document. A `Metadata` of S (or B * S) tokens adds
    branches and spans."""
    transport: str | Transport = "p2p"
    """p2p, all_gather, a2a or kv_exchange, or what `select_transport` built. Build `a2a+p2p` once
    with `(A, B)` and hand it in: it makes process groups."""
    layout: str = "zigzag"
    """contiguous, zigzag, zigzag_document or balanced: which rank holds which tokens. Results do
    not depend on it.
    """

    def __enter__(self) -> ContextParallel:
        self._block = self._opened()
        return self._block.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._block.__exit__(*error)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[ContextParallel]:
        axis, model, buffers, layout = self.axis, self.model, self.buffers, self.layout
        if layout not in LAYOUTS:
            refuse(f"layout {layout} is unknown; choose {', '.join(LAYOUTS)}")
        if isinstance(self.transport, str) and self.transport not in TRANSPORTS:
            refuse(f"transport {self.transport} is unknown; choose {', '.join(TRANSPORTS)}")
        if _open:
            refuse("a context_parallel block is open already, and blocks cannot be nested")
        pads = [0.0] * len(buffers) if self.pad_values is None else self.pad_values
        if not buffers or not len(buffers) == len(self.buffer_seq_dims) == len(pads):
            refuse("give buffers, and as many buffer_seq_dims and pad_values")
        if any(x.requires_grad for x in buffers):
            refuse(
                "a buffer requires grad, and its gradient would have another shape: cut it inside"
            )
        lengths = [x.shape[dim] for x, dim in zip(buffers, self.buffer_seq_dims, strict=True)]
        if len(set(lengths)) > 1:
            refuse(
                f"buffers differ in length: {', '.join(map(str, lengths))} along buffer_seq_dims"
            )
        length, ranks = lengths[0], axis.size
        if model is not None and ranks > 1:
            refuse(*model_problems(model, length))
        dealing = (
            LAYOUTS[layout] if ranks > 1 else CONTIGUOUS
        )  # one rank holds the rows as they are
        mask = batch_mask(self.document_ids, length).padded(dealing, ranks)
        if mask.length > length and self.pad_values is None:
            refuse(
                f"layout {layout} cannot deal {length} tokens to {ranks} ranks, the next length is "
                f"{mask.length}: give "
                f"pad_values, one for each buffer, or pad to it with document_ids -1"
            )
        places = mask.deal(dealing, ranks)
        triples = [
            (x, dim % x.dim(), pad)
            for x, dim, pad in zip(buffers, self.buffer_seq_dims, pads, strict=True)
        ]
        if len(places) > 1 and any(dim == 0 or len(x) != len(places) for x, dim, _ in triples):
            refuse(
                f"each buffer must have the {len(places)} batch rows in dim 0, as layout {layout} "
                "deals each row of "
                f"documents differently: expand it, or choose zigzag or contiguous"
            )
        context = ContextParallel(axis, mask, length, places, self.transport)
        context.transport_on(
            buffers[0].device, torch.get_default_dtype()
        )  # what is wrong with the choice shows here
        with torch.no_grad():
            parts = [_part_of(x.data, dim, context.local, pad) for x, dim, pad in triples]
        # the full data is set aside without a copy: views of one storage can be cut, because
        # nothing is written into it
        whole = [(x, x.data) for x in buffers if not any(x is y for y in self.no_restore_buffers)]
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
        if not context.plans:
            refuse(
                *context.noted,
                "no attention was called in the block: a model that computes attention itself (eager), has none or "
                "calls another library saw this rank's tokens alone",
            )


def _part_of(x: torch.Tensor, dim: int, places: np.ndarray, pad: float) -> torch.Tensor:
    """A copy of the tokens of `x` at `places[1 or B, s]` along `dim >= 0`, `pad` past its end, for
    autograd too.
    """
    if len(places) > 1:  # x [B, ..., S, ...], every row with its own places
        return torch.stack(
            [_part_of(row, dim - 1, own[None], pad) for row, own in zip(x, places, strict=True)]
        )
    length = x.shape[dim]
    index = to_device(
        np.minimum(places[0], length - 1), x.device
    )  # padding reads the last token, overwritten below
    part = x.index_select(dim, index)
    outside = np.flatnonzero(places[0] >= length)
    return part.index_fill_(dim, to_device(outside, x.device), pad) if len(outside) else part
