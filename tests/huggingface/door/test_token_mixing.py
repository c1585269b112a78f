"""Which functions of torch mix the tokens of a rank, told by the length they run along, and which only look so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacp.core.distributed.collectives import gather_objects
from megacp.core.distributed.grid import single_axis
from megacp.huggingface.door.context import context_parallel
from tests.huggingface.door.test_context import TWO
from tests.ranks import grid, run_ranks

TOKENS, HERE = 48, 24
WIDE = torch.zeros(8, 1, 4)
"""A kernel of four tokens for each of eight channels."""

MIXING: dict[str, tuple[Callable[[], Any], str]] = {
    "causal, padded inside": (lambda: F.conv1d(torch.zeros(2, 8, HERE), WIDE, padding=3, groups=8), "conv1d on"),
    "causal, padded before": (lambda: F.conv1d(torch.zeros(2, 8, HERE + 3), WIDE, groups=8), "conv1d on"),
    "rows end to end": (lambda: F.conv1d(torch.zeros(1, 8, 2 * HERE), WIDE, groups=8), "conv1d on"),
    "a module": (lambda: torch.nn.Conv1d(8, 8, 3, padding=1)(torch.zeros(2, 8, HERE)), "conv1d on"),
    "in two dims": (lambda: F.conv2d(torch.zeros(2, 8, HERE, 5), torch.zeros(8, 8, 3, 1)), "conv2d on"),
    "recurrent": (lambda: torch.nn.LSTM(8, 8, batch_first=True)(torch.zeros(2, HERE, 8)), "lstm on"),
    "recurrent, gated": (lambda: torch.nn.GRU(8, 8)(torch.zeros(HERE, 2, 8)), "gru on"),
    "scores": (lambda: torch.zeros(2, 4, HERE, HERE).softmax(-1), r"a softmax over scores \(2, 4, 24, 24\)"),
    "scores of rows and heads": (lambda: F.softmax(torch.zeros(8, HERE, HERE), dim=-1), "a softmax over scores"),
}
PASSING: dict[str, Callable[[], Tensor]] = {
    "patches of an image": lambda: F.conv2d(torch.zeros(1, 3, HERE, HERE), torch.zeros(8, 3, 4, 4), stride=4),
    "patches of a video": lambda: F.conv3d(torch.zeros(1, 3, 2, HERE, HERE), torch.zeros(8, 3, 2, 4, 4)),
    "a kernel of one token": lambda: F.conv1d(torch.zeros(2, 8, HERE), torch.zeros(8, 8, 1)),
    "a sound": lambda: F.conv1d(torch.zeros(1, 8, 400), torch.zeros(8, 8, 3)),
    "letters of each word": lambda: F.conv1d(torch.zeros(2 * HERE, 8, 11), torch.zeros(8, 8, 3)),
    "experts of each token": lambda: torch.zeros(2 * HERE, 4).softmax(-1),
    "experts, rows apart": lambda: torch.zeros(2, HERE, 4).softmax(-1),
    "a vocabulary": lambda: F.log_softmax(torch.zeros(2, HERE, 61), dim=-1),
    "patches that see each other": lambda: torch.zeros(2, 4, 16, 16).softmax(-1),
}


def opened(axis: Any = TWO) -> Any:
    return context_parallel(axis, buffers=[torch.zeros(TOKENS)], buffer_seq_dims=[0])


@pytest.mark.parametrize("name", MIXING)
def test_what_runs_along_the_tokens_of_a_rank_is_refused(name: str) -> None:
    """Would catch gradients that are off by as much as themselves while the loss looks right."""
    call, said = MIXING[name]
    with pytest.raises(ValueError, match=said), opened():
        call()
    with pytest.raises(ValueError, match="no scaled_dot_product"), opened(single_axis("cp")):
        call()  # one rank has all the tokens


@pytest.mark.parametrize("name", PASSING)
def test_what_only_looks_so_passes(name: str) -> None:
    """Would catch a model that is refused because its images are embedded, or its tokens routed."""
    with pytest.raises(ValueError, match="no scaled_dot_product"), opened():
        PASSING[name]()


class Plain(torch.nn.Module):
    """A model of nobody's library: patches by a convolution, positions as it is told, torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = torch.nn.Conv2d(3, 8, 2, stride=2).double()
        self.places = torch.nn.Embedding(TOKENS, 8).double()

    def forward(self, pixels: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        places = torch.arange(pixels.shape[0]) if position_ids is None else position_ids[0]
        x = self.patches(pixels).flatten(1) + self.places(places)  # [s, 3, 2, 2] -> [s, 8]
        x = x[None, None]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask, is_causal=mask is None)


class SelectiveSSMLayer(torch.nn.Module):
    """Stands for a layer whose kernels torch does not see."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def plain_on_ranks(rank: int, world_size: int) -> dict[str, Any]:
    axis, net, said = grid(cp=2).cp, Plain(), {}
    scan = torch.nn.Sequential(SelectiveSSMLayer())
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(TOKENS, 3, 2, 2, dtype=torch.float64, generator=generator)

    def here(**call: Any) -> float:
        x, places = pixels.clone(), torch.arange(TOKENS)[None]
        with context_parallel(axis, buffers=[x, places], buffer_seq_dims=[0, 1], model=call.pop("model", None)):
            if call.pop("scan", False):
                scan(x)
            given = {"position_ids": places} if call.pop("told", True) else {}
            return net(x, **given, **call).sum().item()

    calls: dict[str, dict[str, Any]] = {
        "right": {},
        "right, watched": {"model": net},
        "forgotten": {"model": net, "told": False},
        "a scan": {"model": scan, "scan": True},
        "a scan, not watched": {"scan": True},
        "a mask on one rank": {"mask": torch.ones(HERE, HERE) if rank == 1 else None},
    }
    for name, call in calls.items():
        try:
            said[name] = sum(gather_objects(here(**call), axis))
        except ValueError as error:
            said[name] = str(error)
    said["hooks"] = len(net._forward_pre_hooks) + len(scan[0]._forward_pre_hooks)
    return said


def test_a_model_of_nobodys_library_is_watched_when_it_is_given() -> None:
    """Would catch positions and scans that only `model=` shows, hooks that stay, and a mask that one rank alone has."""
    net, generator = Plain(), torch.Generator().manual_seed(1)
    pixels = torch.randn(TOKENS, 3, 2, 2, dtype=torch.float64, generator=generator)
    want = net(pixels, torch.arange(TOKENS)[None]).sum().item()
    for said in run_ranks(plain_on_ranks, 2):
        assert said.pop("hooks") == 0
        for name in ("right", "right, watched", "a scan, not watched"):
            assert abs(said.pop(name) - want) <= 1e-11 * abs(want), name
        assert "Plain is given no position_ids" in said.pop("forgotten")
        assert "SelectiveSSMLayer carries a state along the sequence" in said.pop("a scan")
        assert "rank 1: attn_mask (24, 24) is of this rank's tokens alone" in said.pop("a mask on one rank")
        assert not said
