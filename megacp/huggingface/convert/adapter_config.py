"""The adapter_config.json of peft: every field with its type, and the modules it names, found in
bounded time.

A field that changes what an adapter computes is followed or refused by its name. Names of modules
may be regular expressions, which are foreign programs: they get some seconds of computing.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacp.engine.config.model import PairSize
from megacp.huggingface.convert.config_json import ConfigJson, shown
from megacp.prepare.tokenize.beside import read_object
from megacp.storage.wording import listed

NAME = "adapter_config.json"
READ = (
    *(
        "peft_type",
        "r",
        "lora_alpha",
        "lora_dropout",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
    ),
    *("target_modules", "target_parameters", "exclude_modules", "init_lora_weights"),
    *("layers_to_transform", "layers_pattern"),
)
"""Fields that are read."""
HARMLESS = (
    *(
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
    ),
    *("megatron_core", "runtime_config", "qalora_group_size", "ensure_weight_tying"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
)
"""Fields that no answer of a saved adapter depends on. Any other field must say that it is not
used.
"""
MOST_RANK, MOST_ALPHA, LEAST_ALPHA = 1 << 20, 1e9, 1e-9
MATCHING_SECONDS = 5.0
"""Seconds of computing that all regular expressions of a config may take; some hundred modules take
a millisecond.
"""
_SWITCHES = ("use_dora", "use_qalora", "lora_bias", "fan_in_fan_out")
"""Fields of what is not followed that are true or false."""
_BESIDE = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights that leave the weights beside the pairs as they are."""
_PLAIN = re.compile(r"\w{1,60}", re.ASCII)
"""A field's name that is shown as it is."""
_LAYER = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")
"""The first number in a module's name, by which peft knows its layer."""


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_text_or_names(value: Any) -> bool:
    return _is_text(value) or _is_names(value)


def _is_layer(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_layers(value: Any) -> bool:
    return _is_layer(value) or (
        isinstance(value, list) and all(_is_layer(layer) for layer in value)
    )


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_switch_or_text(value: Any) -> bool:
    return isinstance(value, (bool, str))


_TYPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("task_type", "peft_version", "revision", "megatron_core"), (_is_text, "a text")
    ),
    "base_model_name_or_path": (_is_text, "a text"),
    **dict.fromkeys(
        ("use_rslora", "inference_mode", "ensure_weight_tying"), (_is_switch, "true or false")
    ),
    **dict.fromkeys(
        ("auto_mapping", "runtime_config", "loftq_config", "eva_config"), (_is_object, "an object")
    ),
    **dict.fromkeys(("corda_config", "lora_ga_config"), (_is_object, "an object")),
    "target_modules": (_is_text_or_names, "a text or a list of texts"),
    "exclude_modules": (_is_text_or_names, "a text or a list of texts"),
    "layers_pattern": (_is_text_or_names, "a text or a list of texts"),
    "target_parameters": (_is_names, "a list of texts"),
    "layers_to_transform": (_is_layers, "a layer's number or a list of them"),
    "qalora_group_size": (_is_whole, "a whole number"),
    "rank_pattern": (_is_object, "an object of ranks"),
    "alpha_pattern": (_is_object, "an object of numbers"),
}
"""What a field must be if it is not null."""


@dataclass(frozen=True)
class TargetSaid:
    """What a config says about one module or parameter."""

    is_module: bool
    """Whether peft puts a pair beside a module of this name."""
    is_parameter: bool
    """Whether peft puts a pair beside a parameter of this name."""
    size: PairSize


