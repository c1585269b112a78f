"""Stock vision-language models train over a sharded sequence as they do on one process."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megacp.attention.ops.mask import Metadata
from megacp.distributed.collectives import all_reduce
from megacp.distributed.grid import axis_of_mesh, single_axis
from megacp.integrations.context import context_parallel
from megacp.integrations.loop import shift_labels, sum_gradients
from megacp.integrations.multimodal import cut_multimodal, image_shares, told_apart
from megacp.integrations.transformers import register_with_transformers
from tests.integrations.test_matrix import LINEAR
from tests.integrations.test_transformers_models import SIZES, gradients_of
from tests.ranks import grid, run_ranks
from tests.reference.precision import float32_is_float64

TOKENS, IMAGE = 40, 65
TEXT: dict[str, Any] = {
    **SIZES,
    "vocab_size": 70,
    "num_hidden_layers": 3,
    "bos_token_id": None,
    "eos_token_id": None,
}
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
}
TOWER |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32}
SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TOKEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": 66,
    "vision_start_token_id": 67,
    "vision_end_token_id": 68,
}
LOCAL: dict[str, Any] = {
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
"""Settings with a window that is shorter than an image."""
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2_5_VL": {
        "text_config": {**TEXT, "rope_parameters": ROPE},
        "vision_config": {**TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
        **TOKEN_IDS,
    },
    "Qwen3VL": {
        "text_config": {**TEXT, "head_dim": 8, "rope_parameters": ROPE},
        "vision_config": {
            **TOWER,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
        **TOKEN_IDS,
    },
    "Qwen3_5": {
        "text_config": {
            **{
                **TEXT,
                **LINEAR,
                "head_dim": 8,
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            },
            "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0},
        },
        "vision_config": {**TOWER, "num_position_embeddings": 16},
        **TOKEN_IDS,
    },
    "Gemma3": {
        "text_config": {**TEXT, "head_dim": 8, "query_pre_attn_scalar": 8, **LOCAL},
        "vision_config": {**SIGLIP, "image_size": 16, "patch_size": 4},
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
        "boi_token_index": 67,
        "eoi_token_index": 68,
    },
    "Gemma4": {
        "text_config": {
            **TEXT,
            **LOCAL,
            **{
                "head_dim": 8,
                "global_head_dim": 16,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": 70,
            },
            "layer_types": [*LOCAL["layer_types"], "full_attention"],
            **{
                "num_hidden_layers": 4,
                "num_kv_shared_layers": 2,
                "use_bidirectional_attention": "vision",
            },
        },
        "vision_config": {
            **SIGLIP,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "pooling_kernel_size": 2,
            "patch_size": 4,
        },
        **{
            "image_token_id": IMAGE,
            "video_token_id": 66,
            "audio_token_id": 69,
            "boi_token_id": 67,
            "eoi_token_id": 68,
        },
    },
}
in_float64 = float32_is_float64(pytest.MonkeyPatch())
"""A decorator for float64; Gemma would otherwise compute its norms in float32."""


def build(name: str, attention: str) -> Any:
    """Return a random float64 model, equal in every process."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed (extra: test)"
    )
    register_with_transformers()
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    model.set_attn_implementation(attention)
    # the library initialises this weight with zeros, which would hide errors in the images
    if name == "Gemma3":
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    return model.double().train()


@functools.cache
def images(name: str) -> Tensor:
    """Return `[2, S]` with 1 at image tokens.

    The first row has two images. Their sizes differ if the model supports this.
    """
    found = torch.zeros(2, TOKENS, dtype=torch.long)
    for row, first, last in ((0, 5, 9), (0, 20, 24 if "Gemma" in name else 28), (1, 30, 34)):
        found[row, first:last] = 1
    return found


