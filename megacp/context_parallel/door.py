"""A door for other people's models: a block in which their own attention call runs over a sharded sequence.

Key property: a `TorchFunctionMode` sees the call `scaled_dot_product_attention` and hands it to the transport; torch is
not patched, and the mode travels into autograd's threads, so a layer that is recomputed in backward takes the same way.
What the mode cannot take over (a mask tensor, dropout, a KV cache, another attention function) is refused. Rejected:
replacing torch's functions or DTensor's dispatch for the whole process, state that a second model in it would meet.

    inputs, positions, labels = ...                                  # of the whole sequence, the same on every rank
    labels = shift_labels(labels)                                    # before the cut, see loop_rules
    counted = (labels != -100).sum()
    with context_parallel(grid.cp, buffers=[inputs, positions, labels], buffer_seq_dims=[1, 1, 1]):
        logits = model(inputs, positions)                            # [B, S / ranks, ...]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / counted
        loss.backward()
    sum_gradients(model.parameters(), grid.cp)

A model that shifts labels itself (`labels=` of transformers) shifts between tokens that are no neighbours once the
sequence is cut, and divides by the tokens of one rank: both are wrong, without an error. Shift before, or hand the cut
`shift_labels=` and `num_items_in_batch=counted` to a model that takes them. Rotary embedding wants the `position_ids`
of the whole sequence among the buffers: a model that is given none counts each rank's tokens from 0.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from megacp.context_parallel.attention import TRANSPORTS, core_attention, select_transport
from megacp.context_parallel.attention_call import length_problems, option_problems, refuse, shape_problems
from megacp.context_parallel.layout import LAYOUTS
from megacp.context_parallel.plan import AttentionPlan
from megacp.context_parallel.row_mask import DocumentIds, RowMask, in_batch, row_mask, row_mask_problems
from megacp.context_parallel.sequence_buffers import SequenceBuffers
from megacp.context_parallel.transport import Tensors, Transport
from megacp.distributed.grid import Axis
from megacp.ops.attention import QKV

_SDPA = torch.nn.functional.scaled_dot_product_attention
_ENGINE = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


@contextlib.contextmanager
def context_parallel(
    axis: Axis,
    *,
    buffers: Sequence[torch.Tensor],
    buffer_seq_dims: Sequence[int],
    no_restore_buffers: Collection[torch.Tensor] = (),
    pad_values: Sequence[float] | None = None,
    document_ids: DocumentIds = None,
    transport: str | Transport = "p2p",
    layout: str = "zigzag",
) -> Iterator[ContextParallel]:
    """In the block, `buffers` hold this rank's tokens and attention runs over all ranks of `axis`.

    Every rank enters with the same whole sequence. Forward and backward of `scaled_dot_product_attention` belong inside
    the block: `q[B, H, s, D]`, `k, v[B, Hkv, s, D]` of the tokens this rank holds, in the order of the buffers.

    * `buffers[i]` has S tokens along dim `buffer_seq_dims[i]`; the object stays, its data becomes those of S / ranks
      tokens. At the end, also after an exception, the data comes back, except for `no_restore_buffers`. What must be
      cut: token ids, position ids, shifted labels, weights, tables of rotary angles over the sequence.
    * `pad_values[i]` fills buffer i up where the layout needs a longer sequence; added tokens belong to no document:
      they are seen by nobody and their attention is zero. Give labels a value that the loss ignores.
    * `document_ids`: int tensor `[B, S]` or `[S]` of the whole sequence, -1 = padding; tokens see their own document
      alone. None: each batch row is one document. A `Metadata` of S (or B * S) tokens adds branches and spans.
    * `is_causal=True` in the call means this mask. `is_causal=False` (without a mask) drops its order: every token sees
      every other of its document; a branch still sees its document's prefix and itself alone, and spans change nothing.
    * `transport`: p2p, all_gather, a2a or kv_exchange, or what `select_transport` built. Build `a2a+p2p` once with
      `TransportOptions(hierarchy=(A, B))` and hand it in: it makes process groups.
    * `layout`: contiguous, zigzag, zigzag_document or balanced: who holds which tokens. Results do not depend on it.

    Raises ValueError with all the reasons at once, before a message is sent; a second block inside is refused. Calls
    are checked one by one, and those that cannot be taken over raise ValueError too. Warns when a block ends without
    any attention: what a model computes itself (eager) cannot be seen, choose `sdpa` or `register_with_transformers`.
    """
    held = SequenceBuffers(list(buffers), list(buffer_seq_dims), pad_values, list(no_restore_buffers))
    problems = _choice_problems(layout, transport)
    if current_context() is not None:
        problems.append("a context_parallel block is open already, and blocks cannot be nested")
    unfit = held.problems()
    problems += unfit or row_mask_problems(document_ids, held.length)
    refuse(problems)
    mask, places = _dealt(row_mask(document_ids, held.length), axis.size, layout, pad_values is not None)
    refuse(held.row_problems(mask.rows) if len(places) > 1 else [])
    context = ContextParallel(axis, mask, places, transport)
    context.transport_on(held.tensors[0].device)  # what is wrong with the choice shows here
    with held.cut(places[:, axis.rank]), context:
        yield context
    if not context.plans:
        warnings.warn(
            "no scaled_dot_product_attention was called in the context_parallel block: a model that computes attention "
            "itself (eager) or by another library saw this rank's tokens alone",
            stacklevel=3,
        )


def current_context() -> ContextParallel | None:
    """The context whose block is open here, also in autograd's threads; None outside."""
    probe = torch.empty(0)
    return handle_torch_function(current_context, (probe,)) if has_torch_function_unary(probe) else None


