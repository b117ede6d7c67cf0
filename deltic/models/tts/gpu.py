"""Qwen3-TTS on a GPU: a decode (predictor, sum of embeddings, talker) and a prefill, as models/tts/cpu.py has
them in one program.

A decode of N frames is one recording: 15 passes of the predictor, each ending in a draw, and one of the
talker. Its matrices are multiplied as in models/qwen/gpu.py, with the rows on the narrow side, cut along K by
the weight's shape. Texts are projected at load: a table of float32 rows. Where the talker is wider than the
predictor, so are the tables of codes, projected.

Everything here starts kernels on the current stream and neither waits nor allocates, so that it can be
captured as a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltic.models.fields import at_most, multiple, one_of, refuse_limits
from deltic.models.loading import QwenLayer
from deltic.models.qwen.gpu_linears import Linears
from deltic.models.rotary import rotary_tables
from deltic.models.tts.cpu import SpeechMemory
from deltic.models.tts.shape import N_SIDE, SPEAKER, DecoderShape, SpeechShape
from deltic.models.tts.weights import Decoder, Projection, SpeechWeights
from deltic.ops.arrays import front
from deltic.ops.geometry import N_CODES, Allocate, AttentionWeights
from deltic.ops.gpu.attention_decode import AttentionScratch, attention_decode, attention_scratch
from deltic.ops.gpu.attention_prefill import attention_prefill
from deltic.ops.gpu.blocks import BLOCK, BatchState, PrefillInputs
from deltic.ops.gpu.fp8 import Operand
from deltic.ops.gpu.frames import (
    MAX_CODES,
    CodeTables,
    FrameParameters,
    FrameRows,
    begin_frames,
    code_attention,
    draw_code,
    keep_past,
    project_rows,
    prompt_rows,
    segment_ends,
)
from deltic.ops.gpu.linear import k_splits, product, silu_mul
from deltic.ops.gpu.norm import add_norm
from deltic.ops.gpu.weight import to_device
from deltic.ops.kv_formats import KvPages

Attend = Callable[[int, QwenLayer, Tensor, Tensor], None]

TEXTS_AT_ONCE = 4096
"""Texts that are projected at once, at load."""


@dataclass(frozen=True)
class LayerBuffers:
    """Activations of a decoder's layers, flat. Fewer rows use the front of each."""

    residual: Tensor  # float32
    normed: Tensor  # bfloat16
    proj: Tensor  # float32
    mixed: Tensor  # bfloat16
    inner: Tensor  # bfloat16
    partial: Tensor  # float32


@dataclass(frozen=True)
class FrameBuffers:
    """Activations of a decode of up to N frames."""

    rows: FrameRows
    talker: LayerBuffers
    predictor: LayerBuffers
    past: Tensor  # bfloat16 [N, h]: what the projection reads
    code_pages: Tensor  # bfloat16 [N, layers, 2, nk, 16, d]
    code_logits: Tensor  # float32, flat
    numbers: Tensor  # int32 [2 N]: 0, 1, 2, ...
    attention: AttentionScratch
    logits: Tensor  # float32, flat


@dataclass(frozen=True)
class PromptBuffers:
    """Activations of a prefill of up to B blocks and G prompts, flat."""

    residual: Tensor  # float32
    normed: Tensor  # bfloat16
    proj: Tensor  # bfloat16
    mixed: Tensor  # bfloat16
    inner: Tensor  # bfloat16
    y: Tensor  # bfloat16
    query: Tensor  # bfloat16
    voice: Tensor  # float32 [64 B, h]: rows that are the voice's
    final: Tensor  # bfloat16 [G, h]
    logits: Tensor  # float32 [G, n_drawn]
    end: Tensor  # int32 [G]: the last row of each segment
    end_slot: Tensor  # int32 [G]


