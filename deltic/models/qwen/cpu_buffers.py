"""Inputs, memory and buffers of the forward on a CPU (cpu.py)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import empty_weights
from deltic.ops.arrays import Array, bfloat16
from deltic.ops.cpu.attention import AttentionInputs
from deltic.ops.cpu.gdn import GdnInputs, GdnMemory
from deltic.ops.cpu.index import IndexBuffers, index_buffers
from deltic.ops.cpu.lora import AdapterRows, Entries, LoraScratch, adapter_rows, lora_scratch, make_table
from deltic.ops.cpu.moe import MoeScratch
from deltic.ops.geometry import Allocate
from deltic.ops.matrix import Matrix, row_bytes


@dataclass(frozen=True, kw_only=True)
class RowInputs(AttentionInputs):
    """Inputs of every forward."""

    angles: Array
    token_ids: Array  # [T]


@dataclass(frozen=True, kw_only=True)
class ForwardInputs(RowInputs, GdnInputs):
    """A step's inputs of the model. A state slot is a row of `Memory.states` and `columns`."""

    n_logit_rows: Array
    hash_ids: Array | None  # [T] as token_ids, but of a picture's tokens those of the prompt
    # [T, longest n-gram - 1] those before, the nearest first; the end of text where there is none
    previous_ids: Array | None
    logit_token: Array  # [R] the tokens whose logits are wanted
    n_hidden: Array  # rows whose hidden states are kept beside those of the logits: all or none


@dataclass(frozen=True)
class AdapterBuffers:
    """Buffers with which a step applies adapters, and the table of what they add. A product is a matrix by
    its name (`adapted_widths`).
    """

    rows: AdapterRows  # of the step's tokens
    logit_rows: AdapterRows  # of the rows of logits
    scratch: LoraScratch
    table: Array  # int64 [slots of adapters, products, words]
    names: tuple[str, ...]  # of the products

    def entries(self, name: str) -> Entries:
        return Entries(self.table, self.names.index(name))


@dataclass(frozen=True)
class DraftBuffers:
    """Buffers of the draft head beside the activations, T rows long, or R that draw.

    A row stands for a token: its hidden state, and the id of the token behind it.
    """

    hidden: Array  # bfloat16 [T, S H]: what comes in; then, where rows draw, the head's own
    pair: Array  # bfloat16 [T S, 2H]
    n_pairs: Array  # int32 scalar: rows of pair in use, S a token
    logits: Array  # float32 [R, n_drafted]


@dataclass(frozen=True)
class Memory:
    """The two memories. pages: of `ops.cpu.attention.kv_pages`, [n_pages, n_kv_layers, ...]; states: float32
    or bfloat16 [n_slots, n_gdn, Hv, dk, dv]; columns: bfloat16 [n_slots, n_gdn, 3, C], the other half of a
    state slot.

    And the windows of drafted tokens, by batch slot: window_columns bfloat16 [n_batch_slots, n_gdn, W, C],
    window_gates float32 [n_batch_slots, n_gdn, W, 2 Hv].

    Where there is an index, index_pages, bfloat16 [n_pages, n_kv_layers, page_rows, d], are part of the
    pages. Where there are n-grams, ngram_columns, bfloat16 [n_slots, window, S H], are part of the state
    slots, and window_ngrams, bfloat16 [n_batch_slots, W, S H], a window of drafts.
    """

    pages: Array
    states: Array
    columns: Array
    window_columns: Array
    window_gates: Array
    index_pages: Array | None = None
    ngram_columns: Array | None = None
    window_ngrams: Array | None = None

    def of_slots(self) -> list[Array]:
        """Returns what a state slot is made of: arrays of which each has a row of it."""
        more = [] if self.ngram_columns is None else [self.ngram_columns]
        return [self.states, self.columns, *more]

    def of_gdn(self, i: int, n_before: int = 0) -> GdnMemory:
        """Returns what layer i of those with a state has of it. n_before: of those that run in front."""
        windows = self.window_columns[:, i], self.window_gates[:, i]
        return GdnMemory(self.columns[:, i], self.states[:, i], *windows, layer=n_before + i)


@dataclass(frozen=True)
class StreamBuffers:
    """Buffers of what is between streams and blocks."""

    normed: Array  # bfloat16, flat: [T, S H]
    low: Array  # float32, flat: [T, R + S]
    gate: Array  # bfloat16, flat: [T, R]


@dataclass(frozen=True)
class NgramBuffers:
    """Buffers of a layer's n-grams."""

    rows: Array  # bfloat16 [T, E]: what the table says
    inputs: Array  # bfloat16 [T, S H]: of the convolution


@dataclass(frozen=True)
class Activations:
    """Buffers of all layers, one set, T tokens long."""

    residual: Array  # float32 [T, S H], S streams
    target: Array  # float32 [T, H]: what blocks add to; the residual, where it is one stream
    streams: StreamBuffers | None  # of several
    index: IndexBuffers | None
    ngrams: NgramBuffers | None
    normed: Array  # bfloat16 [T, H]
    proj: Array  # float32, flat: the widest projection
    mixed: Array  # bfloat16, flat: a mixer's output or the MLP's inner activation
    query: Array  # bfloat16, flat
    attn_records: Array  # float32 [n, d + 16]
    moe: MoeScratch | None
    packed: Array  # uint8: the rows of a linear's input as its kernel reads them
    router: Array | None  # float32 [T, E + 1]
    shared: Array | None  # float32 [T, H]
    final: Array  # bfloat16 [R, H]
    final_hidden: Array  # bfloat16 [R, S H]: final, or the streams that it is mixed of
    logits: Array  # float32 [R, V]
    hidden: Array | None  # bfloat16 [T, S H], as final_hidden for the draft head, or [T, H], as final
    features: Array | None  # bfloat16 [T, n H]: the residual stream behind shape.feature_layers, side by side


