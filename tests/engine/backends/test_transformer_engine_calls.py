"""Check every call to Transformer Engine against the real signatures of its release.

The calls are recorded while a model is built and used. Each call must pass its arguments by
keyword, and must stop binding if Transformer Engine renames or removes one of the keywords.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megacp.attention.context_parallel.layout import LAYOUTS
from megacp.attention.ops.kernels import select_kernel
from megacp.distributed.grid import build_grid
from megacp.distributed.shape import GridShape
from megacp.engine.backends import thd
from megacp.engine.backends import transformer_engine as backend_file
from megacp.engine.backends.transformer_engine import TransformerEngineBackend, package_problem
from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.config.training import TrainingConfig
from megacp.engine.models.language import LanguageModelChunk
from megacp.engine.optim.rules import AdamW
from megacp.engine.rows.shard import shard_batch
from megacp.training.data.mock import MockRules, mock_batch
from tests.engine.backends.engine_layers import emulated_layers
from tests.engine.backends.engine_math import FUSED, UTILS
from tests.engine.backends.engine_stub import NEWEST, OLDER, engine, needs_engine, needs_release
from tests.reference.sharded_toy import group_of

pytestmark = needs_engine

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
REFUSED = ("2.10", "2.14")

TARGETS = {
    "Linear": ("transformer_engine.pytorch", "Linear.__init__"),
    "LayerNormLinear": ("transformer_engine.pytorch", "LayerNormLinear.__init__"),
    "LayerNormMLP": ("transformer_engine.pytorch", "LayerNormMLP.__init__"),
    "RMSNorm": ("transformer_engine.pytorch.ops.basic.rmsnorm", "RMSNorm.__init__"),
    "RMSNorm (legacy)": ("transformer_engine.pytorch", "RMSNorm.__init__"),
    "DotProductAttention": ("transformer_engine.pytorch", "DotProductAttention.__init__"),
    "attention": ("transformer_engine.pytorch", "DotProductAttention.forward"),
    "groups": ("transformer_engine.pytorch", "DotProductAttention.set_context_parallel_group"),
    "autocast": ("transformer_engine.pytorch", "autocast"),
    "fp8": ("transformer_engine.pytorch", "is_fp8_available"),
    "fp8 in blocks": ("transformer_engine.pytorch", "is_fp8_block_scaling_available"),
    "question": (UTILS, "AttentionParams.__init__"),
    "forward": (FUSED, "fused_attn_fwd"),
    "backward": (FUSED, "fused_attn_bwd"),
    "FusedAdam": ("transformer_engine.pytorch.optimizers", "FusedAdam.__init__"),
    "DelayedScaling": ("transformer_engine.common.recipe", "DelayedScaling.__init__"),
    "Float8CurrentScaling": ("transformer_engine.common.recipe", "Float8CurrentScaling.__init__"),
    "Float8BlockScaling": ("transformer_engine.common.recipe", "Float8BlockScaling.__init__"),
}


def spied(patch: pytest.MonkeyPatch, name: str, calls: list[Call]) -> inspect.Signature:
    """Record the calls of a function that come from megacp, and return its real signature."""
    module, path = TARGETS[name]
    owner: Any = sys.modules[module]
    *classes, attribute = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    real: Callable[..., Any] = getattr(owner, attribute)

    def spy(*args: Any, **options: Any) -> Any:
        caller = Path(inspect.stack()[1].filename).name
        through_torch = caller == "module.py"  # nn.Module.__call__
        if caller in ("transformer_engine.py", "cudnn.py") or (
            through_torch and name == "attention"
        ):
            calls.append((name, args[1:] if classes else args, options))
        return real(*args, **options)

    if attribute == "__init__":
        signature = inspect.signature(owner)  # the signature of a recipe is only in its class
    else:
        signature = inspect.signature(real)
        if classes:
            signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    patch.setattr(owner, attribute, spy)
    return signature


def exercise(
    recipe: str, calls: list[Call], signatures: dict[str, inspect.Signature], release: str = NEWEST
) -> None:
    """Build a decoder, compute a gradient and an update, and open the contexts."""
    settings = {
        "num_layers": 1,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "vocab_size": 32,
    }
    settings |= {"dtype": "float64", "qk_layernorm": "head", "seq_length": 32}
    config = with_values(RunConfig(), settings)
    with emulated_layers(release), pytest.MonkeyPatch.context() as patch:
        for name in TARGETS:
            signatures[name] = spied(patch, name, calls)
        patch.setattr(
            torch.backends.cudnn, "version", None
        )  # this call fails in a CUDA torch without a GPU
        backend = TransformerEngineBackend(build_grid(GridShape(), 0), config)
        chunk = LanguageModelChunk(config.model, range(1), backend)
        batch = shard_batch(
            mock_batch([0], MockRules(32, 32)).with_padding_to(35),
            backend.tp,
            LAYOUTS["contiguous"],
        )
        chunk.hidden(None, batch)
        x = torch.zeros(4)
        x.grad = torch.ones(4)
        AdamW([group_of(x, 0.1)], TrainingConfig(), backend.adamw).update(0.1, 1.0)
        if release not in REFUSED:
            q = torch.zeros(35, 4, 8, dtype=torch.float64, requires_grad=True)
            kernel = select_kernel("cudnn", torch.device("cuda"))
            kernel.whole(q, q, q, batch.plan.table_of_row, 1.0).sum().backward()
        backend.recipe = backend_file.fp8_recipe(recipe, True)
        backend.precision()
        with backend_file.eight_bits_off():
            pass
        backend_file.fp8_problem(recipe)


@pytest.fixture(scope="module")
def recorded() -> tuple[list[Call], dict[str, inspect.Signature]]:
    calls: list[Call] = []
    signatures: dict[str, inspect.Signature] = {}
    for recipe in ("delayed", "current", "blockwise"):
        exercise(recipe, calls, signatures)
    return calls, signatures


@pytest.mark.slow
def test_every_entry_is_called_and_binds_by_keyword(
    recorded: tuple[list[Call], dict[str, inspect.Signature]],
) -> None:
    calls, signatures = recorded
    for name, args, options in calls:
        signatures[name].bind(*args, **options)
        assert not args, f"{name} was called with {len(args)} arguments without a name"
    assert {name for name, _, _ in calls} == set(TARGETS) - {"groups", "RMSNorm"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "release", [pytest.param(release, marks=needs_release(release)) for release in OLDER]
)
def test_older_releases_take_the_same_calls(release: str) -> None:
    """Releases that megacp rejects are included: signatures do not show the features that they
    lack.
    """
    calls: list[Call] = []
    signatures: dict[str, inspect.Signature] = {}
    exercise("current", calls, signatures, release)
    for name, _, options in calls:
        signatures[name].bind(**options)
    assert {name for name, _, _ in calls} >= {
        "attention",
        "question",
        "FusedAdam",
        "LayerNormMLP",
        "autocast",
    }


def test_trained_linears_fuse_their_gradients(
    recorded: tuple[list[Call], dict[str, inspect.Signature]],
) -> None:
    names = ("Linear", "LayerNormLinear", "LayerNormMLP")
    linears = [
        (name, options["fuse_wgrad_accumulation"])
        for name, _, options in recorded[0]
        if name in names
    ]
    assert set(linears) == {(name, True) for name in names}


def test_attention_gets_true_and_padded_lengths(
    recorded: tuple[list[Call], dict[str, inspect.Signature]],
) -> None:
    """Both are int32 and the same object without padding, and the longest sequence includes its
    padding.
    """
    calls = [options for name, _, options in recorded[0] if name == "attention"]
    for options in calls:
        lengths, places = options["cu_seqlens_q"], options["cu_seqlens_q_padded"]
        assert lengths.dtype == places.dtype == torch.int32
        assert (lengths is places) == bool(torch.equal(lengths, places))
        assert options["max_seqlen_q"] == int(places.diff().max())
        assert lengths is options["cu_seqlens_kv"] and places is options["cu_seqlens_kv_padded"]
    assert any(options["cu_seqlens_q"] is not options["cu_seqlens_q_padded"] for options in calls)


def test_the_group_setter_binds(recorded: tuple[list[Call], dict[str, inspect.Signature]]) -> None:
    """Only tests on several ranks make this call, so take its keywords from the source."""
    source = ast.parse(Path(thd.__file__).read_text(encoding="utf-8"))
    found = [
        node
        for node in ast.walk(source)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("set_context_parallel_group")
    ]
    keywords = {keyword.arg for keyword in found[0].keywords}
    parameters = recorded[1]["groups"].parameters
    assert not found[0].args and keywords == set(parameters) - {"load_balancing_strategy"}


def test_other_attention_kernels_are_switched_off_before_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformer Engine reads one of the two variables at import.

    If it were set later, flash attention would be used.
    """
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '2.20.0+local'")
    seen = "import os\nassert os.environ['NVTE_FLASH_ATTN'] == os.environ['NVTE_UNFUSED_ATTN'] == '0', 'not yet set'\n"
    seen += "assert os.environ['NVTE_BATCH_MHA_P2P_COMM'] == '1'"
    (package / "pytorch.py").write_text(seen)
    for name in backend_file.SETTINGS:
        monkeypatch.setenv(name, "")  # so that it is removed after the test
        monkeypatch.delenv(name)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert package_problem() is None
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]
    (package / "pytorch.py").write_text("raise OSError('no libcudart')")
    assert "OSError: no libcudart" in str(package_problem())
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]


def test_the_package_is_asked_for_only_where_it_is() -> None:
    assert "not installed" in str(package_problem())
    with engine():
        assert package_problem() is None
