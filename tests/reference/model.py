"""The whole model for one sequence: every token recomputed, no cache, no batch.

`weights` and `shape` are read by attribute only: `weights` has embed, norm, lm_head and layers in the
engine's internal layout (see `deltic.models.qwen.weights`), `shape` the fields of a model shape. A layer with
`in_proj` is a DeltaNet layer, one with `qkv` an attention layer; a feed-forward with `router` is MoE. A norm
with `down` is a hyper-connection. `weights.ngram_rows` gives rows of the table of n-grams. Left out: the
vision tower, and everything that makes it fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import torch
from torch import Tensor

from tests.reference import flash_next, kv
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
    mrope_positions,
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
    y = gated_rms_norm(o, z.unflatten(-1, (hv, dv)), layer.norm, shape.rms_norm_eps, shape.sigmoid_gate)
    return linear(y.flatten(1), layer.out_proj, precision)


def attention_mixer(x: Tensor, layer: Any, shape: Any, precision: Precision, positions: Tensor | None = None) -> Tensor:
    """Gated attention over a whole sequence, or over the keys that its index chooses. x [T, H] normed -> [T,
    H].

    positions: see `trunk`.
    """
    nq, nk, d = shape.n_q_heads, shape.n_kv_heads, shape.head_dim
    q, gate, k, v = linear(x, layer.qkv, precision).split([nq * d, nq * d, nk * d, nk * d], -1)
    of_angle = torch.arange(x.shape[0]) if positions is None else mrope_positions(positions, shape.mrope_section)
    inv_freq = torch.tensor(shape.inv_freq(), dtype=torch.float64)

    def normed_and_rotated(heads: Tensor, n: int, weight: Tensor) -> Tensor:
        y = rms_norm(heads.unflatten(-1, (n, d)), weight, shape.rms_norm_eps)
        return rounded(rope(y, of_angle, inv_freq, shape.rope_attention_factor), precision)

    keys, values = normed_and_rotated(k, nk, layer.k_norm), rounded(v, precision).unflatten(-1, (nk, d))
    if shape.kv_cache_dtype in kv.FORMATS:
        keys, values = (
            torch.from_numpy(of(x.to(torch.bfloat16).view(torch.int16).numpy().view(ml_dtypes.bfloat16)).values())
            for x, of in zip((keys, values), kv.FORMATS[shape.kv_cache_dtype], strict=True)
        )
    seen = None
    if shape.index is not None:
        scores = flash_next.index_scores(x, layer.indexer, shape, of_angle, inv_freq, precision)
        seen = flash_next.chosen_keys(scores, shape.index)
    o = attention(normed_and_rotated(q, nq, layer.q_norm), keys, values, seen)
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


def read(x: Tensor, norm: Any, shape: Any, precision: Precision) -> tuple[Tensor, Tensor | None]:
    """What a block reads of the residual stream, or of several, [T, H]; and how its output is written to
    these.
    """
    if hasattr(norm, "down"):
        return flash_next.read_streams(x, norm, shape, precision)
    return rms_norm(x, norm, shape.rms_norm_eps), None


def block(x: Tensor, norm: Any, shape: Any, precision: Precision, of: Callable[[Tensor], Tensor]) -> Tensor:
    """The residual stream, or streams, after a block, which computes `of` what it reads."""
    block_input, factors = read(x, norm, shape, precision)
    return x + of(block_input) if factors is None else flash_next.write_streams(x, factors, of(block_input))


@torch.no_grad()
def trunk(
    weights: Any,
    shape: Any,
    token_ids: Sequence[int],
    precision: Precision = "float32",
    chunked: bool = False,
    trace: list[Tensor] | None = None,
    store: StoreOfLayer | None = None,
    pictures: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The residual stream behind the last layer, [T, H] float32; of several streams, [T, S*H].

    `chunked` takes the chunked form of DeltaNet. `trace` collects the residual stream after the embedding and
    after every layer, to find the first layer where two implementations part. `store`: what is kept of a
    layer's recurrent state behind a token, or behind a chunk, by the layer's number among its kind.
    `pictures`: the embeddings of all tokens [T, H], with those of pictures in the place of their tokens', and
    the positions of M-RoPE [3, T].
    """
    embedded, positions = pictures or (weights.embed[torch.tensor(token_ids, dtype=torch.long)].float(), None)
    x = embedded.repeat(1, shape.n_streams)
    if trace is not None:
        trace.append(x)
    n_gdn = 0
    for layer in weights.layers:
        if getattr(layer, "ngrams", None) is not None:
            rows = weights.ngram_rows(flash_next.ngram_ids(token_ids, shape.ngrams))
            x = x + flash_next.ngram_embedding(x, rows, layer.ngrams, shape, precision)
        if hasattr(layer, "in_proj"):
            own = None if store is None else partial(store, layer=n_gdn)
            mixer = partial(gdn_mixer, layer=layer, shape=shape, precision=precision, chunked=chunked, store=own)
            n_gdn += 1
        else:
            mixer = partial(attention_mixer, layer=layer, shape=shape, precision=precision, positions=positions)
        x = block(x, layer.input_norm, shape, precision, mixer)
        x = block(
            x, layer.post_norm, shape, precision, partial(feed_forward, mlp=layer.mlp, shape=shape, precision=precision)
        )
        if trace is not None:
            trace.append(x)
    return x


