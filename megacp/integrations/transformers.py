"""Attention and mask functions for transformers models, registered under one name.

In a `context_parallel` block, the attention function uses the block's mask and ranks. No S x S mask
is built: the mask function returns at most the layer's `Reach`. Outside a block, both functions are
the library's `sdpa`, so the same model can evaluate and generate.
"""

from __future__ import annotations

from typing import Any

import torch

from megacp.attention.ops.mask import Reach
from megacp.integrations.context import ContextParallel, LayerRule, block_of, current_context
from megacp.integrations.model_rules import refuse

# Arguments of models whose attention is not softmax(q k) v. They are never supported, and `sdpa`
# would ignore them.
_NOWHERE = {
    "sinks": "per-token sinks",
    "indices": "indexed attention",
    "block_indices": "indexed attention",
}
# Arguments that are supported in a block but not by `sdpa`.
_NO_SDPA = {"s_aux": "attention sinks", "softcap": "a soft cap"}
# Arguments that `sdpa` supports for a whole sequence but a block does not.
_NOT_SHARDED = ("position_bias", "cache", "cu_seq_lens_q", "cu_seq_lens_k", "output_attentions")
_OVERLAY = (
    "this model adds its own mask to the causal mask (for image tokens that attend to each other, "
    "or for prefixes): give context_parallel a Metadata with these spans as document_ids"
)


def register_with_transformers(name: str = "megacp") -> str:
    """Register `attn_implementation=name` with transformers, and return `name`.

    Repeated calls have no effect. In a `context_parallel` block, `document_ids` define the packed
    documents, and `position_ids` define only rotary angles. Calls in a block raise ValueError for
    attention masks that differ from the block's padding, windows that look ahead, position biases,
    KV caches, and additions to the causal mask without a `Metadata`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _mask)
    return name


# torch.compile breaks the graph here: plans and messages cannot be traced.
@torch.compiler.disable
def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute a layer's attention, with the signature that transformers expects.

    Return `[B, s, H, D]` for `query[B, H, s, D]` and `key, value[B, Hkv, s, D]`, and None for the
    attention weights. `attention_mask` comes from `_mask`. Raise ValueError for options that this
    attention does not support.
    """
    context = block_of(module)
    refused: dict[str, str] = dict(_NOWHERE)
    if context is None:
        refused |= _NO_SDPA
    else:
        refused |= {name: name for name in _NOT_SHARDED}
    given = []
    for name, meaning in refused.items():
        option = kwargs.get(name)
        if option is not None and option is not False:
            given.append(meaning)
    if given:
        refuse(
            f"{type(module).__name__} needs {', '.join(given)}, which this attention does not "
            "support here"
        )
    if context is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if kwargs.get("dropout", 0.0) > 0:
        refuse(
            f"attention dropout {kwargs['dropout']:g} is not supported: set it to 0 in the model's "
            "config"
        )
    window = kwargs.get("sliding_window") or 0  # some configs use 0 instead of None
    rule = getattr(getattr(module, "config", None), "use_bidirectional_attention", None)
    spans = rule != "vision" or window > 0  # in Gemma 4, only local layers have spans
    reach = Reach(window)
    if attention_mask is not None:
        # `_mask` returns a Reach as int64 [1, 1, 1, 2]. Any other mask comes from the caller.
        if attention_mask.dtype != torch.int64 or attention_mask.shape != (1, 1, 1, 2):
            refuse(
                f"attn_mask {tuple(attention_mask.shape)} covers only the tokens of one rank: give "
                "context_parallel document_ids instead"
            )
        reach = Reach(*attention_mask.flatten().tolist())
    elif 0 < window < context.length and not context.mask.whole_rule:
        # A whole rule, such as Gemma 3's with images, already includes the window.
        refuse(f"{type(module).__name__} needs a window of {window} tokens, but its mask has none")
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = bool(is_causal)
    layer = LayerRule(reach, float(kwargs.get("softcap") or 0.0), kwargs.get("s_aux"), spans)
    out = context.attend(query, key, value, causal, kwargs.get("scaling"), layer)
    return out.transpose(1, 2).contiguous(), None  # [B, H, s, D] -> [B, s, H, D]


attention.is_sharded = True


@torch.compiler.disable
def _mask(batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> torch.Tensor | None:
    """Return the library's mask outside a block, and the layer's `Reach` inside a block.

    Inside a block, the block's mask applies, and any other mask raises ValueError. The result is
    None or a `Reach` as int64 `[1, 1, 1, 2]`, a shape that models do not slice like a mask.
    """
    from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

    context = current_context()
    if context is None:
        return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **kwargs)
    if kv_length != q_length:
        refuse(
            f"{q_length} queries and {kv_length} keys: KV caches and cross attention cannot be "
            "sharded, and an attention_mask of the whole sequence must be in the buffers"
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
        # With causal and packed masks, no token attends to the next one. If one does here, the
        # model adds its own rule.
        q = torch.arange(q_length - 1, device=kwargs.get("device", "cpu"))
        rows = torch.arange(batch_size, device=q.device)[:, None]
        overlaid = torch.as_tensor(
            function(rows, torch.zeros_like(rows), q[None], q[None] + 1)
        ).any()
        context.note(_OVERLAY if overlaid else "")
    size = kwargs.get("local_size")
    config = kwargs.get("config")
    if not size or size >= context.length:
        return None
    if context.mask.span.any():
        refuse(
            f"spans may exceed a window of {size} tokens, in a sequence of {context.length} "
            "tokens, which is not supported"
        )
    # The library uses `local_size` both for chunks and for windows.
    chunk = getattr(config, "attention_chunk_size", None)
    window = getattr(config, "sliding_window", None)
    reach = Reach(window=size)
    if size == chunk and chunk != window:
        reach = Reach(chunk=size)
    return torch.tensor([[[reach]]])


def _padding_problem(context: ContextParallel, attention_mask: torch.Tensor) -> str:
    """Return a problem if `attention_mask[B, s]` differs from the block's padding, else ""."""
    given = attention_mask.cpu().bool().numpy()
    document = context.mask.document
    if given.all():
        return ""
    if given.shape[1] == context.length:
        # The mask covers the whole sequence: a model with towers shards it later, or there is only
        # one rank.
        real = document[:, : context.length] >= 0
    else:
        real = context.mask.of(document, context.local) >= 0
    if given.shape[1] == real.shape[1] and (given == real).all():
        return ""
    return (
        f"attention_mask {given.shape} has {int((~given).sum())} zeros that do not match this "
        "rank's padding in document_ids: add attention_mask to the buffers, and give "
        "context_parallel document_ids with -1 at padding"
    )
