"""The hybrid text model in plain torch: a batched training forward, and one-token decode for evaluation.

Layout. A training batch is one flat run of N tokens: `n_rows` rows of equal length, each row holding whole
documents one after another. Everything but attention and the chunk scan works on the flat run, so batches of few
long rows and of many short rows have the same shapes (and share one compiled graph). Documents never see one
another: the convolution drops taps that reach over a border, attention masks them, and the recurrence is reset
by a decay of exp(RESET) at each document's first token.

Mathematics: "Gated Delta Networks" (Yang, Kautz, Hatamizadeh, 2024), chunk form of length 64, in float32; the rest of
the decoder as in the published `qwen3_5` text architecture, whose tensor names the parameters carry.
Left out: mixture of experts, vision, draft heads, caches across calls.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64
RESET = -60.0  # log decay at a document's start: exp(-60) ~ 1e-26 of the old state is left, and sums stay exact


@dataclass(frozen=True)
class Geometry:
    """Sizes of one model; the head sizes are those of the published checkpoints."""

    vocab_size: int = 1600
    hidden_size: int = 256
    n_layers: int = 8
    full_attention_interval: int = 4
    gdn_n_k_heads: int = 1
    gdn_n_v_heads: int = 2
    gdn_head_dim: int = 128
    conv_width: int = 4
    n_q_heads: int = 2
    n_kv_heads: int = 1
    head_dim: int = 256
    rotary_dim: int = 64
    rope_theta: float = 1e7
    intermediate_size: int = 448
    max_position_embeddings: int = 4096
    eps: float = 1e-6

    @property
    def layer_types(self) -> list[str]:
        every = self.full_attention_interval
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(self.n_layers)]

    def published_config(self, end_of_text_id: int) -> dict[str, Any]:
        """config.json in the flat, text-only form of the published checkpoints."""
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.n_layers,
            "layer_types": self.layer_types,
            "full_attention_interval": self.full_attention_interval,
            "num_attention_heads": self.n_q_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "linear_num_key_heads": self.gdn_n_k_heads,
            "linear_num_value_heads": self.gdn_n_v_heads,
            "linear_key_head_dim": self.gdn_head_dim,
            "linear_value_head_dim": self.gdn_head_dim,
            "linear_conv_kernel_dim": self.conv_width,
            "mamba_ssm_dtype": "float32",
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "max_position_embeddings": self.max_position_embeddings,
            "partial_rotary_factor": self.rotary_dim / self.head_dim,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": int(self.rope_theta),
                "partial_rotary_factor": self.rotary_dim / self.head_dim,
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
            },
            "tie_word_embeddings": True,
            "eos_token_id": end_of_text_id,
        }


@dataclass
class Packed:
    """A batch: `tokens` [N] int64 on the device, `first` [N] bool (first token of a document), rows of equal length."""

    tokens: Tensor
    first: Tensor
    n_rows: int

    @property
    def row_length(self) -> int:
        return self.tokens.numel() // self.n_rows


@dataclass
class Borders:
    """What the layers need to know of document borders: `taps` [conv_width - 1, N] bool, `mask` [rows, 1, T, T] bool."""

    first: Tensor
    taps: Tensor
    mask: Tensor
    n_rows: int


def find_borders(batch: Packed, conv_width: int) -> Borders:
    """Tap j (1-based) of token t is valid when token t - j belongs to the same document."""
    document = batch.first.long().cumsum(0)
    taps = []
    for j in range(1, conv_width):
        taps.append(torch.cat([document.new_zeros(j, dtype=torch.bool), document[j:] == document[:-j]]))
    rows = document.view(batch.n_rows, batch.row_length)
    mask = (rows[:, :, None] == rows[:, None, :]).tril()[:, None]
    return Borders(batch.first, torch.stack(taps), mask, batch.n_rows)


class Norm(nn.Module):
    """RMSNorm in float32; zero-centred weights (x * (1 + w)) unless `plain`."""

    def __init__(self, size: int, eps: float, plain: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size) if plain else torch.zeros(size))
        self.eps = eps
        self.offset = 0.0 if plain else 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (self.offset + self.weight.float())


class Projection(nn.Module):
    """A matrix without bias that multiplies in `compute_dtype` whatever its own dtype is."""

    compute_dtype = torch.float32  # set once for the process, before the first forward

    def __init__(self, n_in: int, n_out: int, scale: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) * (scale / math.sqrt(n_in)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.compute_dtype), self.weight.to(self.compute_dtype))


class _UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 for strictly lower triangular A [..., 64, 64], by doubling the size of inverted diagonal blocks.

    With T the inverse of the diagonal blocks of size s and C the part of A in the lower left of each block of size
    2s, the inverse of the blocks of size 2s is T - T C T. Stable, unlike the Neumann series of A, whose powers grow.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        n = a.shape[-1]
        index = torch.arange(n, device=a.device)
        t = torch.eye(n, device=a.device, dtype=a.dtype).expand_as(a)
        size = 1
        while size < n:
            block = index // size
            corner = (block[:, None] == block[None, :] + 1) & (block[:, None] % 2 == 1)
            c = a * corner
            t = t - (c if size == 1 else t @ c @ t)
            size *= 2
        ctx.save_for_backward(t)
        return t

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (t,) = ctx.saved_tensors
        return -(t.mT @ grads[0] @ t.mT).tril(-1)


class _StateScan(torch.autograd.Function):
    """S_0 = 0, S_{i+1} = M_i S_i + B_i over the first axis; returns every S_i *entering* step i.

    m: [n, b, k, k], b: [n, b, k, v], float32. One matrix product a step, forward and backward.
    """

    @staticmethod
    def forward(ctx: Any, m: Tensor, b: Tensor) -> Tensor:
        s = torch.zeros_like(b)
        for i in range(m.shape[0] - 1):
            torch.baddbmm(b[i], m[i], s[i], out=s[i + 1])
        ctx.save_for_backward(m, s)
        return s

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        m, s = ctx.saved_tensors
        out = grads[0].contiguous()
        db = torch.zeros_like(out)  # db[i] is the gradient of S_{i+1}; nothing depends on the state after the last step
        n = m.shape[0]
        mt = m.mT
        for i in range(n - 2, -1, -1):
            if i == n - 2:
                db[i].copy_(out[i + 1])
            else:
                torch.baddbmm(out[i + 1], mt[i + 1], db[i + 1], out=db[i])
        return db @ s.mT, db


@torch.compiler.disable
def scan_states(m: Tensor, b: Tensor, n_rows: int) -> Tensor:
    """m [n_chunks, H, k, k], b [n_chunks, H, k, v] -> states entering each chunk, [n_chunks, H, k, v]."""

    def by_step(x: Tensor) -> Tensor:
        rows = x.view(n_rows, -1, *x.shape[1:]).transpose(0, 1)
        return rows.reshape(rows.shape[0], -1, *x.shape[2:])

    s: Tensor = _StateScan.apply(by_step(m), by_step(b))
    n_steps = s.shape[0]
    return s.view(n_steps, n_rows, *b.shape[1:]).transpose(0, 1).reshape(b.shape)


def before_scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Everything of the chunk form that does not need the state.

    q, k [n, Hk, c, d]; v [n, Hv, c, d]; g, beta [n, Hv, c]; all float32, q and k l2-normalised, q scaled.
    """
    r = v.shape[1] // k.shape[1]
    total = g.cumsum(-1)
    c = g.shape[-1]
    lower = torch.ones(c, c, dtype=torch.bool, device=g.device).tril()
    gap = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -1e30)  # masked before exp: no overflow
    decay = gap.exp()
    kk = (k @ k.mT).repeat_interleave(r, 1)
    scores = (q @ k.mT).repeat_interleave(r, 1) * decay
    t: Tensor = _UnitLowerInverse.apply((beta[..., None] * kk * decay).tril(-1))
    k = k.repeat_interleave(r, 1)
    u = t @ (beta[..., None] * v)
    w = t @ ((beta * total.exp())[..., None] * k)
    last = total[..., -1:]
    kd = ((last - total).exp()[..., None] * k).mT
    eye = torch.eye(k.shape[-1], device=g.device)
    return last.exp()[..., None] * eye - kd @ w, kd @ u, u, w, scores, total.exp()


