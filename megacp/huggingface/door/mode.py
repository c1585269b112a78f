"""The mode of an open block: it answers `scaled_dot_product_attention` and refuses what mixes tokens in other ways.

Key property: a `TorchFunctionMode` travels into autograd's threads, so a layer that is recomputed in backward goes
through it as well. A reentrant checkpoint that is recomputed after the block, where no mode is on, is refused.
Rejected: replacing torch's functions for the whole process, which another model in it would meet.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from megacp.core.context_parallel.attention import core_attention, select_transport
from megacp.core.context_parallel.plan import AttentionPlan
from megacp.core.context_parallel.sizes import AttentionSizes
from megacp.core.context_parallel.transport import Tensors, Transport
from megacp.core.distributed.grid import Axis
from megacp.core.ops.kernel import QKV
from megacp.core.ops.kernels import auto_kernel, dtype_problem
from megacp.huggingface.door.agreement import Agreement
from megacp.huggingface.door.buffers import part_of
from megacp.huggingface.door.call import (
    dropout_problems,
    length_problems,
    mask_problems,
    refuse,
    shape_problems,
    stock_problems,
)
from megacp.huggingface.door.call_stack import (
    ModuleCall,
    called_by_stock_sdpa,
    guard_recomputation,
    stock_model_calls,
)
from megacp.huggingface.door.mask import BatchMask, in_batch
from megacp.huggingface.door.model_rules import (
    RotaryLength,
    call_problems,
    config_problems,
    positions_of,
    rotary_length,
    text_config,
)
from megacp.huggingface.door.token_mixing import mixing_problem

_SDPA = torch.nn.functional.scaled_dot_product_attention
_ENGINE = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


def current_context() -> ContextParallel | None:
    """The context of the open block, also in autograd's threads; None outside."""
    probe = torch.empty(0)
    return handle_torch_function(current_context, (probe,)) if has_torch_function_unary(probe) else None


@functools.cache
def _untraced_attend() -> Callable[..., torch.Tensor]:
    """`ContextParallel.attend`, at which a graph of torch.compile breaks: plans and messages are neither traced nor
    compiled by themselves. Made once, because torch keeps the frame that asks for it.
    """
    return torch.compiler.disable(ContextParallel.attend)


class ContextParallel(TorchFunctionMode):
    """State of a block: which rank holds which tokens, the plans that were made, and how a call is answered."""

    def __init__(
        self, axis: Axis, mask: BatchMask, places: np.ndarray, transport: str | Transport, length: int
    ) -> None:
        super().__init__()
        self.axis = axis
        self.mask = mask
        """Of the whole rows, padding included."""
        self.length = length
        """Tokens of a whole row, without that padding."""
        self.places = places
        """int64 `[1 or B, ranks, s]`: the places of a row that each rank holds, in the order of the buffers."""
        self.plans: dict[tuple[int, bool], AttentionPlan] = {}
        """By batch rows and `is_causal`; made by the first call and used by all layers."""
        self.language: torch.nn.Module | None = None
        """The part of the model that is called with this rank's tokens; None: the model itself is."""
        self.outside = 0
        """Above 0 while a part runs that has nothing to do with the sequence: then the block is not there."""
        self.agreement = Agreement(axis)
        """Tells all ranks what one rank has seen."""
        self._attend = _untraced_attend()
        self._choice = transport
        self._positions: deque[torch.Tensor] = deque(maxlen=8)
        self._configs: list[Any] = []
        self._transports: dict[tuple[torch.device, str], Transport] = {}

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
        return part_of(x, dim % x.dim(), self.local, pad)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Attention is taken over, backward runs with the mode on, everything else passes."""
        kwargs = kwargs or {}
        if self.outside:
            return None if func is current_context else func(*args, **kwargs)
        if func is _SDPA:
            return self._attend(self, *args, **kwargs)
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
        if self.axis.size > 1:
            problem = mixing_problem(func, args, kwargs, self.places.shape[2])
            refuse([problem] if problem else [])
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
        alike = dropout_problems(dropout_p) + _kernel_problems(self._choice, query.dtype)
        alike += ill_shaped or self._token_problems(query, key, is_causal)
        refuse(alike + mask_problems(attn_mask) if alike else [])
        self._ask_the_callers()
        self.agreement.settle(mask_problems(attn_mask), query.device)
        batch, _, tokens, width = query.shape
        plan = self._plan(batch, bool(is_causal))
        scale = options.get("scale")
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [B, H, s, D] -> [B * s, H, D]
        order, back = (self._order(plan, name, query.device) for name in ("order", "back"))
        v = torch.nn.functional.pad(v, (0, width - v.shape[-1]))  # narrower values, as of latent attention
        if order is not None:
            q, k, v = (x.index_select(0, order) for x in (q, k, v))
        out = core_attention(
            q,
            k,
            v,
            transport=self.transport_on(query.device, query.dtype),
            plan=plan,
            scale=width**-0.5 if scale is None else float(scale),
        )
        out = (out if back is None else out.index_select(0, back))[..., : value.shape[-1]]
        return out.unflatten(0, (batch, tokens)).transpose(1, 2)  # [B * s, H, D] -> [B, H, s, D]

    def transport_on(self, device: torch.device, dtype: torch.dtype) -> Transport:
        """The transport for tensors of `dtype` on `device`: the caller's, or one that is built once for each kernel."""
        kernel = auto_kernel(device.type, dtype)
        if (device, kernel) not in self._transports:
            inner = self._choice
            if isinstance(inner, str):
                inner = _named_transport(inner, kernel, self.axis, device)
            self._transports[device, kernel] = _OutsideMode(inner)
        return self._transports[device, kernel]

    def check_model_calls(self, calls: list[ModuleCall]) -> None:
        """Refuse calls of transformers models, outermost first, that would not see the whole sequence."""
        if self.axis.size > 1 and calls:
            inner = [number for number, call in enumerate(calls) if call.module is self.language]
            refuse(call_problems(calls, self.places.shape[2], inner[0] if inner else 0))
            calls = calls[inner[0] :] if inner else calls
            config = text_config(calls[0].module)
            self.check_config(config)
            self.check_positions(positions_of(calls), rotary_length(config))

    def check_config(self, config: Any) -> None:
        """Refuse a text config with layers that this block does not shard; each config once."""
        if self.axis.size > 1 and not any(config is known for known in self._configs):
            # padding is behind the row, but `zigzag_document` puts it between the tokens that a model counts here
            refuse(config_problems(config, max(self.length, self.places.shape[2])))
            self._configs.append(config)

    def check_positions(self, position_ids: torch.Tensor | None, rotary: RotaryLength | None = None) -> None:
        """Note what is wrong with the int position ids `[B, s]` or `[axes, B, s]` of the tokens here.

        `rotary`: the rope of the model, where its angles depend on the longest position. All ranks hear of a note in
        the next attention call. A tensor that was checked before is skipped.
        """
        if position_ids is None or position_ids.shape[-1] != self.places.shape[2] or position_ids.is_floating_point():
            return
        if any(_same_memory(position_ids, known) for known in self._positions):
            return
        self._positions.append(position_ids)  # held, so that no other tensor takes its memory
        values = np.atleast_2d(position_ids.detach().cpu().numpy())
        images = self.language is not None and values.ndim == 3
        problem = self.mask.misplaced(values.reshape(-1, *values.shape[-2:]), self.local, images)
        number = rotary.number(int(values.max(initial=0)) + 1) if rotary else 0
        advice = (
            "put the position_ids of the whole sequence among the buffers, and where they restart give document_ids "
            "too (a Metadata as document_ids is taken as it is)"
        )
        self.agreement.note([f"{problem}: {advice}"] if problem else [], number)

    def _ask_the_callers(self) -> None:
        """Check the functions around this call; a layer that is recomputed was checked in its forward."""
        if self.axis.size == 1:
            return
        if called_by_stock_sdpa():
            refuse(stock_problems())
        self.check_model_calls(stock_model_calls())
        if not torch.is_grad_enabled():
            guard_recomputation(self._only_inside)

    def _only_inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, refused where this block is not open."""

        def guarded(*args: Any) -> Any:
            if current_context() is not self:
                refuse(
                    [
                        "a layer under a reentrant checkpoint is recomputed after its block was left, where it sees "
                        "this rank's tokens alone: call backward inside the block"
                    ]
                )
            return function(*args)

        return guarded

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

    def _token_problems(self, query: torch.Tensor, key: torch.Tensor, is_causal: bool) -> list[str]:
        """Why a call of well-shaped tensors is not about this block's tokens."""
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


