"""What Qwen3.8-Flash-Next has besides the layers of the hybrid: hyper-connections, the n-gram embedding, the
index.

As in `layers`: one sequence, float32, slow and obviously right; `precision` "bfloat16" rounds where the
engine does. x [T, S*H] are the S residual streams of T tokens, one behind another. Source: transformers,
models/qwen4_exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.reference.layers import Precision, linear, rms_norm, rope, rounded


def stream_norm(x: Tensor, weight: Tensor, n_streams: int, eps: float) -> Tensor:
    """Zero-centred RMSNorm of each stream by itself. x [T, S*H], weight [S*H]."""
    return rms_norm(x.unflatten(-1, (n_streams, -1)), weight.unflatten(-1, (n_streams, -1)), eps).flatten(-2)


def read_streams(x: Tensor, connection: Any, shape: Any, precision: Precision) -> tuple[Tensor, Tensor | None]:
    """What a block reads of the streams [T, H], and the factor with which its output is written to each [T,
    S].

    connection: norm [S*H]; down [R + S, S*H], the last S rows of the factors, or [R, S*H] if nothing is
    written; up [S*H, R].
    """
    n, rank = shape.n_streams, connection.up.shape[1]
    normed = rounded(stream_norm(x, connection.norm, n, shape.rms_norm_eps), precision)
    down = linear(normed, connection.down, precision) / n
    mix = torch.sigmoid(linear(F.silu(down[:, :rank]), connection.up, precision))
    block_input = (mix * normed).unflatten(-1, (n, -1)).mean(-2)
    return block_input, 2 * torch.sigmoid(down[:, rank:]) if down.shape[1] > rank else None


def write_streams(x: Tensor, factors: Tensor, output: Tensor) -> Tensor:
    """The streams after a block: output [T, H] times its factor is added to each. factors [T, S]."""
    return x + (factors[:, :, None] * output[:, None, :]).flatten(1)


def ngram_ids(ids: Sequence[int], ngrams: Any) -> Tensor:
    """Rows of the table of every token, int64 [T, heads]: heads of 2 tokens first, then of 3, ...

    A token's n-gram ends before the last end of text in front of it, and at the start: from there on
    backwards all its tokens are the end of text.
    """
    per_length = len(ngrams.primes) // (ngrams.size - 1)
    rows = []
    for t in range(len(ids)):
        gram, is_out = [ids[t]], False
        for back in range(1, ngrams.size):
            is_out = is_out or t - back < 0 or ids[t - back] == ngrams.eos_id
            gram.append(ngrams.eos_id if is_out else ids[t - back])
        row, mixed = [], gram[0] * ngrams.multipliers[0]
        for length in range(2, ngrams.size + 1):
            mixed ^= gram[length - 1] * ngrams.multipliers[length - 1]
            for head in range((length - 2) * per_length, (length - 1) * per_length):
                row.append(mixed % ngrams.primes[head] + ngrams.offsets[head])
        rows.append(row)
    return torch.tensor(rows, dtype=torch.long)


def ngram_embedding(x: Tensor, embedded: Tensor, layer: Any, shape: Any, precision: Precision) -> Tensor:
    """What the n-gram embedding adds to the streams, [T, S*H]. embedded [T, E]: the rows of the tokens'
    n-grams.

    layer: proj [S*H + H, E], a key of each stream, then the value; key_norm, query_norm, conv_norm [S*H];
    conv [S*H, W], whose taps are `ngrams.size` tokens apart.
    """
    n, h, eps = shape.n_streams, shape.hidden_size, shape.rms_norm_eps
    key, value = linear(embedded, layer.proj, precision).split([n * h, h], -1)
    key, query = stream_norm(key, layer.key_norm, n, eps), stream_norm(x, layer.query_norm, n, eps)
    score = (key * query).unflatten(-1, (n, h)).sum(-1) / h**0.5
    gate = torch.sigmoid(score.sign() * score.abs().clamp_min(1e-6).sqrt())
    gated = (gate[:, :, None] * value[:, None, :]).flatten(1)
    normed = rounded(stream_norm(gated, layer.conv_norm, n, eps), precision)
    added: Tensor = gated + F.silu(dilated_conv(normed, layer.conv, shape.ngrams.size))
    return added


def dilated_conv(x: Tensor, weight: Tensor, dilation: int) -> Tensor:
    """Depthwise causal convolution: y_t = sum over j of weight[:, j] * x_{t - (W-1-j) * dilation}, x before
    the start 0.

    x [T, C]; weight [C, W].
    """
    n_tokens, width = x.shape[0], weight.shape[1]
    padded = F.pad(x, (0, 0, (width - 1) * dilation, 0))
    y = torch.zeros_like(x)
    for j in range(width):
        y += weight[:, j] * padded[j * dilation : j * dilation + n_tokens]
    return y


def index_scores(
    x: Tensor, indexer: Any, shape: Any, positions: Tensor, inv_freq: Tensor, precision: Precision
) -> Tensor:
    """How well each whole group of tokens fits each token: [T, G]. A common factor, which orders nothing, is
    left out.

    Groups of `ratio` tokens share a key: the mean of theirs, normed and rotated as the first of them. x [T,
    H]: what the block reads; positions [T] or [T, n].
    """
    index, factor, eps = shape.index, shape.rope_attention_factor, shape.rms_norm_eps
    query, key = linear(x, indexer.proj, precision).split([index.n_q * index.dim, index.dim], -1)
    query = rms_norm(query.unflatten(-1, (index.n_q, index.dim)), indexer.q_norm, eps)
    query = rounded(rope(query, positions, inv_freq, factor), precision)
    n_groups = len(x) // index.ratio
    grouped = rounded(key, precision)[: n_groups * index.ratio].unflatten(0, (n_groups, index.ratio))
    group_key = rms_norm(rounded(grouped.mean(1), precision), indexer.k_norm, eps)[:, None]
    group_key = rounded(rope(group_key, positions[: n_groups * index.ratio : index.ratio], inv_freq, factor), precision)
    return torch.relu(torch.einsum("thd,gd->thg", query, group_key[:, 0])).sum(1)


def chosen_keys(scores: Tensor, index: Any) -> Tensor:
    """Which keys each token attends to: bool [T, T]. scores: `index_scores`.

    A token chooses, of the groups that end with it or before it, the `budget / ratio` of highest score, the
    earlier ones among equals. And it sees the tokens behind the last of these groups.
    """
    n_tokens = len(scores)
    chosen = torch.zeros(n_tokens, n_tokens, dtype=torch.bool)
    for t in range(n_tokens):
        n_whole = (t + 1) // index.ratio
        order = scores[t, :n_whole].sort(descending=True, stable=True).indices[: index.budget // index.ratio]
        for group in order.tolist():
            chosen[t, group * index.ratio : (group + 1) * index.ratio] = True
        chosen[t, n_whole * index.ratio : t + 1] = True
    return chosen
