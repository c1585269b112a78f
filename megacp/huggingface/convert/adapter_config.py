"""Reads peft's adapter_config.json: checks all fields and finds the modules that they select.

A field that changes an adapter's output is either supported or refused by name. Module names may be
regular expressions from an untrusted source, so the time for matching is limited.
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
# Supported fields.
READ = (
    "peft_type",
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "init_lora_weights",
    "layers_to_transform",
    "layers_pattern",
)
# Fields without effect on the output of a saved adapter. Any other field must be null, false or
# empty.
HARMLESS = (
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "megatron_core",
    "runtime_config",
    "qalora_group_size",
    "ensure_weight_tying",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
)
# The largest accepted rank, and the range of alpha.
MOST_RANK = 1 << 20
MOST_ALPHA = 1e9
LEAST_ALPHA = 1e-9
# Limit on the CPU time for matching all regular expressions of a config, in seconds. Matching a few
# hundred modules takes about a millisecond.
MATCHING_SECONDS = 5.0
# Unsupported boolean fields; false means that the feature is not used.
_SWITCHES = ("use_dora", "use_qalora", "lora_bias", "fan_in_fan_out")
# Values of init_lora_weights that leave the base model's weights unchanged.
_BESIDE = (True, False, "gaussian", "eva", "orthogonal", "mica")
# A field name that a message shows without quotes.
_PLAIN = re.compile(r"\w{1,60}", re.ASCII)
# The first number in a module's name, which peft treats as its layer number.
_LAYER = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")


# Type checks for the table below.
def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_text_or_names(value: Any) -> bool:
    return _is_text(value) or _is_names(value)


def _is_layer(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_layers(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_layer(layer) for layer in value)
    return _is_layer(value)


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_switch_or_text(value: Any) -> bool:
    return isinstance(value, (bool, str))


# Field -> check for values other than null, and the expected type as a phrase for messages.
_TYPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "task_type": (_is_text, "a string"),
    "peft_version": (_is_text, "a string"),
    "revision": (_is_text, "a string"),
    "megatron_core": (_is_text, "a string"),
    "base_model_name_or_path": (_is_text, "a string"),
    "use_rslora": (_is_switch, "true or false"),
    "inference_mode": (_is_switch, "true or false"),
    "ensure_weight_tying": (_is_switch, "true or false"),
    "auto_mapping": (_is_object, "an object"),
    "runtime_config": (_is_object, "an object"),
    "loftq_config": (_is_object, "an object"),
    "eva_config": (_is_object, "an object"),
    "corda_config": (_is_object, "an object"),
    "lora_ga_config": (_is_object, "an object"),
    "target_modules": (_is_text_or_names, "a string or a list of strings"),
    "exclude_modules": (_is_text_or_names, "a string or a list of strings"),
    "layers_pattern": (_is_text_or_names, "a string or a list of strings"),
    "target_parameters": (_is_names, "a list of strings"),
    "layers_to_transform": (_is_layers, "a layer number or a list of layer numbers"),
    "qalora_group_size": (_is_whole, "a whole number"),
    "rank_pattern": (_is_object, "an object of ranks"),
    "alpha_pattern": (_is_object, "an object of numbers"),
}


@dataclass(frozen=True)
class TargetSaid:
    """A config's settings for one module or parameter."""

    is_module: bool
    """Whether peft adds a pair to a module of this name."""
    is_parameter: bool
    """Whether peft adds a pair to a parameter of this name."""
    size: PairSize


