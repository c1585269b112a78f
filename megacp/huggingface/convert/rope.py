"""Rotary embeddings in a config.json: their base, their scaling, and the part of a head that is
rotated.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from megacp.huggingface.convert.config_json import LAYER_TYPES, ConfigJson, Values, shown

_NUMBERS = {
    "factor": ("rope_scaling_factor", float, 1.0),
    "original_max_position_embeddings": ("rope_original_max_positions", int, 1),
}
"""Their parameter -> our flag, its type, its least value."""
_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Their types of scaling, and the parameters that each needs."""
_FIXED: dict[str, dict[str, Any]] = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"beta_fast": 32.0, "beta_slow": 1.0},
}
"""Parameters that can have one value here, which is also what their absence means; the library asks
llama3 for both.
"""


def read_rope(
    c: ConfigJson,
    positions: int,
    section: str = "",
    theta: float = 1e4,
    kinds: Collection[str] = (),
    part: float | None = None,
) -> Values:
    """Read base and scaling from the library's `rope_parameters`, or their older spelling; `c`
    gathers the faults.

    `positions`: the longest text. `theta`: the base if the config is silent. `kinds`: the types of
    scaling that the class has; empty: all. `part`: the part of a head that is rotated if the config
    is silent; None: the class has no field for it.
    """
    return _Rope(c, section, theta).read(positions, kinds or tuple(_TYPES), part)


