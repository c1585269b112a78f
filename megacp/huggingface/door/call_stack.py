"""What the stack says about an attention call: its caller, the model around it, a checkpoint around it.

Key property: a call carries tensors only. The functions further out know the reasons to refuse it: forgotten
positions, a window without a mask, a layer that will be recomputed. They are read there without a hook or an argument.
Compiled code hides its stack; there `context_parallel(model=...)` asks the model itself. Rejected: patching
transformers, which other models would meet.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch

_CALL = torch.nn.Module._call_impl.__code__
"""The frame of a module that is called; its locals are `self, args, kwargs`."""


class ModuleCall(NamedTuple):
    """A module and what it was called with."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def is_stock_model(module: torch.nn.Module) -> bool:
    """Whether this is a whole model of a class that transformers defines (or downloaded beside a checkpoint)."""
    kind = type(module)
    package = kind.__module__.partition(".")[0]
    return package in ("transformers", "transformers_modules") and any(
        base.__name__ == "PreTrainedModel" for base in kind.__mro__
    )


def stock_model_calls() -> list[ModuleCall]:
    """The models of transformers that are being called here, outermost first."""
    found = []
    for frame in _outward():
        if frame.f_code is _CALL:
            held = frame.f_locals
            if is_stock_model(held["self"]):
                found.append(ModuleCall(held["self"], held["args"], held["kwargs"]))
    return found[::-1]


def called_by_stock_sdpa() -> bool:
    """Whether `attn_implementation="sdpa"` of transformers made this call."""
    for frame in _outward():
        if frame.f_code is _CALL:
            return False
        if frame.f_code.co_name == "sdpa_attention_forward":
            return str(frame.f_globals.get("__name__", "")).startswith("transformers.")
    return False


def guard_recomputation(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the functions that reentrant checkpoints around this call will run again in backward, each once.

    Such a checkpoint keeps its function as `ctx.run_function` (torch's, and others modelled on it).
    """
    for frame in _outward():
        if "run_function" in frame.f_code.co_varnames and frame.f_code.co_name == "forward":
            ctx = frame.f_locals.get("ctx")
            again = getattr(ctx, "run_function", None)
            if ctx is not None and again is not None and not getattr(again, "guarded", False):
                ctx.run_function = wrap(again)
                ctx.run_function.guarded = True


def _outward() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