class AdapterConfig:
    """A config whose fields have been checked."""

    def __init__(self, path: Path) -> None:
        """Raise ValueError that lists all faults: other types, ranges, and fields that only peft
        follows.
        """
        content = read_object(path)
        kind = content.get("peft_type")
        if kind != "LORA":
            raise ValueError(
                f"{NAME} says another peft_type than LORA, {shown(kind)}: only low-rank pairs are "
                "read"
            )
        strange = [
            name
            for name in content
            if name not in (*READ, *HARMLESS) and not _is_nothing(name, content[name])
        ]
        if strange:
            told = [
                f"{name if _PLAIN.fullmatch(name) else shown(name)} {shown(content[name])}"
                for name in strange
            ]
            raise ValueError(f"{NAME} says {listed(told, 10)}: only low-rank pairs are read")
        fields = ConfigJson(content)
        self.rank: int = fields.number("r", 8, high=MOST_RANK)
        self.alpha: float = fields.number("lora_alpha", 8.0, float, LEAST_ALPHA, MOST_ALPHA)
        self.dropout: float = fields.number("lora_dropout", 0.0, float, 0.0, 1.0)
        faults = fields.faults
        for name, (is_sound, words) in _TYPES.items():
            value = content.get(name)
            if value is not None and not is_sound(value):
                faults.append(f"{name} is {shown(value)}, expected {words}")
        start = content.get("init_lora_weights", True)
        if not _is_switch_or_text(start):
            faults.append(f"init_lora_weights is {shown(start)}, expected true, false or a text")
        self._ranks = self._pattern(fields, content.get("rank_pattern"), "rank_pattern")
        self._alphas = self._pattern(fields, content.get("alpha_pattern"), "alpha_pattern")
        if faults:
            raise ValueError(f"{NAME}: {listed(faults, 10, '; ')}")
        if start not in _BESIDE:
            raise ValueError(
                f"{NAME} says init_lora_weights {shown(start)}, which changes the weights beside "
                "the pairs: save plain "
                "pairs with peft's path_initial_model_for_weight_conversion"
            )
        self._is_root = bool(content.get("use_rslora"))
        self.target_modules: str | list[str] | None = content.get("target_modules")
        self.target_parameters: list[str] = content.get("target_parameters") or []
        self._excluded: str | list[str] = content.get("exclude_modules") or []
        layers = content.get("layers_to_transform")
        self.layers: list[int] | None = [layers] if isinstance(layers, int) else layers or None
        patterns = content.get("layers_pattern") or []
        self._layer_names: list[str] = [patterns] if isinstance(patterns, str) else patterns
        if isinstance(self.target_modules, str) and layers is not None:
            raise ValueError(
                f"{NAME}: layers_to_transform needs a list of target_modules, as in peft"
            )

    @staticmethod
    def _pattern(fields: ConfigJson, value: Any, name: str) -> dict[str, Any]:
        """Return ranks or alphas by regular expression; faults are added to those of `fields`."""
        if not isinstance(value, dict):
            return {}
        for key, number in value.items():
            place = f"{name}[{shown(key)}]"
            if name == "rank_pattern":
                fields.checked(place, number, 1, int, 1, MOST_RANK)
            else:
                fields.checked(place, number, 1.0, float, LEAST_ALPHA, MOST_ALPHA)
        return value

    @property
    def usual(self) -> PairSize:
        """The size of pairs that no pattern speaks of."""
        return self.size(self.rank, self.alpha)

    def size(self, rank: int, alpha: float) -> PairSize:
        """Return a size whose scale is alpha / rank, also if the config divides by the root of the
        rank.
        """
        return PairSize(rank, alpha * rank**0.5 if self._is_root else alpha)

    def told(self, field: str) -> str:
        """Quote the config's words about which modules or parameters have pairs."""
        targets = self.target_modules if field == "target_modules" else self.target_parameters
        words = f"{NAME} says {field} {shown(targets)}"
        if self._excluded:
            words += f", exclude_modules {shown(self._excluded)}"
        if self.layers is not None:
            words += f", layers_to_transform {shown(self.layers)}"
        return words

    def about(self, names: Iterable[str]) -> dict[str, TargetSaid]:
        """Look up some modules and parameters.

        Raise ValueError for a regular expression that does not compile, and if all of them together
        do not end soon.
        """
        try:
            with _ends_after(MATCHING_SECONDS):
                matcher = _Matcher(self)
                return {name: matcher.said(name) for name in names}
        except TimeoutError:
            raise ValueError(
                f"{NAME}: its regular expressions are not done after {MATCHING_SECONDS:g} s of "
                "computing "
                "(target_modules, exclude_modules, rank_pattern, alpha_pattern, layers_pattern)"
            ) from None


class _Matcher:
    """The regular expressions of a config, compiled, and its lists as sets."""

    def __init__(self, config: AdapterConfig) -> None:
        self._config = config
        self._targets = _names_or_expression("target_modules", config.target_modules or [])
        self._excluded = _names_or_expression("exclude_modules", config._excluded)
        self._parameters = frozenset(config.target_parameters)
        self._layers = None if config.layers is None else frozenset(config.layers)
        self._layer_of = [_LAYER]
        if config._layer_names:
            self._layer_of = [
                _compiled("layers_pattern", pattern, rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.")
                for pattern in config._layer_names
            ]
        self._ranks, self._alphas = (
            [(_compiled(field, key, rf"(.*\.)?({key})$"), number) for key, number in values.items()]
            for field, values in (
                ("rank_pattern", config._ranks),
                ("alpha_pattern", config._alphas),
            )
        )

    def said(self, name: str) -> TargetSaid:
        """Say what the config says, by the rules of peft."""
        rank = next(
            (number for pattern, number in self._ranks if pattern.match(name)), self._config.rank
        )
        alpha = float(
            next(
                (number for pattern, number in self._alphas if pattern.match(name)),
                self._config.alpha,
            )
        )
        size = self._config.size(rank, alpha)
        return TargetSaid(self._is_module(name), _ends_in_one_of(name, self._parameters), size)

    def _is_module(self, name: str) -> bool:
        if self._excluded(name) or not self._targets(name):
            return False
        if self._layers is None:
            return True
        found = next(filter(None, (pattern.match(name) for pattern in self._layer_of)), None)
        return found is not None and int(found["idx"]) in self._layers


def _is_nothing(name: str, value: Any) -> bool:
    """Whether the value of a field says that it is not used."""
    if value is None or value is False:
        return True
    if name in _SWITCHES:
        return False
    return bool(value == "none") if name == "bias" else value in ([], {})


def _names_or_expression(field: str, said: str | Sequence[str]) -> Callable[[str], bool]:
    """Return whether a name is among those that a field says: one expression, or ends of names."""
    if isinstance(said, str):
        if field == "target_modules" and said.lower() == "all-linear":
            return lambda name: True
        pattern = _compiled(field, said, said)
        return lambda name: pattern.fullmatch(name) is not None
    names = frozenset(said)
    return lambda name: _ends_in_one_of(name, names)


def _ends_in_one_of(name: str, ends: frozenset[str]) -> bool:
    """Whether a dotted name, or its end behind some dot, is one of `ends`."""
    parts = name.split(".")
    return any(".".join(parts[first:]) in ends for first in range(len(parts)))


def _compiled(field: str, said: str, whole: str) -> re.Pattern[str]:
    """Compile an expression that a field says as part of a whole one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(whole)
    except (re.error, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"{NAME}: {field} {shown(said)} is no regular expression: {shown(str(error))}"
        ) from None


@contextlib.contextmanager
def _ends_after(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in a block that computes longer. Only in a process's main thread; others
    take no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before or signal.SIG_DFL)


def _end(number: int, frame: Any) -> None:
    raise TimeoutError
