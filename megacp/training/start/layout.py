"""Advice for a run whose parallel layout does not allow its number of ranks: how to plan another.

A run never plans its own layout. `megacp-plan` writes the flags of a layout to a file for
`--config`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from megacp.engine.checks import check
from megacp.engine.config.other_programs import by_flag
from megacp.engine.config.run import RunConfig, flag, with_values
from megacp.engine.config.yaml_file import values_of_file
from megacp.storage.place import Place
from megacp.storage.wording import counted

# Fields of a parallel layout, which megacp-plan chooses. For another machine, it also chooses the
# dtype.
LAYOUT_FIELDS = frozenset(
    {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "num_virtual_stages_per_pipeline_rank",
        "pipeline_schedule",
        "cp_comm_type",
        "cp_layout",
        "hierarchical_context_parallel_sizes",
        "data_parallel_sharding_strategy",
        "num_distributed_optimizer_instances",
        "micro_batch_size",
        "recompute_granularity",
        "activation_offload",
        "mlp_chunk_tokens",
    }
)
# File name for the planned layout in the suggested commands.
PLANNED = "best.yaml"


@dataclass(frozen=True)
class SavedBy:
    """The checkpoint from which a run resumes, and the number of ranks that saved it."""

    folder: Place
    ranks: int


def other_layout(
    config: RunConfig, ranks: int, arguments: Sequence[str], saved_by: SavedBy | None
) -> str:
    """Return commands that plan another layout, or "" if the current one allows `ranks` ranks.

    `arguments` are the flags of the run, without `--nproc`.
    """
    if config.model_ranks < 1:  # a size is out of range
        return ""
    # Find problems that the usual number of ranks does not have. A dry run ignores missing files.
    elsewhere = with_values(config, {"dry_run": True})
    usual = saved_by.ranks if saved_by is not None else config.model_ranks
    if set(check(elsewhere, ranks)) <= set(check(elsewhere, usual)):
        return ""
    p = config.parallel
    said = (
        f"The parallel layout with --tensor-model-parallel-size {p.tensor_model_parallel_size}, "
        "--pipeline-model-parallel-size "
        f"{p.pipeline_model_parallel_size} and --context-parallel-size {p.context_parallel_size} "
        "does not allow "
        f"{counted(ranks, 'rank')}"
    )
    if saved_by is not None:
        said += f"; {saved_by.folder} was saved by {counted(saved_by.ranks, 'rank')}"
    # The plan sets the layout flags, but layout flags in other files would be kept.
    rest, files, replaced = _without_layout(arguments)
    plan = ["megacp-plan", "--gpu", "here", "--world-size", str(ranks), *rest, "--output", PLANNED]
    if PLANNED in replaced:
        plan.append("--overwrite")
    lines = [f"{said}. To plan another parallel layout:", f"    {shlex.join(plan)}"]
    for file, names in files.items():
        lines.append(
            f"  (first remove {', '.join(map(flag, names))} from {file}; otherwise, the plan keeps "
            "these values)"
        )
    lines += [
        "Then start the run with:",
        f"    {shlex.join([*rest, '--config', PLANNED])}",
    ]
    return "\n".join(lines)


def _without_layout(arguments: Sequence[str]) -> tuple[list[str], dict[str, list[str]], list[str]]:
    """Return the arguments without layout flags, and the --config files with layout fields.

    The three values are the remaining arguments, the files that mix layout fields with other fields
    (each with its layout fields), and the files that contain only a layout, which are removed from
    the arguments.
    """
    kept: list[str] = []
    mixed: dict[str, list[str]] = {}
    replaced: list[str] = []
    for words in by_flag(arguments):
        # The value follows `=` in the same word, or it is the last word.
        name, equals, value = words[0].partition("=")
        field = name.removeprefix("--").replace("-", "_")
        if field in LAYOUT_FIELDS | {"dry_run", "world_size"}:
            continue  # the plan sets these flags
        if name == "--config":
            path = value if equals else words[-1]
            fields = values_of_file(path).keys()
            if layout := [one for one in fields if one in LAYOUT_FIELDS]:
                # a file such as best.yaml, which megacp-plan will overwrite
                if fields <= LAYOUT_FIELDS | {"dtype"}:
                    replaced.append(path)
                    continue
                mixed[path] = layout
        kept += words
    return kept, mixed, replaced
