"""The pipeline runtime on real ranks, compared with all layers in one process, in float64."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megacp.distributed.grid import Axis, ProcessGrid
from megacp.distributed.shape import GridShape
from megacp.engine.pipeline_parallel import runtime
from megacp.engine.pipeline_parallel.runtime import HiddenStates, open_channels, run
from megacp.engine.pipeline_parallel.schedules import (
    Action,
    Kind,
    schedule,
    virtual_stage,
    with_messages,
    with_parameters,
)
from tests.ranks import grid, run_ranks
from tests.reference.pipeline import Part, make_batches, train_in_one_process
from tests.reference.schedule_simulator import in_flight_bound, simulate

WIDTH = 5
LENGTHS = (7, 3, 9, 1, 4, 8, 2, 6)  # packs of different lengths in one step
HIDDEN = HiddenStates(lambda batch: tuple(batch["input"].shape), torch.float64)


def assert_close(found: Any, expected: Any) -> None:
    """Require equality to 1e-12, which is generous for at most 12 layers of the same operations in
    float64.
    """
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def my_parts(rank: int, num_stages: int, num_chunks: int, denominator: float) -> list[Part]:
    places = [virtual_stage(rank, num_stages, chunk) for chunk in range(num_chunks)]
    return [Part(place, num_stages * num_chunks, WIDTH, denominator) for place in places]


def gradients_of(parts: list[Part]) -> list[dict[str, Any]]:
    return [
        {n: p.grad.numpy() for n, p in part.named_parameters() if p.grad is not None}
        for part in parts
    ]


def train_one_step(
    rank: int,
    world_size: int,
    lengths: Sequence[int],
    num_chunks: int,
    slow_stage: int | None,
    name: str,
) -> tuple[list[float], list[dict[str, Any]], list[float]]:
    """Return losses, gradients of each chunk, and the losses of the forward-only schedule.

    The slow stage also recomputes its activations.
    """
    parts = my_parts(rank, world_size, num_chunks, float(sum(lengths)))

    def slowed(part: Part) -> Any:
        def chunk(hidden: Tensor | None, batch: Any) -> Any:
            if rank == slow_stage:
                time.sleep(0.002)
                return checkpoint(part, hidden, batch, use_reentrant=False)
            return part(hidden, batch)

        return chunk

    shared = (
        [slowed(part) for part in parts],
        make_batches(lengths, WIDTH),
        grid(pp=world_size),
        HIDDEN,
    )
    sizes = (rank, world_size, len(lengths), num_chunks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "SEND_WINDOW", 2 if slow_stage is None else 1)
        losses = run(schedule(name, *sizes), *shared)
        with torch.no_grad():
            evaluated = run(schedule("forward_only", *sizes), *shared)
    assert not any(loss.requires_grad for loss in losses + evaluated)
    return (
        [loss.item() for loss in losses],
        gradients_of(parts),
        [loss.item() for loss in evaluated],
    )


def train_many(rank: int, world_size: int, cases: list[tuple[Any, ...]]) -> list[Any]:
    return [train_one_step(rank, world_size, *case) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_losses_and_gradients_are_those_of_one_process(num_stages: int, num_chunks: int) -> None:
    """Use 1 to 8 microbatches of different lengths, including fewer than stages and short groups.

    With 2 stages and several chunks, the next and the previous peer are the same rank. A slow stage
    makes messages queue.
    """
    cases = [
        (LENGTHS[:count], num_chunks, slow, name)
        for count in range(1, len(LENGTHS) + 1)
        for slow, name in (
            (None, "1f1b"),
            (count % num_stages, "1f1b" if count % 2 else "first 1f1b"),
        )
    ]
    ranks = run_ranks(train_many, num_stages, cases)
    for place, (lengths, *_) in enumerate(cases):
        losses, gradients = train_in_one_process(lengths, WIDTH, num_stages * num_chunks)
        for rank in range(num_stages):
            found_losses, found_gradients, evaluated = ranks[rank][place]
            expected = losses if rank == num_stages - 1 else []
            assert len(found_losses) == len(evaluated) == len(expected)
            assert_close(found_losses, expected)
            assert_close(evaluated, expected)
            for chunk, found in enumerate(found_gradients):
                wanted = gradients[virtual_stage(rank, num_stages, chunk)]
                assert found.keys() == wanted.keys()
                for name in wanted:
                    assert_close(found[name], wanted[name].numpy())


def crossing_lists() -> list[list[Action]]:
    """Return lists for two stages, two chunks and two microbatches.

    Stage 0 sends four outputs and then a gradient, but stage 1 receives the gradient as its fourth
    message.
    """
    orders = ["F00 F10 F01 F11 B01 B00 B11 B10", "F00 F10 F01 B01 B00 F11 B11 B10"]
    kinds = {"F": Kind.FORWARD, "B": Kind.BACKWARD}
    computes = [
        [Action(kinds[w[0]], int(w[1]), int(w[2])) for w in order.split()] for order in orders
    ]
    return [with_messages(computes[stage], stage, 2, 2) for stage in range(2)]


def train_crossing(rank: int, world_size: int) -> list[dict[str, Any]]:
    parts = my_parts(rank, world_size, 2, float(sum(LENGTHS[:2])))
    batches = make_batches(LENGTHS[:2], WIDTH)
    run(crossing_lists()[rank], parts, batches, grid(pp=world_size), HIDDEN)
    return gradients_of(parts)


def test_outputs_and_gradients_that_cross_between_two_ranks_stay_apart() -> None:
    simulate(crossing_lists(), 2)
    gradients = train_in_one_process(LENGTHS[:2], WIDTH, 4)[1]
    for rank, chunks in enumerate(run_ranks(train_crossing, 2, timeout=20.0)):
        for chunk, found in enumerate(chunks):
            for name, expected in gradients[virtual_stage(rank, 2, chunk)].items():
                assert_close(found[name], expected.numpy())


def test_one_stage_needs_no_process_group() -> None:
    """Gradients accumulate over two steps as they do over microbatches."""
    open_channels(grid(), 1)
    part = Part(0, 1, WIDTH, float(sum(LENGTHS)))
    losses, gradients = train_in_one_process(LENGTHS, WIDTH, 1)
    for step in (1, 2):
        found = run(
            schedule("1f1b", 0, 1, len(LENGTHS)),
            [part],
            make_batches(LENGTHS, WIDTH),
            grid(),
            HIDDEN,
        )
        assert_close([loss.item() for loss in found], losses)
        assert part.weight.grad is not None
        assert_close(part.weight.grad.numpy(), step * gradients[0]["weight"].numpy())


class Heard:
    """Record the calls that a run makes to its parameters."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def unshard(self, chunk: int) -> None:
        self.events.append(("unshard", chunk))

    def reshard(self, chunk: int) -> None:
        self.events.append(("reshard", chunk))

    def start_backward(self, chunk: int, last: bool) -> None:
        self.events.append(("last" if last else "start", chunk))

    def end_backward(self, chunk: int) -> None:
        self.events.append(("end", chunk))


