"""A naive decoder and trainer in plain torch: global tensors in a dict, an explicit mask, and
torch's AdamW.

It shares no code with megacp except the numbers of the config; the rule of the mask is written
again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.reference import recurrence

Weights = Mapping[str, Tensor]
Seen = list[tuple[str, Any, Tensor, Tensor, Tensor]]
"""For each expert layer and microbatch: name, batch, scores, probabilities `[T, E]`, and 1 for
chosen experts.
"""


def norm(x: Tensor, weight: Tensor, model: Any) -> Tensor:
    factor = 1 + weight if model.apply_layernorm_1p else weight
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.norm_epsilon) * factor


def linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def mask_of(batch: Any, window: int | None = None) -> Tensor:
    """Return the mask, bool `[T, T]`, from `leave` and `span`, and from positions if the layer has
    a window.
    """
    leave, span = torch.from_numpy(batch.leave), torch.from_numpy(batch.span)
    place = torch.arange(len(leave))
    on_path = (
        (place[None] <= place[:, None]) & (place[:, None] < leave[None]) & (leave > 0)[:, None]
    )
    seen = on_path | ((span[:, None] == span[None]) & (span != 0)[None])
    position = torch.from_numpy(batch.position_ids)
    return seen if window is None else seen & (position[:, None] - position[None] < window)


def yarn(speeds: list[float], dim: int, model: Any) -> tuple[list[float], float]:
    """Return YaRN's frequencies and its factor on q and k, by its paper."""
    found, ends = [], []
    for turns in (32.0, 1.0):
        wanted = turns * 2 * math.pi / model.rope_original_max_positions
        ends.append(-math.log(wanted) / math.log(model.rotary_base) * dim / 2)
    if model.yarn_correction_range_round_to_int:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], dim - 1)
    for place, speed in enumerate(speeds):
        slowed = min(max((place - low) / (high - low), 0.0), 1.0)
        found.append(speed * (1 - slowed) + speed / model.rope_scaling_factor * slowed)
    return found, 0.1 * math.log(model.rope_scaling_factor) + 1


def turn(x: Tensor, positions: Tensor, model: Any, near: bool) -> Tensor:
    """Rotate the two halves of `x[T, heads, d]`, or of its first part.

    `near` uses the angles of layers with a window.
    """
    dim, factor = int(x.shape[-1] * model.rotary_percent), 1.0
    x, rest = x[..., :dim], x[..., dim:]
    base = model.window_rotary_base if near else model.rotary_base
    speeds = [base ** (-i / dim) for i in range(0, dim, 2)]
    if model.rope_scaling == "linear" and not near:
        speeds = [speed / model.rope_scaling_factor for speed in speeds]
    if model.rope_scaling == "yarn" and not near:
        speeds, factor = yarn(speeds, dim, model)
    angles = positions.double()[:, None] * torch.tensor(speeds, dtype=torch.float64)
    cos, sin = (
        torch.cat([f(angles) * factor] * 2, -1)[:, None].to(x.dtype) for f in (torch.cos, torch.sin)
    )
    first, second = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat([x * cos + torch.cat([-second, first], -1) * sin, rest], -1)


def delta_net(x: Tensor, weights: Weights, name: str, batch: Any, model: Any) -> Tensor:
    """Compute Gated DeltaNet token by token."""
    part = {n: linear(x, weights, f"{name}.{n}") for n in "qkvzba"}
    for n in "qkv":
        taps = weights[f"{name}.convolution_{n}.weight"].squeeze(1)
        part[n] = F.silu(recurrence.convolution(part[n], taps, batch.leave))
    q, k = (part[n].view(len(x), model.linear_num_key_heads, -1) for n in "qk")
    v, z = (part[n].view(len(x), model.linear_num_value_heads, -1) for n in "vz")
    decay = -weights[f"{name}.A_log"].exp() * F.softplus(part["a"] + weights[f"{name}.dt_bias"])
    out = recurrence.gated_delta_rule(q, k, v, decay, torch.sigmoid(part["b"]), batch.leave)
    out = (
        out
        * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + model.norm_epsilon)
        * weights[f"{name}.norm.weight"]
    )
    return linear((out * F.silu(z)).flatten(1), weights, f"{name}.output")


