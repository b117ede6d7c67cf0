"""The layers of the hybrid, slow and obviously right, for one sequence and without caches.

Every function takes and returns float32 tensors of one sequence, T tokens long; heads are explicit.
`precision` says where values are rounded on their way:

- "float32": nowhere. This is what is compared with the published model code.
- "bfloat16": where the engine rounds. The input of every linear is rounded, the product accumulates in
  float32 and stays there. Residuals, norms, gates, the recurrence, softmax and router stay float32. What
  the engine stores in bfloat16 is rounded too: q, k, v before the convolution, k and v in pages, and q.

Sources: Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks" (arXiv:2412.06464), for the recurrence and
its chunked form; the published Qwen3-Next and Qwen3.5 model code for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Precision = Literal["float32", "bfloat16"]


def rounded(x: Tensor, precision: Precision) -> Tensor:
    """x as float32, first rounded to bfloat16 if the precision asks for it."""
    return x.bfloat16().float() if precision == "bfloat16" else x.float()


def linear(x: Tensor, weight: Tensor, precision: Precision) -> Tensor:
    """x [T, K], weight [N, K] -> [T, N] float32."""
    return rounded(x, precision) @ weight.float().T


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zero-centred RMSNorm over the last dim: x / rms(x) * (1 + weight). x [..., D], weight [D] float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1.0 + weight)


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, sigmoid: bool = False) -> Tensor:
    """weight * x / rms(x) * silu(z), or sigmoid(z): plain weight, norm first, gate after. x, z [..., D],
    weight [D].
    """
    return (
        weight
        * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
        * (torch.sigmoid(z) if sigmoid else F.silu(z))
    )


def l2_norm(x: Tensor) -> Tensor:
    """x / |x| over the last dim; the epsilon is fixed and inside the root."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def causal_conv(x: Tensor, weight: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution, then SiLU: y_t = silu(sum_j weight[:, j] * x_{t-W+1+j}).

    x [T, C]; weight [C, W], the last tap meets the current token; state [C, W-1], the inputs before x
    (zeros at the start of a sequence). Returns y [T, C] and the state after x.
    """
    width = weight.shape[1]
    if state is None:
        state = x.new_zeros(x.shape[1], width - 1)
    padded = torch.cat([state.T, x])  # [W-1+T, C]
    y = torch.zeros_like(x)
    for j in range(width):
        y += weight[:, j] * padded[j : j + x.shape[0]]
    return F.silu(y), padded[padded.shape[0] - width + 1 :].T.contiguous()


def gdn_gates(b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Write strength beta = sigmoid(b) and log decay g = -exp(A_log) * softplus(a + dt_bias); all [T, Hv]."""
    return torch.sigmoid(b), -torch.exp(a_log) * F.softplus(a + dt_bias)


def for_value_heads(x: Tensor, n_v: int, tiled: bool) -> Tensor:
    """x [T, Hk, d] of key heads -> [T, n_v, d]: value head h reads key head h // (n_v/Hk), tiled h % Hk."""
    repeat = n_v // x.shape[1]
    return x.repeat(1, repeat, 1) if tiled else x.repeat_interleave(repeat, 1)


def mixed(x: int) -> int:
    """32 bits of which each depends on all of x, 32 bits, too (C. Wellons, "lowbias32")."""
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def stochastic_bfloat16(state: Tensor, position: int, layer: int) -> Tensor:
    """A state, float32 [Hv, dk, dv], rounded to one of the two nearest bfloat16 values, the nearer one more
    often: its bits, plus 16 random ones, cut off. The random ones are a hash of the position of the token
    behind which the state is stored, of the layer (among those with a state), the head and the element. Two
    rows of keys share a hash: the even one has its low half.
    """
    n_heads, dk, dv = state.shape
    seeds = torch.tensor([mixed(position ^ mixed(layer << 16 | head)) for head in range(n_heads)])  # int64
    even = torch.arange(dv)[None, :] * dk + torch.arange(0, dk, 2)[:, None]  # as elements lie in [dv, dk]
    x = (seeds[:, None, None] + even * 0x9E3779B9) & 0xFFFFFFFF  # [Hv, dk / 2, dv]
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    noise = torch.stack([x & 0xFFFF, x >> 16], 2).view(state.shape)
    bits = state.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    cut = ((bits + noise) & 0xFFFF0000).to(torch.uint32).view(torch.float32)
    return torch.where(state.isfinite(), cut, state)


Store = Callable[[Tensor, int], Tensor]
"""What is kept of a state, float32 [Hv, dk, dv], behind the token at a position."""


