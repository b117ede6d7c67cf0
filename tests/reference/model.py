"""The whole model for one sequence: every token recomputed, no cache, no batch.

`weights` and `shape` are read by attribute only: `weights` has embed, norm, lm_head and layers in the
engine's internal layout (see `deltic.models.qwen.weights`), `shape` the fields of a model shape. A layer with
`in_proj` is a DeltaNet layer, one with `qkv` an attention layer; a feed-forward with `router` is MoE.
Left out: vision, and everything that makes it fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import torch
from torch import Tensor

from tests.reference import kv
from tests.reference.layers import (
    Precision,
    Store,
    attention,
    causal_conv,
    chunk_gdn,
    gated_rms_norm,
    gdn_gates,
    l2_norm,
    linear,
    naive_gdn,
    rms_norm,
    rope,
    rounded,
    route,
    swiglu,
)

StoreOfLayer = Callable[..., Tensor]
"""As a Store, with `layer`: `stochastic_bfloat16`."""


def gdn_mixer(
    x: Tensor, layer: Any, shape: Any, precision: Precision, chunked: bool = False, store: Store | None = None
) -> Tensor:
    """Gated DeltaNet over a whole sequence. x [T, H] normed -> [T, H]. store: see `hidden_states`."""
    hk, hv, dk, dv = shape.gdn_n_k_heads, shape.gdn_n_v_heads, shape.gdn_k_dim, shape.gdn_v_dim
    channels = 2 * hk * dk + hv * dv
    qkv, z, b, a = linear(x, layer.in_proj, precision).split([channels, hv * dv, hv, hv], -1)
    u, _ = causal_conv(rounded(qkv, precision), layer.conv)
    q, k, v = u.split([hk * dk, hk * dk, hv * dv], -1)
    q = l2_norm(q.unflatten(-1, (hk, dk))) * dk**-0.5
    k = l2_norm(k.unflatten(-1, (hk, dk)))
    beta, g = gdn_gates(b, a, layer.a_log, layer.dt_bias)
    rule = chunk_gdn if chunked else naive_gdn
    o, _ = rule(q, k, v.unflatten(-1, (hv, dv)), g, beta, tiled=shape.tiled_value_heads, store=store)
    y = gated_rms_norm(o, z.unflatten(-1, (hv, dv)), layer.norm, shape.rms_norm_eps)
    return linear(y.flatten(1), layer.out_proj, precision)


def attention_mixer(x: Tensor, layer: Any, shape: Any, precision: Precision) -> Tensor:
    """Gated attention over a whole sequence. x [T, H] normed -> [T, H]."""
    nq, nk, d = shape.n_q_heads, shape.n_kv_heads, shape.head_dim
    q, gate, k, v = linear(x, layer.qkv, precision).split([nq * d, nq * d, nk * d, nk * d], -1)
    positions = torch.arange(x.shape[0])
    inv_freq = torch.tensor(shape.inv_freq(), dtype=torch.float64)

    def normed_and_rotated(heads: Tensor, n: int, weight: Tensor) -> Tensor:
        y = rms_norm(heads.unflatten(-1, (n, d)), weight, shape.rms_norm_eps)
        return rounded(rope(y, positions, inv_freq, shape.rope_attention_factor), precision)

    keys, values = normed_and_rotated(k, nk, layer.k_norm), rounded(v, precision).unflatten(-1, (nk, d))
    if shape.kv_cache_dtype in kv.FORMATS:
        keys, values = (
            torch.from_numpy(of(x.to(torch.bfloat16).view(torch.int16).numpy().view(ml_dtypes.bfloat16)).values())
            for x, of in zip((keys, values), kv.FORMATS[shape.kv_cache_dtype], strict=True)
        )
    o = attention(normed_and_rotated(q, nq, layer.q_norm), keys, values)
    return linear(o.flatten(1) * torch.sigmoid(gate), layer.o_proj, precision)


def feed_forward(x: Tensor, mlp: Any, shape: Any, precision: Precision) -> Tensor:
    """SwiGLU, or experts plus gated shared expert. x [T, H] normed -> [T, H]."""
    if not hasattr(mlp, "router"):
        return swiglu(x, mlp.gate_up, mlp.down, precision)
    weights, ids = route(x, mlp.router, shape.n_experts_per_tok, shape.norm_topk_prob, precision)
    y = torch.zeros_like(x)
    for slot in range(ids.shape[1]):  # experts add up in the order of their weights
        for expert in ids[:, slot].unique().tolist():
            rows = ids[:, slot] == expert
            out = swiglu(x[rows], mlp.gate_up[expert], mlp.down[expert], precision)
            y[rows] += weights[rows, slot, None] * out
    shared = swiglu(x, mlp.shared_gate_up, mlp.shared_down, precision)
    return y + torch.sigmoid(linear(x, mlp.shared_gate[None], precision)) * shared


@torch.no_grad()
def hidden_states(
    weights: Any,
    shape: Any,
    token_ids: Sequence[int],
    precision: Precision = "float32",
    chunked: bool = False,
    trace: list[Tensor] | None = None,
    store: StoreOfLayer | None = None,
) -> Tensor:
    """The states that the head reads, after the final norm: [T, H] float32.

    `chunked` takes the chunked form of DeltaNet. `trace` collects the residual stream [T, H] after the
    embedding and after every layer, to find the first layer where two implementations part. `store`: what is
    kept of a layer's recurrent state behind a token, or behind a chunk, by the layer's number among its kind.
    """
    x = weights.embed[torch.tensor(token_ids, dtype=torch.long)].float()
    if trace is not None:
        trace.append(x)
    n_gdn = 0
    for layer in weights.layers:
        normed = rms_norm(x, layer.input_norm, shape.rms_norm_eps)
        if hasattr(layer, "in_proj"):
            own = None if store is None else partial(store, layer=n_gdn)
            x = x + gdn_mixer(normed, layer, shape, precision, chunked, own)
            n_gdn += 1
        else:
            x = x + attention_mixer(normed, layer, shape, precision)
        x = x + feed_forward(rms_norm(x, layer.post_norm, shape.rms_norm_eps), layer.mlp, shape, precision)
        if trace is not None:
            trace.append(x)
    return rms_norm(x, weights.norm, shape.rms_norm_eps)


def forward(
    weights: Any,
    shape: Any,
    token_ids: Sequence[int],
    precision: Precision = "float32",
    chunked: bool = False,
    trace: list[Tensor] | None = None,
    store: StoreOfLayer | None = None,
) -> Tensor:
    """Logits [T, V] float32; row t is what follows token_ids[: t + 1]. See `hidden_states`."""
    hidden = hidden_states(weights, shape, token_ids, precision, chunked, trace, store)
    return linear(hidden, weights.lm_head, precision)


@torch.no_grad()
def draft_states(
    weights: Any, shape: Any, hidden: Tensor, next_ids: Sequence[int], precision: Precision = "float32"
) -> Tensor:
    """The draft head's own hidden states [T, H], of which lm_head makes logits of the token after the next.

    hidden [T, H]: of the tokens, behind the final norm; next_ids: the tokens behind them.
    """
    head, eps = weights.draft_head, shape.rms_norm_eps
    embedded = weights.embed[torch.tensor(next_ids, dtype=torch.long)].float()
    pair = [rms_norm(embedded, head.embedding_norm, eps), rms_norm(rounded(hidden, precision), head.hidden_norm, eps)]
    x = linear(torch.cat(pair, -1), head.fc, precision)
    x = x + attention_mixer(rms_norm(x, head.layer.input_norm, eps), head.layer, shape, precision)
    x = x + feed_forward(rms_norm(x, head.layer.post_norm, eps), head.layer.mlp, shape, precision)
    return rms_norm(x, head.norm, eps)


def generate_greedy(
    weights: Any,
    shape: Any,
    prompt_ids: Sequence[int],
    n_tokens: int,
    precision: Precision = "float32",
    n_real_vocab: int | None = None,
    chunked: bool = False,
    store: StoreOfLayer | None = None,
) -> list[int]:
    """The n_tokens ids that greedy decoding appends; lowest id on ties, no stop ids.

    Ids from n_real_vocab on are padding rows of the embedding and are never chosen.
    """
    ids = list(prompt_ids)
    for _ in range(n_tokens):
        last = hidden_states(weights, shape, ids, precision, chunked, store=store)[-1:]
        logits = linear(last, weights.lm_head, precision)[0, :n_real_vocab]
        ids.append(int(logits.argmax()))
    return ids[len(prompt_ids) :]
