"""A block drafter on a CPU: keys and values of what a step has computed, and the scores of a block's tokens,
recorded as operators.

    context:  x = norm(fc features); each layer's keys and values of x
    block:    h = x + Attention(norm(x)); x' = h + MLP(norm(h)), with convolutions around both (DFlash 2)

The rows of a block are the last token and masks, embedded by the target; its head gives their logits. Keys
and values of a block's rows stand in the pages at their positions, until those of real tokens take their
place. Spec: tests/reference/dflash.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deltic.models.dflash.shape import DrafterShape
from deltic.models.dflash.weights import BlockConv, DrafterLayer, DrafterWeights
from deltic.models.rotary import rotary_tables
from deltic.ops.arrays import Array, bfloat16, front
from deltic.ops.cpu.attention import AttentionInputs, attn_prepare, block_attention
from deltic.ops.cpu.dense import embed, gather, linear, rms_norm, silu_mul
from deltic.ops.cpu.draft import BlockRows, Candidates, ConvKernels, block_conv, block_scores, confidence, scale_rows
from deltic.ops.cpu.program import Program
from deltic.ops.geometry import PAGE_SIZE, Allocate, AttentionWeights
from deltic.ops.kv_formats import KvPages
from deltic.ops.matrix import Matrix, row_bytes


@dataclass(frozen=True)
class BlockInputs:
    """Inputs of blocks, int32, of up to R rows, of which up to R guess."""

    rows: AttentionInputs
    token_ids: Array  # [R]
    nth: Array  # [R] a row's number in its block
    n_logit_rows: Array
    logit_row: Array  # [R] the rows that guess


@dataclass(frozen=True)
class DrafterBuffers:
    """Buffers of a step's rows, T, and of blocks, R rows in all and S at once."""

    residual: Array  # float32 [T, H]
    normed: Array  # bfloat16 [T, H]
    proj: Array  # float32, flat: the widest projection
    query: Array  # bfloat16 [T, nq d]
    packed: Array  # uint8: rows of a linear's input as its kernel reads them
    mixed: Array  # bfloat16, flat: attention's output, or the MLP's inner activation, of R rows
    records: Array  # float32 [n, d + 16]
    part: Array  # float32 [R, H]: what a mixer or MLP gives before it is convolved
    convolved: Array  # bfloat16 [R, H]
    kernels: Array  # float32 [R, 2 * taps * H / group]
    final: Array  # bfloat16 [R, H]
    logits: Array  # float32 [R, V]
    projected: Array  # float32 [R, selector rank]
    embedded: Array  # bfloat16 [S, Markov rank]
    scores: Array  # float32 [S, V]: of the next tokens
    chance: Array  # float32 [S]: of these to be right, where the drafter says so


def allocate_drafter(
    shape: DrafterShape, n_tokens: int, n_rows: int, n_blocks: int, max_len: int, allocate: Allocate
) -> DrafterBuffers:
    """Allocates the buffers for steps of n_tokens rows and blocks of n_rows in all, n_blocks at once."""
    f32, h, heads = np.float32, shape.hidden_size, shape.heads
    t, q_size, inner = max(n_tokens, n_rows), heads.n_q * heads.dim, shape.intermediate_size
    widest = max(len(shape.target_layer_ids) * h, q_size, inner, shape.markov_rank)
    n_kernels = shape.n_conv_kernels

    def buffer(name: str, size: tuple[int, ...], dtype: object = bfloat16) -> Array:
        return np.asarray(allocate(f"drafter {name}", size, dtype))

    return DrafterBuffers(
        residual=buffer("residual", (t, h), f32),
        normed=buffer("normed", (t, h)),
        proj=buffer("projections", (max(t * heads.row, n_rows * 2 * inner),), f32),
        query=buffer("queries", (t, q_size)),
        packed=buffer("packed rows", (t * row_bytes(widest),), np.uint8),
        mixed=buffer("mixed", (n_rows * max(q_size, inner),)),
        records=buffer("attention records", heads.records_size(max_len), f32),
        part=buffer("parts", (n_rows if n_kernels else 0, h), f32),
        convolved=buffer("convolved", (n_rows if n_kernels else 0, h)),
        kernels=buffer("kernels", (n_rows, n_kernels), f32),
        final=buffer("final", (n_rows, h)),
        logits=buffer("logits", (n_rows, shape.vocab_size), f32),
        projected=buffer("projected", (n_rows, shape.selector_rank), f32),
        embedded=buffer("embedded", (n_blocks, shape.markov_rank)),
        scores=buffer("scores", (n_blocks, shape.vocab_size), f32),
        chance=buffer("chances", (n_blocks,), f32),
    )


