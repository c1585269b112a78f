"""The names of a decoder's tensors in the library and in megacp, and the links that a table of
names gives for a model.

The rows of q and k are in the library's order, in which the rotary embedding pairs the two halves
of a head. Our order is the same, so nothing is permuted.
"""

from __future__ import annotations

from collections.abc import Mapping

from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.layers.moe import MOE, correction_tensor
from megacp.engine.layers.stack import decoder_tensors, layers_of
from megacp.engine.layers.vision import connector_tensors, tower_tensors
from megacp.huggingface.convert.config_json import Values
from megacp.huggingface.convert.tensors import Link, Named, Shape

# Our names of the two tensors that a model may tie.
EMBEDDING, HEAD = "embedding.weight", "head.weight"
# The library's names, and those of a model released before the library had its class.
NATIVE, RELEASED = "native", "released"
NAMINGS = (NATIVE, RELEASED)
# Library name -> our name, or several of our names whose tensors are stacked. `{i}` counts decoder
# layers, `{v}` layers of a vision tower, `{e}` experts.
Table = Mapping[str, str | tuple[str, ...]]

# Linears of a layer; each entry applies to both weight and bias.
_LINEARS = {
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.output",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
# The names of most classes. `links_of` skips rows whose tensors a model does not have.
DECODER: dict[str, str | tuple[str, ...]] = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.layers.{i}.input_layernorm.weight": "layers.{i}.attention_norm.weight",
    "model.layers.{i}.self_attn.q_norm.weight": "layers.{i}.attention.q_norm.weight",
    "model.layers.{i}.self_attn.k_norm.weight": "layers.{i}.attention.k_norm.weight",
    "model.layers.{i}.post_attention_layernorm.weight": "layers.{i}.mlp_norm.weight",
    **{
        f"model.layers.{{i}}.{theirs}.weight": f"layers.{{i}}.{ours}.weight"
        for theirs, ours in _LINEARS.items()
    },
    **{
        f"model.layers.{{i}}.{theirs}.bias": f"layers.{{i}}.{ours}.bias"
        for theirs, ours in _LINEARS.items()
    },
    "model.norm.weight": "final_norm.weight",
    "lm_head.weight": "head.weight",
}


def shapes_of(values: Values) -> dict[str, Shape]:
    """Return the global shapes of a model's tensors by our names, without padding.

    Saved buffers are included; a tied head is not.
    """
    config = with_values(RunConfig(), values)
    tensors = (*decoder_tensors(config.model), *tower_tensors(config), *connector_tensors(config))
    found = {tensor.name: tensor.shape for tensor in tensors}
    if config.model.moe_router_score_function == "sigmoid":
        # The correction is a saved buffer, which `decoder_tensors` leaves out.
        tensor = correction_tensor(config.model)
        routed = (layer.name for layer in layers_of(config.model) if layer.is_routed)
        found |= {f"{name}.{MOE.name}.{tensor.name}": tensor.shape for name in routed}
    return found


def links_of(
    table: Table, shapes: Mapping[str, Shape], layers: int, tower_layers: int = 0, experts: int = 0
) -> list[Link]:
    """Return a table's links for each layer and expert.

    Rows whose tensors are not in `shapes` are skipped.
    """
    found = []
    for i in range(max(1, layers, tower_layers)):
        for theirs, ours in table.items():
            count = 1
            if "{i}" in theirs:
                count = layers
            elif "{v}" in theirs:
                count = tower_layers
            if i >= count:
                continue
            stacked = (ours,) if isinstance(ours, str) else ours
            for e in range(experts if "{e}" in theirs else 1):
                names = [name.format(i=i, v=i, e=e) for name in stacked]
                # The model has no such tensor, for example no bias.
                if not all(name in shapes for name in names):
                    continue
                parts = tuple(Named(name, shapes[name]) for name in names)
                # The library's tensor consists of ours, joined along dim 0.
                rows = sum(part.shape[0] for part in parts)
                shape = (rows, *parts[0].shape[1:])
                found.append(Link((Named(theirs.format(i=i, v=i, e=e), shape),), parts))
    return found
