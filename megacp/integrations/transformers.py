"""The attention of `transformers` models under `context_parallel`: an attention and a mask function
under one name.

In a block the attention is the block's, and no S x S mask is made: the mask function hands a layer
its `Reach` at the most. Outside both functions are the library's `sdpa`, so the same model
evaluates and generates.
"""

from __future__ import annotations

from typing import Any

import torch

from megacp.attention.ops.mask import Reach
from megacp.integrations.context import ContextParallel, LayerRule, block_of, current_context
from megacp.integrations.model_rules import refuse

_NOWHERE = {
    "sinks": "sinks of each token",
    "indices": "indexed attention",
    "block_indices": "indexed attention",
}
"""Arguments of models whose attention is more than softmax(q k) v; `sdpa` would leave them out."""
_NO_SDPA = {"s_aux": "attention sinks", "softcap": "a soft cap"}
"""Arguments that a block can follow and `sdpa` cannot."""
_NOT_SHARDED = ("position_bias", "cache", "cu_seq_lens_q", "cu_seq_lens_k", "output_attentions")
"""Arguments that `sdpa` answers for a whole sequence and a block cannot."""
_OVERLAY = (
    "this model lays a mask of its own over the causal one (images that see each other, prefixes): give "
    "context_parallel a Metadata with those spans as document_ids"
)


def register_with_transformers(name: str = "megacp") -> str:
    """Make `attn_implementation=name` known to transformers; returns `name`. Calling it again
    changes nothing.

    In a `context_parallel` block packing is what `document_ids` say, and `position_ids` are only
    angles. What the block cannot do is refused with a ValueError: masks with zeros that are not its
    padding, windows of layers that also look ahead, position biases, KV caches, and overlays on the
    causal mask without a `Metadata`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _mask)
    return name


@torch.compiler.disable  # a graph breaks here: plans and messages are neither traced nor compiled
def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`query[B, H, s, D]`, `key, value[B, Hkv, s, D]` -> `[B, s, H, D]` and no weights; the mask is
    `_mask`'s.
    """
    context = block_of(module)
    refused = {**_NOWHERE, **(dict.fromkeys(_NOT_SHARDED) if context is not None else _NO_SDPA)}
    given = [
        said or name
        for name, said in refused.items()
        if not (kwargs.get(name) is None or kwargs[name] is False)
    ]
    if given:
        refuse(
            f"{type(module).__name__} asks for {', '.join(given)}, which this attention does not "
            "have here"
        )
    if context is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if kwargs.get("dropout", 0.0) > 0:
        refuse(f"dropout {kwargs['dropout']:g} in attention is not supported: set the model's to 0")
    window = kwargs.get("sliding_window") or 0  # some configs say 0 where there is none
    rule = getattr(getattr(module, "config", None), "use_bidirectional_attention", None)
    spans = rule != "vision" or window > 0  # Gemma 4: in the local layers alone
    reach = Reach(window)
    if attention_mask is not None and (attention_mask.dtype, attention_mask.shape) == (
        torch.int64,
        (1, 1, 1, 2),
    ):
        reach = Reach(*attention_mask.flatten().tolist())
    elif attention_mask is not None:
        refuse(
            f"attn_mask {tuple(attention_mask.shape)} is of this rank's tokens alone: give "
            "document_ids"
        )
    elif (
        0 < window < context.length and not context.mask.whole_rule
    ):  # Gemma 3's overlay of images has it inside
        refuse(
            f"{type(module).__name__} asks for a window of {window} tokens, and its mask has none"
        )
    is_causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    layer = LayerRule(reach, float(kwargs.get("softcap") or 0.0), kwargs.get("s_aux"), spans)
    out = context.attend(query, key, value, causal, kwargs.get("scaling"), layer)
    return out.transpose(1, 2).contiguous(), None  # [B, H, s, D] -> [B, s, H, D]


attention.is_sharded = True


@torch.compiler.disable
def _mask(batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> torch.Tensor | None:
    """The stock mask outside of a block; inside the block's rule holds, and a model's other rule is
    refused.

    Inside it is None or int64 `[1, 1, 1, 2]`, a `Reach`: as a model cuts masks `[B, 1, queries,
    keys]`, it stays whole.
    """
    from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

    context = current_context()
    if context is None:
        return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **kwargs)
    if kv_length != q_length:
        refuse(
            f"{q_length} queries and {kv_length} keys: a KV cache and cross attention are not "
            "sharded, and an "
            f"attention_mask of the whole sequence must be among the buffers"
        )
    if kwargs.get("attention_mask") is not None:
        context.note(_padding_problem(context, kwargs["attention_mask"]))
    function = kwargs.get("mask_function")
    if (
        not context.mask.whole_rule
        and function is not None
        and function is not bidirectional_mask_function
    ):
        if kwargs.get("use_vmap", False):
            refuse(_OVERLAY)
        # whether some token sees the next one of this rank, which neither causal nor packed masks
        # allow
        q = torch.arange(q_length - 1, device=kwargs.get("device", "cpu"))
        rows = torch.arange(batch_size, device=q.device)[:, None]
        overlaid = torch.as_tensor(
            function(rows, torch.zeros_like(rows), q[None], q[None] + 1)
        ).any()
        context.note(_OVERLAY if overlaid else "")
    size, config = kwargs.get("local_size"), kwargs.get("config")
    if not size or size >= context.length:  # tokens of a row stand in front of a layout's padding
        return None
    if context.mask.span.any():
        refuse(
            f"spans that may see each other past a window of {size} tokens, in a sequence of "
            f"{context.length}"
        )
    chunked = (
        size
        == getattr(config, "attention_chunk_size", None)
        != getattr(config, "sliding_window", None)
    )
    return torch.tensor([[[Reach(chunk=size) if chunked else Reach(window=size)]]])


def _padding_problem(context: ContextParallel, attention_mask: torch.Tensor) -> str:
    """Zeros in `attention_mask[B, s]` must be where the block has padding, and only there; "" where
    they are.
    """
    given, document = attention_mask.cpu().bool().numpy(), context.mask.document
    if given.all():
        return ""
    if (
        given.shape[1] == context.length
    ):  # made before the cut, by a model with towers; or on one rank
        real = document[:, : context.length] >= 0
    else:
        real = context.mask.of(document, context.local) >= 0
    if given.shape[1] == real.shape[1] and (given == real).all():
        return ""
    return (
        f"attention_mask {given.shape} has {int((~given).sum())} zeros, which are not this rank's "
        "padding in "
        "document_ids: put it among the buffers, and give context_parallel document_ids with -1 "
        "there"
    )
