"""Block drafters, slow and plain: DFlash, DFlash 2 and DSpark, for one sequence and one block.

A drafter is a few Qwen3 layers. What they see of a text are keys and values of the target model's hidden
states; a block of rows, the last token and masks behind it, gives several tokens at once.

`weights` has fc, hidden_norm, norm and layers (input_norm, post_norm, qkv, q_norm, k_norm, o_proj, mlp; of
DFlash 2 attn_conv and mlp_conv with base and projection), perhaps selector (predecessor, successor,
projection), markov (before, after) and confidence (weight, bias). Norms are zero-centred. `shape` has the
sizes of a drafter's configuration. Both are read by attribute only.

Sources: Chen, Liang, Liu 2026, "DFlash" (arXiv:2602.06036); the published model code of z-lab (DFlash,
DFlash 2) and DeepSpec (DSpark).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.reference.layers import Precision, linear, rms_norm, rope, rounded, swiglu


class Keys(NamedTuple):
    """Keys and values of a layer, [T, n_kv_heads, head_dim] each, keys normed and rotated."""

    k: Tensor
    v: Tensor


def keys_of(x: Tensor, layer: Any, shape: Any, positions: Tensor, precision: Precision) -> Keys:
    """Keys and values of rows x [T, H]."""
    nq, nk, d = shape.n_q_heads, shape.n_kv_heads, shape.head_dim
    _, k, v = linear(x, layer.qkv, precision).split([nq * d, nk * d, nk * d], -1)
    return Keys(heads(k, nk, layer.k_norm, shape, positions, precision), rounded(v, precision).unflatten(-1, (nk, d)))


def heads(x: Tensor, n: int, norm: Tensor, shape: Any, positions: Tensor, precision: Precision) -> Tensor:
    """x [T, n * d], normed by head and rotated: [T, n, d]."""
    inv_freq = torch.tensor(shape.inv_freq(), dtype=torch.float64)
    y = rms_norm(x.unflatten(-1, (n, shape.head_dim)), norm, shape.rms_norm_eps)
    return rounded(rope(y, positions, inv_freq, shape.rope_attention_factor), precision)


def context(weights: Any, shape: Any, features: Tensor, precision: Precision = "float32") -> list[Keys]:
    """Keys and values that each layer has of a text. features [T, n * H]: the residual streams behind the
    target's layers of `target_layer_ids`, side by side.
    """
    x = rms_norm(linear(features, weights.fc, precision), weights.hidden_norm, shape.rms_norm_eps)
    positions = torch.arange(len(features))
    return [keys_of(x, layer, shape, positions, precision) for layer in weights.layers]


def attend(q: Tensor, keys: Keys, first: int, is_causal: bool, window: int) -> Tensor:
    """Softmax attention of rows q [T, nq, d] at positions from `first` on. Without is_causal they see all
    keys; with a window those less than so many positions before, and less than so many behind.
    """
    repeat = q.shape[1] // keys.k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1) for x in keys)
    at, to = first + torch.arange(len(q))[:, None], torch.arange(len(k))[None]
    hidden = to > at if is_causal else torch.zeros(1, dtype=torch.bool)
    if window:
        hidden = hidden | (at - to >= window) | (to - at >= window)
    scores = torch.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def convolve(x: Tensor, kernel: Tensor, base: Tensor, group: int) -> Tensor:
    """y[t] = sum over taps j of (base[j] + kernel[t, j], one value a group of channels) * x[t - j]; before
    the block's first row is nothing. x [T, H], kernel [T, taps, H / group], base [taps, H].
    """
    y = torch.zeros_like(x)
    for tap in range(len(base)):
        before = torch.cat([x.new_zeros(tap, x.shape[1]), x])[: len(x)]
        y += (base[tap] + kernel[:, tap].repeat_interleave(group, -1)) * before
    return y


@torch.no_grad()
def block_states(weights: Any, shape: Any, known: list[Keys], rows: Tensor, precision: Precision = "float32") -> Tensor:
    """States of a block's rows behind the final norm, [T, H]. known: of `context`; rows [T, H]: embeddings of
    the last token and of the masks, which stand behind that context.
    """
    x, first = rows * shape.embedding_scale, len(known[0].k)
    positions = first + torch.arange(len(rows))
    nq, nk, d = shape.n_q_heads, shape.n_kv_heads, shape.head_dim
    for i, (layer, before) in enumerate(zip(weights.layers, known, strict=True)):

        def attention(y: Tensor, layer: Any = layer, before: Keys = before, i: int = i) -> Tensor:
            own = keys_of(y, layer, shape, positions, precision)
            q = linear(y, layer.qkv, precision).split([nq * d, nk * d, nk * d], -1)[0]
            q = heads(q, nq, layer.q_norm, shape, positions, precision)
            keys = Keys(*(torch.cat(pair) for pair in zip(before, own, strict=True)))
            mixed = attend(q, keys, first, shape.are_causal[i], shape.windows[i])
            return linear(mixed.flatten(1), layer.o_proj, precision)

        def feed_forward(y: Tensor, layer: Any = layer) -> Tensor:
            return swiglu(y, layer.mlp.gate_up, layer.mlp.down, precision)

        normed = rms_norm(x, layer.input_norm, shape.rms_norm_eps)
        x = x + convolved(attention, normed, layer.attn_conv, shape, precision)
        normed = rms_norm(x, layer.post_norm, shape.rms_norm_eps)
        x = x + convolved(feed_forward, normed, layer.mlp_conv, shape, precision)
    return rms_norm(x, weights.norm, shape.rms_norm_eps)


def convolved(part: Any, x: Tensor, conv: Any, shape: Any, precision: Precision) -> Tensor:
    """part(x) between two convolutions, whose kernels follow from x, if there are any."""
    if conv is None:
        return torch.as_tensor(part(x))
    x = rounded(x, precision)
    kernels = linear(x, conv.projection, precision).unflatten(-1, (2, shape.conv_taps, -1))
    y = rounded(convolve(x, kernels[:, 0], conv.base[0], shape.conv_group), precision)
    return convolve(part(y), kernels[:, 1], conv.base[1], shape.conv_group)


def logits_of(shape: Any, states: Tensor, lm_head: Tensor, precision: Precision = "float32") -> Tensor:
    """Logits of a block's states, [T, V], as the configuration scales and bounds them."""
    logits: Tensor = linear(states, lm_head, precision) * shape.output_multiplier
    if shape.softcap:
        logits = (logits / shape.softcap).tanh() * shape.softcap
    return logits