def after_scan(q: Tensor, s: Tensor, u: Tensor, w: Tensor, scores: Tensor, decay: Tensor) -> Tensor:
    """Outputs of every chunk from its incoming state: [n, Hv, c, d]."""
    q = q.repeat_interleave(s.shape[1] // q.shape[1], 1)
    return decay[..., None] * (q @ s) + scores @ (u - w @ s)


def l2_normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class Convolution(nn.Module):
    """The weight of the causal depthwise convolution, [channels, 1, width]."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, width) * 0.2)
        with torch.no_grad():
            self.weight[:, :, -1] += 0.7


class DeltaNet(nn.Module):
    """The gated DeltaNet mixer."""

    def __init__(self, geo: Geometry, out_scale: float):
        super().__init__()
        self.geo = geo
        h, d = geo.hidden_size, geo.gdn_head_dim
        self.k_size, self.v_size = geo.gdn_n_k_heads * d, geo.gdn_n_v_heads * d
        self.in_proj_qkv = Projection(h, 2 * self.k_size + self.v_size)
        self.in_proj_z = Projection(h, self.v_size)
        self.in_proj_b = Projection(h, geo.gdn_n_v_heads)
        self.in_proj_a = Projection(h, geo.gdn_n_v_heads, 0.1)
        self.conv1d = Convolution(2 * self.k_size + self.v_size, geo.conv_width)
        # decays spread from a few tokens to thousands: rate in 1..8, step log-uniform in 1e-4..1e-1
        step = torch.exp(torch.empty(geo.gdn_n_v_heads).uniform_(math.log(1e-4), math.log(1e-1)))
        self.A_log = nn.Parameter(torch.empty(geo.gdn_n_v_heads).uniform_(1.0, 8.0).log())
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = Norm(d, geo.eps, plain=True)
        self.out_proj = Projection(self.v_size, h, out_scale)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, H] -> log decay g and write strength beta, [N, Hv] float32."""
        a = self.in_proj_a(x).float() + self.dt_bias.float()
        return -self.A_log.float().exp() * F.softplus(a), self.in_proj_b(x).float().sigmoid()

    def heads(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolved channels [..., C] -> q, k [..., Hk, d], v [..., Hv, d]."""
        geo, d = self.geo, self.geo.gdn_head_dim
        q, k, v = u.split([self.k_size, self.k_size, self.v_size], -1)
        q = l2_normalised(q.unflatten(-1, (geo.gdn_n_k_heads, d))) * d**-0.5
        k = l2_normalised(k.unflatten(-1, (geo.gdn_n_k_heads, d)))
        return q, k, v.unflatten(-1, (geo.gdn_n_v_heads, d))

    def chunk_inputs(self, x: Tensor, first: Tensor, taps: Tensor) -> tuple[Tensor, ...]:
        """x [N, H] -> z [N, Vd], q [n, Hk, 64, d], and the results of `before_scan`."""
        p = self.in_proj_qkv(x).float()
        w = self.conv1d.weight.float()
        u = p * w[:, 0, -1]
        for j in range(1, self.geo.conv_width):
            shifted = F.pad(p, (0, 0, j, 0))[: p.shape[0]]
            u = u + torch.where(taps[j - 1][:, None], shifted, 0.0) * w[:, 0, -1 - j]
        g, beta = self.gates(x)
        g = torch.where(first[:, None], RESET, g)
        chunked = [t.unflatten(0, (-1, CHUNK)).transpose(1, 2) for t in (*self.heads(F.silu(u)), g, beta)]
        return self.in_proj_z(x), chunked[0], *before_scan(*chunked)

    def finish(self, core: Tensor, z: Tensor) -> Tensor:
        """core [N, Hv, d] float32, z [N, Vd] -> [N, H]."""
        gated = self.norm(core) * F.silu(z.float()).view_as(core)
        return self.out_proj(gated.flatten(1))

    def forward(self, x: Tensor, borders: Borders) -> Tensor:
        z, q, m, b, u, w, scores, decay = self.chunk_inputs(x, borders.first, borders.taps)
        o = after_scan(q, scan_states(m, b, borders.n_rows), u, w, scores, decay)
        return self.finish(o.transpose(1, 2).flatten(0, 1), z)

    def step(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        """One token of each of B sequences: x [B, H]; `state` holds "conv" [B, 3, C] and "s" [B, Hv, d, d]."""
        p = self.in_proj_qkv(x).float()
        window = torch.cat([state["conv"], p[:, None]], 1)
        state["conv"] = window[:, 1:]
        u = F.silu((window * self.conv1d.weight.float()[:, 0].T).sum(1))
        q, k, v = self.heads(u)
        r = v.shape[1] // k.shape[1]
        q, k = q.repeat_interleave(r, 1), k.repeat_interleave(r, 1)
        g, beta = self.gates(x)
        s = state["s"] * g.exp()[..., None, None]
        e = beta[..., None] * (v - (k[..., None, :] @ s).squeeze(-2))
        s = s + k[..., :, None] * e[..., None, :]
        state["s"] = s
        return self.finish((q[..., None, :] @ s).squeeze(-2), self.in_proj_z(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Partial rotary embedding, half-split pairing, on the first 2 * cos.shape[-1] dims of the last axis."""
    n = cos.shape[-1]
    a, b, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class Attention(nn.Module):
    """Full attention with q/k norm, partial rotary embedding and an output gate."""

    def __init__(self, geo: Geometry, out_scale: float):
        super().__init__()
        self.geo = geo
        h, d = geo.hidden_size, geo.head_dim
        self.q_proj = Projection(h, geo.n_q_heads * 2 * d)
        self.k_proj = Projection(h, geo.n_kv_heads * d)
        self.v_proj = Projection(h, geo.n_kv_heads * d)
        self.o_proj = Projection(geo.n_q_heads * d, h, out_scale)
        self.q_norm = Norm(d, geo.eps)
        self.k_norm = Norm(d, geo.eps)

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [N, H], cos and sin [N, rotary/2] -> q, gate [N, nq, d], k, v [N, nk, d]."""
        d = self.geo.head_dim
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * d)).split(d, -1)
        k = self.k_proj(x).unflatten(-1, (-1, d))
        v = self.v_proj(x).unflatten(-1, (-1, d))
        cos, sin = cos[:, None], sin[:, None]
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        return q.to(v.dtype), gate, k.to(v.dtype), v

    def finish(self, o: Tensor, gate: Tensor) -> Tensor:
        """o, gate [N, nq, d] -> [N, H]."""
        return self.o_proj((o.float() * gate.float().sigmoid()).flatten(1))

    def forward(self, x: Tensor, borders: Borders, cos: Tensor, sin: Tensor) -> Tensor:
        q, gate, k, v = self.heads(x, cos, sin)
        r = self.geo.n_q_heads // self.geo.n_kv_heads
        rows = [t.unflatten(0, (borders.n_rows, -1)).transpose(1, 2) for t in (q, k, v)]
        o = F.scaled_dot_product_attention(
            rows[0], rows[1].repeat_interleave(r, 1), rows[2].repeat_interleave(r, 1), attn_mask=borders.mask
        )
        return self.finish(o.transpose(1, 2).flatten(0, 1), gate)

    def step(self, x: Tensor, state: dict[str, Tensor], position: int, cos: Tensor, sin: Tensor) -> Tensor:
        """One token of each of B sequences at the same position; `state` holds "k" and "v" [B, T, nk, d]."""
        b, r = x.shape[0], self.geo.n_q_heads // self.geo.n_kv_heads
        q, gate, k, v = self.heads(x, cos.expand(b, -1), sin.expand(b, -1))
        state["k"][:, position], state["v"][:, position] = k, v
        keys = state["k"][:, : position + 1].transpose(1, 2).repeat_interleave(r, 1)
        values = state["v"][:, : position + 1].transpose(1, 2).repeat_interleave(r, 1)
        o = F.scaled_dot_product_attention(q[:, :, None], keys, values)
        return self.finish(o.squeeze(2), gate)


class Mlp(nn.Module):
    def __init__(self, geo: Geometry, out_scale: float):
        super().__init__()
        self.gate_proj = Projection(geo.hidden_size, geo.intermediate_size)
        self.up_proj = Projection(geo.hidden_size, geo.intermediate_size)
        self.down_proj = Projection(geo.intermediate_size, geo.hidden_size, out_scale)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x).float()) * self.up_proj(x).float())
        return down


class Layer(nn.Module):
    def __init__(self, geo: Geometry, kind: str):
        super().__init__()
        out_scale = 1 / math.sqrt(2 * geo.n_layers)  # keeps the residual stream near unit size at any depth
        self.input_layernorm = Norm(geo.hidden_size, geo.eps)
        self.post_attention_layernorm = Norm(geo.hidden_size, geo.eps)
        if kind == "linear_attention":
            self.linear_attn = DeltaNet(geo, out_scale)
        else:
            self.self_attn = Attention(geo, out_scale)
        self.mlp = Mlp(geo, out_scale)
        self.is_linear = kind == "linear_attention"

    def forward(self, x: Tensor, borders: Borders, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        mixed = self.linear_attn(normed, borders) if self.is_linear else self.self_attn(normed, borders, cos, sin)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x))

    def step(self, x: Tensor, state: dict[str, Tensor], position: int, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        if self.is_linear:
            x = x + self.linear_attn.step(normed, state)
        else:
            x = x + self.self_attn.step(normed, state, position, cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, geo: Geometry):
        super().__init__()
        self.embed_tokens = nn.Embedding(geo.vocab_size, geo.hidden_size)
        self.layers = nn.ModuleList(Layer(geo, kind) for kind in geo.layer_types)
        self.norm = Norm(geo.hidden_size, geo.eps)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)


class Hybrid(nn.Module):
    """The model; its state dict has the published names (`model.layers.N…`), embeddings tied."""

    cos: Tensor
    sin: Tensor

    def __init__(self, geo: Geometry):
        super().__init__()
        self.geo = geo
        self.model = Decoder(geo)
        n = geo.rotary_dim // 2
        angle = torch.outer(
            torch.arange(geo.max_position_embeddings, dtype=torch.float64),
            geo.rope_theta ** (-torch.arange(n, dtype=torch.float64) / n),
        )
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def logits(self, x: Tensor) -> Tensor:
        dtype = Projection.compute_dtype
        return F.linear(self.model.norm(x).to(dtype), self.model.embed_tokens.weight.to(dtype)).float()

    def hidden(self, batch: Packed) -> Tensor:
        """-> [N, H] float32 before the final norm."""
        borders = find_borders(batch, self.geo.conv_width)
        # positions count from the row's start: rotary embedding is relative, so a document does not notice
        cos = self.cos[: batch.row_length].repeat(batch.n_rows, 1)
        sin = self.sin[: batch.row_length].repeat(batch.n_rows, 1)
        x = self.model.embed_tokens(batch.tokens).float()
        for layer in self.model.layers:
            x = layer(x, borders, cos, sin)
        return x

    def forward(self, batch: Packed) -> Tensor:
        """-> logits [N, V] float32. Row length must be a multiple of 64."""
        return self.logits(self.hidden(batch))

    def loss(self, batch: Packed, targets: Tensor) -> Tensor:
        """Cross entropy of each token, [N] float32; targets [N] int64, -100 gives 0."""
        return self.token_loss(self.hidden(batch), targets)

    def token_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x), targets, ignore_index=-100, reduction="none")

    def new_states(self, n_sequences: int, length: int) -> list[dict[str, Tensor]]:
        geo, device = self.geo, self.cos.device
        states = []
        for kind in geo.layer_types:
            if kind == "linear_attention":
                d = geo.gdn_head_dim
                channels = (2 * geo.gdn_n_k_heads + geo.gdn_n_v_heads) * d
                conv = torch.zeros(n_sequences, geo.conv_width - 1, channels, device=device)
                states.append({"conv": conv, "s": torch.zeros(n_sequences, geo.gdn_n_v_heads, d, d, device=device)})
            else:
                shape = (n_sequences, length, geo.n_kv_heads, geo.head_dim)
                dtype = Projection.compute_dtype
                states.append({x: torch.zeros(shape, device=device, dtype=dtype) for x in "kv"})
        return states

    def step(self, tokens: Tensor, states: list[dict[str, Tensor]], position: int) -> Tensor:
        """tokens [B] at `position` -> logits [B, V]; `states` are advanced in place."""
        x = self.model.embed_tokens(tokens).float()
        cos, sin = self.cos[position : position + 1], self.sin[position : position + 1]
        for layer, state in zip(self.model.layers, states, strict=True):
            x = layer.step(x, state, position, cos, sin)
        return self.logits(x)

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], max_new: list[int], stop_ids: set[int], temperature: float, seed: int = 0
    ) -> list[list[int]]:
        """Sampled (greedy at temperature 0) continuations, stop token left out. All sequences go in lockstep.

        Prompts are fed one token at a time, so sequences of any lengths mix without padding.
        """
        device = self.cos.device
        generator = torch.Generator(device=device).manual_seed(seed)
        total = min(max(len(p) + n for p, n in zip(prompts, max_new, strict=True)), self.cos.shape[0])
        longest = max(len(p) for p in prompts)
        padded = torch.tensor([p + [0] * (longest - len(p)) for p in prompts], device=device)
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        limits = lengths + torch.tensor(max_new, device=device)
        stops = torch.tensor(sorted(stop_ids), device=device, dtype=torch.long)
        states = self.new_states(len(prompts), total)
        history = torch.zeros(len(prompts), total, dtype=torch.long, device=device)
        ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        tokens = padded[:, 0]
        for position in range(total):
            history[:, position] = tokens
            if position % 32 == 31 and bool((ended | (position >= limits)).all()):
                break
            logits = self.step(tokens, states, position)
            if temperature > 0:
                tokens = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
            else:
                tokens = logits.argmax(-1)
            ended |= torch.isin(tokens, stops) & (position + 1 >= lengths)
            if position + 1 < longest:
                tokens = torch.where(position + 1 < lengths, padded[:, position + 1], tokens)
        return [
            until_stop(row[len(p) : len(p) + n], stop_ids)
            for row, p, n in zip(history.tolist(), prompts, max_new, strict=True)
        ]


def until_stop(ids: list[int], stop_ids: set[int]) -> list[int]:
    for i, token in enumerate(ids):
        if token in stop_ids:
            return ids[:i]
    return ids


def checkpoint_tensors(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict as the published layout stores it: bfloat16, contiguous, on the CPU."""
    return {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in weights.items()}