def naive_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    tiled: bool = False,
    store: Store | None = None,
    position: int = 0,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule, one token at a time.

    q, k [T, Hk, dk], normalised, q also scaled; v [T, Hv, dv]; g, beta [T, Hv]; state [Hv, dk, dv], zeros
    if None. Value head h reads key head h // (Hv/Hk), tiled (Qwen3.5 in GGUF) h % Hk. Returns o [T, Hv, dv]
    and the new state.
    For each token: decay, predict from the decayed state, write the error, read after the write, and
    store, if that changes the state. position: of the first token.
    """
    q, k = (for_value_heads(x, v.shape[1], tiled) for x in (q, k))
    s = v.new_zeros(v.shape[1], q.shape[2], v.shape[2]) if state is None else state.clone()
    o = torch.empty_like(v)
    for t in range(v.shape[0]):
        s = s * torch.exp(g[t])[:, None, None]
        error = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", s, k[t]))
        s = s + k[t][:, :, None] * error[:, None, :]
        o[t] = torch.einsum("hkv,hk->hv", s, q[t])
        s = s if store is None else store(s, position + t)
    return o, s


def chunk_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    chunk: int = 64,
    *,
    tiled: bool = False,
    store: Store | None = None,
    position: int = 0,
) -> tuple[Tensor, Tensor]:
    """The same as `naive_gdn`, a chunk at a time: what a chunk adds is solved for at once. The state is
    stored behind the last token of a chunk only. position: of the first token.

    With G the running sum of g in the chunk, D_ij = exp(G_i - G_j) for i >= j, else 0:
    A = strict_lower(beta K K^T D); U, W = (I + A)^-1 beta (V, e^G K); V' = U - W S;
    O = e^G Q S + (Q K^T D) V'; S <- e^{G_last} S + (e^{G_last - G} K)^T V'.
    """
    n_tokens = v.shape[0]
    q, k = (for_value_heads(x, v.shape[1], tiled) for x in (q, k))
    s = v.new_zeros(v.shape[1], q.shape[2], v.shape[2]) if state is None else state.clone()
    outputs = []
    for start in range(0, n_tokens, chunk):
        part = slice(start, min(start + chunk, n_tokens))
        qc, kc, vc = (x[part].transpose(0, 1) for x in (q, k, v))  # [H, c, d]
        decay, strength = g[part].T.cumsum(1), beta[part].T[:, :, None]  # [H, c], [H, c, 1]
        c = decay.shape[1]
        lower = torch.ones(c, c, dtype=torch.bool).tril()
        # masked before exp: above the diagonal the exponents are positive and overflow
        d = (decay[:, :, None] - decay[:, None, :]).masked_fill(~lower, -torch.inf).exp()
        a = (strength * (kc @ kc.transpose(1, 2)) * d).tril(-1)
        grown = decay.exp()[:, :, None]
        system = a + torch.eye(c)
        u = torch.linalg.solve_triangular(system, strength * vc, upper=False, unitriangular=True)
        w = torch.linalg.solve_triangular(system, strength * grown * kc, upper=False, unitriangular=True)
        fresh = u - w @ s
        outputs.append((grown * (qc @ s) + (qc @ kc.transpose(1, 2) * d) @ fresh).transpose(0, 1))
        last = decay[:, -1:, None]
        s = last.exp() * s + ((last - decay[:, :, None]).exp() * kc).transpose(1, 2) @ fresh
        s = s if store is None else store(s, position + part.stop - 1)
    return torch.cat(outputs), s


def rope(x: Tensor, positions: Tensor, inv_freq: Tensor, factor: float = 1.0) -> Tensor:
    """Rotate the first 2n dims of each head, dim i with i+n; the others pass through.

    x [T, heads, D]; positions [T], or [T, n] where angles have positions of their own (M-RoPE:
    `mrope_positions`); inv_freq [n] float64, angle = position * inv_freq; factor scales cos and sin (YaRN).
    With text the three M-RoPE position streams are equal and reduce to one.
    """
    n = inv_freq.shape[0]
    of_angle = positions if positions.ndim == 2 else positions[:, None]
    angle = (of_angle.double() * inv_freq.double()).float()[:, None, :]
    cos, sin = angle.cos() * factor, angle.sin() * factor
    x1, x2, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], -1)


def mrope_positions(positions: Tensor, sections: Sequence[int]) -> Tensor:
    """The position of each angle, [T, n]: of time, but that every third angle from the second (from the
    third) on has that of height (of width), as many as its section says. positions [3, T].
    """
    of_angle = positions[0][:, None].repeat(1, sum(sections))
    for axis in (1, 2):
        of_angle[:, axis : 3 * sections[axis] : 3] = positions[axis][:, None]
    return of_angle


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """Causal softmax attention with scale d^-0.5. q [T, nq, d]; k, v [T, nk, d] -> [T, nq, d].

    Query head j reads key head j // (nq/nk). seen: bool [T, T], the keys that each token attends to, of those
    up to it.
    """
    n_tokens, n_q_heads, d = q.shape
    repeat = n_q_heads // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("thd,shd->hts", q, k) * d**-0.5
    future = torch.ones(n_tokens, n_tokens, dtype=torch.bool).triu(1)
    if seen is not None:
        future |= ~seen
    return torch.einsum("hts,shd->thd", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor, precision: Precision) -> Tensor:
    """down(silu(gate x) * up x). x [T, H]; gate_up [2F, H], gate rows first; down [H, F]."""
    gate, up = linear(x, gate_up, precision).chunk(2, -1)
    return linear(F.silu(gate) * up, down, precision)


def route(x: Tensor, router: Tensor, k: int, renormalise: bool, precision: Precision) -> tuple[Tensor, Tensor]:
    """Softmax over all experts, then the k largest, lower ids first on ties. -> weights, ids, both [T, k]."""
    p = linear(x, router, precision).softmax(-1)
    weights, ids = (y[:, :k] for y in p.sort(dim=-1, descending=True, stable=True))
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), ids
