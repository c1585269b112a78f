"""Types of values and gradients across ranks, checked by `spmd_types` in one process without
communication.

Over an axis a value is I (equal on all ranks, like its gradient), R (equal, with a partial
gradient), P (partial, with an equal gradient), S(d) (sharded along dimension d) or V (different on
each rank). The type of a parameter follows from its spec.

No type of an autograd function is declared. `walked` runs forward and backward under the checker,
and finds the only type of the result for which backward returns the correct gradient types.
"Findings" refer to issue 7452 of NVIDIA/Megatron-LM, which `spmd_types` has found there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import spmd_types as spmd
import torch
from spmd_types import I, P, PartitionSpec, R, S, SpmdTypeError, V, rules
from spmd_types.checker import typecheck
from spmd_types.types import partition_spec_get_shard
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megacp.attention.ops import pointwise
from megacp.distributed import collectives, differentiable
from megacp.distributed.collectives import Pending
from megacp.distributed.fake_world import fake_world
from megacp.distributed.grid import Axis, build_grid
from megacp.distributed.shape import GridShape
from megacp.engine.backends.native import NormSpec, RMSNorm, layer_norm
from megacp.engine.config.model import PairSize
from megacp.engine.data_parallel.parameter import spec_of
from megacp.engine.layers import table as layers
from megacp.engine.models.build import build_chunks
from megacp.engine.tensor_parallel import linear, lora, vocabulary
from megacp.engine.tensor_parallel.linear import LinearSpec
from megacp.engine.tensor_parallel.parameters import LinearOptions
from tests.reference.training import Values, config_of
from tests.training.test_golden_gradients import MODELS

FUNCTIONS = [
    differentiable._Dual,
    linear._Linear,
    linear._ColumnNorm,
    pointwise._RMSNorm,
    vocabulary._ChunkedLoss,
]
AXES = ("dp", "cp", "tp")
TOKENS, WIDTH, WIDE = 8, 6, 12
GRADIENT = {R: P, P: R, I: I, V: V}
"""Type of a value's gradient."""
SERVES = {R: (R, I), I: (R, I), P: (P,), V: (V,)}
"""Types that are interchangeable in backward, where I and R are alike."""


