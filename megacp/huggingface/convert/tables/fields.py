"""Fields of a `config.json` and the flags they are: rows that are read and written, and fields with one allowed value.

A row knows both directions and the meaning of an absent field: the transformers library's default, compared with it in
a test. A field that no row knows is refused by its name. Without that a sliding window or a scaled rotary embedding
would be lost in silence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Values = dict[str, Any]
"""Flags by field name, flat."""
_ABSENT = object()
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Number:
    """A kind of number with its ends: `low` <= value <= `high`, or above `low` where `low_open`."""

    kind: type = int
    low: float = 1
    high: float = _LARGEST
    low_open: bool = False

    def read(self, value: Any) -> Any:
        """The value as this kind, None when it is none: text, true, null, not finite, out of the ends."""
        if type(value) is int and self.kind is float and abs(value) <= _LARGEST:
            value = float(value)
        is_kind = isinstance(value, self.kind) and not isinstance(value, bool)
        if not is_kind or not math.isfinite(value):
            return None
        above = value > self.low if self.low_open else value >= self.low
        return value if above and value <= self.high else None

    def __str__(self) -> str:
        whole = self.kind is int
        begin = f"above {self.low - whole:g}" if whole or self.low_open else f"of at least {self.low:g}"
        return f"a {'whole ' * whole}number {begin} and at most {self.high:.10g}"


SIZE = Number()
LAYERS = Number(high=4096)
"""More would be a table of links without end rather than a model."""
EPSILON = Number(float, 0.0, 1.0, low_open=True)
SPREAD = Number(float, 0.0, 1e6)


SILENT: Mapping[str, Any] = {
    **dict.fromkeys(("is_decoder", "add_cross_attention", "tie_encoder_decoder", "torchscript", "use_bfloat16"), False),
    **dict.fromkeys(("rope_interleaved", "use_mrope", "use_sliding_window", "use_parallel_residual"), False),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tf_legacy_loss"), False),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), 1.0),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "classifier_dropout"), 0.0),
    "pruned_heads": {},
}
"""Values that say what is so without the field, in the library's configs and in those that people add fields to."""


def _is_silent(key: str, value: Any) -> bool:
    return key in SILENT and value == SILENT[key] and isinstance(value, bool) == isinstance(SILENT[key], bool)


def is_whole(value: Any) -> bool:
    """Whether a value is an integer, and not true or false."""
    return type(value) is int