@torch.no_grad()
def hidden_states(
    weights: Any,
    shape: Any,
    token_ids: Sequence[int],
    precision: Precision = "float32",
    chunked: bool = False,
    trace: list[Tensor] | None = None,
    store: StoreOfLayer | None = None,
    pictures: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The states that the head reads, after the final norm: [T, H] float32. See `trunk`."""
    x = trunk(weights, shape, token_ids, precision, chunked, trace, store, pictures)
    return read(x, weights.norm, shape, precision)[0]


def forward(
    weights: Any,
    shape: Any,
    token_ids: Sequence[int],
    precision: Precision = "float32",
    chunked: bool = False,
    trace: list[Tensor] | None = None,
    store: StoreOfLayer | None = None,
    pictures: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Logits [T, V] float32; row t is what follows token_ids[: t + 1]. See `trunk`."""
    hidden = hidden_states(weights, shape, token_ids, precision, chunked, trace, store, pictures)
    return linear(hidden, weights.lm_head, precision)


@torch.no_grad()
def draft_states(
    weights: Any, shape: Any, hidden: Tensor, next_ids: Sequence[int], precision: Precision = "float32"
) -> Tensor:
    """The draft head's own hidden states [T, H], of which lm_head makes logits of the token after the next.

    hidden [T, H]: of the tokens, behind the final norm; of several streams [T, S*H], their `trunk`.
    next_ids: the tokens behind them.
    """
    return read(draft_trunk(weights, shape, hidden, next_ids, precision), weights.draft_head.norm, shape, precision)[0]


@torch.no_grad()
def draft_trunk(
    weights: Any, shape: Any, hidden: Tensor, next_ids: Sequence[int], precision: Precision = "float32"
) -> Tensor:
    """The residual stream behind the draft head's layer, or streams, [T, S*H]: what it guesses on from.
    Arguments as of `draft_states`.
    """
    head, eps, n = weights.draft_head, shape.rms_norm_eps, shape.n_streams
    embedded = weights.embed[torch.tensor(next_ids, dtype=torch.long)].float()
    normed = rms_norm(rounded(hidden, precision), head.hidden_norm, eps).unflatten(
        -1, (n, -1)
    )  # one norm of all streams
    pair = [rms_norm(embedded, head.embedding_norm, eps)[:, None].expand_as(normed), normed]
    x = linear(torch.cat(pair, -1), head.fc, precision).flatten(1)
    mixer = partial(attention_mixer, layer=head.layer, shape=shape, precision=precision)
    x = block(x, head.layer.input_norm, shape, precision, mixer)
    mlp = partial(feed_forward, mlp=head.layer.mlp, shape=shape, precision=precision)
    return block(x, head.layer.post_norm, shape, precision, mlp)


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