def mamba2(x: Tensor, weights: Weights, name: str, batch: Any, model: Any) -> Tensor:
    """Compute Mamba-2 token by token."""
    own = {
        key.removeprefix(f"{name}."): value
        for key, value in weights.items()
        if key.startswith(f"{name}.")
    }
    part = {n: linear(x, weights, f"{name}.{n}") for n in ("z", "x", "B", "C", "dt")}
    for n in "xBC":
        convolved = recurrence.convolution(
            part[n], own[f"convolution_{n}.weight"].squeeze(1), batch.leave
        )
        part[n] = F.silu(convolved + own[f"convolution_{n}.bias"])
    b, c = (part[n].view(len(x), model.linear_num_key_heads, -1) for n in "BC")
    v = part["x"].view(len(x), model.linear_num_value_heads, -1)
    step = F.softplus(part["dt"] + own["dt_bias"])
    out = recurrence.state_space_dual(
        c, b, v * step[..., None], -own["A_log"].exp() * step, batch.leave
    )
    out = ((out + own["D"][:, None] * v).flatten(1) * F.silu(part["z"])).view(
        len(x), model.linear_num_key_heads, -1
    )
    out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + model.norm_epsilon)
    return linear(out.flatten(1) * own["norm.weight"], weights, f"{name}.output")


def attention(x: Tensor, weights: Weights, name: str, batch: Any, model: Any) -> Tensor:
    heads, groups = model.num_attention_heads, model.num_query_groups or model.num_attention_heads
    dim = model.kv_channels or model.hidden_size // heads
    found = {}
    for part in "qkv":
        value = linear(x, weights, f"{name}.{part}")
        if part == "q" and model.attention_output_gate:
            value, gate = (half.flatten(1) for half in value.view(len(x), heads, 2, dim).unbind(2))
        if part != "v" and model.qk_layernorm == "all_heads":
            value = norm(value, weights[f"{name}.{part}_norm.weight"], model)
        value = value.view(len(x), -1, dim)
        if part != "v" and model.qk_layernorm == "head":
            value = norm(value, weights[f"{name}.{part}_norm.weight"], model)
        found[part] = value
    q, k, v = found.values()
    positions = torch.from_numpy(batch.position_ids)
    layer, skipped = int(name.split(".")[1]), int(model.window_attn_skip_freq or 10**6)
    window = None if (layer + 1) % skipped == 0 else model.window_size
    if not (model.no_rope_freq and (layer + 1) % int(model.no_rope_freq) == 0):
        q, k = (
            turn(x, positions, model, bool(window and model.window_rotary_base)) for x in (q, k)
        )
    mask, outs = mask_of(batch, window), []
    for head in range(heads):
        group = head // (heads // groups)
        scores = (q[:, head] @ k[:, group].t() * (model.softmax_scale or dim**-0.5)).masked_fill(
            ~mask, -torch.inf
        )
        # a padding row attends to no key: softmax is NaN there, which must not reach the gradient
        scores = torch.where(mask.any(1)[:, None], scores, torch.zeros_like(scores))
        if model.softmax_type == "learnable":
            scores = torch.cat([scores, weights[f"{name}.sinks"][head].expand(len(x), 1)], 1)
        outs.append(torch.softmax(scores, -1)[:, : len(x)] * mask.any(1)[:, None] @ v[:, group])
    out = torch.cat(outs, -1)
    return linear(
        out * torch.sigmoid(gate) if model.attention_output_gate else out, weights, f"{name}.output"
    )


def mlp(x: Tensor, weights: Weights, name: str, model: Any) -> Tensor:
    gate, up = linear(x, weights, f"{name}.gate"), linear(x, weights, f"{name}.up")
    if model.mlp_activation == "clamped_swiglu":
        gate, up = torch.where(gate > 7, 7, gate), torch.where(up.abs() > 7, 7 * up.sign(), up)
        return linear(gate / (1 + (-1.702 * gate).exp()) * (up + 1), weights, f"{name}.down")
    gate = F.gelu(gate, approximate="tanh") if model.mlp_activation == "geglu" else F.silu(gate)
    return linear(gate * up, weights, f"{name}.down")