def record_backwards(rank: int, world_size: int, num_chunks: int) -> list[tuple[str, int]]:
    parts, heard = my_parts(rank, world_size, num_chunks, 1.0), Heard()
    for chunk, part in enumerate(parts):
        part.weight.register_hook(lambda _, chunk=chunk: heard.events.append(("backward", chunk)))
    actions = with_parameters(schedule("1f1b", rank, world_size, 5, num_chunks))
    run(actions, parts, make_batches(LENGTHS[:5], WIDTH), grid(pp=world_size), HIDDEN, heard)
    return heard.events


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_every_backward_is_announced_and_has_the_parameters_it_needs(num_chunks: int) -> None:
    for events in run_ranks(record_backwards, 2, num_chunks):
        for chunk in range(num_chunks):
            own = [
                name
                for name, of in events
                if of == chunk and name in ("start", "last", "backward", "end")
            ]
            assert own == ["start", "backward", "end"] * 4 + ["last", "backward", "end"]
        held: set[int] = set()
        for name, chunk in events:
            if name == "unshard":
                assert chunk not in held
                held.add(chunk)
            elif name == "reshard":
                held.remove(chunk)
            else:
                assert chunk in held
        assert not held


def count_live_tensors(
    rank: int, world_size: int, num_chunks: int, trains: bool
) -> tuple[int, int]:
    """Return the largest numbers of inputs and of outputs alive at the same time."""
    inputs: list[weakref.ref[Any]] = []
    outputs: list[weakref.ref[Any]] = []
    peaks = [0, 0]

    def alive(references: list[weakref.ref[Any]]) -> int:
        return sum(reference() is not None for reference in references)

    def counted(part: Part) -> Any:
        def chunk(hidden: Tensor | None, batch: Any) -> Tensor:
            x = batch["input"] * 1.0 if hidden is None else hidden
            inputs.append(weakref.ref(x))
            peaks[0] = max(peaks[0], alive(inputs))
            y = torch.tanh(
                x @ part.weight.T + part.bias
            ).sin()  # sin saves its input, so no operation saves the output
            outputs.append(weakref.ref(y))
            peaks[1] = max(peaks[1], alive(outputs))
            return (y**2).sum() if part.last else y

        return chunk

    gc.disable()
    try:
        actions = schedule(
            "1f1b" if trains else "forward_only", rank, world_size, len(LENGTHS), num_chunks
        )
        chunks = [counted(part) for part in my_parts(rank, world_size, num_chunks, 1.0)]
        with torch.set_grad_enabled(trains):
            run(actions, chunks, make_batches(LENGTHS, WIDTH), grid(pp=world_size), HIDDEN)
    finally:
        gc.enable()
    return peaks[0], peaks[1]


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_activations_are_freed_right_after_their_backward(num_chunks: int) -> None:
    """The number of live inputs never exceeds the bound of the schedule.

    Outputs live no longer than their send.
    """
    for rank, (inputs, outputs) in enumerate(run_ranks(count_live_tensors, 2, num_chunks, True)):
        bound = in_flight_bound(rank, 2, len(LENGTHS), num_chunks)
        assert inputs <= bound < len(LENGTHS) * num_chunks
        # The last virtual stage's square saves its y; on other stages the tensor object is gone
        # after the forward.
        assert outputs <= (bound if rank == 1 else 1)
    for inputs, outputs in run_ranks(count_live_tensors, 2, num_chunks, False):
        assert (inputs, outputs) == (1, 1)


