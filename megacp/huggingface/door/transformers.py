"""The attention of `transformers` models under `context_parallel`: an attention and a mask function under one name.

    register_with_transformers()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="megacp")

Key property: the attention calls `scaled_dot_product_attention`, which the block takes over, and no S x S mask is made.
Outside of a block both functions are the library's `sdpa`, so the same model evaluates and generates. Rejected: the
stock `sdpa` inside a block, for which transformers reads packed documents into position ids that the layout permuted.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megacp.huggingface.door.mode import ContextParallel, current_context
from megacp.huggingface.door.model_rules import rotary_length

_NO_SDPA = ("s_aux", "sinks", "softcap", "indices", "block_indices")
"""Arguments of models whose attention is more than softmax(q k) v; `sdpa` would leave most of them out."""
_NOT_SHARDED = ("position_bias", "cache", "cu_seq_lens_q", "cu_seq_lens_k", "output_attentions")
"""Arguments that `sdpa` answers for a whole sequence and a block cannot."""
_OVERLAY = (
    "this model lays a mask of its own over the causal one (images that see each other, prefixes): give "
    "context_parallel a Metadata with those spans as document_ids"
)


def register_with_transformers(name: str = "megacp") -> str:
    """Make `attn_implementation=name` known to transformers; returns `name`. Calling it again changes nothing.

    Inside a `context_parallel` block: packing is what `document_ids` say, `position_ids` are only angles, and must be
    among the buffers (or made of them). Refused with a ValueError: attention masks with zeros that are not padding of
    the block, and sliding windows shorter than the sequence. So are attention sinks, soft caps, position biases, KV
    caches, and position ids that do not follow the documents. So are overlays on the causal mask, unless the block has
    a `Metadata`, which is then the whole rule. Outside: the library's `sdpa`, with its masks for packing and padding.

    A model that computes attention without the library's interface (Falcon, GPT-J, Bloom, MPT) cannot take this name:
    loading it so raises a ValueError instead of a KeyError or worse. One method of `PreTrainedModel` is wrapped for it.
    """
    import transformers
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

    transformers.AttentionInterface.register(name, functools.partial(_attention, sdpa_attention_forward))
    transformers.AttentionMaskInterface.register(name, functools.partial(_mask, sdpa_mask, bidirectional_mask_function))
    models: Any = transformers.PreTrainedModel
    stock = models.get_correct_attn_implementation
    if not hasattr(stock, "megacp_names"):
        names: set[str] = set()

        @functools.wraps(stock)
        def checked(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
            if requested_attention in names and _has_no_interface(type(self).__module__):
                raise ValueError(
                    f"{type(self).__name__} computes attention without the attention interface of transformers, so "
                    f'attn_implementation="{requested_attention}" cannot reach it, and its own is not sharded'
                )
            return stock(self, requested_attention, *args, **kwargs)

        models.get_correct_attn_implementation = checked
        models.get_correct_attn_implementation.megacp_names = names
    models.get_correct_attn_implementation.megacp_names.add(name)
    return name


@functools.cache
def _has_no_interface(module: str) -> bool:
    """Whether the library's file of a model class has attention layers, and none of them asks the interface.

    A file that takes its language model from elsewhere (`from_config`) says nothing about that model.
    """
    if not module.startswith("transformers.models."):
        return False
    source = inspect.getsource(sys.modules[module])
    own = re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE)
    return own is not None and "ALL_ATTENTION_FUNCTIONS" not in source and ".from_config(" not in source


def _attention(
    stock: Callable[..., Any],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`query[B, H, s, D]`, `key, value[B, Hkv, s, D]` -> `[B, s, H, D]` and no weights."""
    context = current_context()
    refused = _NO_SDPA if context is None else _NO_SDPA + _NOT_SHARDED
    given = [name for name in refused if kwargs.get(name) is not None and kwargs[name] is not False]
    if given:
        raise ValueError(
            f"{type(module).__name__} asks for {', '.join(given)}, which this attention does not have"
            + ("" if context is None else " in a context_parallel block; packing is described by document_ids")
        )
    if context is None:
        return stock(module, query, key, value, attention_mask, **kwargs)
    _refuse_window(context, kwargs.get("sliding_window"))
    config = getattr(module, "config", None)
    context.check_config(config)
    context.check_positions(kwargs.get("position_ids"), rotary_length(config))
    is_causal = kwargs.get("is_causal")
    out = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=kwargs.get("dropout", 0.0),
        is_causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
        scale=kwargs.get("scaling"),
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None  # [B, H, s, D] -> [B, s, H, D]


def _mask(
    stock: Callable[..., Any],
    bidirectional: Callable[..., Any],
    batch_size: int,
    q_length: int,
    kv_length: int,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Outside of a block the stock mask; inside none, as the block's rule holds: a model's other rule is refused."""
    context = current_context()
    if context is None:
        return stock(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **kwargs)
    if kv_length != q_length:
        raise ValueError(
            f"{q_length} queries and {kv_length} keys in a context_parallel block: a KV cache and cross attention are "
            f"not sharded, and an attention_mask of the whole sequence must be among the buffers"
        )
    context.check_config(kwargs.get("config"))
    _refuse_window(context, kwargs.get("local_size"))
    padding = kwargs.get("attention_mask")
    if padding is not None:
        context.agreement.note(_padding_problems(context, padding))
    function = kwargs.get("mask_function")
    if not context.mask.whole_rule and function is not None and function is not bidirectional:
        if kwargs.get("use_vmap", False):
            raise ValueError(_OVERLAY)
        overlaid = _sees_its_neighbour(function, batch_size, q_length, kwargs)
        context.agreement.note([_OVERLAY] if overlaid else [])
    return None


def _sees_its_neighbour(function: Callable[..., Any], batch: int, length: int, kwargs: dict[str, Any]) -> bool:
    """Whether some token sees the next one on this rank, which neither causal nor packed masks allow."""
    device = kwargs.get("device", "cpu")
    q = torch.arange(length - 1, device=device)
    rows = torch.arange(batch, device=device)[:, None]
    return bool(torch.as_tensor(function(rows, torch.zeros_like(rows), q[None], q[None] + 1)).any())


def _refuse_window(context: ContextParallel, window: int | None) -> None:
    """Tokens of a row stand in front of a layout's padding, so a window as long as the row leaves none of them out."""
    if window and window < context.length:  # some configs say 0 where there is none
        raise ValueError(
            f"a sliding (or chunked) window of {window} tokens in a sequence of {context.length} is not supported in a "
            f"context_parallel block: switch it off in the model's config"
        )


def _padding_problems(context: ContextParallel, attention_mask: torch.Tensor) -> list[str]:
    """Zeros in `attention_mask[B, s]` must be where the block has padding, and only there."""
    if bool(attention_mask.all()):
        return []
    real = torch.from_numpy(context.mask.of(context.mask.document, context.local) >= 0)
    given = attention_mask.cpu().bool()
    if given.shape[1] == context.length != real.shape[1]:  # made before the cut, by a model with towers
        whole = context.mask.document[:, : context.length] >= 0
        real = torch.from_numpy(np.broadcast_to(whole, tuple(given.shape)))
    if given.shape[1:] == real.shape[1:] and bool((given == real).all()):
        return []
    return [
        f"attention_mask {tuple(given.shape)} has {int((~given).sum())} zeros, which are not this rank's padding in "
        f"document_ids: put it among the buffers, and give context_parallel document_ids with -1 there"
    ]
