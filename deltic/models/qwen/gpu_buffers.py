"""Memory of a hybrid model on a GPU beside its weights: two memories, buffers of decodes and of prefills."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from deltic.models.qwen.gpu_streams import ConnectionBuffers, connection_buffers
from deltic.models.qwen.shape import ModelShape
from deltic.ops.geometry import PAGE_SIZE, Allocate
from deltic.ops.gpu.attention_decode import AttentionScratch, attention_scratch
from deltic.ops.gpu.blocks import BLOCK, AdapterRows, Drafts, Rows, Windows
from deltic.ops.gpu.draft import GuessRows
from deltic.ops.gpu.fp8 import Fp8Rows, fp8_rows
from deltic.ops.gpu.gdn_prefill import GdnScratch, gdn_scratch
from deltic.ops.gpu.index import IndexScratch, index_scratch
from deltic.ops.gpu.linear import WideScratch, k_splits, wide_scratch
from deltic.ops.gpu.moe_decode import MoeScratch, moe_scratch
from deltic.ops.gpu.moe_prefill import MoePrefillScratch, moe_prefill_scratch

RING = 4
"""Convolution inputs that a state slot holds on a GPU: a ring by position. It has one row more than the
window needs, so that no row is read while it is written.
"""


@dataclass(frozen=True)
class GpuMemory:
    """The two memories, of one part of a model that is cut.

    pages: [n_pages + 1, *page_layout], the last one for padding;
    states: float32 or bfloat16 [n_slots, n_gdn, Hv, dv, dk]; columns: bfloat16 [n_slots, n_gdn, RING, C], row
    p % RING for position p. index: bfloat16 [n_pages + 1, n_kv_layers, page_rows, dim], where there is one;
    ngram_columns: bfloat16 [n_slots, ring, S * H], where there is an n-gram embedding.
    """

    pages: Tensor
    states: Tensor
    columns: Tensor
    index: Tensor | None = None
    ngram_columns: Tensor | None = None


def page_layout(shape: ModelShape) -> tuple[tuple[int, ...], torch.dtype]:
    """A page of all layers: bfloat16 [n_kv_layers, 2, nk, 64, d], or uint8 [n_kv_layers, bytes]."""
    n, format = shape.n_kv_layers, shape.kv_format
    if format.is_plain:
        return (n, 2, shape.n_kv_heads, PAGE_SIZE, shape.head_dim), torch.bfloat16
    return (n, format.layer_bytes(shape.n_kv_heads, shape.head_dim)), torch.uint8


@dataclass(frozen=True)
class DecodeBuffers:
    """Activations of a decode of up to N rows. A recording for fewer rows uses the front of each."""

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
    streams: ConnectionBuffers | None
    index: IndexScratch | None
    features: Tensor | None  # bfloat16, flat: the residual stream behind shape.feature_layers, side by side
    windows: Windows | None = None  # for drafts, [batch_slots, n_shards * n_gdn, W, ...]
    adapters: AdapterRows | None = None  # which rows have adapters; None: no row has any


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
    hidden: Tensor | None  # bfloat16: as final, of every row, for vectors, or what drafts behind one stream
    follows: Tensor | None  # int32: the ids of the tokens behind the rows, for the draft head
    streams: ConnectionBuffers | None
    index: IndexScratch | None
    features: Tensor | None  # bfloat16: as of a decode


@dataclass(frozen=True)
class HeadBuffers:
    """Buffers of the draft head in a decode of up to N rows, beside the activations."""

    rows: GuessRows
    pair: Tensor  # bfloat16, flat
    hidden: Tensor  # bfloat16, flat: the head's own


def decode_rows(n: int, drafts: Drafts | None, has_pictures: bool, allocate: Allocate) -> Rows:
    """Allocates what says which n rows a decode has. has_pictures: prompts may have some."""
    return Rows(
        *(allocate(f"row {name}", (n,), torch.int32) for name in ("batch_slot", "state_slot", "position")),
        angle_shift=allocate("row angle shift", (n,), torch.int32) if has_pictures else None,
        drafts=drafts,
    )


def decode_buffers(
    shape: ModelShape,
    codes: Collection[str],
    rows: Rows,
    max_len: int,
    allocate: Allocate,
    *,
    n_kept: int = 0,
    n_shards: int = 1,
) -> DecodeBuffers:
    """Every buffer of a decode of up to so many rows and contexts of up to max_len tokens, of weights in
    these codes. n_kept: further rows of logits. n_shards: of the model, of which this is the shape of each.
    """
    n_rows = len(rows.position)
    f32, bf16 = torch.float32, torch.bfloat16
    h, heads = shape.hidden_size, shape.heads
    widest = [shape.gdn_in_proj_rows, heads.row, *([shape.index.row] if shape.index else [])]
    value, q_size = shape.gdn_value_size, heads.n_q * heads.dim
    inner = max(shape.intermediate_size, shape.shared_intermediate_size)
    widths = value, q_size, inner, shape.stream_size * (1 + shape.has_draft_head)
    n_partials = [k_splits(h, k) for k in widths[:3] if k]
    if shape.has_draft_head:
        n_partials.append(shape.n_streams * k_splits(h, 2 * h))
    moe = None
    if shape.is_moe:
        moe = moe_scratch(n_rows, *_mixture(shape), allocate)
        n_partials.append(shape.n_experts_per_tok + 1)
    return DecodeBuffers(
        rows=rows,
        residual=allocate("residual", (n_rows * shape.stream_size,), f32),
        normed=allocate("normed", (n_rows * h,), bf16),
        proj=allocate("projections", (n_rows * max(2 * inner, *(r * k_splits(r, h) for r in widest)),), f32),
        mixed=allocate("mixed", (n_rows * max(value, q_size),), bf16),
        inner=allocate("inner", (n_rows * max(1, inner),), bf16),
        partial=allocate("partial sums", (n_shards * max(n_partials) * n_rows * h,), f32),
        attention=attention_scratch(heads, n_rows, max_len, allocate),
        moe=moe,
        fp8=fp8_rows("e4m3 rows", n_rows, max(widths), allocate) if "e4m3" in codes else None,
        logits=allocate("logits", ((n_rows + n_kept) * shape.draws * shape.vocab_size,), f32),
        streams=connection_buffers(shape, n_rows, allocate, name="decode"),
        index=_index(shape, n_rows, max_len, allocate, "decode"),
        features=_features(shape, n_rows, allocate, "decode"),
    )


def _mixture(shape: ModelShape) -> tuple[int, int, int, int]:
    """Experts, those of a token, and the widths of a routed one and of the shared one."""
    widths = shape.moe_intermediate_size, shape.shared_intermediate_size
    return shape.n_experts, shape.n_experts_per_tok, *widths


def head_buffers(shape: ModelShape, rows: GuessRows, allocate: Allocate) -> HeadBuffers:
    """Allocates the buffers of the draft head, for as many rows as these."""
    n, size = len(rows.known), shape.stream_size
    return HeadBuffers(
        rows=rows,
        pair=allocate("head rows", (n * 2 * size,), torch.bfloat16),
        hidden=allocate("head hidden states", (n * size,), torch.bfloat16),
    )


def prefill_buffers(
    shape: ModelShape,
    codes: Collection[str],
    n_blocks: int,
    n_segments: int,
    max_len: int,
    allocate: Allocate,
    n_shards: int = 1,
    further: Collection[tuple[int, int]] = (),
) -> PrefillBuffers:
    """Every buffer of a prefill of up to n_blocks blocks in n_segments segments of contexts of up to max_len
    tokens.

    codes: those of the weights. n_shards: as of `decode_buffers`. further: rows and columns of matrices of a
    block drafter.
    """
    f32, bf16 = torch.float32, torch.bfloat16
    t, h, heads = n_blocks * BLOCK, shape.hidden_size, shape.heads
    value, q_size = shape.gdn_value_size, heads.n_q * heads.dim
    inner = max(shape.intermediate_size, shape.shared_intermediate_size)
    moe = None
    if shape.is_moe:
        moe = moe_prefill_scratch(t, h, *_mixture(shape), allocate, has_e4m3="e4m3" in codes)
    many = [(shape.gdn_in_proj_rows, h), (heads.row, h), (h, value), (h, q_size), *further]
    many += [(2 * shape.intermediate_size, h), (h, shape.intermediate_size)]
    widest = [shape.gdn_in_proj_rows, heads.row, 2 * shape.intermediate_size]
    if shape.index is not None:
        many.append((shape.index.row, h))
        widest.append(shape.index.row)
    if shape.n_streams > 1:
        many.append((shape.stream_rank + shape.n_streams, shape.stream_size))
    if shape.ngrams is not None:
        many.append((shape.stream_size + h, shape.ngrams.width))
    hidden, follows, each = None, None, 1
    if shape.has_draft_head:  # its rows, twice as wide, lie where a projection does
        each = shape.n_streams  # a row a stream
        many += [(h, 2 * h), (1, 2 * shape.stream_size)]
        widest.append(2 * shape.stream_size)
        follows = allocate("prefill ids behind", (t,), torch.int32)
    if (shape.has_draft_head and shape.n_streams == 1) or shape.keeps_hidden or shape.feature_layers:
        hidden = allocate("prefill hidden states", (t * h,), bf16)
    return PrefillBuffers(
        residual=allocate("prefill residual", (t * shape.stream_size,), f32),
        normed=allocate("prefill normed", (t * h,), bf16),
        proj=allocate("prefill projections", (t * max(widest),), bf16),
        mixed=allocate("prefill mixed", (t * max(value, q_size),), bf16),
        inner=allocate("prefill inner", (t * max(1, inner),), bf16),
        y=allocate("prefill y", (n_shards * t * h,), bf16),
        query=allocate("prefill queries", (t * q_size,), bf16),
        gdn=gdn_scratch(shape.gdn_heads, n_blocks, allocate),
        moe=moe,
        wide=wide_scratch(t, max(m * k for m, k in many), max(k for _, k in many), codes, allocate, each=each),
        final=allocate("final", (n_segments, h), bf16),
        logits=allocate("prefill logits", (n_segments * shape.draws, shape.vocab_size), f32),
        hidden=hidden,
        follows=follows,
        streams=connection_buffers(shape, t, allocate, name="prefill", n_wanted=n_segments),
        index=_index(shape, t, max_len, allocate, "prefill"),
        features=_features(shape, t, allocate, "prefill"),
    )


def _features(shape: ModelShape, n_rows: int, allocate: Allocate, name: str) -> Tensor | None:
    if not shape.feature_layers:
        return None
    width = len(shape.feature_layers) * shape.hidden_size
    return torch.as_tensor(allocate(f"{name} features", (n_rows * width,), torch.bfloat16))


def _index(shape: ModelShape, n_rows: int, max_len: int, allocate: Allocate, name: str) -> IndexScratch | None:
    if shape.index is None:
        return None
    is_prefill = name == "prefill"
    return index_scratch(shape.index, n_rows, max_len, allocate, name=f"{name} index", is_prefill=is_prefill)