class ContextParallel(TorchFunctionMode):
    """What a block knows: who holds what, the plans that were made, and how a call is answered."""

    def __init__(self, axis: Axis, mask: RowMask, places: np.ndarray, transport: str | Transport) -> None:
        super().__init__()
        self.axis = axis
        self.mask = mask
        """Of the whole rows, padding included."""
        self.places = places
        """int64 `[1 or B, ranks, s]`: who holds which places of a row, in the order of the buffers."""
        self.plans: dict[tuple[int, bool], AttentionPlan] = {}
        """By batch rows and `is_causal`; made by the first call and used by all layers."""
        self._choice = transport
        self._positions_checked = False
        self._transports: dict[torch.device, Transport] = {}

    @property
    def local(self) -> np.ndarray:
        """int64 `[1 or B, s]`: the places that this rank holds."""
        return self.places[:, self.axis.rank]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Attention is taken over, backward runs with the mode on, everything else passes."""
        kwargs = kwargs or {}
        if func is _SDPA:
            return self.attend(*args, **kwargs)
        if func is current_context:
            return self
        if func in _ENGINE:
            return self._run_engine(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if "attention" in name or "attn" in name or name == "_transformer_encoder_layer_fwd":
            refuse(
                [
                    f"{name} would see this rank's tokens alone: in the block a model must call "
                    f"scaled_dot_product_attention itself (nn.MultiheadAttention and other attention functions do not)"
                ]
            )
        return func(*args, **kwargs)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """`scaled_dot_product_attention` over the ranks; `options` are its `scale` and `enable_gqa`."""
        kind = query.device.type
        if torch.is_autocast_enabled(kind):  # as torch's own call would
            to = torch.get_autocast_dtype(kind)
            query, key, value = (x if x.dtype == torch.float64 else x.to(to) for x in (query, key, value))
        ill_shaped = shape_problems(query, key, value, bool(options.get("enable_gqa", False)))
        refuse(option_problems(attn_mask, dropout_p) + (ill_shaped or self._token_problems(query, key, is_causal)))
        batch, _, tokens, width = query.shape
        plan = self._plan(batch, bool(is_causal))
        scale = options.get("scale")
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [B, H, s, D] -> [B * s, H, D]
        order, back = (self._order(plan, name, query.device) for name in ("order", "back"))
        if order is not None:
            q, k, v = (x.index_select(0, order) for x in (q, k, v))
        out = core_attention(
            q,
            k,
            v,
            transport=self.transport_on(query.device),
            plan=plan,
            scale=width**-0.5 if scale is None else float(scale),
        )
        out = out if back is None else out.index_select(0, back)
        return out.unflatten(0, (batch, tokens)).transpose(1, 2)  # [B * s, H, D] -> [B, H, s, D]

    def transport_on(self, device: torch.device) -> Transport:
        """The transport with a kernel for `device`, built once."""
        if device not in self._transports:
            inner = self._choice
            if isinstance(inner, str):
                inner = _named_transport(inner, self.axis, device)
            self._transports[device] = _Undisturbed(inner)
        return self._transports[device]

    def check_positions(self, position_ids: torch.Tensor | None) -> None:
        """Raise ValueError for int position ids `[B, s]` that cannot be those of the tokens here; once in a block."""
        if self._positions_checked or position_ids is None or position_ids.dim() != 2:
            return
        self._positions_checked = True
        problem = self.mask.misplaced(position_ids.cpu().numpy(), self.local)
        if problem:
            refuse(
                [
                    f"{problem}: put the position_ids of the whole sequence among the buffers, and where they restart "
                    f"give document_ids too (a Metadata as document_ids is taken as it is)"
                ]
            )

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
            number = np.argsort(cut)  # of the token at each place of this rank, ascending
            order = number[np.argsort(np.argsort(plan.local))]
            return order if name == "order" else np.argsort(order)

        index = plan.part(f"buffers {name}", build)
        return None if index is None else plan.on_device(f"buffers {name}", device, lambda: index)

    def _token_problems(self, query: torch.Tensor, key: torch.Tensor, is_causal: bool) -> list[str]:
        """What keeps a call of well-shaped tensors from being about this block's tokens."""
        held, whole = self.places.shape[2], self.mask.length
        found = length_problems(query.shape[2], key.shape[2], held, whole)
        if self.mask.rows not in (1, query.shape[0]):
            found.append(f"{query.shape[0]} batch rows, document_ids have {self.mask.rows}")
        if held == 1 < whole and not is_causal:
            found.append(
                "one token on a rank and is_causal=False: causal models ask for that when they decode one token, so it "
                "is not clear what is meant; use fewer ranks"
            )
        return found

    def _run_engine(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Backward with the mode on, for layers that are recomputed in it.

        A function that torch handed to a mode runs without it. Roots given as graph edges are not handed to modes.
        """
        outputs, *rest = args
        if func is torch.Tensor.backward:
            func, kwargs = torch.autograd.backward, {**kwargs}
            kwargs["grad_tensors"] = kwargs.pop("gradient", None)
        if func is torch.autograd.grad:
            rest[:1] = [_edges(rest[0])]
        elif kwargs.get("inputs") is not None:
            for x in _several(kwargs["inputs"]):
                if isinstance(x, torch.Tensor) and not x.is_leaf:
                    x.retain_grad()  # as backward does for inputs that are tensors
            kwargs = {**kwargs, "inputs": _edges(kwargs["inputs"])}
        with self:
            return func(_edges(outputs), *rest, **kwargs)


class _Undisturbed:
    """A transport whose own work neither this mode nor autocast sees."""

    def __init__(self, inner: Transport) -> None:
        self.name = inner.name
        self.inner = inner

    def forward(self, qkv: QKV, plan: AttentionPlan, scale: float) -> tuple[torch.Tensor, Tensors]:
        """See `Transport.forward`."""
        with torch.autocast(qkv[0].device.type, enabled=False):
            return self.inner.forward(qkv, plan, scale)  # the mode is off while it answers a call

    def backward(self, kept: Tensors, dout: torch.Tensor, plan: AttentionPlan, scale: float) -> QKV:
        """See `Transport.backward`."""
        with torch._C.DisableTorchFunction(), torch.autocast(dout.device.type, enabled=False):
            return self.inner.backward(kept, dout, plan, scale)


def _dealt(mask: RowMask, ranks: int, layout: str, padded: bool) -> tuple[RowMask, np.ndarray]:
    """The mask, filled up where the layout needs it and `padded` allows it, and who holds what of it."""
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


def _named_transport(name: str, axis: Axis, device: torch.device) -> Transport:
    try:
        return select_transport(name, "auto", axis, device)
    except ValueError as error:
        raise ValueError(
            f"context_parallel: {error}. A transport with options is built once, with select_transport({name!r}, "
            f"'auto', axis, device, TransportOptions(...)), and given as transport="
        ) from error


def _several(values: Any) -> tuple[Any, ...]:
    return (values,) if isinstance(values, torch.Tensor | GradientEdge) else tuple(values)


def _edges(values: Any) -> tuple[GradientEdge, ...]:
    return tuple(get_gradient_edge(x) if isinstance(x, torch.Tensor) else x for x in _several(values))