def batch_of(name: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return the model's inputs, as a processor prepares them, and shifted labels."""
    generator = torch.Generator().manual_seed(3)
    kinds = images(name).clone()
    ids = torch.randint(0, 64, (2, TOKENS), generator=generator).masked_fill(kinds == 1, IMAGE)
    batch = {"input_ids": ids}
    if name == "Gemma3":
        batch |= {
            "pixel_values": torch.randn(3, 3, 16, 16, generator=generator).double(),
            "token_type_ids": kinds,
        }
    elif name == "Gemma4":
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).repeat(3, 1, 1)
        patches = torch.rand(3, 16, 3 * 4 * 4, generator=generator).double()
        batch |= {"pixel_values": patches, "image_position_ids": places, "mm_token_type_ids": kinds}
    else:
        grids = torch.tensor([[1, 4, 4], [1, 4, 8], [1, 4, 4]])
        patches = torch.randn(
            int(grids.prod(-1).sum()), 3 * 2 * 4 * 4, generator=generator
        ).double()
        batch |= {"pixel_values": patches, "image_grid_thw": grids, "mm_token_type_ids": kinds}
    return batch, shift_labels(ids.masked_fill(kinds == 1, -100))


def rule_of(name: str) -> Metadata | None:
    """Return the mask for Gemma 3 and 4, in which the tokens of an image see each other."""
    if "Gemma" not in name:
        return None
    flat = images(name).flatten().numpy()
    begins = (np.diff(flat, prepend=0) > 0).cumsum()
    return Metadata.of_documents(np.repeat([0, 1], TOKENS), span=begins * flat)


