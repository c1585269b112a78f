"""Families: an architecture of the library, the models that it covers, and the format of its
config.json and tensor names.

A family consists of a table of tensor names and two functions: `from_hf` turns a config into our
flags, and `to_hf` does the reverse. To find settings that `to_hf` cannot express, the written
config is read again (`Family.misfits`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megacp.engine.config.run import flag
from megacp.huggingface.convert.config_json import FURTHER_LAYERS, ConfigJson, Values
from megacp.huggingface.convert.tables import NATIVE, Table, links_of, shapes_of
from megacp.huggingface.convert.tensors import Info, Joined, Link, Source
from megacp.huggingface.convert.words import experts_of, resolved

# The settings that distinguish families, with the values of a plain decoder.
PLAIN_DECODER: Values = {
    "vision_num_layers": False,
    "num_experts": False,
    "norm_position": "before",
    "qk_layernorm": "off",
    "window_size": False,
    "linear_attention_freq": False,
    "no_rope_freq": False,
}
# A family without a vision tower or experts is never the nearest to a model that has them, even if
# all other settings match.
_KINDS = ("vision_num_layers", "num_experts")
# The same settings for families whose layers may have a sliding window.
WITH_WINDOWS: Values = {
    name: value for name, value in PLAIN_DECODER.items() if name != "window_size"
}
# The same settings for families with experts.
WITH_EXPERTS: Values = {
    **WITH_WINDOWS,
    "num_experts": True,
    "softmax_type": "vanilla",
    "moe_router_score_function": "softmax",
    "moe_shared_expert_gate": False,
}


@dataclass(frozen=True)
class Family:
    """An architecture of the library."""

    name: str
    """The library's `model_type`."""
    cls: str
    """The library's model class, with an output head."""
    defaults: Values
    """The library's defaults for sizes that a config omits."""
    from_hf: Callable[[ConfigJson], Values]
    to_hf: Callable[[Values], Values]
    table: Table
    fits: tuple[Values, ...] = ()
    """The models that are exported as this family unless --hf-model-type selects another one.

    Each alternative maps flags to their values; True and False only require that a flag is set or
    unset. No model fits two families. If empty, only --hf-model-type selects the family.
    """
    harmless: frozenset[str] = frozenset()
    """Fields that are ignored because they do not affect the model."""
    sections: tuple[str, ...] = ()
    """Names of the config's nested objects that are read."""
    token_fields: Mapping[str, str] = field(default_factory=dict)
    """Config fields with ids of image tokens -> names of these tokens in the image rules."""
    usual_further_layers: ClassVar[int] = 0
    """Number of multi-token-prediction layers that the library expects even if the config does not
    mention them.
    """
    in_turns: ClassVar[bool] = False
    """Whether gate and up rows alternate in a stack of experts."""
    peft_converts: bool = False
    """Whether peft treats an adapter's MLP module as an expert's linear if it has the same name."""
    gives_tower: bool = False
    """Whether --vision-from-hf can combine this family's vision tower with another text model."""
    token_order: tuple[str, ...] = ()
    """The image tokens in the order of their ids, which follow the vocabulary if no image rules are
    known.
    """

    def distance(self, values: Values) -> tuple[int, int] | None:
        """Return how many settings differ from `fits`: of those in `_KINDS`, and of all.

        Return None if `fits` is empty. A family fits if its distance is (0, 0); the family with the
        smallest distance is the nearest.
        """
        distances = []
        # The number of wrong kinds comes first, so it weighs more than all other settings.
        for wanted in self.fits:
            wrong = [name for name, value in wanted.items() if not _has(values[name], value)]
            of_kind = [name for name in wrong if name in _KINDS]
            distances.append((len(of_kind), len(wrong)))
        return min(distances, default=None)

    def values(
        self,
        content: Mapping[str, Any],
        left_out: list[str] | None = None,
        unused: list[str] | None = None,
    ) -> Values:
        """Return our flags for a config.json.

        Fields without effect in the library are appended to `left_out`. Messages about known fields
        that are ignored are appended to `unused`. Raise ValueError with all invalid
        and unknown fields.
        """
        # Faults are collected while fields are read, and raised together.
        config = ConfigJson(self.native(content), self.sections)
        values = self.from_hf(config)
        config.refuse_unknown(self.harmless, self.name)
        if config.faults:
            raise ValueError("config.json: " + "; ".join(config.faults))
        if left_out is not None:
            left_out += config.left_out
        if unused is not None:
            unused += config.unused_lines()
        return values

    def misfits(self, values: Values) -> list[str]:
        """Return a message for each flag or field that this architecture cannot express."""
        return self._unexpressed(values, self.to_hf(values))

    def _unexpressed(self, values: Values, content: Values) -> list[str]:
        """Read `content` again; return its faults and the flags that differ from `values`."""
        config = ConfigJson(content, self.sections)
        back = self.from_hf(config)
        ours = resolved(values)
        read = resolved(back)
        faults = list(config.faults)
        for name in back:
            # The sequence length belongs to the run, not to the model.
            if name != "seq_length" and ours[name] != read[name]:
                faults.append(
                    f"{flag(name)} is {ours[name]!r}, but this architecture can only express "
                    f"{read[name]!r}"
                )
        return faults

    def config(self, values: Values, layout: str = NATIVE) -> dict[str, Any]:
        """Return the config.json for our flags.

        Raise ValueError with the flags that it cannot express.
        """
        # A config that reads back differently would be a different model.
        content = self.to_hf(values)
        faults = self._unexpressed(values, content)
        if faults:
            raise ValueError(f"this model cannot be exported as {self.name}: " + "; ".join(faults))
        return {
            "architectures": [self.cls],
            "model_type": self.name,
            **self.spelled(content, layout),
        }

    def native(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a config with the library's own field names."""
        return content

    def spelled(self, content: Values, layout: str) -> Values:
        """Return a config with the field names that a layout uses."""
        return content

    def links(
        self, values: Values, layout: str = NATIVE, infos: Mapping[str, Info] | None = None
    ) -> list[Link]:
        """Return the links of all tensors; `infos` describes those of a file to read, if any."""
        return self.links_of_table(self.table, values)

    def links_of_table(self, table: Table, values: Values) -> list[Link]:
        """Return the links of a table for a model's layers and experts."""
        return links_of(
            table,
            shapes_of(values),
            values["num_layers"],
            values["vision_num_layers"],
            values["num_experts"],
        )

    def further_layers(self, content: Mapping[str, Any]) -> int:
        """Return the number of multi-token-prediction layers after the last layer.

        The library skips these layers, too.
        """
        fields = self.native(content).items()
        # An invalid number is a fault elsewhere, so it is only skipped here.
        counts = [value for name, value in fields if FURTHER_LAYERS.search(name)]
        known = [count for count in counts if type(count) is int and count >= 0]
        return max([*known, self.usual_further_layers])

    def opened(self, source: Source, values: Values | None = None) -> Source:
        """Return a folder's tensors in the form that `links` expects.

        Raise ValueError for stacks of experts that do not match `values`, if given.
        """
        return Joined(source, experts_of(values))

    def closed(self, source: Source, values: Values) -> Source:
        """Return tensors in the form in which a folder stores them; the inverse of `opened`."""
        return source

    def links_of_modules(self, values: Values) -> list[Link]:
        """Return the links of all tensors, with the names of the library's modules.

        Adapters use these names.
        """
        return self.links(values)

    def layout_of(self, infos: Mapping[str, Info]) -> str:
        """Return the layout of a file's tensor names."""
        return NATIVE


def _has(value: Any, wanted: Any) -> bool:
    """Return whether a setting matches; True and False match any set or unset value."""
    # Any number other than 0 and any text counts as set.
    if isinstance(wanted, bool):
        return bool(value) == wanted
    return value == wanted
