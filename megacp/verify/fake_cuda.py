"""A CUDA device that is not there: with it, FakeTensorMode has a device `cuda` on a CPU build of
torch.

`load_fake_cuda` builds fake_cuda.cpp once (g++, seconds) and loads it. It must come before the
first import of torch, which asks for its CUDA hooks once. Backward then runs in the thread of that
device, as it does on a GPU.
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
    """Make torch believe in the device. Raises ValueError where it cannot be built or torch has its
    own.
    """
    assert "torch" not in sys.modules, "torch was imported before the stand-in of its device"
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations, "torch is a requirement"
    home = Path(spec.submodule_search_locations[0])
    if (home / "lib" / "libtorch_cuda.so").exists():
        raise ValueError(f"--fake needs a CPU build of torch, {home} is one for CUDA")
    built_for = f"{files.sha256_of(SOURCE)[1]} {home} {version('torch')}".encode()

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
            told = getattr(error, "stderr", b"").decode().strip() or error
            raise ValueError(f"--fake builds {SOURCE.name} with g++: {told}") from error

    library = (
        kept_folder(f"fake_cuda_{hashlib.sha256(built_for).hexdigest()[:16]}", build) / LIBRARY
    )
    for path in (
        *(home / "lib" / f"lib{name}.so" for name in ("torch_global_deps", "c10", "torch_cpu")),
        library,
    ):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
