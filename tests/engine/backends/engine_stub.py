"""Transformer Engine's Python files on CPU torch, without its extension and compilers.

The extension and the compilers are replaced. Everything above the extension is the real package, in
the release of the extra `gpu` or in an older release. Each wheel is in a separate folder (`guests`
in the virtual environment, created by the Makefile), because megatron-core breaks if it can import
only the wheel.
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
"""Releases in the folders of the environment.

All tests use the newest one, except those with `needs_release` or an explicit release.
"""
COMPILERS = ("einops", "onnx", "onnxscript", "triton", "triton.language", "triton.language.core")
COMPILERS += ("triton.language.standard",)
CUDNN = 91900
AT_IMPORT = {"NVTE_PROJECT_BUILDING": "1", "NVTE_TORCH_COMPILE": "0"}
"""Disable the search for shared libraries and the compilation of pointwise functions."""


def folder(release: str) -> Path:
    """Return the folder with the files of a release."""
    return Path(sys.prefix) / ("guests" if release == NEWEST else f"guests-{release}")


def needs_release(release: str) -> pytest.MarkDecorator:
    """Skip a test if the files of a release are missing."""
    missing = not (folder(release) / "transformer_engine").is_dir()
    return pytest.mark.skipif(
        missing, reason=f"needs Transformer Engine's Python files in {folder(release)}: make setup"
    )


needs_engine = needs_release(NEWEST)


class Anything:
    """Placeholder for any object that a kernel's source uses at definition.

    Decorators return the function.
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
    """A package that exists only while Transformer Engine is imported."""

    __path__: list[str] = []
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Extension(types.ModuleType):
    """`transformer_engine_torch`: enums have their values, and functions raise when they are
    called.
    """

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
    """Provide placeholders for missing compilers, and disable the search for shared libraries."""
    import torch._dynamo  # import torch's compiler before it can find the placeholder of triton
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
    """Make `transformer_engine.pytorch` importable inside this context; elsewhere it is not
    installed.
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
    """A CUDA stream or event; on the CPU everything happens in order anyway."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Accept a device (streams) or a timing flag (events)."""

    def _nothing(self, *args: Any) -> None:
        """Ignore waiting and recording."""

    wait_stream = wait_event = record_event = record = synchronize = wait = _nothing


@contextmanager
def claimed_cuda() -> Iterator[None]:
    """Let CPU tensors claim to be on CUDA, with a nonexistent Hopper GPU and streams without
    effect.
    """
    import contextlib

    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")  # the device of new tensors
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
