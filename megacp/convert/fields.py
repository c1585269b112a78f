"""Fields of a `config.json` and the flags they are: rows that are read and written, and the ones that must not vary.

Key property: a row knows both directions, and what a field means when it is absent (the default of the transformers
library, compared with it in a test). A field that no row knows is refused by its name, so nothing that changes the
function is lost in silence. Rejected: reading the few fields that are needed, after which a sliding window or a scaled
rotary embedding is simply gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Values = dict[str, Any]
"""Flags by field name, flat."""
_ABSENT = object()


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
        """Paths that nobody has asked for; `harmless` are last parts of paths, `sections` are walked into.

        An id of a token (`..._id`) changes no tensor's meaning.
        """
        found = []
        for prefix in ("", *(f"{name}." for name in sections)):
            inside = self._content if not prefix else self._content.get(prefix[:-1])
            for key in inside if isinstance(inside, Mapping) else ():
                path = prefix + key
                if path not in self._seen and key not in harmless and path not in sections and not key.endswith("_id"):
                    found.append(path)
        return found


class Field(Protocol):
    """One row of a table."""

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        """Add to `values` what `theirs` says, or to `reasons` why it cannot be said."""

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        """The other way round; `content` is by dotted path."""


@dataclass(frozen=True)
class Same:
    """The same value on both sides, but for its spelling in `words` (theirs -> ours)."""

    theirs: str
    ours: str
    default: Any
    """What its absence means; a function of the values read so far where it depends on other fields."""
    words: Mapping[Any, Any] | None = None
    absent: Callable[[Values], Any] | None = None
    """What None means on our side, when a config is written."""
    kind: type = int

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        """As Field."""
        found = theirs.get(self.theirs)
        if found is None:
            found = self.default(values) if callable(self.default) else self.default
        if not callable(self.default):
            values[self.ours] = self.default if self.words is None else self.words[self.default]  # if refused below
        if self.words is not None:
            if found not in self.words:
                reasons.append(f"{self.theirs} is {found!r}, allowed are {', '.join(map(repr, self.words))}")
                return
            found = self.words[found]
        if self.kind is float and type(found) is int:
            found = float(found)
        if type(found) is not self.kind or (isinstance(found, int) and found < 1):
            kinds = {int: "a whole number above 0", float: "a number", str: "a word"}
            reasons.append(f"{self.theirs} is {found!r}, expected {kinds[self.kind]}")
            return
        values[self.ours] = found

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        """As Field."""
        value = values[self.ours]
        if value is None and self.absent is not None:
            value = self.absent(values)
        content[self.theirs] = value if self.words is None else {v: k for k, v in self.words.items()}[value]


@dataclass(frozen=True)
class Fixed:
    """A field that can only have one value here."""

    theirs: str
    value: Any
    default: Any = _ABSENT
    """What its absence means, if not `value`."""
    written: bool = True

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        """As Field."""
        found = theirs.get(self.theirs, self.value if self.default is _ABSENT else self.default)
        if found != self.value:
            reasons.append(f"{self.theirs} is {found!r}, megacp can only express {self.value!r}")

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        """As Field."""
        if self.written:
            content[self.theirs] = self.value


@dataclass(frozen=True)
class Unsaid:
    """One of our fields that their config has no word for: it must have one value."""

    ours: str
    value: Any

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        """As Field."""
        values[self.ours] = self.value

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        """As Field."""
        if values[self.ours] != self.value:
            flag = "--" + self.ours.replace("_", "-")
            reasons.append(f"{flag} is {values[self.ours]!r}, this architecture can only express {self.value!r}")


@dataclass(frozen=True)
class Biases:
    """One word of theirs for the biases of several of our linears."""

    theirs: str
    ours: tuple[str, ...]

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        """As Field."""
        found = theirs.get(self.theirs, False)
        if not isinstance(found, bool):
            reasons.append(f"{self.theirs} is {found!r}, expected true or false")
        values.update(dict.fromkeys(self.ours, found))

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        """As Field."""
        if len({values[name] for name in self.ours}) > 1:
            words = " and ".join(f"--{name.replace('_', '-')} {values[name]}" for name in self.ours)
            reasons.append(f"{words} differ, but {self.theirs} is one word for all of them")
        content[self.theirs] = values[self.ours[0]]


@dataclass(frozen=True)
class Tied:
    """Whether the head has its own weight: theirs says tied, ours says untied."""

    theirs: str
    default: bool
    ours: str = "untie_embeddings_and_output_weights"

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        """As Field."""
        values[self.ours] = not theirs.get(self.theirs, self.default)

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        """As Field."""
        content[self.theirs] = not values[self.ours]


_ROPE_KEYS = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_max_positions",
}
_ROPE_TYPES = {"default": (), "linear": ("factor",), "llama3": tuple(_ROPE_KEYS)}
_ROPE_WHOLE = {"original_max_position_embeddings"}
LIBRARY_THETA = 10_000.0
"""What the transformers library takes where a config says no theta."""


@dataclass(frozen=True)
class Rope:
    """Theta and scaling of the rotary embedding, in both spellings of the library: `rope_parameters`, and the older
    `rope_theta` beside `rope_scaling`. Both are written: a library that knows one of them alone would otherwise take
    its own theta.
    """

    section: str = ""
    """`text_config.` or nothing."""

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        """As Field."""
        name = next(n for n in ("rope_scaling", "rope_parameters", "") if not n or theirs.get(self.section + n))
        theirs.get(self.section + "rope_parameters")
        path, params = self.section + name, (theirs.get(self.section + name) if name else {})
        if not isinstance(params, Mapping) or any(isinstance(value, Mapping) for value in params.values()):
            reasons.append(f"{path} is {params!r}, expected one set of parameters for all layers")
            return
        theta = params.get("rope_theta", theirs.get(self.section + "rope_theta", LIBRARY_THETA))
        kind = params.get("rope_type", params.get("type", "default"))
        if kind not in _ROPE_TYPES:
            reasons.append(f"{path}.rope_type is {kind!r}, megacp can express {', '.join(_ROPE_TYPES)}")
            return
        values |= {"rotary_base": _number(theta, f"{self.section}rope_theta", reasons)}
        values["rope_scaling"] = "none" if kind == "default" else kind
        known = {"rope_theta", "rope_type", "type", *_ROPE_KEYS}
        rest = {key for key, value in params.items() if value is not None} - known
        reasons += [f"{path}.{key} is {params[key]!r}, which megacp cannot express" for key in sorted(rest)]
        partial = theirs.get(self.section + "partial_rotary_factor", 1.0)
        if partial not in (None, 1.0):
            reasons.append(f"{self.section}partial_rotary_factor is {partial}, megacp can only express 1.0")
        for key in _ROPE_TYPES[kind]:
            value = params.get(key)
            if value is None and key in _ROPE_WHOLE:
                value = values.get("seq_length")  # as the library: the length the model is for
            number = _number(value, f"{path}.{key}", reasons)
            values[_ROPE_KEYS[key]] = int(number) if key in _ROPE_WHOLE else number

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        """As Field."""
        kind = "default" if values["rope_scaling"] == "none" else values["rope_scaling"]
        params = {"rope_type": kind, **{key: values[_ROPE_KEYS[key]] for key in _ROPE_TYPES[kind]}}
        content[self.section + "rope_theta"] = values["rotary_base"]
        content[self.section + "rope_scaling"] = None if kind == "default" else params
        content[self.section + "rope_parameters"] = {"rope_theta": values["rotary_base"], **params}


def _number(value: Any, path: str, reasons: list[str]) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        reasons.append(f"{path} is {value!r}, expected a number above 0")
        return 1.0
    return float(value)


def read_fields(fields: Sequence[Field], theirs: Theirs) -> tuple[Values, list[str]]:
    """Our values, and every reason why some cannot be said."""
    values: Values = {}
    reasons: list[str] = []
    for field in fields:
        field.read(theirs, values, reasons)
    return values, reasons


def write_fields(fields: Sequence[Field], values: Values) -> tuple[Values, list[str]]:
    """Their nested config, and every reason why some value cannot be said."""
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
