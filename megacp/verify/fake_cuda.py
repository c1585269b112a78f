"""Simulates a CUDA device, so that FakeTensorMode supports `cuda` in a CPU build of torch.

`load_fake_cuda` compiles fake_cuda.cpp once with g++ and loads it. Call it before the first import
of torch, because torch looks up its CUDA hooks only once. Autograd then runs the backward pass in
the device's thread, as on a GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from megacp.storage import files
from megacp.storage.cache import kept_folder

SOURCE = Path(__file__).with_suffix(".cpp")
LIBRARY = "fake_cuda.so"


def load_fake_cuda() -> None:
    """Register the simulated device with torch.

    Raise ValueError if g++ cannot build it, or if torch is a CUDA build.
    """
    assert "torch" not in sys.modules, "load the fake device before you import torch"
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations, "torch is a requirement"
    home = Path(spec.submodule_search_locations[0])
    if (home / "lib" / "libtorch_cuda.so").exists():
        raise ValueError(f"--fake requires a CPU build of torch, but {home} is a CUDA build")
    # A change to the source, or to the path or version of torch, requires a new build.
    built_for = f"{files.sha256_of(SOURCE)[1]} {home} {version('torch')}".encode()

    # `kept_folder` calls this only if the cache has no library for `built_for`.
    def build(folder: Path) -> None:
        headers = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
        command = [
            "g++",
            "-shared",
            "-fPIC",
            "-O1",
            "-std=c++20",
            *headers,
            str(SOURCE),
            "-o",
            str(folder / LIBRARY),
        ]
        try:
            subprocess.run(
                [*command, f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu"],
                check=True,
                capture_output=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", b"").decode().strip() or error
            raise ValueError(f"--fake could not build {SOURCE.name} with g++: {reason}") from error

    library = (
        kept_folder(f"fake_cuda_{hashlib.sha256(built_for).hexdigest()[:16]}", build) / LIBRARY
    )
    # torch's libraries come first, because fake_cuda.so needs their symbols.
    for path in (
        *(home / "lib" / f"lib{name}.so" for name in ("torch_global_deps", "c10", "torch_cpu")),
        library,
    ):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
