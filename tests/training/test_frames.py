"""How far a reader steps from the loop to the attention kernel."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import megacp
from megacp.core.ops.tile_kernels import TileKernel
from megacp.train import main
from tests.training.runs import TINY

MOST_FRAMES = 14


def own_frames() -> list[str]:
    """Functions of the package on the stack, from `Trainer.run` to the caller's caller."""
    frame, names = sys._getframe(2), list[str]()
    while frame is not None:
        if Path(frame.f_code.co_filename).is_relative_to(Path(megacp.__file__).parent):
            names.append(frame.f_code.co_qualname)
        frame = frame.f_back  # type: ignore[assignment]
    names.reverse()
    return names[names.index("Trainer.run") :]


def test_few_frames_lie_between_the_loop_and_the_attention_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch one more layer of forwarding on the way that every reader goes."""
    found: list[list[str]] = []
    real = TileKernel.attend

    def attend(self: TileKernel, *rest: object) -> None:
        found.append(own_frames())
        real(self, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(TileKernel, "attend", attend)
    assert main([*TINY, "--dtype", "float32", "--train-iters", "1", "--lr-warmup-iters", "0"]) == 0
    frames = [*found[0], "TileKernel.attend"]
    assert len(frames) <= MOST_FRAMES, frames