class DFlash:
    """The weights in the form the operators read, and the recording of what a drafter does."""

    def __init__(self, shape: DrafterShape, weights: DrafterWeights, max_len: int) -> None:
        self.shape, self.weights, self.heads = shape, weights, shape.heads
        self._n_query = self.heads.n_q * self.heads.dim
        self._kv = [layer.qkv.rows(self._n_query, layer.qkv.n) for layer in weights.layers]
        self.cos, self.sin = rotary_tables(shape.inv_freq(), max_len + PAGE_SIZE, shape.rope_attention_factor)

    def record_context(
        self, program: Program, features: Array, inputs: AttentionInputs, pages: Array, b: DrafterBuffers
    ) -> None:
        """Appends a step's keys and values: of features, bfloat16 [T, n H], to pages, those of all layers."""
        w, n, t = self.weights, inputs.n_tokens, len(features)
        proj = front(b.proj, t, self.heads.row)
        linear(program, features, w.fc, b.residual[:t], b.packed, n)
        rms_norm(program, b.residual, w.hidden_norm, self.shape.rms_norm_eps, b.normed, n)
        for i, layer in enumerate(w.layers):
            linear(program, b.normed[:t], self._kv[i], proj, b.packed, n, first=self._n_query)
            self._prepare(program, layer, proj, inputs, pages[:, i], b)

    def record_block(
        self, program: Program, inputs: BlockInputs, table: Matrix, head: Matrix, pages: Array, b: DrafterBuffers
    ) -> None:
        """Appends the forward of blocks to b.final and b.logits of the rows that guess. table, head: the
        target's embedding and output embedding.
        """
        shape, eps, rows, n = self.shape, self.shape.rms_norm_eps, inputs.rows, inputs.rows.n_tokens
        n_rows = len(b.final)
        residual, normed = b.residual[:n_rows], b.normed[:n_rows]
        embed(program, table, inputs.token_ids, residual, n)
        if shape.embedding_scale != 1.0:
            scale_rows(program, residual, shape.embedding_scale, n)
        proj, up = front(b.proj, n_rows, self.heads.row), front(b.proj, n_rows, 2 * shape.intermediate_size)
        mixed, inner = (front(b.mixed, n_rows, size) for size in (self._n_query, shape.intermediate_size))
        for i, layer in enumerate(self.weights.layers):
            rms_norm(program, residual, layer.input_norm, eps, normed, n)
            x, kernels = self._convolved(program, layer.attn_conv, normed, inputs, b)
            linear(program, x, layer.qkv, proj, b.packed, n)
            self._prepare(program, layer, proj, rows, pages[:, i], b)
            sees = shape.are_causal[i], shape.windows[i]
            query = b.query[:n_rows]
            block_attention(program, query, self.heads, rows, pages[:, i], sees, (proj, b.records), mixed)
            self._add(program, mixed, layer.o_proj, kernels, inputs, b)
            rms_norm(program, residual, layer.post_norm, eps, normed, n)
            x, kernels = self._convolved(program, layer.mlp_conv, normed, inputs, b)
            linear(program, x, layer.mlp.gate_up, up, b.packed, n)
            silu_mul(program, up, inner, n)
            self._add(program, inner, layer.mlp.down, kernels, inputs, b)
        rms_norm(program, residual, self.weights.norm, eps, b.final, inputs.n_logit_rows, rows=inputs.logit_row)
        linear(program, b.final, head, b.logits, b.packed, inputs.n_logit_rows)
        if (selector := self.weights.selector) is not None:
            linear(program, b.final, selector.projection, b.projected, b.packed, inputs.n_logit_rows)

    def record_scores(self, program: Program, rows: BlockRows, n_real: int, b: DrafterBuffers) -> None:
        """Appends the scores of the next token of each block to b.scores, and its chance to b.chance.

        n_real: ids that may be drawn.
        """
        w, shape = self.weights, self.shape
        candidates = None
        if (s := w.selector) is not None:
            candidates = Candidates(shape.selector_top_k, s.predecessor, s.successor, b.projected)
        bounds = shape.output_multiplier, shape.softcap
        block_scores(program, b.logits, n_real, rows, bounds, candidates, b.scores)
        if w.markov is not None:
            gather(program, w.markov.before, rows.before, b.embedded, rows.n)
            linear(program, b.embedded, w.markov.after, b.scores, b.packed, rows.n, add=True)
        if w.confidence is not None:
            head, embedded = w.confidence, b.embedded if shape.confidence_sees_token else None
            confidence(program, b.final, rows, embedded, (head.weight, head.bias), b.chance)

    def _prepare(
        self, program: Program, layer: DrafterLayer, proj: Array, step: AttentionInputs, pages: Array, b: DrafterBuffers
    ) -> None:
        weights = AttentionWeights(layer.q_norm, layer.k_norm, self.shape.rms_norm_eps, self.cos, self.sin)
        attn_prepare(program, proj, self.heads, weights, step, KvPages(pages), b.query[: len(proj)])

    def _convolved(
        self, program: Program, conv: BlockConv | None, x: Array, inputs: BlockInputs, b: DrafterBuffers
    ) -> tuple[Array, ConvKernels | None]:
        """x as a mixer or MLP reads it, and the kernels of what it gives."""
        if conv is None:
            return x, None
        n = inputs.rows.n_tokens
        linear(program, x, conv.projection, b.kernels, b.packed, n)
        kernels = ConvKernels(conv.base, b.kernels, self.shape.conv_group)
        block_conv(program, x, kernels, inputs.nth, b.convolved, n)
        return b.convolved, kernels

    def _add(
        self, program: Program, x: Array, w: Matrix, kernels: ConvKernels | None, inputs: BlockInputs, b: DrafterBuffers
    ) -> None:
        """Adds x W^T to the residual stream, convolved where there are kernels."""
        residual, n = b.residual[: len(x)], inputs.rows.n_tokens
        if kernels is None:
            linear(program, x, w, residual, b.packed, n, add=True)
            return
        linear(program, x, w, b.part, b.packed, n)
        block_conv(program, b.part, kernels, inputs.nth, residual, n)
