"""Transformer Engine's own Python files under CPU torch: its extension module and its compilers are
stand-ins.

Everything above the extension is the real package of the release that the extra `gpu` names, or of
an older one. Each wheel stands in a folder of its own (`guests` in the virtual environment, made by
the Makefile), because megatron-core breaks where it can import the wheel alone.
"""

from __future__ import annotations

import enum
import functools
import importlib
import json
import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NEWEST, OLDER = "2.20", ("2.10", "2.14", "2.18")
"""Releases whose files stand beside the environment; all but `needs_release` and `engine` mean the
newest.
"""
COMPILERS = ("einops", "onnx", "onnxscript", "triton", "triton.language", "triton.language.core")
COMPILERS += ("triton.language.standard",)
CUDNN = 91900
AT_IMPORT = {"NVTE_PROJECT_BUILDING": "1", "NVTE_TORCH_COMPILE": "0"}
"""No search for shared libraries, no compiled pointwise functions."""


def folder(release: str) -> Path:
    """Where the files of a release stand."""
    return Path(sys.prefix) / ("guests" if release == NEWEST else f"guests-{release}")


def needs_release(release: str) -> pytest.MarkDecorator:
    """Skips a test where the files of a release are not."""
    missing = not (folder(release) / "transformer_engine").is_dir()
    return pytest.mark.skipif(
        missing, reason=f"needs Transformer Engine's Python files in {folder(release)}: make setup"
    )


needs_engine = needs_release(NEWEST)


class Anything:
    """Whatever a kernel's source asks for while it is only defined: decorators give their function
    back.
    """

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not options else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: Any) -> Any:
        return self


class Compiler(types.ModuleType):
    """A package that is there while Transformer Engine is imported."""

    __path__: list[str] = []
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Extension(types.ModuleType):
    """`transformer_engine_torch`: enums as they are, functions that raise when they are called."""

    __spec__ = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            value: Any = type(name, (), {})
        else:

            def value(*args: Any, **options: Any) -> Any:
                raise RuntimeError(f"transformer_engine_torch.{name} was called on the CPU")

        setattr(self, name, value)
        return value


@contextmanager
def _stand_ins(files: Path) -> Iterator[None]:
    """The compilers that this environment lacks, and no search for shared libraries."""
    import torch._dynamo  # before a stand-in of triton could mislead it
    import torch._inductor.runtime.hints  # noqa: F401

    missing = [name for name in COMPILERS if name not in sys.modules]
    sys.modules.update({name: Compiler(name) for name in missing})
    before = {name: os.environ.get(name) for name in AT_IMPORT}
    os.environ.update(AT_IMPORT)
    sys.path.insert(0, str(files))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.path.remove(str(files))
        for name in missing:
            del sys.modules[name]
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@functools.cache
def _modules(release: str) -> dict[str, types.ModuleType]:
    extension = Extension("transformer_engine_torch")
    for name, members in json.loads(
        Path(__file__).with_name("engine_enums.json").read_text()
    ).items():
        dropped = (
            {"NVTE_F16_max512_seqlen": 0}
            if name == "NVTE_Fused_Attn_Backend" and release in OLDER
            else {}
        )
        setattr(extension, name, enum.IntEnum(name, members | dropped))
    extension.get_cudnn_version = lambda: CUDNN  # type: ignore[attr-defined]
    before = set(sys.modules)
    with _stand_ins(folder(release)):
        sys.modules["transformer_engine_torch"] = extension
        common = importlib.import_module("transformer_engine.common")
        common.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]
        importlib.import_module("transformer_engine.pytorch")
    names = [
        name for name in sys.modules if name.startswith("transformer_engine") and name not in before
    ]
    return {name: sys.modules.pop(name) for name in names}


@contextmanager
def engine(release: str = NEWEST) -> Iterator[types.ModuleType]:
    """`transformer_engine.pytorch`, importable inside of the context alone: elsewhere the package
    is not installed.
    """
    modules = _modules(release)
    sys.modules.update(modules)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS.*")
            yield modules["transformer_engine.pytorch"]
    finally:
        for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
            modules[name] = sys.modules.pop(name)


class NoStream:
    """A CUDA stream or event where everything happens in order anyway."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Streams take a device, events a timing flag."""

    def _nothing(self, *args: Any) -> None:
        """Waiting and recording."""

    wait_stream = wait_event = record_event = record = synchronize = wait = _nothing


@contextmanager
def claimed_cuda() -> Iterator[None]:
    """CPU tensors that say they are on CUDA, a Hopper GPU that does not exist, streams that do
    nothing.
    """
    import contextlib

    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")  # where new tensors go
        patch.setattr(torch.cuda, "Stream", NoStream)
        patch.setattr(torch.cuda, "Event", NoStream)
        patch.setattr(torch.cuda, "current_stream", NoStream)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: types.SimpleNamespace(major=9, minor=0),
        )
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        yield