@functools.cache
@in_float64
def reference(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and gradients of the stock model with its own attention on one process."""
    model, (batch, labels) = build(name, "sdpa"), batch_of(name)
    logits = model(**batch, use_cache=False).logits
    loss = (
        F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        / (labels != -100).sum()
    )
    loss.backward()
    return loss.detach(), gradients_of(model)


class Found(NamedTuple):
    """Results of a rank after backward."""

    loss: Tensor
    gradients: dict[str, Tensor]
    seen: list[int]
    """Number of patches (images for Gemma) that its vision tower encodes."""
    sent: list[int]
    """Bytes of features sent in forward, and bytes of gradients sent in backward."""


@in_float64
def on_ranks(
    rank: int,
    world_size: int,
    name: str,
    layout: str,
    transport: str,
    vision: str,
    recomputed: bool,
) -> Found:
    """Return loss and summed gradients from a context-parallel block."""
    axis, model, (batch, labels) = grid(cp=world_size).cp, build(name, "megacp"), batch_of(name)
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    seen, sent = list[int](), list[int]()
    tower = model.model.vision_tower if "Gemma" in name else model.model.visual

    def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(len(args[0] if args else kwargs["pixel_values"]))

    tower.register_forward_pre_hook(look, with_kwargs=True)
    axis.traffic.clear()
    counted = (labels != -100).sum()
    options = {"document_ids": rule_of(name), "transport": transport, "layout": layout}
    block = context_parallel(axis, buffers=[labels], buffer_seq_dims=[1], **options)
    with block as context, cut_multimodal(model, context, vision):
        logits = model(**batch, use_cache=False).logits
        assert logits.shape[:2] == (2, TOKENS // world_size)
        sent.append(axis.traffic["all_to_all"])
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / counted
        loss.backward()
        sent.append(axis.traffic["all_to_all"] - sent[0])
    sum_gradients(model.parameters(), axis)
    return Found(all_reduce(loss.detach(), axis), gradients_of(model), seen, sent)


def same(found: Found, name: str) -> None:
    """Require the results of one process."""
    want_loss, want = reference(name)
    assert abs(found.loss - want_loss) <= 1e-12 * want_loss
    assert found.gradients.keys() == want.keys()
    for key, gradient in found.gradients.items():
        assert (gradient - want[key]).abs().max() <= 1e-12 * want[key].abs().max() + 1e-15, key


FEATURES = {"Qwen2_5_VL": 32, "Qwen3_5": 32, "Qwen3VL": 32 * 3, "Gemma3": 32, "Gemma4": 32}
"""Numbers per image token: its embedding, and for Qwen3-VL the features added to two layers."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout", "transport", "vision", "recomputed"),
    [
        (2, "zigzag", "p2p", "sharded", False),
        (4, "zigzag", "p2p", "sharded", False),
        (2, "balanced", "kv_exchange", "sharded", True),
        (2, "zigzag", "p2p", "replicated", False),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_models_that_see_train_on_ranks_as_on_one_and_send_features_of_a_ranks_own_images(
    name: str, ranks: int, layout: str, transport: str, vision: str, recomputed: bool
) -> None:
    """The three images have 16, 32 and 16 patches, but equal sizes for Gemma.

    The fourth rank has no image. It encodes the smallest one and ignores the result.
    """
    sizes, per_token = ([1, 1, 1], 0.25) if "Gemma" in name else ([16, 32, 16], 4)
    # two divisions of 16, 32, 16 into two ranges are equally good
    shares = {
        2: [[0], [1, 2]] if image_shares(sizes, 2)[0] == range(1) else [[0, 1], [2]],
        4: [[0], [1], [2], []],
    }
    for rank, found in enumerate(
        run_ranks(on_ranks, ranks, name, layout, transport, vision, recomputed)
    ):
        same(found, name)
        mine = sum(sizes[i] for i in shares[ranks][rank])
        # forward sends own features to each other rank; backward returns gradients to their owners
        sent = [mine / per_token * (ranks - 1), (sum(sizes) - mine) / per_token]
        # images of Gemma 4 cannot be separated
        if vision == "replicated" or name == "Gemma4":
            mine, sent = sum(sizes), [0, 0]
        assert found.seen[0] == (mine or min(sizes))
        # attention over p2p sends no all-to-all, but a convolution does
        if transport == "p2p" and name != "Qwen3_5":
            assert found.sent == [numbers * FEATURES[name] * 8 for numbers in sent]


@in_float64
def fully_sharded(rank: int, world_size: int, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Train with weights that torch shards over the ranks of a row.

    Torch averages the gradients, so the loss is multiplied by the number of ranks.
    """
    mesh = dist.init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    axis, model, (batch, labels) = axis_of_mesh(mesh["cp"]), build(name, "megacp"), batch_of(name)
    for layer in (*model.model.visual.blocks, *model.model.language_model.layers, model):
        dist.fsdp.fully_shard(layer, mesh=mesh)
    counted = (labels != -100).sum()
    block = context_parallel(axis, buffers=[labels], buffer_seq_dims=[1], transport="kv_exchange")
    with block as context, cut_multimodal(model, context):
        logits = model(**batch, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / counted
        (loss * world_size).backward()
    gradients = {
        key: p.grad.full_tensor() for key, p in model.named_parameters() if p.grad is not None
    }
    return all_reduce(loss.detach(), axis), gradients


@pytest.mark.slow
def test_ranks_that_share_weights_meet_in_every_layer_of_the_tower() -> None:
    """Four ranks share three images.

    The rank without an image must not keep the other ranks waiting for its weight shards.
    """
    for loss, gradients in run_ranks(fully_sharded, 4, "Qwen3VL"):
        same(Found(loss, gradients, [], []), "Qwen3VL")


def block_of(labels: Tensor, rule: Any = None) -> Any:
    return context_parallel(
        single_axis("cp"), buffers=[labels], buffer_seq_dims=[1], document_ids=rule
    )


def test_what_cannot_be_cut_is_refused_and_towers_that_mix_images_are_not_sharded() -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed (extra: test)"
    )
    text = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))
    model, (batch, labels) = build("Gemma3", "megacp"), batch_of("Gemma3")
    for given, rule, vision, message in (
        (text, None, "sharded", "LlamaForCausalLM has no towers"),
        (model, rule_of("Gemma3"), "half", "vision is half"),
        (model, None, "sharded", "Metadata with these spans"),
    ):
        with pytest.raises(ValueError, match=message), torch.no_grad():
            with block_of(labels, rule) as context, cut_multimodal(given, context, vision):
                given(**batch, use_cache=False)
    assert (
        not model.model.language_model._forward_pre_hooks
        and not model.model.vision_tower._forward_hooks
    )
    with pytest.raises(ValueError, match="cut expects the 40 tokens"), block_of(labels) as context:
        context.cut(torch.zeros(2, 7))
    assert told_apart(model.model, [model.model.vision_tower])
    model.model.vision_tower.norm = torch.nn.BatchNorm1d(4)
    assert not told_apart(model.model, [model.model.vision_tower])
