"""gpt-oss: stacks of experts whose matrices lie on their sides, gate and up in turns, in bf16 or in
the 4 bits of MXFP4 that are released, which are read alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megacp.huggingface.convert.config_json import ConfigJson, Values, shown
from megacp.huggingface.convert.moe import TRAINING, ExpertFamily, ExpertWords, stacked
from megacp.huggingface.convert.tables import DECODER, Table
from megacp.huggingface.convert.tensors import (
    BIASES,
    PACKED,
    STACKS,
    Info,
    Joined,
    Link,
    Source,
    is_finite,
    whole,
)
from megacp.huggingface.convert.text_families import OLMO2_SIZES
from megacp.huggingface.convert.words import experts_of
from megacp.storage.wording import listed

_OWN = {
    "self_attn.sinks": "attention.sinks",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.bias",
}
TABLE: Table = DECODER | {
    f"model.layers.{{i}}.{theirs}": f"layers.{{i}}.{ours}" for theirs, ours in _OWN.items()
}
_GATE_UP = (STACKS[0], BIASES[0])
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = torch.tensor([sign * magnitude for sign in (1, -1) for magnitude in _MAGNITUDES])
"""What four bits say (E2M1)."""
_BYTES = 16
"""Bytes of a block: 32 numbers with one scale."""
_NAN = 255
"""The scale that is NaN (E8M0)."""
_LARGE = 253
"""The least scale with a number that bfloat16 cannot hold: 4 times 2 ** (253 - 127)."""
_TOLD = 10
"""Problems that a message names."""


def unpacked(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """MXFP4 in bf16, which holds it exactly: u8 `blocks[..., n / 32, 16]`, two numbers each, the
    low bits first, and the exponents `scales[..., n / 32]` to `[..., n]`.
    """
    pairs = torch.stack([_NUMBERS[(blocks & 15).long()], _NUMBERS[(blocks >> 4).long()]], -1)
    powers = torch.exp2(scales.float() - 127)
    return (pairs.flatten(-2) * powers.unsqueeze(-1)).flatten(-2).bfloat16()


def packed_problems(infos: Mapping[str, Info]) -> list[str]:
    """Return what is wrong with tensors packed in MXFP4, a line each.

    Blocks are u8 `[experts, rows, n / 32, 16]`, scales u8 `[experts, rows, n / 32]`. Scales of
    another shape would be broadcast, and scales of another dtype would be rounded: both give other
    experts without an error.
    """
    found = list[str]()
    stacks = {name.removesuffix(end) for name in infos for end in PACKED if name.endswith(end)}
    for stack in sorted(stacks):
        names = [stack + end for end in PACKED]
        missing = [name for name in names if name not in infos]
        if missing:
            found += [f"{name} is missing" for name in missing]
            continue
        if not stack.endswith(STACKS):
            found.append(
                f"{names[0]} is packed, megacp reads packed matrices of experts "
                f"({' and '.join(STACKS)})"
            )
            continue
        if stack in infos:
            found.append(f"{stack} is there twice: packed and as numbers")
        for name in names:
            if infos[name].dtype != torch.uint8:
                found.append(f"{name} has dtype {_word(infos[name].dtype)}, MXFP4 has uint8")
        blocks, scales = (infos[name].shape for name in names)
        if len(blocks) != 4 or blocks[3] != _BYTES or 0 in blocks:
            found.append(
                f"{names[0]} has shape {blocks}, expected (experts, rows, columns / 32, {_BYTES})"
            )
        elif scales != blocks[:3]:
            found.append(
                f"{names[1]} has shape {scales}, its blocks have {blocks}: expected {blocks[:3]}"
            )
    return found


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Turned:
    """A folder's stacks as those of other families: `[E, 2 I, h]`, each gate before its up, and
    `[E, h, I]`.
    """

    def __init__(self, source: Source) -> None:
        """Raises ValueError for packed tensors that do not belong together."""
        problems = packed_problems(source.infos)
        if problems:
            raise ValueError(listed(problems, _TOLD, "; "))
        self._source = source
        self.infos: dict[str, Info] = {}
        self._packed = set[str]()
        for name, info in source.infos.items():
            if name.endswith(PACKED[0]):
                stack = name.removesuffix(PACKED[0])
                self._packed.add(stack)
                self.infos[stack] = Info(
                    (*info.shape[:2], 2 * _BYTES * info.shape[2]), torch.bfloat16
                )
            elif name.endswith(STACKS) and len(info.shape) == 3:
                self.infos[name] = Info((info.shape[0], info.shape[2], info.shape[1]), info.dtype)
            elif not name.endswith(PACKED):
                self.infos[name] = info

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows of a tensor; of a stack, experts."""
        if name in self._packed:
            found = self._unpacked(name, start, stop)
        else:
            found = self._source.rows(name, start, stop)
            if name.endswith(STACKS):
                found = found.transpose(1, 2)
        if not name.endswith(_GATE_UP):
            return found
        # gate and up are in turns
        return torch.cat([found[:, ::2], found[:, 1::2]], 1)

    def _unpacked(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Experts of a packed stack. Raises ValueError for scales that make numbers which are not
        finite.
        """
        blocks, scales = (self._source.rows(name + end, start, stop) for end in PACKED)
        if (scales == _NAN).any():
            every = whole(self._source, name + PACKED[1])
            count = int((every == _NAN).sum())
            raise ValueError(
                f"{name}{PACKED[1]}: {count:,} of {every.numel():,} scales are {_NAN}, which is NaN"
            )
        found = unpacked(blocks, scales)
        if not is_finite(found):
            every = whole(self._source, name + PACKED[1])
            count = int((every >= _LARGE).sum())
            raise ValueError(
                f"{name}{PACKED[1]}: {count:,} of {every.numel():,} scales are {_LARGE} or more, "
                "which gives numbers "
                "above the largest of bfloat16"
            )
        return found


class Stacked:
    """Matrices of experts below each other as stacks of the library: what `Turned` and `Joined`
    undo, of so many.
    """

    def __init__(self, source: Source, experts: int) -> None:
        self._source, self._experts = source, experts
        self.infos: dict[str, Info] = {}
        for name, info in source.infos.items():
            rows = info.shape[0] // experts
            sides = {STACKS: (*info.shape[1:], rows), BIASES: (rows,)}
            shape = next(
                ((experts, *side) for ends, side in sides.items() if name.endswith(ends)),
                info.shape,
            )
            self.infos[name] = Info(shape, info.dtype)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows of a tensor; of a stack, experts."""
        if not name.endswith((*STACKS, *BIASES)):
            return self._source.rows(name, start, stop)
        rows = self._source.infos[name].shape[0] // self._experts
        found = self._source.rows(name, start * rows, stop * rows).unflatten(
            0, (stop - start, rows)
        )
        if name.endswith(_GATE_UP):
            found = torch.stack(found.chunk(2, 1), 2).flatten(1, 2)  # gate and up in turns
        return found.transpose(1, 2).contiguous() if name.endswith(STACKS) else found


@dataclass(frozen=True)
class GptOssWords(ExpertWords):
    """Words of a class with sinks, biases everywhere and a clamped activation."""

    def from_hf(self, c: ConfigJson) -> Values:
        v = super().from_hf(c)
        v |= dict.fromkeys(
            ("add_qkv_bias", "add_attention_output_bias"), c.switch("attention_bias", True)
        )
        c.only(swiglu_limit=7.0, swiglu_alpha=1.702, experts_per_token=v["moe_router_topk"])
        packed = c.get("quantization_config")
        if packed is not None and (
            not isinstance(packed, Mapping) or packed.get("quant_method") != "mxfp4"
        ):
            c.faults.append(f"quantization_config is {shown(packed)}, megacp reads mxfp4")
        return v

    def to_hf(self, v: Values) -> Values:
        window = (
            v["window_size"] or _SIZES["sliding_window"]
        )  # the library asks for one that no layer has
        own = {"attention_bias": v["add_qkv_bias"], "swiglu_limit": 7.0, "sliding_window": window}
        return super().to_hf(v) | own


class GptOss(ExpertFamily):
    """The family whose stacks lie on their sides."""

    in_turns = True

    def native(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        usual = {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        }
        said = content.get("rope_parameters") or content.get("rope_scaling")
        return content if said else {**content, "rope_parameters": usual}

    def links(
        self, values: Values, layout: str = "", infos: Mapping[str, Info] | None = None
    ) -> list[Link]:
        return self.links_of_table(stacked(self.table, values["num_experts"]), values)

    def opened(self, source: Source, values: Values | None = None) -> Source:
        return Joined(Turned(source), experts_of(values))

    def closed(self, source: Source, values: Values) -> Source:
        return Stacked(source, values["num_experts"])


_SIZES = OLMO2_SIZES | {
    "num_hidden_layers": 36,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
}
_SIZES |= {
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 201088,
    "sliding_window": 128,
}
_SIZES |= {"max_position_embeddings": 131072}
_WORDS = GptOssWords(
    _SIZES,
    150000.0,
    head_dim=True,
    window="layer_types",
    every=2,
    experts=("num_local_experts", 128),
    chosen=4,
    has_norm=False,
    fixed={
        **{"mlp_activation": "clamped_swiglu", "softmax_type": "learnable"},
        **{"moe_router_bias": True, "add_mlp_bias": True},
    },
)
GPT_OSS = GptOss(
    "gpt_oss",
    "GptOssForCausalLM",
    _SIZES,
    _WORDS.from_hf,
    _WORDS.to_hf,
    TABLE,
    fits=(
        {
            "vision_num_layers": False,
            "num_experts": True,
            "softmax_type": "learnable",
            "moe_router_score_function": "softmax",
        },
    ),
    harmless=TRAINING | {"initial_context_length"},
)