def best(values: list[float], count: int) -> list[int]:
    """Return the indices of the highest values; ties go to the lower index."""
    return sorted(range(len(values)), key=lambda place: (-values[place], place))[:count]


def chosen_for(row: list[float], model: Any) -> list[int]:
    """Return the experts of one token.

    Groups are ranked by the sum of their two best scores, and the experts with the highest scores
    in the best groups are chosen.
    """
    size = len(row) // model.moe_router_num_groups
    groups = [row[first : first + size] for first in range(0, len(row), size)]
    if len(groups) > 1:
        opened = best([sum(sorted(group)[-2:]) for group in groups], model.moe_router_group_topk)
        row = [value if place // size in opened else -math.inf for place, value in enumerate(row)]
    return best(row, model.moe_router_topk)


def experts(x: Tensor, weights: Weights, name: str, batch: Any, model: Any, seen: Seen) -> Tensor:
    """Apply every expert to every token, times its weight for the token.

    The weight is 0 for experts that are not chosen, and for padding.
    """
    scores, total = linear(x, weights, f"{name}.router"), torch.zeros_like(x)
    sigmoid, chosen = model.moe_router_score_function == "sigmoid", torch.zeros_like(scores)
    powers = (
        torch.sigmoid(scores) if sigmoid else (scores - scores.max(1, keepdim=True).values).exp()
    )
    ranked = powers + weights[f"{name}.router.correction"] if sigmoid else scores
    for token, row in enumerate(ranked.tolist()):
        chosen[token, chosen_for(row, model) if batch.leave[token] else []] = 1
    among = (powers if model.moe_router_pre_softmax else powers * chosen).sum(1, keepdim=True)
    if sigmoid:
        among = torch.ones_like(among) if model.moe_router_pre_softmax else among + 1e-20
    share = powers * chosen / among.clamp_min(1e-300) * model.moe_router_topk_scaling_factor
    seen.append((name, batch, scores, powers / powers.sum(1, keepdim=True), chosen))
    for expert in range(model.num_experts):
        total = total + share[:, [expert]] * mlp(x, weights, f"{name}.experts.{expert}", model)
    if model.moe_shared_expert_intermediate_size is None:
        return total
    opened = (
        linear(x, weights, f"{name}.shared_gate").sigmoid() if model.moe_shared_expert_gate else 1
    )
    return total + opened * mlp(x, weights, f"{name}.shared", model)


def balance(seen: Seen, batches: Sequence[Any], model: Any, training: Any) -> list[Tensor]:
    """Return the load-balancing term and the z-loss, document by document, if they are enabled."""
    tokens = sum(batch.real_tokens for batch in batches)
    of_documents, z = torch.zeros(2, dtype=torch.float64).unbind()
    for _, batch, scores, probabilities, chosen in seen:
        ends = torch.from_numpy(
            np.maximum.accumulate(batch.leave)
        )  # no part of a document ends later than its root
        real = torch.from_numpy(batch.leave > 0)
        z = z + training.moe_z_loss_coeff / tokens * scores[real].logsumexp(1).square().sum()
        for end in ends[real].unique():
            inside = real & (ends == end)
            product = (chosen[inside].sum(0) * probabilities[inside].sum(0)).sum() / inside.sum()
            scale = (
                training.moe_aux_loss_coeff * model.num_experts / (model.moe_router_topk * tokens)
            )
            of_documents = of_documents + scale * product
    found = ((of_documents, training.moe_aux_loss_coeff), (z, training.moe_z_loss_coeff))
    return [term for term, coefficient in found if coefficient > 0]


def loads(seen: Seen) -> dict[str, Tensor]:
    """Return the number of tokens per expert, by layer."""
    found: dict[str, Tensor] = {}
    for name, *_, chosen in seen:
        found[name] = found.get(name, 0) + chosen.detach().sum(0)
    return found


def logits(weights: Weights, batch: Any, model: Any, seen: Seen) -> Tensor:
    """Return the logits `[T, vocabulary]`."""
    x = weights["embedding.weight"][torch.from_numpy(batch.tokens)] * model.embedding_multiplier
    for layer in range(model.num_layers):
        name = f"layers.{layer}"
        before, after = model.norm_position != "after", model.norm_position != "before"
        out = "_output" if before else ""
        h = norm(x, weights[f"{name}.attention_norm.weight"], model) if before else x
        every = int(model.linear_attention_freq or 1)
        if (layer + 1) % every and model.linear_attention_rule == "mamba2":
            h = mamba2(h, weights, f"{name}.mamba", batch, model)
        elif (layer + 1) % every:
            h = delta_net(h, weights, f"{name}.linear_attention", batch, model)
        else:
            h = attention(h, weights, f"{name}.attention", batch, model)
        x = x + (norm(h, weights[f"{name}.attention{out}_norm.weight"], model) if after else h)
        h = norm(x, weights[f"{name}.mlp_norm.weight"], model) if before else x
        if f"{name}.mlp.router.weight" in weights:
            h = experts(h, weights, f"{name}.mlp", batch, model, seen)
        else:
            h = mlp(h, weights, f"{name}.mlp", model)
        x = x + (norm(h, weights[f"{name}.mlp{out}_norm.weight"], model) if after else h)
    head = weights[
        "head.weight" if model.untie_embeddings_and_output_weights else "embedding.weight"
    ]
    return norm(x, weights["final_norm.weight"], model) @ head.t()


def loss(weights: Weights, batches: Sequence[Any], model: Any, seen: Seen) -> Tensor:
    """Return the weighted mean loss over all tokens of all batches."""
    total = sum(
        (
            F.cross_entropy(
                logits(weights, batch, model, seen),
                torch.from_numpy(batch.labels),
                reduction="none",
            )
            * torch.from_numpy(batch.loss_weights)
        ).sum()
        for batch in batches
    )
    return total / sum(float(np.float64(batch.loss_weights).sum()) for batch in batches)


def train(
    weights: Weights, steps: Sequence[Sequence[Any]], model: Any, training: Any
) -> tuple[list[tuple[float, ...]], dict[str, Tensor], dict[str, Tensor]]:
    """Train with a constant learning rate.

    Return loss, gradient norm and expert figures of each step, the gradients of the first step, and
    the final weights.
    """
    fixed = {
        name: tensor.clone() for name, tensor in weights.items() if name.endswith("correction")
    }
    leaves = {
        name: tensor.clone().requires_grad_()
        for name, tensor in weights.items()
        if name not in fixed
    }
    ends = (".bias", "dt_bias", "A_log", ".D", ".sinks")
    plain = [p for name, p in leaves.items() if name.endswith(ends) or "norm" in name]
    decayed = [p for p in leaves.values() if not any(p is q for q in plain)]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": training.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ],
        lr=training.lr,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_eps,
    )
    reports: list[tuple[float, ...]] = []
    first: dict[str, Tensor] = {}
    for batches in steps:
        optimizer.zero_grad()
        seen: Seen = []
        value = loss({**leaves, **fixed}, batches, model, seen)
        terms = balance(seen, batches, model, training)
        (value + sum(terms)).backward()
        first = first or {name: p.grad.clone() for name, p in leaves.items() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(
            leaves.values(), training.clip_grad or float("inf")
        ).item()
        given = loads(seen)
        load = max((float(count.max() / count.mean()) for count in given.values()), default=0)
        reports.append(
            (value.item(), norm, *((*(term.item() for term in terms), load, 0) if seen else ()))
        )
        optimizer.step()
        for name, correction in fixed.items():
            count = given[name.removesuffix(".router.correction")]
            step = (
                np.float32(training.moe_router_bias_update_rate) * (count.mean() - count).sign()
            ).float()
            fixed[name] = (correction.float() + step).to(correction.dtype)  # float32 in any model
    return reports, first, {**{name: p.detach() for name, p in leaves.items()}, **fixed}