class AdapterConfig:
    """A validated adapter_config.json."""

    def __init__(self, path: Path) -> None:
        """Read and check a config.

        Raise ValueError with all faults: wrong types, numbers out of range, and settings that only
        peft supports.
        """
        # Other methods of peft have other fields, so their configs are not checked further.
        content = read_object(path)
        kind = content.get("peft_type")
        if kind != "LORA":
            raise ValueError(f"{NAME} has peft_type {shown(kind)}; only LORA is supported")
        strange = []
        for name, value in content.items():
            if name not in (*READ, *HARMLESS) and not _is_nothing(name, value):
                word = name if _PLAIN.fullmatch(name) else shown(name)
                strange.append(f"{word} {shown(value)}")
        if strange:
            raise ValueError(
                f"{NAME} has {listed(strange, 10)}, which megacp does not support; use a plain "
                "LoRA adapter"
            )
        # Read the numbers first, with peft's defaults.
        fields = ConfigJson(content)
        self.rank: int = fields.number("r", 8, high=MOST_RANK)
        self.alpha: float = fields.number("lora_alpha", 8.0, float, LEAST_ALPHA, MOST_ALPHA)
        self.dropout: float = fields.number("lora_dropout", 0.0, float, 0.0, 1.0)
        faults = fields.faults
        for name, (is_sound, words) in _TYPES.items():
            value = content.get(name)
            if value is not None and not is_sound(value):
                faults.append(f"{name} is {shown(value)}, expected {words}")
        # Some initialisations modify the base model, and the adapter fits only the modified one.
        start = content.get("init_lora_weights", True)
        if not _is_switch_or_text(start):
            faults.append(f"init_lora_weights is {shown(start)}, expected true, false or a string")
        self._ranks = self._pattern(fields, content.get("rank_pattern"), "rank_pattern")
        self._alphas = self._pattern(fields, content.get("alpha_pattern"), "alpha_pattern")
        if faults:
            raise ValueError(f"{NAME}: {listed(faults, 10, '; ')}")
        if start not in _BESIDE:
            raise ValueError(
                f"{NAME} has init_lora_weights {shown(start)}, which modifies the weights of "
                "the base model: save a plain adapter with peft's "
                "path_initial_model_for_weight_conversion"
            )
        # All fields are valid here.
        self._is_root = bool(content.get("use_rslora"))
        self.target_modules: str | list[str] | None = content.get("target_modules")
        self.target_parameters: list[str] = content.get("target_parameters") or []
        self._excluded: str | list[str] = content.get("exclude_modules") or []
        layers = content.get("layers_to_transform")
        if isinstance(layers, int):
            self.layers: list[int] | None = [layers]
        else:
            self.layers = layers or None
        patterns = content.get("layers_pattern") or []
        self._layer_names: list[str] = [patterns] if isinstance(patterns, str) else patterns
        if isinstance(self.target_modules, str) and layers is not None:
            raise ValueError(
                f"{NAME}: layers_to_transform requires a list of target_modules, as in peft"
            )

    @staticmethod
    def _pattern(fields: ConfigJson, value: Any, name: str) -> dict[str, Any]:
        """Return regular expressions -> ranks or alphas; add faults to `fields`."""
        if not isinstance(value, dict):
            return {}
        for key, number in value.items():
            # `checked` adds a fault for an invalid number; its result is not needed.
            place = f"{name}[{shown(key)}]"
            if name == "rank_pattern":
                fields.checked(place, number, 1, int, 1, MOST_RANK)
            else:
                fields.checked(place, number, 1.0, float, LEAST_ALPHA, MOST_ALPHA)
        return value

    @property
    def usual(self) -> PairSize:
        """The size of pairs that match no pattern."""
        return self.size(self.rank, self.alpha)

    def size(self, rank: int, alpha: float) -> PairSize:
        """Return the size of a pair, whose scale is always alpha / rank.

        With rsLoRA, the scale is alpha / sqrt(rank), so alpha is multiplied by sqrt(rank).
        """
        return PairSize(rank, alpha * rank**0.5 if self._is_root else alpha)

    def told(self, field: str) -> str:
        """Return a phrase that quotes the fields by which modules or parameters are selected."""
        targets = self.target_modules if field == "target_modules" else self.target_parameters
        words = f"{NAME} has {field} {shown(targets)}"
        if self._excluded:
            words += f", exclude_modules {shown(self._excluded)}"
        if self.layers is not None:
            words += f", layers_to_transform {shown(self.layers)}"
        return words

    def about(self, names: Iterable[str]) -> dict[str, TargetSaid]:
        """Return the settings for each of these modules and parameters.

        Raise ValueError for an invalid regular expression, or if matching takes too long.
        """
        try:
            # A malicious expression may need exponential time, so all expressions share one limit.
            with _ends_after(MATCHING_SECONDS):
                matcher = _Matcher(self)
                return {name: matcher.said(name) for name in names}
        except TimeoutError:
            raise ValueError(
                f"{NAME}: matching its regular expressions takes more than {MATCHING_SECONDS:g} s; "
                "simplify target_modules, exclude_modules, rank_pattern, alpha_pattern or "
                "layers_pattern"
            ) from None


