"""A block drafter on a GPU: the forward of models/dflash/cpu.py, over a decode's buffers and its own.

Keys and values of a step's tokens are part of the step: of a decode's rows, whether they count or not, and of
a prefill's blocks. A block's rows are rows of a decode without drafts, but that they see each other. Where a
guess depends on the one before, each row's is drawn from scores of its own. Spec: tests/reference/dflash.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltic.models.dflash.shape import LEAST_CHANCE, DrafterShape
from deltic.models.dflash.weights import BlockConv, DrafterLayer, DrafterWeights
from deltic.models.fields import refuse_limits
from deltic.models.qwen.gpu import QwenGpu
from deltic.models.qwen.gpu_buffers import DecodeBuffers, PrefillBuffers
from deltic.models.qwen.gpu_linears import Linears
from deltic.models.rotary import rotary_tables
from deltic.ops.arrays import front
from deltic.ops.geometry import PAGE_SIZE, Allocate, AttentionHeads, AttentionWeights
from deltic.ops.gpu.attention_decode import keys_decode
from deltic.ops.gpu.attention_prefill import keys_prefill
from deltic.ops.gpu.block import (
    BlockScratch,
    Chance,
    GuessBlocks,
    LikeliestIds,
    PairScores,
    Sight,
    add_scores,
    block_attention,
    block_conv,
    block_scratch,
    bound_scores,
    candidates,
    keys_of_layers,
    next_guess,
    scale_rows,
)
from deltic.ops.gpu.blocks import BLOCK, PrefillInputs, Rows
from deltic.ops.gpu.fp8 import Fp8Rows, fp8_rows
from deltic.ops.gpu.linear import k_splits
from deltic.ops.gpu.norm import add_norm, embed
from deltic.ops.gpu.weight import device_of, to_device
from deltic.ops.kv_formats import KvPages
from deltic.ops.matrix import Matrix


def check_drafter_gpu(shape: DrafterShape) -> None:
    """Raises UnsupportedModelError for a drafter that the kernels do not run."""
    group, dim = shape.n_q_heads // shape.n_kv_heads, shape.head_dim
    refuse_limits(
        ("num_attention_heads / num_key_value_heads", group, group <= 16, "at most 16"),
        ("head_dim", dim, dim in (32, 64, 128, 256), "32, 64, 128 or 256"),
        prefix="draft model: ",
    )


@dataclass(frozen=True)
class GpuDrafterBuffers:
    """Buffers of a drafter for up to N rows of a decode or of blocks, and for the T tokens of a
    prefill, flat. Its residual stream, normed rows and logits are in those of the model.
    """

    rows: GuessBlocks
    proj: Tensor  # float32: partial sums of a projection
    mixed: Tensor  # bfloat16
    inner: Tensor  # bfloat16
    partial: Tensor  # float32: what is to be added to the residual
    attention: BlockScratch
    fp8: Fp8Rows | None  # what is multiplied with e4m3
    keys: Tensor  # bfloat16: keys and values of a prefill's tokens
    convolved: Tensor  # bfloat16: rows as a mixer or feed-forward reads them
    kernels: Tensor  # float32: partial sums of the convolutions' own coefficients
    candidates: LikeliestIds | None  # of the selector
    projected: Tensor  # float32: partial sums of what it reads of a row
    embedded: Tensor  # bfloat16: what the Markov term reads of the tokens before
    scores: Tensor  # float32: that term


def matrix_sizes(shape: DrafterShape) -> list[tuple[int, int]]:
    """Rows and columns of the matrices."""
    h, inner, heads = shape.hidden_size, shape.intermediate_size, shape.heads
    sizes = [(h, len(shape.target_layer_ids) * h), (heads.row, h), (h, heads.n_q * heads.dim)]
    return [*sizes, (2 * inner, h), (h, inner)]


def drafter_buffers(
    shape: DrafterShape, codes: Collection[str], rows: GuessBlocks, n_tokens: int, allocate: Allocate
) -> GpuDrafterBuffers:
    """Allocates the buffers for as many rows as these, and for prefills of n_tokens tokens. codes: those of
    the weights.
    """
    n, h, heads, f32, bf16 = len(rows.first), shape.hidden_size, shape.heads, torch.float32, torch.bfloat16
    q_size, inner = heads.n_q * heads.dim, shape.intermediate_size
    keys = shape.n_layers * (heads.row if codes else _of_keys(heads).row)
    wide = max(k_splits(m, h) * m for m in (heads.row, shape.n_layers * _of_keys(heads).row, keys))
    n_partials = max(k_splits(h, k) for m, k in matrix_sizes(shape) if m == h)
    n_kernels, rank = shape.n_conv_kernels, shape.selector_rank
    widest = max(k for _, k in matrix_sizes(shape))
    return GpuDrafterBuffers(
        rows=rows,
        proj=allocate("drafter projections", (n * max(wide, 2 * inner),), f32),
        mixed=allocate("drafter mixed", (n * q_size,), bf16),
        inner=allocate("drafter inner", (n * inner,), bf16),
        partial=allocate("drafter partial sums", (n_partials * n * h,), f32),
        attention=block_scratch(heads, n, allocate),
        fp8=fp8_rows("drafter e4m3 rows", n, widest, allocate) if "e4m3" in codes else None,
        keys=allocate("drafter prefill keys", (n_tokens * (_of_keys(heads).row if not codes else heads.row),), bf16),
        convolved=allocate("drafter convolved", (n * h if n_kernels else 0,), bf16),
        kernels=allocate("drafter kernels", (n * n_kernels * k_splits(n_kernels, h),), f32),
        candidates=candidates(n, shape.vocab_size, shape.selector_top_k, allocate) if rank else None,
        projected=allocate("drafter projected", (n * rank * k_splits(rank, h),), f32),
        embedded=allocate("drafter embedded", (n * shape.markov_rank,), bf16),
        scores=allocate("drafter scores", (n * shape.vocab_size if shape.markov_rank else 0,), f32),
    )


def _of_keys(heads: AttentionHeads) -> AttentionHeads:
    """The heads of a projection to keys and values alone."""
    return replace(heads, n_q=0)


class DFlashGpu:
    """The weights in rows, and what a drafter does over given buffers, as `QwenGpu` does it."""

    def __init__(self, shape: DrafterShape, weights: DrafterWeights, model: QwenGpu) -> None:
        """model: the target, whose embedding and head it shares."""
        self.shape, self.weights, self.heads = shape, weights, shape.heads
        self._model = model
        n_q = self.heads.n_q * self.heads.dim
        # Rows of other formats are in several planes, of which none is a part.
        is_plain = all(_is_bf16(layer.qkv) for layer in weights.layers)
        self._key_heads = _of_keys(self.heads) if is_plain else self.heads
        keys = [layer.qkv.rows(n_q, layer.qkv.n) if is_plain else layer.qkv for layer in weights.layers]
        segments = tuple(segment for matrix in keys for segment in matrix.segments)
        joined = Matrix(sum(matrix.n for matrix in keys), shape.hidden_size, segments)
        own = (("keys", joined), *((f"keys.{i}", matrix) for i, matrix in enumerate(keys)))
        self._k_norms = torch.stack([layer.k_norm for layer in weights.layers])
        self.linears = Linears([*weights.named_parts(), *own])
        angles = rotary_tables(shape.inv_freq(), model.max_len + PAGE_SIZE, shape.rope_attention_factor)
        self.cos, self.sin = (to_device(table, device_of(weights.fc)) for table in angles)

    def _layers(self, pages: Tensor, table: Tensor | None = None) -> Iterator[tuple[int, AttentionWeights, KvPages]]:
        for i, layer in enumerate(self.weights.layers):
            weights = AttentionWeights(layer.q_norm, layer.k_norm, self.shape.rms_norm_eps, self.cos, self.sin)
            yield i, weights, KvPages(pages[:, i], table=table)

    def keys(self, rows: Rows, table: Tensor, b: DecodeBuffers, g: GpuDrafterBuffers, pages: Tensor) -> None:
        """Writes keys and values of the n rows of a decode, from b.features, to pages, bfloat16 [n_pages,
        layers, 2, nk, 64, d]. table: by batch slot.
        """
        assert b.features is not None
        n, w, h, eps = len(rows.position), self.weights, self.shape.hidden_size, self.shape.rms_norm_eps
        partial = self.linears.partial("fc", front(b.features, n, w.fc.k), g.partial, g.fp8)
        normed = front(b.normed, n, h)
        add_norm(partial[0], partial[1:] if len(partial) > 1 else None, w.hidden_norm, eps, normed)
        proj = self.linears.partial("keys", normed, g.proj, g.fp8)
        weights = AttentionWeights(self._k_norms, self._k_norms, eps, self.cos, self.sin)
        keys_of_layers(proj, self._key_heads, weights, rows=rows, cache=KvPages(pages, table=table))

    def keys_many(
        self, n_blocks: int, inputs: PrefillInputs, b: PrefillBuffers, g: GpuDrafterBuffers, pages: Tensor
    ) -> None:
        """The same of the tokens of a prefill."""
        assert b.features is not None
        t, w, h = n_blocks * BLOCK, self.weights, self.shape.hidden_size
        residual, normed = front(b.residual, t, h), front(b.normed, t, h)
        self.linears.project_many("fc", front(b.features, t, w.fc.k), residual, b.wide)
        add_norm(residual, None, w.hidden_norm, self.shape.rms_norm_eps, normed)
        for i, weights, cache in self._layers(pages):
            heads = self._key_heads
            proj = front(g.keys, t, heads.row)
            self.linears.project_many(f"keys.{i}", normed, proj, b.wide)
            keys_prefill(proj, heads, weights, blocks=inputs.blocks, cache=cache)

    def block(
        self, n: int, table: Tensor, b: DecodeBuffers, g: GpuDrafterBuffers, pages: Tensor, n_real: int
    ) -> Tensor:
        """Logits of n rows of blocks, float32 [n, V], where those of the step stood. table: by batch slot.
        n_real: ids that may be drawn.
        """
        shape, model, linears, rows = self.shape, self._model, self.linears, g.rows.front(n)
        h, eps, inner = shape.hidden_size, shape.rms_norm_eps, front(g.inner, n, shape.intermediate_size)
        residual, normed = front(b.residual, n, h), front(b.normed, n, h)
        mixed, gate_up = front(g.mixed, n, self.heads.n_q * self.heads.dim), front(g.proj, 1, n, 2 * inner.shape[1])
        embed(rows.token, model.weights.embed, residual)
        if shape.embedding_scale != 1.0:
            scale_rows(residual, shape.embedding_scale)
        partial: Tensor | None = None
        for i, weights, cache in self._layers(pages, table):
            layer: DrafterLayer = self.weights.layers[i]
            add_norm(residual, partial, layer.input_norm, eps, normed)
            name = f"layers.{i}."
            x = self._convolved(f"{name}attn_conv", layer.attn_conv, normed, rows, g)
            proj = linears.partial(f"{name}qkv", x, g.proj, g.fp8)
            keys_decode(proj, self.heads, weights, rows=rows.rows, cache=cache)
            sight = Sight(rows.rows.position if shape.are_causal[i] else rows.end, shape.windows[i])
            block_attention(
                proj, self.heads, weights, rows=rows.rows, sight=sight, cache=cache, scratch=g.attention, out=mixed
            )
            partial = linears.partial(f"{name}o_proj", mixed, g.partial, g.fp8)
            partial = self._added(layer.attn_conv, partial, residual, rows, g)
            add_norm(residual, partial, layer.post_norm, eps, normed)
            x = self._convolved(f"{name}mlp_conv", layer.mlp_conv, normed, rows, g)
            codes = linears.swiglu(f"{name}mlp.gate_up", x, inner, gate_up, g.fp8, None, f"{name}mlp.down")
            partial = linears.partial(f"{name}mlp.down", inner, g.partial, codes)
            partial = self._added(layer.mlp_conv, partial, residual, rows, g)
        add_norm(residual, partial, self.weights.norm, eps, normed)
        logits = front(b.logits, 1, n, shape.vocab_size)
        model.project_head(normed, logits, b.fp8, "decode")
        chosen = None if g.candidates is None else g.candidates.front(n)
        bound_scores(logits[0], n_real, shape.output_multiplier, shape.softcap, chosen)
        if chosen is not None:
            linears.partial("selector.projection", normed, g.projected, g.fp8)
        return logits[0]

    def next_guess(self, n: int, b: DecodeBuffers, g: GpuDrafterBuffers, guesses: Tensor, n_real: int) -> Tensor:
        """Scores of the next guess of each block, float32 [n, V], where the logits of `block` stood, whose
        other buffers are as it left them. guesses: int32, of all rows, what was drawn so far. Of g.rows.draws
        the rows that guess now draw.
        """
        shape, w, rows = self.shape, self.weights, g.rows.front(n)
        normed, logits = front(b.normed, n, shape.hidden_size), front(b.logits, 1, n, shape.vocab_size)[0]
        before: Tensor | None = None
        embedded = pairs = chance = None
        if w.selector is not None and g.candidates is not None:
            before, rank = w.selector.predecessor, shape.selector_rank
            projected = front(g.projected, k_splits(rank, shape.hidden_size), n, rank)
            pairs = PairScores(w.selector.successor, projected, g.candidates.front(n))
        if w.markov is not None:
            before, embedded = w.markov.before, front(g.embedded, n, shape.markov_rank)
        if w.confidence is not None:
            chance = Chance(normed, w.confidence.weight, w.confidence.bias, LEAST_CHANCE)
        at_anchor = shape.guesses_at_anchor
        next_guess(rows, guesses, logits, before, embedded, pairs, chance, guesses_at_anchor=at_anchor)
        if embedded is not None:
            scores = front(g.scores, 1, n, shape.vocab_size)
            self.linears.project("markov.after", embedded, scores, g.fp8)
            add_scores(scores[0], rows.draws, logits, n_real)
        return logits

    def _convolved(
        self, name: str, conv: BlockConv | None, x: Tensor, rows: GuessBlocks, g: GpuDrafterBuffers
    ) -> Tensor:
        """x as a mixer or feed-forward reads it."""
        if conv is None:
            return x
        out = front(g.convolved, *x.shape)
        own = self.linears.partial(f"{name}.projection", x, g.kernels, g.fp8)
        block_conv(x, conv.base, own, self.shape.conv_group, nth=rows.nth, out=out)
        return out

    def _added(
        self, conv: BlockConv | None, partial: Tensor, residual: Tensor, rows: GuessBlocks, g: GpuDrafterBuffers
    ) -> Tensor | None:
        """The part of what a mixer or feed-forward gives that is still to be added to the residual stream:
        all of it, or nothing, where it is convolved with the kernels that `_convolved` left.
        """
        if conv is None:
            return partial
        n, n_kernels = rows.nth.shape[0], self.shape.n_conv_kernels
        own = front(g.kernels, k_splits(n_kernels, self.shape.hidden_size), n, n_kernels)
        block_conv(partial, conv.base, own, self.shape.conv_group, nth=rows.nth, out=residual)
        return None


def _is_bf16(matrix: Matrix) -> bool:
    return all(segment.format.codes == "bf16" for segment in matrix.segments)
