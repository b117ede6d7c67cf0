"""The hybrid decoder: gated DeltaNet and gated attention layers, recorded as one program of operators.

    h  = x + Mixer(rms_norm(x));  x' = h + FFN(rms_norm(h))        (Qwen3-Next, 3.5, 3.6, 3.8)

Qwen3.8-Flash-Next has several residual streams: a block reads a mix of them, and adds to each
(ops/cpu/streams.py). One layer adds what a table says of the last tokens (ops/cpu/ngrams.py); attention reads
keys that an index chooses (ops/cpu/index.py).

The residual streams, norms, gates, states, router and logits are float32. The inputs of every linear are
bfloat16, and pages, too, or fewer bits (ops/kv_formats.py). Matrices are bfloat16 or quantised. There is one
layout of the weights (models/qwen/weights.py) and one path for decode and prefill. What stands for a
picture's tokens comes from the vision tower (models/vision), as rows that take the place of embeddings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from deltic.models.fields import Limit, at_most, multiple, refuse_limits
from deltic.models.loading import Mlp, transposed
from deltic.models.qwen.cpu_buffers import Activations, AdapterBuffers, DraftBuffers, ForwardInputs, Memory, RowInputs
from deltic.models.qwen.ngram_table import ngram_row_ids
from deltic.models.qwen.shape import ModelShape, n_gdn_before
from deltic.models.qwen.weights import AttnLayer, GdnLayer, HyperConnection, Indexer, Moe, Ngrams, Weights
from deltic.models.rotary import PromptPositions, axis_of_angle, rotary_tables
from deltic.ops.arrays import Array, front
from deltic.ops.cpu.attention import attention, attn_prepare
from deltic.ops.cpu.dense import DraftNorms, draft_rows, embed, linear, rms_norm, silu_mul
from deltic.ops.cpu.draft import keep_features
from deltic.ops.cpu.gdn import gdn
from deltic.ops.cpu.index import GROUP, index_prepare, index_select
from deltic.ops.cpu.lora import lora, lora_embed
from deltic.ops.cpu.moe import ExpertAdapters, Experts, moe
from deltic.ops.cpu.ngrams import (
    MOST_KEPT,
    TAPS,
    NgramHash,
    NgramMemory,
    NgramRows,
    NgramWeights,
    ngram_conv,
    ngram_gate,
    ngram_rows,
)
from deltic.ops.cpu.program import Program
from deltic.ops.cpu.streams import (
    BlockOutput,
    StreamRows,
    connection_gate,
    connection_mix,
    connection_norm,
    inject,
    round_rows,
    spread,
)
from deltic.ops.geometry import MAX_GDN_DIM, MAX_GROUP, MAX_HEAD_DIM, AttentionWeights, Routing
from deltic.ops.kv_formats import KvPages
from deltic.ops.matrix import Matrix


def check_kernels(shape: ModelShape) -> None:
    """Raises UnsupportedModelError for a geometry that the kernels cannot run.

    Called before anything is loaded.
    """
    group = shape.n_q_heads // max(1, shape.n_kv_heads)
    limits: tuple[Limit, ...] = (
        multiple("head_dim", shape.head_dim, 32, MAX_HEAD_DIM),
        multiple("partial_rotary_factor * head_dim", shape.rotary_dim, 32),
        at_most("num_attention_heads / num_key_value_heads", group, MAX_GROUP),
        multiple("linear_key_head_dim", shape.gdn_k_dim, 16, MAX_GDN_DIM),
        multiple("linear_value_head_dim", shape.gdn_v_dim, 16, MAX_GDN_DIM),
    )
    if (index := shape.index) is not None:
        limits += (
            ("indexer_compress_ratio", index.ratio, index.ratio == GROUP, str(GROUP)),
            at_most("indexer_head_dim", index.dim, MAX_HEAD_DIM),
        )
    if (ngrams := shape.ngrams) is not None:
        limits += (
            ("ple_conv_kernel_size", ngrams.conv_width, ngrams.conv_width == TAPS, str(TAPS)),
            ("ngram_size", ngrams.size, ngrams.window <= MOST_KEPT, f"at most {MOST_KEPT // (TAPS - 1)}"),
            ("ple_embed_dim", ngrams.width, ngrams.head_width % 16 == 0, "a multiple of 16 for each head"),
        )
    refuse_limits(*limits)


class Linears:
    """The matrices of a model by their names, and every product of a forward with one of them (but for the
    routed experts').

    A name is that of `named_parts`, such as `layers.3.mlp.gate_up`. Terms added to the product of one matrix,
    such as an adapter's share, belong here.
    """

    def __init__(self, parts: Iterable[tuple[str, Array | Matrix]]) -> None:
        self.matrices = {name: part for name, part in parts if isinstance(part, Matrix)}
        self.adapters: AdapterBuffers | None = None
        """Adapters of the steps that are recorded. None: steps without adapters."""
        self.n_logit_rows: Array | None = None
        """Number of rows of logits of these steps."""

    def project(
        self,
        program: Program,
        name: str,
        x: Array,
        out: Array,
        packed: Array,
        n_rows: Array,
        *,
        add: bool = False,
        first: int = 0,
    ) -> None:
        """Appends out = x W^T, or out += x W^T: x bfloat16 [T, K], out float32 [T, M], n_rows int32 scalar,
        rows in use: tokens, or rows of logits. packed, first: as of `linear`.
        """
        linear(program, x, self.matrices[name], out, packed, n_rows, add=add, first=first)
        if (a := self.adapters) is not None and name in a.names:
            lora(program, x, out, a.entries(name), a.logit_rows if n_rows is self.n_logit_rows else a.rows, a.scratch)

    def of_experts(self, name: str) -> ExpertAdapters | None:
        """Terms that adapters add to the experts whose matrices' names begin so."""
        if (a := self.adapters) is None or f"{name}down" not in a.names:
            return None
        return ExpertAdapters(a.rows, a.entries(f"{name}gate_up"), a.entries(f"{name}down"), a.scratch)


class Angles:
    """Rows of the tables of cos and sin that a step's tokens read. A text's token, whose three axes of M-RoPE
    are alike, reads that of its position. Each of a picture's has a row that is made for the step, from the
    rows of its axes' positions.
    """

    def __init__(self, cos: Array, sin: Array, axes: Array, begin: int) -> None:
        """axes: of each angle (`axis_of_angle`); begin: the first row that may be made."""
        self._cos, self._sin, self._axes, self._begin = cos, sin, axes, begin
        self._next = begin

    def begin(self) -> None:
        """A step begins: rows that were made are free."""
        self._next = self._begin

    def fill(self, out: Array, prompt: PromptPositions, start: int, end: int) -> Array:
        """Writes the rows of tokens [start, end) to out, int32 [end - start]. Returns which of them are a
        picture's, bool.
        """
        positions, in_picture = prompt.of(start, end)
        out[:] = positions[0]
        n = int(in_picture.sum())
        if n:
            made = slice(self._next, self._next + n)
            at = positions[self._axes][:, in_picture].T, np.arange(len(self._axes))
            self._cos[made], self._sin[made] = self._cos[at], self._sin[at]
            out[in_picture] = np.arange(made.start, made.stop)
            self._next = made.stop
        return in_picture

    def fill_groups(self, out: Array, own: Array, prompt: PromptPositions, start: int) -> None:
        """Writes the rows of the first tokens of the groups that tokens from `start` on are counted to, int32
        [n]. own: the rows of these tokens.
        """
        before = np.empty(start % GROUP, np.int32)  # a group may have begun in an earlier chunk
        self.fill(before, prompt, start - len(before), start)
        rows = np.concatenate([before, own])
        out[:] = np.repeat(rows[::GROUP], GROUP)[len(before) :][: len(own)]


class Qwen:
    """The weights in the form the operators read, and the recording of a forward over given buffers."""

    def __init__(
        self, shape: ModelShape, weights: Weights, max_len: int, n_made_angles: int = 0, *, on_disk: bool = False
    ) -> None:
        """n_made_angles: rows of cos and sin that `angles` may make, beside those of max_len positions.
        on_disk: routed experts are mapped, and not all in memory.
        """
        self.shape = shape
        self.weights = weights
        parts = [*weights.named_parts(), ("lm_head", weights.lm_head)]
        if (head := weights.draft_head) is not None:
            n_query = 2 * shape.n_q_heads * shape.head_dim
            parts += [
                ("draft_head.lm_head", weights.lm_head.rows(0, shape.n_drafted)),
                ("draft_head.kv", head.layer.qkv.rows(n_query, head.layer.qkv.n)),
            ]
        self.linears = Linears(parts)
        self.heads, self.gdn_heads = shape.heads, shape.gdn_heads
        self.gdn_weights = weights.gdn()
        self._max_len = max_len
        self.on_disk = on_disk
        self.cos, self.sin = rotary_tables(
            shape.inv_freq(), max_len, shape.rope_attention_factor, n_beside=n_made_angles
        )

    def angles(self, first: int) -> Angles:
        """Returns the angles of steps that make rows from the first one on, of those that may be made."""
        n = self.shape.rotary_dim // 2
        axes = axis_of_angle(n, self.shape.mrope_section or (n, 0, 0))
        return Angles(self.cos, self.sin, axes, self._max_len + first)

    def record(
        self,
        program: Program,
        inputs: ForwardInputs,
        memory: Memory,
        act: Activations,
        picture_rows: Array | None = None,
        adapters: AdapterBuffers | None = None,
    ) -> None:
        """Appends the whole forward: token ids to act.logits[:n_logit_rows]; of a stage its layers, from and
        to act.residual where others are in front of them and behind.

        picture_rows: bfloat16 [N, H]: ids below 0 name them, from -1 on. adapters: where rows may have some.
        """
        self.linears.adapters, self.linears.n_logit_rows = adapters, inputs.n_logit_rows
        _Forward(self, program, inputs, memory, act).record(picture_rows)

    def gather(self, inputs: ForwardInputs, act: Activations) -> None:
        """Reads the rows of a step's n-grams from a table in blocks, before the recorded forward runs."""
        shape, table = self.shape.ngrams, self.weights.ngram_table
        if shape is None or table is None or not table.blocks:
            return
        assert inputs.hash_ids is not None and inputs.previous_ids is not None and act.ngrams is not None
        n = int(inputs.n_tokens)
        table.gather(ngram_row_ids(shape, inputs.hash_ids[:n], inputs.previous_ids[:n]), act.ngrams.rows[:n])

    def record_draft(
        self,
        program: Program,
        inputs: RowInputs,
        memory: Memory,
        act: Activations,
        buffers: DraftBuffers,
        *,
        keys_only: bool,
    ) -> None:
        """Appends the draft head: buffers.hidden[:n_tokens], and the ids of the tokens behind them, to the
        keys and values of its layer; and, but for keys_only, to buffers.logits[:n_tokens] of the token after
        that, and to the head's own hidden states.

        The keys and values of a row are those of its token's place in the pages. What has no token there yet,
        a guess behind guesses, is overwritten when it has.
        """
        _Forward(self, program, inputs, memory, act).record_draft(buffers, keys_only)


@dataclass(frozen=True)
class _Forward:
    """A forward that is recorded: of these inputs, over this memory, in these buffers."""

    model: Qwen
    program: Program
    inputs: RowInputs
    memory: Memory
    act: Activations

    def record(self, picture_rows: Array | None) -> None:
        """Does what `Qwen.record` does."""
        program, act, w, shape = self.program, self.act, self.model.weights, self.model.shape
        inputs, n, a = self._step, self.inputs.n_tokens, self.model.linears.adapters
        if shape.embeds:
            embed(program, w.embed, inputs.token_ids, act.target, n, picture_rows)
        if a is not None and shape.embeds:
            lora_embed(program, inputs.token_ids, act.target, a.entries("embed"), a.rows, a.scratch)
        if act.streams is not None:
            spread(program, self._streams(), act.target)
        i_gdn = i_attn = 0
        for i, layer in enumerate(w.layers):
            is_added = i == 0
            if isinstance(layer, GdnLayer) and layer.ngrams is not None:
                self._ngrams(i, layer.ngrams, is_added=is_added)
                is_added = True
            self._enter(f"layers.{i}.input_norm", layer.input_norm, is_added=is_added)
            if isinstance(layer, GdnLayer):
                self._gdn(i, i_gdn)
                i_gdn += 1
            else:
                self._attention(f"layers.{i}.", layer, i_attn)
                i_attn += 1
            self._enter(f"layers.{i}.post_norm", layer.post_norm)
            self._feed_forward(f"layers.{i}.mlp.", layer.mlp)
            if act.features is not None and i in shape.feature_layers:
                first = shape.feature_layers.index(i) * shape.hidden_size
                keep_features(program, act.residual, act.features, first, n)
        if shape.draws:
            self._head()

    def _head(self) -> None:
        """Makes logits, and the hidden states that are kept, of the residual streams."""
        program, act, w, shape, inputs = self.program, self.act, self.model.weights, self.model.shape, self._step
        if isinstance(w.norm, HyperConnection):
            inject(program, self._streams(), self._written())
            if act.hidden is not None and shape.has_draft_head:
                round_rows(program, self._streams(inputs.n_hidden), act.hidden)
            elif act.hidden is not None:
                self._mix("norm", w.norm, act.hidden, self._streams(inputs.n_hidden))
            last = self._streams(inputs.n_logit_rows, inputs.logit_token)
            round_rows(program, last, act.final_hidden)
            self._mix("norm", w.norm, act.final, last)
        else:
            eps = shape.rms_norm_eps
            if act.hidden is not None:
                rms_norm(program, act.residual, w.norm, eps, act.hidden, inputs.n_hidden)
            rms_norm(program, act.residual, w.norm, eps, act.final, inputs.n_logit_rows, rows=inputs.logit_token)
        self._project("lm_head", act.final, act.logits, inputs.n_logit_rows)

    def record_draft(self, buffers: DraftBuffers, keys_only: bool) -> None:
        """Does what `Qwen.record_draft` does."""
        program, act, weights, eps = self.program, self.act, self.model.weights, self.model.shape.rms_norm_eps
        head, ids, n = weights.draft_head, self.inputs.token_ids, self.inputs.n_tokens
        assert head is not None
        norms = DraftNorms(head.embedding_norm, head.hidden_norm, eps)
        draft_rows(program, weights.embed, ids, buffers.hidden, norms, buffers.pair, n, act.residual)
        streams = act.residual.reshape(len(buffers.pair), -1)
        self._project("draft_head.fc", buffers.pair, streams, buffers.n_pairs)
        name, layer = "draft_head.layer.", head.layer
        self._enter(f"{name}input_norm", layer.input_norm, is_added=True)
        if keys_only:
            n_row = self.model.heads.row
            proj, n_query = self._front(act.proj, n_row), n_row - self.model.linears.matrices["draft_head.kv"].n
            self._project("draft_head.kv", act.normed, proj, first=n_query)
            self._attn_prepare(layer, proj, self.memory.pages[:, -1])
            if layer.indexer is not None:
                self._index(f"{name}indexer", layer.indexer, -1)
            return
        self._attention(name, layer, -1)
        self._enter(f"{name}post_norm", layer.post_norm)
        self._feed_forward(f"{name}mlp.", layer.mlp)
        own = final = buffers.hidden[: len(buffers.logits)]
        if isinstance(head.norm, HyperConnection):
            inject(program, self._streams(), self._written())
            round_rows(program, self._streams(), own)
            final = act.normed[: len(buffers.logits)]
            self._mix("draft_head.norm", head.norm, final, self._streams())
        else:
            rms_norm(program, act.residual, head.norm, eps, own, n)
        self._project("draft_head.lm_head", final, buffers.logits)

    @property
    def _step(self) -> ForwardInputs:
        """The inputs of a whole step."""
        assert isinstance(self.inputs, ForwardInputs)
        return self.inputs

    def _front(self, flat: Array, width: int) -> Array:
        """The front of a flat buffer, a row a token."""
        return front(flat, len(self.act.residual), width)

    def _project(
        self, name: str, x: Array, out: Array, n_rows: Array | None = None, *, add: bool = False, first: int = 0
    ) -> None:
        """Appends a product with the matrix of this name (`Linears.project`), by default of all tokens."""
        n = self.inputs.n_tokens if n_rows is None else n_rows
        self.model.linears.project(self.program, name, x, out, self.act.packed, n, add=add, first=first)

    def _enter(self, name: str, norm: Array | HyperConnection, *, is_added: bool = False) -> None:
        """Makes act.normed, which the next block reads. is_added: whether the streams have what the last one
        wrote.
        """
        act, eps = self.act, self.model.shape.rms_norm_eps
        if not isinstance(norm, HyperConnection):
            rms_norm(self.program, act.residual, norm, eps, act.normed, self.inputs.n_tokens)
        else:
            self._mix(name, norm, act.normed, self._streams(), None if is_added else self._written())

    def _streams(self, n_rows: Array | None = None, rows: Array | None = None) -> StreamRows:
        """The residual streams, by default of all tokens."""
        n = self.inputs.n_tokens if n_rows is None else n_rows
        return StreamRows(self.act.residual, self.model.shape.n_streams, n, rows)

    def _written(self) -> BlockOutput:
        """Returns what the last block wrote, and how it goes to each stream."""
        assert self.act.streams is not None
        width = self.model.shape.stream_rank + self.model.shape.n_streams
        return BlockOutput(self.act.target, self._front(self.act.streams.low, width))

    def _mix(
        self, name: str, connection: HyperConnection, out: Array, streams: StreamRows, added: BlockOutput | None = None
    ) -> None:
        """Mixes streams to out, bfloat16 [M, H], once what is `added` is in them; act.target becomes 0."""
        program, act, size = self.program, self.act, self.model.shape.stream_size
        buffers, n_rows, m = act.streams, streams.n_rows, len(out)
        assert buffers is not None
        normed, gate = front(buffers.normed, m, size), front(buffers.gate, m, connection.up.k)
        low, up = front(buffers.low, m, connection.down.n), front(act.proj, m, size)
        connection_norm(program, streams, connection.norm, self.model.shape.rms_norm_eps, normed, added)
        self._project(f"{name}.down", normed, low, n_rows)
        connection_gate(program, low, gate, n_rows, streams.count)
        self._project(f"{name}.up", gate, up, n_rows)
        connection_mix(program, up, normed, out, n_rows, act.target)

    def _ngrams(self, i: int, ngrams: Ngrams, *, is_added: bool) -> None:
        """Adds what the table says of the last tokens to the streams."""
        program, act, inputs, memory, n = self.program, self.act, self._step, self.memory, self.inputs.n_tokens
        shape, table, buffers = self.model.shape.ngrams, self.model.weights.ngram_table, act.ngrams
        assert shape is not None and table is not None and buffers is not None
        assert inputs.hash_ids is not None and inputs.previous_ids is not None
        assert memory.ngram_columns is not None and memory.window_ngrams is not None
        if not is_added:
            inject(program, self._streams(), self._written())
        if not table.blocks:  # else `gather` has read them
            rows = NgramRows(table.addresses, table.rows_per_part, table.width, table.parts[0].dtype, table.scale)
            integers = (np.array(values, np.int64) for values in (shape.multipliers, shape.primes, shape.offsets))
            ngram_rows(program, rows, NgramHash(*integers), inputs.hash_ids, inputs.previous_ids, buffers.rows, n)
        kv = self._front(act.proj, ngrams.proj.n)
        self._project(f"layers.{i}.ngrams.proj", buffers.rows, kv)
        weights = NgramWeights(ngrams.key_norm, ngrams.query_norm, ngrams.conv_norm, transposed(ngrams.conv))
        eps, n_streams = self.model.shape.rms_norm_eps, self.model.shape.n_streams
        ngram_gate(program, kv, act.residual, weights, eps, buffers.inputs, n, n_streams)
        kept = NgramMemory(memory.ngram_columns, memory.window_ngrams)
        ngram_conv(program, buffers.inputs, act.residual, weights.conv, inputs, kept)

    def _index(self, name: str, indexer: Indexer, i: int) -> None:
        """Writes to the index of attention layer i, and makes the queries that choose from it."""
        heads, buffers, index_pages = self.model.shape.index, self.act.index, self.memory.index_pages
        assert heads is not None and buffers is not None and index_pages is not None
        self._project(f"{name}.proj", self.act.normed, buffers.proj)
        weights, pages = self._attention_weights(indexer), index_pages[:, i]
        index_prepare(self.program, buffers.proj, heads, weights, self.inputs, pages, buffers.query)

    def _gdn(self, i: int, i_gdn: int) -> None:
        act, shape, heads = self.act, self.model.shape, self.model.gdn_heads
        proj, mixed = self._front(act.proj, shape.gdn_in_proj_rows), self._front(act.mixed, shape.gdn_value_size)
        self._project(f"layers.{i}.in_proj", act.normed, proj)
        weights, memory = self.model.gdn_weights[i], self.memory.of_gdn(i_gdn, n_gdn_before(shape))
        gdn(self.program, proj, heads, weights, shape.rms_norm_eps, self._step, memory, mixed)
        self._project(f"layers.{i}.out_proj", mixed, act.target, add=True)

    def _attention(self, name: str, layer: AttnLayer, i: int) -> None:
        act, shape, heads = self.act, self.model.shape, self.model.heads
        pages, chosen = self.memory.pages[:, i], None
        if layer.indexer is not None:
            assert shape.index is not None and act.index is not None and self.memory.index_pages is not None
            self._index(f"{name}indexer", layer.indexer, i)
            index_select(self.program, shape.index, self.inputs, self.memory.index_pages[:, i], act.index)
            chosen = act.index.chosen
        proj, mixed = self._front(act.proj, heads.row), self._front(act.mixed, heads.n_q * heads.dim)
        self._project(f"{name}qkv", act.normed, proj)
        query, cache = self._attn_prepare(layer, proj, pages), KvPages(pages, shape.kv_format, chosen=chosen)
        attention(self.program, query, proj, heads, self.inputs, cache, act.attn_records, mixed)
        self._project(f"{name}o_proj", mixed, act.target, add=True)

    def _attention_weights(self, layer: AttnLayer | Indexer) -> AttentionWeights:
        model = self.model
        return AttentionWeights(layer.q_norm, layer.k_norm, model.shape.rms_norm_eps, model.cos, model.sin)

    def _attn_prepare(self, layer: AttnLayer, proj: Array, pages: Array) -> Array:
        """Writes keys and values to the pages. Returns the queries."""
        heads, cache = self.model.heads, KvPages(pages, self.model.shape.kv_format)
        query = self._front(self.act.query, heads.n_q * heads.dim)
        attn_prepare(self.program, proj, heads, self._attention_weights(layer), self.inputs, cache, query)
        return query

    def _feed_forward(self, name: str, mlp: Mlp | Moe) -> None:
        act, shape, linears = self.act, self.model.shape, self.model.linears
        if isinstance(mlp, Moe):
            assert act.router is not None and act.shared is not None and act.moe is not None
            self._project(f"{name}router", act.normed, act.router)
            self._swiglu(f"{name}shared_", mlp.shared_down.k, act.shared, add=False)
            routing = Routing(shape.n_experts_per_tok, shape.norm_topk_prob)
            of_adapters, n = linears.of_experts(name), self.inputs.n_tokens
            experts = Experts(mlp.gate_up, mlp.down, routing, of_adapters, self.model.on_disk)
            moe(self.program, act.normed, act.router, experts, act.shared, act.target, n, act.moe)
        else:
            self._swiglu(name, mlp.down.k, act.target, add=True)

    def _swiglu(self, prefix: str, width: int, out: Array, *, add: bool) -> None:
        """The MLP of this width whose matrices' names begin so."""
        up, inner = self._front(self.act.proj, 2 * width), self._front(self.act.mixed, width)
        self._project(f"{prefix}gate_up", self.act.normed, up)
        silu_mul(self.program, up, inner, self.inputs.n_tokens)
        self._project(f"{prefix}down", inner, out, add=add)
