"""Attention calls of other libraries' models over a sharded sequence equal dense attention, or are
refused.
"""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megacp.attention.context_parallel.attention import select_transport
from megacp.attention.context_parallel.layout import LAYOUTS
from megacp.attention.context_parallel.transport import DenseAttention
from megacp.attention.context_parallel.transports import TRANSPORTS
from megacp.attention.ops.flex import FlexKernel
from megacp.attention.ops.mask import Metadata
from megacp.attention.ops.tile_kernels import MathKernel, dense_attention
from megacp.distributed.grid import Axis, axis_of_mesh, single_axis
from megacp.integrations.context import context_parallel, current_context
from megacp.integrations.loop import shift_labels, sum_gradients
from megacp.integrations.mask import batch_mask, documents_of, trees_of
from megacp.integrations.transformers import attention
from tests.ranks import grid, run_ranks
from tests.reference.attention import visible
from tests.reference.packs import random_batch

BATCH, HEADS, GROUPS, DIM = 2, 4, 2, 8
CPU = torch.device("cpu")
TWO = Axis("cp", 2, 1, (0, 1), group=object())  # type: ignore[arg-type]
"""An axis for refusals, on which no message is sent."""


def no_attention() -> Any:
    """Expect the error of a block in which no attention was called."""
    return pytest.raises(ValueError, match="no attention was called")


