"""Classes of torch's operators, and the clock that a step runs under to tell their time.

Key property: every operator below autograd passes through one dispatch mode, which knows its shapes. So the same pass
that times the products also says which products to measure alone. Rejected: torch's profiler, which adds less to a
small operator but tells neither processor time nor strides.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS, ATTENTION, LOSS, SUMS = "products", "attention kernel", "loss", "gradient sums"
ELEMENTWISE, COPIES, EMBEDDING = "norm, rotary, activation, residual", "copies and zeroing", "embedding"
OPTIMIZER, COLLECTIVES, VIEWS = "optimizer and norm", "collectives, posting", "views and allocation"
UNKNOWN = "without a class"
CLASSES = (PRODUCTS, ATTENTION, ELEMENTWISE, LOSS, COPIES, SUMS, EMBEDDING, OPTIMIZER, COLLECTIVES, VIEWS, UNKNOWN)

_NAMES = {
    PRODUCTS: "mm addmm addmm_ bmm baddbmm mv addmv linear",
    ATTENTION: "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward",
    ELEMENTWISE: "add add_ sub sub_ mul mul_ div div_ neg pow sqrt rsqrt exp exp_ log silu silu_ silu_backward sigmoid "
    "sigmoid_ sum mean amax max maximum clamp clamp_ abs addcmul addcmul_ addcdiv_ square cos sin logaddexp logsumexp "
    "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data native_layer_norm _fused_rms_norm "
    "_fused_rms_norm_backward masked_fill masked_fill_ where eq ne ge gt le lt bitwise_or bitwise_and logical_or "
    "logical_and isfinite linalg_vector_norm lerp_ reciprocal tanh scatter_add scatter_add_ gather cumsum any all "
    "arange rsub isinf isnan logical_not bitwise_not",
    COPIES: "copy_ clone cat stack repeat _to_copy zero_ zeros zeros_like new_zeros fill_ full full_like ones "
    "ones_like new_full new_ones index index_select index_put index_put_ index_add index_add_ index_copy_ "
    "slice_backward select_backward constant_pad_nd scalar_tensor contiguous flip roll slice_scatter "
    "lift_fresh_copy _foreach_copy_",
    EMBEDDING: "embedding embedding_dense_backward",
    OPTIMIZER: "_fused_adamw_ _foreach_add_ _foreach_mul_ _foreach_norm _local_scalar_dense",
    VIEWS: "alias detach view _unsafe_view reshape _reshape_alias t transpose permute slice select split unbind expand "
    "split_with_sizes unsqueeze squeeze as_strided empty empty_like empty_strided new_empty new_empty_strided resize_ "
    "lift_fresh set_ unfold diagonal narrow chunk view_as movedim _record_function_enter_new _record_function_exit",
}
_CLASS_OF = {operator: name for name, operators in _NAMES.items() for operator in operators.split()}
_COLLECTIVE_SPACES = ("c10d", "_c10d_functional")
_INSIDE_OPTIMIZER = ("norm", "optimizer")
"""Phases in which elementwise work and copies are the optimizer's."""


@dataclass(frozen=True)
class Spec:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """One like it, with random values where it holds fractions."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        return made.normal_() if self.dtype.is_floating_point else made.zero_()


@dataclass(frozen=True)
class OperatorCall:
    """An operator with the specs of its arguments: enough to run it again, alone."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def alone(self, repeats: int = 5) -> float:
        """Processor seconds of one run with nothing else around, into memory that is there: the median."""
        args = [_value(arg) for arg in self.args]
        kwargs = {name: _value(value) for name, value in self.kwargs}
        result = self.operator(*args, **kwargs)
        run: Callable[..., Any] = self.operator
        if "out" not in kwargs and isinstance(result, Tensor) and "out" in self.operator.overloadpacket.overloads():
            run, kwargs = self.operator.overloadpacket.out, {**kwargs, "out": result}
        seconds = []
        for _ in range(repeats):
            begin = time.thread_time()
            run(*args, **kwargs)
            seconds.append(time.thread_time() - begin)
        return statistics.median(seconds)


def _spec(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Spec(tuple(value.shape), tuple(value.stride()), value.dtype)
    return tuple(map(_spec, value)) if isinstance(value, list | tuple) else value


def _value(spec: Any) -> Any:
    if isinstance(spec, Spec):
        return spec.tensor()
    return list(map(_value, spec)) if isinstance(spec, tuple) else spec


@dataclass(frozen=True)
class Landmarks:
    """What tells operators of one name apart."""

    vocabulary: int
    """Rows of the head on this rank: a tensor as wide belongs to the loss."""
    gradients: frozenset[int]
    """Addresses of the buffers in which gradients are summed: what writes there is the gradients'."""


def class_of(operator: Any, args: tuple[Any, ...], phase: str, landmarks: Landmarks) -> str:
    """The class of one call in a phase of the step."""
    space, _, name = operator.name().partition("::")
    if space in _COLLECTIVE_SPACES:
        return COLLECTIVES
    found = _CLASS_OF.get(name.partition(".")[0], UNKNOWN)
    if found not in (ELEMENTWISE, COPIES):
        return found
    if phase in _INSIDE_OPTIMIZER:
        return OPTIMIZER
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if any(tensor.shape and tensor.shape[-1] == landmarks.vocabulary for tensor in tensors):
        return LOSS
    if tensors and tensors[0].untyped_storage().data_ptr() in landmarks.gradients:
        return SUMS
    return found


class OperatorClock(TorchDispatchMode):
    """Processor seconds of this thread and calls, by class; and the calls of products and attention, to be repeated."""

    def __init__(self, landmarks: Landmarks, phase: Callable[[], str]) -> None:
        super().__init__()
        self._landmarks, self._phase = landmarks, phase
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.repeatable: dict[str, Counter[OperatorCall]] = {PRODUCTS: Counter(), ATTENTION: Counter()}
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = class_of(func, args, self._phase(), self._landmarks)
        begin = time.thread_time()
        result = func(*args, **kwargs)
        self.seconds[name] += time.thread_time() - begin
        self.calls[name] += 1
        if name in self.repeatable:
            self.repeatable[name][OperatorCall(func, _spec(args), tuple((k, _spec(v)) for k, v in kwargs.items()))] += 1
        elif name == UNKNOWN:
            self.unknown.add(func.name())
        return result
