"""flash-linear-attention's `chunk_gated_delta_rule` token by token, with its parameters, errors and
autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the rule for `q, k[1, t, groups, K]`, `v[1, t, heads, V]` and rates `[1, t, heads]`.

    The signature is that of release 0.6.0.
    """
    assert not any(
        [
            use_beta_sigmoid_in_kernel,
            allow_neg_eigval,
            state_v_first,
            cu_seqlens_cpu,
            cp_context,
            kwargs,
        ]
    )
    assert cu_seqlens is not None and chunk_indices is not None
    bounds, share = cu_seqlens.tolist(), v.shape[2] // k.shape[2]
    lengths = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
    assert chunk_indices.tolist() == [
        [i, j] for i, n in enumerate(lengths) for j in range(-(-n // 64))
    ]
    assert (
        len(q) == 1
        and bounds[0] == 0
        and bounds[-1] == q.shape[1]
        and bounds == sorted(set(bounds))
    )
    shape = (len(bounds) - 1, v.shape[2], k.shape[3], v.shape[3])
    states = v.new_zeros(shape) if initial_state is None else initial_state
    assert states.shape == shape
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x[0].repeat_interleave(share, 1) for x in (q, k))
    outs, finals = [], []
    for state, start, stop in zip(states, bounds, bounds[1:], strict=False):
        for i in range(start, stop):
            state = state * g[0, i, :, None, None].exp()
            new = beta[0, i, :, None] * (v[0, i] - torch.einsum("hk,hkv->hv", k[i], state))
            state = state + torch.einsum("hk,hv->hkv", k[i], new)
            outs.append(torch.einsum("hk,hkv->hv", q[i] * (scale or k.shape[2] ** -0.5), state))
        finals.append(state)
    return torch.stack(outs).unsqueeze(0), torch.stack(finals) if output_final_state else None
