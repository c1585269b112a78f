"""Theta and scaling of the rotary embedding: the library's `rope_parameters` and its older spelling, and our flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacp.huggingface.convert.tables.fields import SIZE, Number, Theirs, Values, shown

_THETA = Number(float, 1.0, 1e12, low_open=True)
_FACTOR = Number(float, 0.0, 1e9, low_open=True)
_SCALE = Number(float, 1.0, 1e9)
_ROPE_KEYS = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_max_positions",
}
_ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": tuple(_ROPE_KEYS),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_YARN_KEYS = {
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "attention_factor": "rope_attention_factor",
}
_YARN_DEFAULTS: Values = {"beta_fast": 32.0, "beta_slow": 1.0}
_INEXPRESSIBLE = {
    "longrope": ": its frequencies change when a text passes the original length",
    "dynamic": ": its frequencies change with the length of a text",
}
_ROPE_NUMBERS = {
    "factor": _SCALE,
    "low_freq_factor": _FACTOR,
    "high_freq_factor": _FACTOR,
    "original_max_position_embeddings": SIZE,
}
LIBRARY_THETA = 10_000.0
"""Theta of the transformers library where a config has none."""


@dataclass(frozen=True)
class Rope:
    """Theta and scaling of the rotary embedding, in both spellings of the library: `rope_parameters`, and the older
    `rope_theta` beside `rope_scaling`. Both are written: a library that knows one of them alone would otherwise take
    its own theta.
    """

    section: str = ""
    """`text_config.` or nothing."""
    theta: float = LIBRARY_THETA
    """Of the library's class where a config has none."""
    kinds: tuple[str, ...] = tuple(_ROPE_TYPES)

    def read(self, theirs: Theirs, values: Values, reasons: list[str]) -> None:
        given = {name: theirs.get(self.section + name) for name in ("rope_scaling", "rope_parameters")}
        name = next((n for n, params in given.items() if params), "rope_parameters")
        path, params = self.section + name, ({} if given[name] is None else given[name])
        if not isinstance(params, Mapping) or any(isinstance(value, Mapping) for value in params.values()):
            reasons.append(f"{path} is {shown(params)}, expected one set of parameters for all layers")
            return
        kind = params.get("rope_type", params.get("type", "default"))
        if not isinstance(kind, str) or kind not in self.kinds:
            why = _INEXPRESSIBLE.get(kind, "") if isinstance(kind, str) else ""
            reasons.append(f"{path}.rope_type is {shown(kind)}, megacp can express {', '.join(self.kinds)}{why}")
            return
        theta = params.get("rope_theta", theirs.get(self.section + "rope_theta", self.theta))
        self._number(theta, _THETA, "rope_theta", "rotary_base", (values, reasons))
        values["rope_scaling"] = "none" if kind == "default" else kind
        known = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *_ROPE_KEYS}
        known |= {"truncate", *_YARN_KEYS} if kind == "yarn" else set()
        rest = {key for key, value in params.items() if value is not None} - known
        reasons += [f"{path}.{key} is {shown(params[key])}, which megacp cannot express" for key in sorted(rest)]
        partial = params.get("partial_rotary_factor", theirs.get(self.section + "partial_rotary_factor"))
        if partial is not None and partial != 1.0:
            reasons.append(
                f"{self.section}partial_rotary_factor is {shown(partial)}, megacp can only express 1.0: it rotates "
                "whole heads"
            )
        for key in _ROPE_TYPES[kind]:
            value = params.get(key)
            if value is None and key == "original_max_position_embeddings":
                value = values.get("max_position_embeddings")  # as the library: the length the model is for
            where = f"{name}.{key}"
            self._number(value, _ROPE_NUMBERS[key], where, _ROPE_KEYS[key], (values, reasons))
        if kind == "yarn":
            self._yarn(name, params, values, reasons)

    def _yarn(self, name: str, params: Mapping[str, Any], values: Values, reasons: list[str]) -> None:
        """What a YaRN may say besides; one mscale without the other means nothing to the library."""
        alone = not (params.get("mscale") and params.get("mscale_all_dim"))
        for key, ours in _YARN_KEYS.items():
            value = params.get(key)
            if value is None or (alone and key in ("mscale", "mscale_all_dim")):
                values[ours] = _YARN_DEFAULTS.get(key)
            else:
                self._number(value, _FACTOR, f"{name}.{key}", ours, (values, reasons))
        truncate = params.get("truncate", True)
        if not isinstance(truncate, bool):
            reasons.append(f"{self.section}{name}.truncate is {shown(truncate)}, expected true or false")
        values["yarn_correction_range_round_to_int"] = truncate

    def _number(self, value: Any, number: Number, where: str, ours: str, into: tuple[Values, list[str]]) -> None:
        values, reasons = into
        found = number.read(value)
        if found is None:
            reasons.append(f"{self.section}{where} is {shown(value)}, expected {number}")
        else:
            values[ours] = found

    def write(self, values: Values, content: Values, reasons: list[str]) -> None:
        kind = "default" if values["rope_scaling"] == "none" else values["rope_scaling"]
        if kind not in self.kinds:
            reasons.append(f"--rope-scaling is {kind!r}, this architecture can only express {', '.join(self.kinds)}")
        params = {"rope_type": kind, **{key: values[_ROPE_KEYS[key]] for key in _ROPE_TYPES[kind]}}
        if kind == "yarn":
            said = {key: values[ours] for key, ours in _YARN_KEYS.items()}
            params |= {key: value for key, value in said.items() if value not in (None, _YARN_DEFAULTS.get(key))}
            params |= {} if values["yarn_correction_range_round_to_int"] else {"truncate": False}
        content[self.section + "rope_theta"] = values["rotary_base"]
        content[self.section + "rope_scaling"] = None if kind == "default" else params
        content[self.section + "rope_parameters"] = {"rope_theta": values["rotary_base"], **params}
