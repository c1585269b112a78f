"""The configuration of a run as a frozen dataclass, and its flat view by flag name.

Fields are nested in sections (`room` in the code), but field names are unique across sections. This
lets flags, YAML keys and fields have the same names, as in Megatron.
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
"""Possible values of a flag."""

ON_CPU: dict[str, Value] = {
    "attention_kernel": "auto",
    "transformer_impl": "native",
    "fp8": "off",
}
"""Values that replace those of a GPU configuration when it runs on a CPU."""


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
    """Check the configuration, print the grid, stages and memory, and exit. Needs one process and
    no GPU."""

    world_size: Count[int | None] = None
    """Number of ranks to assume with --dry-run. None means tp x pp x cp."""

    @property
    def model_ranks(self) -> int:
        """Number of ranks per copy of the model: tp x pp x cp."""
        p = self.parallel
        return (
            p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size
        )

    @functools.cached_property
    def frozen_parts(self) -> tuple[str, ...]:
        """Parts of the model that are frozen: any of `text`, `vision` and `connector`.

        LoRA freezes all three.
        """
        parts = ("text", "vision", "connector")
        if self.model.lora_rank > 0:
            return parts
        return tuple(name for name in parts if name in self.vision.frozen)

    def data_parallel_size(self, world_size: int) -> int:
        """Return the data-parallel size for `world_size` ranks, rounded down.

        `checks.py` refuses a world size with a remainder.
        """
        return world_size // self.model_ranks

    def grid_shape(self, world_size: int) -> GridShape:
        """Return the grid for `world_size` ranks. The config must have passed `check`."""
        p = self.parallel
        return GridShape(
            tp=p.tensor_model_parallel_size,
            cp=p.context_parallel_size,
            dp=self.data_parallel_size(world_size),
            pp=p.pipeline_model_parallel_size,
            # 0 creates no expert groups
            ep=p.expert_model_parallel_size if self.model.num_experts > 0 else 0,
        )

    def num_microbatches(self, world_size: int) -> int:
        """Return the number of microbatches per step on each data-parallel rank, rounded down."""
        # packs of all replicas in one microbatch
        packs_at_once = self.training.micro_batch_size * self.data_parallel_size(world_size)
        return self.training.global_batch_size // packs_at_once

    @property
    def log_path(self) -> Path | None:
        """Path of the JSONL log; None if --log-file is /dev/null.

        If --log-file is not set: log.jsonl in a local --save directory, otherwise megacp_log.jsonl.
        """
        if self.log.log_file is not None:
            path = Path(self.log.log_file)
        elif self._local_save:
            path = self._local_save / "log.jsonl"
        else:
            path = Path("megacp_log.jsonl")
        # /dev/null disables the log
        return None if str(path) == os.devnull else path

    @property
    def profile_path(self) -> Path:
        """Folder for traces: `profile`, next to the JSONL log.

        If the log is disabled, the folder is in a local --save directory, otherwise in the working
        directory.
        """
        if self.log_path:
            return self.log_path.parent / "profile"
        return (self._local_save or Path()) / "profile"

    @property
    def _local_save(self) -> Path | None:
        save = self.checkpoint.save
        return Path(save) if save and not is_url(save) else None


@dataclass(frozen=True)
class FieldInfo:
    """A flag's name, section and allowed values."""

    name: str
    room: str
    """Field of RunConfig that contains the flag; "" for fields of RunConfig itself."""
    hint: Any
    """Type annotation of the field, without the range."""
    range: Range | None
    """Range of a numeric flag. An optional field also allows None."""
    is_path: bool = False
    """Whether the value is a path or URL, or several of them with weights."""

    @functools.cached_property
    def words(self) -> list[str]:
        """Words that the field accepts, such as `auto`. A field may also accept a number."""
        words: list[str] = []
        for part in union_types(self.hint):
            if typing.get_origin(part) is typing.Literal:
                words += typing.get_args(part)
        return words

    def problem(self, value: Value) -> str | None:
        """Return why this value is invalid (missing, unknown or out of range); None if valid."""
        words = self.words
        # a file can contain null, and tyro reads the text `None` as no value
        if value is None:
            return None if type(None) in union_types(self.hint) else "needs a value"
        if value in words:
            return None
        if self.range is None:
            if value == "":
                return "the value must not be an empty string"
            # a field without range and words accepts every value of its type
            return f"got {value!r}; use one of {', '.join(words)}" if words else None
        if isinstance(value, (bool, str)):
            expected = " or ".join(["a number", *words])
            return f"expected {expected}, got {value!r}"
        # a few fields are pairs or triples of numbers
        numbers = value if isinstance(value, tuple) else (value,)
        if all(self.range.holds(float(number)) for number in numbers):
            return None
        shown = " ".join(map(str, numbers))
        return f"got {shown}, but it must be {self.range}"


