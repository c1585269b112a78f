"""One family: an architecture of the library, which models it takes, and how its config.json and
tensors are spelled.

A family is a table of tensor names and two functions: `from_hf` reads a config as our flags,
`to_hf` writes them. What `to_hf` cannot express is found by reading its config again
(`Family.misfits`).
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

PLAIN_DECODER: Values = {
    "vision_num_layers": False,
    "num_experts": False,
    "norm_position": "before",
    "qk_layernorm": "off",
    "window_size": False,
    "linear_attention_freq": False,
    "no_rope_freq": False,
}
"""The settings by which families are told apart, as a plain decoder has them."""
_KINDS = ("vision_num_layers", "num_experts")
"""A family without a tower or experts is not near a model that has them, however much else is the
same.
"""
WITH_WINDOWS: Values = {
    name: value for name, value in PLAIN_DECODER.items() if name != "window_size"
}
"""The same for families whose layers may have a sliding window."""
WITH_EXPERTS: Values = {
    **WITH_WINDOWS,
    "num_experts": True,
    "softmax_type": "vanilla",
    "moe_router_score_function": "softmax",
    "moe_shared_expert_gate": False,
}
"""The same for families with experts."""


@dataclass(frozen=True)
class Family:
    """An architecture of the library."""

    name: str
    """`model_type` of the library."""
    cls: str
    """The library's class with a head."""
    defaults: Values
    """What absent sizes mean to the library."""
    from_hf: Callable[[ConfigJson], Values]
    to_hf: Callable[[Values], Values]
    table: Table
    fits: tuple[Values, ...] = ()
    """The models that are exported as this family unless --hf-model-type names another:
    alternatives, each some flags with their values, or with True or False for whether they are set.
    No model fits two families. Empty: only models whose --hf-model-type names the family.
    """
    harmless: frozenset[str] = frozenset()
    """Fields that are not read and mean nothing."""
    sections: tuple[str, ...] = ()
    """Objects of the config whose fields are read."""
    token_fields: Mapping[str, str] = field(default_factory=dict)
    """Fields of the config with ids of image tokens, and the names of these tokens in the image
    rules.
    """
    usual_further_layers: ClassVar[int] = 0
    """Layers that predict further tokens whatever the config says, as the library has it."""
    in_turns: ClassVar[bool] = False
    """Whether rows of gate and up alternate in a stack of experts."""
    peft_converts: bool = False
    """Whether peft takes a module of an adapter that is named like a linear of an MLP for the
    linear of an expert.
    """
    gives_tower: bool = False
    """Whether --vision-from-hf can put its vision tower before another text model."""
    token_order: tuple[str, ...] = ()
    """The image tokens in the order of their ids after the vocabulary, if no rules are known."""

    def distance(self, values: Values) -> tuple[int, int] | None:
        """Return how many settings of `fits` a model has differently: those of `_KINDS`, and all;
        None without `fits`.

        A family whose distance is (0, 0) fits, the family with the least is nearest.
        """
        distances = []
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
        """Return our flags from a config.json.

        `left_out` is filled with fields that change nothing in the library, `unused` with lines
        about fields whose effect is elsewhere. ValueError lists fields at fault and those not
        known.
        """
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
        """Return what this architecture cannot express of a model, a line for each flag or
        field.
        """
        return self._unexpressed(values, self.to_hf(values))

    def _unexpressed(self, values: Values, content: Values) -> list[str]:
        """The flags that are different when `content` is read again, and the faults of its
        fields.
        """
        config = ConfigJson(content, self.sections)
        back = self.from_hf(config)
        ours, read = resolved(values), resolved(back)
        faults = list(config.faults)
        for name in back:
            if name != "seq_length" and ours[name] != read[name]:
                faults.append(
                    f"{flag(name)} is {ours[name]!r}, this architecture can only express "
                    f"{read[name]!r}"
                )
        return faults

    def config(self, values: Values, layout: str = NATIVE) -> dict[str, Any]:
        """Return a config.json from our flags. ValueError lists the flags that it cannot
        express.
        """
        content = self.to_hf(values)
        faults = self._unexpressed(values, content)
        if faults:
            raise ValueError(f"this model is no {self.name}: " + "; ".join(faults))
        return {
            "architectures": [self.cls],
            "model_type": self.name,
            **self.spelled(content, layout),
        }

    def native(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """A config in the library's own spelling."""
        return content

    def spelled(self, content: Values, layout: str) -> Values:
        """A config in the spelling of a layout."""
        return content

    def links(
        self, values: Values, layout: str = NATIVE, infos: Mapping[str, Info] | None = None
    ) -> list[Link]:
        """All tensors; `infos`: of the file that is read."""
        return self.links_of_table(self.table, values)

    def links_of_table(self, table: Table, values: Values) -> list[Link]:
        """A table with its counters filled in."""
        counts = values["num_layers"], values["vision_num_layers"], values["num_experts"]
        return links_of(table, shapes_of(values), *counts)

    def further_layers(self, content: Mapping[str, Any]) -> int:
        """Return how many layers after the last predict further tokens; the library leaves them
        out.
        """
        counts = [
            value for name, value in self.native(content).items() if FURTHER_LAYERS.search(name)
        ]
        known = [count for count in counts if type(count) is int and count >= 0]
        return max([*known, self.usual_further_layers])

    def opened(self, source: Source, values: Values | None = None) -> Source:
        """A folder's tensors as `links` has them. ValueError for stacks that do not fit `values`,
        if given.
        """
        return Joined(source, experts_of(values))

    def closed(self, source: Source, values: Values) -> Source:
        """The inverse, of a folder that is written."""
        return source

    def links_of_modules(self, values: Values) -> list[Link]:
        """All tensors as the library's modules hold them, which is how adapters name them."""
        return self.links(values)

    def layout_of(self, infos: Mapping[str, Info]) -> str:
        """The layout that a file is in."""
        return NATIVE


def _has(value: Any, wanted: Any) -> bool:
    """Whether a setting has the wanted value; True and False ask whether it is set."""
    if isinstance(wanted, bool):
        return bool(value) == wanted
    return value == wanted