class Context:
    """Replacement for the context that autograd passes to forward and backward."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        self.needs_input_grad = [isinstance(x, Tensor) and x.requires_grad for x in inputs]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


class Witness:
    """Rank 0 of tp 2 x cp 2 x dp 2.

    With `exact`, the checker follows sharded dimensions; otherwise sharded values are V and may be
    summed.
    """

    def __init__(self, exact: bool) -> None:
        self.exact, self.grid = exact, build_grid(GridShape(tp=2, cp=2, dp=2), 0)
        self.mesh = init_device_mesh(
            "cpu", (2, 2, 2), mesh_dim_names=AXES
        )  # ranks computed by torch, not by megacp
        self.axes = {name: spmd.normalize_axis(self.mesh.get_group(name)) for name in AXES}

    def made(
        self, shape: tuple[int, ...], types: dict[Any, Any], cut: Any, dtype: Any = torch.float64
    ) -> Tensor:
        with spmd.no_typecheck():
            values = torch.zeros(shape, dtype=dtype)
        return spmd.assert_type(values, types, cut).requires_grad_(dtype.is_floating_point)

    def tokens(self, *shape: int, tp: Any, dtype: Any = torch.float64) -> Tensor:
        """Return `[t, ...]` of tokens sharded over dp and cp, with the given type over tp."""
        cut = [
            tuple(self.axes[name] for name in AXES if name != "tp" or tp == S(0)),
            *[None] * (len(shape) - 1),
        ]
        if tp == S(1):
            cut[1] = self.axes["tp"]
        types = {"dp": V, "cp": V, "tp": tp if tp in (I, R) else V}
        return self.made(
            shape,
            {self.axes[name]: held for name, held in types.items()},
            PartitionSpec(*cut),
            dtype,
        )

    def typed(self, module: Any) -> Any:
        """Give the parameters of a module the types that follow from their specs."""
        for parameter in module.parameters():
            spec = spec_of(parameter)
            here, whole = spec.pieces[0].shape, spec.pieces[0].global_shape
            cut = [S(d) for d in range(len(whole)) if here[d] < whole[d]]
            tp = cut[0] if cut else R if "tp" in spec.partial_over else I
            spmd.assert_type(
                parameter, {self.axes["dp"]: R, self.axes["cp"]: R, self.axes["tp"]: tp}
            )
        return module

    def types(self, x: Tensor) -> dict[str, Any]:
        """Return the type over each axis; `S(d)` if the sharded dimension is known."""
        held, cut = spmd.get_local_type(x), spmd.get_partition_spec(x)
        known = {
            name: partition_spec_get_shard(cut, axis) if cut else None
            for name, axis in self.axes.items()
        }
        return {name: known[name] or held[axis] for name, axis in self.axes.items()}

    def _result(self, x: Tensor, rows: int, types: Any) -> Tensor:
        with spmd.no_typecheck():
            y = torch.zeros(rows, *x.shape[1:], dtype=x.dtype)
        rules.output(y, types)
        return y

    def _summed(self, x: Tensor, axis: Axis) -> Any:
        return P if self.exact or spmd.get_axis_local_type(x, axis.group) is not V else V

    def start_all_gather(self, x: Tensor, axis: Axis) -> Pending:
        y = self._result(x, len(x) * axis.size, rules.all_gather(x, axis.group, src=S(0), dst=R))
        return Pending([], lambda: y)

    def start_reduce_scatter(self, x: Tensor, axis: Axis) -> Pending:
        types = rules.reduce_scatter(x, axis.group, src=self._summed(x, axis), dst=S(0))
        y = self._result(x, len(x) // axis.size, types)
        return Pending([], lambda: y)

    def all_reduce(self, x: Tensor, axis: Axis) -> Tensor:
        return self._result(
            x, len(x), rules.all_reduce(x, axis.group, src=self._summed(x, axis), dst=R)
        )

    def walked(self, function: Any, *inputs: Any) -> Tensor:
        """Return the result of an autograd function, with the type on which its forward and
        backward agree.
        """
        agreed, reasons = {}, []
        for equal in itertools.product((I, R), repeat=len(AXES)):
            context = Context(inputs)
            with torch.no_grad():
                y = function.forward(context, *inputs)
                held, cut = spmd.get_local_type(y), spmd.get_partition_spec(y)
                choices = zip(self.axes.values(), equal, strict=True)
                types = {axis: to if held[axis] in (I, R) else held[axis] for axis, to in choices}
                grad = self.made(
                    tuple(y.shape), {axis: GRADIENT[to] for axis, to in types.items()}, cut
                )
                try:
                    self._compare(inputs, function.backward(context, grad))
                    agreed[tuple(types.values())] = types
                except SpmdTypeError as error:
                    reasons.append(str(error).splitlines()[0])
        if len(agreed) != 1:
            raise SpmdTypeError(f"{function.__name__}: backward is no dual of forward: {reasons}")
        return self.made(tuple(y.shape), *agreed.values(), cut)

    def _compare(self, inputs: tuple[Any, ...], grads: tuple[Tensor | None, ...]) -> None:
        for number, (x, grad) in enumerate(zip(inputs, grads, strict=True)):
            if grad is None:
                continue
            for axis, held in spmd.get_local_type(x).items():
                want, found = GRADIENT[held], spmd.get_local_type(grad)[axis]
                if found not in SERVES[want] and (self.exact or (want, found) != (P, V)):
                    raise SpmdTypeError(f"gradient {number} is {found} over {axis}, not {want}")
            if self.exact and spmd.get_partition_spec(x) != spmd.get_partition_spec(grad):
                raise SpmdTypeError(f"gradient {number} is not cut as its input")


@pytest.fixture
def witness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Witness]:
    with fake_world(0, 8):
        found = Witness(request.param)
        for name in ("start_all_gather", "start_reduce_scatter", "all_reduce"):
            monkeypatch.setattr(collectives, name, getattr(found, name))
        for function in FUNCTIONS:
            monkeypatch.setattr(function, "apply", functools.partial(found.walked, function))
        with spmd.set_current_mesh(found.mesh), typecheck(local=not found.exact):
            yield found


WITNESS: Any = {"indirect": ["witness"]}  # the fixture uses these parameters
parallel = pytest.mark.parametrize(
    "sequence_parallel", [False, True], ids=["replicated", "sequence_parallel"]
)

COLUMN = LinearSpec(
    "a", {"q": layers.Linear(WIDTH, 8, 0.1, True), "k": layers.Linear(WIDTH, 4, 0.1, True)}
)
ROW = LinearSpec("b", {"out": layers.Linear(WIDE, WIDTH, 0.1, True, "columns")})
COLUMNS, TABLE = (
    layers.Tensor("n.weight", (WIDE,), "rows", "ones"),
    layers.Tensor("t", (13, WIDTH), "rows", std=0.1),
)
NORM, HEADS = NormSpec("n", WIDTH, 1e-6), NormSpec("n", 4, 1e-6)
PAIRS = lora.LoraSpec(dict.fromkeys(("a.q", "b.out"), PairSize(2, 2.0)))


def column(o: LinearOptions) -> nn.Module:
    return linear.ColumnParallelLinear(COLUMN, o)


def row(o: LinearOptions) -> nn.Module:
    return linear.RowParallelLinear(ROW, o)


LAYERS: dict[
    str, tuple[bool, Callable[[LinearOptions], nn.Module], tuple[int, ...], bool, bool]
] = {
    "column": (True, column, (WIDTH,), False, True),
    "row": (True, row, (WIDE // 2,), True, False),
    "column_and_pairs": (
        False,
        lambda o: lora.ColumnPairs(column(o), COLUMN, PAIRS, o),
        (WIDTH,),
        False,
        True,
    ),
    "row_and_pair": (
        True,
        lambda o: lora.RowPair(row(o), ROW, PAIRS, o),
        (WIDE // 2,),
        True,
        False,
    ),
    "LayerNorm": (True, lambda o: layer_norm(NORM, o), (WIDTH,), False, False),
    "RMSNorm": (False, lambda o: RMSNorm(NORM, None, o), (WIDTH,), False, False),
    "RMSNorm_of_heads": (False, lambda o: RMSNorm(HEADS, True, o), (2, 4), True, True),
    "ColumnNorm": (False, lambda o: linear.ColumnNorm(COLUMNS, 1e-6, o), (WIDE // 2,), True, True),
}
"""For each layer: `exact`, its factory, the shape of a token, and whether input and output are
column-sharded.

