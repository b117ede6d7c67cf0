"""The hybrid decoder on a GPU: the same forward as models/qwen/cpu.py, recorded twice, once for decodes and
once for prefills.

    h  = x + Mixer(rms_norm(x));  x' = h + FFN(rms_norm(h))        (Qwen3-Next, 3.5, 3.6, 3.8)

A decode is bound by the bytes of the weights and by the number of kernels: its matrices are multiplied with
tokens on the narrow side, cut along K by a rule that knows only the weight's shape, and the partial sums are
added, in order, by whoever reads them next. A prefill is bound by arithmetic: large products, the chunked
form of DeltaNet, tiled attention. The two differ in bits; a token of a prompt always goes through the one, a
generated one through the other (docs/design/purity.md).

Everything here starts kernels on the current stream and neither waits nor allocates, so that it can be
captured as a graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deltic.models.loading import Mlp
from deltic.models.qwen.gpu_linears import Linears, front
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import DraftHead, GdnLayer, Moe, Weights
from deltic.models.rotary import rotary_tables
from deltic.ops.geometry import Allocate
from deltic.ops.gpu.all_reduce import Columns, Rank, all_gather, all_reduce, all_reduce_norm
from deltic.ops.gpu.attention_decode import AttentionScratch, attention_decode, attention_scratch, keys_decode
from deltic.ops.gpu.attention_prefill import attention_prefill, keys_prefill
from deltic.ops.gpu.blocks import BLOCK, Blocks, Drafts, PlaceState, PrefillInputs, Rows, Windows
from deltic.ops.gpu.draft import GuessRows, begin_guess, draft_pair, follow, go_on
from deltic.ops.gpu.fp8 import Fp8Rows, fp8_rows
from deltic.ops.gpu.gdn_decode import gdn_decode
from deltic.ops.gpu.gdn_prefill import GdnScratch, gdn_prefill, gdn_scratch
from deltic.ops.gpu.launch import Levers, copy_rows, take_rows
from deltic.ops.gpu.linear import WideScratch, k_splits, wide_scratch
from deltic.ops.gpu.moe import MoeScratch, moe_decode, moe_scratch
from deltic.ops.gpu.moe_prefill import MoePrefillScratch, moe_prefill, moe_prefill_scratch
from deltic.ops.gpu.norm import add_norm, begin_decode, embed
from deltic.ops.gpu.weight import to_device

RING = 4
"""Convolution inputs that a state slot holds on a GPU: a ring by position. It has one row more than the
window needs, so that no row is read while it is written.
"""


@dataclass(frozen=True)
class GpuMemory:
    """The two memories. pages: bfloat16 [n_pages + 1, n_kv_layers, 2, nk, 64, d], the last one for padding;
    states: float32 [n_slots, n_gdn, Hv, dv, dk]; columns: bfloat16 [n_slots, n_gdn, RING, C], row p % RING
    for position p.
    """

    pages: Tensor
    states: Tensor
    columns: Tensor


@dataclass(frozen=True)
class DecodeBuffers:
    """Activations of a decode of up to N rows; a recording for fewer rows uses the front of each."""

    rows: Rows
    residual: Tensor  # float32, flat
    normed: Tensor  # bfloat16, flat
    proj: Tensor  # float32, flat: partial sums of a projection
    mixed: Tensor  # bfloat16, flat
    inner: Tensor  # bfloat16, flat
    partial: Tensor  # float32, flat: what is to be added to the residual
    attention: AttentionScratch
    moe: MoeScratch | None
    fp8: Fp8Rows | None  # what is multiplied with e4m3
    logits: Tensor  # float32, flat, of more rows: those behind keep what a later draw needs
    windows: Windows | None  # of all layers, [places, n_gdn, W, ...]: for drafts


@dataclass(frozen=True)
class PrefillBuffers:
    """Activations of a prefill of up to B blocks, flat: a recording for fewer uses the front of each."""

    residual: Tensor  # float32
    normed: Tensor  # bfloat16
    proj: Tensor  # bfloat16: the widest projection
    mixed: Tensor  # bfloat16
    inner: Tensor  # bfloat16
    y: Tensor  # bfloat16: what is to be added to the residual
    query: Tensor  # bfloat16
    gdn: GdnScratch
    moe: MoePrefillScratch | None
    wide: WideScratch
    final: Tensor  # bfloat16 [G, H]
    logits: Tensor  # float32 [G, V]
    hidden: Tensor | None  # bfloat16: as final, of every row, for the draft head
    follows: Tensor | None  # int32: the ids of the tokens behind the rows, for the draft head


@dataclass(frozen=True)
class HeadBuffers:
    """What the draft head has in a decode of up to N rows, beside the activations."""

    rows: GuessRows
    pair: Tensor  # bfloat16, flat
    hidden: Tensor  # bfloat16, flat: the head's own


def decode_buffers(
    shape: ModelShape,
    codes: Collection[str],
    levers: Levers,
    n_rows: int,
    max_len: int,
    allocate: Allocate,
    *,
    n_kept: int = 0,
    drafts: Drafts | None = None,
    windows: Windows | None = None,
    has_pictures: bool = False,
) -> DecodeBuffers:
    """Every buffer of a decode of up to n_rows rows and contexts of up to max_len tokens, of weights in these
    codes. n_kept: further rows of logits. drafts: of the rows, and windows, where there are any.
    has_pictures: prompts may have some.
    """
    f32, bf16 = torch.float32, torch.bfloat16
    h, heads = shape.hidden_size, shape.heads
    rows = shape.gdn_in_proj_rows, heads.row
    value, q_size = shape.gdn_value_size, heads.n_q * heads.dim
    inner = max(shape.intermediate_size, shape.shared_intermediate_size)
    widths = (value, q_size, inner, *([2 * h] if shape.has_draft_head else []))
    n_partials = [k_splits(h, k, levers) for k in widths if k]
    moe = None
    if shape.is_moe:
        moe = moe_scratch(
            n_rows,
            shape.n_experts,
            shape.n_experts_per_tok,
            shape.moe_intermediate_size,
            shape.shared_intermediate_size,
            allocate,
        )
        n_partials.append(shape.n_experts_per_tok + 1)
    return DecodeBuffers(
        rows=Rows(
            *(allocate(f"row {name}", (n_rows,), torch.int32) for name in ("place", "slot", "position")),
            angle_shift=allocate("row angle shift", (n_rows,), torch.int32) if has_pictures else None,
            drafts=drafts,
        ),
        residual=allocate("residual", (n_rows * h,), f32),
        normed=allocate("normed", (n_rows * h,), bf16),
        proj=allocate("projections", (n_rows * max(2 * inner, *(r * k_splits(r, h, levers) for r in rows)),), f32),
        mixed=allocate("mixed", (n_rows * max(value, q_size),), bf16),
        inner=allocate("inner", (n_rows * max(1, inner),), bf16),
        partial=allocate("partial sums", (max(n_partials) * n_rows * h,), f32),
        attention=attention_scratch(heads, n_rows, max_len, allocate),
        moe=moe,
        fp8=fp8_rows("e4m3 rows", n_rows, max(h, *widths), allocate) if "e4m3" in codes else None,
        logits=allocate("logits", ((n_rows + n_kept) * shape.vocab_size,), f32),
        windows=windows,
    )


def head_buffers(shape: ModelShape, rows: GuessRows, allocate: Allocate) -> HeadBuffers:
    """Of the draft head, for as many rows as these."""
    n, h = len(rows.known), shape.hidden_size
    return HeadBuffers(
        rows=rows,
        pair=allocate("head rows", (n * 2 * h,), torch.bfloat16),
        hidden=allocate("head hidden states", (n * h,), torch.bfloat16),
    )


def prefill_buffers(
    shape: ModelShape, codes: Collection[str], n_blocks: int, n_segments: int, allocate: Allocate
) -> PrefillBuffers:
    """Every buffer of a prefill of up to n_blocks blocks in n_segments segments.

    codes: those of the weights.
    """
    f32, bf16 = torch.float32, torch.bfloat16
    t, h, heads = n_blocks * BLOCK, shape.hidden_size, shape.heads
    value, q_size = shape.gdn_value_size, heads.n_q * heads.dim
    inner = max(shape.intermediate_size, shape.shared_intermediate_size)
    moe = None
    if shape.is_moe:
        moe = moe_prefill_scratch(
            t,
            h,
            shape.n_experts,
            shape.n_experts_per_tok,
            shape.moe_intermediate_size,
            shape.shared_intermediate_size,
            allocate,
            has_e4m3="e4m3" in codes,
        )
    many = [(shape.gdn_in_proj_rows, h), (heads.row, h), (h, value), (h, q_size)]
    many += [(2 * shape.intermediate_size, h), (h, shape.intermediate_size)]
    widest = [shape.gdn_in_proj_rows, heads.row, 2 * shape.intermediate_size]
    hidden = follows = None
    if shape.has_draft_head:  # its rows, twice as wide, lie where a projection does
        many.append((h, 2 * h))
        widest.append(2 * h)
        hidden = allocate("prefill hidden states", (t * h,), bf16)
        follows = allocate("prefill ids behind", (t,), torch.int32)
    return PrefillBuffers(
        residual=allocate("prefill residual", (t * h,), f32),
        normed=allocate("prefill normed", (t * h,), bf16),
        proj=allocate("prefill projections", (t * max(widest),), bf16),
        mixed=allocate("prefill mixed", (t * max(value, q_size),), bf16),
        inner=allocate("prefill inner", (t * max(1, inner),), bf16),
        y=allocate("prefill y", (t * h,), bf16),
        query=allocate("prefill queries", (t * q_size,), bf16),
        gdn=gdn_scratch(shape.gdn_heads, n_blocks, allocate),
        moe=moe,
        wide=wide_scratch(t, max(m * k for m, k in many), max(k for _, k in many), codes, allocate),
        final=allocate("final", (n_segments, h), bf16),
        logits=allocate("prefill logits", (n_segments, shape.vocab_size), f32),
        hidden=hidden,
        follows=follows,
    )


@dataclass(frozen=True)
class Exchange:
    """What one of several GPUs has for what it shares with the others."""

    sums: Mapping[str, Rank]  # of a decode and of a prefill
    logits: Mapping[str, Columns]  # the same, and of a guess
    part: Tensor  # float32, flat: this rank's columns of logits
    total: Tensor | None  # float32, flat: sums, where a kernel of its own makes them

    @property
    def parts(self) -> list[Rank | Columns]:
        return [*self.sums.values(), *self.logits.values()]


class QwenGpu:
    """The weights in rows, and the two forwards over given buffers; behind each, the draft head's."""

    def __init__(
        self, shape: ModelShape, weights: Weights, max_len: int, levers: Levers, exchange: Exchange | None = None
    ) -> None:
        """exchange: with other GPUs, of which each has a part of every layer."""
        self.shape, self.weights, self.levers = shape, weights, levers
        self.linears = Linears([*weights.named_parts(), ("lm_head", weights.lm_head)], levers)
        self.heads, self.gdn_heads = shape.heads, shape.gdn_heads
        device = weights.norm.device
        self.gdn_weights = weights.gdn()
        self.exchange = exchange
        angles = rotary_tables(shape.inv_freq(), max_len, shape.rope_attention_factor)
        self.cos, self.sin = (to_device(table, device) for table in angles)

    def _add_norm(self, residual: Tensor, partials: Tensor | None, w: Tensor, normed: Tensor, kind: str) -> None:
        """residual += partials, of all GPUs; normed = its norm. kind: decode or prefill."""
        eps, levers = self.shape.rms_norm_eps, self.levers
        if self.exchange is None or partials is None:
            add_norm(residual, partials, w, eps, normed, levers=levers)
            return
        ranks = self.exchange.sums[kind]
        if self.exchange.total is not None:
            total = front(self.exchange.total, 1, *residual.shape)
            all_reduce(partials, total[0], ranks=ranks, levers=levers)
            add_norm(residual, total, w, eps, normed, levers=levers)
            return
        out = all_reduce_norm(residual, partials, w, eps, ranks=ranks, levers=levers)
        if out.data_ptr() != normed.data_ptr():  # it is mostly the buffer that the others reach
            copy_rows(out, normed)

    def _logits(self, normed: Tensor, logits: Tensor, rows: Fp8Rows | None, kind: str) -> None:
        """float32 [1, N, M] of normed rows [N, H], of a decode, a prefill or a guess: those of the first M
        ids.
        """
        if self.exchange is None:
            self.linears.project("lm_head", normed, logits, rows)
            return
        columns = self.exchange.logits[kind]
        n_own = min(self.linears.matrices["lm_head"].n, columns.n_columns - columns.first)
        part = front(self.exchange.part, 1, len(normed), n_own)
        if n_own:
            self.linears.project("lm_head", normed, part, rows)
        all_gather(part[0], columns, levers=self.levers)

    # A decode.

    def decode(
        self, rows_place: Tensor, places: PlaceState, b: DecodeBuffers, memory: GpuMemory, max_len: int
    ) -> Tensor:
        """One token each of n rows, none with more than max_len keys; gives the logits, float32 [n, V].

        rows_place: int32 [n], the place of each row, or -1. b.rows.drafts says which are drafted tokens.
        """
        n = len(rows_place)
        shape, w, levers, linears = self.shape, self.weights, self.levers, self.linears
        eps, h = shape.rms_norm_eps, shape.hidden_size
        rows, residual = b.rows.front(n), front(b.residual, n, h)
        begin_decode(rows_place, places, w.embed, rows=rows, residual=residual, levers=levers)
        partial: Tensor | None = None
        i_gdn = i_attn = 0
        normed = front(b.normed, n, h)
        for i, layer in enumerate(w.layers):
            self._add_norm(residual, partial, layer.input_norm, normed, "decode")
            if isinstance(layer, GdnLayer):
                proj = linears.partial(f"layers.{i}.in_proj", normed, b.proj, b.fp8)
                mixed = front(b.mixed, n, shape.gdn_value_size)
                gdn_decode(
                    proj,
                    self.gdn_heads,
                    self.gdn_weights[i],
                    eps,
                    rows=rows,
                    columns=memory.columns[:, i_gdn],
                    states=memory.states[:, i_gdn],
                    windows=None if b.windows is None else b.windows.of_layer(i_gdn),
                    out=mixed,
                    levers=levers,
                )
                partial = linears.partial(f"layers.{i}.out_proj", mixed, b.partial, b.fp8)
                i_gdn += 1
            else:
                proj = linears.partial(f"layers.{i}.qkv", normed, b.proj, b.fp8)
                mixed = front(b.mixed, n, self.heads.n_q * self.heads.dim)
                attention_decode(
                    proj,
                    self.heads,
                    layer.q_norm,
                    layer.k_norm,
                    eps,
                    rows=rows,
                    page_table=places.page_table,
                    cos=self.cos,
                    sin=self.sin,
                    pages=memory.pages[:, i_attn],
                    scratch=b.attention,
                    max_len=max_len,
                    out=mixed,
                    levers=levers,
                )
                partial = linears.partial(f"layers.{i}.o_proj", mixed, b.partial, b.fp8)
                i_attn += 1
            self._add_norm(residual, partial, layer.post_norm, normed, "decode")
            partial = self._decode_feed_forward(f"layers.{i}.mlp.", layer.mlp, normed, b, rows.slot)
        self._add_norm(residual, partial, w.norm, normed, "decode")
        logits = front(b.logits, 1, n, shape.vocab_size)
        self._logits(normed, logits, b.fp8, "decode")
        return logits[0]

    def _decode_feed_forward(
        self, name: str, mlp: Mlp | Moe, normed: Tensor, b: DecodeBuffers, row_slot: Tensor
    ) -> Tensor:
        """Partial sums of a feed-forward of the normed rows, float32 [S, n, H], to be added up by the next
        norm. name: how the names of its matrices begin.
        """
        shape, n = self.shape, len(normed)
        if not isinstance(mlp, Moe):
            inner = front(b.inner, n, shape.intermediate_size)
            gate_up = front(b.proj, 1, n, 2 * shape.intermediate_size)
            self.linears.swiglu(f"{name}gate_up", normed, inner, gate_up, b.fp8)
            return self.linears.partial(f"{name}down", inner, b.partial, b.fp8)
        assert b.moe is not None
        partial = front(b.partial, shape.n_experts_per_tok + 1, n, shape.hidden_size)
        moe_decode(
            normed,
            mlp,
            shape.n_experts_per_tok,
            shape.norm_topk_prob,
            row_slot=row_slot,
            scratch=b.moe,
            out=partial,
            levers=self.levers,
            codes=b.fp8,
        )
        return partial

    # The draft head behind a decode.

    @property
    def _head(self) -> DraftHead:
        assert self.weights.draft_head is not None
        return self.weights.draft_head

    def _draft_projection(self, n: int, drawn: Tensor | None, b: DecodeBuffers, g: HeadBuffers) -> Tensor:
        """The head's rows up to q, gates, k and v, float32 [S, n, row]. drawn: of the step, int32 [N]; None:
        the rows are those behind the latest guesses.
        """
        head, levers, h, eps = self._head, self.levers, self.shape.hidden_size, self.shape.rms_norm_eps
        rows, guesses = b.rows.front(n), g.rows.front(n)
        residual, normed, hidden = front(b.residual, n, h), front(b.normed, n, h), front(g.hidden, n, h)
        if drawn is not None:
            begin_guess(rows, drawn, guesses, levers=levers)
            hidden = normed  # as the step's last norm has left it
        else:
            go_on(rows, guesses, levers=levers)
        embed(guesses.token, self.weights.embed, residual)
        pair = front(g.pair, n, 2 * h)
        draft_pair(residual, hidden, head.embedding_norm, head.hidden_norm, eps, pair, levers=levers)
        partial = self.linears.partial("draft_head.fc", pair, b.partial, b.fp8)
        add_norm(residual, partial, head.layer.input_norm, eps, normed, levers=levers)
        return self.linears.partial("draft_head.layer.qkv", normed, b.proj, b.fp8)

    def _draft_keys(
        self, proj: Tensor, places: PlaceState, b: DecodeBuffers, g: HeadBuffers, memory: GpuMemory
    ) -> None:
        n = proj.shape[1]
        rows = b.rows.front(n)
        keys_decode(
            proj,
            self.heads,
            self._head.layer.k_norm,
            self.shape.rms_norm_eps,
            rows=Rows(rows.place, g.rows.kept[:n], rows.position, angle_shift=rows.angle_shift),
            page_table=places.page_table,
            cos=self.cos,
            sin=self.sin,
            pages=memory.pages[:, -1],
            levers=self.levers,
        )

    def draft_keys(
        self, n: int, drawn: Tensor, places: PlaceState, b: DecodeBuffers, g: HeadBuffers, memory: GpuMemory
    ) -> None:
        """The head's keys and values of a step's n rows, as far as they count. drawn: int32 [N], by it."""
        self._draft_keys(self._draft_projection(n, drawn, b, g), places, b, g, memory)

    def draft_guess(
        self,
        n: int,
        drawn: Tensor | None,
        places: PlaceState,
        b: DecodeBuffers,
        g: HeadBuffers,
        memory: GpuMemory,
        max_len: int,
    ) -> Tensor:
        """Logits of one guess for each sequence of a step of n rows, float32 [n, n_drafted], in the row from
        which its last token was drawn: behind that token, or, drawn=None, behind the guess before. Rows of
        the step get their keys and values, as by `draft_keys`.

        The logits stand where those of the step stood. A row behind guesses has its keys and values where the
        next step writes those of the token that is right there, before anything reads them.
        """
        shape, head, levers, linears = self.shape, self._head, self.levers, self.linears
        eps, h, is_first = shape.rms_norm_eps, shape.hidden_size, drawn is not None
        step, guesses = b.rows.front(n), g.rows.front(n)
        proj = self._draft_projection(n, drawn, b, g)
        mixed = front(b.mixed, n, self.heads.n_q * self.heads.dim)
        attention_decode(
            proj,
            self.heads,
            head.layer.q_norm,
            head.layer.k_norm,
            eps,
            rows=Rows(
                step.place,
                guesses.last,
                guesses.position,
                angle_shift=step.angle_shift,
                drafts=step.drafts if is_first else None,
            ),
            page_table=places.page_table,
            cos=self.cos,
            sin=self.sin,
            pages=memory.pages[:, -1],
            scratch=b.attention,
            max_len=max_len,
            out=mixed,
            levers=levers,
        )
        if is_first:  # once more, by what writes them where nothing is guessed: the bits are the same then
            self._draft_keys(proj, places, b, g, memory)
        residual, normed, own = front(b.residual, n, h), front(b.normed, n, h), front(g.hidden, n, h)
        partial = linears.partial("draft_head.layer.o_proj", mixed, b.partial, b.fp8)
        self._add_norm(residual, partial, head.layer.post_norm, normed, "decode")
        partial = self._decode_feed_forward("draft_head.layer.mlp.", head.layer.mlp, normed, b, guesses.last)
        self._add_norm(residual, partial, head.norm, own, "decode")
        logits = front(b.logits, 1, n, shape.n_drafted)
        self._logits(own, logits, b.fp8, "guess")
        return logits[0]

    # A prefill.

    def prefill(
        self,
        n_blocks: int,
        inputs: PrefillInputs,
        page_table: Tensor,
        b: PrefillBuffers,
        memory: GpuMemory,
        pictures: Tensor | None = None,
    ) -> Tensor:
        """The tokens of n_blocks blocks; gives the logits of the rows asked for, float32 [G, V]. pictures:
        bfloat16 [N, H], where ids may name its rows.
        """
        shape, w, levers, linears = self.shape, self.weights, self.levers, self.linears
        t, h, eps = n_blocks * BLOCK, shape.hidden_size, shape.rms_norm_eps
        residual, normed = front(b.residual, t, h), front(b.normed, t, h)
        y, added = front(b.y, t, h), None
        embed(inputs.token_ids, w.embed, residual, pictures)
        i_gdn = i_attn = 0
        for i, layer in enumerate(w.layers):
            self._add_norm(residual, added, layer.input_norm, normed, "prefill")
            added = y[None]
            if isinstance(layer, GdnLayer):
                proj = front(b.proj, t, shape.gdn_in_proj_rows)
                mixed = front(b.mixed, t, shape.gdn_value_size)
                linears.project_many(f"layers.{i}.in_proj", normed, proj, b.wide)
                gdn_prefill(
                    proj,
                    self.gdn_heads,
                    self.gdn_weights[i],
                    eps,
                    blocks=inputs.blocks,
                    columns=memory.columns[:, i_gdn],
                    states=memory.states[:, i_gdn],
                    scratch=b.gdn,
                    out=mixed,
                    levers=levers,
                )
                linears.project_many(f"layers.{i}.out_proj", mixed, y, b.wide)
                i_gdn += 1
            else:
                proj = front(b.proj, t, self.heads.row)
                mixed = front(b.mixed, t, self.heads.n_q * self.heads.dim)
                linears.project_many(f"layers.{i}.qkv", normed, proj, b.wide)
                attention_prefill(
                    proj,
                    self.heads,
                    layer.q_norm,
                    layer.k_norm,
                    eps,
                    blocks=inputs.blocks,
                    page_table=page_table,
                    cos=self.cos,
                    sin=self.sin,
                    pages=memory.pages[:, i_attn],
                    query=front(b.query, t, self.heads.n_q, self.heads.dim),
                    out=mixed,
                    levers=levers,
                    angles=inputs.angles,
                    sections=shape.mrope_section or (),
                )
                linears.project_many(f"layers.{i}.o_proj", mixed, y, b.wide)
                i_attn += 1
            self._add_norm(residual, added, layer.post_norm, normed, "prefill")
            self._feed_forward(i, layer.mlp, normed, inputs.blocks, b, y)
        if b.hidden is not None or self.exchange is not None:
            self._add_norm(residual, added, w.norm, normed if b.hidden is None else front(b.hidden, t, h), "prefill")
        return self.logits_of(inputs.logit_row, n_blocks, b)

    def _feed_forward(
        self, i: int, mlp: Mlp | Moe, normed: Tensor, blocks: Blocks, b: PrefillBuffers, y: Tensor
    ) -> None:
        """y = FFN(x): layer i's experts, or its one MLP, on the normed rows."""
        shape, levers, t = self.shape, self.levers, normed.shape[0]
        if isinstance(mlp, Mlp):
            up, inner = front(b.proj, t, 2 * mlp.down.k), front(b.inner, t, mlp.down.k)
            self.linears.project_many(f"layers.{i}.mlp.gate_up", normed, up, b.wide)
            self.linears.down_many(f"layers.{i}.mlp.down", up, inner, y, b.wide)
        else:
            assert b.moe is not None
            moe_prefill(
                normed,
                mlp,
                shape.n_experts_per_tok,
                shape.norm_topk_prob,
                blocks=blocks,
                scratch=b.moe,
                out=y,
                levers=levers,
            )

    def draft_keys_many(
        self, n_blocks: int, inputs: PrefillInputs, drawn: Tensor, b: PrefillBuffers, memory: GpuMemory
    ) -> None:
        """The draft head's keys and values of the tokens of a prefill, behind its draws (int32 [D])."""
        assert inputs.next_ids is not None and b.hidden is not None and b.follows is not None
        head, levers, linears = self._head, self.levers, self.linears
        t, h, eps = n_blocks * BLOCK, self.shape.hidden_size, self.shape.rms_norm_eps
        residual, normed, y = front(b.residual, t, h), front(b.normed, t, h), front(b.y, t, h)
        ids, pair, proj = b.follows[:t], front(b.proj, t, 2 * h), front(b.proj, t, self.heads.row)
        follow(inputs.next_ids, drawn, ids, levers=levers)
        embed(ids, self.weights.embed, residual)
        hidden = front(b.hidden, t, h)
        draft_pair(residual, hidden, head.embedding_norm, head.hidden_norm, eps, pair, levers=levers)
        linears.project_many("draft_head.fc", pair, y, b.wide)
        add_norm(residual, y[None], head.layer.input_norm, eps, normed, levers=levers)
        linears.project_many("draft_head.layer.qkv", normed, proj, b.wide)
        keys_prefill(
            proj,
            self.heads,
            head.layer.k_norm,
            eps,
            blocks=inputs.blocks,
            cos=self.cos,
            sin=self.sin,
            pages=memory.pages[:, -1],
            levers=levers,
            angles=inputs.angles,
            sections=self.shape.mrope_section or (),
        )

    def logits_of(self, rows: Tensor, n_blocks: int, b: PrefillBuffers) -> Tensor:
        """Logits of rows of the last prefill of n_blocks blocks, float32 [len(rows), V]; rows: int32, at most
        G.
        """
        t, h, n = n_blocks * BLOCK, self.shape.hidden_size, rows.shape[0]
        final, logits = b.final[:n], front(b.logits.view(-1), 1, n, self.shape.vocab_size)
        if b.hidden is not None:  # the draft head has used the others since then
            take_rows(front(b.hidden, t, h), rows, final)
        elif self.exchange is not None:  # whose residual is not whole
            take_rows(front(b.normed, t, h), rows, final)
        else:
            residual, y = front(b.residual, t, h), front(b.y, 1, t, h)
            add_norm(residual, y, self.weights.norm, self.shape.rms_norm_eps, final, rows=rows, levers=self.levers)
        self._logits(final, logits, b.wide.rows, "prefill")
        return logits[0]
