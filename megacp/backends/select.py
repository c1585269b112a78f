"""Which backend a run uses: one table, read once.

Key property: the choice is made before any layer exists, and a backend that was asked for and cannot run is refused
with all its reasons before any process group does. Rejected: layers that test for optional packages.
"""

from __future__ import annotations

from megacp.backends.apex import weight_gradient_kernel
from megacp.backends.base import Backend
from megacp.backends.native import NativeBackend
from megacp.backends.support import contradictions, layer_reasons, needed_by
from megacp.backends.transformer_engine import TransformerEngineBackend, fp8_problem, package_problem
from megacp.config.run import RunConfig
from megacp.distributed.grid import ProcessGrid
from megacp.tensor_parallel.linear import AddGradient, add_weight_gradient


def engine_reasons(config: RunConfig, device_type: str | None) -> list[str]:
    """Why Transformer Engine cannot run this config on a type of device; None asks only about the config."""
    if device_type is None:
        return list(layer_reasons(config))
    package = package_problem()
    asked = package is None and device_type == "cuda" and config.training.fp8 != "off"
    return list(layer_reasons(config, device_type, package, fp8_problem(config.training.fp8) if asked else None))


def backend_problems(config: RunConfig, device_type: str | None) -> list[str]:
    """Why the run cannot have the backend that it asks for; empty where nothing in it needs Transformer Engine."""
    wanted = needed_by(config)
    if not wanted:
        return []
    found = contradictions(config)
    return found or [f"{' and '.join(wanted)}: {reason}" for reason in engine_reasons(config, device_type)]


def select_backend(config: RunConfig, grid: ProcessGrid) -> Backend:
    """The backend of a checked config, bound to the grid.

    Raises ValueError with all reasons where the config needs Transformer Engine and that cannot run.
    """
    problems = backend_problems(config, grid.device.type)
    if problems:
        raise ValueError("\n".join(["this configuration cannot run:", *(f"  - {problem}" for problem in problems)]))
    if config.training.transformer_impl == "native" or grid.device.type != "cuda":
        return _native(config, grid)
    reasons = engine_reasons(config, grid.device.type)
    if not reasons:
        return TransformerEngineBackend(grid, config)
    backend = _native(config, grid)
    backend.tell(f"layers: native, because {'; '.join(reasons)}")
    return backend


def _native(config: RunConfig, grid: ProcessGrid) -> NativeBackend:
    return NativeBackend(
        grid,
        config.parallel,
        config.model,
        dtype=config.training.dtype,
        attention_kernel=config.training.attention_kernel,
        vision=config.vision,
        add_gradient=_gradient_adder(config, grid),
    )


def _gradient_adder(config: RunConfig, grid: ProcessGrid) -> AddGradient | None:
    """How native linears add their weight gradients to the buckets."""
    if not config.training.gradient_accumulation_fusion:
        return None
    halves = grid.device.type == "cuda" and config.training.dtype == "bfloat16"
    return (weight_gradient_kernel() if halves else None) or add_weight_gradient