def axis_of(size: int) -> Axis:
    """Return the axis over `size` (2 or 4) ranks in a world of four."""
    return grid(cp=size, dp=4 // size).cp


@functools.cache
def transport_on(name: str, axis: Axis) -> Any:
    """Return the name of a transport, or a built transport if it needs process groups."""
    if name != "a2a+p2p":
        return name
    return select_transport(name, "auto", axis, CPU, (2, axis.size // 2))


def row_metadata(mask: str, tokens: int) -> list[Metadata]:
    """Return a mask for each batch row, drawn at random."""
    kinds: dict[str, dict[str, Any]] = {
        "one document": {"documents": 1},
        "documents": {"documents": 3, "padding": True},
        "documents, all rows alike": {"documents": 3},
        "branches and spans": {"documents": 2, "branches": True, "images": True, "padding": True},
    }
    # frames see each other across text, so the plan sorts tokens by type
    if mask == "video":
        span = np.where(np.arange(tokens) % 5 < 3, 1, 0)
        return [Metadata.of_documents(np.zeros(tokens, int), span=span)] * BATCH
    alike = mask in ("one document", "documents, all rows alike")
    rng = np.random.default_rng(tokens + len(mask))
    batches = [random_batch(rng, tokens, **kinds[mask]) for _ in range(1 if alike else BATCH)]
    rows = [Metadata.of_row(b.leave, b.span) for b in batches]
    return rows * (BATCH // len(rows))


def as_argument(mask: str, rows: list[Metadata]) -> Tensor | Metadata | None:
    """Return the mask in the form in which a caller passes it.

    The numbers of documents, branches and spans are large and decrease along the row.
    """
    if mask == "one document":
        return None
    documents = np.stack(
        [
            np.where(row.document >= 0, 10**12 - 7 * row.document.astype(np.int64), -1)
            for row in rows
        ]
    )
    if mask == "documents, all rows alike":
        return torch.from_numpy(documents[0])
    if mask == "documents":
        return torch.from_numpy(documents)
    if mask == "video":
        return rows[0]
    leave = np.concatenate(
        [np.where(row.leave > 0, row.leave + i * len(row), 0) for i, row in enumerate(rows)]
    )
    span = np.concatenate(
        [
            np.where(row.span > 0, 10**15 - 7 * row.span.astype(np.int64) - 10**12 * i, 0)
            for i, row in enumerate(rows)
        ]
    )
    return Metadata.of_row(leave, span)


def tensors(tokens: int) -> list[Tensor]:
    """Return q, k, v and the gradient of the output, `[B, H, S, D]`."""
    g = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(BATCH, heads, tokens, DIM, generator=g, dtype=torch.float64)
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    ]


@functools.cache
def dense(mask: str, tokens: int, causal: bool) -> list[Tensor]:
    """Return out, dq, dk and dv, computed by autograd with a mask of all pairs."""
    *inputs, dout = tensors(tokens)
    leaves = [x.requires_grad_() for x in inputs]
    outs = []
    for number, row in enumerate(row_metadata(mask, tokens)):
        if not causal:  # drop the causal order from the mask
            row = Metadata.of_row(row.leave, row.leave)
        seen = visible(row, row)
        q, k, v = (x[number].transpose(0, 1) for x in leaves)  # [H, S, D] -> [S, H, D]
        outs.append(dense_attention(q, k, v, torch.from_numpy(seen), 0.3).transpose(0, 1))
    out = torch.stack(outs)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


Case = tuple[int, str, str, str, int, bool]
"""Number of ranks, transport, layout, mask, number of tokens, and whether the mask is causal."""


def attend_on_ranks(rank: int, world_size: int, cases: list[Case]) -> list[Any]:
    found = []
    for size, transport, layout, mask, tokens, causal in cases:
        axis, whole = axis_of(size), tensors(tokens)
        with context_parallel(
            axis,
            buffers=whole,
            buffer_seq_dims=[2, -2, 2, 2],
            pad_values=[0.5] * 4,
            document_ids=as_argument(mask, row_metadata(mask, tokens)),
            transport=transport_on(transport, axis),
            layout=layout,
        ) as context:
            *inputs, dout = whole
            leaves = [x.clone().requires_grad_() for x in inputs]
            out = context.attend(*leaves, causal, 0.3)
            found.append((context.local, [out.detach(), *torch.autograd.grad(out, leaves, dout)]))
        assert all(torch.equal(x, y) for x, y in zip(whole, tensors(tokens), strict=True))
    return found


def all_cases() -> list[Case]:
    masks = [
        "one document",
        "documents",
        "documents, all rows alike",
        "branches and spans",
        "video",
    ]
    cases: list[Case] = []
    for size in (2, 4):
        # a2a+p2p needs 2 x 2 ranks
        names = itertools.cycle(name for name in TRANSPORTS if size == 4 or name != "a2a+p2p")
        for number, (layout, mask) in enumerate(itertools.product(LAYOUTS, masks)):
            tokens = 24 - number % 2  # 23 tokens need padding
            cases.append((size, next(names), layout, mask, tokens, number % 3 > 0))
    return cases


@pytest.mark.slow
def test_attention_in_a_block_is_dense_attention_for_every_layout_transport_and_mask() -> None:
    """The tolerance is for float64 sums of up to 24 terms."""
    cases = all_cases()
    results = run_ranks(attend_on_ranks, 4, cases)
    for number, case in enumerate(cases):
        parts = [result[number] for result in results[: case[0]]]
        expected = dense(case[3], case[4], case[5])
        for position, want in enumerate(expected):
            found = torch.full((*want.shape[:2], 64, DIM), torch.nan, dtype=torch.float64)
            for local, values in parts:
                for row in range(BATCH):
                    found[row][:, local[min(row, len(local) - 1)]] = values[position][row]
            tokens = case[4]
            assert (found[:, :, :tokens] - want).abs().max() <= 1e-12 * want.abs().max(), (
                case,
                position,
            )
            if position == 0:  # positions past the end are padding and see nothing
                assert torch.nan_to_num(found[:, :, tokens:]).abs().max() == 0, case


@pytest.mark.parametrize("error", [False, True])
def test_buffers_are_cut_in_place_and_come_back_as_the_same_memory(error: bool) -> None:
    """Also check views that share memory, and a block that raises an exception."""
    rows = torch.arange(2 * 11).view(2, 11)
    tokens, labels = rows[:, :-1], rows[:, 1:]
    positions, mask = torch.arange(10), torch.ones(1, 3, 10, dtype=torch.bool)
    buffers = [tokens, labels, positions, mask]
    before = [(x.data_ptr(), x.clone()) for x in buffers]
    block = context_parallel(
        TWO,
        buffers=buffers,
        buffer_seq_dims=[1, -1, 0, 2],
        pad_values=[0, -100, 0, False],
        no_restore_buffers={positions},
        document_ids=torch.tensor([0] * 9 + [-1]),
    )
    with no_attention() if not error else pytest.raises(KeyError), block as context:
        assert context.local.tolist() == [[3, 4, 5, 6, 7, 8]]  # rank 1 of zigzag on 12 tokens
        assert tokens.tolist() == [[3, 4, 5, 6, 7, 8], [14, 15, 16, 17, 18, 19]]
        assert labels.tolist() == [[4, 5, 6, 7, 8, 9], [15, 16, 17, 18, 19, 20]]
        assert mask.shape == (1, 3, 6) and mask.all() and current_context() is context
        if error:
            raise KeyError
    assert current_context() is None and torch.equal(rows, torch.arange(22).view(2, 11))
    assert positions.tolist() == [3, 4, 5, 6, 7, 8]
    for x, (memory, values) in zip(buffers, before, strict=True):
        assert x is positions or (x.data_ptr() == memory and torch.equal(x, values))


def test_rows_are_filled_up_and_those_of_different_documents_are_dealt_each_in_its_own_way() -> (
    None
):
    first = Axis("cp", 2, 0, (0, 1), group=object())  # type: ignore[arg-type]
    short, ones = torch.arange(10), torch.ones(2, 10)
    with no_attention():
        with context_parallel(
            first, buffers=[short, ones], buffer_seq_dims=[0, 1], pad_values=[-100, 0.25]
        ):
            assert short.tolist() == [0, 1, 2, 9, -100, -100]
            assert ones.tolist() == [[1, 1, 1, 1, 0.25, 0.25]] * 2
    documents = torch.stack([torch.zeros(16).long(), torch.arange(16) // 3])
    x, y = torch.arange(32).view(2, 16), torch.arange(32.0).view(2, 16)[..., None]
    block = context_parallel(
        TWO, buffers=[x, y], buffer_seq_dims=[1, 1], document_ids=documents, layout="balanced"
    )
    with no_attention(), block as context:
        assert context.local.shape == (2, 8) and not np.array_equal(
            context.local[0], context.local[1]
        )
        assert np.array_equal(x.numpy(), context.local + [[0], [16]]) and torch.equal(
            x, y[..., 0].long()
        )


ROWS = torch.stack([torch.arange(48) // 20, torch.arange(48) // 7])
ZEROS = np.zeros(50, np.int64)


@pytest.mark.parametrize(
    ("message", "given"),
    [
        ("layout spiral", {"layout": "spiral"}),
        ("transport p3p", {"transport": "p3p"}),
        (r"a2a\+p2p", {"transport": "a2a+p2p"}),
        ("give buffers", {"buffers": [], "buffer_seq_dims": []}),
        ("one buffer_seq_dims", {"buffer_seq_dims": [1, 0]}),
        ("and pad_values", {"pad_values": [0, 0]}),
        ("requires grad", {"buffers": [torch.zeros(1, 48, requires_grad=True)]}),
        ("48, 47", {"buffers": [torch.zeros(1, 48), torch.zeros(47)], "buffer_seq_dims": [1, 0]}),
        ("46 tokens over 2 ranks, the next valid length is 48", {"buffers": [torch.zeros(1, 46)]}),
        (
            "the next valid length is 56",
            {"document_ids": torch.arange(48) // 7, "layout": "zigzag_document"},
        ),
        ("S = 48", {"document_ids": torch.zeros(2, 24).int()}),
        ("must be ints", {"document_ids": torch.zeros(48)}),
        ("a Metadata of", {"document_ids": Metadata.of_documents(np.zeros(50, int))}),
        (
            "in order",
            {"document_ids": Metadata.of_documents(np.zeros(48, int)).take(np.arange(48)[::-1])},
        ),
        ("the 2 batch rows", {"document_ids": ROWS, "layout": "balanced"}),
    ],
)
def test_arguments_that_do_not_fit_are_refused(message: str, given: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"buffers": [torch.zeros(1, 48)], "buffer_seq_dims": [1], **given}
    with pytest.raises(ValueError, match=message), context_parallel(TWO, **arguments):
        pass


def test_calls_that_cannot_be_taken_over_are_refused() -> None:
    documents = torch.zeros(2, 48, dtype=torch.int64)
    block = context_parallel(
        TWO, buffers=[torch.zeros(48)], buffer_seq_dims=[0], document_ids=documents
    )
    with no_attention(), block as context:
        for rows, queries, message in (
            (2, 24, "24 queries and 48 keys"),
            (2, 48, "48 keys, but the buffers have 24 of 48"),
            (3, 24, "3 batch rows, but document_ids have 2"),
        ):
            keys = torch.zeros(rows, 4, 24 if rows == 3 else 48, 8)
            with pytest.raises(ValueError, match=message):
                context.attend(torch.zeros(rows, 4, queries, 8), keys, keys, True)
        context.transport = DenseAttention(single_axis("cp"))
        with pytest.raises(
            ValueError, match="the model has a soft cap of 50: give transport by its name"
        ):
            context.transport_on(CPU, torch.float32, 50.0)
        with pytest.raises(ValueError, match="cannot be nested"):
            context_parallel(TWO, buffers=[documents], buffer_seq_dims=[1]).__enter__()


def test_on_cuda_a_float64_model_gets_the_kernel_that_adds_up_in_float64() -> None:
    """FlexAttention accumulates in float32."""
    cuda = torch.device("cuda")
    with (
        no_attention(),
        context_parallel(TWO, buffers=[torch.zeros(48)], buffer_seq_dims=[0]) as context,
    ):
        kernels = [
            context.transport_on(cuda, dtype).kernel for dtype in (torch.float64, torch.bfloat16)
        ]
        assert [type(kernel) for kernel in kernels] == [MathKernel, FlexKernel]
        assert context.transport_on(cuda, torch.float32) is context.transport_on(
            cuda, torch.bfloat16
        )


def test_one_rank_needs_no_process_group_and_follows_autocast() -> None:
    q = torch.randn(2, 4, 13, 8)
    with context_parallel(
        single_axis("cp"), buffers=[q], buffer_seq_dims=[2], transport="a2a+p2p"
    ) as context:
        out = context.attend(q, q, q, True)
        with torch.autocast("cpu", torch.bfloat16):
            half = context.attend(q, q.bfloat16(), q, True)
    # float32 sums of up to 13 terms; inputs and output are rounded once to 2^-9
    torch.testing.assert_close(
        out, F.scaled_dot_product_attention(q, q, q, is_causal=True), rtol=1e-5, atol=1e-5
    )
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), out, rtol=2e-2, atol=2e-2)


def test_labels_are_shifted_within_documents_before_the_cut() -> None:
    labels = torch.arange(10, 18)
    assert shift_labels(labels).tolist() == [11, 12, 13, 14, 15, 16, 17, -100]
    documents = torch.tensor([0, 0, 0, 5, 5, -1, -1, 2])
    want = [11, 12, -1, 14, -1, -1, -1, -1]
    both = torch.stack([labels, labels])
    assert shift_labels(both, documents, ignore_index=-1).tolist() == [want, want] and torch.equal(
        both[0], labels
    )


def sum_on_ranks(rank: int, world_size: int) -> list[Tensor | None]:
    parameters = [
        torch.nn.Parameter(torch.zeros(3, dtype=dtype))
        for dtype in (torch.float32, torch.float64) * 3
    ]
    for number, p in enumerate(parameters[:4]):
        # all ranks have one gradient; each of the remaining gradients is on one rank
        if number == 0 or rank == number:
            p.grad = torch.full((3,), 1.0 + rank, dtype=p.dtype)
    parameters[4].requires_grad_(False)
    with mock.patch("megacp.integrations.loop._AT_ONCE", 4):
        sum_gradients(parameters, axis_of(4))
    return [p.grad for p in parameters]


def test_gradients_are_summed_also_where_some_ranks_have_none() -> None:
    for found in run_ranks(sum_on_ranks, 4):
        assert [x.tolist() for x in found[:4]] == [[10.0] * 3, [2.0] * 3, [3.0] * 3, [4.0] * 3]
        assert found[4:] == [None, None]


def test_documents_are_read_from_positions_and_masks() -> None:
    """Positions of a row may start above 0, and padding on the left does not start a document."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [4, 5, 6, 7, 0, 1]])
    assert documents_of(positions).tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 1, 1]]
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]])
    assert documents_of(None, mask).tolist() == [[0, 0, 0, 0, -1, -1], [-1, -1, 0, 0, 0, 0]]
    padded = documents_of(torch.tensor([[1, 1, 0, 1, 0, 1]]), mask[1:].bool())
    assert padded.tolist() == [[-1, -1, 2, 2, 3, 3]]  # numbers may have gaps
    assert documents_of(torch.arange(6)[None], mask).tolist() == documents_of(None, mask).tolist()
    numbered = torch.tensor([[1, 1, 2, 2]])
    for given in (
        (None, None),
        (torch.zeros(3, 2, 6),),
        (torch.zeros(2, 6), torch.ones(2, 5)),
        (None, numbered),
    ):
        with pytest.raises(ValueError, match="documents_of expects"):
            documents_of(*given)


def rollouts(positions: list[int]) -> list[list[int]]:
    """Return the token indices of each path to a leaf.

    A token continues the last earlier token whose position is one lower.
    """
    path, found = list[int](), []
    for place, position in enumerate(positions):
        path = [*path[:position], place]
        if positions[place + 1 : place + 2] <= [position]:
            found.append(path)
    return found


def test_trees_are_read_from_positions_that_go_back() -> None:
    """Padding may be on both sides of a row."""
    rng, want = np.random.default_rng(0), np.zeros((20, 24, 20, 24), bool)
    positions, mask = torch.zeros(2, 20, 24, dtype=torch.int64)
    for number, (row, real) in enumerate(zip(positions, mask, strict=True)):
        first, last = rng.integers(3), 24 - rng.integers(3)
        real[first:last] = 1
        for place in range(first + 1, last):
            above = int(row[place - 1]) + 1
            row[place] = above if rng.random() < 0.7 else int(rng.integers(above + 1))
        for path in rollouts(row[first:last].tolist()):
            for length, place in enumerate(path, start=1):
                want[number, first + place, number, first + np.array(path[:length])] = True
    found = trees_of(positions, mask)
    assert (visible(found, found) == want.reshape(480, 480)).all()
    assert (found.depth == positions.flatten().numpy())[mask.flatten() == 1].all()
    for wrong in ([1, 2, 3], [0, 2, 3], [0, 1, -1]):
        with pytest.raises(
            ValueError, match="begin at 0 in each row, and increase by one or decrease"
        ):
            trees_of(torch.tensor([[0, 1, 1], wrong]))


def test_position_ids_count_through_documents_or_rows_and_never_go_back_beside_images() -> None:
    text = np.arange(8)[None]
    picture = np.stack(
        [[[0, 1, 2, 2, 2, 2, 4, 5]], [[0, 1, 2, 2, 3, 3, 4, 5]], [[0, 1, 2, 3, 2, 3, 4, 5]]]
    )
    packed = np.where(np.arange(8) < 6, picture, picture[:, :, [0, 1, 2, 3, 4, 5, 0, 1]])
    one, two = batch_mask(None, 8), batch_mask(torch.arange(8) // 6, 8)
    assert one.misplaced(picture, text) == "" and two.misplaced(packed, text) == ""
    assert one.misplaced(packed, text) == "position_ids decrease 1 times within a document"
    for mask, positions, right in (
        (one, text, True),
        (two, text, True),
        (two, text % 6, True),
        (one, text % 6, False),
    ):
        assert (mask.misplaced(positions[None], text) == "") == right
    longer = batch_mask(None, 16)
    # the second rank has positions of padding
    assert "do not count up" in longer.misplaced(np.stack([text] * 3), text + 8)


def summed_shards(rank: int, world_size: int) -> tuple[tuple[int, ...], float]:
    """Return the cp axis of a dp 2 x cp 2 mesh, and the gradient of a weight that torch shards over
    dp.
    """
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    axis = axis_of_mesh(mesh["cp"])
    assert (axis.local is None) == (grid(cp=world_size).cp.local is None), "slow messages"
    layer = dist.fsdp.fully_shard(torch.nn.Linear(4, 4, bias=False), mesh=mesh["dp"])
    layer.weight.grad = torch.full_like(layer.weight, 10.0**rank)
    sum_gradients(layer.parameters(), axis)
    shard = layer.weight.grad.to_local()
    assert shard.shape == (2, 4) and (shard == shard[0, 0]).all()
    with pytest.raises(ValueError, match="one dimension of a mesh"):
        axis_of_mesh(mesh)
    return (axis.rank, *axis.global_ranks), shard[0, 0].item()


def test_an_axis_is_one_dimension_of_a_mesh_and_shards_of_torch_are_summed_over_it() -> None:
    ranks = [(0, 0, 1), (1, 0, 1), (0, 2, 3), (1, 2, 3)]
    assert run_ranks(summed_shards, 4) == list(
        zip(ranks, [11.0, 11.0, 1100.0, 1100.0], strict=True)
    )


class Layers(torch.nn.Module):
    """Two attention layers with a skip connection; `checkpoint` recomputes each of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projections = torch.nn.ModuleList(
            torch.nn.Linear(DIM, 3 * DIM).double() for _ in range(2)
        )

    def layer(self, number: int, x: Tensor) -> Tensor:
        q, k, v = self.projections[number](x).chunk(3, -1)
        return x + attention(self, q, k, v, None, is_causal=True)[0].transpose(1, 2)

    def forward(self, x: Tensor, recomputed: bool = False) -> Tensor:
        for number in range(2):
            x = (
                checkpoint(self.layer, number, x, use_reentrant=False)
                if recomputed
                else self.layer(number, x)
            )
        return x


def compiled_on_ranks(rank: int, world_size: int) -> tuple[list[list[Tensor]], int]:
    """Return the gradients of a plain and a compiled model in a block, and the number of compiled
    functions.
    """
    whole, model = tensors(24)[0], Layers()
    found = []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for called in (model, torch.compile(model, backend="eager")):
        with context_parallel(
            grid(cp=world_size).cp, model=model, buffers=[whole], buffer_seq_dims=[2]
        ):
            loss = called(whole).square().sum()
            found.append(list(torch.autograd.grad(loss, list(model.parameters()))))
    return found, torch._dynamo.utils.counters["frames"]["total"]


@pytest.mark.slow
def test_a_compiled_model_trains_in_a_block_as_a_plain_one_does() -> None:
    """A compiler that traces plans and messages fails, or compiles a hundred functions."""
    for (plain, compiled), functions in run_ranks(compiled_on_ranks, 2):
        # both run the same float64 operations
        torch.testing.assert_close(compiled, plain, rtol=1e-12, atol=1e-12)
        assert functions < 20, functions


def test_a_block_is_freed_when_it_is_let_go_and_a_layer_recomputed_behind_it_is_noticed() -> None:
    whole, model = tensors(24)[0], Layers()
    gc.disable()
    try:
        with context_parallel(
            single_axis("cp"), model=model, buffers=[whole], buffer_seq_dims=[2]
        ) as context:
            loss = model(whole.clone(), recomputed=True).sum()
            held = weakref.ref(context)
        del context
        assert held() is None
    finally:
        gc.enable()
    with pytest.raises(ValueError, match=r"call backward\(\) inside"):
        loss.backward()