Otherwise they are residual streams.
"""


def options(axis: Axis, sequence_parallel: bool) -> LinearOptions:
    return LinearOptions(axis, sequence_parallel, torch.float64, torch.device("cpu"))


@parallel
@pytest.mark.parametrize(
    ("witness", "layer"), [(row[0], row[1:]) for row in LAYERS.values()], **WITNESS, ids=LAYERS
)
def test_layers_and_their_gradients_hold_what_specs_say(
    witness: Witness, layer: Any, sequence_parallel: bool
) -> None:
    make, token, columns_in, columns_out = layer
    stream = S(0) if sequence_parallel else I
    module = witness.typed(make(options(witness.grid.tp, sequence_parallel)))
    y = module(witness.tokens(TOKENS, *token, tp=S(1) if columns_in else stream))
    expected = {"dp": S(0), "cp": S(0), "tp": S(1) if columns_out else stream}
    assert witness.types(y) == {
        axis: held if witness.exact or held is I else V for axis, held in expected.items()
    }


@pytest.fixture
def table_parts(witness: Witness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Declare properties that the checker cannot derive: looked-up rows and products are partial."""

    def cut(shape: tuple[int, ...], like: Tensor, dtype: Any = None) -> Tensor:
        return witness.made(shape, dict.fromkeys(witness.axes.values(), V), None).detach()

    for name in ("empty", "zeros"):
        monkeypatch.setattr(vocabulary, name, cut)

    def partial(reduced: Any, x: Tensor, axis: Axis) -> Tensor:
        return reduced(spmd.mutate_type(x, axis.group, src=V, dst=P), axis)

    for name in ("reduce_from", "reduce_scatter_to"):
        monkeypatch.setattr(
            vocabulary, name, functools.partial(partial, getattr(differentiable, name))
        )


