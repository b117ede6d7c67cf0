"""The hybrid decoder on a GPU: the same forward as models/qwen/cpu.py, recorded twice, once for decodes and
once for prefills.

    h  = x + Mixer(rms_norm(x));  x' = h + FFN(rms_norm(h))        (Qwen3-Next, 3.5, 3.6, 3.8)

Where the residual is several streams, a hyper-connection stands in the place of each norm (gpu_streams.py).

A decode is bound by the bytes of the weights and by the number of kernels: its matrices are multiplied with
tokens on the narrow side, cut along K by a rule that knows only the weight's shape, and the partial sums are
added, in order, by whoever reads them next. A prefill is bound by arithmetic: large products, the chunked
form of DeltaNet, tiled attention. The two differ in bits. A token of a prompt always goes through the one, a
generated one through the other (docs/design/purity.md).

Everything here starts kernels on the current stream and neither waits nor allocates, so that it can be
captured as a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial as partial_of
from itertools import zip_longest

from torch import Tensor

from deltic.models.loading import Mlp
from deltic.models.qwen.gpu_adapters import Targets
from deltic.models.qwen.gpu_buffers import DecodeBuffers, GpuMemory, HeadBuffers, PrefillBuffers
from deltic.models.qwen.gpu_experts import AHEAD_BLOCKS, OutsideExperts
from deltic.models.qwen.gpu_shards import Exchange, Shard, feature_of, keep_feature, norms_of, of_shards, place_of
from deltic.models.qwen.gpu_streams import HyperConnections, NgramLayer
from deltic.models.qwen.shape import ModelShape, n_gdn_before
from deltic.models.qwen.weights import AttnLayer, DraftHead, GdnLayer, Moe, Weights
from deltic.models.rotary import rotary_tables
from deltic.ops.arrays import front
from deltic.ops.geometry import AttentionWeights, Routing
from deltic.ops.gpu.all_reduce import all_gather, all_reduce, all_reduce_norm
from deltic.ops.gpu.attention_decode import attention_decode, keys_decode
from deltic.ops.gpu.attention_prefill import Axes, attention_prefill, keys_prefill
from deltic.ops.gpu.blocks import BLOCK, AdapterRows, BatchState, Blocks, PrefillInputs, Rows, StateSlots
from deltic.ops.gpu.decode import k_block
from deltic.ops.gpu.draft import begin_guess, draft_pair, follow, go_on
from deltic.ops.gpu.experts import is_e4m3
from deltic.ops.gpu.fp8 import Fp8Rows, Operand, round_made
from deltic.ops.gpu.gdn_decode import gdn_decode
from deltic.ops.gpu.gdn_prefill import gdn_prefill
from deltic.ops.gpu.index import IndexPages, index_decode, index_prefill
from deltic.ops.gpu.launch import copy_rows, take_rows
from deltic.ops.gpu.moe_decode import moe_decode
from deltic.ops.gpu.moe_prefill import moe_prefill
from deltic.ops.gpu.norm import add_norm, begin_decode, embed
from deltic.ops.gpu.streams import spread
from deltic.ops.gpu.weight import to_device
from deltic.ops.kv_formats import KvPages


def _first_matrix(i: int, layer: GdnLayer | AttnLayer) -> str:
    """The name of the matrix behind the first norm of layer i."""
    return f"layers.{i}.{'in_proj' if isinstance(layer, GdnLayer) else 'qkv'}"


class QwenGpu:
    """The weights in rows, and the two forwards over given buffers; behind each, the draft head's."""

    def __init__(
        self,
        shape: ModelShape,
        weights: Sequence[Weights],
        max_len: int,
        exchange: Exchange | None = None,
        targets: Sequence[Targets] = (),
        experts: OutsideExperts | None = None,
    ) -> None:
        """weights: of each shard that this GPU has, all of this shape; shards are run one behind the other.
        exchange: where the model is cut. targets: what adapters may add to, of each shard.
        experts: of one whose routed experts are in the host's memory.
        """
        self.shape, self.weights = shape, weights[0]
        outside = [] if experts is None else experts.layers
        self.shards = [Shard(*one) for one in zip_longest(weights, targets, outside)]
        self.linears = self.shards[0].linears
        self.heads, self.gdn_heads = shape.heads, shape.gdn_heads
        self.routing = Routing(shape.n_experts_per_tok, shape.norm_topk_prob)
        self.exchange, self.experts, self.max_len = exchange, experts, max_len
        self.watch: Callable[[Tensor], object] | None = None
        """Takes the residual stream behind each sum of a prefill that is not recorded."""
        self.norms = norms_of(self.weights)
        self.connections = HyperConnections(shape, self.norms, self.linears) if shape.n_streams > 1 else None
        self.ngrams = None if shape.ngrams is None else NgramLayer(shape, self.weights, self.linears)
        angles = rotary_tables(shape.inv_freq(), max_len, shape.rope_attention_factor)
        self.cos, self.sin = (to_device(table, place_of(self.weights)) for table in angles)

    def _attention(self, layer: AttnLayer) -> AttentionWeights:
        return AttentionWeights(layer.q_norm, layer.k_norm, self.shape.rms_norm_eps, self.cos, self.sin)

    def _cache(self, memory: GpuMemory, nth: int, table: Tensor | None = None, chosen: Tensor | None = None) -> KvPages:
        """Makes the pages of a layer, the nth that has any. chosen: which keys are read."""
        ratio = 0 if self.shape.index is None else self.shape.index.ratio
        return KvPages(memory.pages[:, nth], self.shape.kv_format, table, chosen, ratio)

    def _block(self, partials: Tensor | None, kind: str) -> Tensor | None:
        """Partial sums of a block, of several shards [shards, S, N, H]; or [1, N, H] summed over all GPUs."""
        exchange = self.exchange
        if partials is None or exchange is None:
            return partials
        if exchange.total is None:
            return partials.view(len(self.shards), -1, *partials.shape[1:])
        total = front(exchange.total, 1, *partials.shape[1:])
        all_reduce(partials, total[0], ranks=exchange.sums[kind])
        return total

    def _add_norm(
        self,
        residual: Tensor,
        partials: Tensor | None,
        name: str,
        out: Tensor,
        b: DecodeBuffers | PrefillBuffers,
        codes: Fp8Rows | None = None,
        behind: int = -1,
    ) -> Operand:
        """residual += partials, of all GPUs; out = its norm of this name, or what a block reads of streams.
        codes: where to round it to e4m3 as well. behind: a layer whose sum is complete then, if one is.
        """
        eps, exchange, w = self.shape.rms_norm_eps, self.exchange, self.norms[name]
        kind = "prefill" if isinstance(b, PrefillBuffers) else "decode"
        feature = feature_of(self.shape.feature_layers, behind, residual.shape[1])
        # of several shards, one's products overwrite them, and the next one's would read them
        if codes is not None and len(self.shards) > 1:
            codes = codes.rounded_by(0)
        if self.connections is not None:
            assert b.streams is not None
            few, many = (None, b.wide) if isinstance(b, PrefillBuffers) else (b.fp8, None)
            block = self._block(partials, kind)
            self.connections.read(name, residual, block, b.streams, out, fp8=few, wide=many)
            round_made(Operand(out, codes))
        elif partials is not None and exchange is not None and exchange.sums and exchange.total is None:
            ranks = exchange.sums[kind]
            made = all_reduce_norm(residual, partials, w, eps, ranks=ranks, codes=codes, feature=feature)
            if ranks.shots(len(residual)) == 1:  # else a row's owner alone has it whole, and has sent it
                keep_feature(feature, residual, b.features)
            if made.data_ptr() != out.data_ptr():  # it is mostly the buffer that the others reach
                copy_rows(made, out)
            return Operand(out, codes)
        else:
            add_norm(residual, self._block(partials, kind), w, eps, out, codes=codes)
            keep_feature(feature, residual, b.features)
        if self.watch is not None:
            self.watch(residual)
        return Operand(out, codes)

    def _codes(
        self, rows: Fp8Rows | None, name: str, mlp: Mlp | Moe | None = None, *, is_cut: bool = False
    ) -> Fp8Rows | None:
        """Room for normed rows in e4m3, and by which blocks they are rounded, for this matrix, or a
        feed-forward whose matrices' names begin so. is_cut: the matrix along K, as in a decode.
        """
        if rows is None:
            return None
        if isinstance(mlp, Moe):
            return rows.rounded_by(k_block(self.shape.hidden_size) if is_e4m3(mlp.gate_up, mlp.shared_gate_up) else 0)
        return rows.rounded_by(self.linears.block_k(name if mlp is None else f"{name}gate_up", is_cut=is_cut))

    def project_head(
        self, normed: Tensor, logits: Tensor, rows: Fp8Rows | None, kind: str, who: AdapterRows | None = None
    ) -> None:
        """float32 [1, N, M] of normed rows [N, H], of a decode, a prefill or a guess: those of the first M
        ids. who: which rows have adapters.
        """
        exchange, n = self.exchange, len(normed)
        if exchange is None:
            self.linears.project("lm_head", normed, logits, rows, who)
            return
        columns = exchange.logits.get(kind)
        if columns is None:
            self._own_logits(normed, logits[0], rows, who)
            return
        n_own = min(columns.n_columns - columns.first, sum(shard.n_head_rows for shard in self.shards))
        own = exchange.shard_logits if exchange.gpu_logits is None else exchange.gpu_logits
        self._own_logits(normed, front(own, n, n_own), rows, who)
        all_gather(front(own, n, n_own), columns)

    def _own_logits(self, normed: Tensor, out: Tensor, rows: Fp8Rows | None, who: AdapterRows | None) -> None:
        """The columns of all shards that this GPU has, as far as they are asked for. out: float32 [N, M].
        who: as of `project_head`.
        """
        assert self.exchange is not None
        n, begin = len(normed), 0
        for shard in self.shards:
            n_own = max(0, min(shard.n_head_rows, out.shape[1] - begin))
            own = front(self.exchange.shard_logits, 1, n, n_own)
            if n_own:
                shard.linears.project("lm_head", normed, own, rows, who)
            if n_own and own.data_ptr() != out.data_ptr():  # several shards, or all columns are here
                copy_rows(own[0], out[:, begin : begin + n_own])
            begin += n_own

    # A decode.

    def decode(
        self, rows_batch_slot: Tensor, batch: BatchState, b: DecodeBuffers, memory: Sequence[GpuMemory], max_len: int
    ) -> Tensor:
        """Runs one token each of n rows, none with more than max_len keys. Returns the logits, float32 [n,
        V]; of a stage that does not draw what it leaves in b.residual, where one that does not embed begins.

        rows_batch_slot: int32 [n], the batch slot of each row, or -1. b.rows.drafts says which are drafted
        tokens, and b.adapters which rows have adapters. memory: of each shard.
        """
        n = len(rows_batch_slot)
        shape, w, h = self.shape, self.weights, self.shape.hidden_size
        rows, residual, out = b.rows.front(n), front(b.residual, n, shape.stream_size), front(b.normed, n, h)
        embedded = residual if b.streams is None else front(b.streams.embedded, n, h)
        begin_decode(rows_batch_slot, batch, w.embed if shape.embeds else None, rows=rows, residual=embedded)
        who = None if b.adapters is None else b.adapters.front(n)
        self.linears.embedding(batch.last_token, embedded, who if shape.embeds else None, rows_batch_slot, rows.drafts)
        if b.streams is not None:
            spread(embedded, residual.view(n, -1, h))
        if self.ngrams is not None:
            assert b.streams is not None and batch.history is not None
            self.ngrams.rows_of_decode(batch.history, rows, b.streams)
        partial: Tensor | None = None

        for i, layer in enumerate(w.layers):
            partial = self._add_ngrams(layer, residual, partial, rows, b, memory[0])
            codes = self._codes(b.fp8, _first_matrix(i, layer), is_cut=True)
            normed = self._add_norm(residual, partial, f"layers.{i}.input_norm", out, b, codes, i - 1)
            mixer = partial_of(self._decode_mixer, i, normed, batch, b, memory, max_len)
            partial = of_shards(self.shards, b.partial, mixer)
            codes = self._codes(b.fp8, f"layers.{i}.mlp.", layer.mlp)
            normed = self._add_norm(residual, partial, f"layers.{i}.post_norm", out, b, codes)
            partial = of_shards(self.shards, b.partial, partial_of(self._decode_mlp, i, normed, b))
        self._add_norm(residual, partial, "norm", out, b)
        if not shape.draws:
            return residual
        logits = front(b.logits, 1, n, shape.vocab_size)
        self.project_head(out, logits, b.fp8, "decode", who)
        return logits[0]

    def _add_ngrams(
        self,
        layer: GdnLayer | AttnLayer,
        residual: Tensor,
        partials: Tensor | None,
        where: Rows | Blocks,
        b: DecodeBuffers | PrefillBuffers,
        memory: GpuMemory,
    ) -> Tensor | None:
        """residual += partials and what the n-gram embedding adds in front of a layer that has one. Returns
        the partials that are left to be added.
        """
        if not isinstance(layer, GdnLayer) or layer.ngrams is None:
            return partials
        assert self.ngrams is not None and b.streams is not None and memory.ngram_columns is not None
        if isinstance(b, PrefillBuffers):
            block = self._block(partials, "prefill")
            self.ngrams.add(residual, block, memory.ngram_columns, b.streams, where, wide=b.wide)
        else:
            block = self._block(partials, "decode")
            self.ngrams.add(residual, block, memory.ngram_columns, b.streams, where, fp8=b.fp8)
        return None

    def _index(self, layer: AttnLayer) -> AttentionWeights:
        assert layer.indexer is not None
        return replace(self._attention(layer), q_norm=layer.indexer.q_norm, k_norm=layer.indexer.k_norm)

    def _decode_mixer(
        self,
        i: int,
        normed: Operand,
        batch: BatchState,
        b: DecodeBuffers,
        memory: Sequence[GpuMemory],
        max_len: int,
        i_shard: int,
        flat: Tensor,
    ) -> Tensor:
        """A shard's partial sums of layer i's mixer, float32 [S, n, H], in the front of `flat`."""
        shard, of, shape = self.shards[i_shard], memory[i_shard], self.shape
        n = len(normed.rows)
        layer, nth, rows, eps = shard.layers[i], shard.nth[i], b.rows.front(n), shape.rms_norm_eps
        who = None if b.adapters is None else b.adapters.front(n)
        if isinstance(layer, GdnLayer):
            proj = shard.linears.partial(f"layers.{i}.in_proj", normed.rows, b.proj, normed.codes, who)
            name, mixed = f"layers.{i}.out_proj", front(b.mixed, n, shape.gdn_value_size)
            made = Operand(mixed, self._codes(b.fp8, name, is_cut=True))
            windows = None if b.windows is None else b.windows.of_layer(i_shard * shape.n_gdn_layers + nth)
            held = StateSlots(of.columns[:, nth], of.states[:, nth], n_gdn_before(shape) + nth, windows)
            gdn_decode(proj, self.gdn_heads, shard.gdn[i], eps, rows=rows, memory=held, out=made)
            return shard.linears.partial(name, made.rows, flat, made.codes, who)
        chosen = None
        if layer.indexer is not None:
            assert of.index is not None
            proj = shard.linears.partial(f"layers.{i}.indexer.proj", normed.rows, b.proj, normed.codes)
            chosen = self._choose(layer, proj, rows, batch, b, of.index[:, nth], max_len)
        proj = shard.linears.partial(f"layers.{i}.qkv", normed.rows, b.proj, normed.codes, who)
        name, mixed = f"layers.{i}.o_proj", front(b.mixed, n, self.heads.n_q * self.heads.dim)
        made = Operand(mixed, self._codes(b.fp8, name, is_cut=True))
        w, cache = self._attention(layer), self._cache(of, nth, batch.page_table, chosen)
        attention_decode(proj, self.heads, w, rows=rows, cache=cache, scratch=b.attention, max_len=max_len, out=made)
        return shard.linears.partial(name, made.rows, flat, made.codes, who)

    def _choose(
        self,
        layer: AttnLayer,
        proj: Tensor,
        rows: Rows,
        batch: BatchState,
        b: DecodeBuffers,
        keys: Tensor,
        max_len: int,
    ) -> Tensor:
        """Groups that rows of a decode choose among at most max_len keys of the index; of 0 it gets their own
        alone.
        """
        shape, pages = self.shape, IndexPages(keys, batch.page_table)
        assert b.index is not None and shape.index is not None
        begun, w = Axes(batch.group_begun, shape.mrope_section or ()), self._index(layer)
        return index_decode(proj, shape.index, w, rows=rows, pages=pages, scratch=b.index, max_len=max_len, begun=begun)

    def _decode_mlp(self, i: int, normed: Operand, b: DecodeBuffers, i_shard: int, flat: Tensor) -> Tensor:
        """The same of its feed-forward."""
        shard, n = self.shards[i_shard], len(normed.rows)
        row_slot, who = b.rows.front(n).state_slot, None if b.adapters is None else b.adapters.front(n)
        return self._decode_feed_forward(shard, f"layers.{i}.mlp.", shard.layers[i].mlp, normed, b, row_slot, flat, who)

    def _decode_feed_forward(
        self,
        shard: Shard,
        name: str,
        mlp: Mlp | Moe,
        normed: Operand,
        b: DecodeBuffers,
        row_slot: Tensor,
        flat: Tensor,
        who: AdapterRows | None = None,
    ) -> Tensor:
        """A shard's partial sums of a feed-forward of the normed rows, float32 [S, n, H], in the front of
        `flat`, to be added up by the next norm. name: how the names of its matrices begin.
        """
        shape, n = self.shape, len(normed.rows)
        if not isinstance(mlp, Moe):
            inner = front(b.inner, n, shape.intermediate_size)
            gate_up = front(b.proj, 1, n, 2 * shape.intermediate_size)
            down = f"{name}down"
            codes = shard.linears.swiglu(f"{name}gate_up", normed.rows, inner, gate_up, normed.codes, who, down)
            return shard.linears.partial(down, inner, flat, codes, who)
        assert b.moe is not None
        partial = front(flat, shape.n_experts_per_tok + 1, n, shape.hidden_size)
        held, adapters = None if shard.outside is None else shard.outside[name], shard.linears.experts(name, who)
        scratch = replace(b.moe, x8=normed.codes, expert_slots=held)
        moe_decode(normed.rows, mlp, self.routing, row_slot=row_slot, scratch=scratch, out=partial, adapters=adapters)
        return partial

    # The draft head behind a decode.

    @property
    def _head(self) -> DraftHead:
        assert self.weights.draft_head is not None
        return self.weights.draft_head

    def _draft_rows(self, n: int, drawn: Tensor | None, b: DecodeBuffers, g: HeadBuffers) -> Tensor:
        """Rows that the head's layer reads, bfloat16 [n, H]. drawn: of the step, int32 [N]; None: they are
        those behind the latest guesses.
        """
        head, h, size, eps = self._head, self.shape.hidden_size, self.shape.stream_size, self.shape.rms_norm_eps
        rows, guesses, streams = b.rows.front(n), g.rows.front(n), b.streams
        residual, normed, hidden = front(b.residual, n, size), front(b.normed, n, h), front(g.hidden, n, size)
        if drawn is None:
            go_on(rows, guesses)
        else:
            begin_guess(rows, drawn, guesses)
            if streams is None:
                hidden = normed  # as the step's last norm has left it
            else:
                copy_rows(residual, hidden)
        embedded = residual if streams is None else front(streams.embedded, n, h)
        embed(guesses.token, self.weights.embed, embedded)
        pair, residuals = front(g.pair, n * self.shape.n_streams, 2 * h), residual.view(-1, h)
        draft_pair(embedded, hidden, head.embedding_norm, head.hidden_norm, eps, pair, residuals)
        partial = self.linears.partial("draft_head.fc", pair, b.partial, b.fp8)
        if streams is None:
            add_norm(residual, partial, head.layer.input_norm, eps, normed)
        else:
            sums = front(streams.normed, len(pair), h)  # of which nobody reads the norm
            add_norm(residuals, partial, head.embedding_norm, eps, sums)
            self._add_norm(residual, None, "draft_head.layer.input_norm", normed, b)
        return normed

    def _draft_chosen(
        self, normed: Tensor, rows: Rows, batch: BatchState, b: DecodeBuffers, memory: GpuMemory, max_len: int
    ) -> Tensor | None:
        """Groups that the head's rows read, where it has an index."""
        layer = self._head.layer
        if layer.indexer is None:
            return None
        assert memory.index is not None
        proj = self.linears.partial("draft_head.layer.indexer.proj", normed, b.proj, b.fp8)
        return self._choose(layer, proj, rows, batch, b, memory.index[:, -1], max_len)

    def _draft_keys(self, proj: Tensor, batch: BatchState, b: DecodeBuffers, g: HeadBuffers, memory: GpuMemory) -> None:
        n, cache, w = proj.shape[1], self._cache(memory, -1, batch.page_table), self._attention(self._head.layer)
        rows = replace(b.rows.front(n), state_slot=g.rows.kept[:n], drafts=None)
        keys_decode(proj, self.heads, w, rows=rows, cache=cache)

    def draft_keys(
        self, n: int, drawn: Tensor, batch: BatchState, b: DecodeBuffers, g: HeadBuffers, memory: Sequence[GpuMemory]
    ) -> None:
        """The head's keys and values of a step's n rows, as far as they count. drawn: int32 [N], by it.
        memory: of each shard.
        """
        normed, step = self._draft_rows(n, drawn, b, g), b.rows.front(n)
        self._draft_chosen(normed, replace(step, state_slot=g.rows.kept[:n]), batch, b, memory[0], 0)
        for shard, of in zip(self.shards, memory, strict=True):
            self._draft_keys(shard.linears.partial("draft_head.layer.qkv", normed, b.proj, b.fp8), batch, b, g, of)

    def draft_guess(
        self,
        n: int,
        drawn: Tensor | None,
        batch: BatchState,
        b: DecodeBuffers,
        g: HeadBuffers,
        memory: Sequence[GpuMemory],
        max_len: int,
    ) -> Tensor:
        """Logits of one guess for each sequence of a step of n rows, float32 [n, n_drafted], in the row from
        which its last token was drawn: behind that token, or, drawn=None, behind the guess before. Rows of
        the step get their keys and values, as by `draft_keys`.

        The logits stand where those of the step stood. A row behind guesses has its keys and values where the
        next step writes those of the token that is right there, before anything reads them.
        """
        shape, head = self.shape, self._head
        h, size, is_first = shape.hidden_size, shape.stream_size, drawn is not None
        step, guesses, normed = b.rows.front(n), g.rows.front(n), self._draft_rows(n, drawn, b, g)
        drafts = step.drafts if is_first else None
        own = replace(step, state_slot=guesses.last, position=guesses.position, drafts=drafts)
        all_own = replace(own, state_slot=guesses.kept) if is_first else own
        chosen = self._draft_chosen(normed, all_own, batch, b, memory[0], max_len)
        name, mixed = "draft_head.layer.o_proj", front(b.mixed, n, self.heads.n_q * self.heads.dim)
        made, w = Operand(mixed, self._codes(b.fp8, name, is_cut=True)), self._attention(head.layer)
        reads = own if chosen is None else replace(own, drafts=None)

        def mixer(i: int, flat: Tensor) -> Tensor:
            of, linears = memory[i], self.shards[i].linears
            proj = linears.partial("draft_head.layer.qkv", normed, b.proj, b.fp8)
            if is_first and chosen is not None:  # a row may read those in front of it in any of its splits
                self._draft_keys(proj, batch, b, g, of)
            cache = self._cache(of, -1, batch.page_table, chosen)
            attention_decode(
                proj, self.heads, w, rows=reads, cache=cache, scratch=b.attention, max_len=max_len, out=made
            )
            if is_first:  # once more, by what writes them where nothing is guessed: with the same bits
                self._draft_keys(proj, batch, b, g, of)
            return linears.partial(name, made.rows, flat, made.codes)

        partial = of_shards(self.shards, b.partial, mixer)
        residual, normed, hidden = front(b.residual, n, size), front(b.normed, n, h), front(g.hidden, n, size)
        name, mlp = "draft_head.layer.mlp.", head.layer.mlp
        codes = self._codes(b.fp8, name, mlp)
        rows = self._add_norm(residual, partial, "draft_head.layer.post_norm", normed, b, codes)

        def feed_forward(i: int, flat: Tensor) -> Tensor:
            shard = self.shards[i]
            assert shard.draft_head is not None
            return self._decode_feed_forward(shard, name, shard.draft_head.layer.mlp, rows, b, guesses.last, flat)

        partial = of_shards(self.shards, b.partial, feed_forward)
        final = hidden if b.streams is None else normed
        self._add_norm(residual, partial, "draft_head.norm", final, b)
        if b.streams is not None:
            copy_rows(residual, hidden)
        logits = front(b.logits, 1, n, shape.n_drafted)
        self.project_head(final, logits, b.fp8, "guess")
        return logits[0]

    # A prefill.

    def prefill(
        self,
        n_blocks: int,
        inputs: PrefillInputs,
        page_table: Tensor,
        b: PrefillBuffers,
        memory: Sequence[GpuMemory],
        pictures: Tensor | None = None,
    ) -> Tensor:
        """The tokens of n_blocks blocks. Returns the logits of the rows asked for, float32 [G, V]; of a stage
        as of `decode`. memory: of each shard. pictures: bfloat16 [N, H], where ids may name its rows.
        """
        w, t, h = self.weights, n_blocks * BLOCK, self.shape.hidden_size
        residual, out = front(b.residual, t, self.shape.stream_size), front(b.normed, t, h)
        embedded = residual if b.streams is None else front(b.streams.embedded, t, h)
        added: Tensor | None = None
        if self.shape.embeds:
            embed(inputs.token_ids, w.embed, embedded, pictures)
            self.linears.embedding(inputs.token_ids, embedded, inputs.adapters)
        if b.streams is not None:
            spread(embedded, residual.view(t, -1, h))
        if self.ngrams is not None:
            assert b.streams is not None and inputs.ngram_ids is not None
            self.ngrams.rows_of_prefill(inputs.ngram_ids, b.streams)
        ahead = None if n_blocks < AHEAD_BLOCKS else self.experts
        filled = [] if ahead is None else [ahead.fill(0)]
        for i, layer in enumerate(w.layers):
            if ahead is not None and i + 1 < len(w.layers):
                filled.append(ahead.fill(i + 1))
            added = self._add_ngrams(layer, residual, added, inputs.blocks, b, memory[0])
            codes = self._codes(b.wide.rows, _first_matrix(i, layer))
            normed = self._add_norm(residual, added, f"layers.{i}.input_norm", out, b, codes, i - 1)
            mixer = partial_of(self._prefill_mixer, i, normed, inputs, page_table, b, memory)
            added = of_shards(self.shards, b.y, mixer)
            codes = self._codes(b.wide.rows if b.moe is None else b.moe.x8, f"layers.{i}.mlp.", layer.mlp)
            normed = self._add_norm(residual, added, f"layers.{i}.post_norm", out, b, codes)
            if ahead is not None:
                ahead.wait(filled[i])
            added = of_shards(self.shards, b.y, partial_of(self._feed_forward, i, normed, inputs, b))
        if b.hidden is not None or self.exchange is not None or self.watch is not None or not self.shape.draws:
            self._add_norm(residual, added, "norm", out if b.hidden is None else front(b.hidden, t, h), b)
        elif self.connections is not None and b.follows is not None:
            assert b.streams is not None and added is not None
            self.connections.add(residual, added, b.streams)
        return self.logits_of(inputs.logit_row, n_blocks, b, inputs.logit_adapters) if self.shape.draws else residual

    def _prefill_mixer(
        self,
        i: int,
        normed: Operand,
        inputs: PrefillInputs,
        page_table: Tensor,
        b: PrefillBuffers,
        memory: Sequence[GpuMemory],
        i_shard: int,
        flat: Tensor,
    ) -> Tensor:
        """A shard's share of layer i's mixer, bfloat16 [1, T, H], in the front of `flat`."""
        shard, of, shape = self.shards[i_shard], memory[i_shard], self.shape
        layer, nth, eps, t = shard.layers[i], shard.nth[i], shape.rms_norm_eps, len(normed.rows)
        y, who = front(flat, t, shape.hidden_size), inputs.adapters
        wide = replace(b.wide, rows=normed.codes)
        if isinstance(layer, GdnLayer):
            proj = front(b.proj, t, shape.gdn_in_proj_rows)
            mixed = front(b.mixed, t, shape.gdn_value_size)
            shard.linears.project_many(f"layers.{i}.in_proj", normed.rows, proj, wide, who)
            held = StateSlots(of.columns[:, nth], of.states[:, nth], n_gdn_before(shape) + nth)
            gdn_prefill(
                proj, self.gdn_heads, shard.gdn[i], eps, blocks=inputs.blocks, memory=held, scratch=b.gdn, out=mixed
            )
            shard.linears.project_many(f"layers.{i}.out_proj", mixed, y, b.wide, who)
            return y[None]
        chosen, axes = None, Axes(inputs.angles, shape.mrope_section or ())
        if layer.indexer is not None:
            assert b.index is not None and of.index is not None and shape.index is not None
            proj = front(b.proj, t, shape.index.row)
            shard.linears.project_many(f"layers.{i}.indexer.proj", normed.rows, proj, wide)
            pages, w, how = IndexPages(of.index[:, nth], page_table), self._index(layer), {"max_len": self.max_len}
            chosen = index_prefill(
                proj, shape.index, w, blocks=inputs.blocks, pages=pages, scratch=b.index, axes=axes, **how
            )
        proj = front(b.proj, t, self.heads.row)
        mixed = front(b.mixed, t, self.heads.n_q * self.heads.dim)
        shard.linears.project_many(f"layers.{i}.qkv", normed.rows, proj, wide, who)
        w, cache = self._attention(layer), self._cache(of, nth, page_table, chosen)
        query = front(b.query, t, self.heads.n_q, self.heads.dim)
        attention_prefill(proj, self.heads, w, blocks=inputs.blocks, cache=cache, query=query, out=mixed, axes=axes)
        shard.linears.project_many(f"layers.{i}.o_proj", mixed, y, b.wide, who)
        return y[None]

    def _feed_forward(
        self, i: int, normed: Operand, inputs: PrefillInputs, b: PrefillBuffers, i_shard: int, flat: Tensor
    ) -> Tensor:
        """The same of its experts, or of its one MLP, on the normed rows."""
        shard, shape, t = self.shards[i_shard], self.shape, len(normed.rows)
        mlp, y, who, name = shard.layers[i].mlp, front(flat, t, shape.hidden_size), inputs.adapters, f"layers.{i}.mlp."
        if isinstance(mlp, Mlp):
            up, inner = front(b.proj, t, 2 * mlp.down.k), front(b.inner, t, mlp.down.k)
            wide = replace(b.wide, rows=normed.codes)
            shard.linears.project_many(f"{name}gate_up", normed.rows, up, wide, who)
            shard.linears.down_many(f"{name}down", up, inner, y, b.wide, who)
        else:
            assert b.moe is not None
            stage = None if self.experts is None else self.experts.stage(i, i_shard, t >= AHEAD_BLOCKS * BLOCK)
            scratch, adapters = replace(b.moe, x8=normed.codes, stage=stage), shard.linears.experts(name, who)
            moe_prefill(normed.rows, mlp, self.routing, blocks=inputs.blocks, scratch=scratch, out=y, adapters=adapters)
        return y[None]

    def draft_keys_many(
        self,
        n_blocks: int,
        inputs: PrefillInputs,
        drawn: Tensor,
        table: Tensor,
        b: PrefillBuffers,
        memory: Sequence[GpuMemory],
    ) -> None:
        """The draft head's keys and values of the tokens of a prefill, behind its draws (int32 [D])."""
        assert inputs.next_ids is not None and b.follows is not None
        head, linears = self._head, self.linears
        t, h, size, eps = n_blocks * BLOCK, self.shape.hidden_size, self.shape.stream_size, self.shape.rms_norm_eps
        residual, normed, y = front(b.residual, t, size), front(b.normed, t, h), front(b.y, t, h)
        ids, pair, layer = b.follows[:t], front(b.proj, t * self.shape.n_streams, 2 * h), head.layer
        embedded = residual if b.streams is None else front(b.streams.embedded, t, h)
        follow(inputs.next_ids, drawn, ids)
        embed(ids, self.weights.embed, embedded)
        if b.streams is None:
            assert b.hidden is not None
            hidden = front(b.hidden, t, h)
            draft_pair(embedded, hidden, head.embedding_norm, head.hidden_norm, eps, pair, residual)
            linears.project_many("draft_head.fc", pair, y, b.wide)
            add_norm(residual, y[None], layer.input_norm, eps, normed)
        else:  # what is asked for later of the forward stays: its streams, and normed rows
            draft_pair(embedded, residual, head.embedding_norm, head.hidden_norm, eps, pair)
            streams, normed = front(b.streams.normed, t, size), y
            linears.project_many("draft_head.fc", pair, streams.view(-1, h), b.wide)
            assert self.connections is not None
            self.connections.read("draft_head.layer.input_norm", streams, None, b.streams, normed, wide=b.wide)
        axes = Axes(inputs.angles, self.shape.mrope_section or ())
        if layer.indexer is not None:
            assert b.index is not None and memory[0].index is not None and self.shape.index is not None
            proj, pages = front(b.proj, t, self.shape.index.row), IndexPages(memory[0].index[:, -1], table)
            linears.project_many("draft_head.layer.indexer.proj", normed, proj, b.wide)
            w, blocks = self._index(layer), inputs.blocks
            index_prefill(proj, self.shape.index, w, blocks=blocks, pages=pages, scratch=b.index, max_len=0, axes=axes)
        proj, w = front(b.proj, t, self.heads.row), self._attention(layer)
        for shard, of in zip(self.shards, memory, strict=True):
            shard.linears.project_many("draft_head.layer.qkv", normed, proj, b.wide)
            keys_prefill(proj, self.heads, w, blocks=inputs.blocks, cache=self._cache(of, -1), axes=axes)

    def logits_of(self, rows: Tensor, n_blocks: int, b: PrefillBuffers, who: AdapterRows | None = None) -> Tensor:
        """Logits of rows of the last prefill of n_blocks blocks, float32 [len(rows), V]; rows: int32, at most
        G. who: which of these rows have adapters.
        """
        t, h, n = n_blocks * BLOCK, self.shape.hidden_size, rows.shape[0]
        final, logits = b.final[:n], front(b.logits.view(-1), 1, n, self.shape.vocab_size)
        kept = b.normed if b.hidden is None and self.exchange is not None else b.hidden
        if kept is not None:  # what drafts has used the residual, or it is cut
            take_rows(front(kept, t, h), rows, final)
        else:
            residual, y = front(b.residual, t, self.shape.stream_size), front(b.y, 1, t, h)
            if self.connections is not None:
                assert b.streams is not None
                block = y if b.follows is None else None  # else it was added
                self.connections.read("norm", residual, block, b.streams, final, rows=rows, fp8=b.wide.rows)
            else:
                add_norm(residual, y, self.weights.norm, self.shape.rms_norm_eps, final, rows=rows)
        self.project_head(final, logits, b.wide.rows, "prefill", who)
        return logits[0]
