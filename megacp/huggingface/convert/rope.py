"""Rotary embeddings in a config.json: base, scaling, and the rotated fraction of each head."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from megacp.huggingface.convert.config_json import LAYER_TYPES, ConfigJson, Values, shown

# Library parameter -> our flag, its type and its minimum.
_NUMBERS = {
    "factor": ("rope_scaling_factor", float, 1.0),
    "original_max_position_embeddings": ("rope_original_max_positions", int, 1),
}
# The library's types of scaling -> the parameters that each requires.
_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
# Parameters with only one supported value, which is also our default. For llama3, the library
# requires both.
_FIXED: dict[str, dict[str, Any]] = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"beta_fast": 32.0, "beta_slow": 1.0},
}


def read_rope(
    c: ConfigJson,
    positions: int,
    section: str = "",
    theta: float = 1e4,
    kinds: Collection[str] = (),
    part: float | None = None,
) -> Values:
    """Return the flags for `rope_parameters` or the older `rope_scaling`; add faults to `c`.

    `positions`: maximum sequence length of the model. `theta`: default base. `kinds`: types of
    scaling that the class supports; empty for all types. `part`: default rotated fraction of each
    head; None for a class without such a field.
    """
    return _Rope(c, section, theta).read(positions, kinds or tuple(_TYPES), part)


class _Rope:
    """Reads the rotary parameters of one config."""

    def __init__(self, c: ConfigJson, section: str, theta: float) -> None:
        self._c, self._section, self._theta = c, section, theta
        self._path = ""
        """Path of the parameters in the config, for messages."""
        self._params: Mapping[str, Any] = {}
        """Parameters of all layers, or of the layers without a window."""
        self._near: Any = None
        """Parameters of layers with a window, if they differ."""
        self._known = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *_NUMBERS}
        """Names of parameters that are supported or have no effect."""

    def read(self, positions: int, kinds: Collection[str], part: float | None) -> Values:
        """Return the flags for the rotary embedding.

        If the parameters are unreadable, return flags without scaling, so that the caller can find
        faults in other fields, too.
        """
        plain = {"rope_scaling": "none", "rotary_base": self._theta}
        if not self._find():
            return plain
        # `type` is the older name.
        kind = self._params.get("rope_type", self._params.get("type", "default"))
        if not isinstance(kind, str) or kind not in kinds:
            self._fault(
                f"{self._path}.rope_type is {shown(kind)}, but megacp supports {', '.join(kinds)}"
            )
            return plain
        # The base inside the parameters has priority over the older field at the top.
        path = f"{self._section}rope_theta"
        base = self._params.get("rope_theta", self._c.get(path, self._theta))
        values = {
            "rope_scaling": "none" if kind == "default" else kind,
            "rotary_base": self._base(path, base),
        }
        values |= self._read_part(part)
        values |= self._read_numbers(kind, positions)
        # Parameters of the scaling with only one supported value.
        fixed = _FIXED.get(kind, {})
        if kind == "yarn":
            factor = values["rope_scaling_factor"] or 1.0
            fixed = fixed | {"attention_factor": _attention_factor(factor)}
            values |= self._read_rounding()
        self._require(fixed)
        # Layers with a window may have another base, but no scaling.
        if self._near is not None and self._near != self._params:
            if not self._near_is_plain():
                return values
            values |= self._read_near(values["rotary_base"])
        self._refuse_others()
        return values

    def _fault(self, line: str) -> None:
        self._c.faults.append(line)

    def _base(self, path: str, value: Any) -> Any:
        """Return the rotary base as a number."""
        return self._c.checked(path, value, self._theta, float, 1.0, 1e12)

    def _find(self) -> bool:
        """Find the parameters; return False if they are unreadable.

        They are stored under one of two names, as one set for all layers or one per kind of layer.
        """
        names = ("rope_scaling", "rope_parameters")  # the older name, and the current one
        # The first set that is not empty counts; without any, there is no scaling.
        given = {name: self._c.get(self._section + name) for name in names}
        name = next((name for name, params in given.items() if params), "rope_parameters")
        self._path = self._section + name
        params: Any = {} if given[name] is None else given[name]
        # One set of parameters per kind of layer.
        by_kind = given["rope_parameters"]
        if isinstance(by_kind, Mapping) and by_kind.keys() == {*LAYER_TYPES}:
            self._near, params = (by_kind[kind] for kind in LAYER_TYPES)
            older = given["rope_scaling"] or {}
            if not all(isinstance(one, Mapping) for one in (self._near, params, older)):
                self._fault(
                    f"{self._path} is {shown(given[name])}, expected parameters for each kind of "
                    "layer"
                )
                return False
            # `rope_scaling` next to them applies to layers with full attention.
            params = {**params, **older}
        is_flat = isinstance(params, Mapping) and not any(
            isinstance(value, Mapping) for value in params.values()
        )
        if not is_flat:
            self._fault(
                f"{self._path} is {shown(params)}, expected one set of parameters for all layers"
            )
            return False
        self._params = params
        return True

    def _read_part(self, part: float | None) -> Values:
        """Return the flags for the rotated fraction and the number of angles per image axis."""
        path = f"{self._section}partial_rotary_factor"
        found = self._params.get("partial_rotary_factor", self._c.get(path))
        if part is None:
            if found not in (None, 1.0):
                self._fault(
                    f"{path} is {shown(found)}, but megacp can only rotate whole heads in this "
                    "family"
                )
            return {}
        values: Values = {}
        self._known |= {"mrope_section", "mrope_interleaved"}
        # Only models whose rotary angles depend on image positions have this field.
        sections = self._params.get("mrope_section")
        if sections is not None:
            if isinstance(sections, list) and [type(size) for size in sections] == [int] * 3:
                values["mrope_section"] = tuple(sections)
            else:
                self._fault(
                    f"{self._path}.mrope_section is {shown(sections)}, expected three whole numbers"
                )
        given = part if found is None else found
        values["rotary_percent"] = self._c.checked(path, given, part, float, 0.01, 1)
        return values

    def _read_numbers(self, kind: str, positions: int) -> Values:
        """Return the flags for the numbers that a type of scaling requires."""
        values = {}
        for key in _TYPES[kind]:
            ours, number, low = _NUMBERS[key]
            value = self._params.get(key)
            if value is None and number is int:
                value = positions  # the library's default
            values[ours] = self._c.checked(f"{self._path}.{key}", value, None, number, low, 1e9)
        return values

    def _read_rounding(self) -> Values:
        """Return the flag for rounding YaRN's ramp ends; ignore an `mscale` without effect."""
        self._known.add("truncate")
        if not (self._params.get("mscale") and self._params.get("mscale_all_dim")):
            # The library uses these only if both are set.
            self._known |= {"mscale", "mscale_all_dim"}
        rounds = self._params.get("truncate", True)
        if not isinstance(rounds, bool):
            self._fault(f"{self._path}.truncate is {shown(rounds)}, expected true or false")
        return {"yarn_correction_range_round_to_int": bool(rounds)}

    def _require(self, fixed: Mapping[str, float]) -> None:
        """Add a fault for each parameter that differs from its only supported value."""
        self._known |= set(fixed)
        for key, value in fixed.items():
            given = self._params.get(key)
            if given is None:
                given = value
            is_number = isinstance(given, (int, float))
            if not is_number or not math.isclose(given, value, rel_tol=1e-12):
                self._fault(
                    f"{self._path}.{key} is {shown(given)}, but megacp can only express {value!r}"
                )

    def _near_is_plain(self) -> bool:
        """Return whether layers with a window have no scaling; add a fault if they have."""
        if isinstance(self._near, Mapping) and self._near.get("rope_type", "default") == "default":
            return True
        self._fault(
            f"{self._path}.{LAYER_TYPES[0]} is {shown(self._near)}, but megacp cannot scale the "
            "rotary embedding of layers with a window"
        )
        return False

    def _read_near(self, base: float) -> Values:
        """Return the flag for the rotary base of layers with a window."""
        own = self._near.get("rope_theta", base)
        return {"window_rotary_base": self._base(f"{self._path}.rope_theta", own)}

    def _refuse_others(self) -> None:
        """Add a fault for each unknown parameter whose value is not null."""
        others = {key for key, value in self._params.items() if value is not None} - self._known
        for key in sorted(others):
            self._fault(
                f"{self._path}.{key} is {shown(self._params[key])}, which megacp cannot express"
            )


