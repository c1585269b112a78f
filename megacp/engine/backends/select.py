"""Choice of a run's backend, which is made once, before any layer is built.

If a requested backend or kernel cannot run, an error lists all reasons before any process group
exists.
"""

from __future__ import annotations

from megacp.attention.ops.flex import compiler_problem
from megacp.attention.ops.kernels import kernel_problem
from megacp.distributed.grid import ProcessGrid
from megacp.engine.backends.apex import weight_gradient_kernel
from megacp.engine.backends.native import NativeBackend
from megacp.engine.backends.support import layer_reasons, needed_by
from megacp.engine.backends.transformer_engine import (
    TransformerEngineBackend,
    fp8_problem,
    package_problem,
)
from megacp.engine.config.run import RunConfig
from megacp.engine.pipeline_parallel.schedules import defers
from megacp.engine.tensor_parallel.weight_gradients import (
    DeferredWeightGradients,
    WeightGradients,
    add_weight_gradient,
)


def engine_reasons(config: RunConfig, device_type: str | None) -> list[str]:
    """Return the reasons why Transformer Engine cannot run this config on a type of device.

    If the device type is None, check only the config.
    """
    if device_type is None:
        return list(layer_reasons(config))
    package = package_problem()
    eight_bits = None
    if package is None and device_type == "cuda" and config.training.fp8 != "off":
        eight_bits = fp8_problem(config.training.fp8)  # asks the GPU
    return list(layer_reasons(config, device_type, package, eight_bits))


def backend_problems(config: RunConfig, device_type: str | None) -> list[str]:
    """Return the reasons why the requested kernel and layers cannot run on a type of device.

    If the device type is None, check only the config.
    """
    training = config.training
    wanted = needed_by(config)
    problems = []
    if device_type is not None:
        unusable = kernel_problem(training.attention_kernel, device_type, training.dtype)
        if unusable:
            problems.append(f"--attention-kernel and --dtype: {unusable}")
    # on CUDA, torch.compile compiles elementwise operations
    if device_type == "cuda":
        no_compiler = compiler_problem()
        if no_compiler:
            problems.append(no_compiler)
    if training.transformer_impl == "native":
        asked = "needs --transformer-impl transformer_engine or auto, but this run uses native"
        problems += [f"{name} {asked}" for name in wanted]
    elif wanted:
        problems += _refused(wanted, engine_reasons(config, device_type))
    return problems


def _refused(wanted: list[str], reasons: list[str]) -> list[str]:
    """Return one message per reason, each with the flags that require Transformer Engine."""
    return [f"{' and '.join(wanted)}: {reason}" for reason in reasons]


def select_backend(config: RunConfig, grid: ProcessGrid) -> NativeBackend:
    """Return the backend for a checked config on this grid.

    Raise ValueError with all reasons if the config requires Transformer Engine and it cannot run.
    """
    wanted = needed_by(config)
    # on a CPU, use native layers without looking for Transformer Engine
    if config.training.transformer_impl == "native" or not (wanted or grid.device.type == "cuda"):
        return NativeBackend(grid, config, _weight_gradients(config, grid))
    reasons = engine_reasons(config, grid.device.type)
    if not reasons:
        return TransformerEngineBackend(grid, config)
    # a run that requires Transformer Engine must not silently use native layers
    if wanted:
        lines = [f"  - {problem}" for problem in _refused(wanted, reasons)]
        raise ValueError("\n".join(["this configuration cannot run:", *lines]))
    backend = NativeBackend(grid, config, _weight_gradients(config, grid))
    backend.tell(f"layers: native, because {'; '.join(reasons)}")
    return backend


def _weight_gradients(config: RunConfig, grid: ProcessGrid) -> WeightGradients | None:
    """Return the receiver of native layers' weight gradients; None if autograd computes them."""
    asked = config.parallel.defers_weight_gradients
    if not (asked or config.training.gradient_accumulation_fusion):
        return None
    # with this schedule, stages that need not defer gradients add them immediately
    later = asked and defers(grid.pp.rank, config.parallel.num_virtual_stages_per_pipeline_rank)
    add = None
    # apex's kernel expects 16-bit factors
    if grid.device.type == "cuda" and config.training.dtype == "bfloat16":
        add = weight_gradient_kernel()
    add = add or add_weight_gradient
    return DeferredWeightGradients(add) if later else WeightGradients(add)