def allocate_activations(shape: ModelShape, n_tokens: int, n_logit_rows: int, allocate: Allocate) -> Activations:
    """Every buffer of a forward of up to n_tokens tokens and n_logit_rows rows of logits."""
    f32, bf16, i32 = np.float32, bfloat16, np.int32
    t, h = n_tokens, shape.hidden_size
    value, inner = shape.gdn_value_size, max(shape.intermediate_size, shape.shared_intermediate_size)
    q_size = shape.n_q_heads * shape.head_dim
    s = shape.n_streams
    widest = max(h * s * (1 + shape.has_draft_head), value, q_size, inner, shape.ngrams.width if shape.ngrams else 0)
    proj_rows = max(shape.gdn_in_proj_rows, shape.attn_qkv_rows, 2 * inner, 0 if s == 1 else (s + 1) * h)
    heads = shape.heads
    scratch = router = shared = None
    if shape.is_moe:
        k, m, e = shape.n_experts_per_tok, shape.moe_intermediate_size, shape.n_experts
        scratch = MoeScratch(
            expert=allocate("expert", (t, k), i32),
            weight=allocate("expert weight", (t, k), f32),
            order=allocate("expert order", (t * k,), i32),
            begin=allocate("expert begin", (e + 1,), i32),
            probabilities=allocate("router probabilities", (t, e + 16), f32),
            rows=allocate("experts in", (t * k, row_bytes(max(h, m))), np.uint8),
            up=allocate("experts up", (t * k, 2 * m), f32),
            act=allocate("experts act", (t * k, m), bf16),
            y=allocate("experts out", (t * k, h), f32),
        )
        router = allocate("router logits", (t, e + 1), f32)
        shared = allocate("shared expert", (t, h), f32)
    residual = allocate("residual", (t, s * h), f32)
    final = allocate("final", (n_logit_rows, h), bf16)
    streams = ngrams = None
    if s > 1:
        streams = StreamBuffers(
            allocate("streams normed", (t * s * h,), bf16),
            allocate("streams mixed", (t * (shape.stream_rank + s),), f32),
            allocate("streams gate", (t * shape.stream_rank,), bf16),
        )
    if shape.ngrams is not None:
        ngrams = NgramBuffers(
            allocate("n-grams", (t, shape.ngrams.width), bf16), allocate("n-grams gated", (t, s * h), bf16)
        )
    return Activations(
        residual=residual,
        target=residual if s == 1 else allocate("block output", (t, h), f32),
        streams=streams,
        index=None if shape.index is None else index_buffers(shape.index, t, shape.max_position_embeddings, allocate),
        ngrams=ngrams,
        normed=allocate("normed", (t, h), bf16),
        proj=allocate("projections", (t * proj_rows,), f32),
        mixed=allocate("mixed", (t * max(value, q_size, inner),), bf16),
        query=allocate("queries", (t * q_size,), bf16),
        attn_records=allocate("attention records", heads.records_size(shape.max_position_embeddings), f32),
        moe=scratch,
        packed=allocate("packed rows", (max(t * widest, n_logit_rows * s * h) * 2,), np.uint8),
        router=router,
        shared=shared,
        final=final,
        final_hidden=final if s == 1 else allocate("final streams", (n_logit_rows, s * h), bf16),
        logits=allocate("logits", (n_logit_rows * shape.draws, shape.vocab_size), f32),
        hidden=allocate("hidden states", (t, (s if shape.has_draft_head else 1) * h), bf16)
        if shape.has_draft_head or shape.keeps_hidden
        else None,
        features=allocate("features", (t, len(shape.feature_layers) * h), bf16) if shape.feature_layers else None,
    )


def allocate_drafts(shape: ModelShape, n_tokens: int, n_draws: int, allocate: Allocate) -> DraftBuffers:
    """Allocates the buffers of a draft head for up to n_tokens rows, n_draws of which draw."""
    h, s = shape.hidden_size, shape.n_streams
    return DraftBuffers(
        hidden=allocate("draft hidden states", (n_tokens, s * h), bfloat16),
        pair=allocate("draft rows", (n_tokens * s, 2 * h), bfloat16),
        n_pairs=allocate("draft row count", (1,), np.int32)[0, ...],
        logits=allocate("draft logits", (n_draws, shape.n_drafted), np.float32),
    )


def adapted_widths(shape: ModelShape) -> dict[str, int]:
    """The matrices that an adapter may change, as `Weights.named_parts` names them, and what they multiply;
    `embed` and `lm_head`.
    """
    parts = empty_weights(shape, None, True).named_parts()
    found = {"embed": 1, "lm_head": shape.hidden_size}
    return found | {
        name: part.k for name, part in parts if isinstance(part, Matrix) and name.startswith(("layers.", "norm."))
    }


def allocate_adapters(
    shape: ModelShape, n_tokens: int, n_logit_rows: int, n_slots: int, rank: int, allocate: Allocate
) -> AdapterBuffers:
    """Allocates the buffers of n_slots adapters of up to this rank."""
    widths, k = adapted_widths(shape), max(1, shape.n_experts_per_tok if shape.is_moe else 1)
    return AdapterBuffers(
        rows=adapter_rows("adapters'", n_tokens, allocate),
        logit_rows=adapter_rows("adapters' logits", n_logit_rows, allocate),
        scratch=lora_scratch(n_tokens * k, max(widths.values()), rank, allocate),
        table=make_table(n_slots, len(widths), allocate),
        names=tuple(widths),
    )
