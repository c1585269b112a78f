"""gpt-oss: stacks of transposed expert matrices with alternating gate and up rows.

The matrices are stored in bf16 or, as released, in MXFP4 (4 bits per number). MXFP4 can be read but
not written.
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

# Tensors that other families do not have, or name differently.
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
# The values of four bits (E2M1).
_NUMBERS = torch.tensor([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)])
# Bytes per block: 32 numbers that share a scale.
_BYTES = 16
# The scale that means NaN (E8M0).
_NAN = 255
# The smallest scale that can give numbers too large for bfloat16: 4 * 2 ** (253 - 127).
_LARGE = 253
# Number of problems that a message lists.
_TOLD = 10


def unpacked(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return MXFP4 numbers as bf16 `[..., n]`, which represents them exactly.

    `blocks`: u8 `[..., n / 32, 16]`, two numbers per byte, low bits first. `scales`: u8 exponents
    `[..., n / 32]`.
    """
    # [..., n / 32, 16, 2]
    pairs = torch.stack([_NUMBERS[(blocks & 15).long()], _NUMBERS[(blocks >> 4).long()]], -1)
    # E8M0: a power of two with a bias of 127.
    powers = torch.exp2(scales.float() - 127)
    return (pairs.flatten(-2) * powers.unsqueeze(-1)).flatten(-2).bfloat16()


def packed_problems(infos: Mapping[str, Info]) -> list[str]:
    """Return a message for each problem with tensors packed in MXFP4.

    Blocks are u8 `[experts, rows, n / 32, 16]`, scales u8 `[experts, rows, n / 32]`. Scales of
    another shape would be broadcast, and scales of another dtype would be rounded. Either would
    silently change the experts.
    """
    found = list[str]()
    stacks = set[str]()
    for end in PACKED:
        stacks |= {name.removesuffix(end) for name in infos if name.endswith(end)}
    for stack in sorted(stacks):
        # blocks, scales
        names = [stack + end for end in PACKED]
        missing = [name for name in names if name not in infos]
        if missing:
            found += [f"{name} is missing" for name in missing]
            continue
        if not stack.endswith(STACKS):
            found.append(
                f"{names[0]} is packed; megacp can only read packed expert matrices "
                f"({' and '.join(STACKS)})"
            )
            continue
        if stack in infos:
            found.append(f"{stack} is stored twice: packed and unpacked")
        for name in names:
            if infos[name].dtype != torch.uint8:
                dtype = str(infos[name].dtype).removeprefix("torch.")
                found.append(f"{name} has dtype {dtype}, MXFP4 requires uint8")
        blocks, scales = (infos[name].shape for name in names)
        if len(blocks) != 4 or blocks[3] != _BYTES or 0 in blocks:
            found.append(
                f"{names[0]} has shape {blocks}, expected (experts, rows, columns / 32, {_BYTES})"
            )
        elif scales != blocks[:3]:
            found.append(
                f"{names[1]} has shape {scales}, expected {blocks[:3]} for blocks of shape {blocks}"
            )
    return found