@torch.no_grad()
def step_scores(
    weights: Any, shape: Any, state: Tensor, logits: Tensor, before: int, precision: Precision = "float32"
) -> Tensor:
    """Scores [V] of a block's next token behind the one before: its logits [V], with what DSpark's Markov
    term or the selector of DFlash 2 adds. What is not among the selector's candidates is -inf. state [H].
    """
    if weights.markov is not None:
        embedded = weights.markov.before[before].float()[None]
        return logits + linear(embedded, weights.markov.after, precision)[0]
    if weights.selector is None:
        return logits
    values, ids = logits.sort(descending=True, stable=True)
    values, ids = values[: shape.selector_top_k], ids[: shape.selector_top_k]
    projected = linear(state[None], weights.selector.projection, precision)[0]
    wanted = weights.selector.predecessor[before].float() * projected
    scores = torch.full_like(logits, -torch.inf)
    scores[ids] = values + weights.selector.successor[ids].float() @ wanted
    return scores


@torch.no_grad()
def confidence(weights: Any, shape: Any, state: Tensor, before: int) -> float:
    """Chance that DSpark gives the token behind `before` to be right. state [H]."""
    x = state
    if shape.confidence_sees_token:
        x = torch.cat([x, weights.markov.before[before].float()])
    return float(torch.sigmoid(x @ weights.confidence.weight + weights.confidence.bias))


def guess(weights: Any, shape: Any, states: Tensor, logits: Tensor, anchor: int, **more: Any) -> list[int]:
    """The likeliest token of each row that guesses, from left to right. states, logits: of these rows."""
    found = list[int]()
    for state, of_row in zip(states, logits, strict=True):
        before = found[-1] if found else anchor
        found.append(int(step_scores(weights, shape, state, of_row, before, **more).argmax()))
    return found