def check_speech_gpu(shape: SpeechShape) -> None:
    """Raises UnsupportedModelError for a geometry that the GPU's kernels cannot run."""
    for prefix, d in (("", shape.talker), ("code_predictor_config.", shape.predictor)):
        refuse_limits(
            multiple("hidden_size", d.hidden_size, 64),
            multiple("intermediate_size", d.intermediate_size, 32),
            one_of("head_dim", d.head_dim, 32, 64, 128, 256),
            ("num_attention_heads", d.n_q_heads // d.n_kv_heads, d.n_q_heads // d.n_kv_heads <= 16, "16 a key head"),
            prefix=prefix,
        )
    refuse_limits(at_most("code_predictor_config.vocab_size", shape.n_codebook, MAX_CODES))


def _layer_buffers(name: str, d: DecoderShape, n: int, allocate: Allocate) -> LayerBuffers:
    f32, bf16, h, f = torch.float32, torch.bfloat16, d.hidden_size, d.intermediate_size
    widest = max(d.qkv_rows * k_splits(d.qkv_rows, h), 2 * f)
    parts = max(k_splits(h, d.q_rows), k_splits(h, f))
    return LayerBuffers(
        residual=allocate(f"{name} residual", (n * h,), f32),
        normed=allocate(f"{name} normed", (n * h,), bf16),
        proj=allocate(f"{name} projections", (n * widest,), f32),
        mixed=allocate(f"{name} mixed", (n * d.q_rows,), bf16),
        inner=allocate(f"{name} inner", (n * f,), bf16),
        partial=allocate(f"{name} partial sums", (parts * n * h,), f32),
    )


def frame_buffers(shape: SpeechShape, n: int, max_len: int, allocate: Allocate) -> FrameBuffers:
    """Every buffer of a decode of up to n frames and contexts of up to max_len rows."""
    f32, bf16, i32 = torch.float32, torch.bfloat16, torch.int32
    t, p, c = shape.talker, shape.predictor, shape.n_codebook
    talker = _layer_buffers("talker", t, n, allocate)
    names = ("batch_slot", "state_slot", "position", "frame")
    rows = FrameRows(
        **{name: allocate(f"row {name}", (n,), i32) for name in names},
        codes=allocate("codes", (n, N_CODES), i32),
        sums=talker.residual.view(n, t.hidden_size),
    )
    return FrameBuffers(
        rows=rows,
        talker=talker,
        predictor=_layer_buffers("predictor", p, 2 * n, allocate),
        past=allocate("past rows", (n, t.hidden_size), bf16),
        code_pages=allocate("predictor pages", (n, p.n_layers, 2, p.n_kv_heads, N_CODES, p.head_dim), bf16),
        code_logits=allocate("code logits", (k_splits(c, p.hidden_size) * n * c,), f32),
        numbers=allocate("numbers", (2 * n,), i32),
        attention=attention_scratch(t.heads, n, max_len, allocate),
        logits=allocate("logits", (n * shape.n_drawn,), f32),
    )


def prompt_buffers(shape: SpeechShape, n_blocks: int, n_prompts: int, allocate: Allocate) -> PromptBuffers:
    """Every buffer of a prefill of up to n_blocks blocks of up to n_prompts prompts."""
    f32, bf16, d = torch.float32, torch.bfloat16, shape.talker
    t, h = n_blocks * BLOCK, d.hidden_size
    return PromptBuffers(
        residual=allocate("prefill residual", (t * h,), f32),
        normed=allocate("prefill normed", (t * h,), bf16),
        proj=allocate("prefill projections", (t * max(d.qkv_rows, 2 * d.intermediate_size),), bf16),
        mixed=allocate("prefill mixed", (t * d.q_rows,), bf16),
        inner=allocate("prefill inner", (t * d.intermediate_size,), bf16),
        y=allocate("prefill y", (t * h,), bf16),
        query=allocate("prefill queries", (t * d.q_rows,), bf16),
        voice=allocate("voice rows", (t, h), f32),
        final=allocate("final", (n_prompts, h), bf16),
        logits=allocate("prefill logits", (n_prompts, shape.n_drawn), f32),
        end=allocate("ends", (n_prompts,), torch.int32),
        end_slot=allocate("end state slots", (n_prompts,), torch.int32),
    )


def _product(x: Tensor, projection: Projection) -> Tensor:
    """x W^T + bias, float32, of bfloat16 x: at load."""
    result: Tensor = product(x, projection.weight) + projection.bias
    return result


def project_texts(weights: SpeechWeights) -> Tensor:
    """float32 [text vocabulary, h]: fc2(bfloat16(silu(fc1(x)))) of the whole table."""
    table, fc2 = weights.text_table, weights.text_fc2
    texts = torch.empty((len(table), len(fc2.bias)), dtype=torch.float32, device=table.device)
    for rows, out in zip(table.split(TEXTS_AT_ONCE), texts.split(TEXTS_AT_ONCE), strict=True):
        hidden = torch.nn.functional.silu(_product(rows, weights.text_fc1)).bfloat16()
        out.copy_(_product(hidden, fc2))
    return texts


class TtsGpu:
    """The weights in rows, and the two forwards over given buffers."""

    def __init__(self, shape: SpeechShape, weights: SpeechWeights, max_len: int) -> None:
        """The text table of `weights` is used up."""
        self.shape, self.weights = shape, weights
        self.linears = Linears(weights.named_parts())
        self.texts = project_texts(weights)
        # a view would keep its memory
        weights.text_table = weights.text_table.new_empty((0, shape.text_hidden_size))
        codes = [weights.codec_table[: shape.n_codebook], *weights.code_tables]
        projection = weights.projection
        # code i as the predictor's row
        self.inner_tables = codes if projection is None else [_product(table, projection) for table in codes]
        self.talker_angles = _angles(shape.talker, max_len, self.texts.device)
        self.predictor_angles = _angles(shape.predictor, N_CODES, self.texts.device)

    def _layers(self, name: str, d: DecoderShape, decoder: Decoder, n: int, b: LayerBuffers, attend: Attend) -> Tensor:
        """Runs n rows of b.residual through all layers of the decoder of this name.

        Returns the partial sums that are still to be added to b.residual, float32 [S, n, H].
        """
        linears, eps, h = self.linears, d.rms_norm_eps, d.hidden_size
        residual, normed = front(b.residual, n, h), front(b.normed, n, h)
        mixed, inner = front(b.mixed, n, d.q_rows), front(b.inner, n, d.intermediate_size)
        partial: Tensor | None = None
        for i, layer in enumerate(decoder.layers):
            add_norm(residual, partial, layer.input_norm, eps, normed)
            proj = linears.partial(f"{name}.layers.{i}.qkv", normed, b.proj)
            attend(i, layer, proj, mixed)
            partial = linears.partial(f"{name}.layers.{i}.o_proj", mixed, b.partial)
            add_norm(residual, partial, layer.post_norm, eps, normed)
            gate_up = front(b.proj, 1, n, 2 * d.intermediate_size)
            linears.swiglu(f"{name}.layers.{i}.mlp.gate_up", normed, inner, gate_up)
            partial = linears.partial(f"{name}.layers.{i}.mlp.down", inner, b.partial)
        assert partial is not None
        return partial

    def decode(
        self,
        rows_batch_slot: Tensor,
        batch: BatchState,
        parameters: FrameParameters,
        b: FrameBuffers,
        memory: SpeechMemory,
        max_len: int,
    ) -> Tensor:
        """Runs one frame each of n rows, none with more than max_len keys: codes into b.rows.codes. Returns
        the logits of the next code 0, float32 [n, n_drawn]. rows_batch_slot: int32 [n], the batch slot of
        each row, or -1.
        """
        w, d, n = self.weights, self.shape.talker, len(rows_batch_slot)
        rows = b.rows.front(n)
        self._frames(n, rows, rows_batch_slot, batch, parameters, b, memory)
        heads, cos_sin = d.heads, self.talker_angles
        step: dict[str, Any] = {"rows": rows, "scratch": b.attention, "max_len": max_len}

        def attend(i: int, layer: QwenLayer, proj: Tensor, mixed: Tensor) -> None:
            weights = AttentionWeights(layer.q_norm, layer.k_norm, d.rms_norm_eps, *cos_sin)
            cache = KvPages(memory.pages[:, i], table=batch.page_table)
            attention_decode(proj, heads, weights, cache=cache, out=Operand(mixed), **step)

        partial = self._layers("talker", d, w.talker, n, b.talker, attend)
        normed = front(b.talker.normed, n, d.hidden_size)
        add_norm(front(b.talker.residual, n, d.hidden_size), partial, w.talker.norm, d.rms_norm_eps, normed)
        keep_past(normed, rows.state_slot, memory.past)
        logits = front(b.logits, 1, n, self.shape.n_drawn)
        self.linears.project("head", normed, logits)
        return logits[0]

    def _frames(
        self,
        n: int,
        rows: FrameRows,
        rows_batch_slot: Tensor,
        batch: BatchState,
        parameters: FrameParameters,
        b: FrameBuffers,
        memory: SpeechMemory,
    ) -> None:
        """Draws codes 1 to 15, and leaves the talker's input in rows.sums."""
        w, d = self.weights, self.shape.predictor
        p, eps = d.hidden_size, d.rms_norm_eps
        residual = front(b.predictor.residual, 2 * n, p)
        past = residual[:n] if w.projection is None else b.past[:n]
        first_tables, into = CodeTables(w.codec_table, self.inner_tables[0]), {"into": past, "residual": residual}
        begin_frames(rows_batch_slot, batch, parameters, memory.past, first_tables, rows=rows, **into)
        if w.projection is not None:
            parts = self.linears.partial("projection.weight", past, b.predictor.partial)
            project_rows(parts, w.projection.bias, residual[:n])
        heads, cos_sin = d.heads, self.predictor_angles
        for step in range(1, N_CODES):

            def attend(
                i: int, layer: QwenLayer, proj: Tensor, mixed: Tensor, first: int = step if step > 1 else 0
            ) -> None:
                weights, pages = AttentionWeights(layer.q_norm, layer.k_norm, eps, *cos_sin), b.code_pages[:, i]
                code_attention(proj, heads, weights, first, state_slot=rows.state_slot, pages=pages, out=mixed)

            # the first pass has the talker's last output and code 0: only the second is drawn from
            n_rows = n if step > 1 else 2 * n
            partial = self._layers("predictor", d, w.predictor, n_rows, b.predictor, attend)
            normed = front(b.predictor.normed, n, p)
            wanted = None if step > 1 else b.numbers[n : 2 * n]
            add_norm(residual[:n_rows], partial, w.predictor.norm, eps, normed, rows=wanted)
            logits = self.linears.partial(f"code_heads.{step - 1}", normed, b.code_logits)
            tables = CodeTables(w.code_tables[step - 1], self.inner_tables[step] if step < N_CODES - 1 else None)
            draw_code(logits, step, parameters, rows, tables, residual[:n], self.texts, self.shape.ids.tts_pad)

    def prefill(
        self, n_blocks: int, inputs: PrefillInputs, page_table: Tensor, b: PromptBuffers, memory: SpeechMemory
    ) -> Tensor:
        """Rows of prompts of n_blocks blocks. Leaves the last output of each segment in its state slot.

        Gives the logits of the rows asked for, float32 [G, n_drawn].
        """
        w, linears, d = self.weights, self.linears, self.shape.talker
        t, h, eps = n_blocks * BLOCK, d.hidden_size, d.rms_norm_eps
        residual, normed, y = front(b.residual, t, h), front(b.normed, t, h), front(b.y, 1, t, h)
        prompt_rows(inputs.token_ids, N_SIDE, SPEAKER, self.texts, w.codec_table, b.voice, residual)
        heads, cos_sin, added = d.heads, self.talker_angles, None
        for i, layer in enumerate(w.talker.layers):
            add_norm(residual, added, layer.input_norm, eps, normed)
            added = y
            proj, mixed = front(b.proj, t, heads.row), front(b.mixed, t, d.q_rows)
            linears.project_many(f"talker.layers.{i}.qkv", normed, proj)
            weights = AttentionWeights(layer.q_norm, layer.k_norm, eps, *cos_sin)
            cache = KvPages(memory.pages[:, i], table=page_table)
            query = front(b.query, t, heads.n_q, heads.dim)
            attention_prefill(proj, heads, weights, blocks=inputs.blocks, cache=cache, query=query, out=mixed)
            linears.project_many(f"talker.layers.{i}.o_proj", mixed, y[0])
            add_norm(residual, added, layer.post_norm, eps, normed)
            up, inner = front(b.proj, t, 2 * d.intermediate_size), front(b.inner, t, d.intermediate_size)
            linears.project_many(f"talker.layers.{i}.mlp.gate_up", normed, up)
            silu_mul(up, inner)
            linears.project_many(f"talker.layers.{i}.mlp.down", inner, y[0])
        n = inputs.logit_row.shape[0]
        final, end, end_slot = b.final[:n], b.end[:n], b.end_slot[:n]
        segment_ends(inputs.blocks, end, end_slot)
        add_norm(residual, y, w.talker.norm, eps, final, rows=end)
        keep_past(final, end_slot, memory.past)
        logits = front(b.logits.view(-1), 1, n, self.shape.n_drawn)
        add_norm(residual, y, w.talker.norm, eps, final, rows=inputs.logit_row)
        self.linears.project("head", final, logits)
        return logits[0]

    def frame_embeddings(self, codes: NDArray[np.int32]) -> NDArray[np.float32]:
        """float32 [R, h]: the sum of the 16 embeddings of each frame of codes, int32 [R, 16]."""
        tables = [self.weights.codec_table, *self.weights.code_tables]
        total = torch.zeros(len(codes), self.shape.talker.hidden_size, device=self.texts.device)
        for table, column in zip(tables, torch.from_numpy(codes.T.astype(np.int64)).to(self.texts.device), strict=True):
            total += table[column].float()
        return np.asarray(total.cpu().numpy(), np.float32)


def _angles(d: DecoderShape, max_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [max_len, head_dim / 2]."""
    cos, sin = rotary_tables(d.inv_freq(), max_len)
    return to_device(cos, device), to_device(sin, device)