class _Matcher:
    """The compiled regular expressions and name sets of a config."""

    def __init__(self, config: AdapterConfig) -> None:
        self._config = config
        self._targets = _names_or_expression("target_modules", config.target_modules or [])
        self._excluded = _names_or_expression("exclude_modules", config._excluded)
        self._parameters = frozenset(config.target_parameters)
        self._layers = None if config.layers is None else frozenset(config.layers)
        # By default, the first number in a name is the layer; layers_pattern overrides this.
        self._layer_of = [_LAYER]
        if config._layer_names:
            self._layer_of = [
                _compiled("layers_pattern", pattern, rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.")
                for pattern in config._layer_names
            ]
        self._ranks = _compiled_pattern("rank_pattern", config._ranks)
        self._alphas = _compiled_pattern("alpha_pattern", config._alphas)

    def said(self, name: str) -> TargetSaid:
        """Return the settings for a name, following peft's rules."""
        rank = _first_match(self._ranks, name, self._config.rank)
        alpha = float(_first_match(self._alphas, name, self._config.alpha))
        size = self._config.size(rank, alpha)
        return TargetSaid(self._is_module(name), _ends_in_one_of(name, self._parameters), size)

    def _is_module(self, name: str) -> bool:
        """Return whether peft adds a pair to a module of this name."""
        # peft checks exclusions first, then targets, then layers.
        if self._excluded(name) or not self._targets(name):
            return False
        if self._layers is None:
            return True
        # The first pattern that matches finds the layer.
        for pattern in self._layer_of:
            found = pattern.match(name)
            if found is not None:
                return int(found["idx"]) in self._layers
        return False


def _compiled_pattern(field: str, values: Mapping[str, Any]) -> list[tuple[re.Pattern[str], Any]]:
    """Compile the keys of rank_pattern or alpha_pattern, which match the end of a name."""
    return [(_compiled(field, key, rf"(.*\.)?({key})$"), number) for key, number in values.items()]


def _first_match(patterns: Iterable[tuple[re.Pattern[str], Any]], name: str, default: Any) -> Any:
    """Return the number of the first pattern that matches a name, or `default`."""
    for pattern, number in patterns:
        if pattern.match(name):
            return number
    return default


def _is_nothing(name: str, value: Any) -> bool:
    """Return whether a field with this value has no effect."""
    if value is None or value is False:
        return True
    if name in _SWITCHES:
        return False
    if name == "bias":
        return bool(value == "none")
    return value in ([], {})


def _names_or_expression(field: str, said: str | Sequence[str]) -> Callable[[str], bool]:
    """Return a predicate for the names that a field selects by regular expression or by suffix."""
    if isinstance(said, str):
        # Only names of linears are matched, so this word selects all of them.
        if field == "target_modules" and said.lower() == "all-linear":
            return lambda name: True
        pattern = _compiled(field, said, said)
        return lambda name: pattern.fullmatch(name) is not None
    names = frozenset(said)
    return lambda name: _ends_in_one_of(name, names)


def _ends_in_one_of(name: str, ends: frozenset[str]) -> bool:
    """Return whether a dotted name, or its part after some dot, is one of `ends`."""
    parts = name.split(".")
    return any(".".join(parts[first:]) in ends for first in range(len(parts)))


def _compiled(field: str, said: str, whole: str) -> re.Pattern[str]:
    """Compile `whole`, which contains a field's expression `said`.

    Raise ValueError with `said` if it is invalid.
    """
    try:
        with warnings.catch_warnings():
            # Odd expressions cause warnings, which would be printed before the error.
            warnings.simplefilter("ignore")
            return re.compile(whole)
    except (re.error, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"{NAME}: {field} {shown(said)} is not a valid regular expression: {shown(str(error))}"
        ) from None


@contextlib.contextmanager
def _ends_after(seconds: float) -> Iterator[None]:
    """Raise TimeoutError if the enclosed block uses more than `seconds` of CPU time.

    Outside the main thread there is no limit, because only the main thread receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # The timer counts the CPU time of this process, so other processes do not affect it.
    before = signal.signal(signal.SIGVTALRM, _end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before or signal.SIG_DFL)


def _end(number: int, frame: Any) -> None:
    raise TimeoutError