class Turned:
    """A folder's stacks in the form that other families use: `[E, 2 I, h]`, with all gate rows
    before the up rows, and `[E, h, I]`.
    """

    def __init__(self, source: Source) -> None:
        """Wrap a folder's tensors. Raise ValueError if packed tensors are invalid."""
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
                columns = 2 * _BYTES * info.shape[2]  # two numbers per byte
                self.infos[stack] = Info((*info.shape[:2], columns), torch.bfloat16)
            elif name.endswith(STACKS) and len(info.shape) == 3:
                # Unpacked matrices are transposed, packed ones are not.
                self.infos[name] = Info((info.shape[0], info.shape[2], info.shape[1]), info.dtype)
            elif not name.endswith(PACKED):
                self.infos[name] = info

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of a tensor, or experts [start, stop) of a stack."""
        if name in self._packed:
            found = self._unpacked(name, start, stop)
        else:
            found = self._source.rows(name, start, stop)
            if name.endswith(STACKS):
                found = found.transpose(1, 2)
        if not name.endswith(_GATE_UP):
            return found
        # Rows of gate and up alternate.
        return torch.cat([found[:, ::2], found[:, 1::2]], 1)

    def _unpacked(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return experts [start, stop) of a packed stack.

        Raise ValueError if a scale gives inf or NaN.
        """
        blocks, scales = (self._source.rows(name + end, start, stop) for end in PACKED)
        if (scales == _NAN).any():
            every = whole(self._source, name + PACKED[1])
            count = int((every == _NAN).sum())
            raise ValueError(
                f"{name}{PACKED[1]}: {count:,} of {every.numel():,} scales are {_NAN}, which means "
                "NaN: the file may be damaged"
            )
        found = unpacked(blocks, scales)
        if not is_finite(found):
            every = whole(self._source, name + PACKED[1])
            count = int((every >= _LARGE).sum())
            raise ValueError(
                f"{name}{PACKED[1]}: {count:,} of {every.numel():,} scales are {_LARGE} or more, "
                "which gives numbers too large for bfloat16: the file may be damaged"
            )
        return found


class Stacked:
    """Expert matrices as the library's stacks; the inverse of `Turned` and `Joined` with the given
    number of experts.
    """

    def __init__(self, source: Source, experts: int) -> None:
        self._source, self._experts = source, experts
        self.infos: dict[str, Info] = {}
        for name, info in source.infos.items():
            rows = info.shape[0] // experts
            shape = info.shape
            if name.endswith(STACKS):
                shape = (experts, *info.shape[1:], rows)  # transposed
            elif name.endswith(BIASES):
                shape = (experts, rows)
            self.infos[name] = Info(shape, info.dtype)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of a tensor, or experts [start, stop) of a stack."""
        if not name.endswith((*STACKS, *BIASES)):
            return self._source.rows(name, start, stop)
        # `start` and `stop` count experts.
        rows = self._source.infos[name].shape[0] // self._experts
        joined = self._source.rows(name, start * rows, stop * rows)
        found = joined.unflatten(0, (stop - start, rows))  # [E, rows, columns]
        if name.endswith(_GATE_UP):
            # Let rows of gate and up alternate.
            found = torch.stack(found.chunk(2, 1), 2).flatten(1, 2)
        return found.transpose(1, 2).contiguous() if name.endswith(STACKS) else found


@dataclass(frozen=True)
class GptOssWords(ExpertWords):
    """Config fields of a class with attention sinks, biases everywhere and a clamped activation."""

    def from_hf(self, c: ConfigJson) -> Values:
        v = super().from_hf(c)
        has_bias = c.switch("attention_bias", True)
        v |= {"add_qkv_bias": has_bias, "add_attention_output_bias": has_bias}
        c.only(swiglu_limit=7.0, swiglu_alpha=1.702, experts_per_token=v["moe_router_topk"])
        packed = c.get("quantization_config")
        is_mxfp4 = isinstance(packed, Mapping) and packed.get("quant_method") == "mxfp4"
        if packed is not None and not is_mxfp4:
            c.faults.append(
                f"quantization_config is {shown(packed)}, but megacp can only read mxfp4"
            )
        return v

    def to_hf(self, v: Values) -> Values:
        # The library requires a window even if no layer has one.
        window = v["window_size"] or _SIZES["sliding_window"]
        own = {"attention_bias": v["add_qkv_bias"], "swiglu_limit": 7.0, "sliding_window": window}
        return super().to_hf(v) | own


class GptOss(ExpertFamily):
    """The family whose expert matrices are transposed."""

    in_turns = True

    def native(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        # Unlike other classes, this class uses YaRN by default.
        usual = {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        }
        if content.get("rope_parameters") or content.get("rope_scaling"):
            return content
        return {**content, "rope_parameters": usual}

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
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 201088,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
}
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
        "mlp_activation": "clamped_swiglu",
        "softmax_type": "learnable",
        "moe_router_bias": True,
        "add_mlp_bias": True,
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
