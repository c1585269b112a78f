"""The whole configuration of a run as one frozen value, and its flat view by flag name.

Every field name is unique over all rooms: flag, YAML key and field are one name, as in Megatron.
The nesting is for the code that reads it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megacp.distributed.shape import GridShape
from megacp.engine.config.model import ModelConfig
from megacp.engine.config.parallel import ParallelConfig
from megacp.engine.config.ranges import Count, IsPath, Range
from megacp.engine.config.training import CheckpointConfig, DataConfig, LogConfig, TrainingConfig
from megacp.engine.config.vision import VisionConfig
from megacp.storage.place import at_home
from megacp.storage.url import is_url

Value = bool | int | float | str | tuple[float, ...] | tuple[str, ...] | None
"""What a flag can hold."""

ON_CPU: dict[str, Value] = {
    "attention_kernel": "auto",
    "transformer_impl": "native",
    "fp8": "off",
}
"""Replacements of choices that only a GPU can run."""


@dataclass(frozen=True)
class RunConfig:
    """Train a language model on packed sequences over a grid of tp x cp x dp x pp ranks."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    dry_run: bool = False
    """Check the configuration, print grid, stages and memory, and stop; needs one process and no
    GPU.
    """

    world_size: Count[int | None] = None
    """World size to check with --dry-run (default: tp x pp x cp)."""

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model: tp x pp x cp."""
        p = self.parallel
        return (
            p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size
        )

    @functools.cached_property
    def frozen_parts(self) -> tuple[str, ...]:
        """Parts among `text`, `vision` and `connector` whose weights stay; beside low-rank pairs
        all do.
        """
        parts = ("text", "vision", "connector")
        return (
            parts
            if self.model.lora_rank > 0
            else tuple(name for name in parts if name in self.vision.frozen)
        )

    def data_parallel_size(self, world_size: int) -> int:
        """Data-parallel ranks in a world of `world_size`, rounded down (`checks` refuses a
        remainder).
        """
        return world_size // self.model_ranks

    def grid_shape(self, world_size: int) -> GridShape:
        """The grid of a checked config on `world_size` ranks."""
        p = self.parallel
        return GridShape(
            tp=p.tensor_model_parallel_size,
            cp=p.context_parallel_size,
            dp=self.data_parallel_size(world_size),
            pp=p.pipeline_model_parallel_size,
            ep=p.expert_model_parallel_size if self.model.num_experts > 0 else 0,
        )

    def num_microbatches(self, world_size: int) -> int:
        """Microbatches per step and data-parallel rank: global batch / (micro batch x dp), rounded
        down.
        """
        return self.training.global_batch_size // (
            self.training.micro_batch_size * self.data_parallel_size(world_size)
        )

    @property
    def log_path(self) -> Path | None:
        """The JSONL file: `log_file`, or log.jsonl beside the checkpoints of a local --save, or
        megacp_log.jsonl; None for /dev/null.
        """
        usual = self._local_save / "log.jsonl" if self._local_save else "megacp_log.jsonl"
        path = Path(usual if self.log.log_file is None else self.log.log_file)
        return None if str(path) == os.devnull else path

    @property
    def profile_path(self) -> Path:
        """The folder for traces: `profile` beside the JSONL file, or where that file would be."""
        return (self.log_path.parent if self.log_path else self._local_save or Path()) / "profile"

    @property
    def _local_save(self) -> Path | None:
        save = self.checkpoint.save
        return Path(save) if save and not is_url(save) else None


@dataclass(frozen=True)
class FieldInfo:
    """Where a flag lives: `room` is the field of RunConfig that holds it, "" for RunConfig
    itself.
    """

    name: str
    room: str
    hint: Any
    """The type, without its range."""
    range: Range | None
    """Allowed values of a number. None is allowed beside them where the type has it."""
    is_path: bool = False
    """Whether it holds a path or a URL, or several beside their weights."""

    @functools.cached_property
    def words(self) -> list[str]:
        """The words that the field may hold, beside a number or instead of it."""
        literals = (
            part for part in union_types(self.hint) if typing.get_origin(part) is typing.Literal
        )
        return [word for part in literals for word in typing.get_args(part)]

    def problem(self, value: Value) -> str | None:
        """Why the field cannot hold this value: missing, not one of its words, out of range; None
        when it can.
        """
        words = self.words
        if value is None:
            return None if type(None) in union_types(self.hint) else "needs a value"
        if value in words:
            return None
        if self.range is None:
            unknown = f"got {value!r}, allowed are {', '.join(words)}" if words else None
            return "an empty string is no name" if value == "" else unknown
        if isinstance(value, (bool, str)):
            return f"expected a number{''.join(f' or {word}' for word in words)}, got {value!r}"
        numbers = value if isinstance(value, tuple) else (value,)
        if all(self.range.holds(float(number)) for number in numbers):
            return None
        return f"got {' '.join(map(str, numbers))}, it must be {self.range}"


def union_types(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return (
        typing.get_args(hint)
        if typing.get_origin(hint) in (types.UnionType, typing.Union)
        else (hint,)
    )


@functools.cache
def fields() -> dict[str, FieldInfo]:
    """All flags by field name, in the order of their declaration."""
    table: dict[str, FieldInfo] = {}
    for room, room_type in typing.get_type_hints(RunConfig, include_extras=True).items():
        inside = dataclasses.is_dataclass(room_type)
        hints = (
            typing.get_type_hints(room_type, include_extras=True) if inside else {room: room_type}
        )
        for name, hint in hints.items():
            assert name not in table, (
                f"the flag {name} is declared in {room} and in {table[name].room}"
            )
            marks = getattr(hint, "__metadata__", ())
            plain = typing.get_args(hint)[0] if marks else hint
            allowed = next((mark for mark in marks if isinstance(mark, Range)), None)
            is_path = any(isinstance(mark, IsPath) for mark in marks)
            table[name] = FieldInfo(name, room if inside else "", plain, allowed, is_path)
    return table


def flag(name: str) -> str:
    """The command line spelling of a field: `seq_length` -> `--seq-length`."""
    return "--" + name.replace("_", "-")


def flatten(config: RunConfig) -> dict[str, Value]:
    """All values by field name."""
    return {
        info.name: getattr(getattr(config, info.room) if info.room else config, info.name)
        for info in fields().values()
    }


def with_values(config: RunConfig, values: Mapping[str, Value]) -> RunConfig:
    """A copy of `config` with some fields replaced, by flat field name. KeyError for a name that is
    no field.
    """
    rooms: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        rooms.setdefault(fields()[name].room, {})[name] = value
    own: dict[str, Any] = rooms.pop("", {})
    for room, changes in rooms.items():
        own[room] = dataclasses.replace(getattr(config, room), **changes)
    return dataclasses.replace(config, **own)


def with_homes(config: RunConfig) -> RunConfig:
    """Return a copy of `config` whose paths have the folders of users where they began with `~`.

    Raises ValueError that names each flag with a user who is not known.
    """
    before = flatten(config)
    values: dict[str, Value] = {}
    reasons = []
    for info in fields().values():
        value = before[info.name]
        if not info.is_path or value is None:
            continue
        try:
            if isinstance(value, tuple):
                values[info.name] = tuple(at_home(str(part)) for part in value)
            else:
                values[info.name] = at_home(str(value))
        except ValueError as error:
            reasons.append(f"{flag(info.name)} {error}")
    if reasons:
        raise ValueError("\n".join(reasons))
    return with_values(config, values)