class _OutsideMode:
    """A transport that runs outside of this mode and of autocast."""

    def __init__(self, inner: Transport) -> None:
        self.name = inner.name
        self.inner = inner

    def prepare(self, plan: AttentionPlan, sizes: AttentionSizes) -> None:
        """See `Transport.prepare`."""
        self.inner.prepare(plan, sizes)

    def forward(self, qkv: QKV, plan: AttentionPlan, scale: float) -> tuple[torch.Tensor, Tensors]:
        """See `Transport.forward`."""
        with torch.autocast(qkv[0].device.type, enabled=False):
            return self.inner.forward(qkv, plan, scale)  # the mode is off while it answers a call

    def backward(self, kept: Tensors, dout: torch.Tensor, plan: AttentionPlan, scale: float) -> QKV:
        """See `Transport.backward`."""
        if torch.is_grad_enabled():
            refuse(["backward with create_graph=True: attention over ranks cannot be differentiated twice"])
        with torch._C.DisableTorchFunction(), torch.autocast(dout.device.type, enabled=False):
            return self.inner.backward(kept, dout, plan, scale)


def _kernel_problems(transport: str | Transport, dtype: torch.dtype) -> list[str]:
    """Why the kernel of a transport that the caller built cannot take tensors of `dtype`."""
    inner: Any = transport
    while hasattr(inner, "inner"):  # of a hierarchy
        inner = inner.inner
    kernel = getattr(inner, "kernel", None)
    problem = None if kernel is None else dtype_problem(kernel, dtype)
    return [problem] if problem else []


def _named_transport(name: str, kernel: str, axis: Axis, device: torch.device) -> Transport:
    try:
        return select_transport(name, kernel, axis, device)
    except ValueError as error:
        raise ValueError(
            f"context_parallel: {error}. A transport with options is built once, with select_transport({name!r}, "
            f"'auto', axis, device, TransportOptions(...)), and given as transport="
        ) from error


def _several(values: Any) -> tuple[Any, ...]:
    return (values,) if isinstance(values, torch.Tensor | GradientEdge) else tuple(values)


def _edges(values: Any) -> tuple[GradientEdge, ...]:
    return tuple(get_gradient_edge(x) if isinstance(x, torch.Tensor) else x for x in _several(values))


def _same_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape
