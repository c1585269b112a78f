"""The whole configuration of a run as one frozen value, and its flat view by flag name.

Key property: every field name is unique over all rooms, so `--flag`, YAML key and field are one name and the nesting is
only for the code that reads it. Rejected: prefixed flags (`--parallel.tensor-model-parallel-size`), which no user of
Megatron would guess.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megacp.config.data import DataConfig
from megacp.config.health import HealthConfig
from megacp.config.model import ModelConfig
from megacp.config.parallel import ParallelConfig
from megacp.config.training import CheckpointConfig, LogConfig, TrainingConfig
from megacp.config.vision import VisionConfig

Value = bool | int | float | str | tuple[int, ...] | None
"""What a flag can hold."""


@dataclass(frozen=True)
class RunConfig:
    """Train a language model on packed sequences over a grid of tp x cp x dp x pp ranks."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    dry_run: bool = False
    """Check the configuration, print grid, stages and memory, and stop; needs one process and no GPU."""

    world_size: int | None = None
    """World size to check with --dry-run (default: tp x pp x cp)."""

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model: tp x pp x cp."""
        p = self.parallel
        return p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Data-parallel ranks in a world of `world_size`, rounded down (`checks` refuses a remainder)."""
        return world_size // self.model_ranks

    def num_microbatches(self, world_size: int) -> int:
        """Microbatches per step and data-parallel rank: global batch / (micro batch x dp), rounded down."""
        return self.training.global_batch_size // (self.training.micro_batch_size * self.data_parallel_size(world_size))

    @property
    def log_path(self) -> Path:
        """The JSONL file: `log_file`, or log.jsonl beside the checkpoints, or megacp_log.jsonl."""
        if self.log.log_file is not None:
            return Path(self.log.log_file)
        return Path(self.checkpoint.save, "log.jsonl") if self.checkpoint.save else Path("megacp_log.jsonl")

    @property
    def profile_path(self) -> Path:
        """The folder for traces: `profile_dir`, or the folder `profile` beside the JSONL file."""
        return Path(self.log.profile_dir) if self.log.profile_dir else self.log_path.parent / "profile"


@dataclass(frozen=True)
class FieldInfo:
    """Where a flag lives: `room` is the field of RunConfig that holds it, "" for RunConfig itself."""

    name: str
    room: str
    hint: Any


@functools.cache
def fields() -> dict[str, FieldInfo]:
    """All flags by field name, in the order of their declaration."""
    table: dict[str, FieldInfo] = {}
    for room, room_type in typing.get_type_hints(RunConfig).items():
        inside = typing.get_type_hints(room_type) if dataclasses.is_dataclass(room_type) else None
        rows = [(name, room, hint) for name, hint in inside.items()] if inside else [(room, "", room_type)]
        for name, owner, hint in rows:
            assert name not in table, f"the flag {name} is declared in {owner} and in {table[name].room}"
            table[name] = FieldInfo(name, owner, hint)
    return table


def flag(name: str) -> str:
    """The command line spelling of a field: `seq_length` -> `--seq-length`."""
    return "--" + name.replace("_", "-")


def flatten(config: RunConfig) -> dict[str, Value]:
    """All values by field name."""
    return {
        info.name: getattr(getattr(config, info.room) if info.room else config, info.name) for info in fields().values()
    }


def with_values(config: RunConfig, values: Mapping[str, Value]) -> RunConfig:
    """A copy of `config` with some fields replaced, by flat field name. KeyError for a name that is no field."""
    rooms: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        rooms.setdefault(fields()[name].room, {})[name] = value
    own: dict[str, Any] = rooms.pop("", {})
    for room, changes in rooms.items():
        own[room] = dataclasses.replace(getattr(config, room), **changes)
    return dataclasses.replace(config, **own)