class _Rope:
    """The parameters of one config, found and then read field by field."""

    def __init__(self, c: ConfigJson, section: str, theta: float) -> None:
        self._c, self._section, self._theta = c, section, theta
        self._path = ""
        """Where the parameters are, for messages."""
        self._params: Mapping[str, Any] = {}
        """Those of all layers, or of the layers without a window."""
        self._near: Any = None
        """Those of layers with a window, if they have their own."""
        self._known = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *_NUMBERS}
        """Names of parameters that have been read, or that mean nothing."""

    def read(self, positions: int, kinds: Collection[str], part: float | None) -> Values:
        """Return the flags; after a fault of the whole, the flags of no scaling, so that other
        faults are found too.
        """
        plain = {"rope_scaling": "none", "rotary_base": self._theta}
        if not self._find():
            return plain
        kind = self._params.get("rope_type", self._params.get("type", "default"))
        if not isinstance(kind, str) or kind not in kinds:
            self._fault(
                f"{self._path}.rope_type is {shown(kind)}, megacp can express {', '.join(kinds)}"
            )
            return plain
        base = self._c.get(f"{self._section}rope_theta", self._theta)
        values = {
            "rope_scaling": "none" if kind == "default" else kind,
            "rotary_base": self._base(
                f"{self._section}rope_theta", self._params.get("rope_theta", base)
            ),
        }
        values |= self._read_part(part)
        values |= self._read_numbers(kind, positions)
        fixed = _FIXED.get(kind, {})
        if kind == "yarn":
            fixed = fixed | {
                "attention_factor": _attention_factor(values["rope_scaling_factor"] or 1.0)
            }
            values |= self._read_rounding()
        self._require(fixed)
        if self._near is not None and self._near != self._params:
            if not self._near_is_plain():
                return values
            values |= self._read_near(values["rotary_base"])
        self._refuse_others()
        return values

    def _fault(self, line: str) -> None:
        self._c.faults.append(line)

    def _base(self, path: str, value: Any) -> Any:
        """The base of the angles as a number."""
        return self._c.checked(path, value, self._theta, float, 1.0, 1e12)

    def _find(self) -> bool:
        """Find the parameters, in one of two spellings and once or for each kind of layers; False
        after a fault.
        """
        given = {
            name: self._c.get(self._section + name) for name in ("rope_scaling", "rope_parameters")
        }
        name = next((name for name, params in given.items() if params), "rope_parameters")
        self._path = self._section + name
        params: Any = {} if given[name] is None else given[name]
        by_kind = given["rope_parameters"]
        if isinstance(by_kind, Mapping) and by_kind.keys() == {*LAYER_TYPES}:
            self._near, params = (by_kind[kind] for kind in LAYER_TYPES)
            older = given["rope_scaling"] or {}
            if not all(isinstance(one, Mapping) for one in (self._near, params, older)):
                self._fault(
                    f"{self._path} is {shown(given[name])}, expected parameters for each kind of "
                    "layers"
                )
                return False
            params = {**params, **older}
        if not isinstance(params, Mapping) or any(
            isinstance(value, Mapping) for value in params.values()
        ):
            self._fault(
                f"{self._path} is {shown(params)}, expected one set of parameters for all layers"
            )
            return False
        self._params = params
        return True

    def _read_part(self, part: float | None) -> Values:
        """Read which part of a head is rotated, and how many of its angles belong to each axis of
        an image.
        """
        path = f"{self._section}partial_rotary_factor"
        said = self._params.get("partial_rotary_factor", self._c.get(path))
        if part is None:
            if said not in (None, 1.0):
                self._fault(f"{path} is {shown(said)}, megacp rotates whole heads")
            return {}
        values: Values = {}
        self._known |= {"mrope_section", "mrope_interleaved"}
        sections = self._params.get("mrope_section")
        if sections is not None:
            if isinstance(sections, list) and [type(size) for size in sections] == [int] * 3:
                values["mrope_section"] = tuple(sections)
            else:
                self._fault(
                    f"{self._path}.mrope_section is {shown(sections)}, expected three whole numbers"
                )
        values["rotary_percent"] = self._c.checked(
            path, part if said is None else said, part, float, 0.01, 1
        )
        return values

    def _read_numbers(self, kind: str, positions: int) -> Values:
        """Read the numbers that a type of scaling needs."""
        values = {}
        for key in _TYPES[kind]:
            ours, number, low = _NUMBERS[key]
            value = self._params.get(key)
            if value is None and number is int:
                value = positions  # as the library: the length the model is for
            values[ours] = self._c.checked(f"{self._path}.{key}", value, None, number, low, 1e9)
        return values

    def _read_rounding(self) -> Values:
        """Read whether YaRN rounds the ends of its ramp, and see whether its `mscale` means
        anything.
        """
        self._known.add("truncate")
        if not (self._params.get("mscale") and self._params.get("mscale_all_dim")):
            self._known |= {
                "mscale",
                "mscale_all_dim",
            }  # only a pair means something to the library
        rounds = self._params.get("truncate", True)
        if not isinstance(rounds, bool):
            self._fault(f"{self._path}.truncate is {shown(rounds)}, expected true or false")
        return {"yarn_correction_range_round_to_int": bool(rounds)}

    def _require(self, fixed: Mapping[str, float]) -> None:
        """Refuse other values of parameters that can have one."""
        self._known |= set(fixed)
        for key, value in fixed.items():
            given = value if self._params.get(key) is None else self._params[key]
            if not isinstance(given, (int, float)) or not math.isclose(given, value, rel_tol=1e-12):
                self._fault(
                    f"{self._path}.{key} is {shown(given)}, megacp can only express {value!r}"
                )

    def _near_is_plain(self) -> bool:
        """Whether layers with a window are not scaled; a fault if they are."""
        if isinstance(self._near, Mapping) and self._near.get("rope_type", "default") == "default":
            return True
        self._fault(
            f"{self._path}.{LAYER_TYPES[0]} is {shown(self._near)}, megacp stretches no layer with "
            "a window"
        )
        return False

    def _read_near(self, base: float) -> Values:
        """Read the base of layers with a window."""
        own = self._near.get("rope_theta", base)
        return {"window_rotary_base": self._base(f"{self._path}.rope_theta", own)}

    def _refuse_others(self) -> None:
        """Refuse parameters that have a value and that nothing above has read."""
        others = {key for key, value in self._params.items() if value is not None} - self._known
        for key in sorted(others):
            self._fault(
                f"{self._path}.{key} is {shown(self._params[key])}, which megacp cannot express"
            )


def _attention_factor(factor: float) -> float:
    """The factor of scores under YaRN, as the library computes it."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_fields(values: Values) -> Values:
    """Write what `read_rope` reads, in both spellings: a library that knows one would take its own
    theta otherwise.
    """
    kind = "default" if values["rope_scaling"] == "none" else values["rope_scaling"]
    params = {"rope_type": kind, **{key: values[_NUMBERS[key][0]] for key in _TYPES[kind]}}
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