class Theirs:
    """A config.json being read: values by dotted path; remembers which were asked for."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content
        self._seen: set[str] = set()

    def get(self, path: str, default: Any = None) -> Any:
        """The value, or `default` where there is none."""
        self._seen.add(path)
        value: Any = self._content
        for key in path.split("."):
            value = value.get(key, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        return default if value is _ABSENT else value

    def unknown(self, harmless: frozenset[str], sections: Sequence[str]) -> list[str]:
        """Paths that no row has asked for; `harmless` are last parts of paths, `sections` are walked into.

        An id of a token (`..._id`) changes no tensor's meaning, and null asks for nothing. A value of `SILENT` is what
        every model does without the field.
        """
        found = []
        for prefix in ("", *(f"{name}." for name in sections)):
            inside = self._content if not prefix else self._content.get(prefix[:-1])
            for key, value in inside.items() if isinstance(inside, Mapping) else ():
                path = prefix + key
                plain = value is None or key.endswith("_id") or key in harmless or _is_silent(key, value)
                if path not in self._seen and path not in sections and not plain:
                    found.append(path)
        return found

    @property
    def asked(self) -> frozenset[str]:
        """Paths that rows have asked for."""
        return frozenset(self._seen)


class Field(Protocol):
    """One row of a table."""

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        """Add the values of `theirs` to `values`, or to `reasons` why they cannot be expressed."""

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        """The other way round; `content` is by dotted path."""


@dataclass(frozen=True)
class Same:
    """The same number on both sides."""

    theirs: str
    ours: str
    default: Any
    """The meaning of its absence; a function of the values read so far where it depends on other fields."""
    number: Number = SIZE
    null: Callable[[Values], Any] | None = None
    """The meaning of null to the library; None: it takes no null here."""
    absent: Callable[[Values], Any] | None = None
    """The meaning of None on our side, when a config is written."""

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        found = theirs.get(self.theirs, _ABSENT)
        if found is _ABSENT:
            found = self.default(values) if callable(self.default) else self.default
        elif found is None and self.null is not None:
            found = self.null(values)
        number = self.number.read(found)
        if number is None:
            reasons.append(f"{self.theirs} is {shown(found)}, expected {self.number}")
        if number is not None or not callable(self.default):
            values[self.ours] = self.default if number is None else number  # others are read beside a refused one

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        content[self.theirs] = self.resolved(values)

    def resolved(self, values: Values) -> Any:
        """Our value, or what None stands for."""
        value = values[self.ours]
        return self.absent(values) if value is None and self.absent is not None else value


@dataclass(frozen=True)
class Word:
    """The same choice on both sides, in the spellings of `words` (theirs -> ours)."""

    theirs: str
    ours: str
    default: str
    words: Mapping[str, str]

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        found = theirs.get(self.theirs, self.default)
        known = isinstance(found, str) and found in self.words
        if not known:
            reasons.append(f"{self.theirs} is {shown(found)}, allowed are {', '.join(map(repr, self.words))}")
        values[self.ours] = self.words[found if known else self.default]

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        content[self.theirs] = {v: k for k, v in self.words.items()}[values[self.ours]]


@dataclass(frozen=True)
class Fixed:
    """A field that can only have one value here."""

    theirs: str
    value: Any
    default: Any = _ABSENT
    """The meaning of its absence, if not `value`."""
    written: bool = True

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        found = theirs.get(self.theirs, self.value if self.default is _ABSENT else self.default)
        if found != self.value or isinstance(found, bool) != isinstance(self.value, bool):
            reasons.append(f"{self.theirs} is {shown(found)}, megacp can only express {self.value!r}")

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        if self.written:
            content[self.theirs] = self.value


@dataclass(frozen=True)
class Unsaid:
    """One of our fields that their config has no word for: it must have one value."""

    ours: str
    value: Any

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        values[self.ours] = self.value

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        if values[self.ours] != self.value:
            flag = "--" + self.ours.replace("_", "-")
            reasons.append(f"{flag} is {values[self.ours]!r}, this architecture can only express {self.value!r}")


@dataclass(frozen=True)
class Switch:
    """One true or false of theirs for some of our flags; `inverted`: theirs says tied, ours says untied."""

    theirs: str
    ours: tuple[str, ...]
    inverted: bool = False
    default: bool = False
    """The meaning of its absence."""

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        found = theirs.get(self.theirs, self.default)
        if not isinstance(found, bool):
            reasons.append(f"{self.theirs} is {shown(found)}, expected true or false")
        values.update(dict.fromkeys(self.ours, not found if self.inverted else found))

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        if len({values[name] for name in self.ours}) > 1:
            words = " and ".join(f"--{name.replace('_', '-')} {values[name]}" for name in self.ours)
            reasons.append(f"{words} differ, but {self.theirs} is one word for all of them")
        content[self.theirs] = values[self.ours[0]] != self.inverted


@dataclass(frozen=True)
class LayerTypes:
    """`layer_types` may say only what is so without it; `written` where the library's class has the field."""

    written: bool = False
    section: str = ""

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        path = f"{self.section}layer_types"
        found, count = theirs.get(path), values.get("num_layers")
        if found is None:
            return
        if not isinstance(found, list) or not all(isinstance(kind, str) for kind in found):
            reasons.append(f"{path} is no list of words")
        elif other := {kind for kind in found if kind != "full_attention"}:
            reasons.append(f"{path} holds {', '.join(sorted(other))}, megacp can only express full_attention")
        elif len(found) != count:
            reasons.append(f"{path} has {len(found)} words, num_hidden_layers is {count}")

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        if self.written:
            content[f"{self.section}layer_types"] = ["full_attention"] * values["num_layers"]


TIED = Switch("tie_word_embeddings", ("untie_embeddings_and_output_weights",), inverted=True)


def shown(value: Any) -> str:
    """A value of theirs in a message: JSON's null, long ones cut."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_fields(fields: Sequence[Field], theirs: Theirs) -> tuple[Values, list[str]]:
    """Our values, and every reason why some cannot be expressed."""
    values: Values = {}
    reasons: list[str] = []
    for field in fields:
        field.read(theirs, values, reasons)
    return values, reasons


def write_fields(fields: Sequence[Field], values: Values) -> tuple[Values, list[str]]:
    """Their nested config, and every reason why some value cannot be expressed."""
    flat: Values = {}
    reasons: list[str] = []
    for field in fields:
        field.write(values, flat, reasons)
    nested: Values = {}
    for path, value in flat.items():
        *outer, last = path.split(".")
        inside = nested
        for key in outer:
            inside = inside.setdefault(key, {})
        inside[last] = value
    return nested, reasons