def send_a_wrong_output(rank: int, world_size: int, fault: str) -> str:
    """Return the assertion message of stage 0, whose output has a shape that stage 1 does not
    expect.
    """
    part = my_parts(rank, world_size, 1, 1.0)[0]

    def chunk(hidden: Tensor | None, batch: Any) -> Tensor:
        y = part(hidden, batch)
        return y[:-1] if fault == "shape" else y.float()

    if rank == 1:
        return ""
    actions, batches = schedule("forward_only", 0, 2, 1), make_batches(LENGTHS[:1], WIDTH)
    with torch.no_grad(), pytest.raises(AssertionError) as caught:
        run(actions, [chunk], batches, grid(pp=world_size), HIDDEN)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fault", "sent"),
    [("shape", "(6, 5) and dtype torch.float64"), ("dtype", "(7, 5) and dtype torch.float32")],
)
def test_an_output_the_peer_does_not_expect_is_never_sent(fault: str, sent: str) -> None:
    text = run_ranks(send_a_wrong_output, 2, fault)[0]
    assert sent in text and "(7, 5) and torch.float64" in text


def open_all(rank: int, world_size: int, num_chunks: int) -> bool:
    open_channels(grid(pp=world_size), num_chunks)
    return True


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_every_channel_opens_in_one_common_order(num_stages: int) -> None:
    """Here every message blocks until the peer receives it, like the creation of an NCCL
    communicator.
    """
    for num_chunks in (1, 2):
        assert all(run_ranks(open_all, num_stages, num_chunks, timeout=20.0))


def test_a_receive_is_posted_after_all_computes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proofs of the schedules assume this (`hangs_where_computes_wait`).

    An earlier receive could stop both stages.
    """
    done: list[str] = []

    class Received:
        def __init__(self, buffer: Tensor, *args: object) -> None:
            done.append("receive")
            self.buffer = buffer

        def wait(self) -> Tensor:
            return self.buffer.zero_()

    part = my_parts(1, 2, 1, 1.0)[0]

    def chunk(hidden: Tensor | None, batch: Any) -> Tensor:
        done.append("forward")
        return part(hidden, batch)

    monkeypatch.setattr(runtime, "irecv", Received)
    with torch.no_grad():
        actions = schedule("forward_only", 1, 2, 6)
        run(actions, [chunk], make_batches(LENGTHS[:6], WIDTH), _of_two(1), HIDDEN)
    assert done == ["receive", "forward"] * 6


def _of_two(rank: int) -> ProcessGrid:
    """Return one of two stages; the test inspects its messages."""
    axis = Axis("pp", 2, rank, (0, 1), group=object())  # type: ignore[arg-type]
    channels = {("forward", 0): axis}
    return ProcessGrid(
        GridShape(pp=2), rank, torch.device("cpu"), {("pp",): axis}, axis, channels, axis
    )


def test_the_sends_under_way_on_a_channel_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, most = set[int](), []

    class Sent:
        def __init__(self, *args: object) -> None:
            under_way.add(id(self))
            most.append(len(under_way))

        def wait(self) -> None:
            under_way.discard(id(self))

    monkeypatch.setattr(runtime, "isend", Sent)
    with torch.no_grad():
        batches = make_batches(LENGTHS[:6], WIDTH)
        run(schedule("forward_only", 0, 2, 6), my_parts(0, 2, 1, 1.0), batches, _of_two(0), HIDDEN)
    assert max(most) == 2 and not under_way