def _attention_factor(factor: float) -> float:
    """Return YaRN's scaling factor for attention scores, as the library computes it."""
    if factor <= 1:
        return 1.0
    return 0.1 * math.log(factor) + 1.0


def rope_fields(values: Values) -> Values:
    """Return the config fields for these flags; the inverse of `read_rope`.

    The parameters are written under both names: each version of the library reads only one of them
    and would otherwise use its default base.
    """
    kind = "default" if values["rope_scaling"] == "none" else values["rope_scaling"]
    # Each type of scaling has its own parameters.
    params = {"rope_type": kind}
    for key in _TYPES[kind]:
        params[key] = values[_NUMBERS[key][0]]
    # The library requires these two, even at their default.
    if kind == "llama3":
        params |= _FIXED["llama3"]
    if not values.get("yarn_correction_range_round_to_int", True):
        params["truncate"] = False
    if values.get("rotary_percent", 1.0) != 1.0:
        params["partial_rotary_factor"] = values["rotary_percent"]
    if values.get("mrope_section"):
        params |= {"mrope_section": list(values["mrope_section"]), "mrope_interleaved": True}
    return {
        "rope_theta": values["rotary_base"],
        "rope_scaling": None if kind == "default" else params,
        "rope_parameters": {"rope_theta": values["rotary_base"], **params},
    }