def union_types(hint: Any) -> tuple[Any, ...]:
    """Return the member types of a union, or a tuple with only `hint` if it is not a union."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return typing.get_args(hint)
    return (hint,)


@functools.cache
def fields() -> dict[str, FieldInfo]:
    """Return all flags by field name, in declaration order."""
    table: dict[str, FieldInfo] = {}
    for room, room_type in typing.get_type_hints(RunConfig, include_extras=True).items():
        # RunConfig has sections, which are dataclasses, and a few flags of its own
        inside = dataclasses.is_dataclass(room_type)
        if inside:
            hints = typing.get_type_hints(room_type, include_extras=True)
        else:
            hints = {room: room_type}
        for name, hint in hints.items():
            # a flag has no section in its name, so two sections cannot share a name
            assert name not in table, (
                f"the flag {name} is declared in {room} and in {table[name].room}"
            )
            # `Positive[int]` is `Annotated[int, Range(1)]`: the type, then the marks
            marks = getattr(hint, "__metadata__", ())
            plain = typing.get_args(hint)[0] if marks else hint
            allowed = next((mark for mark in marks if isinstance(mark, Range)), None)
            is_path = any(isinstance(mark, IsPath) for mark in marks)
            table[name] = FieldInfo(name, room if inside else "", plain, allowed, is_path)
    return table


def flag(name: str) -> str:
    """Return the command-line spelling of a field: `seq_length` -> `--seq-length`."""
    return "--" + name.replace("_", "-")


def flatten(config: RunConfig) -> dict[str, Value]:
    """Return all values by field name."""
    values: dict[str, Value] = {}
    for name, info in fields().items():
        section = getattr(config, info.room) if info.room else config
        values[name] = getattr(section, name)
    return values


def with_values(config: RunConfig, values: Mapping[str, Value]) -> RunConfig:
    """Return a copy of `config` in which `values`, by field name, replace the old values.

    Raise KeyError if a name is not a field.
    """
    # section -> its changes; the configs are frozen, so each section is replaced once
    rooms: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        rooms.setdefault(fields()[name].room, {})[name] = value
    # flags of RunConfig itself have the section ""; they are replaced together with the sections
    own: dict[str, Any] = rooms.pop("", {})
    for room, changes in rooms.items():
        own[room] = dataclasses.replace(getattr(config, room), **changes)
    return dataclasses.replace(config, **own)


def with_homes(config: RunConfig) -> RunConfig:
    """Return a copy of `config` with `~` expanded in all paths.

    Raise ValueError if a path refers to the home of an unknown user; the message lists all flags
    with this problem.
    """
    before = flatten(config)
    # collect all unknown users, so that one error reports every mistake
    values: dict[str, Value] = {}
    reasons = []
    for info in fields().values():
        value = before[info.name]
        if not info.is_path or value is None:
            continue
        try:
            if isinstance(value, tuple):
                # WEIGHT FOLDER pairs of a blend; a weight does not start with `~` and is unchanged
                values[info.name] = tuple(at_home(str(part)) for part in value)
            else:
                values[info.name] = at_home(str(value))
        except ValueError as error:
            reasons.append(f"{flag(info.name)} {error}")
    if reasons:
        raise ValueError("\n".join(reasons))
    return with_values(config, values)