@parallel
@pytest.mark.parametrize("chunk_tokens", [0, 3])
@pytest.mark.parametrize("witness", [False], **WITNESS)
@pytest.mark.usefixtures("table_parts")
def test_a_table_gives_the_residual_stream_and_one_loss_for_all_tp_ranks(
    witness: Witness, sequence_parallel: bool, chunk_tokens: int
) -> None:
    shared = options(witness.grid.tp, sequence_parallel)
    table = witness.typed(vocabulary.VocabularyTable(vocabulary.TableSpec(TABLE), 2, shared))
    labels = witness.tokens(TOKENS, tp=R, dtype=torch.int64)
    x = table(labels)
    assert witness.types(x) == {"dp": V, "cp": V, "tp": S(0) if sequence_parallel else I}
    logits = table.logits(x).detach()
    assert witness.types(logits) == dict.fromkeys(AXES, V)
    losses = vocabulary.cross_entropy(
        logits, labels, 0, witness.grid.tp
    )  # the checker does not follow writes by index
    assert witness.types(losses) == {"dp": V, "cp": V, "tp": R}
    loss = table.loss(x, vocabulary.Target(labels, labels.double(), 3.5), chunk_tokens)
    assert witness.types(loss) == {"dp": V, "cp": V, "tp": I}


DUALS = {
    "copy_to": (I, R),
    "reduce_from": (P, I),
    "gather_from": (S(0), R),
    "reduce_scatter_to": (P, S(0)),
}


@pytest.mark.parametrize("witness", [True], **WITNESS)
@pytest.mark.parametrize("name", DUALS)
@pytest.mark.parametrize("axis", AXES)
def test_a_differentiable_collective_has_the_types_of_its_row(
    witness: Witness, name: str, axis: str
) -> None:
    """Check the table in `differentiable.py`; types over other axes stay the same."""
    before, after = DUALS[name]
    types = {place: before if other == axis else I for other, place in witness.axes.items()}
    x = witness.made((TOKENS, WIDTH), types, None)
    y = getattr(differentiable, name)(x, getattr(witness.grid, axis))
    assert witness.types(y) == {other: after if other == axis else I for other in AXES}


def over_another_axis(witness: Witness) -> None:
    """Findings 4 to 7: the layer's weight is sharded over tp, but its messages use cp."""
    module = witness.typed(linear.ColumnParallelLinear(COLUMN, options(witness.grid.tp, False)))
    module.options = options(witness.grid.cp, False)
    module(witness.tokens(TOKENS, WIDTH, tp=I))


def norm_without_its_sum(witness: Witness) -> None:
    """Finding 11: each rank normalises different heads, but their gradients are not summed."""
    module = RMSNorm(HEADS, False, options(witness.grid.tp, False))
    witness.typed(module)(witness.tokens(TOKENS, 2, 4, tp=S(1)))


def unknown_function(witness: Witness) -> None:
    pointwise.swiglu(witness.tokens(TOKENS, WIDTH, tp=I))


@pytest.mark.parametrize("witness", [True, False], **WITNESS)
@pytest.mark.parametrize(
    ("mistake", "reason"),
    [
        (over_another_axis, "mesh_cp"),
        (norm_without_its_sum, "mesh_tp"),
        (unknown_function, "not registered"),
    ],
    ids=["axis", "norm", "function"],
)
def test_a_mistake_is_refused(
    witness: Witness, mistake: Callable[[Witness], None], reason: str
) -> None:
    with pytest.raises(SpmdTypeError, match=reason):
        mistake(witness)


def test_what_is_reduced_keeps_its_own_values() -> None:
    """Finding 10: a count that was reduced in place was mistaken for this rank's count."""
    with fake_world(0, 2):
        tp = build_grid(GridShape(tp=2), 0).tp
        for reduce in (collectives.all_reduce, collectives.reduce_scatter):
            x = torch.arange(4.0)
            reduce(x, tp).fill_(7.0)
            assert x.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("values", MODELS.values(), ids=["tied", "untied", "dropout"])
def test_the_norm_counts_every_element_of_a_model_once(values: Values) -> None:
    """Finding 8: for parameters sharded by heads, the norm included only those on tp rank 0."""
    shape, seen = {"tp": 2, "pp": 2, "cp": 2}, {}
    for rank in range(8):
        with fake_world(rank, 8):
            grid = build_grid(GridShape(**shape), rank)
            if grid.cp.rank > 0:  # another slice of the same parameters
                continue
            chunks = build_chunks(config_of(values, shape), grid)
        for spec in (spec_of(parameter) for chunk in chunks for parameter in chunk.parameters()):
            for piece in spec.pieces if spec.counted else ():
                box = tuple(
                    slice(first, first + size)
                    for first, size in zip(piece.offsets, piece.shape, strict=True)
                )
                seen.setdefault(piece.name, torch.zeros(piece.global_shape))[box] += 1
    assert len(seen) > 20 and all((times == 1).all() for times in seen.values())
